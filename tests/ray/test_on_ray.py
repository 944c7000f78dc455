"""A store on Ray Serve, in a real Ray of two nodes, whose proxies carry the protocol."""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import grpc
import httpx2
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -c constraints.txt './server[ray]'")
    import ray_server
    from ray import serve

from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc
from headway_client import Client, DeadlineExceededError, InvalidArgumentError, NotFoundError, PermissionDeniedError

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own

TEXT = "Shares of oil companies rose on Monday."
MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, str]]:
    with ray_server.running_cluster() as addresses:
        yield addresses


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    for name in ("ag-news", "shakespeare"):
        shutil.copytree(MODELS / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def deployed(cluster, store) -> str:
    """The address of the shipped classifier and the shipped language model, which has one slot."""
    ray_server.deploy(store=store, num_slots=1, log_level="warning")
    return cluster[0]


@pytest.fixture
def client(deployed) -> Iterator[Client]:
    with Client(deployed, timeout_s=30) as connected:
        connected.wait_ready(20)
        yield connected


class Load:
    """Callers that call until they are stopped, and what became of their calls."""

    def __init__(self, address: str, num_callers: int = 4) -> None:
        self.answers: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self._address, self._stop = address, threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(num_callers)]

    def _call(self) -> None:
        with Client(self._address, timeout_s=30) as client:
            while not self._stop.is_set():
                try:
                    self.answers[client.classify_text([TEXT], model="ag-news").model.version] += 1
                except Exception as error:
                    self.errors.append(error)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def wait_until(is_so: Callable[[], bool], timeout_s: float = 60) -> None:
    give_up = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def num_running(deployment: str = "ag-news") -> int:
    states = serve.status().applications["default"].deployments[deployment].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def replicas(deployment: str = "ag-news") -> list[str]:
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if f"#{deployment}#" in name]


def test_every_model_of_the_store_answers_and_is_listed(client: Client) -> None:
    assert client.classify_text([TEXT], model="ag-news")[0].labels[0].label == "Business"
    assert client.classify_text([TEXT])[0].labels[0].label == "Business"  # the only model that can
    text = client.generate_text("To be", model="shakespeare", max_new_tokens=8, temperature=0)[0].text
    with client.stream_generate_text("To be", model="shakespeare", max_new_tokens=8, temperature=0) as stream:
        assert "".join(delta.text for delta in stream) == text
    assert [model.name for model in client.list_models()] == ["ag-news", "shakespeare"]
    assert client.get_model("ag-news").model.name == "ag-news"


def test_errors_have_their_code_and_their_details(client: Client) -> None:
    with pytest.raises(NotFoundError, match="model 'nope' is not loaded; loaded are ag-news, shakespeare") as not_found:
        client.classify_text([TEXT], model="nope")
    assert not_found.value.reason == "MODEL_NOT_FOUND"
    with pytest.raises(InvalidArgumentError) as invalid:
        client.classify_text([], model="ag-news")
    assert "texts" in str(invalid.value)
    with (
        pytest.raises(InvalidArgumentError) as in_a_stream,
        client.stream_generate_text("To be", model="shakespeare", temperature=9.0) as stream,
    ):
        list(stream)
    assert in_a_stream.value.reason == "INVALID_INPUT"


def test_metadata_go_to_the_replica_and_come_back(deployed: str) -> None:
    with grpc.insecure_channel(deployed) as channel:
        stub = texts_grpc.TextClassificationServiceStub(channel)
        request = texts_pb.ClassifyTextRequest(model="ag-news", texts=[TEXT])
        _, call = stub.ClassifyText.with_call(request, metadata=(("x-request-id", "a-name"),))
        assert dict(call.trailing_metadata())["x-request-id"] == "a-name"


def test_a_deadline_ends_the_call_in_the_replica(client: Client) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        client.generate_text(["To be"] * 64, model="shakespeare", max_new_tokens=200, timeout_s=0.5)
    assert time.monotonic() - began < 1.5
    client.generate_text("To be", model="shakespeare", max_new_tokens=4, timeout_s=2)  # the slot is free


def test_a_stream_that_is_closed_frees_its_slot_and_its_place(client: Client) -> None:
    def open_one() -> object:
        stream = client.stream_generate_text("To be", model="shakespeare", max_new_tokens=200)
        return stream.__enter__()

    began = time.monotonic()
    client.generate_text("To be", model="shakespeare", max_new_tokens=200)
    one_s = time.monotonic() - began
    streams = [open_one() for _ in range(40)]
    next(iter(streams[0]))
    for stream in streams:
        stream.close()
    began = time.monotonic()
    client.generate_text("To be", model="shakespeare", max_new_tokens=4)
    assert time.monotonic() - began < 10 * one_s  # and not that of 40


def test_http_requests_go_to_the_model_that_they_name(cluster, deployed) -> None:
    with httpx2.Client(base_url=f"http://{cluster[1]}") as http:
        path = "/headway.v1.TextClassificationService/ClassifyText"
        answer = http.post(path, json={"model": "ag-news", "texts": [TEXT]})
        assert answer.json()["results"][0]["labels"][0]["label"] == "Business"
        answer = http.post(path, json={"model": "ag-news", "texts": []})
        assert answer.status_code == 400
        assert answer.json()["code"] == "invalid_argument"
        body = {"model": "shakespeare", "prompt": "To be", "max_tokens": 8, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert http.get("/v2/models/ag-news").json()["name"] == "ag-news"
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["ag-news", "shakespeare"]
        listed = http.post("/headway.v1.ModelService/ListModels", json={}).json()
        assert [model["name"] for model in listed["models"]] == ["ag-news", "shakespeare"]
        assert http.post("/v1/embeddings", json={"model": "ag-news", "input": TEXT}).json()["model"] == "ag-news"
        answer = http.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"RIFF")})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_task")
        assert "loaded are ag-news, shakespeare" in answer.json()["error"]["message"]  # and not those of one replica
        assert http.post(path, content=b"a" * (21 * 2**20)).status_code == 413


def test_no_call_changes_the_models_of_one_replica(client: Client) -> None:
    with pytest.raises(PermissionDeniedError, match="deploy it anew"):
        client.unload_model("ag-news")


def test_a_replica_that_is_killed_under_load_loses_no_call(cluster, store) -> None:
    ray_server.deploy(store=store, min_replicas=2, log_level="warning")
    wait_until(lambda: num_running() == 2)
    with Load(cluster[0]) as load:
        time.sleep(1)
        ray.kill(ray.get_actor(replicas()[0], namespace="serve"), no_restart=False)
        time.sleep(3)
    assert not load.errors
    assert load.answers.total() > 100
    wait_until(lambda: num_running() == 2)


def test_replicas_come_with_load_and_go_without(cluster, store) -> None:
    scaling = {"max_replicas": 2, "target_calls": 1, "upscale_delay_s": 1, "downscale_delay_s": 2}
    ray_server.deploy(store=store, log_level="warning", **scaling)
    wait_until(lambda: num_running() == 1)
    with Load(cluster[0], num_callers=8) as load:
        wait_until(lambda: num_running() == 2)
        time.sleep(1)
    wait_until(lambda: num_running() == 1)
    assert not load.errors


def test_a_new_version_is_rolled_out_without_a_failed_call(cluster, store) -> None:
    ray_server.deploy(store=store, min_replicas=2, log_level="warning")
    wait_until(lambda: num_running() == 2)
    shutil.copytree(store / "ag-news" / "1", store / "ag-news" / "2")
    manifest = store / "ag-news" / "2" / "bundle.json"
    manifest.write_text(manifest.read_text().replace('"version": "1"', '"version": "2"'))
    with Load(cluster[0]) as load:
        time.sleep(1)
        assert set(load.answers) == {"1"}
        ray_server.deploy(store=store, min_replicas=2, log_level="warning")
        before = load.answers["2"]
        wait_until(lambda: load.answers["2"] > before + 100)
    assert not load.errors
    with Client(cluster[0]) as client:
        assert {client.classify_text([TEXT], model="ag-news").model.version for _ in range(10)} == {"2"}


def test_models_share_replicas_that_load_them_when_they_are_called(cluster, store) -> None:
    ray_server.deploy(store=store, models_per_replica=1, log_level="warning")
    with Client(cluster[0], timeout_s=30) as client:
        for _ in range(2):
            assert client.classify_text([TEXT], model="ag-news")[0].labels[0].label == "Business"
            with client.stream_generate_text("To be", model="shakespeare", max_new_tokens=4) as stream:
                assert list(stream)
