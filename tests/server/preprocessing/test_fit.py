"""Images that keep their proportions."""

import asyncio
import io

import numpy as np
import pytest
from PIL import Image
from tiny_bundles import FITTED

from headway_server.bundles import ImagePreprocessing
from headway_server.errors import BundleError, InvalidInputError
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.image import ImageLimits

LIMITS = ImageLimits(max_bytes=10_000, max_pixels=400 * 400)


def fit(shorter, longer, multiple=1):
    given = {"height": longer, "width": longer, "resize_size": shorter, "multiple": multiple}
    return ImagePreprocessing.model_validate(FITTED.model_dump() | given)


@pytest.mark.parametrize(
    ("size", "multiple", "expected"),
    [
        ((100, 50), 1, (24, 12)),  # the longer side is the limit
        ((50, 60), 1, (16, 19)),
        ((50, 60), 8, (16, 16)),
        ((300, 1), 1, (24, 1)),
        ((1, 300), 8, (8, 24)),
    ],
)
def test_a_picture_becomes_as_large_as_both_limits_allow(size, multiple, expected):
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    prepared = ImagePreprocessor(fit(16, 24, multiple), LIMITS).prepare(file.getvalue())
    assert prepared.pixel_values.shape == (3, *expected[::-1])
    assert (prepared.width, prepared.height) == size
    np.testing.assert_allclose(prepared.transform.to_model(size), expected)


def test_the_largest_picture_is_known_at_the_start():
    assert fit(16, 24, 5).largest == (15, 20)
    assert ImagePreprocessor(fit(16, 24), LIMITS).num_image_bytes == 16 * 24 * 12
    with pytest.raises(BundleError, match=r"has 1000 x 500 pixels"):
        ImagePreprocessor(fit(500, 1000), LIMITS)


def test_pixels_have_one_of_the_sizes():
    preprocessor = ImagePreprocessor(fit(16, 24, 8), LIMITS)
    for height, width in ((16, 24), (24, 16), (8, 8)):
        [image] = asyncio.run(preprocessor.take_pixels(np.zeros((1, 3, height, width), np.float32)))
        assert (image.width, image.height) == (width, height)
    for height, width in ((24, 24), (16, 32), (16, 20), (0, 16)):
        with pytest.raises(InvalidInputError, match="up to 16, the longer one up to 24, both multiples of 8"):
            asyncio.run(preprocessor.take_pixels(np.zeros((1, 3, height, width), np.float32)))


def test_what_fits_states_its_limits():
    for wrong in ({"resize_size": None}, {"width": 20}, {"resize": "stretch", "resize_size": None, "multiple": 2}):
        with pytest.raises(ValueError, match=r"image_preprocessing: (fit needs|multiple is for images of many sizes)"):
            ImagePreprocessing.model_validate(FITTED.model_dump() | wrong)
