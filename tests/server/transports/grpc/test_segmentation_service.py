"""Segments that are pointed at: found in the pixels of the caller's image, embedded once, and answered together."""

import asyncio
from io import BytesIO

import grpc
import numpy as np
import pytest
import tiny_segmenter
from PIL import Image
from rpc_failures import failure_of
from typer.testing import CliRunner
from waiting import until

from headway.v1 import common_pb2
from headway.v1 import image_service_pb2 as images_pb
from headway.v1 import image_service_pb2_grpc as images_grpc
from headway.v1 import segmentation_service_pb2 as pb
from headway.v1 import segmentation_service_pb2_grpc as pb_grpc
from headway_client import AsyncClient, Client, InvalidArgumentError, SegmentPrompt
from headway_client.cli import app
from headway_server.observers import Observer


class Batches(Observer):
    """Counts runs, and what they computed."""

    def __init__(self):
        self.sizes = []

    def batch_finished(self, event):
        self.sizes.append(event.num_items)


@pytest.fixture(scope="module")
def segmenter_store(tmp_path_factory):
    store = tmp_path_factory.mktemp("segmenters")
    tiny_segmenter.write_segmenter_bundle(store)
    return store


@pytest.fixture
async def batches():
    return Batches()


@pytest.fixture
async def segmenting(serve, segmenter_store, batches):
    async with serve(segmenter_store, observer=batches) as serving:
        yield serving


def stub(serving):
    return pb_grpc.SegmentationServiceStub(serving.channel)


def squares(colour="red", size=(80, 40)) -> bytes:
    """A grey image whose left half is of a colour, and whose upper right quarter is white."""
    width, height = size
    image = Image.new("RGB", size, "grey")
    image.paste(colour, (0, 0, width // 2, height))
    image.paste("white", (width // 2, 0, width, height // 2))
    return encode(image)


def encode(image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def at(*places, box=None, outside=()) -> pb.SegmentPrompt:
    points = [pb.PromptPoint(x=x, y=y) for x, y in places]
    points += [pb.PromptPoint(x=x, y=y, outside=True) for x, y in outside]
    sides = None if box is None else common_pb2.Box(left=box[0], top=box[1], right=box[2], bottom=box[3])
    return pb.SegmentPrompt(points=points, box=sides)


def pixels(mask) -> np.ndarray:
    inside = np.arange(len(mask.counts)) % 2 == 1
    return np.repeat(inside, mask.counts).reshape(mask.width, mask.height).T


def left_half(height=40, width=80):
    return np.arange(width) < np.full((height, 1), width // 2)


async def test_a_mask_has_the_pixels_of_the_callers_image(segmenting):
    request = pb.SegmentImageRequest(image=squares(), prompts=[at((10, 30)), at((70, 5)), at(box=(45, 25, 80, 40))])
    answer = await stub(segmenting).SegmentImage(request)
    assert [len(result.masks) for result in answer.results] == [3, 3, 3]
    first = answer.results[0].masks[0]
    np.testing.assert_array_equal(pixels(first), left_half())
    assert (first.area, first.width, first.height) == (1600, 80, 40)
    assert (first.box.left, first.box.top, first.box.right, first.box.bottom) == (0, 0, 40, 40)
    assert first.predicted_iou == pytest.approx(0.9)
    promised = [mask.predicted_iou for mask in answer.results[0].masks]
    assert promised == sorted(promised, reverse=True)
    white, grey = answer.results[1].masks[0], answer.results[2].masks[1]
    assert (white.box.left, white.box.top, white.box.right, white.box.bottom) == (40, 0, 80, 20)
    # At a box the mask of what means one thing comes first, however sure the model is of it, and two of the others.
    assert [mask.predicted_iou for mask in answer.results[2].masks] == pytest.approx([0.8, 0.9, 0.6])
    assert (grey.box.left, grey.box.top, grey.box.right, grey.box.bottom) == (40, 20, 80, 40)
    everything, nothing = answer.results[0].masks[1:]
    assert (everything.area, list(everything.counts)) == (3200, [0, 3200])
    assert (nothing.area, list(nothing.counts), nothing.box) == (0, [3200], common_pb2.Box())
    assert answer.model.name == "cells"


async def test_a_png_shows_the_same_mask(segmenting):
    request = pb.SegmentImageRequest(
        image=squares(), prompts=[at((10, 30))], max_mask_count=1, mask_format=pb.MASK_FORMAT_PNG
    )
    [mask] = (await stub(segmenting).SegmentImage(request)).results[0].masks
    assert not mask.counts
    np.testing.assert_array_equal(np.asarray(Image.open(BytesIO(mask.png))), left_half())


async def test_prompts_of_several_callers_and_images_share_runs_of_the_decoder(serve, segmenter_store, batches):
    async with serve(segmenter_store, observer=batches, batching={"max_batch_prompts": 64}) as serving:
        colours = ("red", "green", "blue", "black", "navy", "maroon")

        async def ask(colour):
            prompts = [at((10, 30)), at((70, 5)), at((10, 10), (70, 5))]
            request = pb.SegmentImageRequest(image=squares(colour), prompts=prompts, max_mask_count=1)
            return (await stub(serving).SegmentImage(request)).results

        for results in await asyncio.gather(*map(ask, colours)):
            np.testing.assert_array_equal(pixels(results[0].masks[0]), left_half())
            assert results[1].masks[0].area == pytest.approx(800, rel=0.1)
            assert results[2].masks[0].area == 1600, "the first part's mask goes into the answer to both"
        batches.sizes.clear()
        for results in await asyncio.gather(
            *map(ask, colours)
        ):  # the images are known now, and all prompts come at once
            np.testing.assert_array_equal(pixels(results[0].masks[0]), left_half())
        assert sum(batches.sizes) == 6 * 4
        assert max(batches.sizes) > 3, f"no run had prompts of two callers: {batches.sizes}"


async def test_an_image_is_embedded_once_whoever_sends_it(segmenting, batches):
    request = images_pb.PrepareImageRequest(images=[squares()], model="cells")
    prepared = await images_grpc.ImageServiceStub(segmenting.channel).PrepareImage(request)
    assert batches.sizes == [1]
    by_id = pb.SegmentImageRequest(image_id=prepared.results[0].image_id, prompts=[at((10, 30))], max_mask_count=1)
    answer = await stub(segmenting).SegmentImage(by_id)
    assert batches.sizes == [1, 1], "the decoder's run alone is added"
    again = await stub(segmenting).SegmentImage(pb.SegmentImageRequest(image=squares(), prompts=by_id.prompts))
    assert batches.sizes == [1, 1, 1]
    assert answer.results[0].masks[0] == again.results[0].masks[0]
    [cache] = segmenting.host.models[0].usage().caches
    assert (cache.name, cache.num_hits, cache.num_misses) == ("image_embeddings", 2, 1)


async def test_everything_is_found_once_each_and_the_best_first(segmenting):
    request = pb.SegmentEverythingRequest(image=squares(), points_per_side=8, min_predicted_iou=0.85)
    *found, last = [response async for response in stub(segmenting).SegmentEverything(request)]
    boxes = {(box.left, box.top, box.right, box.bottom) for box in (response.mask.box for response in found)}
    assert len(found) == 3
    assert boxes == {(0, 0, 40, 40), (40, 0, 80, 20), (40, 20, 80, 40)}
    assert not last.HasField("mask")
    assert last.model.name == "cells"


async def test_clicks_of_a_stream_improve_the_last_answer(segmenting, batches):
    async def clicks():
        yield pb.SegmentInteractivelyRequest(image=squares())
        yield pb.SegmentInteractivelyRequest(points=at((10, 30)).points, max_mask_count=1)
        yield pb.SegmentInteractivelyRequest(points=at((70, 5)).points)
        yield pb.SegmentInteractivelyRequest(points=at((70, 5)).points, restart=True, max_mask_count=1)

    answers = [answer async for answer in stub(segmenting).SegmentInteractively(clicks())]
    assert [len(answer.masks) for answer in answers] == [0, 1, 1, 1]
    assert all((answer.width, answer.height) == (80, 40) for answer in answers)
    np.testing.assert_array_equal(pixels(answers[1].masks[0]), left_half())
    assert [answer.masks[0].area for answer in answers[1:]] == [1600, 1600, pytest.approx(800, rel=0.1)]
    assert answers[2].masks[0].predicted_iou == pytest.approx(0.8), "the mask of several parts"
    assert batches.sizes == [1] * 4
    assert segmenting.host.models[0]._embeddings.num_admitted == 0, "a stream that has ended holds no embedding"


BAD = [
    ({"prompts": []}, "prompts", "is empty; give 1 to 256"),
    ({"prompts": [at((1, 1))] * 257}, "prompts", "has 257 elements, the limit is 256"),
    ({"prompts": [at((1, 1))] * 10_000}, "prompts.points", "to more than 8192; send several calls"),
    ({"prompts": [at((1, 1)), at()]}, "prompts[1]", "has neither points nor a box"),
    ({"prompts": [at(*[(1, 1)] * 65)]}, "prompts[0].points", "has 65 elements, the limit is 64"),
    ({"prompts": [at(outside=[(1, 1)])]}, "prompts[0].points", "are all background"),
    ({"prompts": [at((81, 5))]}, "prompts[0].points[0]", "is (81, 5), outside of the image: x goes from 0 to 80"),
    ({"prompts": [at((float("nan"), 5))]}, "prompts[0].points[0]", "outside of the image"),
    ({"prompts": [at(box=(10, 10, 10, 20))]}, "prompts[0].box", "is (10, 10, 10, 20); its sides are left, top"),
    ({"prompts": [at(box=(-1, 0, 10, 20))]}, "prompts[0].box", "within the image of 80 x 40 pixels"),
    ({"prompts": [at(box=(30, 0, 10, 20))]}, "prompts[0].box", "left before right and top before bottom"),
    ({"prompts": [at(box=(0, 0, 0, 0))]}, "prompts[0].box", "left before right and top before bottom"),
    ({"prompts": [at(box=(0, float("nan"), 10, 20))]}, "prompts[0].box", "is (0, nan, 10, 20)"),
    ({"prompts": [at(box=(0, 0, float("inf"), 20))]}, "prompts[0].box", "is (0, 0, inf, 20)"),
    ({"prompts": [at((float("-inf"), 5))]}, "prompts[0].points[0]", "is (-inf, 5), outside of the image"),
    ({"prompts": [at((1, 1))], "max_mask_count": -1}, "max_mask_count", "is -1; it goes from 1 to 3"),
    ({"prompts": [at((1, 1))], "max_mask_count": 4}, "max_mask_count", "is 4; it goes from 1 to 3"),
    (
        {"prompts": [at((1, 1))], "mask_format": 9},
        "mask_format",
        "is 9; must be one of MASK_FORMAT_RUNS (1), MASK",
    ),
    ({"prompts": [at((1, 1))], "image": b""}, "image", "is empty"),
    ({"prompts": [at((1, 1))], "image": b"GIF89a"}, "image", "is not an image"),
    ({"prompts": [at((1, 1))], "image_id": "x"}, "image_id", "is set together with image"),
]


async def test_what_cannot_be_answered_is_refused_with_a_sentence(segmenting):
    for fields, field, sentence in BAD:
        request = pb.SegmentImageRequest(**({"image": squares()} | fields))
        failure = await failure_of(stub(segmenting).SegmentImage(request))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field), failure.message
        assert sentence in failure.message
    large = pb.SegmentImageRequest(image=squares(size=(4000, 4000)), prompts=[at((1, 1))] * 30)
    failure = await failure_of(stub(segmenting).SegmentImage(large))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompts")
    assert "ask for 90 masks of 4000 x 4000 pixels" in failure.message
    for fields, field in (
        ({"points_per_side": 33}, "points_per_side"),
        ({"points_per_side": -1}, "points_per_side"),
        ({"max_overlap": 2}, "max_overlap"),
        ({"min_stability": -0.1}, "min_stability"),
        ({"min_predicted_iou": float("nan")}, "min_predicted_iou"),
        ({"mask_format": 9}, "mask_format"),
    ):
        request = pb.SegmentEverythingRequest(image=squares(), **fields)
        failure = await failure_of(stub(segmenting).SegmentEverything(request).read())
        assert failure.field == field


def click(*places, image=b"", outside=(), **fields) -> pb.SegmentInteractivelyRequest:
    return pb.SegmentInteractivelyRequest(image=image, points=at(*places, outside=outside).points, **fields)


BAD_CLICKS = [
    ([click((10, 30))], "image", "is empty"),
    ([click((10, 30), image=squares()), click((10, 41))], "prompt.points[0]", "is (10, 41), outside"),
    ([click(image=squares()), click(outside=[(1, 1)])], "prompt.points", "are all background"),
    ([click(image=squares()), click(box=at(box=(5, 5, 5, 9)).box)], "prompt.box", "is (5, 5, 5, 9)"),
    ([click(*[(1, 1)] * 64, image=squares()), click((1, 1))], "prompt.points", "has 65 elements, the limit is 64"),
    ([click(image=squares()), click((1, 1), model="cells")], "model", "is set without an image"),
    ([click(image=squares()), click((1, 1), max_mask_count=4)], "max_mask_count", "is 4; it goes from 1 to 3"),
]


@pytest.mark.parametrize(("requests", "field", "sentence"), BAD_CLICKS)
async def test_a_click_that_cannot_be_answered_ends_its_stream_with_a_sentence(segmenting, requests, field, sentence):
    async def clicks():
        for request in requests:
            yield request

    stream = stub(segmenting).SegmentInteractively(clicks())
    for _ in requests[1:]:
        await stream.read()
    failure = await failure_of(stream.read())
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field), failure.message
    assert sentence in failure.message
    assert segmenting.host.models[0]._embeddings.num_admitted == 0


async def test_an_id_that_has_expired_is_not_found_by_every_call(serve, segmenter_store):
    async with serve(segmenter_store, image_ttl=0.05) as serving:
        request = images_pb.PrepareImageRequest(images=[squares()])
        [prepared] = (await images_grpc.ImageServiceStub(serving.channel).PrepareImage(request)).results
        named = {"image_id": prepared.image_id}
        await until(lambda: not serving.host.images.usage().num_bytes)

        async def clicks():
            yield pb.SegmentInteractivelyRequest(**named)

        for call in (
            stub(serving).SegmentImage(pb.SegmentImageRequest(**named, prompts=[at((1, 1))])),
            stub(serving).SegmentEverything(pb.SegmentEverythingRequest(**named)).read(),
            stub(serving).SegmentInteractively(clicks()).read(),
        ):
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "IMAGE_NOT_FOUND")
            assert "image_id: no image has this id; ids expire 0.05 s after their last use" in failure.message


async def test_streams_hold_no_more_embeddings_than_the_limit(serve, segmenter_store, monkeypatch):
    async with serve(segmenter_store) as serving:
        model = serving.host.models[0]
        monkeypatch.setattr(model._embeddings, "_max_bytes", 1000)  # of 768 bytes each
        go_on = asyncio.Event()

        async def wait():
            yield pb.SegmentInteractivelyRequest(image=squares())
            await go_on.wait()

        first = stub(serving).SegmentInteractively(wait())
        await first.read()
        failure = await failure_of(stub(serving).SegmentInteractively(wait()).read())
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        model.max_idle_s = 0.05
        third = stub(serving).SegmentInteractively(wait())
        first.cancel()
        await until(lambda: not model._embeddings.num_admitted)
        await third.read()
        failure = await failure_of(third.read())
        assert (failure.code, model._embeddings.num_admitted) == (grpc.StatusCode.DEADLINE_EXCEEDED, 0)
        assert "no request came for 0.05 s" in failure.message
        go_on.set()


async def test_both_clients_and_the_command_cut_out_the_same(serve, segmenter_store, tmp_path):
    async with serve(segmenter_store) as serving:
        address = f"127.0.0.1:{serving.port}"
        async with AsyncClient(address) as client:
            by_prompt = await client.segment_image(
                squares(), prompts=SegmentPrompt(points=[(10, 30)]), max_mask_count=1
            )
            async with client.segment_everything(squares(), points_per_side=4, min_predicted_iou=0.85) as stream:
                areas = [mask.area async for mask in stream]
            assert len(areas) == len(stream.answer) == 3
            async with client.segment_interactively(squares(), max_mask_count=1) as session:
                clicked = await session.add(points=[(10, 30)])
                with pytest.raises(InvalidArgumentError, match="outside of the image"):
                    await session.add(outside_points=[(10, 100)])
        mask = by_prompt[0].masks[0]
        assert clicked[0] == mask
        np.testing.assert_array_equal(mask.to_numpy(), left_half())
        assert mask.to_coco() == {"size": [40, 80], "counts": [0, 1600, 1600]}
        await asyncio.to_thread(_call_and_command, address, mask, tmp_path)


def _call_and_command(address, mask, folder):
    with Client(address) as client:
        prompts = [SegmentPrompt(points=[(10, 30)]), SegmentPrompt(box=(45, 25, 80, 40))]
        answer = client.segment_image(squares(), prompts=prompts, mask_format="png", max_mask_count=1)
        np.testing.assert_array_equal(answer[0].masks[0].to_numpy(), mask.to_numpy())
        with client.segment_interactively(squares(), max_mask_count=1) as session:
            assert session.add(points=[(10, 30)])[0] == mask
            assert session.add(points=[(70, 5)], restart=True)[0].area < mask.area
        with client.segment_everything(squares(), points_per_side=4, min_predicted_iou=0.85) as stream:
            assert mask in list(stream)
    (folder / "photo.png").write_bytes(squares())
    files = {name: folder / f"{name}.png" for name in ("output", "overlay")}
    run = ["segment", str(folder / "photo.png"), "--server", address]
    shown = [text for name, file in files.items() for text in (f"--{name}", str(file))]
    ended = CliRunner().invoke(app, [*run, "--point", "10,30", *shown])
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.splitlines()[1].split() == ["0.900", "1.000", "1600", "0,0,40,40"]
    np.testing.assert_array_equal(np.asarray(Image.open(files["output"])) == 255, left_half())
    overlay = np.asarray(Image.open(files["overlay"]))
    assert tuple(overlay[5, 70]) == (255, 255, 255)
    assert tuple(overlay[5, 5]) != (255, 0, 0)
    for arguments, said in (
        ([], "give points or a box, or --everything"),
        (["--point", "1"], "is not 2 numbers, such as 120,80"),
        (["--point", "1,1", "--points-per-side", "3"], "--points-per-side is for --everything alone"),
        (["--point", "99,1"], "is (99, 1), outside of the image"),
    ):
        ended = CliRunner().invoke(app, [*run, *arguments])
        assert ended.exit_code in (1, 2)
        assert said in " ".join(ended.stderr.replace("│", " ").split())
