"""Whether a model can be trained for a task: the points of the list in `models/protocols.py`, tried on a few rows.

A run of a module of the user's own is checked before its first step, and a test holds every model of the package to it.

B rows, T tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from headway_training.errors import RecipeError
from headway_training.processes import exchange
from headway_training.tasks import IGNORED, Task

_ROWS: Final = 3
_TOLERANCE: Final = 1e-3
_SHOWN: Final = 5
Tensors = Mapping[str, Tensor]


def check_contract(task: Task, model: nn.Module, seed: int = 0) -> None:
    """Tries a model on the first rows of a task's data, and leaves it as it was.

    Args:
        task: The task.
        model: As the task has wrapped it (`Task.wrap`), in fp32 on the CPU.
        seed: Of the run, whose first batch the rows are of.

    Raises:
        RecipeError: The model breaks a point: says which, and what to do.
    """
    batch = task.epoch_batches(seed, 0)[0][:_ROWS]
    rows = task.collate(batch, torch.Generator().manual_seed(seed)).tensors
    training = model.training
    with torch.random.fork_rng(devices=[]), exchange():
        try:
            task.before_step(model, 0, 1)
            model.eval()
            for check in (_check_predictions, _check_repeats, _check_rows, _check_order, _check_padding):
                check(task, model, rows)
            model.train()
            _check_buffers(task, model, rows)
            _check_gradients(task, model, rows)
        finally:
            model.zero_grad(set_to_none=True)
            model.train(training)


def _refuse(what: str) -> RecipeError:
    return RecipeError(f"the model cannot be trained so: {what} (docs/bring-your-own.md)")


@torch.no_grad()
def _check_predictions(task: Task, model: nn.Module, rows: Tensors) -> None:
    """There is a prediction for each target, among as many classes as the data has."""
    targets, given = rows["targets"], {name: tuple(one.shape) for name, one in rows.items() if name != "targets"}
    try:
        logits = task.logits(model, rows)
    except Exception as error:  # whatever its code raises
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _refuse(f"it does not read a batch, {given}: {said}. Make it take these tensors") from error
    if not isinstance(logits, Tensor) or logits.shape[: targets.ndim] != targets.shape:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise _refuse(
            f"it returns {found}, and the targets of the rows are {tuple(targets.shape)}: return logits of these axes, "
            "rows first, with the classes behind them"
        )
    decided = task.model_fields()
    field = next((name for name in ("num_classes", "vocabulary_size") if name in decided), None)
    is_told = task.takes_modules and logits.ndim == targets.ndim + 1
    if field is not None and is_told and logits.shape[-1] != decided[field]:
        raise _refuse(
            f"it tells {logits.shape[-1]} classes apart, and the data has {decided[field]}: give its factory a "
            f"parameter {field}, and make the last layer so wide"
        )
    if not logits.isfinite().all():
        raise _refuse("its fresh weights give numbers that are not finite: start from smaller ones")


@torch.no_grad()
def _check_repeats(task: Task, model: nn.Module, rows: Tensors) -> None:
    """In evaluation mode nothing is random."""
    if not _same(task.logits(model, rows), task.logits(model, rows)):
        raise _refuse(
            "in evaluation mode it answers the same batch twice with different numbers: make what is random depend on "
            "self.training, as nn.Dropout does"
        )


@torch.no_grad()
def _check_rows(task: Task, model: nn.Module, rows: Tensors) -> None:
    """The loss of a batch is the sum of its rows', and a row without targets counts for nothing."""
    if task.compares_rows:
        return
    count = len(rows["targets"])
    whole = task.loss(model, rows)
    parts = sum(task.loss(model, {name: one[row : row + 1] for name, one in rows.items()}) for row in range(count))
    if not _same(whole, torch.as_tensor(parts)):
        raise _refuse(
            f"a batch of {count} rows has the loss {float(whole):.5g}, and its rows one by one {float(parts):.5g}: "
            "a row's answer must not depend on others, so normalise within a row (nn.LayerNorm, nn.GroupNorm)"
        )
    ignored = {**rows, "targets": torch.full_like(rows["targets"], IGNORED)}
    if float(task.loss(model, ignored)) != 0:
        raise _refuse("rows whose targets are ignored have a loss: count in it only what has a target")


@torch.no_grad()
def _check_order(task: Task, model: nn.Module, rows: Tensors) -> None:
    """What is predicted does not depend on what comes after."""
    ids = rows.get(task.in_order)
    if ids is None or ids.shape[-1] < 2:
        return
    changed = ids.clone()
    changed[..., -1] = (ids[..., -1] == 0).long()
    before = task.logits(model, rows)[..., :-1, :]
    after = task.logits(model, {**rows, task.in_order: changed})[..., :-1, :]
    if not _same(before, after):
        raise _refuse(
            "another last token changes what is predicted before it: let tokens see each other through attend alone, "
            "and mix neighbours (a convolution) with those before them"
        )


@torch.no_grad()
def _check_padding(task: Task, model: nn.Module, rows: Tensors) -> None:
    """A text answers as it does without the padding behind it."""
    mask = rows.get("attention_mask")
    if mask is None or mask.shape[1] < 3:
        return
    length = mask.shape[1]
    per_token = [name for name, one in rows.items() if one.ndim == 2 and one.shape[1] == length]
    cut = {**rows, **{name: rows[name][:, :-1] for name in per_token}}
    padded = {**rows, "attention_mask": torch.cat((mask[:, :-1], torch.zeros_like(mask[:, -1:])), dim=1)}
    with_padding, without = task.logits(model, padded), task.logits(model, cut)
    kept = with_padding[:, :-1] if with_padding.ndim == 3 and with_padding.shape[1] == length else with_padding
    if not _same(kept, without):
        raise _refuse(
            "padding behind a text changes its answer: leave out of means and of attention what attention_mask has 0 at"
        )


def _check_buffers(task: Task, model: nn.Module, rows: Tensors) -> None:
    """A step's weights follow from the batch alone: nothing is noted in buffers."""
    before = {name: one.clone() for name, one in model.named_buffers()}
    with torch.no_grad():
        task.loss(model, rows)
    changed = [name for name, one in model.named_buffers() if not _same(one, before[name])]
    for name, one in model.named_buffers():
        one.copy_(before[name])
    if changed:
        raise _refuse(
            f"forward changes {_names(changed)}, which each process and part of a batch would change otherwise: keep "
            "no running figures in it (nn.BatchNorm does; nn.GroupNorm does not)"
        )


def _check_gradients(task: Task, model: nn.Module, rows: Tensors) -> None:
    """Every weight learns."""
    loss = task.loss(model, rows)
    if not loss.requires_grad:
        raise _refuse("its loss depends on no weight: have logits computed of nn.Parameters, without torch.no_grad")
    torch.autograd.backward(loss)
    idle = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    if idle and task.uses_all_weights:
        raise _refuse(
            f"{_names(idle)} get no gradient, so that they never learn: use them in forward, leave them out, or set "
            "requires_grad=False of what is to stay as it is"
        )


def _names(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    smallest = _TOLERANCE * float(one.abs().max().clamp(max=1)) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=smallest, equal_nan=True)
