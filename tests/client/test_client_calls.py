"""Every call, through both clients: what is sent and what is answered."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headway_client
from headway_client import AsyncClient, Client, results

Connect = Callable[..., Any]


def test_generate_sends_every_option_and_reads_every_field(server: Any, connect: Connect) -> None:
    answer = connect(server.address).call(
        "generate",
        ["one two", "three"],
        model="rule",
        model_version="1",
        truncate=True,
        max_new_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        seed=2**63,
        stop=["."],
    )
    (request,) = server.rules.requests
    assert (request.model, request.model_version, request.truncate) == ("rule", "1", True)
    sampling = request.sampling
    assert (sampling.max_new_token_count, sampling.top_k, sampling.seed) == (5, 3, 2**63)
    assert (sampling.temperature, sampling.top_p, list(sampling.stop_strings)) == (0.5, 0.75, ["."])
    assert answer[0] == results.GeneratedText("one two and so on", results.FinishReason.LENGTH, 2, 5, False, 7)
    assert [result.text for result in answer] == ["one two and so on", "three and so on"]
    assert str(answer.model) == "rule 1 (fp32)"
    assert answer.timings == results.Timings(1.5, 0.25, 0.0, 0.0)


def test_options_that_are_not_given_stay_unset(server: Any, connect: Connect) -> None:
    connect(server.address).call("generate", "one", temperature=0.0)
    sampling = server.rules.requests[0].sampling
    assert sampling.HasField("temperature")
    assert not any(sampling.HasField(name) for name in ("max_new_token_count", "top_k", "top_p", "seed"))


def test_stream_generate_hands_out_pieces_whose_join_is_the_text(server: Any, connect: Connect) -> None:
    pieces, answer = connect(server.address).stream("stream_generate", "one two", max_new_tokens=9)
    assert len(pieces) == 6  # five words and the last message
    assert "".join(piece.text for piece in pieces) == answer[0].text == "one two and so on"
    assert [piece.new_token_count for piece in pieces] == [1, 2, 3, 4, 5, 5]
    assert server.rules.requests[0].sampling.max_new_token_count == 9


def test_translate(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    answer = caller.call("translate", ["a dog"], source_language="en", target_language="de", max_new_tokens=4)
    assert answer[0] == results.TranslatedText("A DOG", -1.5, results.FinishReason.END_OF_SEQUENCE, 2, 2, False)
    (request,) = server.rules.requests
    assert (request.source_language, request.target_language) == ("en", "de")
    assert request.parameters.max_new_token_count == 4
    pieces, streamed = caller.stream("stream_translate", "a dog")
    assert "".join(piece.text for piece in pieces) == "A DOG"
    assert streamed[0] == answer[0]


def test_classify_and_its_kin(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    labels = caller.call("classify", ["good news", "bad"], top_k=2)
    assert labels[0].labels == (results.LabelScore("World", 0.5), results.LabelScore("Sports", 0.25))
    assert len(labels) == 2
    assert caller.call("classify_tokens", "good news")[0].spans == (results.LabeledSpan("noun", 0.5, 0, 4),)
    assert caller.call("embed", "good news")[0].values == (0.5, -0.5)


def test_label_takes_bytes_and_paths(server: Any, connect: Connect, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(b"four")
    answer = connect(server.address).call("label", [b"one", file, str(file)], top_k=1)
    assert [result.width for result in answer] == [3, 4, 4]
    assert list(server.rules.requests[0].images) == [b"one", b"four", b"four"]
    with pytest.raises(FileNotFoundError):
        connect(server.address).call("label", tmp_path / "absent.png")


def test_models_and_model(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    listing = caller.call("models")
    (model,) = listing
    assert (model.name, model.task, model.parameter_count) == ("rule", results.Task.GENERATION, 1_234_567)
    assert model.default_sampling == results.SamplingDefaults(None, 0.5, None, None)
    assert model.quality[0].value == 90.5
    assert listing.rejected_bundles[0].path == "broken/1"
    assert len(caller.call("models", "translation")) == 0
    assert caller.call("model", "rule").manifest_json == '{"schema_version": 1}'
    with pytest.raises(ValueError, match="juggling"):
        caller.call("models", "juggling")


def test_health_and_readiness(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    assert caller.call("health") is results.HealthStatus.SERVING
    caller.call("wait_ready", 5.0)
    server.rules.serving = False
    assert caller.call("health") is results.HealthStatus.NOT_SERVING
    with pytest.raises(headway_client.DeadlineExceededError, match=r"not ready within 0\.2 s"):
        caller.call("wait_ready", 0.2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("generate", 3, "prompts: a str or a sequence of str"),
        ("generate", ["one", b"two"], r"prompts\[1\]: a str is needed, got bytes"),
        ("classify", b"one", "texts: a str or"),
        ("label", [b"one", 2], r"images\[1\]: bytes or a path"),
    ],
)
def test_a_wrong_type_is_told_before_anything_is_sent(
    server: Any, connect: Connect, name: str, value: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        connect(server.address).call(name, value)
    assert server.rules.requests == []


def test_a_misspelt_option_is_a_type_error(server: Any, connect: Connect) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        connect(server.address).call("generate", "one", max_tokens=3)


def test_both_clients_have_the_same_methods_and_options() -> None:
    def signatures(kind: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(method).parameters) for name, method in methods if name[0] != "_"}

    assert signatures(Client) == signatures(AsyncClient)


def test_no_module_of_the_client_brings_in_numpy_or_a_framework() -> None:
    program = (
        "import importlib, pkgutil, sys, headway_client\n"
        "for module in pkgutil.walk_packages(headway_client.__path__, 'headway_client.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(sorted({'torch', 'onnx', 'onnxruntime', 'numpy'} & set(sys.modules)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
