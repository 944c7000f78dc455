"""Shapes that follow from the inputs at a glance, held against what PyTorch finds by running the operator."""

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from headway_export import shaping

aten = torch.ops.aten
B, T = 5, 7
"""Sizes that are dynamic wherever a tensor has them."""


def rows(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def swapped(*shape, dtype=torch.float32):
    return rows(*shape, dtype=dtype).transpose(1, 2)


def repeated(*shape):
    return rows(1).expand(*shape)


X, Y, IDS = rows(B, T, 8), rows(B, T, 8), rows(B, T, dtype=torch.int64)
IMAGE = rows(B, 8, T, 4)
CASES = [
    *((operator, (tensor,), {}) for operator in (
        *(aten.silu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.neg.default),
        *(aten.rsqrt.default, aten.sqrt.default, aten.exp.default, aten.cos.default, aten.sin.default),
        *(aten.gelu.default, aten.contiguous.default),
    ) for tensor in (X, swapped(B, 4, T, 8), repeated(B, T, 8), IMAGE.to(memory_format=torch.channels_last))),
    (aten.gelu.default, (X,), {"approximate": "tanh"}),
    (aten.dropout.default, (X, 0.1, False), {}),
    (aten.dropout.default, (swapped(B, 4, T, 8), 0.1, False), {}),
    (aten.softmax.int, (X, -1), {}),
    (aten.softmax.int, (X, -1, torch.float32), {}),
    (aten.softmax.int, (X, -1, torch.float64), {}),
    (aten.pow.Tensor_Scalar, (X, 2), {}),
    (aten.pow.Tensor_Scalar, (IDS, 2), {}),
    *((operator, operands, {}) for operator in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
      for operands in (
        (X, Y), (X, 2), (X, 0.5), (X, True), (IDS, 2), (IDS, 0.5), (IDS, IDS), (X, IDS), (IDS, X), (IDS > 0, IDS > 0),
        (X, rows(8)), (rows(8), X), (X, rows(T, 1)), (X, rows()), (rows(B, 1, 8), rows(1, T, 8)), (IDS > 0, 1),
        (swapped(B, 4, T, 8), rows(B, 1, 4, 8)), (swapped(B, 4, T, 8), rows(8)), (rows(8), swapped(B, T, T, 8)),
        (X, repeated(B, T, 8)), (repeated(B, T, 8), X), (X, rows(B, T, 8, dtype=torch.float64)),
        (swapped(B, T, T), rows(B, T, T)), (X[..., ::2], rows(4)),
    )),
    (aten.add.Tensor, (X, Y), {"alpha": 2}),
    (aten.masked_fill.Scalar, (rows(B, 2, T, T), rows(B, 1, T, T) > 0, -1.0), {}),
    (aten.masked_fill.Scalar, (repeated(B, 1, T, T), repeated(B, 1, T, T) > 0, -1.0), {}),
    (aten.masked_fill.Scalar, (rows(T, T), rows(B, 1, T, T) > 0, -1.0), {}),
    (aten.where.self, (X > 0, X, Y), {}),
    (aten.where.self, (IDS.unsqueeze(-1) > 0, X, rows()), {}),
    (aten.where.self, (X > 0, rows(), rows()), {}),
    (aten.where.ScalarOther, (X > 0, X, 0.0), {}),
    (aten.where.ScalarSelf, (X > 0, 0.0, X), {}),
    (aten.to.dtype, (X, torch.float16), {}),
    (aten.to.dtype, (swapped(B, 4, T), torch.int64), {}),
    (aten.to.dtype, (X, torch.float32), {}),
    (aten.linear.default, (X, rows(3, 8)), {}),
    (aten.linear.default, (rows(B, 8), rows(3, 8), rows(3)), {}),
    (aten.linear.default, (swapped(B, 8, T), rows(3, 8), rows(3)), {}),
    (aten.matmul.default, (X, rows(8, 3)), {}),
    (aten.matmul.default, (rows(B, 2, T, 8), rows(B, 2, 8, T)), {}),
    (aten.matmul.default, (rows(B, 2, T, 8), swapped(B, 8, 2, T)), {}),
    (aten.matmul.default, (rows(B, 2, T, 8), rows(1, 2, 8, T)), {}),
    (aten.layer_norm.default, (X, [8], rows(8), rows(8)), {}),
    (aten.layer_norm.default, (swapped(B, 8, T), [8], rows(8), None, 1e-6), {}),
    (aten.group_norm.default, (IMAGE, 4, rows(8), rows(8)), {}),
    (aten.group_norm.default, (IMAGE.to(memory_format=torch.channels_last), 4, rows(8), rows(8), 1e-6, False), {}),
    (aten.embedding.default, (rows(20, 8), IDS), {}),
    (aten.embedding.default, (rows(20, 8), IDS, 0), {}),
    *((operator, (tensor, shape), {}) for operator in (aten.reshape.default, aten.view.default) for tensor, shape in (
        (X, [B, T, 2, 4]), (X, [B, -1, 2, 4]), (X, [-1, T, 4, 2]), (X, [B, -1]), (X, [-1, 8]), (X, [B, T, -1]),
        (X, [B, T * 2, 4]), (X, [8, -1, B]), (rows(B, 6), [B, 2, 3]),
    )),
    (aten.reshape.default, (swapped(B, T, 2, 4), [B, 2, -1]), {}),
    (aten.reshape.default, (swapped(B, 2, T, 4), [B, -1, 8]), {}),
    (aten.flatten.using_ints, (X,), {}),
    (aten.flatten.using_ints, (X, 1), {}),
    (aten.flatten.using_ints, (X, 0, 1), {}),
    (aten.flatten.using_ints, (IMAGE, -2), {}),
    (aten.transpose.int, (X, 1, 2), {}),
    (aten.transpose.int, (X, -1, 0), {}),
    (aten.permute.default, (IMAGE, [0, 2, -1, 1]), {}),
    (aten.unsqueeze.default, (X, 1), {}),
    (aten.unsqueeze.default, (X, -1), {}),
    (aten.unsqueeze.default, (swapped(B, 8, T), -2), {}),
    (aten.expand.default, (rows(B, 1, T), [B, 4, T]), {}),
    (aten.expand.default, (rows(B, 1, T), [-1, T, -1]), {}),
    (aten.expand.default, (rows(1, T), [B, 2, 1, T]), {}),
    (aten.slice.Tensor, (X, 2, 0, 4), {}),
    (aten.slice.Tensor, (X, -1, 4, 9223372036854775807), {}),
    (aten.slice.Tensor, (X, 2, -3, None, 2), {}),
    (aten.slice.Tensor, (X, 1, 0, 4), {}),
    (aten.mean.dim, (X, [1]), {}),
    (aten.mean.dim, (X, [-1], True), {}),
    (aten.mean.dim, (swapped(B, 8, T), [-1, 1], True), {}),
]  # fmt: skip


@pytest.fixture(scope="module")
def without_values():
    """Returns what takes values from an operator's arguments, and makes their dynamic sizes names."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    names = {}

    def take(value):
        if isinstance(value, torch.Tensor):
            kinds = [DimDynamic.DUCK if size in (B, T) else DimDynamic.STATIC for size in value.shape]
            context = StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * value.ndim)
            return mode.from_tensor(value, symbolic_context=context, source=ConstantSource(f"x{id(value)}"))
        if isinstance(value, list):
            return [names[one // 2] * 2 if one == 2 * T else names.get(one, one) for one in value]
        return value

    names.update(zip((B, T), take(rows(B, T)).shape, strict=True))
    with torch.no_grad():
        yield mode, take


@pytest.mark.parametrize(("operator", "args", "kwargs"), CASES)
def test_a_rule_finds_what_running_the_operator_finds(without_values, operator, args, kwargs):
    """In the same words, so that the graph is the same; where a rule is not sure it finds nothing."""
    mode, take = without_values
    args = tuple(map(take, args))
    found = shaping._apply(shaping._RULES[operator], args, kwargs)
    if found is None:
        return
    with mode:
        expected = operator(*args, **kwargs)
    made = shaping._make(next(value for value in args if isinstance(value, torch.Tensor)), found)
    assert made.dtype is expected.dtype
    assert [str(size) for size in made.shape] == [str(size) for size in expected.shape]
    assert [str(stride) for stride in made.stride()] == [str(stride) for stride in expected.stride()]


def test_every_rule_finds_something(without_values):
    _, take = without_values
    finding = {
        operator
        for operator, args, kwargs in CASES
        if shaping._apply(shaping._RULES[operator], tuple(map(take, args)), kwargs) is not None
    }
    assert finding == set(shaping._RULES)
