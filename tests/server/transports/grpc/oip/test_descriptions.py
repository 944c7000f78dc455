"""Health, metadata, configuration, statistics and the repository, by the real Triton client."""

import asyncio
import shutil
from functools import partial

import numpy as np
import pytest
import tiny_bundles
from open_inference import GENERATION, TRANSLATION, picture, text
from triton_client import TritonError

from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings


def test_server_and_models_are_ready(triton):
    assert triton("ask", "is_server_live")
    assert triton("ask", "is_server_ready")
    assert triton("ask", "is_model_ready", "topics")
    assert triton("ask", "is_model_ready", "topics", "1")
    assert not triton("ask", "is_model_ready", "topics", "2")
    assert not triton("ask", "is_model_ready", "nope")


def test_the_server_names_itself_and_its_extensions(triton):
    answer = triton("ask", "get_server_metadata")
    assert answer["name"] == "headway"
    assert {"model_repository", "statistics", "model_configuration"} <= set(answer["extensions"])


ARRAYS = {
    "topics": {"text": text("goal")},
    "pairs": {"text": text("goal")},
    "tagger": {"text": text("Ada")},
    "colours": {"image": np.array([picture((9, 9, 200))], object)},
    "hues": {"image": np.array([picture((9, 9, 200))], object)},
    "vectors": {"text": text("goal")},
    "scorer": {"text": text("goal")},
    GENERATION: {"text": text("the cat")},
    TRANSLATION: {"text": text("the cat")},
}


@pytest.mark.parametrize("model", ARRAYS)
def test_answers_are_as_the_metadata_and_the_configuration_say(triton, model):
    metadata = triton("ask", "get_model_metadata", model)
    config = triton("ask", "get_model_config", model)["config"]
    assert (metadata["name"], metadata["versions"]) == (model, ["1"])
    assert config["name"] == model
    for tensors, configured in ((metadata["inputs"], config["input"]), (metadata["outputs"], config["output"])):
        assert [tensor["name"] for tensor in tensors] == [tensor["name"] for tensor in configured]
        assert [tensor["shape"] for tensor in tensors] == [tensor["dims"] for tensor in configured]
        types = [tensor["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES") for tensor in configured]
        assert [tensor["datatype"] for tensor in tensors] == types
    required = {tensor["name"] for tensor in config["input"] if not tensor.get("optional")}
    assert required == ARRAYS[model].keys()
    is_decoder = model in (GENERATION, TRANSLATION)
    assert config["model_transaction_policy"].get("decoupled", False) is is_decoder

    answer = triton("infer", model, ARRAYS[model]).arrays
    assert answer.keys() == {tensor["name"] for tensor in metadata["outputs"]}
    dtypes = {"FP32": "float32", "INT64": "int64", "UINT64": "uint64", "BOOL": "bool", "BYTES": "object"}
    for tensor in metadata["outputs"]:
        array = answer[tensor["name"]]
        assert str(array.dtype) == dtypes[tensor["datatype"]], tensor
        assert array.ndim == len(tensor["shape"])
        for length, expected in zip(array.shape, map(int, tensor["shape"]), strict=True):
            assert expected in (-1, length)


PARTS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit")


def counts_of(triton, model: str) -> dict[str, int]:
    """What Triton's client reads of a model: numbers of inputs and runs, and of each part."""
    [found] = triton("ask", "get_inference_statistics", model)["model_stats"]
    parts = {name: int(found.get("inference_stats", {}).get(name, {}).get("count", 0)) for name in PARTS}
    runs = [batch["compute_infer"] for batch in found.get("batch_stats", ())]
    assert sum(int(run["count"]) for run in runs) == int(found.get("execution_count", 0))
    assert parts["queue"] == parts["compute_input"] == parts["compute_infer"] == parts["compute_output"]
    assert parts["success"] == parts["queue"] + parts["cache_hit"]
    return {"inputs": int(found.get("inference_count", 0)), "runs": int(found.get("execution_count", 0)), **parts}


COMPUTED = {name: 1 for name in PARTS if name not in ("fail", "cache_hit")}
PIXELS = np.zeros((3, 3, 8, 8), np.float32)


@pytest.mark.parametrize(
    ("model", "inputs", "parameters", "expected"),
    [
        ("topics", {"text": text("goal", "atom")}, {}, COMPUTED | {"inputs": 2, "runs": (1, 2)}),
        ("colours", {"pixel_values": PIXELS}, {}, COMPUTED | {"inputs": 3, "runs": (1, 3)}),
        (GENERATION, {"text": text("the cat", "a")}, {"max_new_tokens": 3}, COMPUTED | {"inputs": 2, "runs": (3, 9)}),
        (TRANSLATION, {"text": text("the cat")}, {"max_new_tokens": 3}, COMPUTED | {"inputs": 1, "runs": (1, 9)}),
        ("topics", {"text": text("goal", "")}, {}, {"fail": 1}),
        ("colours", {"image": text("nothing")}, {}, {"fail": 1}),
        ("topics", {"text": text("goal")}, {"nothing": 1}, {"fail": 1}),
    ],
)
def test_statistics_count_as_triton_documents(triton, model, inputs, parameters, expected):
    before = counts_of(triton, model)
    try:
        triton("infer", model, inputs, parameters=parameters)
    except TritonError:
        assert "fail" in expected
    after = counts_of(triton, model)
    runs = after.pop("runs") - before.pop("runs")
    least, most = expected.get("runs", (0, 0))
    assert least <= runs <= most
    increase = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert increase == {name: count for name, count in expected.items() if name != "runs"}


def test_a_call_that_a_cache_answers_is_counted_as_such(serve_in_thread, runtime, tmp_path, triton_calls):
    tiny_bundles.write_colour_bundle(tmp_path)
    settings = ServerSettings(store=tmp_path, port=0, max_image_outputs_mib=1)
    caching = serve_in_thread(lambda observer: ModelHost.open(runtime, settings, observer=observer), settings)
    triton = partial(triton_calls, caching.port)
    images = {"image": np.array([picture((200, 1, 2))], object)}
    triton("infer", "colours", images)
    before = counts_of(triton, "colours")
    triton("infer", "colours", images)
    after = counts_of(triton, "colours")
    assert {name: after[name] - count for name, count in before.items() if after[name] != count} == {
        "success": 1,
        "cache_hit": 1,
    }


def test_what_describes_a_model_is_no_inference(triton):
    before = counts_of(triton, "topics")
    for method in ("get_model_metadata", "get_model_config", "is_model_ready", "get_inference_statistics"):
        triton("ask", method, "topics")
    triton("ask", "get_model_repository_index")
    assert counts_of(triton, "topics") == before


def test_times_of_statistics_are_parts_of_the_calls_and_of_the_runs(triton):
    def totals() -> dict[str, int]:
        [found] = triton("ask", "get_inference_statistics", "topics")["model_stats"]
        parts = {name: int(found["inference_stats"].get(name, {}).get("ns", 0)) for name in PARTS}
        runs = sum(int(batch["compute_infer"]["ns"]) for batch in found["batch_stats"])
        return parts | {"runs": runs, "last": int(found["last_inference"])}

    triton("infer", "topics", {"text": text("goal")})
    before = totals()
    triton("infer", "topics", {"text": text("goal", "match", "atom")})
    after = totals()
    parts = {name: after[name] - before[name] for name in after}
    for name in ("success", "queue", "compute_input", "compute_infer", "runs"):
        assert parts[name] > 0, name
    assert parts["success"] >= parts["queue"] + parts["compute_input"] + parts["compute_infer"]
    assert parts["compute_output"] == parts["fail"] == 0
    assert after["last"] >= before["last"] > 1.7e12
    every = triton("ask", "get_inference_statistics")["model_stats"]
    assert [model["name"] for model in every] == sorted(model["name"] for model in every)
    assert len(every) == 10


@pytest.fixture
def changing(serve_in_thread, runtime, tmp_path):
    """A server on a store of its own, with two versions of a model."""
    tiny_bundles.write_topic_bundle(tmp_path, version="1")
    tiny_bundles.write_topic_bundle(tmp_path, version="2")
    settings = ServerSettings(store=tmp_path, port=0)
    return serve_in_thread(lambda observer: ModelHost.open(runtime, settings, observer=observer), settings)


def test_models_are_listed_unloaded_and_loaded(changing, triton_calls):
    def ask(*arguments, **options):
        return triton_calls(changing.port, "ask", *arguments, **options)

    def index() -> dict[str, str]:
        models = ask("get_model_repository_index")["models"]
        return {f"{model['name']}/{model['version']}": model["state"] for model in models}

    assert index()["topics/2"] == "READY"
    ask("load_model", "topics")
    assert triton_calls(changing.port, "infer", "topics", {"text": text("goal")}).model == ("topics", "2")
    ask("unload_model", "topics")
    assert not ask("is_model_ready", "topics")
    assert "READY" not in index().values()
    with pytest.raises(TritonError, match="NOT_FOUND"):
        triton_calls(changing.port, "infer", "topics", {"text": text("goal")})
    ask("load_model", "topics")
    assert index()["topics/2"] == "READY"
    assert ask("is_model_ready", "topics")


def test_what_cannot_be_loaded_is_refused_with_its_reason(changing, triton_calls):
    def code_of(*arguments, **options) -> tuple[str, str]:
        with pytest.raises(TritonError) as caught:
            triton_calls(changing.port, "ask", *arguments, **options)
        return caught.value.code, caught.value.message

    assert code_of("load_model", "nope")[0] == "StatusCode.NOT_FOUND"
    assert code_of("unload_model", "nope")[0] == "StatusCode.NOT_FOUND"
    assert code_of("load_model", "../secrets")[0] == "StatusCode.INVALID_ARGUMENT"
    assert code_of("load_model", "topics", config="{}")[1].startswith("parameters.config: is unknown")
    assert code_of("get_model_metadata", "nope")[0] == "StatusCode.NOT_FOUND"
    bundle = changing.host._loader.settings.store / "topics" / "2"
    (bundle / "model.onnx").write_bytes(b"damaged")
    code, message = code_of("load_model", "topics")
    assert code == "StatusCode.FAILED_PRECONDITION"
    assert "topics/2" in message
    assert triton_calls(changing.port, "infer", "topics", {"text": text("goal")}).model == ("topics", "2")
    shutil.rmtree(bundle)


async def test_probes_answer_while_the_server_drains_and_calls_do_not(changing, triton_calls):
    release = asyncio.Event()

    async def hold() -> None:
        async with changing.server.calls.answer("/held"):
            await release.wait()

    holding = asyncio.run_coroutine_threadsafe(hold(), changing.loop)
    ask = lambda *arguments: asyncio.to_thread(triton_calls, changing.port, "ask", *arguments)  # noqa: E731
    assert await ask("is_server_ready")
    stopping = asyncio.create_task(asyncio.to_thread(changing.run, changing.server.stop()))
    while not changing.server.calls.is_draining:  # noqa: ASYNC110 (another thread's loop sets it)
        await asyncio.sleep(0.01)
    assert await ask("is_server_live")
    assert not await ask("is_server_ready")
    assert not await ask("is_model_ready", "topics")
    with pytest.raises(TritonError, match="UNAVAILABLE"):
        await asyncio.to_thread(triton_calls, changing.port, "infer", "topics", {"text": text("goal")})
    changing.loop.call_soon_threadsafe(release.set)
    await asyncio.wrap_future(holding)
    assert await stopping
