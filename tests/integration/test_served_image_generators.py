"""Pipelines of diffusers, exported by one command and served, against the pipelines themselves."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from headway_client import Client
from headway_export.cli import app
from headway_server.bundles import Precision, open_bundle
from headway_server.diffusion import draw_noise

from .conftest import serve

diffusers = pytest.importorskip("diffusers", reason="needs diffusers, which is no library of the distributions")
import tiny_diffusers  # noqa: E402 (it needs diffusers)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers")
SAMPLERS = {
    "ddim": ("DDIMScheduler", {}),
    "euler": ("EulerDiscreteScheduler", {"timestep_spacing": "leading"}),
    "dpm_solver_pp_2m": ("DPMSolverMultistepScheduler", {"timestep_spacing": "leading"}),
}
SHAPE = (tiny_diffusers.LATENT_CHANNELS, tiny_diffusers.SIDE, tiny_diffusers.SIDE)
PIXELS = tiny_diffusers.SIDE << tiny_diffusers.HALVINGS
LEVELS = 2


MODELS = {
    "stable-diffusion": tiny_diffusers.write_stable_diffusion,
    "dit": tiny_diffusers.write_dit,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipelines")
    return {name: write(root / name) for name, write in MODELS.items()}


@pytest.fixture(scope="module")
def folder(folders):
    return folders["stable-diffusion"]


@pytest.fixture(scope="module")
def store(folders, tmp_path_factory):
    made = tmp_path_factory.mktemp("store")
    for name, folder in folders.items():
        more = ("--precision", "fp32", "--precision", "int8") if name == "stable-diffusion" else ()
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(made), *more])
        assert result.exit_code == 0, f"{name}: {result.output}"
    return made


@pytest.fixture(scope="module")
def client(store, tmp_path_factory):
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


@pytest.fixture(scope="module")
def pipeline(folder):
    read = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    read.set_progress_bar_config(disable=True)
    return read


def with_sampler(pipeline, sampler, kind=None):
    """The pipeline, or another of the same parts, with a scheduler at the folder's times."""
    name, settings = SAMPLERS[sampler]
    scheduler = getattr(diffusers, name).from_config(pipeline.scheduler.config, **settings)
    made = (kind or diffusers.StableDiffusionPipeline)(
        **{**pipeline.components, "scheduler": scheduler}, requires_safety_checker=False
    )
    made.set_progress_bar_config(disable=True)
    return made


def noise_of(seed):
    return torch.from_numpy(draw_noise(seed, SHAPE))[None]


def levels(image):
    return np.asarray(image.convert("RGB")).astype(int)


def served(answer):
    return levels(Image.open(io.BytesIO(answer.png)))


def generate(client, prompt, model="stable-diffusion", **options):
    return client.generate_image(prompt, model=model, **options)


def picture():
    return Image.fromarray(np.random.default_rng(5).integers(0, 256, (PIXELS, PIXELS, 3)).astype(np.uint8))


def file_of(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("call", [(7, 7.5, "a cat"), (20, 7.5, ""), (4, 1.0, "")], ids=["negative", "", "free"])
def test_an_image_is_that_of_the_pipeline(client, pipeline, sampler, call):
    prompt, (steps, guidance, negative) = "A red cat", call
    exact = with_sampler(pipeline, sampler)(
        prompt,
        negative_prompt=negative,
        num_inference_steps=steps,
        guidance_scale=guidance,
        latents=noise_of(11),
    ).images[0]
    [found] = generate(
        client, prompt, negative_prompt=negative, step_count=steps, guidance_scale=guidance, sampler=sampler, seed=11
    )
    assert levels(exact).std() > 5
    assert np.abs(served(found) - levels(exact)).max() <= LEVELS


def test_the_scheduler_of_the_folder_is_the_default(client):
    asked = {"step_count": 5, "seed": 3}
    [plain] = generate(client, "cat", **asked)
    [named] = generate(client, "cat", **asked, sampler="ddim")
    [other] = generate(client, "cat", **asked, sampler="euler")
    assert plain.png == named.png
    assert other.png != plain.png


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_edited_image_is_that_of_the_pipeline(client, pipeline, sampler, monkeypatch):
    kind = diffusers.StableDiffusionImg2ImgPipeline
    monkeypatch.setitem(kind.prepare_latents.__globals__, "randn_tensor", lambda *_, **__: noise_of(2))
    exact = with_sampler(pipeline, sampler, kind)(
        "red", image=picture(), strength=0.5, num_inference_steps=10, guidance_scale=3.0
    ).images[0]
    [found] = generate(
        client, "red", image=file_of(picture()), strength=0.5, step_count=10, guidance_scale=3, sampler=sampler, seed=2
    )
    assert np.abs(served(found) - levels(exact)).max() <= LEVELS


def test_a_painted_area_is_that_of_the_pipeline(client, pipeline):
    mask = np.zeros((PIXELS, PIXELS), np.uint8)
    mask[4:12, 2:10] = 255  # whole cells of the latent, as both see them
    exact = with_sampler(pipeline, "ddim", diffusers.StableDiffusionInpaintPipeline)(
        "cat",
        image=picture(),
        mask_image=Image.fromarray(mask),
        height=PIXELS,
        width=PIXELS,
        strength=1.0,
        num_inference_steps=8,
        guidance_scale=3.0,
        latents=noise_of(4),
    ).images[0]
    [found] = generate(
        client,
        "cat",
        image=file_of(picture()),
        mask=file_of(Image.fromarray(mask)),
        step_count=8,
        guidance_scale=3,
        sampler="ddim",
        seed=4,
    )
    assert np.abs(served(found) - levels(exact))[mask > 0].max() <= LEVELS
    np.testing.assert_array_equal(served(found)[mask == 0], levels(picture())[mask == 0])


def test_a_prompt_of_more_tokens_is_told_its_limit(client):
    with pytest.raises(Exception, match=f"the model reads at most {tiny_diffusers.LENGTH}; shorten it"):
        generate(client, "x" * 200)


def test_both_variants_are_proved(store):
    bundle = open_bundle(store / "stable-diffusion" / "1")
    manifest = bundle.manifest
    assert manifest.diffusion.model_dump(include={"schedule", "prediction", "condition", "sampler"}) == {
        "schedule": "discrete",
        "prediction": "noise",
        "condition": "text",
        "sampler": "ddim",
    }
    assert manifest.limits.max_input_tokens == tiny_diffusers.LENGTH
    fp32, int8 = manifest.variants[Precision.FP32], manifest.variants[Precision.INT8]
    assert fp32.parity.max_relative_logit_error < 1e-4
    assert int8.agreement.figures["mean_cosine"] > 0.99
    assert "A prompt is any text of at most 77 tokens." in (bundle.path / "README.md").read_text()


def test_a_label_is_drawn_as_by_the_pipeline(client, folders, monkeypatch):
    kind = diffusers.DiTPipeline
    monkeypatch.setitem(kind.__call__.__wrapped__.__globals__, "randn_tensor", lambda *_, **__: noise_of(6))
    pipeline = kind.from_pretrained(folders["dit"])
    pipeline.set_progress_bar_config(disable=True)
    for label in (0, 999):
        exact = pipeline([label], guidance_scale=4.0, num_inference_steps=10).images[0]
        [found] = generate(client, f"Thing {label}", model="dit", guidance_scale=4, step_count=10, seed=6)
        assert levels(exact).std() > 5
        assert np.abs(served(found) - levels(exact)).max() <= LEVELS
