"""Measures a store's models on this machine: served, and bare beside it.

    python benchmarks/run.py [--store models] [--rounds 3] [--seconds 3]

The real `headway-server` runs in a process of its own; this process calls it through the client's load tester. The same
models run bare in a third process (limits.py). Rounds are interleaved, so that whatever slows the machine for a while
slows both sides; the figures are medians over the rounds. What is measured and what the last line holds is in
README.md beside this file.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from callers import measure_calls
from inputs import LOAD_TASKS, InputError, Inputs, load_inputs
from limits import BATCH_SIZES, BareModel, BareProcess
from machine import command_line, describe_hardware, describe_versions, git_commit, memory_mib
from served import RunningServer, ServerFailedError, running_server
from table import format_report, medians

from headway_client import Client, HeadwayError
from headway_client.load import LoadPlan, LoadTask
from headway_client.results import Model
from headway_server.bundles import Bundle, open_bundle
from headway_server.decoding.runner.memory_plan import DEFAULT_MAX_SLOTS
from headway_server.errors import HeadwayError as ServerError

SCHEMA_VERSION = 1
CALLERS = (1, 8, 32)
"""Callers that each wait for their answer before they ask again."""
RESULTS = Path(__file__).resolve().parent / "results" / "latest.json"
_SECONDS_OF_A_START = 5.0  # a guess, for the announced duration alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to measure."""

    store: Path
    rounds: int
    seconds: float
    warmup_s: float
    starts: int
    new_tokens: int
    num_slots: int
    device: Literal["cpu", "cuda"]
    precision: str | None
    threads: int | None

    def server_flags(self) -> list[str]:
        """Flags of `headway-server`."""
        flags = ["--device", self.device, "--num-slots", str(self.num_slots)]
        flags += ["--precision", self.precision] if self.precision else []
        return flags + (["--threads", str(self.threads)] if self.threads else [])


@dataclass(slots=True, kw_only=True)
class Subject:
    """A loaded model with its inputs and what was measured of it."""

    model: Model
    bundle: Bundle
    inputs: Inputs
    served: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: {callers: [] for callers in CALLERS})
    """Figures of each round, by callers."""
    bare: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Figures of each round: of a decoder by rows, of a classifier by batch size."""

    @property
    def load_task(self) -> LoadTask:
        """What the load tester calls."""
        return LOAD_TASKS[self.bundle.manifest.task]

    @property
    def decodes(self) -> bool:
        """Whether it produces tokens."""
        return self.load_task in (LoadTask.GENERATE_TEXT, LoadTask.TRANSLATE_TEXT)

    def num_rows(self, settings: Settings) -> list[int]:
        """Rows of the bare loop, one for each number of callers; more than there are slots do not run at once."""
        return [min(callers, settings.num_slots) for callers in CALLERS]


def main(
    *,
    store: Annotated[Path, typer.Option(help="Folder that holds the bundles.")] = Path("models"),
    rounds: Annotated[int, typer.Option(min=1, help="Times everything is measured; figures are medians.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Length of one measurement.")] = 3.0,
    warmup: Annotated[
        float | None, typer.Option(min=0, max=60, help="Calls before it. [default: a third of --seconds]")
    ] = None,
    starts: Annotated[int, typer.Option(min=1, help="Starts of the server that are timed.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate after a prompt.")] = 64,
    num_slots: Annotated[int, typer.Option(min=1, help="Sequences that a decoder runs at once.")] = DEFAULT_MAX_SLOTS,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="Variant to run. [default: by device]")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the models. [default: usable cores]")] = None,
    output: Annotated[Path, typer.Option(help="File for the JSON object.")] = RESULTS,
) -> None:
    """Measures a store's models on this machine: served, and bare beside it."""
    if device not in ("cpu", "cuda"):
        _fail(f"--device is {device!r}; must be cpu or cuda")
    settings = Settings(
        store=store,
        rounds=rounds,
        seconds=seconds,
        warmup_s=seconds / 3 if warmup is None else warmup,
        starts=starts,
        new_tokens=new_tokens,
        num_slots=num_slots,
        device="cuda" if device == "cuda" else "cpu",
        precision=precision,
        threads=threads,
    )
    try:
        report = _measure_everything(settings)
    except (ServerFailedError, HeadwayError, ServerError, InputError) as error:
        _fail(str(error))
    for line in format_report(report):
        _say(line)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _say(f"\nwritten to {output}")
    _say(json.dumps(report))


def _measure_everything(settings: Settings) -> dict[str, Any]:
    about = {
        "schema_version": SCHEMA_VERSION,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "git_commit": git_commit(),
        "hardware": describe_hardware(),
        "versions": describe_versions(),
        "settings": {name: getattr(settings, name) for name in Settings.__slots__} | {"store": str(settings.store)},
    }
    for key in ("command", "git_commit", "hardware", "versions"):
        _say(f"{key}: {about[key]}")
    start_times_s = []
    for _ in range(settings.starts - 1):
        with running_server(settings.store, settings.server_flags()) as server:
            start_times_s.append(server.start_s)
    with running_server(settings.store, settings.server_flags()) as server, BareProcess() as bare:
        start_times_s.append(server.start_s)
        _say(server.ready_line)
        ready_memory = memory_mib(server.process_id)
        subjects = _find_subjects(server, settings)
        _announce(subjects, settings)
        for number in range(settings.rounds):
            for subject in subjects:
                _measure_round(subject, server, bare, settings)
            _say(f"round {number + 1} of {settings.rounds} done")
        loaded_memory = memory_mib(server.process_id)
    return about | {
        "server": {
            "start_s": {"median": statistics.median(start_times_s), "all": start_times_s},
            "ready_memory": ready_memory,
            "loaded_memory": loaded_memory,
        },
        "models": [_model_report(subject, settings) for subject in subjects],
    }


def _find_subjects(server: RunningServer, settings: Settings) -> list[Subject]:
    """Asks the server what it has loaded.

    Raises:
        InputError: Of no model is anything measured.
    """
    with Client(server.address) as client:
        listing = client.list_models()
    for rejected in listing.rejected_bundles:
        _say(f"not served: {rejected.path}: {rejected.reason}")
    subjects = []
    for model in listing:
        bundle = open_bundle(settings.store / model.name / model.version)
        try:
            inputs = load_inputs(bundle, settings.new_tokens)
        except InputError as error:
            _say(f"left out: {model.name}/{model.version}: {error}")
            continue
        subjects.append(Subject(model=model, bundle=bundle, inputs=inputs))
    if not subjects:
        raise InputError(f"nothing to measure: no model of {settings.store} could be asked anything")
    return subjects


def _announce(subjects: list[Subject], settings: Settings) -> None:
    """Says how long it will take."""
    served_s = len(subjects) * len(CALLERS) * (settings.warmup_s + settings.seconds)
    bare_s = sum(
        len(set(subject.num_rows(settings))) * settings.seconds
        if subject.decodes
        else len(BATCH_SIZES) * _batch_seconds(settings)
        for subject in subjects
    )
    expected_s = settings.rounds * (served_s + bare_s) + _SECONDS_OF_A_START
    _say(f"{len(subjects)} models, {settings.rounds} rounds: about {expected_s / 60:.1f} minutes from here")


def _batch_seconds(settings: Settings) -> float:
    """Seconds for each batch size: together as long as the calls of one number of callers."""
    return settings.seconds / 2


def _measure_round(subject: Subject, server: RunningServer, bare: BareProcess, settings: Settings) -> None:
    """Measures a model once: every number of callers, and bare."""
    model = subject.model
    bare_model = BareModel(
        folder=subject.bundle.path,
        precision=model.variant,
        device=settings.device,
        num_threads=settings.threads,
        inputs=subject.inputs.values,
        new_tokens=settings.new_tokens,
        num_slots=settings.num_slots,
    )
    measured_rows = set()
    for callers, rows in zip(CALLERS, subject.num_rows(settings), strict=True):
        plan = LoadPlan(
            task=subject.load_task,
            concurrency=callers,
            duration_s=settings.seconds,
            warmup_s=settings.warmup_s,
            stream=subject.load_task is LoadTask.GENERATE_TEXT,
            model=model.name,
            model_version=model.version,
            max_new_tokens=settings.new_tokens if subject.load_task is LoadTask.GENERATE_TEXT else None,
        )
        subject.served[callers].append(measure_calls(server.address, plan, subject.inputs.values))
        if subject.decodes and rows not in measured_rows:
            measured_rows.add(rows)
            figures = bare.measure_decoding(bare_model, rows, settings.seconds)
            subject.bare.setdefault(rows, []).append(figures)
    if not subject.decodes:
        for figures in bare.measure_batches(bare_model, _batch_seconds(settings)):
            subject.bare.setdefault(figures["batch_size"], []).append(figures)


def _model_report(subject: Subject, settings: Settings) -> dict[str, Any]:
    model = subject.model
    rows = dict(zip(CALLERS, subject.num_rows(settings), strict=True))
    return {
        "name": model.name,
        "version": model.version,
        "variant": model.variant,
        "task": subject.bundle.manifest.task.value,
        "device": model.device,
        "parameter_count": model.parameter_count,
        "input_source": subject.inputs.source,
        "input_count": len(subject.inputs.values),
        "loads": [_load_report(subject, callers, rows[callers]) for callers in CALLERS],
    }


def _load_report(subject: Subject, callers: int, rows: int) -> dict[str, Any]:
    """The figures of one number of callers, beside the limit that goes with it."""
    served = medians(subject.served[callers])
    if subject.decodes:
        limit = medians(subject.bare[rows])
        share = _ratio(served["tokens_per_s"], limit["tokens_per_s"])
    else:
        # More inputs than callers are never there at once.
        sizes = [medians(figures) for size, figures in subject.bare.items() if size <= callers]
        limit = max(sizes, key=lambda figures: figures["inputs_per_s"])
        share = _ratio(served["requests_per_s"], limit["inputs_per_s"])
    return {"callers": callers, **served, "limit": limit, "share_of_limit": share}


def _ratio(value: float, limit: float) -> float | None:
    return round(value / limit, 3) if limit else None


def _say(line: str) -> None:
    print(line, flush=True)


def _fail(message: str) -> NoReturn:
    print(f"benchmark: {message}", file=sys.stderr)
    raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    app()
