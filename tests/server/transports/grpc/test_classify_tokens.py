"""ClassifyTokens through a real channel."""

import asyncio
import math

import grpc
import numpy as np
import pytest
import tiny_bundles
import tiny_tagger
from rpc_failures import failure_of

from headway.oip import grpc_predict_v2_pb2 as oip_pb
from headway.oip import grpc_predict_v2_pb2_grpc as oip_grpc
from headway.v1 import common_pb2
from headway.v1 import model_service_pb2 as models_pb
from headway.v1 import text_classification_service_pb2 as pb
from headway_server.bundles import Tagging

SURE = math.exp(tiny_tagger.STRENGTH) / (math.exp(tiny_tagger.STRENGTH) + len(tiny_tagger.TAGS) - 1)
TEXT = "the Ada Lovelace  saw Köln, Oslo"


@pytest.fixture
async def tagging(serve, tmp_path):
    """A server of the tagger and a text classifier."""
    tiny_tagger.write_tagger_bundle(tmp_path)
    tiny_bundles.write_topic_bundle(tmp_path)
    async with serve(tmp_path) as started:
        yield started


def spans(text: str, result: pb.TokenClassification) -> list[tuple[str, str]]:
    return [(text[one.span.start : one.span.end], one.label) for one in result.spans]


async def test_spans_stand_where_they_are_in_the_callers_text(tagging):
    texts = [TEXT, f"🙂🙂 {TEXT}", " Ada\u00a0Hopper\n", "ﬁ e\u0301 Oslo"]
    response = await tagging.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=texts))
    people = [("Ada Lovelace", "person"), ("Köln", "place"), ("Oslo", "place")]
    assert [spans(text, result) for text, result in zip(texts, response.results, strict=True)] == [
        people,
        people,
        [("Ada\u00a0Hopper", "person")],
        [("Oslo", "place")],
    ]
    assert [span.probability for span in response.results[0].spans] == pytest.approx([SURE] * 3, abs=1e-6)


async def test_a_tag_that_cannot_stand_there_is_not_answered(tagging):
    texts = ["Lovelace in Oslo", "Ada Ada Hopper Hopper Oslo Hopper"]
    response = await tagging.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=texts))
    first, second = (spans(text, result) for text, result in zip(texts, response.results, strict=True))
    assert first[-1] == ("Oslo", "place")
    assert second[:2] == [("Ada", "person"), ("Ada Hopper Hopper", "person")]
    for result in response.results:
        ends = [0, *(position for one in result.spans for position in (one.span.start, one.span.end))]
        assert ends == sorted(ends)


async def test_the_answer_names_model_tokens_and_times(tagging):
    response = await tagging.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=["the Ada", "in"]))
    assert (response.model.name, response.model.version, response.model.variant) == (
        "tagger",
        "1",
        common_pb2.VARIANT_FP32,
    )
    assert [result.token_count for result in response.results] == [3, 2]
    assert response.timings.inference.ToNanoseconds() > 0


async def test_a_text_without_spans_has_none(tagging):
    response = await tagging.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=["in the", "Oslo"]))
    assert [len(result.spans) for result in response.results] == [0, 1]


async def test_truncate_cuts_at_the_end_and_says_so(tagging):
    long = "Oslo " * 40
    failure = await failure_of(tagging.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=["Oslo", long])))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, "texts[1]")
    assert "41 tokens" in failure.message
    assert "at most 16" in failure.message
    response = await tagging.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=["Oslo", long], truncate=True))
    assert [result.truncated for result in response.results] == [False, True]
    assert [one.span.start for one in response.results[1].spans] == list(range(0, 75, 5))


@pytest.mark.parametrize(("texts", "field"), [([], "texts"), (["Oslo", ""], "texts[1]"), (["in", " \n"], "texts[1]")])
async def test_what_is_no_text_is_named(tagging, texts, field):
    failure = await failure_of(tagging.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=texts)))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_a_model_of_another_task_names_one_that_can(tagging):
    failure = await failure_of(tagging.texts.ClassifyTokens(pb.ClassifyTokensRequest(model="topics", texts=["in"])))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_TASK")
    assert "ask tagger" in failure.message


async def test_the_model_is_listed_with_the_labels_of_its_spans(tagging):
    response = await tagging.models.ListModels(models_pb.ListModelsRequest(task="token_classification"))
    [model] = response.models
    assert list(model.labels) == ["person", "place"]


async def test_many_callers_at_once_get_their_own_answers(tagging):
    texts = [" ".join(list(tiny_tagger.WORDS)[: 1 + index % 9]) for index in range(60)]
    alone = [await tagging.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=[text])) for text in texts[:9]]
    together = await asyncio.gather(
        *(tagging.texts.ClassifyTokens(pb.ClassifyTokensRequest(texts=[text, "Oslo"])) for text in texts)
    )
    for index, response in enumerate(together):
        assert response.results[0] == alone[index % 9].results[0]
        assert [span.label for span in response.results[1].spans] == ["place"]


@pytest.fixture
async def reading(serve, tmp_path):
    """A server of two taggers that read boxes, in thousandths and in fractions, and one that reads texts."""
    tiny_tagger.write_tagger_bundle(tmp_path)
    for unit in ("thousandths", "fractions"):
        boxes = tiny_tagger.BOXES.model_copy(update={"unit": unit})
        tiny_tagger.write_tagger_bundle(tmp_path, name=unit, word_boxes=boxes, tagging=Tagging(aggregation="first"))
    async with serve(tmp_path) as started:
        yield started


NARROW = pb.Page(words=["Ada", "Lovelace", "saw", "", "Köln"], boxes=[0, 0, 1, 1] * 5)
WIDE = pb.Page(words=["saw", "the", "Ada"], boxes=[5, 0, 10, 9, 4, 0, 9, 9, 0, 0, 9, 9], width=10, height=9)


@pytest.mark.parametrize("model", ["thousandths", "fractions"])
async def test_words_are_labelled_by_their_boxes(reading, model):
    response = await reading.texts.ClassifyTokens(pb.ClassifyTokensRequest(model=model, pages=[NARROW, WIDE]))
    found = [
        [(one.label, one.words.start, one.words.end, one.span.start, one.span.end) for one in result.spans]
        for result in response.results
    ]
    assert found == [
        [("person", 0, 2, 0, 12), ("place", 4, 5, 18, 22)],
        [("place", 0, 1, 0, 3), ("person", 2, 3, 8, 11)],
    ]
    assert [result.token_count for result in response.results] == [5, 4]


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (
            pb.ClassifyTokensRequest(model="fractions", texts=["Ada"]),
            grpc.StatusCode.FAILED_PRECONDITION,
            "cannot classify tokens of texts; ask tagger; it can classify words with their boxes, which `pages` has",
        ),
        (
            pb.ClassifyTokensRequest(model="tagger", pages=[NARROW]),
            grpc.StatusCode.FAILED_PRECONDITION,
            "cannot classify words with their boxes, which `pages` has; ask fractions, thousandths; it can",
        ),
        (
            pb.ClassifyTokensRequest(model="fractions", texts=["Ada"], pages=[NARROW]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "texts: is set together with pages",
        ),
        (
            pb.ClassifyTokensRequest(model="fractions", pages=[NARROW, pb.Page(words=[" "], boxes=[0] * 4)]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "pages[1]: has no text; give it at least one word",
        ),
        (
            pb.ClassifyTokensRequest(model="fractions", pages=[pb.Page()]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "pages[0]: is empty; give at least one character",
        ),
        (
            pb.ClassifyTokensRequest(model="fractions", pages=[NARROW, pb.Page(words=["a"], boxes=[0, 0, 1])]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "pages[1].boxes: has 3 numbers for 1 words; give four for each",
        ),
        (
            pb.ClassifyTokensRequest(model="fractions", pages=[pb.Page(words=["a"] * 16, boxes=[0] * 64)]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "pages[0]: has 17 tokens, the model reads at most 16; shorten it",
        ),
        (
            pb.ClassifyTokensRequest(model="fractions", pages=[pb.Page(words=["a"] * 3501, boxes=[0] * 14004)] * 2),
            grpc.StatusCode.INVALID_ARGUMENT,
            "pages: have 7002 words in all, the limit is 7000; send them in several calls",
        ),
    ],
)
async def test_what_a_model_does_not_read_is_refused_and_what_to_send_is_said(reading, request_, code, words):
    failure = await failure_of(reading.texts.ClassifyTokens(request_))
    assert failure.code is code
    assert words in failure.message


async def test_a_long_page_is_cut_if_asked_for(reading):
    page = pb.Page(words=["Ada"] * 20, boxes=[0] * 80)
    request = pb.ClassifyTokensRequest(model="fractions", pages=[page], truncate=True)
    [result] = (await reading.texts.ClassifyTokens(request)).results
    assert (result.truncated, result.token_count, result.spans[-1].words.end) == (True, 16, 15)


def tensors(**arrays: object) -> oip_pb.ModelInferRequest:
    """A request of pages as tensors, raw."""
    request = oip_pb.ModelInferRequest(model_name="thousandths")
    for name, values in arrays.items():
        array = np.array(values, object if name == "word" else np.float64)
        kind = "BYTES" if name == "word" else "FP64"
        request.inputs.add(name=name, datatype=kind, shape=array.shape)
        data = b"".join(len(one).to_bytes(4, "little") + one for one in array.ravel()) if name == "word" else None
        request.raw_input_contents.append(array.tobytes() if data is None else data)
    return request


WORDS = [[b"Ada", b"saw"], [b"Oslo", b""]]
SIDES = [[[0, 0, 1, 1], [600, 0, 601, 1]], [[0, 0, 1, 1], [0] * 4]]


async def test_pages_are_rows_of_tensors_filled_up_with_empty_words(reading):
    stub = oip_grpc.GRPCInferenceServiceStub(reading.channel)
    answer = await stub.ModelInfer(tensors(word=WORDS, bbox=SIDES))
    found = {output.name: data for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True)}
    numbers = {name: np.frombuffer(found[name], np.int64).tolist() for name in ("text_index", "start", "first_word")}
    assert numbers == {"text_index": [0, 0, 1], "start": [0, 4, 0], "first_word": [0, 1, 0]}
    assert np.frombuffer(found["token_count"], np.int64).tolist() == [3, 2]


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"word": WORDS}, "inputs: lack bbox; give it"),
        ({"bbox": SIDES}, "inputs: lack word; give it"),
        ({"word": [[b"a"]], "bbox": SIDES}, "bbox: has shape [2, 2, 4], and word [1, 1]"),
        ({"word": WORDS, "bbox": SIDES, "page_size": [[9, 9]]}, "page_size: has 1 rows for 2 pages; give one for each"),
        ({"word": WORDS, "bbox": SIDES, "page_size": [[999, 9], [9, 0]]}, "page_size[1]: is 0; give width and height"),
        (
            {"word": [[b"a"]], "bbox": [[[0, 0, 1, 1001]]]},
            "bbox[0][3]: is 1001, y_max of word 0; must be from 0 to 1000",
        ),
        ({"word": [[b"a", b"\xff"]], "bbox": SIDES[:1]}, "word[0][1]: is not UTF-8 at byte 0; send text as UTF-8"),
        ({"word": [[b""]], "bbox": [[[0, 0, 1, 1]]]}, "word[0]: is empty; give at least one character"),
    ],
)
async def test_tensors_that_are_no_pages_are_refused_by_their_names(reading, arrays, says):
    stub = oip_grpc.GRPCInferenceServiceStub(reading.channel)
    failure = await failure_of(stub.ModelInfer(tensors(**arrays)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert says in failure.message
