"""What goes wrong around a server: its log, its disk, its clock, the network under its peers, a run that hangs."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO, cast

import grpc
import h2.config
import h2.connection
from tests.drills.server import Server, check

from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc

_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
/* Moves the wall clock by an hour to and fro every two seconds; the monotonic clock stays as it is. */
static long jump(void) {
    static int (*real)(clockid_t, struct timespec *);
    struct timespec now;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    real(CLOCK_MONOTONIC, &now);
    return (now.tv_sec / 2) % 2 ? 3600 : 0;
}
int clock_gettime(clockid_t id, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, time);
    if (id == CLOCK_REALTIME) time->tv_sec += jump();
    return result;
}
int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(time, zone);
    time->tv_sec += jump();
    return result;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


def _answers(server: Server, count: int, *, bad: bool = False, timeout_s: float = 5) -> int:
    """Returns how many of some calls are answered, or refused as they should be."""
    request = texts_pb.ClassifyTextRequest(texts=[] if bad else ["Oil prices fall."], model="ag-news")
    answered = 0
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = texts_grpc.TextClassificationServiceStub(channel)
        for _ in range(count):
            try:
                stub.ClassifyText(request, timeout=timeout_s)
                answered += 1
            except grpc.RpcError as error:
                answered += bad and cast("grpc.Call", error).code() is grpc.StatusCode.INVALID_ARGUMENT
    return answered


def _with_log(stderr: BinaryIO) -> dict[str, Any]:
    """Serves with a log that takes nothing, stops, and returns what was answered."""
    server = Server("--log-level", "debug")
    server.start(stderr)
    answered = _answers(server, 300)
    code, stop_s = server.stop()
    check(answered == 300, f"{answered} of 300 calls were answered")
    check(code == 0, f"the exit code is {code}")
    return {"answered": answered, "of": 300, "stop_s": round(stop_s, 2)}


def _full_disk() -> dict[str, Any]:
    with Path("/dev/full").open("wb") as full:
        return _with_log(full)


def _blocked_log() -> dict[str, Any]:
    """A pipe that is full and that nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
    try:
        with os.fdopen(writer, "wb") as pipe:
            return _with_log(pipe)
    finally:
        os.close(reader)


def _closed_log() -> dict[str, Any]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as pipe:
        os.close(reader)
        return _with_log(pipe)


def _clock() -> dict[str, Any]:
    """Calls with deadlines of five seconds while the wall clock jumps by an hour."""
    compiler = shutil.which("cc")
    if compiler is None:
        return {"skipped": "there is no C compiler"}
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "clock.c", Path(folder) / "clock.so"
        source.write_text(_CLOCK, encoding="ascii")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        server = Server(environment={"LD_PRELOAD": str(library)})
        server.start()
        try:
            began, answered, calls = time.monotonic(), 0, 0
            while time.monotonic() - began < 10:
                answered += _answers(server, 20)
                calls += 20
            code, _ = server.stop()
        finally:
            if server.process is not None and server.process.poll() is None:
                server.kill()
    check(code == 0, f"the exit code is {code}")
    return {"answered": answered, "of": calls, "seconds": 10}


def _half_open() -> dict[str, Any]:
    """Connections whose peers answer nothing any more, not even pings, are given up."""
    server = Server("--keepalive-time", "2")
    server.start()
    try:
        before = server.num_descriptors
        peers = []
        for _ in range(100):
            peer = socket.create_connection(("127.0.0.1", server.port))
            connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
            connection.initiate_connection()
            peer.sendall(connection.data_to_send())
            peers.append(peer)
        time.sleep(1)
        held = server.num_descriptors
        began = time.monotonic()
        while server.num_descriptors > before + 5 and time.monotonic() - began < 60:
            time.sleep(0.5)
        gone_s = time.monotonic() - began
        after = server.num_descriptors
        check(after <= before + 5, f"descriptors {before} -> {held} -> {after}")
        check(_answers(server, 20) == 20, "others are not answered")
        for peer in peers:
            peer.close()
        server.stop()
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()
    return {"connections": 100, "descriptors": [before, held, after], "given_up_after_s": round(gone_s, 1)}


def surroundings() -> dict[str, Any]:
    """Does all of it, to one server after another."""
    return {
        "full_disk": _full_disk(),
        "blocked_log": _blocked_log(),
        "closed_log": _closed_log(),
        "clock": _clock(),
        "half_open": _half_open(),
    }
