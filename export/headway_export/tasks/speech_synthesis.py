"""Speech of texts: a decoder that writes the codes of audio, and what makes samples of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from headway_export.candidate import Candidate, run_batch
from headway_export.graphs import Outputs, float_dtype
from headway_export.inputs import DecoderText
from headway_export.parity import BATCH_SIZES, SEED, Comparison
from headway_export.quality import NUM_EXAMPLES, Quality, figure_of, nats_of_window, quoted
from headway_export.reference import Reference
from headway_export.source import EvaluationData, ExportSource
from headway_export.tasks.generation import Generation, trace_decoder
from headway_export.tasks.task import NOT_LOOKED_AT, ExportTask, Metric
from headway_export.tracing import Traceable, TracedModel, make_spec, trace_graph
from headway_server.batching import BatchGraph
from headway_server.bundles import VOICES_FILE, AudioCodec, Manifest, demanded
from headway_training.checkpoint import Checkpoint
from headway_training.models import Codec, SpeechSynthesizer

FRAMES_PER_RUN = 5
"""Frames of a stream whose samples are computed together: 100 ms at 50 frames a second."""
_CODEC_RUNS = 6


class SpeechSynthesis(Generation):
    """Codes that are written as texts are, and their samples."""

    metrics = (Metric(name="nats_per_code", allowed_loss=0.02, higher_is_better=False),)
    optional_flags = ()
    takes_int4 = False
    takes_fixed_scales = False
    more_outputs = None  # codes repeat nothing that could be looked up
    needs_evaluation = True
    is_of_the_kit = True
    is_evaluated_served = False
    words_of_names = "Voices"
    shows_no_attention = NOT_LOOKED_AT

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces the decoder, and what makes samples."""
        codec, decoder = cast("Codec", asked.module), trace_decoder(asked.module)
        inputs = [
            make_spec("codes", "int64", "batch", FRAMES_PER_RUN, codec.configuration.num_books),
            make_spec("state", "float32", "batch", codec.decoder.state_size),
        ]
        traced = trace_graph("codec_decoder", codec, CodecDecoderGraph(codec), inputs)
        return replace(decoder, graphs=(traced, *decoder.graphs))

    def parts_of_checkpoint(self, path: Path, module: nn.Module, checkpoint: Checkpoint) -> dict[str, Any]:
        """Adds the codec, and the codes of voices."""
        parts = ExportTask.parts_of_checkpoint(self, path, module, checkpoint)
        voices = _voices_of(cast("SpeechSynthesizer", module), checkpoint.labels)
        return parts | {"codec": _codec_of(cast("SpeechSynthesizer", module)), "documents": {VOICES_FILE: voices}}

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads tokens of texts and of speech."""
        with np.load(file) as arrays:
            sequences = np.split(arrays["input_ids"], np.cumsum(arrays["lengths"])[:-1])
            return {"sequences": sequences, "prompt_lengths": arrays["prompt_lengths"].tolist()}

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how long it speaks."""
        codec, limits = demanded(manifest.codec), manifest.limits
        num_tokens = demanded(limits.max_total_tokens) - demanded(limits.max_input_tokens)
        seconds = num_tokens / codec.num_books * codec.hop_length
        return [
            f"It speaks mono audio of {codec.sampling_rate} Hz, {seconds / codec.sampling_rate:.1f} seconds after the "
            "longest text."
        ]

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares what is written, and the samples."""
        super().compare(candidate, reference, comparison)
        _compare_codec(candidate, reference, comparison)

    def _windows(self, source: ExportSource, data: EvaluationData) -> Iterator[DecoderText]:
        for ids, first in zip(data.sequences, data.prompt_lengths, strict=True):
            yield DecoderText(token_ids=ids, num_given=first)

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Negative log-likelihood of the codes of recordings, and of their ends, after voice and text."""
        runner = candidate.open_decoder(1)
        pairs = list(zip(data.sequences, data.prompt_lengths, strict=True))
        rates = [nats_of_window(runner, ids, first) / (len(ids) - first) for ids, first in pairs]
        counts = [len(ids) - first for ids, first in pairs]
        tokenizer = candidate.source.tokenizer
        assert tokenizer is not None, "a model that speaks has its tokenizer"
        worst = sorted(range(len(pairs)), key=lambda index: -rates[index])[:NUM_EXAMPLES]
        first_code = tokenizer.get_vocab_size()
        return Quality(
            figure=figure_of(data, float(np.average(rates, weights=counts))),
            weak_points=tuple(
                f"{rates[index]:.2f} nats per code: {quoted(_text_of(pairs[index], first_code, tokenizer))}."
                for index in worst
            ),
        )


def _compare_codec(candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
    """Holds the samples of streams, run after run, against those that PyTorch makes of all their codes at once."""
    module, graph = (
        cast("Codec", reference.module),
        BatchGraph(candidate.runtime.open(candidate.bundle, candidate.variant.graphs["codec_decoder"])),
    )
    shape, random = module.configuration, np.random.default_rng(SEED)
    frames = graph.session.graph.inputs[0].shape[1]
    assert isinstance(frames, int), "the exporter fixes it"
    for batch_size in BATCH_SIZES:
        codes = random.integers(0, shape.codebook_size, (batch_size, _CODEC_RUNS * frames, shape.num_books))
        states = [np.zeros(module.decoder.state_size, np.float32)] * batch_size
        parts = []
        for start in range(0, codes.shape[1], frames):
            items = [
                {"codes": row[start : start + frames], "state": state} for row, state in zip(codes, states, strict=True)
            ]
            found = run_batch(graph, items)
            states = [one["present_state"] for one in found]
            parts.append(np.stack([one["samples"] for one in found]))
        samples = np.concatenate(parts, axis=1)
        exact = CodecDecoderGraph(module)
        for row, expected_codes in enumerate(codes):
            item = {"codes": expected_codes, "state": np.zeros_like(states[row])}
            outputs = {"samples": samples[row], "present_state": states[row]}
            answer = partial(reference.row_outputs, "codec_decoder", exact, item)
            comparison.add_outputs(outputs, f"batch {batch_size}", answer)
    comparison.num_shapes += len(BATCH_SIZES)


def _text_of(pair: tuple[NDArray[np.int64], int], first_code: int, tokenizer: Tokenizer) -> str:
    """Returns the text of a sequence: what comes before the speech and is no code."""
    ids, first = pair
    prompt = ids[:first]
    return tokenizer.decode(prompt[prompt < first_code].tolist())


class CodecDecoderGraph(nn.Module):
    """Graph `codec_decoder`: the next samples of streams whose codes come frame by frame."""

    def __init__(self, module: Codec) -> None:
        super().__init__()
        self.module = module

    def forward(self, codes: Tensor, state: Tensor) -> Outputs:
        """Int64 (B, F, K), float32 (B, state) -> samples, float32 (B, F hop), and the next state."""
        samples, present = self.module.decode(codes, state.to(float_dtype(self.module)))
        return {"samples": samples.float(), "present_state": present.float()}


# Parts of a checkpoint


def _codec_of(module: SpeechSynthesizer) -> AudioCodec:
    shape = module.configuration
    return AudioCodec(
        sampling_rate=shape.sampling_rate,
        hop_length=shape.hop_length,
        num_books=shape.num_books,
        codebook_size=shape.codebook_size,
        first_code=shape.vocabulary_size,
        frames_per_run=FRAMES_PER_RUN,
    )


def _voices_of(module: SpeechSynthesizer, names: Sequence[str]) -> bytes:
    """Returns the codes of voices, by name, as JSON: a line for each."""
    lines = [f"{json.dumps(name)}: {voice.tolist()}" for name, voice in zip(names, module.voices, strict=True)]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()
