"""Served image generation model: an engine for its denoiser, and a batcher for each of its other graphs.

Encoder and decoder run one image at a time: batching convolutions gains nothing on the CPU, and an image depends on
its own request alone. Texts are encoded one at a time too.

C channels and S side of a latent, H, W height and width of an image.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import structlog

from headway_server.batching import Batcher, BatchGraph, Tensors
from headway_server.batching.batcher import BatchedResults
from headway_server.bundles import TOKENIZER_FILE, Bundle, GraphRole, Precision, demanded
from headway_server.diffusion import (
    Denoising,
    DenoisingEngine,
    DiffusionSampler,
    PreservedArea,
    Trajectory,
    draw_noise,
    mix,
    schedule_of,
)
from headway_server.diffusion.engine import LABEL, LATENT, TEXT, TEXT_MASK, TIMESTEP, Progress
from headway_server.diffusion.samplers import Latent
from headway_server.errors import BundleError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.preprocessing import ImagePreprocessor, TextTokenizer
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.serving.families import ServedModel
from headway_server.serving.permits import Admission, MeasuredPace
from headway_server.settings import ServerSettings
from headway_server.tasks.image_generation.editing import Edit, encode_png, read_edit
from headway_server.tasks.image_generation.prompts import (
    ATTENTION_MASK,
    ImagePrompt,
    LabelPrompts,
    Prompts,
    TextPrompts,
    text_row,
    text_states_shape,
)
from headway_server.tasks.image_generation.request import ImageGenerationRequest
from headway_server.tasks.job import Job
from headway_server.tasks.parameters import draw_seed

PIXELS: Final = "pixel_values"
_ROLES: Final[tuple[GraphRole, ...]] = ("denoiser", "vae_decoder", "vae_encoder", "text_encoder")
_SEEDS: Final = 2**64
_LATENTS_OF_IMAGE: Final = 3
"""Latents in memory per running image: its noise, its current state and its prediction."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedImage:
    """A generated image."""

    png: bytes
    seed: int
    """Seed with which a request for one image reproduces it."""
    num_steps: int
    """Denoising steps made."""
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProgress:
    """Progress of an image."""

    num_made: int
    num_steps: int
    preview: bytes | None
    """PNG of the current prediction; None if no preview is due."""


class ImageGenerationModel(ServedModel):
    """Generates and edits images by label or text prompt."""

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        settings: ServerSettings,
        graphs: Mapping[GraphRole, BatchGraph],
        max_padding: Mapping[GraphRole, int | None],
        *,
        observer: Observer,
    ) -> None:
        """Assembles a model from its parts; `load` makes the parts."""
        manifest, denoiser = bundle.manifest, graphs["denoiser"]
        super().__init__(bundle, precision, denoiser.device)
        self._preprocessor = ImagePreprocessor(demanded(manifest.image_preprocessing), settings.image_limits)
        self._latent_shape = _latent_shape(denoiser)
        model = ModelId(name=manifest.name, version=manifest.version)
        session, diffusion = denoiser.session, demanded(manifest.diffusion)
        output = self._prediction = diffusion.prediction
        self._schedule, self._sampler = schedule_of(diffusion), DiffusionSampler(diffusion.sampler)
        self._engine = DenoisingEngine(
            lambda inputs: session.run(inputs, [output])[output],
            max_rows=settings.batching.denoising_rows(self.device),
            model=model,
            busy_lanes=session.cores.busy_lanes(),
            observer=observer,
        )
        batchers = {
            role: Batcher(
                graph, budget=1, model=model, session=graph.session, max_padding=max_padding[role], observer=observer
            )
            for role, graph in graphs.items()
            if role != "denoiser"
        }
        self._decoder, self._encoder = batchers["vae_decoder"], batchers["vae_encoder"]
        self.workers += [self._engine, *batchers.values()]
        self._prompts: Prompts = LabelPrompts(manifest.labels)
        if "text_encoder" in batchers:
            self._prompts = TextPrompts(
                TextTokenizer.load(bundle.path / TOKENIZER_FILE),
                batchers["text_encoder"],
                max_tokens=demanded(manifest.limits.max_input_tokens),
                pad_id=_pad_id(bundle),
                max_bytes=settings.max_text_bytes,
            )
        self._admission = Admission(
            limit=settings.batching.max_waiting_images, noun="images", owner=manifest.name, pace=MeasuredPace()
        )
        self._memory = Admission(
            limit=None,
            noun="decoded images and states of texts",
            owner=manifest.name,
            max_bytes=settings.batching.max_waiting_bytes,
        )

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads the requested variant, or the best one for the runtime, and runs it once.

        Raises:
            BundleError: A graph cannot be loaded, or it or its preprocessing does not fit the manifest.
            RuntimeUnavailableError: The bundle does not have the variant.
        """
        manifest = bundle.manifest
        sizes = demanded(manifest.image_preprocessing)
        size = (3, sizes.height, sizes.width)
        precision, variant = runtime.choose_variant(manifest, settings.precision)
        graphs = {
            role: BatchGraph(runtime.open(bundle, variant.graphs[role])) for role in _ROLES if role in variant.graphs
        }
        shape = _latent_shape(graphs["denoiser"])
        blank = np.zeros(shape, np.float32)
        row = {LATENT: blank, TIMESTEP: np.array(1, np.float32), LABEL: np.array(len(manifest.labels))}
        tried: dict[GraphRole, tuple[Tensors, Mapping[str, tuple[int, ...]]]] = {
            "denoiser": (row, {demanded(manifest.diffusion).prediction: shape}),
            "vae_decoder": ({LATENT: blank}, {PIXELS: size}),
            "vae_encoder": ({PIXELS: np.zeros(size, np.float32)}, {LATENT: shape}),
        }
        if "text_encoder" in graphs:
            text = text_row((), demanded(manifest.limits.max_input_tokens), _pad_id(bundle))
            states = text_states_shape(graphs["text_encoder"])
            tried["text_encoder"] = text, {TEXT: states}
            row |= {TEXT: np.zeros(states, np.float32), TEXT_MASK: text[ATTENTION_MASK]}
        max_padding = {role: graphs[role].warm_up(inputs, 1, outputs) for role, (inputs, outputs) in tried.items()}
        return cls(bundle, precision, settings, graphs, max_padding, observer=observer)

    def __repr__(self) -> str:
        manifest = self.bundle.manifest
        return f"ImageGenerationModel({manifest.name}/{manifest.version}, {self.precision}, {self._engine!r})"

    async def generate(self, request: ImageGenerationRequest, *, deadline: float | None) -> Answer[GeneratedImage]:
        """Generates the images of a call; all of them, or none.

        Args:
            request: Parameters of the call.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: A label is unknown, a text is too long, an image cannot be read, the queue is full, the
                deadline
            passed, the server is draining.
        """
        request = replace(request, seed=draw_seed(request.seed))
        with self._begin(request, deadline) as job:
            denoisings, edit = await self._prepare(job, request)
            latents = await job.run(denoisings)
            return job.answer(await self._finish(job, request, latents, edit))

    async def stream(
        self, request: ImageGenerationRequest, *, deadline: float | None
    ) -> AsyncGenerator[ImageProgress | Answer[GeneratedImage], None]:
        """Generates one image: yields its progress, and last the answer. Errors are those of `generate`."""
        request = replace(request, seed=draw_seed(request.seed), num_images=1)
        with self._begin(request, deadline) as job:
            [denoising], edit = await self._prepare(job, request, wants_progress=True)
            num_steps, due = denoising.trajectory.num_steps, request.preview_step_count
            async with aclosing(job.stream(denoising)) as parts:
                async for part in parts:
                    preview = None
                    if due and part.num_made >= due:
                        due = part.num_made + request.preview_step_count
                        [preview] = (await self._decode(job, [part.image], edit)).results
                    yield ImageProgress(num_made=part.num_made, num_steps=num_steps, preview=preview)
            yield job.answer(await self._finish(job, request, [denoising.result.result()], edit))

    def _begin(self, request: ImageGenerationRequest, deadline: float | None) -> DenoisingJob:
        """Returns the job of a call, which counts the latents of its images."""
        num_latents = request.num_images * _LATENTS_OF_IMAGE + (request.image is not None)
        return DenoisingJob(
            self._engine,
            self._admission,
            self._memory,
            count=request.num_images,
            work=_work(request),
            num_bytes=num_latents * math.prod(self._latent_shape) * np.dtype(np.float32).itemsize,
            deadline=deadline,
        )

    async def _prepare(
        self, job: DenoisingJob, request: ImageGenerationRequest, *, wants_progress: bool = False
    ) -> tuple[list[Denoising], Edit | None]:
        """Reads the prompts and the image to edit, if there is one, and reserves their bytes in the job.

        Returns:
            A denoising for each image, and the edit with its latent.
        """
        with job.preparing():
            read = self._prompts.read
            prompts = await read("prompt", request.prompt), await read("negative_prompt", request.negative_prompt)
            edit = None
            if request.image is not None:
                edit = await read_edit(self._preprocessor, request.image, request.mask, self._latent_shape[-1])
                job.reserve_more(edit.num_bytes)
            conditions = await self._prompts.conditions(prompts[: _num_rows(request, prompts)], job)
            job.reserve_more(sum(tensor.nbytes for condition in conditions for tensor in condition.values()))
            if edit is not None:
                encoded: BatchedResults[Tensors] = await job.batch(
                    self._encoder, [{PIXELS: edit.pixel_values}], outputs=(LATENT,), num_bytes=0, num_read=0
                )
                edit.latent = encoded.results[0][LATENT]
        denoisings = [
            Denoising(
                self._trajectory(request, seed, edit),
                condition=conditions[0],
                other_condition=conditions[-1],
                guidance=request.guidance_scale if len(conditions) > 1 else 1.0,
                deadline=job.deadline,
                wants_progress=wants_progress,
            )
            for seed in _seeds(request)
        ]
        return denoisings, edit

    def _trajectory(self, request: ImageGenerationRequest, seed: int, edit: Edit | None) -> Trajectory:
        """Returns the initial trajectory of an image: pure noise, or the image to edit with partial noise."""
        steps = self._schedule.steps(request.num_steps, request.sampler or self._sampler).last(request.share)
        noise = draw_noise(seed, self._latent_shape)
        latent, preserved = noise * np.float32(steps.noise_scale), None
        if edit is not None and edit.latent is not None:
            if request.share < 1:
                latent = mix(edit.latent, noise, steps.points[0])
            if edit.is_preserved is not None:
                preserved = PreservedArea(is_preserved=edit.is_preserved, latent=edit.latent, noise=noise)
        return Trajectory(latent, steps, preserved, prediction=self._prediction)

    async def _finish(
        self, job: DenoisingJob, request: ImageGenerationRequest, latents: Sequence[Latent], edit: Edit | None
    ) -> list[GeneratedImage]:
        """Decodes latents to images."""
        decoded = await self._decode(job, latents, edit)
        job.note(decoded.runs)
        width, height = self.size if edit is None else edit.size(self.size)
        return [
            GeneratedImage(png=png, seed=seed, num_steps=request.num_made_steps, width=width, height=height)
            for png, seed in zip(decoded.results, _seeds(request), strict=True)
        ]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of generated images, in pixels."""
        sizes = demanded(self.bundle.manifest.image_preprocessing)
        return sizes.width, sizes.height

    async def _decode(self, job: DenoisingJob, latents: Sequence[Latent], edit: Edit | None) -> BatchedResults[bytes]:
        """Decodes latents to PNG files, off the event loop."""

        def read(row: Tensors, _: int) -> bytes:
            pixels = np.rint(row[PIXELS].transpose(1, 2, 0) * 255).astype(np.uint8)  # (H, W, 3)
            return encode_png(pixels if edit is None else edit.composite(pixels))

        items = [{LATENT: latent} for latent in latents]
        return await job.batch(self._decoder, items, outputs=(PIXELS,), num_bytes=0, num_read=0, read=read)


class DenoisingJob(Job[DenoisingEngine]):
    """Call of denoised images."""

    async def run(self, denoisings: Sequence[Denoising]) -> list[Latent]:
        """Returns the final latents, whose bytes are counted already; errors are those of `DenoisingEngine.run`."""
        with self._running(num_bytes=0, num_read=0):
            latents = await self._engine.run(denoisings, self.caller)
        self.note(denoisings)
        return latents

    async def stream(self, denoising: Denoising) -> AsyncGenerator[Progress, None]:
        """Runs a denoising as `run` does and yields its progress; its `result` is set afterwards."""
        with self._running(num_bytes=0, num_read=0):
            async with aclosing(self._engine.stream(denoising, self.caller)) as parts:
                async for part in parts:
                    yield part
        self.note([denoising])


def _latent_shape(denoiser: BatchGraph) -> tuple[int, ...]:
    graph = denoiser.session.graph
    shape = next((spec.shape[1:] for spec in graph.inputs if spec.name == LATENT), ())
    sizes = tuple(axis for axis in shape if isinstance(axis, int))
    if len(sizes) != 3 or sizes[1] != sizes[2]:
        raise BundleError(
            f"{graph.file}: latents of {shape}; (channels, side, side) is expected: export the model again"
        )
    return sizes


def _pad_id(bundle: Bundle) -> int:
    tokens = bundle.manifest.special_tokens
    return 0 if tokens is None or tokens.pad is None else tokens.pad


def _num_rows(request: ImageGenerationRequest, prompts: tuple[ImagePrompt, ImagePrompt] | tuple[str, str]) -> int:
    """Returns the rows of an image in a step: two with classifier-free guidance."""
    return 1 if request.guidance_scale == 1 or prompts[0] == prompts[1] else 2


def _work(request: ImageGenerationRequest) -> float:
    """Returns the total rows of an image over all steps, from the unread prompts."""
    return float(_num_rows(request, (request.prompt, request.negative_prompt)) * request.num_made_steps)


def _seeds(request: ImageGenerationRequest) -> list[int]:
    assert request.seed is not None, "`generate` sets it"
    return [(request.seed + number) % _SEEDS for number in range(request.num_images)]
