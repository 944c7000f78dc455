"""Images that are drawn: by their seeds alone, step by step together with others, and over images."""

import asyncio
import io
import random

import grpc
import numpy as np
import pytest
import tiny_diffusion
from PIL import Image
from rpc_failures import failure_of
from typer.testing import CliRunner

from headway.v1 import image_generation_service_pb2 as pb
from headway.v1 import image_generation_service_pb2_grpc as pb_grpc
from headway.v1 import model_service_pb2
from headway_client import AsyncClient, Client
from headway_client.cli import app
from headway_server.observers import Observer

COLOURS = tuple(tiny_diffusion.COLOURS)


class Steps(Observer):
    """Counts the rows of each step."""

    def __init__(self):
        self.rows = []

    def step_finished(self, event):
        self.rows.append(event.num_rows)


@pytest.fixture
async def steps():
    return Steps()


@pytest.fixture
async def drawing(serve, diffusion_store, steps):
    async with serve(diffusion_store, observer=steps, precision="fp32") as serving:
        yield serving


def stub(serving):
    return pb_grpc.ImageGenerationServiceStub(serving.channel)


def pixels_of(png):
    return np.asarray(Image.open(io.BytesIO(png)))


def encode(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


SAMPLERS = pb.DiffusionSampler.values()[:4]
"""Those of a schedule of the kit."""


def parameters(**fields):
    return pb.DiffusionParameters(**{"step_count": 8, "seed": 1, **fields})


@pytest.mark.parametrize("sampler", SAMPLERS[1:])
async def test_what_is_drawn_has_the_colour_of_its_label(drawing, sampler):
    for number, colour in enumerate(COLOURS):
        request = pb.GenerateImageRequest(prompt=colour.upper(), parameters=parameters(sampler=sampler), image_count=2)
        response = await stub(drawing).GenerateImage(request)
        assert [image.seed for image in response.results] == [1, 2]
        for image in response.results:
            pixels = pixels_of(image.png)
            assert pixels.shape == (8, 8, 3)
            assert (image.width, image.height, image.step_count) == (8, 8, 8)
            assert pixels[3:5, 3:5].mean(axis=(0, 1)).argmax() == number, colour
    assert response.model.name == "squares"
    assert response.timings.inference.nanos > 0


@pytest.fixture(params=["labels", "texts"])
def kind(request, diffusion_store, text_diffusion_store):
    """A store, and prompts that its model draws."""
    if request.param == "labels":
        return diffusion_store, ("", *COLOURS)
    return text_diffusion_store, ("", *tiny_diffusion.TEXTS, "red", "square green green a")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
async def test_an_image_follows_from_its_seed_whatever_its_company(serve, kind, steps, precision):
    store, prompts = kind
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # noqa: T201 (shown where the test fails)
    generator = random.Random(seed)
    requests = [
        pb.GenerateImageRequest(
            prompt=generator.choice(prompts),
            negative_prompt=generator.choice(prompts),
            parameters=pb.DiffusionParameters(
                step_count=generator.randrange(10, 40),  # so that calls overlap, however fast a step is
                guidance_scale=generator.choice((1.0, 2.5)),
                sampler=generator.choice(SAMPLERS),
                seed=generator.randrange(2**64),
            ),
            image_count=generator.randrange(1, 4),
        )
        for _ in range(10)
    ]
    async with serve(store, observer=steps, precision=precision) as drawing:
        alone = [await stub(drawing).GenerateImage(request) for request in requests]
        steps.rows.clear()

        async def later(request):
            await asyncio.sleep(generator.random() / 100)
            return await stub(drawing).GenerateImage(request)

        together = await asyncio.gather(*map(later, requests))
    assert max(steps.rows) > 6
    for one, other in zip(alone, together, strict=True):
        assert [image.png for image in one.results] == [image.png for image in other.results]


async def test_a_text_is_drawn_and_what_is_too_long_is_told_with_its_limit(serve, text_diffusion_store):
    async with serve(text_diffusion_store, precision="fp32") as drawing:
        for number, text in enumerate(tiny_diffusion.TEXTS):
            request = pb.GenerateImageRequest(prompt=text, negative_prompt="", parameters=parameters(), image_count=2)
            for image in (await stub(drawing).GenerateImage(request)).results:
                assert pixels_of(image.png)[3:5, 3:5].mean(axis=(0, 1)).argmax() == number, text
        for field in ("prompt", "negative_prompt"):
            failure = await failure_of(stub(drawing).GenerateImage(pb.GenerateImageRequest(**{field: "red " * 40})))
            assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"{field}: has " in failure.message
            assert "tokens, the model reads at most 12; shorten it" in failure.message
        [model] = (await drawing.models.ListModels(model_service_pb2.ListModelsRequest())).models
        assert (list(model.labels), model.max_input_token_count) == ([], 12)


async def test_the_next_seed_draws_the_next_image(drawing):
    three = await stub(drawing).GenerateImage(
        pb.GenerateImageRequest(prompt="red", parameters=parameters(seed=2**64 - 2), image_count=3)
    )
    assert [image.seed for image in three.results] == [2**64 - 2, 2**64 - 1, 0]
    again = await stub(drawing).GenerateImage(pb.GenerateImageRequest(prompt="red", parameters=parameters(seed=0)))
    assert again.results[0].png == three.results[2].png
    drawn = await stub(drawing).GenerateImage(pb.GenerateImageRequest(prompt="red"))
    assert drawn.results[0].step_count == 20


@pytest.mark.parametrize(("every", "least", "most"), [(1, 1, 40), (10, 0, 4)])  # a slow reader misses steps
async def test_a_stream_tells_of_steps_shows_previews_and_ends_with_the_same_image(drawing, every, least, most):
    asked = {"prompt": "green", "parameters": parameters(step_count=40)}
    messages = [
        message
        async for message in stub(drawing).StreamGenerateImage(
            pb.StreamGenerateImageRequest(**asked, preview_step_count=every)
        )
    ]
    assert {message.step_count for message in messages} == {40}
    made = [message.completed_step_count for message in messages]
    assert made == sorted(made)
    previews = [pixels_of(message.preview_png) for message in messages if message.preview_png]
    assert least <= len(previews) <= most
    assert all(preview.shape == (8, 8, 3) for preview in previews)
    [whole] = (await stub(drawing).GenerateImage(pb.GenerateImageRequest(**asked))).results
    assert messages[-1].result.png == whole.png
    assert messages[-1].model.name == "squares"
    assert not any(message.HasField("result") for message in messages[:-1])


async def test_an_image_is_drawn_over_as_far_as_strength_says(drawing):
    [pixels], _ = tiny_diffusion.draw_squares(1, 5)  # red
    results = {}
    for strength in (0.1, 1.0):
        asked = pb.GenerateImageRequest(
            prompt="blue", image=encode(pixels), parameters=parameters(step_count=20, strength=strength)
        )
        [results[strength]] = (await stub(drawing).GenerateImage(asked)).results
    assert results[0.1].step_count == 2
    assert pixels_of(results[0.1].png)[3:5, 3:5].mean(axis=(0, 1)).argmax() == 0
    assert pixels_of(results[1.0].png)[3:5, 3:5].mean(axis=(0, 1)).argmax() == 2


@pytest.mark.parametrize("size", [(8, 8), (40, 24)])
async def test_pixels_outside_of_the_mask_stay_exactly_as_they_were(drawing, size):
    random_pixels = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    mask = np.zeros(size[::-1], np.uint8)
    mask[: size[1] // 2, size[0] // 4 :] = 255
    asked = pb.GenerateImageRequest(
        prompt="blue", image=encode(random_pixels), mask=encode(mask), parameters=parameters()
    )
    [image] = (await stub(drawing).GenerateImage(asked)).results
    found = pixels_of(image.png)
    assert (image.width, image.height) == size
    np.testing.assert_array_equal(found[mask == 0], random_pixels[mask == 0])
    assert not np.array_equal(found[mask > 0], random_pixels[mask > 0])
    assert (await stub(drawing).GenerateImage(asked)).results[0].png == image.png


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "yellow"}, "prompt: is 'yellow'; this model knows red, green, blue"),
        ({"negative_prompt": "pink"}, "negative_prompt: is 'pink'"),
        ({"image_count": 17}, "image_count: is 17; it goes from 1 to 16"),
        ({"image_count": 0}, "image_count: is 0"),
        ({"parameters": pb.DiffusionParameters(step_count=251)}, "step_count: is 251; it goes from 1 to 250"),
        ({"parameters": pb.DiffusionParameters(guidance_scale=-1)}, "guidance_scale: is -1; it goes from 0 to 30"),
        ({"parameters": pb.DiffusionParameters(guidance_scale=float("nan"))}, "guidance_scale: is nan"),
        ({"parameters": pb.DiffusionParameters(sampler=99)}, "parameters.sampler: is 99"),
        (
            {"parameters": pb.DiffusionParameters(sampler=pb.DIFFUSION_SAMPLER_PNDM)},
            "parameters.sampler: is pndm; this model has ddim, dpm_solver_pp_2m, euler: name one of these",
        ),
        ({"parameters": pb.DiffusionParameters(strength=0.5)}, "strength: is set without an image"),
        ({"mask": b"x"}, "mask: is set without an image"),
        ({"image": b"x"}, "image: is not an image"),
        ({"image": encode(np.zeros((8, 8, 3), np.uint8)), "mask": b"x"}, "mask: is not an image"),
        (
            {"image": encode(np.zeros((8, 8, 3), np.uint8)), "mask": encode(np.zeros((9, 8), np.uint8))},
            "mask: is 8 x 9 pixels, and the image 8 x 8",
        ),
        (
            {"image": encode(np.zeros((8, 8, 3), np.uint8)), "mask": encode(np.zeros((8, 8), np.uint8))},
            "mask: has no white pixel",
        ),
    ],
)
async def test_what_is_out_of_range_is_told_with_its_limit(drawing, fields, said):
    failure = await failure_of(stub(drawing).GenerateImage(pb.GenerateImageRequest(**fields)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert said in failure.message


async def test_more_images_than_the_queue_holds_are_refused_and_a_deadline_is_kept(serve, diffusion_store):
    async with serve(diffusion_store, batching={"max_waiting_images": 64}) as drawing:
        long = pb.GenerateImageRequest(prompt="red", parameters=parameters(step_count=250), image_count=16)

        async def ask():
            return await stub(drawing).GenerateImage(long)

        tasks = [asyncio.create_task(ask()) for _ in range(5)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [task.exception().code() for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        failure = await failure_of(stub(drawing).GenerateImage(long, timeout=0.05))
        assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
        short = pb.GenerateImageRequest(prompt="red", parameters=parameters())
        assert len((await stub(drawing).GenerateImage(short)).results) == 1


async def test_both_clients_and_the_command_line_draw_the_same(drawing, tmp_path):
    asked = {"step_count": 6, "seed": 9, "sampler": "euler", "guidance_scale": 2.0}
    address = f"127.0.0.1:{drawing.port}"
    async with AsyncClient(address) as client:
        [image] = (await client.generate_image("blue", **asked)).results
        async with client.stream_generate_image("blue", **asked, preview_step_count=2) as stream:
            parts = [part async for part in stream]
        assert stream.answer.results[0] == image
        assert parts[-1].completed_step_count == 6
        [model] = (await client.list_models()).models
        assert (model.task, model.labels) == ("image_generation", COLOURS)

    def call():
        with Client(address) as client:
            assert client.generate_image("blue", **asked).results[0] == image
        flags = ["--step-count", "6", "--seed", "9", "--sampler", "euler", "--guidance-scale", "2", "--server", address]
        for more in ((), ("--progress", "2")):
            file = tmp_path / "blue.png"
            result = CliRunner().invoke(app, ["generate-image", "blue", "-o", str(file), *flags, *more])
            assert result.exit_code == 0, result.output
            assert file.read_bytes() == image.png
            assert "8 x 8" in result.output
        result = CliRunner().invoke(
            app, ["generate-image", "blue", "-o", str(tmp_path / "x.png"), "--image-count", "2", *flags]
        )
        assert result.exit_code == 0, result.output
        assert (tmp_path / "x-1.png").read_bytes() == image.png
        assert (tmp_path / "x-2.png").is_file()

    await asyncio.to_thread(call)


async def test_models_tell_what_they_draw(drawing):
    [model] = (await drawing.models.ListModels(model_service_pb2.ListModelsRequest())).models
    assert model.task == "image_generation"
    assert list(model.labels) == list(COLOURS)
