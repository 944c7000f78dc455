"""A scaling law is fitted to pilots within a budget, and predicts the largest of them."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headway_training.cli import app
from headway_training.errors import RecipeError, StoppedError
from headway_training.models import GPTConfig
from headway_training.recipes import read_recipe
from headway_training.scaling import ScalingLaw, fit_law, parse_budget, plan, study
from headway_training.scaling.plan import MOST_EPOCHS, Data, plan_pilots, shapes
from headway_training.scaling.records import Size, Study

CHINCHILLA = ScalingLaw(irreducible=1.69, size_factor=406.4, size_exponent=0.34, data_factor=410.7, data_exponent=0.28)
"""Hoffmann et al. 2022, equation 10."""


def points(law: ScalingLaw, noise: float, seed: int) -> list[tuple[float, float, float]]:
    random = np.random.default_rng(seed)
    return [
        (size, tokens, law.loss(size, tokens) * math.exp(random.normal(0, noise)))
        for size in np.geomspace(1e6, 1e9, 5)
        for tokens in np.geomspace(2e7, 2e10, 5)
    ]


def test_the_constants_of_losses_without_noise_are_found():
    law = fit_law(points(CHINCHILLA, noise=0.0, seed=0))
    for name in ("irreducible", "size_factor", "size_exponent", "data_factor", "data_exponent"):
        assert getattr(law, name) == pytest.approx(getattr(CHINCHILLA, name), rel=1e-3), name


def test_a_few_noisy_losses_hardly_move_the_law():
    noisy = points(CHINCHILLA, noise=1e-3, seed=7)
    noisy[3] = (*noisy[3][:2], noisy[3][2] * 1.2)  # which a squared loss would follow
    law = fit_law(noisy)
    assert law.loss(1e10, 2e11) == pytest.approx(CHINCHILLA.loss(1e10, 2e11), rel=0.01)
    assert law.size_exponent == pytest.approx(0.34, abs=0.02)
    assert law.data_exponent == pytest.approx(0.28, abs=0.02)


SIZES = [
    Size(
        model={"num_layers": 1},
        parameter_count=3**power * 10_000,
        whole_parameter_count=3**power * 10_000,
        flops_per_token=6e4 * 3**power,
        token_s=1e-5 * 3**power,
        evaluation_s=0.1,
    )
    for power in range(6)
]
DATA = Data(step_tokens=1000, epoch_tokens=1_000_000)


@pytest.mark.parametrize("budget_s", [10, 60, 600, 6_000, 600_000])
def test_a_plan_stays_within_its_budget_and_the_data(budget_s):
    pilots = plan_pilots(SIZES, DATA, budget_s)
    assert sum(pilot.estimated_s for pilot in pilots) <= budget_s
    assert len(pilots) >= 4
    assert max(pilot.token_count for pilot in pilots) <= MOST_EPOCHS * DATA.epoch_tokens
    largest = pilots[-1]
    assert largest.token_count == max(pilot.token_count for pilot in pilots)
    assert largest.size.parameter_count == max(pilot.size.parameter_count for pilot in pilots)
    assert len({(pilot.size.parameter_count, pilot.step_count) for pilot in pilots}) == len(pilots)


def test_more_time_is_spent_on_larger_sizes_and_more_data():
    small, large = (plan_pilots(SIZES, DATA, budget_s)[-1] for budget_s in (60, 6_000))
    assert large.flops > 20 * small.flops


def test_a_budget_without_room_for_four_pilots_is_refused_with_what_they_take():
    with pytest.raises(RecipeError, match=r"the budget is 1\.0 s, and 4 pilots .* take about 2\.\d s: raise --budget"):
        plan_pilots(SIZES, DATA, 1.0)
    with pytest.raises(RecipeError, match="makes 8 steps in 4 passes, and pilots need 40"):
        plan_pilots(SIZES, Data(step_tokens=1000, epoch_tokens=2000), 600)


@pytest.mark.parametrize("name", ["tiny-shakespeare", "tiny-shakespeare-llama"])
def test_sizes_keep_the_width_of_heads_and_their_groups(name):
    class Vocabulary:
        def model_fields(self):
            return {"vocabulary_size": 300}

    recipe = read_recipe(name)
    kind = GPTConfig
    whole = kind.from_dict(recipe.configuration)
    made = [kind.from_dict({**recipe.configuration, **fields}) for fields in shapes(recipe, Vocabulary())]
    assert whole in made
    assert {one.head_dim for one in made} == {whole.head_dim}
    assert {one.num_heads // (one.num_kv_heads or one.num_heads) for one in made} == {
        whole.num_heads // (whole.num_kv_heads or whole.num_heads)
    }
    assert [one.d_model for one in made] == sorted(one.d_model for one in made)


@pytest.mark.parametrize(("text", "seconds"), [("4h", 14_400), ("1h30m", 5_400), ("90s", 90), ("0.5h", 1_800)])
def test_budgets_of_time_are_read(text, seconds):
    assert parse_budget(text).seconds == seconds


def test_a_target_may_be_a_number_of_operations_and_a_budget_may_not():
    assert parse_budget("1e18").flops == 1e18
    for text in ("1e18", "0s", "", "soon"):
        with pytest.raises(RecipeError, match="must be a time above 0"):
            parse_budget(text, flops=False)


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*words], catch_exceptions=False)
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def test_pilots_are_trained_once_and_the_largest_is_predicted(tmp_path, verses, tiny_settings, monkeypatch):
    monkeypatch.setattr(plan, "_FACTORS", (1, 2))
    monkeypatch.setattr(plan, "_GRIDS", ((2, 2),))
    trained: list[int] = []
    train = study._train

    def stop_before_the_third(task, recipe, pilot, folder: Path, **others):
        if len(trained) == 2:
            trained.append(0)
            raise StoppedError("stopped by SIGTERM")
        trained.append(pilot.step_count)
        return train(task, recipe, pilot, folder, **others)

    monkeypatch.setattr(study, "_train", stop_before_the_third)
    folder = tmp_path / "scale"
    words = ["scale", "tiny-shakespeare", "--train", str(verses), "--valid", str(verses), "--output", str(folder)]
    for setting in (*tiny_settings["tiny-shakespeare"], "optimization.batch_size=4", "optimization.precision=fp32"):
        words += ["--set", setting]
    words += ["--budget", "60s", "--target", "1e9"]
    code, output = invoke(*words)
    assert (code, "go on with the same command and --resume" in output) == (130, True)
    assert invoke(*words)[0] == 1  # the folder is taken
    code, output = invoke(*words, "--resume")
    assert code == 0, output
    assert len(trained) == 5  # with the one that was stopped
    found = Study.model_validate_json((folder / "scale.json").read_text())
    assert len(found.pilots) == 4
    assert all(pilot.loss is not None and 0 < pilot.loss < 6 for pilot in found.pilots)
    assert found.held_out is not None
    assert found.advice is not None
    assert found.held_out.measured == found.pilots[-1].loss
    assert f"measured {found.held_out.measured:.4f}" in output
    assert "a law of 5 constants is not determined by 4 pilots" in output
    assert found.advice.flops == pytest.approx(1e9, rel=1e-6)
    assert (folder / "scale.svg").read_text().count("N = ") == 2
    assert not list((folder / "pilots").glob("*"))
    before = json.loads((folder / "scale.json").read_text())["pilots"]
    code, output = invoke(*words[:-1], "2s", "--resume")  # another target: nothing is trained
    assert (code, len(trained)) == (0, 5), output
    assert json.loads((folder / "scale.json").read_text())["pilots"] == before
    assert "for 2.0 s:" in output
    code, output = invoke(*words, "--resume", "--seed", "1")
    assert code == 1
    assert "was begun with another seed" in output


def test_a_recipe_without_a_loss_that_compares_is_refused(tmp_path):
    code, output = invoke("scale", "ag-news", "--budget", "1h", "--output", str(tmp_path / "scale"))
    assert code == 1
    assert "fitted to losses in nats" in output
    assert "text_classification" in output
