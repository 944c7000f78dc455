"""The commands that put a model to work: generate, translate, classify, label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headway_client.base import DEFAULT_TIMEOUT_S
from headway_client.channels import DEFAULT_SERVER
from headway_client.cli import parameters
from headway_client.cli.inputs import batches, read_inputs
from headway_client.cli.output import as_dict, format_labels, heading, print_answer_json, print_json
from headway_client.cli.parameters import connected, named_inputs
from headway_client.options import GenerateOptions, TranslateOptions
from headway_client.results import Answer
from headway_client.streams import TextStream

Stream = Annotated[
    bool | None, typer.Option("--stream/--no-stream", help="Print text as it appears. Default: yes, unless --json.")
]
StreamOfTranslations = Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it appears.")]
SourceLanguage = Annotated[str, typer.Option("--source-language", metavar="CODE", help="Language of the texts.")]
TargetLanguage = Annotated[str, typer.Option("--target-language", metavar="CODE", help="Language to translate to.")]


def generate(
    texts: parameters.Texts = None,
    *,
    file: parameters.File = None,
    server: parameters.Server = DEFAULT_SERVER,
    model: parameters.ModelName = "",
    model_version: parameters.ModelVersion = "",
    max_new_tokens: parameters.MaxNewTokens = None,
    temperature: parameters.Temperature = None,
    top_k: parameters.TopK = None,
    top_p: parameters.TopP = None,
    seed: parameters.Seed = None,
    stop: parameters.Stop = None,
    truncate: parameters.Truncate = False,
    stream: Stream = None,
    batch_size: parameters.BatchSize = 16,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """Continue texts."""
    options: GenerateOptions = {
        "model": model,
        "model_version": model_version,
        "truncate": truncate,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or (),
    }
    prompts = read_inputs(texts, file)
    headed = file is not None or len(texts or ()) != 1
    with connected(server, timeout) as client:
        if stream if stream is not None else not as_json:
            _print_streams(prompts, lambda text: client.stream_generate(text, **options), as_json, headed)
        else:
            _print_answers(
                batches(prompts, batch_size),
                lambda batch: client.generate(batch, **options),
                as_json,
                lambda text, result: f"{heading(text)}\n{result.text}" if headed else result.text,
            )


def translate(
    texts: parameters.Texts = None,
    *,
    file: parameters.File = None,
    server: parameters.Server = DEFAULT_SERVER,
    model: parameters.ModelName = "",
    model_version: parameters.ModelVersion = "",
    source_language: SourceLanguage = "",
    target_language: TargetLanguage = "",
    max_new_tokens: parameters.MaxNewTokens = None,
    truncate: parameters.Truncate = False,
    stream: StreamOfTranslations = False,
    batch_size: parameters.BatchSize = 32,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """Translate texts, line by line."""
    options: TranslateOptions = {
        "model": model,
        "model_version": model_version,
        "truncate": truncate,
        "source_language": source_language,
        "target_language": target_language,
        "max_new_tokens": max_new_tokens,
    }
    inputs = read_inputs(texts, file)
    with connected(server, timeout) as client:
        if stream:
            _print_streams(inputs, lambda text: client.stream_translate(text, **options), as_json, headed=False)
        else:
            _print_answers(
                batches(inputs, batch_size),
                lambda batch: client.translate(batch, **options),
                as_json,
                lambda _, result: result.text,
            )


def classify(
    texts: parameters.Texts = None,
    *,
    file: parameters.File = None,
    server: parameters.Server = DEFAULT_SERVER,
    model: parameters.ModelName = "",
    model_version: parameters.ModelVersion = "",
    top_k: parameters.TopLabels = None,
    truncate: parameters.Truncate = False,
    batch_size: parameters.BatchSize = 32,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """Label texts.

    Prints the labels with their probabilities, a tab, the text.
    """
    inputs = read_inputs(texts, file)
    with connected(server, timeout) as client:
        _print_answers(
            batches(inputs, batch_size),
            lambda batch: client.classify(
                batch, model=model, model_version=model_version, top_k=top_k or 0, truncate=truncate
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
        _print_answers(
            batches(inputs, batch_size),
            lambda batch: client.label(
                [Path(path) for path in batch], model=model, model_version=model_version, top_k=top_k or 0
            ),
            as_json,
            lambda path, result: f"{format_labels(result.labels, top_k)}\t{path}",
        )


def _print_answers(
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
        for text, result in zip(batch, answer, strict=True):
            typer.echo(line(text, result))


def _print_streams(
    inputs: Iterator[str], open_stream: Callable[[str], TextStream[Any, Any]], as_json: bool, headed: bool
) -> None:
    """Prints the pieces of one text after another; as JSON, an object for every piece and one for the answer."""
    for text in inputs:
        if headed and not as_json:
            typer.echo(heading(text))
        with named_inputs([text]), open_stream(text) as stream:
            for piece in stream:
                if as_json:
                    print_json(as_dict(piece))
                else:
                    typer.echo(piece.text, nl=False)
            if as_json:
                print_answer_json([text], stream.answer)
            else:
                typer.echo()
