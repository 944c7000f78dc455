"""Encoder inputs of audio: windows of its spectrogram.

M mel bins, F frames of an audio, W frames of a window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Elements

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles import AudioPreprocessing
from headway_server.decoding.interfaces import EncoderInput
from headway_server.preprocessing.audio import AudioDecoder, AudioLimits, LogMel, PreparedAudio
from headway_server.preprocessing.pool import audio_pool
from headway_server.preprocessing.sound import check_audio_bytes


class AudioReader:
    """Computes spectrograms of audio files, off the event loop."""

    def __init__(
        self, preprocessing: AudioPreprocessing, limits: AudioLimits, *, num_positions: int, max_bytes: int
    ) -> None:
        """Takes the model's settings.

        Args:
            preprocessing: Audio preprocessing of the manifest.
            limits: Maximum sizes of an audio.
            num_positions: Encoder positions of a window.
            max_bytes: Maximum bytes of the audios of a call and their features.

        Raises:
            RuntimeUnavailableError: The libraries that read audio are not installed.
        """
        self._sizes = preprocessing
        self._decoder = AudioDecoder(preprocessing.sampling_rate, limits)
        self._log_mel = LogMel(preprocessing)
        self._num_positions = num_positions
        self._max_bytes = max_bytes

    def blank(self) -> EncoderInput:
        """Returns a window of silence."""
        return self.window(np.zeros((self._sizes.num_mel_bins, 0), np.float32), 0)

    async def decode(self, data: bytes, field: str) -> PreparedAudio:
        """Decodes an audio; errors are those of `AudioDecoder.decode`."""
        return await asyncio.get_running_loop().run_in_executor(audio_pool(), self._decoder.decode, data, field)

    def num_bytes(self, audios: Elements[PreparedAudio]) -> int:
        """Returns the bytes of the audios of a call and their features.

        Raises:
            InvalidInputError: Several audios exceed the memory limit.
        """
        total = sum(self._log_mel.num_bytes(len(audio.samples)) for audio in audios)
        return check_audio_bytes(audios, total, self._max_bytes)

    def is_long(self, audio: PreparedAudio) -> bool:
        """Returns True if an audio is longer than a window."""
        return len(audio.samples) > self._sizes.window_samples

    def num_frames(self, audio: PreparedAudio) -> int:
        """Returns F, without the padding of a window."""
        num_samples, hop_length = len(audio.samples), self._sizes.hop_length
        return num_samples // hop_length if self.is_long(audio) else max(1, -(-num_samples // hop_length))

    async def features(self, audio: PreparedAudio) -> NDArray[np.float32]:
        """Computes the spectrogram of an audio, (M, F), at least a window."""
        return await asyncio.get_running_loop().run_in_executor(audio_pool(), self._log_mel.features, audio.samples)

    def window(self, features: NDArray[np.float32], start: int) -> EncoderInput:
        """Returns the window of a spectrogram that begins at frame `start`, padded to W frames."""
        part = features[:, start : start + self._sizes.num_frames]
        padded = np.pad(part, ((0, 0), (0, self._sizes.num_frames - part.shape[1])))  # (M, W)
        return EncoderInput.of_features(padded, self._num_positions)
