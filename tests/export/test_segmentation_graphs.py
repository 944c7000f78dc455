"""The two graphs of a segmentation model compute what PyTorch does, at any number of images, prompts and points."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from headway_export.tracing import trace_segmenter
from headway_training.models import SegmentationConfig, Segmenter

SHAPE = {
    "image_size": 32,
    "patch_size": 8,
    "mask_stride": 2,
    "d_detail": 8,
    "image_num_layers": 1,
    "image_d_model": 16,
    "image_num_heads": 2,
    "image_d_ff": 32,
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 2,
    "d_ff": 32,
}


def test_prompts_of_several_images_give_pytorchs_masks(tmp_path):
    torch.manual_seed(0)
    module = Segmenter(SegmentationConfig(**SHAPE)).eval()
    traced = trace_segmenter(module)
    sessions = {}
    for graph in traced.graphs:
        ir.save(graph.model, tmp_path / f"{graph.role}.onnx")
        sessions[graph.role] = onnxruntime.InferenceSession(tmp_path / f"{graph.role}.onnx")
    random = np.random.default_rng(0)
    for num_images, num_prompts, num_points in ((1, 1, 1), (3, 5, 2), (2, 9, 6)):
        pixels = random.normal(size=(num_images, 3, 32, 32)).astype(np.float32)
        (bank,) = sessions["encoder"].run(["embedding"], {"pixel_values": pixels})
        prompts = {
            "image_index": random.integers(num_images, size=num_prompts),
            "points": random.random((num_prompts, num_points, 2), np.float32),
            "point_labels": random.integers(-1, 4, size=(num_prompts, num_points)),
            "earlier_mask": random.normal(size=(num_prompts, 16, 16)).astype(np.float32),
            "has_earlier_mask": random.integers(2, size=num_prompts),
        }
        masks, iou = sessions["decoder"].run(["masks", "predicted_iou"], {"embedding": bank, **prompts})
        with torch.inference_mode():
            embedding = module.embed(torch.from_numpy(pixels))
            expected = module.decoder(embedding, **{name: torch.from_numpy(value) for name, value in prompts.items()})
        np.testing.assert_allclose(bank, embedding, atol=1e-4)
        np.testing.assert_allclose(masks, expected["masks"], atol=1e-4)
        np.testing.assert_allclose(iou, expected["predicted_iou"], atol=1e-4)
