"""Speech of texts: a decoder that writes the codes of audio, and what makes samples of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headway_export.candidate import Candidate, run_batch
from headway_export.graphs import CodecDecoderGraph
from headway_export.inputs import DecoderText
from headway_export.parity import BATCH_SIZES, SEED, Comparison
from headway_export.quality import NUM_EXAMPLES, Quality, figure_of, nats_of_window, quoted
from headway_export.reference import Reference
from headway_export.source import EvaluationData, ExportSource
from headway_export.tasks.generation import Generation
from headway_export.tasks.task import Metric
from headway_server.batching import BatchGraph
from headway_training.models import Codec

_CODEC_RUNS = 6


class SpeechSynthesis(Generation):
    """Codes that are written as texts are, and their samples."""

    metrics = (Metric(name="nats_per_code", allowed_loss=0.02, higher_is_better=False),)

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares what is written, and the samples."""
        super().compare(candidate, reference, comparison)
        _compare_codec(candidate, reference, comparison)

    def _windows(self, source: ExportSource, data: EvaluationData) -> Iterator[DecoderText]:  # noqa: ARG002
        for ids, first in zip(data.sequences, data.prompt_lengths, strict=True):
            yield DecoderText(token_ids=ids, num_given=first)

    def hold_out(
        self,
        source: ExportSource,  # noqa: ARG002
        data: EvaluationData,  # noqa: ARG002
    ) -> tuple[EvaluationData, EvaluationData] | None:
        """Takes nothing of few recordings."""
        return None

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
            comparison.add_outputs(outputs, reference.row_outputs("codec_decoder", exact, item), f"batch {batch_size}")
    comparison.num_shapes += len(BATCH_SIZES)


def _text_of(pair: tuple[NDArray[np.int64], int], first_code: int, tokenizer: Tokenizer) -> str:
    """Returns the text of a sequence: what comes before the speech and is no code."""
    ids, first = pair
    prompt = ids[:first]
    return tokenizer.decode(prompt[prompt < first_code].tolist())
