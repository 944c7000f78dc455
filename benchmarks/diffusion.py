"""How fast images are drawn: python -m benchmarks.diffusion [--steps 20] [--callers 8] [--rounds 3] [--tiny].

The model has the shape of the recipe fashion-mnist-diffusion and random weights, which compute as fast as trained ones.
One caller draws an image with guidance; then so many callers ask for one each at the same moment. The sides take turns:

- headway, int8 and fp32: the images of all callers share the denoiser's runs;
- the same server with room for one image in a run (`--max-denoising-rows 2`), whose callers take turns;
- PyTorch, eager, with the same model in fp32: one pipeline call at a time, on all cores.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.contestants.denoising import GUIDANCE
from benchmarks.contestants.headway import running_server
from benchmarks.machine import describe_run
from benchmarks.worker import ROOT, Worker, tree_environment
from headway_client import AsyncClient

_SIDES = {
    "headway int8": ("int8", ()),
    "headway fp32": ("fp32", ()),
    "headway fp32, an image a run": ("fp32", ("--max-denoising-rows", "2")),
}
_TORCH = "PyTorch eager fp32, a call at a time"


def main(
    steps: Annotated[int, typer.Option(min=1, max=250)] = 20,
    callers: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of no size, to try the command.")] = False,
) -> None:
    """Measures and prints a table, and one JSON object as the last line."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _write_random(folder / "checkpoint", tiny=tiny)
        _export(folder / "checkpoint", folder / "store")
        servers = {
            name: stack.enter_context(
                running_server(ROOT, folder / "store", ["--precision", precision, *flags])
            ).address
            for name, (precision, flags) in _SIDES.items()
        }
        threads = str(os.cpu_count() or 1)
        torch = stack.enter_context(
            Worker("contestants.denoising", threads, str(folder / "checkpoint"), environment=tree_environment(ROOT))
        )
        waits: dict[tuple[str, int], list[list[float]]] = {}
        for number in range(rounds + 1):  # the first warms up
            for count in sorted({1, callers}):
                for name in sorted((*servers, _TORCH), reverse=bool(number % 2)):
                    if name == _TORCH:
                        found = torch.ask(callers=count, steps=steps)["waits_s"]
                    else:
                        found = asyncio.run(_draw(servers[name], count, steps))
                    if number:
                        waits.setdefault((name, count), []).append(found)
    rows = [_row(name, count, runs) for (name, count), runs in waits.items()]
    for row in rows:
        typer.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    typer.echo(json.dumps(describe_run() | {"rounds": rounds, "steps": steps, "rows": rows}))


def _row(name: str, count: int, runs: list[list[float]]) -> dict[str, Any]:
    """Medians of the rounds: images a second, what callers wait on average, and the last of them."""
    return {
        "side": name,
        "callers": count,
        "images_per_s": round(statistics.median(len(waits) / max(waits) for waits in runs), 2),
        "mean_ms": round(1e3 * statistics.median(statistics.mean(waits) for waits in runs), 1),
        "last_ms": round(1e3 * statistics.median(max(waits) for waits in runs), 1),
    }


async def _draw(address: str, callers: int, steps: int) -> list[float]:
    """Draws an image for each caller, all asked for at once; returns what each waits, in seconds."""
    async with AsyncClient(address) as client:
        [model] = (await client.list_models()).models
        began = time.perf_counter()

        async def call(number: int) -> float:
            label = model.labels[number % len(model.labels)]
            await client.generate_image(label, step_count=steps, seed=number, guidance_scale=GUIDANCE)
            return time.perf_counter() - began

        return list(await asyncio.gather(*map(call, range(callers))))


def _write_random(folder: Path, *, tiny: bool) -> None:
    """Writes a checkpoint with random weights."""
    import torch  # noqa: PLC0415 (of training and export alone)

    from headway_training.checkpoint import (  # noqa: PLC0415
        Checkpoint,
        Evaluation,
        ImagePreprocessing,
        write_checkpoint,
    )
    from headway_training.models import LatentDiffusion, LatentDiffusionConfig, named_configuration  # noqa: PLC0415

    shape = named_configuration("fashion-diffusion").configuration
    if tiny:
        shape = LatentDiffusionConfig(
            image_size=8, num_halvings=1, width=8, num_layers=1, d_model=16, num_heads=2, d_ff=32, num_classes=10
        )
    assert isinstance(shape, LatentDiffusionConfig)
    torch.manual_seed(0)
    model = LatentDiffusion(shape).eval()
    for parameter in model.denoiser.parameters():  # some start at zero
        torch.nn.init.normal_(parameter, std=0.02)
    random, side = np.random.default_rng(0), shape.image_size
    checkpoint = Checkpoint(
        name="random",
        task="image_generation",
        description="Random weights.",
        license="none",
        architecture="latent_diffusion",
        configuration=shape.to_dict(),
        labels=tuple(f"label {number}" for number in range(shape.num_classes)),
        image_preprocessing=ImagePreprocessing(height=side, width=side, mean=(0.5,) * 3, std=(0.5,) * 3),
        evaluation=Evaluation(file="evaluation.npz", dataset="noise", metric="velocity_error", higher_is_better=False),
    )
    images = random.integers(0, 256, (8, side, side, 3)).astype(np.uint8)
    write_checkpoint(folder, checkpoint, model, images=(images, random.integers(0, shape.num_classes, 8)))


def _export(checkpoint: Path, store: Path) -> None:
    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415 (as above)
    from headway_export.source import from_checkpoint  # noqa: PLC0415
    from headway_server.bundles import Precision  # noqa: PLC0415

    export(from_checkpoint(checkpoint), ExportOptions(store=store, precisions=(Precision.FP32, Precision.INT8)))


if __name__ == "__main__":
    typer.run(main)
