"""A JPEG of endless scans is refused before it is decoded; ordinary ones, whatever they carry, are not."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ImageLimits
from headway_server.preprocessing.image import decode_image
from headway_server.preprocessing.jpeg_scans import MAX_SCANS, check_scans

LIMITS = ImageLimits(max_bytes=10_000_000, max_pixels=1_000_000)
START_OF_SCAN = b"\xff\xda"


def jpeg(**options: object) -> bytes:
    pixels = np.random.default_rng(1).integers(0, 256, (64, 48, 3), np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def with_scans(num_scans: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again; decoders take it."""
    data = jpeg(progressive=True)
    last, end = data.rindex(START_OF_SCAN), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * (num_scans - data.count(START_OF_SCAN)) + data[end:]


def test_more_scans_than_the_limit_are_refused_by_name():
    with pytest.raises(InvalidInputError, match=r"images\[2\]: has more than 100 scans.*save it anew") as caught:
        decode_image(with_scans(MAX_SCANS + 1), field="images[2]", limits=LIMITS)
    assert caught.value.field == "images[2]"


def test_as_many_scans_as_the_limit_are_decoded():
    decode_image(with_scans(MAX_SCANS), field="images[0]", limits=LIMITS)


def test_markers_with_fill_bytes_before_them_count():
    data = with_scans(MAX_SCANS + 1).replace(START_OF_SCAN, b"\xff" + START_OF_SCAN)
    with pytest.raises(InvalidInputError, match="more than 100 scans"):
        check_scans(data, "images[0]")


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}])
def test_scans_within_a_colour_profile_or_behind_the_picture_do_not_count(options):
    profile = START_OF_SCAN * (MAX_SCANS + 1)
    check_scans(jpeg(icc_profile=profile, comment=profile, **options), "images[0]")
    check_scans(jpeg(**options) + profile, "images[0]")


def test_what_is_cut_off_or_no_jpeg_at_all_is_walked_to_its_end():
    data = with_scans(MAX_SCANS + 1)
    for length in range(2, len(jpeg()), 97):
        check_scans(data[:length], "images[0]")
    check_scans(b"\xff\xd8" + b"\xff\xe1\x00" * 1000 + b"\xff\xe1\xff\xff" + START_OF_SCAN * 200, "images[0]")
