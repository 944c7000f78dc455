"""Drawn inputs have the statistics of real ones."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headway_export import synthetic

TEXT = ["the old house by the sea is not the house of the man", "a dog and the cat are in the rain"] * 20


def trained(kind: str) -> Tokenizer:
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>", "<pad>"], unk_token="<unk>")
    elif kind == "bpe":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<pad>", "<unk>"])
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=["[PAD]", "[UNK]", "[unused1]"])
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


@pytest.mark.parametrize("kind", ["unigram", "bpe", "wordpiece"])
def test_texts_are_of_common_words_and_without_special_tokens(kind):
    tokenizer = trained(kind)
    texts = synthetic.draw_texts(tokenizer, [40] * 50, np.random.default_rng(0))
    assert texts == synthetic.draw_texts(tokenizer, [40] * 50, np.random.default_rng(0))
    whole = " ".join(texts)
    assert not any(mark in whole for mark in ("<", "[", "pad", "UNK"))
    counts = np.bincount(np.concatenate([tokenizer.encode(text).ids for text in texts]))
    order = synthetic.common_tokens(tokenizer)
    third = len(order) // 3
    assert counts[[token for token in order[:third] if token < len(counts)]].sum() > 0.5 * counts.sum()
    assert len(set(whole.split())) > 20


def test_images_have_the_spectrum_of_photographs_and_edges():
    images = synthetic.draw_images(24, 128, 128, np.random.default_rng(0)) / 255
    grey = images.mean(axis=-1)
    power = np.abs(np.fft.fft2(grey - grey.mean(axis=(1, 2), keepdims=True))) ** 2
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(128), np.fft.fftfreq(128)))
    means = [power[:, (frequency > low) & (frequency <= 2 * low)].mean() for low in (0.02, 0.04, 0.08, 0.16)]
    slope = np.polyfit(np.log2([0.02, 0.04, 0.08, 0.16]), np.log2(means), 1)[0]
    assert -3.2 < slope < -1.4  # of the power, about -2
    steps = np.abs(np.diff(grey, axis=2))
    assert np.quantile(steps, 0.99) > 8 * np.median(steps)  # few and sharp: noise of the same spectrum has 4
    reds, greens = images[..., 0].reshape(24, -1), images[..., 1].reshape(24, -1)
    assert np.median([np.corrcoef(red, green)[0, 1] for red, green in zip(reds, greens, strict=True)]) > 0.3
    assert len({image.tobytes() for image in images}) == 24


def test_sounds_have_syllables_pauses_a_pitch_and_formants():
    rate = 16_000
    sounds = synthetic.draw_speech(6, rate, 8 * rate, np.random.default_rng(0))
    for sound in sounds:
        assert sound.shape == (8 * rate,)
        assert sound.dtype == np.float32
        assert 0.15 < np.abs(sound).max() <= 0.9
        spoken = sound[: np.flatnonzero(sound)[-1]]
        loudness = np.sqrt((spoken[: len(spoken) // 400 * 400].reshape(-1, 400) ** 2).mean(axis=1))
        assert 0.03 < np.mean(loudness < 0.05 * loudness.max()) < 0.6  # pauses
        rhythm = np.abs(np.fft.rfft(loudness - loudness.mean()))
        frequencies = np.fft.rfftfreq(len(loudness), 0.025)
        assert 1 < np.average(frequencies[1:], weights=rhythm[1:] ** 2) < 9  # syllables a second
        start = 400 * int(loudness.argmax())
        voiced = spoken[max(0, start - 400) : start + 800] * 1.0
        lags = np.correlate(voiced, voiced, "full")[len(voiced) - 1 :]
        pitch = rate / (lags[rate // 300 : rate // 60].argmax() + rate // 300)
        assert 60 < pitch < 300
        assert lags[round(rate / pitch)] > 0.4 * lags[0]
        spectrum = np.abs(np.fft.rfft(spoken)) ** 2
        assert spectrum[: len(spectrum) // 2].sum() > 3 * spectrum[len(spectrum) // 2 :].sum()
