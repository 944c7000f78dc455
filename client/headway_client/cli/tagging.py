"""The command that finds labelled spans in texts."""

from __future__ import annotations

import typer

from headway_client.base import DEFAULT_TIMEOUT_S
from headway_client.channels import DEFAULT_SERVER
from headway_client.cli import parameters
from headway_client.cli.inputs import batches, read_inputs
from headway_client.cli.output import heading, print_answer_json, print_table, with_inputs
from headway_client.cli.parameters import connected, named_inputs
from headway_client.results import TextSpans


def tag(
    texts: parameters.Texts = None,
    *,
    file: parameters.File = None,
    server: parameters.Server = DEFAULT_SERVER,
    model: parameters.ModelName = "",
    model_version: parameters.ModelVersion = "",
    truncate: parameters.Truncate = False,
    batch_size: parameters.BatchSize = 32,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """Find labelled spans in texts, such as names or parts of speech.

    Prints a line for every span: where it starts and ends, its label, the label's probability, and its text.
    """
    inputs = read_inputs(texts, file)
    headed = file is not None or len(texts or ()) != 1
    with connected(server, timeout) as client:
        for batch in batches(inputs, batch_size):
            with named_inputs(batch):
                answer = client.classify_tokens(batch, model=model, model_version=model_version, truncate=truncate)
            if as_json:
                print_answer_json(batch, answer)
                continue
            for text, result in with_inputs(batch, answer):
                if headed:
                    typer.echo(heading(text))
                _print_spans(text, result)


def _print_spans(text: str, result: TextSpans) -> None:
    """Prints the spans of a text, if there are any."""
    rows = [
        (str(span.start), str(span.end), span.label, f"{span.probability:.3f}", text[span.start : span.end])
        for span in result.spans
    ]
    if rows:
        print_table(rows)
