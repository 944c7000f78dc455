"""Images that are drawn, of labels or of texts, by diffusion of latents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from torch import nn

from headway_export.agreement import Kind, Rows
from headway_export.candidate import NUM_ROWS, Candidate, pixel_values_of, run_batch
from headway_export.graphs import DenoiserGraph, DiffusionTextGraph, LatentDecoderGraph, LatentEncoderGraph
from headway_export.inputs import NUM_MASKED, Inputs, affordable, image_positions, places
from headway_export.parity import BATCH_SIZES, SEED, Comparison, sample_images
from headway_export.quality import Quality, figure_of
from headway_export.reference import Reference
from headway_export.source import EvaluationData, ExportSource
from headway_export.tasks.task import ExportTask, Metric
from headway_server.batching import BatchGraph, Tensors
from headway_server.diffusion import mix
from headway_server.tasks.image_generation.prompts import text_row
from headway_training.models import LatentDiffusion
from headway_training.tasks.diffusion import measured_noise


class ImageGeneration(ExportTask):
    """A denoiser of latents, an autoencoder, and an encoder of texts where texts are drawn."""

    metrics = (Metric(name="velocity_error", allowed_loss=0.005, higher_is_better=False),)
    recorded = "velocity"

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Holds all graphs against PyTorch's, rows at drawn times, of drawn labels or evaluation texts."""
        source, graphs = candidate.source, open_diffusion(candidate)
        module = cast("LatentDiffusion", reference.module)
        random, num_classes = np.random.default_rng(SEED), len(source.labels)
        images = pixel_values_of(source, sample_images(source, max(BATCH_SIZES)))
        latents = random.standard_normal((len(images), *module.configuration.latent_shape), np.float32)
        times = random.random(len(images), np.float32)
        prompts: Sequence[Any] = random.integers(
            0, num_classes + 1, len(images)
        ).tolist()  # the last one stands for none
        checked: dict[str, tuple[nn.Module, list[Tensors]]] = {
            "vae_decoder": (LatentDecoderGraph(module), [{"latent": latent} for latent in latents]),
            "vae_encoder": (LatentEncoderGraph(module), [{"pixel_values": image} for image in images]),
        }
        if module.text_encoder is not None:
            assert source.evaluation is not None, "such a model is exported with some"
            prompts = ["", *source.evaluation.texts[: len(images) - 1]]
            prompts = [prompts[row % len(prompts)] for row in range(len(images))]
            checked["text_encoder"] = (DiffusionTextGraph(module), drawing_texts(source, prompts))
        rows: list[Tensors] = [
            {"latent": latent, "timestep": time, **condition}
            for latent, time, condition in zip(
                latents, times, drawing_conditions(candidate, graphs, prompts), strict=True
            )
        ]
        checked["denoiser"] = (DenoiserGraph(module), rows)
        for role, (exact, items) in checked.items():
            for batch_size in BATCH_SIZES:
                some = items[:batch_size]
                for item, found in zip(some, run_batch(graphs[role], some), strict=True):
                    for name, expected in reference.row_outputs(role, exact, item).items():
                        comparison.add(name, found[name].ravel(), expected.ravel(), f"batch {batch_size}")
        comparison.num_shapes += len(BATCH_SIZES)

    def kind(self, source: ExportSource) -> Kind:  # noqa: ARG002
        """A velocity."""
        return "vector"

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Yields the velocity of each latent, (1, C)."""
        graphs = open_diffusion(candidate)
        conditions = drawing_conditions(candidate, graphs, inputs.prompts)
        for number, (item, condition) in enumerate(zip(inputs.items, conditions, strict=True)):
            [found] = run_batch(graphs["denoiser"], [{**item, **condition}])
            yield Rows(found["velocity"].reshape(1, -1).astype(np.float32), np.zeros(1, np.int64), number)

    def inputs_of(
        self, source: ExportSource, data: EvaluationData, most: int | None, candidate: Candidate | None
    ) -> Inputs:
        """Returns noisy latents of images, and what the images show."""
        count = most or affordable(source, image_positions(source), *NUM_MASKED)
        rows = data.take(places(len(data), count))
        assert candidate is not None, "the caller gives it"
        items = tuple(_noisy_latents(candidate, rows))
        return Inputs(dataset=data.dataset, items=items, prompts=tuple(rows.texts or rows.labels.tolist()))

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Mean squared error of velocities of the images' noisy latents, with the noise and times of training."""
        source, graphs = candidate.source, open_diffusion(candidate)
        prompts: Sequence[Any] = data.texts or data.labels.tolist()
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
            items = [
                {"latent": mix(latent, noise[row], times[row]), "timestep": times[row], **condition}
                for row, latent, condition in zip(
                    rows, latents, drawing_conditions(candidate, graphs, prompts[rows[0] : rows[-1] + 1]), strict=True
                )
            ]
            for row, latent, found in zip(rows, latents, run_batch(graphs["denoiser"], items), strict=True):
                angle = float(times[row]) * np.pi / 2
                velocity = np.cos(angle) * noise[row] - np.sin(angle) * latent
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


def open_diffusion(candidate: Candidate) -> dict[str, BatchGraph]:
    """Opens all graphs, by their names."""
    runtime, graphs = candidate.runtime, candidate.variant.graphs
    return {str(role): BatchGraph(runtime.open(candidate.bundle, graph)) for role, graph in graphs.items()}


def drawing_conditions(candidate: Candidate, graphs: Mapping[str, BatchGraph], prompts: Sequence[Any]) -> list[Tensors]:
    """Returns the denoiser's inputs of what is drawn, as a server does, for labels' numbers or for texts."""
    if "text_encoder" not in graphs:
        return [{"label": np.array(label, np.int64)} for label in prompts]
    rows = drawing_texts(candidate.source, prompts)
    states = [found for row in rows for found in run_batch(graphs["text_encoder"], [row])]
    return [{**found, "text_mask": row["attention_mask"]} for found, row in zip(states, rows, strict=True)]


def drawing_texts(source: ExportSource, texts: Sequence[str]) -> list[Tensors]:
    """Returns the inputs of the text encoder of a model that draws images: longer texts are cut."""
    limit, tokens = source.limits.max_input_tokens, source.special_tokens
    assert limit is not None, "the source has read the module's lengths"
    pad = 0 if tokens is None or tokens.pad is None else tokens.pad
    return [text_row(ids.tolist(), limit, pad) for ids in source.encode(texts, limit)]


def _noisy_latents(candidate: Candidate, data: EvaluationData) -> Iterator[Tensors]:
    """Yields what a denoiser reads beside its condition, of the images' latents."""
    encoder = open_diffusion(candidate)["vae_encoder"]
    pixels = pixel_values_of(candidate.source, data.images)
    latents = [run_batch(encoder, [{"pixel_values": image}])[0]["latent"] for image in pixels]
    noise, times = measured_noise(len(latents), latents[0].shape)
    for latent, own, time in zip(latents, noise, times, strict=True):
        yield {"latent": mix(latent, own, time), "timestep": time}
