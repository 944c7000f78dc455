"""Samples of frames, made in windows with the frames around each that they depend on.

So audio of any length takes memory for a window, and has the samples that the whole would have; a stream has a window
at a time. Windows of one length share a run with those of other calls. Where samples depend on all frames, one window
has all of an audio.

F frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Elements
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import BatchedResults, Batcher, Tensors
from headway_server.tasks.job import Job
from headway_server.tasks.synthesis.synthesizer import to_int16

Window = tuple[int, int]
"""First frame of a window, and the one behind its last."""
_FIRST_PART: Final = 8
"""The first window of an audio is this part of the others, so that a stream begins soon."""
_OUTPUT: Final = "samples"


class WindowDecoder:
    """Makes samples by a graph `waveform_decoder`."""

    def __init__(
        self, batcher: Batcher, *, input_name: str, frames_per_run: int | None, context_frames: int, hop_length: int
    ) -> None:
        """Describes the windows.

        Args:
            batcher: Runs the graph.
            input_name: Its input of frames, (F, ...).
            frames_per_run: Frames of a window; None: all of an audio.
            context_frames: Frames on either side that the samples of a frame depend on.
            hop_length: Samples of a frame.
        """
        self._batcher = batcher
        self._input_name = input_name
        self._size = frames_per_run
        self._context = context_frames
        self._hop = hop_length

    def __repr__(self) -> str:
        return f"WindowDecoder({self._size or 'all'} frames and {self._context} on either side, {self._batcher!r})"

    def windows(self, num_frames: int) -> list[Window]:
        """Returns the windows of an audio."""
        if self._size is None:
            return [(0, num_frames)]
        starts = [0, *range(max(self._size // _FIRST_PART, 1), num_frames, self._size)]
        return [(start, min(stop, num_frames)) for start, stop in zip(starts, [*starts[1:], num_frames], strict=True)]

    def num_ready(self, num_frames: int) -> int:
        """Returns how many windows are the same of any longer audio, whose first frames these are."""
        return sum(stop + self._context <= num_frames for _, stop in self.windows(num_frames)[:-1])

    async def decode(
        self,
        job: Job[Any],
        frames: NDArray[np.float32],
        windows: Elements[Window],
        given: Tensors,
        of_frames: Tensors = MappingProxyType({}),
    ) -> list[NDArray[np.int16]]:
        """Returns the samples of windows; errors are those of `Job.batch`.

        Args:
            job: The call.
            frames: (F, ...).
            windows: Some of their windows.
            given: Other inputs of the graph.
            of_frames: Further inputs that have a row for each frame, (F, ...).
        """
        rows = {self._input_name: frames, **of_frames}
        lefts = [max(start - self._context, 0) for start, _ in windows]
        items: list[Mapping[str, NDArray[Any]]] = [
            {**{name: array[left : stop + self._context] for name, array in rows.items()}, **given}
            for left, (_, stop) in zip(lefts, windows, strict=True)
        ]
        lengths = [len(item[self._input_name]) for item in items]

        def read(row: Tensors, number: int) -> NDArray[np.int16]:
            left, (start, stop) = lefts[number], windows[number]
            return to_int16(row[_OUTPUT][(start - left) * self._hop : (stop - left) * self._hop])

        found: BatchedResults[NDArray[np.int16]] = await job.batch(
            self._batcher,
            items,
            outputs=(_OUTPUT,),
            num_bytes=0,
            num_read=sum(stop - start for start, stop in windows),
            lengths=lengths,
            groups=lengths,
            read=read,
        )
        job.note(found.runs)
        return found.results
