"""What the metrics tell of real calls, and how they are read."""

import asyncio
import io
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy_decoder import NumpyEncoder
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from rpc_failures import failure_of
from tiny_engine import VOCAB_SIZE, make_decoder, make_sequence, running_engine, slow_down

from headway.oip import grpc_predict_v2_pb2 as oip_pb
from headway.v1 import image_classification_service_pb2 as classify_pb
from headway.v1 import image_service_pb2 as image_pb
from headway.v1 import image_service_pb2_grpc as image_pb_grpc
from headway.v1 import model_service_pb2 as model_pb
from headway.v1 import text_classification_service_pb2 as pb
from headway_server.errors import DeadlineError, ServerError
from headway_server.monitoring.metrics import FAMILIES, Metrics
from headway_server.observers import ModelEvent, ModelId, QueueEvent
from headway_server.runtime import Cores
from headway_server.services.procedure import is_look

TINY = ModelId("tiny", "1")
CLASSIFY = "headway.v1.TextClassificationService/ClassifyText"


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics()
    made.listen("127.0.0.1", 0)
    yield made
    made.close()


def read(metrics: Metrics) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=10) as response:
        return response.read().decode()


def samples(metrics: Metrics) -> dict[str, float]:
    """Reads the metrics as Prometheus does: each sample's value by its name and labels, `name{label=value,...}`."""
    found = {}
    for family in text_string_to_metric_families(read(metrics)):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


async def test_calls_are_counted_by_method_model_code_and_reason(serve, classifier_store, metrics):
    async with serve(classifier_store, observer=metrics) as serving:
        metrics.watch(serving.host, serving.server.calls, Cores(2))
        for _ in range(3):
            await serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["star", "a star and a game"]))
        await failure_of(serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=[])))
        await failure_of(serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["a"], model="absent")))
        without_request = serving.channel.stream_unary(f"/{CLASSIFY}")
        await failure_of(without_request(iter(())))
        await asyncio.sleep(0.25)  # two measurements of the loop
        found = await asyncio.to_thread(samples, metrics)
    ok = f"code=OK,method={CLASSIFY},model=topics"
    assert found[f"headway_calls_total{{{ok},reason=,version=1}}"] == 3
    assert found[f"headway_call_duration_seconds_count{{{ok},version=1}}"] == 3
    assert 0 < found[f"headway_call_duration_seconds_sum{{{ok},version=1}}"] < 30
    wrong = f"code=INVALID_ARGUMENT,method={CLASSIFY},model=topics,reason=INVALID_INPUT,version=1"
    assert found[f"headway_calls_total{{{wrong}}}"] == 1
    assert found[f"headway_calls_total{{code=INTERNAL,method={CLASSIFY},model=topics,reason=INTERNAL,version=1}}"] == 0
    missing = f"code=INVALID_ARGUMENT,method={CLASSIFY},model=,reason=INVALID_INPUT,version="
    assert found[f"headway_calls_total{{{missing}}}"] == 1
    absent = f"code=NOT_FOUND,method={CLASSIFY},model=,reason=MODEL_NOT_FOUND,version="
    assert found[f"headway_calls_total{{{absent}}}"] == 1
    topics = "model=topics,version=1"
    assert found[f"headway_queue_duration_seconds_count{{{topics}}}"] == 6
    assert found["headway_inputs_dropped_total{model=topics,reason=expired,version=1}"] == 0
    assert found[f"headway_batch_items_sum{{{topics}}}"] == 6
    assert found[f"headway_computed_tokens_total{{{topics}}}"] > 6
    assert found[f"headway_padding_tokens_total{{{topics}}}"] > 0
    assert found["headway_model_loads_total{model=topics,result=ready,version=1}"] == 1
    assert found["headway_model_state{model=topics,state=ready,version=1}"] == 1
    assert found["headway_model_state{model=topics,state=failed,version=1}"] == 0
    assert found["headway_event_loop_lag_seconds_count{}"] >= 1
    assert found["headway_cores{}"] == 2
    assert found["headway_calls_running{}"] == 0
    assert found["process_resident_memory_bytes{}"] > 1e7
    assert found["headway_threads{}"] >= 2


def test_every_rpc_about_the_server_is_a_look_or_changes_it_or_runs_a_model():
    of_models, of_inference = (
        model_pb.DESCRIPTOR.services_by_name["ModelService"],
        oip_pb.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    )
    rpcs = [f"/{service.full_name}/{rpc.name}" for service in (of_models, of_inference) for rpc in service.methods]
    assert {rpc.rpartition("/")[2] for rpc in rpcs if not is_look(rpc)} == {
        *("LoadModel", "UnloadModel", "ScanStore", "SetRoute", "SetAlias"),
        *("RepositoryModelLoad", "RepositoryModelUnload", "ModelInfer", "ModelStreamInfer"),
    }
    assert not is_look(f"/{CLASSIFY}")


async def test_what_is_kept_of_images_is_counted_in_hits_misses_and_bytes(serve, classifier_store, metrics):
    file = io.BytesIO()
    Image.new("RGB", (20, 16), "red").save(file, "PNG")
    async with serve(classifier_store, observer=metrics) as serving:
        metrics.watch(serving.host, serving.server.calls, Cores(2))
        request = image_pb.PrepareImageRequest(images=[file.getvalue()])
        [prepared] = (await image_pb_grpc.ImageServiceStub(serving.channel).PrepareImage(request)).results
        named = classify_pb.ClassifyImageRequest(image_ids=[prepared.image_id])
        for _ in range(3):
            answer = await serving.images.ClassifyImage(named)
        found = await asyncio.to_thread(samples, metrics)
    model = f"model={answer.model.name}"
    assert found[f"headway_cache_lookups_total{{cache=image_outputs,{model},result=miss,version=1}}"] == 1
    assert found[f"headway_cache_lookups_total{{cache=image_outputs,{model},result=hit,version=1}}"] == 2
    assert found[f"headway_cache_bytes{{cache=image_outputs,{model},version=1}}"] > 500
    assert found["headway_cache_lookups_total{cache=prepared_images,model=,result=hit,version=}"] == 3
    assert found["headway_cache_bytes{cache=prepared_images,model=,version=}"] == len(file.getvalue())


async def test_an_engine_tells_of_prefills_steps_tokens_and_first_tokens(metrics):
    async with running_engine(make_decoder(prefill_chunk=8), observer=metrics, model=TINY) as engine:
        await engine.run([make_sequence(np.arange(2, 21), eos_id=None, max_new_tokens=5) for _ in range(2)])
        usage = engine.usage()
    found = samples(metrics)
    tiny = "model=tiny,version=1"
    assert found[f"headway_step_duration_seconds_count{{kind=prefill,{tiny}}}"] == 6
    assert found[f"headway_first_token_seconds_count{{{tiny}}}"] == 2
    assert found[f"headway_token_gap_seconds_count{{{tiny}}}"] == 8
    assert found[f"headway_input_tokens_total{{{tiny}}}"] == 2 * 19
    assert found[f"headway_output_tokens_total{{{tiny}}}"] == 2 * 5
    assert found["headway_sequences_total{model=tiny,outcome=length,version=1}"] == 2
    assert (usage.num_slots, usage.num_used_slots, usage.num_waiting, usage.num_used_positions) == (4, 0, 0, 0)
    assert usage.num_positions == 4 * 64


async def test_slots_and_cache_are_told_while_sequences_run_and_drops_by_their_reason(metrics):
    decoder = make_decoder(num_slots=1)
    slow_down(decoder, 0.02)
    async with running_engine(decoder, observer=metrics, model=TINY) as engine:
        running = asyncio.ensure_future(engine.run([make_sequence([5, 6], eos_id=None, max_new_tokens=20)]))
        await asyncio.sleep(0.1)
        waiting = asyncio.ensure_future(engine.run([make_sequence([6], deadline=time.monotonic() + 0.2)]))
        await asyncio.sleep(0.05)
        usage = engine.usage()
        with pytest.raises(DeadlineError):
            await waiting
        await running
    assert (usage.num_used_slots, usage.num_waiting) == (1, 1)
    assert 2 <= usage.num_used_positions <= 21
    found = samples(metrics)
    assert found["headway_inputs_dropped_total{model=tiny,reason=expired,version=1}"] == 1
    assert found["headway_sequences_total{model=tiny,outcome=expired,version=1}"] == 1


async def test_the_padding_of_an_encoder_is_counted(metrics):
    encoder = NumpyEncoder(vocab_size=VOCAB_SIZE)
    async with running_engine(make_decoder(), encoder=encoder, observer=metrics, model=TINY) as engine:
        sequences = [
            make_sequence(np.arange(2, 2 + length), start_ids=[0], eos_id=None, max_new_tokens=2) for length in (3, 7)
        ]
        await engine.run(sequences)
    found = samples(metrics)
    assert found["headway_padding_tokens_total{model=tiny,version=1}"] == 4
    assert found["headway_input_tokens_total{model=tiny,version=1}"] == 10


def test_what_threads_counted_is_added_up_and_kept_when_they_end(metrics):
    def count() -> None:
        for _ in range(1000):
            metrics.left_queue(QueueEvent(model=TINY, queue_s=0.002, reason="started", num_waiting=0))

    name = "headway_queue_duration_seconds_count{model=tiny,version=1}"
    for number in (1, 2):
        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert samples(metrics)[name] == number * 4000
    assert len(metrics._shards) == 0
    assert samples(metrics)[name] == 8000


def test_buckets_are_cumulative_and_hold_their_upper_bound(metrics):
    for seconds in (0.001, 0.0011, 100.0):
        metrics.left_queue(QueueEvent(model=TINY, queue_s=seconds, reason="started", num_waiting=0))
    found = samples(metrics)
    counts = [
        found[f"headway_queue_duration_seconds_bucket{{le={bound},model=tiny,version=1}}"]
        for bound in ("0.001", "0.0025", "60.0", "+Inf")
    ]
    assert counts == [1, 2, 2, 3]
    assert found["headway_queue_duration_seconds_sum{model=tiny,version=1}"] == pytest.approx(100.0021)


def test_loads_that_fail_are_counted(metrics):
    metrics.model_changed(ModelEvent(model=TINY, state="failed", reason="broken"))
    metrics.model_changed(ModelEvent(model=TINY, state="ready", seconds=0.3))
    found = samples(metrics)
    assert found["headway_model_loads_total{model=tiny,result=failed,version=1}"] == 1
    assert found["headway_model_load_duration_seconds_sum{model=tiny,version=1}"] == 0.3


def test_a_server_tells_its_metrics_from_its_first_moment_to_its_end(start_process, classifier_store):
    server = start_process("--store", classifier_store, "--port", 0, "--metrics-port", 0, "--log-format", "json")
    server.wait_ready()
    lines = map(json.loads, server.log.read_text().splitlines())
    [port] = [line["port"] for line in lines if line["event"] == "metrics"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        told = response.read().decode()
    assert 'headway_model_state{model="colours",state="ready",version="1"} 1.0' in told
    assert 'headway_model_loads_total{model="topics",result="ready",version="1"} 1.0' in told
    ended = subprocess.run(
        [sys.executable, "-m", "headway_server", "--store", str(classifier_store), "--metrics-port", str(port)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert f"cannot listen for metrics on 127.0.0.1:{port}" in ended.stderr
    server.process.terminate()
    assert server.wait_end() == 0


def test_a_taken_port_is_told_with_what_to_do(metrics):
    with pytest.raises(ServerError, match=r"cannot listen for metrics on 127\.0\.0\.1:\d+: .*--metrics-port"):
        Metrics().listen("127.0.0.1", metrics.port)


def test_a_reader_that_sends_nothing_holds_the_others_up_for_a_moment_alone(monkeypatch):
    monkeypatch.setattr("headway_server.monitoring.metrics._READ_TIMEOUT_S", 0.2)
    metrics = Metrics()
    metrics.listen("127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", metrics.port)):
            began = time.monotonic()
            assert "headway_build_info" in read(metrics)
            assert time.monotonic() - began < 5
    finally:
        metrics.close()


def test_every_metric_stands_in_the_table_of_the_document_with_its_type_and_labels():
    page = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text()
    rows = re.findall(r"^\| `(headway_\w+)` \| (\w+) \| ([^|]*) \|", page, flags=re.MULTILINE)
    told = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    exists = {
        family.name + "_total" * (family.kind == "counter"): (family.kind, set(family.labels)) for family in FAMILIES
    }
    assert told == exists
