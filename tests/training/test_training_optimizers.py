"""The optimizers of a recipe: which weights each takes, and that several act as one."""

import copy

import pytest
import torch
from torch.optim import SGD, AdamW

from headway_training.models import build_model
from headway_training.optimizers import JoinedOptimizer, make_optimizer
from headway_training.recipes.settings import OptimizationSettings

SHAPE = {"vocabulary_size": 20, "max_length": 16, "num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 32}
MUON = OptimizationSettings(epochs=1, optimizer="muon", learning_rate=0.01, weight_decay=0.5)


def make_model():
    torch.manual_seed(3)
    return build_model("gpt", SHAPE)


def take_step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randint(20, (2, 16))).logsumexp(-1).sum().backward()
    optimizer.step()


def test_muon_moves_the_matrices_of_the_layers_by_orthogonal_ones_and_adamw_the_rest():
    model = make_model()
    before = copy.deepcopy(dict(model.named_parameters()))
    take_step(model, make_optimizer(model, OptimizationSettings(epochs=1, optimizer="muon", weight_decay=0)), seed=1)
    for name, parameter in model.named_parameters():
        change = (parameter - before[name]).detach()
        if "layers." in name and parameter.ndim == 2:
            singular = torch.linalg.svdvals(change) / (1e-3 * 0.2 * max(change.shape) ** 0.5)
            assert 0.5 < singular.max() < 1.3, name  # Newton-Schulz brings singular values near one, not to it
        else:  # AdamW's first step is as long for every element that has a gradient
            assert change.abs().max() == pytest.approx(1e-3, rel=1e-2), name


@pytest.mark.parametrize(("optimizer", "kind"), [("adamw", AdamW), ("muon", JoinedOptimizer)])
def test_matrices_are_decayed_and_vectors_and_positions_are_not(optimizer, kind):
    model = make_model()
    made = make_optimizer(model, OptimizationSettings(epochs=1, optimizer=optimizer, weight_decay=0.5))
    assert type(made) is kind
    decays = {id(parameter): group["weight_decay"] for group in made.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        assert decays.pop(id(parameter)) == (0.5 if parameter.ndim > 1 and "positions" not in name else 0.0), name
    assert not decays


def test_a_joined_optimizer_goes_on_from_its_state():
    models = [make_model(), make_model()]
    optimizers = [make_optimizer(model, MUON) for model in models]
    for number in range(3):
        take_step(models[0], optimizers[0], seed=number)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = 0.02  # as a schedule sets it; the parts must see it
        take_step(model, optimizer, seed=9)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_joined_optimizer_steps_every_part_at_its_own_rate():
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    joined = JoinedOptimizer(SGD([weights[0]], lr=1.0), SGD([weights[1]], lr=10.0))
    sum(weight.sum() for weight in weights).backward()
    joined.step()
    assert [weight[0].item() for weight in weights] == [-1.0, -10.0]
    assert repr(joined) == "JoinedOptimizer(SGD, SGD)"
    with pytest.raises(ValueError, match="takes no closure"):
        joined.step(lambda: 0.0)
