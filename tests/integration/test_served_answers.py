"""Folders of `transformers` for question answering and fill-mask, exported and served, against their pipelines."""

import json

import numpy as np
import pytest
import tiny_huggingface as tiny
import torch
import transformers
from typer.testing import CliRunner

from headway_client import Client
from headway_export.cli import app
from headway_training.cli import app as train
from headway_training.metrics import answer_scores

from .conftest import serve

HEADS = {
    "bert-answers": ("bert", "ForQuestionAnswering"),
    "deberta-answers": ("deberta-v2", "ForQuestionAnswering"),
    "splinter-answers": ("splinter", "ForQuestionAnswering"),
    "roberta-masks": ("roberta", "ForMaskedLM"),
}
CONTEXT = "the old fire is not in the rain  an answer is so " * 6
QUESTION = "is it the fire"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each model, by the name of its bundle."""
    root, found = tmp_path_factory.mktemp("folders"), {}
    for name, (family, head) in HEADS.items():
        if family == "splinter":
            found[name] = _write_splinter(root / name)
            continue
        found[name] = tiny.write_model(root / name, family, head, num_labels=2)
        tiny.write_tokenizer(root / name, has_types=family == "bert", mask="<mask>")
    return found


def _write_splinter(folder):
    """A model that reads an answer from the token that its tokenizer puts behind the question."""
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[QUESTION]",
        ".",
        *["is", "a", "f", "n", "not", "t", "##he", "old", "##ire", "in"],
    ]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(pieces))
    transformers.SplinterTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.SplinterConfig(
        vocab_size=len(pieces), max_position_embeddings=64, question_token_id=5, initializer_range=0.2, **sizes
    )
    torch.manual_seed(0)
    transformers.SplinterForQuestionAnswering(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """A file of questions: one has several answers, as SQuAD writes them, and one has none."""
    rows = [
        {"question": QUESTION, "context": CONTEXT, "answers": {"text": ["the rain", "An old  fire."]}},
        {"question": "what is so", "context": "rain is so, the fire is not", "answers": ["fire"]},
        {"question": "is it", "context": "the answer is in the rain" * 30, "answers": []},
    ]
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def client(folders, questions, tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    for name, folder in folders.items():
        more = ["--evaluation", str(questions)] if name == "bert-answers" else []
        result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store), "--precision", "fp32", *more])
        assert result.exit_code == 0, f"{name}: {result.output}"
    for address in serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log"):
        with Client(address) as connected:
            yield connected


def _answers_by_definition(folder, *, window, overlap, max_tokens):
    """Every answer of the pipeline that transformers had until version 4, with its best score, and that of none."""
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    read = transformers.AutoTokenizer.from_pretrained(folder)(
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


def test_answers_are_measured_at_export_and_on_a_server_alike(client, questions):
    """With the definition of SQuAD 2: a question without an answer is right where none is given."""
    manifest = json.loads(client.get_model("bert-answers").manifest_json)
    figure = manifest["variants"]["fp32"]["quality"]
    assert (figure["metric"], figure["example_count"], figure["dataset"]) == ("answer_f1", 3, "questions.jsonl")
    words = ["evaluate", "bert-answers", "--file", str(questions), "--server", client.server, "--json"]
    result = CliRunner().invoke(train, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["figures"].keys() == {"answer_f1", "exact_match"}
    np.testing.assert_allclose(report["value"], figure["value"], atol=1e-9)
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    pairs = [[row[name] for row in rows] for name in ("question", "context")]
    found = client.answer_question(*pairs, model="bert-answers", no_answer_threshold=0.0)
    told = [one.answers[0].text if one.answers else "" for one in found]
    assert len({*told}) == 3
    right = [row["answers"]["text"] if isinstance(row["answers"], dict) else row["answers"] for row in rows]
    np.testing.assert_allclose(figure["value"], answer_scores(told, right)[0], atol=1e-9)


def test_masks_are_filled_as_by_the_pipeline(folders, client):
    folder = folders["roberta-masks"]
    pipeline = transformers.pipeline(
        "fill-mask",
        model=transformers.AutoModelForMaskedLM.from_pretrained(folder).eval(),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
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
