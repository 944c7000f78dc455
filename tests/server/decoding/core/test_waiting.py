"""Whose turn it is."""

import random

from tiny_engine import make_sequence

from headway_server.decoding.core.pace import EnginePace, LanesPace
from headway_server.decoding.core.waiting import WaitingQueue


def bring(queue, caller, count, **options):
    sequences = [make_sequence([3], caller=caller, **options) for _ in range(count)]
    queue.add(sequences)
    return sequences


async def test_a_caller_that_brings_much_at_the_highest_priority_delays_others_by_one():
    queue = WaitingQueue()
    bring(queue, "greedy", 512, priority=100)
    queue.pop()
    [patient] = bring(queue, "patient", 1)
    assert patient in [queue.pop() for _ in range(2)]


async def test_callers_take_turns_by_the_tokens_they_ask_for():
    queue = WaitingQueue()
    bring(queue, "long", 40, max_new_tokens=30)
    bring(queue, "short", 40, max_new_tokens=10)
    taken = [queue.pop().caller for _ in range(40)]
    assert 9 <= taken.count("long") <= 11


async def test_priority_orders_the_sequences_of_a_caller_and_of_all_where_they_trust_each_other():
    for scope, expected in [("caller", ["a", "b", "b"]), ("server", ["b", "b", "a"])]:
        queue = WaitingQueue(scope)
        bring(queue, "a", 1, priority=-5)
        low = bring(queue, "b", 2, priority=0)
        high = bring(queue, "b", 1, priority=1)
        queue.remove(low[:1])
        taken = [queue.pop() for _ in range(3)]
        assert [sequence.caller for sequence in taken] == expected
        assert [sequence for sequence in taken if sequence.caller == "b"] == [*high, *low[1:]]
        assert len(queue) == 0


async def test_a_caller_that_comes_back_has_saved_nothing_up():
    queue = WaitingQueue()
    bring(queue, "idle", 1)
    queue.pop()
    bring(queue, "busy", 100)
    for _ in range(50):
        queue.pop()
    bring(queue, "idle", 50)
    assert 24 <= [queue.pop().caller for _ in range(50)].count("idle") <= 26


async def test_after_any_history_the_queue_holds_what_was_neither_taken_nor_removed():
    generator = random.Random(5)
    queue, waiting = WaitingQueue(), set()
    for _ in range(2000):
        action = generator.random()
        if action < 0.5:
            waiting.update(bring(queue, f"caller {generator.randrange(400)}", generator.randint(1, 3)))
        elif action < 0.9 and waiting:
            first = queue.first()
            assert queue.pop() is first
            waiting.remove(first)
        elif waiting:
            gone = generator.sample(sorted(waiting, key=id), min(3, len(waiting)))
            queue.remove(gone)
            waiting.difference_update(gone)
        assert len(queue) == len(waiting)
        assert set(queue) == waiting
        assert len(queue._callers) <= 256 + len(waiting) + 400
    while waiting:
        waiting.remove(queue.pop())
    assert queue._callers == {}


def test_the_pace_tells_how_long_a_queue_takes():
    pace = EnginePace()
    lanes = LanesPace([pace], num_slots=4)
    assert lanes.queue_s(1000, 10) is None
    for _ in range(200):
        pace.note_step(0.01)
        pace.note_end(10, 20)
    assert abs(lanes.service_s(20) - 0.1) < 0.01  # ten tokens of twenty, of 10 ms
    assert lanes.queue_s(3 * 20, 20) == 0.0  # a slot is free
    assert abs(lanes.queue_s(43 * 20, 20) - 1.0) < 0.05  # forty before it, four at a time
