"""How fast texts are spoken: python -m benchmarks.speaking [--callers 1,8,16] [--seconds 4] [--rounds 3] [--tiny].

The model has the shape `telephone-speaker` (8,000 samples a second) and random weights, which compute as fast as
trained ones. So many callers ask for a stream at the same moment, each of a text of its own; what is drawn goes on for
`--seconds`, where all streams are cut. Told of each side: what a caller waits for the first audio, and how long a
second of audio takes: below 1 a stream plays without a stop. The sides take turns:

- headway, int8 and fp32, served over gRPC;
- Piper (contestants/piper.py) in its process, without a server, which gives the audio of a sentence at once;
- a VITS of Piper's geometry and random weights, imported and served by headway: the same work as Piper's.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.contestants.headway import running_server
from benchmarks.environments import python_of
from benchmarks.huggingface import import_folder
from benchmarks.machine import describe_run
from benchmarks.worker import ROOT, ContestantError, Worker, foreign_environment
from headway_client import AsyncClient

_PRECISIONS = ("int8", "fp32")
_PEER = "Piper medium fp32"
_TEXTS = tuple(
    f"please press {one} for the number {two}" for one in ("one", "two", "three", "four") for two in range(8)
)

Call = dict[str, float]
Speak = Callable[[Sequence[str]], list[Call]]
"""Speaks a text for each caller, all asked for at once."""


def main(
    callers: Annotated[str, typer.Option(help="Numbers with commas between.")] = "1,8,16",
    seconds: Annotated[float, typer.Option(min=0.1, max=6, help="Audio of a stream.")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of no size and no Piper, to try the command.")] = False,
) -> None:
    """Measures and prints a table, and one JSON object as the last line."""
    counts = [int(count) for count in callers.split(",")]
    report: dict[str, Any] = {"rounds": rounds, "seconds": seconds}
    found: dict[tuple[str, int], list[list[Call]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _write_random(folder / "checkpoint", tiny=tiny)
        _export(folder / "checkpoint", folder / "store")
        sides: dict[str, Speak] = {}
        for precision in _PRECISIONS:
            flags = ["--precision", precision, "--num-slots", str(max(counts))]
            server = stack.enter_context(running_server(ROOT, folder / "store", flags))
            sides[f"headway {precision}"] = partial(_speak_served, server.address, seconds)
        if not tiny:
            _import_vits(folder / "vits", folder / "imported")
            server = stack.enter_context(running_server(ROOT, folder / "imported", ["--precision", "fp32"]))
            sides["headway, VITS of Piper's geometry, fp32"] = partial(_speak_served, server.address, seconds)
            try:
                worker = stack.enter_context(_start_piper())
            except ContestantError as error:
                report["not_started"] = {"piper": str(error)}
            else:
                sides[_PEER] = partial(_speak_in, worker)
                report["peer_versions"] = worker.versions
        for number in range(rounds + 1):  # the first warms up
            for count in counts:
                for name in sorted(sides, reverse=bool(number % 2)):
                    calls = sides[name]([_TEXTS[caller % len(_TEXTS)] for caller in range(count)])
                    if number:
                        found.setdefault((name, count), []).append(calls)
    rows = [_row(name, count, runs) for (name, count), runs in found.items()]
    for row in rows:
        typer.echo("  ".join(f"{name} {value}" for name, value in row.items()))
    typer.echo(json.dumps(describe_run() | report | {"rows": rows}))


def _row(name: str, count: int, runs: list[list[Call]]) -> dict[str, Any]:
    """Medians of the rounds; of each round the mean over the callers."""
    first, factor, produced = (
        statistics.median(statistics.mean(map(of, run)) for run in runs)
        for of in (
            lambda call: call["first_s"],
            lambda call: call["last_s"] / call["audio_s"],
            lambda call: call["audio_s"],
        )
    )
    total = statistics.median(
        sum(call["audio_s"] for call in run) / max(call["last_s"] for call in run) for run in runs
    )
    return {
        "side": name,
        "callers": count,
        "first_audio_ms": round(1e3 * first),
        "real_time_factor": round(factor, 3),
        "audio_s_per_s": round(total, 1),
        "audio_s": round(produced, 1),
    }


def _start_piper() -> Worker:
    threads = str(os.cpu_count() or 1)
    return Worker("contestants.piper", threads, environment=foreign_environment(), python=python_of("piper"))


def _speak_in(worker: Worker, texts: Sequence[str]) -> list[Call]:
    calls: list[Call] = worker.ask(texts=list(texts))["calls"]
    return calls


def _speak_served(address: str, seconds: float, texts: Sequence[str]) -> list[Call]:
    async def speak() -> list[Call]:
        async with AsyncClient(address, timeout_s=600) as client:
            await client.list_models()  # connects
            began = time.perf_counter()

            async def call(seed: int, text: str) -> Call:
                times, length = [], 0.0
                async with client.stream_synthesize_speech(text, seed=seed, max_duration_seconds=seconds) as stream:
                    async for part in stream:
                        if part.pcm:
                            length += len(part.pcm) / 2 / part.sampling_rate
                            times.append(time.perf_counter() - began)
                return {"first_s": times[0], "last_s": times[-1], "audio_s": length}

            return list(await asyncio.gather(*(call(seed, text) for seed, text in enumerate(texts))))

    return asyncio.run(speak())


def _write_random(folder: Path, *, tiny: bool) -> None:
    """Writes a checkpoint with random weights, of which the end of a text is as likely as any code."""
    import torch  # noqa: PLC0415 (of training and export alone)

    from headway_training.checkpoint import Checkpoint, Evaluation, write_checkpoint  # noqa: PLC0415
    from headway_training.models import SpeechSynthesizer, SpeechSynthesizerConfig, named_configuration  # noqa: PLC0415
    from headway_training.recipes.settings import TokenizerSettings  # noqa: PLC0415
    from headway_training.tokenizers import SPEECH, special_tokens, train_tokenizer  # noqa: PLC0415

    tokenizer = train_tokenizer(
        [*_TEXTS], TokenizerSettings(vocabulary_size=261, lowercase=True), "speech_synthesis", (SPEECH,)
    )
    shape = named_configuration("telephone-speaker").configuration
    assert isinstance(shape, SpeechSynthesizerConfig)
    if tiny:
        shape = replace(shape, num_layers=1, d_model=32, num_heads=2, d_ff=32)
    shape = replace(shape, vocabulary_size=tokenizer.get_vocab_size())
    torch.manual_seed(0)
    model = SpeechSynthesizer(shape).eval()
    special = special_tokens(tokenizer)
    first = shape.vocabulary_size + torch.arange(shape.num_books) * shape.codebook_size
    random = np.random.default_rng(0)
    text = tokenizer.encode(_TEXTS[0]).ids
    codes = (random.integers(0, shape.codebook_size, (8, shape.num_books)) + first.numpy()).flatten()
    row = np.array([*text, *codes, special.eos])
    checkpoint = Checkpoint(
        name="random",
        task="speech_synthesis",
        description="Random weights.",
        license="none",
        architecture="speech_synthesizer",
        configuration=shape.to_dict(),
        labels=tuple(f"voice {number}" for number in range(shape.num_voices)),
        special_tokens=special,
        evaluation=Evaluation(file="evaluation.npz", dataset="noise", metric="nats_per_code", higher_is_better=False),
    )
    arrays = {"input_ids": row, "lengths": np.array([len(row)]), "prompt_lengths": np.array([len(text)])}
    write_checkpoint(folder, checkpoint, model, tokenizer=tokenizer, arrays=arrays)


def _export(checkpoint: Path, store: Path) -> None:
    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415 (needs torch)
    from headway_export.source import from_checkpoint  # noqa: PLC0415
    from headway_server.bundles import Precision  # noqa: PLC0415

    export(from_checkpoint(checkpoint), ExportOptions(store=store, precisions=(Precision.FP32, Precision.INT8)))


def _import_vits(folder: Path, store: Path) -> None:
    """Writes a VITS with the geometry of Piper's `medium`, and imports it.

    Its blocks have two convolutions a dilation, of which Piper's have one, so that it has half as many dilations.
    """
    import torch  # noqa: PLC0415 (of training and export alone)
    import transformers  # noqa: PLC0415

    torch.manual_seed(0)
    symbols = " " + "".join(sorted(set("".join(_TEXTS)) - {" "}))
    sizes: dict[str, Any] = {
        "sampling_rate": 22_050,
        "upsample_initial_channel": 256,
        "upsample_rates": [8, 8, 4],
        "upsample_kernel_sizes": [16, 16, 8],
        "resblock_kernel_sizes": [3, 5, 7],
        "resblock_dilation_sizes": [[1], [2], [3]],
    }
    transformers.VitsModel(transformers.VitsConfig(vocab_size=len(symbols), **sizes)).save_pretrained(folder)
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(json.dumps({symbol: index for index, symbol in enumerate(symbols)}), encoding="utf-8")
    options: dict[str, Any] = {"phonemize": False, "pad_token": " ", "unk_token": "<unk>", "language": "eng"}
    transformers.VitsTokenizer(str(vocabulary), **options).save_pretrained(folder)
    import_folder(folder, store, ["fp32"])


if __name__ == "__main__":
    typer.run(main)
