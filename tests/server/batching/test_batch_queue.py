"""How batches are cut."""

import random

import pytest

from headway_server.batching.queue import BatchQueue, Entry

NOW = 100.0


def entries(call: object, lengths: list[int], deadline: float | None = None) -> list[Entry]:
    return [
        Entry(item=f"{call}{index}", length=length, call=call, index=index, deadline=deadline)
        for index, length in enumerate(lengths)
    ]


def take(queue: BatchQueue) -> list[str]:
    batch, _ = queue.take(NOW)
    return [entry.item for entry in batch]


def test_an_empty_queue_gives_nothing():
    assert BatchQueue(10).take(NOW) == ([], [])


def test_a_batch_is_cut_by_longest_times_count():
    queue = BatchQueue(budget=32)
    queue.add(entries("a", [8, 8, 8, 8, 8]))
    assert len(take(queue)) == 4
    assert len(take(queue)) == 1
    assert len(queue) == 0


def test_an_entry_longer_than_the_budget_goes_alone():
    queue = BatchQueue(budget=10)
    queue.add(entries("a", [50, 2]))
    assert take(queue) == ["a0"]
    assert take(queue) == ["a1"]


def test_a_batch_is_of_like_lengths():
    queue = BatchQueue(budget=40)
    queue.add(entries("a", [10, 2, 10, 3, 10, 2, 10]))
    assert sorted(take(queue)) == ["a0", "a2", "a4", "a6"]
    assert sorted(take(queue)) == ["a1", "a3", "a5"]


def test_padding_that_costs_more_than_a_run_is_not_taken_in():
    queue = BatchQueue(budget=400, max_padding=6)
    queue.add(entries("a", [10, 40, 13, 42, 14, 90]))
    assert sorted(take(queue)) == ["a0", "a2", "a4"], "10 and 13 are padded to 14"
    assert sorted(take(queue)) == ["a1", "a3"]
    assert take(queue) == ["a5"]


def test_padding_counts_for_all_that_a_longer_entry_pads():
    queue = BatchQueue(budget=400, max_padding=6)
    queue.add(entries("a", [10, 10, 10, 10, 12]))
    assert sorted(take(queue)) == ["a0", "a1", "a2", "a3"], "the longer one would pad four entries by 2 each"


def test_one_text_passes_the_rest_of_a_large_call():
    queue = BatchQueue(budget=20)
    queue.add(entries("large", [10] * 100))
    assert take(queue) == ["large0", "large1"]
    queue.add(entries("small", [10]))
    assert "small0" in take(queue)


def test_calls_share_batches_in_turn():
    queue = BatchQueue(budget=20)
    queue.add(entries("a", [10] * 50))
    queue.add(entries("b", [10] * 50))
    first = [item for _ in range(10) for item in take(queue)]
    assert sum(item.startswith("a") for item in first) == 10


def test_newcomers_do_not_keep_a_large_call_waiting_for_ever():
    queue = BatchQueue(budget=20)
    queue.add(entries("large", [10] * 20))
    served = 0
    for round_ in range(200):  # newcomers alone would fill every batch
        queue.add(entries(f"new{round_}-", [10, 10]))
        served += sum(item.startswith("large") for item in take(queue))
    assert served == 20


def test_short_texts_do_not_keep_a_long_one_waiting_for_ever():
    queue = BatchQueue(budget=20)
    queue.add(entries("short", [2] * 40))
    queue.add(entries("long", [20]))
    taken = []
    while "long0" not in taken:
        queue.add(entries("more", [2] * 10))
        taken += take(queue)
    assert len(taken) <= 60


def test_an_expired_entry_is_dropped_and_told():
    queue = BatchQueue(budget=20)
    queue.add(entries("late", [5, 5], deadline=NOW - 1))
    queue.add(entries("well", [5], deadline=NOW + 1))
    batch, expired = queue.take(NOW)
    assert [entry.item for entry in batch] == ["well0"]
    assert sorted(entry.item for entry in expired) == ["late0", "late1"]
    assert len(queue) == 0


def test_what_is_left_of_a_call_is_removed():
    queue = BatchQueue(budget=10)
    gone = entries("gone", [5] * 6)
    queue.add(gone)
    queue.add(entries("stays", [5]))
    take(queue)
    queue.remove(gone)
    assert take(queue) in (["stays0"], [])
    assert not queue.fills_batch
    assert len(queue) == 0


def test_entries_that_were_removed_do_not_pile_up():
    queue = BatchQueue(budget=10)
    queue.add(entries("stays", [5] * 3))
    for number in range(1000):
        gone = entries(f"gone{number}-", [1] * 5)
        queue.add(gone)
        queue.remove(gone)
        queue.remove(gone)  # it is said once by whoever waited and once by whoever fails the call
        assert len(queue) == 3
        assert len(queue._heap) <= 80
    assert sorted(take(queue) + take(queue)) == ["stays0", "stays1", "stays2"]


def test_entries_of_several_rows_share_a_batch_within_their_group():
    queue = BatchQueue(budget=8)
    for call, (count, group) in {"a": (3, "x"), "b": (2, "y"), "c": (4, "x"), "d": (2, "x"), "e": (6, "y")}.items():
        queue.add([Entry(item=call, length=1, call=call, index=0, count=count, group=group)])
    assert queue.fills_batch
    assert take(queue) == ["a", "c"]
    assert take(queue) == ["b", "e"]
    assert not queue.fills_batch
    assert take(queue) == ["d"]
    assert len(queue) == 0
    queue.add([Entry(item="large", length=1, call="f", index=0, count=20), *entries("small", [1])])
    assert [take(queue), take(queue)] == [["large"], ["small0"]]


@pytest.mark.parametrize("seed", range(5))
def test_every_entry_is_taken_once_and_every_batch_keeps_the_budget(seed):
    generator = random.Random(seed)
    queue, budget = BatchQueue(budget=64), 64
    waiting = set()
    for call in range(60):
        lengths = [generator.randint(1, 80) for _ in range(generator.randint(1, 20))]
        added = entries(f"{call}-", lengths)
        queue.add(added)
        gone = generator.sample(added, generator.randint(0, len(added)) if call % 3 == 0 else 0)
        queue.remove(gone)
        waiting |= {entry.item for entry in added} - {entry.item for entry in gone}
        assert len(queue) == len(waiting)
        assert queue.fills_batch == (sum(entry.length for entry in queue._heap if entry.waits) >= budget)
    while waiting:
        batch, _ = queue.take(NOW)
        lengths = [entry.length for entry in batch]
        assert lengths == sorted(lengths)
        assert len(batch) == 1 or lengths[-1] * len(batch) <= budget
        items = {entry.item for entry in batch}
        assert items <= waiting
        waiting -= items
    assert len(queue) == 0
    assert not queue.fills_batch


def test_a_caller_that_brings_many_calls_delays_its_own():
    queue = BatchQueue(budget=8)
    for number in range(100):
        queue.add(entries(f"greedy {number} ", [8]), "greedy")
    for _ in range(10):
        take(queue)
    queue.add(entries("patient ", [8]), "patient")
    assert "patient 0" in take(queue) + take(queue)
    for number in range(3000):
        queue.add(entries("x", [1]), f"caller {number}")
        queue.take(NOW)
    assert len(queue._rank_of) <= 1200
