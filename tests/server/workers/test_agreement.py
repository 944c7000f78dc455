"""What a call has changed in one worker holds in all of them when the call returns, or the call fails by its name."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_bundles
from tiny_family import FAMILY
from waiting import until

from headway_server.bundles import Task
from headway_server.errors import BundleRejectedError, DrainingError
from headway_server.runtime import Runtime
from headway_server.serving.abilities import Effect
from headway_server.serving.counts import Counts
from headway_server.serving.host import ModelState
from headway_server.serving.images import PreparedImages
from headway_server.serving.routes import Alias, Route
from headway_server.settings import ServerSettings
from headway_server.tasks.table import FAMILIES, RPCS
from headway_server.workers.agreement import Agreement
from headway_server.workers.host import WorkerHost

FAMILIES_HERE = {**FAMILIES, Task.TEXT_CLASSIFICATION: FAMILY}


def write(store: Path, version: str, **fields: str) -> None:
    tiny_bundles.write_topic_bundle(store, name="mirror", version=version, replace=True, **fields)


class Server:
    """Workers of one server, all in this process, whose locks exclude nobody."""

    def __init__(self, runtime: Runtime, folder: Path, settings: ServerSettings) -> None:
        self.runtime = runtime
        self.folder = folder
        self.settings = settings
        self.fd = Counts.create(3)
        self.hosts: list[WorkerHost] = []
        self.supervisor = Counts(self.fd, index=0, num_workers=3)

    def agreement(self, index: int, *, supervisor: int | None = None) -> Agreement:
        counts = Counts(self.fd, index=index, num_workers=3)
        return Agreement(self.folder, counts, index=index, supervisor=supervisor or os.getppid())

    def begin(self, index: int, settings: ServerSettings | None = None, *, supervisor: int | None = None) -> WorkerHost:
        """Starts a worker, which follows nothing before its `start`."""
        self.supervisor.begin(index)
        agreement = self.agreement(index, supervisor=supervisor)
        agreed = agreement.begin()
        host = WorkerHost.open(
            self.runtime,
            settings or self.settings,
            families=FAMILIES_HERE,
            asked_for=agreed.asked_for,
            routes_over=agreed.routes_over,
        )
        host.join(agreement, agreed, PreparedImages())
        self.hosts.append(host)
        return host

    def start(self, index: int, settings: ServerSettings | None = None, *, supervisor: int | None = None) -> WorkerHost:
        host = self.begin(index, settings, supervisor=supervisor)
        host.start()
        return host


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    for version in ("1", "2"):
        write(folder, version, description="old")
    return folder


@pytest.fixture
async def make(runtime: Runtime, tmp_path: Path, store: Path) -> AsyncIterator[Callable[..., Server]]:
    made = []

    def start(**versions: object) -> Server:
        settings = ServerSettings(
            store=store, drain_timeout=5, versions={"poll_interval": 0, "load_timeout": 20, **versions}
        )
        (tmp_path / "private").mkdir()
        made.append(Server(runtime, tmp_path / "private", settings))
        return made[-1]

    yield start
    for server in made:
        for host in server.hosts:
            host.close()
        os.close(server.fd)


def loaded(host: WorkerHost) -> list[str]:
    return [bundle.path for bundle in host.bundles if bundle.state is ModelState.READY]


async def load(host: WorkerHost) -> None:
    await host.unload("mirror")
    await host.load("mirror")


async def load_what_was_replaced(host: WorkerHost) -> None:
    write(host._loader.settings.store, "2", description="new")
    await host.load("mirror", "2")


async def scan(host: WorkerHost) -> None:
    write(host._loader.settings.store, "3")
    await host.scan()


CHANGES: dict[str, tuple[Callable, Callable[[WorkerHost], object], object]] = {
    "LoadModel": (load, loaded, ["mirror/2"]),
    "LoadModel of what was replaced": (
        load_what_was_replaced,
        lambda host: [model.bundle.manifest.description for model in host.models],
        ["old", "new"],
    ),
    "UnloadModel": (lambda host: host.unload("mirror", "2"), loaded, ["mirror/1"]),
    "UnloadModel without a version": (lambda host: host.unload("mirror"), loaded, []),
    "ScanStore": (scan, loaded, ["mirror/1", "mirror/2", "mirror/3"]),
    "SetRoute": (
        lambda host: host.set_route("mirror", Route(default_version="1")),
        lambda host: host.routes.models["mirror"].default_version,
        "1",
    ),
    "SetAlias": (
        lambda host: host.set_alias("news", Alias(model="mirror")),
        lambda host: host.routes.resolve("news", ""),
        ("mirror", ""),
    ),
}


def test_every_rpc_that_changes_the_server_is_tried():
    of_open_inference = {"RepositoryModelLoad", "RepositoryModelUnload"}  # which call the same methods of the host
    tried = {change.partition(" ")[0] for change in CHANGES}
    assert tried | of_open_inference == {name for name, rpc in RPCS.items() if rpc.effect is Effect.CHANGES}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("can_be_written", [True, False])
async def test_a_change_holds_in_all_workers_when_the_call_returns(make, tmp_path, change, can_be_written):
    make_it, found, expected = CHANGES[change]
    (tmp_path / "file").touch()
    server = make(routes_file=tmp_path / ("routes.json" if can_be_written else "file/routes.json"))
    one, other = server.start(0), server.start(1)
    not_kept = await make_it(one)
    assert [found(host) for host in (one, other)] == [expected, expected]
    if change in ("SetRoute", "SetAlias"):
        assert bool(not_kept) is not can_be_written
    for host in (one, other):
        await host._look()  # what is in the file, or is not, takes nothing back
    assert [found(host) for host in (one, other)] == [expected, expected]
    late = server.start(2)
    assert found(late) == expected, "a worker that starts takes it over"


async def test_workers_follow_one_another_in_turns_and_a_worker_hears_of_several_changes_at_once(make):
    server = make()
    one, other = server.start(0), server.start(1)
    late = server.begin(2)
    changing = [
        asyncio.create_task(one.set_alias("a", Alias(model="mirror"))),
        asyncio.create_task(one.unload("mirror", "1")),
        asyncio.create_task(one.set_route("mirror", Route(default_version="2"))),
    ]
    await until(lambda: "a" in other.routes.aliases)
    assert not any(task.done() for task in changing), "a worker that is still loading has not followed"
    late.start()
    await asyncio.gather(*changing)
    await other.set_alias("a", None)
    for host in (one, other, late):
        assert loaded(host) == ["mirror/2"]
        assert host.routes.models == {"mirror": Route(default_version="2")}
        assert not host.routes.aliases


async def test_a_worker_that_starts_loads_a_version_that_a_route_names_though_the_route_is_not_kept(
    make, tmp_path, store
):
    shutil.rmtree(store / "mirror" / "2")
    (tmp_path / "file").touch()
    server = make(routes_file=tmp_path / "file/routes.json", max_versions=1)
    one = server.start(0)
    await one.set_route("mirror", Route(default_version="1"))
    write(store, "2")
    await one.scan()
    assert loaded(one) == ["mirror/1", "mirror/2"]
    assert loaded(server.start(1)) == ["mirror/1", "mirror/2"]


async def test_a_file_of_routes_that_was_changed_since_the_last_call_wins_in_a_worker_that_starts(make, tmp_path):
    file = tmp_path / "routes.json"
    server = make(routes_file=file)
    one = server.start(0)
    await one.set_alias("news", Alias(model="mirror"))
    file.write_text('{"aliases": {"words": {"model": "mirror"}}}')
    assert list(server.start(1).routes.aliases) == ["words"]


async def test_a_call_fails_by_the_name_of_the_worker_that_cannot_follow(make, tmp_path, store):
    server = make()
    shutil.copytree(store, tmp_path / "other")
    one = server.start(0)
    server.start(1, server.settings.model_copy(update={"store": tmp_path / "other"}))
    write(store, "3")
    with pytest.raises(BundleRejectedError, match=r"not by others: worker 1: the store has no bundle mirror/3"):
        await one.load("mirror", "3")
    with pytest.raises(BundleRejectedError, match=r"not by others: worker 1: model mirror has no version '3'"):
        await one.set_route("mirror", Route(default_version="3"))
    await one.set_route("mirror", Route(default_version="2"))


async def test_a_call_waits_for_no_worker_that_has_ended_and_for_none_once_the_supervisor_has(make):
    server = make()
    one = server.start(0)
    server.begin(1)
    waiting = asyncio.create_task(one.unload("mirror", "1"))
    await until(lambda: loaded(one) == ["mirror/2"])
    assert not waiting.done()
    server.supervisor.forget(1)
    await waiting
    server.begin(1)
    orphan = server.start(2, supervisor=os.getpid())  # which is not its parent
    with pytest.raises(DrainingError, match="shutting down"):
        await orphan.set_alias("news", Alias(model="mirror"))


async def test_what_a_worker_has_written_that_ended_before_it_told_others_holds_in_all_once_it_is_replaced(make):
    server = make()
    one = server.start(0)
    agreement = server.agreement(1)
    agreement.write(agreement.read().with_bundles({"mirror/1": False}))
    assert loaded(server.start(1)) == ["mirror/2"]
    await until(lambda: loaded(one) == ["mirror/2"])


async def test_a_worker_speaks_for_the_health_of_all(make):
    server = make()
    one, other = server.start(0), server.start(1)
    assert one.unhealthy(stall_timeout_s=0) == {}
    other.models[0].close()
    assert list(other.unhealthy(stall_timeout_s=0)) == ["mirror/1"]
    assert one.unhealthy(stall_timeout_s=0) == {
        "worker 1": "1 of its models are out of order; its own lines of the log name them"
    }
    server.supervisor.forget(1)
    assert one.unhealthy(stall_timeout_s=0) == {}


@pytest.fixture
def counts() -> Iterator[Counts]:
    fd = Counts.create(1)
    yield Counts(fd, index=0, num_workers=1)
    os.close(fd)


@contextmanager
def holding_the_turn(fd: int) -> Iterator[None]:
    """Another process has the turn, and is killed in the end."""
    code = f"from headway_server.serving.counts import Counts as C; c = C({fd}, index=0, num_workers=1)"
    command = [sys.executable, "-u", "-c", f"{code}; print(c.try_lock()); input()"]
    with subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"True\n"
            yield
        finally:
            other.kill()


async def test_the_turn_is_one_for_all_processes_and_ends_with_the_process_that_has_it(counts, tmp_path):
    agreement = Agreement(tmp_path, counts, index=0, supervisor=os.getppid())
    with holding_the_turn(counts._fd):
        assert not counts.try_lock()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02), agreement.turn():
                pass
    async with agreement.turn():
        pass
