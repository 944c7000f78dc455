"""`headway translate-text`: what it sends and how it prints what it gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.v1 import common_pb2
from headway.v1 import translation_service_pb2 as pb
from headway_client.cli import app

Run = Callable[..., Any]


@pytest.fixture
def run(server: Any) -> Run:
    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["translate-text", *arguments], env={"HEADWAY_SERVER": server.address})

    return invoke


def test_every_option_reaches_the_request(run: Run, server: Any) -> None:
    arguments = (
        "--beam-size 4 --hypothesis-count 1 --length-penalty 0.5 --early-stopping first --no-repeat-ngram-size 2"
    )
    ended = run(
        "a dog",
        *arguments.split(),
        *(
            "--max-length-ratio",
            "2",
            "--target-prefix",
            "Ein",
            "--required-phrase",
            "Hund",
            "--required-phrase",
            "groß",
            "--forbidden-phrase",
            "Katze",
        ),
        "--split-sentences",
    )
    assert (ended.exit_code, ended.stdout) == (0, "A DOG\n")
    (request,) = server.rules.requests
    assert request == pb.TranslateTextRequest(
        texts=["a dog"],
        parameters=common_pb2.DecodingParameters(
            beam_size=4,
            hypothesis_count=1,
            length_penalty=0.5,
            early_stopping=common_pb2.EARLY_STOPPING_FIRST,
            no_repeat_ngram_size=2,
            max_length_ratio=2,
        ),
        target_prefixes=["Ein"],
        phrase_constraints=[common_pb2.PhraseConstraints(required=["Hund", "groß"], forbidden=["Katze"])],
        split_sentences=True,
    )
    run("a dog", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.5", "--min-p", "0.25", "--seed", "9")
    sampling = common_pb2.SamplingParameters(temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, seed=9)
    assert server.rules.requests[-1].parameters.sampling == sampling


def test_hypotheses_are_printed_with_their_scores(run: Run) -> None:
    assert run("a dog", "--beam-size", "2", "--hypothesis-count", "2").stdout == "-0.750  A DOG\n-1.750  A DOG!\n"
    headed = run("a", "b", "--beam-size", "2", "--hypothesis-count", "2").stdout
    assert headed == "==> a <==\n-0.750  A\n-1.750  A!\n==> b <==\n-0.750  B\n-1.750  B!\n"


def test_an_alignment_is_a_small_table(run: Run, tmp_path: Path) -> None:
    table = "A DOG\n  A    a    0.75\n  DOG  dog  0.75\n"
    assert run("a dog", "--include-alignment").stdout == table
    assert run("a dog", "--include-alignment", "--stream").stdout == table
    file = tmp_path / "texts"
    file.write_text("a dog\n", encoding="utf-8")
    assert run("--file", str(file), "--include-alignment").stdout == f"==> a dog <==\n{table}"


def test_json_has_everything(run: Run) -> None:
    (line,) = run(
        "a dog", "--hypothesis-count", "2", "--beam-size", "2", "--include-alignment", "--json"
    ).stdout.splitlines()
    result = json.loads(line)
    assert [hypothesis["text"] for hypothesis in result["hypotheses"]] == ["A DOG", "A DOG!"]
    assert result["alignments"][0]["target_tokens"][0]["span"] == {"start": 0, "end": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--beam-size", "2"],
        ["--hypothesis-count", "2"],
        ["--required-phrase", "x"],
        ["--forbidden-phrase", "x"],
        ["--split-sentences"],
    ],
    ids=" ".join,
)
def test_a_stream_refuses_what_needs_a_search(run: Run, server: Any, arguments: list[str]) -> None:
    ended = run("a dog", "--stream", *arguments)
    assert ended.exit_code == 2
    assert arguments[0] in " ".join(ended.stderr.split())
    assert not server.rules.requests
