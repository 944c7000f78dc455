"""The command line, `headway`: one command for each RPC, `chat` to talk to a model, and the load tester."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Annotated

# gRPC's core logs every failed handshake to stderr; the call's error already tells it. gRPC reads this at import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import typer

from headway_client.cli import (
    answers,
    captions,
    classification,
    detection,
    generation,
    image_generation,
    images,
    inspection,
    load,
    models,
    pixels,
    segmentation,
    speech,
    tensors,
    text_to_text,
)

__all__ = ["app"]

app = typer.Typer(
    name="headway",
    help="Calls a headway server.",
    epilog="Exit codes: 0 success, 1 a call failed, 2 the command line or an input file is wrong, "
    "3 a load test missed an objective.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (
    generation.generate_text,
    generation.chat,
    text_to_text.translate_text,
    text_to_text.rewrite_text,
    captions.caption,
    image_generation.generate_image,
    speech.transcribe,
    speech.speak,
    classification.classify_text,
    classification.classify_tokens,
    answers.answer_question,
    answers.fill_mask,
    classification.classify_image,
    classification.classify_audio,
    classification.classify_video,
    detection.detect_objects,
    pixels.classify_pixels,
    pixels.estimate_depth,
    classification.embed_text,
    classification.score_text,
    classification.embed_image,
    images.prepare_image,
    images.rank_images,
    images.rank_texts,
    segmentation.segment,
    inspection.inspect_text,
    inspection.inspect_image,
    inspection.inspect_generation,
    inspection.inspect_translation,
    tensors.infer,
    models.list_models,
    models.get_model,
    models.list_bundles,
    models.load_model,
    models.unload_model,
    models.scan_store,
    models.set_route,
    models.set_alias,
    models.health,
    load.load,
    load.load_compare,
):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headway-client {version('headway-client')}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Calls a headway server."""
