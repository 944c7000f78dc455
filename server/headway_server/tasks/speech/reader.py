"""Encoder inputs of audio: windows of its spectrogram, or of its samples.

N samples, M mel bins, F frames of an audio, W frames of a window. A frame is a column of a spectrogram, or a sample.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence as Elements
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import AudioPreprocessing, Manifest, SoundPreprocessing, demanded
from headway_server.decoding.interfaces import EncoderInput
from headway_server.preprocessing.audio import AudioDecoder, AudioLimits, LogMel, PreparedAudio
from headway_server.preprocessing.pool import audio_pool
from headway_server.preprocessing.sound import SoundReader, check_audio_bytes


class AudioReader(ABC):
    """Makes windows of audio files, off the event loop."""

    width: int
    """Frames of a window, W."""
    frame_s: float
    """Seconds of a frame."""

    def __init__(self, sizes: AudioPreprocessing | SoundPreprocessing, limits: AudioLimits, *, max_bytes: int) -> None:
        """Takes the model's settings.

        Args:
            sizes: Preprocessing of the manifest.
            limits: Maximum sizes of an audio.
            max_bytes: Maximum bytes of the audios of a call and their features.

        Raises:
            RuntimeUnavailableError: The libraries that read audio are not installed.
        """
        self._decoder = AudioDecoder(sizes.sampling_rate, limits)
        self._max_bytes = max_bytes
        self._window_samples = sizes.window_samples
        self.window_s = sizes.window_samples / sizes.sampling_rate

    @staticmethod
    def of(manifest: Manifest, limits: AudioLimits, *, max_bytes: int) -> AudioReader:
        """Returns the reader that a manifest asks for; arguments and errors are those of the constructor."""
        num_positions = demanded(manifest.limits.max_input_tokens)
        if manifest.sound is not None:
            return SampleReader(manifest.sound, limits, num_positions=num_positions, max_bytes=max_bytes)
        sizes = demanded(manifest.audio_preprocessing)
        return SpectrogramReader(sizes, limits, num_positions=num_positions, max_bytes=max_bytes)

    @abstractmethod
    def blank(self) -> EncoderInput:
        """Returns a window of silence."""

    async def decode(self, data: bytes, field: str) -> PreparedAudio:
        """Decodes an audio; errors are those of `AudioDecoder.decode`."""
        return await asyncio.get_running_loop().run_in_executor(audio_pool(), self._decoder.decode, data, field)

    def num_bytes(self, audios: Elements[PreparedAudio]) -> int:
        """Returns the bytes of the audios of a call and their features.

        Raises:
            InvalidInputError: Several audios exceed the memory limit.
        """
        total = sum(self._num_bytes(len(audio.samples)) for audio in audios)
        return check_audio_bytes(audios, total, self._max_bytes)

    @abstractmethod
    def _num_bytes(self, num_samples: int) -> int:
        """Returns the bytes of an audio and its features."""

    def is_long(self, audio: PreparedAudio) -> bool:
        """Returns True if an audio is longer than a window."""
        return len(audio.samples) > self._window_samples

    @abstractmethod
    def num_frames(self, audio: PreparedAudio) -> int:
        """Returns F, without the padding of a window."""

    @abstractmethod
    async def features(self, audio: PreparedAudio) -> NDArray[np.float32]:
        """Returns what windows are cut from: the spectrogram of an audio, (M, F), or its samples, (N,)."""

    @abstractmethod
    async def window(self, features: NDArray[np.float32], start: int) -> EncoderInput:
        """Returns the window that begins at frame `start`."""


class SpectrogramReader(AudioReader):
    """Computes the spectrogram of a whole audio, of which windows have one length."""

    def __init__(self, sizes: AudioPreprocessing, limits: AudioLimits, *, num_positions: int, max_bytes: int) -> None:
        """See `AudioReader`; `num_positions` are the encoder's positions of a window."""
        super().__init__(sizes, limits, max_bytes=max_bytes)
        self._sizes, self._num_positions = sizes, num_positions
        self._log_mel = LogMel(sizes)
        self.width, self.frame_s = sizes.num_frames, sizes.hop_length / sizes.sampling_rate

    def blank(self) -> EncoderInput:
        """See `AudioReader`."""
        return self._padded(np.zeros((self._sizes.num_mel_bins, 0), np.float32))

    def _num_bytes(self, num_samples: int) -> int:
        return self._log_mel.num_bytes(num_samples)

    def num_frames(self, audio: PreparedAudio) -> int:
        """See `AudioReader`."""
        num_samples, hop_length = len(audio.samples), self._sizes.hop_length
        return num_samples // hop_length if self.is_long(audio) else max(1, -(-num_samples // hop_length))

    async def features(self, audio: PreparedAudio) -> NDArray[np.float32]:
        """Computes the spectrogram of an audio, (M, F), at least a window."""
        return await asyncio.get_running_loop().run_in_executor(audio_pool(), self._log_mel.features, audio.samples)

    async def window(self, features: NDArray[np.float32], start: int) -> EncoderInput:
        """See `AudioReader`; it is padded to W frames."""
        return self._padded(features[:, start : start + self.width])

    def _padded(self, part: NDArray[np.float32]) -> EncoderInput:
        padded = np.pad(part, ((0, 0), (0, self.width - part.shape[1])))  # (M, W)
        return EncoderInput.of_features(padded, self._num_positions)


class SampleReader(AudioReader):
    """Prepares each window by itself; the last has the length that is left."""

    def __init__(self, sizes: SoundPreprocessing, limits: AudioLimits, *, num_positions: int, max_bytes: int) -> None:
        """See `AudioReader`; `num_positions` are the encoder's positions of the longest window."""
        super().__init__(sizes, limits, max_bytes=max_bytes)
        self._sounds = SoundReader(sizes, None, max_bytes=max_bytes)
        self._num_positions = num_positions
        self.width, self.frame_s = sizes.window_samples, 1 / sizes.sampling_rate

    def blank(self) -> EncoderInput:
        """See `AudioReader`."""
        return self._input(np.zeros(self.width, np.float32))

    def _num_bytes(self, num_samples: int) -> int:
        return self._sounds.num_bytes(num_samples, [min(num_samples, self.width)])

    def num_frames(self, audio: PreparedAudio) -> int:
        """Returns N."""
        return len(audio.samples)

    async def features(self, audio: PreparedAudio) -> NDArray[np.float32]:
        """Returns the samples, (N,)."""
        return audio.samples

    async def window(self, features: NDArray[np.float32], start: int) -> EncoderInput:
        """See `AudioReader`."""
        part = features[start : start + self.width]
        return await asyncio.get_running_loop().run_in_executor(audio_pool(), self._input, part)

    def _input(self, samples: NDArray[np.float32]) -> EncoderInput:
        tensors: dict[str, NDArray[Any]] = dict(self._sounds.input_of(samples))
        return EncoderInput(tensors, max(1, -(-len(samples) * self._num_positions // self.width)))
