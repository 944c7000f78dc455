"""The int4 variant of decoders: what it stores, what it computes, that a row's answer is its own, and its proof."""

import dataclasses
from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes import common
from onnx_ir.tape import Tape

from headway_export.agreement import limits_of
from headway_export.errors import ParityError, SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.rewriting import QuantizeBlocks, QuantizeProducts, quantize_blocks, rewrite
from headway_export.source import from_checkpoint
from headway_export.tracing import trace
from headway_server.bundles import Precision, Task
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.runtime import Runtime, has_exact_int8, sum_exactly
from headway_training.models import build_model

BLOCK = QuantizeBlocks.BLOCK_SIZE
FEWEST = 1 if has_exact_int8() else 2
"""Rows from which on they have the same bits: one alone has others on a processor without VNNI
(docs/decisions/int4-weights.md)."""
FP32_ARITHMETIC = 1


def dequantized(codes, scales, zeros, length):
    """Reads what `quantize_blocks` packs, by the definition: (N, K)."""
    values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1)  # (N, M, J)
    zero = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(len(zeros), -1)[:, : scales.shape[1]]  # (N, M)
    numbers = (values.astype(np.float32) - zero[..., np.newaxis]) * scales[..., np.newaxis]
    return numbers.reshape(len(codes), -1)[:, :length]


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 300),
    st.integers(1, 100),
    st.floats(1e-6, 1e6),
    st.sampled_from([-3, 0, 3]),
)
def test_a_matrix_of_blocks_is_within_half_a_step(seed, rows, length, magnitude, shift):
    noise = np.random.default_rng(seed).normal(size=(rows, length)) + shift
    matrix = (noise * magnitude).astype(np.float32)
    codes, scales, zeros = quantize_blocks(matrix, BLOCK)
    steps = scales.repeat(BLOCK, axis=1)[:, :length]
    assert (np.abs(dequantized(codes, scales, zeros, length) - matrix) <= 0.5001 * steps).all()


def test_blocks_of_zeros_stay_zero():
    parts = quantize_blocks(np.zeros((3, 40), np.float32), BLOCK)
    assert not dequantized(*parts, 40).any()
    assert np.isfinite(parts[1]).all()


def session_of(matrix, accuracy_level, num_threads=1):
    """A session of one product with a weight, (N, K)."""
    rows, length = matrix.shape
    activation = ir.val("activation", ir.DataType.FLOAT, ["rows", length])
    tape = Tape()
    parts = zip(("codes", "scales", "zeros"), quantize_blocks(matrix, BLOCK), strict=True)
    weight = [tape.initializer(ir.tensor(part, name=name)) for name, part in parts]
    attributes = {"K": length, "N": rows, "bits": 4, "block_size": BLOCK, "accuracy_level": accuracy_level}
    product = tape.op("MatMulNBits", [activation, *weight], attributes, domain="com.microsoft")
    product.name, product.type, product.shape = "product", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["rows", rows])
    opsets = {"": 21, "com.microsoft": 1}
    graph = ir.Graph(
        [activation], [product], nodes=tape.nodes, initializers=tape.initializers, opset_imports=opsets, name="product"
    )
    options = onnxruntime.SessionOptions()
    sum_exactly(options)
    options.intra_op_num_threads = num_threads
    content = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def product_of(session, activations):
    return session.run(None, {"activation": activations})[0]


@pytest.mark.parametrize(("rows", "length"), [(48, 64), (33, 96), (5, 100), (130, 768)])
def test_onnx_runtime_reads_the_weights_that_are_packed(rows, length):
    """A product with the unit matrix is the weight itself; the number of blocks may be odd, and the last one short."""
    matrix = np.random.default_rng(3).normal(size=(rows, length)).astype(np.float32)
    found = product_of(session_of(matrix, FP32_ARITHMETIC), np.eye(length, dtype=np.float32))
    expected = dequantized(*quantize_blocks(matrix, BLOCK), length).T
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_activations_are_rounded_to_a_scale_a_block_of_a_row():
    rng = np.random.default_rng(4)
    matrix = rng.normal(size=(40, 256)).astype(np.float32)
    activations = (rng.normal(size=(9, 256)) * rng.uniform(0.1, 10, (9, 1))).astype(np.float32)
    found = product_of(session_of(matrix, QuantizeBlocks.INT8_ARITHMETIC), activations)
    weight = dequantized(*quantize_blocks(matrix, BLOCK), 256)
    steps = np.abs(activations.reshape(9, -1, BLOCK)).max(axis=-1).repeat(BLOCK, axis=1) / 127
    assert (np.abs(found - activations @ weight.T) <= 0.51 * steps @ np.abs(weight).T).all()


@pytest.mark.parametrize(("rows", "length"), [(1152, 896), (50, 100), (768, 3072)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_whatever_runs_beside_it(rows, length, num_threads):
    """Among all numbers of rows from `FEWEST` on."""
    rng = np.random.default_rng(5)
    matrix = rng.normal(size=(rows, length)).astype(np.float32)
    activations = rng.normal(size=(40, length)).astype(np.float32)
    one = session_of(matrix, QuantizeBlocks.INT8_ARITHMETIC)
    alone = np.stack([product_of(one, activations[[row] * FEWEST])[0] for row in range(40)])
    session = session_of(matrix, QuantizeBlocks.INT8_ARITHMETIC, num_threads)
    for count in (*range(FEWEST, 18), 31, 32, 33, 40):
        first = int(rng.integers(0, 41 - count))
        company = slice(first, first + count)
        np.testing.assert_array_equal(product_of(session, activations[company]), alone[company])


def test_a_value_in_a_branch_has_no_name_of_a_value_outside():
    """ONNX Runtime refuses some graphs where one has, and both may be named in turn."""
    chosen, number = ir.val("chosen", ir.DataType.BOOL, []), ir.val("number", ir.DataType.FLOAT, [])
    branches = {}
    for name, operator in (("then_branch", "Neg"), ("else_branch", "Abs")):
        inner = Tape()
        inner.op(operator, [number]).name = "same"
        branches[name] = ir.Graph([], inner.nodes[0].outputs, nodes=inner.nodes, name=name)
    tape = Tape()
    behind = tape.op("Sqrt", [tape.op("If", [chosen], branches)])
    result = tape.op("Abs", [behind])
    behind.name, result.type, result.shape = "same", ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
    inputs, opsets = [chosen, number], {"": 21}
    model = ir.Model(ir.Graph(inputs, [result], nodes=tape.nodes, opset_imports=opsets, name="graph"), ir_version=10)
    rewrite(model, common.RemoveUnusedNodesPass())
    assert behind.name == "same"
    assert {branch.outputs[0].name for branch in branches.values()} == {"branch_same"}


@pytest.fixture(scope="module", params=["trained", "llama"])
def int4_bundle(request, tiny_checkpoints, llama_checkpoint, tmp_path_factory):
    """A decoder in fp32, int8 and int4, proved on its evaluation data."""
    checkpoint = llama_checkpoint if request.param == "llama" else tiny_checkpoints["generation"]
    precisions = (Precision.FP32, Precision.INT8, Precision.INT4)
    options = ExportOptions(store=tmp_path_factory.mktemp("int4"), precisions=precisions, attention=True)
    return export(from_checkpoint(checkpoint), options)


def test_every_product_but_the_output_projection_is_in_blocks():
    torch.manual_seed(0)
    sizes = {"vocabulary_size": 300, "max_length": 64, "num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128}
    (decoder,) = trace(build_model("gpt", sizes).eval(), Task.GENERATION).graphs
    rewrite(decoder.model, QuantizeBlocks(), QuantizeProducts())
    operators = Counter(node.op_type for node in decoder.model.graph)
    assert (operators["MatMulNBits"], operators["MatMulInteger"], operators["MatMul"]) == (8, 1, 0)
    weights = decoder.model.graph.initializers.values()
    tables = [tuple(weight.shape) for weight in weights if weight.dtype == ir.DataType.INT8]
    assert tables.count((300, 64)) == 1  # the table is the output projection too
    assert max(weight.const_value.size for weight in weights if weight.dtype == ir.DataType.FLOAT) < 1 << 12


def test_int4_is_proved_and_a_server_prefers_int8(int4_bundle):
    variants = int4_bundle.manifest.variants
    assert variants[Precision.INT4].quality.metric == variants[Precision.INT8].quality.metric
    assert variants[Precision.INT4].parity.bound is None
    assert {tensor.dtype for tensor in variants[Precision.INT4].graphs["decoder"].inputs} >= {"int8"}
    runtime = Runtime(device="cpu")
    assert runtime.choose_variant(int4_bundle.manifest, None)[0] in (Precision.INT8, Precision.FP32)
    assert runtime.choose_variant(int4_bundle.manifest, Precision.INT4)[0] is Precision.INT4


def test_a_text_has_the_same_logits_in_any_company(int4_bundle):
    """Bit for bit: rows of several texts, decoded alone (`FEWEST`) and together, on one thread and on two."""
    rng = np.random.default_rng(6)
    variant = int4_bundle.manifest.variants[Precision.INT4]
    runners = [
        DecoderRunner(Runtime(device="cpu", num_threads=threads), int4_bundle, variant, num_slots=20)
        for threads in (1, 2)
    ]
    texts = [rng.integers(0, runners[0].vocab_size, length) for length in rng.integers(3, 60, 20)]
    steps = rng.integers(0, runners[0].vocab_size, (4, 20))

    def logits(runner, rows):
        for slot, row in enumerate(rows):
            runner.prefill(slot, texts[row], 0)
        lengths = np.array([len(texts[row]) for row in rows])
        return np.stack([runner.decode(step[rows], lengths + number).copy() for number, step in enumerate(steps)])

    alone = np.concatenate([logits(runners[0], [row] * FEWEST)[:, :1] for row in range(20)], axis=1)
    for runner in runners:
        for count in (2, 3, 7, 16, 20):
            rows = rng.permutation(20)[:count]
            np.testing.assert_array_equal(logits(runner, rows), alone[:, rows])


def test_without_evaluation_data_int4_is_held_to_fp32_by_limits_of_its_own(tiny_checkpoints, tmp_path):
    source = dataclasses.replace(from_checkpoint(tiny_checkpoints["generation"]), evaluation=None)
    bundle = export(source, ExportOptions(store=tmp_path, precisions=(Precision.INT8, Precision.INT4)))
    agreed = bundle.manifest.variants[Precision.INT4].agreement
    assert (agreed.dataset, agreed.limits) == ("generated", limits_of(Precision.INT4, agreed.figures))
    assert agreed.limits["mean_kl_divergence"] > limits_of(Precision.INT8, agreed.figures)["mean_kl_divergence"]
    assert "Its answers were held against those of fp32." in bundle.file("README.md").read_text()


def test_a_quantizer_that_loses_the_weights_is_refused(tiny_checkpoints, tmp_path, monkeypatch):
    def zeros(matrix, block_size):
        return quantize_blocks(np.zeros_like(matrix), block_size)

    monkeypatch.setattr("headway_export.rewriting.quantize_blocks", zeros)
    with pytest.raises(ParityError, match="int4: nats_per_character"):
        export(
            from_checkpoint(tiny_checkpoints["generation"]),
            ExportOptions(store=tmp_path, precisions=(Precision.INT4,)),
        )
    assert list(tmp_path.iterdir()) == []


def test_only_decoders_have_an_int4_variant(tiny_checkpoints, tmp_path):
    source = from_checkpoint(tiny_checkpoints["text_classification"])
    with pytest.raises(SourceError, match="int4 is a precision of generation"):
        export(source, ExportOptions(store=tmp_path, precisions=(Precision.INT4,)))
