"""How models of pixels of `transformers` are read, and how their outputs become maps."""

import io

import numpy as np
import pytest
import tiny_pixel_models
import torch
from PIL import Image

from headway_export.agreement import LIMITS, Rows, _Comparison
from headway_export.errors import SourceError
from headway_export.huggingface import FolderOptions, from_folder
from headway_export.huggingface.depth_estimators import DEPTH_ESTIMATORS
from headway_export.huggingface.semantic_segmenters import MASK_CLASSIFIERS, PIXEL_CLASSIFIERS
from headway_server.bundles import ClassificationScheme, Task
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.image import ImageLimits
from headway_server.tasks.pixels.maps import ClassMap, enlarge_depth

SIZE = (90, 60)
"""Width and height of an image."""
LARGE = ImageLimits(max_bytes=2**26, max_pixels=2**24)


def picture(size=SIZE):
    generator = np.random.default_rng(3)
    return Image.fromarray(generator.integers(0, 256, (9, 9, 3)).astype(np.uint8)).resize(size)


def prepared(source, image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return torch.from_numpy(ImagePreprocessor(source.image_preprocessing, LARGE).prepare(file.getvalue()).pixel_values)


def test_every_family_that_is_read_is_tried():
    assert set(tiny_pixel_models.SEMANTIC) == {*PIXEL_CLASSIFIERS, *MASK_CLASSIFIERS}
    assert set(tiny_pixel_models.DEPTH) == set(DEPTH_ESTIMATORS)


@pytest.mark.parametrize("family", tiny_pixel_models.SEMANTIC)
def test_labels_are_those_of_the_post_processing(tmp_path, family):
    folder = tiny_pixel_models.write_pixel_model(tmp_path, family)
    source, _ = from_folder(folder, FolderOptions())
    assert source.task is Task.SEMANTIC_SEGMENTATION
    with torch.inference_mode():
        [logits] = source.module(prepared(source, picture())[None]).numpy()
    found = ClassMap.of(logits, SIZE, is_score=source.semantic_segmentation.scores == "sum")
    assert (found.classes == tiny_pixel_models.expected_labels(folder, picture())).mean() >= 0.999
    assert np.count_nonzero(found.counts) > 1


@pytest.mark.parametrize("family", tiny_pixel_models.DEPTH)
def test_depth_is_that_of_the_post_processing(tmp_path, family):
    folder = tiny_pixel_models.write_pixel_model(tmp_path, family, is_depth=True)
    source, _ = from_folder(folder, FolderOptions())
    assert source.task is Task.DEPTH_ESTIMATION
    with torch.inference_mode():
        [depth] = source.module(prepared(source, picture())[None])["depth"].numpy()
    expected = tiny_pixel_models.expected_depth(folder, picture())
    assert np.ptp(expected) > 0
    np.testing.assert_allclose(enlarge_depth(depth, SIZE), expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_a_folder_whose_maps_would_be_stretched_wrongly_is_refused(tmp_path):
    crop = {"do_center_crop": True, "crop_size": {"height": 32, "width": 32}}
    folder = tiny_pixel_models.write_pixel_model(tmp_path, "beit", **crop)
    with pytest.raises(SourceError, match=r"stretches maps to images; write a size there"):
        from_folder(folder, FolderOptions())


@pytest.mark.parametrize(
    ("kind", "expected", "found", "figures"),
    [
        ("pixel", [[5, 0], [0, 5]], [[5, 0], [0, 5]], {"top_agreement": 1, "mean_label_iou": 1}),
        ("pixel", [[5, 0], [0, 5]], [[5, 0], [5, 0]], {"top_agreement": 0.5, "mean_label_iou": 0.25}),
        ("pixel", [[5, 0], [0.1, 0]], [[5, 0], [0, 5]], {"top_agreement": 1, "mean_label_iou": 1}),  # fp32 is unsure
        ("depth", [[4, 4], [2, 2]], [[4, 4], [2, 3]], {"mean_relative_error": 0.125}),
    ],
)
def test_maps_of_two_variants_are_compared(kind, expected, found, figures):
    scheme = ClassificationScheme()
    comparison = _Comparison(kind=kind, scheme=scheme, has_labels=kind == "pixel")
    first, second = (np.repeat(np.array(rows, np.float32), 20, axis=0) for rows in (expected, found))
    if kind == "pixel":
        first, second = (rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)) for rows in (first, second))
    comparison.add(first, Rows(second, np.zeros(len(first), np.int64), 0))
    measured, _ = comparison.figures()
    assert measured.keys() <= LIMITS.keys()
    for name, value in figures.items():
        assert measured[name] == pytest.approx(value, abs=1e-6)
