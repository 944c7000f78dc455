"""The commands that prepare images, and that rank images and texts."""

from __future__ import annotations

from pathlib import Path

import typer

from headway_client.cli.calls import print_answers, read_images
from headway_client.cli.flags import (
    AsJson,
    BatchSize,
    ConnectionFlags,
    File,
    ImageArguments,
    TextArguments,
    connected,
    named_inputs,
    takes_options,
)
from headway_client.cli.output import as_dict, print_json, read_inputs
from headway_client.options import PrepareImageOptions, RankImagesOptions, RankTextsOptions
from headway_client.results import PreparedImage, RankedImage, RankedText


@takes_options
def prepare_image(
    images: ImageArguments = None,
    *,
    file: File = None,
    batch_size: BatchSize = 8,
    as_json: AsJson = False,
    options: PrepareImageOptions,
    connection: ConnectionFlags,
) -> None:
    """Upload image files for calls that name them by id.

    Prints the id, a tab, the file.
    """
    inputs = read_inputs(images, file)

    def show(path: str, result: PreparedImage) -> None:
        typer.echo(f"{result.image_id}\t{path}")

    with connected(connection) as client:
        print_answers(
            inputs,
            batch_size,
            lambda batch: client.prepare_image([Path(path) for path in batch], **options),
            None if as_json else show,
        )


@takes_options
def rank_images(
    images: ImageArguments = None,
    *,
    file: File = None,
    as_json: AsJson = False,
    options: RankImagesOptions,
    connection: ConnectionFlags,
) -> None:
    """Rank image files or prepared images by their similarity to a text or an image.

    Prints the similarity, a tab, the file or id, the most similar first.
    """
    found, arguments = read_images(images, file, options)
    inputs = list(found)
    with connected(connection) as client, named_inputs(inputs):
        answer = client.rank_images(**arguments(inputs), **options)
    _print(inputs, answer.results, as_json=as_json)


@takes_options
def rank_texts(
    texts: TextArguments = None,
    *,
    file: File = None,
    as_json: AsJson = False,
    options: RankTextsOptions,
    connection: ConnectionFlags,
) -> None:
    """Rank texts by their similarity to an image or a text.

    Prints the similarity, a tab, the text, the most similar first.
    """
    inputs = list(read_inputs(texts, file))
    with connected(connection) as client, named_inputs(inputs):
        answer = client.rank_texts(inputs, **options)
    _print(inputs, answer.results, as_json=as_json)


def _print(inputs: list[str], ranked: tuple[RankedImage | RankedText, ...], *, as_json: bool) -> None:
    for result in ranked:
        if as_json:
            print_json({"input": inputs[result.index]} | as_dict(result))
        else:
            typer.echo(f"{result.score:.4f}\t{inputs[result.index]}")
