"""Texts, or pairs of them, that a model without state reads.

N examples, C labels, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt
from torch import nn

from headway_export.candidate import Candidate, run_batch
from headway_export.graphs import StatelessGraph
from headway_export.inputs import (
    FULL_SHARE,
    LENGTHS,
    NUM_CALIBRATED,
    NUM_VECTORS,
    Draw,
    apart,
    drawn_boxes,
    evenly,
    text_items,
)
from headway_export.parity import Comparison, attention_texts, batches, sample_tokens
from headway_export.quality import NUM_EXAMPLES, Quality, by_length, figure_of, quoted
from headway_export.reference import Reference
from headway_export.source import EvaluationData, ExportSource, TextRow, read_rows, validated
from headway_export.tasks.stateless import Embedding, Stateless
from headway_export.tasks.task import NOT_LOOKED_AT, Metric
from headway_export.tracing import Traceable, TracedModel, make_spec, trace_graph
from headway_server.batching import Tensors
from headway_server.bundles import BBOX, LateInteraction, Limits, TensorSpec, demanded
from headway_server.preprocessing import EncodedText
from headway_server.tasks.mask_filling.model import POSITIONS
from headway_server.tasks.outputs import LOGITS, VECTORS
from headway_server.tasks.question_answering.windows import (
    DEFAULT_ANSWER_TOKENS,
    DEFAULT_WINDOW_TOKENS,
    Context,
    Found,
    PairFrame,
    Window,
    merge,
    shared_tokens,
    split,
)
from headway_server.tasks.text.model import text_tensors
from headway_training.data.questions import read_questions
from headway_training.metrics import answer_scores

if TYPE_CHECKING:
    from headway_export.agreement import Kind

_WINDOW_LENGTH: Final = 128
"""Tokens of a question and a context that judge."""
_QUESTION_SHARE: Final = 8
"""One token of so many is the question's."""
_MASKED_SHARE: Final = 0.15
"""Of a text's tokens that are masked, as in the training of BERT."""
_MOST_MASKED: Final = 4


class TextTask(Stateless):
    """A model of texts."""

    def limits(self, module: nn.Module) -> Limits:
        """Reads that of texts."""
        return Limits(max_input_tokens=self.longest_text(module))

    def longest_text(self, module: nn.Module) -> int:
        """Reads the limit of the module."""
        return int(cast("Any", module).max_length)

    def attention_inputs(self, asked: Traceable) -> list[TensorSpec]:
        """Tokens and their mask, and their types or boxes where the model reads such."""
        names = ("input_ids", "attention_mask", *(("token_type_ids",) if asked.has_token_types else ()))
        inputs = [make_spec(name, "int64", "batch", "length") for name in names]
        boxes = asked.word_boxes
        return inputs if boxes is None else [*inputs, make_spec(BBOX, boxes.dtype, "batch", "length", 4)]

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares batches of texts, long and short together."""
        source, graph = candidate.source, candidate.open_stateless()
        limit = source.limits.max_input_tokens
        assert limit is not None, "the source has read the module's length"
        assert source.tokenizer is not None, "a text model has its tokenizer"
        texts = sample_tokens(source, source.tokenizer.get_vocab_size(), limit, frame=True)
        for lengths in batches(limit):
            batch = [texts[row % len(texts)][:length] for row, length in enumerate(lengths)]
            items = [self.item(source, text) for text in batch]
            for item, found in zip(items, run_batch(graph, items), strict=True):
                read = [item[name] for name in graph.input_names if name != "attention_mask"]
                where = f"batch {len(lengths)}, lengths {lengths}"
                comparison.add_outputs(found, where, partial(reference.outputs, *read))
            comparison.num_shapes += len(set(lengths))

    def item(self, source: ExportSource, text: NDArray[np.int64]) -> Tensors:
        """Makes the graph's inputs of a text's tokens, (T,)."""
        boxes = drawn_boxes(source, text)
        return text_tensors(text, _halved(text), has_types=source.has_token_types, boxes=boxes)

    def attention_items(self, candidate: Candidate) -> Iterator[list[Tensors]]:
        """Yields texts."""
        has_types = candidate.source.has_token_types
        for batch, _ in attention_texts(candidate, frame=True):
            yield [text_tensors(text, _halved(text), has_types=has_types) for text in batch]

    def items(self, source: ExportSource, data: EvaluationData) -> Sequence[Tensors]:
        """Makes them of texts, or of pairs."""
        return text_items(source, data.texts, data.text_pairs)

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Returns texts that are given or drawn, with second ones where the model reads such."""
        source, count = draw.source, self.num_inputs(draw.source)
        if source.texts:
            return apart(self.drawn_items(draw, evenly(source.texts, count)))
        items = self.drawn_items(draw, draw.texts(count + NUM_CALIBRATED))
        return items[:count], items[count:]

    def drawn_items(self, draw: Draw, texts: Sequence[str]) -> list[Tensors]:
        """Makes the graph's inputs of texts that are given or drawn, as many of them."""
        return text_items(draw.source, *_paired(draw, texts))

    def positions(self, source: ExportSource) -> float:
        """Tokens."""
        limit = source.limits.max_input_tokens or LENGTHS[1]
        return min(limit, 24 + limit / FULL_SHARE)

    def logits(self, candidate: Candidate, data: EvaluationData) -> NDArray[np.float32]:
        """Logits of the examples, (N, C)."""
        graph, logits = candidate.open_stateless(), np.empty((len(data), len(candidate.source.labels)), np.float32)
        items = self.items(candidate.source, data)
        for rows in by_length([item["input_ids"] for item in items]):
            logits[rows] = [found["logits"] for found in run_batch(graph, [items[row] for row in rows])]
        return logits


class TextClassification(TextTask):
    """Labels of texts, one each or several."""

    optional_flags = ("--multi-label", "--text-pairs")
    metrics = (Metric(name="accuracy", allowed_loss=0.5), Metric(name="micro_f1", allowed_loss=0.5))

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads texts with a label each, or with several: `labels` in place of `label`.

        Raises:
            ValueError: The model does not have a label.
        """
        rows = read_rows(file)
        several = any("labels" in row for row in rows)
        read: list[_LabelsRow] | list[_LabelRow] = (
            validated(_LabelsRow, rows) if several else validated(_LabelRow, rows)
        )
        labels = [row.labels if isinstance(row, _LabelsRow) else [row.label] for row in read]
        if (largest := max((label for own in labels for label in own), default=0)) >= num_labels:
            raise ValueError(f"label {largest}: the model has {num_labels} labels, numbered from 0")
        pairs = [row.text_pair or "" for row in read] if any(row.text_pair is not None for row in read) else None
        examples = {"texts": [row.text for row in read], "text_pairs": pairs}
        if not several:
            return examples | {"labels": np.array(labels, np.int64)[:, 0]}
        truth = np.array([[label in own for label in range(num_labels)] for own in labels], np.int64)  # (N, C)
        return examples | {"metric": "micro_f1", "labels": truth}


class TextScoring(TextTask):
    """Numbers of texts, or of pairs."""

    is_read = False

    def kind(self, source: ExportSource) -> Kind:
        """A score, or a vector of each token."""
        return "score" if _late_interaction(source) is None else "vector"

    def output_of(self, source: ExportSource) -> str:
        """The logit, or the vectors of tokens."""
        return LOGITS if _late_interaction(source) is None else VECTORS


def _late_interaction(source: ExportSource) -> LateInteraction | None:
    return None if source.scoring is None else source.scoring.late_interaction


class TextEmbedding(Embedding, TextTask):
    """Vectors of texts."""


class QuestionAnswering(TextTask):
    """Where answers begin and end: a row of logits each, over the tokens of a question and a context."""

    is_read = False
    names_columns = False
    shows_no_attention = NOT_LOOKED_AT
    metrics = (Metric(name="answer_f1", allowed_loss=0.5),)

    def read_examples(self, file: Path, num_labels: int) -> dict[str, Any]:
        """Reads questions, their contexts and the answers that are right."""
        read = read_questions(file)
        return {"texts": read.questions, "text_pairs": read.contexts, "answers": read.answers}

    def measure(self, candidate: Candidate, data: EvaluationData) -> Quality:
        """Measures F1 of the answers' words, and exact answers."""
        found = _find_answers(candidate, data)
        f1, exact = answer_scores(found, data.answers)
        return Quality(
            figure=figure_of(data, f1),
            weak_points=(f"{exact:.1f} % of the answers are exactly right.", *_weak_answers(found, data)),
        )

    def positions(self, source: ExportSource) -> float:
        """Tokens of a window."""
        return _window_length(source)

    def drawn_items(self, draw: Draw, texts: Sequence[str]) -> list[Tensors]:
        """Makes windows of one length of the texts' tokens, so that answers are choices among as many."""
        source = draw.source
        assert source.tokenizer is not None, "a text model has its tokenizer"
        frame, stream = PairFrame.of(source.tokenizer), np.concatenate(source.encode(texts, frame=False))
        length = max(_window_length(source) - len(frame), 2)
        parts = np.resize(stream, (len(texts), length))
        asked = max(1, length // _QUESTION_SHARE)
        joined = (frame.join(part[:asked], part[asked:]) for part in parts)
        return [text_tensors(ids, types, has_types=source.has_token_types) for ids, types in joined]


class FillMask(TextTask):
    """Tokens in the places of masks."""

    is_read = False
    names_columns = False
    shows_no_attention = NOT_LOOKED_AT
    num_items = NUM_VECTORS

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces the graph, which reads where the masks are."""
        inputs = [*self.attention_inputs(asked), make_spec(POSITIONS, "int64", "batch", "masks")]
        return TracedModel(graphs=(trace_graph("model", asked.module, StatelessGraph(asked.served), inputs),))

    def item(self, source: ExportSource, text: NDArray[np.int64]) -> Tensors:
        """Asks for the tokens at both ends and in the middle."""
        return {**text_tensors(text), POSITIONS: np.unique([0, len(text) // 2, len(text) - 1])}

    def drawn_items(self, draw: Draw, texts: Sequence[str]) -> list[Tensors]:
        """Puts masks in the places of some tokens of each text."""
        source = draw.source
        assert source.special_tokens is not None, "the manifest needs a mask"
        items: list[Tensors] = []
        for ids in source.encode(texts, source.limits.max_input_tokens):
            count = min(_MOST_MASKED, max(1, round(_MASKED_SHARE * len(ids))))
            places = np.sort(draw.generator.choice(len(ids), count, replace=False))
            masked = ids.copy()
            masked[places] = demanded(source.special_tokens.mask)
            items.append({**text_tensors(masked), POSITIONS: places})
        return items


def _find_answers(candidate: Candidate, data: EvaluationData) -> list[str]:
    """Answers questions as a server does by default; there may be no answer if some question of the data has none."""
    tokenizer, most = candidate.source.tokenizer, candidate.source.limits.max_input_tokens
    assert tokenizer is not None, "a text model has its tokenizer"
    frame, length = PairFrame.of(tokenizer), min(DEFAULT_WINDOW_TOKENS, demanded(most))
    contexts, windows, items = list[Context](), list[tuple[int, int, Window]](), list[Tensors]()
    for number, (question, text) in enumerate(zip(data.texts, data.text_pairs or (), strict=True)):
        asked, read = (tokenizer.encode(one, add_special_tokens=False) for one in (question, text))
        ids = np.array(asked.ids[: length - len(frame) - 1], np.int64)
        encoded = EncodedText(
            input_ids=np.array(read.ids, np.int64), offsets=tuple(read.offsets), word_ids=tuple(read.word_ids)
        )
        contexts.append(context := Context.of(text, encoded, splits_words=False))
        room = length - len(frame) - len(ids)
        for window in split(len(encoded), room, shared_tokens(room)):
            joined, types = frame.join(ids, context.ids[window.start : window.end])
            windows.append((number, len(frame.before) + len(ids) + len(frame.between), window))
            items.append(text_tensors(joined, types, has_types=candidate.source.has_token_types))
    found: list[list[list[Found]]] = [[] for _ in contexts]
    nulls, graph, has_null = np.ones(len(contexts)), candidate.open_stateless(), len(frame.before) > 0
    for rows in by_length([item["input_ids"] for item in items]):
        for row, outputs in zip(rows, run_batch(graph, [items[row] for row in rows]), strict=True):
            number, first, window = windows[row]
            answers, null = contexts[number].read(
                outputs[LOGITS], window, first=first, has_null=has_null, top_k=1, max_tokens=DEFAULT_ANSWER_TOKENS
            )
            found[number].append(answers)
            nulls[number] = min(nulls[number], null)
    best = [merge(of_windows, 1) for of_windows in found]
    if not all(data.answers):
        best = [[] if null > sum(one.score for one in own) else own for own, null in zip(best, nulls, strict=True)]
    texts = zip(data.text_pairs or (), best, strict=True)
    return ["".join(text[one.start : one.end] for one in own) for text, own in texts]


def _weak_answers(found: Sequence[str], data: EvaluationData) -> list[str]:
    """Questions with the worst answers."""
    scores = [answer_scores([one], [right])[0] for one, right in zip(found, data.answers, strict=True)]
    worst = [row for row in sorted(range(len(scores)), key=scores.__getitem__)[:NUM_EXAMPLES] if scores[row] < 100]
    lines = []
    for row in worst:
        own, right = (quoted(one) if one else "nothing" for one in (found[row], (*data.answers[row], "")[0]))
        lines.append(f"F1 {scores[row]:.0f}: {quoted(data.texts[row])} was answered with {own}; expected {right}.")
    return lines


def _window_length(source: ExportSource) -> int:
    return min(_WINDOW_LENGTH, source.limits.max_input_tokens or _WINDOW_LENGTH)


class _LabelRow(TextRow):
    text_pair: str | None = None
    label: NonNegativeInt


class _LabelsRow(TextRow):
    text_pair: str | None = None
    labels: list[NonNegativeInt]


def _halved(text: NDArray[np.int64]) -> NDArray[np.int64]:
    """Types of a text's tokens, (T,), as if it were a pair of two halves."""
    return (np.arange(len(text)) >= len(text) // 2).astype(np.int64)


def _paired(draw: Draw, texts: Sequence[str]) -> tuple[Sequence[str], Sequence[str] | None]:
    """Adds second texts, if the model reads such: another one, the same, a part of it, or one of both in turn."""
    if draw.source.text_pairs == "never":
        return texts, None
    pairs = []
    for number, text in enumerate(texts):
        words, other = text.split(), texts[(number + 1) % len(texts)]
        half = " ".join(words[: (len(words) + 1) // 2])
        pairs.append((other, text, half, f"{half} {other}")[number % 4] or other)
    return texts, pairs
