"""`headway-train evaluate` against real servers: the figure is the one of the model's card."""

import csv
import io
import json
import re
import shutil

import numpy as np
import pytest
import tiny_diffusion
from evaluation_files import read_image_evaluation, read_text_evaluation
from PIL import Image
from tiny_own import write_segmented
from tiny_pictures import write_picture_data
from tiny_segmenter import write_segmenter_bundle
from tiny_segments import write_segment_data
from typer.testing import CliRunner

from headway_client import Client
from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.cli import app
from headway_training.data.sources import read_splits
from headway_training.evaluation import nats_per_character
from headway_training.metrics import nearest_neighbour_labels, word_error_rate
from headway_training.recipes import read_recipe
from headway_training.tasks import segmentation

from .conftest import serve


def evaluate(server: str, *words: str, code: int = 0) -> tuple[dict, str]:
    """Runs the command; gives its JSON line, if there is one, and what it says."""
    result = CliRunner().invoke(app, ["evaluate", *words, "--server", server, "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    line = result.stdout.strip().splitlines()[-1] if result.stdout.strip() else "null"
    return json.loads(line), re.sub(r"\s+", " ", result.stderr)


def card_value(client, name: str) -> float:
    model = client.get_model(name).model
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


def write_rows(file, *rows):
    with file.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows(rows)
    return file


def test_several_labels_a_text_are_measured_by_those_that_apply(topic_server, tmp_path):
    rows = [["goal team", "sports"], ["cell atom", ""], ["stock team stock team", "business|sports"]]
    with Client(topic_server) as client:
        answer = client.classify_text([text for text, _ in rows], model="several")
    applying = [{label.label for label in result.labels if label.selected} for result in answer]
    assert any(applying)
    file = write_rows(tmp_path / "test.csv", ["text", "label"], *rows)
    report, told = evaluate(topic_server, "several", "--file", str(file))
    actual = [set(labels.split("|")) - {""} for _, labels in rows]
    hits = sum(len(one & other) for one, other in zip(applying, actual, strict=True))
    expected = 200 * hits / sum(len(labels) for labels in [*applying, *actual])
    assert (report["metric"], report["value"]) == ("micro_f1", pytest.approx(expected))
    assert "macro_f1" in report["figures"]
    same = write_rows(
        tmp_path / "same.csv",
        ["text", "label"],
        *([text, "; ".join(labels)] for (text, _), labels in zip(rows, applying, strict=True)),
    )
    own = ("several", "--file", str(same), "--label-separator", ";")
    assert evaluate(topic_server, *own)[0]["value"] == 100
    assert evaluate(topic_server, *own, "--limit", "2")[0]["example_count"] == 2
    assert evaluate(topic_server, *own, "--option", "threshold=1.0")[0]["value"] == 0
    write_rows(file, ["text", "label"], ["goal", "sports|weather"])
    _, told = evaluate(topic_server, "several", "--file", str(file), code=1)
    assert "line 2: the label 'weather' is not among those of the model" in told


def test_pairs_of_texts_are_measured_as_pairs(topic_server, tmp_path):
    """Words of the second text weigh more, so that the order of the texts tells."""
    rows = [["team", "science", "atom"], ["atom", "sports", "team"], ["bank", "science", "cell"]]
    file = write_rows(tmp_path / "test.csv", ["text", "label", "text_pair"], *rows)
    report, _ = evaluate(topic_server, "pairs", "--file", str(file), "--batch-size", "2")
    assert (report["metric"], report["value"], report["example_count"]) == ("accuracy", 100, 3)
    some = [["team", "sports", ""], ["atom", "science", "cell"]]
    report, _ = evaluate(topic_server, "both", "--file", str(write_rows(file, ["text", "label", "text_pair"], *some)))
    assert report["metric"] == "micro_f1"
    _, told = evaluate(topic_server, "pairs", "--file", str(file), code=1)
    assert "line 2: the text_pair is empty" in told
    _, told = evaluate(topic_server, "both", "--file", str(file), "--option", "text_pairs=3", code=1)
    assert "text_pairs is no option of measuring" in told


def test_what_cannot_be_measured_is_said(fp32_server, tmp_path):
    file = tmp_path / "test.csv"
    file.write_text("text,label\nthe sun,warm\nthe ice,lukewarm\n", encoding="utf-8")
    own = ("--file", str(file))
    _, told = evaluate(fp32_server, "no-such-model", *own, code=1)
    assert "no-such-model" in told
    _, told = evaluate(fp32_server, "tiny-classification", *own, code=1)
    assert "line 3: the label 'lukewarm' is not among those of the model" in told
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


def test_images_and_texts_of_one_space_are_measured_by_recall(towers, towers_client, tmp_path):
    with np.load(towers / "evaluation.npz") as arrays:
        images = arrays["images"]
    captions = [["a red wall", "two dogs"], ["the sea"], ["green grass"], ["a house"]]
    lines = []
    for number, (image, own) in enumerate(zip(images, captions, strict=True)):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        lines += [f"{number}.png\t{caption}" for caption in own]
    file = tmp_path / "captions.tsv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    report, _ = evaluate(towers_client.server, "tiny-clip-image", "--file", str(file), "--batch-size", "2")
    files = [tmp_path / f"{number}.png" for number in range(4)]
    texts = [caption for own in captions for caption in own]
    similarity = towers_client.embed_image(files).to_numpy() @ towers_client.embed_text(texts).to_numpy().T
    owner = np.array([0, 0, 1, 2, 3])
    assert (report["metric"], report["example_count"], report["unit"]) == ("image_recall_1", 4, "pictures")
    assert report["value"] == pytest.approx(100 * (similarity.argmax(axis=0) == owner).mean())
    assert report["figures"]["text_recall_1"] == pytest.approx(
        100 * (owner[similarity.argmax(axis=1)] == np.arange(4)).mean()
    )
    assert report["figures"]["image_recall_5"] == 100
    file.write_text("0.png a wall\n", encoding="utf-8")
    _, told = evaluate(towers_client.server, "tiny-clip-image", "--file", str(file), code=1)
    assert "line 1: 1 columns; expected 2 (file, caption)" in told
    file.write_text("none.png\ta wall\n", encoding="utf-8")
    assert "none.png" in evaluate(towers_client.server, "tiny-clip-image", "--file", str(file), code=1)[1]


def test_two_towers_are_measured_on_their_recipes_data(towers_client, tmp_path):
    words = ("tiny-clip-image", "--data", "pictures", "--data-dir", str(write_picture_data(tmp_path)))
    report, _ = evaluate(towers_client.server, *words)
    figures = report["figures"]
    assert report["metric"] == "mean_recall"
    parts = [figures[name] for name in ("drawings_top_1", "image_recall_10", "labels_top_1")]
    assert report["value"] == pytest.approx(sum(parts) / 3)
    assert figures["image_recall_10"] == 100, "of four photographs"
    assert "which are measured whole" in evaluate(towers_client.server, *words, "--limit", "2", code=1)[1]


def test_vectors_of_images_are_measured_by_the_labels_of_their_neighbours(towers_client, tmp_path):
    folder = write_picture_data(tmp_path)
    report, _ = evaluate(
        towers_client.server, "tiny-clip-image", "--data", "cifar10", "--data-dir", str(folder), "--limit", "3"
    )
    assert (report["metric"], report["example_count"]) == ("knn_accuracy", 3)
    splits = read_splits(read_recipe("cifar10-dino"), folder, None)

    def embed(images):
        files = [io.BytesIO() for _ in images]
        for image, file in zip(images, files, strict=True):
            Image.fromarray(image).save(file, "PNG")
        return towers_client.embed_image([file.getvalue() for file in files], model="tiny-clip-image").to_numpy()

    known, asked = embed(splits.train.images), embed(splits.test.images[:3])
    found = nearest_neighbour_labels(known, splits.train.labels, asked)
    assert report["value"] == pytest.approx(100 * (found == splits.test.labels[:3]).mean())


def test_segments_are_measured_at_points_and_boxes(tmp_path, monkeypatch):
    monkeypatch.setattr(segmentation, "_NUM_COMPOSITES", {"valid": 2, "test": 2})
    write_segmenter_bundle(tmp_path / "store")  # cuts out what has the colour of the point
    write_segmented(tmp_path / "own")
    words = ("cells", "--data", "segments", "--data-dir", str(write_segment_data(tmp_path / "data")))
    for address in serve(tmp_path / "store", "fp32", tmp_path / "server.log"):
        report, _ = evaluate(address, *words)
        few, _ = evaluate(address, *words, "--limit", "1")
        own, _ = evaluate(address, "cells", "--file", str(tmp_path / "own"))
        assert "there is no folder x/images" in evaluate(address, "cells", "--file", "x", code=1)[1]
    assert (own["metric"], own["example_count"]) == ("mean_iou", 9)
    assert own["value"] == pytest.approx((own["figures"]["own_point"] + own["figures"]["own_box"]) / 2)
    figures = report["figures"]
    assert (report["metric"], report["unit"], few["example_count"]) == ("mean_iou", "pictures", 1)
    assert figures["photographs_point"] > 90, "two halves of a colour each"
    assert figures["photographs_point_best"] >= figures["photographs_point"]
    assert 0 < figures["iou_error"] < 100
    named = (
        "nuclei_point",
        "nuclei_box",
        *(f"{kind}_{at}_best" for kind in ("composites", "photographs") for at in ("point", "box")),
    )
    assert report["value"] == pytest.approx(np.mean([figures[name] for name in named]))


@pytest.fixture(scope="module")
def drawing_server(diffusion_store, text_diffusion_store, tiny_store, tmp_path_factory):
    """A server of models that draw labels and texts, and of a classifier that knows the labels."""
    folder = tmp_path_factory.mktemp("drawing")
    for store, name in (
        (diffusion_store, "squares"),
        (text_diffusion_store, "text-squares"),
        (tiny_store, "tiny-images"),
    ):
        shutil.copytree(store / name, folder / "store" / name)
    yield from serve(folder / "store", "fp32", folder / "server.log")


def test_drawings_of_labels_are_judged_by_a_classifier(drawing_server, tmp_path):
    images, labels = tiny_diffusion.draw_squares(12, 3)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        file = tmp_path / tuple(tiny_diffusion.COLOURS)[label] / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(file)
    words = ("squares", "--file", str(tmp_path), "--option", "step_count=8")
    report, _ = evaluate(drawing_server, *words)
    assert (report["metric"], report["unit"], report["example_count"]) == ("label_accuracy", "images", 12)
    assert report["value"] > 60, "by chance it would be 33"
    assert report["figures"]["judge"] == "tiny-images"
    assert report["figures"]["label_accuracy_of_images"] > 60
    assert report["figures"]["frechet_distance"] >= 0
    assert evaluate(drawing_server, *words)[0]["figures"] == report["figures"], "seeds are always the same"
    assert "seed is no option" in evaluate(drawing_server, *words, "--option", "seed=1", code=1)[1]


def test_drawings_of_texts_are_looked_for_by_an_embedder(drawing_server, text_diffusion_store, towers_store, tmp_path):
    images, labels = tiny_diffusion.draw_squares(6, 3)
    lines = []
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png\t{tiny_diffusion.TEXTS[label]}\n")
    (tmp_path / "texts.tsv").write_text("".join(lines), encoding="utf-8")
    words = ("text-squares", "--file", str(tmp_path / "texts.tsv"), "--option", "step_count=4")
    assert "shares its space" in evaluate(drawing_server, *words, code=1)[1]
    store = tmp_path / "store"
    shutil.copytree(towers_store, store)
    shutil.copytree(text_diffusion_store / "text-squares", store / "text-squares")
    for address in serve(store, "fp32", tmp_path / "server.log"):
        report, _ = evaluate(address, *words)
    assert (report["metric"], report["example_count"]) == ("r_precision", 6)
    assert report["figures"]["judge"] == "tiny-clip-image"
    assert 0 <= report["value"] <= 100
    assert 0 <= report["figures"]["r_precision_of_images"] <= 100


def test_what_is_spoken_is_judged_by_a_transcriber(voice_store, voice_checkpoint, transcriber_store, tmp_path):
    store, (name,) = tmp_path / "store", [folder.name for folder in voice_store.iterdir()]
    shutil.copytree(voice_store / name, store / name)
    table = voice_checkpoint.parents[1] / "recordings" / "recordings.tsv"
    words = (name, "--file", str(table), "--limit", "6")
    for address in serve(store, "fp32", tmp_path / "alone.log"):
        assert "no loaded model transcribes speech" in evaluate(address, *words, code=1)[1]
    shutil.copytree(transcriber_store, store, dirs_exist_ok=True)
    for address in serve(store, "fp32", tmp_path / "server.log"):
        report, _ = evaluate(address, *words)
        again, _ = evaluate(address, *words, "--concurrency", "1")
        with Client(address) as client:
            recordings = [
                (table.parent / line.split("\t")[0]).read_bytes() for line in table.read_text().split("\n")[1:7]
            ]
            heard = [result.text for result in client.transcribe_speech(recordings)]
        assert "voice is no option" in evaluate(address, *words, "--option", "voice=bob", code=1)[1]
    figures = report["figures"]
    assert (report["metric"], report["unit"], report["example_count"]) == ("wer", "texts", 6)
    assert again["figures"] == figures, "seeds are always the same"
    assert figures["judge"] == "listener"
    assert figures["wer"] == pytest.approx((figures["wer_ann"] + figures["wer_bob"]) / 2)
    assert figures["recorded_wer"] == word_error_rate(heard, ["low", "high", "both"] * 2)


def test_a_server_that_is_not_there_is_an_error():
    _, told = evaluate("127.0.0.1:1", "tiny-generation", "--timeout", "2", "--data", "tiny-shakespeare", code=1)
    assert "127.0.0.1:1" in told
