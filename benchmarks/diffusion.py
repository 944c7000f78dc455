"""How fast images are drawn: python -m benchmarks.diffusion [--geometry emoji] [--callers 8] [--rounds 3] [--tiny].

The model has the shape of a recipe and random weights, which compute as fast as trained ones: `clothes`, which draws
labels, that of fashion-mnist-diffusion, and `emoji`, which draws texts, that of emoji-diffusion. One caller draws an
image with guidance; then so many callers ask for one each at the same moment. The sides take turns:

- headway, int8 and fp32: the images of all callers share the denoiser's runs;
- the same server with room for one image in a run (`--max-denoising-rows 2`), whose callers take turns;
- PyTorch, eager, with the same model in fp32: one pipeline call at a time, on all cores.

PyTorch runs in its own process, without a server, and stops at pixels; headway sends a PNG by gRPC.
"""

import asyncio
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
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

Draw = Callable[[Sequence[str]], list[float]]
"""Draws an image of each prompt, all asked for at once; returns what each caller waits, in seconds."""


class Geometry(StrEnum):
    """The recipe whose shape is measured."""

    CLOTHES = "clothes"
    EMOJI = "emoji"


def main(
    geometry: Annotated[Geometry, typer.Option()] = Geometry.CLOTHES,
    steps: Annotated[int, typer.Option(min=1, max=250)] = 20,
    callers: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of no size, to try the command.")] = False,
) -> None:
    """Measures and prints a table, and one JSON object as the last line."""
    report: dict[str, Any] = {"geometry": geometry, "rounds": rounds, "steps": steps}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint, store, threads = folder / "checkpoint", folder / "store", str(os.cpu_count() or 1)
        prompts = _write_random(checkpoint, geometry, tiny=tiny)
        _export(checkpoint, store)
        sides: dict[str, Draw] = {}
        for name, (precision, flags) in _SIDES.items():
            server = stack.enter_context(running_server(ROOT, store, ["--precision", precision, *flags]))
            sides[name] = partial(_draw_served, server.address, steps)
        torch = stack.enter_context(
            Worker("contestants.denoising", threads, str(checkpoint), environment=tree_environment(ROOT))
        )
        sides[_TORCH] = partial(_draw_in, torch, {"steps": steps})
        waits: dict[tuple[str, int], list[list[float]]] = {}
        for number in range(rounds + 1):  # the first warms up
            for count in sorted({1, callers}):
                for name in sorted(sides, reverse=bool(number % 2)):
                    found = sides[name]([prompts[caller % len(prompts)] for caller in range(count)])
                    if number:
                        waits.setdefault((name, count), []).append(found)
    rows = [_row(name, count, runs) for (name, count), runs in waits.items()]
    for row in rows:
        typer.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    typer.echo(json.dumps(describe_run() | report | {"rows": rows}))


def _row(name: str, count: int, runs: list[list[float]]) -> dict[str, Any]:
    """Medians of the rounds: images a second, what callers wait on average, and the last of them."""
    return {
        "side": name,
        "callers": count,
        "images_per_s": round(statistics.median(len(waits) / max(waits) for waits in runs), 2),
        "mean_ms": round(1e3 * statistics.median(statistics.mean(waits) for waits in runs), 1),
        "last_ms": round(1e3 * statistics.median(max(waits) for waits in runs), 1),
    }


def _draw_in(worker: Worker, request: dict[str, Any], prompts: Sequence[str]) -> list[float]:
    waits: list[float] = worker.ask(**request, prompts=prompts)["waits_s"]
    return waits


def _draw_served(address: str, steps: int, prompts: Sequence[str]) -> list[float]:
    async def draw() -> list[float]:
        async with AsyncClient(address) as client:
            await client.list_models()  # connects
            began = time.perf_counter()

            async def call(seed: int, prompt: str) -> float:
                await client.generate_image(prompt, step_count=steps, seed=seed, guidance_scale=GUIDANCE)
                return time.perf_counter() - began

            return list(await asyncio.gather(*(call(seed, prompt) for seed, prompt in enumerate(prompts))))

    return asyncio.run(draw())


def _write_random(folder: Path, geometry: Geometry, *, tiny: bool) -> list[str]:
    """Writes a checkpoint with random weights; returns prompts that it draws."""
    import torch  # noqa: PLC0415 (of training and export alone)

    from headway_training.checkpoint import (  # noqa: PLC0415
        Checkpoint,
        Evaluation,
        ImagePreprocessing,
        write_checkpoint,
    )
    from headway_training.models import LatentDiffusion, LatentDiffusionConfig, named_configuration  # noqa: PLC0415
    from headway_training.recipes.settings import TokenizerSettings  # noqa: PLC0415
    from headway_training.tokenizers import special_tokens, train_tokenizer  # noqa: PLC0415

    draws_texts = geometry is Geometry.EMOJI
    shape = named_configuration("emoji-diffusion" if draws_texts else "fashion-diffusion").configuration
    assert isinstance(shape, LatentDiffusionConfig)
    if tiny:
        sizes = {"width": 8, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 32}
        shape = dataclasses.replace(shape, image_size=2 * 2**shape.num_halvings, **sizes)
    torch.manual_seed(0)
    model = LatentDiffusion(shape).eval()
    for parameter in model.denoiser.parameters():  # some start at zero
        torch.nn.init.normal_(parameter, std=0.02)
    random, side = np.random.default_rng(0), shape.image_size
    prompts = [f"a smiling face number {number}, in a style" for number in range(8)]
    if not draws_texts:
        prompts = [f"label {number}" for number in range(shape.num_classes)]
    tokenizer = None
    if draws_texts:
        tokenizer = train_tokenizer(
            prompts, TokenizerSettings(vocabulary_size=shape.vocabulary_size), "image_generation"
        )
    checkpoint = Checkpoint(
        name="random",
        task="image_generation",
        description="Random weights.",
        license="none",
        architecture="latent_diffusion",
        configuration=shape.to_dict(),
        labels=() if draws_texts else tuple(prompts),
        special_tokens=tokenizer and special_tokens(tokenizer),
        image_preprocessing=ImagePreprocessing(height=side, width=side, mean=(0.5,) * 3, std=(0.5,) * 3),
        evaluation=Evaluation(file="evaluation.npz", dataset="noise", metric="velocity_error", higher_is_better=False),
    )
    images = random.integers(0, 256, (8, side, side, 3)).astype(np.uint8)
    known = {"texts": np.array(prompts)} if draws_texts else {"labels": np.arange(8)}
    write_checkpoint(folder, checkpoint, model, tokenizer=tokenizer, arrays={"images": images, **known})
    return prompts


def _export(checkpoint: Path, store: Path) -> None:
    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415 (as above)
    from headway_export.source import from_checkpoint  # noqa: PLC0415
    from headway_server.bundles import Precision  # noqa: PLC0415

    export(from_checkpoint(checkpoint), ExportOptions(store=store, precisions=(Precision.FP32, Precision.INT8)))


if __name__ == "__main__":
    typer.run(main)
