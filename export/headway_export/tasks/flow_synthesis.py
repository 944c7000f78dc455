"""Speech of texts by normalizing flows: durations and frames of texts, and the samples of frames.

B texts, T tokens, F frames, D channels of a frame, N numbers of its pitch and energy, S samples.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.candidate import Candidate, run_batch
from headway_export.graphs import Outputs
from headway_export.parity import BATCH_SIZES, SEED, Comparison
from headway_export.reference import Reference
from headway_export.source import ExportSource
from headway_export.tasks.task import TaskOfOnePrecision
from headway_export.tracing import Traceable, TracedModel, make_spec, trace_graph
from headway_server.batching import BatchGraph, Tensors
from headway_server.bundles import FLOW_TENSORS, FlowSpeech, GraphRole, Limits, Manifest, demanded
from headway_server.bundles.manifest import EXCITED_TENSORS, NUM_CURVES

_LENGTHS: Final = (33, 7, 1)
"""Tokens of the texts of each compared batch, and their frames: beside what a graph was traced at."""
_HIGHEST: Final = 500.0
"""Highest pitch that is compared, in Hz."""


class FlowSpeaker(Protocol):
    """A model that speaks by flows; docs/speech.md says what it computes."""

    max_source_length: int
    """Most tokens of a text."""
    num_speakers: int
    """Voices; 0: it has one, without a name."""
    speech: FlowSpeech

    def durations(self, input_ids: Tensor, noise: Tensor, speaker: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T), (B, 2, T), (B,) -> frames of tokens (B, T), and the means and deviations of these, (B, T, D)."""

    def samples(self, latents: Tensor, speaker: Tensor | None) -> Tensor:
        """(B, F, D), (B,) -> (B, S)."""


class ExcitedSpeaker(Protocol):
    """A model whose frames are not drawn, and whose samples read noise and the pitch; `speech.is_excited` is true."""

    max_source_length: int
    num_speakers: int
    speech: FlowSpeech

    def durations(self, input_ids: Tensor, speaker: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T), (B,) -> frames of tokens (B, T), and the numbers of these, (B, T, D)."""

    def curves(self, latents: Tensor) -> Tensor:
        """(B, F, D) -> (B, F, N)."""

    def samples(self, latents: Tensor, curves: Tensor, noise: Tensor) -> Tensor:
        """(B, F, D), (B, F, N), (B, F, S / F) -> (B, S)."""


class FlowSynthesis(TaskOfOnePrecision):
    """An encoder of texts, and a decoder of frames to samples."""

    recorded = "samples"
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
        """Traces the graphs."""
        module = asked.module
        speech = cast("FlowSpeaker", module).speech
        specs = {
            "input_ids": make_spec("input_ids", "int64", "batch", "length"),
            "duration_noise": make_spec("duration_noise", "float32", "batch", 2, "length"),
            "latents": make_spec("latents", "float32", "batch", "frames", speech.num_channels),
            "curves": make_spec("curves", "float32", "batch", "frames", NUM_CURVES),
            "noise": make_spec("noise", "float32", "batch", "frames", speech.hop_length),
            "speaker": make_spec("speaker", "int64", "batch"),
            "samples": make_spec("samples", "float32", "batch", "samples"),
        }
        tensors = speech.tensors(has_voices=_num_voices(module) > 0)
        traced = []
        for role, graph in _graphs_of(module).items():
            inputs, outputs = tensors[role]
            stated = [specs[name] for name in outputs] if role == "waveform_decoder" else None
            traced.append(trace_graph(role, module, graph, [specs[name] for name in inputs], outputs=stated))
        return TracedModel(graphs=tuple(traced))

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Holds what each graph gives of drawn texts and frames against PyTorch's."""
        source, random = candidate.source, np.random.default_rng(SEED)
        flow, module = demanded(source.flow), reference.module
        tokenizer = source.tokenizer
        assert tokenizer is not None, "a model that speaks texts has its tokenizer"
        known, num_voices = sorted(tokenizer.get_vocab().values()), _num_voices(module)
        tensors = flow.tensors(has_voices=num_voices > 0)
        graphs = _graphs_of(module)
        opened = {
            role: BatchGraph(candidate.runtime.open(candidate.bundle, candidate.variant.graphs[role]))
            for role in graphs
        }

        def drawn(name: str, length: int) -> NDArray[Any]:
            match name:
                case "input_ids":
                    edges = [] if flow.edge is None else [flow.edge]
                    most = demanded(source.limits.max_input_tokens) - 2 * len(edges)
                    ids = random.choice(known, min(length, most))
                    return np.concatenate([edges, ids, edges]).astype(np.int64)
                case "duration_noise":
                    return (random.normal(size=(2, length)) * flow.duration_noise_scale).astype(np.float32)
                case "speaker":
                    return np.array(random.integers(num_voices))
                case "curves":
                    pitch = random.uniform(0, _HIGHEST, (length, NUM_CURVES // 2))
                    return np.hstack([pitch, random.normal(size=pitch.shape)]).astype(np.float32)
            width = flow.num_channels if name == "latents" else flow.hop_length
            return random.normal(size=(length, width)).astype(np.float32)

        least = 1 if flow.edge is None else 3  # a token, and the two ends, of a frame each
        for batch_size, length in zip(BATCH_SIZES, (max(length, least) for length in _LENGTHS), strict=True):
            for role, graph in graphs.items():
                names = tensors[role][0]
                items = [{name: drawn(name, length) for name in names} for _ in range(batch_size)]
                where = f"batch {batch_size} of {length} tokens or frames"
                for given, found in zip(items, run_batch(opened[role], items), strict=True):
                    flat = {name: value.ravel() for name, value in found.items()}
                    comparison.add_outputs(flat, where, partial(_flat, reference, role, graph, given))
            comparison.num_shapes += 1


def _num_voices(module: nn.Module) -> int:
    return cast("FlowSpeaker", module).num_speakers


def _graphs_of(module: nn.Module) -> dict[GraphRole, nn.Module]:
    """Returns the graphs of a `FlowSpeaker` or an `ExcitedSpeaker`."""
    if cast("FlowSpeaker", module).speech.is_excited:
        excited = cast("ExcitedSpeaker", module)
        return {
            "text_encoder": ExcitedTextGraph(excited),
            "pitch_predictor": PitchGraph(excited),
            "waveform_decoder": ExcitedWaveformGraph(excited),
        }
    speaker = cast("FlowSpeaker", module)
    return {"text_encoder": FlowTextGraph(speaker), "waveform_decoder": FlowWaveformGraph(speaker)}


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


class ExcitedTextGraph(nn.Module):
    """Graph `text_encoder` of an excited model: durations of tokens, and the numbers of their frames."""

    def __init__(self, speaker: ExcitedSpeaker) -> None:
        super().__init__()
        self.speaker = speaker

    def forward(self, input_ids: Tensor, speaker: Tensor) -> Outputs:
        """(B, T), (B,) -> (B, T), (B, T, D)."""
        found = self.speaker.durations(input_ids, speaker)
        return dict(zip(EXCITED_TENSORS["text_encoder"][1], found, strict=True))


class PitchGraph(nn.Module):
    """Graph `pitch_predictor`: pitch and energy of frames."""

    def __init__(self, speaker: ExcitedSpeaker) -> None:
        super().__init__()
        self.speaker = speaker

    def forward(self, latents: Tensor) -> Outputs:
        """(B, F, D) -> (B, F, N)."""
        return {"curves": self.speaker.curves(latents)}


class ExcitedWaveformGraph(nn.Module):
    """Graph `waveform_decoder` of an excited model: the samples of all frames of an audio."""

    def __init__(self, speaker: ExcitedSpeaker) -> None:
        super().__init__()
        self.speaker = speaker

    def forward(self, latents: Tensor, curves: Tensor, noise: Tensor) -> Outputs:
        """(B, F, D), (B, F, N), (B, F, S / F) -> (B, S)."""
        return {"samples": self.speaker.samples(latents, curves, noise)}
