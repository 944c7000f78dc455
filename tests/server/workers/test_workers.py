"""A server of several processes: one port, one ready line, one drain, and what each worker is told holds for all."""

import io
import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import tiny_bundles
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from headway.v1 import (
    image_classification_service_pb2,
    image_classification_service_pb2_grpc,
    image_service_pb2,
    image_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
)
from headway.v1 import text_classification_service_pb2 as pb
from headway.v1 import text_classification_service_pb2_grpc as pb_grpc
from headway_client import Client
from headway_server.bundles import Task, read_manifest
from headway_server.errors import BudgetError, OverloadedError
from headway_server.serving.access import Access, AccessFile
from headway_server.serving.counts import Counts
from headway_server.serving.permits import Admission
from headway_server.settings import ServerSettings
from headway_server.workers.shares import share_cores, share_settings, suiting

READY = re.compile(
    r"headway-server ready on 127\.0\.0\.1:(\d+) models=2 rejected=0 device=cpu threads=2 lanes=2 workers=2 "
    r"http=127\.0\.0\.1:(\d+)\n"
)
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def events(log: Path, event: str) -> list[dict]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def pids(log: Path) -> dict[int, int]:
    """Process ids by worker; of one that was replaced, the later."""
    return {line["worker"]: line["pid"] for line in events(log, "starting a worker")}


def private_folders(server) -> set[Path]:
    """Folders that the supervisor of a server holds."""
    held = {file.readlink() for file in Path(f"/proc/{server.process.pid}/fd").iterdir()}
    return {path for path in held if path.name.startswith("headway-server-workers-")}


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except FileNotFoundError:
        return False


def wait_until(is_so, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Pair:
    """A server of two workers, and connections that reach both of them."""

    def __init__(self, start_process, folder: Path) -> None:
        self.store = folder / "store"
        tiny_bundles.write_topic_bundle(self.store)
        tiny_bundles.write_colour_bundle(self.store)
        flags = ["--store", self.store, "--port", 0, "--http-port", 0, "--metrics-port", 0, "--workers", 2]
        self.process = start_process(*flags, "--threads", 2, "--log-format", "json", "--drain-timeout", 20)
        line = self.process.wait_ready()
        match = READY.fullmatch(line)
        assert match, line
        self.port, self.http_port = int(match[1]), int(match[2])
        [self.metrics_port] = {line["port"] for line in events(self.process.log, "metrics")}

    def channels(self, count: int = 16) -> list[grpc.Channel]:
        return [grpc.insecure_channel(f"127.0.0.1:{self.port}", OWN_CONNECTION) for _ in range(count)]

    def samples(self, port: int, name: str) -> dict[str | None, float]:
        """Sums of a metric's values by worker."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        found: dict[str | None, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    worker = sample.labels.get("worker")
                    found[worker] = found.get(worker, 0.0) + sample.value
        return found

    def listed(self) -> set[tuple[str, ...]]:
        """What models each of many connections is told of."""
        found = set()
        for channel in self.channels():
            with channel:
                models = model_service_pb2_grpc.ModelServiceStub(channel)
                answer = models.ListModels(model_service_pb2.ListModelsRequest(), timeout=20)
                found.add(tuple(model.name for model in answer.models))
        return found


@pytest.fixture(scope="module")
def pair(start_shared_process, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(start_shared_process, tmp_path_factory.mktemp("pair"))


def test_both_workers_answer_and_the_metrics_of_both_are_at_either_port(pair):
    for channel in pair.channels():
        with channel:
            answer = pb_grpc.TextClassificationServiceStub(channel).ClassifyText(
                pb.ClassifyTextRequest(texts=["star"]), timeout=20
            )
        assert answer.results[0].labels[0].label == "science"
    for port in (pair.metrics_port, pair.http_port):
        calls = pair.samples(port, "headway_calls_total")
        assert set(calls) == {"0", "1"}
        assert min(calls.values()) > 0
        assert sum(calls.values()) >= 16
        assert pair.samples(port, "headway_workers") == {None: 2.0}


def test_an_image_that_one_worker_was_sent_is_found_by_all(pair):
    file = io.BytesIO()
    Image.new("RGB", (20, 16), "blue").save(file, "PNG")
    first, *others = pair.channels()
    with first:
        sent = image_service_pb2.PrepareImageRequest(images=[file.getvalue()])
        [prepared] = image_service_pb2_grpc.ImageServiceStub(first).PrepareImage(sent, timeout=20).results
    for channel in others:
        with channel:
            images = image_classification_service_pb2_grpc.ImageClassificationServiceStub(channel)
            named = image_classification_service_pb2.ClassifyImageRequest(image_ids=[prepared.image_id])
            assert images.ClassifyImage(named, timeout=20).results[0].labels[0].label == "blue"
            with pytest.raises(grpc.RpcError, match="no image has this id"):
                images.ClassifyImage(
                    image_classification_service_pb2.ClassifyImageRequest(image_ids=["0" * 32]), timeout=20
                )


def test_what_a_call_changes_in_one_worker_changes_in_all(pair):
    with grpc.insecure_channel(f"127.0.0.1:{pair.port}") as channel:
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        models.UnloadModel(model_service_pb2.UnloadModelRequest(model="colours"), timeout=30)
        assert pair.listed() == {("topics",)}
        models.LoadModel(model_service_pb2.LoadModelRequest(model="colours"), timeout=30)
        assert pair.listed() == {("colours", "topics")}
        with pytest.raises(grpc.RpcError, match="no bundle"):
            models.LoadModel(model_service_pb2.LoadModelRequest(model="none", model_version="1"), timeout=30)
        models.UnloadModel(model_service_pb2.UnloadModelRequest(model="colours"), timeout=30)
        models.SetAlias(model_service_pb2.SetAliasRequest(alias="news", model="topics"), timeout=30)
        assert list(models.ScanStore(model_service_pb2.ScanStoreRequest(), timeout=30).bundles) == []
    assert pair.listed() == {("topics",)}


@pytest.mark.parametrize("workers", [1, 2])
def test_another_server_is_told_that_the_port_is_taken(pair, start_process, workers):
    other = start_process("--store", pair.store, "--port", pair.port, "--workers", workers)
    assert other.wait_end() == 2
    [line] = other.log.read_text().splitlines()
    assert line.startswith(f"headway-server: cannot listen on 127.0.0.1:{pair.port}: Address already in use")


def test_a_worker_that_dies_is_replaced_and_no_call_is_lost(pair):
    with grpc.insecure_channel(f"127.0.0.1:{pair.port}") as channel:
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        models.UnloadModel(model_service_pb2.UnloadModelRequest(model="colours"), timeout=30)
    victim = pids(pair.process.log)[1]
    failures: list[Exception] = []
    answers: list[str] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            try:
                with Client(f"127.0.0.1:{pair.port}", timeout_s=30) as client:
                    answers.extend(
                        client.classify_text(["star"], model="topics").results[0].labels[0].label for _ in range(5)
                    )
            except Exception as error:
                failures.append(error)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    time.sleep(0.5)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: pids(pair.process.log)[1] != victim)
    wait_until(lambda: len(events(pair.process.log, "a worker is ready")) == 3)
    stop.set()
    for caller in callers:
        caller.join()
    assert failures == []
    assert set(answers) == {"science"}
    [told] = events(pair.process.log, "a worker ended and is restarted")
    assert (told["worker"], told["end"]) == (1, "signal SIGKILL")
    assert pair.samples(pair.metrics_port, "headway_worker_restarts_total") == {None: 1.0}
    assert pair.listed() == {("topics",)}  # the new one has taken over what calls had changed


def test_all_workers_drain_on_one_signal(pair):
    [folder] = private_folders(pair.process)

    def num_accepted() -> float:
        counts = [pair.samples(pair.metrics_port, name) for name in ("headway_calls_running", "headway_calls_total")]
        return sum(value for by_worker in counts for value in by_worker.values())

    before = num_accepted()
    with ExitStack() as stack:
        running = []
        for channel in pair.channels(8):
            stub = pb_grpc.TextClassificationServiceStub(stack.enter_context(channel))
            running.append(stub.ClassifyText.future(pb.ClassifyTextRequest(texts=["star"] * 64), timeout=30))
        wait_until(lambda: num_accepted() >= before + 8)
        pair.process.process.send_signal(signal.SIGTERM)
        assert [len(answer.result().results) for answer in running] == [64] * 8
    assert pair.process.wait_end() == 0
    assert {line["worker"] for line in events(pair.process.log, "draining")} == {0, 1}
    assert pair.process.process.stdout.read() == ""  # but for the ready line
    assert not any(is_running(pid) for pid in pids(pair.process.log).values())
    assert not folder.exists()
    assert "Traceback" not in pair.process.log.read_text()


def test_workers_that_serve_end_with_a_supervisor_that_is_killed(start_process, classifier_store):
    server = start_process("--store", classifier_store, "--port", 0, "--workers", 2, "--log-format", "json")
    server.wait_ready()
    [folder] = private_folders(server)
    server.process.kill()
    server.wait_end()
    wait_until(lambda: not any(is_running(pid) for pid in pids(server.log).values()))
    assert not folder.exists()


def test_workers_that_load_end_with_a_supervisor_that_is_killed(start_process, classifier_store):
    server = start_process("--store", classifier_store, "--port", 0, "--workers", 2, "--log-format", "json")
    wait_until(lambda: len(pids(server.log)) == 2)
    server.process.kill()
    server.wait_end()
    wait_until(lambda: not any(is_running(pid) for pid in pids(server.log).values()))


def test_a_signal_during_the_start_ends_all_processes(start_process, classifier_store):
    server = start_process("--store", classifier_store, "--port", 0, "--workers", 2, "--log-format", "json")
    wait_until(lambda: len(pids(server.log)) == 2)
    server.process.terminate()
    assert server.wait_end(20) == 0
    assert server.log.read_text().splitlines()[-1] == "headway-server: stopped before it was ready"
    assert not any(is_running(pid) for pid in pids(server.log).values())


def test_workers_that_cannot_start_end_the_start_with_one_line(start_process, tmp_path):
    (tiny_bundles.write_topic_bundle(tmp_path).path / "tokenizer.json").write_text("tampered")
    server = start_process("--store", tmp_path, "--port", 0, "--workers", 2, "--log-format", "json")
    assert server.wait_end() == 2
    [line] = [line for line in server.log.read_text().splitlines() if not line.startswith("{")]
    assert re.match(r"headway-server: store .*: none of its bundles can be served: topics/1", line)
    assert not any(is_running(pid) for pid in pids(server.log).values())


@pytest.fixture
def two_counts() -> Iterator[tuple[Counts, Counts]]:
    """A table as two workers see it. Locks are between processes, so here they exclude nobody."""
    fd = Counts.create(2)
    yield Counts(fd, index=0, num_workers=2), Counts(fd, index=1, num_workers=2)
    os.close(fd)


def callers_of(counts: tuple[Counts, Counts], **grant: object):
    text = f'[keys.alice]\nsha256 = "{"0" * 64}"\nscopes = ["model:*"]\n'
    text += "".join(f"{name} = {value}\n" for name, value in grant.items())
    accesses = [Access(AccessFile.parse(text, "access.toml"), each) for each in counts]
    return [next(iter(access._keys.values())) for access in accesses]


def test_a_budget_of_calls_is_one_for_all_workers(two_counts):
    one, other = callers_of(two_counts, calls_per_s=0.001, burst=3)
    one.begin()
    other.begin()
    one.begin()
    with pytest.raises(BudgetError):
        other.begin()
    with pytest.raises(BudgetError):
        one.begin()
    [fresh, _] = callers_of(two_counts, calls_per_s=0.001, burst=3)  # a worker that starts anew
    with pytest.raises(BudgetError):
        fresh.begin()


def test_a_budget_of_tokens_is_one_for_all_workers(two_counts):
    one, other = callers_of(two_counts, tokens_per_minute=10)
    one.begin()
    one.count_tokens(11)
    with pytest.raises(BudgetError, match="tokens a minute"):
        other.begin()


def test_calls_at_a_time_are_counted_in_all_workers_and_forgotten_with_one_that_died(two_counts):
    one, other = callers_of(two_counts, concurrency=2)
    began = one.begin()
    other.begin()
    for caller in (one, other):
        with pytest.raises(BudgetError, match="2 calls at a time"):
            caller.begin()
    one.end(began)
    one.begin()
    with pytest.raises(BudgetError):
        other.begin()
    two_counts[0].forget(1)
    one.begin()


def test_the_limits_of_calls_and_of_bytes_hold_for_all_workers_together(two_counts):
    one, other = (
        Admission(limit=3, noun="calls", owner="the server", max_bytes=100, counted=counts.server)
        for counts in two_counts
    )
    permits = [one.admit(1, 40), other.admit(1, 40)]
    with pytest.raises(OverloadedError, match="80 bytes"):
        one.admit(1, 40)
    permits.append(one.admit(1, 1))
    with pytest.raises(OverloadedError, match="3 calls waiting"):
        other.admit(1, 1)
    permits[0].release()
    other.admit(1, 1)


def test_cores_are_shared_out_and_taken_in_turns_where_there_are_too_few():
    assert share_cores([0, 1, 2, 3, 8], 2) == [(0, 1), (2, 3, 8)]
    assert share_cores([4, 5], 3) == [(4,), (4,), (5,)] or share_cores([4, 5], 3) == [(4,), (5,), (5,)]
    assert all(share_cores([7], 3)[index] == (7,) for index in range(3))


def test_slots_and_queues_are_shared_out_and_limits_of_calls_are_not(tmp_path):
    settings = ServerSettings(
        store=tmp_path,
        threads=5,
        max_calls=100,
        max_inflight_mib=64,
        engine={"num_slots": 9, "max_waiting": 10},
        batching={"max_waiting_texts": 300},
        models={"big": {"num_slots": 4, "lanes": 1}},
    )
    shares = share_settings(settings, 2)
    assert [share.threads for share in shares] == [2, 3]
    assert {share.max_calls for share in shares} == {100}
    assert {share.max_inflight_mib for share in shares} == {64}
    assert shares[0].engine.num_slots == 5
    assert shares[0].engine.max_waiting == 5
    assert shares[0].batching.max_waiting_texts == 256  # those of one call, at least
    assert shares[0].for_model("big").engine.num_slots == 2
    assert shares[0].for_model("big").engine.max_waiting == 5
    assert shares[0].for_model("big").lanes == 1


@pytest.mark.parametrize("workers", [0, -1, 257, 1.5, "few", True])
def test_a_number_of_workers_out_of_its_range_is_refused(tmp_path, workers):
    with pytest.raises(ValidationError, match="must be auto, or a number from 1 to 256"):
        ServerSettings(store=tmp_path, workers=workers)


def test_auto_takes_a_worker_a_core_for_small_models_and_one_for_large_ones_and_those_that_generate(tmp_path):
    manifest = read_manifest(tiny_bundles.write_topic_bundle(tmp_path).path)
    settings = ServerSettings(store=tmp_path, threads=3, workers="auto")
    several = suiting(settings, [manifest])
    assert several.count == 3
    assert several.reason.startswith("3 cores")
    assert suiting(settings.model_copy(update={"threads": 1}), [manifest]).count == 1
    writer = manifest.model_copy(update={"task": Task.GENERATION, "name": "poet"})
    assert suiting(settings, [manifest, writer]).count == 1
    assert suiting(settings, [manifest, writer]).reason.startswith("poet: one process shares slots")
    architecture = manifest.architecture.model_copy(update={"parameter_count": 110_000_000})
    large = manifest.model_copy(update={"architecture": architecture, "name": "bert"})
    assert suiting(settings, [large, manifest]).reason.startswith("bert: more than 20,000,000 parameters")
