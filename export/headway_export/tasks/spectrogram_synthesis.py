"""Speech of texts by spectrograms: frames that a decoder writes, and the samples of frames.

B texts, R rows of a step, S tokens of a text, T steps, F frames, M numbers of a frame, L layers with dropout, U numbers
of such a layer, E numbers of a voice, V numbers that a step gives.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, cast

import numpy as np
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
from headway_server.bundles import Limits, Manifest, SpectrogramSpeech, demanded
from headway_server.bundles.manifest import FRAMES, SPECTROGRAM_STEP
from headway_server.tasks.synthesis.spectrogram import draw_dropout

_LENGTHS: Final = (33, 7, 1)
"""Frames of each compared batch whose samples are made: beside what a graph was traced at."""


class SpectrogramSpeaker(StepWriter, Protocol):
    """A model that speaks by spectrograms; docs/speech.md says what it computes.

    A step reads a frame (R, M), the dropout (R, L, U) and a voice (R, E). It gives frames, and then the logit of the
    end of each.
    """

    max_source_length: int
    max_length: int
    """Most steps."""
    speech: SpectrogramSpeech
    cache_shape: tuple[int, int, int]
    """Layers, and heads and head width of a layer's cache."""

    def samples(self, spectrogram: Tensor) -> Tensor:
        """(B, F, M) -> (B, S)."""

    def expected_frames(self, input_ids: Tensor, frames: Tensor, dropout: Tensor, speaker: Tensor) -> Tensor:
        """The original of all steps: (1, S), (1, T, M), (T, L, U), (1, E) -> (T, V)."""


class SpectrogramSynthesis(TaskOfOnePrecision):
    """An encoder, a decoder with a cache that writes frames, and what makes samples of them."""

    recorded = FRAMES
    words_of_error = "frame error"
    words_of_names = "Voices"
    only_in_fp32 = "what int8 does to its speech is not judged"

    def limits(self, module: nn.Module) -> Limits:
        """Reads those of texts and of steps."""
        speaker = cast("SpectrogramSpeaker", module)
        return Limits(max_input_tokens=int(speaker.max_source_length), max_total_tokens=int(speaker.max_length))

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Says how frames are written."""
        return {"spectrogram": source.spectrogram}

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how long it speaks."""
        speech, steps = demanded(manifest.spectrogram), demanded(manifest.limits.max_total_tokens)
        seconds = steps * speech.frames_per_step * speech.hop_length / speech.sampling_rate
        return [f"It speaks mono audio of {speech.sampling_rate} Hz, at most {seconds:.0f} seconds of a text."]

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces the three graphs."""
        module = asked.module
        speaker = cast("SpectrogramSpeaker", module)
        speech = speaker.speech
        widths = ((speech.num_bins,), (speech.num_layers, speech.num_units), (speech.speaker_width,))
        step = [
            make_spec(name, "float32", "slots", *width) for name, width in zip(SPECTROGRAM_STEP, widths, strict=True)
        ]
        traced = trace_steps(module, step, speaker.cache_shape, FRAMES)
        waveform = trace_graph(
            "waveform_decoder",
            module,
            SpectrogramWaveformGraph(speaker),
            [make_spec("spectrogram", "float32", "batch", "frames", speech.num_bins)],
            outputs=[make_spec("samples", "float32", "batch", "samples")],
        )
        return replace(traced, graphs=(*traced.graphs, waveform))

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Holds what is written of drawn texts, step by step and together, and samples, against the original."""
        source, random = candidate.source, np.random.default_rng(SEED)
        speech, speaker = demanded(source.spectrogram), cast("SpectrogramSpeaker", reference.module)
        tokenizer = source.tokenizer
        assert tokenizer is not None, "a model that speaks texts has its tokenizer"
        known, limits = sorted(tokenizer.get_vocab().values()), source.limits
        session = candidate.open_session()
        graph = BatchGraph(candidate.runtime.open(candidate.bundle, candidate.variant.graphs["waveform_decoder"]))
        steps = min(DECODED_TOKENS, demanded(limits.max_total_tokens))
        for batch_size, length in zip(BATCH_SIZES, _LENGTHS, strict=True):
            lengths = random.integers(1, demanded(limits.max_input_tokens) + 1, batch_size)
            texts = [random.choice(known, size) for size in lengths]
            [sources] = candidate.encode([texts])
            runner = candidate.open_decoder(batch_size, max_length=steps, sources=sources, session=session)
            runner.set_sources(sources)
            voices = random.normal(size=(batch_size, speech.speaker_width)).astype(np.float32)
            read = np.zeros((batch_size, steps + 1, speech.num_bins), np.float32)
            dropout = np.stack([[draw_dropout(random, speech) for _ in range(batch_size)] for _ in range(steps)])
            found = np.empty((batch_size, steps, runner.vocab_size), np.float32)
            for number in range(steps):
                places = np.full(batch_size, number)
                further = {"frame": read[:, number].copy(), "dropout": dropout[number], "speaker": voices}
                found[:, number] = runner.decode(places, places, further=further)
                last = (speech.frames_per_step - 1) * speech.num_bins
                read[:, number + 1] = found[:, number, last : last + speech.num_bins]
            where = f"batch {batch_size}, texts of {lengths.tolist()} tokens, {steps} steps"
            for row, text in enumerate(texts):
                given = (text[None], read[row, None, :-1], dropout[:, row], voices[row, None])
                answer = partial(answer_of, FRAMES, speaker.expected_frames, *given)
                comparison.add_outputs({FRAMES: found[row]}, where, answer)
            frames = random.normal(size=(batch_size, length, speech.num_bins)).astype(np.float32)
            for one, spectrogram in zip(
                run_batch(graph, [{"spectrogram": one} for one in frames]), frames, strict=True
            ):
                answer = partial(answer_of, "samples", speaker.samples, spectrogram[None])
                comparison.add_outputs(
                    {"samples": one["samples"][None]}, f"batch {batch_size} of {length} frames", answer
                )
            comparison.num_shapes += len(set(lengths)) + 1


class SpectrogramWaveformGraph(nn.Module):
    """Graph `waveform_decoder`: the samples of frames."""

    def __init__(self, speaker: SpectrogramSpeaker) -> None:
        super().__init__()
        self.speaker = speaker

    def forward(self, spectrogram: Tensor) -> Outputs:
        """(B, F, M) -> (B, S)."""
        return {"samples": self.speaker.samples(spectrogram)}
