"""`headway classify-tokens` against a real server: what it prints."""

import json
from typing import Any

from typer.testing import CliRunner

from headway_client.cli import app


def run(server: Any, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["classify-tokens", *arguments], env={"HEADWAY_SERVER": server.address})


def test_a_line_a_span_says_where_and_what_it_is(server: Any) -> None:
    ended = run(server, "good news", "--model", "rule", "--truncate")
    assert (ended.exit_code, ended.stdout) == (0, "0  4  noun  0.500  good\n")
    (request,) = server.rules.requests
    assert (list(request.texts), request.model, request.truncate) == (["good news"], "rule", True)


def test_several_texts_are_headed(server: Any) -> None:
    lines = "==> good news <==\n0  4  noun  0.500  good\n==> 🙂 dogs <==\n0  4  noun  0.500  🙂 do\n"
    assert run(server, "good news", "🙂 dogs").stdout == lines


def test_json_has_the_spans(server: Any) -> None:
    answer = json.loads(run(server, "good news", "--json").stdout)
    assert answer["spans"] == [{"label": "noun", "probability": 0.5, "span": {"start": 0, "end": 4}}]
