"""How many runs of long texts there are at a time."""

import pytest
import tiny_bundles
from structlog.testing import capture_logs

from headway_server.batching.memory_plan import plan_runs
from headway_server.errors import MemoryUnavailableError
from headway_server.runtime import Runtime
from headway_server.settings import ServerSettings
from headway_server.tasks.text.classifier import TextClassifier

MIB = 2**20


def plan(**changes):
    values = {"num_lanes": 2, "largest": 8192, "batch": 512, "available": 1000 * MIB, "owner": "m/1"}
    return plan_runs(100 * MIB, **{**values, **changes})


def test_as_many_runs_as_the_cores_allow_take_half_of_the_memory_at_most():
    assert str(plan()) == "2 runs x 100.0 MiB = 200.0 MiB at most"
    assert plan(available=None).num_lanes == 2
    assert plan(available=399 * MIB).num_lanes == 1


def test_a_batch_that_may_have_more_tokens_than_a_text_takes_more():
    assert plan(batch=16384).num_bytes == 200 * MIB


def test_a_run_that_does_not_fit_is_refused_with_what_to_do():
    with pytest.raises(MemoryUnavailableError) as caught:
        plan(available=90 * MIB)
    assert str(caught.value) == (
        "m/1: a run with 8,192 tokens takes 100.0 MiB, and beside the weights there are 90.0 MiB of memory; free "
        "memory, or export the model with a smaller --max-length"
    )
    with pytest.raises(MemoryUnavailableError, match="lower --max-batch-tokens, or export"):
        plan(batch=16384, available=190 * MIB)


def test_a_model_of_long_texts_is_loaded_with_the_lanes_that_fit(tmp_path, monkeypatch):
    bundle = tiny_bundles.write_topic_bundle(tmp_path, run_bytes=MIB)
    settings = ServerSettings(store=tmp_path)
    for available, lanes in ((65, 2), (20, 1)):
        monkeypatch.setattr("headway_server.tasks.stateless.available_bytes", lambda _, mib=available: mib * MIB)
        with capture_logs() as logs:
            model = TextClassifier.load(bundle, Runtime(device="cpu", num_threads=2, num_lanes=2), settings)
        model.close()
        [line] = [line for line in logs if line["event"] == "memory"]
        assert line["runs"].startswith(f"{lanes} runs x 16.0 MiB")
