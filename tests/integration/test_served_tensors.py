"""Somebody's graphs through every door that takes arrays, and what every other door says of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
import tiny_bundles
import tiny_tensors
from tiny_tensors import weight
from triton_client import TritonError, triton_process
from typer.testing import CliRunner

from headway_client import AsyncClient, Client, InvalidArgumentError, TensorAnswer
from headway_client.cli import app

from .conftest import Doors, serve_saying

Arrays = dict[str, np.ndarray]
INPUTS: dict[str, Arrays] = {
    "tabular": {"numbers": weight(3, 3), "category": np.array([0, 4, 2])},
    "detector": {"image": weight(2, 3, 8, 8)},
    "series": {"values": weight(2, 5)},
}


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """The ways into a server of these graphs and a classifier of texts."""
    folder = tmp_path_factory.mktemp("tensors")
    tiny_tensors.publish(folder / "store", *INPUTS)
    tiny_bundles.write_topic_bundle(folder / "store", name="pairs", text_pairs="optional", has_token_types=True)
    for line in serve_saying(folder / "store", folder / "server.log", "--http-port", "0", "--log-level", "warning"):
        address, http = line.split()[0], line.partition("http=")[2].split()[0]
        yield Doors(address=address, http=f"http://{http}", manifests={}, folder=folder)


@pytest.fixture(scope="module")
def triton() -> Iterator[Callable[..., Any]]:
    with triton_process() as started:
        yield started


def by_client(doors: Doors, _: Any, model: str, inputs: Arrays) -> Arrays:
    with Client(doors.address) as client:
        answer = client.infer(model, inputs)
    assert isinstance(answer, TensorAnswer)
    assert (answer.model, answer.model_version) == (model, "1")
    return dict(answer)


def by_asyncio(doors: Doors, _: Any, model: str, inputs: Arrays) -> Arrays:
    async def ask() -> Arrays:
        async with AsyncClient(doors.address) as client:
            return dict(await client.infer(model, inputs, model_version="1"))

    return asyncio.run(ask())


def by_command(doors: Doors, _: Any, model: str, inputs: Arrays) -> Arrays:
    np.savez(doors.folder / "inputs.npz", **inputs)
    out = doors.folder / "outputs.npz"
    arguments = ["--input", str(doors.folder / "inputs.npz"), "--output", str(out), "--server", doors.address]
    ended = CliRunner().invoke(app, ["infer", model, *arguments])
    assert ended.exit_code == 0, ended.output
    with np.load(out) as arrays:
        return {name: array.astype(object) if array.dtype.kind == "U" else array for name, array in arrays.items()}


def by_triton(doors: Doors, triton: Callable[..., Any], model: str, inputs: Arrays) -> Arrays:
    arrays: Arrays = triton(int(doors.address.rpartition(":")[2]), "infer", model, inputs).arrays
    return arrays


def by_triton_over_http(doors: Doors, triton: Callable[..., Any], model: str, inputs: Arrays) -> Arrays:
    arrays: Arrays = triton(int(doors.http.rpartition(":")[2]), "infer_over_http", model, inputs)[0]
    return arrays


def by_json(doors: Doors, triton: Callable[..., Any], model: str, inputs: Arrays) -> Arrays:
    port = int(doors.http.rpartition(":")[2])
    arrays: Arrays = triton(port, "infer_over_http", model, inputs, binary=False)[0]
    return arrays


def by_predictions(doors: Doors, _: Any, model: str, inputs: Arrays) -> Arrays:
    instances = [
        {name: array[row].tolist() for name, array in inputs.items()} for row in range(len(next(iter(inputs.values()))))
    ]
    answer = httpx2.post(f"{doors.http}/v1/models/{model}:predict", json={"instances": instances})
    assert answer.status_code == 200, answer.text
    found = answer.json()["predictions"]
    if not isinstance(found[0], dict):
        [name] = {"detector": ["boxes"], "series": ["forecast"]}[model]
        found = [{name: row} for row in found]
    return {name: np.array([row[name] for row in found]) for name in found[0]}


DOORS = (by_client, by_asyncio, by_command, by_triton, by_triton_over_http, by_json, by_predictions)


@pytest.mark.parametrize("model", INPUTS)
def test_every_door_answers_arrays_alike(doors: Doors, triton: Callable[..., Any], model: str) -> None:
    first, *others = [door(doors, triton, model, INPUTS[model]) for door in DOORS]
    if model == "series":
        np.testing.assert_allclose(first["forecast"], np.tanh(INPUTS[model]["values"].cumsum(axis=1)), rtol=1e-5)
    for door, other in zip(DOORS[1:], others, strict=True):
        missing = {"anchors"} if door is by_predictions else set()  # which has no row for each instance
        assert other.keys() == first.keys() - missing, door.__name__
        for name, array in other.items():
            if first[name].dtype == object:
                texts = [text.decode() if isinstance(text, bytes) else text for text in array.ravel().tolist()]
                assert texts == first[name].ravel().tolist(), door.__name__
            else:
                np.testing.assert_allclose(array, first[name], rtol=1e-6, err_msg=door.__name__)


def test_wrong_arrays_are_refused_alike(doors: Doors, triton: Callable[..., Any]) -> None:
    wrong = INPUTS["tabular"] | {"category": np.array([0, 4])}
    words = "category: has size 2 on axis 0 (batch), and axis 0 of numbers has 3; they must be equal"
    with pytest.raises(InvalidArgumentError, match="must be equal") as refused:
        by_client(doors, None, "tabular", wrong)
    assert [violation.field for violation in refused.value.field_violations] == ["category"]
    for door in (by_triton, by_triton_over_http):
        with pytest.raises(TritonError) as failed:
            door(doors, triton, "tabular", wrong)
        assert words in failed.value.message
    outside = INPUTS["tabular"] | {"category": np.array([0, 4, 99])}
    with pytest.raises(InvalidArgumentError, match="operator Gather") as refused:
        by_client(doors, None, "tabular", outside)
    assert "onnxruntime" not in str(refused.value).lower()
    assert by_client(doors, None, "tabular", INPUTS["tabular"])["scores"].shape == (3, 3)


def test_clients_send_lists_whole_numbers_and_texts(doors: Doors) -> None:
    with Client(doors.address) as client:
        answer = client.infer("series", {"values": [[1, 2]]}, outputs=["forecast"])
        np.testing.assert_allclose(answer["forecast"], np.tanh([[1, 3]]), rtol=1e-6)
        label = client.infer("pairs", {"text": np.array(["goal"])}, outputs=["label"], parameters={"top_k": 1})
        assert label["label"].tolist() == [["sports"]]
        assert (len(label), list(label)) == (1, ["label"])
        with pytest.raises(InvalidArgumentError, match="has 16777217, which FP32 does not hold"):
            client.infer("series", {"values": [[2**24 + 1]]})
        for inputs, parameters, words in (
            ({"values": [1 + 2j]}, {}, "is of dtype complex128"),
            ({"values": np.array([None])}, {}, "has an element of NoneType"),
            ({"values": [1]}, {"a": [1]}, r"parameters\['a'\] is list"),
        ):
            with pytest.raises(TypeError, match=words):
                client.infer("series", inputs, parameters=parameters)  # type: ignore[arg-type]


def test_models_of_tensors_are_listed_and_other_doors_say_how_to_call_them(doors: Doors) -> None:
    with Client(doors.address) as client:
        listed = {model.name: model.task for model in client.list_models("tensors")}
        assert listed == dict.fromkeys(INPUTS, "tensors")
        with pytest.raises(Exception, match="is for tensors and cannot classify texts") as refused:
            client.classify_text("goal", model="series")
        assert str(refused.value).endswith("it takes tensors, by ModelInfer or at /v2/models/series/infer")
    assert {"series", "tabular"} <= {one["id"] for one in httpx2.get(f"{doors.http}/v1/models").json()["data"]}
    said = httpx2.post(f"{doors.http}/v1/embeddings", json={"model": "series", "input": "a"})
    assert said.status_code == 400
    assert "at /v2/models/series/infer" in said.json()["error"]["message"]
    shown = CliRunner().invoke(app, ["list-models", "--task", "tensors", "--server", doors.address])
    assert "detector.onnx, an ONNX file" in shown.output
    statistics = httpx2.get(f"{doors.http}/v2/models/series/stats").json()["model_stats"][0]
    assert statistics["inference_count"] >= 2
    config = httpx2.get(f"{doors.http}/v2/models/detector/config").json()
    assert [one["dims"] for one in config["output"]] == [[-1, 4, 4], [4, 4]]
