"""New texts of texts, through both clients and by `headway rewrite-text`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner

from headway.v1 import common_pb2
from headway.v1 import text_to_text_service_pb2 as pb
from headway_client import Client, PhraseConstraints
from headway_client.cli import app

Connect = Callable[..., Any]


def run(server: Any, *arguments: str) -> str:
    ended = CliRunner().invoke(app, ["rewrite-text", *arguments], env={"HEADWAY_SERVER": server.address})
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def test_every_option_is_sent(server: Any, connect: Connect) -> None:
    answer = connect(server.address).call(
        "rewrite_text",
        ["a dog", "a cat"],
        model="rule",
        model_version="1",
        truncate=True,
        beam_size=4,
        hypothesis_count=2,
        early_stopping="first",
        target_prefixes="So",
        phrase_constraints=PhraseConstraints(required=("dog",)),
    )
    (request,) = server.rules.requests
    assert request == pb.RewriteTextRequest(
        model="rule",
        model_version="1",
        texts=["a dog", "a cat"],
        parameters=common_pb2.DecodingParameters(
            beam_size=4, hypothesis_count=2, early_stopping=common_pb2.EARLY_STOPPING_FIRST
        ),
        truncate=True,
        target_prefixes=["So", "So"],
        phrase_constraints=[common_pb2.PhraseConstraints(required=["dog"])] * 2,
    )
    assert [[one.text for one in result.hypotheses] for result in answer] == [["A DOG", "A DOG!"], ["A CAT", "A CAT!"]]


def test_a_text_is_streamed(server: Any) -> None:
    with Client(server.address) as client, client.stream_rewrite_text("a dog", target_prefix="A") as stream:
        assert "".join(delta.text for delta in stream) == "A DOG"
        assert stream.answer[0].text == "A DOG"
    assert server.rules.requests[-1].target_prefix == "A"


def test_the_command_prints_texts_lists_and_streams(server: Any) -> None:
    assert run(server, "a dog", "b") == "A DOG\nB\n"
    assert run(server, "a dog", "--beam-size", "2", "--hypothesis-count", "2") == "-0.750  A DOG\n-1.750  A DOG!\n"
    assert run(server, "a dog", "--stream") == "A DOG\n"
    run(server, "a dog", "--target-prefix", "So", "--required-phrase", "dog")
    assert server.rules.requests[-1].target_prefixes == ["So"]
    assert server.rules.requests[-1].phrase_constraints[0].required == ["dog"]
