"""Speech of texts in stages: semantic tokens, coarse codes, fine codes, and samples of codes.

B texts or windows, T tokens, F frames, K codebooks, C codes of a codebook, V vocabulary, S samples.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from headway_export.candidate import Candidate, run_batch
from headway_export.graphs import DecoderGraph, Outputs
from headway_export.parity import BATCH_SIZES, DECODED_TOKENS, SEED, Comparison, batches, read_text
from headway_export.reference import Reference
from headway_export.source import ExportSource
from headway_export.tasks.task import TaskOfOnePrecision
from headway_export.tracing import (
    STEP_INPUTS,
    Traceable,
    TracedGraph,
    TracedModel,
    caches_of,
    make_spec,
    past_specs,
    trace_graph,
)
from headway_server.batching import BatchGraph
from headway_server.bundles import GraphRole, Limits, Manifest, SpeechStages, StateTensor, demanded
from headway_server.decoding.runner.decoder import DecoderRunner, coarse_stage
from headway_server.tasks.synthesis.staged import frames_of

_LENGTHS: Final = (40, 7, 1)
"""Tokens of the texts of each compared batch, and the frames whose samples are made."""


class StageDecoder(Protocol):
    """One of the stages that write token after token; it follows the protocol of a decoder, too."""

    max_length: int

    def expected(self, input_ids: Tensor) -> Tensor:
        """Logits of the original, (B, T) -> (B, T, V)."""


class StagedSpeaker(Protocol):
    """A model that speaks in stages; docs/speech.md says what they compute."""

    max_source_length: int
    stages: SpeechStages
    semantic: StageDecoder
    coarse: StageDecoder

    def fine(self, codes: Tensor, book: Tensor) -> Tensor:
        """Int64 (B, F, K), (B,) -> logits (B, F, C) of the codes of a codebook, by those before it."""

    def samples(self, codes: Tensor) -> Tensor:
        """Int64 (B, F, K) -> (B, S)."""

    def expected_fine(self, codes: Tensor, book: int) -> Tensor:
        """The original of `fine`, of one codebook."""

    def expected_samples(self, codes: Tensor) -> Tensor:
        """The original of `samples`."""


class StagedSynthesis(TaskOfOnePrecision):
    """Two decoders with caches, one that fills windows, and the decoder of a codec."""

    words_of_names = "Voices"
    only_in_fp32 = "what int8 does to its speech is not judged"

    def limits(self, module: nn.Module) -> Limits:
        """Reads those of texts and of semantic tokens."""
        speaker = cast("StagedSpeaker", module)
        return Limits(
            max_input_tokens=int(speaker.max_source_length), max_total_tokens=int(speaker.semantic.max_length)
        )

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Says how the stages follow each other."""
        return {"stages": source.stages}

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how long it speaks."""
        stages, limits = demanded(manifest.stages), manifest.limits
        most = demanded(limits.max_total_tokens) - demanded(limits.max_input_tokens) - 1
        seconds = frames_of(most, stages) * stages.hop_length / stages.sampling_rate
        return [f"It speaks mono audio of {stages.sampling_rate} Hz, at most {seconds:.1f} seconds of a text."]

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces all stages."""
        module = asked.module
        speaker = cast("StagedSpeaker", module)
        stages = speaker.stages
        semantic, state = _trace_decoder("decoder", cast("nn.Module", speaker.semantic))
        coarse, _ = _trace_decoder("coarse_decoder", cast("nn.Module", speaker.coarse))
        codes = make_spec("codes", "int64", "batch", stages.fine_input, stages.num_books)
        logits = make_spec("logits", "float32", "batch", stages.fine_input, stages.codebook_size)
        fine = trace_graph(
            "fine_decoder", module, FineGraph(speaker), [codes, make_spec("book", "int64", "batch")], outputs=[logits]
        )
        codes = make_spec("codes", "int64", "batch", "frames", stages.num_books)
        samples = make_spec("samples", "float32", "batch", "samples")
        codec = trace_graph("codec_decoder", module, SamplesGraph(speaker), [codes], outputs=[samples])
        return TracedModel(graphs=(semantic, coarse, fine, codec), state=state)

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Holds each stage against the layers of the original."""
        speaker, random = cast("StagedSpeaker", reference.module), np.random.default_rng(SEED)
        stages = speaker.stages
        manifest, variant = coarse_stage(candidate.bundle.manifest, candidate.variant)
        coarse = replace(candidate, bundle=replace(candidate.bundle, manifest=manifest), variant=variant)
        pairs = stages.num_inputs * random.integers(1, stages.first_code, demanded(manifest.limits.max_input_tokens))
        for stage, opened, beside in ((speaker.semantic, candidate, pairs), (speaker.coarse, coarse, pairs[:0])):
            _compare_decoder(stage, opened, comparison, random, beside)
        graphs = {
            role: BatchGraph(candidate.runtime.open(candidate.bundle, candidate.variant.graphs[role]))
            for role in ("fine_decoder", "codec_decoder")
        }
        for batch_size, length in zip(BATCH_SIZES, _LENGTHS, strict=True):
            books = random.integers(stages.num_coarse_books, stages.num_books, min(batch_size, 2))
            codes = random.integers(0, stages.codebook_size + 1, (len(books), stages.fine_input, stages.num_books))
            items = [{"codes": one, "book": book} for one, book in zip(codes, books, strict=True)]
            found = run_batch(graphs["fine_decoder"], items)
            for one, book, given in zip(found, books, codes, strict=True):
                answer = partial(_answer, "logits", speaker.expected_fine, torch.from_numpy(given[None]), int(book))
                comparison.add_outputs(one, f"fine codes of codebook {book}", answer)
            codes = random.integers(0, stages.codebook_size, (batch_size, length, stages.num_books))
            for one, given in zip(
                run_batch(graphs["codec_decoder"], [{"codes": one} for one in codes]), codes, strict=True
            ):
                answer = partial(_answer, "samples", speaker.expected_samples, torch.from_numpy(given[None]))
                comparison.add_outputs(one, f"samples of {length} frames", answer)
            comparison.num_shapes += 2


def _trace_decoder(role: Any, module: nn.Module) -> tuple[TracedGraph, tuple[StateTensor, ...]]:
    past = past_specs(module, has_source=False)
    inputs = [*(make_spec(*step) for step in STEP_INPUTS), *past]
    traced = trace_graph(cast("GraphRole", role), module, DecoderGraph(module), inputs)
    return traced, caches_of(traced, past, max_length=cast("StageDecoder", module).max_length)


def _compare_decoder(
    stage: StageDecoder,
    candidate: Candidate,
    comparison: Comparison,
    random: np.random.Generator,
    beside: np.ndarray[Any, np.dtype[np.int64]],
) -> None:
    """Holds prompts and what is decoded after them, row by row and together, against the original.

    A prompt may begin with pairs of tokens; `beside` is what makes pairs of them. The longest prompt is read once,
    beside short ones: PyTorch reads each whole, which is what the proof waits for.
    """
    session, longest = candidate.open_session(), stage.max_length - 1  # the last token is written and never read
    num_steps = min(DECODED_TOKENS, longest - 1)
    _, ragged, short = batches(longest - num_steps)
    for lengths in (ragged[-1:], ragged, short):
        limits = candidate.bundle.manifest.limits.model_copy(update={"max_total_tokens": longest})
        bundle = replace(candidate.bundle, manifest=candidate.bundle.manifest.model_copy(update={"limits": limits}))
        runner = DecoderRunner(candidate.runtime, bundle, candidate.variant, num_slots=len(lengths), sharing=session)
        prompts = [random.integers(0, runner.vocab_size, length) for length in lengths]
        for prompt in prompts:
            paired = min(len(prompt), len(beside))
            prompt[:paired] += beside[:paired]
        first = [read_text(runner, slot, one, np.array([len(one) - 1])) for slot, one in enumerate(prompts)]
        steps, positions = [np.concatenate(first)], np.array(lengths)
        for _ in range(num_steps):
            steps.append(runner.decode(steps[-1].argmax(axis=-1), positions).copy())
            positions = positions + 1
        where = f"batch {len(lengths)}, prompt lengths {lengths}"
        for row, prompt in enumerate(prompts):
            found = np.stack([step[row] for step in steps])
            text = torch.from_numpy(np.concatenate([prompt, found[:-1].argmax(axis=-1)])[None])

            def again(text: Tensor = text, count: int = len(prompt)) -> Any:
                with torch.inference_mode():
                    return stage.expected(text)[0, count - 1 :].numpy()

            expected = again()
            comparison.add("logits", found, expected, where, again)
            comparison.add_greedy(found.argmax(axis=-1), expected, where, again)
        comparison.num_shapes += len(lengths)


def _answer(name: str, compute: Any, *given: Any) -> dict[str, Any]:
    with torch.inference_mode():
        return {name: compute(*given)[0].numpy()}


class FineGraph(nn.Module):
    """Graph `fine_decoder`: the logits of a codebook's codes in a window."""

    def __init__(self, speaker: StagedSpeaker) -> None:
        super().__init__()
        self.speaker = speaker

    def forward(self, codes: Tensor, book: Tensor) -> Outputs:
        """Int64 (B, F, K), (B,) -> float32 (B, F, C)."""
        return {"logits": self.speaker.fine(codes, book)}


class SamplesGraph(nn.Module):
    """Graph `codec_decoder`: the samples of whole texts."""

    def __init__(self, speaker: StagedSpeaker) -> None:
        super().__init__()
        self.speaker = speaker

    def forward(self, codes: Tensor) -> Outputs:
        """Int64 (B, F, K) -> (B, S)."""
        return {"samples": self.speaker.samples(codes)}
