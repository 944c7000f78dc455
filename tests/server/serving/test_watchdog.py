"""The watchdog of a process that serves."""

import subprocess
import sys
import time

import structlog
from waiting import until

from headway_server.serving.watchdog import STALLED_EXIT_CODE, Watchdog


async def test_what_hangs_is_told_once_with_the_stacks_of_all_threads(monkeypatch):
    monkeypatch.setattr("headway_server.serving.watchdog.faulthandler.dump_traceback_later", lambda *_, **__: None)
    stalled = {"shakespeare/1": "has made no progress for 1 s"}
    dog = Watchdog(lambda _: stalled, limit_s=0.2, ends=False)
    with structlog.testing.capture_logs() as lines:
        dog.start()
        await until(lambda: lines)
        dog.beat()
        await until(lambda: "event loop" in lines[-1]["stalled"])
        dog.stop()
    assert lines[0]["stalled"] == stalled
    assert "run_forever" in lines[0]["stacks"]
    assert "in _watch" in lines[0]["stacks"]
    assert len(lines) <= 3


HANGS = """
import sys, threading, time
from headway_server.serving.watchdog import Watchdog
began = time.monotonic()
Watchdog(lambda limit: {"model": "hangs"} if time.monotonic() - began > limit else {}, limit_s=0.5, ends=True).start()
time.sleep(60)
"""


def test_a_process_that_hangs_is_ended_if_asked_to():
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == STALLED_EXIT_CODE
    assert time.monotonic() - began < 20
    assert "the server hangs" in ended.stdout + ended.stderr
