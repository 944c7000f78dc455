"""Model folders of Hugging Face `transformers`, fine-tuned, exported and served, against `transformers` itself."""

import json

import numpy as np
import pytest
import tiny_tuning
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

from headway_client import Client
from headway_export.cli import app
from headway_server.bundles import Precision, open_bundle
from headway_training.checkpoint import read_checkpoint
from headway_training.tagging import TagScheme, find_subwords, predict_spans

from .conftest import serve

LORA = ("lora.rank=4",)
SETTINGS = {"topics": (), "tags": LORA, "pictures": LORA, "story": (), "chats": LORA}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_tuning.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def folders(data, tmp_path_factory):
    """The checkpoint of each task, by its name in the store."""
    root = tmp_path_factory.mktemp("folders")
    tiny_tuning.write_folders(root)
    return {name: tiny_tuning.tune(root, data, name, *SETTINGS[name], steps=20) for name in tiny_tuning.RECIPES}


@pytest.fixture(scope="module")
def store(folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    for name, folder in folders.items():
        words = ["hf"] if name in ("tags", "story") else []  # both commands take a checkpoint
        result = CliRunner().invoke(app, [*words, str(folder), "--store", str(path), "--precision", "fp32"])
        assert result.exit_code == 0, f"{name}: {result.output}"
    return path


@pytest.fixture(scope="module")
def client(store, tmp_path_factory):
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def _model(folder, auto):
    return getattr(transformers, auto).from_pretrained(folder, attn_implementation="eager").eval()


@torch.inference_mode()
def test_topics_are_those_of_transformers_at_the_fitted_temperature(folders, client):
    folder, texts = folders["topics"], ["the old fire is good", "rain is bad", "so"]
    model, tokenizer = (
        _model(folder, "AutoModelForSequenceClassification"),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    checkpoint = read_checkpoint(folder)
    assert checkpoint.classification.temperature != 1
    for text, result in zip(texts, client.classify_text(texts, model="topics").results, strict=True):
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0] / checkpoint.classification.temperature
        found = {label.label: label.probability for label in result.labels}
        np.testing.assert_allclose([found["blame"], found["praise"]], logits.softmax(-1).numpy(), atol=1e-5)


@torch.inference_mode()
def test_tags_are_found_as_in_training(folders, client):
    folder, texts = folders["tags"], ["the old fire", "rain is so", "fire rain fire"]
    model = _model(folder, "AutoModelForTokenClassification")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert read_checkpoint(folder).labels == ("O", "B-name", "I-name")
    for text, result in zip(texts, client.classify_tokens(texts, model="tags"), strict=True):
        encoded = tokenizer(text, return_offsets_mapping=True)
        ids = torch.tensor([encoded.input_ids])
        scores = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].log_softmax(-1).numpy()
        scheme = TagScheme(("name",), covering=False)
        expected = predict_spans(scores, find_subwords(text, encoded.offset_mapping), scheme, text)
        assert [(one.span.start, one.span.end) for one in result.spans] == [(span.start, span.end) for span in expected]


@torch.inference_mode()
def test_labels_of_pictures_are_those_of_transformers(folders, client, data):
    folder, file = folders["pictures"], data["pictures"] / "red" / "3.png"
    model = _model(folder, "AutoModelForImageClassification")
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    logits = model(**processor(Image.open(file), return_tensors="pt")).logits[0]
    temperature = read_checkpoint(folder).classification.temperature
    found = {
        label.label: label.probability
        for label in client.classify_image(file.read_bytes(), model="pictures").results[0].labels
    }
    expected = (logits / temperature).softmax(-1).numpy()
    np.testing.assert_allclose([found["blue"], found["red"]], expected, atol=1e-4)


def test_a_story_goes_on_as_generate_writes_it(folders, client):
    model, tokenizer = (
        _model(folders["story"], "AutoModelForCausalLM"),
        transformers.AutoTokenizer.from_pretrained(folders["story"]),
    )
    ids = tokenizer("the old", return_tensors="pt").input_ids
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    answer = client.generate_text("the old", model="story", max_new_tokens=8, temperature=0).results[0]
    assert answer.text == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_conversation_is_answered_as_generate_answers_it(folders, client, data):
    turns = json.loads(data["chats"].read_text().splitlines()[0])["messages"][:1]
    model, tokenizer = (
        _model(folders["chats"], "AutoModelForCausalLM"),
        transformers.AutoTokenizer.from_pretrained(folders["chats"]),
    )
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    answer = client.chat(turns[0]["content"], model="chats", max_new_tokens=8, temperature=0).results[0]
    assert answer.prompt_token_count == ids.shape[1]
    assert answer.text == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_bundle_says_what_the_run_has_found(folders, store):
    manifest = open_bundle(store / "topics" / "1").manifest
    checkpoint = read_checkpoint(folders["topics"])
    assert manifest.labels == checkpoint.labels
    assert manifest.license == checkpoint.license == "that of bert, which it was fine-tuned from"
    assert manifest.variants[Precision.FP32].quality.dataset == "topics.csv"
    assert abs(manifest.variants[Precision.FP32].quality.value - checkpoint.training.metrics["accuracy"]) < 0.01
    assert manifest.limits.max_input_tokens == 40
