"""Folders of Hugging Face `transformers`, exported by one command and served, against `transformers` itself."""

import json

import numpy as np
import pytest
import tiny_huggingface as tiny
import torch
import transformers
from typer.testing import CliRunner

from headway_client import Client, FinishReason, InvalidArgumentError
from headway_export.candidate import run_batch
from headway_export.cli import app
from headway_server.bundles import Precision, open_bundle
from headway_server.runtime import Runtime
from headway_server.tasks.text.model import text_graph, text_tensors

from .conftest import serve

PROMPTS = ["the", "the old fire", "an answer is not in the rain", "o", "it is " * 5]
TEXTS = ["the old fire", "rain", "an answer is not in the rain", "it is so"]
CHAT = "{% for m in messages %}{{ '<s>' if m.role == 'user' else '<unk>' }}{{ m.content }}</s>{% endfor %}<unk>"
TAGS = {"id2label": {0: "O", 1: "B-x", 2: "I-x"}, "label2id": {"O": 0, "B-x": 1, "I-x": 2}}
TAGGERS = ("bert",)
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, by the name of its bundle."""
    root = tmp_path_factory.mktemp("huggingface")
    found = {}
    for family in tiny.DECODERS:
        found[family] = tiny.write_model(root / family, family)
        tiny.write_tokenizer(root / family, frame="<s> $A" if family in ("llama", "opt") else "$A")
    for family in tiny.ENCODERS:
        found[family] = tiny.write_model(root / family, family, "ForSequenceClassification")
    for family in TAGGERS:
        name = f"{family}-tags"
        found[name] = tiny.write_model(root / name, family, "ForTokenClassification", **TAGS)
    for name in (*tiny.ENCODERS, *(f"{family}-tags" for family in TAGGERS)):
        tiny.write_tokenizer(root / name, has_types=name in ("bert", "electra"))
    tiny.write_tokenizer(root / "llama", frame="<s> $A", chat_template=CHAT)
    _end_sooner(root / "qwen3")
    return found


def _end_sooner(folder):
    """Makes the sixth token that the model chooses one of its end tokens."""
    prompt = _tokenizer(folder)(PROMPTS[1], return_tensors="pt")
    ends = _model(folder).generate(**prompt, max_new_tokens=6, do_sample=False)[0, -1]
    tiny.write_generation_config(folder, eos_token_id=[int(ends), 2], pad_token_id=0, do_sample=False)


@pytest.fixture(scope="module")
def store(folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    evaluation = tmp_path_factory.mktemp("evaluation") / "texts.jsonl"
    evaluation.write_text(json.dumps({"text": " ".join(TEXTS * 10)}) + "\n")
    for name, folder in folders.items():
        flags = ["--evaluation", str(evaluation)] if name == "llama" else []
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(path), *flags])
        assert result.exit_code == 0, f"{name}: {result.output}"
        assert ("fp32 alone: int8 is judged" in result.output) is not bool(flags)
    return path


@pytest.fixture(scope="module")
def client(store, tmp_path_factory):
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def _model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def _tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", tiny.DECODERS)
def test_greedy_answers_are_those_of_generate(folders, client, family):
    model, tokenizer = _model(folders[family]), _tokenizer(folders[family])
    answers = client.generate_text(PROMPTS, model=family, max_new_tokens=NEW_TOKENS, temperature=0).results
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert answer.prompt_token_count == ids.shape[1]
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )[0, ids.shape[1] :]
        assert answer.text == tokenizer.decode(expected, skip_special_tokens=True).removesuffix(
            _end_text(tokenizer, model, expected)
        )
        assert answer.new_token_count == len(expected)


def _end_text(tokenizer, model, ids):
    """The text of the last token if it ended the answer, which the server leaves out."""
    ends = model.generation_config.eos_token_id
    ended = int(ids[-1]) in (ends if isinstance(ends, list) else [ends])
    return tokenizer.decode(ids[-1:], skip_special_tokens=True) if ended else ""


def test_int8_is_judged_on_evaluation_data_that_is_given(store):
    variants = open_bundle(store / "llama" / "1").manifest.variants
    assert set(variants) == {Precision.FP32, Precision.INT8}
    assert abs(variants[Precision.INT8].quality.value - variants[Precision.FP32].quality.value) < 0.02
    assert variants[Precision.INT8].graphs["decoder"].inputs[5].dtype == "int8"


def test_a_second_end_token_ends_an_answer(client):
    answer = client.generate_text(PROMPTS[1], model="qwen3", max_new_tokens=NEW_TOKENS, temperature=0).results[0]
    assert answer.new_token_count <= 6
    assert answer.finish_reason is FinishReason.END_OF_SEQUENCE


def test_a_prompt_with_an_image_is_refused_by_a_model_that_reads_text_alone(store, client):
    assert open_bundle(store / "gemma3" / "1").manifest.media_tokens == (3,)
    with pytest.raises(InvalidArgumentError, match="has <unk>, which stands for an image or a sound, and gemma3 reads"):
        client.generate_text(["the", "the <unk> fire"], model="gemma3")


def test_a_conversation_is_continued_by_the_folders_template(folders, client):
    model, tokenizer = _model(folders["llama"]), _tokenizer(folders["llama"])
    turns = [{"role": "user", "content": "is it an old fire"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, pad_token_id=0)[0]
    answer = client.chat("is it an old fire", model="llama", max_new_tokens=5, temperature=0).results[0]
    assert answer.prompt_token_count == ids.shape[1]
    assert answer.text == tokenizer.decode(expected[ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("family", tiny.ENCODERS)
@pytest.mark.parametrize("pairs", [None, ["rain", "the", "an old answer", "so it is"]])
def test_probabilities_are_those_of_transformers(folders, client, family, pairs):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folders[family]).eval()
    tokenizer = _tokenizer(folders[family])
    results = client.classify_text(TEXTS, text_pairs=pairs, model=family).results
    for index, (text, result) in enumerate(zip(TEXTS, results, strict=True)):
        encoded = tokenizer(text, pairs and pairs[index], return_tensors="pt")
        with torch.inference_mode():
            expected = model(**encoded).logits[0].softmax(-1).numpy()
        found = {label.label: label.probability for label in result.labels}
        np.testing.assert_allclose([found[f"LABEL_{number}"] for number in range(3)], expected, atol=1e-5)


@pytest.mark.parametrize("family", TAGGERS)
def test_tags_of_tokens_are_those_of_transformers(folders, store, family):
    model = transformers.AutoModelForTokenClassification.from_pretrained(folders[f"{family}-tags"]).eval()
    tokenizer = _tokenizer(folders[f"{family}-tags"])
    bundle = open_bundle(store / f"{family}-tags" / "1")
    graph = text_graph(
        Runtime(device="cpu").open(bundle, bundle.manifest.variants[Precision.FP32].graphs["model"]),
        bundle.manifest.special_tokens,
    )
    ids = [np.array(tokenizer(text).input_ids) for text in TEXTS]
    for row, found in zip(ids, run_batch(graph, [text_tensors(row) for row in ids]), strict=True):
        with torch.inference_mode():
            expected = model(input_ids=torch.from_numpy(row)[None]).logits[0].numpy()
        np.testing.assert_allclose(found["logits"], expected, atol=1e-4)
