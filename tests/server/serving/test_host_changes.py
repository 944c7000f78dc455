"""Loading, replacing and unloading models while calls are answered."""

import asyncio
import contextlib
import gc
import weakref
from pathlib import Path

import pytest
import tiny_bundles
from tiny_family import FAMILY, MAY_GO_ON
from waiting import until

from headway_server.bundles import Task
from headway_server.errors import (
    BundleRejectedError,
    DrainingError,
    InvalidInputError,
    ModelNotFoundError,
    StoreError,
    StoreUnavailableError,
)
from headway_server.observers import Observer
from headway_server.runtime import Runtime
from headway_server.serving.calls import Calls
from headway_server.serving.host import BundleStatus, ModelHost, ModelState
from headway_server.settings import ServerSettings
from headway_server.tasks.table import CLASSIFY_TEXTS, FAMILIES

TASK = Task.TEXT_CLASSIFICATION


def write(store: Path, description: str, *, name: str = "mirror", version: str = "1") -> None:
    """Writes a bundle of the tiny family, over the one that is there."""
    tiny_bundles.write_topic_bundle(store, name=name, version=version, replace=True, description=description)


class Recorder(Observer):
    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []

    def model_changed(self, event) -> None:
        self.changes.append((f"{event.model.name}/{event.model.version}", event.state))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
async def host(tmp_path, runtime: Runtime, recorder):
    write(tmp_path, "old")
    settings = ServerSettings(store=tmp_path, drain_timeout=10)
    opened = ModelHost.open(runtime, settings, families={**FAMILIES, TASK: FAMILY}, observer=recorder)
    opened.start()
    yield opened
    opened.close()


@pytest.fixture
def calls() -> Calls:
    return Calls()


async def ask(host: ModelHost, calls: Calls, *, pause_s: float = 0.0, version: str = "") -> str:
    async with calls.answer("/reverse"):
        model = host.find(CLASSIFY_TEXTS, "mirror", version)
        await asyncio.sleep(pause_s)
        return (await model.reverse(["ab"], pause_s=pause_s)).results[0]


async def test_a_bundle_that_was_added_is_loaded_and_found(host, calls, tmp_path):
    write(tmp_path, "new", version="2")
    model = await host.load("mirror", "2")
    assert model.is_alive
    assert await ask(host, calls) == "ba by new"
    assert await ask(host, calls, version="1") == "ba by old"
    assert [bundle.state for bundle in host.bundles] == [ModelState.READY, ModelState.READY]


@pytest.fixture
def slow_load():
    """What lets a bundle that loads slowly go on."""
    MAY_GO_ON.clear()
    yield MAY_GO_ON
    MAY_GO_ON.set()


async def test_calls_are_answered_while_a_bundle_is_loaded(host, calls, tmp_path, slow_load):
    write(tmp_path, "slow", version="2")
    loading = asyncio.create_task(host.load("mirror", "2"))
    await until(lambda: len(host.bundles) == 2)
    assert host.bundles[1] == BundleStatus(path="mirror/2", state=ModelState.LOADING)
    assert await ask(host, calls) == "ba by old"
    assert not loading.done()
    slow_load.set()
    await loading
    assert await ask(host, calls) == "ba by slow"


async def test_a_call_keeps_the_model_it_found_and_the_old_one_is_closed_after_its_last_call(host, calls, tmp_path):
    [old] = host.models
    running = asyncio.create_task(ask(host, calls, pause_s=0.1))
    await until(lambda: calls.num_running == 1)
    write(tmp_path, "new")
    new = await host.load("mirror", "1")
    assert host.models == (new,)
    assert await ask(host, calls) == "ba by new"
    assert not old.is_closed
    assert await running == "ba by old"
    await until(lambda: old.is_closed)
    assert host.unhealthy(stall_timeout_s=60) == {}


async def test_no_call_fails_while_a_model_is_replaced_again_and_again(host, calls, tmp_path):
    answers: list[str] = []
    is_over = False

    async def keep_asking() -> None:
        while not is_over:
            answers.append(await ask(host, calls, pause_s=0.002))

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(keep_asking())
        for number in range(5):
            write(tmp_path, f"copy {number}")
            await host.load("mirror", "1")
            await asyncio.sleep(0.02)
        is_over = True
    assert {"ba by old", "ba by copy 0", "ba by copy 4"} <= set(answers)
    await until(lambda: not host._leaving)


async def test_a_bad_copy_is_refused_with_its_reason_and_the_old_one_goes_on(host, calls, tmp_path, recorder):
    write(tmp_path, "broken")
    with pytest.raises(BundleRejectedError, match="mirror/1: its mirror is broken"):
        await host.load("mirror", "1")
    assert await ask(host, calls) == "ba by old"
    assert host.bundles == (BundleStatus(path="mirror/1", state=ModelState.READY, reason="its mirror is broken"),)
    assert host.rejected == ()
    assert host.unhealthy(stall_timeout_s=60) == {}
    assert recorder.changes[-1] == ("mirror/1", "failed")
    write(tmp_path, "mended")
    await host.load("mirror", "1")
    assert host.bundles == (BundleStatus(path="mirror/1", state=ModelState.READY),)
    assert await ask(host, calls) == "ba by mended"


async def test_a_bundle_that_cannot_be_loaded_is_rejected_and_can_be_forgotten(host, tmp_path):
    (tmp_path / "mirror" / "7").mkdir()
    with pytest.raises(BundleRejectedError, match=r"bundle\.json is missing"):
        await host.load("mirror", "7")
    [rejected] = host.rejected
    assert (rejected.path, rejected.state) == ("mirror/7", ModelState.REJECTED)
    await host.unload("mirror", "7")
    assert host.rejected == ()


@pytest.mark.parametrize("version", ["8", ""])
async def test_a_bundle_that_the_store_does_not_have_is_not_found_and_leaves_no_trace(host, version):
    with pytest.raises(ModelNotFoundError, match="the store has no"):
        await host.load("other", version)
    assert len(host.bundles) == 1


@pytest.mark.parametrize(("name", "version"), [("../mirror", "1"), ("mirror", "../1"), ("", ""), ("mirror\n", "1")])
async def test_a_name_that_leads_out_of_the_store_is_refused(host, name, version):
    with pytest.raises(InvalidInputError):
        await host.load(name, version)


async def test_an_unloaded_model_is_found_no_more_and_leaves_the_server_healthy(host, calls, recorder):
    [model] = host.models
    running = asyncio.create_task(ask(host, calls, pause_s=0.05))
    await until(lambda: calls.num_running == 1)
    unloading = asyncio.create_task(host.unload("mirror", "1"))
    await until(lambda: not host.models)
    assert [bundle.state for bundle in host.bundles] == [ModelState.UNLOADING]
    with pytest.raises(ModelNotFoundError, match="model 'mirror' is not loaded; loaded are none"):
        await ask(host, calls)
    assert not model.is_closed
    assert await running == "ba by old"
    await unloading
    assert model.is_closed
    assert host.bundles == (BundleStatus(path="mirror/1", state=ModelState.AVAILABLE),)
    assert host.unhealthy(stall_timeout_s=60) == {}
    assert host.serving(stall_timeout_s=60) == set()
    states = [state for _, state in recorder.changes]
    assert states == ["loading", "ready", "unloading", "unloaded"]
    await host.unload("mirror", "1")  # which it is
    with pytest.raises(ModelNotFoundError):
        await host.unload("mirror", "2")


async def test_calls_that_take_longer_than_an_unload_waits_are_cut_off(host, calls):
    running = asyncio.create_task(ask(host, calls, pause_s=0.2))
    await until(lambda: calls.num_running == 1)
    await host.unload("mirror", "1", timeout_s=0.01)
    with pytest.raises(DrainingError):
        await running


async def test_a_change_is_made_though_its_caller_goes(host, tmp_path, slow_load):
    write(tmp_path, "slow", version="2")
    loading = asyncio.create_task(host.load("mirror", "2"))
    await until(lambda: len(host.bundles) == 2)
    loading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await loading
    slow_load.set()
    await until(lambda: len(host.models) == 2)


async def test_what_is_loaded_when_the_host_closes_is_closed_too(host, tmp_path, slow_load):
    write(tmp_path, "slow", version="2")
    loading = asyncio.create_task(host.load("mirror", "2"))
    await until(lambda: len(host.bundles) == 2)
    closing = asyncio.create_task(asyncio.to_thread(host.close))
    await asyncio.sleep(0.02)
    assert not closing.done()
    slow_load.set()
    assert await closing
    with pytest.raises(DrainingError, match="nothing is loaded any more"):
        await loading


async def test_a_host_without_a_store_loads_nothing():
    with pytest.raises(StoreUnavailableError, match="the server has no store"):
        await ModelHost().load("mirror", "1")


async def test_a_model_that_does_not_fit_into_memory_is_rejected_and_the_others_are_served(tmp_path, runtime):
    write(tmp_path, "fits", name="small")
    write(tmp_path, "huge", name="large")
    host = ModelHost.open(runtime, ServerSettings(store=tmp_path), families={**FAMILIES, TASK: FAMILY})
    assert [model.bundle.manifest.name for model in host.models] == ["small"]
    assert host.rejected == (BundleStatus(path="large/1", state=ModelState.REJECTED, reason="large: does not fit"),)
    with pytest.raises(BundleRejectedError, match="large/1: large: does not fit"):
        await host.load("large", "1")


def test_a_precision_that_no_bundle_has_ends_the_start(tmp_path, runtime):
    tiny_bundles.write_topic_bundle(tmp_path)
    with pytest.raises(StoreError, match=r"topics/1: has no int8 variant \(it has fp32\)"):
        ModelHost.open(runtime, ServerSettings(store=tmp_path, precision="int8"))


async def test_real_models_are_replaced_under_load(tmp_path, runtime):
    """The topic model itself, its batcher's threads included."""
    from headway_server.tasks.text.model import TextInputs

    tiny_bundles.write_topic_bundle(tmp_path)
    host, calls, num_answers = ModelHost.open(runtime, ServerSettings(store=tmp_path)), Calls(), 0
    host.start()

    async def keep_asking(end: asyncio.Event) -> None:
        nonlocal num_answers
        while not end.is_set():
            async with calls.answer("/classify"):
                model = host.find(CLASSIFY_TEXTS, "", "")
                inputs = TextInputs(texts=["goal team"])
                answer = await model.classify(inputs, top_k=1, deadline=None)
            assert answer.results[0].labels[0].label == "sports"
            num_answers += 1

    end = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(keep_asking(end))
        for _ in range(3):
            before = num_answers
            await host.load("topics", "1")
            await until(lambda before=before: num_answers > before + 10)
        end.set()
    await until(lambda: not host._leaving)
    assert await asyncio.to_thread(host.close)


async def test_nothing_holds_a_real_model_that_was_unloaded(tmp_path, runtime):
    """Its memory is free when `unload` returns, without the garbage collector."""
    from headway_server.tasks.text.model import TextInputs

    tiny_bundles.write_topic_bundle(tmp_path)
    tiny_bundles.write_topic_bundle(tmp_path, version="2")
    host, calls = ModelHost.open(runtime, ServerSettings(store=tmp_path)), Calls()
    host.start()
    gc.disable()
    try:
        async with calls.answer("/classify"):
            model = host.find(CLASSIFY_TEXTS, "topics", "2")
            await model.classify(TextInputs(texts=["goal team"]), top_k=1, deadline=None)
        alive = weakref.ref(model)
        del model
        await host.unload("topics", "2")
        assert alive() is None, gc.get_referrers(alive())
    finally:
        gc.enable()
    assert await asyncio.to_thread(host.close)
