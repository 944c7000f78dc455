"""A checkpoint that draws images becomes a bundle of three graphs, each held against PyTorch."""

import dataclasses

import pytest

from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_checkpoint, from_factory
from headway_server.bundles import Precision, Task, open_bundle


def test_both_variants_are_proved_and_judged_by_their_velocities(diffusion_store):
    bundle = open_bundle(diffusion_store / "squares" / "1")
    manifest = bundle.manifest
    assert manifest.task is Task.IMAGE_GENERATION
    assert manifest.labels == ("red", "green", "blue")
    assert manifest.diffusion.condition == "label"
    for variant in manifest.variants.values():
        assert list(variant.graphs) == ["denoiser", "vae_decoder", "vae_encoder"]
        assert (variant.quality.metric, variant.quality.example_count) == ("velocity_error", 24)
    fp32, int8 = manifest.variants[Precision.FP32], manifest.variants[Precision.INT8]
    assert fp32.parity.max_relative_logit_error < 1e-4
    assert fp32.quality.value < 0.8  # of numbers of unit variance, whose velocity cannot be known exactly
    assert abs(fp32.quality.value - int8.quality.value) <= 0.005
    card = (bundle.path / "README.md").read_text()
    assert "It draws images of 8 x 8 pixels." in card
    assert "Squared error of the velocity by the time" in card


def test_a_model_that_draws_texts_brings_their_encoder_and_its_tokenizer(text_diffusion_store):
    bundle = open_bundle(text_diffusion_store / "text-squares" / "1")
    manifest = bundle.manifest
    assert manifest.diffusion.condition == "text"
    assert (manifest.labels, manifest.limits.max_input_tokens) == ((), 12)
    assert "tokenizer.json" in manifest.files
    for variant in manifest.variants.values():
        assert list(variant.graphs) == ["denoiser", "vae_decoder", "vae_encoder", "text_encoder"]
        states = next(spec for spec in variant.graphs["denoiser"].inputs if spec.name == "text")
        assert states.shape == ("batch", 12, 32)
    fp32, int8 = manifest.variants[Precision.FP32], manifest.variants[Precision.INT8]
    assert fp32.parity.max_relative_logit_error < 1e-4
    assert fp32.quality.value < 0.8
    assert abs(fp32.quality.value - int8.quality.value) <= 0.005
    assert "A prompt is any text of at most 12 tokens." in (bundle.path / "README.md").read_text()


def test_what_cannot_be_exported_is_refused(diffusion_checkpoint, tmp_path):
    source = from_checkpoint(diffusion_checkpoint)
    for changes, said in (
        ({"precisions": (Precision.INT8_STATIC,)}, "has no int8-static"),
        ({"attention": True}, "leave out --attention"),
    ):
        with pytest.raises(SourceError, match=said):
            export(source, ExportOptions(store=tmp_path, **changes))
    with pytest.raises(SourceError, match="carries no evaluation data"):
        export(dataclasses.replace(source, evaluation=None), ExportOptions(store=tmp_path))
    with pytest.raises(SourceError, match="exported from a checkpoint of the kit"):
        from_factory("a:b", tmp_path, task="image_generation", name="mine")
