"""Audio of texts by codes in the delay pattern: a code of every codebook a step, and the samples of codes.

B texts, R rows of a step, T tokens of a text or steps, F frames, K codebooks, V codes of a codebook, D channels of a
frame, S samples.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from headway_export.candidate import Candidate, run_batch
from headway_export.graphs import Outputs
from headway_export.parity import BATCH_SIZES, DECODED_TOKENS, SEED, Comparison
from headway_export.reference import Reference
from headway_export.source import ExportSource
from headway_export.tasks.steps import StepWriter, answer_of, trace_steps
from headway_export.tasks.task import TaskOfOnePrecision
from headway_export.tracing import Traceable, TracedModel, make_spec, trace_graph
from headway_server.batching import BatchGraph
from headway_server.bundles import DelayedCodes, Limits, Manifest, demanded
from headway_server.bundles.manifest import DELAYED_STEP, DELAYED_TENSORS

_LENGTHS: Final = (40, 7, 4)
"""Frames of each compared batch whose samples are made: beside what a graph was traced at."""
_LONGEST: Final = 64
"""Most tokens of a text that is compared."""


class DelayedSpeaker(StepWriter, Protocol):
    """A model that writes codes in the delay pattern; docs/speech.md says what it computes.

    A step reads codes (R, K) int64, and (R,) float32: 1 in rows that read the text, 0 in others. It gives the logits of
    all codebooks.
    """

    max_source_length: int
    max_length: int
    """Most steps."""
    delayed: DelayedCodes
    cache_shape: tuple[int, int, int]
    """Layers, and heads and head width of a layer's cache."""
    num_channels: int
    """D."""

    def states(self, codes: Tensor) -> Tensor:
        """Int64 (B, F, K) -> (B, F, D): the part of the codec's decoder that recurs."""

    def samples(self, states: Tensor) -> Tensor:
        """(B, F, D) -> (B, S): the rest of it."""

    def expected_logits(self, input_ids: Tensor, codes: Tensor, condition: Tensor) -> Tensor:
        """The original of all steps: (1, T), (1, T, K), (1,) -> (T, K * V)."""

    def expected_samples(self, codes: Tensor) -> Tensor:
        """The original of `samples` of `states`: (1, F, K) -> (1, S)."""


class DelayedSynthesis(TaskOfOnePrecision):
    """An encoder, a decoder with a cache that writes codes, and the decoder of a codec in two parts."""

    only_in_fp32 = "what int8 does to its audio is not judged"

    def limits(self, module: nn.Module) -> Limits:
        """Reads those of texts and of steps."""
        speaker = cast("DelayedSpeaker", module)
        return Limits(max_input_tokens=int(speaker.max_source_length), max_total_tokens=int(speaker.max_length))

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Says how codes are written."""
        return {"delayed": source.delayed}

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how long its audio is."""
        delayed = demanded(manifest.delayed)
        seconds = delayed.max_frames * delayed.hop_length / delayed.sampling_rate
        return [f"It makes mono audio of {delayed.sampling_rate} Hz, at most {seconds:.1f} seconds of a text."]

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces the four graphs."""
        module = asked.module
        speaker = cast("DelayedSpeaker", module)
        books, channels = speaker.delayed.num_books, speaker.num_channels
        of_codes, of_condition = DELAYED_STEP
        step = [make_spec(of_codes, "int64", "slots", books), make_spec(of_condition, "float32", "slots")]
        traced = trace_steps(module, step, speaker.cache_shape, "logits")
        states = make_spec("states", "float32", "batch", "frames", channels)
        codec = trace_graph(
            "codec_decoder",
            module,
            CodecStatesGraph(speaker),
            [make_spec("codes", "int64", "batch", "frames", books)],
            outputs=[states],
        )
        waveform = trace_graph(
            "waveform_decoder",
            module,
            CodecSamplesGraph(speaker),
            [states],
            outputs=[make_spec("samples", "float32", "batch", "samples")],
        )
        return replace(traced, graphs=(*traced.graphs, codec, waveform))

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Holds the logits of drawn codes, step by step and together, and samples, against the original."""
        source, random = candidate.source, np.random.default_rng(SEED)
        delayed, speaker = demanded(source.delayed), cast("DelayedSpeaker", reference.module)
        tokenizer = source.tokenizer
        assert tokenizer is not None, "a model that reads texts has its tokenizer"
        known, size = sorted(tokenizer.get_vocab().values()), delayed.codebook_size
        session = candidate.open_session()
        codec, waveform = (
            BatchGraph(candidate.runtime.open(candidate.bundle, candidate.variant.graphs[role]))  # type: ignore[index]
            for role in DELAYED_TENSORS
        )
        steps = min(DECODED_TOKENS, demanded(source.limits.max_total_tokens))
        longest = min(_LONGEST, demanded(source.limits.max_input_tokens))
        for batch_size, length in zip(BATCH_SIZES, _LENGTHS, strict=True):
            lengths = random.integers(1, longest + 1, batch_size)
            texts = [random.choice(known, count) for count in lengths]
            [sources] = candidate.encode([texts])
            runner = candidate.open_decoder(batch_size, max_length=steps, sources=sources, session=session)
            runner.set_sources(sources)
            codes = random.integers(0, size + 1, (batch_size, steps, delayed.num_books))
            condition = np.arange(batch_size).astype(np.float32) % 2
            found = np.empty((batch_size, steps, runner.vocab_size), np.float32)
            for number in range(steps):
                places = np.full(batch_size, number)
                further: dict[str, NDArray[Any]] = {"codes": codes[:, number].copy(), "condition": condition}
                found[:, number] = runner.decode(places, places, further=further)
            where = f"batch {batch_size}, texts of {lengths.tolist()} tokens, {steps} steps"
            for row, text in enumerate(texts):
                given = (text[None], codes[row, None], condition[row, None])
                answer = partial(answer_of, "logits", speaker.expected_logits, *given)
                comparison.add_outputs({"logits": found[row]}, where, answer)
            drawn = random.integers(0, size, (batch_size, length, delayed.num_books))
            states = run_batch(codec, [{"codes": one} for one in drawn])
            for one, of_codes in zip(run_batch(waveform, states), drawn, strict=True):
                answer = partial(answer_of, "samples", speaker.expected_samples, of_codes[None])
                comparison.add_outputs(
                    {"samples": one["samples"][None]}, f"batch {batch_size} of {length} frames", answer
                )
            comparison.num_shapes += len(set(lengths)) + 1


class CodecStatesGraph(nn.Module):
    """Graph `codec_decoder`: what the part of the codec's decoder that recurs makes of codes."""

    def __init__(self, speaker: DelayedSpeaker) -> None:
        super().__init__()
        self.speaker = speaker

    def forward(self, codes: Tensor) -> Outputs:
        """Int64 (B, F, K) -> (B, F, D)."""
        return {"states": self.speaker.states(codes)}


class CodecSamplesGraph(nn.Module):
    """Graph `waveform_decoder`: the samples of these states."""

    def __init__(self, speaker: DelayedSpeaker) -> None:
        super().__init__()
        self.speaker = speaker

    def forward(self, states: Tensor) -> Outputs:
        """(B, F, D) -> (B, S)."""
        return {"samples": self.speaker.samples(states)}
