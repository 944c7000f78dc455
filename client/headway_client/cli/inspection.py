"""The commands that show attention: inspect-text, -image, -generation, -translation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from headway_client import pictures
from headway_client.cli.calls import read_image
from headway_client.cli.flags import AsJson, ConnectionFlags, ImageArgument, connected, takes_options
from headway_client.cli.output import print_answer_json, print_heading, print_table
from headway_client.options import (
    InspectGenerationOptions,
    InspectImageOptions,
    InspectTextOptions,
    InspectTranslationOptions,
)
from headway_client.results import (
    Answer,
    Attention,
    ImageInspection,
    InspectedToken,
    TextInspection,
    TranslationInspection,
)

ResultT = TypeVar("ResultT")

TextArgument = Annotated[str, typer.Argument(metavar="TEXT", help="Text to read.")]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--picture",
        metavar="FILE",
        dir_okay=False,
        help="Draw the weights into FILE (.png, .svg or .pdf); needs the extra pictures.",
    ),
]

_MOST_ATTENDED = 3
"""Tokens printed for each token, those with the most attention."""


@takes_options
def inspect_text(
    text: TextArgument,
    *,
    picture: Picture = None,
    as_json: AsJson = False,
    options: InspectTextOptions,
    connection: ConnectionFlags,
) -> None:
    """Show the attention of a text's tokens in a classifier.

    Prints for each map a line per token with its most attended tokens.
    """
    with connected(connection, picture) as client:
        _show(client.inspect_text(text, **options), text, picture, as_json, _show_text)


@takes_options
def inspect_generation(
    text: TextArgument,
    *,
    picture: Picture = None,
    as_json: AsJson = False,
    options: InspectGenerationOptions,
    connection: ConnectionFlags,
) -> None:
    """Show the attention of a text's tokens in a generation model.

    Prints for each map a line per token with its most attended tokens.
    """
    with connected(connection, picture) as client:
        _show(client.inspect_generation(text, **options), text, picture, as_json, _show_text)


@takes_options
def inspect_translation(
    text: TextArgument,
    *,
    picture: Picture = None,
    as_json: AsJson = False,
    options: InspectTranslationOptions,
    connection: ConnectionFlags,
) -> None:
    """Show the attention of the tokens of a source and of its translation.

    Prints the translation and for each map a line per token with its most attended tokens.
    """
    with connected(connection, picture) as client:
        _show(client.inspect_translation(text, **options), text, picture, as_json, _show_translation)


@takes_options
def inspect_image(
    image: ImageArgument = None,
    *,
    picture: Picture = None,
    as_json: AsJson = False,
    options: InspectImageOptions,
    connection: ConnectionFlags,
) -> None:
    """Show the attention of an image's patches.

    Prints for each map the patches with the most attention from the class token, or without one from all patches.
    --picture lays the weights over the image file.
    """
    with connected(connection, picture) as client:
        if picture is not None and image is None:
            raise typer.BadParameter("--picture draws over an image file; give it beside --image-id")
        answer = client.inspect_image(read_image(image, options), **options)
        _show(answer, image or str(options.get("image_id")), picture, as_json, _show_image)


def _show(
    answer: Answer[ResultT],
    read: str | Path,
    picture: Path | None,
    as_json: bool,
    show: Callable[[ResultT], None],
) -> None:
    """Prints and draws a result; `read` is the text, the image id or the image file."""
    if picture is not None:
        pictures.save(answer[0], picture, image=read if isinstance(read, Path) else None)  # type: ignore[arg-type]
    if as_json:
        print_answer_json([str(read)], answer)
    elif picture is None:
        show(answer[0])


def _show_text(result: TextInspection) -> None:
    names = _names(result.tokens)
    _show_maps(result.attention, names, names)


def _show_translation(result: TranslationInspection) -> None:
    typer.echo(result.translation)
    sources, targets = _names(result.source_tokens), _names(result.target_tokens)
    _show_maps(result.encoder_attention, sources, sources, "encoder, ")
    _show_maps(result.decoder_attention, targets, targets, "decoder, ")
    _show_maps(result.cross_attention, targets, sources, "cross, ")


def _show_image(result: ImageInspection) -> None:
    has_class_token = len(result.patches) > result.patch_row_count * result.patch_column_count
    names = [f"{patch.left:.0f},{patch.top:.0f}-{patch.right:.0f},{patch.bottom:.0f}" for patch in result.patches]
    for found in result.attention.maps:
        print_heading(found.title)
        size = result.attention.column_count
        if has_class_token:
            names[0], row = "class token", found.weights[:size]
        else:
            columns = (found.weights[index::size] for index in range(size))
            row = tuple(sum(column) / len(column) for column in columns)
        print_table([("all patches" if not has_class_token else names[0], _most_attended(row, names))])


def _show_maps(attention: Attention, rows: Sequence[str], columns: Sequence[str], kind: str = "") -> None:
    size = attention.column_count
    for found in attention.maps:
        print_heading(kind + found.title)
        print_table(
            [
                (name, _most_attended(found.weights[number * size : (number + 1) * size], columns))
                for number, name in enumerate(rows)
            ]
        )


def _most_attended(weights: Sequence[float], names: Sequence[str]) -> str:
    best = sorted(range(len(weights)), key=lambda index: -weights[index])[:_MOST_ATTENDED]
    return ", ".join(f"{names[index]} {weights[index]:.3f}" for index in best)


def _names(tokens: Iterable[InspectedToken]) -> list[str]:
    return [repr(token.text) for token in tokens]
