"""Files that would keep a decoder busy are refused before they do; ordinary ones, whatever they carry, are not."""

import struct
import threading
import time
import zlib
from io import BytesIO

import numpy as np
import pytest
from decoding_images import decode_image
from PIL import Image

from headway_server.bundles import ImagePreprocessing
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ImageLimits, ImagePreprocessor
from headway_server.preprocessing.image import MAX_READS, MAX_SCANS, _Gate, check_scans

LIMITS = ImageLimits(max_bytes=16_000_000, max_pixels=1_000_000)
START_OF_SCAN = b"\xff\xda"


def encoded(image_format: str = "JPEG", **options: object) -> bytes:
    buffer = BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (64, 48, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, image_format, **options)
    return buffer.getvalue()


# Parts of a file, which its reader goes through one by one


def jpeg_with(filling: bytes) -> bytes:
    data = encoded("JPEG")
    start = data.index(START_OF_SCAN)
    return data[:start] + filling + data[start:]


def png_with(num_chunks: int) -> bytes:
    data = encoded("PNG")
    chunk = struct.pack(">I", 0) + b"teSt" + struct.pack(">I", zlib.crc32(b"teSt"))
    end = data.index(b"IDAT") - 4
    return data[:end] + chunk * num_chunks + data[end:]


def gif_with(num_comments: int) -> bytes:
    data = encoded("GIF")
    start = data.index(b"\x2c", 13 + 3 * 2 ** ((data[10] & 7) + 1))
    return data[:start] + b"\x21\xfe\x01a\x00" * num_comments + data[start:]


ENDLESS = {
    "segments": jpeg_with(b"\xff\xfe\0\2" * 3_500_000),
    "fill": jpeg_with(b"\xff" * 10_000_000),
    "zero": jpeg_with(b"\xff\x00" * 5_000_000),
    "junk": jpeg_with(b"junk" * 3_000_000),
    "chunks": png_with(1_000_000),
    "comments": gif_with(2_500_000),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_file_of_endless_parts_is_refused_soon(name):
    began = time.thread_time()
    with pytest.raises(InvalidInputError, match=r"images\[1\]: takes more than 100000 reads; save it again") as caught:
        decode_image(ENDLESS[name], field="images[1]", limits=LIMITS)
    assert caught.value.field == "images[1]"
    assert time.thread_time() - began < 2, "5 s and more if it is read to its end"


@pytest.mark.parametrize("data", [jpeg_with(b"\xff\xfe\0\2" * 15_000), png_with(15_000)], ids=["JPEG", "PNG"])
def test_thousands_of_parts_are_read(data):
    assert decode_image(data, limits=LIMITS).size == (48, 64)


def test_a_large_picture_of_a_usual_encoder_takes_few_reads():
    pixels = np.random.default_rng(2).integers(0, 256, (1000, 1000, 3), np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    assert decode_image(buffer.getvalue(), limits=LIMITS).size == (1000, 1000)
    assert 10 * len(buffer.getvalue()) / 8192 < MAX_READS, "chunks of 8 KiB, a few reads each"


# Scans of a JPEG, each of which is a pass of the decoder over all pixels


def with_scans(num_scans: int) -> bytes:
    """A progressive JPEG whose last scan comes again and again; decoders take it."""
    data = encoded(progressive=True)
    last, end = data.rindex(START_OF_SCAN), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * (num_scans - data.count(START_OF_SCAN)) + data[end:]


def test_more_scans_than_the_limit_are_refused_by_name():
    with pytest.raises(InvalidInputError, match=r"images\[2\]: has more than 100 scans.*save it again") as caught:
        decode_image(with_scans(MAX_SCANS + 1), field="images[2]", limits=LIMITS)
    assert caught.value.field == "images[2]"


def test_as_many_scans_as_the_limit_are_decoded():
    decode_image(with_scans(MAX_SCANS), limits=LIMITS)


def test_markers_with_fill_bytes_before_them_count():
    data = with_scans(MAX_SCANS + 1).replace(START_OF_SCAN, b"\xff" + START_OF_SCAN)
    with pytest.raises(InvalidInputError, match="more than 100 scans"):
        check_scans(data, "images[0]")


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}])
def test_scans_within_a_colour_profile_or_behind_the_picture_do_not_count(options):
    profile = START_OF_SCAN * (MAX_SCANS + 1)
    check_scans(encoded(icc_profile=profile, comment=profile, **options), "images[0]")
    check_scans(encoded(**options) + profile, "images[0]")


def test_what_is_cut_off_or_no_jpeg_at_all_is_walked_to_its_end():
    data = with_scans(MAX_SCANS + 1)
    for length in range(2, len(encoded()), 97):
        check_scans(data[:length], "images[0]")
    check_scans(b"\xff\xd8" + b"\xff\xe1\x00" * 1000 + b"\xff\xe1\xff\xff" + START_OF_SCAN * 200, "images[0]")


# Pixels that are decoded at a time


class Decoding(threading.Thread):
    """Holds pixels until it is told to go."""

    def __init__(self, gate: _Gate, num_pixels: int) -> None:
        super().__init__(daemon=True)
        self._gate, self._num_pixels = gate, num_pixels
        self.inside, self.go = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self._gate.reserve(self._num_pixels, 10):
            self.inside.set()
            assert self.go.wait(30)

    def leave(self) -> None:
        self.go.set()
        self.join()


def test_images_wait_for_their_turn_while_others_hold_the_limit_and_a_larger_one_passes_alone():
    gate = _Gate()
    first, second = Decoding(gate, 6), Decoding(gate, 4)
    assert first.inside.wait(30)
    assert second.inside.wait(30)
    large = Decoding(gate, 11)
    time.sleep(0.02)
    small = Decoding(gate, 1)
    second.leave()
    assert not large.inside.wait(0.05)
    assert not small.inside.wait(0.05), "it came later"
    first.leave()
    assert large.inside.wait(30)
    assert not small.inside.wait(0.05)
    large.leave()
    assert small.inside.wait(30)
    small.leave()
    with pytest.raises(ZeroDivisionError), gate.reserve(10, 10):
        raise ZeroDivisionError
    with gate.reserve(10, 10):
        pass


async def test_small_files_that_are_read_on_the_event_loop_keep_it_for_less_than_50_ms():
    settings = ImagePreprocessing(
        height=128,
        width=128,
        resize="shorter_side",
        resize_size=128,
        interpolation="bicubic",
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    preprocessor = ImagePreprocessor(settings, LIMITS)
    texts = b"".join(png_chunk(b"zTXt", b"k%d\0\0" % index + zlib.compress(bytes(2**20 - 10), 9)) for index in range(3))
    buffer = BytesIO()
    Image.new("RGB", (128, 128)).save(buffer, "JPEG", progressive=True)
    jpeg = buffer.getvalue()
    scan = jpeg[jpeg.rindex(START_OF_SCAN) : -2]
    files = {
        "texts": small_png(16, 16, texts),
        "chunks": small_png(16, 16, png_chunk(b"teSt", b"") * 330),
        "strip": small_png(16, 128),
        "scans": jpeg[:-2] + scan * min(90, (4000 - len(jpeg)) // len(scan)) + jpeg[-2:],
    }
    for name, data in files.items():
        assert len(data) <= 4096, name
        times_s = []
        for _ in range(3):
            began = time.thread_time()  # of the event loop alone: what other threads do is not counted
            [prepared] = await preprocessor.prepare_batch([data], fields=["images[0]"])
            times_s.append(time.thread_time() - began)
        assert prepared.pixel_values.shape == (3, 128, 128)
        assert min(times_s) < 0.05, name


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def small_png(width: int, height: int, chunks: bytes = b"") -> bytes:
    rows = (b"\0" + bytes(3 * width)) * height
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunks + png_chunk(b"IDAT", zlib.compress(rows, 9)) + png_chunk(b"IEND", b"")
