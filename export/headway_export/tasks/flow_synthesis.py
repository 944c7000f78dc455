"""Speech of texts by normalizing flows: durations and frames of texts, and the samples of frames.

B texts, T tokens, F frames, D channels of a frame, S samples.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Protocol, cast

import numpy as np
from torch import Tensor, nn

from headway_export.candidate import Candidate, run_batch
from headway_export.graphs import Outputs
from headway_export.parity import BATCH_SIZES, SEED, Comparison
from headway_export.reference import Reference
from headway_export.source import ExportSource
from headway_export.tasks.task import NOT_LOOKED_AT, TaskOfOnePrecision
from headway_export.tracing import Traceable, TracedModel, make_spec, trace_graph
from headway_server.batching import BatchGraph, Tensors
from headway_server.bundles import FLOW_TENSORS, GraphRole, Limits, Manifest, demanded

_LENGTHS: Final = (33, 7, 1)
"""Tokens of the texts of each compared batch, and their frames: beside what a graph was traced at."""


class FlowSpeaker(Protocol):
    """A model that speaks by flows; docs/speech.md says what it computes."""

    @property
    def max_source_length(self) -> int:
        """Most tokens of a text."""

    @property
    def num_speakers(self) -> int:
        """Voices; 0: it has one, without a name."""

    def durations(self, input_ids: Tensor, noise: Tensor, speaker: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T), (B, 2, T), (B,) -> frames of tokens (B, T), and the means and deviations of these, (B, T, D)."""

    def samples(self, latents: Tensor, speaker: Tensor | None) -> Tensor:
        """(B, F, D), (B,) -> (B, S)."""


class FlowSynthesis(TaskOfOnePrecision):
    """An encoder of texts, and a decoder of frames to samples."""

    recorded = "samples"
    own_kind = "vector"
    names_columns = False
    is_read = False
    is_of_the_kit = True
    is_evaluated_served = False
    takes_fixed_scales = False
    shows_no_attention = NOT_LOOKED_AT
    attends_by_operator = False
    words_of_error = "sample error"
    words_of_names = "Voices"
    only_in_fp32 = "its convolutions, which take nearly all of its time, stay in fp32"

    def limits(self, module: nn.Module) -> Limits:
        """Reads that of texts."""
        return Limits(max_input_tokens=int(cast("FlowSpeaker", module).max_source_length))

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Says how frames are drawn."""
        return {"flow": source.flow}

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how long it speaks."""
        flow = demanded(manifest.flow)
        seconds = flow.max_frames * flow.hop_length / flow.sampling_rate
        return [f"It speaks mono audio of {flow.sampling_rate} Hz, at most {seconds:.0f} seconds of a text."]

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces both graphs."""
        module = asked.module
        speaker = cast("FlowSpeaker", module)
        voice = [make_spec("speaker", "int64", "batch")] if speaker.num_speakers else []
        ids, noise = (
            make_spec("input_ids", "int64", "batch", "length"),
            make_spec("duration_noise", "float32", "batch", 2, "length"),
        )
        encoder = trace_graph("text_encoder", module, FlowTextGraph(speaker), [ids, noise, *voice])
        channels = next(spec.shape[-1] for spec in encoder.outputs if spec.name == "means")
        latents = make_spec("latents", "float32", "batch", "frames", channels)
        decoder = trace_graph(
            "waveform_decoder",
            module,
            FlowWaveformGraph(speaker),
            [latents, *voice],
            outputs=[make_spec("samples", "float32", "batch", "samples")],
        )
        return TracedModel(graphs=(encoder, decoder))

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Holds durations, frames and samples of drawn texts and frames against PyTorch's."""
        source, random = candidate.source, np.random.default_rng(SEED)
        flow, module = demanded(source.flow), cast("FlowSpeaker", reference.module)
        tokenizer = source.tokenizer
        assert tokenizer is not None, "a model that speaks texts has its tokenizer"
        known = sorted(tokenizer.get_vocab().values())
        graphs: dict[GraphRole, nn.Module] = {
            "text_encoder": FlowTextGraph(module),
            "waveform_decoder": FlowWaveformGraph(module),
        }
        for batch_size, length in zip(BATCH_SIZES, _LENGTHS, strict=True):
            for role, graph in graphs.items():
                opened = BatchGraph(candidate.runtime.open(candidate.bundle, candidate.variant.graphs[role]))
                items: list[Tensors] = []
                for _ in range(batch_size):
                    item: dict[str, Any] = {"latents": random.normal(size=(length, flow.num_channels)).astype("f4")}
                    if role == "text_encoder":
                        noise = random.normal(size=(2, length)) * flow.duration_noise_scale
                        item = {"input_ids": random.choice(known, length), "duration_noise": noise.astype("f4")}
                    if module.num_speakers:
                        item["speaker"] = np.array(random.integers(module.num_speakers))
                    items.append(item)
                where = f"batch {batch_size} of {length} tokens or frames"
                for given, found in zip(items, run_batch(opened, items), strict=True):
                    flat = {name: value.ravel() for name, value in found.items()}
                    comparison.add_outputs(flat, where, partial(_flat, reference, role, graph, given))
            comparison.num_shapes += 1


def _flat(reference: Reference, role: str, graph: nn.Module, item: Tensors) -> dict[str, Any]:
    return {name: value.ravel() for name, value in reference.row_outputs(role, graph, item).items()}


class FlowTextGraph(nn.Module):
    """Graph `text_encoder`: durations of tokens, and means and deviations of their frames."""

    def __init__(self, speaker: FlowSpeaker) -> None:
        super().__init__()
        self.speaker = speaker

    def forward(self, input_ids: Tensor, duration_noise: Tensor, speaker: Tensor | None = None) -> Outputs:
        """(B, T), (B, 2, T), (B,) -> (B, T), (B, T, D), (B, T, D)."""
        found = self.speaker.durations(input_ids, duration_noise, speaker)
        return dict(zip(FLOW_TENSORS["text_encoder"][1], found, strict=True))


class FlowWaveformGraph(nn.Module):
    """Graph `waveform_decoder`: the samples of frames."""

    def __init__(self, speaker: FlowSpeaker) -> None:
        super().__init__()
        self.speaker = speaker

    def forward(self, latents: Tensor, speaker: Tensor | None = None) -> Outputs:
        """(B, F, D), (B,) -> (B, S)."""
        return {"samples": self.speaker.samples(latents, speaker)}
