"""AnswerQuestion and FillMask through a real channel: models whose answers are known by hand."""

import asyncio
import math
from collections import Counter

import numpy as np
import pytest
import tiny_answers
from rpc_failures import failure_of
from tiny_answers import ENDS, write_answer_bundle, write_mask_bundle
from tokenizers import Tokenizer

from headway.oip import grpc_predict_v2_pb2
from headway.oip.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from headway.v1 import mask_filling_service_pb2 as masks_pb
from headway.v1 import question_answering_service_pb2 as pb
from headway.v1.mask_filling_service_pb2_grpc import MaskFillingServiceStub
from headway.v1.question_answering_service_pb2_grpc import QuestionAnsweringServiceStub
from headway_server.preprocessing import TextTokenizer
from headway_server.runtime import Runtime
from headway_server.settings import ServerSettings
from headway_server.tasks.mask_filling.model import POSITIONS, MaskFiller, fill_in

CONTEXT = "  the Ada  Lovelace saw Oslo ."


@pytest.fixture
async def serving(serve, tmp_path):
    """A server of both models."""
    write_answer_bundle(tmp_path / "store")
    write_mask_bundle(tmp_path / "store")
    async with serve(tmp_path / "store") as running:
        yield running


def answer(serving, questions, contexts, **fields):
    stub = QuestionAnsweringServiceStub(serving.channel)
    return stub.AnswerQuestion(pb.AnswerQuestionRequest(questions=questions, contexts=contexts, **fields))


def fill(serving, texts, **fields):
    return MaskFillingServiceStub(serving.channel).FillMask(masks_pb.FillMaskRequest(texts=texts, **fields))


def chance(words, first, last):
    """The score of an answer among the words of a window, which begins with [CLS]."""
    sums = [sum(math.exp(ENDS.get(word, (0, 0))[side]) for word in ("[CLS]", *words)) for side in (0, 1)]
    return math.exp(ENDS.get(first, (0, 0))[0]) / sums[0] * math.exp(ENDS.get(last, (0, 0))[1]) / sums[1]


async def test_answers_stand_where_they_are_in_the_callers_text(serving):
    response = await answer(serving, ["who"], [CONTEXT], top_k=3)
    [result] = response.results
    words = CONTEXT.split()
    expected = [("Ada Lovelace", "Ada", "Lovelace"), ("Oslo", "Oslo", "Oslo"), ("Ada Lovelace saw Oslo", "Ada", "Oslo")]
    expected.sort(key=lambda one: -chance(words, *one[1:]))
    assert [CONTEXT[one.span.start : one.span.end] for one in result.answers][:1] == ["Ada  Lovelace"]
    assert [" ".join(one.text.split()) for one in result.answers] == [text for text, _, _ in expected]
    assert [one.text for one in result.answers] == [CONTEXT[one.span.start : one.span.end] for one in result.answers]
    assert [one.score for one in result.answers] == pytest.approx([chance(words, *ends) for _, *ends in expected])
    assert result.no_answer_score == pytest.approx(chance(words, "[CLS]", "[CLS]"))
    assert (result.token_count, result.window_count) == (9, 1)
    assert response.model.name == "answers"


async def test_an_answer_has_no_more_tokens_than_asked_for(serving):
    response = await answer(serving, ["who"], [CONTEXT], top_k=9, max_answer_token_count=1)
    assert {len(one.text.split()) for one in response.results[0].answers} == {1}


async def test_a_long_context_is_read_in_windows_that_overlap(serving):
    words = [*["sea"] * 20, "Ada", "Lovelace", *["star"] * 20, "Oslo", "."]
    context = " ".join(words)
    for fields in ({}, {"overlap_token_count": 1}, {"window_token_count": 8, "overlap_token_count": 3}):
        response = await answer(serving, ["who"], [context], top_k=3, **fields)
        [result] = response.results
        window = fields.get("window_token_count", 16)
        room = window - 3
        step = room - fields.get("overlap_token_count", room // 2)
        starts = range(0, len(words) - (room - step), step)
        assert result.window_count == len(starts)
        found = Counter()
        for start in starts:
            part = words[start : start + room]
            for first, last in (("Ada", "Lovelace"), ("Oslo", "Oslo"), ("Lovelace", "Lovelace")):
                if first in part and last in part:
                    found[first, last] = max(found[first, last], chance(part, first, last))
        best = [one.text for one in result.answers]
        assert best[:2] == [f"{a} {b}" if a != b else a for (a, b), _ in found.most_common(2)]
        assert [one.score for one in result.answers[:2]] == pytest.approx([n for _, n in found.most_common(2)])
        assert len(set(best)) == len(best)
        assert result.no_answer_score == pytest.approx(
            min(chance(words[start : start + room], "[CLS]", "[CLS]") for start in starts)
        )
        assert all(context[one.span.start : one.span.end] == one.text for one in result.answers)


@pytest.mark.parametrize(("threshold", "num_answers"), [(None, 1), (0, 0), (0.9, 1), (-1, 0)])
async def test_no_answer_is_given_where_its_score_is_higher_by_a_threshold(serving, threshold, num_answers):
    fields = {} if threshold is None else {"no_answer_threshold": threshold}
    response = await answer(serving, ["who"], ["the sea"], **fields)
    assert len(response.results[0].answers) == num_answers
    assert response.results[0].no_answer_score > 0.3


async def test_a_single_question_or_context_goes_with_all_others(serving):
    contexts = ["Oslo", "the Ada Lovelace"]
    response = await answer(serving, ["who"], contexts)
    assert [one.answers[0].text for one in response.results] == ["Oslo", "Ada Lovelace"]
    response = await answer(serving, ["who", "saw"], contexts[:1])
    assert [one.answers[0].text for one in response.results] == ["Oslo", "Oslo"]


@pytest.mark.parametrize(
    ("questions", "contexts", "fields", "words"),
    [
        ([], ["a"], {}, "questions: is empty"),
        (["a"], [], {}, "contexts: is empty"),
        (["a"] * 2, ["a"] * 3, {}, "contexts: has 3 elements for 2 questions; give one for each question"),
        (["a"], [" "], {}, "contexts[0]: has no text"),
        ([" "], ["a"], {}, "questions[0]: has no text"),
        (["a " * 14], ["a"], {}, "questions[0]: has 14 tokens, the limit is 13 in a window of 16 tokens"),
        (["a"], ["a"], {"top_k": 101}, "top_k: is 101; must be from 0 to 100"),
        (["a"], ["a"], {"max_answer_token_count": 513}, "max_answer_token_count: is 513; must be from 0 to 512"),
        (["a"], ["a"], {"window_token_count": 17}, "window_token_count: is 17; must be from 0 to 16"),
        (
            ["a"],
            ["a"],
            {"overlap_token_count": 13},
            "overlap_token_count: is 13, and beside questions[0] a window has 13",
        ),
        (["a"], ["a"], {"no_answer_threshold": 1.5}, "no_answer_threshold: is 1.5; must be from -1 to 1"),
        (["a"], ["a " * 8000], {}, "contexts[0]: has 8000 tokens, which are 1142 windows after 0 of the texts before"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_name(serving, questions, contexts, fields, words):
    failure = await failure_of(answer(serving, questions, contexts, **fields))
    assert words in failure.message, failure.message


async def test_contexts_of_too_many_windows_are_refused_at_the_first_and_keep_nobody_waiting(serving, monkeypatch):
    """All of them would be 600 MB of tokens, and seconds of work."""
    read, encode = [], TextTokenizer._encode

    def encode_and_count(tokenizer, texts, *rest):
        read.extend(text for text in texts if len(text) > 1000)
        return encode(tokenizer, texts, *rest)

    monkeypatch.setattr(TextTokenizer, "_encode", encode_and_count)
    calls = [failure_of(answer(serving, ["who"], ["a " * 130_000] * 16)) for _ in range(2)]
    for failure in await asyncio.gather(*calls):
        assert "contexts[0]: has 130000 tokens, which are" in failure.message
    assert len(read) == 2


async def test_masks_are_filled_in_the_callers_text(serving):
    texts = ["saw  the [MASK].", "<mask> the<mask> a [MASK]"]
    response = await fill(serving, texts, top_k=2)
    first, second = response.results
    assert [[one.token for one in mask.tokens] for mask in first.masks] == [[" sea", " star"]]
    assert [one.filled_text for one in first.masks[0].tokens] == ["saw  the sea.", "saw  the star."]
    total = math.exp(4) + math.exp(3) + len(tiny_answers.VOCABULARY) - 2
    expected = [math.exp(4) / total, math.exp(3) / total]
    assert [one.probability for one in first.masks[0].tokens] == pytest.approx(expected)
    assert [texts[1][mask.span.start : mask.span.end] for mask in second.masks] == ["<mask>", "<mask>", "[MASK]"]
    assert [mask.tokens[0].filled_text for mask in second.masks][1:] == [
        "<mask> the sea a [MASK]",
        "<mask> the<mask> a star",
    ]
    assert (first.token_count, first.truncated, second.token_count) == (5, False, 6)


async def test_targets_are_the_only_choices_and_keep_their_probability(serving):
    [every] = (await fill(serving, ["the [MASK]"], top_k=100)).results
    [chosen] = (await fill(serving, ["the [MASK]"], targets=["goal", "star", "goal"])).results
    assert [one.token for one in chosen.masks[0].tokens] == [" star", " goal"]
    of_all = {one.token_id: one.probability for one in every.masks[0].tokens}
    assert len(of_all) == len(tiny_answers.VOCABULARY)
    assert all(of_all[one.token_id] == one.probability for one in chosen.masks[0].tokens)


@pytest.mark.parametrize(
    ("texts", "fields", "words"),
    [
        ([], {}, "texts: is empty"),
        (["the sea"], {}, "texts[0]: has no mask; put [MASK]"),
        (["a [MASK]", "[MASK] " * 65], {}, "texts[1]: has more than 64 masks"),
        (["the " * 16 + "[MASK]"], {}, "texts[0]: has 18 tokens, the model reads at most 16"),
        (["the " * 16 + "[MASK]"], {"truncate": True}, "reads 0 of them in its 16 tokens; shorten it"),
        (["a [MASK]"], {"top_k": -1}, "top_k: is -1; must be from 0 to 100"),
        (
            ["a [MASK]"],
            {"targets": ["sea star"]},
            "targets[0]: is no token of model masks, which reads it as 'sea', 'star'",
        ),
        (
            ["a [MASK]"],
            {"targets": ["sea", "zoo"]},
            "targets[1]: is no token of model masks, which reads it as '[UNK]'",
        ),
        (["a [MASK] " * 60 + "x" * 2**13] * 10, {"top_k": 100}, "send a lower top_k, or several calls"),
    ],
)
async def test_masks_that_cannot_be_filled_are_refused_by_name(serving, texts, fields, words):
    failure = await failure_of(fill(serving, texts, **fields))
    assert words in failure.message, failure.message


@pytest.mark.parametrize(
    ("text", "token", "filled"),
    [
        ("saw [MASK].", " sea", "saw sea."),
        ("super[MASK]", " man", "super man"),
        ("play [MASK]", "ing", "playing"),
        ("One.\r\n[MASK] rain", "The", "One.\r\nThe rain"),
        ("  [MASK] rain", "The", "  The rain"),
        ("([MASK])", " Paris", "(Paris)"),
        ("[MASK] rain", " the", "the rain"),
        ("\u5317[MASK]", " \u4eac", "\u5317\u4eac"),
    ],
)
def test_a_token_is_put_into_a_text_as_it_is_written(text, token, filled):
    start = text.index("[MASK]")
    assert fill_in(text, start, start + len("[MASK]"), token) == filled


def test_masks_cost_their_share_of_a_batchs_memory(tmp_path, monkeypatch):
    bundle, runtime = write_mask_bundle(tmp_path), Runtime(device="cpu", num_threads=1)
    filler = MaskFiller.load(bundle, runtime, ServerSettings(store=tmp_path))
    item = {"input_ids": np.zeros(4, np.int64), POSITIONS: np.zeros(3, np.int64)}
    assert filler._cost(item) == 4
    room = 10 * 4 * len(tiny_answers.VOCABULARY)  # logits of ten masks
    monkeypatch.setattr("headway_server.tasks.mask_filling.model._BATCH_BYTES", room)
    assert 512 // filler._cost(item) == 10 // 3
    filler.close()


async def test_a_refusal_over_the_open_inference_protocol_names_its_tensors(serving):
    def tensor(name, *texts):
        contents = grpc_predict_v2_pb2.InferTensorContents(bytes_contents=[text.encode() for text in texts])
        kind = grpc_predict_v2_pb2.ModelInferRequest.InferInputTensor
        return kind(name=name, datatype="BYTES", shape=[len(texts)], contents=contents)

    stub = GRPCInferenceServiceStub(serving.channel)
    for questions, contexts, words in (
        (["a"], ["a", " "], "context[1]: has no text"),
        ([" "], ["a"], "question[0]: has"),
    ):
        inputs = [tensor("question", *questions), tensor("context", *contexts)]
        request = grpc_predict_v2_pb2.ModelInferRequest(model_name="answers", inputs=inputs)
        failure = await failure_of(stub.ModelInfer(request))
        assert failure.message.startswith(words)


async def test_a_target_beyond_the_logits_is_refused(serve, tmp_path, monkeypatch):
    load = Tokenizer.from_file

    class Longer:
        @staticmethod
        def from_file(file):
            tokenizer = load(file)
            tokenizer.add_tokens(["extra"])
            return tokenizer

    write_mask_bundle(tmp_path / "store")
    monkeypatch.setattr("headway_server.preprocessing.text.Tokenizer", Longer)
    async with serve(tmp_path / "store") as running:
        failure = await failure_of(fill(running, ["the [MASK]"], targets=["sea", "extra"]))
        assert "targets[1]: is token 16, and model masks fills masks with tokens below 16" in failure.message
        assert (await fill(running, ["the [MASK]"], top_k=100)).results[0].masks[0].tokens[0].token == " sea"


async def test_other_calls_name_what_the_models_can_do(serving):
    failure = await failure_of(answer(serving, ["a"], ["a"], model="masks"))
    assert "masks/1 is for fill_mask and cannot find answers to questions in texts" in failure.message


async def test_a_mask_that_the_tokenizer_does_not_read_is_told_from_one_that_is_cut(serve, tmp_path):
    write_mask_bundle(tmp_path / "store", has_apart=True)
    async with serve(tmp_path / "store") as serving:
        assert (await fill(serving, ["saw the [MASK] a"])).results
        failure = await failure_of(fill(serving, ["saw the[MASK] a"]))
        assert "does not read [MASK] as a mask beside what is before and behind it; put a space" in failure.message
