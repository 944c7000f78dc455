"""A ViT whose tokens come from convolutions, exported."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from headway_export.tracing import trace
from headway_server.bundles import Task
from headway_training.models import ViT, ViTConfig

SHAPE = {
    "image_size": 16,
    "patch_size": 4,
    "num_layers": 1,
    "num_classes": 3,
    "d_model": 32,
    "num_heads": 2,
    "d_ff": 64,
}


@pytest.mark.parametrize("pooling", ["class_token", "mean"])
def test_any_number_of_images_gives_pytorchs_logits(tmp_path, pooling):
    torch.manual_seed(0)
    module = ViT(ViTConfig(**SHAPE, stem="convolutions", pooling=pooling)).eval()
    traced = trace(module, Task.IMAGE_CLASSIFICATION, image_size=(16, 16))
    ir.save(traced.graphs[0].model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for count in (1, 2, 7):
        pixels = np.random.default_rng(count).normal(size=(count, 3, 16, 16)).astype(np.float32)
        with torch.inference_mode():
            expected = module(torch.from_numpy(pixels)).numpy()
        np.testing.assert_allclose(session.run(["logits"], {"pixel_values": pixels})[0], expected, atol=1e-5)
