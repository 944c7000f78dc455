"""Damaged inputs for every parser, some hundred cases each; `tests/support/fuzzing.py` runs as many as one likes."""

import random
import sys

import fuzzing
import pytest


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_damaged_inputs_are_taken_or_refused_and_nothing_else(name):
    seed = random.randrange(2**32)
    sys.stdout.write(f"seed {seed}\n")
    outcome = fuzzing.fuzz(fuzzing.TARGETS[name], seed, seconds=1.0, max_cases=2000)
    assert outcome.taken
    assert outcome.refused
