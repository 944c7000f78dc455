"""Spectra of audio on the mel scale: what a codec is trained by and judged by.

B rows, N samples, W samples of a window, M mel bins, F frames.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import dct
from torch import Tensor

from headway_training.data.audio import mel_filters

_FLOOR = 1e-5
"""Least magnitude whose logarithm is taken."""
_LOSS_FLOOR = 1e-3
"""That of the loss, above which half of what is heard in recorded digits lies: the quiet half shall only stay quiet."""
_WINDOWS = ((64, 8), (128, 16), (256, 32), (512, 64))
"""Windows of the loss with their mel bins: 8 to 64 ms at 8 kHz."""
NUM_CEPSTRA = 13
"""Coefficients of the distortion, the first one, which is loudness, left out."""
_CEPSTRUM_WINDOW, _CEPSTRUM_BINS = 256, 40


def mel_magnitudes(samples: Tensor, window: int, num_bins: int, sampling_rate: int) -> Tensor:
    """Magnitudes in mel bins, a frame every quarter of a window: float (B, N) -> (B, M, F)."""
    spectrum = torch.stft(
        samples.float(),
        window,
        hop_length=window // 4,
        window=torch.hann_window(window, device=samples.device),
        center=True,
        pad_mode="constant",
        return_complex=True,
    )  # (B, W / 2 + 1, F)
    magnitudes = (spectrum.real.square() + spectrum.imag.square() + _FLOOR**2).sqrt()
    filters = torch.from_numpy(mel_filters(num_bins, window, sampling_rate, highest=sampling_rate / 2))
    return filters.float().to(samples.device) @ magnitudes


def spectral_loss(found: Tensor, samples: Tensor, sampling_rate: int) -> Tensor:
    """How far mel spectra are from each other, the mean over several windows: (B, N) twice -> (B).

    The mean absolute difference of their logarithms (Zeghidour et al. 2021, equation 5), and that of the magnitudes
    themselves as a share of what is heard, as in Yamamoto et al. (2020, equations 4 and 5): without it the noise
    between words counts as much as the words.
    """
    losses = []
    for window, bins in _WINDOWS:
        made, heard = (mel_magnitudes(one, window, bins, sampling_rate) for one in (found, samples))  # (B, M, F)
        logarithms = (made.clamp(min=_LOSS_FLOOR).log() - heard.clamp(min=_LOSS_FLOOR).log()).abs().mean(dim=(1, 2))
        shares = (made - heard).abs().mean(dim=(1, 2)) / heard.mean(dim=(1, 2)).clamp(min=_LOSS_FLOOR)
        losses.append(logarithms + shares)
    return torch.stack(losses).mean(dim=0)


def mel_cepstral_distortion(found: NDArray[np.float32], samples: NDArray[np.float32], sampling_rate: int) -> float:
    """Mean over frames of 10 / ln 10 sqrt(2 sum (c - c')^2), in decibels (Kubichek 1993), of audio of one timing.

    The cepstrum is that of the log-mel spectrum: its cosine coefficients.

    Args:
        found: (N,) float32.
        samples: (N,) float32, what it should be.
        sampling_rate: Samples a second.
    """
    pair = torch.from_numpy(np.stack([found, samples]))
    magnitudes = mel_magnitudes(pair, _CEPSTRUM_WINDOW, _CEPSTRUM_BINS, sampling_rate)  # (2, M, F)
    spectra = magnitudes.clamp(min=_FLOOR).log().numpy()
    cepstra = dct(spectra, axis=1, norm="ortho")[:, 1 : NUM_CEPSTRA + 1] * math.sqrt(2 / _CEPSTRUM_BINS)
    distances = np.sqrt(2 * np.square(cepstra[0] - cepstra[1]).sum(axis=0))  # (F,)
    return float(10 / math.log(10) * distances.mean())
