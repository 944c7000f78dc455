"""Models of named tensors: which calls share a run, what each gets of it, and what is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tensors
from tiny_tensors import weight

from headway_server.batching.settings import MAX_ROWS, BatchingSettings
from headway_server.bundles import open_bundle
from headway_server.errors import BundleError, DeadlineError, DrainingError, InvalidInputError, OverloadedError
from headway_server.observers import BatchEvent, Observer, QueueEvent
from headway_server.runtime import Runtime, Session
from headway_server.settings import ServerSettings
from headway_server.tasks.tensors.graph import num_bytes
from headway_server.tasks.tensors.model import TensorModel

Tensors = dict[str, np.ndarray]


class Runs(Observer):
    """Counts runs."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.left: list[str] = []

    def batch_finished(self, event: BatchEvent) -> None:
        self.sizes.append(event.num_items)

    def left_queue(self, event: QueueEvent) -> None:
        self.left.append(event.reason)


@pytest.fixture(scope="session")
def tensor_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of all tiny graphs."""
    store = tmp_path_factory.mktemp("tensors") / "store"
    tiny_tensors.publish(store, *tiny_tensors.GRAPHS)
    return store


Load = Callable[..., AbstractAsyncContextManager[tuple[TensorModel, Runs]]]


@pytest.fixture
def load(tensor_store: Path, runtime: Runtime) -> Load:
    """Loads and starts a model: `async with load("tabular", max_batch_rows=8) as (model, runs)`."""

    @asynccontextmanager
    async def start(name: str, **batching: int) -> AsyncIterator[tuple[TensorModel, Runs]]:
        runs = Runs()
        settings = ServerSettings(store=tensor_store, batching=BatchingSettings(**batching))
        model = TensorModel.load(open_bundle(tensor_store / name / "1"), runtime, settings, runs)
        model.start()
        try:
            yield model, runs
        finally:
            assert await asyncio.to_thread(model.close)

    return start


async def infer(model: TensorModel, deadline: float | None = None, **inputs: np.ndarray) -> Tensors:
    outputs = [spec.name for spec in model.outputs]
    [found] = (await model.infer(inputs, outputs=outputs, deadline=deadline)).results
    return dict(found)


def rows(count: int, seed: int = 0) -> Tensors:
    return {"numbers": weight(count, 3, seed=seed), "category": np.arange(count) % 5}


async def test_calls_share_a_run_and_each_gets_its_own_rows(load: Load) -> None:
    async with load("tabular", max_batch_rows=64) as (model, runs):
        asked = [rows(count, seed) for seed, count in enumerate((1, 3, 2, 7))]
        alone = [await infer(model, **one) for one in asked]
        assert runs.sizes == [1, 3, 2, 7]
        runs.sizes.clear()
        found = await asyncio.gather(*(infer(model, **one) for one in asked))
        assert runs.sizes == [13]
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(one["scores"], other["scores"], rtol=1e-5)
        assert one["label"].tolist() == other["label"].tolist()
        assert set(one["label"]) <= {"low", "médium", "high"}


async def test_a_large_call_runs_in_parts_and_is_joined(load: Load) -> None:
    async with load("tabular", max_batch_rows=8) as (model, runs):
        asked = rows(20)
        found = await infer(model, **asked)
        assert sorted(runs.sizes) == [4, 8, 8]
        single = [await infer(model, **{name: array[number : number + 1] for name, array in asked.items()})
                  for number in (0, 9, 19)]  # fmt: skip
    assert found["scores"].shape == (20, 3)
    for number, one in zip((0, 9, 19), single, strict=True):
        np.testing.assert_allclose(found["scores"][number], one["scores"][0], rtol=1e-5)
        assert found["label"][number] == one["label"][0]


async def test_an_output_without_the_batch_axis_is_whole_in_every_answer(load: Load) -> None:
    async with load("detector", max_batch_rows=4) as (model, runs):
        images = [weight(count, 3, 8, 8, seed=count) for count in (1, 2, 6)]
        found = await asyncio.gather(*(infer(model, image=image) for image in images))
        assert sum(runs.sizes) == 9
        assert max(runs.sizes) == 4
    for image, one in zip(images, found, strict=True):
        assert one["boxes"].shape == (len(image), 4, 4)
        np.testing.assert_array_equal(one["anchors"], weight(4, 4, seed=1))


async def test_calls_of_other_shapes_or_without_a_batch_axis_do_not_share_a_run(load: Load) -> None:
    async with load("series", max_batch_rows=64) as (model, runs):
        asked = [np.ones((2, size), np.float32) for size in (3, 5, 3, 5, 4)]
        found = await asyncio.gather(*(infer(model, values=values) for values in asked))
        assert sorted(runs.sizes) == [2, 4, 4]
        for values, one in zip(asked, found, strict=True):
            np.testing.assert_allclose(one["forecast"], np.tanh(values.cumsum(axis=1)), rtol=1e-5)
    async with load("mixing") as (model, runs):
        asked = [weight(count, 3, seed=count) for count in (2, 3)]
        found = await asyncio.gather(*(infer(model, x=x) for x in asked))
        assert runs.sizes == [1, 1]
        for x, one in zip(asked, found, strict=True):
            np.testing.assert_allclose(one["y"], x - x.mean(axis=0), atol=1e-6)
    async with load("single") as (model, _):
        found = await infer(model, x=np.ones((1, 4), np.float32), scale=np.array(2.5, np.float32))
        assert found["y"].tolist() == [[2.5] * 4]


async def test_a_call_that_the_graph_refuses_fails_alone_in_a_sentence(load: Load) -> None:
    async with load("tabular", max_batch_rows=64) as (model, runs):
        wrong = rows(1) | {"category": np.array([99])}
        found = await asyncio.gather(
            *(infer(model, **one) for one in (rows(2), wrong, rows(3))), return_exceptions=True
        )
        assert isinstance(found[1], InvalidInputError)
        assert str(found[1]) == (
            "inputs: cannot be computed by the graph at its operator Gather (vector); check their shapes and values, "
            "and how they fit each other"
        )
        assert [len(found[0]["scores"]), len(found[2]["scores"])] == [2, 3]
        assert len((await infer(model, **rows(4)))["scores"]) == 4, "and the model goes on"
        assert runs.left.count("started") == 4
    async with load("picky") as (model, _):
        with pytest.raises(InvalidInputError, match=r"operator Reshape \(paired\)"):
            await infer(model, x=np.ones((1, 3), np.float32))
        assert (await infer(model, x=np.ones((1, 4), np.float32)))["y"].tolist() == [[2, 2]]


WRONG: dict[str, tuple[str, Tensors, str]] = {
    "missing": ("tabular", {"numbers": weight(1, 3)}, "inputs: lack category; the model reads numbers, category"),
    "rank": (
        "tabular",
        {"numbers": weight(3), "category": np.zeros(3, np.int64)},
        "numbers: has 1 axes, [3]; must have 2, [batch, 3]",
    ),
    "size": (
        "tabular",
        {"numbers": weight(2, 4), "category": np.zeros(2, np.int64)},
        "numbers: has size 4 on axis 1; must be 3",
    ),
    "one name": (
        "tabular",
        {"numbers": weight(2, 3), "category": np.zeros(3, np.int64)},
        "category: has size 3 on axis 0 (batch), and axis 0 of numbers has 2; they must be equal",
    ),
    "no rows": ("series", {"values": weight(0, 3)}, "values: has size 0 on axis 0 (batch); must be at least 1"),
    "many rows": (
        "series",
        {"values": np.zeros((MAX_ROWS + 1, 1), np.float32)},
        f"values: has size {MAX_ROWS + 1} on axis 0 (batch); the limit is {MAX_ROWS}; send more in several calls",
    ),
    "fixed batch": (
        "single",
        {"x": weight(2, 4), "scale": np.array(1, np.float32)},
        "x: has size 2 on axis 0; must be 1",
    ),
}


@pytest.mark.parametrize("what", WRONG)
async def test_shapes_are_checked_before_anything_runs(load: Load, what: str) -> None:
    name, inputs, message = WRONG[what]
    async with load(name) as (model, runs):
        with pytest.raises(InvalidInputError) as refused:
            await infer(model, **inputs)
        assert str(refused.value) == message
        assert not runs.sizes


async def test_a_limit_of_an_axis_is_checked_and_warmed_up(
    tensor_store: Path, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(tensor_store / "series" / "1")
    limits = bundle.manifest.limits.model_copy(update={"max_axis_sizes": {"time": 40}})
    shapes: list[tuple[int, ...]] = []
    run = Session.run

    def spy(session: Session, feeds: Tensors, *arguments: Any, **options: Any) -> dict[str, np.ndarray]:
        shapes.append(feeds["values"].shape)
        return run(session, feeds, *arguments, **options)

    monkeypatch.setattr(Session, "run", spy)
    copied = type(bundle)(path=bundle.path, manifest=bundle.manifest.model_copy(update={"limits": limits}))
    settings = ServerSettings(store=tmp_path, batching=BatchingSettings(max_batch_rows=8))
    model = TensorModel.load(copied, runtime, settings)
    assert shapes[-1] == (8, 40)
    with pytest.raises(InvalidInputError, match=r"values: has size 41 on axis 1 \(time\); the limit is 40"):
        await infer(model, values=weight(1, 41))


async def test_waiting_calls_are_bounded_by_decoded_bytes_and_leave_with_their_callers(load: Load) -> None:
    texts = np.array([["a", "béé"]], object)
    assert num_bytes({"texts": texts}) == 2 * (8 + 64) + 4
    async with load("series", max_waiting_mib=1) as (model, _):
        large = {"values": np.ones((1, 2**18), np.float32)}  # a MiB
        found = await asyncio.gather(*(infer(model, **large) for _ in range(2)), return_exceptions=True)
        assert sum(isinstance(one, OverloadedError) for one in found) == 1
        with pytest.raises(DeadlineError):
            await infer(model, deadline=time.monotonic() - 1, values=weight(1, 3))
        waiting = asyncio.create_task(infer(model, values=weight(1, 3)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len((await infer(model, **large))["forecast"]) == 1
    with pytest.raises(DrainingError):
        await infer(model, values=weight(1, 3))


def test_the_rows_of_a_batch_follow_from_the_time_of_one() -> None:
    settings = BatchingSettings()
    assert [settings.batch_rows(run_s) for run_s in (None, 1e-6, 1e-3, 1.0)] == [64, 64, 10, 2]
    assert BatchingSettings(max_batch_rows=5).batch_rows(1e-6) == 5


def test_a_bundle_whose_examples_do_not_run_is_rejected(tensor_store: Path, tmp_path: Path, runtime: Runtime) -> None:
    tiny_tensors.publish(tmp_path / "store", "series")
    bundle = open_bundle(tmp_path / "store" / "series" / "1")
    np.savez(bundle.path / "examples.npz", other=np.ones(3))
    with pytest.raises(
        BundleError, match=r"does not run on examples.npz \(examples.npz has other; the graph reads values\)"
    ):
        TensorModel.load(bundle, runtime, ServerSettings(store=tmp_path))
