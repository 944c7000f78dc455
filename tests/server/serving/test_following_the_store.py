"""The store changes while calls are answered: new, changed, half copied, broken, gone, stalled."""

import asyncio
import errno
import os
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import tiny_bundles
from tiny_family import FAMILY
from waiting import until

from headway_server.bundles import Task, VersionSettings, listing
from headway_server.errors import (
    BundleError,
    BundleRejectedError,
    MachineBusyError,
    MemoryUnavailableError,
    ModelNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from headway_server.runtime import Runtime
from headway_server.serving import host as host_module
from headway_server.serving.calls import Calls
from headway_server.serving.host import ModelHost, ModelState
from headway_server.serving.routes import Alias, Route, Routes, read_routes, write_routes
from headway_server.settings import ServerSettings
from headway_server.tasks.table import CLASSIFY_TEXTS, FAMILIES

TASK = Task.TEXT_CLASSIFICATION
OFF = 0


def write(store: Path, version: str, description: str = "", *, name: str = "mirror") -> Path:
    """Writes a bundle of the tiny family, over the one that is there; answers name its description."""
    text = description or f"version {version}"
    return tiny_bundles.write_topic_bundle(store, name=name, version=version, replace=True, description=text).path


@pytest.fixture
def open_host(tmp_path: Path, runtime: Runtime):
    """Opens hosts on a store with version 1; by default they look only when asked."""
    opened: list[ModelHost] = []
    write(tmp_path, "1")

    def open_one(**versions: object) -> ModelHost:
        settings = ServerSettings(
            store=tmp_path, drain_timeout=10, versions=VersionSettings(**{"poll_interval": OFF, **versions})
        )
        host = ModelHost.open(runtime, settings, families={**FAMILIES, TASK: FAMILY})
        opened.append(host)
        host.start()
        return host

    yield open_one
    for host in opened:
        host.close()


def states(host: ModelHost) -> dict[str, str]:
    return {bundle.path: str(bundle.state) for bundle in host.bundles}


def reasons(host: ModelHost) -> dict[str, str | None]:
    return {bundle.path: bundle.reason for bundle in host.bundles}


async def ask(host: ModelHost, *, name: str = "mirror", version: str = "") -> str:
    async with Calls().answer("/reverse"):
        return (await host.find(CLASSIFY_TEXTS, name, version).reverse(["a"])).results[0].removeprefix("a by ")


async def poll(host: ModelHost) -> None:
    """One look of those that nobody asks for."""
    await host._scan(is_asked_for=False)


# New, changed and gone


async def test_a_new_version_is_noticed_and_answers_and_both_are_there(open_host, tmp_path):
    host = open_host(poll_interval=0.02)
    write(tmp_path, "2")
    await until(lambda: len(host.models) == 2)
    assert await ask(host) == "version 2"
    assert await ask(host, version="1") == "version 1"


async def test_what_is_found_by_chance_is_loaded_at_the_second_look_and_what_is_asked_for_at_once(open_host, tmp_path):
    host = open_host()
    write(tmp_path, "2")
    await poll(host)
    assert states(host)["mirror/2"] == "available"
    await poll(host)
    assert states(host)["mirror/2"] == "ready"
    write(tmp_path, "3")
    changed = await host.scan()
    assert [(bundle.path, bundle.state) for bundle in changed] == [("mirror/3", ModelState.READY)]
    assert await host.scan() == ()


async def test_with_one_version_at_a_time_the_old_one_is_taken_out_when_the_new_one_is_ready(open_host, tmp_path):
    host = open_host(max_versions=1)
    [old] = host.models
    write(tmp_path, "2")
    await host.scan()
    assert await ask(host) == "version 2"
    await until(lambda: old.is_closed)
    await until(lambda: states(host) == {"mirror/1": "available", "mirror/2": "ready"})
    await host.scan()
    assert states(host)["mirror/1"] == "available"


async def test_a_bad_version_is_refused_with_its_reason_and_the_old_one_serves_on(open_host, tmp_path):
    host = open_host(max_versions=1)
    write(tmp_path, "2", "broken")
    with structlog.testing.capture_logs() as log:
        [changed] = await host.scan()
        await host.scan()
        await poll(host)
    assert (changed.path, changed.state, changed.reason) == ("mirror/2", ModelState.REJECTED, "its mirror is broken")
    assert [line["event"] for line in log if line["log_level"] == "error"] == ["bundle rejected"]  # tried once
    assert await ask(host) == "version 1"
    write(tmp_path, "2", "mended")
    await host.scan()
    assert await ask(host) == "mended"


async def test_a_version_that_is_replaced_in_place_is_loaded_anew(open_host, tmp_path):
    host = open_host()
    write(tmp_path, "1", "another")
    [changed] = await host.scan()
    assert (changed.path, changed.state) == ("mirror/1", ModelState.READY)
    assert await ask(host) == "another"


async def test_files_that_are_only_copied_again_are_not_loaded_again(open_host, tmp_path):
    host = open_host()
    [model] = host.models
    for file in (tmp_path / "mirror" / "1").iterdir():
        os.utime(file, (1, 1))
    assert await host.scan() == ()
    assert host.models == (model,)


async def test_a_version_whose_folder_has_gone_is_taken_out_at_the_second_look(open_host, tmp_path):
    write(tmp_path, "2")
    host = open_host()
    shutil.rmtree(tmp_path / "mirror" / "2")
    await host.scan()
    assert await ask(host) == "version 2"
    await host.scan()
    assert await ask(host) == "version 1"
    await until(lambda: states(host)["mirror/2"] == "available")
    await host.scan()
    assert states(host) == {"mirror/1": "ready"}


async def test_a_version_that_a_route_names_is_served_on_though_its_folder_has_gone(open_host, tmp_path):
    write(tmp_path, "2")
    host = open_host()
    await host.set_route("mirror", Route(default_version="1"))
    shutil.rmtree(tmp_path / "mirror" / "1")
    for _ in range(3):
        await host.scan()
    assert await ask(host) == "version 1"
    assert "its folder was removed" in (reasons(host)["mirror/1"] or "")


async def test_a_store_that_is_empty_all_at_once_takes_nothing_out(open_host, tmp_path):
    """So looks a volume that is not mounted."""
    host = open_host()
    shutil.rmtree(tmp_path / "mirror")
    for _ in range(3):
        await host.scan()
    assert await ask(host) == "version 1"


# Half copied


async def test_a_half_copied_bundle_waits_without_noise_until_it_is_whole(open_host, tmp_path):
    host = open_host(poll_interval=0.02)
    source = write(tmp_path / ".elsewhere", "2")
    target = tmp_path / "mirror" / "2"
    target.mkdir()
    files = sorted(source.iterdir(), key=lambda file: file.name != "bundle.json")  # the manifest first
    with structlog.testing.capture_logs() as log:
        for file in files:
            content = file.read_bytes()
            for size in (len(content) // 2, len(content)):
                (target / file.name).write_bytes(content[:size])
                if (file, size) != (files[-1], len(content)):
                    await asyncio.sleep(0.05)
                    await until(lambda: states(host).get("mirror/2") == "incomplete")
                    assert await ask(host) == "version 1"
        await until(lambda: len(host.models) == 2)
    assert await ask(host) == "version 2"
    assert [line for line in log if line["log_level"] in ("warning", "error")] == []


async def test_what_is_missing_of_a_bundle_is_told(open_host, tmp_path):
    host = open_host()
    folder = write(tmp_path, "2")
    (folder / "model.onnx").write_bytes(b"x")
    [bundle] = await host.scan()
    assert bundle.state is ModelState.INCOMPLETE
    assert bundle.reason is not None
    assert bundle.reason.startswith("model.onnx has 1 of the ")
    (folder / "model.onnx").unlink()
    [bundle] = await host.scan()
    assert bundle.reason == "model.onnx is missing"
    (folder / "bundle.json").unlink()
    [bundle] = await host.scan()
    assert bundle.reason == "bundle.json is missing; export the model again"


async def test_a_loaded_version_whose_files_are_being_overwritten_serves_on(open_host, tmp_path):
    host = open_host()
    (tmp_path / "mirror" / "1" / "model.onnx").write_bytes(b"half")
    await host.scan()
    assert await ask(host) == "version 1"
    assert states(host) == {"mirror/1": "ready"}
    assert (reasons(host)["mirror/1"] or "").startswith("model.onnx has 4 of the ")


async def test_a_bundle_with_the_right_sizes_and_other_bytes_is_rejected_by_its_hash(open_host, tmp_path):
    host = open_host()
    file = write(tmp_path, "2") / "model.onnx"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    [bundle] = await host.scan()
    assert bundle.state is ModelState.REJECTED
    assert "model.onnx has SHA-256" in (bundle.reason or "")


async def test_a_bundle_that_is_swapped_while_it_is_loaded_is_not_served(open_host, tmp_path, monkeypatch):
    """Its manifest would be that of one bundle and its graph that of another."""
    host = open_host()
    write(tmp_path, "2", "first")
    load = FAMILIES[TASK].load

    def swap_and_load(self, *arguments):
        monkeypatch.undo()
        write(tmp_path, "2", "second")
        return load(*arguments)

    monkeypatch.setattr(type(FAMILY), "load", swap_and_load)
    with pytest.raises(BundleRejectedError, match="was changed while it was loaded"):
        await host.load("mirror", "2")
    assert await ask(host) == "version 1"
    await host.scan()
    assert await ask(host) == "second"


# Paths that lead outside


@pytest.mark.parametrize("name", ["model.onnx", "bundle.json", "tokenizer.json"])
async def test_a_link_that_leads_out_of_the_bundle_is_refused(open_host, tmp_path, name):
    host = open_host()
    folder = write(tmp_path, "2")
    shutil.move(folder / name, tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    [bundle] = await host.scan()
    assert bundle.state is ModelState.REJECTED
    assert bundle.reason == f"{name} is a link that leads out of the bundle; copy the file there"


async def test_a_version_may_itself_be_a_link(open_host, tmp_path):
    host = open_host()
    (tmp_path / "mirror" / "2").symlink_to(write(tmp_path / ".elsewhere", "2"))
    await host.scan()
    assert await ask(host) == "version 2"


@pytest.mark.parametrize("name", ["model.onnx", "bundle.json"])
async def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(open_host, tmp_path, name):
    host = open_host()
    folder = write(tmp_path, "2")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    async with asyncio.timeout(5):
        await host.scan()
        with pytest.raises(BundleRejectedError):
            await host.load("mirror", "2")
    assert await ask(host) == "version 1"


async def test_a_manifest_that_names_a_path_outside_is_refused(open_host, tmp_path):
    host = open_host()
    folder = write(tmp_path, "2")
    manifest = (folder / "bundle.json").read_text()
    (tmp_path / "mirror" / "secret").write_bytes((folder / "model.onnx").read_bytes())
    (folder / "bundle.json").write_text(manifest.replace('"model.onnx"', '"../secret"'))
    with pytest.raises(BundleRejectedError, match="files"):
        await host.load("mirror", "2")


# A store that cannot be read, or not in time


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch):
    """Makes every look at a store wait, as a network mount that stalls does, until the returned event is set."""
    may_go_on = threading.Event()
    look = listing.subfolders

    def wait(folder: Path) -> list[Path]:
        assert may_go_on.wait(30)
        return look(folder)

    def begin() -> threading.Event:
        monkeypatch.setattr(listing, "subfolders", wait)
        return may_go_on

    yield begin
    may_go_on.set()


async def test_a_store_that_stalls_holds_nothing_up_and_is_found_again(open_host, tmp_path, stall):
    host = open_host(scan_timeout=0.05)
    may_go_on = stall()
    num_threads = threading.active_count()
    for _ in range(3):
        with pytest.raises(StoreUnavailableError, match=r"has not answered for 0\.05 s"):
            await host.scan()
    assert threading.active_count() == num_threads + 1
    assert host.store_problem == "the store has not answered for 0.05 s"
    assert await ask(host) == "version 1"
    write(tmp_path, "2")
    may_go_on.set()
    await asyncio.sleep(0.05)
    await host.scan()
    await host.scan()  # the first one may have had the answer of the look that stalled
    assert (host.store_problem, await ask(host)) == (None, "version 2")


async def test_a_host_closes_though_its_store_stalls(open_host, stall):
    host = open_host(poll_interval=0.01, scan_timeout=20)
    stall()
    await asyncio.sleep(0.05)
    async with asyncio.timeout(2):
        assert await asyncio.to_thread(host.close)


async def test_loading_that_takes_too_long_is_given_up_and_its_model_closed_later(open_host, tmp_path, monkeypatch):
    host, events = open_host(load_timeout=0.05), defaultdict(list)
    events["1"] = ["ready"]
    monkeypatch.setattr(host, "_report", lambda path, state, **_: events[path.partition("/")[2]].append(state))
    write(tmp_path, "2")
    may_go_on, made = threading.Event(), []
    load = type(FAMILY).load

    def slowly(self, *arguments):
        assert may_go_on.wait(30)
        made.append(load(self, *arguments))
        return made[-1]

    monkeypatch.setattr(type(FAMILY), "load", slowly)
    with pytest.raises(BundleRejectedError, match=r"mirror/2: has not been loaded after 0\.05 s"):
        await host.load("mirror", "2")
    assert await ask(host) == "version 1"
    write(tmp_path, "3")
    with pytest.raises(BundleRejectedError, match=r"mirror/3: is not loaded while mirror/2 is"):
        await host.load("mirror", "3")  # what takes too long takes memory too
    assert [changes[-1] for changes in events.values()] == ["ready", "failed", "failed"]
    may_go_on.set()
    await until(lambda: made and made[0].is_closed)
    assert len(host.models) == 1
    await host.load("mirror", "3")
    assert [len(host.models), len(made)] == [2, 2]
    assert events["2"] == ["loading", "failed"]  # nobody has ever been served by it
    assert events["3"][-1] == "ready"


def unreadable():
    error = BundleError("cannot be read (Stale file handle)")
    error.__cause__ = OSError(errno.ESTALE, "Stale file handle")
    return error


@pytest.mark.parametrize(
    "error", [MachineBusyError("the machine is busy"), MemoryUnavailableError("no room"), unreadable()]
)
async def test_what_failed_for_the_machines_sake_is_tried_again_when_asked_for_and_after_a_while(
    open_host, tmp_path, monkeypatch, error
):
    host = open_host(load_timeout=20)
    write(tmp_path, "2")
    load, failures, num_tries = type(FAMILY).load, [error] * 3, 0

    def unluckily(self, *arguments):
        nonlocal num_tries
        num_tries += 1
        if failures:
            raise failures.pop()
        return load(self, *arguments)

    monkeypatch.setattr(type(FAMILY), "load", unluckily)
    await host.scan()
    assert reasons(host)["mirror/2"] == str(error)
    await poll(host)
    assert num_tries == 1, "it is left alone for a while"
    host._entries["mirror/2"].next_try_at -= 20
    await poll(host)
    assert num_tries == 2
    host._entries["mirror/2"].next_try_at -= 20
    await poll(host)
    assert num_tries == 2, "for longer after each try"
    with pytest.raises(BundleRejectedError, match=re.escape(str(error))):
        await host.load("mirror", "2")
    await host.scan()
    assert (num_tries, await ask(host)) == (4, "version 2")


@pytest.mark.parametrize("damage", ["none", "found late"])
async def test_a_bundle_that_was_not_loaded_in_time_is_tried_again_when_that_try_has_ended(
    open_host, tmp_path, monkeypatch, damage
):
    host = open_host(load_timeout=0.05)
    write(tmp_path, "2")
    may_go_on, running, most = threading.Event(), 0, 0
    load = type(FAMILY).load

    def slowly(self, *arguments):
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            assert may_go_on.wait(30)
            if damage == "found late":
                raise BundleError("is damaged")
            return load(self, *arguments)
        finally:
            running -= 1

    monkeypatch.setattr(type(FAMILY), "load", slowly)
    with structlog.testing.capture_logs() as log:
        await host.scan()
        first = "has not been loaded after 0.05 s; it is tried again when this try has ended"
        assert reasons(host)["mirror/2"].startswith(first)
        await host.scan()  # which waits for nothing
        assert (running, reasons(host)["mirror/2"].startswith(first)) == (1, True)
        may_go_on.set()
        _, ending = host._overdue
        await asyncio.wait({ending})
        if damage == "found late":
            assert (states(host)["mirror/2"], reasons(host)["mirror/2"]) == ("rejected", "is damaged")
        monkeypatch.setattr(type(FAMILY), "load", load)
        host._entries["mirror/2"].next_try_at = 0
        await poll(host)
    expected = "version 1" if damage == "found late" else "version 2"
    assert (await ask(host), most) == (expected, 1)
    told = [line["reason"] if "reason" in line else line["event"] for line in log if line["log_level"] != "info"]
    assert told[0].startswith(first)
    assert told[1:] == ["is damaged" if damage == "found late" else "loading a bundle took too long; it is retried"]


async def test_a_store_that_has_gone_is_a_problem_that_is_told_once_and_takes_nothing_out(open_host, tmp_path):
    host = open_host()
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    tmp_path.rename(moved)
    with structlog.testing.capture_logs() as log:
        for _ in range(3):
            with pytest.raises(StoreUnavailableError, match=r"cannot be read \(No such file or directory\)"):
                await host.scan()
    assert [line["log_level"] for line in log] == ["error"]
    assert await ask(host) == "version 1"
    moved.rename(tmp_path)
    await host.scan()
    assert host.store_problem is None


async def test_a_panic_of_a_library_is_a_rejected_bundle_and_not_the_end(open_host, tmp_path, monkeypatch):
    class Panic(BaseException):
        pass

    def panic(*_: object) -> None:
        raise Panic

    host = open_host()
    write(tmp_path, "2")
    monkeypatch.setattr(type(FAMILY), "load", panic)
    with pytest.raises(BundleRejectedError, match="cannot be loaded; the server's log says why"):
        await host.load("mirror", "2")
    assert states(host)["mirror/2"] == "rejected"


# By request


async def test_what_was_unloaded_stays_so_until_it_is_asked_for(open_host, tmp_path):
    write(tmp_path, "2")
    host = open_host()
    await host.unload("mirror", "2")
    await host.scan()
    assert await ask(host) == "version 1"
    assert states(host)["mirror/2"] == "available"
    await host.load("mirror")
    assert await ask(host) == "version 2"


async def test_a_model_is_unloaded_with_all_its_versions(open_host, tmp_path):
    write(tmp_path, "2")
    host = open_host()
    await host.unload("mirror")
    assert host.models == ()
    assert set(states(host).values()) == {"available"}


async def test_an_old_version_that_was_asked_for_is_kept_beside_the_newest(open_host, tmp_path):
    for version in ("2", "3"):
        write(tmp_path, version)
    host = open_host(max_versions=1)
    assert [model.bundle.manifest.version for model in host.models] == ["3"]
    await host.load("mirror", "1")
    write(tmp_path, "4")
    await host.scan()
    await until(lambda: [model.bundle.manifest.version for model in host.models] == ["1", "4"])


async def test_a_host_that_starts_takes_the_newest_version_that_can_be_loaded(open_host, tmp_path):
    write(tmp_path, "2")
    write(tmp_path, "3", "broken")
    host = open_host(max_versions=1)
    assert states(host) == {"mirror/1": "available", "mirror/2": "ready", "mirror/3": "rejected"}


# Routes


async def test_a_default_version_an_alias_and_a_canary_decide_who_answers(open_host, tmp_path):
    write(tmp_path, "2")
    host = open_host()
    assert await host.set_route("mirror", Route(default_version="1")) is None
    assert await ask(host) == "version 1"
    assert await ask(host, name="") == "version 1"
    assert await ask(host, version="2") == "version 2"
    assert await host.set_alias("looking-glass", Alias(model="mirror", version="2")) is None
    assert await ask(host, name="looking-glass") == "version 2"
    await host.set_route("mirror", Route(default_version="1", canary_version="2", canary_share=0.5))
    answers = [await ask(host) for _ in range(100)]
    assert 20 < answers.count("version 2") < 80
    assert host.get("mirror", "").bundle.manifest.version == "1"
    await host.set_alias("looking-glass", None)
    with pytest.raises(ModelNotFoundError):
        await ask(host, name="looking-glass")


async def test_routes_outlast_a_restart_and_keep_their_versions_loaded(open_host, tmp_path):
    for version in ("2", "3"):
        write(tmp_path, version)
    first = open_host()
    await first.set_route("mirror", Route(default_version="1"))
    first.close()
    second = open_host(max_versions=1)
    assert [model.bundle.manifest.version for model in second.models] == ["1", "3"]
    assert await ask(second) == "version 1"


@pytest.mark.parametrize(
    "change",
    [
        lambda host: host.set_route("other", Route(default_version="1")),
        lambda host: host.set_route("other", Route()),
        lambda host: host.set_route("mirror", Route(default_version="7")),
        lambda host: host.set_route("mirror", Route(canary_version="7", canary_share=0.1)),
        lambda host: host.set_alias("a", Alias(model="other")),
        lambda host: host.set_alias("a", Alias(model="mirror", version="7")),
        lambda host: host.set_alias("a", None),
    ],
)
async def test_routes_to_what_is_not_loaded_are_refused(open_host, change: Callable[[ModelHost], object]):
    host = open_host()
    with pytest.raises(ModelNotFoundError):
        await change(host)
    assert host.routes == Routes()


async def test_a_route_can_be_taken_back_though_its_version_has_gone(open_host, tmp_path):
    host = open_host()
    await host.set_route("mirror", Route(default_version="1"))
    await host.unload("mirror", "1")
    write(tmp_path, "2")
    await host.scan()
    with pytest.raises(ModelNotFoundError, match="default version 1, which cannot answer now"):
        await ask(host)
    await host.set_route("mirror", Route())
    assert await ask(host) == "version 2"


async def test_routes_that_cannot_be_kept_hold_until_the_server_stops(open_host, tmp_path):
    write(tmp_path, "2")
    host = open_host(routes_file=tmp_path / "no-such-folder" / "routes.json")
    reason = await host.set_route("mirror", Route(default_version="1"))
    assert reason == "routes.json cannot be written (No such file or directory)"
    await host.scan()
    assert await ask(host) == "version 1"


async def test_a_change_of_routes_whose_file_stalls_holds_and_is_not_overtaken(open_host, tmp_path, monkeypatch):
    host = open_host(scan_timeout=0.05)
    may_go_on = threading.Event()

    def write_slowly(file: Path, routes: Routes) -> None:
        assert may_go_on.wait(30)
        write_routes(file, routes)

    monkeypatch.setattr(host_module, "write_routes", write_slowly)
    assert await host.set_alias("a", Alias(model="mirror")) == "the store has not answered for 0.05 s"
    assert await ask(host, name="a") == "version 1"
    with pytest.raises(StoreUnavailableError, match="an earlier change"):
        await host.set_alias("b", Alias(model="mirror"))
    may_go_on.set()
    await until((tmp_path / "routes.json").exists)
    await until(lambda: host._writing is not None and host._writing.done())
    await host.scan()
    assert set(host.routes.aliases) == {"a"}
    assert await host.set_alias("b", Alias(model="mirror")) is None


async def test_a_file_of_routes_that_changes_is_followed_and_a_wrong_one_changes_nothing(open_host, tmp_path):
    write(tmp_path, "2")
    host = open_host()
    write_routes(tmp_path / "routes.json", Routes().with_route("mirror", Route(default_version="1")))
    await host.scan()
    assert await ask(host) == "version 1"
    (tmp_path / "routes.json").write_text('{"modles": 1}')
    await host.scan()
    assert await ask(host) == "version 1"
    assert host.store_problem == "routes.json: modles is no setting; did you mean models?"
    with pytest.raises(StoreError, match="modles"):
        open_host()
    (tmp_path / "routes.json").unlink()
    await host.scan()
    assert (await ask(host), host.store_problem) == ("version 2", None)


async def test_changes_of_routes_that_come_together_are_all_kept(open_host, tmp_path):
    host = open_host()
    await asyncio.gather(*(host.set_alias(f"name{number}", Alias(model="mirror")) for number in range(8)))
    assert len(read_routes(tmp_path / "routes.json").aliases) == 8
