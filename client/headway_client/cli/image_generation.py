"""The image generation command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway_client.cli.calls import options_for_stream
from headway_client.cli.flags import AsJson, ConnectionFlags, connected, takes_options
from headway_client.cli.output import as_dict, print_json, print_table
from headway_client.client import Client
from headway_client.options import GenerateImageOptions, StreamGenerateImageOptions
from headway_client.results import GeneratedImage


@takes_options
def generate_image(
    prompt: Annotated[
        str, typer.Argument(help="A label or a text, depending on the model. Default: unconditional.")
    ] = "",
    *,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", dir_okay=False, help="PNG file; several images are numbered."),
    ],
    progress: Annotated[
        int, typer.Option(metavar="STEPS", help="Write a preview to FILE every STEPS steps; one image only.")
    ] = 0,
    as_json: AsJson = False,
    options: GenerateImageOptions,
    connection: ConnectionFlags,
) -> None:
    """Generate images, or edit an image file.

    Prints a line for each image: its file, seed and size.
    """
    with connected(connection, output) as client:
        if progress:
            streamed = options_for_stream(options, StreamGenerateImageOptions)
            generated = [_stream(client, prompt, output, streamed, progress)]
        else:
            generated = list(client.generate_image(prompt, **options))
        files = [output]
        if len(generated) > 1:
            files = [output.with_stem(f"{output.stem}-{number}") for number in range(1, len(generated) + 1)]
        for file, image in zip(files, generated, strict=True):
            file.write_bytes(image.png)
    for file, image in zip(files, generated, strict=True):
        if as_json:
            shown = {name: value for name, value in as_dict(image).items() if name != "png"}
            print_json({"file": str(file), **shown})
    if not as_json:
        rows = [
            (str(file), str(image.seed), f"{image.width} x {image.height}")
            for file, image in zip(files, generated, strict=True)
        ]
        print_table([("FILE", "SEED", "SIZE"), *rows])


def _stream(
    client: Client, prompt: str, output: Path, options: StreamGenerateImageOptions, preview_step_count: int
) -> GeneratedImage:
    """Generates one image and writes its previews to the file."""
    options["preview_step_count"] = preview_step_count
    with client.stream_generate_image(prompt, **options) as stream:
        for part in stream:
            if part.preview_png:
                output.write_bytes(part.preview_png)
                typer.echo(f"step {part.completed_step_count} of {part.step_count}", err=True)
    return stream.answer.results[0]
