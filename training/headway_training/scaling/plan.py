"""Which pilots fit a budget: sizes of a recipe's model, amounts of its data, and how long each takes.

N counts the weights of the layers alone, without the tables of tokens and positions and without an output projection:
these grow with the vocabulary, which is the same in all pilots, and would be most of what small pilots have. D counts
tokens that are read, those of a second pass over the data again: up to four passes are nearly as good as new data
(Muennighoff et al. 2023), so no pilot makes more.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from headway_training.errors import RecipeError
from headway_training.models import ARCHITECTURES, build_model, count_parameters
from headway_training.models.configuration import LayerConfig
from headway_training.optimization import layers_of, make_optimizers
from headway_training.recipes import Recipe
from headway_training.scaling.records import Pilot, Size
from headway_training.sizing import attention_kind, expected_throughput, size_up
from headway_training.tasks import Task
from headway_training.trainer import Objective

MOST_EPOCHS = 4
LEAST_STEPS = 20
"""Fewest optimizer steps of a pilot."""
LEAST_PILOTS = 4
TOKENS_PER_PARAMETER = 20
"""What a plan aims at for its largest size, where data and budget allow: near the optimum of Hoffmann et al."""
_GRIDS = ((4, 4), (4, 3), (3, 3))
"""Sizes and amounts of data, the best first; each amount is twice the one before."""
_SMALL_GRIDS = ((2, 3), (2, 2))
"""Which do not determine the five constants."""
_MOST_SHARE = 0.5
"""Of the budget, that the two shortest pilots of a size may take."""
_FACTORS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""Of the recipe's width and number of layers; a model grows by their third power."""
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_UNIT_S = (3600, 60, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Time or arithmetic that a run may take: one of the two is set."""

    seconds: float | None = None
    """Of this machine."""
    flops: float | None = None
    """Floating-point operations of matrix products, forward and backward."""

    def describe(self) -> str:
        """In words."""
        return f"{self.flops:.3g} FLOPs" if self.seconds is None else describe_duration(self.seconds)


def parse_budget(text: str, *, flops: bool = True) -> Budget:
    """Reads `4h`, `1h30m`, `90s`, or a number of operations, such as `1e18`.

    Args:
        text: What to read.
        flops: Whether a number of operations may be given.

    Raises:
        RecipeError: It is neither, or not above 0.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = (
        sum(float(part) * unit for part, unit in zip(match.groups(), _UNIT_S, strict=True) if part) if match else 0
    )
    if seconds > 0:
        return Budget(seconds=seconds)
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if flops and 0 < number < math.inf:
        return Budget(flops=number)
    other = ", or a number of FLOPs, such as 1e18" if flops else ""
    raise RecipeError(f"the budget is {text!r}; it must be a time above 0, such as 4h, 1h30m or 90s{other}")


def describe_duration(seconds: float) -> str:
    """A time in its largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What an optimizer step and a pass over the training data read."""

    step_tokens: float
    """Tokens of a step."""
    epoch_tokens: float
    """Tokens of a pass."""

    @classmethod
    def of(cls, task: Task, seed: int) -> Data:
        """Counts on the first epoch; rows have the same length."""
        batches = task.epoch_batches(seed, 0)
        if not batches:
            raise RecipeError("the training data makes no batch: it is too small for the recipe's model.max_length")
        rows = sum(len(batch) for batch in batches)
        row_tokens = task.collate(batches[0], torch.Generator().manual_seed(seed)).num_units / len(batches[0])
        return cls(step_tokens=rows * row_tokens / len(batches), epoch_tokens=rows * row_tokens)

    @property
    def most_steps(self) -> int:
        """Of a pilot."""
        return int(MOST_EPOCHS * self.epoch_tokens / self.step_tokens)


def shapes(recipe: Recipe, task: Task) -> Iterator[dict[str, Any]]:
    """The fields of the recipe's model at rising sizes: heads of the same width, as many layers for a width as it has.

    Raises:
        RecipeError: The architecture has no width and no layers that could be scaled.
    """
    scalable = {
        name: one.configuration
        for name, one in ARCHITECTURES.items()
        if issubclass(one.configuration, LayerConfig) and "num_layers" in one.configuration.__dataclass_fields__
    }
    kind = scalable.get(recipe.architecture)
    if kind is None:
        raise RecipeError(
            f"{recipe.name}: the sizes of {recipe.architecture!r} cannot be varied; those of {', '.join(scalable)} can"
        )
    try:
        whole: Any = kind.from_dict({**recipe.configuration, **task.model_fields()})
    except (TypeError, ValueError) as error:
        raise RecipeError(f"model: {error}") from error
    group = whole.num_heads // (whole.num_kv_heads or whole.num_heads)
    before = (0, 0)
    for factor in _FACTORS:
        num_heads = max(group, round(whole.num_heads * factor / group) * group)
        d_model = num_heads * whole.head_dim
        num_layers = max(1, round(whole.num_layers * factor))
        if (d_model, num_layers) == before:
            continue
        before = (d_model, num_layers)
        yield {
            "num_layers": num_layers,
            "d_model": d_model,
            "num_heads": num_heads,
            **({"num_kv_heads": num_heads // group} if whole.num_kv_heads else {}),
            "d_ff": max(8, round(whole.d_ff * d_model / whole.d_model / 8) * 8),
        }


def measure_sizes(recipe: Recipe, task: Task, data: Data, budget_s: float, seed: int) -> list[Size]:
    """Measures sizes, the smallest first, up to the first one too large for the memory or for a plan of the budget.

    How long a size takes is guessed from the one before, so that none is measured that could not be used.
    """
    sizes: list[Size] = []
    for fields in shapes(recipe, task):
        try:
            if sizes:
                flop_s = sizes[-1].token_s / sizes[-1].flops_per_token
                guessed = measure_size(recipe, fields, task, seed, flop_s)
                if _grid_s([guessed], _doubled(LEAST_STEPS, 2), data) > _MOST_SHARE * budget_s:
                    break
            sizes.append(measure_size(recipe, fields, task, seed))
        except RecipeError:
            break
    return sizes


def measure_size(recipe: Recipe, fields: dict[str, Any], task: Task, seed: int, flop_s: float | None = None) -> Size:
    """Counts what a size needs, and times it on the device of the run.

    Args:
        recipe: The recipe.
        fields: One of its `shapes`.
        task: Its task.
        seed: Of weights and batches.
        flop_s: Seconds of an operation, from which the times follow without any training; None: they are measured.

    Raises:
        RecipeError: It needs more memory than there is.
    """
    recipe = recipe.model_copy(update={"model": {**recipe.model, **fields}})
    settings, device = recipe.optimization, run_device()
    sizing = size_up(recipe, task, seed, device)
    torch.manual_seed(seed)
    with torch.device("meta" if flop_s else "cpu"):
        model = build_model(recipe.architecture, {**recipe.configuration, **task.model_fields()})
    if flop_s:
        token_s, evaluation_s = flop_s * sizing.flops_per_unit, 0.0
    else:
        wrapped = task.wrap(model).use_attention(attention_kind(device, recipe.model)).to(device)
        objective = Objective(task, wrapped, settings, device.type)
        rate, _ = expected_throughput(sizing, objective, bf16=settings.precision == "bf16", device=device)
        update_s = _update_s(recipe, model)
        token_s = 1 / rate + update_s / (sizing.batch.num_units * settings.gradient_accumulation)
        started_s = time.perf_counter()
        task.evaluate(model.eval(), "valid")
        evaluation_s = time.perf_counter() - started_s
    return Size(
        model=fields,
        parameter_count=sum(count_parameters(layer) for layer in layers_of(model)),
        whole_parameter_count=count_parameters(model),
        flops_per_token=sizing.flops_per_unit,
        token_s=token_s,
        evaluation_s=evaluation_s,
    )


def run_device() -> torch.device:
    """What pilots are trained on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _update_s(recipe: Recipe, model: nn.Module) -> float:
    """Seconds of the optimizers' part of a step, which fresh weights are changed by."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers = make_optimizers(model, recipe.optimization)
    times = []
    for _ in range(2):  # the first one allocates
        started_s = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    model.zero_grad(set_to_none=True)
    return min(times)


def plan_pilots(sizes: Sequence[Size], data: Data, budget_s: float) -> list[Pilot]:
    """Chooses a grid of sizes and amounts of data whose estimated times add up to the budget at most.

    The grid is the largest that fits; of its sizes, neighbours, the largest is the largest one that can still read
    `TOKENS_PER_PARAMETER`, or all the data four times. Where no size can, a quarter of that, or anything, is enough.

    Returns:
        The pilots by rising arithmetic: the last one has the largest size and the most data.

    Raises:
        RecipeError: Not even four fit.
    """
    for grids, ratio in product((_GRIDS, _SMALL_GRIDS), (TOKENS_PER_PARAMETER, TOKENS_PER_PARAMETER / 4, 0)):
        for num_sizes, num_amounts in grids:
            for top in range(len(sizes), num_sizes - 1, -1):
                chosen = sizes[top - num_sizes : top]
                steps = _most_steps(chosen, num_amounts, data, budget_s)
                wanted = min(data.most_steps, ratio * chosen[-1].parameter_count / data.step_tokens)
                if steps is not None and steps[-1] >= wanted:
                    return sorted(_pilots(chosen, steps, data), key=lambda pilot: pilot.flops)
    least_s = _grid_s(sizes[:2], _doubled(LEAST_STEPS, 2), data)
    if len(sizes) < 2:
        raise RecipeError("the model of the recipe has no two sizes that fit the memory; make it smaller")
    if data.most_steps < 2 * LEAST_STEPS:
        raise RecipeError(
            f"the training data makes {data.most_steps} steps in {MOST_EPOCHS} passes, and pilots need "
            f"{2 * LEAST_STEPS}: take more data, or a smaller optimization.batch_size"
        )
    raise RecipeError(
        f"the budget is {describe_duration(budget_s)}, and {LEAST_PILOTS} pilots of the two smallest sizes take about "
        f"{describe_duration(least_s)}: raise --budget, or make the recipe's model smaller"
    )


def _most_steps(sizes: Sequence[Size], num_amounts: int, data: Data, budget_s: float) -> list[int] | None:
    """The steps of each amount of data, as many as the budget has room for; None where it has too little."""
    doubled = sum(_doubled(1, num_amounts))
    left_s = budget_s - num_amounts * sum(size.evaluation_s for size in sizes)
    least = int(left_s / (doubled * data.step_tokens * sum(size.token_s for size in sizes)))
    least = min(least, data.most_steps // 2 ** (num_amounts - 1))
    return _doubled(least, num_amounts) if least >= LEAST_STEPS else None


def _doubled(least: int, count: int) -> list[int]:
    return [least * 2**power for power in range(count)]


def _grid_s(sizes: Sequence[Size], steps: Sequence[int], data: Data) -> float:
    return sum(pilot.estimated_s for pilot in _pilots(sizes, steps, data))


def _pilots(sizes: Sequence[Size], steps: Sequence[int], data: Data) -> list[Pilot]:
    return [
        Pilot(
            size=size,
            step_count=count,
            token_count=round(count * data.step_tokens),
            estimated_s=count * data.step_tokens * size.token_s + size.evaluation_s,
        )
        for size in sizes
        for count in steps
    ]


def pilot_recipe(recipe: Recipe, pilot: Pilot, data: Data) -> Recipe:
    """The recipe of a pilot: of its size and length, validated at its end alone."""
    epochs = pilot.token_count / data.epoch_tokens
    settings = recipe.optimization.model_copy(
        update={"epochs": math.ceil(epochs) + 1.0, "max_steps": pilot.step_count, "evaluations": 1, "patience": 0}
    )
    return recipe.model_copy(update={"model": {**recipe.model, **pilot.size.model}, "optimization": settings})
