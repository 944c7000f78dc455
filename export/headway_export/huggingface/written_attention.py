"""Attention that a family of `transformers` writes out in operators, given from outside.

Families older than the interface of `attention.py` compute softmax(scale Q K^T + bias) V themselves: GPT-J, GPT-Neo,
Falcon, BLOOM, CodeGen, MPT, XGLM. All hand their keys and values to a cache first. `WrittenCache` is that cache: what
it gives back stands for keys and values, notes what the family's operators do to them, and has the given attention
compute the result. So no family's code is repeated, and one with operators that are not known here is refused.

The keys stand for all positions that there may be, so that a bias (ALiBi, Press et al. 2021, arXiv 2108.12409) is given
for each of them. A family's causal mask is noted and left out: the given attention is causal.

B rows, T tokens, S positions that there may be, H heads, G key and value heads, K head width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, Unpack

import torch
import transformers
from torch import Tensor, nn

from headway_export.errors import SourceError
from headway_training.models.parts.attention import TextScoring

WRITTEN_ATTENTION: Final = "headway_written"
"""Name of the attention that asks for masks which can be told from other tensors."""
_INTERFACE: Final = "ALL_ATTENTION_FUNCTIONS"


class TokenAttention(Protocol):
    """Attention of a layer that is not told."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **scoring: Unpack[TextScoring]) -> Tensor:
        """(B, T, H, K), twice (B, T, G, K) -> (B, T, H, K)."""
        ...


def writes_attention(model_class: type) -> bool:
    """Returns True for a family whose code does not use the interface for attention."""
    return not hasattr(sys.modules[model_class.__module__], _INTERFACE)


def own_attention(model_class: type) -> str:
    """Returns the name of the attention that such a family has where nobody asks for another.

    Falcon adds ALiBi twice with the other one.
    """
    return "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"


@contextmanager
def standing_masks(model: nn.Module) -> Iterator[None]:
    """Lets a model make masks that stand for what every query may see."""
    config: Any = model.config
    own = config._attn_implementation  # noqa: SLF001 (the library's own name for a setting)
    config._attn_implementation = WRITTEN_ATTENTION  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation = own  # noqa: SLF001


class WrittenCache:
    """What a family takes for its cache of keys and values."""

    is_compileable = False

    def __init__(self, attend: TokenAttention, *, length: int, num_keys: int, windows: Mapping[int, int]) -> None:
        """Takes what computes attention.

        Args:
            attend: Called once for each layer.
            length: T.
            num_keys: S.
            windows: By layer, how many keys a query sees; others see all.
        """
        self._attend, self._length, self._num_keys, self._windows = attend, length, num_keys, windows

    def get_seq_length(self, _layer: int = 0) -> int:
        """Returns how many keys there are before those of this step, as it seems to the model."""
        return self._num_keys - self._length

    def get_query_offset(self, _layer: int = 0) -> int:
        """Returns the same."""
        return self._num_keys - self._length

    def get_mask_sizes(self, _length: int, _layer: int = 0) -> tuple[int, int]:
        """Returns the number of keys, and the first one's position."""
        return self._num_keys, 0

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[_Keys, _Values]:
        """Takes the keys and values of this step, (B, G, T, K), and returns what stands for all of them."""
        shape = (*key.shape[:2], self._num_keys, key.shape[3])

        def compute(query: Tensor, scale: float, bias: Tensor | None) -> Tensor:
            of_heads = query.reshape(key.shape[0], -1, *query.shape[-2:])  # (B, H, T, K)
            if bias is not None and bias.ndim == 3:  # rows and heads in one axis
                bias = bias.reshape(key.shape[0], -1, *bias.shape[1:])
            scoring: TextScoring = {"scale": scale, "bias": bias, "window": self._windows.get(layer)}
            tensors = (tensor.transpose(1, 2) for tensor in (of_heads, key, value))
            return self._attend(*tensors, **scoring).transpose(1, 2)  # (B, H, T, K)

        return _Keys(_like(key, shape), compute), _Values(_like(value, (*shape[:3], value.shape[3])))


Compute = Callable[[Tensor, float, Tensor | None], Tensor]
"""Query, scale and bias to the context (B, H, T, K)."""


def _like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a tensor of a shape that holds one number."""
    return tensor.new_zeros(()).expand(tuple(shape))


class _Standing:
    """What stands for a tensor: its form is right, its numbers are not there.

    Methods and functions of torch that are called with it come to `apply`, by their names.
    """

    changes: frozenset[str] = frozenset((
        "clone", "contiguous", "expand", "flatten", "float", "permute", "reshape", "to", "transpose", "type",
        "unflatten", "unsqueeze", "squeeze", "view", "swapaxes",
    ))  # fmt: skip
    """Operators that change the form alone."""

    def __init__(self, form: Tensor) -> None:
        self.form = form

    @classmethod
    def __torch_function__(
        cls, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        every = (*args, *given.values())
        latest = max((one for one in every if isinstance(one, _Standing)), key=lambda one: one.rank)
        return latest.apply(func.__name__.strip("_"), args, given)

    rank = 0
    """Of several, the one with the highest tells what an operator means."""

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "device", "ndim", "size", "dim"):
            return getattr(self.form, name)
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.apply(name, (self, *args), kwargs)

    def apply(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns what an operator makes of it.

        Raises:
            SourceError: The operator is not known.
        """
        if name in self.changes and args[0] is self:
            return self.of_form(getattr(self.form, name)(*args[1:], **kwargs))
        raise SourceError(f"its attention is written out in operators of which {name} is not known")

    def of_form(self, form: Tensor) -> _Standing:
        """Returns the same in another form."""
        return type(self)(form)

    def __matmul__(self, other: Any) -> Any:
        return self.apply("matmul", (self, other), {})

    def __rmatmul__(self, other: Any) -> Any:
        return self.apply("matmul", (other, self), {})

    def __add__(self, other: Any) -> Any:
        latest = max((one for one in (self, other) if isinstance(one, _Standing)), key=lambda one: one.rank)
        return latest.apply("add", (self, other), {})

    __radd__ = __iadd__ = __add__

    def __mul__(self, other: Any) -> Any:
        return self.apply("mul", (self, other), {})

    __rmul__ = __imul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self.apply("div", (self, other), {})

    __itruediv__ = __truediv__

    def __lt__(self, other: Any) -> Any:
        return self.apply("lt", (self, other), {})


class _Mask(_Standing):
    """A causal mask, of whatever numbers; all that is made of it is one, such as a mask with a bias added twice."""

    def apply(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Mask:  # noqa: ARG002
        return self


class _Keys(_Standing):
    """Keys of all positions."""

    rank = 1

    def __init__(self, form: Tensor, compute: Compute) -> None:
        super().__init__(form)
        self._compute = compute

    def of_form(self, form: Tensor) -> _Keys:
        return _Keys(form, self._compute)

    def apply(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "baddbmm":
            bias, query, scale = args[0], kwargs.get("batch1", args[1:2]), kwargs.get("alpha", 1.0)
            query = query if isinstance(query, Tensor) else query[0]
            found = _Scores(_like(query, (*query.shape[:-1], self.form.shape[-1])), self._compute, query, scale)
            return found.added(bias * kwargs.get("beta", 1.0))
        if name in ("matmul", "bmm", "rmatmul") and isinstance(args[0], Tensor):
            query = args[0]
            return _Scores(_like(query, (*query.shape[:-1], self.form.shape[-1])), self._compute, query, 1.0)
        return super().apply(name, args, kwargs)


class _Scores(_Standing):
    """scale Q K^T + bias, before or after the softmax."""

    rank = 3

    def __init__(
        self,
        form: Tensor,
        compute: Compute,
        query: Tensor,
        scale: float,
        bias: Tensor | None = None,
        *,
        are_weights: bool = False,
    ) -> None:
        super().__init__(form)
        self._compute, self._query, self._scale, self._bias = compute, query, scale, bias
        self._are_weights = are_weights

    def of_form(self, form: Tensor) -> _Scores:
        return self._changed(form=form)

    def _changed(self, **values: Any) -> _Scores:
        scale, bias = values.get("scale", self._scale), values.get("bias", self._bias)
        are_weights = values.get("are_weights", self._are_weights)
        form = values.get("form", self.form)
        return _Scores(form, self._compute, self._query, scale, bias, are_weights=are_weights)

    def added(self, bias: Tensor) -> _Scores:
        """Adds a bias, broadcastable to the scores."""
        while bias.ndim < self.form.ndim:
            bias = bias.unsqueeze(0)
        return self._changed(bias=bias if self._bias is None else self._bias + bias)

    def apply(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        others = [one for one in args if one is not self]
        found: Any = None
        if self._are_weights:
            if name in ("matmul", "bmm") and args[0] is self and isinstance(args[1], _Values):
                context = self._compute(self._query, self._scale, self._bias)  # (B, H, T, K)
                found = context.reshape(*self.form.shape[:-1], context.shape[-1])
            elif name == "dropout":
                found = self
        elif name == "softmax":
            found = self._changed(are_weights=True)
        elif name in ("mul", "div") and isinstance(others[0], int | float):
            factor = 1 / others[0] if name == "div" else others[0]
            bias = None if self._bias is None else self._bias * factor
            found = self._changed(scale=self._scale * factor, bias=bias)
        elif name in ("add", "masked_fill") and isinstance(others[0], _Mask):
            found = self
        elif name == "add" and isinstance(others[0], Tensor):
            found = self.added(others[0])
        elif name in ("where", "max"):  # a mask of the family's own, or a bound of scores that are masked
            found = self
        return super().apply(name, args, kwargs) if found is None else found


class _Values(_Standing):
    """Values of all positions."""

    rank = 2


def _standing_mask(*, batch_size: int, q_length: int, kv_length: int, device: Any, **_: Any) -> _Mask:
    """A mask (B, 1, T, S) as the library asks for it."""
    return _Mask(torch.zeros((), device=device).expand(batch_size, 1, q_length, kv_length))


transformers.AttentionMaskInterface.register(WRITTEN_ATTENTION, _standing_mask)
