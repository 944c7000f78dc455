"""Beams in their slots, against a model that writes down what each slot holds."""

import random
from types import SimpleNamespace

import pytest

from headway_server.decoding.beam_search.search import Beam, BeamBlock

STEPS = 25


def advance(block: BeamBlock, texts: list, rng: random.Random) -> list:
    """Lets each beam that there will be continue one that there is; returns their texts."""
    size = len(block.slots)
    parents = [rng.randrange(len(texts)) for _ in range(rng.randint(1, size))]
    children = [(*texts[parent], (step := len(texts[parent]), number)) for number, parent in enumerate(parents)]
    block.search.beams = [Beam(0.0, token_ids=(step, number), parent=parent) for number, parent in enumerate(parents)]
    return children


@pytest.mark.parametrize("size", [1, 2, 4, 5, 16])
def test_each_slot_holds_its_beams_history_and_only_what_differs_is_copied(size):
    rng = random.Random(size)
    for _ in range(20):
        block = BeamBlock(SimpleNamespace(beams=[Beam(0.0)]), size)
        texts: list = [()]
        held: list[list] = [[] for _ in range(size)]
        for step in range(STEPS):
            for place, slot in enumerate(block.slots):  # a step writes a position of every slot
                held[slot].append(texts[place][-1] if place < len(texts) and texts[place] else (step, "none", slot))
            before = [row.copy() for row in held]
            slots_before = block.slots
            texts = advance(block, texts, rng)
            copies = block.reorder(100, step + 1)
            for copy in copies:
                source, target = copy.source - 100, copy.target - 100
                assert before[source][: copy.start] == before[target][: copy.start]
                assert before[source][copy.start] != before[target][copy.start]
                assert copy.stop == step + 1
                held[target][copy.start : copy.stop] = before[source][copy.start : copy.stop]
            assert sorted(block.slots) == list(range(size))
            sources, targets = {copy.source for copy in copies}, [copy.target for copy in copies]
            assert not sources & set(targets)
            assert len(set(targets)) == len(targets)
            parents = [beam.parent for beam in block.search.beams]
            assert len(copies) == len(parents) - len(set(parents))
            for place, beam in enumerate(block.search.beams):
                assert held[block.slots[place]] == before[slots_before[beam.parent]]


def test_slots_without_a_beam_read_what_the_best_beam_reads():
    beams = [Beam(0.0, (4,)), Beam(-1.0, (5,))]
    block = BeamBlock(SimpleNamespace(beams=beams), 4)
    block.slots = [2, 0, 1, 3]
    assert block.next_inputs(1) == [5, 4, 4, 4]
    assert block.log_probabilities() == [0.0, -1.0, float("-inf"), float("-inf")]
