"""Audio as the input of a model that reads it whole: samples, or logarithms of a filter bank's energies.

N samples, F frames, M mel bins, W samples of a frame, S frames that become one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from headway_server.bundles import FilterBank, Normalization, SoundPreprocessing
from headway_server.errors import InvalidInputError
from headway_server.preprocessing.audio import AudioDecoder, AudioLimits, PreparedAudio, slaney_filters, triangles
from headway_server.preprocessing.pool import audio_pool

_FRAMES_AT_A_TIME = 1 << 10
_POVEY = 0.85


class FilterBankEnergies:
    """Computes a filter bank's energies. Safe to use from several threads."""

    def __init__(self, bank: FilterBank, sampling_rate: int) -> None:
        self._bank = bank
        window = np.hanning(bank.frame_length)
        self._window = window**_POVEY if bank.window == "povey" else window  # (W,)
        self._filters = _filters_of(bank, sampling_rate)  # (fft_size / 2 + 1, M)

    def __repr__(self) -> str:
        return f"FilterBankEnergies({self._bank.num_mel_bins} mel bins)"

    def of(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Computes the logarithms of a sound's energies.

        A frame has the samples from `hop_length` times its number on; with `is_centered` those around that place.

        Args:
            samples: (N,) at the model's rate.

        Returns:
            (F, M) float32, as feature extractors round them. F is N / hop_length rounded down if frames are centered,
            else as many as lie within the samples.
        """
        bank = self._bank
        sound = samples.astype(np.float64) * bank.scale
        if bank.preemphasizes == "audio":
            sound[1:] -= bank.preemphasis * sound[:-1]
        num_frames = (len(sound) - bank.frame_length) // bank.hop_length + 1
        if bank.is_centered:
            num_frames = len(sound) // bank.hop_length
            half = bank.frame_length // 2
            sound = np.pad(sound, (half, bank.frame_length))
        logarithms = np.empty((max(num_frames, 0), bank.num_mel_bins), np.float32)
        if num_frames < 1:
            return logarithms
        frames = sliding_window_view(sound, bank.frame_length)[:: bank.hop_length]  # (F, W)
        for start in range(0, num_frames, _FRAMES_AT_A_TIME):
            stop = min(start + _FRAMES_AT_A_TIME, num_frames)
            spectrum = np.fft.rfft(self._windowed(frames[start:stop]), bank.fft_size).astype(np.complex64)
            energies = np.abs(spectrum, dtype=np.float64) ** 2 @ self._filters  # (f, M)
            logarithms[start:stop] = np.log(
                energies + bank.floor if bank.adds_floor else np.maximum(energies, bank.floor)
            )
        return logarithms

    def _windowed(self, frames: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns frames (f, W) under the window."""
        bank = self._bank
        if bank.removes_offset:
            frames = frames - frames.mean(axis=1, keepdims=True)
        if bank.preemphasizes == "frames" and bank.preemphasis:
            before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
            frames = frames - bank.preemphasis * before
        windowed: NDArray[np.float64] = frames * self._window
        return windowed


def _filters_of(bank: FilterBank, rate: int) -> NDArray[np.float64]:
    """Returns the filters, (fft_size / 2 + 1, M)."""
    lowest, highest = bank.min_frequency, bank.max_frequency
    if bank.mel_scale == "slaney":
        return slaney_filters(bank.num_mel_bins, bank.fft_size, rate, lowest=lowest, highest=highest)
    bins = rate / bank.fft_size * np.arange(bank.fft_size // 2 + 1, dtype=np.float64)
    lowest_mel, highest_mel = _kaldi_mels(np.array([lowest, highest]))
    return triangles(_kaldi_mels(bins), np.linspace(lowest_mel, highest_mel, bank.num_mel_bins + 2))


def _kaldi_mels(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    mels: NDArray[np.float64] = 1127.0 * np.log(1.0 + hertz / 700.0)
    return mels


class SoundReader:
    """Makes a graph's inputs of audio. Safe to use from several threads."""

    def __init__(self, preprocessing: SoundPreprocessing, limits: AudioLimits | None, *, max_bytes: int) -> None:
        """Takes the model's settings.

        Args:
            preprocessing: Of the manifest.
            limits: Limits of an audio; None: no files are decoded.
            max_bytes: Maximum bytes of a call's audios and inputs.

        Raises:
            RuntimeUnavailableError: The libraries that read audio are not installed.
        """
        self._sound = preprocessing
        self._decoder = None if limits is None else AudioDecoder(preprocessing.sampling_rate, limits)
        bank = preprocessing.filter_bank
        self._energies = None if bank is None else FilterBankEnergies(bank, preprocessing.sampling_rate)
        self._max_bytes = max_bytes

    def __repr__(self) -> str:
        return f"SoundReader({self._sound.input_name}, {self._sound.sampling_rate} Hz)"

    async def decode(self, data: bytes, field: str) -> PreparedAudio:
        """Decodes an audio; errors are those of `AudioDecoder.decode`."""
        assert self._decoder is not None, "a reader of files has limits"
        return await asyncio.get_running_loop().run_in_executor(audio_pool(), self._decoder.decode, data, field)

    async def inputs(self, sounds: Sequence[NDArray[np.float32]]) -> list[Mapping[str, NDArray[np.float32]]]:
        """Makes the inputs of sounds, each as `input_of`."""
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(audio_pool(), self.input_of, sound) for sound in sounds]

    def input_of(self, samples: NDArray[np.float32]) -> Mapping[str, NDArray[np.float32]]:
        """Makes the input of a sound.

        Args:
            samples: (N,) at the model's rate, at most `window_samples`. Shorter ones than `min_samples` are filled with
                silence.

        Returns:
            By its name, (N,), or (F / S, M S); float32.
        """
        sound = self._sound
        if (missing := sound.min_samples - len(samples)) > 0:
            samples = np.pad(samples, (0, missing))
        values: NDArray[np.floating] = samples if self._energies is None else self._energies.of(samples)
        if sound.num_frames is not None:
            values = values[: sound.num_frames]
            values = np.pad(values, ((0, sound.num_frames - len(values)), (0, 0)))
        if sound.normalization is not None and len(values):
            values = _normalized(values, sound.normalization)
        if self._energies is not None:
            size = sound.stacked_frames
            values = values[: len(values) // size * size].reshape(-1, size * values.shape[1])
        return {sound.input_name: values.astype(np.float32)}

    def num_bytes(self, num_samples: int, num_inputs: Sequence[int]) -> int:
        """Returns the bytes of an audio and its inputs, by their numbers of samples."""
        return np.dtype(np.float32).itemsize * (num_samples + sum(map(self._sound.num_values, num_inputs)))

    def check_bytes(self, audios: Sequence[PreparedAudio], total: int) -> int:
        """Returns the bytes of a call's audios; errors are those of `check_audio_bytes`."""
        return check_audio_bytes(audios, total, self._max_bytes)


def check_audio_bytes(audios: Sequence[PreparedAudio], total: int, max_bytes: int) -> int:
    """Returns the bytes of a call's decoded audios.

    Raises:
        InvalidInputError: Several audios have more than `max_bytes`.
    """
    if len(audios) > 1 and total > max_bytes:
        seconds = sum(audio.duration_s for audio in audios)
        raise InvalidInputError(
            "audios",
            f"have {seconds:.1f} seconds in {len(audios)} audios, {total >> 20} MiB decoded; the limit is "
            f"{max_bytes >> 20} MiB (--max-waiting-mib): send them in several calls",
        )
    return total


def _normalized(values: NDArray[np.floating], how: Normalization) -> NDArray[np.floating]:
    """Returns samples (N,) or energies (F, M), normalized."""
    if how.of == "constants":
        return (values - how.mean) / how.std
    if how.of == "all":
        mean, variance = values.mean(), values.var()
    else:
        is_biased = how.is_of_population or len(values) == 1
        mean, variance = values.mean(axis=0), values.var(axis=0, ddof=0 if is_biased else 1)
    deviation = np.sqrt(variance) + how.epsilon if how.in_deviation else np.sqrt(variance + how.epsilon)
    normalized: NDArray[np.floating] = (values - mean) / deviation
    return normalized
