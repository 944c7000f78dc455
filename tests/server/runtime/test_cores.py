"""Runs that share the cores: who gets how many, and that the answer does not depend on it."""

from pathlib import Path

import numpy as np
import pytest

from headway_server.bundles import Precision, open_bundle
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import EncoderRunner
from headway_server.runtime import Cores, Runtime


@pytest.mark.parametrize(
    ("count", "num_busy", "shared"), [(1, 1, False), (2, 1, False), (2, 2, True), (16, 8, False), (16, 9, True)]
)
def test_cores_are_shared_when_those_at_work_fill_most_of_them(count, num_busy, shared):
    cores = Cores(count)
    counters = [cores.busy_lanes() for _ in range(num_busy)]
    for lane in counters:
        lane.set(1)
        lane.set(1)  # it counts once
    assert cores.is_shared is shared
    for lane in counters:
        lane.set(0)
        lane.set(0)
    assert not cores.is_shared
    assert repr(cores) == f"Cores(0 busy on {count})"


def test_a_runtime_has_as_many_lanes_as_it_was_given_and_no_more_than_cores():
    assert Runtime(device="cpu", num_threads=2).num_lanes == 1
    assert Runtime(device="cpu", num_threads=2, num_lanes=None).num_lanes == 2
    assert Runtime(device="cpu", num_threads=2, num_lanes=8).num_lanes == 2


def test_a_graph_answers_alike_on_one_core_and_on_all(classifier_store: Path):
    bundle = open_bundle(classifier_store / "topics" / "1")
    variant = next(iter(bundle.manifest.variants.values()))
    session = Runtime(device="cpu", num_threads=2, num_lanes=2).open(bundle, variant.graphs["model"])
    ids = np.random.default_rng(0).integers(0, 5, (3, 7))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    expected = session.run(feeds)
    assert session.num_lanes == 2
    for name, tensor in session.run(feeds, on_one_core=True).items():
        np.testing.assert_array_equal(tensor, expected[name])
    session.use_one_core(1)
    assert session.num_lanes == 1
    np.testing.assert_array_equal(session.run(feeds)["logits"], expected["logits"])


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_a_decoder_goes_on_where_it_was_whichever_session_takes_the_next_step(tiny_store, precision):
    """The cores are shared and unshared at random between steps; the logits are those of one session."""
    bundle = open_bundle(tiny_store / "tiny-translation" / "1")
    variant = bundle.manifest.variants[precision]
    rng = np.random.default_rng(7)
    sources = [rng.integers(4, 14, length) for length in (3, 6, 2)]
    token_ids = rng.integers(14, 24, (8, len(sources)))
    logits = []
    for num_lanes in (1, 2):
        runtime = Runtime(device="cpu", num_threads=2, num_lanes=num_lanes)
        decoder = DecoderRunner(runtime, bundle, variant, num_slots=4)
        decoder.set_sources(
            EncoderRunner(runtime, bundle, variant).encode([EncoderInput.of_tokens(source) for source in sources])
        )
        counters = [runtime.cores.busy_lanes() for _ in range(2)]
        steps = []
        for position, row in enumerate(token_ids):
            for lane in counters:
                lane.set(int(rng.random() < 0.7))
            steps.append(decoder.decode(row, np.full(len(sources), position)).copy())
        logits.append(np.stack(steps))
    np.testing.assert_array_equal(*logits)
