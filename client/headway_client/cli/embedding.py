"""The commands that print vectors: embed, embed-images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway_client.base import DEFAULT_TIMEOUT_S
from headway_client.channels import DEFAULT_SERVER
from headway_client.cli import parameters
from headway_client.cli.inputs import batches, read_inputs, split_pairs
from headway_client.cli.tasks import print_answers
from headway_client.results import ImageEmbedding, TextEmbedding

Normalize = Annotated[bool, typer.Option("--normalize/--raw", help="Scale vectors to length 1, or leave them.")]


def embed(
    texts: parameters.Texts = None,
    *,
    file: parameters.File = None,
    server: parameters.Server = DEFAULT_SERVER,
    model: parameters.ModelName = "",
    model_version: parameters.ModelVersion = "",
    pairs: parameters.Pairs = False,
    normalize: Normalize = True,
    truncate: parameters.Truncate = False,
    batch_size: parameters.BatchSize = 32,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """Turn texts into vectors.

    Prints the numbers with spaces between them, a tab, the text.
    """
    inputs = read_inputs(texts, file)
    with parameters.connected(server, timeout) as client:
        print_answers(
            batches(inputs, batch_size),
            lambda batch: client.embed(
                **split_pairs(batch, pairs),
                model=model,
                model_version=model_version,
                normalize=normalize,
                truncate=truncate,
            ),
            as_json,
            _line,
        )


def embed_images(
    images: parameters.Images = None,
    *,
    file: parameters.File = None,
    server: parameters.Server = DEFAULT_SERVER,
    model: parameters.ModelName = "",
    model_version: parameters.ModelVersion = "",
    normalize: Normalize = True,
    batch_size: parameters.BatchSize = 8,
    timeout: parameters.Timeout = DEFAULT_TIMEOUT_S,
    as_json: parameters.AsJson = False,
) -> None:
    """Turn image files into vectors.

    Prints the numbers with spaces between them, a tab, the file.
    """
    inputs = read_inputs(images, file)
    with parameters.connected(server, timeout) as client:
        print_answers(
            batches(inputs, batch_size),
            lambda batch: client.embed_image(
                [Path(path) for path in batch], model=model, model_version=model_version, normalize=normalize
            ),
            as_json,
            _line,
        )


def _line(text: str, result: TextEmbedding | ImageEmbedding) -> str:
    return f"{' '.join(f'{value:.6g}' for value in result.values)}\t{text}"
