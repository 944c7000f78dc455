"""Maps of cells, enlarged to pixels, against the plain computation."""

import io
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from headway_server.tasks.pixels import maps
from headway_server.tasks.pixels.maps import ClassMap, depth_png, enlarge_depth


def blobs(num_labels, rows, columns, seed=0):
    """Logits of smooth areas, (labels, rows, columns)."""
    coarse = np.random.default_rng(seed).normal(size=(num_labels, 4, 5)).astype(np.float32)
    return np.stack([enlarge_depth(one, (columns, rows)) for one in coarse])


def naive(logits, size):
    """Logits of every pixel by linear interpolation, (labels, height, width)."""

    def axis(num_cells, num_pixels):
        places = np.clip((np.arange(num_pixels) + 0.5) * num_cells / num_pixels - 0.5, 0, None)
        low = np.minimum(places.astype(int), num_cells - 1)
        return low, np.minimum(low + 1, num_cells - 1), places - low

    (top, bottom, down), (left, right, across) = axis(logits.shape[1], size[1]), axis(logits.shape[2], size[0])
    rows = logits[:, top] * (1 - down)[:, None] + logits[:, bottom] * down[:, None]
    return rows[..., left] * (1 - across) + rows[..., right] * across


@pytest.mark.parametrize("num_labels", [1, 2, 5, 40, 300])
@pytest.mark.parametrize("size", [(64, 48), (9, 31), (1, 1)])
@pytest.mark.parametrize("band", [64, maps._BAND_VALUES])
def test_labels_are_those_of_all_interpolated_logits(monkeypatch, num_labels, size, band):
    monkeypatch.setattr(maps, "_BAND_VALUES", band)
    noise = np.random.default_rng(1).normal(size=(num_labels, 7, 6)).astype(np.float32)
    for logits in (blobs(num_labels, 12, 16), noise):
        found = ClassMap.of(logits, size)
        expected = naive(logits, size).argmax(axis=0)
        assert (found.classes == expected).mean() >= 0.999
        assert found.counts.tolist() == np.bincount(found.classes.ravel(), minlength=num_labels).tolist()
        assert ((found.scores > 0) == (found.counts > 0)).all()
        assert found.scores.max() <= 1 + 1e-6
        assert found.classes.dtype == (np.uint8 if num_labels <= 256 else np.uint16)
        assert (np.asarray(Image.open(io.BytesIO(found.png()))) == found.classes).all()


def test_the_score_of_a_label_is_its_mean_at_the_nearest_cells():
    logits = np.log(np.array([[[0.9, 0.2]], [[0.1, 0.8]]], np.float32))
    found = ClassMap.of(logits, (4, 2))
    assert found.classes.tolist() == [[0, 0, 1, 1]] * 2
    assert found.scores == pytest.approx([0.9, 0.8])
    assert ClassMap.of(logits + 3, (4, 2), is_score=True).scores == pytest.approx([3 + np.log(0.9), 3 + np.log(0.8)])


def test_logits_of_all_pixels_are_never_in_memory():
    logits = blobs(150, 32, 32)
    tracemalloc.start()
    ClassMap.of(logits, (1200, 900))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150 * 1200 * 900 * 4 / 4


@pytest.mark.parametrize("size", [(16, 12), (50, 7), (3, 90)])
def test_depth_in_a_file_is_that_of_the_map(size):
    depth = enlarge_depth(blobs(1, 12, 16)[0], size)
    if size == (16, 12):
        np.testing.assert_allclose(depth, blobs(1, 12, 16)[0], atol=1e-6)
    png, least, most = depth_png(depth.copy())
    levels = np.asarray(Image.open(io.BytesIO(png))).astype(np.float64)
    assert (least, most) == (depth.min(), depth.max())
    np.testing.assert_allclose(least + levels / 65535 * (most - least), depth, atol=(most - least) / 65535)


def test_a_flat_depth_is_a_file_of_its_minimum():
    png, least, most = depth_png(np.full((2, 3), 1.5, np.float32))
    assert (least, most, np.asarray(Image.open(io.BytesIO(png))).max()) == (1.5, 1.5, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(value):
    with pytest.raises(FloatingPointError):
        ClassMap.of(np.full((2, 3, 3), value, np.float32), (5, 5))
    with pytest.raises(FloatingPointError):
        enlarge_depth(np.full((3, 3), value, np.float32), (5, 5))
