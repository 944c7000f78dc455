"""A graph of any named tensors: two float inputs and three outputs, in batches and one by one."""

import asyncio
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from headway_server.batching import Batcher, BatchGraph
from headway_server.batching.graph import measure_run, most_padding
from headway_server.bundles import Graph, TensorSpec
from headway_server.errors import BundleError
from headway_server.observers import ModelId
from headway_server.runtime import Cores, Session

FRAMES = TensorSpec(name="frames", dtype="float32", shape=("batch", "time", 2))
WEIGHTS = TensorSpec(name="weights", dtype="float32", shape=("batch", "time"))
MAP = TensorSpec(name="map", dtype="float32", shape=("batch", "time", 3))
TOTAL = TensorSpec(name="total", dtype="float32", shape=("batch", 2))
BEST = TensorSpec(name="best", dtype="int64", shape=("batch",))
OUTPUTS = (MAP, TOTAL, BEST)


def make_session(folder: Path, inputs=(FRAMES, WEIGHTS), outputs=OUTPUTS) -> Session:
    """A graph of frames, (T, 2), and their weights: a map, (T, 3), the weighted sum of frames, its larger column."""
    import onnxruntime

    types = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}

    def constant(name, value):
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))

    nodes = [
        constant("matrix", np.array([[1, 2, 3], [4, 5, 6]], np.float32)),
        constant("last", np.array([-1])),
        constant("middle", np.array([1])),
        helper.make_node("Unsqueeze", ["weights", "last"], ["columns"]),
        helper.make_node("Mul", ["frames", "columns"], ["weighted"]),
        helper.make_node("MatMul", ["weighted", "matrix"], ["map"]),
        helper.make_node("ReduceSum", ["weighted", "middle"], ["total"], keepdims=0),
        helper.make_node("ArgMax", ["total"], ["best"], axis=1, keepdims=0),
    ]
    tensors = [
        [helper.make_tensor_value_info(spec.name, types[spec.dtype], spec.shape) for spec in specs]
        for specs in ((FRAMES, WEIGHTS), OUTPUTS)
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "sounds", *tensors), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    onnx.save(model, folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    graph = Graph(file="model.onnx", inputs=inputs, outputs=outputs)
    return Session(session, graph=graph, device="cpu", cores=Cores(1))


def sounds(count: int) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(8)
    lengths = generator.integers(1, 12, count)
    return [
        {
            "frames": generator.normal(size=(length, 2)).astype(np.float32),
            "weights": generator.random(length).astype(np.float32),
        }
        for length in lengths
    ]


@pytest.fixture
def graph(tmp_path) -> BatchGraph:
    return BatchGraph(make_session(tmp_path))


def alone(graph: BatchGraph, item: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the graph's session answers to one item, without anything of ours."""
    return {name: tensor[0] for name, tensor in graph.session.run({k: v[None] for k, v in item.items()}).items()}


def test_items_of_any_sizes_are_answered_in_a_batch_as_one_by_one(graph):
    items = sounds(20)
    names = ("map", "total", "best")
    rows = graph.split(graph.run(graph.collate(items), names), items)
    for item, row in zip(items, rows, strict=True):
        expected = alone(graph, item)
        assert row["map"].shape == (len(item["frames"]), 3), "padding is cut off"
        for name in names:
            np.testing.assert_allclose(row[name], expected[name], rtol=1e-5, atol=1e-6)
            assert row[name].dtype == expected[name].dtype


async def test_callers_of_different_outputs_share_batches_and_get_their_own(graph):
    ran: list[tuple[int, list[str]]] = []
    run = graph.run
    graph.run = lambda inputs, outputs: (ran.append((len(inputs["frames"]), outputs)), run(inputs, outputs))[1]  # type: ignore[method-assign]
    batcher = Batcher(graph, budget=10_000, model=ModelId(name="sounds", version="1"))
    batcher.start()
    try:
        items = sounds(60)
        wanted = [("map",), ("total", "best"), ("best",)]
        with batcher._lanes:  # so that all of them wait
            calls = [
                asyncio.create_task(
                    batcher.submit(
                        items[start : start + 5],
                        [len(item["frames"]) for item in items[start : start + 5]],
                        outputs=wanted[start % 3],
                        deadline=None,
                    )
                )
                for start in range(0, 60, 5)
            ]
            await asyncio.sleep(0.05)
        for start, call in zip(range(0, 60, 5), calls, strict=True):
            for item, row in zip(items[start : start + 5], (await call).results, strict=True):
                expected = alone(graph, item)
                for name in wanted[start % 3]:
                    np.testing.assert_allclose(row[name], expected[name], rtol=1e-5, atol=1e-6)
    finally:
        batcher.close()
    assert max(count for count, _ in ran) > 5, "calls share batches"
    assert {name for _, names in ran for name in names} == {"map", "total", "best"}


async def test_only_the_outputs_that_are_asked_for_are_run(graph):
    ran: list[list[str]] = []
    run = graph.run
    graph.run = lambda inputs, outputs: (ran.append(outputs), run(inputs, outputs))[1]  # type: ignore[method-assign]
    batcher = Batcher(graph, budget=100, model=ModelId(name="sounds", version="1"))
    batcher.start()
    try:
        answer = await batcher.submit(sounds(1), [4], outputs=("total",), deadline=None)
    finally:
        batcher.close()
    assert list(answer.results[0]) == ["total"]
    assert ran == [["total"]]


def test_padding_is_what_the_graph_is_told_and_keeps_the_type_of_the_input(tmp_path):
    graph = BatchGraph(make_session(tmp_path), padding={"weights": 7})
    inputs = graph.collate([{"frames": np.ones((1, 2)), "weights": np.ones(1)}, *sounds(1)])
    assert inputs["weights"][0].tolist() == [1] + [7] * (inputs["weights"].shape[1] - 1)
    assert not inputs["frames"][0, 1:].any()
    assert {tensor.dtype for tensor in inputs.values()} == {np.dtype("float32")}


@pytest.mark.parametrize("shape", [("time", 3), ("rows", "time", 3), ("batch", "batch", 3), ()])
def test_a_tensor_whose_first_axis_is_not_the_batch_is_a_bad_bundle(tmp_path, shape):
    wrong = MAP.model_copy(update={"shape": shape})
    with pytest.raises(BundleError, match=r"model\.onnx: map has the axes"):
        BatchGraph(make_session(tmp_path, outputs=(wrong, TOTAL, BEST)))


def test_a_graph_that_does_not_answer_every_item_is_not_taken_apart(graph):
    with pytest.raises(ValueError, match="total has 3 rows of 2 items"):
        graph.split({"total": np.zeros((3, 2))}, sounds(2))


def test_the_first_run_tells_of_outputs_that_are_not_the_manifests(graph):
    item = sounds(1)[0]
    assert graph.warm_up(item, 4, {"total": (2,), "best": ()}) is not None
    for expected in ({"total": (3,)}, {"nothing": (2,)}):
        with pytest.raises(BundleError, match="of one input, by the manifest it is"):
            graph.warm_up(item, 4, expected)
    with pytest.raises(BundleError, match="does not run"):
        graph.warm_up(item | {"weights": np.ones((3, 3))}, 4, {})


@pytest.mark.parametrize(("long_s", "num_runs"), [(0.0, 1), (60.0, 5)])
def test_a_graph_that_takes_long_is_run_once(graph, monkeypatch, long_s, num_runs):
    runs, run = [], Session.run

    def counted(*args, **options):
        runs.append(args)
        return run(*args, **options)

    monkeypatch.setattr("headway_server.batching.graph._LONG_RUN_S", long_s)
    monkeypatch.setattr(Session, "run", counted)
    graph.warm_up(sounds(1)[0], 4, {"total": (2,)})
    assert len(runs) == num_runs


def test_a_small_graph_is_small_however_busy_the_machine_is(monkeypatch, graph):
    """What a model is found to be at its load holds for as long as it is loaded."""
    run = Session.run

    def interrupted(*args, **options):
        time.sleep(0.02)  # as long as another process has the core
        return run(*args, **options)

    monkeypatch.setattr(Session, "run", interrupted)
    session = graph.session
    session.num_lanes = 4
    assert measure_run(session, graph.collate(sounds(1))) < 2e-3
    assert session.num_lanes == 3


def test_the_lanes_of_a_small_graph_are_those_that_are_set(graph):
    session = graph.session
    session.num_lanes, session.lanes_are_set = 4, True
    measure_run(session, graph.collate(sounds(1)))
    assert session.num_lanes == 4


@pytest.mark.parametrize(("run_s", "expected"), [(10e-3, 6), (0.32e-3, 200), (1.0, 0)])
def test_padding_is_worth_runs_of_two_milliseconds(run_s, expected):
    assert most_padding(run_s, 32) == expected


def test_outputs_of_a_batch_are_postprocessed_together(tmp_path):
    batches = []

    def double(total):
        batches.append(len(total))
        return 2 * total

    items = sounds(3)
    graph = BatchGraph(make_session(tmp_path), postprocess={"total": double})
    outputs = graph.run(graph.collate(items), ("total", "best"))
    for index, row in enumerate(graph.split(outputs, items)):
        np.testing.assert_array_equal(row["total"], 2 * outputs["total"][index])
        np.testing.assert_array_equal(row["best"], outputs["best"][index])
    assert batches == [3]
