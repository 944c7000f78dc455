"""Images of OWLv2, against the image processor of `transformers`."""

import numpy as np
import pytest
from PIL import Image
from transformers import Owlv2ImageProcessorPil

from headway_server.preprocessing.smoothing import smooth_square

SIDE = 48


@pytest.mark.parametrize("size", [(64, 48), (48, 48), (47, 30), (5, 9), (1, 6), (7, 200), (301, 517), (400, 3)])
def test_a_smoothed_square_is_that_of_transformers(size):
    colours = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    processor = Owlv2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_normalize=False)
    picture = Image.fromarray(colours)
    [expected] = processor(picture, return_tensors="np", input_data_format="channels_last").pixel_values
    found = smooth_square(colours, SIDE)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, 255 * expected.transpose(1, 2, 0), atol=1e-3)
