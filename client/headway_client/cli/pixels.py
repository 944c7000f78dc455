"""The commands that label pixels and estimate depth, and their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from headway_client.cli.calls import read_images
from headway_client.cli.flags import (
    AsJson,
    BatchSize,
    ConnectionFlags,
    File,
    ImageArguments,
    connected,
    named_inputs,
    takes_options,
)
from headway_client.cli.output import as_dict, batches, print_heading, print_json, print_table, with_inputs
from headway_client.cli.segmentation import COLOURS, OPACITY, picture_library
from headway_client.options import ClassifyPixelsOptions, EstimateDepthOptions
from headway_client.results import Answer, DepthMap, PixelClassification

ResultT = TypeVar("ResultT", PixelClassification, DepthMap)

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the map of one image as a PNG.")
]
Overlay = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write one image with a colour for each label laid over it.")
]
Maps = Annotated[
    Path | None,
    typer.Option(
        "--probability-maps",
        metavar="FOLDER",
        help="Write the probabilities of each label of one image into a folder that exists: the first `--label` as "
        "0.png, the second as 1.png and so on.",
    ),
]


@takes_options
def classify_pixels(
    images: ImageArguments = None,
    *,
    file: File = None,
    output: Output = None,
    overlay: Overlay = None,
    probability_maps: Maps = None,
    batch_size: BatchSize = 8,
    as_json: AsJson = False,
    options: ClassifyPixelsOptions,
    connection: ConnectionFlags,
) -> None:
    """Label the pixels of image files or prepared images.

    Prints a line for each label, the most frequent first: share of the pixels, mean score, label.
    """
    headed = _check_files(images, file, options.get("image_ids"), output, overlay, probability_maps)
    if probability_maps is not None:
        _check_maps(probability_maps, options.get("labels"))
    if overlay is not None:
        picture_library()
        if not images:
            raise typer.BadParameter("--overlay draws over an image file; leave out --image-id")
    inputs, arguments = read_images(images, file, options)
    with connected(connection, output, overlay) as client:
        answers = _answers(inputs, batch_size, lambda batch: client.classify_pixels(**arguments(batch), **options))
        for image, result, answer in answers:
            _save_files(result, Path(image), output, overlay, probability_maps)
            if as_json:
                _print_json(image, result, answer)
                continue
            if headed:
                print_heading(image)
            print_table([(f"{one.share:.3f}", f"{one.score:.3f}", one.label) for one in result.labels])


@takes_options
def estimate_depth(
    images: ImageArguments = None,
    *,
    file: File = None,
    output: Output = None,
    batch_size: BatchSize = 8,
    as_json: AsJson = False,
    options: EstimateDepthOptions,
    connection: ConnectionFlags,
) -> None:
    """Estimate the depth of image files or prepared images.

    Prints a line for each image: least value, largest value, meaning of the values.
    """
    headed = _check_files(images, file, options.get("image_ids"), output)
    inputs, arguments = read_images(images, file, options)
    with connected(connection, output) as client:
        answers = _answers(inputs, batch_size, lambda batch: client.estimate_depth(**arguments(batch), **options))
        for image, result, answer in answers:
            if output is not None:
                output.write_bytes(result.png)
            if as_json:
                _print_json(image, result, answer)
                continue
            if headed:
                print_heading(image)
            print_table([(f"{result.minimum:.4g}", f"{result.maximum:.4g}", result.kind)])


def _check_files(images: list[str] | None, file: Path | None, image_ids: Any, *outputs: Path | None) -> bool:
    """Returns True for several images.

    Raises:
        typer.BadParameter: There are several, and a file is to be written.
    """
    several = file is not None or len(images or image_ids or ()) != 1
    if several and any(outputs):
        raise typer.BadParameter("--output, --overlay and --probability-maps are files of one image; give one image")
    return several


def _check_maps(folder: Path, labels: Any) -> None:
    """Raises `typer.BadParameter` where there are no labels to write maps of, or no folder to write them into."""
    if not labels:
        raise typer.BadParameter("--probability-maps has a file for each --label; give one")
    if not folder.is_dir():
        raise typer.BadParameter(f"--probability-maps: there is no folder {folder}; make it first")


def _save_files(
    result: PixelClassification, image: Path, output: Path | None, overlay: Path | None, maps: Path | None
) -> None:
    """Writes the files that are asked for of one image."""
    if output is not None:
        output.write_bytes(result.class_map)
    if overlay is not None:
        _save_overlay(result, image, overlay)
    if maps is not None:
        for one in result.labels:
            (maps / f"{one.label_index}.png").write_bytes(one.probability_map)


def _answers(
    inputs: Iterator[str], batch_size: int, call: Callable[[list[str]], Answer[ResultT]]
) -> Iterator[tuple[str, ResultT, Answer[ResultT]]]:
    """Yields each image with its result and the answer of its call."""
    for batch in batches(inputs, batch_size):
        with named_inputs(batch):
            answer = call(batch)
        for image, result in with_inputs(batch, answer):
            yield image, result, answer


def _without_files(values: Any) -> Any:
    """Leaves out bytes, at any depth."""
    if isinstance(values, dict):
        return {name: _without_files(value) for name, value in values.items() if not isinstance(value, bytes)}
    return [_without_files(value) for value in values] if isinstance(values, list | tuple) else values


def _print_json(image: str, result: Any, answer: Answer[Any]) -> None:
    """Prints all of a result but its files."""
    print_json(
        {
            "input": image,
            **_without_files(as_dict(result)),
            "model": as_dict(answer.model),
            "timings": as_dict(answer.timings),
        }
    )


def _save_overlay(result: PixelClassification, image: Path, file: Path) -> None:
    """Writes the image with a colour over the pixels of each label."""
    import numpy as np  # noqa: PLC0415 (an extra)

    image_module, image_operations = picture_library()
    with image_module.open(image) as opened:
        picture = np.asarray(image_operations.exif_transpose(opened).convert("RGB")).astype(np.float32)
    colours = np.array(COLOURS, np.float32)[result.to_numpy() % len(COLOURS)]
    image_module.fromarray((picture + OPACITY * (colours - picture)).astype(np.uint8)).save(file)
