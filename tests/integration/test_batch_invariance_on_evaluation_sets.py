"""What the shipped int8 models answer does not depend on what else they are asked: over their evaluation sets.

Each twentieth example is asked; `HEADWAY_THOROUGH=1` asks all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from real_data import REAL
from thorough import amount

from headway_client import Client
from headway_training.served.data import read_dataset

ALLOWED = 1e-3
STRIDE = amount(20, 1)
"""Of so many examples one is asked."""
EVERY = 16
"""One of so many inputs is a call of its own too."""

Ask = Callable[[Client, Sequence[Any]], Sequence[Any]]


def examples_of(client: Client, name: str) -> Any:
    if not REAL.is_dir():
        pytest.skip(f"no data sets in {REAL}; set HEADWAY_DATA_DIR to their folder")
    [model] = [model for model in client.list_models() if model.name == name]
    return read_dataset(model, None, REAL).examples


def ask_all(ask: Ask, client: Client, inputs: Sequence[Any], inputs_per_call: int) -> list[Any]:
    return [
        answer
        for start in range(0, len(inputs), inputs_per_call)
        for answer in ask(client, inputs[start : start + inputs_per_call])
    ]


def both_ways(ask: Ask, alone: Client, together: Client, inputs: Sequence[Any], inputs_per_call: int) -> Any:
    """The answers to each input in a batch of its own, and in batches with its neighbours.

    Some are calls of one input to the server that has batches, as a caller who is alone makes them.
    """
    answers = ask_all(ask, alone, inputs, inputs_per_call)
    answers[::EVERY] = ask_all(ask, together, inputs[::EVERY], 1)
    return zip(answers, ask_all(ask, together, inputs, inputs_per_call), strict=True)


def check_labels(pairs: Any) -> None:
    for one, other in pairs:
        assert one.labels[0].label == other.labels[0].label
        others = {scored.label: scored.probability for scored in other.labels}
        assert all(abs(scored.probability - others[scored.label]) <= ALLOWED for scored in one.labels)


def test_no_topic_changes(shipped_alone_client: Client, shipped_client: Client) -> None:
    texts = examples_of(shipped_client, "ag-news").texts[::STRIDE]

    def ask(client: Client, part: Sequence[str]) -> Sequence[Any]:
        return client.classify_text(part, model="ag-news", truncate=True)

    check_labels(both_ways(ask, shipped_alone_client, shipped_client, texts, 256))


def test_no_image_label_changes(shipped_alone_client: Client, shipped_client: Client) -> None:
    images = examples_of(shipped_client, "cifar10").images[::STRIDE]

    def ask(client: Client, part: Sequence[bytes]) -> Sequence[Any]:
        return client.classify_image(part, model="cifar10")

    check_labels(both_ways(ask, shipped_alone_client, shipped_client, images, 64))


def test_no_part_of_speech_changes(shipped_alone_client: Client, shipped_client: Client) -> None:
    texts = examples_of(shipped_client, "ud-ewt-pos").texts[::STRIDE]

    def ask(client: Client, part: Sequence[str]) -> Sequence[Any]:
        return client.classify_tokens(part, model="ud-ewt-pos", truncate=True)

    for one, other in both_ways(ask, shipped_alone_client, shipped_client, texts, 256):
        assert [(found.span, found.label) for found in one.spans] == [
            (found.span, found.label) for found in other.spans
        ]
        differences = (abs(a.probability - b.probability) for a, b in zip(one.spans, other.spans, strict=True))
        assert all(difference <= ALLOWED for difference in differences)
