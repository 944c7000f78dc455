"""Texts, images and sounds that are drawn with the statistics of real ones, for models without evaluation data.

Texts take a vocabulary's tokens by Zipf's law (Mandelbrot 1953), in the order in which a tokenizer has found them: by
how often they are. Images are dead leaves: opaque discs whose radii follow a power law, so that there are the edges and
the scales of photographs (Lee, Mumford and Huang 2001), over a spectrum of 1/f (Field 1987). The channels of a colour
agree but for a part. Sounds come from a source and a filter (Fant 1960): pulses of a voice and noise, through formants
of vowels (Peterson and Barney 1952), in syllables, phrases and pauses.

N images, L tokens, S samples, F bins of a spectrum, P pulses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

_MANDELBROT: Final = 2.7
"""What is added to a rank, so that the first words are not nearly everything."""
_PLACEHOLDER: Final = re.compile(r"<.+>|\[.+\]")
"""Tokens that no text becomes by itself: special ones, bytes, and places that were left for later."""

_MOST_PIXELS: Final = 256
"""A side that is drawn; larger images are enlarged ones."""
_NUM_LEAVES: Final = (12, 60)
"""Discs of an image: as many as it has pixels a side, within these numbers."""

_VOWELS: Final = np.array(
    [
        (270, 2290, 3010),
        (390, 1990, 2550),
        (530, 1840, 2480),
        (660, 1720, 2410),
        (730, 1090, 2440),
        (570, 840, 2410),
        (440, 1020, 2240),
        (300, 870, 2240),
        (640, 1190, 2390),
        (490, 1350, 1690),
    ],
    np.float64,
)
"""First three formants of ten vowels of men, in Hz (Peterson and Barney 1952, table II)."""
_HISSES: Final = (2500.0, 4500.0, 6000.0)
"""Where the noise of a consonant is strongest, in Hz."""
_FRAME_S: Final = 0.01
"""Between two states of the voice."""
_RESPONSE_S: Final = 0.03
"""Of what a pulse leaves."""


# Texts


def common_tokens(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of a vocabulary's tokens, those that a text has most often first, without special ones.

    The order is that of the merges, of the scores of a unigram model, or else of the ids. Letters come behind what a
    tokenizer has made of them.
    """
    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    ids = {token: number for token, number in vocabulary.items() if number not in added}
    words = {token: number for token, number in ids.items() if not _PLACEHOLDER.fullmatch(token)} or ids or vocabulary
    if model["type"] == "Unigram":
        scores = dict(map(tuple, model["vocab"]))
        return [words[token] for token in sorted(words, key=lambda token: (-scores[token], words[token]))]
    has_pieces = bool(model.get("merges")) or model["type"] == "WordPiece"
    is_letter = {
        number: has_pieces and len(token.removeprefix(model.get("continuing_subword_prefix") or "")) == 1
        for token, number in words.items()
    }
    return sorted(words.values(), key=lambda number: (is_letter[number], number))


def draw_texts(tokenizer: Tokenizer, lengths: Sequence[int], generator: np.random.Generator) -> list[str]:
    """Draws texts of about so many tokens each."""
    ids = np.array(common_tokens(tokenizer))
    shares = 1 / (np.arange(len(ids)) + _MANDELBROT)
    drawn = generator.choice(ids, sum(lengths), p=shares / shares.sum())
    parts = np.split(drawn, np.cumsum(lengths)[:-1])
    return [tokenizer.decode(part.tolist()) or "a" for part in parts]


def draw_boxes(count: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Draws the boxes of a page's words in reading order, (L, 4), in thousandths: lines of words from left to right."""
    widths, height = generator.integers(10, 120, count), int(generator.integers(8, 25))
    left, right = np.sort(generator.integers(0, 1001, 2)) if count else (0, 1000)
    left, right = min(left, 500), max(right, 700)
    boxes = np.empty((count, 4))
    x, y = left, int(generator.integers(0, 200))
    for box, width in zip(boxes, widths.tolist(), strict=True):
        if x + width > right:
            x, y = left, y + 2 * height
        if y + height > 1000:  # a page that is full begins anew
            y = 0
        box[:] = x, y, x + width, y + height
        x += width + 8
    return boxes


# Images


def draw_images(count: int, height: int, width: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Draws images: (N, height, width, 3)."""
    rows, columns = min(height, _MOST_PIXELS), min(width, _MOST_PIXELS)
    images = np.empty((count, height, width, 3), np.uint8)
    for image in images:
        drawn = _draw_leaves(rows, columns, generator)
        image[:] = drawn if drawn.shape == image.shape else np.asarray(Image.fromarray(drawn).resize((width, height)))
    return images


def _draw_leaves(height: int, width: int, generator: np.random.Generator) -> NDArray[np.uint8]:
    """Draws one image, (height, width, 3)."""
    side = min(height, width)
    texture = _draw_field(height, width, generator)[..., np.newaxis]  # (height, width, 1)
    light, contrast, saturation = (
        generator.uniform(0.25, 0.75),
        generator.uniform(0.08, 0.3),
        generator.uniform(0, 0.25),
    )

    def colour() -> NDArray[np.float64]:
        return light + contrast * generator.normal() + saturation * generator.normal(size=3)

    picture = colour() + 0.1 * texture
    least = max(1.0, 0.03 * side)
    count = min(max(side, _NUM_LEAVES[0]), _NUM_LEAVES[1])
    radii = least / np.sqrt(generator.uniform((least / (0.6 * side)) ** 2, 1, count))  # density r^-3
    centres = generator.uniform(0, (height, width), (count, 2))
    for radius, (y, x) in zip(radii, centres, strict=True):
        top, left = max(0, int(y - radius)), max(0, int(x - radius))
        box = np.s_[top : int(y + radius) + 1, left : int(x + radius) + 1]
        part = picture[box]
        down, right = np.ogrid[top : top + part.shape[0], left : left + part.shape[1]]
        distance = ((down - y) ** 2 + (right - x) ** 2)[..., np.newaxis] / radius**2
        shading = generator.uniform(0, 0.15) * (1 - distance)
        part[:] = np.where(distance < 1, colour() + shading + generator.uniform(0, 0.15) * texture[box], part)
    return (np.clip(picture, 0, 1) * 255).astype(np.uint8)


def _draw_field(height: int, width: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Draws noise whose amplitude falls with the frequency, of unit variance: (height, width)."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, np.newaxis], np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf
    field = np.fft.irfft2(np.fft.rfft2(generator.normal(size=(height, width))) / frequency, (height, width))
    return np.asarray(field / max(field.std(), 1e-9))


# Sounds


def draw_speech(count: int, rate: int, num_samples: int, generator: np.random.Generator) -> list[NDArray[np.float32]]:
    """Draws mono sounds like speech, (S,) each: a voice each, for a part of `num_samples`, and then silence."""
    return [_draw_speaker(rate, num_samples, generator) for _ in range(count)]


def _draw_speaker(rate: int, num_samples: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """Draws the sound of one voice."""
    spoken = max(int(generator.uniform(0.3, 1.0) * num_samples), 1)
    num_frames = int(spoken / rate / _FRAME_S) + 1
    pitch, formants, voiced, hiss, centre = _draw_gestures(num_frames, generator)
    size = 2 ** int(np.ceil(np.log2(_RESPONSE_S * rate)))
    bins = np.fft.rfftfreq(size, 1 / rate)  # (F,)

    times, time = [], 0.0
    while time < spoken / rate:
        times.append(time)
        time += (1 + 0.01 * generator.normal()) / pitch[min(int(time / _FRAME_S), num_frames - 1)]
    frames = np.minimum((np.array(times) / _FRAME_S).astype(int), num_frames - 1)  # (P,)
    tilt = 1 / (1 + (bins / 600) ** 2)  # of the glottis, and of the lips
    pulses = _resonances(bins.astype(np.float64), formants[frames]) * tilt * voiced[frames, np.newaxis]  # (P, F)
    sound = np.zeros(num_samples + size)
    _add_at(sound, (np.array(times) * rate).astype(int), np.fft.irfft(pulses, size))

    noise = generator.normal(size=(num_frames, len(bins))) + 1j * generator.normal(size=(num_frames, len(bins)))
    shape = np.exp(-(((bins - centre[:, np.newaxis]) / 1500) ** 2)) * hiss[:, np.newaxis] + 0.002
    window = np.hanning(size)
    _add_at(sound, (np.arange(num_frames) * _FRAME_S * rate).astype(int), np.fft.irfft(noise * shape, size) * window)
    sound = sound[:num_samples]
    sound[spoken:] = 0
    loudness = generator.uniform(0.2, 0.9) / max(float(np.abs(sound).max()), 1e-9)
    return np.asarray(sound * loudness, np.float32)


def _draw_gestures(num_frames: int, generator: np.random.Generator) -> tuple[NDArray[np.float64], ...]:
    """Draws what a voice does in each frame.

    Returns:
        Pitch in Hz, formants in Hz (frames, 3), strength of the voice, strength of the noise, and its centre in Hz.
    """
    base = generator.uniform(95, 230)
    formants = np.tile(_VOWELS.mean(axis=0), (num_frames, 1))
    pitch, voiced, hiss, centre = np.full(num_frames, base), *np.zeros((2, num_frames)), np.full(num_frames, 4000.0)
    size = 1.0 if base < 150 else 1.15  # of the formants of men and women
    frame = int(generator.uniform(0.05, 0.3) / _FRAME_S)
    while frame < num_frames:
        num_syllables = generator.integers(3, 13)
        for syllable in range(num_syllables):
            onset, vowel = (int(generator.uniform(*span) / _FRAME_S) for span in ((0.03, 0.1), (0.07, 0.22)))
            first, last = np.s_[frame : frame + onset], np.s_[frame + onset : frame + onset + vowel]
            kind = generator.integers(3)
            if kind == 0:  # a fricative
                hiss[first], centre[first] = generator.uniform(0.05, 0.2), generator.choice(_HISSES)
            elif kind == 1:  # a stop: silence and a burst
                burst = np.s_[frame + onset - 1 : frame + onset + 1]
                hiss[burst], centre[burst] = generator.uniform(0.1, 0.4), generator.choice(_HISSES)
            else:  # a nasal or a liquid
                voiced[first] = 0.25
                formants[first] = (280, generator.uniform(900, 1500), 2400)
            voiced[last] = generator.uniform(0.5, 1.0)
            formants[last] = size * _VOWELS[generator.integers(len(_VOWELS))]
            fall = 1 - 0.25 * syllable / num_syllables
            pitch[frame : frame + onset + vowel] = base * fall * (1 + 0.12 * generator.normal())
            frame += onset + vowel
        frame += int(generator.uniform(0.15, 0.8) / _FRAME_S)
    smooth = np.hanning(9)[1:-1] / np.hanning(9).sum()
    voiced, pitch = (np.convolve(np.pad(one, 3, "edge"), smooth, "valid") for one in (voiced, pitch))
    formants = np.stack([np.convolve(np.pad(one, 3, "edge"), smooth, "valid") for one in formants.T], axis=1)
    return np.maximum(pitch, 50), formants, voiced, hiss, centre


def _resonances(bins: NDArray[np.float64], formants: NDArray[np.float64]) -> NDArray[np.complex128]:
    """Computes the responses of vocal tracts: (F,), (P, 3) -> (P, F)."""
    response = np.ones((len(formants), len(bins)), np.complex128)
    for centres in (*formants.T, np.full(len(formants), 3500.0)):
        relative = bins / centres[:, np.newaxis]
        width = (60 + 0.05 * centres)[:, np.newaxis] / centres[:, np.newaxis]
        response /= 1 - relative**2 + 1j * relative * width
    return response


def _add_at(sound: NDArray[np.float64], starts: NDArray[np.int64], parts: NDArray[np.float64]) -> None:
    """Adds parts, (P, size), to a sound where each begins."""
    places = starts[:, np.newaxis] + np.arange(parts.shape[1])
    is_inside = places < len(sound)
    sound += np.bincount(places[is_inside], weights=parts[is_inside], minlength=len(sound))
