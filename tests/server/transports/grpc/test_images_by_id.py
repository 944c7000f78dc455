"""Images that are sent once: named by id, computed once a model, forgotten in time, and apart for each API key."""

import asyncio
from importlib import import_module
from io import BytesIO
from pathlib import Path

import grpc
import pytest
import tiny_bundles
from PIL import Image
from rpc_failures import failure_of
from waiting import until

import headway.v1
from headway.v1 import embedding_service_pb2 as embedding_pb
from headway.v1 import image_classification_service_pb2 as images_pb
from headway.v1 import image_service_pb2 as pb
from headway.v1 import image_service_pb2_grpc as pb_grpc
from headway.v1 import model_service_pb2 as models_pb
from headway_server import keys
from headway_server.observers import Observer


class Batches(Observer):
    """Counts images that models have computed."""

    def __init__(self) -> None:
        self.num_items = 0

    def batch_finished(self, event):
        self.num_items += event.num_items


def encoded(colour: str, size: tuple[int, int] = (20, 16)) -> bytes:
    file = BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


async def prepare(serving, *images: bytes, metadata=(), **fields) -> list[str]:
    request = pb.PrepareImageRequest(images=images, **fields)
    answer = await pb_grpc.ImageServiceStub(serving.channel).PrepareImage(request, metadata=metadata)
    return [result.image_id for result in answer.results]


def classify(serving, *image_ids: str, metadata=(), **fields):
    return serving.images.ClassifyImage(
        images_pb.ClassifyImageRequest(image_ids=image_ids, **fields), metadata=metadata
    )


def test_every_call_that_takes_images_takes_ids_in_their_place():
    found = {}
    for module in Path(headway.v1.__path__[0]).glob("*_service_pb2.py"):
        for service in import_module(f"headway.v1.{module.stem}").DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                fields = method.input_type.fields_by_name
                images = [name for name in fields if name.removeprefix("query_") in ("image", "images")]
                found |= {(method.name, name): {f"{name}_id", f"{name[:-1]}_ids"} & {*fields} for name in images}
    assert not found.pop(("PrepareImage", "images"))
    assert {"ClassifyImage", "EmbedImage", "RankTexts", "CaptionImage", "SegmentImage", "InspectImage"} < {
        name for name, _ in found
    }
    assert all(found.values()), found


async def test_an_image_is_sent_once_and_computed_once(serve, classifier_store):
    batches = Batches()
    async with serve(classifier_store, observer=batches) as serving:
        red, blue = encoded("red"), encoded("blue", (30, 40))
        ids = await prepare(serving, red, blue)
        assert await prepare(serving, blue, red) == ids[::-1], "the same image has the same id"
        assert batches.num_items == 0
        for _ in range(2):
            answer = await classify(serving, *ids, top_k=1)
            found = [(result.labels[0].label, result.width, result.height) for result in answer.results]
            assert found == [("red", 20, 16), ("blue", 30, 40)]
        assert answer.timings.inference.ToTimedelta().total_seconds() == 0
        again = await serving.images.ClassifyImage(images_pb.ClassifyImageRequest(images=[red, blue, encoded("lime")]))
        assert [result.labels[0].label for result in again.results] == ["red", "blue", "green"]
        vector = await serving.embeddings.EmbedImage(embedding_pb.EmbedImageRequest(image_ids=ids[:1], normalize=False))
        assert vector.results[0].width == 20
        assert batches.num_items == 3, "bytes that were computed before are not computed again"
        [cache] = serving.host.models[0].usage().caches
        assert (cache.name, cache.num_hits, cache.num_misses) == ("image_outputs", 5, 3)
        assert 3 * 500 < cache.num_bytes < 3 * 700
        assert serving.host.images.usage()[1:] == (len(red) + len(blue), 5, 0)


async def test_a_model_that_is_named_reads_images_as_they_are_prepared(serve, classifier_store):
    batches = Batches()
    async with serve(classifier_store, observer=batches) as serving:
        ids = await prepare(serving, encoded("red"), model="colours")
        assert batches.num_items == 1
        assert (await classify(serving, *ids, top_k=1)).results[0].labels[0].label == "red"
        assert batches.num_items == 1
        failure = await failure_of(prepare(serving, encoded("red"), model="topics"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_TASK")


async def test_an_id_expires_and_says_so(serve, classifier_store):
    async with serve(classifier_store, image_ttl=0.2) as serving:
        [image_id] = await prepare(serving, encoded("red"))
        await classify(serving, image_id)
        await until(lambda: serving.host.images.usage().num_bytes == 0)
        failure = await failure_of(classify(serving, image_id))
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND")
        assert "ids expire 0.2 s after their last use" in failure.message
        assert "send the image to PrepareImage again" in failure.message
        await until(lambda: serving.host.models[0].usage().caches[0].num_bytes == 0)  # kept a little later


async def test_newer_images_take_the_room_of_those_unused_for_longest(serve, classifier_store):
    noise = [Image.effect_noise((900, 900), 200 + number) for number in range(3)]
    files = []
    for image in noise:
        file = BytesIO()
        image.save(file, "PNG")
        files.append(file.getvalue())
    assert all(400_000 < len(one) < 1_000_000 for one in files)
    async with serve(classifier_store, max_prepared_mib=1) as serving:
        first, second = await prepare(serving, files[0]), await prepare(serving, files[1])
        failure = await failure_of(classify(serving, *first))
        assert failure.reason == "IMAGE_NOT_FOUND"
        await classify(serving, *second)
        failure = await failure_of(prepare(serving, *files))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "images")
        assert "this server keeps 1048576 (--max-prepared-mib)" in failure.message


async def test_an_id_is_worth_nothing_with_another_key(serve, classifier_store, tmp_path, capsys):
    file, headers = tmp_path / "access.toml", []
    for name in ("first", "second"):
        keys.main(["create", name, "--access-file", str(file), "--scope", "model:*"])
        headers.append([("authorization", f"Bearer {capsys.readouterr().out.splitlines()[-1]}")])
    batches = Batches()
    async with serve(classifier_store, observer=batches, access_file=file) as serving:
        own = [await prepare(serving, encoded("red"), metadata=header) for header in headers]
        assert own[0] != own[1]
        await classify(serving, *own[0], metadata=headers[0])
        failure = await failure_of(classify(serving, *own[0], metadata=headers[1]))
        assert failure.reason == "IMAGE_NOT_FOUND"
        await classify(serving, *own[1], metadata=headers[1])
        assert batches.num_items == 2, "nobody learns by the time of an answer what another has sent"


async def test_a_new_version_does_not_answer_with_what_the_old_one_made(serve, tmp_path):
    tiny_bundles.write_colour_bundle(tmp_path)
    batches = Batches()
    async with serve(tmp_path, observer=batches) as serving:
        [image_id] = await prepare(serving, encoded("red"), model="colours")
        tiny_bundles.write_colour_bundle(tmp_path, version="2")
        await serving.models.LoadModel(models_pb.LoadModelRequest(model="colours", model_version="2"))
        answer = await classify(serving, image_id)
        assert (answer.model.version, batches.num_items) == ("2", 2)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"images": [b"x"], "image_ids": ["a"]}, "image_ids", "is set together with images; give one of them"),
        ({"image_ids": ["a"] * 65}, "image_ids", "has 65 elements, the limit is 64"),
    ],
)
async def test_images_that_are_named_twice_or_too_often_are_refused(serving, fields, field, message):
    failure = await failure_of(serving.images.ClassifyImage(images_pb.ClassifyImageRequest(**fields)))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert message in failure.message


async def test_ids_that_nobody_was_given_are_not_found(serving):
    for image_id in ("a", "0" * 32, "é" * 32, "x" * 100_000):
        failure = await failure_of(classify(serving, image_id))
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND")
        assert len(failure.message) < 300


@pytest.mark.parametrize("images", [[], [b"no picture"], [b""]])
async def test_what_is_no_image_is_not_kept(serving, images):
    failure = await failure_of(prepare(serving, *images))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert serving.host.images.usage().num_bytes == 0


async def test_a_server_that_keeps_nothing_computes_every_image(serve, classifier_store):
    batches = Batches()
    settings = {"max_image_outputs_mib": 0, "max_prepared_mib": 0}
    async with serve(classifier_store, observer=batches, **settings) as serving:
        for _ in range(2):
            await serving.images.ClassifyImage(images_pb.ClassifyImageRequest(images=[encoded("red")]))
        assert batches.num_items == 2
        failure = await failure_of(prepare(serving, encoded("red")))
        assert "this server keeps 0 (--max-prepared-mib); send the images with each call" in failure.message


async def test_many_calls_at_once_answer_by_ids_as_by_bytes(serving):
    colours = ["red", "lime", "blue"] * 20
    ids = await prepare(serving, *map(encoded, colours))
    answers = await asyncio.gather(*(classify(serving, image_id, top_k=1) for image_id in ids))
    found = [answer.results[0].labels[0].label for answer in answers]
    assert found == ["red", "green", "blue"] * 20
