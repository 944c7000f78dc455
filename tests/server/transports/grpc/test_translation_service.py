"""TranslationService through a real channel, over an exported model that translates numbers in reverse order."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from edge import make_interceptor
from loading import loading
from rpc_failures import failure_of
from waiting import until

from headway.v1 import common_pb2
from headway.v1 import translation_service_pb2 as pb
from headway.v1 import translation_service_pb2_grpc as pb_grpc
from headway_server.bundles import Precision, open_bundle
from headway_server.decoding.settings import EngineSettings
from headway_server.runtime import Runtime
from headway_server.services.translation import TranslationService
from headway_server.serving.host import ModelHost
from headway_server.tasks.text_to_text.translation import TranslationModel


@pytest.fixture(scope="module")
def bundle(tiny_store: Path) -> Any:
    return open_bundle(tiny_store / "tiny-translation" / "1")


@pytest.fixture
async def stub(bundle: Any, runtime: Runtime) -> AsyncIterator["pb_grpc.TranslationServiceAsyncStub"]:
    settings = EngineSettings(num_slots=8, max_waiting=40)
    model = TranslationModel.load(bundle, runtime, loading(engine=settings, precision=Precision.FP32, max_text_kib=2))
    host = ModelHost([model])
    host.start()
    server = grpc.aio.server(interceptors=[make_interceptor({"TranslationService": TranslationService(host)})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.TranslationServiceStub(channel)
    await server.stop(None)
    await until(lambda: model._admission.num_admitted == 0)
    assert model._lanes._engines[0]._stepper.scheduler.num_free == 8
    host.close()


def request(*texts: str, parameters: dict[str, Any] | None = None, **fields: Any) -> pb.TranslateTextRequest:
    return pb.TranslateTextRequest(
        texts=texts, parameters=common_pb2.DecodingParameters(**(parameters or {})), **fields
    )


async def test_beams_find_what_there_is_to_find_and_tell_all_of_it(stub: Any) -> None:
    texts = ["one two three", "ten", "four four five six"]
    response = await stub.TranslateText(request(*texts, parameters={"beam_size": 4, "hypothesis_count": 3}))
    assert [result.text for result in response.results] == ["drei zwei eins", "zehn", "sechs fünf vier vier"]
    for result in response.results:
        assert len(result.hypotheses) == 3
        best = result.hypotheses[0]
        assert (best.text, best.score, best.log_probability) == (result.text, result.score, result.log_probability)
        assert best.finish_reason == common_pb2.FINISH_REASON_END_OF_SEQUENCE
        assert result.score == pytest.approx(result.log_probability / result.new_token_count)
        assert [one.score for one in result.hypotheses] == sorted(
            (one.score for one in result.hypotheses), reverse=True
        )
        assert len({one.text for one in result.hypotheses}) == 3
        assert not result.HasField("seed")
        assert result.sentence_count == 1


async def test_a_glossary_decides_what_is_said(stub: Any) -> None:
    phrases = [
        common_pb2.PhraseConstraints(required=["acht"]),
        common_pb2.PhraseConstraints(forbidden=["zwei", "eins"]),
        common_pb2.PhraseConstraints(),
    ]
    response = await stub.TranslateText(
        request(*["one two three"] * 3, parameters={"beam_size": 4}, phrase_constraints=phrases)
    )
    required, forbidden, plain = (result.text for result in response.results)
    assert "acht" in required.split()
    assert not {"zwei", "eins"} & set(forbidden.split())
    assert plain == "drei zwei eins"


async def test_a_translation_goes_on_from_its_prefix(stub: Any) -> None:
    response = await stub.TranslateText(request("one two three", "ten", target_prefixes=["neun zwei", ""]))
    assert response.results[0].text.startswith("neun zwei ")
    assert response.results[1].text == "zehn"
    stream = stub.StreamTranslateText(pb.StreamTranslateTextRequest(text="one two three", target_prefix="neun zwei"))
    messages = [message async for message in stream]
    assert messages[0].text_delta.startswith("neun zwei")
    assert "".join(message.text_delta for message in messages) == response.results[0].text
    assert messages[-1].result == response.results[0]


async def test_the_words_that_became_each_other_are_told(stub: Any) -> None:
    text = "one  two three"
    response = await stub.TranslateText(request(text, include_alignment=True))
    (result,) = response.results
    (alignment,) = result.alignments
    assert [text[span.start : span.end] for span in alignment.source_tokens] == ["one", "two", "three", ""]
    words = [result.text[token.span.start : token.span.end] for token in alignment.target_tokens]
    assert words == ["drei", "zwei", "eins"]
    for token in alignment.target_tokens:
        assert sum(token.source_attention) == pytest.approx(1)
        assert len(token.source_attention) == result.source_token_count
    streamed = stub.StreamTranslateText(pb.StreamTranslateTextRequest(text=text, include_alignment=True))
    messages = [message async for message in streamed]
    assert [token.span for token in messages[-1].result.alignments[0].target_tokens] == [
        token.span for token in alignment.target_tokens
    ]


async def test_a_long_text_is_translated_sentence_by_sentence(stub: Any) -> None:
    text = " one two\n\nthree four\n\n \n" + "\n\n".join(["five six seven"] * 9) + "\n"
    response = await stub.TranslateText(
        request(text, "ten", split_sentences=True, include_alignment=True, parameters={"beam_size": 2})
    )
    whole, other = response.results
    assert whole.text == " zwei eins\n\nvier drei\n\n \n" + "\n\n".join(["sieben sechs fünf"] * 9) + "\n"
    assert (whole.sentence_count, other.sentence_count) == (11, 1)
    assert len(whole.alignments) == 11
    spans = whole.alignments[1]
    assert [text[span.start : span.end] for span in spans.source_tokens[:2]] == ["three", "four"]
    assert [whole.text[token.span.start : token.span.end] for token in spans.target_tokens] == ["vier", "drei"]


async def test_drawn_translations_come_with_their_seed(stub: Any) -> None:
    sampling = common_pb2.SamplingParameters(temperature=2.0)
    response = await stub.TranslateText(request("one two", "one two", parameters={"sampling": sampling}))
    first, second = response.results
    assert first.HasField("seed")
    assert first.seed != second.seed
    again = common_pb2.SamplingParameters(temperature=2.0, seed=first.seed)
    repeated = await stub.TranslateText(request("one two", parameters={"sampling": again}))
    assert repeated.results[0] == first


@pytest.mark.parametrize(
    ("bad", "field", "says"),
    [
        (request("a", parameters={"beam_size": 9}), "parameters.beam_size", "--num-slots 9"),
        (request("a", parameters={"early_stopping": 7}), "parameters.early_stopping", "is 7"),
        (request("a", "b", target_prefixes=["x"]), "target_prefixes", "has 1 elements for 2 texts"),
        (request("a", target_prefixes=["x" * 2049]), "target_prefixes[0]", "the limit is 2048"),
        (
            request("one", "two", phrase_constraints=[common_pb2.PhraseConstraints()] * 3),
            "phrase_constraints",
            "has 3 elements for 2 texts",
        ),
        (
            request("one", phrase_constraints=[common_pb2.PhraseConstraints(required=["eins", "hund"])]),
            "phrase_constraints[0].required[1]",
            "does not know",
        ),
        (request("one " * 30, split_sentences=True), "texts[0]", "sentence 1 (characters 0 to 119)"),
        (request("one\n\n" * 60, split_sentences=True), "texts", "has 60 sentences"),
    ],
)
async def test_what_is_wrong_is_named(stub: Any, bad: pb.TranslateTextRequest, field: str, says: str) -> None:
    failure = await failure_of(stub.TranslateText(bad))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.field == field
    assert says in failure.message


async def test_a_cancelled_search_gives_its_slots_back(stub: Any) -> None:
    calls = [stub.TranslateText(request(*["one two three"] * 20, parameters={"beam_size": 8})) for _ in range(2)]
    await asyncio.sleep(0.01)
    for call in calls:
        call.cancel()
    response = await stub.TranslateText(request("ten", parameters={"beam_size": 8}), timeout=20)
    assert response.results[0].text == "zehn"
