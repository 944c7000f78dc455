"""Encoding of audio samples."""

from __future__ import annotations

from enum import Enum
from io import BytesIO
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.errors import InvalidInputError
from headway_server.preprocessing.audio import audio_libraries


class AudioFormat(Enum):
    """Container and encoding of soundfile."""

    WAV = ("WAV", "PCM_16")
    FLAC = ("FLAC", "PCM_16")
    OPUS = ("OGG", "OPUS")
    MP3 = ("MP3", "MPEG_LAYER_III")


_RATES: Final = {
    AudioFormat.OPUS: (8_000, 12_000, 16_000, 24_000, 48_000),
    AudioFormat.MP3: (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
}
"""Sampling rates in Hz of formats that do not take every one."""


class AudioWriter:
    """Writes audio of one sampling rate. Thread-safe."""

    def __init__(self, sampling_rate: int) -> None:
        """Takes the sampling rate in Hz.

        Raises:
            RuntimeUnavailableError: The library that writes audio is not installed.
        """
        self._soundfile, _ = audio_libraries()
        self._sampling_rate = sampling_rate

    def __repr__(self) -> str:
        return f"AudioWriter({self._sampling_rate} Hz)"

    def check(self, form: AudioFormat) -> None:
        """Checks that the installed library writes a format.

        Raises:
            InvalidInputError: It does not write the format, or not at this rate.
        """
        container, encoding = form.value
        rates = _RATES.get(form, (self._sampling_rate,))
        if not self._soundfile.check_format(container, encoding) or self._sampling_rate not in rates:
            raise InvalidInputError(
                "format",
                f"is {form.name}, which this server cannot write at {self._sampling_rate} Hz; ask for WAV or FLAC",
            )

    def write(self, samples: NDArray[np.int16], form: AudioFormat) -> bytes:
        """Encodes mono samples."""
        container, encoding = form.value
        file = BytesIO()
        best = {"compression_level": 0.0} if form is AudioFormat.MP3 else {}  # 6 dB less noise, for half as much again
        self._soundfile.write(file, samples, self._sampling_rate, format=container, subtype=encoding, **best)
        return file.getvalue()
