"""How fast speech is written beside faster-whisper: python -m benchmarks.speech [--models whisper-tiny] [--tiny].

Whisper's geometry with random weights, which compute as fast as trained ones; both sides have the same ones. Each
caller has a clip of its own, a WAV file of tones and noise, and sends it again when it has its transcript. A transcript
has as many tokens on either side, taken greedily, in a language that is named and without timestamps; each call is one
window of 30 seconds, to which both sides pad. The sides take turns:

- headway, served over gRPC, in each of `--precisions`; the others are compared with the first;
- faster-whisper in int8, in a process of its own, in the setting that is its quickest for that number of callers;
- the same with the clips of all callers joined to one audio, which its batches need and no caller's call offers.
"""

import asyncio
import io
import json
import statistics
import tempfile
import time
import wave
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.contestants.headway import Server, running_server
from benchmarks.environments import python_of
from benchmarks.huggingface import ImportedModel, import_model
from benchmarks.machine import describe_run
from benchmarks.measure import paired_ratio
from benchmarks.worker import ROOT, ContestantError, Worker, foreign_environment
from headway_client import AsyncClient
from headway_server.runtime import usable_cores

_RATE = 16_000
_LEAST_CALLS = 8
"""Of all callers together."""
_PEER, _JOINED = "faster-whisper int8", "faster-whisper int8, clips joined"
Figures = dict[str, Any]
Measure = Callable[[Sequence[Path], int], Figures]
"""Takes the files of the callers and how often each is sent; returns `elapsed_s`, `waits_s` and `texts`."""


def main(  # noqa: PLR0917 (options of a command)
    models: Annotated[str, typer.Option(help="Names with commas between.")] = "whisper-tiny,whisper-base",
    precisions: Annotated[str, typer.Option(help="Of headway, with commas between.")] = "int8-static",
    callers: Annotated[str, typer.Option(help="Numbers with commas between.")] = "1,8,32",
    clip_seconds: Annotated[float, typer.Option(min=1, max=30, help="How long a clip is.")] = 10.0,
    new_tokens: Annotated[int, typer.Option(min=1, max=220, help="Tokens of a transcript.")] = 40,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    peer: Annotated[bool, typer.Option(help="Measure faster-whisper.")] = True,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of no size, to try the command.")] = False,
) -> None:
    """Measures and prints a table, and one JSON object as the last line."""
    counts = [int(count) for count in callers.split(",")]
    rows: list[Figures] = []
    versions: dict[str, str] = {}
    for name in ["whisper-toy"] if tiny else models.split(","):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            files = [folder / f"{number}.wav" for number in range(max(counts))]
            for number, file in enumerate(files):
                file.write_bytes(_sound(clip_seconds, number))
            asked = precisions.split(",")
            imported = import_model(name, ["fp32", *(one for one in asked if one != "fp32")])
            sides = dict[str, Measure]()
            servers: list[Server] = []
            for precision in asked:
                server = stack.enter_context(running_server(ROOT, imported.store, ["--precision", precision]))
                servers.append(server)
                sides[f"headway {precision}"] = partial(_call_headway, server.address, new_tokens)
            if peer:
                worker = stack.enter_context(_start_peer(imported))
                versions = worker.versions
                sides[_PEER] = partial(_call_peer, worker, new_tokens, joined=False)
                sides[_JOINED] = partial(_call_peer, worker, new_tokens, joined=True)
            found = _measure(sides, files, counts, rounds)
            memory = [server.memory_mib()["peak_resident_mib"] for server in servers]
        for row in _rows(name, found, clip_seconds):
            typer.echo("  ".join(f"{key} {value}" for key, value in row.items()))
            rows.append(row)
        typer.echo(f"headway's servers held at most {memory} MiB")
    report = describe_run() | {"rounds": rounds, "clip_seconds": clip_seconds, "new_tokens": new_tokens}
    typer.echo(json.dumps(report | {"peer_versions": versions, "rows": rows}))


def _measure(
    sides: dict[str, Measure], files: Sequence[Path], counts: Sequence[int], rounds: int
) -> dict[tuple[str, int], list[Figures]]:
    found: dict[tuple[str, int], list[Figures]] = {}
    for count in counts:
        num_calls = -(-_LEAST_CALLS // count)
        for number in range(-1, rounds):  # the first warms up, and finds the peer's setting
            for name in sorted(sides, reverse=bool(number % 2)):
                if name == _JOINED and count == 1:
                    continue
                figures = sides[name](files[:count], num_calls)
                if number >= 0:
                    found.setdefault((name, count), []).append(figures)
                elif tried := figures.get("tried_s"):
                    typer.echo(f"{name}, {count} callers, seconds of each setting: {tried}", err=True)
    return found


def _rows(model: str, found: dict[tuple[str, int], list[Figures]], clip_seconds: float) -> list[Figures]:
    """Medians of the rounds; ratios are the first side's rate over the row's, of the rounds in which both ran."""
    rates = {key: [len(run["waits_s"]) / run["elapsed_s"] for run in runs] for key, runs in found.items()}
    rows: list[Figures] = []
    for (name, callers), runs in found.items():
        ours = next(key for key in found if key[1] == callers and key[0].startswith("headway"))
        waits = [sorted(run["waits_s"]) for run in runs]
        rows.append(
            {
                "model": model,
                "side": name,
                "callers": callers,
                "windows_per_s": round(statistics.median(rates[name, callers]), 3),
                "audio_s_per_s": round(clip_seconds * statistics.median(rates[name, callers]), 1),
                "p50_ms": round(1e3 * statistics.median(map(statistics.median, waits))),
                "p95_ms": round(1e3 * statistics.median(one[max(0, -(-len(one) * 95 // 100) - 1)] for one in waits)),
                "ours_times": paired_ratio(rates[ours], rates[name, callers]),
                "same_text": round(
                    statistics.mean(
                        SequenceMatcher(None, a, b, autojunk=False).ratio()
                        for a, b in zip(found[ours][-1]["texts"], runs[-1]["texts"], strict=True)
                    ),
                    3,
                ),
            }
            | ({"setting": runs[0]["setting"]} if "setting" in runs[0] else {})
        )
    return rows


def _start_peer(imported: ImportedModel) -> Worker:
    variables = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return Worker(
        "contestants.faster_whisper",
        str(usable_cores()),
        str(imported.folder),
        environment=foreign_environment(**variables),
        python=python_of("faster_whisper"),
    )


def _call_peer(worker: Worker, new_tokens: int, files: Sequence[Path], num_calls: int, *, joined: bool) -> Figures:
    return worker.ask(files=[*map(str, files)], calls=num_calls, tokens=new_tokens, joined=joined)


def _call_headway(address: str, new_tokens: int, files: Sequence[Path], num_calls: int) -> Figures:
    return asyncio.run(_keep_calling(address, new_tokens, [file.read_bytes() for file in files], num_calls))


async def _keep_calling(address: str, new_tokens: int, clips: Sequence[bytes], num_calls: int) -> Figures:
    waits: list[float] = []
    texts = [""] * len(clips)
    async with AsyncClient(address) as client:
        await client.list_models()  # connects
        began = time.perf_counter()

        async def call(number: int) -> None:
            for _ in range(num_calls):
                sent = time.perf_counter()
                [said] = await client.transcribe_speech(
                    [clips[number]], language="en", max_new_tokens=new_tokens, timeout_s=600
                )
                waits.append(time.perf_counter() - sent)
                if said.new_token_count != new_tokens:
                    raise ContestantError(f"a transcript has {said.new_token_count} tokens")
                texts[number] = said.text

        await asyncio.gather(*map(call, range(len(clips))))
        elapsed = time.perf_counter() - began
    return {"elapsed_s": elapsed, "waits_s": waits, "texts": texts}


def _sound(seconds: float, seed: int) -> bytes:
    """Returns a WAV file of a tone that comes and goes, and noise."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * _RATE)) / _RATE
    swell = 0.5 + 0.5 * np.sin(2 * np.pi * random.uniform(0.5, 3) * times)
    tone = 0.3 * swell * np.sin(2 * np.pi * random.uniform(100, 3000) * times)
    samples = tone + 0.1 * random.normal(size=len(times))
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(_RATE)
        opened.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


if __name__ == "__main__":
    typer.run(main)
