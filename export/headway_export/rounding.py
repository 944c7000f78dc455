"""Tells how far rounding alone moves a model's answer, by Monte Carlo arithmetic (Parker 1997, UCLA CSD-970002).

Products of a model's numbers are computed once more, each result with a random relative error of one unit in the last
place of fp32. Large numbers that cancel each other make trained models sensitive to that for some inputs: two correct
implementations then differ by more than usual, and so do two of PyTorch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

AnswerT = TypeVar("AnswerT")

FACTOR = 4.0
"""Most that a difference is, in multiples of what rounding was seen to do, to be explained by it."""
LARGEST = 1e-2
"""Relative difference that is explained at most."""
NUM_DRAWS = 16
"""Draws of errors at most: few of them meet what is sensitive."""
_STEP = 2.0**-23
_ATEN = torch.ops.aten
_PRODUCTS = frozenset(
    {
        *(_ATEN.linear.default, _ATEN.matmul.default, _ATEN.einsum.default, _ATEN.conv1d.default, _ATEN.conv2d.default),
        *(_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default, _ATEN.convolution.default),
    }
)
"""In inference mode composite operators arrive as they are, and otherwise in parts."""


def rounded_answers(answer: Callable[[], AnswerT]) -> Iterator[AnswerT]:
    """Yields `NUM_DRAWS` answers, computed by `answer` with other rounding errors each."""
    for seed in range(NUM_DRAWS):
        token = _is_open.set(True)
        try:
            with _Rounding(seed):
                found = answer()
        finally:
            _is_open.reset(token)
        yield found


def is_rounding() -> bool:
    """True while an answer is computed with other rounding errors."""
    return _is_open.get()


_is_open = ContextVar("is_rounding", default=False)


class _Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Adds rounding errors to the results of products as long as it is open."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _PRODUCTS:
            return result
        assert isinstance(result, Tensor), "a product is one tensor"
        errors = torch.rand(result.shape, generator=self._generator).mul_(2 * _STEP).sub_(_STEP)
        return result * (1 + errors).to(result.dtype)


def is_explained(difference: float, answer: Callable[[], NDArray[Any]], move: Callable[[NDArray[Any]], float]) -> bool:
    """True if rounding moves an answer by a quarter of a relative difference, which is not above `LARGEST`.

    Args:
        difference: The relative difference.
        answer: Computes the answer.
        move: Measures how far a rounded answer is from the answer, as `difference` was measured.
    """
    return difference <= LARGEST and any(difference <= FACTOR * move(found) for found in rounded_answers(answer))
