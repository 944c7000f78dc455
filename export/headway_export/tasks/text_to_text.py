"""What is written of a source: a text, an image or audio.

T tokens, S source tokens, P asked positions, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import nn

from headway_export import parity, tracing
from headway_export.agreement import Rows, distributions
from headway_export.candidate import NUM_ROWS, Candidate, encode_sources, named_source, open_sources
from headway_export.errors import ParityError, SourceError
from headway_export.graphs import (
    CrossDecoderGraph,
    EncoderDecoderAttentionGraph,
    EncoderGraph,
    RecurrentDecoderGraph,
    RecurrentEncoderGraph,
)
from headway_export.inputs import LENGTHS, DecoderText, Draw, Inputs, affordable, apart, evenly, places, write_on
from headway_export.quality import NUM_EXAMPLES, Quality, by_length, decode_greedily, figure_of, quoted
from headway_export.reference import Reference, TargetAnswers
from headway_export.rewriting import RankLogits
from headway_export.source import EvaluationData, ExportSource, Readable, read_rows, validated
from headway_export.spool import spooled
from headway_export.tasks.task import ExportTask, Metric
from headway_server.batching import Tensors
from headway_server.bundles import Limits, StateTensor, TensorSpec
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import CrossTensors
from headway_server.runtime import Session, give_back_memory
from headway_server.tasks.text.model import text_tensors
from headway_training.models import protocols
from headway_training.models.protocols import is_recurrent

_NUM_BEAMS = 2
_NUM_LIKELIEST = 8
_NUM_SOURCES = (8, 32)
"""The least and the most."""
_SOURCES_AT_A_TIME = 4


class EncoderDecoder(ExportTask):
    """An encoder and a decoder, whatever the source is."""

    has_cache = True
    more_outputs = RankLogits  # which nearly every step needs
    words_of_total = "What it writes has"

    def limits(self, module: nn.Module) -> Limits:
        """Reads those of sources and of what is written."""
        source = int(cast("Any", module).max_source_length)
        return Limits(max_input_tokens=source, max_total_tokens=int(cast("Any", module).max_target_length))

    def check_source(self, source: ExportSource) -> None:
        """Checks that there are tokens to begin and to end with."""
        tokens = source.special_tokens
        if tokens is None or tokens.bos is None or tokens.eos is None:
            raise SourceError(f"{self.task} needs the ids of bos and eos; give them with --bos-token and --eos-token")

    def trace(self, asked: tracing.Traceable) -> tracing.TracedModel:
        """Traces encoder and decoder."""
        return trace_encoder_decoder(asked.served, self.encoder_inputs(asked), asked.known)

    @abstractmethod
    def encoder_inputs(self, asked: tracing.Traceable) -> list[TensorSpec]:
        """Declares what the encoder reads."""

    def compare(self, candidate: Candidate, reference: Reference, comparison: parity.Comparison) -> None:
        """Compares what is decoded of batches of sources, and what is answered to targets that are given.

        The encoder, the decoder with its cache, and PyTorch take their memory one after another.
        """
        limits, tokens = candidate.source.limits, candidate.source.special_tokens
        assert limits.max_input_tokens is not None, "the source has read the module's lengths"
        assert limits.max_total_tokens is not None, "the source has read the module's lengths"
        assert tokens is not None, "a text model has its special tokens"
        assert tokens.bos is not None, "the exporter has checked it"
        # A decoder may place tokens by where there is no padding, which it never writes.
        forbidden = {*candidate.source.suppressed_tokens, *([] if tokens.pad is None else [tokens.pad])}
        never = sorted(forbidden - {tokens.bos})
        evaluation = candidate.source.evaluation
        references = () if evaluation is None else self.references(evaluation)
        written = _sample_targets(candidate, references, never)
        read = [*self.source_batches(candidate.source, candidate.vocab_size, limits.max_input_tokens)]
        encoded, session = candidate.encode(read), candidate.open_session()
        all_lengths = parity.batches(limits.max_total_tokens)
        for sources, of_decoder, lengths in zip(read, encoded, all_lengths, strict=True):
            batch = _SourceBatch(
                candidate=candidate,
                session=session,
                reference=reference,
                comparison=comparison,
                sources=sources,
                encoded=of_decoder,
            )
            batch.compare_decoding(tokens.bos, never)
            batch.compare_given(
                [np.append(tokens.bos, written[row][: length - 1]) for row, length in enumerate(lengths)]
            )
            comparison.num_shapes += len(set(map(_shape_of, sources))) + len(set(lengths))

    @abstractmethod
    def source_batches(self, source: ExportSource, vocab_size: int, limit: int) -> Iterator[Sequence[Readable]]:
        """Yields batches of what the encoder reads, one for each of `BATCH_SIZES`."""

    def references(self, data: EvaluationData) -> Sequence[str]:
        """Returns texts of evaluation data that the decoder is given."""
        return data.references

    def answers(self, candidate: Candidate, inputs: Inputs) -> Iterator[Rows]:
        """Yields logarithms of the probabilities of tokens."""
        return distributions(candidate, inputs.texts)

    def inputs_of(
        self, source: ExportSource, data: EvaluationData, most: int | None, candidate: Candidate | None
    ) -> Inputs:
        """Returns sources with what is to be written of them."""
        rows = data.take(places(len(data), most or self._num_sources(source)))
        return Inputs(dataset=data.dataset, texts=tuple(self.pairs(source, rows)))

    @abstractmethod
    def pairs(self, source: ExportSource, data: EvaluationData) -> Iterator[DecoderText]:
        """Yields sources with what is to be written of them."""

    @abstractmethod
    def draw_sources(self, draw: Draw, count: int, most: int) -> Sequence[tuple[Readable, NDArray[np.int64]]]:
        """Returns sources, `most` of them at most where they are given, and what the decoder is given of each."""

    def source_positions(self, limit: int) -> int:
        """Returns how many positions of a source are computed at most, of `limit`."""
        return limit

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Lets the model write of sources."""
        source, count = draw.source, self._num_sources(draw.source)
        num_others = max(_SOURCES_AT_A_TIME, count // 2)
        read = [*self.draw_sources(draw, count + num_others, 2 * count)]
        if source.texts or source.recordings or source.images is not None:
            judged, others = apart(read)
            few = judged[:count]
            judged, calibration = few, few if others is judged else others
        else:
            judged, calibration = read[:count], read[count:]
        texts = self._write_of(draw, judged)
        return texts, texts if judged is calibration else self._write_of(draw, calibration)

    def _write_of(self, draw: Draw, sources: Sequence[tuple[Readable, NDArray[np.int64]]]) -> list[DecoderText]:
        """Writes of each source twice, and of one up to the model's limit."""
        source, tokens = draw.source, draw.source.special_tokens
        limit = source.limits.max_total_tokens
        assert tokens is not None, "a text model has its special tokens"
        assert limit is not None, "a decoder has a length"
        length, texts = min(LENGTHS[1], limit), list[DecoderText]()
        ends = [token for token in (tokens.eos, *tokens.more_eos) if token is not None]
        parts = [sources[at : at + _SOURCES_AT_A_TIME] for at in range(0, len(sources), _SOURCES_AT_A_TIME)]
        encoded = [one for part in draw.candidate.encode([one for one, _ in part] for part in parts) for one in part]
        session = draw.candidate.open_session()
        most_rows = draw.candidate.affordable_rows(2 * _SOURCES_AT_A_TIME, max_length=length, sources=encoded)
        step = max(1, most_rows // 2)
        for at in range(0, len(sources), step):
            some, of_decoder = sources[at : at + step], encoded[at : at + step]
            rows = 2 * len(some)
            runner = draw.candidate.open_decoder(rows, max_length=length, sources=of_decoder, session=session)
            runner.set_sources(of_decoder)
            for row in range(rows):
                runner.begin(row, of_decoder[row // 2])
            starts = np.stack([some[row // 2][1] for row in range(rows)])
            starts = self.first_tokens(draw, runner, starts)
            is_drawn = np.arange(rows) % 2 == 1
            written = write_on(runner, starts, length, is_drawn, ends, source.suppressed_tokens, draw.generator)
            del runner  # its cache, before that of the next
            texts += [
                DecoderText(token_ids=ids, num_given=len(starts[row]), source=some[row // 2][0])
                for row, ids in enumerate(written)
            ]
        if limit > length:
            texts.append(_repeated(texts[0], limit))
        return texts

    def first_tokens(self, draw: Draw, runner: DecoderRunner, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns what rows, (R, P), begin with once their sources are known."""
        return starts

    def _num_sources(self, source: ExportSource) -> int:
        """Returns how many sources are affordable."""
        read = self.source_positions(source.limits.max_input_tokens or 1)
        return affordable(source, 2 * LENGTHS[1] + read, *_NUM_SOURCES)


class TextToText(EncoderDecoder):
    """Texts of texts."""

    protocols: ClassVar[tuple[type, ...]] = (protocols.EncoderDecoder, protocols.RecurrentEncoderDecoder)
    is_read: ClassVar[bool] = False
    attention_graph = EncoderDecoderAttentionGraph
    inspection = "inspect-translation TEXT"

    def trace(self, asked: tracing.Traceable) -> tracing.TracedModel:
        """Traces encoder and decoder, which may have a recurrent state."""
        with tracing.following_the_protocol(asked.module):
            has_state = is_recurrent(asked.module)
        return trace_recurrent(asked.module) if has_state else super().trace(asked)

    def encoder_inputs(self, asked: tracing.Traceable) -> list[TensorSpec]:
        """Tokens of sources, and their mask."""
        return [tracing.make_spec(*spec) for spec in _ENCODER_INPUTS]

    def check_attention(self, module: nn.Module) -> None:
        """Refuses a recurrent model, and one whose kernel cannot be replaced."""
        if is_recurrent(module):
            raise SourceError(
                f"{type(module).__name__}: has a recurrent state in place of attention to its own tokens; leave out "
                "--attention. Its attention to the source comes with each translation as its alignment"
            )
        super().check_attention(module)

    def attention_inputs(self, asked: tracing.Traceable) -> list[TensorSpec]:
        """Sources, and targets from their first token on."""
        sources = [_as_read(spec, "batch") for spec in self.encoder_inputs(asked)]
        return [*sources, tracing.make_spec("target_ids", "int64", "batch", "length")]

    def source_batches(self, source: ExportSource, vocab_size: int, limit: int) -> Iterator[list[NDArray[Any]]]:
        """Yields tokens of several lengths."""
        texts = parity.sample_tokens(source, vocab_size, limit, frame=True)
        for rows in parity.batches(limit):
            yield [texts[row % len(texts)][:length] for row, length in enumerate(rows)]

    def attention_items(self, candidate: Candidate) -> Iterator[list[Tensors]]:
        """Yields sources and targets."""
        for batch, others in parity.attention_texts(candidate, frame=True):
            targets = [other[: 1 + len(text) // 2] for text, other in zip(batch, others, strict=True)]
            yield [{**text_tensors(text), "target_ids": target} for text, target in zip(batch, targets, strict=True)]

    def pairs(self, source: ExportSource, data: EvaluationData) -> Iterator[DecoderText]:
        """Yields texts with what is to be written of them."""
        read = source.encode_sources(data.texts, data.languages)
        for (given, start), ids in zip(read, source.encode(data.references), strict=True):
            yield framed(source, start, ids, given)

    def draw_sources(self, draw: Draw, count: int, most: int) -> list[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Returns texts, in drawn languages."""
        texts = evenly(draw.source.texts, most) or draw.texts(count)
        return [*draw.source.encode_sources(texts, [draw.languages() for _ in texts])]

    def source_positions(self, limit: int) -> int:
        """Returns those of a text that is not among the longest."""
        return min(limit, LENGTHS[1])


class Translation(TextToText):
    """Texts in another language."""

    is_read = True
    metrics = (Metric(name="sacrebleu", allowed_loss=0.5),)

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads sources and targets."""
        pairs = validated(_TranslationRow, read_rows(file))
        languages = [(row.source_language, row.target_language) for row in pairs]
        return {
            "texts": [row.source for row in pairs],
            "references": [row.target for row in pairs],
            "languages": languages if any(map(any, languages)) else [],
        }

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Measures BLEU of greedy translations."""
        import sacrebleu

        metric = sacrebleu.BLEU()
        translations = _translate(candidate, data)
        score = metric.corpus_score(translations, [list(data.references)])
        return Quality(
            figure=figure_of(data, float(score.score), signature=str(metric.get_signature())),
            weak_points=weak_translations(data.texts, translations, data.references),
        )


class _TranslationRow(BaseModel):
    source: str
    target: str
    source_language: str = ""
    target_language: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceBatch:
    """Encoded sources, and what a decoder makes of them.

    The decoder's logits are on disk before PyTorch is asked, and its cache is closed.
    """

    candidate: Candidate
    session: Session
    reference: Reference
    comparison: parity.Comparison
    sources: Sequence[Readable]
    encoded: Sequence[CrossTensors]

    def compare_decoding(self, bos: int, never: Sequence[int]) -> None:
        """Holds what is decoded greedily from the first token on; with beams that differ, where there is room.

        Args:
            bos: The first token.
            never: Tokens that are not taken.
        """
        num_sources = len(self.sources)
        num_beams = _NUM_BEAMS if 1 < num_sources <= max(parity.BATCH_SIZES) // _NUM_BEAMS else 1
        where = f"batch {num_sources}, sources {[_shape_of(source) for source in self.sources]}, {num_beams} rows each"
        chosen, steps = self._decode(bos, never, num_beams, where)
        for row in range(num_sources * num_beams):
            found = _Part(np.arange(len(steps)), np.stack([step[row] for step in steps]))
            self._compare(self.sources[row // num_beams], chosen[:, row], [found], where)

    def _decode(
        self, bos: int, never: Sequence[int], num_beams: int, where: str
    ) -> tuple[NDArray[np.int64], list[NDArray[np.float32]]]:
        """Decodes greedily and returns the tokens read, (T, R), and the logits after each: T times (R, V)."""
        limit, vocab_size = self.candidate.source.limits.max_total_tokens, self.candidate.vocab_size
        assert limit is not None, "the source has read the module's lengths"
        num_steps, count = min(2 * parity.DECODED_TOKENS, limit), min(_NUM_LIKELIEST, vocab_size)
        num_rows = len(self.sources) * num_beams
        runner = self._open(num_rows, num_steps)
        runner.set_sources(self.encoded)
        for slot in range(num_rows):
            runner.begin(slot, self.encoded[slot // num_beams])
        chosen, steps = [np.full(num_rows, bos, np.int64)], list[NDArray[np.float32]]()
        for position in range(num_steps):
            logits = runner.decode(chosen[-1], np.full(num_rows, position), num_likeliest=count)
            parity.check_ranking(runner.ranking, logits, where)
            steps.append(self._kept(logits))
            logits[:, never] = -np.inf
            following = logits.argmax(axis=-1)
            if position == 0:  # the beams of a source go ways of their own
                best = np.argsort(-logits, axis=-1, kind="stable")
                following = best[np.arange(num_rows), np.arange(num_rows) % num_beams]
            chosen.append(following)
        return np.stack(chosen[:-1]), steps

    def compare_given(self, targets: Sequence[NDArray[np.int64]]) -> None:
        """Holds targets that are given: read in chunks, as a given beginning is, with their ends decoded."""
        where = f"batch {len(self.sources)}, targets of {[len(target) for target in targets]} tokens"
        found, alignments = self._read(targets)
        for row, (source, target) in enumerate(zip(self.sources, targets, strict=True)):
            expected = self._compare(source, target, found[row], where).alignment
            if alignments:
                self._compare_alignment(alignments[row], expected)

    def _read(self, targets: Sequence[NDArray[np.int64]]) -> tuple[list[list[_Part]], list[NDArray[np.float32]]]:
        """Reads targets in chunks and decodes their ends.

        Returns:
            The logits of each target, and its alignment (T, S) if the decoder has such.
        """
        num_steps = np.array([min(parity.DECODED_TOKENS, len(target) - 1) for target in targets])
        firsts = np.array([len(target) for target in targets]) - num_steps
        runner = self._open(len(targets), max(map(len, targets)))
        found: list[list[_Part]] = []
        for slot, (target, source) in enumerate(zip(targets, self.encoded, strict=True)):
            runner.begin(slot, source)
            asked = parity.asked_positions(int(firsts[slot]), runner.vocab_size)
            chunks = parity.read_chunks(runner, slot, target[: firsts[slot]], asked, source)
            found.append([_Part(positions, self._kept(logits)) for positions, logits in chunks])
            give_back_memory()
        runner.set_sources(self.encoded)
        steps = list[NDArray[np.float32]]()
        for step in range(int(num_steps.max())):
            # A row that has ended reads its last token once more, where it was.
            positions = np.minimum(firsts + step, firsts + num_steps - 1)
            tokens = np.array([target[at] for target, at in zip(targets, positions, strict=True)])
            steps.append(self._kept(runner.decode(tokens, positions)))
        for row, (parts, target, count) in enumerate(zip(found, targets, num_steps.tolist(), strict=True)):
            if count:
                decoded = np.stack([logits[row] for logits in steps[:count]])
                parts.append(_Part(np.arange(len(target) - count, len(target)), self._kept(decoded)))
        if not runner.has_alignment:
            return found, []
        return found, [runner.align(slot, *pair) for slot, pair in enumerate(zip(self.encoded, targets, strict=True))]

    def _open(self, num_rows: int, max_length: int) -> DecoderRunner:
        give_back_memory()  # of what PyTorch has computed
        return self.candidate.open_decoder(num_rows, max_length=max_length, sources=self.encoded, session=self.session)

    def _kept(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns logits, which the next step writes over, on disk if they are many."""
        (kept,) = spooled({"logits": logits}, self.candidate.bundle.path).values()
        return kept.copy() if kept is logits else kept

    def _compare_alignment(self, found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
        """Holds the alignment of a target against the attention of PyTorch's layer, (T, S) each."""
        error = float(np.abs(found - expected / expected.sum(axis=-1, keepdims=True)).max())
        if not (error <= parity.WEIGHT_BOUND or (self.comparison.bound is None and np.isfinite(error))):
            raise ParityError(
                f"alignment {found.shape} of a target of {len(found)} tokens: {error:.2e} from PyTorch's weights, "
                f"bound {parity.WEIGHT_BOUND:.0e}"
            )

    def _compare(
        self, source: Readable, target: NDArray[np.int64], found: Sequence[_Part], where: str
    ) -> TargetAnswers:
        """Compares logits after tokens of a target, (T,), in parts; returns what PyTorch answers to all of them."""
        positions = np.concatenate([part.positions for part in found])
        give_back_memory()  # freed by the decoder, or by the comparison of another row

        def answer() -> TargetAnswers:
            return self.reference.target_answers(source, target, positions)

        answers, stop = answer(), 0
        for part in found:
            start, stop = stop, stop + len(part.positions)
            here = slice(start, stop)

            def again(here: slice = here) -> NDArray[np.float32]:
                return answer().logits[here]

            self.comparison.add("logits", part.logits, answers.logits[here], where, again)
            self.comparison.add_greedy(part.logits.argmax(axis=-1), answers.logits[here], where, again)
        return answers


class _Part(NamedTuple):
    """Logits of a decoder."""

    positions: NDArray[np.int64]
    """(P,), of the tokens of a target that they come after."""
    logits: NDArray[np.float32]
    """(P, V)"""


def _sample_targets(candidate: Candidate, references: Sequence[str], never: Sequence[int]) -> list[NDArray[np.int64]]:
    """Returns tokens that a decoder is given, up to its limit: of evaluation data, or drawn among those it takes."""
    source, rows, length = candidate.source, max(parity.BATCH_SIZES), candidate.source.limits.max_total_tokens
    assert length is not None, "the source has read the module's lengths"
    if references and source.tokenizer is not None:
        tokens = np.concatenate(source.encode(references[: rows * length], frame=False))
        if len(tokens) > 1:
            return list(np.resize(tokens, (rows, length)))
    allowed = np.setdiff1d(np.arange(candidate.vocab_size), never)
    return list(np.random.default_rng(parity.SEED).choice(allowed, (rows, length)))


def framed(source: ExportSource, start: NDArray[np.int64], ids: NDArray[np.int64], read: Readable) -> DecoderText:
    """Returns a target that begins with what is given and is cut at the limit."""
    target = np.concatenate([start, ids])[: source.limits.max_total_tokens]
    return DecoderText(token_ids=target, num_given=len(start), source=read)


def _shape_of(source: Readable) -> tuple[int, ...]:
    """Returns the axes of all that an encoder reads of a source."""
    return tuple(size for tensor in named_source(source).values() for size in tensor.shape)


def _repeated(text: DecoderText, limit: int) -> DecoderText:
    """Repeats what was written up to the model's length."""
    written = text.token_ids[text.num_given :]
    written = written if len(written) else text.token_ids[-1:]
    ids = np.concatenate([text.token_ids, np.resize(written, limit)])[:limit]
    return replace(text, token_ids=ids)


def _translate(candidate: Candidate, data: EvaluationData) -> list[str]:
    """Translates greedily, in fixed batches of sentences of similar length."""
    source = candidate.source
    assert source.tokenizer is not None, "a text model has its tokenizer"
    assert source.special_tokens is not None, "a text model has its special tokens"
    pairs = source.encode_sources(data.texts, data.languages)
    ids, starts = [ids for ids, _ in pairs], [start for _, start in pairs]
    rows = candidate.affordable_rows(NUM_ROWS)
    decoder, encoder = candidate.open_decoder(rows), candidate.open_encoder()
    translations = [""] * len(ids)
    for batch in by_length(ids, rows):
        open_sources(decoder, encode_sources(encoder, [ids[index] for index in batch], candidate.bundle.path))
        given = np.stack([starts[index] for index in batch])
        targets = decode_greedily(decoder, given, source.special_tokens.eos, source.suppressed_tokens)
        for index, target in zip(batch, targets, strict=True):
            translations[index] = source.tokenizer.decode(target, skip_special_tokens=True)
    return translations


def weak_translations(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[str]
) -> tuple[str, ...]:
    """The worst translations by chrF (Popović 2015) of the sentence, with sacreBLEU's defaults."""
    import sacrebleu

    metric = sacrebleu.CHRF()
    pairs = zip(translations, references, strict=True)
    scores = [metric.sentence_score(translation, [reference]).score for translation, reference in pairs]
    worst = sorted(range(len(scores)), key=scores.__getitem__)[:NUM_EXAMPLES]
    return tuple(
        f"chrF {scores[index]:.1f}: {quoted(sources[index])} became {quoted(translations[index])}; "
        f"expected {quoted(references[index])}."
        for index in worst
    )


# Graphs

_ENCODER_INPUTS = (
    ("input_ids", "int64", "batch", "length"),
    ("attention_mask", "int64", "batch", "length"),
)


def trace_encoder_decoder(
    module: nn.Module,
    encoder_inputs: Sequence[TensorSpec],
    known: tracing.TracedModel | None,
    *,
    has_own_positions: bool = False,
) -> tracing.TracedModel:
    """Traces an encoder, and a decoder with a cache; the encoder may give other positions than it reads."""
    past = tracing.past_specs(module, has_source=True)
    graph = EncoderGraph(module)
    outputs = _with_own_positions(module, graph, encoder_inputs) if has_own_positions else None
    encoder = tracing.trace_graph("encoder", module, graph, encoder_inputs, outputs=outputs)
    cross = encoder.outputs
    inputs = [*(tracing.make_spec(*spec) for spec in tracing.STEP_INPUTS), *past, *tracing.read_sources(encoder)]
    aligned_layer = tracing.alignment_layer(len(cross) // 2)
    if known is not None:  # its attention is given to a decoder, whatever the kernel
        decoder = known.graphs[-1]
    else:
        decoder = tracing.trace_graph("decoder", module, CrossDecoderGraph(module, len(past), aligned_layer), inputs)
    return tracing.TracedModel(
        graphs=(encoder, decoder),
        state=tracing.in_place(past),
        cross=tuple(spec.name for spec in cross),
        alignment_layer=aligned_layer,
    )


def _with_own_positions(module: nn.Module, graph: nn.Module, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Declares keys and values of a source, (batch, heads, positions, head_dim)."""
    with tracing.following_the_protocol(module):
        found = graph(*tracing.example_of(inputs))
    return [
        tracing.make_spec(name, str(one.dtype).removeprefix("torch."), "batch", one.shape[1], "positions", one.shape[3])
        for name, one in found.items()
    ]


def trace_recurrent(module: nn.Module) -> tracing.TracedModel:
    """Traces an encoder, and a decoder with a recurrent state."""
    graph = RecurrentEncoderGraph(module)
    encoder = tracing.trace_graph("encoder", module, graph, [tracing.make_spec(*spec) for spec in _ENCODER_INPUTS])
    cross = [spec for spec in encoder.outputs if spec.name.startswith("cross_")]
    states = tuple(
        StateTensor(
            past=f"past_state_{number}",
            present=f"present_state_{number}",
            update="replace",
            initial=f"initial_state_{number}",
        )
        for number in range(len(encoder.outputs) - len(cross))
    )
    past = [
        _as_read(spec, "slots").model_copy(update={"name": state.past})
        for spec, state in zip(encoder.outputs[len(cross) :], states, strict=True)
    ]
    inputs = [
        tracing.make_spec("input_ids", "int64", "slots", 1),
        *past,
        tracing.make_spec(*tracing.SOURCE_MASK),
        *(_as_read(spec, "sources") for spec in cross),
    ]
    decoder_graph = RecurrentDecoderGraph(module, len(past))
    _check_step(module, past, tracing.declare_outputs(module, decoder_graph, inputs))
    decoder = tracing.trace_graph("decoder", module, decoder_graph, inputs)
    names = tuple(spec.name for spec in cross)
    return tracing.TracedModel(graphs=(encoder, decoder), state=states, cross=names, alignment_layer=0)


def _check_step(module: nn.Module, past: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Checks that a step of a recurrent model returns its states, and a weight for each source token.

    Raises:
        SourceError: It does not.
    """
    _, alignment, *present = outputs
    if not past or [spec.shape for spec in present] != [spec.shape for spec in past]:
        raise SourceError(
            f"{type(module).__name__}: step was given states {[spec.shape for spec in past]} and returned "
            f"{[spec.shape for spec in present]}; it returns at least one, each of the shape it was given"
        )
    if alignment.shape != (expected := ("slots", 1, "source_length")):
        raise SourceError(
            f"{type(module).__name__}: step returned attention of {alignment.shape}; it returns {expected}, a weight a "
            "source token"
        )


def _as_read(spec: TensorSpec, rows: str) -> TensorSpec:
    """Returns an encoder's output as a decoder declares it."""
    axes = {"batch": rows, "length": "source_length"}
    return spec.model_copy(update={"shape": tuple(axes.get(str(axis), axis) for axis in spec.shape)})
