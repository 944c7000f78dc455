"""VITS of other kinds than the served one: read, and held against `transformers`, without an export."""

import json

import numpy as np
import pytest
import tiny_voices
import torch

from headway_export import huggingface
from headway_export.errors import SourceError


def read(folder):
    return huggingface.from_folder(folder, huggingface.FolderOptions())


@pytest.mark.parametrize(
    "changes",
    [
        {"use_stochastic_duration_prediction": False},
        {"wavenet_dilation_rate": 1},
        {"num_speakers": 2, "speaker_embedding_size": 4, "use_stochastic_duration_prediction": False},
    ],
    ids=["mean durations", "another reach", "speakers"],
)
def test_samples_are_those_of_transformers(tmp_path, changes):
    source, notes = read(tiny_voices.write_vits(tmp_path / "vits", pad="<pad>", **changes))
    assert source.flow.duration_noise_scale == (0.8 if "wavenet_dilation_rate" in changes else 0.0)
    assert source.labels == (("0", "1") if "num_speakers" in changes else ())
    assert not notes


def test_samples_of_a_window_are_those_of_the_whole(tmp_path):
    source, _ = read(tiny_voices.write_vits(tmp_path / "vits"))
    context, hop, module = source.flow.context_frames, source.flow.hop_length, source.module
    frames = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 4 * context, 8)).astype(np.float32))
    with torch.inference_mode():
        whole = module.samples(frames)[0]
        found = module.samples(frames[:, context : 3 * context])[0]
        nearer = module.samples(frames[:, 2 * context - 2 : 3 * context])[0]
    middle = slice(2 * context * hop, (2 * context + 1) * hop)
    torch.testing.assert_close(found[context * hop :][:hop], whole[middle], atol=1e-6, rtol=0)
    assert (nearer[2 * hop :][:hop] - whole[middle]).abs().max() > 1e-4  # it does depend on frames before


def test_a_model_of_phonemes_says_what_its_texts_are(tmp_path):
    folder = tiny_voices.write_vits(tmp_path / "vits")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "phonemize": True}))
    source, notes = read(folder)
    assert any("phonemes as espeak writes them" in note for note in notes)
    assert source.tokenizer.encode("a!b").tokens == ["a", "b"]


def test_weights_that_compute_otherwise_are_refused(tmp_path, monkeypatch):
    folder = tiny_voices.write_vits(tmp_path / "vits")
    monkeypatch.setattr("headway_export.huggingface.flow_speakers._LEAST", 2e-3)
    with pytest.raises(SourceError, match="durations differ by"):
        read(folder)
