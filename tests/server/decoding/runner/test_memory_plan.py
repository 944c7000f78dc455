"""How many slots there are, by the memory there is."""

import pytest

from headway_server.decoding.runner.memory_plan import DEFAULT_MAX_SLOTS, SlotSizes, plan_memory
from headway_server.decoding.settings import EngineSettings
from headway_server.errors import MemoryUnavailableError
from headway_server.runtime import available_bytes

MIB = 2**20
SIZES = SlotSizes(state_bytes=10 * MIB, prefix_slot_bytes=10 * MIB)


def plan(available: int | None, sizes: SlotSizes = SIZES, **settings):
    return plan_memory(EngineSettings(**settings), sizes, available=available, owner="tiny/1")


def test_with_plenty_of_memory_there_are_as_many_slots_as_are_worth_having():
    chosen = plan(100_000 * MIB)
    assert (chosen.num_slots, chosen.num_prefix_slots) == (DEFAULT_MAX_SLOTS, DEFAULT_MAX_SLOTS // 8)


def test_the_default_takes_no_more_than_half_of_the_memory_there_is():
    chosen = plan(240 * MIB)
    assert (chosen.num_slots, chosen.num_prefix_slots) == (10, 2)
    assert chosen.total_bytes <= 120 * MIB


def test_the_arithmetic_is_told():
    assert str(plan(240 * MIB)) == "(10 slots + 2 of prefix cache) x 10.0 MiB = 120.0 MiB"
    translation = SlotSizes(state_bytes=10 * MIB, source_bytes=3 * MIB, prefix_slot_bytes=0)
    assert str(plan(None, translation, num_slots=4)) == "4 slots x (10.0 MiB + 3.0 MiB of its source) = 52.0 MiB"
    hybrid = SlotSizes(state_bytes=10 * MIB, prefix_slot_bytes=12 * MIB)
    told = "4 slots x 10.0 MiB + 2 of prefix cache x 12.0 MiB = 64.0 MiB"
    assert str(plan(None, hybrid, num_slots=4, num_prefix_slots=2)) == told


def test_too_many_slots_are_refused_with_the_largest_number_that_fits():
    with pytest.raises(MemoryUnavailableError) as caught:
        plan(200 * MIB, num_slots=64, num_prefix_slots=0)
    assert str(caught.value) == (
        "tiny/1: 64 slots x 10.0 MiB = 640.0 MiB is more than the 200.0 MiB of memory there is; "
        "--num-slots 19 is the largest setting that fits"
    )
    assert plan(200 * MIB, num_slots=19, num_prefix_slots=0).num_slots == 19


def test_a_slot_that_does_not_fit_is_refused():
    with pytest.raises(MemoryUnavailableError, match="not even --num-slots 1 fits"):
        plan(5 * MIB)


def test_where_nothing_tells_the_memory_the_defaults_hold():
    assert plan(None).num_slots == DEFAULT_MAX_SLOTS
    assert plan(None, num_slots=7, num_prefix_slots=3).num_prefix_slots == 3


def test_a_model_without_prompts_keeps_none():
    sizes = SlotSizes(state_bytes=MIB, source_bytes=MIB, prefix_slot_bytes=0)
    assert plan(1000 * MIB, sizes, num_prefix_slots=3).num_prefix_slots == 0


def test_this_machine_tells_its_memory():
    available = available_bytes("cpu")
    assert available is None or available > MIB
