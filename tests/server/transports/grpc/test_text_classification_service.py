"""TextClassificationService through a real channel."""

import asyncio
import threading

import grpc
import pytest
import tiny_bundles
from rpc_failures import failure_of

from headway.v1 import common_pb2
from headway.v1 import text_classification_service_pb2 as pb
from headway_server.services import text_classification


async def test_texts_are_answered_in_order_with_probabilities_that_add_up(serving):
    response = await serving.texts.ClassifyText(
        pb.ClassifyTextRequest(texts=["goal match", "star atom cell", "price of stock"])
    )
    assert [result.labels[0].label for result in response.results] == ["sports", "science", "business"]
    for result in response.results:
        probabilities = [scored.probability for scored in result.labels]
        assert sum(probabilities) == pytest.approx(1, abs=1e-6)
        assert probabilities == sorted(probabilities, reverse=True)
    assert [result.token_count for result in response.results] == [3, 4, 4]


async def test_the_answer_names_the_model_and_says_where_the_time_went(serving):
    response = await serving.texts.ClassifyText(
        pb.ClassifyTextRequest(model="topics", model_version="1", texts=["goal"])
    )
    assert (response.model.name, response.model.version, response.model.variant) == (
        "topics",
        "1",
        common_pb2.VARIANT_FP32,
    )
    parts = (response.timings.queue, response.timings.preprocessing, response.timings.inference)
    assert all(part.ToNanoseconds() > 0 for part in parts)
    assert response.timings.total.ToNanoseconds() >= max(part.ToNanoseconds() for part in parts)


async def test_top_k_answers_so_many_labels(serving):
    response = await serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["star star goal"], top_k=2))
    assert [scored.label for scored in response.results[0].labels] == ["science", "sports"]


@pytest.mark.parametrize("top_k", [-1, 4])
async def test_top_k_out_of_range_names_the_range(serving, top_k):
    failure = await failure_of(serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["goal"], top_k=top_k)))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "top_k")
    assert str(top_k) in failure.message
    assert "1 to 3" in failure.message


async def test_an_empty_text_is_named(serving):
    failure = await failure_of(
        serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["goal", "star", "bank", "", "goal"]))
    )
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT")
    assert failure.field == "texts[3]"


@pytest.mark.parametrize("count", [0, 257])
async def test_a_wrong_number_of_texts_names_the_limit(serving, count):
    failure = await failure_of(serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["goal"] * count)))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "texts")
    assert "256" in failure.message


async def test_a_text_past_the_limit_is_refused_with_limit_and_value(serving):
    text = "goal " * tiny_bundles.MAX_INPUT_TOKENS
    failure = await failure_of(serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["goal", text])))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "texts[1]")
    assert "33 tokens" in failure.message
    assert "at most 32" in failure.message
    assert "truncate" in failure.message


async def test_truncate_shortens_a_text_at_its_end_and_says_so(serving):
    beginning = "goal " * (tiny_bundles.MAX_INPUT_TOKENS - 1)
    response = await serving.texts.ClassifyText(
        pb.ClassifyTextRequest(texts=[beginning + "star " * 100, beginning, "star"], truncate=True)
    )
    cut, whole, short = response.results
    assert (cut.truncated, cut.token_count) == (True, tiny_bundles.MAX_INPUT_TOKENS)
    assert (whole.truncated, short.truncated) == (False, False)
    assert list(cut.labels) == list(whole.labels)


async def test_a_text_of_unknown_words_is_answered(serving):
    response = await serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["ünknøwn wörds 🙂"]))
    assert [result.token_count for result in response.results] == [4]


async def test_a_text_of_nothing_but_spaces_is_refused(serving):
    failure = await failure_of(serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["goal", " \n"])))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "texts[1]")
    assert "has no text" in failure.message


async def test_the_largest_text_is_that_of_the_settings(serve, classifier_store):
    async with serve(classifier_store, max_text_kib=1) as serving:
        request = pb.ClassifyTextRequest(texts=["goal", "goal " * 205], truncate=True)
        failure = await failure_of(serving.texts.ClassifyText(request))
        assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "texts[1]")
        assert "has 1025 bytes, the limit is 1024" in failure.message


async def test_an_unknown_model_lists_what_is_loaded(serving):
    failure = await failure_of(serving.texts.ClassifyText(pb.ClassifyTextRequest(model="nothing", texts=["goal"])))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert "'nothing'" in failure.message
    assert "topics" in failure.message


async def test_an_unknown_version_lists_the_versions(serving):
    request = pb.ClassifyTextRequest(model="topics", model_version="9", texts=["goal"])
    failure = await failure_of(serving.texts.ClassifyText(request))
    assert failure.code is grpc.StatusCode.NOT_FOUND
    assert "no version '9'" in failure.message
    assert "loaded are 1" in failure.message


async def test_a_model_of_another_task_names_one_that_can(serving):
    failure = await failure_of(serving.texts.ClassifyText(pb.ClassifyTextRequest(model="colours", texts=["goal"])))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_TASK")
    assert "ask topics" in failure.message


async def test_tokens_are_refused_where_no_model_can(serving):
    for call in (
        serving.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=["goal"])),
        serving.texts.ClassifyTokens(pb.ClassifyTokensRequest(model="topics", texts=["goal"])),
    ):
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_TASK")
        assert "no loaded model" in failure.message


async def test_a_name_of_a_megabyte_is_answered_with_a_short_message(serving):
    failure = await failure_of(serving.texts.ClassifyText(pb.ClassifyTextRequest(model="x" * 2**20, texts=["goal"])))
    assert failure.code is grpc.StatusCode.NOT_FOUND
    assert len(failure.message) < 1500


async def test_many_callers_at_once_get_their_own_answers(serving):
    words = [word for members in tiny_bundles.TOPICS.values() for word in members]
    alone = {}
    for word in words:
        alone[word] = await serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=[word]))
    texts = [(word + " ") * (1 + index % 20) for index, word in enumerate(words * 8)]
    together = await asyncio.gather(
        *(serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=[text, "bank"])) for text in texts)
    )
    for text, response in zip(texts, together, strict=True):
        assert response.results[0].labels[0].label == alone[text.split()[0]].results[0].labels[0].label
        assert response.results[1].labels[0].label == "business"


async def test_an_answer_of_very_many_labels_is_built_off_the_event_loop(serve, tmp_path, monkeypatch):
    tiny_bundles.write_topic_bundle(tmp_path, num_labels=1000)
    threads: list[bool] = []
    make = text_classification.label_scores
    monkeypatch.setattr(
        text_classification,
        "label_scores",
        lambda labels: (threads.append(threading.current_thread() is threading.main_thread()), make(labels))[1],
    )
    async with serve(tmp_path) as started:
        for count, top_k in ((64, 0), (64, 1)):
            request = pb.ClassifyTextRequest(texts=["goal match"] * count, top_k=top_k)
            response = await started.texts.ClassifyText(request)
            assert {len(result.labels) for result in response.results} == {top_k or 1000}
            assert {result.labels[0].label for result in response.results} == {"sports"}
    assert threads == [False] * 64 + [True] * 64
