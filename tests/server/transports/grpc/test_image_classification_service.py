"""ImageClassificationService through a real channel."""

from io import BytesIO

import grpc
import pytest
from PIL import Image
from rpc_failures import failure_of

from headway.v1 import image_classification_service_pb2 as pb


def encoded(colour: str, size: tuple[int, int] = (20, 16), image_format: str = "PNG") -> bytes:
    buffer = BytesIO()
    Image.new("RGB", size, colour).save(buffer, image_format)
    return buffer.getvalue()


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
async def test_images_of_every_format_get_their_labels(serving, image_format):
    images = [encoded(colour, image_format=image_format) for colour in ("red", "lime", "blue")]
    response = await serving.images.ClassifyImage(pb.ClassifyImageRequest(images=images, top_k=1))
    assert [[scored.label for scored in result.labels] for result in response.results] == [["red"], ["green"], ["blue"]]
    assert {(result.width, result.height) for result in response.results} == {(20, 16)}
    assert response.model.name == "colours"


async def test_one_bad_image_fails_the_call_and_is_named(serving):
    whole = encoded("red", (200, 200), "JPEG")
    for bad, word in (
        (b"", "empty"),
        (whole[: len(whole) // 2], "truncated"),
        (b"GIF89a but not really", "damaged"),
        (b"%PDF-1.7 nothing to see", "not an image"),
    ):
        request = pb.ClassifyImageRequest(images=[whole, whole, bad])
        failure = await failure_of(serving.images.ClassifyImage(request))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "images[2]")
        assert word in failure.message


@pytest.mark.parametrize("count", [0, 65])
async def test_a_wrong_number_of_images_names_the_limit(serving, count):
    failure = await failure_of(serving.images.ClassifyImage(pb.ClassifyImageRequest(images=[encoded("red")] * count)))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "images")
    assert "64" in failure.message


async def test_limits_on_bytes_and_pixels_are_those_of_the_settings(serve, classifier_store):
    async with serve(classifier_store, max_image_mib=0.001, max_image_megapixels=0.01) as serving:
        too_long = encoded("red", (30, 30), "BMP")
        failure = await failure_of(serving.images.ClassifyImage(pb.ClassifyImageRequest(images=[too_long])))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "images[0]")
        assert f"{len(too_long)} bytes, the limit is 1048" in failure.message
        too_large = encoded("red", (101, 100))
        failure = await failure_of(serving.images.ClassifyImage(pb.ClassifyImageRequest(images=[too_large])))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "101 x 100 = 10100 pixels, the limit is 10000" in failure.message


async def test_top_k_out_of_range_names_the_range(serving):
    request = pb.ClassifyImageRequest(images=[encoded("red")], top_k=4)
    failure = await failure_of(serving.images.ClassifyImage(request))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "top_k")


async def test_a_text_model_is_refused(serving):
    failure = await failure_of(
        serving.images.ClassifyImage(pb.ClassifyImageRequest(model="topics", images=[encoded("red")]))
    )
    assert failure.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "ask colours" in failure.message
