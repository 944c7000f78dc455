"""Whose drawings take part in a step."""

import random
from dataclasses import dataclass

from headway_server.diffusion.turns import Turns


@dataclass(eq=False)
class Job:
    name: str
    num_rows: int = 1
    left: int = 10**9


def jobs(name, count, num_rows=1, left=10**9):
    return [Job(f"{name}{number}", num_rows, left) for number in range(count)]


def names(chosen):
    return sorted(one.name for one in chosen)


def test_all_take_part_where_there_is_room():
    turns = Turns()
    turns.add(jobs("a", 3), "anna")
    turns.add(jobs("b", 2, num_rows=2), "bert")
    assert names(turns.take(8)) == ["a0", "a1", "a2", "b0", "b1"]


def test_a_long_call_leaves_a_short_one_its_share_of_every_step():
    turns = Turns()
    turns.add(jobs("a", 40), "anna")
    for _ in range(5):
        assert len(turns.take(4)) == 4
    turns.add(jobs("b", 1), "bert")
    turns.add(jobs("c", 1), "anna")  # and so it does among the calls of one caller
    for _ in range(20):
        chosen = names(turns.take(4))
        assert {"b0", "c0"} <= set(chosen)
        assert len(chosen) == 4


def test_drawings_of_a_call_go_in_order_so_that_the_first_are_done_first():
    turns = Turns()
    turns.add(jobs("a", 6), "anna")
    assert [names(turns.take(3)) for _ in range(3)] == [["a0", "a1", "a2"]] * 3


def test_callers_with_too_much_share_alike():
    turns, taken = Turns(), {"a": 0, "b": 0}
    turns.add(jobs("a", 50), "anna")
    turns.add(jobs("b", 7, num_rows=2), "bert")
    for _ in range(40):
        for one in turns.take(7):
            taken[one.name[0]] += one.num_rows
    assert abs(taken["a"] - taken["b"]) <= 4


def test_what_nobody_else_wanted_is_no_debt():
    turns = Turns()
    turns.add(jobs("a", 8), "anna")
    turns.add(jobs("b", 1), "bert")
    for _ in range(100):  # anna has three rows a step that nobody else wants
        turns.take(4)
    for name in "cde":
        turns.add(jobs(name, 1), name)
    waits = 0
    while not any(one.name[0] == "a" for one in turns.take(4)):
        waits += 1
    assert waits <= 1


def test_random_calls_all_end_within_their_share():
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # noqa: T201 (shown where the test fails)
    generator = random.Random(seed)
    turns, open_jobs, waits = Turns(), [], {}
    for step in range(400):
        if step < 200 and generator.random() < 0.3:
            rows, left = generator.choice((1, 2)), generator.randrange(1, 12)
            added = jobs(f"{step}-", generator.randrange(1, 6), rows, left)
            turns.add(added, generator.choice("abc"))
            open_jobs += added
        chosen = turns.take(4)
        assert sum(one.num_rows for one in chosen) <= 4
        assert len({id(one) for one in chosen}) == len(chosen)
        assert bool(chosen) == bool(len(turns))
        for one in chosen:
            one.left -= 1
        done = [one for one in chosen if not one.left]
        gone = [one for one in open_jobs if generator.random() < 0.002]
        turns.remove([*done, *gone])
        open_jobs = [one for one in open_jobs if one.left and one not in gone]
        assert len(turns) == len(open_jobs) == len(turns.members())
        waits = {id(one): 0 if one in chosen else waits.get(id(one), 0) + 1 for one in open_jobs}
    while len(turns):
        for one in turns.take(4):
            one.left -= 1
        turns.remove([one for one in turns.members() if not one.left])
