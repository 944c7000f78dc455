"""Models that read sounds whole: their preparation of audio against `transformers`, and folders that are refused."""

import json

import numpy as np
import pytest
import tiny_sounds
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.huggingface.sounds import _map
from headway_export.run_memory import eager_run_bytes
from headway_server.bundles import SoundPreprocessing
from headway_server.preprocessing.sound import SoundReader

RATE = 16_000
EXTRACTORS = {  # rounding of float32 grows where a filter hardly varies and is normalized
    "Wav2Vec2FeatureExtractor": 1e-5,
    "SeamlessM4TFeatureExtractor": 1e-3,
    "ParakeetFeatureExtractor": 2e-3,
    "LasrFeatureExtractor": 1e-4,
    "ASTFeatureExtractor": 1e-5,
}


def sounds():
    """Fading noise of an odd number of samples, a tone in a little noise, and a quiet sound."""
    generator = np.random.default_rng(0)
    fading = generator.normal(size=23_457) * np.exp(-np.arange(23_457) / RATE)
    tone = np.sin(np.arange(RATE) * 0.2) + 0.01 * generator.normal(size=RATE)
    return [(0.3 * one).astype(np.float32) for one in (fading, tone, 1e-2 * generator.normal(size=9_000))]


@pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")  # of 128 filters over 257 bins
@pytest.mark.parametrize("name", EXTRACTORS)
def test_inputs_are_those_of_the_feature_extractor(name):
    extractor = getattr(transformers, name)()
    sizes = {"sampling_rate": RATE, "min_samples": 1, "window_samples": 30 * RATE}
    sound = SoundPreprocessing(**{**sizes, **_map(extractor)})
    reader = SoundReader(sound, None, max_bytes=0)
    for samples in sounds():
        own = extractor(samples, sampling_rate=RATE, return_tensors="np", return_attention_mask=True)
        expected = np.asarray(own[extractor.model_input_names[0]])[0]
        if "attention_mask" in own:
            expected = expected[: int(np.asarray(own["attention_mask"]).sum())]
        found = reader.input_of(samples)[sound.input_name]
        assert found.shape == expected.shape
        assert found.size <= sound.num_values(len(samples))
        np.testing.assert_allclose(found, expected, atol=EXTRACTORS[name] * max(1.0, float(np.abs(expected).max())))


def test_padding_changes_what_a_model_with_a_group_norm_hears(tmp_path):
    folder = tiny_sounds.write_ctc(tmp_path / "wav2vec2", "wav2vec2")
    model = transformers.AutoModelForCTC.from_pretrained(folder).eval()
    samples = torch.from_numpy(sounds()[0])[np.newaxis]
    with torch.inference_mode():
        alone, padded = (model(one).logits[0, :40] for one in (samples, nn.functional.pad(samples, (0, RATE))))
    assert float((alone - padded).abs().max()) > 0.01


def test_the_memory_of_a_run_is_that_of_what_is_held_together():
    class Wide(nn.Module):
        def forward(self, values):
            wide = values.repeat(1, 100)  # held with the input until it is summed
            return wide.sum(dim=1)

    assert eager_run_bytes(Wide(), 1, 1_000) == 3 * 4 * (1_000 + 100_000 + 1)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("preprocessor_config.json", None, "does not say how it hears"),
        ("preprocessor_config.json", {"feature_extractor_type": "WhisperFeatureExtractor"}, "hears by WhisperFeatureE"),
        ("vocab.json", {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "A": 99}, "they do not belong together"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused_in_a_sentence(tmp_path, file, content, says):
    folder = tiny_sounds.write_ctc(tmp_path / "letters", "wav2vec2")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(json.dumps(content))
    ended = CliRunner().invoke(app, ["hf", str(folder), "--store", str(tmp_path / "store"), "--precision", "fp32"])
    assert (ended.exit_code, says in ended.output) == (2, True), ended.output
    assert not (tmp_path / "store" / "letters").exists()
