"""Models of documents, exported from folders of `transformers` and served: words with boxes, against `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tiny_pages
import torch
import transformers
from typer.testing import CliRunner

from headway_client import Client, FailedPreconditionError, InvalidArgumentError, Page, TokenClassification
from headway_export.cli import app

from .conftest import serve

AGGREGATIONS = {"layoutlm": "first", "lilt": "max", "bros": "average"}
PRECISIONS = {"layoutlm": ("--precision", "fp32", "--precision", "int8")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {family: tiny_pages.write_model(root / family, family) for family in tiny_pages.FAMILIES}


@pytest.fixture(scope="module")
def client(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    store = tmp_path_factory.mktemp("store")
    for family, folder in folders.items():
        flags = ("--store", str(store), "--aggregation", AGGREGATIONS[family], *PRECISIONS.get(family, ()))
        result = CliRunner().invoke(app, ["hf", str(folder), *flags])
        assert result.exit_code == 0, f"{family}: {result.output}"
        assert "not applied" not in result.output
        assert "--evaluation" not in result.output
        assert "It reads words with their boxes" in (store / family / "1" / "README.md").read_text(encoding="utf-8")
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def pages() -> list[dict[str, Any]]:
    draw = Random(11)
    found = [tiny_pages.draw_page(draw, number) for number in (1, 7, 4, 3, 2, 6, 5)]
    whole = tiny_pages.draw_page(draw, 5, width=1000, height=1000)
    found.append({**whole, "boxes": [tuple(map(int, box)) for box in whole["boxes"]], "width": None, "height": None})
    return found


def logits_of(folder: Path, page: dict[str, Any]) -> tuple[np.ndarray, list[int | None]]:
    """Runs the library's own tokenizer and model on a page: logits of the tokens, (T, C), and their words."""
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    width, height = page["width"] or 1000, page["height"] or 1000
    sizes = (width, height, width, height)
    is_bros = model.config.model_type == "bros"
    scale = (lambda side, size: side / size) if is_bros else (lambda side, size: int(1000 * (side / size)))
    boxes = [[scale(side, size) for side, size in zip(box, sizes, strict=True)] for box in page["boxes"]]
    if model.config.model_type == "lilt":
        encoded = tokenizer(page["words"], boxes=boxes, truncation=True, max_length=tiny_pages.LENGTH)
        bbox, words = encoded["bbox"], encoded.word_ids()
    else:
        limit = {"truncation": True, "max_length": tiny_pages.LENGTH}
        encoded = tokenizer(page["words"], is_split_into_words=True, **limit)
        words = encoded.word_ids()
        end = [1, 1, 1, 1] if is_bros else [1000, 1000, 1000, 1000]
        bbox = [[0, 0, 0, 0], *(boxes[word] for word in words[1:-1]), end]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([encoded["input_ids"]]), bbox=torch.tensor([bbox])).logits[0]
    return logits.numpy(), words


REDUCED = {
    "first": lambda rows: rows[0],
    "average": lambda rows: rows.mean(axis=0),
    "max": lambda rows: rows[rows.max(axis=-1).argmax()],
}
"""Probabilities of a word's tags by those of its tokens, (T, C) -> (C,)."""


def spans_of(folder: Path, page: dict[str, Any]) -> list[tuple[str, int, int, float]]:
    """Finds label, first word, end and score of the spans of neighbouring words of one label."""
    logits, words = logits_of(folder, page)
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found: list[tuple[str, int, int, list[float]]] = []
    for word in sorted({word for word in words if word is not None}):
        tokens = [token for token, of in enumerate(words) if of == word]
        row = REDUCED[AGGREGATIONS[folder.name]](scores[tokens])
        prefix, _, label = tiny_pages.LABELS[row.argmax()].partition("-")
        if found and found[-1][0] == label and prefix == "I":
            found[-1] = (label, found[-1][1], word + 1, [*found[-1][3], row.max()])
        else:
            found.append((label, word, word + 1, [row.max()]))
    return [(label, start, end, float(np.mean(own))) for label, start, end, own in found if label]


def answered(result: TokenClassification) -> list[tuple[str, int, int, float]]:
    return [(one.label, one.words.start, one.words.end, one.probability) for one in result.spans if one.words]


@pytest.mark.parametrize("family", tiny_pages.FAMILIES)
def test_labels_of_words_are_those_of_transformers_alone_and_in_a_batch(
    folders: dict[str, Path], client: Client, family: str
) -> None:
    given = pages()
    together = client.classify_tokens(pages=[Page(**page) for page in given], model=family)
    assert together.model.variant == "fp32"
    num_spans = 0
    for page, result in zip(given, together, strict=True):
        expected = spans_of(folders[family], page)
        [alone] = client.classify_tokens(pages=Page(**page), model=family)
        for spans in (answered(result), answered(alone)):
            assert [span[:3] for span in spans] == [span[:3] for span in expected]
            assert [span[3] for span in spans] == pytest.approx([span[3] for span in expected], abs=1e-5)
        text = Page(**page).text
        assert [one.span.of(text).split(" ") for one in result.spans] == [
            page["words"][start:end] for _, start, end, _ in expected
        ]
        num_spans += len(expected)
    assert num_spans > 5


@pytest.mark.parametrize("family", tiny_pages.FAMILIES)
def test_a_page_that_is_too_long_is_refused_or_cut_as_by_transformers(
    folders: dict[str, Path], client: Client, family: str
) -> None:
    page = tiny_pages.draw_page(Random(5), 30)
    limit = rf"pages\[0\]: has \d+ tokens, the model reads at most {tiny_pages.LENGTH}; shorten it"
    with pytest.raises(InvalidArgumentError, match=limit):
        client.classify_tokens(pages=Page(**page), model=family)
    [result] = client.classify_tokens(pages=Page(**page), model=family, truncate=True)
    assert (result.truncated, result.token_count) == (True, tiny_pages.LENGTH)
    expected = spans_of(folders[family], page)
    assert [span[:3] for span in answered(result)] == [span[:3] for span in expected]
    assert [span[3] for span in answered(result)] == pytest.approx([span[3] for span in expected], abs=1e-5)


def test_a_text_is_refused_by_a_model_that_reads_boxes(client: Client) -> None:
    says = r"model lilt/1 is for token_classification and cannot classify tokens of texts.*it can classify words with "
    with pytest.raises(FailedPreconditionError, match=says):
        client.classify_tokens("a text", model="lilt")
    with pytest.raises(InvalidArgumentError, match=r"texts: is set together with pages; send one of the two"):
        client.classify_tokens("a text", pages=Page(["a"], [0, 0, 1, 1]), model="lilt")


def test_boxes_change_the_answer(client: Client) -> None:
    given = pages()
    moved = [{**page, "boxes": [(0, 0, 1, 1)] * len(page["words"])} for page in given]
    for family in tiny_pages.FAMILIES:
        found = client.classify_tokens(pages=[Page(**page) for page in (*given, *moved)], model=family)
        assert found[: len(given)] != found[len(given) :]
