"""The spans a server answers: PyTorch's, and the same alone and in any batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headway_client import Client
from headway_export import reference
from headway_export.source import from_checkpoint
from headway_server.bundles.tags import TagSet
from headway_training.cli import app
from headway_training.metrics import span_scores
from headway_training.tagging import TagScheme, find_subwords, predict_spans

Spans = list[tuple[int, int, str]]
MAX_TEXTS = 256
"""Of a call."""


@pytest.fixture
def sightings(tiny_checkpoints: dict[str, Path]) -> tuple[list[str], list[Spans]]:
    """Texts with start, end and label of their spans."""
    lines = (tiny_checkpoints["token_classification"] / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["text"] for row in rows], [[tuple(span) for span in row["spans"]] for row in rows]


def numbered(texts: list[Spans], labels: tuple[str, ...]) -> list[list[tuple[int, int, int]]]:
    return [[(start, end, labels.index(label)) for start, end, label in spans] for spans in texts]


def test_the_served_spans_and_their_f1_are_pytorchs(
    tiny_checkpoints: dict[str, Path], fp32_client: Client, sightings: tuple[list[str], list[Spans]]
) -> None:
    source = from_checkpoint(tiny_checkpoints["token_classification"])
    scheme = TagScheme(TagSet.parse(source.labels).labels, covering=False)
    assert scheme.names == source.labels
    texts, expected = (side[:MAX_TEXTS] for side in sightings)
    own: list[Spans] = []
    served = fp32_client.classify_tokens(texts)
    for text, result in zip(texts, served, strict=True):
        encoding = source.tokenizer.encode(text)
        logits = reference.outputs(source.module, np.array(encoding.ids))["logits"].astype(np.float64)
        scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        spans = predict_spans(scores, find_subwords(text, encoding.offsets), scheme, text)
        own.append([(span.start, span.end, scheme.labels[span.label]) for span in spans])
        assert [(one.span.start, one.span.end, one.label) for one in result.spans] == own[-1]
        probabilities = [span.probability for span in spans]
        assert [span.probability for span in result.spans] == pytest.approx(probabilities, abs=1e-5)
    found = [[(one.span.start, one.span.end, one.label) for one in result.spans] for result in served]
    theirs, ours = (
        span_scores(numbered(side, scheme.labels), numbered(expected, scheme.labels)) for side in (found, own)
    )
    assert theirs == ours
    assert 50 < ours[2] < 99.9, "a model without errors would prove little"


def test_a_text_is_answered_alike_alone_and_in_a_batch(
    client: Client, sightings: tuple[list[str], list[Spans]]
) -> None:
    texts = sightings[0][:MAX_TEXTS]
    together = client.classify_tokens(texts)
    allowed = {"fp32": 1e-5, "int8": 1e-3}[together.model.variant]
    for text, batched in zip(texts, together, strict=True):
        [alone] = client.classify_tokens(text)
        assert [(one.span.start, one.span.end, one.label) for one in alone.spans] == [
            (one.span.start, one.span.end, one.label) for one in batched.spans
        ]
        for one, other in zip(alone.spans, batched.spans, strict=True):
            assert one.probability == pytest.approx(other.probability, abs=allowed)


def test_int8_finds_about_as_much(tiny_store: Path) -> None:
    manifest = json.loads((tiny_store / "tiny-tokens" / "1" / "bundle.json").read_text(encoding="utf-8"))
    fp32, int8 = (manifest["variants"][precision]["quality"] for precision in ("fp32", "int8"))
    assert fp32["metric"] == int8["metric"] == "span_f1"
    assert fp32["example_count"] == 600
    assert fp32["value"] - int8["value"] <= 0.5


def test_spans_stand_in_text_that_the_model_never_saw(client: Client) -> None:
    text = "🙂 quick brown  fox, in\u00a0oslo e\u0301"
    [result] = client.classify_tokens(text)
    borders = [0, *(position for one in result.spans for position in (one.span.start, one.span.end)), len(text)]
    assert borders == sorted(borders)
    assert all(one.span.of(text).strip() == one.span.of(text) for one in result.spans)
    assert "fox" in {one.span.of(text).rsplit(maxsplit=1)[-1] for one in result.spans}


def test_the_command_that_checks_a_card_finds_its_figure(
    server: str, client: Client, sightings: tuple[list[str], list[Spans]], tmp_path: Path
) -> None:
    lines = []
    for text, spans in zip(*sightings, strict=True):
        start = 0
        for word in text.split(" "):
            tag = next((("B-" if start == a else "I-") + label for a, b, label in spans if a <= start < b), "O")
            lines.append(f"{word}\t{tag}")
            start += len(word) + 1
        lines.append("")
    file = tmp_path / "sightings.conll"
    file.write_text("\n".join(lines), encoding="utf-8")
    words = ["evaluate", "tiny-tokens", "--server", server, "--file", str(file), "--json"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    model = client.get_model("tiny-tokens").model
    card = next(figure.value for figure in model.quality if figure.variant == model.variant)
    assert report["metric"] == "span_f1"
    assert report["value"] == pytest.approx(card)
    assert set(report["figures"]) == {"span_f1", "span_precision", "span_recall"}
