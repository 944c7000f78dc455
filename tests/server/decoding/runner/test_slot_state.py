"""The state of slots: caches by positions, recurrent state whole, and the memory of both counted."""

import ctypes

import numpy as np
import pytest

from headway_server.bundles import Graph, ParityFigures, StateTensor, TensorSpec, Variant
from headway_server.decoding.runner.state import SlotState, StateSizes
from headway_server.errors import BundleError

SLOTS, HEADS, LENGTH, WIDTH, STATE = 4, 2, 6, 8, 5


def spec(name, *shape):
    return TensorSpec(name=name, dtype="float32", shape=shape)


def variant(state_axis: int | str = STATE) -> Variant:
    cache = ("slots", HEADS, "cache_length", WIDTH)
    return Variant(
        device="cpu",
        graphs={
            "encoder": Graph(file="e", inputs=(), outputs=(spec("initial", "batch", STATE),)),
            "decoder": Graph(
                file="d",
                inputs=(spec("past_key", *cache), spec("past_state", "slots", state_axis)),
                outputs=(spec("present_key", *cache), spec("present_state", "slots", state_axis)),
            ),
        },
        state=(
            StateTensor(past="past_key", present="present_key", update="in_place"),
            StateTensor(past="past_state", present="present_state", update="replace", initial="initial"),
        ),
        parity=ParityFigures(max_relative_logit_error=0, bound=None, checked_shape_count=0, provider=""),
        quality=None,
    )


class Addresses:
    """Keeps what is bound, as `onnxruntime.IOBinding` would."""

    def __init__(self):
        self.inputs, self.outputs = {}, {}

    def bind_input(self, name, *where):
        self.inputs[name] = where[-2:]

    def bind_output(self, name, *where):
        self.outputs[name] = where[-2:]


def bound(state: SlotState, first_slot: int, rows: int) -> tuple[dict, dict]:
    """The memory that a step of these slots reads and writes, as arrays by name."""
    binding = Addresses()
    state.bind(binding, first_slot, rows)

    def view(where):
        shape, address = where
        floats = (ctypes.c_float * int(np.prod(shape))).from_address(address)
        return np.ctypeslib.as_array(floats).reshape(shape)

    return {n: view(w) for n, w in binding.inputs.items()}, {n: view(w) for n, w in binding.outputs.items()}


@pytest.fixture
def state() -> SlotState:
    return SlotState("cpu", variant(), num_slots=SLOTS, max_length=LENGTH)


def test_a_cache_is_one_memory_and_a_recurrent_state_is_two(state):
    past, present = bound(state, 1, 2)
    present["present_key"][:] = 3
    present["present_state"][:] = 4
    np.testing.assert_array_equal(past["past_key"], np.full((2, HEADS, LENGTH, WIDTH), 3))
    np.testing.assert_array_equal(past["past_state"], np.zeros((2, STATE)))


def test_what_a_step_hands_on_is_the_state_of_the_slots_it_ran_alone(state):
    _, present = bound(state, 1, 2)
    present["present_state"][:] = [[1], [2]]
    state.take_over(1, 2)
    past, _ = bound(state, 0, SLOTS)
    np.testing.assert_array_equal(past["past_state"][:, 0], [0, 1, 2, 0])


def test_groups_of_slots_may_step_in_any_order(state):
    for first_slot, rows in ((2, 2), (0, 1), (2, 1), (0, 4)):
        past, present = bound(state, first_slot, rows)
        present["present_state"][:] = past["past_state"] + 1
        state.take_over(first_slot, rows)
    past, _ = bound(state, 0, SLOTS)
    np.testing.assert_array_equal(past["past_state"][:, 0], [2, 1, 3, 2])


def test_copies_take_positions_of_a_cache_and_the_whole_of_a_recurrent_state(state):
    past, _ = bound(state, 0, SLOTS)
    past["past_key"][:] = np.arange(SLOTS * LENGTH).reshape(SLOTS, 1, LENGTH, 1)
    past["past_state"][:] = np.arange(SLOTS)[:, np.newaxis]
    state.copy(3, 1, 2)
    assert past["past_key"][1, 0, :, 0].tolist() == [18, 19, 8, 9, 10, 11]
    assert past["past_state"][:, 0].tolist() == [0, 3, 2, 3]
    state.copy(2, 0, 0)
    assert past["past_key"][0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert past["past_state"][:, 0].tolist() == [2, 3, 2, 3]


def test_reordering_takes_the_positions_that_differ_and_the_whole_of_a_recurrent_state(state):
    past, _ = bound(state, 0, SLOTS)
    past["past_key"][:] = np.arange(SLOTS * LENGTH).reshape(SLOTS, 1, LENGTH, 1)
    past["past_state"][:] = np.arange(SLOTS)[:, np.newaxis]
    state.reorder([(0, 2, 3, 5), (0, 1, 1, 2)])
    assert past["past_key"][2, 1, :, 0].tolist() == [12, 13, 14, 3, 4, 17]
    assert past["past_key"][1, 0, :, 0].tolist() == [6, 1, 8, 9, 10, 11]
    assert past["past_state"][:, 0].tolist() == [0, 0, 0, 3]


def test_a_sentence_begins_with_what_the_encoder_says_and_leaves_the_others_alone(state):
    past, _ = bound(state, 0, SLOTS)
    past["past_state"][:] = 9
    state.begin(2, {"initial": np.arange(STATE, dtype=np.float32)})
    assert past["past_state"].tolist() == [[9] * STATE, [9] * STATE, list(range(STATE)), [9] * STATE]


def test_without_an_initial_tensor_a_slot_begins_with_zeros():
    without = variant()
    names = without.state[1].model_copy(update={"initial": None})
    without = without.model_copy(update={"state": (without.state[0], names)})
    state = SlotState("cpu", without, num_slots=SLOTS, max_length=LENGTH)
    past, _ = bound(state, 0, SLOTS)
    past["past_state"][:] = 9
    state.begin(0, {})
    assert past["past_state"][:, 0].tolist() == [0, 9, 9, 9]


def test_memory_is_what_a_slot_takes_times_the_slots(state):
    sizes = StateSizes.of(variant(), LENGTH, 2)
    assert sizes.of_slot == 4 * (HEADS * LENGTH * WIDTH + 2 * STATE)
    assert state.num_bytes == SLOTS * sizes.of_slot
    assert sizes.num_chunks == LENGTH // 2
    assert sizes.of_prefix_slot == 4 * (HEADS * LENGTH * WIDTH + 3 * STATE)
    cached = SlotState("cpu", variant(), num_slots=SLOTS, max_length=LENGTH, num_prefix_slots=2, num_snapshots=6)
    assert cached.num_bytes == SLOTS * sizes.of_slot + 2 * sizes.of_prefix_slot


def test_snapshots_take_no_more_memory_than_a_slot_that_runs():
    without_cache = variant().model_copy(update={"state": variant().state[1:]})
    sizes = StateSizes.of(without_cache, 1000, 2)
    assert sizes.num_chunks == 2
    assert sizes.of_prefix_slot == sizes.of_slot


def test_a_snapshot_is_the_whole_of_a_recurrent_state_and_no_positions():
    state = SlotState("cpu", variant(), num_slots=SLOTS, max_length=LENGTH, num_prefix_slots=1, num_snapshots=3)
    past, _ = bound(state, 0, SLOTS)
    past["past_key"][:] = np.arange(SLOTS).reshape(SLOTS, 1, 1, 1)
    past["past_state"][:] = np.arange(SLOTS)[:, np.newaxis]
    state.keep(3, 2)
    past["past_state"][3] = 9
    state.keep_chunk(2, 0, 2, (0, 4), 2)
    state.restore(2, 0)
    assert past["past_state"][:, 0].tolist() == [3, 1, 2, 9]
    assert past["past_key"][:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    state.reuse_chunks([(0, 4)], 2, 1)
    assert past["past_key"][1, 0, :, 0].tolist() == [2, 2, 1, 1, 1, 1]


# Windows

LONG, CHUNK = 60, 6
SIZES = [(1, 1), (4, 4), (5, 8), (4, 9), (12, 17), (13, 30)]
"""Windows and rows of their caches: shorter and longer than a chunk, and dropping one or several positions at once."""


def windowed(window: int, num_rows: int) -> Variant:
    shape = ("slots", HEADS, num_rows, WIDTH)
    names = StateTensor(past="past_key", present="present_key", update="in_place", window=window)
    decoder = Graph(file="d", inputs=(spec("past_key", *shape),), outputs=(spec("present_key", *shape),))
    return variant().model_copy(update={"graphs": {"decoder": decoder}, "state": (names,)})


class Reading:
    """Slots that read tokens; in the place of each key stands the token, as the operator would leave it."""

    def __init__(self, window: int, num_rows: int) -> None:
        self.state = SlotState("cpu", windowed(window, num_rows), num_slots=SLOTS, max_length=LONG, num_prefix_slots=1)
        past, _ = bound(self.state, 0, SLOTS)
        self.cache = past["past_key"]
        self.window, self.num_rows = window, num_rows

    def read(self, slot: int, tokens: list[int], start: int) -> None:
        """Reads the tokens of a text from position `start` on, one by one, and checks what the next one sees."""
        for length in range(start, len(tokens)):
            first, following = self.first(length), self.first(length + 1)
            held = self.cache[slot, 0, : length - first, 0].tolist()
            num_seen = min(length, self.window - 1)
            assert held[len(held) - num_seen :] == tokens[length - num_seen : length]
            kept = self.cache[slot, :, following - first : length - first].copy()
            self.cache[slot, :, : length - following] = kept
            self.cache[slot, :, length - following] = tokens[length]

    def first(self, length: int) -> int:
        """The position of row 0, by dropping as the operator's documentation says."""
        first = 0
        for count in range(1, length + 1):
            if count - first > self.num_rows:
                first += self.num_rows - self.window + 1
        return first


@pytest.mark.parametrize(("window", "num_rows"), SIZES)
def test_a_window_survives_copies_chunks_and_reordering(window, num_rows):
    reading = Reading(window, num_rows)
    state = reading.state
    for length in range(1, LONG):
        tokens = list(range(100, 100 + length))
        reading.cache[:] = -1
        places = []
        for start in range(0, length, CHUNK):
            reading.read(0, tokens[: start + CHUNK], start)
            if start + CHUNK <= length:
                places.append((0, LONG - CHUNK * (len(places) + 1)))
                state.keep_chunk(0, start, start + CHUNK, places[-1], start + CHUNK)
        state.copy(0, 1, length)
        reading.read(1, [*tokens, 1, 2, 3], length)
        state.reuse_chunks(places, CHUNK, 2)
        reading.read(2, [*tokens[: CHUNK * len(places)], 4, 5], CHUNK * len(places))
        other = [*tokens[: length // 2], *range(length - length // 2)]
        reading.read(3, other, 0)
        state.reorder([(3, 0, length // 2, length)])
        reading.read(0, [*other, 6, 7, 8], length)


@pytest.mark.parametrize(("window", "num_rows"), SIZES)
def test_a_slot_returns_to_a_length_whose_positions_it_still_has(window, num_rows):
    reading = Reading(window, num_rows)
    for num_read in range(1, LONG):
        for length in range(num_read + 1):
            can = reading.state.can_return(length, num_read)
            assert can == (reading.first(length) == reading.first(num_read))
            if can:
                reading.cache[0] = -1
                reading.read(0, list(range(num_read)), 0)
                reading.read(0, [*range(length), 98, 99], length)


def test_memory_of_windows_is_that_of_their_rows_and_their_chunks_take_all_positions():
    sizes = StateSizes.of(windowed(5, 8), LONG, CHUNK)
    assert sizes.of_slot == 4 * HEADS * 8 * WIDTH
    assert sizes.of_prefix_slot == 4 * HEADS * LONG * WIDTH
    assert sizes.num_chunks == LONG // CHUNK
    state = Reading(5, 8).state
    assert state.num_bytes == SLOTS * sizes.of_slot + sizes.of_prefix_slot


@pytest.mark.parametrize(
    ("rows", "message"),
    [(4, "past_key: must have at least 5 rows for its window, and has 4"), ("rows", "axis 2 must have a fixed size")],
)
def test_a_window_that_its_cache_cannot_hold_is_refused(rows, message):
    with pytest.raises(BundleError, match=message):
        SlotState("cpu", windowed(5, rows), num_slots=SLOTS, max_length=LONG)


def test_state_of_unknown_size_is_refused_with_its_name():
    with pytest.raises(BundleError, match="past_state: axis 1 must have a fixed size, the manifest says 'width'"):
        SlotState("cpu", variant("width"), num_slots=SLOTS, max_length=LENGTH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"past": "nowhere"}, "nowhere is named as an input of the decoder"),
        ({"present": "nowhere"}, "nowhere is named as an output of the decoder"),
        ({"initial": "nowhere"}, "nowhere is named as an output of the encoder"),
        ({"update": "in_place"}, "initial is for update replace, and this one's is in_place"),
        ({"window": 3}, "window is for update in_place, and this one's is replace"),
    ],
)
def test_a_manifest_names_tensors_that_there_are(change, message):
    content = variant().model_dump()
    content["state"][1].update(change)
    with pytest.raises(ValueError, match=message):
        Variant.model_validate(content)
