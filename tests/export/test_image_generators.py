"""Folders of diffusers: their schedules against the library's own, and what is refused of them, in a sentence."""

import builtins
import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from headway_export.cli import app
from headway_export.errors import SourceError
from headway_export.huggingface import FolderOptions, sources_from_folder
from headway_server.diffusion import DiffusionSampler, Trajectory, draw_noise, schedule_of

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
}
SCHEDULES = [
    (sampler, spacing, prediction, is_rescaled)
    for sampler, spacing, prediction, is_rescaled in itertools.product(
        CLASSES, ("leading", "trailing", "linspace"), ("epsilon", "v_prediction", "sample"), (False, True)
    )
    # noise says nothing of an image where none is left; and diffusers' DDIM passes its own times of even spacing
    if not (is_rescaled and prediction == "epsilon") and (sampler, spacing) != ("ddim", "linspace")
]


def predict(latent, time):
    """Stands for a model."""
    return np.tanh((latent.reshape(-1) @ WEIGHTS).reshape(latent.shape) + np.float32(time / 1000)).astype(np.float32)


@pytest.mark.parametrize("case", SCHEDULES, ids=lambda case: "-".join(map(str, case)))
def test_a_schedule_is_that_of_the_library(tmp_path, case):
    sampler, spacing, prediction, is_rescaled = case
    settings = {"prediction_type": prediction, "timestep_spacing": spacing, "rescale_betas_zero_snr": is_rescaled}
    if sampler == "ddim":
        settings |= {"clip_sample": False, "set_alpha_to_one": False}
    scheduler = getattr(diffusers, CLASSES[sampler])(**tiny_diffusers.NOISE, **settings)
    scheduler.save_pretrained(tmp_path / "scheduler")
    diffusion, notes = _read_schedule(tmp_path, CLASSES[sampler], diffusers, _PIPELINES["StableDiffusionPipeline"])
    assert (diffusion.sampler, notes) == (sampler, ())
    for num_steps in (2, 10 if sampler == "ddim" else 7, 50):  # its own DDIM passes times of whole strides
        scheduler.set_timesteps(num_steps)
        latent = torch.from_numpy(draw_noise(3, SHAPE))[None] * scheduler.init_noise_sigma
        for time in scheduler.timesteps:
            found = predict(scheduler.scale_model_input(latent, time)[0].numpy(), float(time))
            latent = scheduler.step(torch.from_numpy(found)[None], time, latent).prev_sample
        steps = schedule_of(diffusion).steps(num_steps, DiffusionSampler(sampler))
        noise = draw_noise(3, SHAPE) * np.float32(steps.noise_scale)
        trajectory = Trajectory(noise, steps, prediction=diffusion.prediction)
        assert [point.time for point in steps.points[:-1]] == pytest.approx(scheduler.timesteps.tolist())
        while not trajectory.is_finished:
            trajectory.advance(predict(trajectory.latent, trajectory.time))
        exact = latent[0].numpy()
        np.testing.assert_allclose(trajectory.latent, exact, atol=1e-3 * np.abs(exact).max())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tiny_diffusers.write_stable_diffusion(tmp_path_factory.mktemp("pipelines") / "stable-diffusion")


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("PNDMScheduler", {}, "PNDMScheduler is not computed: dpm_solver_pp_2m makes the steps"),
        ("UniPCMultistepScheduler", {}, "UniPCMultistepScheduler is not computed: dpm_solver_pp_2m"),
        ("EulerAncestralDiscreteScheduler", {}, "EulerAncestralDiscreteScheduler is not computed: euler"),
        ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, "with use_karras_sigmas True is not computed"),
        ("DPMSolverMultistepScheduler", {"solver_order": 3}, "with solver_order 3 is not computed"),
        ("DDIMScheduler", {"timestep_spacing": "linspace"}, "with timestep_spacing linspace is not computed"),
    ],
)
def test_a_scheduler_that_is_not_computed_has_an_equivalent_and_a_note(folder, name, settings, said):
    index = json.loads((folder / "model_index.json").read_text())
    tiny_diffusers.change(
        folder / "model_index.json", scheduler=["diffusers", name], safety_checker=["stable_diffusion", "Checker"]
    )
    assert index["scheduler"][1] == "DDIMScheduler"
    tiny_diffusers.change(folder / "scheduler" / "scheduler_config.json", _class_name=name, **settings)
    (source,), notes = sources_from_folder(folder, FolderOptions())
    assert said in notes[0]
    assert notes[1] == "its safety checker is not run: images are answered as they are drawn"
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
    "a mask among inputs": (edit("unet/config.json", in_channels=9), "unet"),
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
