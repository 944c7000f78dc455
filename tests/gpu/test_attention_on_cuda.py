"""Attention to later tokens, which images of Gemma 3 and prompts of PaliGemma need, by the operator of the decoder."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

ROWS, LENGTH, PAST, CACHE, HEADS, WIDTH = 1, 5, 7, 16, 2, 16
pytestmark = pytest.mark.gpu


def model_of(has_bias: bool) -> bytes:
    """A step of `LENGTH` tokens behind `PAST` in a cache, all of which see each other."""
    half, whole = TensorProto.FLOAT16, TensorProto.INT32
    new, cache = [ROWS, LENGTH, HEADS * WIDTH], [ROWS, HEADS, CACHE, WIDTH]
    inputs = dict.fromkeys(("query", "key", "value"), (half, new))
    inputs |= dict.fromkeys(("past_key", "past_value"), (half, cache))
    inputs |= {"lengths": (whole, [ROWS]), "longest": (whole, [])}
    names = [*inputs, "", "", "", "bias"] if has_bias else list(inputs)
    inputs |= {"bias": (half, [1, 1, LENGTH, PAST + LENGTH])} if has_bias else {}
    outputs = {"attended": new, "present_key": cache, "present_value": cache}
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        list(outputs),
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=HEADS,
        causal=0,
    )
    graph = helper.make_graph(
        [node],
        "step",
        [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()],
        [helper.make_tensor_value_info(name, half, shape) for name, shape in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


@pytest.mark.parametrize("has_bias", [False, True])
def test_tokens_of_a_step_attend_to_later_ones(device, has_bias):
    """A kernel that is causal all the same would give other numbers, without a word."""
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=(ROWS, LENGTH, HEADS * WIDTH)) for name in ("query", "key", "value")}
    drawn |= {name: rng.normal(size=(ROWS, HEADS, CACHE, WIDTH)) for name in ("past_key", "past_value")}
    drawn |= {"bias": rng.normal(size=(1, 1, LENGTH, PAST + LENGTH))} if has_bias else {}
    feeds = {name: values.astype(np.float16) for name, values in drawn.items()}
    lengths = {"lengths": np.array([PAST + LENGTH - 1], np.int32), "longest": np.array(PAST + LENGTH, np.int32)}
    provider = "CUDAExecutionProvider" if device == "cuda" else "CPUExecutionProvider"
    session = onnxruntime.InferenceSession(model_of(has_bias), providers=[provider])
    assert session.get_providers()[0] == provider
    found = session.run(["attended"], {**feeds, **lengths})[0][0].astype(np.float32)

    def heads(name: str) -> np.ndarray:
        return feeds[name][0].astype(np.float32).reshape(LENGTH, HEADS, WIDTH).transpose(1, 0, 2)

    def all_of(name: str) -> np.ndarray:
        return np.concatenate([feeds[f"past_{name}"][0, :, :PAST].astype(np.float32), heads(name)], axis=1)

    scores = heads("query") @ all_of("key").transpose(0, 2, 1) / WIDTH**0.5
    scores += feeds["bias"][0].astype(np.float32) if has_bias else 0
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = (weights / weights.sum(axis=-1, keepdims=True)) @ all_of("value")
    np.testing.assert_allclose(found, expected.transpose(1, 0, 2).reshape(LENGTH, -1), rtol=0, atol=5e-3)
