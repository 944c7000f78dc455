"""The commands that put a model to work: generate, classify, label; `translation` has the fourth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headway_client.base import DEFAULT_TIMEOUT_S
from headway_client.channels import DEFAULT_SERVER
from headway_client.cli import parameters
from headway_client.cli.generation_flags import GenerationFlags, takes_flags
from headway_client.cli.inputs import batches, read_inputs, split_pairs
from headway_client.cli.output import (
    format_labels,
    heading,
    print_answer_json,
    print_tokens,
    with_inputs,
)
from headway_client.cli.parameters import connected, named_inputs
from headway_client.cli.streams import print_streams
from headway_client.options import StreamGenerateOptions
from headway_client.results import Answer, GeneratedText

Stream = Annotated[
    bool | None, typer.Option("--stream/--no-stream", help="Print text as it appears. Default: yes, unless --json.")
]
Samples = Annotated[
    int | None, typer.Option("--samples", metavar="N", help="Texts for every input, 1 to 16. Default: 1.")
]
Threshold = Annotated[
    float | None,
    typer.Option("--threshold", metavar="P", help="Probability from which a label applies. Default: the model's."),
]
Echo = Annotated[bool, typer.Option("--echo", help="Repeat the input before what follows it.")]


@takes_flags
def generate(
    texts: parameters.Texts = None,
    *,
    file: parameters.File = None,
    samples: Samples = None,
    echo: Echo = False,
    stream: Stream = None,
    batch_size: parameters.BatchSize = 16,
    flags: GenerationFlags,
) -> None:
    """Continue texts."""
    has_samples = samples is not None and samples != 1
    if stream and has_samples:
        raise typer.BadParameter("a stream has one text a prompt; leave out --stream or --samples")
    prompts = read_inputs(texts, file)
    headed = file is not None or len(texts or ()) != 1 or has_samples
    with connected(flags.server, flags.timeout) as client:
        options: StreamGenerateOptions = {**flags.options(), "echo": echo}
        if stream or (stream is None and not flags.as_json and not has_samples):
            print_streams(
                prompts,
                lambda text: client.stream_generate(text, **options),
                flags.as_json,
                headed=headed,
                after=_print_log_probabilities,
            )
            return
        for batch in batches(prompts, batch_size):
            with named_inputs(batch):
                answer = client.generate(batch, samples=samples, **options)
            if flags.as_json:
                print_answer_json(batch, answer)
                continue
            for text, result in with_inputs(batch, answer):
                if headed:
                    typer.echo(heading(text, result.sample_index + 1 if has_samples else None))
                typer.echo(result.text)
                _print_log_probabilities(text, result)


def classify(
    texts: parameters.Texts = None,
    *,
    file: parameters.File = None,
    server: parameters.Server = DEFAULT_SERVER,
    model: parameters.ModelName = "",
    model_version: parameters.ModelVersion = "",
    top_k: parameters.TopLabels = None,
    pairs: parameters.Pairs = False,
    threshold: Threshold = None,
    truncate: parameters.Truncate = False,
    batch_size: parameters.BatchSize = 32,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """Label texts.

    Prints the labels with their probabilities, a tab, the text. --json tells which labels apply, too.
    """
    inputs = read_inputs(texts, file)
    with connected(server, timeout) as client:
        print_answers(
            batches(inputs, batch_size),
            lambda batch: client.classify(
                **split_pairs(batch, pairs),
                model=model,
                model_version=model_version,
                top_k=top_k or 0,
                threshold=threshold,
                truncate=truncate,
            ),
            as_json,
            lambda text, result: f"{format_labels(result.labels, top_k)}\t{text}",
        )


def label(
    images: parameters.Images = None,
    *,
    file: parameters.File = None,
    server: parameters.Server = DEFAULT_SERVER,
    model: parameters.ModelName = "",
    model_version: parameters.ModelVersion = "",
    top_k: parameters.TopLabels = None,
    batch_size: parameters.BatchSize = 8,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """Label image files.

    Prints the labels with their probabilities, a tab, the file.
    """
    inputs = read_inputs(images, file)
    with connected(server, timeout) as client:
        print_answers(
            batches(inputs, batch_size),
            lambda batch: client.label(
                [Path(path) for path in batch], model=model, model_version=model_version, top_k=top_k or 0
            ),
            as_json,
            lambda path, result: f"{format_labels(result.labels, top_k)}\t{path}",
        )


def print_answers(
    inputs: Iterator[list[str]],
    call: Callable[[list[str]], Answer[Any]],
    as_json: bool,
    line: Callable[[str, Any], str],
) -> None:
    """Calls once for every batch and prints its results before the next one is read."""
    for batch in inputs:
        with named_inputs(batch):
            answer = call(batch)
        if as_json:
            print_answer_json(batch, answer)
            continue
        for text, result in with_inputs(batch, answer):
            typer.echo(line(text, result))


def _print_log_probabilities(_prompt: str, result: GeneratedText) -> None:
    """Prints those that came with a text, after it."""
    print_tokens(result.prompt_tokens)
    print_tokens(result.tokens)
