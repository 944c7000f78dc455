"""Damaged inputs for every parser, some hundred cases each; `tests/support/fuzzing.py` runs as many as one likes."""

import random
import sys

import fuzzing
import hostile_images
import hostile_texts
import pytest


@pytest.fixture(autouse=True)
def small_inputs(monkeypatch):
    """Holds pictures and texts to sizes that a second is enough for."""
    monkeypatch.setattr(hostile_images, "SIDES", (500, 400))
    monkeypatch.setattr(hostile_texts, "MAX_BYTES", 4096)
    hostile_images.samples.cache_clear()


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_damaged_inputs_are_taken_or_refused_and_nothing_else(name):
    seed = random.randrange(2**32)
    sys.stdout.write(f"seed {seed}\n")

    def is_varied(outcome):
        return outcome.taken and (outcome.refused or name == "tokenizers")

    # On a busy machine a second is little for templates, which are parsed in a process of their own.
    outcome = fuzzing.fuzz(fuzzing.TARGETS[name], seed, seconds=1.0, max_cases=2000, is_enough=is_varied)
    assert is_varied(outcome)
