"""What a step costs after a long text: python -m benchmarks.long_texts [--tokens N]... [--rounds 3] [--tiny].

A decoder with linear attention, of the shape `shakespeare-linear`, beside the kit's GPT of the same sizes with rotary
positions; random weights, fp32, one caller, greedy. A prompt of each length is continued by 64 tokens, as a stream: the
time to the first token, in which the prompt is read, and the mean time of those that follow. Then the memory of the
server. Attention takes minutes to read 64,000 tokens, so its longest prompt has a limit of its own.
"""

import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.contestants.headway import Server, running_server
from benchmarks.inputs import Lengths, make_tokenizer, random_texts
from benchmarks.machine import describe_run
from benchmarks.worker import ROOT
from headway_client import Client

_NEW_TOKENS = 64
_VOCABULARY_SIZE = 1024
"""Of the shape `shakespeare-linear`."""
_SIDES = ("linear attention", "attention")


def main(
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Lengths of the prompt.")] = None,
    attention_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt of the side with attention.")] = 16_384,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    tiny: Annotated[bool, typer.Option("--tiny", help="Models of no size, to try the command.")] = False,
) -> None:
    """Measures and prints a table, and one JSON object as the last line."""
    asked = sorted(tokens or [64, 1024, 4096, 16_384, 65_000])
    lengths = {side: asked if side != "attention" else [n for n in asked if n <= attention_tokens] for side in _SIDES}
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, Server] = {}
        for side in _SIDES:
            store = folder / side.replace(" ", "-")
            _export(side, store, max_length=lengths[side][-1] + _NEW_TOKENS, tiny=tiny)
            flags = ("--precision", "fp32", "--num-slots", "1", "--num-prefix-slots", "0", "--max-text-kib", "1024")
            servers[side] = stack.enter_context(running_server(ROOT, store, flags))
        for number in range(rounds + 1):  # the first warms up, with the shortest prompt
            for length in asked if number else asked[:1]:
                for side in (side for side in _SIDES if length in lengths[side]):
                    measured = _measure(servers[side].address, _text(length, number))
                    if number:
                        found.setdefault((side, length), []).append(measured)
        rows = [_row(*key, times) for key, times in found.items()]
        for row in rows:
            typer.echo("  ".join(f"{name} {value}" for name, value in row.items()))
        memory = {side: server.memory_mib() for side, server in servers.items()}
    typer.echo(json.dumps(describe_run() | {"rounds": rounds, "rows": rows, "memory": memory}))


def _row(side: str, length: int, times: list[tuple[float, float]]) -> dict[str, Any]:
    first, step = (statistics.median(values) for values in zip(*times, strict=True))
    return {"side": side, "prompt": length, "first_token_ms": round(1e3 * first, 1), "step_ms": round(1e3 * step, 3)}


def _text(num_tokens: int, seed: int) -> str:
    lengths = Lengths(name=f"{num_tokens} tokens", percents=(0, 100), tokens=(num_tokens, num_tokens))
    return random_texts(make_tokenizer(_VOCABULARY_SIZE), lengths, seed + 1)[0][-1]


def _measure(address: str, prompt: str) -> tuple[float, float]:
    """Returns what the first token and, on average, each that follows took, in seconds."""
    with Client(address, timeout_s=600) as client:
        began = time.perf_counter()
        with client.stream_generate_text(prompt, max_new_tokens=_NEW_TOKENS, temperature=0.0) as stream:
            times = [time.perf_counter() for _ in stream]
    return times[0] - began, (times[-1] - times[0]) / (_NEW_TOKENS - 1)


def _export(side: str, store: Path, *, max_length: int, tiny: bool) -> None:
    """Exports a model with random weights that reads so long a text."""
    import torch  # noqa: PLC0415 (of training and export alone)

    from headway_export.exporter import ExportOptions, export  # noqa: PLC0415
    from headway_export.source import EvaluationData, ExportSource, limits_of  # noqa: PLC0415
    from headway_server import bundles  # noqa: PLC0415
    from headway_training.models import build_model, named_configuration  # noqa: PLC0415

    linear = named_configuration("shakespeare-linear")
    fields = replace(linear.configuration, dropout=0.0, max_length=max_length).to_dict()  # type: ignore[call-arg]
    if tiny:
        fields |= {"num_layers": 1, "d_model": 64, "num_heads": 2, "d_ff": 64}
    architecture = linear.architecture
    if side == "attention":
        architecture = "gpt"
        fields |= {"positions": "rotary"}
        del fields["window"]

    def make() -> Any:
        torch.manual_seed(0)
        return build_model(architecture, fields).eval()

    module = make()
    tokenizer = make_tokenizer(_VOCABULARY_SIZE)
    source = ExportSource(
        name=side.replace(" ", "-"),
        task=bundles.Task.GENERATION,
        module=module,
        make_reference=make,
        description="Random weights, to measure speed with.",
        license="none",
        architecture=bundles.Architecture(
            kind=architecture, parameter_count=sum(map(torch.numel, module.parameters())), configuration=fields
        ),
        limits=limits_of(module, bundles.Task.GENERATION),
        tokenizer=tokenizer,
        special_tokens=bundles.SpecialTokens(),  # none ends a text: every answer has all its tokens
        evaluation=EvaluationData(
            dataset="random", metric="nats_per_character", higher_is_better=False, texts=(_text(256, 0),)
        ),
    )
    export(source, ExportOptions(store=store, precisions=(bundles.Precision.FP32,)))


if __name__ == "__main__":
    typer.run(main)
