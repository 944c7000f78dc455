"""Calls a second of a server with one process and with several: `python -m benchmarks.workers`.

Each caller has a connection of its own, as callers of different machines have, and calls one call after another; the
kernel shares connections out among the workers. The servers run side by side and are called in turn, so that what else
the machine does meets all of them. With `--server-cores` the servers have the first cores and the callers the others;
else they share all cores, and the callers take their part.

The last line is one JSON object. On 16 cores, in ten minutes:

    python -m benchmarks.workers --workers 1,2,4,6,12 --server-cores 12 --callers 32,128 --seconds 5 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from PIL import Image

from benchmarks.contestants.headway import Server, running_server
from headway.v1 import image_classification_service_pb2 as images_pb
from headway.v1 import image_classification_service_pb2_grpc as images_grpc
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc
from headway.v1 import translation_service_pb2 as translations_pb
from headway.v1 import translation_service_pb2_grpc as translations_grpc

_TREE = Path(__file__).parents[1]
_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
_WARM_S = 0.5
_TEXT = "Shares of oil companies rose on Monday after the largest exporters agreed to produce less than last year."
_SENTENCE = "A man in an orange hat is looking at something on the other side of the street."


def _picture() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def _caller_of(model: str, channel: grpc.aio.Channel) -> Callable[[], Any]:
    """Returns what makes one call."""
    if model == "cifar10":
        image = images_pb.ClassifyImageRequest(model=model, images=[_picture()])
        images = images_grpc.ImageClassificationServiceStub(channel)
        return lambda: images.ClassifyImage(image)
    if model == "multi30k-en-de":
        sentence = translations_pb.TranslateTextRequest(model=model, texts=[_SENTENCE])
        translations = translations_grpc.TranslationServiceStub(channel)
        return lambda: translations.TranslateText(sentence)
    text = texts_pb.ClassifyTextRequest(model=model, texts=[_TEXT])
    texts = texts_grpc.TextClassificationServiceStub(channel)
    return lambda: texts.ClassifyText(text)


async def _call(address: str, model: str, num_callers: int, seconds: float) -> list[float]:
    """Returns the seconds of each call that ended after the callers were warm."""
    took: list[float] = []
    begin = time.monotonic() + _WARM_S
    end = begin + seconds

    async def caller() -> None:
        async with grpc.aio.insecure_channel(address, options=_OWN_CONNECTION) as channel:
            call = _caller_of(model, channel)
            while (began := time.monotonic()) < end:
                await call()
                if began >= begin and (now := time.monotonic()) <= end:
                    took.append(now - began)

    await asyncio.gather(*(caller() for _ in range(num_callers)))
    return took


def _callers(address: str, model: str, num_callers: int, seconds: float, cores: Sequence[int]) -> list[float]:
    os.sched_setaffinity(0, cores)
    return asyncio.run(_call(address, model, num_callers, seconds))


def _children(process_id: int) -> list[int]:
    tasks = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text(encoding="ascii").split()]


def _memory_mib(process_id: int) -> dict[str, float]:
    """Returns what the processes of a server hold, pages that several map counted in parts (PSS)."""
    total = {"pss_mib": 0.0, "private_mib": 0.0}
    for each in (process_id, *_children(process_id)):
        lines = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="ascii").splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines[1:]}
        total["pss_mib"] += sizes["Pss"]
        total["private_mib"] += sizes["Private_Clean"] + sizes["Private_Dirty"]
    return {name: round(value, 1) for name, value in total.items()}


def _measure(arguments: argparse.Namespace, servers: dict[int, Server], cores: Sequence[int]) -> dict[str, Any]:
    rates: dict[str, list[float]] = {}
    p99s: dict[str, list[float]] = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes) as pool:
        for model in arguments.models:
            for num_callers in arguments.callers:
                share = num_callers // arguments.processes
                for _ in range(arguments.rounds):
                    for workers, server in servers.items():
                        job = (server.address, model, share, arguments.seconds, cores)
                        took = sorted(
                            itertools.chain.from_iterable(pool.starmap(_callers, [job] * arguments.processes))
                        )
                        name = f"{model}, {num_callers} callers, {workers} workers"
                        rates.setdefault(name, []).append(len(took) / arguments.seconds)
                        p99s.setdefault(name, []).append(took[int(0.99 * len(took))] * 1e3)
    rows = {}
    for name, found in rates.items():
        first = rates[f"{name.rpartition(', ')[0]}, {next(iter(servers))} workers"]
        ratios = [rate / base for rate, base in zip(found, first, strict=True)]
        rows[name] = {
            "calls_per_s": round(statistics.median(found), 1),
            "p99_ms": round(statistics.median(p99s[name]), 1),
            "ratio": round(statistics.median(ratios), 2),
            "ratios": [round(min(ratios), 2), round(max(ratios), 2)],
        }
        print(f"{name:<45} {rows[name]}", flush=True)  # noqa: T201 (its output)
    return rows


def main() -> None:
    """Runs the benchmark."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", type=numbers, default=[1, 2], help="workers of each server; ratios are to the first"
    )
    parser.add_argument("--callers", type=numbers, default=[8, 32], help="callers, each with a connection")
    parser.add_argument("--models", type=lambda text: text.split(","), default=["ag-news", "cifar10", "multi30k-en-de"])
    parser.add_argument("--server-cores", type=int, help="cores of the servers; the callers have the others")
    parser.add_argument("--processes", type=int, default=2, help="processes of callers")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    split = arguments.server_cores or 0
    os.sched_setaffinity(0, cores[:split] or cores)  # which the servers inherit
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for model in arguments.models:
            shutil.copytree(_TREE / "models" / model, store / model)
        servers = {
            workers: stack.enter_context(running_server(_TREE, store, ["--workers", str(workers)]))
            for workers in arguments.workers
        }
        rows = _measure(arguments, servers, cores[split:] or cores)
        memory = {str(workers): _memory_mib(server.process.process_id) for workers, server in servers.items()}
    result = {
        "cores": len(cores),
        "server_cores": split or "shared with the callers",
        "python": sys.version.split()[0],
        "grpcio": grpc.__version__,
        "memory": memory,
        "start_s": {str(workers): round(server.start_s, 1) for workers, server in servers.items()},
        "rows": rows,
    }
    print(json.dumps(result))  # noqa: T201 (its output)


if __name__ == "__main__":
    main()
