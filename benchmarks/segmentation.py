"""How fast prompts about images are answered: python -m benchmarks.segmentation [--store STORE] [--rounds 3].

The store holds one segmentation model. Without it one of the recipe's shape is exported with random weights, which
compute as fast as trained ones, but whose masks are noise.

Callers: each asks about an image of its own, one prompt a call, by the id of the prepared image. One server gathers
the prompts of all callers and images into runs of the decoder; the other runs one prompt at a time. Clicks: one caller
clicks on one image again and again, with its embedding kept and without, and over a stream. All sides take turns.
"""

import asyncio
import io
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image

from benchmarks.contestants.headway import running_server
from benchmarks.machine import describe_run
from benchmarks.worker import ROOT
from headway_client import AsyncClient, SegmentPrompt

CALLERS = (1, 8, 32)
_SIZE = (640, 480)
_SIDES = {"shared runs": [], "one prompt a run": ["--max-batch-prompts", "1"]}
_CLICKS = 40
_WARM_UP_CALLS = 3

Click = Callable[[AsyncClient, bytes, str, SegmentPrompt], Awaitable[object]]


def main(
    store: Annotated[Path | None, typer.Option(help="Store of one segmentation model.")] = None,
    seconds: Annotated[float, typer.Option(min=0.2, help="Of each side in a round.")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Measures and prints a table, and one JSON object as the last line."""
    with ExitStack() as stack:
        if store is None:
            store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            _export_random(store)
        servers = {
            name: stack.enter_context(running_server(ROOT, store, flags)).address for name, flags in _SIDES.items()
        }
        forgetful = stack.enter_context(running_server(ROOT, store, ["--max-image-embeddings-mib", "0"])).address
        rows = asyncio.run(_measure_callers(servers, seconds, rounds))
        clicks = asyncio.run(_measure_clicks(servers["shared runs"], forgetful, rounds))
    for row in [*rows, *clicks]:
        typer.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    typer.echo(json.dumps(describe_run() | {"rounds": rounds, "seconds": seconds, "callers": rows, "clicks": clicks}))


async def _measure_callers(servers: dict[str, str], seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Prompts a second, and the time of a call, of each number of callers on as many images."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    images = [_picture(seed) for seed in range(max(CALLERS))]
    for number in range(rounds):
        for callers in CALLERS:
            for name in sorted(servers, reverse=bool(number % 2)):
                async with AsyncClient(servers[name]) as client:
                    prepared = await client.prepare_image(images[:callers])
                    ids = [one.image_id for one in prepared]
                    await _call(client, ids, 0.3)  # embeds the images
                    found.setdefault((name, callers), []).append(await _call(client, ids, seconds))
    return [
        {
            "side": name,
            "callers": callers,
            "prompts_per_s": round(statistics.median(rate for rate, _ in runs), 1),
            "p50_ms": round(statistics.median(p50 for _, p50 in runs), 2),
        }
        for (name, callers), runs in found.items()
    ]


async def _call(client: AsyncClient, ids: list[str], seconds: float) -> tuple[float, float]:
    """Calls for each image by a caller of its own; returns answers a second and the median call in milliseconds."""
    latencies: list[float] = []
    began = time.perf_counter()

    async def keep_calling(image_id: str, seed: int) -> None:
        random = np.random.default_rng(seed)
        while time.perf_counter() - began < seconds:
            prompt = SegmentPrompt(points=[_place(random)])
            sent = time.perf_counter()
            await client.segment_image(image_id=image_id, prompts=prompt, max_mask_count=1)
            latencies.append(1e3 * (time.perf_counter() - sent))

    await asyncio.gather(*(keep_calling(image_id, seed) for seed, image_id in enumerate(ids)))
    return len(latencies) / (time.perf_counter() - began), statistics.median(latencies)


async def _measure_clicks(keeping: str, forgetful: str, rounds: int) -> list[dict[str, Any]]:
    """The time of a click on an image that has been clicked on before."""
    data, random = _picture(0), np.random.default_rng(0)

    async def by_bytes(client: AsyncClient, image: bytes, _: str, prompt: SegmentPrompt) -> None:
        await client.segment_image(image, prompts=prompt, max_mask_count=1)

    async def by_id(client: AsyncClient, _: bytes, image_id: str, prompt: SegmentPrompt) -> None:
        await client.segment_image(image_id=image_id, prompts=prompt, max_mask_count=1)

    sides: dict[str, tuple[str, Click]] = {
        "by id, embedding kept": (keeping, by_id),
        "by bytes, embedding kept": (keeping, by_bytes),
        "by bytes, embedded anew": (forgetful, by_bytes),
    }
    found: dict[str, list[float]] = {name: [] for name in (*sides, "over a stream")}
    for _ in range(rounds):
        for name, (address, click) in sides.items():
            async with AsyncClient(address) as client:
                image_id = (await client.prepare_image([data]))[0].image_id
                for number in range(_CLICKS + _WARM_UP_CALLS):
                    sent = time.perf_counter()
                    await click(client, data, image_id, SegmentPrompt(points=[_place(random)]))
                    if number >= _WARM_UP_CALLS:
                        found[name].append(1e3 * (time.perf_counter() - sent))
        async with AsyncClient(keeping) as client, client.segment_interactively(data, max_mask_count=1) as session:
            for number in range(_CLICKS + _WARM_UP_CALLS):
                sent = time.perf_counter()
                await session.add(points=[_place(random)], restart=number % 8 == 0)
                if number >= _WARM_UP_CALLS:
                    found["over a stream"].append(1e3 * (time.perf_counter() - sent))
    return [
        {
            "click": name,
            "p50_ms": round(statistics.median(latencies), 2),
            "p90_ms": round(sorted(latencies)[len(latencies) * 9 // 10], 2),
            "clicks": len(latencies),
        }
        for name, latencies in found.items()
    ]


def _place(random: np.random.Generator) -> tuple[float, float]:
    x, y = random.random(2) * _SIZE
    return float(x), float(y)


def _picture(seed: int) -> bytes:
    """Returns a JPEG of smooth colours."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3)).astype(np.uint8))
    file = io.BytesIO()
    coarse.resize(_SIZE, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def _export_random(store: Path) -> None:
    """Exports a model of the recipe's shape with random weights, in int8."""
    import torch  # noqa: PLC0415 (of the exporter alone)

    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415
    from headway_export.source import ExportSource  # noqa: PLC0415
    from headway_server.bundles import Architecture, ImagePreprocessing, Limits, Precision, Task  # noqa: PLC0415
    from headway_training.models import Segmenter  # noqa: PLC0415
    from headway_training.models.architectures import NAMED_CONFIGURATIONS  # noqa: PLC0415
    from headway_training.models.segmentation import SegmentationConfig  # noqa: PLC0415

    shape = NAMED_CONFIGURATIONS["segments-segmenter"].configuration
    assert isinstance(shape, SegmentationConfig)
    torch.manual_seed(0)
    source = ExportSource(
        name="random",
        task=Task.SEGMENTATION,
        module=Segmenter(shape).eval(),
        description="Random weights.",
        license="none",
        architecture=Architecture(kind="segmenter", parameter_count=0, configuration={}),
        limits=Limits(),
        image_preprocessing=ImagePreprocessing(
            height=shape.image_size,
            width=shape.image_size,
            resize="stretch",
            interpolation="bilinear",
            mean=(0.5,) * 3,
            std=(0.3,) * 3,
        ),
    )
    export(source, ExportOptions(store=store, precisions=(Precision.INT8,)))


if __name__ == "__main__":
    typer.run(main)
