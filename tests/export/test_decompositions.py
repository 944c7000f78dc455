"""Programs that are traced without being decomposed, held against the same ones decomposed."""

import sys
from collections import Counter
from contextlib import nullcontext

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.onnx._internal.exporter._registration import ONNXRegistry

from headway_export import tracing
from headway_export.tracing import trace
from headway_server.bundles import Task

WIDTH = 8
IDS = np.random.default_rng(0).integers(0, 20, (4, 6))
FEEDS = {"input_ids": IDS, "attention_mask": (np.arange(6) < np.array([[6], [1], [3], [4]])).astype(np.int64)}


class Pooling(nn.Module):
    """Averages tokens, by casts, one of them to the dtype there is, and by axes that are joined and split."""

    max_length = 6

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, WIDTH)
        self.output = nn.Linear(WIDTH, 3)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.to(torch.float32).unsqueeze(-1)
        tokens = self.tokens(input_ids.flatten()).to(torch.float32).unflatten(0, input_ids.shape)
        heads = tokens.unflatten(-1, (2, -1)).flatten(2)
        return self.output((heads * mask).sum(dim=1) / mask.sum(dim=1))


class PoolingOfManyOperators(Pooling):
    """Has other names of operators, chunks, squares, casts, and a tensor of its own that is changed in place."""

    def forward(self, input_ids, attention_mask):
        with torch.no_grad():
            mask = attention_mask.to(device=input_ids.device, dtype=torch.float32).unsqueeze(-1)
        left, right = self.tokens(input_ids).chunk(2, dim=-1)
        whole = (attention_mask > 0) & (input_ids >= 0) | (input_ids < 0)
        tokens = torch.cat([torch.max(left, right), torch.min(left, right) * whole.unsqueeze(-1)], dim=-1)
        products = torch.matmul(tokens, tokens.transpose(1, 2))
        products += attention_mask.unsqueeze(1).float().expand_as(products)
        mixed = torch.matmul(products.square(), tokens * mask)
        return self.output(mixed.mean(dim=1).type_as(mask).to("cpu"))


class PoolingOfComposites(Pooling):
    """Has operators that PyTorch makes of others, some of several results or in place."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Conv1d(WIDTH, WIDTH, 3, padding="same")
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1).float()
        tokens = self.tokens(input_ids) * mask
        mixed = self.norm(self.mixing(tokens.mT)).relu_().clamp_(max=2.0)
        rows, columns = torch.meshgrid(mixed[0, :, 0], mixed[0, :, 1], indexing="ij")
        first = torch.zeros_like(mixed).index_copy(2, torch.tensor([0]), mixed[:, :, 1:2])
        left, _, right = (mixed + first).tensor_split([2, 4], dim=1)
        pooled = nn.functional.adaptive_avg_pool1d(mixed, 1).squeeze(-1)
        sides = torch.cat([left, right], dim=1).mean(dim=2)
        total = (sides.sum(dim=1, keepdim=True) + (rows * columns).mean()).broadcast_to(pooled.shape)
        return self.output(pooled + total.view_as(pooled))


class PoolingInPlaceOfDropout(Pooling):
    """Changes what `dropout` returns, which is the tensor that it reads."""

    def forward(self, input_ids, attention_mask):
        tokens = self.tokens(input_ids) * 2.0
        changed = nn.functional.dropout(tokens, 0.1, training=False)
        changed += attention_mask.unsqueeze(-1).float().expand_as(changed)
        return self.output(tokens.mean(dim=1))


class PoolingInPlaceReadAfterwards(Pooling):
    """Changes a tensor in place whose view is read afterwards."""

    def forward(self, input_ids, attention_mask):
        tokens = self.tokens(input_ids) * 2.0
        view = tokens.transpose(1, 2)
        tokens += attention_mask.unsqueeze(-1).float().expand_as(tokens)
        return self.output(view.mean(dim=2))


class PoolingInPlace(Pooling):
    """Changes a tensor in place, through a view of it."""

    def forward(self, input_ids, attention_mask):
        tokens = self.tokens(input_ids) + 0.0
        tokens.transpose(1, 2).mul_(attention_mask.unsqueeze(1))
        return self.output(tokens.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True))


def _trace(module, monkeypatch, *, as_needed=True):
    """Returns the graph, and how often a program was decomposed."""
    count, decompose = Counter(), ExportedProgram.run_decompositions

    def counted(program, *arguments, **options):
        count["decomposed"] += 1
        return decompose(program, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ExportedProgram, "run_decompositions", counted)
        if not as_needed:
            patch.setattr("headway_export.decomposing._plan", lambda *_: None)
        (graph,) = trace(module, Task.TEXT_CLASSIFICATION).graphs
    return graph.model, count["decomposed"]


def _logits(model, tmp_path):
    ir.save(model, tmp_path / "model.onnx")
    return onnxruntime.InferenceSession(tmp_path / "model.onnx").run(["logits"], FEEDS)[0]


IN_PLACE = (PoolingInPlace, PoolingInPlaceReadAfterwards)


@pytest.fixture(params=[Pooling, PoolingOfManyOperators, PoolingOfComposites, *IN_PLACE])
def module(request):
    torch.manual_seed(0)
    return request.param().eval()


def test_a_program_is_decomposed_only_where_it_changes_tensors_in_place(module, monkeypatch, tmp_path):
    model, num_decomposed = _trace(module, monkeypatch)
    assert num_decomposed == isinstance(module, IN_PLACE)
    with torch.inference_mode():
        expected = module(*map(torch.from_numpy, FEEDS.values())).numpy()
    np.testing.assert_allclose(_logits(model, tmp_path), expected, rtol=1e-5, atol=1e-6)


def test_what_an_operator_may_return_as_it_is_counts_as_read_afterwards(monkeypatch):
    assert _trace(PoolingInPlaceOfDropout().eval(), monkeypatch)[1] == 1


@pytest.mark.parametrize("kind", [Pooling, PoolingOfManyOperators, PoolingOfComposites])
def test_a_program_that_is_not_decomposed_has_no_more_operators(monkeypatch, kind):
    module = kind().eval()
    (found, num_decomposed), (decomposed, _) = (
        _trace(module, monkeypatch, as_needed=as_needed) for as_needed in (True, False)
    )
    assert not num_decomposed
    written = {"Pow": "Mul"}  # a square
    names, names_decomposed = (
        Counter(written.get(node.op_type, node.op_type) for node in model.graph) for model in (found, decomposed)
    )
    assert not names - names_decomposed


class PoolingOfSeveralTypes(Pooling):
    """Adds and multiplies tensors of different dtypes, and numbers of one dtype to tensors of another."""

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        tokens = self.tokens(input_ids) * mask + (mask > 0)
        counts = attention_mask.sum(dim=1, keepdim=True)
        return self.output((tokens * 0.5 + mask * 1.5).sum(dim=1) / counts) * (counts * 0.25)


class PoolingOfNorms(Pooling):
    """Normalizes tensors whose axes are in order, swapped or repeated, and puts them through an activation."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.norm_of_both = nn.LayerNorm((2, WIDTH), bias=False)

    def forward(self, input_ids, attention_mask):
        tokens = self.tokens(input_ids)
        swapped = self.norm(tokens.transpose(0, 1)).transpose(0, 1)
        twice = self.norm_of_both(nn.functional.gelu(tokens.unsqueeze(2).expand(-1, -1, 2, -1))).mean(dim=2)
        mixed = nn.functional.gelu(self.norm(tokens), approximate="tanh") + nn.functional.gelu(swapped + twice)
        return self.output((mixed * attention_mask.unsqueeze(-1)).mean(dim=1))


OF_THE_CAPTURE = (
    *("_composites_listed_once", "_signatures_read_once", "_shapes_inferred_once", "_promoting_known_values"),
    *("shaping", "_uncached", "_without_stack_traces"),
)


@pytest.mark.parametrize(
    "kind", [Pooling, PoolingOfManyOperators, PoolingOfSeveralTypes, PoolingInPlace, PoolingOfNorms]
)
def test_the_graph_is_the_one_without_known_values(monkeypatch, kind, tmp_path):
    """What operators give is known from the capture: computing it anew and keeping it changes no operator."""
    torch.manual_seed(0)
    module = kind().eval()
    model, _ = _trace(module, monkeypatch)
    with monkeypatch.context() as patch:
        for shortcut in OF_THE_CAPTURE:
            patch.setattr(f"headway_export.shortcuts.{shortcut}", nullcontext)
        slow, _ = _trace(module, monkeypatch)
    operators, of_slow = ([(node.op_type, dict(node.attributes)) for node in each.graph] for each in (model, slow))
    assert operators == of_slow
    np.testing.assert_array_equal(_logits(model, tmp_path), _logits(slow, tmp_path))
    with torch.inference_mode():
        expected = module(*map(torch.from_numpy, FEEDS.values())).numpy()
    np.testing.assert_allclose(_logits(model, tmp_path), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shortcut", ["_promoting_known_values", "shaping", "_uncached"])
def test_values_that_are_known_are_not_computed_again(monkeypatch, shortcut):
    """Each spares a part of the calls of operators on tensors without numbers, or of what is kept of them."""
    count = Counter()
    for name in ("_dispatch_impl", "_make_cache_entry"):
        call = getattr(FakeTensorMode, name)

        def counted(self, *arguments, call=call, **options):
            count[spared] += 1
            return call(self, *arguments, **options)

        monkeypatch.setattr(FakeTensorMode, name, counted)
    module = (PoolingOfNorms if shortcut == "shaping" else PoolingOfManyOperators)().eval()
    spared = True
    _trace(module, monkeypatch)
    spared = False
    monkeypatch.setattr(f"headway_export.shortcuts.{shortcut}", nullcontext)
    _trace(module, monkeypatch)
    assert count[True] < count[False]


def test_a_release_of_pytorch_without_a_private_name_is_traced_without_shortcuts(monkeypatch, tmp_path):
    torch.manual_seed(0)
    module = Pooling().eval()
    module_name = "headway_export.shortcuts"
    with monkeypatch.context() as patch:
        patch.delattr(ONNXRegistry, "from_torchlib")  # which PyTorch needs itself to trace
        patch.delitem(sys.modules, module_name, raising=False)
        with pytest.warns(UserWarning, match=r"other inner parts than the exporter knows \(.*from_torchlib"):
            assert isinstance(tracing._shortcuts(), nullcontext)
    monkeypatch.setitem(sys.modules, module_name, None)
    with pytest.warns(UserWarning, match="traced without shortcuts"):
        model, num_decomposed = _trace(module, monkeypatch)
    assert num_decomposed == 1
    with torch.inference_mode():
        expected = module(*map(torch.from_numpy, FEEDS.values())).numpy()
    np.testing.assert_allclose(_logits(model, tmp_path), expected, rtol=1e-5, atol=1e-6)
