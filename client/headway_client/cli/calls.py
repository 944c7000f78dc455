"""Calls of a command and the printing of their results, for all commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import typer

from headway_client.cli.flags import flag_of, named_inputs
from headway_client.cli.output import (
    as_dict,
    batches,
    print_answer_json,
    print_heading,
    print_json,
    read_inputs,
    with_inputs,
)
from headway_client.options import (
    CaptionImageOptions,
    ClassifyImageOptions,
    ClassifyPixelsOptions,
    DetectObjectsOptions,
    EmbedImageOptions,
    EstimateDepthOptions,
    RankImagesOptions,
)
from headway_client.results import Answer
from headway_client.streams import TextStream

ResultT = TypeVar("ResultT")
_ImageOptions: TypeAlias = (
    CaptionImageOptions
    | ClassifyImageOptions
    | ClassifyPixelsOptions
    | DetectObjectsOptions
    | EmbedImageOptions
    | EstimateDepthOptions
    | RankImagesOptions
)
"""Options of calls with several images or image ids."""


def print_answers(
    inputs: Iterable[str],
    batch_size: int,
    call: Callable[[list[str]], Answer[ResultT]],
    show: Callable[[str, ResultT], None] | None,
    *,
    shared: Sequence[str] = (),
) -> None:
    """Calls once for each batch of inputs and prints its results before the next batch is read.

    Args:
        inputs: The inputs.
        batch_size: Inputs of a call.
        call: Makes the call.
        show: Prints the result of an input; None: JSON is printed.
        shared: Fields of the call whose elements are not the inputs.
    """
    for batch in batches(inputs, batch_size):
        with named_inputs(batch, shared=shared):
            answer = call(batch)
        if show is None:
            print_answer_json(batch, answer)
            continue
        for text, result in with_inputs(batch, answer):
            show(text, result)


def read_images(
    images: Sequence[str] | None, file: Path | None, options: _ImageOptions
) -> tuple[Iterator[str], Callable[[list[str]], dict[str, Any]]]:
    """Reads the images of a command: files, or prepared images. Ids are removed from the options of the call.

    Args:
        images: The arguments.
        file: File that lists more images.
        options: Options of the call.

    Returns:
        The files or ids, and a function from some of them to arguments of a call.

    Raises:
        typer.BadParameter: Files and ids are both given, or neither.
        OSError: The file cannot be read.
    """
    ids = options.pop("image_ids", None)
    if not ids:
        return read_inputs(images, file), lambda batch: {"images": [Path(path) for path in batch]}
    if images or file is not None:
        raise typer.BadParameter("--image-id names images on the server; leave out image files, or it")
    return iter(ids), lambda batch: {"images": [], "image_ids": batch}


def read_image(image: Path | None, options: Mapping[str, Any]) -> bytes:
    """Reads the one image of a command; empty if its options name a prepared one.

    Raises:
        typer.BadParameter: There is no image.
        OSError: The file cannot be read.
    """
    if options.get("image_id"):
        return b""
    if image is None:
        raise typer.BadParameter("there is no image; give a file, or --image-id")
    return image.read_bytes()


def print_streams(
    inputs: Iterable[str],
    open_stream: Callable[[str], TextStream[ResultT]],
    show: Callable[[str, ResultT], None] | None,
    *,
    headed: bool = False,
) -> None:
    """Prints one streamed text after another.

    Args:
        inputs: The inputs.
        open_stream: Starts the call for one of them.
        show: Prints the rest of a result after its deltas. None prints JSON: an object for each delta and one for the
            answer.
        headed: True prints a heading above each text.
    """
    for text in inputs:
        if headed and show is not None:
            print_heading(text)
        with named_inputs([text]), open_stream(text) as stream:
            for delta in stream:
                if show is None:
                    print_json(as_dict(delta))
                else:
                    typer.echo(delta.text, nl=False)
            if show is None:
                print_answer_json([text], stream.answer)
            else:
                typer.echo()
                show(text, stream.answer[0])


def options_for_stream(options: Mapping[str, Any], kind: Any) -> Any:
    """Returns the options of the streaming call.

    Args:
        options: Options of the unary call.
        kind: Typed dictionary of the streaming call's options.

    Raises:
        typer.BadParameter: An option has no counterpart in the stream, and is not 1.
    """
    others = {name: value for name, value in options.items() if name not in kind.__optional_keys__}
    if refused := [flag_of(name) for name, value in others.items() if value is True or value != 1]:
        raise typer.BadParameter(f"a stream cannot have {', '.join(refused)}; leave out --stream or these")
    return {name: value for name, value in options.items() if name not in others}
