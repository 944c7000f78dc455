"""How detectors of `transformers` are read, and how their outputs become objects."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_bundles
import tiny_detectors
import torch
import transformers
from transformers.image_transforms import get_size_with_aspect_ratio
from transformers.models.yolos.image_processing_pil_yolos import get_size_with_aspect_ratio_yolos

from headway_export.agreement import LIMITS, Rows, _Comparison
from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.huggingface import FolderOptions, from_folder
from headway_export.huggingface.detectors import DETECTORS
from headway_export.huggingface.zero_shot_detectors import ZERO_SHOT_DETECTORS
from headway_export.source import from_checkpoint
from headway_server.bundles import ClassificationScheme, Detection, Precision, Task
from headway_server.tasks.detection.objects import Objects
from headway_training.checkpoint import Checkpoint, Evaluation, ImagePreprocessing, write_checkpoint
from headway_training.metrics import mean_average_precision
from headway_training.models import build_model
from headway_training.tasks.detection import objects_of

SIZE = (90, 60)
"""Width and height of an image."""


@pytest.fixture(scope="module", params=tiny_detectors.FAMILIES)
def folder(request, tmp_path_factory):
    return tiny_detectors.write_detector(tmp_path_factory.mktemp("detector"), request.param)


def test_every_family_that_is_read_is_tried():
    assert set(tiny_detectors.FAMILIES) == set(DETECTORS)
    assert set(tiny_detectors.ZERO_SHOT) == ZERO_SHOT_DETECTORS


def test_objects_are_those_of_the_post_processing(folder):
    source, _ = from_folder(folder, FolderOptions())
    assert source.task is Task.OBJECT_DETECTION
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.AutoModelForObjectDetection.from_pretrained(folder).eval()
    pixels = torch.rand(2, 3, 96, 128, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output, found = model(pixel_values=pixels), source.module(pixels)
    for ours, own in ((found["logits"], output.logits), (found["boxes"], output.pred_boxes)):
        torch.testing.assert_close(ours, own, rtol=1e-3, atol=1e-3)
    output = SimpleNamespace(logits=found["logits"], pred_boxes=found["boxes"])  # apart from rounding
    [everything, _] = processor.post_process_object_detection(output, 0.0, target_sizes=[SIZE[::-1]] * 2)
    threshold = tiny_detectors.threshold_within(everything["scores"].numpy())
    expected = processor.post_process_object_detection(output, threshold, target_sizes=[SIZE[::-1]] * 2)
    for logits, boxes, one in zip(found["logits"].numpy(), found["boxes"].numpy(), expected, strict=True):
        objects = Objects.of(logits, boxes, source.detection, threshold=threshold, size=SIZE)
        order = one["scores"].argsort(descending=True, stable=True)
        np.testing.assert_allclose(objects.scores, one["scores"][order], atol=1e-6)
        assert objects.labels.tolist() == one["labels"][order].tolist()
        np.testing.assert_allclose(objects.boxes, one["boxes"][order], atol=1e-3)
    assert 0 < len(expected[0]["scores"]) < len(everything["scores"])


def test_a_family_of_one_size_is_not_asked_for_several(tmp_path):
    sizes = {"shortest_edge": 50, "longest_edge": 71}
    folder = tiny_detectors.write_detector(tmp_path / "detector", "deformable_detr", size=sizes)
    with pytest.raises(SourceError, match=r"a graph of deformable_detr is of one size; write one there"):
        from_folder(folder, FolderOptions())


def test_a_backbone_of_a_package_that_is_absent_is_refused(tmp_path, monkeypatch):
    folder = tiny_detectors.write_detector(tmp_path / "detector", "detr")
    config = json.loads((folder / "config.json").read_text())
    config["backbone_config"] = {"model_type": "timm_backbone", "backbone": "resnet50", "out_indices": [4]}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(SourceError, match=r"computed by the package timm, which is not installed; install it"):
        from_folder(folder, FolderOptions())


def test_a_family_whose_scores_nobody_knows_is_refused(tmp_path):
    folder = tiny_detectors.write_detector(tmp_path / "detector", "detr")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"model_type": "detr"', '"model_type": "dab-detr"'))
    with pytest.raises(SourceError, match=r"dab-detr"):
        from_folder(folder, FolderOptions())


@pytest.mark.parametrize("resample", [0, 3])
def test_pictures_are_fitted_as_by_the_image_processor(tmp_path, resample):
    folder = tiny_detectors.write_detector(
        tmp_path / "detector", "detr", resample=resample, size={"shortest_edge": 50, "longest_edge": 71}
    )
    preprocessing = from_folder(folder, FolderOptions())[0].image_preprocessing
    assert (preprocessing.resize, preprocessing.resize_size, preprocessing.largest) == ("fit", 50, (50, 71))


@pytest.mark.parametrize(("multiple", "own"), [(1, get_size_with_aspect_ratio), (16, get_size_with_aspect_ratio_yolos)])
def test_sizes_are_those_of_the_image_processors(multiple, own):
    generator = np.random.default_rng(0)
    for shorter, longer in ((800, 1333), (512, 864), (60, 96)):
        preprocessing = tiny_bundles.FITTED.model_copy(
            update={"height": longer, "width": longer, "resize_size": shorter, "multiple": multiple}
        )
        for height, width in generator.integers(40, (2 * longer, 3 * shorter), (2_000, 2)).tolist():
            sides = tuple(max(side, multiple) for side in own((height, width), shorter, longer))
            assert preprocessing.fitted(width, height)[::-1] == sides, (height, width)


def outputs_of(labels, sides):
    """Logits and boxes in one row: an object of a label, or of none, for each box of the left half and a height."""
    logits = np.full((len(labels), 3), -5, np.float32)
    logits[np.arange(len(labels)), labels] = 5
    boxes = np.array([[0.25, 0.5, 0.5, side] for side in sides], np.float32)
    return np.concatenate([logits.ravel(), boxes.ravel()])[np.newaxis]


@pytest.mark.parametrize(
    ("labels", "sides", "agreement", "iou"),
    [
        ([1, 0, 2], [0.4, 0.8, 0.1], 1.0, 1.0),  # in another order
        ([0, 1, 2], [0.8, 0.5, 0.1], 1.0, 0.9),
        ([0, 2, 2], [0.8, 0.4, 0.1], 2 / 3, 1.0),  # one is lost
        ([0, 1, 1], [0.8, 0.4, 0.1], 4 / 5, 1.0),  # one is new
        ([1, 0, 2], [0.8, 0.3, 0.1], 0.0, None),  # labels are exchanged, and no box is near one of its label
    ],
)
def test_objects_of_two_variants_are_matched(labels, sides, agreement, iou):
    scheme = Detection(scores="softmax", num_queries=3, max_objects=3)
    comparison = _Comparison(kind="objects", scheme=ClassificationScheme(), has_labels=False, detection=scheme)
    found = Rows(outputs_of(labels, sides), np.zeros(1, np.int64), 0)
    comparison.add(outputs_of([0, 1, 2], [0.8, 0.4, 0.1]), found)
    figures, intervals = comparison.figures()
    assert figures.keys() <= LIMITS.keys()
    assert figures.get("mean_box_iou") == pytest.approx(iou)
    assert figures["top_agreement"] == pytest.approx(agreement)
    assert intervals["top_agreement"][0] < LIMITS["top_agreement"]  # of an image or two nothing is told


def test_a_detector_of_the_kit_is_exported_with_its_precision_and_its_overlap(tmp_path):
    torch.manual_seed(0)
    model = build_model("detector", {"image_size": 32, "num_classes": 2, "width": 8, "num_blocks": 1}).eval()
    with torch.no_grad():
        model.labels.bias.fill_(0.0)
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (6, 32, 32, 3)).astype(np.uint8)
    preprocessing = ImagePreprocessing(height=32, width=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    with torch.inference_mode():  # what it finds itself is the truth
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
        outputs = model((pixels - 0.5) / 0.5)
    found = [objects_of(*(outputs[name][row].numpy() for name in ("logits", "boxes"))) for row in range(6)]
    described = Checkpoint(
        name="finder",
        task="object_detection",
        description="Has learned nothing.",
        license="Apache-2.0",
        architecture="detector",
        configuration=model.configuration.to_dict(),
        labels=("cat", "dog"),
        image_preprocessing=preprocessing,
        evaluation=Evaluation(
            file="evaluation.npz", dataset="noise", metric="mean_average_precision", higher_is_better=True
        ),
    )
    arrays = {
        "images": images,
        "image_index": np.arange(6),
        "boxes": np.stack([one.boxes[0] for one in found]),
        "labels": np.array([one.labels[0] for one in found]),
    }
    write_checkpoint(tmp_path / "checkpoint", described, model, arrays=arrays)
    options = ExportOptions(store=tmp_path / "store", precisions=(Precision.FP32,))
    bundle = export(from_checkpoint(tmp_path / "checkpoint"), options)
    detection = bundle.manifest.detection
    assert (detection.scores, detection.num_queries, detection.nms_threshold) == ("sigmoid", 16, 0.5)
    quality = bundle.manifest.variants[Precision.FP32].quality
    assert quality.metric == "mean_average_precision"
    truth = [(boxes[None], label[None]) for boxes, label in zip(arrays["boxes"], arrays["labels"], strict=True)]
    assert quality.value == pytest.approx(mean_average_precision(found, truth), abs=0.5)
    card = (bundle.path / "README.md").read_text()
    assert "Lowest average precision: " in card
