"""How fast prompts about images are answered: python -m benchmarks.segmentation [--store STORE] [--rounds 3].

The store holds one segmentation model. Without it one of the recipe's shape is exported with random weights, which
compute as fast as trained ones, but whose masks are noise.

Callers: each asks about an image of its own, one prompt a call, by the id of the prepared image. One server gathers
the prompts of all callers and images into runs of the decoder; the other runs one prompt at a time. Clicks: one caller
clicks on one image again and again, with its embedding kept and without, and over a stream. SAM ViT-B: prompts about as
many embedded images, answered without a server by what its users run in ONNX Runtime and by the kit's segmenter of the
same sizes (sam.py says where they differ), and what their encoders take for an image. All sides take turns.
"""

import asyncio
import io
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np
import typer
from PIL import Image

from benchmarks import sam
from benchmarks.contestants.headway import running_server
from benchmarks.machine import describe_run
from benchmarks.worker import ROOT, Worker, tree_environment
from headway_client import AsyncClient, SegmentPrompt
from headway_server.batching.settings import BatchingSettings
from headway_server.runtime import usable_cores

CALLERS = (1, 8, 32)
_SIDES = {"shared runs": [], "one prompt a run": ["--max-batch-prompts", "1"]}
_CLICKS = 40
_WARM_UP_CALLS = 3
_ENCODER_RUNS = 2
"""Of each encoder of SAM's size, which takes seconds; the quicker one counts."""

Click = Callable[[AsyncClient, bytes, str, SegmentPrompt], Awaitable[object]]


class CallerRow(TypedDict):
    """Callers of one server, each with an image of its own."""

    side: str
    callers: int
    prompts_per_s: float
    p50_ms: float


class ClickRow(TypedDict):
    """One caller's clicks on one image."""

    click: str
    p50_ms: float
    p90_ms: float
    clicks: int


class EncoderRow(TypedDict):
    """What an encoder of SAM's size takes for an image."""

    encoder: str
    seconds: float


class DecoderRow(TypedDict):
    """Prompts about embedded images, to their masks in the pixels of the images."""

    side: str
    images: int
    prompts_per_s: float
    ms: float


def main(
    store: Annotated[Path | None, typer.Option(help="Store of one segmentation model.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each side in a round.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, and few and short measurements.")] = False,
) -> None:
    """Measures and prints a table, and one JSON object as the last line."""
    seconds, rounds = (0.1, 1) if quick else (seconds, rounds)
    callers, clicks = (CALLERS[:2], 4) if quick else (CALLERS, _CLICKS)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with Worker("sam", environment=tree_environment(ROOT)) as maker:
            maker.ask(make=str(scratch / "sam"), tiny=quick)
        if store is None:
            store = scratch / "store"
            store.mkdir()
            _export_random(store, tiny=quick)
        servers = {
            name: stack.enter_context(running_server(ROOT, store, flags)).address for name, flags in _SIDES.items()
        }
        forgetful = stack.enter_context(running_server(ROOT, store, ["--max-image-embeddings-mib", "0"])).address
        caller_rows = asyncio.run(_measure_callers(servers, callers, seconds, rounds))
        click_rows = asyncio.run(_measure_clicks(servers["shared runs"], forgetful, clicks, rounds))
        contestants = stack.enter_context(Worker("sam", environment=tree_environment(ROOT)))
        contestants.ask(folder=str(scratch / "sam"), threads=usable_cores())
        encoder_rows = _measure_encoders(contestants)
        decoder_rows = _measure_decoders(contestants, callers, seconds, rounds)
    for row in (*caller_rows, *click_rows, *encoder_rows, *decoder_rows):
        typer.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    report = describe_run() | {"quick": quick, "rounds": rounds, "seconds": seconds}
    measured = {
        "callers": caller_rows,
        "clicks": click_rows,
        "sam_encoders": encoder_rows,
        "sam_decoders": decoder_rows,
    }
    typer.echo(json.dumps(report | measured))


def _measure_encoders(contestants: Worker) -> list[EncoderRow]:
    """The seconds of an image in each encoder, in turn."""
    names = (sam.THEIRS, sam.OURS, sam.OURS_INT8)
    taken = [{name: float(contestants.ask(encoder=name)["seconds"]) for name in names} for _ in range(_ENCODER_RUNS)]
    return [{"encoder": name, "seconds": round(min(one[name] for one in taken), 3)} for name in names]


def _measure_decoders(contestants: Worker, counts: Sequence[int], seconds: float, rounds: int) -> list[DecoderRow]:
    """Prompts a second of each side, one about each of so many images."""
    num_runs = BatchingSettings().batch_prompts("cpu")
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(rounds):
        for count in counts:
            for side in sorted(sam.SIDES, reverse=bool(number % 2)):
                asked = {"side": side, "num_images": count, "num_runs": num_runs, "seconds": seconds}
                found.setdefault((side, count), []).append(contestants.ask(**asked))
    return [
        {
            "side": side,
            "images": count,
            "prompts_per_s": round(statistics.median(one["prompts_per_s"] for one in runs), 1),
            "ms": round(statistics.median(one["ms"] for one in runs), 1),
        }
        for (side, count), runs in found.items()
    ]


async def _measure_callers(
    servers: dict[str, str], counts: Sequence[int], seconds: float, rounds: int
) -> list[CallerRow]:
    """Prompts a second, and the time of a call, of each number of callers on as many images."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    images = [_picture(seed) for seed in range(max(counts))]
    for number in range(rounds):
        for callers in counts:
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


async def _measure_clicks(keeping: str, forgetful: str, clicks: int, rounds: int) -> list[ClickRow]:
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
                for number in range(clicks + _WARM_UP_CALLS):
                    sent = time.perf_counter()
                    await click(client, data, image_id, SegmentPrompt(points=[_place(random)]))
                    if number >= _WARM_UP_CALLS:
                        found[name].append(1e3 * (time.perf_counter() - sent))
        async with AsyncClient(keeping) as client, client.segment_interactively(data, max_mask_count=1) as session:
            for number in range(clicks + _WARM_UP_CALLS):
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
    x, y = random.random(2) * sam.IMAGE_SIZE
    return float(x), float(y)


def _picture(seed: int) -> bytes:
    """Returns a JPEG of smooth colours."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3)).astype(np.uint8))
    file = io.BytesIO()
    coarse.resize(sam.IMAGE_SIZE, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def _export_random(store: Path, *, tiny: bool) -> None:
    """Exports a model of the recipe's shape, or of a tiny one, with random weights, in int8."""
    import torch  # noqa: PLC0415 (of the exporter alone)

    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415
    from headway_export.source import ExportSource  # noqa: PLC0415
    from headway_server.bundles import Architecture, ImagePreprocessing, Limits, Precision, Task  # noqa: PLC0415
    from headway_training.models import NAMED_CONFIGURATIONS, Segmenter  # noqa: PLC0415
    from headway_training.models.segmentation import SegmentationConfig  # noqa: PLC0415

    shape = NAMED_CONFIGURATIONS["segments-segmenter"].configuration
    assert isinstance(shape, SegmentationConfig)
    if tiny:
        shape = replace(shape, image_size=64, image_num_layers=1, image_d_model=48, image_d_ff=96, num_layers=1)

    def make() -> Segmenter:
        torch.manual_seed(0)
        return Segmenter(shape).eval()

    source = ExportSource(
        name="random",
        task=Task.SEGMENTATION,
        module=make(),
        make_reference=make,
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
