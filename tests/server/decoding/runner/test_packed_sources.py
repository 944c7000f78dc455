"""Sources that are packed in pieces, against packing all of them anew."""

import random

import numpy as np
import pytest

from headway_server.bundles import TensorSpec
from headway_server.decoding.runner.encoder import CrossTensors, PackedSources, padded_length

HEADS, HEAD_DIM, MAX_LENGTH, MAX_SOURCES = 2, 4, 20, 12
NAMES = ("cross_key_0", "cross_value_0")


def new_packed() -> PackedSources:
    shape = ("sources", HEADS, "source_length", HEAD_DIM)
    specs = [TensorSpec(name=name, dtype="float32", shape=shape) for name in NAMES]
    return PackedSources(specs, max_sources=MAX_SOURCES, max_length=MAX_LENGTH)


def random_source(rng: random.Random) -> CrossTensors:
    length = rng.randint(1, MAX_LENGTH)
    draw = np.random.default_rng(rng.randrange(2**32))
    tensors = {name: draw.normal(size=(HEADS, length, HEAD_DIM)).astype(np.float32) for name in NAMES}
    return CrossTensors(num_positions=length, tensors=tensors)


def check(packed: dict, sources: list[CrossTensors]) -> None:
    length = packed["source_mask"].shape[1]
    longest = padded_length(max(source.num_positions for source in sources))
    assert length % 4 == 0
    assert longest <= length <= longest + max(8, longest // 4)
    for row, source in enumerate(sources):
        assert packed["source_mask"][row].tolist() == [1] * source.num_positions + [0] * (length - source.num_positions)
        for name in NAMES:
            assert packed[name].shape == (len(sources), HEADS, length, HEAD_DIM)
            np.testing.assert_array_equal(packed[name][row, :, : source.num_positions], source.tensors[name])
            assert not packed[name][row, :, source.num_positions :].any()


@pytest.mark.parametrize("seed", range(6))
def test_sources_that_come_and_go_are_packed_as_if_anew(seed):
    rng = random.Random(seed)
    packed = new_packed()
    sources: list[CrossTensors] = []
    for _ in range(200):
        if sources and (rng.random() < 0.4 or len(sources) == MAX_SOURCES):
            last = sources.pop()
            if sources and rng.random() < 0.7:
                sources[rng.randrange(len(sources))] = last
        else:
            sources.append(random_source(rng))
        if sources:
            check(packed.pack(sources, 0), sources)


@pytest.mark.parametrize("seed", range(6))
def test_sources_of_several_groups_do_not_disturb_each_other(seed):
    rng = random.Random(seed)
    packed = new_packed()
    groups: dict[int, tuple[list[CrossTensors], dict]] = {}
    for _ in range(200):
        first = rng.randrange(MAX_SOURCES)
        count = rng.randint(1, MAX_SOURCES - first)
        old = groups.get(first, ([], {}))[0]
        sources = [*old, *(random_source(rng) for _ in range(count))][:count]
        groups = {
            start: group for start, group in groups.items() if start + len(group[0]) <= first or first + count <= start
        }
        groups[first] = sources, packed.pack(sources, first)
        for group, tensors in groups.values():
            check(tensors, group)


def test_no_sources_are_nothing():
    assert new_packed().pack([], 3) == {}
