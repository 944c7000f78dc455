"""`headway-train evaluate` against real servers: the figure is the one of the model's card."""

import csv
import json
import re

import pytest
from PIL import Image
from typer.testing import CliRunner

from headway_training.checkpoint import load_model, load_tokenizer, read_image_evaluation, read_text_evaluation
from headway_training.cli import app
from headway_training.evaluation import nats_per_character


def evaluate(server: str, *words: str, code: int = 0) -> tuple[dict, str]:
    """Runs the command; gives its JSON line, if there is one, and what it says."""
    result = CliRunner().invoke(app, ["evaluate", *words, "--server", server, "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    line = result.stdout.strip().splitlines()[-1] if result.stdout.strip() else "null"
    return json.loads(line), re.sub(r"\s+", " ", result.stderr)


def card_value(client, name: str) -> float:
    model = client.model(name).model
    return next(figure.value for figure in model.quality if figure.variant == model.variant)


def test_texts_are_measured_as_for_the_card(server, client, tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints["text_classification"]
    labels = load_model(checkpoint)[1].labels
    examples = read_text_evaluation(checkpoint)
    file = tmp_path / "test.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        rows = ([example["text"], labels[example["label"]]] for example in examples)
        csv.writer(out).writerows([["text", "label"], *rows])
    words = ("tiny-classification", "--file", str(file))
    report, told = evaluate(server, *words, "--batch-size", "3", "--concurrency", "5")
    assert report["value"] == pytest.approx(card_value(client, "tiny-classification"))
    assert (report["example_count"], report["unit"], report["dataset"]) == (len(examples), "texts", "test.csv")
    assert 0 <= report["figures"]["macro_f1"] <= 100
    assert "no figure for this data" in told
    few, _ = evaluate(server, *words, "--limit", "4")
    assert few["example_count"] == 4
    assert evaluate(server, *words, "--check", code=3)[0]["agrees_with_card"] is None


def test_images_are_measured_as_for_the_card(server, client, tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints["image_classification"]
    labels = load_model(checkpoint)[1].labels
    for index, (image, label) in enumerate(zip(*read_image_evaluation(checkpoint), strict=True)):
        folder = tmp_path / "images" / labels[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{index}.png")
    report, _ = evaluate(server, "tiny-images", "--file", str(tmp_path / "images"))
    assert report["value"] == pytest.approx(card_value(client, "tiny-images"))


def test_translations_are_measured_as_for_the_card(server, client, tiny_checkpoints, tmp_path):
    examples = read_text_evaluation(tiny_checkpoints["translation"])
    file = tmp_path / "test.tsv"
    file.write_text("".join(f"{one['source']}\t{one['target']}\n" for one in examples), encoding="utf-8")
    report, told = evaluate(server, "tiny-translation", "--file", str(file))
    assert report["value"] == pytest.approx(card_value(client, "tiny-translation"))
    assert "tok:13a" in report["figures"]["sacrebleu_signature"]
    assert "tok:13a" in told
    short, _ = evaluate(server, "tiny-translation", "--file", str(file), "--option", "max_new_tokens=1")
    assert short["value"] < report["value"]


def test_a_text_is_measured_by_its_log_probabilities(fp32_server, tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints["generation"]
    model, _ = load_model(checkpoint)
    text = read_text_evaluation(checkpoint)[0]["text"] * 3
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    report, _ = evaluate(fp32_server, "tiny-generation", "--file", str(tmp_path / "text.txt"))
    expected = nats_per_character(model.eval(), load_tokenizer(checkpoint), text)
    assert report["value"] == pytest.approx(expected, rel=0.05)  # windows are cut at spaces, and one token shorter
    assert (report["example_count"], report["unit"]) == (len(text), "characters")


def test_what_cannot_be_measured_is_said(fp32_server, tmp_path):
    file = tmp_path / "test.csv"
    file.write_text("text,label\nthe sun,warm\nthe ice,lukewarm\n", encoding="utf-8")
    own = ("--file", str(file))
    _, told = evaluate(fp32_server, "no-such-model", *own, code=1)
    assert "no-such-model" in told
    _, told = evaluate(fp32_server, "tiny-classification", *own, code=1)
    assert "the label 'lukewarm' is not one that tiny-classification answers" in told
    _, told = evaluate(fp32_server, "tiny-classification", *own, "--data", "ag-news", code=1)
    assert "--data and --file are both given" in told
    _, told = evaluate(fp32_server, "tiny-classification", code=1)
    assert "is the name of no recipe's model" in told
    assert "ag-news" in told
    _, told = evaluate(fp32_server, "tiny-classification", "--data", "cifar10", code=1)
    assert "--data cifar10 is not for this model" in told
    file.write_text("text,label\nthe sun,warm\nthe ice,cold\n", encoding="utf-8")
    _, told = evaluate(fp32_server, "tiny-classification", *own, "--option", "beams=4", code=1)
    assert "beams is no option of measuring text_classification" in told
    _, told = evaluate(fp32_server, "tiny-classification", *own, "--option", "beams", code=1)
    assert "expected NAME=VALUE" in told
    _, told = evaluate(fp32_server, "tiny-classification", *own, "--option", "truncate=0.5", code=1)
    assert "the client's call cannot be made" in told


def test_a_server_that_is_not_there_is_an_error():
    _, told = evaluate("127.0.0.1:1", "tiny-generation", "--timeout", "2", "--data", "tiny-shakespeare", code=1)
    assert "127.0.0.1:1" in told
