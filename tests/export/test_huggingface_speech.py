"""Folders of Whisper: how they hear, which tokens may follow, and what is refused."""

import json
from functools import reduce

import numpy as np
import pytest
import tiny_speech as tiny
import torch
import transformers
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from headway_export.errors import SourceError
from headway_export.huggingface.folder import FolderOptions
from headway_export.huggingface.kinds import from_folder
from headway_server.bundles import AudioPreprocessing, SpeechTokens
from headway_server.decoding.rules import mask_of, num_words, unpack
from headway_server.preprocessing.audio import LogMel, mel_filters
from headway_server.tasks.speech.rules import TranscriptRule

SEED = 0


@pytest.mark.parametrize("num_mel_bins", [80, 128])
def test_features_are_those_of_whisper(num_mel_bins):
    extractor = transformers.WhisperFeatureExtractor(feature_size=num_mel_bins)
    sizes = AudioPreprocessing(
        sampling_rate=16_000, num_mel_bins=num_mel_bins, fft_size=400, hop_length=160, num_frames=3000
    )
    np.testing.assert_allclose(mel_filters(sizes), extractor.mel_filters, atol=1e-12)
    log_mel, random = LogMel(sizes), np.random.default_rng(SEED)
    for seconds in (1 / 16_000, 5.3, 31.01):
        samples = (random.normal(size=int(seconds * 16_000)) * 0.1).astype(np.float32)
        whole = {"truncation": False, "padding": "longest"} if seconds > 30 else {}
        expected = extractor(samples, sampling_rate=16_000, return_tensors="np", **whole)["input_features"][0]
        np.testing.assert_allclose(log_mel.features(samples), expected, atol=5e-5)


def test_the_rule_of_timestamps_is_that_of_whisper():
    first, end, begin, suppressed, random = 50, 40, [3, 40], [7, 8, 41], np.random.default_rng(SEED)
    settings = transformers.GenerationConfig(eos_token_id=end)
    settings.no_timestamps_token_id, settings.max_initial_timestamp_index = first - 1, 5
    tokens = SpeechTokens(
        no_timestamps=first - 1, first_timestamp=first, max_initial_timestamp=5, begin_suppressed=tuple(begin)
    )
    start = TranscriptRule(tokens, eos_id=end, timestamps=True)
    for _ in range(300):
        words = random.integers(0, end, 7)
        written = np.where(random.random(7) < 0.5, words, random.integers(first, 80, 7))[
            : random.integers(0, 7)
        ].tolist()
        logits = (random.normal(size=80) * 3).astype(np.float32)
        scores = torch.from_numpy(logits)[None].clone()
        for process in (
            SuppressTokensAtBeginLogitsProcessor(begin, 3),
            SuppressTokensLogitsProcessor(suppressed),
            WhisperTimeStampLogitsProcessor(settings, begin_index=3),
        ):
            scores = process(torch.tensor([[1, 2, 3, *written]]), scores)
        expected = set(np.flatnonzero(~np.isfinite(scores[0].numpy())).tolist())
        mask = ~mask_of(suppressed, num_words(80))
        reduce(TranscriptRule.follow, written, start).allow(mask, logits)
        assert set(np.flatnonzero(~unpack(mask)[:80]).tolist()) == expected, (SEED, written)


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        (None, {}, "does not say how it hears"),
        ("preprocessor_config.json", {"feature_size": 20}, "do not belong together"),
        ("preprocessor_config.json", {"dither": 0.1}, "dither"),
    ],
)
def test_what_is_heard_otherwise_is_refused(tmp_path, file, changes, words):
    folder = tiny.write_whisper(tmp_path / "whisper")
    path = folder / "preprocessor_config.json"
    if file is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(SourceError, match=words):
        from_folder(folder, FolderOptions())
