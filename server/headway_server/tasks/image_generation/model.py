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
from functools import partial
from typing import Final, Self, TypeVar

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
from headway_server.diffusion.engine import (
    GUIDANCE,
    INPAINTING,
    LABEL,
    LATENT,
    TEXT_MASK,
    TIMESTEP,
    Condition,
    Progress,
)
from headway_server.diffusion.samplers import Latent
from headway_server.diffusion.schedules import DRAWING, num_made_steps
from headway_server.errors import BundleError, InvalidInputError
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
    text_states_shapes,
)
from headway_server.tasks.image_generation.request import (
    DEFAULT_GUIDANCE,
    DEFAULT_STEPS,
    ImageGenerationRequest,
)
from headway_server.tasks.job import Job
from headway_server.tasks.parameters import draw_seed

PIXELS: Final = "pixel_values"
_ROLES: Final[tuple[GraphRole, ...]] = ("denoiser", "vae_decoder", "vae_encoder", "text_encoder")
_SEEDS: Final = 2**64
_LATENTS_OF_IMAGE: Final = 3
"""Latents in memory per running image: its noise, its current state and its prediction."""

_Value = TypeVar("_Value")

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
        output = diffusion.prediction
        self._schedule, self._diffusion = schedule_of(diffusion), diffusion
        reads = {spec.name for spec in session.graph.inputs}
        self._reads_guidance, self._reads_inpainting = GUIDANCE in reads, INPAINTING in reads
        self._grey: Latent | None = None  # latent of an image of which nothing is seen
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
                outputs=[name for name in text_states_shapes(graphs["text_encoder"]) if name in reads],
                has_zero_negative=diffusion.has_zero_negative,
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
            states = text_states_shapes(graphs["text_encoder"])
            tried["text_encoder"] = text, states
            row |= {name: np.zeros(one, np.float32) for name, one in states.items()}
            row[TEXT_MASK] = text[ATTENTION_MASK]
        row[INPAINTING] = np.zeros((1 + shape[0], *shape[1:]), np.float32)
        row[GUIDANCE] = np.array(1, np.float32)
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
        request = self._complete(request)
        with self._begin(request, deadline) as job:
            denoisings, edit = await self._prepare(job, request)
            latents = await job.run(denoisings)
            num_steps = denoisings[0].trajectory.num_steps
            return job.answer(await self._finish(job, request, latents, edit, num_steps))

    async def stream(
        self, request: ImageGenerationRequest, *, deadline: float | None
    ) -> AsyncGenerator[ImageProgress | Answer[GeneratedImage], None]:
        """Generates one image: yields its progress, and last the answer. Errors are those of `generate`."""
        request = replace(self._complete(request), num_images=1)
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
            yield job.answer(await self._finish(job, request, [denoising.result.result()], edit, num_steps))

    def _complete(self, request: ImageGenerationRequest) -> ImageGenerationRequest:
        """Returns a request with the model's defaults, and a seed.

        Raises:
            InvalidInputError: The sampler is not for the model, or cannot make as many steps.
        """
        own = self._diffusion
        sampler = request.sampler or DiffusionSampler(own.sampler)
        guidance = DEFAULT_GUIDANCE if own.guidance_scale is None else own.guidance_scale
        if self._reads_guidance and request.negative_prompt:
            raise InvalidInputError(
                "negative_prompt", "this model reads the scale of guidance and no negative prompt; leave it out"
            )
        most = self._schedule.max_steps(sampler)
        num_steps = request.num_steps or min(own.step_count or DEFAULT_STEPS, most or DEFAULT_STEPS)
        if most == 0:
            known = ", ".join(one for one in DiffusionSampler if self._schedule.max_steps(one) != 0)
            raise InvalidInputError("parameters.sampler", f"is {sampler}; this model has {known}: name one of these")
        if most is not None and num_steps > most:
            raise InvalidInputError(
                "parameters.step_count", f"is {num_steps}; the sampler {sampler} makes at most {most} of this model"
            )
        return replace(
            request,
            sampler=sampler,
            num_steps=num_steps,
            guidance_scale=guidance if request.guidance_scale is None else request.guidance_scale,
            seed=draw_seed(request.seed),
        )

    def _begin(self, request: ImageGenerationRequest, deadline: float | None) -> DenoisingJob:
        """Returns the job of a call, which counts the latents of its images."""
        num_latents = request.num_images * _LATENTS_OF_IMAGE + (request.image is not None)
        num_latents += 2 * self._reads_inpainting
        return DenoisingJob(
            self._engine,
            self._admission,
            self._memory,
            count=request.num_images,
            work=self._num_rows(request, (request.prompt, request.negative_prompt)) * _num_made_steps(request),
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
                edit = await read_edit(
                    self._preprocessor,
                    request.image,
                    request.mask,
                    self._latent_shape[-1],
                    self._diffusion.mask_cells,
                )
                job.reserve_more(edit.num_bytes)
            conditions = await self._prompts.conditions(prompts[: self._num_rows(request, prompts)], job)
            job.reserve_more(sum(tensor.nbytes for condition in conditions for tensor in condition.values()))
            if edit is not None:
                edit.latent = await self._encode(job, edit.pixel_values)
            more = await self._more_conditions(job, request, edit)
            conditions = [{**condition, **more} for condition in conditions]
        denoisings = [
            Denoising(
                self._trajectory(request, seed, edit),
                condition=conditions[0],
                other_condition=conditions[-1],
                guidance=_given(request.guidance_scale) if len(conditions) > 1 else 1.0,
                deadline=job.deadline,
                wants_progress=wants_progress,
            )
            for seed in _seeds(request)
        ]
        return denoisings, edit

    async def _encode(self, job: DenoisingJob, pixels: Latent) -> Latent:
        encoded: BatchedResults[Tensors] = await job.batch(
            self._encoder, [{PIXELS: pixels}], outputs=(LATENT,), num_bytes=0, num_read=0
        )
        return encoded.results[0][LATENT]

    async def _more_conditions(
        self, job: DenoisingJob, request: ImageGenerationRequest, edit: Edit | None
    ) -> Condition:
        """Returns what a denoiser reads beside the prompt: the scale of guidance, and what is to be seen of an image.

        Without a mask all of it is generated: nothing is seen.
        """
        more: dict[str, Latent] = {}
        if self._reads_guidance:
            more[GUIDANCE] = np.array(request.guidance_scale, np.float32)
        if self._reads_inpainting:
            mask = np.ones((1, *self._latent_shape[1:]), np.float32)
            if edit is not None and edit.is_preserved is not None:
                mask, seen = 1 - edit.is_preserved.astype(np.float32), await self._encode(job, _given(edit.seen_pixels))
            else:
                if self._grey is None:
                    width, height = self.size
                    self._grey = await self._encode(job, np.zeros((3, height, width), np.float32))
                seen = self._grey
            more[INPAINTING] = np.concatenate((mask, seen))
        return more

    def _num_rows(self, request: ImageGenerationRequest, prompts: Sequence[ImagePrompt | str]) -> int:
        """Returns the rows of an image in a step: two with guidance, unless the model reads the scale of it."""
        is_plain = self._reads_guidance or _given(request.guidance_scale) <= 1
        return 1 if is_plain or prompts[0] == prompts[1] else 2

    def _trajectory(self, request: ImageGenerationRequest, seed: int, edit: Edit | None) -> Trajectory:
        """Returns the initial trajectory of an image: pure noise, or the image to edit with noise of the first step.

        Of an image with a mask all of whose steps are made it is pure noise.
        """
        num_steps = _given(request.num_steps)
        steps = self._schedule.steps(num_steps, _given(request.sampler)).last(num_steps - _num_made_steps(request))
        noise = draw_noise(seed, self._latent_shape)
        latent, preserved = noise * np.float32(steps.noise_scale), None
        if edit is not None and edit.latent is not None:
            if request.share < 1 or edit.is_preserved is None:
                latent = mix(edit.latent, noise, steps.points[0])
            if edit.is_preserved is not None and not self._reads_inpainting:
                preserved = PreservedArea(is_preserved=edit.is_preserved, latent=edit.latent, noise=noise)
        draw = partial(draw_noise, seed, self._latent_shape) if steps.solver in DRAWING else None
        return Trajectory(latent, steps, preserved, prediction=self._diffusion.prediction, draw=draw)

    async def _finish(
        self,
        job: DenoisingJob,
        request: ImageGenerationRequest,
        latents: Sequence[Latent],
        edit: Edit | None,
        num_steps: int,
    ) -> list[GeneratedImage]:
        """Decodes latents to images."""
        decoded = await self._decode(job, latents, edit)
        job.note(decoded.runs)
        width, height = self.size if edit is None else edit.size(self.size)
        return [
            GeneratedImage(png=png, seed=seed, num_steps=num_steps, width=width, height=height)
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


def _num_made_steps(request: ImageGenerationRequest) -> int:
    return num_made_steps(_given(request.num_steps), request.share)


def _given(value: _Value | None) -> _Value:
    """Returns a value that is known by then."""
    assert value is not None, "`_complete` and `read_edit` set it"
    return value


def _seeds(request: ImageGenerationRequest) -> list[int]:
    assert request.seed is not None, "`generate` sets it"
    return [(request.seed + number) % _SEEDS for number in range(request.num_images)]
