"""An image encoder without a head: its vectors and its attention, from a checkpoint to a bundle."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headway_export.exporter import ExportOptions, export
from headway_export.reference import Reference
from headway_export.source import from_checkpoint
from headway_server.bundles.manifest import Precision, Task
from headway_training.checkpoint import Checkpoint, Evaluation, ImagePreprocessing, write_checkpoint
from headway_training.models import build_model

CONFIGURATION = {
    "image_size": 16,
    "patch_size": 4,
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 2,
    "d_ff": 64,
    "num_registers": 3,
    "stem": "convolutions",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoder") / "checkpoint"
    described = Checkpoint(
        name="tiny-encoder",
        task="image_embedding",
        description="Turns an image into a vector.",
        license="none",
        architecture="image_encoder",
        configuration=CONFIGURATION,
        image_preprocessing=ImagePreprocessing(height=16, width=16, mean=(0.5, 0.5, 0.5), std=(0.3, 0.3, 0.3)),
        attention=True,
        evaluation=Evaluation(
            file="evaluation.npz", dataset="tiny images", metric="knn_accuracy", higher_is_better=True
        ),
    )
    images = np.random.default_rng(0).integers(0, 255, (8, 16, 16, 3), np.uint8)
    write_checkpoint(folder, described, build_model("image_encoder", CONFIGURATION), images=(images, np.arange(8)))
    return folder


def test_it_is_exported_with_its_attention_and_registers_are_not_seen(checkpoint: Path, tmp_path: Path) -> None:
    source = from_checkpoint(checkpoint)
    bundle = export(source, ExportOptions(store=tmp_path, precisions=(Precision.FP32, Precision.INT8)))
    manifest = bundle.manifest
    assert manifest.task is Task.IMAGE_EMBEDDING
    assert (manifest.embedding.pooling, manifest.embedding.dimension) == ("class_token", 32)
    assert (manifest.patches.rows, manifest.patches.columns, manifest.patches.has_class_token) == (4, 4, True)
    assert manifest.variants[Precision.INT8].agreement is not None
    pixels = torch.randn(3, 16, 16)
    weights = Reference(source).attention_weights({"pixel_values": pixels.numpy()})
    assert [one.shape for one in weights.values()] == [(2, 17, 17), (2, 17, 17)]
    np.testing.assert_allclose(weights["attention_1"].sum(-1), 1, atol=1e-5)


def test_registers_change_what_an_encoder_computes_and_nothing_of_its_shape() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 16, 16)
    for pooling, count in (("class_token", 17), ("mean", 16)):
        model = build_model("image_encoder", {**CONFIGURATION, "pooling": pooling}).eval()
        states = model.hidden_states(images)
        assert states.shape == (2, count, 32)
        with torch.no_grad():
            model.registers.normal_()  # not a shift, which layer norms take away
        assert not torch.allclose(states, model.hidden_states(images))
        small = model.hidden_states(images[..., :8, :8], interpolate=True)
        assert small.shape == (2, count - 12, 32)
        with pytest.raises(ValueError, match="images must be 16 x 16 pixels"):
            model.hidden_states(images[..., :8, :8])
    plain = build_model("image_encoder", {**CONFIGURATION, "num_registers": 0})
    assert not any("register" in name for name in plain.state_dict())
