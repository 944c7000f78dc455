"""What a training run needs is counted without allocating it, and a run that does not fit is refused."""

from dataclasses import replace

import pytest
import torch
from tiny_models import LLAMA_PARTS

from headway_training import sizing
from headway_training.data.sources import OwnData, read_splits
from headway_training.errors import RecipeError
from headway_training.models import build_model, count_parameters
from headway_training.recipes import OptimizationSettings, read_recipe
from headway_training.sizing import expected_throughput, measure_footprint, size_up
from headway_training.tasks import make_task

CPU = torch.device("cpu")


class Mean(torch.nn.Module):
    """One matrix, of which autograd keeps the input: x @ w, squared."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(4, 8))

    def forward(self, x):
        return ((x @ self.matrix) ** 2).sum()


def test_the_footprint_of_a_product_is_known():
    tensors = {"x": torch.zeros(10, 4)}
    plain = OptimizationSettings(epochs=1, precision="fp32", average_decay=0.9)
    footprint = measure_footprint(Mean, lambda model, batch: model(batch["x"]), tensors, plain)
    assert footprint.parameter_count == 32
    assert (footprint.weight_bytes, footprint.gradient_bytes, footprint.optimizer_bytes) == (128, 128, 384)
    assert footprint.activation_bytes == 4 * (
        10 * 4 + 10 * 8
    )  # the input, for the weights; the product, for its square
    assert footprint.step_flops == 3 * 2 * 10 * 4 * 8
    half = measure_footprint(Mean, lambda model, batch: model(batch["x"]), tensors, OptimizationSettings(epochs=1))
    assert (half.weight_bytes, half.optimizer_bytes) == (192, 256)


@pytest.mark.parametrize("attention", ["plain", "fused"])
def test_the_footprint_of_a_llama_is_that_of_its_matrices(attention):
    rows, length, vocabulary, layers, width, heads, kv_heads, inner = 2, 12, 40, 3, 32, 4, 1, 56
    head_dim = width // heads
    sizes = {"vocabulary_size": vocabulary, "max_length": 16, "num_layers": layers, "d_model": width}
    fields = {**sizes, "num_heads": heads, "d_ff": inner, **LLAMA_PARTS, "num_kv_heads": kv_heads}
    footprint = measure_footprint(
        lambda: build_model("gpt", fields, attention=attention),
        lambda model, batch: model(batch["ids"]).sum(),
        {"ids": torch.zeros(rows, length, dtype=torch.int64)},
        OptimizationSettings(epochs=1, precision="fp32"),
    )
    matrices = layers * (width * (width + 2 * kv_heads * head_dim) + width * width + 3 * width * inner)
    norms, embedding = (2 * layers + 1) * width, vocabulary * width  # which is the output projection, too
    assert footprint.parameter_count == matrices + norms + embedding
    products = 2 * rows * length * (matrices + embedding)
    scores_and_contexts = layers * 2 * 2 * rows * heads * length * length * head_dim
    assert footprint.step_flops == 3 * (products + scores_and_contexts)
    kept_at_least = 4 * rows * length * layers * (3 * width + 3 * inner)  # what the matrices and the gate read
    assert kept_at_least < footprint.activation_bytes < 10 * kept_at_least


def test_muon_keeps_one_moment_of_the_matrices_of_layers(tiny_task):
    recipe, task = tiny_task
    adamw, muon = (
        recipe.model_copy(update={"optimization": recipe.optimization.model_copy(update={"optimizer": optimizer})})
        for optimizer in ("adamw", "muon")
    )
    model = build_model("gpt", {**recipe.configuration, **task.model_fields()})
    matrices = sum(w.numel() for name, w in model.named_parameters() if w.ndim == 2 and name.startswith("stack.layers"))
    adamw_bytes, muon_bytes = (
        size_up(one, task, seed=0, device=CPU).footprint.optimizer_bytes for one in (adamw, muon)
    )
    assert matrices > 0
    assert adamw_bytes - muon_bytes == 4 * matrices


@pytest.fixture
def tiny_task(tmp_path, verses, tiny_settings):
    recipe = read_recipe("tiny-shakespeare", tiny_settings["tiny-shakespeare"])
    own = OwnData(train=str(verses), valid=str(verses))
    return recipe, make_task(recipe, read_splits(recipe, tmp_path, own), tmp_path)


def test_a_recipe_is_sized_up_without_weights(tiny_task):
    recipe, task = tiny_task
    sized = size_up(recipe, task, seed=0, device=CPU)
    model = build_model("gpt", {**recipe.configuration, **task.model_fields()})
    assert sized.footprint.parameter_count == count_parameters(model)
    assert sized.batch.num_units == 8 * 16
    assert "weights" in sized.describe()
    assert "available" in sized.describe()


def size_up_freely(recipe, task, monkeypatch):
    """The footprint, however much memory there is."""
    monkeypatch.setattr(sizing, "available_bytes", lambda _: 2**60)
    return size_up(recipe, task, seed=0, device=CPU).footprint


def test_what_does_not_fit_is_refused_with_the_largest_named_size_that_does(tiny_task, monkeypatch):
    _, task = tiny_task
    recipe = read_recipe("tiny-shakespeare", ["optimization.batch_size=8"], configuration="gpt3-large")
    named = {name: sizing.NAMED_CONFIGURATIONS[name] for name in ("gpt3-small", "gpt3-medium")}
    monkeypatch.setattr(sizing, "NAMED_CONFIGURATIONS", named)
    monkeypatch.setattr(sizing, "available_bytes", lambda _: 8 * 2**30)
    with pytest.raises(RecipeError, match=r"needs about weights .* = .* GiB, and 8\.0 GiB are available") as refused:
        size_up(recipe, task, seed=0, device=CPU)
    assert "largest named size that fits is gpt3-medium" in str(refused.value)
    recipe = read_recipe("tiny-shakespeare", ["optimization.batch_size=8"], configuration="gpt3-small")
    needed = size_up_freely(recipe, task, monkeypatch)
    monkeypatch.setattr(sizing, "available_bytes", lambda _: needed.total_bytes - needed.activation_bytes // 2)
    with pytest.raises(
        RecipeError, match=r"work through a batch in parts, with --set optimization\.gradient_accumulation=[23]$"
    ):
        size_up(recipe, task, seed=0, device=CPU)
    monkeypatch.setattr(sizing, "available_bytes", lambda _: 1000)
    with pytest.raises(RecipeError, match=r"No named size fits at this batch$"):
        size_up(recipe, task, seed=0, device=CPU)


def test_the_speed_is_measured_where_that_is_quick_and_changes_nothing(tiny_task, monkeypatch):
    recipe, task = tiny_task
    sized = size_up(recipe, task, seed=0, device=CPU)
    model = build_model("gpt", {**recipe.configuration, **task.model_fields()})

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tensors):
            return task.loss(self.model, tensors)

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    rate, how = expected_throughput(sized, Loss(), bf16=True, device=CPU)
    assert rate > 0
    assert "measured over" in how
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    monkeypatch.setattr(sizing, "matrix_flops", lambda *_, **__: 1000.0)
    rate, how = expected_throughput(sized, Loss(), bf16=True, device=CPU)
    assert rate == pytest.approx(500 / sized.flops_per_unit)
    assert "estimated: 50% of" in how


def test_the_speed_is_that_of_all_passes_and_not_of_the_quickest(tiny_task, monkeypatch):
    recipe, task = tiny_task
    sized = size_up(recipe, task, seed=0, device=CPU)
    clock = iter([0.0, 9.0, *(time for start in (10.0, 20.0, 30.0) for time in (start, start + start / 10))])
    monkeypatch.setattr(sizing, "WARM_UP_S", 100.0)
    monkeypatch.setattr(sizing, "matrix_flops", lambda *_, **__: 1e15)
    monkeypatch.setattr(sizing.time, "perf_counter", lambda: next(clock))

    class Loss(torch.nn.Module):
        def forward(self, tensors):  # noqa: ARG002 (nothing is read)
            return torch.zeros((), requires_grad=True)

    rate, how = expected_throughput(sized, Loss(), bf16=True, device=CPU)
    assert rate == pytest.approx(sized.batch.num_units * 3 / 6)
    assert "over 3 passes" in how


@pytest.mark.parametrize(("times", "expected"), [(9.9, False), (10, True)])
def test_freed_memory_is_kept_only_where_there_is_plenty(tiny_task, times, expected):
    recipe, task = tiny_task
    sized = size_up(recipe, task, seed=0, device=CPU)
    assert replace(sized, available_bytes=round(times * sized.footprint.total_bytes)).leaves_room is expected


def footprint_of(tiny_task, monkeypatch, **changes):
    recipe, task = tiny_task
    optimization = recipe.optimization.model_copy(update=changes)
    return size_up_freely(recipe.model_copy(update={"optimization": optimization}), task, monkeypatch)


def test_parts_of_a_batch_and_layers_computed_anew_need_less_memory(tiny_task, monkeypatch):
    whole = footprint_of(tiny_task, monkeypatch)
    parts = footprint_of(tiny_task, monkeypatch, gradient_accumulation=4)
    assert parts.activation_bytes == pytest.approx(whole.activation_bytes / 4, rel=0.05)
    assert parts.weight_bytes == whole.weight_bytes
    anew = footprint_of(tiny_task, monkeypatch, activation_checkpointing=True)
    assert anew.activation_bytes <= whole.activation_bytes
    assert anew.step_flops == pytest.approx(whole.step_flops * 4 / 3)
    recipe, task = tiny_task
    deep = recipe.model_copy(update={"model": {**recipe.model, "num_layers": 8}})
    plain, checkpointed = (footprint_of((deep, task), monkeypatch, activation_checkpointing=on) for on in (False, True))
    assert checkpointed.activation_bytes < plain.activation_bytes / 2
