"""What the first runs of a graph tell about it."""

import pytest
from loading import loading

from headway_server.batching.settings import BatchingSettings
from headway_server.batching.warm_up import WarmUp
from headway_server.bundles import open_bundle
from headway_server.runtime import Runtime
from headway_server.tasks.text.classifier import TextClassifier


@pytest.mark.parametrize(("run_s", "expected"), [(10e-3, 6), (0.32e-3, 200), (1.0, 0), (None, None)])
def test_padding_is_worth_as_many_tokens_as_run_in_two_milliseconds(run_s, expected):
    assert WarmUp(outputs={}, run_s=run_s).costs(32).most_padding == expected


@pytest.mark.parametrize(("run_s", "expected"), [(0.2e-3, 160), (0.5e-3, 64), (40e-3, 0), (None, 0)])
def test_items_may_run_on_the_event_loop_for_a_millisecond(run_s, expected):
    assert WarmUp(outputs={}, run_s=run_s).costs(32).most_inline == expected


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_padding_is_bounded_with_one_lane_as_with_several(classifier_store, num_lanes):
    runtime = Runtime(device="cpu", num_threads=2, num_lanes=num_lanes)
    model = TextClassifier.load(open_bundle(classifier_store / "topics" / "1"), runtime, loading())
    queue, budget = model._batcher._queue, BatchingSettings().batch_tokens("cpu")
    assert queue._most_padding != budget, "that would be no bound"
