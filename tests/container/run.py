"""Builds the images, runs the compose file as the README says, and does to its containers what happens to containers.

    make container-test

It needs a Docker engine of version 25 or newer with the compose plugin, whose containers this machine can reach at
127.0.0.1. PYTHON_VERSION names the tag of the base image (docker-compose.yml). Exit code 0 if all of it holds, 1 with
what does not, 2 where no engine answers. The last line is one JSON object with the figures. What it started is removed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "demo"))

from examples import EXAMPLES  # noqa: E402 (of the demo's folder)
from page import show  # noqa: E402

from headway_client import Client  # noqa: E402

MIB = 1 << 20
SERVER_IMAGE_LIMIT_MB = 500
NUM_STREAMS = 24
# As docs/operations.md says.
HARDENED = [
    "--init",
    "--stop-timeout=40",
    "--read-only",
    "--tmpfs=/tmp",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
]

# Run inside a server's container; prints what the kernel says of the server's process.
INSPECT = """
import json, os, pathlib
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    arguments = (folder / "cmdline").read_bytes().split(b"\\0")
    if len(arguments) > 1 and arguments[1].endswith(b"/headway-server"):
        break
status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
def written(path):
    try:
        pathlib.Path(path).write_text("")
    except OSError:
        return False
    return True
def first(*paths):
    return next((path.read_text().strip() for path in map(pathlib.Path, paths) if path.exists()), "0")
group = "/sys/fs/cgroup"
print(json.dumps({
    "pid": int(folder.name),
    "ids": sorted(set(status["Uid"].split() + status["Gid"].split())),
    "capabilities": sorted({status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}),
    "no_new_privileges": status["NoNewPrivs"].strip(),
    "written": [path for path in ("/written", "/models/written", "/headway/written") if written(path)],
    "memory_limit_bytes": int(first(group + "/memory.max", group + "/memory/memory.limit_in_bytes")),
    "memory_peak_bytes": int(first(group + "/memory.peak", group + "/memory/memory.max_usage_in_bytes")),
    "processor_s": int(first(group + "/cpuacct/cpuacct.usage")) / 1e9 or float(
        dict(line.split() for line in first(group + "/cpu.stat").splitlines())["usage_usec"]) / 1e6,
    "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
}))
"""

# Run inside a container of the client image, beside two servers of one name: calls both, for eight seconds.
BALANCED = """
import collections, threading, time
from headway_client import Client
begin, codes = time.monotonic(), collections.Counter()
def call():
    while time.monotonic() < begin + 8:
        try:
            client.classify_text(["Oil prices fall"], model="ag-news", timeout_s=20)
            codes["OK"] += 1
        except Exception as error:
            codes[str(error)] += 1
with Client("dns:///server:50051", load_balancing="round-robin") as client:
    client.wait_ready()
    print("calling", flush=True)
    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print(dict(codes))
"""


class CheckError(Exception):
    """Something that must hold did not."""


def check(holds: bool, what: str) -> None:
    """Ends the test if something does not hold."""
    if not holds:
        raise CheckError(what)


def docker(*arguments: str, **options: Any) -> str:
    """Standard output of a docker command, which must end well."""
    ran = subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, **options)
    check(ran.returncode == 0, f"docker {' '.join(arguments)}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}")
    return ran.stdout.strip()


def compose(*arguments: str) -> str:
    """Standard output of a docker compose command."""
    return docker("compose", *arguments)


def seconds_of(action: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.monotonic()
    action()
    return round(time.monotonic() - began, 2)


def inspect(container: str, field: str) -> Any:
    """A field of `docker inspect`."""
    return json.loads(docker("inspect", container, "--format", f"{{{{json {field}}}}}"))


def wait_healthy(container: str) -> None:
    """Waits for the health check of the image."""
    ends = time.monotonic() + 60
    while inspect(container, ".State.Health.Status") != "healthy":
        check(time.monotonic() < ends, "the server was not healthy within a minute")
        time.sleep(0.2)


def process_of(container: str) -> dict[str, Any]:
    """What the kernel says of the server's process, from inside."""
    report: dict[str, Any] = json.loads(docker("exec", container, "python", "-ISc", INSPECT))
    return report


def check_hardened(container: str) -> None:
    """Not root, no capabilities, a root that cannot be written."""
    process = process_of(container)
    check(process["ids"] == ["10001"], f"user and group are {process['ids']}")
    check(process["capabilities"] == ["0" * 16], f"capabilities are {process['capabilities']}")
    check(process["no_new_privileges"] == "1", "the process may gain privileges")
    check(not process["written"], f"could write {process['written']}")


def configured() -> dict[str, Any]:
    """The compose file is one in every profile; images of the others cannot be had everywhere, so they are not run."""
    return {"services": sorted(compose("--profile", "*", "config", "--services").split())}


def built() -> dict[str, Any]:
    """Builds both images, twice from nothing: their layers are the same. A base that is here is not fetched again."""
    names = ("server", "client")
    figures: dict[str, Any] = {}
    layers = []
    for _ in range(2):
        build = partial(compose, "--profile", "load", "build", "--no-cache", "server", "load")
        figures["build_s"] = seconds_of(build)
        layers.append([inspect(f"headway-{name}", ".RootFS.Layers") for name in names])
    check(layers[0] == layers[1], f"layers differ from build to build: {layers}")
    sizes = {f"{name}_image_mb": round(inspect(f"headway-{name}", ".Size") / 1e6) for name in names}
    check(sizes["server_image_mb"] < SERVER_IMAGE_LIMIT_MB, f"sizes: {sizes}")
    return figures | sizes


def started() -> dict[str, Any]:
    """`docker compose up --wait` is over once the server serves; what was promised of its container holds."""
    figures: dict[str, Any] = {"up_until_healthy_s": seconds_of(lambda: compose("up", "--wait"))}
    container = compose("ps", "--quiet", "server")
    check_hardened(container)
    process = process_of(container)
    check(process["memory_limit_bytes"] == 2 << 30, f"memory limit is {process['memory_limit_bytes']}")
    check(inspect(container, ".HostConfig.NanoCpus") == 2_000_000_000, "the CPU limit is not two cores")
    ready = next(line for line in docker("logs", container).splitlines() if " ready on " in line)
    return figures | {"ready": ready, "idle_mib": round(process["rss_bytes"] / MIB)}


def called(address: str) -> dict[str, Any]:
    """Examples of every RPC from outside, and a call whose constraint is tried in a process of its own."""
    with contextlib.redirect_stdout(io.StringIO()) as said, Client(address, timeout_s=120) as client:
        failed = show(client, EXAMPLES)
        answer = client.generate_text(["To be"], choices=["yes", "no"], max_new_tokens=8)
    check(not failed, f"failed: {failed}\n{said.getvalue()}")
    with urllib.request.urlopen("http://127.0.0.1:8080/v2/health/ready", timeout=10) as ready:
        check(json.load(ready) == {"ready": True}, "the HTTP port does not say that the server is ready")
    check(answer[0].text in {"yes", "no"}, f"the constraint gave {answer[0].text!r}")
    return {}


def loaded() -> dict[str, Any]:
    """The load profile; the server keeps to its memory and its cores."""
    container = compose("ps", "--quiet", "server")
    before_s = process_of(container)["processor_s"]
    began = time.monotonic()
    report = compose("--profile", "load", "run", "--rm", "load")
    took_s = time.monotonic() - began
    sys.stderr.write(report + "\n")
    check(" 0 failed" in report, "calls of the load profile failed")
    after = process_of(container)
    cores = (after["processor_s"] - before_s) / took_s
    check(inspect(container, ".RestartCount") == 0, "the server was ended under load")
    check(cores < 2.05, f"the server had {cores} cores")
    return {"load_cores": round(cores, 2), "load_peak_mib": round(after["memory_peak_bytes"] / MIB)}


def killed(address: str) -> dict[str, Any]:
    """Kill -9: the engine starts the server again."""
    container = compose("ps", "--quiet", "server")
    pid = process_of(container)["pid"]
    began = time.monotonic()
    kill = ["docker", "exec", container, "python", "-ISc", f"import os; os.kill({pid}, 9)"]
    subprocess.run(kill, capture_output=True, check=False)  # it may end with the container
    while inspect(container, ".RestartCount") == 0 or not inspect(container, ".State.Running"):
        check(time.monotonic() < began + 30, "the server was not started again")
        time.sleep(0.05)
    with Client(address, timeout_s=60) as client:
        client.wait_ready()
    return {"ready_after_kill_s": round(time.monotonic() - began, 2)}


def drained(address: str) -> dict[str, Any]:
    """`docker compose stop` while streams run: every one comes to its end."""
    container = compose("ps", "--quiet", "server")
    running, ends = threading.Barrier(NUM_STREAMS + 1), []

    def stream() -> None:
        with (
            Client(address, timeout_s=60) as client,
            client.stream_generate_text("ROMEO:", max_new_tokens=240) as deltas,
        ):
            for number, _ in enumerate(deltas):
                if number == 0:
                    running.wait(60)
        ends.append(1)

    threads = [threading.Thread(target=stream) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    running.wait(60)
    stop_s = seconds_of(lambda: compose("stop", "server"))
    for thread in threads:
        thread.join()
    check(len(ends) == NUM_STREAMS, f"{len(ends)} of {NUM_STREAMS} streams ended")
    check(inspect(container, ".State.ExitCode") == 0, "the server did not end well")
    return {"drain_s": stop_s, "streams_drained": f"{len(ends)} of {NUM_STREAMS}"}


def balanced() -> dict[str, Any]:
    """A client that knows a name of two servers loses nothing while one of them stops."""
    compose("up", "--wait")
    second = compose("run", "--detach", "--no-deps", "--use-aliases", "server")
    try:
        wait_healthy(second)
        command = ["docker", "run", "--rm", "--network", "headway-test_default", "--entrypoint", "python"]
        caller = subprocess.Popen([*command, "headway-client", "-c", BALANCED], stdout=subprocess.PIPE, text=True)
        assert caller.stdout is not None
        check(caller.stdout.readline() == "calling\n", "the caller did not begin")
        time.sleep(2)
        docker("stop", second)
        outcome = caller.communicate(timeout=60)[0].strip()
    finally:
        docker("rm", "--force", second)
    check(outcome.startswith("{'OK': ") and "," not in outcome, f"calls ended as {outcome}")
    return {"balanced_calls": outcome}


def stopped_early() -> dict[str, Any]:
    """The documented `docker run` is as hardened as the compose file; SIGTERM during the start ends it at once."""
    slowest_s = 0.0
    for delay_s in (0.0, 0.3, 0.6, 1.2, None):
        container = docker("run", "--detach", *HARDENED, f"--volume={ROOT / 'models'}:/models:ro", "headway-server")
        try:
            if delay_s is None:
                wait_healthy(container)
                check_hardened(container)
            else:
                time.sleep(delay_s)
            began = time.monotonic()
            docker("stop", container)
            slowest_s = max(slowest_s, time.monotonic() - began)
            # Until Python has set its handler, SIGTERM ends a process as it ends every one that an init has started.
            good = (0,) if delay_s is None else (0, 143)
            code = inspect(container, ".State.ExitCode")
            check(code in good, f"exit code {code} of a server stopped after {delay_s} s")
        finally:
            docker("rm", "--force", container)
    check(slowest_s < 5, f"a stop took {slowest_s} s")
    return {"slowest_idle_stop_s": round(slowest_s, 2)}


@contextlib.contextmanager
def composed() -> Iterator[str]:
    """A project and a port of their own, for nothing else of this machine to meet; yields the server's address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        del os.environ[name]
    os.environ.update(COMPOSE_PROJECT_NAME="headway-test", HEADWAY_PORT=str(port))
    try:
        yield f"127.0.0.1:{port}"
    finally:
        compose("--profile", "*", "down", "--volumes", "--timeout", "5")


def main() -> int:
    """Does one after another."""
    try:
        engine = docker("version", "--format", "{{.Server.Version}}")
        docker("compose", "version")
    except (CheckError, OSError) as error:
        sys.stderr.write(f"container-test: needs a Docker engine with the compose plugin, and none answers: {error}\n")
        return 2
    figures: dict[str, Any] = {"engine": engine}
    with composed() as address:
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "compose file with every profile": configured,
            "build": built,
            "up": started,
            "every call from outside": lambda: called(address),
            "load": loaded,
            "kill -9": lambda: killed(address),
            "stop while streams run": lambda: drained(address),
            "two servers of one name": balanced,
            "docker run, and stops during the start": stopped_early,
        }
        for name, step in steps.items():
            began = time.monotonic()
            try:
                found = step()
            except CheckError as error:
                sys.stderr.write(f"container-test: {name}: {error}\n{compose('logs', '--tail', '50')}\n")
                return 1
            sys.stderr.write(f"{name}: holds ({time.monotonic() - began:.1f} s) {found or ''}\n")
            figures |= found
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
