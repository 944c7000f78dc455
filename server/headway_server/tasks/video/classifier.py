"""Served video classification model.

F frames that a model reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from headway_server.batching import Batcher, BatchGraph
from headway_server.bundles import Bundle, demanded
from headway_server.field_rules import most_elements
from headway_server.observers import NO_OBSERVER, Observer
from headway_server.preprocessing import ImagePreprocessor
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.serving.limits import check_count, check_top_k
from headway_server.settings import ServerSettings
from headway_server.tasks.job import Job
from headway_server.tasks.outputs import LOGITS, ScoredLabel, logits_postprocess
from headway_server.tasks.stateless import StatelessModel, StatelessParts, expected_outputs

MAX_FRAMES: Final = most_elements("ClassifyVideoRequest.frames")
"""Maximum frames of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedVideo:
    """Labels of a video, the most likely first."""

    labels: tuple[ScoredLabel, ...]
    frame_indices: tuple[int, ...]
    """The frames that were read, F of them."""


class VideoClassifier(StatelessModel):
    """Classifies videos."""

    _noun = "videos"
    _memory_noun = "frames"

    def __init__(self, bundle: Bundle, parts: StatelessParts, preprocessor: ImagePreprocessor) -> None:
        """Assembles a model from its parts.

        Args:
            bundle: The bundle.
            parts: Its parts; the graph reads `pixel_values`, (batch, F, 3, height, width).
            preprocessor: Prepares a frame.
        """
        self._num_frames = demanded(bundle.manifest.video).num_frames
        self._preprocessor = preprocessor
        batching = parts.settings.batching
        budget = batching.batch_images(parts.graph.device, self._num_frames * preprocessor.num_pixels)
        super().__init__(bundle, parts, budget=budget, max_waiting=batching.max_waiting_images)

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the requested variant, or the best one for the runtime, and runs it once on black frames.

        Raises:
            BundleError: The graph cannot be loaded, or graph or preprocessing do not match the manifest.
            RuntimeUnavailableError: The bundle does not have the variant.
        """
        manifest = bundle.manifest
        sizes = demanded(manifest.image_preprocessing)
        preprocessor = ImagePreprocessor(sizes, settings.image_limits)
        precision, variant = runtime.choose_variant(manifest, settings.precision)
        graph = BatchGraph(runtime.open(bundle, variant.graphs["model"]), postprocess=logits_postprocess(manifest))
        black = np.zeros((demanded(manifest.video).num_frames, 3, *sizes.largest), np.float32)
        parts = StatelessParts(
            precision=precision,
            graph=graph,
            max_padding=graph.warm_up({"pixel_values": black}, 1, expected_outputs(manifest)),
            runtime=runtime,
            settings=settings,
            observer=observer,
        )
        return cls(bundle, parts, preprocessor)

    async def classify(self, frames: Sequence[bytes], *, top_k: int, deadline: float | None) -> Answer[ClassifiedVideo]:
        """Classifies a video.

        Args:
            frames: 1 to `MAX_FRAMES` encoded images; F of them are decoded.
            top_k: Labels to answer, 1 to the number of labels; 0: all of them.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: An argument is out of its range, a frame cannot be read, the queue is full, the deadline
                passed, the server is draining.
        """
        check_count("frames", len(frames), MAX_FRAMES)
        num_labels = check_top_k(top_k, len(self.labels))
        indices = _evenly(len(frames), self._num_frames)
        distinct = sorted(set(indices))
        num_bytes = sum(map(len, frames)) + (len(distinct) + self._num_frames) * self._preprocessor.num_image_bytes

        with Job[Batcher](
            self._batcher, self._admission, self._memory, count=1, work=1, num_bytes=num_bytes, deadline=deadline
        ) as job:
            with job.preparing():
                prepared = await self._preprocessor.prepare_batch(
                    [frames[index] for index in distinct], fields=[f"frames[{index}]" for index in distinct]
                )
                pixels = dict(zip(distinct, (frame.pixel_values for frame in prepared), strict=True))
                video = np.stack([pixels[index] for index in indices])
            batched = await job.batch(
                self._batcher,
                [{"pixel_values": video}],
                outputs=(LOGITS,),
                num_bytes=0,
                num_read=self._num_frames,
                read=lambda row, _: self._label_reader.read(row[LOGITS], num_labels),
            )
            job.note(batched.runs)
            [labels] = batched.results
            return job.answer([ClassifiedVideo(labels=labels, frame_indices=indices)])


def _evenly(count: int, num_frames: int) -> tuple[int, ...]:
    """Returns which of so many frames are read, from the first to the last."""
    return tuple(np.linspace(0, count - 1, num_frames).astype(np.int64).tolist())
