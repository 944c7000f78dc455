"""Videos that a model reads as a fixed number of frames.

F frames of a video.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

from headway_export.candidate import Candidate, pixel_values_of, run_batch
from headway_export.inputs import NUM_LONG, Draw, image_positions
from headway_export.parity import Comparison, sample_images
from headway_export.reference import Reference
from headway_export.source import ExportSource
from headway_export.tasks.images import ImageTask
from headway_export.tasks.task import NOT_LOOKED_AT
from headway_export.tracing import Traceable, make_spec
from headway_server.batching import Tensors
from headway_server.bundles import Manifest, TensorSpec, demanded

_BATCH_SIZES: Final = (1, 3)
"""Of compared batches: a video is many images."""


class VideoClassification(ImageTask):
    """Labels of videos."""

    num_items = NUM_LONG
    is_read = False
    takes_fixed_scales = False
    shows_no_attention = NOT_LOOKED_AT

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Says how many frames are read."""
        return {"video": source.video}

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how many frames are read."""
        return [f"{demanded(manifest.video).num_frames} frames of a video are read, evenly from the first to the last."]

    def attention_inputs(self, asked: Traceable) -> list[TensorSpec]:
        """Pixels of frames, (batch, F, 3, height, width)."""
        batch, *pixels = asked.pixels.shape
        return [make_spec("pixel_values", "float32", batch, int(asked.module.num_frames), *pixels)]  # type: ignore[arg-type]

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares batches of videos."""
        source, graph = candidate.source, candidate.open_stateless()
        most, num_frames = max(_BATCH_SIZES), demanded(source.video).num_frames
        frames = pixel_values_of(source, sample_images(source, most * num_frames))
        videos = frames.reshape(most, num_frames, *frames.shape[1:])
        for batch_size in _BATCH_SIZES:
            items = [{"pixel_values": video} for video in videos[:batch_size]]
            for item, found in zip(items, run_batch(graph, items), strict=True):
                comparison.add_outputs(found, f"batch {batch_size}", partial(reference.outputs, item["pixel_values"]))
            comparison.num_shapes += 1

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Returns videos of images that are given or drawn; no scales are taken from them."""
        num_frames = demanded(draw.source.video).num_frames
        frames = [item["pixel_values"] for item in draw.pixels(self.num_inputs(draw.source) * num_frames)]
        starts = range(0, len(frames) - num_frames + 1, num_frames)
        items: list[Tensors] = [{"pixel_values": np.stack(frames[start : start + num_frames])} for start in starts]
        return items, items

    def positions(self, source: ExportSource) -> float:
        """Patches of all frames."""
        return float(demanded(source.video).num_frames * image_positions(source))
