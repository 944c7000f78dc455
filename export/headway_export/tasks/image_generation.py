"""Images that are drawn, of labels or of texts, by diffusion of latents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.agreement import Rows
from headway_export.candidate import NUM_ROWS, Candidate, pixel_values_of, run_batch
from headway_export.graphs import Outputs, float_dtype
from headway_export.inputs import NUM_MASKED, Draw, Inputs, affordable, evenly, image_positions, places
from headway_export.parity import BATCH_SIZES, SEED, Comparison, sample_images
from headway_export.quality import Quality, figure_of
from headway_export.reference import Reference
from headway_export.source import EvaluationData, ExportSource
from headway_export.tasks.task import NOT_LOOKED_AT, ExportTask, Metric
from headway_export.tracing import Traceable, TracedGraph, TracedModel, make_spec, trace_graph
from headway_server.batching import BatchGraph, Tensors
from headway_server.bundles import Diffusion, GraphRole, Limits, Manifest, demanded
from headway_server.diffusion import Schedule, mix, schedule_of
from headway_server.runtime import give_back_memory
from headway_server.tasks.image_generation.prompts import text_row
from headway_training.tasks.diffusion import measured_noise

_MOST_SIDE: Final = 256
"""Pixels a side of images that several are compared of: a row of a larger one takes seconds."""
NUM_DRAWN: Final = (16, 64)
"""Noisy latents that judge without evaluation data."""


class DrawingShape(Protocol):
    """Sizes of a model that draws."""

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, and sides."""

    @property
    def image_size(self) -> int:
        """Pixels a side."""

    @property
    def max_length(self) -> int:
        """Tokens that a text is padded to; 0: labels are drawn."""

    @property
    def d_model(self) -> int:
        """Width of a token's states."""


class DrawingModel(Protocol):
    """A model that draws: the kit's `LatentDiffusion`, or a published one."""

    @property
    def configuration(self) -> DrawingShape:
        """Its sizes."""

    @property
    def denoiser(self) -> nn.Module:
        """(B, C, S, S), times (B,), and (B,) labels or (B, T, D) states and (B, T) mask -> (B, C, S, S)."""

    @property
    def text_encoder(self) -> nn.Module | None:
        """(B, T), (B, T) -> (B, T, D)."""

    def encode(self, pixels: Tensor) -> Tensor:
        """(B, 3, I, I) -> (B, C, S, S)."""

    def decode(self, latents: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, 3, I, I)."""


class ImageGeneration(ExportTask):
    """A denoiser of latents, an autoencoder, and an encoder of texts where texts are drawn."""

    metrics = (Metric(name="velocity_error", allowed_loss=0.005, higher_is_better=False),)
    recorded = "velocity"
    own_kind = "vector"
    names_columns = False
    takes_fixed_scales = False
    needs_evaluation = True
    is_of_the_kit = True
    is_evaluated_served = False
    shows_no_attention = NOT_LOOKED_AT
    attends_by_operator = False

    def limits(self, module: nn.Module) -> Limits:
        """Reads that of texts, where such are drawn."""
        drawn: DrawingShape | None = getattr(module, "configuration", None)
        return Limits(max_input_tokens=None if drawn is None else drawn.max_length or None)

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads images, and their texts or labels."""
        with np.load(file) as arrays:
            shows = {"texts": arrays["texts"].tolist()} if "texts" in arrays else {"labels": arrays["labels"]}
            return {"images": arrays["images"], **shows}

    def described(self, source: ExportSource) -> dict[str, Any]:
        """What is drawn, and how."""
        return {"diffusion": diffusion_of(source)}

    def output_of(self, source: ExportSource) -> str:
        """Returns what the denoiser predicts."""
        return diffusion_of(source).prediction

    def image_limits(self, manifest: Manifest) -> list[str]:
        """Says how large what it draws is, and how long a prompt may be."""
        image, limit = demanded(manifest.image_preprocessing), manifest.limits.max_input_tokens
        prompts = [] if limit is None else [f"A prompt is any text of at most {limit} tokens."]
        return [f"It draws images of {image.height} x {image.width} pixels.", *prompts]

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces all graphs."""
        module = cast("DrawingModel", asked.module)
        shape = module.configuration
        latent = make_spec("latent", "float32", "batch", *shape.latent_shape)
        pixels = make_spec("pixel_values", "float32", "batch", 3, shape.image_size, shape.image_size)
        rows = [latent, make_spec("timestep", "float32", "batch")]
        graphs: tuple[TracedGraph, ...] = ()
        if module.text_encoder is None:
            rows.append(make_spec("label", "int64", "batch"))
        else:
            ids, mask, text_mask = (
                make_spec(name, "int64", "batch", shape.max_length)
                for name in ("input_ids", "attention_mask", "text_mask")
            )
            graphs = (trace_graph("text_encoder", asked.module, DiffusionTextGraph(module), [ids, mask]),)
            rows += [make_spec("text", "float32", "batch", shape.max_length, shape.d_model), text_mask]
        further: Mapping[str, tuple[int, ...]] = getattr(module, "further_inputs", {})
        rows += [make_spec(name, "float32", "batch", *axes) for name, axes in further.items()]
        return TracedModel(
            graphs=(
                trace_graph("denoiser", asked.module, DenoiserGraph(module), rows),
                trace_graph("vae_decoder", asked.module, LatentDecoderGraph(module), [latent]),
                trace_graph("vae_encoder", asked.module, LatentEncoderGraph(module), [pixels]),
                *graphs,
            )
        )

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Holds all graphs against PyTorch's, rows at drawn times, of drawn labels or evaluation texts.

        One graph is open at a time: that of a denoiser lays out gigabytes.
        """
        source = candidate.source
        module = cast("DrawingModel", reference.module)
        random, num_classes = np.random.default_rng(SEED), len(source.labels)
        is_large = module.configuration.image_size > _MOST_SIDE
        batch_sizes = (*BATCH_SIZES[:1], 2) if is_large else BATCH_SIZES
        images = pixel_values_of(source, sample_images(source, max(batch_sizes)))
        latents = random.standard_normal((len(images), *module.configuration.latent_shape), np.float32)
        times = _times(schedule_of(diffusion_of(source)), random.random(len(images), np.float32))
        prompts: Sequence[Any] = random.integers(
            0, num_classes + 1, len(images)
        ).tolist()  # the last one stands for none
        checked: dict[GraphRole, tuple[nn.Module, list[Tensors]]] = {
            "vae_decoder": (LatentDecoderGraph(module), [{"latent": latent} for latent in latents]),
            "vae_encoder": (LatentEncoderGraph(module), [{"pixel_values": image} for image in images]),
        }
        if module.text_encoder is not None:
            texts = Draw(candidate).texts(len(images)) if source.evaluation is None else source.evaluation.texts
            prompts = ["", *texts[: len(images) - 1]]
            prompts = [prompts[row % len(prompts)] for row in range(len(images))]
            checked["text_encoder"] = (DiffusionTextGraph(module), drawing_texts(source, prompts))
        rows: list[Tensors] = [
            {"latent": latent, "timestep": time, **condition}
            for latent, time, condition in zip(
                latents, times, _conditions(candidate, drawing_rows(source, prompts)), strict=True
            )
        ]
        checked["denoiser"] = (DenoiserGraph(module), rows)
        for role, (exact, items) in checked.items():
            graph = open_graph(candidate, role)
            for batch_size in batch_sizes[:1] if is_large and role != "denoiser" else batch_sizes:
                some = items[:batch_size]
                for item, found in zip(some, run_batch(graph, some), strict=True):

                    def flat(role: GraphRole = role, exact: nn.Module = exact, item: Tensors = item) -> Tensors:
                        answers = reference.row_outputs(role, exact, item)
                        return {name: array.ravel() for name, array in answers.items()}

                    numbers = {name: array.ravel() for name, array in found.items()}
                    comparison.add_outputs(numbers, f"batch {batch_size}", flat)
            del graph
            give_back_memory()
        comparison.num_shapes += len(batch_sizes)

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Yields what is predicted of each latent, (1, C)."""
        conditions, output = _conditions(candidate, inputs.items), self.output_of(candidate.source)
        denoiser = open_graph(candidate, "denoiser")
        for number, (item, condition) in enumerate(zip(inputs.items, conditions, strict=True)):
            [found] = run_batch(denoiser, [{**item, **condition}])
            yield Rows(found[output].reshape(1, -1).astype(np.float32), np.zeros(1, np.int64), number)

    def inputs_of(
        self, source: ExportSource, data: EvaluationData, most: int | None, candidate: Candidate | None
    ) -> Inputs:
        """Returns noisy latents of images, and what the images show."""
        count = most or affordable(source, image_positions(source), *NUM_MASKED)
        rows = data.take(places(len(data), count))
        assert candidate is not None, "the caller gives it"
        pixels = [{"pixel_values": image} for image in pixel_values_of(source, rows.images)]
        shown = drawing_rows(source, list(rows.texts) or rows.labels.tolist())
        noise, times = measured_noise(len(rows), _latent_shape(candidate))
        return Inputs(dataset=data.dataset, items=tuple(_noisy_latents(candidate, pixels, shown, noise, times)))

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Draws noisy latents of images, and what they are to show."""
        source = draw.source
        pixels = draw.pixels(affordable(source, image_positions(source), *NUM_DRAWN))
        prompts: list[Any] = draw.generator.integers(0, len(source.labels) + 1, len(pixels)).tolist()
        if source.tokenizer is not None:
            prompts = list(evenly(source.texts, len(pixels)) if source.texts else draw.texts(len(pixels)))
        shown = drawing_rows(source, [prompts[row % len(prompts)] for row in range(len(pixels))])
        noise = draw.generator.standard_normal((len(pixels), *_latent_shape(draw.candidate)), np.float32)
        times = draw.generator.random(len(pixels), np.float32)
        items = list(_noisy_latents(draw.candidate, pixels, shown, noise, times))
        return items, items

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Mean squared error of velocities of the images' noisy latents, with the noise and times of training."""
        source = candidate.source
        graphs = {role: open_graph(candidate, role) for role in ("vae_encoder", "denoiser", "vae_decoder")}
        schedule = schedule_of(diffusion_of(source))
        prompts: Sequence[Any] = data.texts or data.labels.tolist()
        conditions = _conditions(candidate, drawing_rows(source, prompts))
        errors = np.empty(len(data))
        squares = 0.0
        for start in range(0, len(data), NUM_ROWS):
            pixels = pixel_values_of(source, data.images[start : start + NUM_ROWS])
            latents = np.stack(
                [
                    found["latent"]
                    for found in run_batch(graphs["vae_encoder"], [{"pixel_values": one} for one in pixels])
                ]
            )
            if not start:
                noise, times = measured_noise(len(data), latents.shape[1:])
            rows = range(start, start + len(latents))
            points = [schedule.point(float(times[row])) for row in rows]
            items = [
                {"latent": mix(latent, noise[row], point), "timestep": times[row], **condition}
                for row, latent, point, condition in zip(
                    rows, latents, points, conditions[rows[0] : rows[-1] + 1], strict=True
                )
            ]
            answers = run_batch(graphs["denoiser"], items)
            for row, latent, point, found in zip(rows, latents, points, answers, strict=True):
                velocity = point.signal * noise[row] - point.noise * latent
                errors[row] = np.square(found["velocity"] - velocity).mean()
            images = run_batch(graphs["vae_decoder"], [{"latent": latent} for latent in latents])
            shown = np.stack([found["pixel_values"] for found in images]).transpose(0, 2, 3, 1)
            squares += float(np.square(shown - data.images[start : start + NUM_ROWS] / 255).mean(axis=(1, 2, 3)).sum())
        psnr = -10 * np.log10(max(squares / len(data), 1e-10))
        parts = ", ".join(
            f"{errors[(times >= low) & (times < low + 0.25)].mean():.3f} ({low:g} to {low + 0.25:g})"
            for low in (0.0, 0.25, 0.5, 0.75)
            if ((times >= low) & (times < low + 0.25)).any()
        )
        return Quality(
            figure=figure_of(data, float(errors.mean())),
            weak_points=(
                f"Squared error of the velocity by the time, from 0, an image, to 1, noise: {parts}.",
                "An image that goes through the autoencoder comes back with a peak signal-to-noise ratio of "
                f"{psnr:.1f} dB; no drawing can be finer than that.",
            ),
        )


def open_graph(candidate: Candidate, role: GraphRole) -> BatchGraph:
    """Opens one of the graphs."""
    return BatchGraph(candidate.runtime.open(candidate.bundle, candidate.variant.graphs[role]))


def diffusion_of(source: ExportSource) -> Diffusion:
    """Returns how a source draws: as it says, or as the kit's own models do."""
    if source.diffusion is not None:
        return source.diffusion
    condition: Literal["text", "label"] = "label" if source.tokenizer is None else "text"
    return Diffusion(schedule="trigonometric", prediction="velocity", condition=condition)


def drawing_rows(source: ExportSource, prompts: Sequence[Any]) -> list[Tensors]:
    """Returns what stands for labels' numbers or texts: a label, or the inputs of the text encoder."""
    if source.tokenizer is None:
        return [{"label": np.array(label, np.int64)} for label in prompts]
    return drawing_texts(source, prompts)


def drawing_texts(source: ExportSource, texts: Sequence[str]) -> list[Tensors]:
    """Returns the inputs of the text encoder of a model that draws images: longer texts are cut."""
    limit, tokens = source.limits.max_input_tokens, source.special_tokens
    assert limit is not None, "the source has read the module's lengths"
    pad = 0 if tokens is None or tokens.pad is None else tokens.pad
    return [text_row(ids.tolist(), limit, pad) for ids in source.encode(texts, limit)]


def _conditions(candidate: Candidate, rows: Sequence[Tensors]) -> list[Tensors]:
    """Returns the denoiser's inputs of what is drawn, as a server does, for rows of `drawing_rows`."""
    if "text_encoder" not in candidate.variant.graphs:
        return [{"label": row["label"]} for row in rows]
    encoder = open_graph(candidate, "text_encoder")
    return [_text_condition(candidate, encoder, row) for row in rows]


def _text_condition(candidate: Candidate, encoder: BatchGraph, row: Tensors) -> Tensors:
    [found] = run_batch(encoder, [row])
    drawn = np.random.default_rng(SEED)
    condition: dict[str, NDArray[Any]] = {"text": found["text"], "text_mask": row["attention_mask"]}
    for spec in candidate.variant.graphs["denoiser"].inputs[len(("latent", "timestep", *condition)) :]:
        axes = tuple(axis for axis in spec.shape[1:] if isinstance(axis, int))
        condition[spec.name] = found[spec.name] if spec.name in found else drawn.standard_normal(axes, np.float32)
        if spec.name == "inpainting":
            condition[spec.name][0] = condition[spec.name][0] > 0  # the mask
    return condition


def _latent_shape(candidate: Candidate) -> tuple[int, int, int]:
    return cast("DrawingModel", candidate.source.module).configuration.latent_shape


def _times(schedule: Schedule, shares: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns times of a schedule that are shares of its last one; of a discrete one whole numbers."""
    times = shares * np.float32(schedule.last_time)
    return times if schedule.last_time == 1 else np.rint(times)


def _noisy_latents(
    candidate: Candidate,
    pixels: Sequence[Tensors],
    shown: Sequence[Tensors],
    noise: NDArray[np.float32],
    shares: NDArray[np.float32],
) -> Iterator[Tensors]:
    """Yields what a denoiser reads of images, (N,), at shares of the last time, with what its condition comes from."""
    encoder, schedule = open_graph(candidate, "vae_encoder"), schedule_of(diffusion_of(candidate.source))
    times = _times(schedule, shares)
    for image, row, own, time in zip(pixels, shown, noise, times, strict=True):
        latent = run_batch(encoder, [image])[0]["latent"]
        yield {"latent": mix(latent, own, schedule.point(float(time))), "timestep": time, **row}


# Graphs


class DenoiserGraph(nn.Module):
    """Graph `denoiser`: what is predicted of noisy latents, each row at a time of its own."""

    def __init__(self, module: DrawingModel) -> None:
        super().__init__()
        self.module = module.denoiser
        self.prediction: str = getattr(module, "prediction", "velocity")

    def forward(self, latent: Tensor, timestep: Tensor, *conditions: Tensor) -> Outputs:
        """The inputs of `Denoiser`, floats as float32 -> float32, named by what is predicted."""
        dtype = float_dtype(self.module)
        read = [one.to(dtype) if one.is_floating_point() else one for one in conditions]
        return {self.prediction: self.module(latent.to(dtype), timestep, *read).float()}


class DiffusionTextGraph(nn.Module):
    """Graph `text_encoder`: the states of texts, all padded to the same length."""

    def __init__(self, module: DrawingModel) -> None:
        super().__init__()
        self.module = module.text_encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Outputs:
        """int64 (B, T), and int64 (B, T), 1 at tokens and 0 at padding -> float32 (B, T, D), and perhaps (B, P)."""
        assert self.module is not None, "only a model that draws texts has this graph"
        found = self.module(input_ids, attention_mask)
        states = found if isinstance(found, tuple) else (found,)
        return {name: one.float() for name, one in zip(("text", "pooled"), states, strict=False)}


class LatentDecoderGraph(nn.Module):
    """Graph `vae_decoder`: images of latents."""

    def __init__(self, module: DrawingModel) -> None:
        super().__init__()
        self.module: Any = module

    def forward(self, latent: Tensor) -> Outputs:
        """Float32 (B, C, S, S) -> RGB values of 0 to 1, float32 (B, 3, height, width)."""
        return {"pixel_values": self.module.decode(latent.to(float_dtype(self.module))).float().clamp(0, 1)}


class LatentEncoderGraph(nn.Module):
    """Graph `vae_encoder`: latents of images."""

    def __init__(self, module: DrawingModel) -> None:
        super().__init__()
        self.module: Any = module

    def forward(self, pixel_values: Tensor) -> Outputs:
        """Float32 (B, 3, height, width), normalised -> float32 (B, C, S, S)."""
        return {"latent": self.module.encode(pixel_values.to(float_dtype(self.module))).float()}
