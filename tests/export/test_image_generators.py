"""Folders of diffusers: their schedules against the library's own, and what is refused of them, in a sentence."""

import builtins
import itertools
import re
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.errors import SourceError
from headway_export.huggingface import FolderOptions, sources_from_folder
from headway_server.diffusion import DiffusionSampler, Trajectory, draw_noise, mix, schedule_of

diffusers = pytest.importorskip("diffusers", reason="needs diffusers, which is no library of the distributions")
import tiny_diffusers  # noqa: E402 (it needs diffusers)

from headway_export.huggingface.image_generators import _OTHER_PIPELINES, _PIPELINES, _read_schedule  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers")
SHAPE = (4, 8, 8)
WEIGHTS = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32) / 16
CLASSES = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "dpm_solver_pp_2m": "DPMSolverMultistepScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
    "ddpm": "DDPMScheduler",
    "pndm": "PNDMScheduler",
    "unipc": "UniPCMultistepScheduler",
    "lcm": "LCMScheduler",
}
SCHEDULES = [
    (sampler, spacing, prediction, more)
    for sampler, spacing, prediction, more in itertools.product(
        CLASSES,
        ("leading", "trailing", "linspace"),
        ("epsilon", "v_prediction", "sample"),
        ({}, {"rescale_betas_zero_snr": True}, {"use_karras_sigmas": True}),
    )
    # noise says nothing of an image where none is left; and not every class has every setting
    if not ("rescale_betas_zero_snr" in more and (prediction == "epsilon" or sampler == "pndm"))
    and not ("use_karras_sigmas" in more and sampler not in ("euler", "dpm_solver_pp_2m", "unipc"))
    and not (sampler == "pndm" and (spacing != "leading" or prediction == "sample"))
    and not (sampler == "lcm" and spacing != "leading")
    and not (sampler == "euler_ancestral" and prediction == "sample")
]


def predict(latent, time):
    """Stands for a model."""
    return np.tanh((latent.reshape(-1) @ WEIGHTS).reshape(latent.shape) + np.float32(time / 1000)).astype(np.float32)


@pytest.mark.parametrize("case", SCHEDULES, ids=lambda case: "-".join([*case[:3], *case[3]]))
def test_a_schedule_is_that_of_the_library(tmp_path, case, monkeypatch):
    sampler, spacing, prediction, more = case
    settings = {"prediction_type": prediction, "timestep_spacing": spacing, **more}
    if sampler in ("ddim", "ddpm"):
        settings["clip_sample"] = False
    if sampler in ("ddim", "pndm"):
        settings["set_alpha_to_one"] = False
    if sampler == "pndm":
        settings["skip_prk_steps"] = True
    scheduler = getattr(diffusers, CLASSES[sampler])(**tiny_diffusers.NOISE, **settings)
    scheduler.save_pretrained(tmp_path / "scheduler")
    diffusion, notes = _read_schedule(tmp_path, CLASSES[sampler], diffusers, _PIPELINES["StableDiffusionPipeline"])
    assert (diffusion.sampler, notes) == (sampler, ())
    for num_steps, left_out in ((1, 0), (2, 0), (7, 0), (7, 3), (50, 0)):
        if num_steps == 1 and spacing == "linspace" and sampler not in ("dpm_solver_pp_2m", "unipc"):
            continue  # the library has its only step begin without noise
        scheduler.set_timesteps(num_steps)
        steps = schedule_of(diffusion).steps(num_steps, DiffusionSampler(sampler)).last(left_out)
        times = scheduler.timesteps[left_out:]
        assert [point.time for point in steps.points[:-1]] == pytest.approx(times.tolist(), abs=1e-2)
        noise = draw_noise(3, SHAPE)
        latent = mix(np.ones(SHAPE, np.float32), noise, steps.points[0]) if left_out else noise * steps.noise_scale
        trajectory = Trajectory(latent, steps, prediction=diffusion.prediction, draw=partial(draw_noise, 3, SHAPE))
        while not trajectory.is_finished:
            trajectory.advance(predict(trajectory.latent, trajectory.time))
        exact = run(scheduler, left_out, monkeypatch)
        np.testing.assert_allclose(trajectory.latent, exact, atol=2e-3 * np.abs(exact).max())


def run(scheduler, left_out, monkeypatch):
    """The latent of the library, from noise, or from an image of ones to which noise is added."""
    drawn, known = itertools.count(1), type(scheduler).step.__globals__
    if "randn_tensor" in known:
        draw = partial(draw_noise, 3, SHAPE)
        monkeypatch.setitem(known, "randn_tensor", lambda *_, **__: torch.from_numpy(draw(next(drawn)))[None])
    noise, times = torch.from_numpy(draw_noise(3, SHAPE))[None], scheduler.timesteps[left_out:]
    latent = noise * scheduler.init_noise_sigma
    if left_out:
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(left_out)
        latent = scheduler.add_noise(torch.ones(1, *SHAPE), noise, times[:1])
    for time in times:
        found = predict(scheduler.scale_model_input(latent, time)[0].numpy(), float(time))
        latent = scheduler.step(torch.from_numpy(found)[None], time, latent).prev_sample
    return latent[0].numpy()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tiny_diffusers.write_stable_diffusion(tmp_path_factory.mktemp("pipelines") / "stable-diffusion")


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        (
            "HeunDiscreteScheduler",
            {},
            "its scheduler is HeunDiscreteScheduler, and StableDiffusionPipeline is exported",
        ),
        ("DPMSolverMultistepScheduler", {"solver_order": 3}, "solver_order is 3; DPMSolverMultistepScheduler is comp"),
        ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}, "algorithm_type is sde-dpmsolver++;"),
        ("DPMSolverMultistepScheduler", {"use_beta_sigmas": True}, "use_beta_sigmas is True"),
        ("UniPCMultistepScheduler", {"solver_type": "bh1"}, "solver_type is bh1"),
        (
            "PNDMScheduler",
            {"skip_prk_steps": True, "timestep_spacing": "linspace"},
            "timestep_spacing is linspace; PNDMScheduler is computed",
        ),
        ("PNDMScheduler", {"skip_prk_steps": False}, "skip_prk_steps is False"),
        ("EulerDiscreteScheduler", {"final_sigmas_type": "sigma_min"}, "final_sigmas_type is sigma_min"),
        ("LCMScheduler", {"timestep_scaling": 3.0}, "timestep_scaling is 3.0"),
        ("DDPMScheduler", {"variance_type": "learned"}, "variance_type is learned"),
    ],
)
def test_a_scheduler_that_is_not_computed_is_refused(folder, name, settings, said):
    tiny_diffusers.change(folder / "model_index.json", scheduler=["diffusers", name])
    tiny_diffusers.change(folder / "scheduler" / "scheduler_config.json", _class_name=name, **settings)
    with pytest.raises(SourceError, match=re.escape(said)):
        sources_from_folder(folder, FolderOptions())


def test_a_safety_checker_is_not_run_and_a_note_says_so(folder):
    tiny_diffusers.change(folder / "model_index.json", safety_checker=["stable_diffusion", "Checker"])
    (source,), notes = sources_from_folder(folder, FolderOptions())
    assert notes == ("its safety checker is not run: images are answered as they are drawn",)
    assert source.limits.max_input_tokens == tiny_diffusers.LENGTH


def edit(file, **values):
    return lambda folder: tiny_diffusers.change(folder / file, **values)


INDEX, SCHEDULE = "model_index.json", "scheduler/scheduler_config.json"
REFUSED = {
    "no pipeline that is known": (edit(INDEX, _class_name="MyPipeline"), "is a pipeline MyPipeline, which is not"),
    "no class": (edit(INDEX, _class_name=None), "is a pipeline None, which is not exported"),
    "no object": (lambda folder: (folder / INDEX).write_text("[1]"), "is not a JSON object"),
    "nested": (lambda folder: (folder / INDEX).write_text("[" * 100_000), "cannot be read"),
    "another unet": (edit(INDEX, unet=["diffusers", "UNet3DConditionModel"]), "its unet is UNet3DConditionModel"),
    "code of its own": (edit(INDEX, unet=["own_code", "Own"]), "its unet is Own"),
    "an odd part": (edit(INDEX, vae={"a": 1}), "its vae is None"),
    "a picture too": (edit(INDEX, image_encoder=["transformers", "CLIPVision"]), "an IP-Adapter"),
    "no weights": (lambda folder: (folder / "vae/diffusion_pytorch_model.safetensors").unlink(), "has no weights of"),
    "no part": (lambda folder: shutil.rmtree(folder / "text_encoder"), "has no weights of safetensors"),
    "no tokenizer": (lambda folder: shutil.rmtree(folder / "tokenizer"), "has no tokenizer that can be read"),
    "no schedule": (lambda folder: shutil.rmtree(folder / "scheduler"), "cannot be read"),
    "other variances": (edit(SCHEDULE, beta_schedule="sigmoid"), "is no schedule that is computed"),
    "no variances": (edit(SCHEDULE, beta_start=float("nan")), "is no schedule that is computed"),
    "listed variances": (edit(SCHEDULE, trained_betas=[0.1] * 1000), "a list of variances"),
    "few times": (edit(SCHEDULE, num_train_timesteps=3), "num_train_steps"),
    "many times": (edit(SCHEDULE, num_train_timesteps=10**9), "num_train_timesteps is 1000000000"),
    "a flow": (edit(SCHEDULE, prediction_type="flow_prediction"), "prediction_type is flow_prediction"),
    "odd channels": (edit("unet/config.json", in_channels=7), "unet"),
    "a refiner": (edit(INDEX, requires_aesthetics_score=True), "refines what another model draws"),
    "a mean of each channel": (edit("vae/config.json", latents_mean=[0.1] * 4), "has a mean or a deviation of each"),
    "classes": (edit("unet/config.json", class_embed_type="timestep"), "unet"),
    "a size of a kind": (edit("unet/config.json", sample_size=[8, 8]), "sample_size is [8, 8]"),
    "another width": (edit("text_encoder/config.json", hidden_size=64), "text_encoder"),
    "few tokens": (edit("text_encoder/config.json", vocab_size=10), "the vocabulary of its text encoder ends at 9"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_refused_in_a_sentence(folder, case):
    spoil, said = REFUSED[case]
    spoil(folder)
    result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(folder.parent / "store")])
    assert result.exit_code == 2, result.output
    assert said in result.output.replace("\n", "")
    assert len(result.output.strip().splitlines()) == 1, result.output
    assert not (folder.parent / "store").exists()


@pytest.mark.parametrize("part", _OTHER_PIPELINES)
def test_pipelines_that_are_not_exported_are_called_what_they_are(folder, part):
    tiny_diffusers.change(folder / INDEX, _class_name=f"{part}Pipeline")
    with pytest.raises(SourceError, match=f"is a pipeline {part}Pipeline, which is not exported: it"):
        sources_from_folder(folder, FolderOptions())


@pytest.mark.parametrize(
    "asked", [{"task": "generation"}, {"max_length": 7}, {"pooling": "mean"}, {"base": "a/b"}], ids=str
)
def test_what_is_not_for_a_pipeline_is_refused(folder, asked):
    with pytest.raises(SourceError, match="--"):
        sources_from_folder(folder, FolderOptions(**asked))


def test_the_library_that_is_missing_is_named(folder, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **more):
        if name == "diffusers":
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SourceError, match="needs the library diffusers: pip install diffusers"):
        sources_from_folder(folder, FolderOptions())
