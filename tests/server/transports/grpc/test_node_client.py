"""A client in another language, which knows nothing but the .proto files: Node's `@grpc/grpc-js`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import google.rpc
import pytest
from node_packages import install
from waiting import until

_SUPPORT = Path(__file__).parents[3] / "support" / "node"
_PROTOS = Path(__file__).parents[4] / "proto"
_ENOUGH_S = 60


@pytest.fixture(scope="module")
def node_modules(request: pytest.FixtureRequest) -> Path:
    """The packages that the client needs."""
    return install(request.config)


@pytest.fixture(scope="module")
def answers(node_modules: Path, served) -> dict[str, Any]:
    """What the client got for each kind of call."""
    folders = [_PROTOS, Path(google.rpc.__path__[0]).parents[1]]
    ran = subprocess.run(
        ["node", str(_SUPPORT / "calls.cjs"), f"127.0.0.1:{served.port}", *map(str, folders)],
        env=os.environ | {"NODE_PATH": str(node_modules)},
        capture_output=True,
        text=True,
        timeout=_ENOUGH_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def test_a_unary_call_is_answered(answers):
    assert answers["unary"] == ["sports", "science"]


def test_a_stream_is_read_to_its_end_and_makes_the_whole_text(answers):
    stream = answers["server_stream"]
    assert stream["code"] == "OK"
    assert stream["streamed"] == stream["whole"] != ""
    assert stream["finish_reason"] == "FINISH_REASON_LENGTH"


async def test_a_cancelled_stream_and_a_passed_deadline_end_with_their_codes_and_hold_nothing(answers, served):
    assert answers["cancel"] == "CANCELLED"
    assert answers["deadline"]["code"] == "DEADLINE_EXCEEDED"
    assert answers["deadline"]["milliseconds"] < 1000
    await until(lambda: not served.server.calls.num_running)
    [model] = [model for model in served.host.models if model.bundle.manifest.name == "tiny-generation"]
    await until(lambda: not model._admission.num_admitted)


def test_the_details_of_an_error_can_be_read(answers):
    error = answers["error_details"]
    assert (error["code"], error["message"]) == ("INVALID_ARGUMENT", "texts[1]: is empty; give at least one character")
    details = {detail.pop("type"): detail for detail in error["details"]}
    assert details["ErrorInfo"]["reason"] == "INVALID_INPUT"
    [violation] = details["BadRequest"]["field_violations"]
    assert (violation["field"], violation["description"]) == ("texts[1]", "is empty; give at least one character")


def test_a_compressed_call_is_answered(answers):
    assert answers["gzip"] == ["sports"]


def test_the_open_inference_protocol_is_spoken_unary_and_in_both_directions(answers):
    assert answers["infer"] == {"id": "7", "shape": ["2", "3"], "first": "sports"}
    assert answers["bidirectional_stream"] == {"code": "OK", "ids": ["a", "b"]}
