"""Measures generation at the size of GPT-2 small: served, bare, by other libraries, and against the machine's memory.

    python benchmarks/generation.py [--rounds 5] [--seconds 4] [--peers all]
    python benchmarks/generation.py --quick         # a tiny model and no peers, seconds: does it run?
    python benchmarks/generation.py --profile       # where the server's time goes with 32 streams

Everything runs in processes of its own and is measured in turn, round after round, so that whatever slows the machine
for a while slows all sides; figures are medians over the rounds, ratios medians of the rounds' ratios. README.md beside
this file says what is measured and what the last line holds.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from bandwidth import measure_bandwidth
from contestants import Bare, Load, PeerContestant, Served, prompts_between
from footprint import Footprint
from generation_table import format_report
from latency import NEWCOMER_TOKENS, RUNNING_TOKENS, measure_latency
from limits import BareProcess
from machine import ROOT, command_line, describe_hardware, describe_versions, git_commit
from peers.environment import PEERS, PeerError, PeerProcess, ensure_environment
from picture import draw
from profiling import profile_server
from prompts import PROMPT_SETS
from random_gpt import GEOMETRIES, prepare
from random_model import RandomModel
from rows import SETTLING_SHARE, Row
from served import RunningServer, ServerFailedError, running_server
from targets import OURS, judge

from headway_export.errors import ExportError
from headway_server.errors import HeadwayError
from headway_server.runtime import usable_cores

SCHEMA_VERSION = 1
STREAMS = (1, 8, 32)
PRECISIONS = ("int8", "fp32")
NUM_SLOTS = 32
SCRATCH = ROOT / "runs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results" / "generation.json"
PICTURE = ROOT / "docs" / "generation-benchmark.svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to measure."""

    geometry: str
    rounds: int
    seconds: float
    new_tokens: int
    newcomers: int
    threads: int
    peers: tuple[str, ...]

    @property
    def loads(self) -> list[Load]:
        """What is asked in every round."""
        return [
            Load(case=name, num_streams=streams, new_tokens=self.new_tokens, seconds=self.seconds)
            for name in PROMPT_SETS
            for streams in STREAMS
        ]


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Times everything is measured.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Shortest measurement.")] = 4.0,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    newcomers: Annotated[int, typer.Option(min=2, help="Newcomers, one a second, while 31 streams run.")] = 20,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of every side. [default: usable cores]")] = None,
    peers: Annotated[str, typer.Option(help="all, none, or names with commas between.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and short measurements.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Only show where the server's time goes.")] = False,
    output: Annotated[Path, typer.Option(help="File for the JSON object.")] = RESULTS,
    picture: Annotated[Path, typer.Option(help="File for the picture.")] = PICTURE,
) -> None:
    """Measures generation at the size of GPT-2 small."""
    settings = Settings(
        geometry="tiny" if quick else "gpt2-small",
        rounds=2 if quick else rounds,
        seconds=0.2 if quick else seconds,
        new_tokens=new_tokens,
        newcomers=2 if quick else newcomers,
        threads=threads or usable_cores(),
        peers=_chosen(peers, quick=quick),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped, as by Ctrl-C
    try:
        report = _profile(settings) if profile else _measure(settings)
    except (ServerFailedError, PeerError, ExportError, HeadwayError) as error:
        _fail(str(error))
    if not profile:
        for line in format_report(report):
            _say(line)
        title = f"Tokens a second, {settings.geometry}, {settings.new_tokens} new tokens"
        drawn = draw(report, title=title, panel_title=_panel_title)
        for file, text in ((output, json.dumps(report, indent=2) + "\n"), (picture, drawn)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            _say(f"written to {file}")
    _say(json.dumps(report))


def _panel_title(prompt_set: str, streams: int) -> str:
    return f"prompts of {prompt_set} tokens, {streams} stream{'s' if streams > 1 else ''}"


def _chosen(peers: str, *, quick: bool) -> tuple[str, ...]:
    """Returns the names of the peers that were asked for; in a quick run none but those named."""
    known = [peer.name for peer in PEERS]
    if peers == "all":
        return () if quick else tuple(known)
    asked = [] if peers == "none" else [name.strip() for name in peers.split(",")]
    if unknown := sorted(set(asked) - set(known)):
        _fail(f"--peers {', '.join(unknown)}: not known; known are {', '.join(known)}")
    return tuple(asked)


def _about(settings: Settings) -> dict[str, Any]:
    about = {
        "schema_version": SCHEMA_VERSION,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "git_commit": git_commit(),
        "hardware": describe_hardware(),
        "versions": describe_versions(),
        "settings": asdict(settings),
    }
    for key in ("command", "git_commit", "hardware", "versions"):
        _say(f"{key}: {about[key]}")
    return about


def _prepare(settings: Settings) -> RandomModel:
    _say("the model: looked for, and exported where this code has not done so yet (about two minutes)")
    return prepare(GEOMETRIES[settings.geometry], SCRATCH)


def _server_flags(settings: Settings, precision: str) -> list[str]:
    return ["--precision", precision, "--num-slots", str(NUM_SLOTS), "--threads", str(settings.threads)]


def _measure(settings: Settings) -> dict[str, Any]:
    about = _about(settings)
    model = _prepare(settings)
    bandwidth = measure_bandwidth(settings.threads)
    footprints = {name: Footprint.of(model.bundle, name, num_slots=NUM_SLOTS) for name in PRECISIONS}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(running_server(model.store, _server_flags(settings, name))) for name in PRECISIONS
        }
        rows, failed = _open_rows(settings, model, servers, stack)
        _run_rounds(settings, rows)
        ours = next(row for row in rows if row.contestant.name == OURS)
        assert isinstance(ours.contestant, Served), "its name says so"
        time.sleep(SETTLING_SHARE * settings.seconds)
        latency = measure_latency(
            ours.contestant.target,
            newcomers=prompts_between(model, NEWCOMER_TOKENS, NEWCOMER_TOKENS, seed=21),
            running=prompts_between(model, RUNNING_TOKENS, RUNNING_TOKENS, seed=22),
            running_new_tokens=model.geometry.max_length - RUNNING_TOKENS,
            num_newcomers=settings.newcomers,
        )
        memory = {name: footprints[name].resident(server.process_id) for name, server in servers.items()}
    rounds = {(row.contestant.name, *key): row.tokens_per_s(key) for row in rows for key in row.measured}
    length = RUNNING_TOKENS + settings.new_tokens / 2
    return about | {
        "model": asdict(model.geometry) | {"variants": [asdict(footprint) for footprint in footprints.values()]},
        "bandwidth": {
            "gb_per_s": round(bandwidth / 1e9, 2),
            "decode_limits": [
                limit
                for footprint in footprints.values()
                for limit in footprint.decode_limits(bandwidth, STREAMS, length)
            ],
        },
        "rows": [*(row.record(ours) for row in rows), *failed],
        "latency": latency,
        "memory": memory,
        "targets": [verdict.as_record() for verdict in judge(rounds, latency, memory["int8"])],
    }


def _open_rows(
    settings: Settings, model: RandomModel, servers: dict[str, RunningServer], stack: ExitStack
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Opens all contestants; returns their rows, and records of those that do not run."""
    bare = stack.enter_context(BareProcess())
    rows = [Row(contestant=Served(model, server.address, name)) for name, server in servers.items()]
    rows += [
        Row(contestant=Bare(model, bare, name, num_slots=NUM_SLOTS, threads=settings.threads)) for name in PRECISIONS
    ]
    failed: list[dict[str, Any]] = []
    for peer in (peer for peer in PEERS if peer.name in settings.peers):
        try:
            python = ensure_environment(SCRATCH)
            process = PeerProcess(
                peer,
                python=python,
                model=model.folder,
                bundle=model.bundle,
                scratch=model.folder / "peers",
                threads=settings.threads,
            )
        except PeerError as error:
            _say(f"{peer.name}: {error}")
            failed.append({"name": peer.name, "kind": "peer", "precision": peer.precision, "error": str(error)})
            continue
        stack.enter_context(process)
        rows.append(Row(contestant=PeerContestant(model, process), versions=process.versions))
    return rows, failed


def _run_rounds(settings: Settings, rows: list[Row]) -> None:
    for number in range(settings.rounds):
        begun_s = time.perf_counter()
        first = number % len(rows)  # nobody is always behind the same neighbour's heat
        for load in settings.loads:
            for row in (*rows[first:], *rows[:first]):
                row.measure(load)
        _say(f"round {number + 1} of {settings.rounds} done in {time.perf_counter() - begun_s:.0f} s")


def _profile(settings: Settings) -> dict[str, Any]:
    """Shows where the server's time goes with as many streams as there are slots."""
    about = _about(settings)
    model = _prepare(settings)
    python = ensure_environment(SCRATCH)
    with running_server(model.store, _server_flags(settings, "int8")) as server:
        served = Served(model, server.address, "int8")
        load = Load(case="128", num_streams=NUM_SLOTS, new_tokens=settings.new_tokens, seconds=3 * settings.seconds)
        found = profile_server(python, server.process_id, lambda: served.measure(load))
    for line in found.lines():
        _say(line)
    return about | {"profile": found.as_record()}


def _say(line: str) -> None:
    print(line, flush=True)


def _fail(message: str) -> NoReturn:
    print(f"benchmark: {message}", file=sys.stderr)
    raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    app()
