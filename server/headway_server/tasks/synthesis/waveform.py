"""Decoding of codes to samples: one batch has the next frames of many streams.

The decoder's small state is an input and an output of the graph. Runs are therefore stateless, and the batching engine
shares them among streams, callers and cores. All runs have the same number of frames, streamed or not, so both give the
same samples.

F frames of a run, K codebooks, S samples of a run.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import BatchedResults, Batcher, BatchGraph, Tensors, measure_padding
from headway_server.bundles import AudioCodec
from headway_server.errors import BundleError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.runtime import Session
from headway_server.tasks.job import Job
from headway_server.tasks.synthesis.synthesizer import to_int16

_MAX_STREAMS: Final = 64
"""Maximum streams of one run."""
_OUTPUTS: Final = ("samples", "present_state")


class WaveformDecoder:
    """Codec decoder of a speech synthesis model."""

    def __init__(
        self, session: Session, codec: AudioCodec, *, model: ModelId, observer: Observer = NO_OBSERVER
    ) -> None:
        """Runs the decoder once.

        Raises:
            BundleError: It does not run, or its tensors do not match the manifest's codec.
        """
        graph = session.graph
        sizes = {spec.name: spec.shape[1:] for spec in (*graph.inputs, *graph.outputs)}
        frames = (codec.frames_per_run, codec.num_books)
        samples = (codec.frames_per_run * codec.hop_length,)
        if (sizes["codes"], sizes["samples"]) != (frames, samples) or sizes["state"] != sizes["present_state"]:
            raise BundleError(
                f"{graph.file}: has the sizes {sizes}; codes of {frames} and samples of {samples} are expected: export "
                "the model again"
            )
        self.codec = codec
        (state_size,) = sizes["state"]
        assert isinstance(state_size, int), "the exporter fixes it"
        self.state_size = state_size
        self.batcher = Batcher(
            BatchGraph(session),
            budget=_MAX_STREAMS,
            model=model,
            session=session,
            max_padding=self._warm_up(session),
            observer=observer,
        )
        """Runs the frames of all streams."""

    def _warm_up(self, session: Session) -> int | None:
        inputs = {
            "codes": np.full((1, self.codec.frames_per_run, self.codec.num_books), self.codec.codebook_size - 1),
            "state": np.zeros((1, self.state_size), np.float32),
        }
        try:
            session.run(inputs)
            return measure_padding(session, inputs, 1)
        except Exception as error:  # errors of onnxruntime
            raise BundleError(f"{session.graph.file}: does not run ({error}); export the model again") from error

    def __repr__(self) -> str:
        return f"WaveformDecoder({self.codec.sampling_rate} Hz, {self.batcher!r})"


class WaveformStream:
    """Samples of one sequence of frames, pushed in parts of any size; belongs to a call."""

    def __init__(self, decoder: WaveformDecoder, job: Job[Any]) -> None:
        self._decoder = decoder
        self._job = job
        self._state = np.zeros(decoder.state_size, np.float32)
        self._frames: NDArray[np.int64] = np.empty((0, decoder.codec.num_books), np.int64)

    async def push(self, frames: NDArray[np.int64], *, is_last: bool = False) -> NDArray[np.int16]:
        """Takes the next frames, (n, K), and returns the samples that are final, or the rest with `is_last`.

        Raises:
            BatchError: The decoder could not be run.
            DeadlineError: The deadline passed.
            DrainingError: The server is closing.
        """
        codec = self._decoder.codec
        size = codec.frames_per_run
        waiting = np.concatenate([self._frames, frames])
        parts: list[NDArray[np.float32]] = []
        while len(waiting) >= size or (is_last and len(waiting)):
            run, waiting = waiting[:size], waiting[size:]
            padded = np.pad(run, ((0, size - len(run)), (0, 0)))
            found: BatchedResults[Tensors] = await self._job.batch(
                self._decoder.batcher,
                [{"codes": padded, "state": self._state}],
                outputs=_OUTPUTS,
                num_bytes=0,  # codes are outputs of the model, and few per run
                num_read=0,  # codes are charged when they are generated
            )
            samples, self._state = (found.results[0][name] for name in _OUTPUTS)
            parts.append(samples[: len(run) * codec.hop_length])
        self._frames = waiting
        return to_int16(np.concatenate(parts) if parts else np.empty(0, np.float32))

    def __repr__(self) -> str:
        return f"WaveformStream({len(self._frames)} frames wait)"
