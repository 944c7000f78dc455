"""The segmentation command, and its mask and overlay files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headway_client.cli.calls import read_image
from headway_client.cli.flags import AsJson, ConnectionFlags, ImageArgument, connected, takes_options
from headway_client.cli.output import as_dict, print_json, print_table
from headway_client.options import SegmentEverythingOptions, SegmentImageOptions, options_of
from headway_client.requests import SegmentPrompt
from headway_client.results import Mask

COLOURS = ((230, 60, 60), (60, 140, 230), (70, 180, 90), (240, 170, 40), (150, 90, 210), (40, 190, 190))
OPACITY = 0.5
"""Opacity of the colour over a segment."""

Points = Annotated[list[str] | None, typer.Option(metavar="X,Y", help="Point inside the segment. May be repeated.")]
OutsidePlaces = Annotated[
    list[str] | None, typer.Option("--outside", metavar="X,Y", help="Point outside the segment. May be repeated.")
]
BoxSides = Annotated[
    str | None, typer.Option(metavar="LEFT,TOP,RIGHT,BOTTOM", help="Box around the segment, in pixels.")
]
Everything = Annotated[bool, typer.Option("--everything", help="Find all segments; excludes points and boxes.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the first mask as a PNG; with --everything, all segments in grey levels.",
    ),
]
Overlay = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the image with the segments laid over it.")]


class SegmentOptions(SegmentEverythingOptions, SegmentImageOptions, total=False):
    """Options of SegmentImage and SegmentEverything."""


@takes_options
def segment(
    image: ImageArgument = None,
    *,
    point: Points = None,
    outside: OutsidePlaces = None,
    box: BoxSides = None,
    everything: Everything = False,
    output: Output = None,
    overlay: Overlay = None,
    as_json: AsJson = False,
    options: SegmentOptions,
    connection: ConnectionFlags,
) -> None:
    """Segment an image file or a prepared image: by points, by a box, or everything.

    Prints a line for each mask, the best first: predicted IoU, stability, area in pixels, bounding box.
    """
    prompt = SegmentPrompt(
        points=[_numbers(one, 2, "--point") for one in point or ()],  # type: ignore[misc]
        outside_points=[_numbers(one, 2, "--outside") for one in outside or ()],  # type: ignore[misc]
        box=None if box is None else _numbers(box, 4, "--box"),  # type: ignore[arg-type]
    )
    has_prompt = bool(prompt.points or prompt.outside_points or prompt.box)
    if has_prompt == everything:
        raise typer.BadParameter("give points or a box, or --everything instead")
    kind: Any = SegmentEverythingOptions if everything else SegmentImageOptions
    if refused := [name for name in options if name not in options_of(kind)]:
        of = "--everything alone" if not everything else "points and boxes alone"
        raise typer.BadParameter(f"--{refused[0].replace('_', '-')} is for {of}")
    if overlay is not None and image is None:
        raise typer.BadParameter("--overlay draws over an image file; give it beside --image-id")
    with connected(connection, output, overlay) as client:
        sent = read_image(image, options)
        if everything:
            with client.segment_everything(sent, **options) as stream:  # type: ignore[misc]
                masks: Sequence[Mask] = tuple(stream)
        else:
            masks = client.segment_image(sent, prompts=prompt, **options)[0].masks  # type: ignore[misc]
        shown = masks if everything else masks[:1]
        if output is not None:
            _save_masks(shown, image, output)
        if overlay is not None and image is not None:
            _save_overlay(shown, image, overlay)
    if as_json:
        for mask in masks:
            print_json({name: value for name, value in as_dict(mask).items() if name != "png"})
    elif masks:
        print_table([("IOU", "STABILITY", "PIXELS", "BOX"), *map(_row, masks)])


def _numbers(value: str, count: int, flag: str) -> tuple[float, ...]:
    try:
        numbers = tuple(map(float, value.split(",")))
    except ValueError:
        numbers = ()
    if len(numbers) != count:
        example = "120,80" if count == 2 else "20,30,200,180"
        raise typer.BadParameter(f"{value!r} is not {count} numbers, such as {example}", param_hint=flag)
    return numbers


def _row(mask: Mask) -> tuple[str, ...]:
    box = ",".join(f"{side:g}" for side in (mask.box.left, mask.box.top, mask.box.right, mask.box.bottom))
    return f"{mask.predicted_iou:.3f}", f"{mask.stability:.3f}", str(mask.area), box


def picture_library() -> Any:
    """Returns Pillow's modules `Image` and `ImageOps`.

    Raises:
        typer.BadParameter: Pillow or NumPy is not installed.
    """
    try:
        import numpy  # noqa: F401, PLC0415 (an extra)
        from PIL import Image, ImageOps  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise typer.BadParameter(f"{error}; run: pip install 'headway-client[pictures]'") from None
    return Image, ImageOps


def _save_masks(masks: Sequence[Mask], image: Path | None, file: Path) -> None:
    """Writes one mask in white; several in different grey levels, the smaller over the larger."""
    import numpy as np  # noqa: PLC0415 (an extra)

    image_module, image_operations = picture_library()
    if not masks:
        if image is None:
            raise ValueError(f"{file}: no mask was found, and the image's size is unknown without the image file")
        with image_module.open(image) as opened:
            size = image_operations.exif_transpose(opened).size
        levels = np.zeros(size[::-1], np.uint8)
    else:
        levels = np.zeros((masks[0].height, masks[0].width), np.uint8)
    ordered = sorted(masks, key=lambda mask: -mask.area)
    for number, mask in enumerate(ordered):
        levels[mask.to_numpy()] = 255 - number * 254 // max(1, len(ordered))
    image_module.fromarray(levels).save(file)


def _save_overlay(masks: Sequence[Mask], image: Path, file: Path) -> None:
    """Writes the image with a colour over each segment."""
    import numpy as np  # noqa: PLC0415 (an extra)

    image_module, image_operations = picture_library()
    with image_module.open(image) as opened:
        picture = np.asarray(image_operations.exif_transpose(opened).convert("RGB")).astype(np.float32)
    for number, mask in enumerate(sorted(masks, key=lambda mask: -mask.area)):
        inside = mask.to_numpy()
        colour = np.array(COLOURS[number % len(COLOURS)], np.float32)
        picture[inside] += OPACITY * (colour - picture[inside])
    image_module.fromarray(picture.astype(np.uint8)).save(file)
