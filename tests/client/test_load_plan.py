"""What a load test is told: schedules, scenario files, objectives, and the search for the highest rate."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from headway_load import (
    Arrivals,
    CallRecord,
    LoadPlan,
    LoadTask,
    Objective,
    Outcome,
    Recorder,
    Workload,
    best,
    encode_png,
    find_max,
    make_plan,
    read_scenario,
    read_times,
    time_limits,
)

TEXTS = Workload(task=LoadTask.CLASSIFY_TEXT, inputs=["a", "b"], name="texts")
VERSE = Workload(task=LoadTask.GENERATE_TEXT, inputs=["a"], name="verse", stream=True)


def offsets(**values: Any) -> list[float]:
    plan = make_plan(workloads=(TEXTS,), **{"warmup_s": 0.0} | values)
    return [due_s - 7.0 for due_s, _ in plan.schedule(7.0)]


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert offsets(rate_per_s=4, duration_s=1, arrivals=Arrivals.CONSTANT) == pytest.approx([0, 0.25, 0.5, 0.75])
    times = offsets(rate_per_s=4, duration_s=1, warmup_s=0.5, arrivals=Arrivals.CONSTANT)
    assert times == pytest.approx([-0.5, -0.25, 0, 0.25, 0.5, 0.75])


@pytest.mark.parametrize("arrivals", list(Arrivals))
@pytest.mark.parametrize(("rate", "ramp_to"), [(10, 190), (190, 10)])
def test_a_ramp_changes_its_rate_evenly_after_the_warmup(arrivals: Arrivals, rate: float, ramp_to: float) -> None:
    times = offsets(rate_per_s=rate, ramp_to_per_s=ramp_to, duration_s=100, warmup_s=10, seed=3, arrivals=arrivals)
    assert times == sorted(times)
    counts = Counter(int(time_s // 10) for time_s in times)
    for part in range(-1, 10):
        expected = 10 * (rate if part < 0 else rate + (ramp_to - rate) * (part + 0.5) / 10)
        # Of a Poisson process the count has its mean as its variance.
        assert abs(counts[part] - expected) <= (4 * expected**0.5 if arrivals is Arrivals.POISSON else 1.1)


def test_a_ramp_may_fall_to_almost_nothing() -> None:
    times = offsets(rate_per_s=100, ramp_to_per_s=1e-3, duration_s=10, arrivals=Arrivals.CONSTANT)
    assert len(times) == pytest.approx(500, abs=1)


def test_a_replay_repeats_what_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "times.txt"
    file.write_text("1700000000.5\n\n1700000000.25\n1700000003\n")
    times = read_times(file)
    assert offsets(replay_s=times) == pytest.approx([0, 0.25, 2.75], abs=1e-6)
    assert offsets(replay_s=times, warmup_s=1.0) == pytest.approx([-1, -0.75, 1.75], abs=1e-6)
    assert offsets(replay_s=times, duration_s=1.0) == pytest.approx([0, 0.25], abs=1e-6)
    file.write_text("noon\n")
    with pytest.raises(ValueError, match=r"times.txt.*noon.*a time in seconds"):
        read_times(file)


def test_workloads_are_drawn_by_weight_and_alike_for_a_seed() -> None:
    heavy = Workload(task=LoadTask.CLASSIFY_TEXT, inputs=["a"], name="heavy", weight=3)
    plan = LoadPlan(workloads=(TEXTS, heavy), rate_per_s=1000, duration_s=20, seed=4)
    drawn = list(plan.schedule(0.0))
    assert drawn == list(plan.schedule(0.0))
    counts = Counter(number for _, number in drawn)
    assert counts[1] / counts[0] == pytest.approx(3, rel=0.1)
    callers = [tuple(islice(plan.choices(caller), 20)) for caller in range(3)]
    assert len(set(callers)) == 3


def test_gaps_of_a_poisson_ramp_shrink() -> None:
    gaps = [later - earlier for earlier, later in pairwise(offsets(rate_per_s=5, ramp_to_per_s=500, duration_s=20))]
    assert sum(gaps[:50]) > 5 * sum(gaps[-50:])


SCENARIO = """
rate_per_s = 40
ramp_to_per_s = 80
arrivals = "constant"
duration_s = 30
objectives = ["errors<1%", "talk:ttft.p95<500ms"]

[[workloads]]
task = "classify-text"
weight = 9
inputs = "texts.txt"

[[workloads]]
name = "talk"
task = "chat"
inputs = "talk.jsonl"
options = { temperature = 0.5 }

[[workloads]]
task = "classify-image"
inputs = "images"
batch_size = 2
"""


def test_a_scenario_names_its_calls_and_their_inputs(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one\n\ntwo\n")
    turns = [{"role": "user", "content": "hi"}]
    lines = [json.dumps({"messages": turns, "max_new_tokens": 5}), json.dumps("hello"), json.dumps([["user", "x"]])]
    (tmp_path / "talk.jsonl").write_text("\n".join(lines))
    (tmp_path / "images").mkdir()
    image = encode_png(2, 2, lambda x, y: (x, y, 0))
    (tmp_path / "images" / "a.png").write_bytes(image)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    file = tmp_path / "scenario.toml"
    file.write_text(SCENARIO)
    plan = make_plan(**read_scenario(file))
    assert (plan.rate_per_s, plan.ramp_to_per_s, plan.arrivals, plan.duration_s) == (40, 80, Arrivals.CONSTANT, 30)
    texts, talk, images = plan.workloads
    assert (texts.name, texts.weight, texts.inputs, texts.stream) == ("classify-text", 9, ["one", "two"], False)
    assert (talk.name, talk.stream, talk.options) == ("talk", True, {"temperature": 0.5})
    assert talk.inputs == [turns, "hello", [["user", "x"]]]
    assert talk.input_options == [{"max_new_tokens": 5}, {}, {}]
    assert (images.inputs, images.batch_size) == ([image], 2)
    assert plan.describe().startswith(
        "82% classify-text, 9% talk, 9% classify-image: open loop, 40 to 80 calls/s (Const"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate = 4", "there is no 'rate'; is it 'rate_per_s'?"),
        ('[[workloads]]\ntask = "talk"', "task is 'talk'; it is one of generate-text, chat"),
        ("rate_per_s = [", "scenario.toml: "),
        ('rate_per_s = 1\narrivals = "uniform"', "arrivals is 'uniform'; it is one of "),
        ('rate_per_s = 1\nobjectives = ["fast"]', "'fast' is no objective"),
        ("[[workloads]]\nweight = 1", "a workload has no task; it is one of generate-text, chat"),
        ('[[workloads]]\ntask = "chat"\nwieght = 1', "there is no 'wieght'; is it 'weight'?"),
        ('[[workloads]]\ntask = "chat"\nweight = "much"', "weight"),
        ('[[workloads]]\ntask = "chat"\ninputs = "bad.jsonl"', "bad.jsonl, line 1: chat needs messages or a text"),
        ('[[workloads]]\ntask = "chat"\noptions = { beams = 1 }', "stream_chat has no option 'beams'"),
    ],
)
def test_a_wrong_scenario_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    file = tmp_path / "scenario.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"scenario\.toml") as error:
        read_scenario(file)
    assert message in str(error.value)


def recorded(*latencies_ms: float, failed_count: int = 0) -> Recorder:
    recorder = Recorder(0.0, 10.0)
    for number, latency_ms in enumerate(latencies_ms):
        due_s = 5 * number / len(latencies_ms)
        recorder.add(CallRecord(intended_s=due_s, sent_s=due_s, ended_s=due_s + latency_ms / 1e3))
    for _ in range(failed_count):
        recorder.add(CallRecord(intended_s=1.0, sent_s=1.0, ended_s=1.1, outcome="UNAVAILABLE"))
    return recorder


@pytest.mark.parametrize(
    ("text", "value", "met"),
    [
        ("p99<200ms", 99, True),
        ("latency.p50 < 50ms", 50, False),
        ("p99.9<=0.2s", 0.1, True),
        ("mean<51ms", 50.5, True),
        ("max<99000us", 100_000, False),
        ("errors<10%", 100 * 25 / 125, False),
        ("rate>9/s", 10, True),
        ("goodput>11/s", 10, False),
        ("goodput>79%", 80, True),
        ("ttft.p95<1s", None, False),
    ],
)
def test_objectives_hold_what_was_measured_against_their_limit(text: str, value: float | None, *, met: bool) -> None:
    recorder = recorded(*range(1, 101), failed_count=25)
    recorder.good_count = recorder.ok_count
    result = Objective.parse(text).judge(recorder, elapsed_s=10.0)
    assert (result.objective, result.met) == (text, met)
    assert result.value == (value if value is None else pytest.approx(value, rel=2e-3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no objective; write one such as p99<200ms"),
        ("p99<200", "is no objective"),
        ("p99>200ms", "latency takes a limit such as <1us or <1ms or <1s"),
        ("p99<2%", "latency takes a limit such as"),
        ("errors<5ms", "errors takes a limit such as <1%, without a percentile"),
        ("errors.p50<5%", "without a percentile"),
        ("ttft<5ms", "with a percentile, mean or max"),
        ("rate<5/s", "rate takes a limit such as >1/s"),
    ],
)
def test_what_is_no_objective_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"objective|limit") as error:
        Objective.parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text:p99<1s", "there is no workload 'text', only texts, verse"),
        ("texts:ttft.p95<1s", "only calls that stream have tokens to time"),
    ],
)
def test_an_objective_must_fit_the_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadPlan(workloads=(TEXTS, VERSE), rate_per_s=1, objectives=(Objective.parse(text),))
    LoadPlan(workloads=(TEXTS, VERSE), rate_per_s=1, objectives=(Objective.parse("verse:gap.p99<1s"),))


def test_goodput_counts_calls_within_the_widest_limit_of_each_kind() -> None:
    objectives = [
        Objective.parse(text) for text in ("p50<50ms", "p99<200ms", "verse:ttft.p95<30ms", "verse:gap.p99<5ms")
    ]
    assert time_limits(objectives, "texts") == (0.2, None, None)
    limits = time_limits(objectives, "verse")
    assert limits == (0.2, 0.03, 0.005)

    def good(ended_ms: float, *tokens: tuple[float, int]) -> int:
        recorder = Recorder(limits=limits)
        times = [(time_ms / 1e3, count) for time_ms, count in tokens]
        recorder.add(CallRecord(intended_s=0.0, sent_s=0.0, ended_s=ended_ms / 1e3, token_times_s=times))
        return recorder.good_count

    assert good(100, (20, 1), (60, 11)) == 1
    assert good(201, (20, 1), (60, 11)) == 0
    assert good(100, (31, 1), (60, 11)) == 0
    assert good(100, (20, 1), (80, 11)) == 0
    assert good(100, (20, 1)) == 1


@pytest.mark.parametrize("capacity", [9.0, 137.0, 2500.0])
@pytest.mark.parametrize("first", [None, 100.0])
def test_the_highest_rate_is_found_to_a_twentieth(capacity: float, first: float | None) -> None:
    """A server whose latency grows as that of a queue does, 1 / (capacity - rate), and then never ends."""

    def run(plan: LoadPlan) -> Outcome:
        assert plan.rate_per_s is not None
        rates.append(plan.rate_per_s)
        headroom = capacity - plan.rate_per_s
        latency_ms = 1e3 / headroom if headroom > 0 else 5e3
        return Outcome(plan=plan, recorders=[recorded(*[latency_ms] * 100)], elapsed_s=10.0)

    rates: list[float] = []
    plan = LoadPlan(workloads=(TEXTS,), rate_per_s=first or 16.0, objectives=(Objective.parse("p99<1000ms"),))
    probes = find_max(plan, run, 20)
    highest = best(probes)
    assert highest is not None
    assert highest.rate_per_s == max(probe.rate_per_s for probe in probes if probe.met)
    assert (capacity - 1) / 1.05 <= highest.rate_per_s <= capacity - 1
    assert len(rates) == len(probes) <= 14
    assert len(find_max(plan, run, 3)) == 3


def test_a_rate_that_the_server_falls_behind_is_not_kept() -> None:
    def run(plan: LoadPlan) -> Outcome:
        recorder = recorded(*[1.0] * 100)
        recorder.not_sent_count = 1
        return Outcome(plan=plan, recorders=[recorder], elapsed_s=10.0)

    plan = LoadPlan(workloads=(TEXTS,), rate_per_s=16, objectives=(Objective.parse("p99<1000ms"),))
    probes = find_max(plan, run, 3)
    assert [probe.rate_per_s for probe in probes] == [16, 4, 1]
    assert best(probes) is None
    assert "only 10/s were answered" in str(probes[0])
