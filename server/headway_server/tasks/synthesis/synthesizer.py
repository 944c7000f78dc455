"""What every model that speaks has: calls, results, and the encoding of audio."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Elements
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.sequence import FinishReason
from headway_server.preprocessing.pool import audio_pool
from headway_server.serving.answers import Answer
from headway_server.serving.families import ServedModel
from headway_server.tasks.synthesis.encoding import AudioWriter
from headway_server.tasks.synthesis.request import SynthesisRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenText:
    """Result of one text."""

    audio: bytes
    """Encoded audio; empty at the end of a stream, whose samples are already sent."""
    duration_s: float
    finish_reason: FinishReason
    num_new_tokens: int
    """Number of codes, including the end; or of frames, of a model without codes."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechPart:
    """The next samples of a stream."""

    samples: NDArray[np.int16]
    """(S,), at least one."""
    num_new_tokens: int
    """Number of codes or frames so far."""

    @property
    def pcm(self) -> bytes:
        """Samples as signed 16-bit little-endian bytes."""
        return self.samples.astype("<i2", copy=False).tobytes()


class Synthesizer(ServedModel):
    """Model of speech synthesis."""

    _writer: AudioWriter

    @property
    @abstractmethod
    def voices(self) -> tuple[str, ...]:
        """Names of the voices."""

    @property
    @abstractmethod
    def sampling_rate(self) -> int:
        """Samples a second."""

    @property
    @abstractmethod
    def max_seconds(self) -> float:
        """Maximum seconds of a text's audio."""

    @abstractmethod
    async def synthesize(self, texts: Elements[str], *, request: SynthesisRequest) -> Answer[SpokenText]:
        """Synthesizes the speech of texts; all of them, or none.

        Args:
            texts: 1 to `MAX_TEXTS` texts.
            request: Parameters of the call.

        Raises:
            RequestError: A parameter or text is out of its range, the queue is full, the deadline passed, the server is
            draining.
        """

    @abstractmethod
    def stream(
        self, text: str, *, field: str, request: SynthesisRequest
    ) -> AsyncGenerator[SpeechPart | Answer[SpokenText], None]:
        """Synthesizes one text: yields samples as they appear, and last the answer. Args and errors: `synthesize`."""

    async def _encode(self, samples: NDArray[np.int16], request: SynthesisRequest) -> bytes:
        """Encodes audio off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(audio_pool(), self._writer.write, samples, request.format)


def to_int16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    """Converts samples of -1 to 1 to 16 bits; larger ones are clipped."""
    return np.clip(np.rint(samples * 32_768), -32_768, 32_767).astype(np.int16)
