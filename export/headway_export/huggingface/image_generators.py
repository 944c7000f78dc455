"""Pipelines of `diffusers`: published models of latent diffusion, in a folder with a part in each folder of it.

No code of a folder is run: every class is one of the table below, of the libraries that are installed.

B rows, C channels and S side of a latent, I pixels a side, T tokens, D width of their states.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, normalizers
from torch import Tensor, nn
from torch.nn import functional

from headway_export.errors import SourceError
from headway_export.graphs import parameter_count
from headway_export.huggingface.folder import FolderOptions, ModelFolder, as_source_error, model_name
from headway_export.source import ExportSource, limits_of
from headway_export.space import FLOAT_BYTES, check_memory, working_bytes
from headway_server.bundles import (
    Architecture,
    Diffusion,
    DiscreteNoise,
    ImagePreprocessing,
    SpecialTokens,
    Task,
)
from headway_server.diffusion import DiffusionSampler
from headway_training.folders import first_line, open_tokenizer, plain_tokenizer, quiet

PIPELINE_FILE: Final = "model_index.json"
_SAFETENSORS: Final = "diffusion_pytorch_model*.safetensors"
_OTHER_PIPELINES: Final = {
    "ControlNet": "is steered by a picture (ControlNet), which no call gives",
    "StableDiffusion3": "has a transformer of images and texts together that predicts a flow (Stable Diffusion 3)",
    "Flux": "has a transformer of images and texts together that predicts a flow (Flux)",
    "Video": "makes videos",
    "AnimateDiff": "makes videos",
    "CogVideo": "makes videos",
    "LTX": "makes videos",
    "Wan": "makes videos",
    "Audio": "makes sounds",
    "Music": "makes sounds",
    "Upscale": "enlarges pictures",
    "Kandinsky": "draws from embeddings of a prior of its own",
    "InstructPix2Pix": "follows an instruction about a picture, with two scales of guidance",
}
"""What pipelines are that are not exported, by a part of their name."""


_SCHEDULERS: Final[Mapping[str, DiffusionSampler]] = {
    "DDIMScheduler": DiffusionSampler.DDIM,
    "PNDMScheduler": DiffusionSampler.PNDM,
    "EulerDiscreteScheduler": DiffusionSampler.EULER,
    "EulerAncestralDiscreteScheduler": DiffusionSampler.EULER_ANCESTRAL,
    "DPMSolverMultistepScheduler": DiffusionSampler.DPM_SOLVER_PP_2M,
    "UniPCMultistepScheduler": DiffusionSampler.UNIPC,
    "LCMScheduler": DiffusionSampler.LCM,
    "DDPMScheduler": DiffusionSampler.DDPM,
}
"""Schedulers that are computed, by which of ours makes their steps."""
_BETAS: Final = {"linear": "linear", "scaled_linear": "scaled_linear", "squaredcos_cap_v2": "squared_cosine"}
_PREDICTIONS: Final = {"epsilon": "noise", "v_prediction": "velocity", "sample": "image"}
_MOST_TIMES: Final = 100_000
_REFUSED_SETTINGS: Final = {
    "clip_sample": "latents between -1 and 1 (clip_sample)",
    "trained_betas": "a list of variances (trained_betas)",
    "thresholding": "thresholds of pixels (thresholding)",
    "use_flow_sigmas": "a schedule of flows (use_flow_sigmas)",
}
"""Settings of a scheduler that change what a step computes, by what they ask for."""
_EXPECTED_SETTINGS: Final[Mapping[str, object]] = {
    "algorithm_type": "dpmsolver++",
    "solver_order": 2,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "use_lu_lambdas": False,
    "euler_at_final": False,
    "final_sigmas_type": "zero",
    "interpolation_type": "linear",
    "timestep_type": "discrete",
    "skip_prk_steps": True,
    "predict_x0": True,
    "disable_corrector": [],
    "solver_p": None,
    "variance_type": "fixed_small",
    "timestep_scaling": 10.0,
    "sigma_min": None,
    "sigma_max": None,
    "lower_order_final": True,
}
"""Settings that change a step or the times, as they are computed; each scheduler has some of them."""
_SOLVER_TYPES: Final = {DiffusionSampler.DPM_SOLVER_PP_2M: "midpoint", DiffusionSampler.UNIPC: "bh2"}
"""The same of `solver_type`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingSizes:
    """Sizes of a published model, as `DrawingShape` has them."""

    latent_shape: tuple[int, int, int]
    image_size: int
    max_length: int
    d_model: int


class PublishedDiffusion(nn.Module):
    """A published model that draws images: its denoiser, its autoencoder, and its text encoder."""

    def __init__(
        self,
        denoiser: nn.Module,
        autoencoder: Any,
        text_encoder: nn.Module | None,
        *,
        sizes: DrawingSizes,
        prediction: str,
        further_inputs: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        self.further_inputs = further_inputs
        self.denoiser = denoiser
        self.autoencoder = autoencoder
        self.text_encoder = text_encoder
        self.configuration = sizes
        self.prediction = prediction

    def encode(self, pixels: Tensor) -> Tensor:
        """(B, 3, I, I), -1 to 1 -> the likeliest latents, (B, C, S, S), of about unit variance."""
        config = self.autoencoder.config
        with _operator_attention():
            latents: Tensor = self.autoencoder.encode(pixels).latent_dist.mode()
        return (latents - (config.shift_factor or 0.0)) * float(config.scaling_factor)

    def decode(self, latents: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, 3, I, I), 0 to 1."""
        config = self.autoencoder.config
        plain = latents / config.scaling_factor + (config.shift_factor or 0.0)
        with _operator_attention():
            pixels: Tensor = self.autoencoder.decode(plain, return_dict=False)[0]
        return pixels / 2 + 0.5


_ATTENTION: Final = "scaled_dot_product_attention"


@contextmanager
def _operator_attention() -> Iterator[None]:
    """Lets attention without a mask be one operator in a graph that is traced, as it is called in torch.

    At the largest size of Stable Diffusion, 4,096 positions of two rows, it takes a quarter of the processor time of
    plain operators, and 43 MiB in place of 2.1 GiB, since scores of few queries are held at a time.
    """
    plain = functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
        """(B, H, T, K), (B, H, S, K), (B, H, S, K) -> (B, H, T, K)."""
        scale = more.get("scale")
        if attn_mask is not None or more.get("is_causal") or query.shape[1] != key.shape[1] or scale is not None:
            return plain(query, key, value, attn_mask=attn_mask, **more)
        heads = [tensor.transpose(1, 2).flatten(2) for tensor in (query, key, value)]
        context = torch.onnx.ops.symbolic(
            "com.microsoft::MultiHeadAttention",
            heads,
            {"num_heads": query.shape[1]},
            dtype=query.dtype,
            shape=heads[0].shape,
            version=1,
        )
        rows, num_heads, length, width = query.shape
        return context.reshape(rows, length, num_heads, width).transpose(1, 2)

    if not torch.compiler.is_exporting():
        yield
        return
    setattr(functional, _ATTENTION, attend)
    try:
        yield
    finally:
        setattr(functional, _ATTENTION, plain)


class UNetDenoiser(nn.Module):
    """The network of Stable Diffusion, which attends to all T states of a text, those of its padding too."""

    def __init__(self, unet: Any, inputs: Sequence[str], image_size: int) -> None:
        """Takes the network, the names of what it reads further, and the pixels a side of its images."""
        super().__init__()
        self.unet = unet
        self.inputs = tuple(inputs)
        sizes = [image_size, image_size, 0, 0, image_size, image_size]  # drawn at that size, of nothing cropped
        self.register_buffer("time_ids", torch.tensor([sizes], dtype=torch.float32), persistent=False)

    def forward(self, latent: Tensor, timestep: Tensor, text: Tensor, text_mask: Tensor, *further: Tensor) -> Tensor:  # noqa: ARG002 (it reads none)
        """(B, C, S, S), (B,), (B, T, D), (B, T), perhaps (B, P), (B, 1 + C, S, S), (B,) -> (B, C, S, S)."""
        read = dict(zip(self.inputs, further, strict=True))
        more: dict[str, Any] = {}
        if "pooled" in read:
            time_ids = self.get_buffer("time_ids").to(latent.dtype).expand(latent.shape[0], -1)
            more["added_cond_kwargs"] = {"text_embeds": read["pooled"], "time_ids": time_ids}
        if "inpainting" in read:
            latent = torch.cat((latent, read["inpainting"]), dim=1)
        if "guidance" in read:
            width = self.unet.config.time_cond_proj_dim
            more["timestep_cond"] = scale_embedding(read["guidance"] - 1, width).to(latent.dtype)
        with _operator_attention():
            found: Tensor = self.unet(latent, timestep, encoder_hidden_states=text, return_dict=False, **more)[0]
        return found


def scale_embedding(weight: Tensor, width: int) -> Tensor:
    """Embeds the weight of guidance as sines and cosines (Meng et al. 2023, section 3.1), of a thousand of it.

    (B,) -> (B, W).
    """
    half = width // 2
    steps = torch.exp(torch.arange(half, dtype=torch.float32) * (-math.log(10_000) / (half - 1)))
    angles = weight.float()[:, None] * 1000 * steps  # (B, W / 2)
    return functional.pad(torch.cat((angles.sin(), angles.cos()), dim=1), (0, width % 2))


class _OfOneRow(nn.Module):
    """A last layer whose answer has an axis of one row more, which the network then takes away.

    It takes it away where there is none, too; but the operator of a graph does not allow that.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor) -> Tensor:
        """(B, N, D) -> (B, 1, N, P)."""
        found: Tensor = self.layer(states)
        return found.unsqueeze(1)


class TextTransformer(nn.Module):
    """The network of PixArt, which may predict a variance beside the noise, which nothing reads."""

    def __init__(self, transformer: Any, inputs: Sequence[str], image_size: int) -> None:
        """Takes the network, nothing further, and the pixels a side of its images."""
        super().__init__()
        assert not inputs, "it reads a text alone"
        transformer.proj_out = _OfOneRow(transformer.proj_out)
        self.transformer = transformer
        self.image_size = image_size

    def forward(self, latent: Tensor, timestep: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        """(B, C, S, S), (B,), (B, T, D), (B, T) -> (B, C, S, S)."""
        torch._check(text_mask.shape[0] == latent.shape[0])  # type: ignore[no-untyped-call]  # noqa: SLF001 (its name)
        more: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
        if self.transformer.config.sample_size == _CONDITIONED_SIDE:
            more["resolution"] = latent.new_full((latent.shape[0], 2), self.image_size)
            more["aspect_ratio"] = latent.new_ones((latent.shape[0], 1))
        with _operator_attention():
            found: Tensor = self.transformer(
                latent,
                encoder_hidden_states=text,
                encoder_attention_mask=text_mask,
                timestep=timestep,
                added_cond_kwargs=more,
                return_dict=False,
            )[0]
        return found[:, : latent.shape[1]]


class LabelTransformer(nn.Module):
    """The network of DiT, which may predict a variance beside the noise (learned sigma), which nothing reads."""

    def __init__(self, transformer: Any, inputs: Sequence[str], image_size: int) -> None:  # noqa: ARG002 (as the others)
        """Takes the network; it reads nothing further."""
        super().__init__()
        self.transformer = transformer

    def forward(self, latent: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        """(B, C, S, S), (B,), (B,) -> (B, C, S, S)."""
        with _operator_attention():
            found: Tensor = self.transformer(latent, timestep=timestep, class_labels=label, return_dict=False)[0]
        return found[:, : latent.shape[1]]


class TextStates(nn.Module):
    """A text encoder of `transformers`, and whether it is told where the padding is."""

    def __init__(self, model: nn.Module, *, reads_mask: bool) -> None:
        super().__init__()
        self.model = model
        self.reads_mask = reads_mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T), (B, T) -> the states of the last layer, (B, T, D)."""
        mask = {"attention_mask": attention_mask} if self.reads_mask else {}
        found: Tensor = self.model(input_ids=input_ids, return_dict=True, **mask).last_hidden_state
        return found


class PairedTextStates(nn.Module):
    """The two text encoders of SDXL, whose states before their last layers stand beside each other."""

    def __init__(self, first: Any, second: Any, *, pad_id: int, changed: Mapping[int, int]) -> None:
        """Takes the encoders, and how the second one's tokens differ: those of padding, and some others."""
        super().__init__()
        self.first = first
        self.second = second
        self.pad_id = pad_id
        self.changed = dict(changed)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T), (B, T) -> (B, T, D), and the second one's projection of a text, (B, P)."""
        others = input_ids
        for one, other in self.changed.items():
            others = torch.where(input_ids == one, other, others)
        others = torch.where(attention_mask == 0, self.pad_id, others)
        states = self.first(input_ids=input_ids, output_hidden_states=True, return_dict=True).hidden_states[-2]
        found = self.second(input_ids=others, output_hidden_states=True, return_dict=True)
        return torch.cat((states, found.hidden_states[-2]), dim=-1), found.text_embeds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """What a pipeline is made of."""

    denoiser: str
    """Name of the part."""
    classes: Mapping[str, tuple[str, ...]]
    """Of each part, beside the autoencoder and the scheduler."""
    make_denoiser: Callable[[Any, Sequence[str], int], nn.Module]
    """Takes the part, the names of what it reads further, and the pixels a side of an image."""
    guidance_scale: float
    """Its default."""
    max_length: int | None = None
    """Tokens that a text is padded to; None: as many as its encoder has positions."""
    lowers_texts: bool = False
    """True if it reads texts in lower case, without spaces around them."""
    mends_schedule: bool = False
    """True if `steps_offset` is 1 and nothing is clipped, whatever the folder says."""

    @property
    def reads_texts(self) -> bool:
        """False if it draws labels."""
        return "text_encoder" in self.classes

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the parts with weights."""
        return ("vae", *(part for part in self.classes if "tokenizer" not in part))


_UNET: Final = {"unet": ("UNet2DConditionModel",)}
_CLIP: Final = {"text_encoder": ("CLIPTextModel",), "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast")}
_T5: Final = {"text_encoder": ("T5EncoderModel",), "tokenizer": ("T5Tokenizer", "T5TokenizerFast")}
_PIPELINES: Final = {
    "StableDiffusionPipeline": _Pipeline(
        denoiser="unet",
        classes={**_UNET, **_CLIP},
        make_denoiser=UNetDenoiser,
        guidance_scale=7.5,
        mends_schedule=True,
    ),
    "StableDiffusionXLPipeline": _Pipeline(
        denoiser="unet",
        classes={
            **_UNET,
            **_CLIP,
            "text_encoder_2": ("CLIPTextModelWithProjection",),
            "tokenizer_2": _CLIP["tokenizer"],
        },
        make_denoiser=UNetDenoiser,
        guidance_scale=5.0,
    ),
    "LatentConsistencyModelPipeline": _Pipeline(
        denoiser="unet", classes={**_UNET, **_CLIP}, make_denoiser=UNetDenoiser, guidance_scale=8.5
    ),
    "PixArtAlphaPipeline": _Pipeline(
        denoiser="transformer",
        classes={"transformer": ("PixArtTransformer2DModel", "Transformer2DModel"), **_T5},
        make_denoiser=TextTransformer,
        guidance_scale=4.5,
        max_length=120,
        lowers_texts=True,
    ),
    "PixArtSigmaPipeline": _Pipeline(
        denoiser="transformer",
        classes={"transformer": ("PixArtTransformer2DModel",), **_T5},
        make_denoiser=TextTransformer,
        guidance_scale=4.5,
        max_length=300,
        lowers_texts=True,
    ),
    "DiTPipeline": _Pipeline(
        denoiser="transformer",
        classes={"transformer": ("DiTTransformer2DModel", "Transformer2DModel")},
        make_denoiser=LabelTransformer,
        guidance_scale=4.0,
    ),
}
"""Pipelines that are exported."""
_SAME_PARTS: Final = {
    "StableDiffusionImg2ImgPipeline": "StableDiffusionPipeline",
    "StableDiffusionInpaintPipeline": "StableDiffusionPipeline",
    "StableDiffusionXLImg2ImgPipeline": "StableDiffusionXLPipeline",
    "StableDiffusionXLInpaintPipeline": "StableDiffusionXLPipeline",
    "LatentConsistencyModelImg2ImgPipeline": "LatentConsistencyModelPipeline",
}
"""Pipelines of the same parts, which differ in what they do with them."""
_FEW_STEPS: Final = 4
"""Default steps of models that are distilled to few."""
_IMAGE_ARRAYS: Final = 4
"""Of an image's pixels that an autoencoder holds, each of the channels of its last but one block."""
_CONDITIONED_SIDE: Final = 128
"""Side of latents of the PixArt models that also read the size of an image."""


def is_pipeline(path: Path) -> bool:
    """True of a folder that holds a pipeline."""
    return (path / PIPELINE_FILE).is_file()


def read_pipeline(path: Path, options: FolderOptions) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a folder of `diffusers`, and notes for the user, a sentence each.

    Raises:
        SourceError: The library is missing, the folder is incomplete, or its model cannot be served.
    """
    _check_options(path, options)
    index = _read_json(path / PIPELINE_FILE)
    pipeline, scheduler = _pipeline_of(path, index)
    library = _diffusers(path)
    folder = ModelFolder(path=path, task=Task.IMAGE_GENERATION, config=None, options=options)
    count = sum(_count_weights(path / part) for part in pipeline.models)
    diffusion, notes = _read_schedule(path, scheduler, library, pipeline)
    configs = {part: _read_json(path / part / "config.json") for part in pipeline.models}
    side = _number(path / pipeline.denoiser, configs[pipeline.denoiser], "sample_size")
    check_memory(str(path), count, working=drawing_bytes(configs["vae"], side), can_shrink=False)
    changed: dict[int, int] = {}
    if pipeline.reads_texts:
        tokenizer, pad_id = _read_tokenizer(path / "tokenizer")
        _check_tokenizer(path, tokenizer, pad_id, configs["text_encoder"])
        if "tokenizer_2" in pipeline.classes:
            changed = _changed_tokens(path, tokenizer, configs["text_encoder_2"])
        if pipeline.lowers_texts:
            _lower_texts(tokenizer)
        of_condition: dict[str, Any] = {"tokenizer": tokenizer, "special_tokens": SpecialTokens(pad=pad_id)}
    else:
        of_condition = {"labels": _read_labels(path, index, configs[pipeline.denoiser])}
    make = partial(_load, path, library, pipeline, diffusion.prediction, changed)
    module = make()
    size = module.configuration.image_size
    diffusion, more_notes = _with_defaults(diffusion, pipeline, module, index)
    notes += more_notes
    if isinstance(checker := index.get("safety_checker"), list) and checker[0] is not None:
        notes += ("its safety checker is not run: images are answered as they are drawn",)
    name = str(index["_class_name"])
    return ExportSource(
        name=options.name or _name_of(path),
        task=Task.IMAGE_GENERATION,
        module=module,
        make_reference=make,
        description=f"{name}, exported from a folder of diffusers.",
        license=folder.license(),
        documents=folder.documents(),
        architecture=Architecture(
            kind=str(configs[pipeline.denoiser].get("_class_name")),
            parameter_count=parameter_count(module),
            configuration={"pipeline": name, "diffusers": str(library.__version__)},
        ),
        limits=limits_of(module, Task.IMAGE_GENERATION),
        image_preprocessing=ImagePreprocessing(
            height=size,
            width=size,
            resize="shorter_side",
            resize_size=size,
            interpolation="lanczos",
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
        ),
        diffusion=diffusion,
        **of_condition,
    ), notes


def drawing_bytes(autoencoder: Mapping[str, Any], side: int) -> int:
    """Returns about how many bytes the export of a pipeline computes with, beside weights.

    An autoencoder takes the most, at the pixels of a whole image. At 512 a side Stable Diffusion's took 1.0 GiB. A
    denoiser's attention holds few scores at a time.

    Args:
        autoencoder: Its configuration.
        side: Of a latent.
    """
    channels = autoencoder.get("block_out_channels")
    if not isinstance(channels, list) or not all(isinstance(count, int) for count in channels[:2]) or not channels:
        return working_bytes(writes=False, num_heads=0, length=0, vocab_size=0)  # reading it will tell what is wrong
    pixels = (side << (len(channels) - 1)) ** 2
    arrays = _IMAGE_ARRAYS * FLOAT_BYTES * int(channels[:2][-1]) * pixels
    return working_bytes(writes=False, num_heads=0, length=0, vocab_size=0) + arrays


def _with_defaults(
    diffusion: Diffusion, pipeline: _Pipeline, module: PublishedDiffusion, index: Mapping[str, Any]
) -> tuple[Diffusion, tuple[str, ...]]:
    """Returns how a pipeline draws, with what it does of requests that name neither steps nor guidance, and notes.

    Few steps without guidance are what distilled models are made for. They are known by the sampler of consistency
    models, or by Euler's method from the last step of training for one that predicts noise (Sauer et al. 2023).
    """
    is_consistent = diffusion.sampler == "lcm"
    is_distilled = is_consistent or (
        diffusion.sampler in ("euler", "euler_ancestral")
        and diffusion.prediction == "noise"
        and diffusion.discrete is not None
        and diffusion.discrete.spacing == "trailing"
    )
    guidance = 1.0 if is_distilled and "guidance" not in module.further_inputs else pipeline.guidance_scale
    notes: tuple[str, ...] = ()
    if is_distilled:
        notes = (
            f"its schedule is that of a model of few steps: a request that names none gets {_FEW_STEPS}, with guidance "
            f"{guidance:g}",
        )
    return diffusion.model_copy(
        update={
            "step_count": _FEW_STEPS if is_distilled else None,
            "guidance_scale": guidance,
            "has_zero_negative": "pooled" in module.further_inputs and index.get("force_zeros_for_empty_prompt", True),
            "mask_cells": "first",
        }
    ), notes


def _check_options(path: Path, options: FolderOptions) -> None:
    """Refuses what is not for a pipeline.

    Raises:
        SourceError: Something of it is asked for.
    """
    if options.task not in (None, Task.IMAGE_GENERATION):
        raise SourceError(f"{path}: is a pipeline of diffusers, for {Task.IMAGE_GENERATION}; --task is {options.task}")
    given = {
        "--max-length": options.max_length,
        "--pooling": options.pooling,
        "--prompt": options.prompts,
        "--base": options.base,
        "--evaluation": options.evaluation_file,
    }
    for flag, value in given.items():
        if value:
            raise SourceError(f"{path}: {flag} is not for a pipeline of diffusers; leave it out")


def _name_of(path: Path) -> str:
    if not (name := model_name(path.resolve().name)):
        raise SourceError(f"{path}: its name is no name of a model; give one with --name")
    return name


def _diffusers(path: Path) -> Any:
    """Returns the library.

    Raises:
        SourceError: It is not installed.
    """
    try:
        with quiet():
            import diffusers  # noqa: PLC0415 (for folders of it)
    except ImportError as error:
        raise SourceError(f"{path}: needs the library diffusers: pip install diffusers") from error
    return diffusers


def _read_json(file: Path) -> dict[str, Any]:
    """Reads an object.

    Raises:
        SourceError: There is none.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{file}: cannot be read ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise SourceError(f"{file}: is not a JSON object")
    return content


def _pipeline_of(path: Path, index: Mapping[str, Any]) -> tuple[_Pipeline, str]:
    """Returns what a pipeline is, and the class of its scheduler.

    Raises:
        SourceError: The pipeline is none that is exported, or a part is of another class.
    """
    name = str(index.get("_class_name"))
    pipeline = _PIPELINES.get(_SAME_PARTS.get(name, name))
    if pipeline is None:
        why = next((f": it {said}" for part, said in _OTHER_PIPELINES.items() if part in name), "")
        raise SourceError(
            f"{path}: is a pipeline {name[:80]}, which is not exported{why}; those that are: "
            f"{', '.join((*_PIPELINES, *_SAME_PARTS))}"
        )
    if index.get("requires_aesthetics_score"):
        raise SourceError(
            f"{path}: refines what another model draws (requires_aesthetics_score), which is not exported"
        )
    found = ""
    for part, classes in (*pipeline.classes.items(), ("vae", ("AutoencoderKL",)), ("scheduler", tuple(_SCHEDULERS))):
        entry = index.get(part)
        found = str(entry[1] if isinstance(entry, list) and len(entry) == 2 else None)
        if found not in classes:
            raise SourceError(f"{path}: its {part} is {found[:80]}, and {name} is exported with {' or '.join(classes)}")
    if isinstance(adapter := index.get("image_encoder"), list) and adapter[0] is not None:
        raise SourceError(f"{path}: has an image encoder beside its text encoder (an IP-Adapter), which no call gives")
    return pipeline, found


# Weights


def _weight_files(folder: Path) -> list[Path]:
    """Returns the files of a part's weights.

    Raises:
        SourceError: There are none of safetensors.
    """
    files = sorted((*folder.glob(_SAFETENSORS), *folder.glob("model*.safetensors")))
    plain = [file for file in files if not {"fp16", "non_ema"} & set(file.name.split("."))]
    if not files:
        others = sorted(file.name for file in folder.glob("*.bin")) if folder.is_dir() else []
        found = f", only {others[0]}, which is pickled and can run any code" if others else ""
        raise SourceError(f"{folder}: has no weights of safetensors{found}; fetch the folder again")
    return plain or files


def _count_weights(folder: Path) -> int:
    """Counts a part's weights by the headers of their files.

    Raises:
        SourceError: They cannot be read.
    """
    count = 0
    for file in _weight_files(folder):
        try:
            opened: Any = safe_open(file, framework="pt")
            count += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
        except Exception as error:  # the library raises kinds of its own
            raise SourceError(f"{file}: cannot be read ({first_line(error)}); fetch the folder again") from error
    return count


def _load(
    path: Path, library: Any, pipeline: _Pipeline, prediction: str, changed: Mapping[int, int]
) -> PublishedDiffusion:
    """Loads the parts, in fp32.

    Raises:
        SourceError: They cannot be read, or do not fit each other.
    """
    loaded = {
        part: _load_part(path / part, getattr(library if part in ("vae", pipeline.denoiser) else transformers, name))
        for part, name in ((part, pipeline.classes.get(part, ("AutoencoderKL",))[0]) for part in pipeline.models)
    }
    denoiser, autoencoder = loaded[pipeline.denoiser], loaded["vae"]
    texts = [model for part, model in loaded.items() if part.startswith("text_encoder")]
    width = sum(model.config.hidden_size for model in texts)
    channels, side = autoencoder.config.latent_channels, denoiser.config.sample_size
    further = _further_inputs(path / pipeline.denoiser, denoiser.config, channels, texts)
    has_variance = pipeline.denoiser == "transformer" and denoiser.config.out_channels == 2 * channels
    for what, found, expected in (
        ("reads {} channels", denoiser.config.in_channels, channels + further.get("inpainting", (0,))[0]),
        ("predicts {} channels", channels if has_variance else denoiser.config.out_channels, channels),
        ("attends to states of width {}", _text_width(denoiser.config) if texts else 0, width),
    ):
        if found != expected:
            raise SourceError(f"{path}: its {pipeline.denoiser} {what.format(found)}, not {expected}")
    if any(getattr(autoencoder.config, name, None) is not None for name in ("latents_mean", "latents_std")):
        raise SourceError(
            f"{path / 'vae'}: has a mean or a deviation of each channel (latents_mean), which is not read"
        )
    sizes = DrawingSizes(
        latent_shape=(channels, side, side),
        image_size=side << (len(autoencoder.config.block_out_channels) - 1),
        max_length=(pipeline.max_length or texts[0].config.max_position_embeddings) if texts else 0,
        d_model=width,
    )
    text_encoder: nn.Module | None = None
    if len(texts) == 2:
        text_encoder = PairedTextStates(*texts, pad_id=_read_tokenizer(path / "tokenizer_2")[1], changed=changed)
    elif texts:
        reads_mask = pipeline.max_length is not None or bool(getattr(texts[0].config, "use_attention_mask", False))
        text_encoder = TextStates(texts[0], reads_mask=reads_mask)
    module = PublishedDiffusion(
        pipeline.make_denoiser(denoiser, tuple(further), sizes.image_size),
        autoencoder,
        text_encoder,
        sizes=sizes,
        prediction=prediction,
        further_inputs=further,
    )
    return module.float().eval()


def _text_width(config: Any) -> int | None:
    """Returns the width of states that a denoiser attends to; PixArt projects them first."""
    found: int | None = getattr(config, "caption_channels", None) or getattr(config, "cross_attention_dim", None)
    return found


def _load_part(folder: Path, part: Any) -> Any:
    """Loads a part of a pipeline.

    Raises:
        SourceError: It cannot be read, or a weight is missing or of another shape.
    """
    given: dict[str, Any] = {}
    if all(".fp16." in file.name for file in _weight_files(folder)):
        given["variant"] = "fp16"
    try:
        with quiet():
            model, loaded = part.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                torch_dtype=torch.float32,
                **given,
            )
    except Exception as error:  # the library raises many kinds
        raise SourceError(f"{folder}: cannot be read as {part.__name__} ({first_line(error)})") from error
    for what, names in (("not there", loaded["missing_keys"]), ("of another shape", loaded["mismatched_keys"])):
        if names := [str(name) for name in names if not str(name).endswith("position_ids")]:
            raise SourceError(
                f"{folder}: {len(names)} weights of {part.__name__} are {what} ({min(names)} is the first); fetch the "
                "folder again"
            )
    return model


_PLAIN: Final = ("class_embed_type", "encoder_hid_dim", "encoder_hid_dim_type", "num_class_embeds")
"""Settings of a denoiser that reads what no call gives."""


def _further_inputs(folder: Path, config: Any, channels: int, texts: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of what a denoiser reads beside a latent, a time and what is drawn.

    Raises:
        SourceError: It reads something that no call gives.
    """
    for name in _PLAIN:
        if getattr(config, name, None) is not None:
            raise SourceError(f"{folder}: has {name} {getattr(config, name)}, an input that no call gives")
    found: dict[str, tuple[int, ...]] = {}
    added = getattr(config, "addition_embed_type", None)
    if (added == "text_time") != (len(texts) == 2) or added not in (None, "text_time"):
        raise SourceError(f"{folder}: has addition_embed_type {added}, which does not fit its text encoders")
    if added:
        found["pooled"] = (int(texts[1].config.projection_dim),)
        expected = config.projection_class_embeddings_input_dim
        if (own := 6 * config.addition_time_embed_dim + found["pooled"][0]) != expected:
            raise SourceError(f"{folder}: reads {expected} numbers of a text and its sizes, and there are {own}")
    if config.in_channels == 2 * channels + 1:
        found["inpainting"] = (1 + channels, config.sample_size, config.sample_size)
    if getattr(config, "time_cond_proj_dim", None) is not None:
        found["guidance"] = ()
    return found


def _number(folder: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or not 1 <= value <= 1024:
        raise SourceError(f"{folder / 'config.json'}: {name} is {str(value)[:40]}; a whole number is expected")
    return value


# Tokenizer


def _read_tokenizer(folder: Path) -> tuple[Tokenizer, int]:
    """Returns a tokenizer and its padding token.

    Raises:
        SourceError: It cannot be read.
    """
    with as_source_error():
        read = open_tokenizer(folder)
    if not hasattr(read, "backend_tokenizer") or read.pad_token_id is None:
        raise SourceError(f"{folder}: is no tokenizer that can be written as tokenizer.json, or has no padding token")
    return plain_tokenizer(read), int(read.pad_token_id)


def _check_tokenizer(path: Path, tokenizer: Tokenizer, pad_id: int, config: Mapping[str, Any]) -> None:
    """Checks that a tokenizer gives no id that the text encoder does not know.

    Raises:
        SourceError: It does.
    """
    largest = max((pad_id, *tokenizer.get_vocab().values()))
    if largest >= int(config.get("vocab_size", 0)):
        raise SourceError(
            f"{path}: the tokenizer has a token of id {largest}, and the vocabulary of its text encoder ends at "
            f"{int(config.get('vocab_size', 0)) - 1}; they do not belong together"
        )


def _changed_tokens(path: Path, first: Tokenizer, config: Mapping[str, Any]) -> dict[int, int]:
    """Returns tokens of a first tokenizer that the second one gives other numbers.

    The second one of SDXL is the same but for its padding, an exclamation mark. That is a word of its own there, so a
    mark at the end of a word has the number of padding.

    Raises:
        SourceError: It is another tokenizer.
    """
    second, pad_id = _read_tokenizer(path / "tokenizer_2")
    _check_tokenizer(path, second, pad_id, config)
    parts = [json.loads(one.to_str()) for one in (first, second)]
    if any(parts[0][name] != parts[1][name] for name in ("model", "normalizer", "pre_tokenizer")):
        raise SourceError(f"{path}: its tokenizer_2 reads texts otherwise than its tokenizer, which is not computed")
    ending = first.get_vocab().get(f"{second.id_to_token(pad_id)}</w>")
    is_word = pad_id in second.get_added_tokens_decoder() and pad_id not in first.get_added_tokens_decoder()
    return {} if ending is None or not is_word else {ending: pad_id}


def _lower_texts(tokenizer: Tokenizer) -> None:
    """Lets a tokenizer read texts in lower case, without spaces around them."""
    own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip(), *own])


# Labels


def _read_labels(path: Path, index: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the labels of a model that draws such.

    Raises:
        SourceError: They are not those of the model.
    """
    file, stated, count = path / PIPELINE_FILE, index.get("id2label"), config.get("num_embeds_ada_norm")
    if not isinstance(stated, dict) or {str(number) for number in range(len(stated))} != set(stated):
        raise SourceError(f"{file}: id2label does not name the labels from 0 on")
    if len(stated) != count:
        raise SourceError(f"{file}: id2label has {len(stated)} labels, and the model {str(count)[:20]}")
    labels = [str(stated[str(number)]) for number in range(len(stated))]
    return tuple(
        label if labels.index(label) == number else f"{label} ({number})" for number, label in enumerate(labels)
    )


# Schedule


def _read_schedule(path: Path, name: str, library: Any, pipeline: _Pipeline) -> tuple[Diffusion, tuple[str, ...]]:
    """Returns the noise schedule and the sampler, and notes.

    Raises:
        SourceError: The scheduler does something that changes images and is not computed.
    """
    file = path / "scheduler" / "scheduler_config.json"
    content, sampler = _read_json(file), _SCHEDULERS[name]
    count = content.get("num_train_timesteps", 1000)
    if not isinstance(count, int) or not 1 <= count <= _MOST_TIMES:  # the library makes arrays of as many
        raise SourceError(f"{file}: num_train_timesteps is {str(count)[:40]}; it is at most {_MOST_TIMES}")
    with _refusing(file), quiet():
        stated = dict(getattr(library, name).from_config(content).config)
    for setting, what in _REFUSED_SETTINGS.items():
        if stated.get(setting) and not (setting == "clip_sample" and pipeline.mends_schedule):
            raise SourceError(f"{file}: asks for {what}, which is not computed")
    betas, prediction = (
        _BETAS.get(str(stated.get("beta_schedule"))),
        _PREDICTIONS.get(str(stated.get("prediction_type"))),
    )
    for setting, known, found in (
        ("beta_schedule", _BETAS, betas),
        ("prediction_type", _PREDICTIONS, prediction),
    ):
        if found is None:
            raise SourceError(f"{file}: {setting} is {str(stated.get(setting))[:40]}; {', '.join(known)} are read")
    expected = {**_EXPECTED_SETTINGS, "solver_type": _SOLVER_TYPES.get(sampler)}
    if sampler is DiffusionSampler.PNDM:
        expected["timestep_spacing"] = "leading"
    for setting, value in expected.items():
        if (found := stated.get(setting)) not in (value, None):
            raise SourceError(f"{file}: {setting} is {str(found)[:40]}; {name} is computed with {value}")
    with _refusing(file):
        noise = DiscreteNoise.model_validate(
            {
                "num_train_steps": stated["num_train_timesteps"],
                "betas": betas,
                "beta_start": stated["beta_start"],
                "beta_end": stated["beta_end"],
                "has_zero_terminal_snr": bool(stated.get("rescale_betas_zero_snr")),
                "spacing": stated.get("timestep_spacing", "leading"),
                "steps_offset": 1 if pipeline.mends_schedule else stated.get("steps_offset", 0),
                "ends_at_image": bool(stated.get("set_alpha_to_one", True)),
                "has_karras_times": bool(stated.get("use_karras_sigmas")),
                "num_consistent_steps": stated.get("original_inference_steps", 50),
            }
        )
        return Diffusion.model_validate(
            {
                "schedule": "discrete",
                "discrete": noise,
                "prediction": prediction,
                "condition": "text" if pipeline.reads_texts else "label",
                "sampler": sampler,
            }
        ), ()


@contextmanager
def _refusing(file: Path) -> Iterator[None]:
    """Turns what the library or the manifest refuses of a scheduler into the error of this package."""
    try:
        yield
    except Exception as error:  # the library raises many kinds
        raise SourceError(f"{file}: is no schedule that is computed ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    errors: Callable[[], list[Any]] | None = getattr(error, "errors", None)
    if errors is None:
        return first_line(error)
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in errors())
