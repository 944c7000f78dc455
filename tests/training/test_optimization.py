"""Optimizers, the average of the weights, parts of a batch and activations that are computed anew."""

import copy

import pytest
import torch
from rich.console import Console
from torch.optim import AdamW, Muon

from headway_training.data import OwnData, read_splits
from headway_training.errors import RecipeError
from headway_training.models import build_model
from headway_training.optimization import checkpoint_activations, layers_of, make_average, make_optimizers
from headway_training.recipes import OptimizationSettings, read_recipe
from headway_training.tasks import make_task
from headway_training.trainer import Trainer

QUIET = Console(quiet=True)
SHAPE = {"vocabulary_size": 20, "max_length": 16, "num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 32}


def make_model():
    torch.manual_seed(3)
    return build_model("gpt", SHAPE)


def take_step(model, optimizers, seed):
    torch.manual_seed(seed)
    model.zero_grad()
    model(torch.randint(20, (2, 16))).logsumexp(-1).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_muon_moves_the_matrices_of_the_layers_by_orthogonal_ones_and_adamw_the_rest():
    model = make_model()
    before = copy.deepcopy(dict(model.named_parameters()))
    take_step(model, make_optimizers(model, OptimizationSettings(epochs=1, optimizer="muon", weight_decay=0)), seed=1)
    for name, parameter in model.named_parameters():
        change = (parameter - before[name]).detach()
        if "layers." in name and parameter.ndim == 2:
            singular = torch.linalg.svdvals(change) / (1e-3 * 0.2 * max(change.shape) ** 0.5)
            assert 0.5 < singular.max() < 1.3, name  # Newton-Schulz brings singular values near one, not to it
        else:  # AdamW's first step is as long for every element that has a gradient
            assert change.abs().max() == pytest.approx(1e-3, rel=1e-2), name


@pytest.mark.parametrize(("optimizer", "kinds"), [("adamw", [AdamW]), ("muon", [AdamW, Muon])])
def test_matrices_are_decayed_and_vectors_and_positions_are_not(optimizer, kinds):
    model = make_model()
    made = make_optimizers(model, OptimizationSettings(epochs=1, optimizer=optimizer, weight_decay=0.5))
    assert [type(one) for one in made] == kinds
    groups = [group for one in made for group in one.param_groups]
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        assert decays.pop(id(parameter)) == (0.5 if parameter.ndim > 1 and "positions" not in name else 0.0), name
    assert not decays


def test_the_average_forgets_the_start_and_then_moves_slowly():
    model = torch.nn.Linear(1, 1, bias=False)
    average = make_average(model, 0.9)
    assert average is not None
    expected = None
    for step in range(200):
        torch.nn.init.constant_(model.weight, float(step))
        average.update_parameters(model)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = float(step) if expected is None else decay * expected + (1 - decay) * step
        assert average.module.weight.item() == pytest.approx(expected, rel=1e-5)
    assert make_average(model, 0.0) is None


def make_trainer(folder, name, data, settings):
    """A trainer with a fresh model of the same seed every time."""
    recipe = read_recipe(name, ["optimization.precision=fp32", *settings])
    own = OwnData(train=str(data), valid=str(data))
    task = make_task(recipe, read_splits(recipe, folder, own), folder)
    torch.manual_seed(0)
    model = build_model(recipe.architecture, {**recipe.configuration, **task.model_fields()})
    return Trainer(task=task, model=model, recipe=recipe, folder=folder, seed=0, console=QUIET)


def gradients_of(trainer, seed=1):
    """Loss and gradients of the first batch."""
    batch = trainer._make_batch(0)
    trainer.objective.train()
    torch.manual_seed(seed)
    loss = trainer._backward(batch)
    return loss, {name: weight.grad for name, weight in trainer.model.named_parameters() if weight.grad is not None}


TASKS = {
    "ag-news": "reviews",
    "tiny-shakespeare": "verses",
    "cifar10": "pictures",
    "multi30k-en-de": "pairs",
    "multi30k-en-de-rnn": "pairs",
}


@pytest.mark.parametrize("parts", [3, 100])
def test_a_batch_in_any_number_of_parts_has_the_gradient_of_the_whole(tmp_path, tiny_settings, pairs, parts):
    name = "multi30k-en-de"
    settings = (*tiny_settings[name], "model.dropout=0")
    whole = gradients_of(make_trainer(tmp_path, name, pairs, settings))
    accumulated = gradients_of(
        make_trainer(tmp_path, name, pairs, (*settings, f"optimization.gradient_accumulation={parts}"))
    )
    torch.testing.assert_close(accumulated[0], whole[0])
    torch.testing.assert_close(accumulated[1], whole[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ag-news", "tiny-shakespeare", "cifar10", "multi30k-en-de"])
def test_activations_computed_anew_give_the_same_gradients_under_dropout(tmp_path, tiny_settings, request, name):
    data = request.getfixturevalue(TASKS[name])
    layers = (
        ("model.num_encoder_layers=2", "model.num_decoder_layers=2") if "en-de" in name else ("model.num_layers=2",)
    )
    settings = (*tiny_settings[name], *layers, "model.dropout=0.3")
    plain = make_trainer(tmp_path, name, data, settings)
    anew = make_trainer(tmp_path, name, data, (*settings, "optimization.activation_checkpointing=true"))
    calls = []
    for layer in layers_of(anew.model):
        layer.attention.register_forward_hook(lambda *_: calls.append(1))
    (loss, gradients), (other_loss, others) = gradients_of(plain), gradients_of(anew)
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == others.keys()
    for gradient_name, gradient in gradients.items():
        assert torch.equal(gradient, others[gradient_name]), gradient_name
    assert len(calls) == 2 * len(layers_of(anew.model)), "the layers were not computed anew"


def test_a_model_without_layers_cannot_compute_them_anew(tmp_path, pairs):
    with pytest.raises(ValueError, match="the model has no layers"):
        checkpoint_activations(torch.nn.Linear(1, 1))
    settings = ("tokenizer.vocabulary_size=300", "optimization.activation_checkpointing=true")
    with pytest.raises(RecipeError, match="activation_checkpointing: the model has no layers"):
        make_trainer(tmp_path, "multi30k-en-de-rnn", pairs, settings)
