"""What rounding alone does to a model is told from what a wrong export does."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from headway_export.errors import ParityError
from headway_export.parity import LOGIT_BOUND, Comparison
from headway_export.rounding import LARGEST, rounded_answers
from headway_export.tasks.detection import add_objects
from headway_server.tasks.detection.objects import BOXES
from headway_server.tasks.outputs import LOGITS

WIDTH = 64
INPUT = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))


class Cancelling(nn.Module):
    """Two products with a common bias, of which the difference is given: the larger it is, the more is rounded away."""

    def __init__(self, common: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for layer in (self.first, self.second):
            nn.init.constant_(layer.bias, common)

    def answer(self, dtype=torch.float32):
        """Logits, (5, WIDTH) float32, computed in a dtype."""
        with torch.inference_mode():
            x, model = INPUT.to(dtype), self.to(dtype)
            found = (model.first(x) - model.second(x)).float().numpy()
        self.float()
        return found


def compare(found, model, comparison=None):
    comparison = comparison or Comparison(bound=LOGIT_BOUND)
    comparison.add("logits", found, model.answer(), "a test", model.answer)
    return comparison


def test_an_answer_that_rounding_moves_is_within_what_rounding_does():
    model = Cancelling(common=1e4)
    comparison = compare(model.answer(torch.float64), model)
    assert comparison.max_error > LOGIT_BOUND
    assert comparison.num_rounded == 1


def test_an_answer_within_the_bound_is_not_counted():
    model = Cancelling(common=0.0)
    assert compare(model.answer(torch.float64), model).num_rounded == 0


@pytest.mark.parametrize(("common", "factor"), [(0.0, 1.001), (1e4, 1.01), (1e4, 1 + 2 * LARGEST)])
def test_a_wrong_answer_is_refused_however_sensitive_the_model_is(common, factor):
    model = Cancelling(common)
    with pytest.raises(ParityError, match="rounding does not explain"):
        compare(model.answer() * factor, model)


def test_what_cannot_be_told_from_rounding_is_refused_from_a_size_on():
    model = Cancelling(common=3e6)
    with pytest.raises(ParityError, match="rounding does not explain"):
        compare(model.answer(torch.float64), model)


def test_a_token_may_be_another_where_rounding_moves_the_best_two_that_far():
    for common, tokens_differ in ((1e4, True), (0.0, False)):
        model = Cancelling(common)
        expected = model.answer()
        second = expected.argsort(axis=-1)[:, -2]
        rows = np.arange(len(expected))
        best = expected.argmax(axis=-1)
        close = expected.copy()
        close[rows, second] = expected[rows, best] - 1e-3
        comparison = Comparison(bound=LOGIT_BOUND)
        again = lambda model=model, shift=close - expected: model.answer() + shift  # noqa: E731
        if tokens_differ:
            comparison.add_greedy(second, close, "a test", again)
            assert comparison.num_mismatches == 0
        else:
            with pytest.raises(ParityError, match="PyTorch chooses"):
                comparison.add_greedy(second, close, "a test", again)


def test_draws_are_the_same_each_time_and_leave_the_model_as_it_was():
    model = Cancelling(common=10.0)
    before = model.answer()
    first, second = (np.stack(list(rounded_answers(model.answer))) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(first, axis=0)) == len(first)
    np.testing.assert_array_equal(model.answer(), before)


class Choosing:
    """Boxes chosen by their scores; the best that is left out has the score of the worst chosen one, less a gap."""

    def __init__(self, gap: float) -> None:
        generator = torch.Generator().manual_seed(2)
        self.vectors = torch.randn(200, WIDTH, generator=generator)
        order = self.scores().argsort(descending=True)
        self.rows = order[39].item(), order[40].item()
        self.vectors[self.rows[1]] = self.vectors[self.rows[0]] * (1 - gap)
        self.outputs = torch.randn(200, 3, generator=generator), torch.rand(200, 4, generator=generator)

    def scores(self):
        with torch.inference_mode():
            return functional.linear(INPUT[:1], self.vectors)[0]

    def answer(self, chosen=None):
        chosen = self.scores().topk(40)[1] if chosen is None else chosen
        return {name: each[chosen].numpy() for name, each in zip((LOGITS, BOXES), self.outputs, strict=True)}

    def answer_with_the_other(self):
        """With the one of the two that is not chosen, in another order."""
        chosen = self.scores().topk(40)[1].flip(0)
        first, second = self.rows
        other = second if first in chosen else first
        return self.answer(torch.where((chosen == first) | (chosen == second), other, chosen))


@pytest.mark.parametrize(("gap", "is_explained"), [(0.0, True), (1e-3, False)])
def test_boxes_may_be_others_where_rounding_exchanges_their_scores(gap, is_explained):
    model, comparison = Choosing(gap), Comparison(bound=LOGIT_BOUND, of_softmax=None)
    found = model.answer_with_the_other()
    if is_explained:
        add_objects(comparison, found, "a test", model.answer)
        assert comparison.num_rounded == 1
    else:
        with pytest.raises(ParityError, match="rounding does not explain"):
            add_objects(comparison, found, "a test", model.answer)


def test_boxes_in_another_order_are_the_same_and_changed_ones_are_not():
    model, comparison = Choosing(0.0), Comparison(bound=LOGIT_BOUND, of_softmax=None)
    found = {name: values[::-1].copy() for name, values in model.answer().items()}
    add_objects(comparison, found, "a test", model.answer)
    assert (comparison.num_rounded, comparison.max_error) == (0, 0.0)
    found[BOXES][:10] += 0.3
    with pytest.raises(ParityError, match="rounding does not explain"):
        add_objects(comparison, found, "a test", model.answer)
