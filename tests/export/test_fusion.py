"""Fused decoders, held against the same ones as they were traced."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_ir.passes import InPlacePass, PassResult
from torch import nn

from headway_export.errors import TraceError
from headway_export.fusing import FuseNormalizations, FuseRotations
from headway_export.rewriting import copy_graph, rewrite
from headway_export.tracing import trace
from headway_server.bundles import Task
from headway_training.models.encoder import Encoder, EncoderConfig
from headway_training.models.gpt import GPT, GPTConfig
from headway_training.models.parts.attention import causal_attention

CACHE_LENGTH, WIDTH, HEAD = 40, 32, 8


class OneLayer(nn.Module):
    """A decoder of one layer, whose projections of query, key and value are one product or three."""

    max_length = CACHE_LENGTH

    def __init__(self, *, heads, key_heads, packed):
        super().__init__()
        self.tokens = nn.Embedding(50, WIDTH)
        self.sizes = [heads * HEAD, key_heads * HEAD, key_heads * HEAD]
        self.packed = nn.Linear(WIDTH, sum(self.sizes)) if packed else None
        self.apart = None if packed else nn.ModuleList(nn.Linear(WIDTH, size) for size in self.sizes)
        self.output = nn.Linear(heads * HEAD, WIDTH)

    def hidden_states(self, input_ids, position_ids, attend):
        hidden = self.tokens(input_ids) + position_ids.unsqueeze(-1) * 0.01
        parts = (
            self.packed(hidden).split(self.sizes, dim=-1)
            if self.packed is not None
            else [projection(hidden) for projection in self.apart]
        )
        query, key, value = (part.unflatten(-1, (-1, HEAD)) for part in parts)
        return hidden + self.output(attend(query, key, value, layer=0).flatten(2))

    def logits(self, hidden_states):
        return hidden_states @ self.tokens.weight.T


class SwappedOneLayer(OneLayer):
    """Its product holds the value before the key, which no packed attention understands."""

    def hidden_states(self, input_ids, position_ids, attend):
        def attend_swapped(query, key, value, *, layer):
            return attend(query, value, key, layer=layer)

        return super().hidden_states(input_ids, position_ids, attend_swapped)


class JoinedOneLayer(OneLayer):
    """Takes its product apart by heads: those of the query first (`blocks`), or three of each head in turn."""

    def __init__(self, *, blocks):
        super().__init__(heads=4, key_heads=4, packed=True)
        self.blocks = blocks

    def hidden_states(self, input_ids, position_ids, attend):
        hidden = self.tokens(input_ids) + position_ids.unsqueeze(-1) * 0.01
        product = self.packed(hidden)
        if self.blocks:
            parts = product.unflatten(-1, (12, HEAD)).split(4, dim=2)
        else:
            parts = product.unflatten(-1, (4, 3 * HEAD)).chunk(3, dim=-1)
        return hidden + self.output(attend(*parts, layer=0).flatten(2))


class RotatedOneLayer(OneLayer):
    """Normalizes and turns queries and keys as transformers' models do; heads have their own axis before tokens."""

    def __init__(self, *, weight_shape=(WIDTH,), angles_of_all=False, uneven=False, square=2):
        super().__init__(heads=4, key_heads=2, packed=False)
        self.weight = nn.Parameter(torch.rand(weight_shape) + 0.5)
        self.register_buffer("frequencies", 0.3 ** torch.arange(HEAD // 2 + HEAD // 2 * uneven))
        self.angles_of_all, self.square = angles_of_all, square

    def norm(self, hidden):
        return self.weight * (hidden * torch.rsqrt(hidden.pow(self.square).mean(-1, keepdim=True) + 1e-3))

    def hidden_states(self, input_ids, position_ids, attend):
        hidden = self.tokens(input_ids)
        normed = self.norm(hidden)
        query, key, value = (one(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in self.apart)
        positions = position_ids[:1] * 0 + 3 if self.angles_of_all else position_ids
        angles = positions[:, :, None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)[..., :HEAD] if len(self.frequencies) < HEAD else angles
        cosines, sines = ((turned * 1.1).unsqueeze(1) for turned in (angles.cos(), angles.sin()))

        def rotate(heads):
            first, second = heads[..., : HEAD // 2], heads[..., HEAD // 2 :]
            return (heads * cosines + torch.cat((-second, first), -1) * sines).transpose(1, 2)

        context = attend(rotate(query), rotate(key), value.transpose(1, 2), layer=0)
        return hidden + self.output(context.flatten(2))


class BranchedOneLayer(OneLayer):
    """Two branches follow its attention, the first position by position, and the other without telling positions."""

    def __init__(self):
        super().__init__(heads=4, key_heads=4, packed=True)
        self.shared, self.routed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def hidden_states(self, input_ids, position_ids, attend):
        hidden = super().hidden_states(input_ids, position_ids, attend)
        shared = self.shared(hidden).relu()
        return shared + self.routed(hidden.view(-1, WIDTH)).view(hidden.shape)


def _tiny_gpt():
    return GPT(GPTConfig(vocabulary_size=50, max_length=CACHE_LENGTH, num_layers=2, d_model=32, num_heads=4, d_ff=64))


def _traced(module, *, fused):
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            for name in ("FuseAttention", "GatherAsked", "FuseNormalizations", "FuseRotations"):
                patch.setattr(f"headway_export.tracing.{name}.call", lambda _, model: PassResult(model, modified=False))
        return trace(module.eval(), Task.GENERATION).graphs[0]


def _logits_of_a_chunk_and_a_step(traced, tmp_path):
    """Reads 17 tokens into each of three rows, and then one in all of them together, at positions of their own."""
    ir.save(traced.model, tmp_path / "decoder.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(tmp_path / "decoder.onnx", options)
    ids = np.random.default_rng(0).integers(0, 50, (3, 18))
    past = {
        spec.name: np.zeros((1, spec.shape[1], CACHE_LENGTH, spec.shape[3]), np.float32)
        for spec in traced.inputs
        if spec.name.startswith("past")
    }
    chunks = [_run(session, row[np.newaxis, :17], past, [0]) for row in ids]
    caches = {name: np.concatenate([chunk[name.replace("past", "present")] for chunk in chunks]) for name in past}
    step = _run(session, ids[:, 17:], caches, [17, 12, 9])
    return np.concatenate([chunk["logits"] for chunk in chunks]), step["logits"]


def _run(session, ids, past, starts, *, asked=()):
    rows, length = ids.shape
    starts = np.array(starts)
    feeds = past | {
        "input_ids": ids,
        "position_ids": starts[:, np.newaxis] + np.arange(length),
        "logits_positions": np.array([asked or [length - 1]] * rows),
        "seqlens_k": (starts + length - 1).astype(np.int32),
        "total_sequence_length": np.array((starts + length).max(), np.int32),
    }
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _operators(traced):
    return Counter(node.op_type for node in traced.model.graph)


def _tiny_llama():
    sizes = {"vocabulary_size": 50, "max_length": CACHE_LENGTH, "num_layers": 2, "d_model": 32, "num_heads": 4}
    kinds = {"norm_kind": "rms_norm", "activation": "silu", "gated": True, "positions": "rotary"}
    return GPT(GPTConfig(**sizes, **kinds, d_ff=64))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_tiny_gpt, id="gpt"),
        pytest.param(_tiny_llama, id="llama"),
        pytest.param(RotatedOneLayer, id="rotated"),
        pytest.param(lambda: RotatedOneLayer(weight_shape=(1, WIDTH)), id="weight of two axes"),
        pytest.param(lambda: RotatedOneLayer(angles_of_all=True), id="angles of all texts"),
        pytest.param(lambda: RotatedOneLayer(uneven=True), id="halves that differ"),
        pytest.param(lambda: RotatedOneLayer(square=4), id="no square"),
        pytest.param(lambda: OneLayer(heads=4, key_heads=2, packed=True), id="fewer key heads"),
        pytest.param(lambda: OneLayer(heads=4, key_heads=4, packed=False), id="three projections"),
        pytest.param(lambda: SwappedOneLayer(heads=4, key_heads=4, packed=True), id="value before key"),
        pytest.param(lambda: JoinedOneLayer(blocks=True), id="heads of the query first"),
        pytest.param(lambda: JoinedOneLayer(blocks=False), id="query, key and value of each head"),
        pytest.param(BranchedOneLayer, id="two branches"),
    ],
)
def test_a_fused_decoder_gives_the_same_logits(make, tmp_path):
    torch.manual_seed(0)
    module = make()
    expected = _logits_of_a_chunk_and_a_step(_traced(module, fused=False), tmp_path)
    fused = _traced(module, fused=True)
    copy_graph(fused.model)  # fails if a node stands before what it reads
    found = _logits_of_a_chunk_and_a_step(fused, tmp_path)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("make", "activation"), [(_tiny_gpt, "Gelu"), (_tiny_llama, "Sigmoid")])
def test_what_follows_the_last_attention_is_computed_for_the_asked_positions_alone(make, activation, tmp_path):
    torch.manual_seed(0)
    module = make()
    traced = _traced(module, fused=True)
    order = [
        "asked" if node.op_type == "GatherND" and node.attributes.get_int("batch_dims", 0) else node.op_type
        for node in traced.model.graph
    ]
    assert order.count("asked") == 2  # of attention's context, and of what the layer was given
    assert "GatherElements" not in order
    assert order.index("asked") < len(order) - 1 - order[::-1].index(activation)
    ir.save(traced.model, tmp_path / "decoder.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "decoder.onnx")
    ids = np.random.default_rng(0).integers(0, 50, (1, 9))
    past = {
        spec.name: np.zeros((1, spec.shape[1], CACHE_LENGTH, spec.shape[3]), np.float32)
        for spec in traced.inputs
        if spec.name.startswith("past")
    }
    found = _run(session, ids, past, [0], asked=[8, 2, 5])["logits"][0]
    with torch.inference_mode():
        tensor = torch.from_numpy(ids)
        expected = module.logits(module.hidden_states(tensor, torch.arange(9)[None], causal_attention()))[0, [8, 2, 5]]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_nothing_is_sliced_or_reshaped_around_attention():
    operators = _operators(_traced(_tiny_gpt(), fused=True))
    assert operators["GroupQueryAttention"] == 2
    assert not {"Split", "Reshape", "Concat"} & set(operators)


def test_normalizations_and_rotations_are_one_operator_each():
    operators = _operators(_traced(_tiny_llama(), fused=True))
    assert (operators["RMSNormalization"], operators["RotaryEmbedding"]) == (5, 4)
    assert not {"Pow", "ReduceMean", "Neg", "Transpose", "Reshape"} & set(operators)
    operators = _operators(_traced(RotatedOneLayer(), fused=True))
    assert (operators["RMSNormalization"], operators["RotaryEmbedding"]) == (1, 2)
    assert not {"Pow", "ReduceMean", "Neg", "Transpose", "Reshape"} & set(operators)


@pytest.mark.parametrize(
    ("options", "normalizations", "rotations"),
    [
        ({"weight_shape": (1, WIDTH)}, 0, 2),
        ({"square": 4}, 0, 2),
        ({"uneven": True}, 1, 0),
        ({"angles_of_all": True}, 1, 0),
    ],
)
def test_what_only_looks_like_an_operator_stays_as_it_is(options, normalizations, rotations):
    operators = _operators(_traced(RotatedOneLayer(**options), fused=True))
    assert (operators["RMSNormalization"], operators["RotaryEmbedding"]) == (normalizations, rotations)


_MADE_OF_ONE = ("Sqrt", "Reciprocal", "Neg", "Cos")
_MADE_OF_TWO = ("Mul", "Add", "Pow")


def _random_graph(draw):
    """Twelve operators of the two fusions over numbers, vectors and tensors of up to four axes."""
    inputs = [ir.val(f"input{rank}", ir.DataType.FLOAT, [2] * rank) for rank in range(5)]
    inputs.append(ir.val("vector", ir.DataType.FLOAT, [1]))
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 21})
    values = list(inputs)
    for _ in range(12):
        kind = draw.choice(["constant", "one", "two", "two", "two", "mean", "concat"])
        first, second = (values[draw.integers(len(values))] for _ in range(2))
        rank, other = len(first.shape), len(second.shape)
        if kind == "constant":
            tensor = ir.tensor(np.full([2] * draw.integers(3), draw.choice([2.0, 1e-3]), np.float32))
            node, shape = ir.node("Constant", [], {"value": tensor}), list(tensor.shape)
        elif kind == "one":
            node, shape = ir.node(draw.choice(_MADE_OF_ONE), [first]), first.shape
        elif kind == "two":
            longer = first if (rank, first.shape.numpy()) >= (other, second.shape.numpy()) else second
            node, shape = ir.node(draw.choice(_MADE_OF_TWO), [first, second]), longer.shape
        elif kind == "mean" and rank:
            axes = ir.val("axes", const_value=ir.tensor(np.array([-1]), name="axes"))
            constant = ir.node("Constant", [], {"value": axes.const_value})
            graph.append(constant)
            node, shape = ir.node("ReduceMean", [first, constant.outputs[0]]), [*first.shape[:-1], 1]
        elif rank:
            node, shape = ir.node("Concat", [first, first], {"axis": 0}), [2 * first.shape[0], *first.shape[1:]]
        else:
            continue
        node.outputs[0].shape, node.outputs[0].dtype = ir.Shape(shape), ir.DataType.FLOAT
        graph.append(node)
        values.append(node.outputs[0])
    graph.outputs.append(values[-1])
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("fusion", [FuseNormalizations, FuseRotations])
def test_values_of_any_number_of_axes_pass_a_fusion(fusion):
    for seed in range(300):
        model = _random_graph(np.random.default_rng(seed))
        operators = [node.op_type for node in model.graph]
        fusion()(model)
        assert [node.op_type for node in model.graph] == operators, f"seed {seed}"


def test_slices_that_are_not_query_key_and_value_in_turn_stay_slices():
    attention = next(
        node
        for node in _traced(SwappedOneLayer(heads=4, key_heads=4, packed=True), fused=True).model.graph
        if node.op_type == "GroupQueryAttention"
    )
    assert all(value is not None for value in attention.inputs[:3])


def _encoder():
    sizes = {"vocabulary_size": 50, "max_length": 16, "num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 64}
    return Encoder(EncoderConfig(**sizes, num_classes=3))


def test_an_encoder_for_the_cpu_attends_by_one_operator_a_layer_and_answers_alike(tmp_path):
    torch.manual_seed(0)
    module = _encoder().eval()
    graphs = [trace(module, Task.TEXT_CLASSIFICATION, for_cpu=for_cpu).graphs[0] for for_cpu in (False, True)]
    operators = _operators(graphs[1])
    assert operators["GroupQueryAttention"] == 2
    assert not {"Split", "Softmax", "Transpose"} & set(operators)
    lengths = np.array([9, 3, 16, 1])
    ids = np.random.default_rng(0).integers(0, 50, (4, 16))
    feeds = {"input_ids": ids, "attention_mask": (np.arange(16) < lengths[:, np.newaxis]).astype(np.int64)}
    found = []
    for graph in graphs:
        ir.save(graph.model, tmp_path / "model.onnx")
        found.append(onnxruntime.InferenceSession(tmp_path / "model.onnx").run(["logits"], feeds)[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_a_graph_of_a_form_that_is_not_known_is_told_in_a_sentence():
    first, second = (ir.node("Relu", [ir.val("input", ir.DataType.FLOAT, [1])]) for _ in range(2))
    first.replace_input_with(0, second.outputs[0])
    model = ir.Model(
        ir.Graph([second.inputs[0]], first.outputs, nodes=[first, second], opset_imports={"": 21}), ir_version=10
    )

    class Fails(InPlacePass):
        def call(self, model):
            raise KeyError(len(model.graph))

    for step, name in ((lambda: copy_graph(model), "copy"), (lambda: rewrite(model, Fails()), "Fails: 2")):
        with pytest.raises(TraceError, match=f"form that the exporter does not know .{name}") as raised:
            step()
        assert len(str(raised.value).splitlines()) == 1
