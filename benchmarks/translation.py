"""Measures translation at the size of the Transformer base: served, bare, and by other libraries.

    python benchmarks/translation.py [--rounds 5] [--seconds 4] [--peers all]
    python benchmarks/translation.py --quick        # a tiny model and no peers, seconds: does it run?

Everything runs in processes of its own and is measured in turn, round after round; figures are medians over the rounds,
ratios medians of the rounds' ratios. README.md beside this file says what is measured.
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
from footprint import Footprint
from machine import ROOT, command_line, describe_hardware, describe_versions, git_commit
from peers.environment import TRANSLATORS, PeerError, PeerProcess, ensure_environment
from picture import draw
from random_model import RandomModel
from random_transformer import GEOMETRIES, prepare
from rows import Row
from served import RunningServer, ServerFailedError, running_server
from translation_contestants import Bare, PeerTranslator, Served, TranslationLoad
from translation_limits import BareTranslator
from translation_table import format_report
from translation_targets import OURS, judge

from headway_export.errors import ExportError
from headway_server.errors import HeadwayError
from headway_server.runtime import usable_cores

SCHEMA_VERSION = 1
CALLERS = (1, 8, 32)
BEAM_SIZES = (1, 4)
PRECISIONS = ("int8", "fp32")
NUM_SLOTS = max(CALLERS) * max(BEAM_SIZES)
SCRATCH = ROOT / "runs" / "benchmarks"
RESULTS = ROOT / "benchmarks" / "results" / "translation.json"
PICTURE = ROOT / "docs" / "translation-benchmark.svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to measure."""

    geometry: str
    rounds: int
    seconds: float
    threads: int
    peers: tuple[str, ...]

    @property
    def loads(self) -> list[TranslationLoad]:
        """What is asked in every round."""
        return [
            TranslationLoad(beam_size=beam_size, num_callers=callers, seconds=self.seconds)
            for beam_size in BEAM_SIZES
            for callers in CALLERS
        ]


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Times everything is measured.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Shortest measurement.")] = 4.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of every side. [default: usable cores]")] = None,
    peers: Annotated[str, typer.Option(help="all, none, or names with commas between.")] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and short measurements.")] = False,
    output: Annotated[Path, typer.Option(help="File for the JSON object.")] = RESULTS,
    picture: Annotated[Path, typer.Option(help="File for the picture.")] = PICTURE,
) -> None:
    """Measures translation at the size of the Transformer base."""
    settings = Settings(
        geometry="tiny-transformer" if quick else "transformer-base",
        rounds=2 if quick else rounds,
        seconds=0.3 if quick else seconds,
        threads=threads or usable_cores(),
        peers=_chosen(peers, quick=quick),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is stopped, as by Ctrl-C
    try:
        report = _measure(settings)
    except (ServerFailedError, PeerError, ExportError, HeadwayError) as error:
        _fail(str(error))
    for line in format_report(report):
        _say(line)
    title = f"Target tokens a second, {settings.geometry}"
    drawn = draw(report, title=title, panel_title=_panel_title)
    for file, text in ((output, json.dumps(report, indent=2) + "\n"), (picture, drawn)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        _say(f"written to {file}")
    _say(json.dumps(report))


def _panel_title(case: str, callers: int) -> str:
    return f"{case}, {callers} call{'s' if callers > 1 else ''} at a time"


def _chosen(peers: str, *, quick: bool) -> tuple[str, ...]:
    """Returns the names of the peers that were asked for; in a quick run none but those named."""
    known = [peer.name for peer in TRANSLATORS]
    if peers == "all":
        return () if quick else tuple(known)
    asked = [] if peers == "none" else [name.strip() for name in peers.split(",")]
    if unknown := sorted(set(asked) - set(known)):
        _fail(f"--peers {', '.join(unknown)}: not known; known are {', '.join(known)}")
    return tuple(asked)


def _measure(settings: Settings) -> dict[str, Any]:
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
    _say("the model: looked for, and exported where this code has not done so yet (about two minutes)")
    model = prepare(GEOMETRIES[settings.geometry], SCRATCH)
    footprints = {name: Footprint.of(model.bundle, name, num_slots=NUM_SLOTS) for name in PRECISIONS}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(running_server(model.store, _server_flags(settings, name))) for name in PRECISIONS
        }
        rows, failed = _open_rows(settings, model, servers, stack)
        for number in range(settings.rounds):
            begun_s = time.perf_counter()
            first = number % len(rows)  # nobody is always behind the same neighbour's heat
            for load in settings.loads:
                for row in (*rows[first:], *rows[:first]):
                    row.measure(load)
            _say(f"round {number + 1} of {settings.rounds} done in {time.perf_counter() - begun_s:.0f} s")
        memory = {name: footprints[name].resident(server.process_id) for name, server in servers.items()}
    ours = next(row for row in rows if row.contestant.name == OURS)
    rounds = {(row.contestant.name, *key): row.tokens_per_s(key) for row in rows for key in row.measured}
    return about | {
        "model": asdict(model.geometry) | {"variants": [asdict(footprint) for footprint in footprints.values()]},
        "rows": [*(row.record(ours) for row in rows), *failed],
        "memory": memory,
        "targets": [verdict.as_record() for verdict in judge(rounds)],
    }


def _server_flags(settings: Settings, precision: str) -> list[str]:
    return ["--precision", precision, "--num-slots", str(NUM_SLOTS), "--threads", str(settings.threads)]


def _open_rows(
    settings: Settings, model: RandomModel, servers: dict[str, RunningServer], stack: ExitStack
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Opens all contestants; returns their rows, and records of those that do not run."""
    bare = stack.enter_context(BareTranslator(settings.threads))
    rows = [Row(contestant=Served(model, server.address, name)) for name, server in servers.items()]
    rows += [Row(contestant=Bare(model, bare, name, num_slots=NUM_SLOTS)) for name in PRECISIONS]
    failed: list[dict[str, Any]] = []
    for peer in (peer for peer in TRANSLATORS if peer.name in settings.peers):
        try:
            process = PeerProcess(
                peer,
                python=ensure_environment(SCRATCH, peer.requirements),
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
        rows.append(Row(contestant=PeerTranslator(model, process), versions=process.versions))
    return rows, failed


def _say(line: str) -> None:
    print(line, flush=True)


def _fail(message: str) -> NoReturn:
    print(f"benchmark: {message}", file=sys.stderr)
    raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    app()
