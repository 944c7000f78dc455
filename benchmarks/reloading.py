"""What callers notice of new versions: python -m benchmarks.reloading [--rounds 4] [--seconds 8] [--interval 2].

A server of `ag-news` and `shakespeare` that serves the newest version of each is called at a constant rate, with and
without new versions appearing in its store, in turn, round after round. Then two versions are held at once, and one of
them is unloaded: what that gives back of the memory.
"""

import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.contestants.headway import Server, running_server
from benchmarks.machine import describe_run
from benchmarks.worker import ROOT
from headway_client import AsyncClient, HeadwayError

MODELS = ("ag-news", "shakespeare")
RATES_PER_S = {"ag-news": 50.0, "shakespeare": 4.0}
_TEXT = "Stocks fell on Monday as oil prices rose and investors waited for the central bank to speak."
_NEW_TOKENS = 32


class _Store:
    """A store that gets one version of the shipped models after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 0

    def add_version(self, models: tuple[str, ...] = MODELS) -> None:
        """Adds a version of each model, as a copy of the shipped one that is renamed into place."""
        self.version += 1
        for model in models:
            staged = self.folder / f".staged-{model}"
            shutil.copytree(ROOT / "models" / model / "1", staged)
            manifest = json.loads((staged / "bundle.json").read_text(encoding="utf-8"))
            manifest["version"] = str(self.version)
            (staged / "bundle.json").write_text(json.dumps(manifest), encoding="utf-8")
            (self.folder / model).mkdir(exist_ok=True)
            staged.rename(self.folder / model / str(self.version))
            for old in (self.folder / model).iterdir():
                if int(old.name) < self.version - 1:  # the last one may still be the one that serves
                    shutil.rmtree(old)


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 4,
    seconds: Annotated[float, typer.Option(min=1)] = 8.0,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds from one new version to the next.")] = 2.0,
) -> None:
    """Measures and prints a table, and one JSON object as the last line."""
    flags = ["--max-versions", "1", "--poll-interval", "0.25", "--num-slots", "32"]
    with tempfile.TemporaryDirectory() as folder:
        store = _Store(Path(folder))
        store.add_version()
        with running_server(ROOT, store.folder, flags) as server:
            calls = asyncio.run(_measure_calls(server, store, rounds, seconds, interval))
    with tempfile.TemporaryDirectory() as folder:
        store = _Store(Path(folder))
        store.add_version()
        with running_server(ROOT, store.folder, ["--poll-interval", "0", "--num-slots", "32"]) as server:
            memory = asyncio.run(_measure_memory(server, store))
    for row in calls["rows"]:
        typer.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    typer.echo(f"resident MiB after each version that replaced another: {calls['resident_mib']}")
    typer.echo(f"resident MiB: {memory}")
    typer.echo(json.dumps(describe_run() | {"rounds": rounds, "seconds": seconds} | calls | {"memory": memory}))


async def _measure_calls(server: Server, store: _Store, rounds: int, seconds: float, interval: float) -> dict[str, Any]:
    found: dict[tuple[str, bool], list[list[float]]] = {(model, kind): [] for model in MODELS for kind in (False, True)}
    failures: list[str] = []
    resident = [round(server.memory_mib()["resident_mib"])]
    async with AsyncClient(server.address) as client:

        async def classify() -> None:
            await client.classify_text([_TEXT], model="ag-news")

        async def generate() -> None:
            await client.generate_text("ROMEO:", model="shakespeare", max_new_tokens=_NEW_TOKENS)

        for number in range(2 * rounds + 2):  # the first two warm up
            is_reloading = number % 2 == 1
            calls = [_call_steadily("ag-news", classify, seconds, failures)]
            calls.append(_call_steadily("shakespeare", generate, seconds, failures))
            reloading = asyncio.create_task(_keep_adding(store, interval)) if is_reloading else None
            for model, latencies in zip(MODELS, await asyncio.gather(*calls), strict=True):
                if number > 1:
                    found[model, is_reloading].append(latencies)
            if reloading is not None:
                reloading.cancel()
                with suppress(asyncio.CancelledError):
                    await reloading
                await asyncio.sleep(2)
                resident.append(round(server.memory_mib()["resident_mib"]))
        serving = {model.name: model.version for model in await client.list_models()}
    assert set(serving.values()) == {str(store.version)}, serving
    rows = [_row(model, is_reloading, phases) for (model, is_reloading), phases in found.items()]
    return {"rows": rows, "failures": failures, "versions": store.version, "resident_mib": resident}


async def _call_steadily(
    model: str, call: Callable[[], Awaitable[None]], seconds: float, failures: list[str]
) -> list[float]:
    """Calls at a constant rate; returns each call's time since it was due, in milliseconds."""
    latencies: list[float] = []

    async def call_at(due: float) -> None:
        try:
            await call()
        except HeadwayError as error:
            failures.append(str(error))
        latencies.append((time.perf_counter() - due) * 1e3)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(int(seconds * RATES_PER_S[model])):
            due = began + index / RATES_PER_S[model]
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(call_at(due))
    return latencies


async def _keep_adding(store: _Store, interval: float) -> None:
    while True:
        await asyncio.to_thread(store.add_version)
        await asyncio.sleep(interval)


def _row(model: str, is_reloading: bool, phases: list[list[float]]) -> dict[str, Any]:
    """Medians over the rounds, and the slowest call of all."""
    ordered = [sorted(phase) for phase in phases]
    pooled = sorted(chain.from_iterable(phases))
    return {
        "model": model,
        "new_versions": is_reloading,
        "calls": sum(map(len, ordered)),
        "p50_ms": round(statistics.median(phase[len(phase) // 2] for phase in ordered), 2),
        "p99_ms": round(statistics.median(phase[int(len(phase) * 0.99)] for phase in ordered), 2),
        "pooled_p99_ms": round(pooled[int(len(pooled) * 0.99)], 2),
        "max_ms": round(pooled[-1], 2),
    }


async def _measure_memory(server: Server, store: _Store) -> dict[str, float]:
    """Returns resident MiB with one version of a generation model, with two, and with one again."""

    def resident() -> float:
        return round(server.memory_mib()["resident_mib"], 1)

    async with AsyncClient(server.address) as client:

        async def use(version: str) -> None:
            await client.generate_text(["ROMEO:"] * 8, model="shakespeare", model_version=version, max_new_tokens=32)

        await use("1")
        memory = {"one version": resident()}
        store.add_version(("shakespeare",))
        await client.load_model("shakespeare")
        await use("2")
        memory["two versions"] = resident()
        await client.unload_model("shakespeare", model_version="1")
        memory["the old one unloaded"] = resident()
        await client.unload_model("shakespeare")
        memory["none"] = resident()
    return memory


if __name__ == "__main__":
    typer.run(main)
