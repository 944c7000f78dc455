"""The command that finds objects in images."""

from __future__ import annotations

from headway_client.cli.calls import print_answers, read_images
from headway_client.cli.flags import (
    AsJson,
    BatchSize,
    ConnectionFlags,
    File,
    ImageArguments,
    connected,
    takes_options,
)
from headway_client.cli.output import print_heading, print_table
from headway_client.options import DetectObjectsOptions
from headway_client.results import ObjectDetection


@takes_options
def detect_objects(
    images: ImageArguments = None,
    *,
    file: File = None,
    batch_size: BatchSize = 8,
    as_json: AsJson = False,
    options: DetectObjectsOptions,
    connection: ConnectionFlags,
) -> None:
    """Find objects in image files or prepared images.

    Prints a line for each object, the best first: score, label, and left, top, right and bottom of its box in pixels.
    """
    headed = file is not None or len(images or options.get("image_ids") or ()) != 1
    inputs, arguments = read_images(images, file, options)

    def show(image: str, result: ObjectDetection) -> None:
        if headed:
            print_heading(image)
        print_table(
            [
                (f"{one.score:.3f}", one.label, *(f"{side:.1f}" for side in (box.left, box.top, box.right, box.bottom)))
                for one in result.objects
                for box in (one.box,)
            ]
        )

    with connected(connection) as client:
        print_answers(
            inputs,
            batch_size,
            lambda batch: client.detect_objects(**arguments(batch), **options),
            None if as_json else show,
        )
