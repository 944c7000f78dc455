"""What the processes of a run tell each other, and how they wait for each other.

Each process computes its rows of a batch. Most losses are sums over rows, whose gradients are averaged; what else a
step needs of all rows is gathered or summed here. A process does so within `exchange` alone, which a step of training
enters on all of them: a measurement that one of them makes by itself waits for nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

_PATIENCE = timedelta(days=365)
"""For a process that measures, or reads data, while the others have nothing to do."""
_EXCHANGES: ContextVar[bool] = ContextVar("exchanges", default=False)


@contextmanager
def exchange() -> Iterator[None]:
    """Within, every process works on the same step, and they exchange what they find."""
    token = _EXCHANGES.set(True)
    try:
        yield
    finally:
        _EXCHANGES.reset(token)


def num_exchanging() -> int:
    """Processes that work on the same step; 1 outside `exchange`."""
    return _num_processes() if _EXCHANGES.get() else 1


def sum_over_processes(tensor: Tensor) -> Tensor:
    """The sum of the tensors of all processes that work on the same step, without a gradient."""
    if num_exchanging() == 1:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of all processes that work on the same step, (N B, ...) of (B, ...) each, with their gradient.

    The gradient that a process's rows get is the sum over all processes, as each may have a loss of its own of them.
    """
    if num_exchanging() == 1:
        return rows
    gathered: Tensor = _GatheredRows.apply(rows)  # type: ignore[no-untyped-call]  # torch has no type for it
    return gathered


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # noqa: ARG004 (the signature of autograd's functions)
        parts = [torch.empty_like(rows) for _ in range(_num_processes())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004 (as above)
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total.chunk(_num_processes())[dist.get_rank()]


def agree(*flags: bool) -> tuple[bool, ...]:
    """Which of the flags any process has set. All processes call it, and wait for the last one however long it takes.

    Collectives of GPUs give up after minutes, which a validation by one process may take.
    """
    if _num_processes() == 1:
        return flags
    counts = torch.tensor([float(flag) for flag in flags])
    dist.all_reduce(counts, group=_patient_group(dist.group.WORLD))
    return tuple(count > 0 for count in counts.tolist())


@contextmanager
def first_process_first() -> Iterator[None]:
    """Lets the first process go through the block before the others, who wait for it as in `agree`."""
    if _num_processes() == 1:
        yield
        return
    is_first = dist.get_rank() == 0
    _patient_group(dist.group.WORLD)  # which all make together, before one of them is busy
    if not is_first:
        agree()
    try:
        yield
    finally:  # an error of the first process shall not leave the others waiting
        if is_first:
            agree()


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@functools.cache
def _patient_group(world: Any) -> Any:  # noqa: ARG001 (a group is one of the processes that were there)
    """The same processes, which wait for each other on the CPU and do not give up."""
    return dist.new_group(backend="gloo", timeout=_PATIENCE)
