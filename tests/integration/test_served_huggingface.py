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
HEADS = {
    "bert-answers": ("bert", "ForQuestionAnswering"),
    "deberta-answers": ("deberta-v2", "ForQuestionAnswering"),
    "roberta-masks": ("roberta", "ForMaskedLM"),
}
CONTEXT = "the old fire is not in the rain  an answer is so " * 6
QUESTION = "is it the fire"


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
    for name, (family, head) in HEADS.items():
        found[name] = tiny.write_model(root / name, family, head, num_labels=2)
        tiny.write_tokenizer(root / name, has_types=family == "bert", mask="<mask>")
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


def _answers_by_definition(folder, *, window, overlap, max_tokens):
    """Every answer of the pipeline that transformers had until version 4, with its best score, and that of none."""
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    read = _tokenizer(folder)(
        QUESTION,
        CONTEXT,
        truncation="only_second",
        max_length=window,
        stride=overlap,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in read]
    found, null = {}, 1.0
    for index, offsets in enumerate(read["offset_mapping"]):
        with torch.no_grad():
            output = model(**{name: torch.tensor([read[name][index]]) for name in names})
        outside = np.array([source != 1 for source in read.sequence_ids(index)])
        outside[0] = False  # the special token, by which a context has no answer
        sides = []
        for logits in (output.start_logits[0], output.end_logits[0]):
            exponentials = np.exp(np.where(outside, -1e4, logits.double().numpy()))
            sides.append(exponentials / exponentials.sum())
        null = min(null, sides[0][0] * sides[1][0])
        for first in np.flatnonzero(~outside)[1:].tolist():
            for last in range(first, min(first + max_tokens, len(offsets))):
                if not outside[last]:
                    begin, end = offsets[first][0], offsets[last][1]
                    text = CONTEXT[begin:end]
                    span = (begin + len(text) - len(text.lstrip()), begin + len(text.rstrip()))
                    if text.strip():
                        found[span] = max(found.get(span, 0.0), sides[0][first] * sides[1][last])
    return found, null, len(read["input_ids"])


@pytest.mark.parametrize("name", [name for name, (_, head) in HEADS.items() if head == "ForQuestionAnswering"])
def test_answers_are_those_of_the_question_answering_pipeline(folders, client, name):
    sizes = {"window_token_count": 40, "overlap_token_count": 11, "max_answer_token_count": 6}
    [result] = client.answer_question(QUESTION, CONTEXT, model=name, top_k=8, split_words=True, **sizes)
    expected, null, num_windows = _answers_by_definition(folders[name], window=40, overlap=11, max_tokens=6)
    assert result.window_count == num_windows > 3
    np.testing.assert_allclose(result.no_answer_score, null, rtol=1e-5)
    best = sorted(expected.values(), reverse=True)[:8]
    np.testing.assert_allclose([one.score for one in result.answers], best, rtol=1e-5)
    for one in result.answers:
        assert CONTEXT[one.span.start : one.span.end] == one.text
        np.testing.assert_allclose(one.score, expected[one.span.start, one.span.end], rtol=1e-5)
    [whole] = client.answer_question(QUESTION, CONTEXT, model=name, **sizes)
    [answer] = whole.answers
    assert answer.score >= best[0] * (1 - 1e-5)
    assert all(not CONTEXT[place - 1 : place + 1].isalpha() for place in (answer.span.start, answer.span.end) if place)


def test_masks_are_filled_as_by_the_pipeline(folders, client):
    folder = folders["roberta-masks"]
    pipeline = transformers.pipeline(
        "fill-mask",
        model=transformers.AutoModelForMaskedLM.from_pretrained(folder).eval(),
        tokenizer=_tokenizer(folder),
    )
    texts = ["the old <mask> is", "an <mask> is not in the<mask>", "<mask>"]
    targets = ["in", "o"]
    for asked in ({}, {"targets": targets}):
        answers = client.fill_mask(
            [text.replace("<mask>", "[MASK]") for text in texts], top_k=4, model="roberta-masks", **asked
        )
        for text, answer in zip(texts, answers, strict=True):
            expected = pipeline(text, top_k=4, **asked)
            rows = expected if isinstance(expected[0], list) else [expected]
            assert len(rows) == len(answer.masks) == text.count("<mask>")
            for row, mask in zip(rows, answer.masks, strict=True):
                assert [one["token"] for one in row] == [one.token_id for one in mask.tokens]
                np.testing.assert_allclose(
                    [one["score"] for one in row], [one.probability for one in mask.tokens], rtol=1e-5
                )
            if len(rows) == 1:
                own = [one.filled_text.replace(" ", "") for one in answer.masks[0].tokens]
                assert own == [one["sequence"].replace(" ", "") for one in rows[0]]
