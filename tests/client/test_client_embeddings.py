"""Embeddings and pairs of texts, from Python and from the command line."""

import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

import headway_client
from headway_client import AsyncClient, requests, results
from headway_client.cli import app
from headway_client.waiting import MAX_CALLS_AT_ONCE


def test_any_number_of_texts_become_one_array_in_order(server: Any, connect: Any) -> None:
    texts = [str(number) for number in range(600)]
    answer = connect(server.address).call("embed_text", texts, model="rule", normalize=False)
    vectors = answer.to_numpy()
    assert (vectors.shape, vectors.dtype) == ((600, 2), np.float32)
    assert vectors[:, 0].tolist() == list(range(600))
    assert sorted(len(request.texts) for request in server.rules.requests) == [88, 256, 256]
    assert all(request.model == "rule" and not request.normalize for request in server.rules.requests)
    assert (len(answer), str(answer.model), answer.timings.total_s) == (600, "rule 1 (fp32)", 4.5)


def test_one_text_becomes_one_row_and_scaling_is_left_to_the_server(server: Any, connect: Any) -> None:
    assert connect(server.address).call("embed_text", "good news").to_numpy().tolist() == [[0.5, -0.5]]
    assert not server.rules.requests[0].HasField("normalize")


async def test_the_asyncio_client_sends_the_calls_of_many_texts_at_the_same_time(server: Any) -> None:
    server.rules.delay_s = 0.2
    async with AsyncClient(server.address) as client:
        await client.embed_text([str(number) for number in range(6 * 256)])
    assert len(server.rules.requests) == 6
    assert server.rules.most_running == MAX_CALLS_AT_ONCE == 4


def test_a_call_that_fails_ends_the_others(new_server: Any, connect: Any, fault: Any) -> None:
    server = new_server  # of its own: calls that were ended may still arrive when the next test begins
    server.start()
    server.rules.faults.append(fault(grpc.StatusCode.FAILED_PRECONDITION))
    server.rules.delay_s = 0.2
    with pytest.raises(headway_client.FailedPreconditionError):
        connect(server.address).call("embed_text", ["x"] * 3000)
    assert len(server.rules.requests) <= MAX_CALLS_AT_ONCE


class Refused(grpc.RpcError):
    """What gRPC raises for a status."""

    def __init__(self, status: Any) -> None:
        self.code, self.details = (lambda: status.code), (lambda: status.details)
        self.trailing_metadata = lambda: status.trailing_metadata


MANY = [str(number) for number in range(600)]


@pytest.mark.parametrize(
    ("calls", "field", "own"),
    [
        (requests.embed_text(MANY), "texts[3]", "texts[259]"),
        (requests.embed_text(MANY, text_pairs=MANY), "text_pairs[3]", "text_pairs[259]"),
        (requests.score_text(MANY, text_pairs=MANY), "texts[3]", "texts[259]"),
        (requests.score_text("one", text_pairs=MANY), "text_pairs[3]", "text_pairs[259]"),
        (requests.score_text("one", text_pairs=MANY), "texts[0]", "texts[0]"),
        (requests.embed_image([b"x"] * 200), "images[3].data", "images[67].data"),
        (requests.embed_image(image_ids=MANY), "image_ids[3]", "image_ids[67]"),
        (requests.embed_text(MANY), "normalize", "normalize"),
    ],
)
def test_an_error_names_the_element_that_the_caller_gave(calls: Any, field: str, own: str, fault: Any) -> None:
    """Though what was given has been split into several calls."""
    message = "has texts[9] in its own words"
    status = fault(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {message}", violations={field: message}).status()
    first, second = itertools.islice(calls, 2)
    assert str(first.error(Refused(status))) == f"INVALID_ARGUMENT: {field}: {message}"
    error = second.error(Refused(status))
    assert [violation.field for violation in error.field_violations] == [own]
    assert str(error) == f"INVALID_ARGUMENT: {own}: {message}"


def test_every_method_that_splits_its_inputs_is_held_to_that() -> None:
    """The methods of the cases above, by what they return."""
    splitting = {name for name, one in vars(requests).items() if "-> Iterator[Call" in _signature(one)}
    assert splitting == {"embed_text", "score_text", "embed_image"}


def _signature(one: Any) -> str:
    return f"-> {one.__annotations__.get('return', '')}" if inspect.isfunction(one) else ""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: requests.embed_text([*MANY, 3]), r"texts\[600\]: a str is needed"),
        (lambda: requests.score_text("one", text_pairs=[*MANY, 3]), r"text_pairs\[600\]: a str is needed"),
        (lambda: requests.embed_image([*[b"x"] * 70, 3]), r"images\[70\]: bytes or a path is needed, got int"),
        (lambda: requests.embed_image(image_ids=[*MANY, 3]), r"image_ids\[600\]: a str is needed"),
    ],
)
def test_a_wrong_element_is_named_as_the_caller_gave_it(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        list(call())


def test_vectors_of_two_models_are_not_joined() -> None:
    timings = results.Timings(1.0, 0.0, 0.0, 0.0)
    answers = [
        results.Answer(
            (results.TextEmbedding((1.0,), 1, False),), results.ModelReference("a", version, "fp32"), timings
        )
        for version in ("1", "2")
    ]
    with pytest.raises(headway_client.ProtocolError, match=r"answered by a 1 \(fp32\) and a 2 \(fp32\)"):
        requests.join(answers)


def test_pairs_stay_with_their_texts_in_every_call(server: Any, connect: Any) -> None:
    texts, pairs = [str(number) for number in range(300)], [f"pair {number}" for number in range(300)]
    caller = connect(server.address)
    caller.call("embed_text", texts, text_pairs=pairs)
    sent = sorted(server.rules.requests, key=lambda request: int(request.texts[0]))
    assert [pair for request in sent for pair in request.text_pairs] == pairs
    with pytest.raises(ValueError, match="text_pairs has 1 elements for 2 texts"):
        caller.call("embed_text", ["one", "two"], text_pairs="three")
    caller.call("classify_text", "left", text_pairs="right", threshold=0.0)
    request = server.rules.requests[-1]
    assert (list(request.text_pairs), request.HasField("threshold"), request.threshold) == (["right"], True, 0.0)


def test_images_are_embedded_from_bytes_and_paths(server: Any, connect: Any, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(b"four")
    caller = connect(server.address)
    assert caller.call("embed_image", [b"one", file])[1] == results.ImageEmbedding((4.0, 0.25), 4, 1)
    assert caller.call("embed_image", [b"one"] * 70).to_numpy().shape == (70, 2)
    assert caller.call("embed_image", file).to_numpy().tolist() == [[4.0, 0.25]]
    assert sorted(len(request.images) for request in server.rules.requests) == [1, 2, 6, 64]


def test_large_inputs_go_with_calls_of_their_own(
    server: Any, connect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_TEXT_BYTES", 4000)
    monkeypatch.setattr(requests, "MAX_IMAGE_BYTES", 3200)
    caller = connect(server.address)
    long = "é" * 1000  # 2000 bytes in UTF-8
    assert len(caller.call("embed_text", ["1", long, "2", long, "3", long])) == 6
    assert len(caller.call("embed_text", [long, "4"], text_pairs=[long + "é", "5"])) == 2
    assert sorted(len(request.texts) for request in server.rules.requests[:3]) == [1, 2, 3]
    assert [len(request.texts) for request in server.rules.requests[3:]] == [1, 1]
    file = tmp_path / "picture.png"
    file.write_bytes(b"x" * 2000)
    assert len(caller.call("embed_image", [b"one", file, str(file), b"two"])) == 4
    assert [len(request.images) for request in server.rules.requests[5:]] == [2, 2]
    with pytest.raises(FileNotFoundError):
        caller.call("embed_image", [b"one", tmp_path / "none.png"])


def run(server: Any, *arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"HEADWAY_SERVER": server.address})


def test_embed_prints_the_vector_before_the_text(server: Any) -> None:
    ended = run(server, "embed-text", "7", "good news", "--no-normalize")
    assert ended.stdout == "7 -0.5\t7\n0.5 -0.5\tgood news\n"
    assert not server.rules.requests[0].normalize
    (answer,) = [json.loads(line) for line in run(server, "embed-text", "7", "--json").stdout.splitlines()]
    assert (answer["values"], answer["input"], answer["token_count"]) == ([7.0, -0.5], "7", 2)


def test_images_are_embedded_by_path(server: Any, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(b"four")
    assert run(server, "embed-image", str(file)).stdout == f"4 0.25\t{file}\n"


def test_pairs_of_texts_stand_on_a_line_with_a_tab_between_them(server: Any) -> None:
    ended = run(server, "classify-text", "--pairs", "--threshold", "0.5", stdin="one\ttwo\nthree\tfour\tfive\n")
    assert ended.exit_code == 0
    (request,) = server.rules.requests
    assert (list(request.texts), list(request.text_pairs)) == (["one", "three"], ["two", "four\tfive"])
    assert request.threshold == 0.5
    run(server, "embed-text", "--pairs", "a\tb")
    assert list(server.rules.requests[1].text_pairs) == ["b"]
    ended = run(server, "classify-text", "--pairs", "alone")
    assert ended.exit_code == 2
    assert "--pairs needs two texts separated by a tab; 'alone' has no tab" in ended.stderr
