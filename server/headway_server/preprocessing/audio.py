"""Decoding of audio to mono samples at a model's rate, and log-mel spectrograms, by the bundle's manifest.

A header can declare hours in a few bytes, and a few bytes of FLAC can encode minutes of silence. So the format is
identified by its first bytes before a decoder sees it, and the header's channels and rate are checked against limits.
Samples are decoded block by block and counted, whatever the header declares. Each block is mixed and resampled before
the next: only mono audio at the model's rate is in memory.

N samples, F frames, M mel bins, W samples of a Fourier transform.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from headway_server.bundles import AudioPreprocessing
from headway_server.errors import InvalidInputError, RuntimeUnavailableError

MAX_CHANNELS: Final = 8
MIN_RATE: Final = 1_000
MAX_RATE: Final = 192_000
"""Range of sample rates, in Hz."""
_SAMPLES_A_SECOND: Final = 192_000
"""Limit of decoded samples of all channels, for each second of the audio limit: stereo at 96 kHz."""
_FORMATS: Final = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
FORMATS_AS_TEXT: Final = "WAV, FLAC, OGG (Vorbis or Opus) or MP3"
_BEGINNINGS: Final = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3")
_OTHERS: Final = (
    ("M4A or MP4", re.compile(rb".{4}ftyp", re.DOTALL)),
    ("WebM or Matroska", re.compile(rb"\x1aE\xdf\xa3")),
    ("AAC", re.compile(rb"\xff[\xf0\xf1\xf8\xf9]|ADIF")),
    ("AMR", re.compile(rb"#!AMR")),
    ("AIFF", re.compile(rb"FORM.{4}AIF", re.DOTALL)),
    ("CAF", re.compile(rb"caff")),
    ("ASF or WMA", re.compile(rb"\x30\x26\xb2\x75")),
)
"""Known formats that are not supported, by their first bytes."""
_UNKNOWN_FRAMES: Final = (1 << 36) - 1
"""Frame counts from here on mean an unknown length: the largest in a FLAC header."""
_NO_SIZES: Final = (0, 0xFFFFFFFF)
"""Placeholders for sizes in the header of a WAV file written to a pipe."""
_FIRST_PAGE: Final = 2
"""Flag of the first page of an OGG stream."""
_MAX_LINKS: Final = 256
"""Limit of chained files. Each needs a decoder, however short it is."""
_MAX_CHUNKS: Final = 1_024
"""Limit of chunks of a WAV file before its samples."""
_BLOCK_FRAMES: Final = 1 << 16
_FRAMES_AT_A_TIME: Final = 1 << 10
"""Frames of a spectrogram computed at a time."""
_FLOOR: Final = 1e-10
"""Lower bound of power before the logarithm."""
_RANGE: Final = 8.0
"""Dynamic range below the loudest value, in powers of ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioLimits:
    """Limits of audio."""

    max_bytes: int
    max_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedAudio:
    """Audio as a speech model's input."""

    samples: NDArray[np.float32]
    """(N,) mono, in -1 to 1, at the model's rate."""
    duration_s: float
    """Duration of the original audio."""


class AudioDecoder:
    """Decodes audio for one model. Safe to use from several threads."""

    def __init__(self, rate: int, limits: AudioLimits) -> None:
        """Decodes to a sample rate.

        Raises:
            RuntimeUnavailableError: The libraries for decoding and resampling are not installed.
        """
        audio_libraries()
        self._rate = rate
        self._limits = limits

    def __repr__(self) -> str:
        return f"AudioDecoder({self._rate} Hz, {self._limits})"

    def decode(self, data: bytes, field: str) -> PreparedAudio:
        """Decodes audio, mixes its channels and resamples it.

        Args:
            data: WAV, FLAC, OGG or MP3.
            field: Its name in the request.

        Raises:
            InvalidInputError: The format is unsupported, or the audio is damaged, empty or past a limit.
        """
        if (size := len(data)) > self._limits.max_bytes:
            raise InvalidInputError(
                field, f"has {size} bytes, the limit is {self._limits.max_bytes}; compress or cut it"
            )
        if not data:
            raise InvalidInputError(field, f"is empty; give {FORMATS_AS_TEXT}")
        for name, beginning in _OTHERS:
            if beginning.match(data):
                raise InvalidInputError(
                    field,
                    f"is {name}, which is not supported; convert it, as with ffmpeg -i FILE out.flac, and give "
                    f"{FORMATS_AS_TEXT}",
                )
        if not data.startswith(_BEGINNINGS) and not (data[0] == 0xFF and data[1:2] >= b"\xe0"):
            raise InvalidInputError(field, f"is not audio of a supported format; give {FORMATS_AS_TEXT}")
        soundfile, _ = audio_libraries()
        parts: list[NDArray[np.float32]] = []
        duration_s = 0.0
        try:
            for number, link in enumerate(_links(_with_sizes(data))):
                if number == _MAX_LINKS:
                    raise InvalidInputError(field, f"has more than {_MAX_LINKS} files in a chain; join or cut them")
                duration_s += self._decode_link(link, parts, self._limits.max_seconds - duration_s, field)
        except soundfile.SoundFileError as error:
            reason = str(error).rpartition(": ")[2].rstrip(".")
            raise InvalidInputError(field, f"cannot be decoded ({reason}); give {FORMATS_AS_TEXT}") from error
        samples = np.concatenate(parts) if parts else np.empty(0, np.float32)
        if not len(samples):
            raise InvalidInputError(field, "has no samples; give audio that sounds")
        return PreparedAudio(samples=np.clip(samples, -1.0, 1.0), duration_s=duration_s)

    def _decode_link(self, data: bytes, parts: list[NDArray[np.float32]], most: float, field: str) -> float:
        """Decodes a file, or one of its chained files, and appends the samples to `parts`.

        Returns:
            Its seconds, at most `most`.
        """
        soundfile, soxr = audio_libraries()
        rate = self._rate
        with soundfile.SoundFile(BytesIO(data)) as file:
            file.seekable = lambda: False  # otherwise reading stops at the header's length, and each block is sought
            self._check_header(file, most, field)
            resampler = None if file.samplerate == rate else soxr.ResampleStream(file.samplerate, rate, 1, "float32")
            num_frames = 0
            for block in self._mono_blocks(file, most, field):
                num_frames += len(block)
                parts.append(block if resampler is None else resampler.resample_chunk(block))
            if resampler is not None:
                parts.append(resampler.resample_chunk(np.empty(0, np.float32), last=True))
            return float(num_frames / file.samplerate)

    def _check_header(self, file: Any, most: float, field: str) -> None:
        """Checks the header; the file may be longer than it declares, which `_mono_blocks` finds.

        Raises:
            InvalidInputError: It is of another format or past a limit.
        """
        if file.format not in _FORMATS:
            raise InvalidInputError(field, f"is {file.format} audio; give {FORMATS_AS_TEXT}")
        if not 1 <= file.channels <= MAX_CHANNELS:
            raise InvalidInputError(
                field, f"has {file.channels} channels, the limit is {MAX_CHANNELS}; mix them to one or two"
            )
        if not MIN_RATE <= file.samplerate <= MAX_RATE:
            raise InvalidInputError(
                field, f"has {file.samplerate} samples a second; {MIN_RATE} to {MAX_RATE} are read; resample it"
            )
        if (seconds := file.frames / file.samplerate) > most and file.frames < _UNKNOWN_FRAMES:
            limit = self._limits.max_seconds
            before = "" if most == limit else f" and {limit - most:.1f} before"
            raise InvalidInputError(
                field, f"has {seconds:.1f} seconds by its header{before}, the limit is {limit:g}; cut it"
            )

    def _mono_blocks(self, file: Any, most: float, field: str) -> Iterator[NDArray[np.float32]]:
        """Yields the mean of all channels, block by block.

        Raises:
            InvalidInputError: The audio exceeds the limits, or a sample is not finite.
        """
        limit_s = self._limits.max_seconds
        num_frames = 0
        while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):  # (frames, channels)
            num_frames += len(block)
            if num_frames > most * file.samplerate:
                raise InvalidInputError(field, f"has more than {limit_s:g} seconds, which is the limit; cut it")
            if num_frames * file.channels > (limit := int(most * _SAMPLES_A_SECOND)):
                raise InvalidInputError(
                    field,
                    f"has more than {limit} samples in its {file.channels} channels, which is the limit; mix the "
                    "channels or resample it",
                )
            if not np.isfinite(block).all():
                raise InvalidInputError(field, "has samples that are no finite numbers; repair it")
            yield np.clip(block, -1.0, 1.0).mean(axis=1, dtype=np.float32)


def _with_sizes(data: bytes) -> bytes:
    """Returns a WAV file with true sizes in its header, which a file written to a pipe lacks."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE" or int.from_bytes(data[4:8], "little") == len(data) - 8:
        return data
    position = 12
    for _ in range(_MAX_CHUNKS):
        if data[position : position + 4] in (b"data", b""):
            break
        position += 8 + (size := int.from_bytes(data[position + 4 : position + 8], "little")) + size % 2
    start = position + 8
    if (
        data[position : position + 4] != b"data"
        or len(data) < start
        or int.from_bytes(data[position + 4 : start], "little") not in _NO_SIZES
    ):
        return data
    sizes = [size.to_bytes(4, "little") for size in (len(data) - 8, len(data) - start)]
    return b"".join((data[:4], sizes[0], data[8 : position + 4], sizes[1], data[start:]))


def _links(data: bytes) -> Iterator[bytes]:
    """Yields the chained files of an OGG file (RFC 3533); any other file as it is."""
    start = position = 0
    was_first = True
    while data[position : position + 4] == b"OggS" and len(data) > position + 26:
        is_first = bool(data[position + 5] & _FIRST_PAGE)
        if is_first and not was_first:
            yield data[start:position]
            start = position
        was_first = is_first
        num_segments = data[position + 26]
        position += 27 + num_segments + sum(data[position + 27 : position + 27 + num_segments])
    yield data[start:] if start else data


class LogMel:
    """Computes spectrograms for one model. Safe to use from several threads."""

    def __init__(self, preprocessing: AudioPreprocessing) -> None:
        self._preprocessing = preprocessing
        self._window = np.hanning(preprocessing.fft_size + 1)[:-1]  # (W,), periodic
        self._filters = mel_filters(preprocessing)  # (W / 2 + 1, M)

    def __repr__(self) -> str:
        return f"LogMel({self._preprocessing.num_mel_bins} mel bins)"

    def num_bytes(self, num_samples: int) -> int:
        """Returns the bytes of an audio's samples and features, and of one window of features."""
        sizes = self._preprocessing
        num_frames = max(num_samples, sizes.window_samples) // sizes.hop_length + sizes.num_frames
        return np.dtype(np.float32).itemsize * (num_samples + num_frames * sizes.num_mel_bins)

    def features(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Computes the log-mel spectrogram of a whole audio.

        Args:
            samples: (N,) at the model's rate. Shorter audio is padded with silence to a window.

        Returns:
            (M, F) float32, F = N / hop_length, at least a window.
        """
        sizes = self._preprocessing
        if (missing := sizes.window_samples - len(samples)) > 0:
            samples = np.pad(samples, (0, missing))
        num_frames, half = len(samples) // sizes.hop_length, sizes.fft_size // 2
        padded = np.pad(samples, half, mode="reflect")
        windows = sliding_window_view(padded, sizes.fft_size)[:: sizes.hop_length]  # (F + 1, W)
        logarithms = np.empty((sizes.num_mel_bins, num_frames), np.float32)
        for start in range(0, num_frames, _FRAMES_AT_A_TIME):
            stop = min(start + _FRAMES_AT_A_TIME, num_frames)
            spectrum = np.fft.rfft(windows[start:stop] * self._window)  # (f, W / 2 + 1)
            power = (spectrum.real**2 + spectrum.imag**2) @ self._filters  # (f, M)
            logarithms[:, start:stop] = np.log10(np.maximum(power, _FLOOR)).T
        np.maximum(logarithms, logarithms.max() - _RANGE, out=logarithms)
        return (logarithms + 4.0) / 4.0


def mel_filters(sizes: AudioPreprocessing) -> NDArray[np.float64]:
    """Returns Slaney's triangular filters of equal area on his mel scale (Auditory Toolbox, 1998).

    The scale is linear up to 1 kHz, 200/3 Hz a mel, and logarithmic above, 27 mels a factor of 6.4.

    Returns:
        (W / 2 + 1, M)
    """
    return slaney_filters(sizes.num_mel_bins, sizes.fft_size, sizes.sampling_rate, highest=sizes.max_frequency)


def slaney_filters(
    num_mel_bins: int, fft_size: int, sampling_rate: int, *, lowest: float = 0.0, highest: float
) -> NDArray[np.float64]:
    """Returns the same filters of other sizes, from `lowest` to `highest` Hz."""
    edges = _hertz_of(np.linspace(_mel_of(lowest), _mel_of(highest), num_mel_bins + 2))  # (M + 2,)
    bins = np.linspace(0.0, sampling_rate // 2, fft_size // 2 + 1)  # (W / 2 + 1,)
    return triangles(bins, edges) * (2.0 / (edges[2:] - edges[:-2]))


def triangles(places: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns triangular filters, each from an edge to the next but one.

    Args:
        places: Of Fourier bins, on the scale of the edges, (W / 2 + 1,).
        edges: (M + 2,), rising.

    Returns:
        (W / 2 + 1, M)
    """
    distances = edges - places[:, np.newaxis]  # (W / 2 + 1, M + 2)
    widths = np.diff(edges)
    rising, falling = -distances[:, :-2] / widths[:-1], distances[:, 2:] / widths[1:]
    filters: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return filters


_LINEAR: Final = 200.0 / 3
"""Hertz a mel below 1 kHz."""
_BREAK: Final = 15.0
"""Mels of 1 kHz."""
_STEP: Final = np.log(6.4) / 27.0
"""Of the logarithm of the frequency, a mel above 1 kHz."""


def _mel_of(hertz: float) -> float:
    return float(hertz / _LINEAR if hertz < 1000.0 else _BREAK + np.log(hertz / 1000.0) / _STEP)


def _hertz_of(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mels < _BREAK, mels * _LINEAR, 1000.0 * np.exp(_STEP * (mels - _BREAK)))


@cache
def audio_libraries() -> tuple[ModuleType, ModuleType]:
    """Returns the libraries for decoding and resampling.

    Raises:
        RuntimeUnavailableError: They are not installed.
    """
    try:
        import soundfile  # noqa: PLC0415 (an extra)
        import soxr  # noqa: PLC0415
    except (ImportError, OSError) as error:  # soundfile raises OSError where libsndfile is not there
        raise RuntimeUnavailableError(
            f"models of speech need the extra `speech` ({error}); pip install 'headway-server[speech]'"
        ) from error
    return soundfile, soxr
