"""A checkpoint that speaks becomes a bundle of a codec's decoder and a language model, each held against PyTorch."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_checkpoint, from_factory
from headway_server.bundles import Precision, Task, open_bundle
from headway_server.runtime import Runtime
from headway_training.checkpoint import load_model


def test_both_variants_are_proved_and_judged_by_their_codes(voice_store):
    bundle = open_bundle(voice_store / "tones" / "1")
    manifest = bundle.manifest
    assert manifest.task is Task.SPEECH_SYNTHESIS
    assert manifest.labels == ("ann", "bob")
    assert manifest.codec.model_dump() == {
        "sampling_rate": 8000,
        "hop_length": 160,
        "num_books": 2,
        "codebook_size": 16,
        "first_code": 261,
        "frames_per_run": 5,
    }
    assert (manifest.limits.max_input_tokens, manifest.limits.max_total_tokens) == (34, 128)
    for variant in manifest.variants.values():
        assert list(variant.graphs) == ["codec_decoder", "decoder"]
        assert (variant.quality.metric, variant.quality.example_count) == ("nats_per_code", 36)
    fp32, int8 = manifest.variants[Precision.FP32], manifest.variants[Precision.INT8]
    assert fp32.parity.max_relative_logit_error < 1e-4
    assert fp32.parity.greedy_token_count > 100
    assert fp32.parity.greedy_mismatch_count == 0
    assert abs(fp32.quality.value - int8.quality.value) <= 0.02
    voices = json.loads((bundle.path / "voices.json").read_text())
    assert {name: np.shape(codes) for name, codes in voices.items()} == {"ann": (5, 2), "bob": (5, 2)}
    card = (bundle.path / "README.md").read_text()
    assert "| Voices | ann, bob |" in card
    assert "It speaks mono audio of 8000 Hz" in card


@torch.inference_mode()
def test_the_codec_that_serves_is_pytorchs_whatever_its_company(voice_store, voice_checkpoint):
    bundle = open_bundle(voice_store / "tones" / "1")
    session = Runtime(device="cpu").open(bundle, bundle.manifest.variants[Precision.FP32].graphs["codec_decoder"])
    model = load_model(voice_checkpoint)[0]
    codes = np.random.default_rng(0).integers(0, 16, (7, 5, 2))
    state = np.random.default_rng(1).normal(size=(7, model.decoder.state_size)).astype(np.float32)
    found = session.run({"codes": codes, "state": state})
    expected = model.decode(torch.from_numpy(codes), torch.from_numpy(state))
    for name, exact in zip(("samples", "present_state"), expected, strict=True):
        np.testing.assert_allclose(found[name], exact.numpy(), atol=1e-5)
        for row in range(7):
            alone = session.run({"codes": codes[row : row + 1], "state": state[row : row + 1]})
            np.testing.assert_array_equal(alone[name][0], found[name][row])


def test_what_cannot_be_exported_is_refused(voice_checkpoint, tmp_path):
    source = from_checkpoint(voice_checkpoint)
    for changes, said in (
        ({"precisions": (Precision.INT8_STATIC,)}, "has no int8-static"),
        ({"precisions": (Precision.INT4,)}, "int4 is a precision of generation"),
        ({"attention": True}, "leave out --attention"),
    ):
        with pytest.raises(SourceError, match=said):
            export(source, ExportOptions(store=tmp_path, **changes))
    with pytest.raises(SourceError, match="carries no evaluation data"):
        export(dataclasses.replace(source, evaluation=None), ExportOptions(store=tmp_path))
    with pytest.raises(SourceError, match="exported from a checkpoint of the kit"):
        from_factory("a:b", tmp_path, task="speech_synthesis", name="mine")
    with pytest.raises(SourceError, match="task audio_coding: cannot be exported"):
        from_checkpoint(voice_checkpoint.parents[1] / "codec" / "checkpoint")
