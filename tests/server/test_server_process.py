"""A server in a process of its own: what it prints, how it starts, ends, and refuses to start."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import tiny_bundles

from headway.v1 import model_service_pb2, model_service_pb2_grpc
from headway.v1 import text_classification_service_pb2 as pb
from headway.v1 import text_classification_service_pb2_grpc as pb_grpc

READY = re.compile(
    r"headway-server ready on 127\.0\.0\.1:(\d+) models=(\d+) rejected=(\d+) device=cpu threads=1 lanes=1\n"
)


def port_of(line: str) -> int:
    match = READY.fullmatch(line)
    assert match, line
    return int(match[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_tells_its_port_answers_and_ends_well_on_a_signal(start_process, classifier_store, number):
    server = start_process("--store", classifier_store, "--port", 0, "--device", "cpu")
    port = port_of(server.wait_ready())
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        response = pb_grpc.TextClassificationServiceStub(channel).ClassifyText(pb.ClassifyTextRequest(texts=["star"]))
    assert response.results[0].labels[0].label == "science"
    server.process.send_signal(number)
    assert server.wait_end() == 0
    log = server.log.read_text()
    assert "draining" in log
    assert "Traceback" not in log


COUNT_OBJECTS = """
import gc, signal
signal.signal(signal.SIGUSR1, lambda *_: print(len(gc.get_objects()), flush=True))
"""


def test_the_garbage_collector_passes_over_what_a_ready_server_keeps(start_process, classifier_store, tmp_path):
    """Else a full collection would hold the event loop for 0.1 s."""
    (tmp_path / "sitecustomize.py").write_text(COUNT_OBJECTS)
    variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    server = start_process("--store", classifier_store, "--port", 0, variables=variables)
    port_of(server.wait_ready())
    server.process.send_signal(signal.SIGUSR1)
    assert int(server.process.stdout.readline()) < 10_000


def minds(pid: int, number: signal.Signals) -> bool:
    """True if a process has a handler for a signal, or holds it back until it has."""
    fields = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return any(int(fields[name], 16) >> (number - 1) & 1 for name in ("SigCgt", "SigBlk"))


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.5])
def test_a_signal_during_the_start_ends_it(start_process, classifier_store, delay_s):
    server = start_process("--store", classifier_store, "--port", 0)
    while not minds(server.process.pid, signal.SIGTERM):  # which the interpreter's own start does not
        time.sleep(0.001)
    time.sleep(delay_s)
    server.process.terminate()
    assert server.wait_end(10) == 0


def test_a_running_call_is_finished_after_sigterm(start_process, tmp_path):
    tiny_bundles.write_topic_bundle(tmp_path / "store", num_idle_products=150)
    server = start_process("--store", tmp_path / "store", "--port", 0)
    port = port_of(server.wait_ready())
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        texts, models = pb_grpc.TextClassificationServiceStub(channel), model_service_pb2_grpc.ModelServiceStub(channel)
        running = texts.ClassifyText.future(pb.ClassifyTextRequest(texts=["star"] * 4))
        models.ListModels(model_service_pb2.ListModelsRequest())  # answered after the call before it has begun
        time.sleep(0.05)  # for it to be admitted, of which nothing tells
        server.process.send_signal(signal.SIGTERM)
        assert running.result(timeout=60).results[3].labels[0].label == "science"
    assert server.wait_end() == 0


def test_sighup_has_it_look_at_its_store(start_process, tmp_path):
    tiny_bundles.write_topic_bundle(tmp_path)
    server = start_process("--store", tmp_path, "--port", 0, "--poll-interval", 0, "--max-versions", 1)
    port = port_of(server.wait_ready())
    tiny_bundles.write_topic_bundle(tmp_path, version="2")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        texts = pb_grpc.TextClassificationServiceStub(channel)
        assert texts.ClassifyText(pb.ClassifyTextRequest(texts=["star"])).model.version == "1"
        server.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 30
        while texts.ClassifyText(pb.ClassifyTextRequest(texts=["star"])).model.version != "2":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_end() == 0
    assert "topics/2 ready" in server.log.read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_cannot_be_written_is_served_and_watched(start_process, tmp_path):
    store = tmp_path / "store"
    tiny_bundles.write_topic_bundle(store)
    store.chmod(0o555)
    server = start_process("--store", store, "--port", 0)
    port = port_of(server.wait_ready())
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        kept = models.SetRoute(model_service_pb2.SetRouteRequest(model="topics", default_version="1"))
    assert kept.not_kept_reason == "routes.json cannot be written (Permission denied)"


def test_bad_bundles_are_logged_and_the_others_are_served(start_process, tmp_path):
    tiny_bundles.write_colour_bundle(tmp_path)
    (tiny_bundles.write_topic_bundle(tmp_path).path / "tokenizer.json").write_text("tampered")
    server = start_process("--store", tmp_path, "--port", 0, "--log-format", "json")
    match = READY.fullmatch(server.wait_ready())
    assert match is not None
    assert match.groups()[1:] == ("1", "1")
    server.process.terminate()
    assert server.wait_end() == 0
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    events = ["lanes", "model loaded", "bundle rejected", "calls", "serving", "draining", "stopped"]
    assert [line["event"] for line in lines] == events
    assert (lines[2]["bundle"], lines[2]["level"]) == ("topics/1", "error")
    assert lines[2]["reason"].startswith("tokenizer.json has 8 bytes")


HANGING = """
import sys, threading
from headway_server import cli
from headway_server.bundles import Task
from headway_server.tasks.table import FAMILIES
import tiny_family

def start(self):
    self.is_alive = True
    self.hang.set()
    threading.Thread(target=threading.Event().wait).start()  # not a daemon: the interpreter waits for it

tiny_family.Mirror.start = start
FAMILIES[Task.TEXT_CLASSIFICATION] = tiny_family.FAMILY
cli.main(sys.argv[1:])
"""


def test_a_model_that_hangs_does_not_keep_the_process_from_ending(tmp_path):
    tiny_bundles.write_topic_bundle(tmp_path)
    support = Path(tiny_bundles.__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{support}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", HANGING, "--store", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        assert "models=1" in server.stdout.readline()
        server.send_signal(signal.SIGTERM)
        try:
            assert server.wait(60) == 1
        finally:
            server.kill()
        assert server.stderr is not None
        assert "stopped" in server.stderr.read()


def refusal(*arguments: object) -> str:
    """Starts a server that must not start; returns its one line on stderr."""
    command = [sys.executable, "-m", "headway_server", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith("headway-server: ")
    return line


def test_a_port_in_use_is_told(classifier_store: Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        line = refusal("--store", classifier_store, "--port", port)
        health_line = refusal("--store", classifier_store, "--port", 0, "--health-port", port)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line
    assert "another --host or --port" in line
    assert health_line == line.replace("--host or --port", "--health-port")


def test_an_address_that_is_not_this_machines_is_told(classifier_store: Path):
    assert "cannot listen on 192.0.2.1:0: " in refusal("--store", classifier_store, "--port", 0, "--host", "192.0.2.1")


def test_a_missing_store_is_told(tmp_path: Path):
    line = refusal("--store", tmp_path / "missing", "--port", 0)
    assert f"store {tmp_path / 'missing'}: no such folder; make one with headway-export" in line


def test_an_empty_store_is_told(tmp_path: Path):
    assert "has no bundle" in refusal("--store", tmp_path, "--port", 0)


def test_a_peers_words_are_not_written_to_the_log(start_process, classifier_store):
    server = start_process("--store", classifier_store, "--port", 0)
    port = port_of(server.wait_ready())
    forged = b'\n{"event": "FORGED", "level": "error"}\n\x1b[2J'
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I", 0)[1:] + b"\4\0\0\0\0\0"
    goaway = struct.pack(">I", 8 + len(forged))[1:] + b"\7\0\0\0\0\0" + struct.pack(">II", 0, 1) + forged
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.sendall(preface + goaway)
        peer.shutdown(socket.SHUT_WR)  # the server closes once it has read all of it
        with suppress(ConnectionResetError):
            while peer.recv(4096):
                pass
    server.process.terminate()
    assert server.wait_end() == 0
    assert "FORGED" not in server.log.read_text()
