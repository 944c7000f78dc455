"""The int8 key/value cache: close to the fp32 one, a quarter of it, and the same whichever way it was written."""

import dataclasses
import subprocess
import sys

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from shared_traces import trace
from tiny_models import LLAMA_PARTS

from headway_export.exporter import ExportOptions, export
from headway_export.inputs import NUM_CALIBRATED, of_evaluation
from headway_export.reference import cache_ranges
from headway_export.rewriting import LayerRange, QuantizeCache, rewrite
from headway_export.source import from_checkpoint
from headway_server.bundles import Precision, Task, open_bundle
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.runtime import Runtime
from headway_training.models.gpt import GPT, GPTConfig
from headway_training.models.parts.attention import scaled_dot_product_attention


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(device="cpu")


@pytest.fixture(scope="module")
def runners(tiny_store, tiny_checkpoints, tmp_path_factory, runtime):
    """The int8 variant of the tiny generation model with either cache."""
    options = ExportOptions(store=tmp_path_factory.mktemp("fp32-cache"), precisions=(Precision.INT8,), cache="fp32")
    bundles = {
        "fp32": export(from_checkpoint(tiny_checkpoints["generation"]), options),
        "int8": open_bundle(tiny_store / "tiny-generation" / "1"),
    }
    return {
        cache: DecoderRunner(runtime, bundle, bundle.manifest.variants[Precision.INT8], num_slots=4)
        for cache, bundle in bundles.items()
    }


def _mean_error(found, expected):
    return np.abs(found - expected).mean() / np.abs(expected).mean()


def test_the_manifest_says_what_a_cache_is_made_of_and_it_takes_a_quarter(tiny_store, runners):
    decoder = open_bundle(tiny_store / "tiny-generation" / "1").manifest.variants[Precision.INT8].graphs["decoder"]
    assert {spec.dtype for spec in decoder.inputs if spec.name.startswith("past")} == {"int8"}
    assert {spec.dtype for spec in decoder.outputs if spec.name.startswith("present")} == {"int8"}
    assert runners["int8"].cache_bytes * 4 == runners["fp32"].cache_bytes


def test_prompts_and_steps_are_close_to_those_with_an_fp32_cache(runners):
    ids = np.random.default_rng(0).integers(0, runners["int8"].vocab_size, (4, 60))
    logits = {}
    for cache, runner in runners.items():
        prompts = [runner.score(slot, row[:50], 0) for slot, row in enumerate(ids)]
        steps = [runner.decode(ids[:, at], np.full(4, at)).copy() for at in range(50, 60)]
        logits[cache] = np.concatenate([*prompts, *steps])
    assert 0 < _mean_error(logits["int8"], logits["fp32"]) < 0.02


def test_a_prompt_read_token_by_token_is_close_to_one_read_at_once(runners):
    runner = runners["int8"]
    ids = np.random.default_rng(1).integers(0, runner.vocab_size, 40)
    together = runner.score(0, ids, 0)
    alone = np.concatenate([runner.score(1, ids[at : at + 1], at) for at in range(40)])
    assert _mean_error(alone, together) < 0.02


@pytest.mark.parametrize("cut", [16, 48, 64])
def test_a_prompt_read_in_two_chunks_gives_the_bits_of_one(runners, cut):
    runner = runners["int8"]
    ids = np.random.default_rng(2).integers(0, runner.vocab_size, 96)
    together = runner.score(0, ids, 0)
    apart = np.concatenate([runner.score(1, ids[:cut], 0), runner.score(1, ids[cut:], cut)])
    np.testing.assert_array_equal(apart, together)


ALONE_AND_TOGETHER = """
import sys
import numpy as np
from headway_server.runtime import Runtime

Runtime(device="cpu")
import onnxruntime

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 16
session = onnxruntime.InferenceSession(sys.argv[1], options)
dtype = np.int8 if sys.argv[2] == "int8" else np.float32
generator = np.random.default_rng(3)
step = 1.1 / 127 if dtype == np.int8 else 1.0
past = {
    name: (generator.uniform(-1, 1, (8, 4, 601, 64)) / step).astype(dtype) for name in ("past_key_0", "past_value_0")
}


def decode(slots):
    rows = len(range(8)[slots])
    feeds = {
        "input_ids": np.full((rows, 1), 7),
        "position_ids": np.full((rows, 1), 600),
        "logits_positions": np.zeros((rows, 1), np.int64),
        "seqlens_k": np.full(rows, 600, np.int32),
        "total_sequence_length": np.array(601, np.int32),
    }
    return session.run(["logits"], {name: array[slots] for name, array in past.items()} | feeds)[0]


np.testing.assert_array_equal(decode(slice(2, 3))[0], decode(slice(8))[2])
"""


@pytest.mark.parametrize("cache", ["fp32", "int8"])
def test_a_row_of_many_tokens_is_the_same_alone_where_threads_are_many(tmp_path, cache):
    """16 threads and 4 heads: the runtime has told ONNX Runtime not to split a row between them."""
    torch.manual_seed(0)
    module = GPT(GPTConfig(vocabulary_size=30, max_length=601, num_layers=1, d_model=256, num_heads=4, d_ff=64))
    traced = trace(module.eval(), Task.GENERATION)
    if cache == "int8":
        rewrite(traced.graphs[0].model, QuantizeCache([LayerRange(key=1.0, value=1.0)]))
    ir.save(traced.graphs[0].model, tmp_path / "decoder.onnx")
    command = [sys.executable, "-c", ALONE_AND_TOGETHER, str(tmp_path / "decoder.onnx"), cache]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("task", ["generation", "translation"])
def test_ranges_reach_what_the_model_writes(tiny_checkpoints, task):
    source = from_checkpoint(tiny_checkpoints[task])
    read = of_evaluation(source, source.evaluation, NUM_CALIBRATED)
    ranges = cache_ranges(source, read)
    assert len(ranges) == source.architecture.configuration.get("num_layers", len(ranges))
    for found in ranges:
        for magnitudes in (found.key, found.value):
            assert magnitudes.ndim == 2
            assert (magnitudes > 0).all()
            assert (magnitudes < 100).all()
    fewer = dataclasses.replace(read, texts=read.texts[:1])
    for less, more in zip(cache_ranges(source, fewer), ranges, strict=True):
        assert (less.key <= more.key).all()
        assert (less.value <= more.value).all()


@pytest.mark.parametrize("parts", [{}, LLAMA_PARTS | {"num_kv_heads": 2}], ids=["usual", "llama"])
@pytest.mark.parametrize("length", [1, 5])
def test_the_cache_holds_rounded_keys_and_values_and_clips_the_rest(tmp_path, length, parts):
    """One layer, so that what goes into it is known; half of each channel is beyond its scale, if there are several."""
    torch.manual_seed(0)
    sizes = {"vocabulary_size": 30, "max_length": 16, "num_layers": 1, "d_model": 32, "num_heads": 4, "d_ff": 64}
    module = GPT(GPTConfig(**sizes, **parts)).eval()
    ids = np.arange(length)[np.newaxis]
    written = []

    def attend(query, key, value, *, layer):
        written.extend([key, value])
        return scaled_dot_product_attention(query, key, value, causal=True)

    with torch.inference_mode():
        module.hidden_states(torch.from_numpy(ids), torch.arange(length).unsqueeze(0), attend)
    middle = [tensor.abs().flatten(0, 1).median(dim=0).values.numpy() for tensor in written]  # (G, K)
    traced = trace(module, Task.GENERATION)
    rewrite(traced.graphs[0].model, QuantizeCache([LayerRange(key=middle[0], value=middle[1])]))
    for past, exact, magnitude in zip(
        _written(traced, ids, tmp_path, written[0].shape[2]), written, middle, strict=True
    ):
        codes = exact.transpose(1, 2).numpy() / (magnitude[:, np.newaxis] * QuantizeCache.HEADROOM / 127)
        np.testing.assert_allclose(past[:, :, :length], np.clip(np.round(codes), -128, 127), atol=1)
        assert not past[:, :, length:].any()


def _written(traced, ids, tmp_path, heads):
    """Runs the decoder on a prompt and returns what it wrote."""
    return _run(traced, ids, tmp_path, heads, ["present_key_0", "present_value_0"])


def _run(traced, ids, tmp_path, heads, outputs):
    """Runs the decoder on a prompt and returns some outputs."""
    ir.save(traced.graphs[0].model, tmp_path / "decoder.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 16
    session = onnxruntime.InferenceSession(tmp_path / "decoder.onnx", options)
    length = ids.shape[1]
    feeds = {
        "input_ids": ids,
        "position_ids": np.arange(length)[np.newaxis],
        "logits_positions": np.array([[length - 1]]),
        "seqlens_k": np.array([length - 1], np.int32),
        "total_sequence_length": np.array(length, np.int32),
    }
    past = {name: np.zeros((1, heads, 16, 8), np.int8) for name in ("past_key_0", "past_value_0")}
    return session.run(outputs, feeds | past)


def test_a_channel_of_large_keys_does_not_round_the_others_away(tmp_path):
    """Keys 100 times as large in one number of a head, and queries that much smaller: the same function in fp32."""
    torch.manual_seed(0)
    sizes = {"vocabulary_size": 30, "max_length": 16, "num_layers": 1, "d_model": 32, "num_heads": 4, "d_ff": 64}
    module = GPT(GPTConfig(**sizes)).eval()
    attention, width = module.stack.layers[0].attention, sizes["d_model"]
    with torch.no_grad():
        attention.query_key_value.weight.mul_(4)  # so that attention tells positions apart
        for row, factor in ((3, 0.01), (width + 3, 100.0)):
            attention.query_key_value.weight[row] *= factor
            attention.query_key_value.bias[row] *= factor
    ids = np.arange(12)[np.newaxis]
    keys = []

    def attend(query, key, value, *, layer):
        keys.append((key, value))
        return scaled_dot_product_attention(query, key, value, causal=True)

    with torch.inference_mode():
        exact = module.logits(module.hidden_states(torch.from_numpy(ids), torch.arange(12).unsqueeze(0), attend))
    largest = LayerRange(*(tensor.abs().amax(dim=(0, 1)).numpy() for tensor in keys[0]))
    errors = {}
    for name, found in (("each", largest), ("one", LayerRange(float(largest.key.max()), float(largest.value.max())))):
        traced = trace(module, Task.GENERATION)
        rewrite(traced.graphs[0].model, QuantizeCache([found]))
        logits = _run(traced, ids, tmp_path, sizes["num_heads"], ["logits"])[0]
        errors[name] = np.abs(logits[0, 0] - exact[0, -1].numpy()).max()
    assert errors["each"] < errors["one"] / 5
