"""Pipelines of diffusers, exported by one command and served, against the pipelines themselves."""

import io
import itertools

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
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "unipc": ("UniPCMultistepScheduler", {"timestep_spacing": "leading"}),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", {"timestep_spacing": "leading"}),
    "ddpm": ("DDPMScheduler", {"timestep_spacing": "leading", "clip_sample": False}),
    "lcm": ("LCMScheduler", {}),
}
SHAPE = (tiny_diffusers.LATENT_CHANNELS, tiny_diffusers.SIDE, tiny_diffusers.SIDE)
PIXELS = tiny_diffusers.SIDE << tiny_diffusers.HALVINGS
LEVELS = 2


MODELS = {
    "stable-diffusion": tiny_diffusers.write_stable_diffusion,
    "inpainting": tiny_diffusers.write_inpainting,
    "xl": tiny_diffusers.write_xl,
    "consistency": tiny_diffusers.write_consistency,
    "pixart": tiny_diffusers.write_pixart,
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


def with_noise(pipeline, monkeypatch, seed):
    """Lets a pipeline's scheduler draw the noise of its steps as the server does."""
    drawn, step = itertools.count(1), type(pipeline.scheduler).step

    def draw(*_, **__):
        return noise_of(seed, next(drawn))

    if "randn_tensor" in step.__globals__:
        monkeypatch.setitem(step.__globals__, "randn_tensor", draw)
    return pipeline


def with_sampler(pipeline, sampler, kind=None):
    """The pipeline, or another of the same parts, with a scheduler at the folder's times."""
    name, settings = SAMPLERS[sampler]
    scheduler = getattr(diffusers, name).from_config(pipeline.scheduler.config, **settings)
    made = (kind or diffusers.StableDiffusionPipeline)(
        **{**pipeline.components, "scheduler": scheduler}, requires_safety_checker=False
    )
    made.set_progress_bar_config(disable=True)
    return made


def noise_of(seed, step=0):
    return torch.from_numpy(draw_noise(seed, SHAPE, step))[None]


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


@pytest.mark.parametrize(
    "case",
    [*((sampler, 7, 7.5, "a cat") for sampler in SAMPLERS), ("ddim", 20, 7.5, ""), ("euler", 4, 1.0, "")],
    ids=lambda case: "-".join(map(str, case)),
)
def test_an_image_is_that_of_the_pipeline(client, pipeline, case, monkeypatch):
    prompt, (sampler, steps, guidance, negative) = "A red cat", case
    exact = with_noise(with_sampler(pipeline, sampler), monkeypatch, 11)(
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


@pytest.mark.parametrize(("sampler", "strength"), list(zip(SAMPLERS, itertools.cycle((0.35, 0.8, 1.0)), strict=False)))
def test_an_edited_image_is_that_of_the_pipeline(client, pipeline, sampler, strength, monkeypatch):
    kind = diffusers.StableDiffusionImg2ImgPipeline
    made = with_noise(with_sampler(pipeline, sampler, kind), monkeypatch, 2)
    monkeypatch.setitem(kind.prepare_latents.__globals__, "randn_tensor", lambda *_, **__: noise_of(2))
    asked = {"strength": strength, "guidance_scale": 3.0}
    exact = made("red", image=picture(), num_inference_steps=10, **asked).images[0]
    [found] = generate(client, "red", image=file_of(picture()), step_count=10, sampler=sampler, seed=2, **asked)
    assert np.abs(served(found) - levels(exact)).max() <= LEVELS


PAINTED = [
    *(("stable-diffusion", sampler, 0.6) for sampler in SAMPLERS),
    ("stable-diffusion", "ddim", 1.0),
    ("inpainting", "pndm", 0.6),
    ("inpainting", "pndm", 1.0),
]


@pytest.mark.parametrize("case", PAINTED, ids=lambda case: "-".join(map(str, case)))
def test_a_painted_area_is_that_of_the_pipeline(client, folders, case, monkeypatch):
    model, sampler, strength = case
    kind = diffusers.StableDiffusionInpaintPipeline
    own = kind.from_pretrained(folders[model], requires_safety_checker=False)
    made = with_noise(with_sampler(own, sampler, kind), monkeypatch, 4)
    monkeypatch.setitem(kind.prepare_latents.__globals__, "randn_tensor", lambda *_, **__: noise_of(4))
    mask = (np.random.default_rng(8).random((PIXELS, PIXELS)) < 0.4) * np.uint8(255)  # no whole cells
    asked = {"guidance_scale": 3.0, "strength": strength}
    sizes = {"height": PIXELS, "width": PIXELS}
    white = Image.fromarray(mask)
    exact = made("cat", image=picture(), mask_image=white, num_inference_steps=8, **sizes, **asked).images[0]
    files = {"image": file_of(picture()), "mask": file_of(white)}
    [found] = generate(client, "cat", model, **files, step_count=8, sampler=sampler, seed=4, **asked)
    assert np.abs(served(found) - levels(exact))[mask > 0].max() <= LEVELS
    np.testing.assert_array_equal(served(found)[mask == 0], levels(picture())[mask == 0])


def test_without_an_image_a_network_that_paints_draws_all_of_it(client, folders):
    pipeline = diffusers.StableDiffusionInpaintPipeline.from_pretrained(folders["inpainting"])
    pipeline.set_progress_bar_config(disable=True)
    white = Image.fromarray(np.full((PIXELS, PIXELS), 255, np.uint8))
    asked = {"height": PIXELS, "width": PIXELS, "num_inference_steps": 20, "latents": noise_of(9)}
    exact = pipeline("cat", image=picture(), mask_image=white, strength=1.0, **asked).images[0]
    [found] = generate(client, "cat", "inpainting", seed=9)  # the pipeline's guidance is the model's own
    assert np.abs(served(found) - levels(exact)).max() <= LEVELS


XL_CALLS = {
    "turbo": ({}, {"num_inference_steps": 4, "guidance_scale": 0.0}),
    "one step": (
        {"step_count": 1, "guidance_scale": 0.0},
        {"num_inference_steps": 1, "guidance_scale": 0.0},
    ),
    "guided": (
        {"step_count": 6, "guidance_scale": 5.0, "sampler": "euler"},
        {"num_inference_steps": 6, "guidance_scale": 5.0},
    ),
    "negative": (
        {"step_count": 5, "guidance_scale": 5.0, "negative_prompt": "a cat"},
        {"num_inference_steps": 5, "guidance_scale": 5.0, "negative_prompt": "a cat"},
    ),
}


@pytest.mark.parametrize("case", XL_CALLS)
def test_an_image_of_xl_is_that_of_the_pipeline(client, folders, case, monkeypatch):
    asked, exactly = XL_CALLS[case]
    pipeline = diffusers.StableDiffusionXLPipeline.from_pretrained(folders["xl"])
    pipeline.set_progress_bar_config(disable=True)
    if asked.get("sampler") == "euler":
        pipeline.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipeline.scheduler.config)
    exact = with_noise(pipeline, monkeypatch, 5)("A red cat!", latents=noise_of(5), **exactly).images[0]
    [found] = generate(client, "A red cat!", "xl", seed=5, **asked)
    assert levels(exact).std() > 5
    assert np.abs(served(found) - levels(exact)).max() <= LEVELS


@pytest.mark.parametrize("guidance", [None, 1.0, 4.0])
def test_a_consistency_model_reads_the_scale_of_guidance(client, folders, guidance, monkeypatch):
    pipeline = diffusers.LatentConsistencyModelPipeline.from_pretrained(folders["consistency"])
    pipeline.set_progress_bar_config(disable=True)
    asked = {} if guidance is None else {"guidance_scale": guidance}
    exact = with_noise(pipeline, monkeypatch, 6)("A red cat", latents=noise_of(6), **asked).images[0]
    [found] = generate(client, "A red cat", "consistency", seed=6, **asked)
    assert found.step_count == 4
    assert levels(exact).std() > 5
    assert np.abs(served(found) - levels(exact)).max() <= LEVELS


@pytest.mark.parametrize("negative", ["", "a cat"])
def test_an_image_of_pixart_is_that_of_the_pipeline(client, folders, negative):
    pipeline = diffusers.PixArtAlphaPipeline.from_pretrained(folders["pixart"])
    pipeline.set_progress_bar_config(disable=True)
    exact = pipeline(
        " A red CAT! ",
        negative_prompt=negative,
        latents=noise_of(7),
        clean_caption=False,
        use_resolution_binning=False,
    ).images[0]  # of its own 20 steps and guidance
    [found] = generate(client, " A red CAT! ", "pixart", negative_prompt=negative, seed=7)
    assert levels(exact).std() > 5
    assert np.abs(served(found) - levels(exact)).max() <= LEVELS


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        ("consistency", {"negative_prompt": "a cat"}, "negative_prompt: this model reads the scale of guidance"),
        ("consistency", {"step_count": 60}, "step_count: is 60; the sampler lcm makes at most 50"),
        ("inpainting", {"image": 16, "mask": 8}, "mask: is 8 x 8 pixels, and the image 16 x 16"),
    ],
    ids=["a negative prompt", "many steps", "another size"],
)
def test_what_a_model_cannot_do_is_refused_in_a_sentence(client, model, asked, said):
    given = {
        name: file_of(Image.new("RGB", (value, value), "white")) if name in ("image", "mask") else value
        for name, value in asked.items()
    }
    with pytest.raises(Exception, match=said):
        generate(client, "cat", model, **given)


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
