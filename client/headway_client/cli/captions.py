"""The command `caption`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headway_client import pictures
from headway_client.cli.calls import options_for_stream, print_answers, print_streams, read_images
from headway_client.cli.flags import AsJson, BatchSize, ConnectionFlags, File, ImageArguments, connected, takes_options
from headway_client.cli.output import print_heading, print_table
from headway_client.options import CaptionImageOptions, StreamCaptionImageOptions
from headway_client.results import ImageCaption

_MOST_SEEN = 3
"""Patches printed for each word, those with the most attention."""


@takes_options
def caption(
    images: ImageArguments = None,
    *,
    file: File = None,
    prefix: Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Beginning of each caption.")] = "",
    question: Annotated[
        str, typer.Option("--question", metavar="TEXT", help="What the model is asked about each image.")
    ] = "",
    attention: Annotated[
        Path | None,
        typer.Option(
            "--attention",
            metavar="FILE",
            dir_okay=False,
            help="Draw the attention of each word into FILE (.png, .svg or .pdf), for one image; needs the extra "
            "pictures.",
        ),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it is generated.")] = False,
    batch_size: BatchSize = 8,
    as_json: AsJson = False,
    options: CaptionImageOptions,
    connection: ConnectionFlags,
) -> None:
    """Caption images: files or prepared images."""
    are_files = not options.get("image_ids")
    found, arguments = read_images(images, file, options)
    inputs = list(found)
    if attention is not None:
        if len(inputs) != 1 or not are_files:
            raise typer.BadParameter("--attention draws over one image file; give one, and no --image-id")
        options["include_attention"] = True
    show = _Show(headed=len(inputs) != 1, attention=attention)
    if stream:
        streamed: StreamCaptionImageOptions = options_for_stream(options, StreamCaptionImageOptions)
        if prefix:
            streamed["prefix"] = prefix
        if question:
            streamed["question"] = question
        with connected(connection, attention) as client:
            print_streams(
                inputs,
                lambda one: client.stream_caption_image(**_of_stream(arguments([one])), **streamed),
                None if as_json else show.maps,
                headed=show.headed,
            )
        return
    if prefix:
        options["prefixes"] = prefix
    if question:
        options["questions"] = question
    with connected(connection, attention) as client:
        print_answers(
            inputs,
            batch_size,
            lambda batch: client.caption_image(**arguments(batch), **options),
            None if as_json else show.whole,
        )


def _of_stream(arguments: dict[str, Any]) -> dict[str, Any]:
    """Turns the arguments of a call with one image into those of a stream."""
    names = {"images": "image", "image_ids": "image_id"}
    return {names[name]: value[0] for name, value in arguments.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Show:
    """Printing of captions."""

    headed: bool
    attention: Path | None
    """File for the attention of the words."""

    def whole(self, path: str, result: ImageCaption) -> None:
        """Shows an image's captions."""
        if self.headed:
            print_heading(path)
        if result.hypotheses:
            print_table([(f"{one.score:.3f}", one.text) for one in result.hypotheses])
        else:
            typer.echo(result.text)
        self.maps(path, result)

    def maps(self, path: str, result: ImageCaption) -> None:
        """Shows the attention of the words, if it was asked for."""
        if self.attention is not None:
            pictures.save(result, self.attention, image=Path(path))
        elif result.tokens:
            _print_maps(result)


def _print_maps(result: ImageCaption) -> None:
    """Prints each word with its most attended patches, as row, column and share."""
    rows = []
    for found in result.word_maps():
        patches = [
            (share, row, column)
            for row, shares in enumerate(found.attention, start=1)
            for column, share in enumerate(shares, start=1)
        ]
        best = sorted(patches, reverse=True)[:_MOST_SEEN]
        seen = ", ".join(f"{row}/{column} {share:.2f}" for share, row, column in best)
        rows.append((f"  {found.word.of(result.text)}", seen))
    print_table(rows)
