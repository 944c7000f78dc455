"""How many things a model remembers that were said once: python docs/journal/recall.py [--pairs N]... [--steps N].

Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): a text names pairs of a key and a value, each key
once, and then all keys again in another order; after each the model is to say its value. A decoder with linear
attention, whose memory has a fixed size, beside two with attention, of the same width: the kit's, and one that reads
its tokens through the short convolution that the linear one has. Each is trained for each number of pairs anew.
"""

from __future__ import annotations

import time
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models import GPT, build_model
from headway_training.models.parts.linear_attention import CONVOLUTION_WIDTH
from headway_training.optimization import learning_rate, make_optimizers
from headway_training.recipes import OptimizationSettings

_KEYS = _VALUES = 64
_SHAPE = {"num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 128, "vocabulary_size": _KEYS + _VALUES}
_ROTARY = {"positions": "rotary"}
_KINDS = {
    "attention": ("gpt", _ROTARY),
    "attention after a convolution": ("gpt", _ROTARY),
    "linear attention": ("linear", {}),
}
_ROWS = 64


def main(
    pairs: Annotated[list[int] | None, typer.Option(min=1, max=_KEYS)] = None,
    steps: Annotated[int, typer.Option(min=1)] = 1200,
    rate: Annotated[float, typer.Option(help="Of Muon, and of AdamW beside it.")] = 1e-2,
    seed: int = 0,
) -> None:
    """Trains and prints a row for each model and number of pairs."""
    for count in pairs or [8, 16, 32, 64]:
        for name, (architecture, fields) in _KINDS.items():
            torch.manual_seed(seed)
            model = build_model(architecture, _SHAPE | {"max_length": 4 * count} | fields)
            if name == "attention after a convolution":
                _add_convolutions(model)
            began = time.perf_counter()
            _train(model, count, steps, rate)
            right = _accuracy(model, count)
            typer.echo(f"{count} pairs  {name}  {right:.1%} recalled  {time.perf_counter() - began:.0f} s  seed {seed}")


class _Convolution(nn.Module):
    """Adds to each token a weighted sum of it and those before it, as `LinearAttention` does: (B, T, D) of each."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(CONVOLUTION_WIDTH, 1, d_model))

    def forward(self, hidden_states: Tensor) -> Tensor:
        seen = F.pad(hidden_states, (0, 0, CONVOLUTION_WIDTH - 1, 0))
        length = hidden_states.shape[1]
        for offset in range(CONVOLUTION_WIDTH):
            hidden_states = hidden_states + self.weight[offset] * seen[:, offset : offset + length]
        return hidden_states


def _add_convolutions(model: nn.Module) -> None:
    assert isinstance(model, GPT), "only a GPT's attention has no convolution"
    for layer in model.stack.layers:
        projection = layer.attention.query_key_value
        projection.convolution = convolution = _Convolution(projection.in_features)
        projection.register_forward_pre_hook(lambda _, inputs, convolution=convolution: convolution(*inputs))


def _draw(count: int) -> tuple[Tensor, Tensor]:
    """Draws texts, int64 (B, 4 N), and which of their tokens are keys that are asked for, bool (4 N,)."""
    keys = torch.rand(_ROWS, _KEYS).argsort(dim=1)[:, :count]  # (B, N), each once
    values = torch.randint(_KEYS, _KEYS + _VALUES, (_ROWS, count))
    order = torch.rand(_ROWS, count).argsort(dim=1)
    said = torch.stack((keys, values), dim=2)  # (B, N, 2)
    asked = torch.stack((keys.gather(1, order), values.gather(1, order)), dim=2)
    is_question = torch.arange(4 * count) >= 2 * count
    is_question[1::2] = False
    return torch.cat((said, asked), dim=1).flatten(1), is_question


def _train(model: nn.Module, count: int, steps: int, rate: float) -> None:
    settings = OptimizationSettings(
        epochs=1, batch_size=_ROWS, optimizer="muon", learning_rate=rate, weight_decay=0.01, warmup_fraction=0.05
    )
    optimizers = make_optimizers(model, settings)
    for step in range(steps):
        texts, is_question = _draw(count)
        answers = model(texts)[:, is_question]  # (B, N, V)
        loss = F.cross_entropy(answers.flatten(0, 1), texts[:, is_question.roll(1)].flatten())
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step, steps)
            optimizer.step()


@torch.inference_mode()
def _accuracy(model: nn.Module, count: int) -> float:
    right = []
    for _ in range(10):
        texts, is_question = _draw(count)
        said = model(texts)[:, is_question].argmax(dim=-1)
        right.append((said == texts[:, is_question.roll(1)]).float().mean().item())
    return sum(right) / len(right)


if __name__ == "__main__":
    typer.run(main)
