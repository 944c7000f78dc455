"""The parts of the benchmarks: what is drawn, counted, chosen and compared."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from benchmarks.caller import _Http, _NotReadyError, _RawSender, figures_of
from benchmarks.contestants.in_process import Fastest, classifying_ways, decoding_run
from benchmarks.environments import REQUIREMENTS
from benchmarks.inputs import AG_NEWS, MULTI30K, PROMPTS, make_tokenizer, random_texts
from benchmarks.measure import Figures, Load, Results, format_report, medians, paired_ratio
from benchmarks.worker import ContestantError, Process, foreign_environment, tree_environment

from headway_load import CallRecord


def call(sent_s: float, ended_s: float, tokens: Sequence[tuple[float, int]] = (), token_count: int = 0) -> CallRecord:
    times = list(tokens)
    return CallRecord(intended_s=sent_s, sent_s=sent_s, ended_s=ended_s, token_times_s=times, token_count=token_count)


def figures(calls: Sequence[CallRecord], *, cycle_tokens: int = 0, has_tokens: bool = False) -> Figures:
    return figures_of(calls, 10.0, 20.0, cycle_tokens=cycle_tokens, has_tokens=has_tokens)


@pytest.mark.parametrize("lengths", [*PROMPTS, MULTI30K, AG_NEWS], ids=lambda lengths: lengths.name)
def test_random_texts_have_exactly_the_lengths_of_their_distribution(lengths) -> None:
    tokenizer = make_tokenizer(1024)
    texts, token_ids = random_texts(tokenizer, lengths, 200)
    for text, ids in zip(texts, token_ids, strict=True):
        assert tokenizer.encode(text).ids == list(ids)
    assert len(set(texts)) == len(texts)
    for percent, tokens in zip(lengths.percents, lengths.tokens, strict=True):
        if 5 <= percent <= 95:
            assert np.percentile([len(ids) for ids in token_ids], percent) == pytest.approx(tokens, rel=0.1)


def test_a_full_size_vocabulary_has_exactly_its_tokens() -> None:
    assert set(make_tokenizer(50257).get_vocab().values()) == set(range(50257))


def test_calls_count_by_the_part_of_their_time_within_the_window() -> None:
    measured = figures([call(5, 15), call(12, 13), call(18, 28), call(1, 2)])
    assert measured["inputs_per_s"] == pytest.approx((0.5 + 1 + 0.2) / 10)
    assert (measured["call_count"], measured["error_count"]) == (3, 0)
    assert measured["latency_p50_ms"] == pytest.approx(10_000, rel=0.01)
    tokens = figures([call(5, 15, token_count=20), call(12, 13, token_count=4)], has_tokens=True)
    assert tokens["tokens_per_s"] == pytest.approx((10 + 4) / 10)


def test_tokens_of_a_stream_count_when_they_came() -> None:
    stream = call(10, 21, tokens=[(9.5, 1), (11, 3), (15, 4), (20.5, 9)])
    assert figures([stream])["tokens_per_s"] == pytest.approx(3 / 10)


def test_streams_of_one_length_are_counted_over_whole_cycles() -> None:
    # Two seconds for each prompt, then a token each half second: the window has two prompts and parts of three answers.
    answers = [call(4 * n, 4 * n + 4, tokens=[(4 * n + 2 + 0.5 * i, i + 1) for i in range(4)]) for n in range(6)]
    assert figures(answers, cycle_tokens=4)["tokens_per_s"] == pytest.approx(1.0)
    assert figures(answers)["tokens_per_s"] == pytest.approx(1.2)


def test_the_fastest_way_is_found_once_and_then_taken(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(json.dumps({"bundle": "b"}), encoding="utf-8")
    runs: list[str] = []
    loaded: list[dict] = []

    def way(name: str, rate: float):
        return lambda _: runs.append(name) or {"inputs_per_s": rate}

    fastest = Fastest(loaded.append, lambda *_: {"slow": way("slow", 1.0), "fast": way("fast", 2.0)})
    request = {"case": str(file), "callers": 8, "seconds": 1.0}
    assert fastest.answer(request) == fastest.answer(request) == {"inputs_per_s": 2.0, "setting": "fast"}
    assert runs == ["slow", "slow", "fast", "fast", "fast"]
    assert len(loaded) == 1


def test_batches_of_a_classifier_are_full_and_as_large_as_there_are_callers_at_most() -> None:
    sizes: list[int] = []
    ways = classifying_ways(
        ["aaa", "b", "cc"],
        4,
        collate=lambda items: {"texts": list(items)},
        run=lambda feeds: sizes.append(len(feeds["texts"])),
        orders=("in order", "sorted"),
    )
    assert list(ways) == [f"batches of {n}, {order}" for order in ("in order", "sorted") for n in (1, 2, 4)]
    assert ways["batches of 2, sorted"](0)["inputs_per_s"] > 0
    assert sizes == [2, 2]


def test_decoding_counts_the_tokens_that_were_wanted_and_refuses_other_answers() -> None:
    case = {"new_tokens": [3, 1], "max_new_tokens": None, "token_ids": [[5, 5, 5], [7]]}
    asked: list[tuple[list[list[int]], int]] = []

    def generate(batch: list[list[int]], count: int) -> list[list[int]]:
        asked.append((batch, count))
        return [[0] * count] * len(batch)

    assert decoding_run(case, 2, generate)(0)["tokens_per_s"] > 0
    assert asked == [([[7], [5, 5, 5]], 3)]
    with pytest.raises(RuntimeError, match=r"answers have \[1\] tokens, 3 were asked for"):
        decoding_run(case, 2, lambda batch, _: [[0]] * len(batch))(0)


class Row:
    """A contestant with rates of its own, which notes when it is measured."""

    kind = "served"

    def __init__(self, name: str, rates: list[float], turns: list[str], error: str = "") -> None:
        self.name, self._rates, self._turns, self._error = name, iter(rates), turns, error
        self.versions = {"row": "1"}

    def measure(self, loads: Sequence[Load]) -> Iterator[tuple[Load, Figures]]:
        for load in loads:
            self._turns.append(f"{self.name}{load.callers}")
            if self._error:
                raise ContestantError(self._error)
            yield load, {load.rate: next(self._rates), "call_count": 2, "setting": "one way"}


def test_rounds_alternate_ratios_are_paired_and_errors_are_kept() -> None:
    turns: list[str] = []
    rows = [Row("a", [90, 45, 300], turns), Row("b", [100, 50, 150], turns), Row("c", [], turns, error="broken")]
    results = Results(rows, [Load(case="m", file=Path("m.json"), rate="inputs_per_s", callers=1, seconds=0)])
    for number in range(3):
        results.add_round(number=number, by_case=False)
    assert turns == ["a1", "b1", "c1", "b1", "a1", "a1", "b1"]
    ours, other, broken = results.records()
    assert other["loads"][0]["ours_times"] == {"median": 0.9, "least": 0.9, "greatest": 2.0}
    assert other["loads"][0]["rounds"] == [100, 50, 150]
    assert ours["loads"][0]["call_count"] == 6
    assert (broken["loads"], broken["errors"]) == ([], {"m": "broken"})
    text = "\n".join(format_report({"cases": [{"name": "m", "source": "texts"}], "rows": [ours, other, broken]}))
    for shown in ("0.90 (0.90-2.00)", "c was not measured: broken", "b, 1 callers: one way", "inputs/s"):
        assert shown in text


def test_contestants_that_must_be_started_get_all_loads_of_a_case_at_a_time() -> None:
    turns: list[str] = []
    loads = [Load(case=c, file=Path(c), rate="inputs_per_s", callers=n, seconds=0) for c in "xy" for n in (1, 8)]
    results = Results([Row("a", [1] * 4, turns), Row("b", [1] * 4, turns)], loads)
    results.add_round(number=0, by_case=True)
    assert turns == ["a1", "a8", "b1", "b8"] * 2


def test_medians_sum_counts_and_keep_words() -> None:
    rounds = [{"error_count": 1, "p50": 3.0, "setting": "s"}, {"error_count": 2, "p50": 5.0, "setting": "s"}]
    assert medians(rounds) == {"error_count": 3, "p50": 4.0, "setting": "s"}
    assert paired_ratio([2.0], [1.0]) == {"median": 2.0, "least": 2.0, "greatest": 2.0}


async def test_http_calls_share_a_connection_and_a_server_that_is_not_ready_is_asked_again() -> None:
    statuses = iter(["503 No", "404 No", "200 OK", "200 OK", "400 Bad"])
    num_connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while header := await reader.readline():
            while (line := await reader.readline()) != b"\r\n":
                header += line
            assert header.startswith(b"POST /path HTTP/1.1\r\n")
            assert await reader.readexactly(4) == b"body"
            writer.write(f"HTTP/1.1 {next(statuses)}\r\nContent-Length: 2\r\n\r\nok".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    http = _Http(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "/path")
    sender = _RawSender(http.post, [b"body"], [3])
    await sender.probe()
    record = CallRecord(intended_s=0.0)
    await sender.send(record)
    assert record.ended_s > record.sent_s
    assert record.token_count == 3
    with pytest.raises(RuntimeError, match="status 400: b'ok'") as raised:
        await http.post(b"body")
    assert not isinstance(raised.value, _NotReadyError)
    assert num_connections == 1
    for _, writer in http.idle:
        writer.close()
        await writer.wait_closed()
    server.close()
    await server.wait_closed()


def test_a_process_that_ends_is_told_with_its_log() -> None:
    with Process(["sh", "-c", "echo one; echo why >&2; exit 3"], foreign_environment()) as process:
        assert process.read_line("one") == "one"
        with pytest.raises(ContestantError, match="ended with code 3: why"):
            process.read_line()


def test_a_tree_comes_before_what_is_installed_and_the_users_settings_are_left_out(monkeypatch) -> None:
    monkeypatch.setenv("HEADWAY_THREADS", "7")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    environment = tree_environment(Path("/tree"))
    assert "HEADWAY_THREADS" not in environment
    folders = environment["PYTHONPATH"].split(":")
    assert folders[:2] == ["/tree/proto", "/tree/server"]
    assert folders[-1] == "elsewhere"
    assert "PYTHONPATH" not in foreign_environment()


def test_every_library_that_is_compared_is_pinned() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    for requirements in REQUIREMENTS.values():
        assert all("==" in one or f"\n{one}==" in constraints for one in requirements)
