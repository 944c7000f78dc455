"""Audio: from files to samples, and samples to log-mel spectrograms, as `AudioPreprocessing` describes it.

B rows, N samples, F frames, M mel bins, W samples of a Fourier transform.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_training.checkpoint import AudioPreprocessing
from headway_training.errors import DataError

FULL_SCALE = 32_768
"""The sample of 16 bits that is -1."""
_FLOOR = 1e-10
"""Least power whose logarithm is taken."""
_RANGE = 8.0
"""Powers of ten below the loudest that are told apart."""
_BLOCK_FRAMES = 1 << 16
_NO_SIZES = (0, 0xFFFFFFFF)
"""What is in place of sizes in the header of a WAV file that was written to a pipe."""
_FIRST_PAGE = 2
"""Mark of the first page of a stream in OGG."""


def read_audio(source: Path | bytes, rate: int, name: str = "") -> NDArray[np.int16]:
    """Reads an audio file, as mono.

    Args:
        source: The file, or its content.
        rate: Samples a second to bring it to.
        name: What an error calls it; empty: the file's name.

    Returns:
        (N,).

    Raises:
        DataError: It cannot be read, or has no samples; or the libraries that read audio are not installed.
    """
    soundfile, _ = _libraries()
    what = name or (source if isinstance(source, Path) else "audio")
    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
        with _quiet_decoders():
            parts = [_read_link(link, rate) for link in _links(_with_sizes(data))]
    except (OSError, soundfile.SoundFileError) as error:
        raise DataError(f"{what} cannot be read as audio: {error}") from error
    mono = np.concatenate(parts)  # (N,)
    if not len(mono):
        raise DataError(f"{what} has no samples")
    if np.isnan(mono).any():
        raise DataError(f"{what} has samples that are no finite numbers; repair it")
    whole: NDArray[np.int16] = (np.clip(mono, -1, 1 - 1 / FULL_SCALE) * FULL_SCALE).round().astype(np.int16)
    return whole


def _read_link(data: bytes, rate: int) -> NDArray[np.float32]:
    """Reads a file to its end, whatever its header says, as mono, (N,); NaN where a sample is no finite number."""
    soundfile, _ = _libraries()
    blocks = [np.empty((0, 1), np.float32)]
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        file.seekable = lambda: False  # or no more is read than the header says
        while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):  # (frames, channels)
            block[~np.isfinite(block)] = np.nan
            blocks.append(np.clip(block, -1, 1).mean(axis=1, keepdims=True, dtype=np.float32))
        mono: NDArray[np.float32] = np.concatenate(blocks)[:, 0]
        return mono if file.samplerate == rate else resample(mono, file.samplerate, rate)


def _with_sizes(data: bytes) -> bytes:
    """Returns a WAV file with the sizes that it has: what was written to a pipe has none (as a server does)."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE" or int.from_bytes(data[4:8], "little") == len(data) - 8:
        return data
    place = 12
    while (chunk := data[place : place + 4]) and chunk != b"data":
        place += 8 + (size := int.from_bytes(data[place + 4 : place + 8], "little")) + size % 2
    start = place + 8
    if not chunk or len(data) < start or int.from_bytes(data[place + 4 : start], "little") not in _NO_SIZES:
        return data
    riff_size, data_size = (size.to_bytes(4, "little") for size in (len(data) - 8, len(data) - start))
    return b"".join((data[:4], riff_size, data[8 : place + 4], data_size, data[start:]))


def _links(data: bytes) -> Iterator[bytes]:
    """Yields the files that are chained to an OGG file (RFC 3533), one after the other; anything else as it is."""
    start = place = 0
    was_first = True
    while data[place : place + 4] == b"OggS" and len(data) > place + 26:
        is_first = bool(data[place + 5] & _FIRST_PAGE)
        if is_first and not was_first:
            yield data[start:place]
            start = place
        was_first = is_first
        num_segments = data[place + 26]
        place += 27 + num_segments + sum(data[place + 27 : place + 27 + num_segments])
    yield data[start:]


@contextmanager
def _quiet_decoders() -> Iterator[None]:
    """Has C's own stream of errors write nowhere: what decodes MP3 prints there what is wrong with a file."""
    own, nowhere = _c_errors()
    if own is None or not nowhere:
        yield
        return
    shown = own.value if own.value != nowhere else None
    own.value = nowhere
    try:
        yield
    finally:
        if shown is not None:
            own.value = shown


@cache
def _c_errors() -> tuple[ctypes.c_void_p | None, int]:
    """C's `stderr`, and a stream that writes nowhere; None and 0 of a C library without such a variable."""
    try:
        library = ctypes.CDLL(None)
        library.fopen.restype = ctypes.c_void_p
        return ctypes.c_void_p.in_dll(library, "stderr"), library.fopen(os.fsencode(os.devnull), b"w") or 0
    except (OSError, ValueError, AttributeError):
        return None, 0


def audio_rate(path: Path) -> int:
    """The samples a second of an audio file.

    Raises:
        DataError: It cannot be read, or the libraries that read audio are not installed.
    """
    soundfile, _ = _libraries()
    try:
        return int(soundfile.info(path).samplerate)
    except (OSError, soundfile.SoundFileError) as error:
        raise DataError(f"{path} cannot be read as audio: {error}") from error


def encode_audio(samples: NDArray[np.int16], rate: int) -> bytes:
    """Encodes mono audio, (N,), as FLAC, without loss."""
    soundfile, _ = _libraries()
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def to_float(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    """Samples of 16 bits, (N,), as numbers from -1 to below 1."""
    return samples.astype(np.float32) / np.float32(FULL_SCALE)


def resample(samples: NDArray[np.float32], from_rate: float, to_rate: float) -> NDArray[np.float32]:
    """Brings mono audio, (N,), from one number of samples a second to another."""
    _, soxr = _libraries()
    resampled: NDArray[np.float32] = soxr.resample(samples, from_rate, to_rate)
    return resampled


class LogMel:
    """Makes spectrograms as a server does (`headway_server.preprocessing.audio`; docs/speech.md has the formula)."""

    def __init__(self, preprocessing: AudioPreprocessing) -> None:
        self._preprocessing = preprocessing
        self._window = torch.hann_window(preprocessing.fft_size)  # periodic
        filters = mel_filters(
            preprocessing.num_mel_bins,
            preprocessing.fft_size,
            preprocessing.sampling_rate,
            highest=preprocessing.max_frequency,
        )
        self._filters = torch.from_numpy(filters).float()  # (M, W / 2 + 1)

    def __repr__(self) -> str:
        return f"LogMel({self._preprocessing.num_mel_bins} mel bins)"

    def features(self, samples: Tensor) -> Tensor:
        """Computes log-mel spectrograms.

        Args:
            samples: float (B, N), in -1 to 1.

        Returns:
            float (B, M, F), F = N / hop_length.
        """
        sizes = self._preprocessing
        spectrum = torch.stft(
            samples,
            sizes.fft_size,
            sizes.hop_length,
            window=self._window,
            center=True,
            pad_mode="reflect",
            return_complex=True,
        )[..., :-1]  # (B, W / 2 + 1, F)
        logarithms = (self._filters @ spectrum.abs().square()).clamp_min(_FLOOR).log10()  # (B, M, F)
        loudest = logarithms.amax(dim=(1, 2), keepdim=True)
        return (torch.maximum(logarithms, loudest - _RANGE) + 4) / 4

    def of_recording(self, samples: NDArray[np.int16]) -> Tensor:
        """The window that a server hears of a recording of at most a window, (N,): (M, F), silence at its end."""
        window = torch.zeros(self._preprocessing.window_samples)
        window[: len(samples)] = torch.from_numpy(to_float(samples))
        return self.features(window[None])[0]


@cache
def mel_filters(num_bins: int, fft_size: int, sampling_rate: int, *, highest: float) -> NDArray[np.float64]:
    """Makes Slaney's triangular filters of equal area on his mel scale (Auditory Toolbox, 1998): (M, W / 2 + 1).

    Args:
        num_bins: M.
        fft_size: W.
        sampling_rate: Samples a second.
        highest: Frequency that the last filter ends at, in hertz.
    """
    edges = np.array([_hertz(mel) for mel in np.linspace(0, _mels(highest), num_bins + 2)])
    bins = np.linspace(0, sampling_rate // 2, fft_size // 2 + 1)  # (W / 2 + 1,)
    distances = edges[:, None] - bins  # (M + 2, W / 2 + 1)
    widths = np.diff(edges)[:, None]
    rising, falling = -distances[:-2] / widths[:-1], distances[2:] / widths[1:]
    filters: NDArray[np.float64] = (
        np.clip(np.minimum(rising, falling), 0, None) * (2 / (edges[2:] - edges[:-2]))[:, None]
    )
    return filters


def _mels(hertz: float) -> float:
    """The scale is linear up to 1 kHz, 200/3 Hz a mel, and logarithmic above, 27 mels a factor of 6.4."""
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000, 6.4)


def _hertz(mels: float) -> float:
    return mels * 200 / 3 if mels < 15 else 1000 * math.pow(6.4, (mels - 15) / 27)


@cache
def _libraries() -> tuple[ModuleType, ModuleType]:
    """What decodes audio and what resamples it.

    Raises:
        DataError: They are not installed.
    """
    try:
        import soundfile  # noqa: PLC0415 (an extra)
        import soxr  # noqa: PLC0415
    except (ImportError, OSError) as error:  # soundfile raises OSError where libsndfile is not there
        raise DataError(f"audio needs the extra `speech` ({error}); pip install 'headway-training[speech]'") from error
    return soundfile, soxr
