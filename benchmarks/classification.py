"""Measures classifiers of texts and images: served, bare, by other servers, and against what the transport can do.

    python benchmarks/classification.py [--rounds 3] [--seconds 4] [--peers all]
    python benchmarks/classification.py --quick         # tiny models and no peers, seconds: does it run?

Everything runs in processes of its own and is measured in turn, round after round, so that whatever slows the machine
for a while slows all sides; figures are medians over the rounds, ratios medians of the rounds' ratios. README.md beside
this file says what is measured and what the last line holds.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import grpc
import typer
from classification_subjects import MODELS, SHIPPED, Subject, load_subjects
from classification_table import format_report
from classification_targets import BARE, BARE_SORTED, ECHO, OURS, judge
from classifier_limits import BATCH_SIZES, ORDERS, BareClassifier, BareProcess
from classifier_peers.contestants import Choices, PeerMeasurer, read_choices
from classifier_peers.environment import PEERS
from closed_loop import measure_callers
from echo import measure_echo, running_echo
from machine import ROOT, command_line, describe_hardware, describe_versions, git_commit
from peers.environment import PeerError
from picture import Keys, draw
from served import ServerFailedError, running_server
from table import medians

from headway_export.errors import ExportError
from headway_server.errors import HeadwayError
from headway_server.runtime import usable_cores

SCHEMA_VERSION = 1
CALLERS = (1, 8, 32, 128)
SCRATCH = ROOT / "runs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results" / "classification.json"
PICTURE = ROOT / "docs" / "classification-benchmark.svg"
_BATCHES = re.compile(r"batches of ([2-9]|\d\d)")
_KEYS = Keys(group="model", number="callers", figure="inputs_per_s")
_KINDS = {OURS: "served", BARE: "bare", BARE_SORTED: "bare", ECHO: "bare"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to measure."""

    size: str
    precision: str
    rounds: int
    seconds: float
    threads: int
    callers: tuple[int, ...]
    models: tuple[str, ...]
    peers: tuple[str, ...]


@dataclass(slots=True)
class Figures:
    """What was measured, round after round, by model, row and callers."""

    rounds: dict[tuple[str, str, int], list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    """Why a row of a model is missing."""

    def add(self, model: str, row: str, callers: int, figures: dict[str, Any]) -> None:
        """Adds what one round measured."""
        self.rounds.setdefault((model, row, callers), []).append(figures)

    def each(self, figure: str) -> dict[tuple[str, str, int], list[float]]:
        """One figure of each round, of the rows that have it."""
        return {
            key: [one[figure] for one in figures]
            for key, figures in self.rounds.items()
            if all(figure in one for one in figures)
        }

    def rows(self) -> list[dict[str, Any]]:
        """For the JSON object."""
        names = dict.fromkeys(row for _, row, _ in self.rounds)
        return [
            {
                "name": name,
                "kind": _KINDS.get(name, "peer"),
                "loads": [
                    {"model": model, "callers": callers} | _summary(figures)
                    for (model, row, callers), figures in self.rounds.items()
                    if row == name
                ],
            }
            for name in names
        ]


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Times everything is measured.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Shortest measurement.")] = 4.0,
    precision: Annotated[str, typer.Option(help="Variant that all sides run: int8 or fp32.")] = "int8",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of every side. [default: usable cores]")] = None,
    models: Annotated[str, typer.Option(help="all, or names with commas between.")] = "all",
    peers: Annotated[str, typer.Option(help="all, none, or names with commas between.")] = "all",
    setups: Annotated[
        Path | None,
        typer.Option(help="JSON object of an earlier run, whose choice of the peers' setups is taken over."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models and short measurements.")] = False,
    output: Annotated[Path, typer.Option(help="File for the JSON object.")] = RESULTS,
    picture: Annotated[Path, typer.Option(help="File for the picture.")] = PICTURE,
) -> None:
    """Measures classifiers of texts and images."""
    settings = Settings(
        size="tiny" if quick else "base",
        precision=precision,
        rounds=2 if quick else rounds,
        seconds=0.2 if quick else seconds,
        threads=threads or usable_cores(),
        callers=CALLERS[:2] if quick else CALLERS,
        models=_chosen("models", models, MODELS),
        peers=() if quick and peers == "all" else _chosen("peers", peers, (*(peer.name for peer in PEERS), "OpenVINO")),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped, as by Ctrl-C
    try:
        choices = {} if setups is None else _read_choices(setups)
        report = _measure(settings, choices, lambda rounds: _write(rounds, output, picture))
    except (ServerFailedError, ExportError, HeadwayError) as error:
        _fail(str(error))
    for line in format_report(report):
        _say(line)
    for file in (output, picture):
        _say(f"written to {file}")
    _say(json.dumps(report))


def _write(report: dict[str, Any], output: Path, picture: Path) -> None:
    """Writes the JSON object and draws it."""
    drawn = draw(
        {"rows": [row for row in report["rows"] if row["name"] != ECHO]} | {key: report[key] for key in _DRAWN},
        title=f"Inputs a second, {report['settings']['precision']}",
        panel_title=lambda model, callers: f"{model}, {callers} caller{'s' if callers > 1 else ''}",
        keys=_KEYS,
    )
    for file, text in ((output, json.dumps(report, indent=2) + "\n"), (picture, drawn)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


_DRAWN = ("hardware", "settings", "started_at")


def _chosen(option: str, names: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names that an option asks for."""
    if names == "all":
        return known
    asked = [] if (option, names) == ("peers", "none") else [name.strip() for name in names.split(",")]
    if unknown := sorted(set(asked) - set(known)):
        _fail(f"--{option} {', '.join(unknown)}: not known; known are {', '.join(known)}")
    return tuple(asked)


def _read_choices(file: Path) -> Choices:
    try:
        return read_choices(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _fail(f"--setups {file}: {error!r}; give the file that an earlier run of this benchmark wrote")


def _measure(settings: Settings, choices: Choices, after_round: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measures everything; `after_round` gets the report of the rounds that are done, so that a stop loses one only."""
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
    _say("the models: looked for, and exported where this code has not done so yet (some minutes)")
    subjects = [subject for subject in load_subjects(settings.size, SCRATCH) if subject.name in settings.models]
    figures = Figures()
    with ExitStack() as stack:
        addresses = dict(_open_servers(subjects, settings, stack))
        echo = stack.enter_context(running_echo())
        bare = stack.enter_context(BareProcess())
        peers = PeerMeasurer(
            settings.peers, SCRATCH, threads=settings.threads, precision=settings.precision, choices=choices
        )
        for number in range(settings.rounds):
            begun_s = time.perf_counter()
            for subject in subjects:
                _say(f"round {number + 1} of {settings.rounds}: {subject.name}")
                _measure_served(subject, addresses[subject.store], echo, settings, figures)
                _measure_bare(subject, bare, settings, figures)
                _measure_peers(subject, peers, settings, figures)
            _say(f"round {number + 1} of {settings.rounds} done in {time.perf_counter() - begun_s:.0f} s")
            report = about | _report(subjects, settings, figures)
            report["versions"] = about["versions"] | peers.versions()
            after_round(report)
    return report


def _report(subjects: list[Subject], settings: Settings, measured: Figures) -> dict[str, Any]:
    """What has been measured so far, and what it says of the targets."""
    figures = Figures(rounds=dict(measured.rounds), failures=measured.failures)
    _choose_batches(figures, settings)
    verdicts = judge(
        figures.each("inputs_per_s"),
        figures.each("latency_p99_ms"),
        big=[subject.name for subject in subjects if subject.is_big],
        padded=_padded(figures, [subject.name for subject in subjects if subject.reads_texts]),
    )
    return {
        "models": [
            {
                "name": subject.name,
                "precision": settings.precision,
                "inputs": subject.source,
                "is_big": subject.is_big,
            }
            for subject in subjects
        ],
        "rows": figures.rows(),
        "failures": [{"model": model, "row": row, "error": error} for (model, row), error in figures.failures.items()],
        "targets": [verdict.as_record() for verdict in verdicts],
    }


def _open_servers(subjects: list[Subject], settings: Settings, stack: ExitStack) -> Iterator[tuple[Path, str]]:
    """Starts a server for each store; of the shipped models, only those that are measured are in it."""
    flags = ["--precision", settings.precision, "--threads", str(settings.threads)]
    for store in dict.fromkeys(subject.store for subject in subjects):
        served = store
        if store == ROOT / "models":
            served = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name in SHIPPED:
                (served / name).symlink_to(store / name)
        yield store, stack.enter_context(running_server(served, flags)).address


def _measure_served(subject: Subject, address: str, echo: str, settings: Settings, figures: Figures) -> None:
    """Measures a model served, and the transport with its requests."""
    requests = subject.requests()
    for callers in settings.callers:
        served = asyncio.run(_ask(subject, address, requests, callers, settings.seconds))
        served["inputs_per_s"] = served.pop("requests_per_s")
        figures.add(subject.name, OURS, callers, served)
        echoed = measure_echo(echo, requests, num_callers=callers, seconds=settings.seconds / 2)
        figures.add(subject.name, ECHO, callers, {"inputs_per_s": echoed["requests_per_s"]})


def _measure_bare(subject: Subject, bare: BareProcess, settings: Settings, figures: Figures) -> None:
    """Measures a model's graph bare, in every fixed batch."""
    model = BareClassifier(
        folder=subject.bundle,
        precision=settings.precision,
        threads=settings.threads,
        inputs=subject.inputs,
    )
    for order in ORDERS if subject.reads_texts else ORDERS[:1]:
        for batch_size in BATCH_SIZES:
            measured = bare.measure(model, batch_size, order, settings.seconds / 2)
            figures.add(subject.name, f"bare, {order}, batches", batch_size, measured)


async def _ask(subject: Subject, address: str, requests: list[bytes], callers: int, seconds: float) -> dict[str, Any]:
    """Calls the server with requests that are serialized already, as a fast client would."""
    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.unary_unary(subject.method)

        async def ask(number: int) -> None:
            await method(requests[number % len(requests)])

        subject.check(await method(requests[0]))
        return await measure_callers(ask, num_callers=callers, seconds=seconds, min_answers=2 * callers)


def _measure_peers(subject: Subject, peers: PeerMeasurer, settings: Settings, figures: Figures) -> None:
    for peer in peers.names():
        if (subject.name, peer) in figures.failures:
            continue
        try:
            for row, callers, measured in peers.measure(peer, subject, settings.callers, settings.seconds):
                figures.add(subject.name, row, callers, measured)
        except PeerError as error:
            figures.failures[subject.name, peer] = str(error)
            for key in [key for key in figures.rounds if key[0] == subject.name and key[1].startswith(peer)]:
                del figures.rounds[key]
            _say(f"{subject.name}, {peer}: {error}")


def _choose_batches(figures: Figures, settings: Settings) -> None:
    """Puts in the place of all fixed batches the best for each number of callers: of at most so many inputs."""
    prefixes = dict.fromkeys((model, row) for model, row, _ in figures.rounds if row.endswith(", batches"))
    for model, row in prefixes:
        by_size = {size: figures.rounds.pop((model, row, size)) for size in BATCH_SIZES}
        for callers in settings.callers:
            fitting = [size for size in BATCH_SIZES if size <= callers]
            best = max(fitting, key=lambda size: medians(by_size[size])["inputs_per_s"])
            figures.rounds[model, row.removesuffix(", batches"), callers] = [
                one | {"setting": f"batches of {best}"} for one in by_size[best]
            ]


def _padded(figures: Figures, texts: list[str]) -> set[tuple[str, str, int]]:
    """The loads of text models of which a peer's setup makes batches; sorted ones hardly pad."""
    settings = {key: str(rounds[0].get("setting", "")) for key, rounds in figures.rounds.items()}
    return {
        (model, row, callers)
        for (model, row, callers), setting in settings.items()
        if model in texts and callers > 1 and _BATCHES.search(setting) and "sorted" not in setting
    }


def _summary(figures: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = [{name: value for name, value in one.items() if isinstance(value, int | float)} for one in figures]
    shared = [{name: one[name] for name in numbers[0] if all(name in other for other in numbers)} for one in numbers]
    summary = medians(shared) | {"rounds_inputs_per_s": [round(one["inputs_per_s"], 2) for one in figures]}
    return summary | ({"setting": figures[0]["setting"]} if "setting" in figures[0] else {})


def _say(line: str) -> None:
    print(line, flush=True)


def _fail(message: str) -> NoReturn:
    print(f"benchmark: {message}", file=sys.stderr)
    raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    app()
