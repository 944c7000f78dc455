"""A segmentation checkpoint becomes a bundle of two graphs, each held against PyTorch and by its masks."""

import dataclasses

import numpy as np
import pytest
import torch

from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_checkpoint
from headway_server.bundles import Precision, Task
from headway_training.checkpoint import Checkpoint, Evaluation, ImagePreprocessing, write_checkpoint
from headway_training.models import SegmentationConfig, Segmenter

SHAPE = SegmentationConfig(
    image_size=32,
    patch_size=8,
    mask_stride=2,
    d_detail=8,
    image_num_layers=1,
    image_d_model=16,
    image_num_heads=2,
    image_d_ff=32,
    num_layers=1,
    d_model=32,
    num_heads=2,
    d_ff=32,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    masks = np.zeros((6, 32, 32), np.uint8)
    masks[:, 8:24, 4:20] = 1
    arrays = {
        "images": random.integers(0, 256, (3, 32, 32, 3)).astype(np.uint8),
        "image_index": np.array([0, 0, 1, 1, 1, 2]),
        "points": np.full((6, 2), 0.4, np.float32),
        "boxes": np.tile(np.array([4, 8, 20, 24], np.float32) / 32, (6, 1)),
        "masks": np.packbits(masks.reshape(6, -1), axis=1),
    }
    folder = tmp_path_factory.mktemp("segmenter") / "checkpoint"
    preprocessing = ImagePreprocessing(height=32, width=32, mean=(0.5,) * 3, std=(0.3,) * 3)
    described = Checkpoint(
        name="tiny-segmenter",
        task="segmentation",
        description="Tiny.",
        license="Apache-2.0",
        architecture="segmenter",
        configuration=SHAPE.to_dict(),
        image_preprocessing=preprocessing,
        evaluation=Evaluation(file="evaluation.npz", dataset="squares", metric="first_mask_iou", higher_is_better=True),
    )
    write_checkpoint(folder, described, Segmenter(SHAPE).eval(), arrays=arrays)
    return folder


def test_both_variants_are_proved_and_judged_by_their_masks(checkpoint, tmp_path):
    options = ExportOptions(store=tmp_path, precisions=(Precision.FP32, Precision.INT8))
    bundle = export(from_checkpoint(checkpoint), options)
    manifest = bundle.manifest
    assert manifest.task is Task.SEGMENTATION
    for variant in manifest.variants.values():
        assert list(variant.graphs) == ["encoder", "decoder"]
        assert (variant.quality.metric, variant.quality.example_count, variant.quality.dataset) == (
            "first_mask_iou",
            3,
            "squares",
        )
    fp32, int8 = manifest.variants[Precision.FP32], manifest.variants[Precision.INT8]
    assert fp32.parity.max_relative_logit_error < 1e-4
    assert fp32.parity.checked_shape_count == 3
    assert abs(fp32.quality.value - int8.quality.value) <= 0.5
    card = (bundle.path / "README.md").read_text()
    assert "Mean IoU in percent of the mask it is surest of:" in card
    assert "A call has at most 256 prompts about an image, and a prompt 64 points." in card


def test_what_cannot_be_exported_is_refused(checkpoint, tmp_path):
    source = from_checkpoint(checkpoint)
    for changes, said in (
        ({"precisions": (Precision.INT8_STATIC,)}, "has no int8-static"),
        ({"attention": True}, "leave out --attention"),
    ):
        with pytest.raises(SourceError, match=said):
            export(dataclasses.replace(source), ExportOptions(store=tmp_path, **changes))
