"""Where blocks are, against a model of the slots: after any history, each holds what its owner wrote."""

import random

import pytest
from tiny_engine import make_sequence

from headway_server.decoding.core.block_layout import BlockLayout
from headway_server.decoding.parameters import SearchParameters


def sequence_of(width: int, *, searched: bool = True):
    return make_sequence([2], search=SearchParameters(beam_size=width) if searched else None)


def carry_out(moves, held: list) -> None:
    """Copies what slots hold, one after the other."""
    for move in moves:
        for source, target in move.slots():
            held[target] = held[source]


def write(sequence, held: list) -> None:
    for offset in range(sequence.num_beams):
        held[sequence.slot + offset] = (sequence, offset)


def check(layout: BlockLayout, held: list, everyone: list) -> None:
    position = 0
    for group in layout.groups:
        assert group.sequences
        assert group.start >= position
        position = group.stop
        for number, sequence in enumerate(group.sequences):
            assert (sequence.num_beams, sequence.search is not None) == group.kind
            assert sequence.slot == group.start + number * group.kind.width
            for offset in range(sequence.num_beams):
                assert held[sequence.slot + offset] == (sequence, offset)
    assert position <= layout.num_slots
    assert len({group.kind for group in layout.groups}) == len(layout.groups)
    owners = [sequence for group in layout.groups for sequence in group.sequences]
    assert sorted(map(id, owners)) == sorted(map(id, everyone))
    assert layout.num_used == sum(sequence.num_beams for sequence in everyone)


@pytest.mark.parametrize("seed", range(12))
async def test_every_slot_holds_what_its_owner_wrote_after_any_history(seed):
    rng = random.Random(seed)
    layout = BlockLayout(rng.choice([8, 17, 32]))
    held: list = [None] * layout.num_slots
    everyone: list = []
    widths = rng.choice([(1, 4), (1, 2, 3, 5, 8), (4,), (1, 1, 1, 8)])
    for _ in range(600):
        if everyone and rng.random() < 0.45:
            leaving = sorted(rng.sample(everyone, rng.randint(1, min(3, len(everyone)))), key=lambda one: -one.slot)
            for sequence in leaving:
                everyone.remove(sequence)
                if (move := layout.remove(sequence)) is not None:
                    carry_out([move], held)
        else:
            sequence = sequence_of(rng.choice(widths), searched=rng.random() < 0.8)
            if sequence.search is None and sequence.num_beams != 1:
                continue
            if layout.num_used + sequence.num_beams > layout.num_slots:
                continue
            moves = layout.place(sequence)
            everyone.append(sequence)
            carry_out(moves, held)
            write(sequence, held)
        check(layout, held, everyone)


async def test_with_one_kind_nothing_moves_but_the_last_block_into_a_hole():
    rng = random.Random(3)
    layout = BlockLayout(32)
    everyone: list = []
    for _ in range(300):
        if len(everyone) == 8 or (everyone and rng.random() < 0.5):
            gone = everyone.pop(rng.randrange(len(everyone)))
            last = max([gone, *everyone], key=lambda one: one.slot)
            move = layout.remove(gone)
            assert (move is None) == (last is gone)
            if move is not None:
                assert (move.sequence, move.target) == (last, gone.slot)
        else:
            everyone.append(sequence_of(4))
            assert layout.place(everyone[-1]) == []
        assert sorted(one.slot for one in everyone) == list(range(0, 4 * len(everyone), 4))


async def test_two_kinds_grow_towards_each_other_without_a_move():
    layout = BlockLayout(24)
    for _ in range(4):
        assert layout.place(sequence_of(4)) == []
        assert layout.place(sequence_of(2)) == []
    assert layout.num_used == 24


async def test_a_group_is_told_of_when_others_read_in_its_places():
    layout = BlockLayout(16)
    first, second = sequence_of(4), sequence_of(4)
    layout.place(first)
    layout.place(second)
    (group,) = layout.groups
    group.has_changed = False
    other = sequence_of(2)
    layout.place(other)
    assert not group.has_changed
    layout.remove(first)
    assert group.has_changed
