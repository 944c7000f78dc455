"""Shapes of what operators give, while a program is captured, where they follow from those of the inputs at a glance.

PyTorch runs an operator's own implementation on tensors without data, which asks for conditions on dynamic sizes of
each of its parts. Here a size is the same as another if both are written alike. Where a rule is not sure of that, or
of the inputs' memory, PyTorch finds the shape as before, with its conditions and its errors. As in `shortcuts`, the
private names of PyTorch that this needs may be missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, cast
from unittest.mock import patch

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree

Size: TypeAlias = int | SymInt
_aten = torch.ops.aten


class _Result(NamedTuple):
    """What an operator gives."""

    shape: Sequence[Size]
    dtype: torch.dtype
    strides: Sequence[Size] | None = None
    """None: the axes are in order, without gaps."""


@contextmanager
def shaping() -> Iterator[None]:
    """Has the shapes of results taken from those of inputs while a program is captured."""
    with (
        patch.object(proxy_tensor, "proxy_call", _call),
        # It describes a result's memory beside the result itself, which nothing reads.
        patch.object(proxy_tensor, "_extract_tensor_metadata", _describe_nothing),
    ):
        yield


_call_by_running, _proxies_of = attrgetter("proxy_call", "_fetch_proxies_and_all_constant_flag")(proxy_tensor)
_needed = attrgetter("_extract_tensor_metadata", "track_tensor_tree")(proxy_tensor)
if [*signature(_call_by_running).parameters] != ["proxy_mode", "func", "pre_dispatch", "args", "kwargs"]:
    raise ImportError("proxy_call takes other arguments")


def _describe_nothing(_: Tensor) -> None:
    return None


def _call(mode: Any, operator: OpOverload, pre_dispatch: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Writes an operator into the captured program, and returns a tensor as it gives."""
    rule = _RULES.get(operator) if pre_dispatch else None
    result = None if rule is None else _apply(rule, args, kwargs)
    if result is None:
        return _call_by_running(mode, operator, pre_dispatch, args, kwargs)
    flat, spec = _pytree.tree_flatten((args, kwargs))
    tracer = mode.tracer
    named = tracer.graph._target_to_str(operator.overloadpacket.__name__)  # noqa: SLF001
    proxies = _pytree.tree_unflatten(_proxies_of(flat, tracer)[1], spec)
    proxy = tracer.create_proxy("call_function", operator, *proxies, name=named)
    example = next(value for value in flat if isinstance(value, FakeTensor))
    given = _make(example, result)
    proxy_tensor.track_tensor_tree(given, proxy, constant=None, tracer=tracer)
    return given


def _apply(rule: Callable[..., _Result | None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result | None:
    """Applies a rule to tensors without data, one of them of a dynamic size; None where there is anything else."""
    if torch.is_grad_enabled():
        return None
    is_dynamic = False
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
                return None
            is_dynamic = is_dynamic or any(isinstance(size, SymInt) for size in value.shape)
    if not is_dynamic:
        return None
    try:
        return rule(*args, **kwargs)
    except TypeError:  # an argument that the rule does not know
        return None


def _make(example: FakeTensor, result: _Result) -> FakeTensor:
    mode = example.fake_mode
    with in_kernel_invocation_manager(mode):
        if result.strides is None:
            tensor = torch.empty(result.shape, dtype=result.dtype, device="meta")
        else:
            tensor = torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device="meta")
    given = FakeTensor(mode, tensor, example.device)
    if result.strides is None:
        cast("Any", given).order = tuple(reversed(range(len(result.shape))))
    return given


def _expression(size: Size) -> Any:
    return size.node.expr if isinstance(size, SymInt) else size


def _is_same(size: Size, other: Size) -> bool:
    """True if two sizes are written alike; comparing them as numbers would make a condition."""
    return bool(size is other or _expression(size) == _expression(other))


def _are_same(sizes: Sequence[Size], others: Sequence[Size]) -> bool:
    return len(sizes) == len(others) and all(map(_is_same, sizes, others))


def _order_of(tensor: Any) -> tuple[int, ...] | None:
    """Returns the axes by how near their elements are in memory, nearest first; None where there are gaps."""
    if not hasattr(tensor, "order"):
        tensor.order = _find_order(tensor.shape, tensor.stride())
    return cast("tuple[int, ...] | None", tensor.order)


def _find_order(shape: Sequence[Size], strides: Sequence[Size]) -> tuple[int, ...] | None:
    left = list(reversed(range(len(shape))))
    order, expected = [], 1
    while left:
        axis = next((axis for axis in left if _is_one(shape[axis]) or _expression(strides[axis]) == expected), None)
        if axis is None:
            return None
        left.remove(axis)
        order.append(axis)
        expected = expected * _expression(shape[axis])
    return tuple(order)


def _is_in_order(tensor: Tensor) -> bool:
    """True if the strides are written as those of a contiguous tensor."""
    return _order_of(tensor) == tuple(reversed(range(tensor.ndim)))


def _has_known_order(tensor: Tensor) -> bool:
    """True if the axes are in order, but for those along which all elements are the same."""
    if _is_in_order(tensor):
        return True
    strides = tensor.stride()
    kept = [axis for axis in range(tensor.ndim) if not (isinstance(strides[axis], int) and strides[axis] == 0)]
    order = _find_order([tensor.shape[axis] for axis in kept], [strides[axis] for axis in kept])
    return order == tuple(reversed(range(len(kept))))


def _is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def _joined(*tensors: Any) -> _Result | None:
    """Returns what tensors of one dtype give that are broadcast; None where it is not sure of its shape and memory.

    The memory is as that of the first if it has the whole shape, and in order if that of all is.
    """
    shape: list[Size] = []
    for axis in range(-max(tensor.ndim for tensor in tensors), 0):
        size: Size = 1
        for tensor in tensors:
            own = tensor.shape[axis] if tensor.ndim >= -axis else 1
            if _is_one(own) or (not _is_one(size) and _is_same(own, size)):
                continue
            if not _is_one(size):
                return None
            size = own
        shape.append(size)
    first = tensors[0]
    if _are_same(first.shape, shape) and _order_of(first) is not None:
        return _Result(shape, first.dtype, first.stride())
    return _Result(shape, first.dtype) if all(map(_has_known_order, tensors)) else None


def _unchanged(tensor: Tensor, *_: Any, **options: Any) -> _Result | None:
    """Of what gives a tensor as it reads one, of numbers with fractions."""
    if any(value is not None for value in options.values()) or not tensor.is_floating_point():
        return None
    return _joined(tensor)


def _softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> _Result | None:
    del dim
    return _unchanged(tensor) if dtype in (None, tensor.dtype) else None


def _gelu(tensor: Tensor, *, approximate: str = "none") -> _Result | None:
    del approximate
    return _unchanged(tensor)


def _power(tensor: Tensor, exponent: object) -> _Result | None:
    return _unchanged(tensor) if isinstance(exponent, int | float) else None


def _contiguous(tensor: Tensor) -> _Result:
    return _Result(tensor.shape, tensor.dtype)


def _to_dtype(tensor: Tensor, dtype: torch.dtype) -> _Result | None:
    result = _joined(tensor)
    return None if result is None else result._replace(dtype=dtype)


def _arithmetic(tensor: object, other: object) -> _Result | None:
    """Of sums, differences and products, of numbers with fractions or of whole numbers alone."""
    if not isinstance(tensor, Tensor):
        return None
    is_number = isinstance(other, float if tensor.is_floating_point() else int) or type(other) is int
    if is_number and not isinstance(other, bool) and tensor.dtype is not torch.bool:
        return _joined(tensor)
    if not isinstance(other, Tensor) or other.dtype is not tensor.dtype or tensor.dtype is torch.bool:
        return None
    return _joined(tensor, other)


def _quotient(tensor: object, other: object) -> _Result | None:
    return _arithmetic(tensor, other) if isinstance(tensor, Tensor) and tensor.is_floating_point() else None


def _masked(tensor: Tensor, mask: Tensor, value: object) -> _Result | None:
    if isinstance(value, Tensor) or not tensor.is_floating_point():
        return None
    result = _joined(tensor, mask)
    return result if result is not None and _are_same(result.shape, tensor.shape) else None


def _where(condition: Tensor, tensor: object, other: object) -> _Result | None:
    tensors = [value for value in (tensor, other) if isinstance(value, Tensor)]
    if not tensors or len({value.dtype for value in tensors}) > 1 or not tensors[0].is_floating_point():
        return None
    result = _joined(condition, *tensors)
    if result is None or all(value.ndim == 0 for value in tensors):
        return None
    return result._replace(dtype=tensors[0].dtype)


def _linear(tensor: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Result | None:
    dtypes = {value.dtype for value in (tensor, weight, bias) if value is not None}
    if tensor.ndim < 2 or weight.ndim != 2 or not _is_same(tensor.shape[-1], weight.shape[1]) or len(dtypes) > 1:
        return None
    if bias is not None and not _are_same(bias.shape, weight.shape[:1]):
        return None
    return _Result([*tensor.shape[:-1], weight.shape[0]], tensor.dtype)


def _product(tensor: Tensor, other: Tensor) -> _Result | None:
    if tensor.dtype is not other.dtype or min(tensor.ndim, other.ndim) < 2:
        return None
    if not _is_same(tensor.shape[-1], other.shape[-2]):
        return None
    if other.ndim > 2 and not _are_same(tensor.shape[:-2], other.shape[:-2]):
        return None
    return _Result([*tensor.shape[:-1], other.shape[-1]], tensor.dtype)


def _layer_norm(
    tensor: Tensor,
    normalized_shape: Sequence[Size],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: object,
) -> _Result | None:
    if not _are_same(tensor.shape[len(tensor.shape) - len(normalized_shape) :], normalized_shape):
        return None
    if any(value is not None and not _are_same(value.shape, normalized_shape) for value in (weight, bias)):
        return None
    return _Result(tensor.shape, tensor.dtype) if tensor.is_floating_point() else None


def _group_norm(
    tensor: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *_: object
) -> _Result | None:
    channels = tensor.shape[1]
    if not isinstance(channels, int) or channels % num_groups or tensor.ndim < 3:
        return None
    if any(value is not None and not _are_same(value.shape, [channels]) for value in (weight, bias)):
        return None
    return _unchanged(tensor)


def _embedding(weight: Tensor, indices: Tensor, *_: object) -> _Result | None:
    if weight.ndim != 2 or indices.is_floating_point() or indices.dtype is torch.bool:
        return None
    return _Result([*indices.shape, weight.shape[1]], weight.dtype) if _is_in_order(indices) else None


def _mean(tensor: Tensor, dim: Sequence[int] | None, keepdim: bool = False) -> _Result | None:
    if not dim or _unchanged(tensor) is None:
        return None
    taken = {axis % tensor.ndim for axis in dim}
    kept: list[Size] = [1 if axis in taken else size for axis, size in enumerate(tensor.shape)]
    return _Result(kept if keepdim else [kept[axis] for axis in range(tensor.ndim) if axis not in taken], tensor.dtype)


def _reshape(tensor: Tensor, shape: Sequence[Size]) -> _Result | None:
    """Of a shape whose factors are those of the tensor's; what is left of them is the size that is not given."""
    if tensor.ndim == 0 or not shape:
        return None
    number, factors = _factors(tensor.shape)
    unknown = [axis for axis, size in enumerate(shape) if isinstance(size, int) and size == -1]
    given, others = _factors([size for axis, size in enumerate(shape) if axis not in unknown])
    if given == 0 or number % given or others - factors:
        return None
    left, ratio = list((factors - others).elements()), number // given
    if not unknown:
        return None if left or ratio != 1 else _Result(shape, tensor.dtype)
    sized: Sequence[Size] = tensor.shape
    by_name = {_expression(size): size for size in sized if isinstance(size, SymInt)}
    sizes = [by_name[factor] for factor in left if factor in by_name]
    if len(unknown) > 1 or len(sizes) != len(left) or len(left) > 1:
        return None
    size: Size = ratio if not sizes else sizes[0] if ratio == 1 else sizes[0] * ratio
    return _Result([size if axis in unknown else own for axis, own in enumerate(shape)], tensor.dtype)


def _factors(shape: Sequence[Size]) -> tuple[int, Counter[Any]]:
    """Returns the product of the sizes that are known, and how often each other factor is among them."""
    number, others = 1, Counter[Any]()
    for size in shape:
        expression = _expression(size)
        for factor in expression.args if getattr(expression, "is_Mul", False) else (expression,):
            if isinstance(factor, int) or factor.is_Integer:
                number *= int(factor)
            else:
                others[factor] += 1
    return number, others


def _view(tensor: Tensor, shape: Sequence[Size]) -> _Result | None:
    return _reshape(tensor, shape) if _is_in_order(tensor) else None


def _flatten(tensor: Tensor, start_dim: int = 0, end_dim: int = -1) -> _Result | None:
    if not _is_in_order(tensor) or tensor.ndim == 0:
        return None
    start, end = start_dim % tensor.ndim, end_dim % tensor.ndim
    flat = math.prod(tensor.shape[start : end + 1])
    return _Result([*tensor.shape[:start], flat, *tensor.shape[end + 1 :]], tensor.dtype)


def _transpose(tensor: Tensor, first: int, second: int) -> _Result:
    order = list(range(tensor.ndim))
    order[first], order[second] = order[second], order[first]
    return _permute(tensor, order)


def _permute(tensor: Tensor, order: Sequence[int]) -> _Result:
    strides = tensor.stride()
    return _Result([tensor.shape[axis] for axis in order], tensor.dtype, [strides[axis] for axis in order])


def _unsqueeze(tensor: Tensor, dim: int) -> _Result | None:
    if not _is_in_order(tensor):
        return None
    shape: list[Size] = list(tensor.shape)
    shape.insert(dim % (tensor.ndim + 1), 1)
    return _Result(shape, tensor.dtype)


def _expand(tensor: Tensor, size: Sequence[Size]) -> _Result | None:
    added = len(size) - tensor.ndim
    if added < 0 or any(isinstance(one, int) and one == -1 for one in size[:added]):
        return None
    shape, strides = list(size), [cast("Size", 0)] * added
    for axis, (own, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True), added):
        asked = size[axis]
        if (isinstance(asked, int) and asked == -1) or _is_same(asked, own):
            shape[axis] = own
            strides.append(stride)
        elif _is_one(own):
            strides.append(0)
        else:
            return None
    return _Result(shape, tensor.dtype, strides)


def _slice(
    tensor: Tensor, dim: int = 0, start: Size | None = None, end: Size | None = None, step: Size = 1
) -> _Result | None:
    """Of an axis whose size is known."""
    size = tensor.shape[dim]
    if any(isinstance(value, SymInt) for value in (size, start, end, step)) or not isinstance(size, int):
        return None
    shape: list[Size] = list(tensor.shape)
    strides: list[Size] = list(tensor.stride())
    shape[dim] = len(range(*slice(start, end, step).indices(size)))
    strides[dim] = strides[dim] * step
    return _Result(shape, tensor.dtype, strides)


_RULES: dict[OpOverload, Callable[..., _Result | None]] = {
    _aten.linear.default: _linear,
    _aten.matmul.default: _product,
    _aten.layer_norm.default: _layer_norm,
    _aten.group_norm.default: _group_norm,
    _aten.embedding.default: _embedding,
    _aten.reshape.default: _reshape,
    _aten.view.default: _view,
    _aten.flatten.using_ints: _flatten,
    _aten.transpose.int: _transpose,
    _aten.permute.default: _permute,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.expand.default: _expand,
    _aten.slice.Tensor: _slice,
    _aten.contiguous.default: _contiguous,
    _aten.to.dtype: _to_dtype,
    _aten.add.Tensor: _arithmetic,
    _aten.sub.Tensor: _arithmetic,
    _aten.mul.Tensor: _arithmetic,
    _aten.div.Tensor: _quotient,
    _aten.masked_fill.Scalar: _masked,
    _aten.where.self: _where,
    _aten.where.ScalarOther: _where,
    _aten.where.ScalarSelf: _where,
    _aten.mean.dim: _mean,
    _aten.softmax.int: _softmax,
    _aten.gelu.default: _gelu,
    _aten.pow.Tensor_Scalar: _power,
    **dict.fromkeys(
        attrgetter(
            *("dropout.default", "silu.default", "relu.default", "sigmoid.default", "tanh.default", "neg.default"),
            *("rsqrt.default", "sqrt.default", "exp.default", "cos.default", "sin.default"),
        )(_aten),
        _unchanged,
    ),
}
"""How results follow from inputs, by operator; a rule takes the operator's arguments."""
