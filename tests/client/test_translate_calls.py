"""Translation through both clients: what is sent, what is answered, and which words became which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway.v1 import common_pb2
from headway.v1 import translation_service_pb2 as pb
from headway_client import Alignment, EarlyStopping, PhraseConstraints, TextSpan, TokenAlignment, TranslatedText
from headway_client.results import FinishReason

Connect = Callable[..., Any]


def test_every_option_is_sent(server: Any, connect: Connect) -> None:
    connect(server.address).call(
        "translate_text",
        ["a dog", "a cat"],
        model="rule",
        model_version="1",
        truncate=True,
        source_language="en",
        target_language="de",
        max_new_tokens=9,
        max_length_ratio=1.5,
        beam_size=4,
        hypothesis_count=2,
        length_penalty=0.5,
        early_stopping="never",
        no_repeat_ngram_size=3,
        target_prefixes=["Ein", ""],
        phrase_constraints=[PhraseConstraints(("Hund",), ("Katze", "Kater")), PhraseConstraints()],
        include_alignment=True,
        split_sentences=True,
    )
    (request,) = server.rules.requests
    assert request == pb.TranslateTextRequest(
        model="rule",
        model_version="1",
        texts=["a dog", "a cat"],
        source_language="en",
        target_language="de",
        parameters=common_pb2.DecodingParameters(
            max_new_tokens=9,
            max_length_ratio=1.5,
            beam_size=4,
            hypothesis_count=2,
            length_penalty=0.5,
            early_stopping=common_pb2.EARLY_STOPPING_NEVER,
            no_repeat_ngram_size=3,
        ),
        truncate=True,
        target_prefixes=["Ein", ""],
        phrase_constraints=[
            common_pb2.PhraseConstraints(required=["Hund"], forbidden=["Katze", "Kater"]),
            common_pb2.PhraseConstraints(),
        ],
        include_alignment=True,
        split_sentences=True,
    )


def test_one_prefix_and_one_glossary_are_for_every_text(server: Any, connect: Connect) -> None:
    phrases = PhraseConstraints(required=("Hund",))
    connect(server.address).call("translate_text", ["a", "b"], target_prefixes="Der", phrase_constraints=phrases)
    (request,) = server.rules.requests
    assert list(request.target_prefixes) == ["Der", "Der"]
    assert [list(each.required) for each in request.phrase_constraints] == [["Hund"], ["Hund"]]


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, None),
        ({"temperature": 0.5, "seed": 0}, common_pb2.SamplingParameters(temperature=0.5, seed=0)),
        (
            {"top_k": 3, "top_p": 0.5, "min_p": 0.25},
            common_pb2.SamplingParameters(top_k=3, top_p=0.5, min_p=0.25),
        ),
    ],
)
def test_sampling_is_sent_by_unary_and_streaming_calls_alike(
    server: Any, connect: Connect, options: dict[str, Any], sampling: common_pb2.SamplingParameters | None
) -> None:
    caller = connect(server.address)
    caller.call("translate_text", "a dog", **options)
    caller.stream("stream_translate_text", "a dog", target_prefix="Ein", include_alignment=True, **options)
    unary, stream = server.rules.requests
    assert unary.parameters == stream.parameters == common_pb2.DecodingParameters(sampling=sampling)
    assert (stream.target_prefix, stream.include_alignment) == ("Ein", True)


def test_an_unknown_way_of_stopping_is_refused_before_anything_is_sent(server: Any, connect: Connect) -> None:
    with pytest.raises(ValueError, match="soon"):
        connect(server.address).call("translate_text", "a", early_stopping="soon")
    connect(server.address).call("translate_text", "a", early_stopping=EarlyStopping.FIRST)
    assert len(server.rules.requests) == 1


def test_hypotheses_alignment_and_seed_are_read(server: Any, connect: Connect) -> None:
    answer = connect(server.address).call(
        "translate_text", "a dog", hypothesis_count=2, beam_size=2, include_alignment=True
    )
    (result,) = answer
    assert [(hypothesis.text, hypothesis.score) for hypothesis in result.hypotheses] == [
        ("A DOG", -0.75),
        ("A DOG!", -1.75),
    ]
    assert result.hypotheses[0].finish_reason is FinishReason.END_OF_SEQUENCE
    (alignment,) = result.alignments
    assert alignment.source_tokens == (TextSpan(0, 1), TextSpan(2, 5), TextSpan(5, 5))
    assert alignment.target_tokens[1] == TokenAlignment(TextSpan(2, 5), (0.25, 0.75, 0.0))
    pairs = result.word_pairs("a dog")
    assert [(pair.target.of(result.text), pair.source.of("a dog"), pair.attention) for pair in pairs] == [
        ("A", "a", 0.75),
        ("DOG", "dog", 0.75),
    ]
    assert connect(server.address).call("translate_text", "a", seed=5)[0].seed == 5


def test_pairs_need_an_alignment() -> None:
    result = TranslatedText("A", -1.0, -1.0, FinishReason.END_OF_SEQUENCE, 1, 1, False)
    with pytest.raises(ValueError, match="include_alignment=True"):
        result.word_pairs("a")


def test_the_sentences_of_a_long_text_are_paired_each_in_its_own_part() -> None:
    count = 20_000  # to go through the whole text for each of them would take minutes
    source, target = "no dog. " * count, "kein Hund. " * count
    result = TranslatedText(
        target,
        -1.0,
        -1.0,
        FinishReason.END_OF_SEQUENCE,
        1,
        1,
        False,
        alignments=tuple(
            Alignment(
                source_tokens=(
                    TextSpan(8 * i, 8 * i + 2),
                    TextSpan(8 * i + 3, 8 * i + 6),
                    TextSpan(8 * i + 6, 8 * i + 7),
                ),
                target_tokens=(TokenAlignment(TextSpan(11 * i, 11 * i + 4), (0.9, 0.1, 0.0)),),
            )
            for i in range(count)
        ),
    )
    pairs = result.word_pairs(source)
    assert {(pair.target.of(target), pair.source and pair.source.of(source)) for pair in pairs} == {("kein", "no")}
    assert [pair.target.start for pair in pairs] == list(range(0, 11 * count, 11))


def test_words_are_paired_by_the_mean_of_their_tokens_and_the_sum_of_the_sources() -> None:
    source, target = "the doghouse, here", "Hundehaus-Dach!"
    alignment = Alignment(
        source_tokens=(TextSpan(0, 3), TextSpan(4, 7), TextSpan(7, 12), TextSpan(12, 13), TextSpan(18, 18)),
        target_tokens=(
            TokenAlignment(TextSpan(0, 5), (0.4, 0.3, 0.3, 0.0, 0.0)),
            TokenAlignment(TextSpan(5, 14), (0.2, 0.3, 0.3, 0.1, 0.1)),
            TokenAlignment(TextSpan(14, 15), (0.1, 0.1, 0.1, 0.1, 0.6)),
            TokenAlignment(TextSpan(15, 15), (1.0, 0.0, 0.0, 0.0, 0.0)),
        ),
    )
    word, mark = alignment.word_pairs(source, target)
    assert (word.target.of(target), word.source) == ("Hundehaus-Dach", TextSpan(4, 12))
    assert word.attention == pytest.approx(0.6)
    assert (mark.target.of(target), mark.source, mark.attention) == ("!", None, pytest.approx(0.6))
