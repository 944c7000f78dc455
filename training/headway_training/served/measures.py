"""One measurement for each task, on the answers of a served model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_type_hints

from headway_client import Client, LabelScore, Model, Task
from headway_client.options import (
    ClassifyImageOptions,
    ClassifyTextOptions,
    ClassifyTokensOptions,
    TranslateTextOptions,
)
from headway_training.data.examples import ParallelTexts, PlainText
from headway_training.errors import EvaluationError
from headway_training.metrics import accuracy, corpus_bleu, macro_f1, multi_label_f1, span_scores
from headway_training.served.data import LabeledInputs, MultiLabeledInputs, ServedExamples, SpanInputs
from headway_training.served.sender import Sender
from headway_training.served.text_score import TextScorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a served model reaches."""

    metric: str
    """Name of the task's metric, as model cards have it."""
    figures: Mapping[str, float | str]
    """The metric, and what else was measured with it; a metric's own signature is a string."""
    example_count: int
    """Examples that were measured."""
    unit: str
    """What one of them is."""

    @property
    def value(self) -> float:
        """The metric's value."""
        return float(self.figures[self.metric])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model and the way to it."""

    client: Client
    model: Model
    sender: Sender
    options: Mapping[str, object]
    """Options of the client's call beside the model and what must be as it is for the metric."""


def measure(served: ServedModel, examples: ServedExamples) -> Measurement:
    """Measures the metric of the model's task.

    Raises:
        EvaluationError: There is no measurement for the task, or the client's call does not take an option.
        HeadwayError: A call fails.
        TypeError: An option's value is of a wrong type.
    """
    measurement = _MEASURES.get(served.model.task)
    if measurement is None:
        raise EvaluationError(
            f"{served.model.name} is for {served.model.task}, which cannot be measured; "
            f"these can: {', '.join(sorted(_MEASURES))}"
        )
    _check_options(served)
    return measurement(served, examples)


def _check_options(served: ServedModel) -> None:
    """Checks that the client's call takes the options."""
    kind = _OPTIONS.get(served.model.task)
    known = sorted(set(get_type_hints(kind)) - _GIVEN) if kind else []
    for name in served.options:
        if name not in known:
            raise EvaluationError(
                f"{name} is no option of measuring {served.model.task}; these are: {', '.join(known) or 'none'}"
            )


Ask = Callable[[Sequence[Any]], Sequence[str]]
"""Some inputs -> the label of each."""
TextAndPair = tuple[str, str | None]
"""A text, and what it is paired with where the model reads pairs."""


def _labels(served: ServedModel, examples: LabeledInputs, inputs: Sequence[Any], ask: Ask) -> Measurement:
    """Accuracy and macro F1, in percent, of the likeliest labels."""
    names = {name: index for index, name in enumerate(served.model.labels)}
    predicted = [names[label] for label in served.sender.send(inputs, ask)]
    actual = [names[label] for label in examples.labels]
    figures = {"accuracy": accuracy(predicted, actual), "macro_f1": macro_f1(predicted, actual, len(names))}
    unit = "texts" if served.model.task is Task.TEXT_CLASSIFICATION else "images"
    return Measurement(metric="accuracy", figures=figures, example_count=len(examples), unit=unit)


def _text_labels(served: ServedModel, examples: ServedExamples) -> Measurement:
    """A text past the model's limit is shortened, as it is when a card is made."""
    if isinstance(examples, MultiLabeledInputs):
        return _several_labels(served, examples)
    assert isinstance(examples, LabeledInputs), "the data is read for the model's task"

    def ask(inputs: Sequence[TextAndPair]) -> Sequence[str]:
        return [_likeliest(labels) for labels in _classify(served, inputs, top_k=1)]

    return _labels(served, examples, _paired([str(text) for text in examples.inputs], examples.text_pairs), ask)


def _several_labels(served: ServedModel, examples: MultiLabeledInputs) -> Measurement:
    """Micro and macro F1, in percent, of the labels that are said to apply."""

    def ask(inputs: Sequence[TextAndPair]) -> Sequence[list[bool]]:
        rows = [{label.label: label.selected for label in labels} for labels in _classify(served, inputs, top_k=0)]
        return [[row[name] for name in served.model.labels] for row in rows]

    selected = served.sender.send(_paired(examples.texts, examples.text_pairs), ask)
    truth = [[name in labels for name in served.model.labels] for labels in examples.labels]
    micro, macro = multi_label_f1(selected, truth)
    figures = {"micro_f1": micro, "macro_f1": macro}
    return Measurement(metric="micro_f1", figures=figures, example_count=len(examples), unit="texts")


def _paired(texts: Sequence[str], text_pairs: Sequence[str] | None) -> list[TextAndPair]:
    return [(text, (text_pairs[index] or None) if text_pairs else None) for index, text in enumerate(texts)]


def _classify(served: ServedModel, inputs: Sequence[TextAndPair], *, top_k: int) -> Sequence[Sequence[LabelScore]]:
    """Asks for the labels of some texts: those with a pair in a call of their own, as a call has pairs or none."""
    options = cast("ClassifyTextOptions", {"truncate": True, **_named(served), "top_k": top_k})
    singles = [index for index, (_, pair) in enumerate(inputs) if pair is None]
    pairs = {index: pair for index, (_, pair) in enumerate(inputs) if pair is not None}
    labels: dict[int, Sequence[LabelScore]] = {}
    for indices, own in ((singles, options), (list(pairs), options | {"text_pairs": list(pairs.values())})):
        if indices:
            answer = served.client.classify_text([inputs[index][0] for index in indices], **own)
            labels |= {index: result.labels for index, result in zip(indices, answer, strict=True)}
    return [labels[index] for index in range(len(inputs))]


def _image_labels(served: ServedModel, examples: ServedExamples) -> Measurement:
    assert isinstance(examples, LabeledInputs), "the data is read for the model's task"
    options = cast("ClassifyImageOptions", {**_named(served), "top_k": 1})

    def ask(images: Sequence[bytes]) -> Sequence[str]:
        return [_likeliest(result.labels) for result in served.client.classify_image(images, **options)]

    return _labels(served, examples, examples.inputs, ask)


def _spans(served: ServedModel, examples: ServedExamples) -> Measurement:
    """F1, precision and recall of the spans of raw text, in percent; a text past the model's limit is shortened."""
    assert isinstance(examples, SpanInputs), "the data is read for the model's task"
    options = cast("ClassifyTokensOptions", {"truncate": True, **_named(served)})
    numbers = {name: index for index, name in enumerate(served.model.labels)}

    def ask(texts: Sequence[str]) -> Sequence[list[tuple[int, int, int]]]:
        answer = served.client.classify_tokens(texts, **options)
        return [[(span.start, span.end, numbers[span.label]) for span in result.spans] for result in answer]

    found = served.sender.send(examples.texts, ask)
    expected = [[(start, end, numbers[label]) for start, end, label in spans] for spans in examples.spans]
    precision, recall, f1 = span_scores(found, expected)
    figures = {"span_f1": f1, "span_precision": precision, "span_recall": recall}
    return Measurement(metric="span_f1", figures=figures, example_count=len(examples), unit="texts")


def _likeliest(labels: Sequence[LabelScore]) -> str:
    return labels[0].label


def _translation(served: ServedModel, examples: ServedExamples) -> Measurement:
    """SacreBLEU of the best translation of each sentence; a source past the model's limit is shortened."""
    assert isinstance(examples, ParallelTexts), "the data is read for the model's task"
    options = cast("TranslateTextOptions", {"truncate": True, **_named(served)})

    def ask(texts: Sequence[str]) -> Sequence[str]:
        return [result.text for result in served.client.translate_text(texts, **options)]

    hypotheses = served.sender.send(examples.sources, ask)
    score, signature = corpus_bleu(hypotheses, examples.targets)
    figures: dict[str, float | str] = {"sacrebleu": score, "sacrebleu_signature": signature}
    return Measurement(metric="sacrebleu", figures=figures, example_count=len(examples), unit="sentences")


def _generation(served: ServedModel, examples: ServedExamples) -> Measurement:
    """Nats per character, and per token."""
    assert isinstance(examples, PlainText), "the data is read for the model's task"
    score = TextScorer(served.client, served.model, served.sender).score(examples.text)
    figures = {
        "nats_per_character": score.nats / score.num_characters,
        "nats_per_token": score.nats / score.num_tokens,
    }
    return Measurement(metric="nats_per_character", figures=figures, example_count=len(examples), unit="characters")


def _named(served: ServedModel) -> dict[str, object]:
    """The options with the model's name and version."""
    return {**served.options, "model": served.model.name, "model_version": served.model.version}


_MEASURES: Mapping[Task, Callable[[ServedModel, ServedExamples], Measurement]] = {
    Task.GENERATION: _generation,
    Task.TRANSLATION: _translation,
    Task.TEXT_CLASSIFICATION: _text_labels,
    Task.TOKEN_CLASSIFICATION: _spans,
    Task.IMAGE_CLASSIFICATION: _image_labels,
}

_OPTIONS: Mapping[Task, type] = {
    Task.TRANSLATION: TranslateTextOptions,
    Task.TEXT_CLASSIFICATION: ClassifyTextOptions,
    Task.TOKEN_CLASSIFICATION: ClassifyTokensOptions,
    Task.IMAGE_CLASSIFICATION: ClassifyImageOptions,
}
"""Options of the client's call; how a text is continued does not bear on how likely it is."""
_GIVEN = {"model", "model_version", "top_k", "text_pairs"}
"""Options that the measurement itself sets."""
