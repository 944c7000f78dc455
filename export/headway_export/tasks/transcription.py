"""What is said in audio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headway_export import synthetic
from headway_export.candidate import NUM_ROWS, Candidate, audio_reader, features_of
from headway_export.inputs import DecoderText, Draw, evenly
from headway_export.parity import BATCH_SIZES, SEED
from headway_export.quality import NUM_EXAMPLES, Quality, figure_of, quoted, write_greedily
from headway_export.source import EvaluationData, ExportSource
from headway_export.tasks.task import NOT_LOOKED_AT, Metric
from headway_export.tasks.text_to_text import EncoderDecoder, framed, trace_encoder_decoder
from headway_export.tracing import Traceable, TracedModel, make_spec
from headway_server.bundles import Manifest, TensorSpec
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_training.metrics import score_transcripts, transcript_words, word_errors

_DRAWN_S: Final = 4.0
"""Of a drawn sound that judges a model of sounds of any length."""


class Transcription(EncoderDecoder):
    """Transcripts of windows of audio."""

    is_of_the_kit = True
    metrics = (Metric(name="wer", allowed_loss=0.5, higher_is_better=False),)

    shows_no_attention = NOT_LOOKED_AT

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads recordings and their transcripts.

        Raises:
            ValueError: Recordings have other lengths than their samples.
        """
        with np.load(file) as arrays:
            ends = np.cumsum(arrays["lengths"])
            if len(ends) != len(arrays["transcripts"]) or ends[-1:].tolist() != [len(arrays["samples"])]:
                raise ValueError("lengths are not those of the transcripts' samples")
            return {
                "recordings": np.split(arrays["samples"], ends[:-1]),
                "rate": int(arrays["rate"]),
                "references": arrays["transcripts"].tolist(),
                "groups": arrays["sources"].tolist(),
            }

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Says how audio of any length is read."""
        return {"sound": source.sound}

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces encoder and decoder."""
        inputs, has_any_length = self.encoder_inputs(asked), asked.sound is not None
        return trace_encoder_decoder(asked.served, inputs, asked.known, has_own_positions=has_any_length)

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how long audio of any length is heard."""
        if (sound := manifest.sound) is None:
            return []
        seconds = sound.window_samples / sound.sampling_rate
        return [f"It hears at most {seconds:g} seconds of mono audio of {sound.sampling_rate} Hz at once."]

    def encoder_inputs(self, asked: Traceable) -> list[TensorSpec]:
        """Features of windows of audio, or their samples."""
        if asked.sound is not None:
            return [asked.heard]
        assert asked.audio_size is not None, "a model of audio has its preprocessing"
        return [make_spec("input_features", "float32", "batch", *asked.audio_size)]

    def source_batches(self, source: ExportSource, vocab_size: int, limit: int) -> Iterator[list[NDArray[Any]]]:
        """Yields windows of audio."""
        random, read = np.random.default_rng(SEED), audio_reader(source)
        rate, num_samples = _window_of(source)
        lengths = [num_samples] * max(BATCH_SIZES)
        if source.sound is not None:  # of several lengths, the first as long as a window
            least = source.sound.min_samples
            lengths = [max(num_samples // 3**row, least) for row in range(len(lengths))]
        windows = [read(synthetic.draw_speech(1, rate, length, random)[0]) for length in lengths]
        yield from (windows[:batch_size] for batch_size in BATCH_SIZES)

    def pairs(self, source: ExportSource, data: EvaluationData) -> Iterator[DecoderText]:
        """Yields recordings with their transcripts."""
        written = source.encode([f" {text}" for text in data.references])
        start = source.caption_start("")
        for features, ids in zip(features_of(source, data, slice(None)), written, strict=True):
            yield framed(source, start, ids, features)

    def draw_sources(self, draw: Draw, count: int, most: int) -> list[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Returns recordings that are given, or synthetic ones, in drawn languages."""
        source, read = draw.source, audio_reader(draw.source)
        rate, num_samples = _window_of(source)
        if source.sound is not None:
            num_samples = min(num_samples, round(_DRAWN_S * rate))
        sounds = list(source.recordings) or synthetic.draw_speech(count, rate, num_samples, draw.generator)
        heard = [read(one) for one in evenly(sounds, most)]
        return [(one, source.caption_start(draw.languages()[1])) for one in heard]

    def first_tokens(self, draw: Draw, runner: DecoderRunner, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Replaces what rows, (R, P), begin with by what is given for the language that the model hears in each."""
        languages = draw.source.languages
        if languages is None or not languages.target_tokens:
            return starts
        codes = languages.targets
        tokens = [languages.target_tokens[code] for code in codes]
        logits = runner.decode(starts[:, 0], np.zeros(len(starts), np.int64))[:, tokens]
        return np.stack([draw.source.caption_start(codes[place]) for place in logits.argmax(axis=1)])

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Word error rate in percent of greedy transcripts."""
        source = candidate.source
        batches = (features_of(source, data, slice(at, at + NUM_ROWS)) for at in range(0, len(data), NUM_ROWS))
        transcripts = [text.strip() for text in write_greedily(candidate, batches, source.caption_start(""))]
        scores = score_transcripts(transcripts, data.references, data.groups)
        by_group = ", ".join(
            f"{name.removeprefix('wer_')} {value:.1f}" for name, value in scores.items() if name != "wer"
        )
        return Quality(
            figure=figure_of(data, scores["wer"]),
            weak_points=(
                *([f"Word error rate in percent by source: {by_group}."] if by_group else []),
                *_weak_transcripts(transcripts, data.references),
            ),
        )


def _window_of(source: ExportSource) -> tuple[int, int]:
    """Returns the rate of audio in Hz, and the samples of a window."""
    sizes = source.audio_preprocessing or source.sound
    assert sizes is not None, "a model of audio has its preprocessing"
    return sizes.sampling_rate, sizes.window_samples


def _weak_transcripts(transcripts: Sequence[str], references: Sequence[str]) -> list[str]:
    """Those with the most errors."""
    words = [tuple(map(transcript_words, pair)) for pair in zip(transcripts, references, strict=True)]
    errors = [word_errors(own, truth) for own, truth in words]
    worst = sorted(range(len(errors)), key=lambda index: -errors[index])[:NUM_EXAMPLES]
    return [
        f"{errors[index]} of {len(words[index][1])} words: {quoted(references[index])} was heard as "
        f"{quoted(transcripts[index])}."
        for index in worst
        if errors[index]
    ]
