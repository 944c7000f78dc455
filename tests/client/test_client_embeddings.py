"""Embeddings and pairs of texts, from Python and from the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headway_client import Client, embeddings, results
from headway_client.cli import app


def test_any_number_of_texts_become_one_array_in_order(server: Any) -> None:
    texts = [str(number) for number in range(600)]
    with Client(server.address) as client:
        vectors = client.embed_texts(texts, model="rule", normalize=False)
    assert (vectors.shape, vectors.dtype) == ((600, 2), np.float32)
    assert vectors[:, 0].tolist() == list(range(600))
    assert [len(request.texts) for request in server.rules.requests] == [256, 256, 88]
    assert all(request.model == "rule" and not request.normalize for request in server.rules.requests)


def test_one_text_becomes_one_row_and_is_scaled_by_default(server: Any) -> None:
    with Client(server.address) as client:
        assert client.embed_texts("good news").tolist() == [[0.5, -0.5]]
    assert server.rules.requests[0].normalize


def test_pairs_stay_with_their_texts_in_every_call(server: Any) -> None:
    texts, pairs = [str(number) for number in range(300)], [f"pair {number}" for number in range(300)]
    with Client(server.address) as client:
        client.embed_texts(texts, text_pairs=pairs)
        with pytest.raises(ValueError, match="text_pairs has 1 elements and texts has 2"):
            client.embed_texts(["one", "two"], text_pairs="three")
        client.classify("left", text_pairs="right", threshold=0.0)
    first, second, third = server.rules.requests
    assert [*first.text_pairs, *second.text_pairs] == pairs
    assert (list(third.text_pairs), third.HasField("threshold"), third.threshold) == (["right"], True, 0.0)


def test_both_clients_embed_images(server: Any, connect: Any, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(b"four")
    caller = connect(server.address)
    assert caller.call("embed_image", [b"one", file])[1] == results.ImageEmbedding((4.0, 0.25), 4, 1)
    assert caller.call("embed_images", [b"one"] * 70).shape == (70, 2)
    assert caller.call("embed_images", file).tolist() == [[4.0, 0.25]]
    assert [len(request.images) for request in server.rules.requests] == [2, 64, 6, 1]


def test_large_inputs_go_with_calls_of_their_own(
    server: Any, connect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_TEXT_BYTES", 4000)
    monkeypatch.setattr(embeddings, "MAX_IMAGE_BYTES", 3200)
    caller = connect(server.address)
    long = "é" * 1000  # 2000 bytes in UTF-8
    assert caller.call("embed_texts", ["1", long, "2", long, "3", long]).shape == (6, 2)
    assert caller.call("embed_texts", [long, "4"], text_pairs=[long + "é", "5"]).shape == (2, 2)
    assert [len(request.texts) for request in server.rules.requests] == [3, 2, 1, 1, 1]
    file = tmp_path / "picture.png"
    file.write_bytes(b"x" * 2000)
    assert caller.call("embed_images", [b"one", file, str(file), b"two"]).shape == (4, 2)
    assert [len(request.images) for request in server.rules.requests[5:]] == [2, 2]
    with pytest.raises(FileNotFoundError):
        caller.call("embed_images", [b"one", tmp_path / "none.png"])


def test_both_clients_embed_texts(server: Any, connect: Any) -> None:
    assert connect(server.address).call("embed_texts", ["7", "8"]).tolist() == [[7.0, -0.5], [8.0, -0.5]]


def run(server: Any, *arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"HEADWAY_SERVER": server.address})


def test_embed_prints_the_vector_before_the_text(server: Any) -> None:
    ended = run(server, "embed", "7", "good news", "--raw")
    assert ended.stdout == "7 -0.5\t7\n0.5 -0.5\tgood news\n"
    assert not server.rules.requests[0].normalize
    (answer,) = [json.loads(line) for line in run(server, "embed", "7", "--json").stdout.splitlines()]
    assert (answer["values"], answer["input"], answer["token_count"]) == ([7.0, -0.5], "7", 2)


def test_images_are_embedded_by_path(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(b"four")
    assert run(server, "embed-images", str(file)).stdout == f"4 0.25\t{file}\n"


def test_pairs_of_texts_stand_on_a_line_with_a_tab_between_them(server: Any) -> None:
    ended = run(server, "classify", "--pairs", "--threshold", "0.5", stdin="one\ttwo\nthree\tfour\tfive\n")
    assert ended.exit_code == 0
    (request,) = server.rules.requests
    assert (list(request.texts), list(request.text_pairs)) == (["one", "three"], ["two", "four\tfive"])
    assert request.threshold == 0.5
    run(server, "embed", "--pairs", "a\tb")
    assert list(server.rules.requests[1].text_pairs) == ["b"]
    ended = run(server, "classify", "--pairs", "alone")
    assert ended.exit_code == 2
    assert "--pairs needs two texts with a tab between them, and 'alone' has none" in ended.stderr
