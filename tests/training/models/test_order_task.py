"""A task that is learned with positions and cannot be learned without them: which of two tokens came first.

A text has one A, one B, and fillers; its class says whether A stands before B. Exchanging A and B gives a text of the
other class that is a permutation of the first. Without positions every part of an encoder treats tokens alike
wherever they stand: embeddings and feed-forward work token by token, and attention is permutation-equivariant. So the
final states of the second text are those of the first, permuted, and their mean is the same: the model answers both
texts with the same probability p of the first class. Over such a pair the mean cross-entropy is
-(ln p + ln(1 - p)) / 2, which is at least ln 2 whatever p is, and accuracy is exactly one half.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headway_training.models import Encoder, EncoderConfig

FILLER, A, B = 0, 1, 2
LENGTH = 8


def make_pairs(count: int) -> tuple[Tensor, Tensor]:
    """Texts (2 * count, LENGTH) and classes (2 * count): each of the first half has its exchange in the second."""
    places = torch.stack([torch.randperm(LENGTH)[:2] for _ in range(count)])  # (count, 2): of A and of B
    texts = torch.full((count, LENGTH), FILLER)
    texts.scatter_(1, places, torch.tensor([A, B]).expand(count, 2))
    exchanged = texts.clone().scatter_(1, places, torch.tensor([B, A]).expand(count, 2))
    first = (places[:, 0] < places[:, 1]).long()
    return torch.cat((texts, exchanged)), torch.cat((first, 1 - first))


def train(positions: str, steps: int) -> tuple[Encoder, list[float]]:
    torch.manual_seed(3)
    sizes = {"num_layers": 1, "d_model": 32, "num_heads": 2, "d_ff": 64}
    configuration = EncoderConfig(
        vocabulary_size=3, max_length=LENGTH, num_classes=2, pooling="mean", positions=positions, **sizes
    )
    model = Encoder(configuration).use_attention("fused")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        texts, classes = make_pairs(32)
        loss = cross_entropy(model(texts, torch.ones_like(texts)), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), losses


@pytest.fixture(scope="module")
def evaluate() -> Callable[[Encoder], tuple[Tensor, float]]:
    @torch.inference_mode()
    def run(model: Encoder) -> tuple[Tensor, float]:
        """Logits of 256 pairs, and the accuracy."""
        texts, classes = make_pairs(256)
        logits = model(texts, torch.ones_like(texts))
        return logits, (logits.argmax(dim=-1) == classes).float().mean().item()

    return run


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_the_task_is_learned_with_positions(
    positions: str, evaluate: Callable[[Encoder], tuple[Tensor, float]]
) -> None:
    model, losses = train(positions, steps=150)
    _, accuracy = evaluate(model)
    assert losses[-1] < 0.1
    assert accuracy == 1.0


def test_without_positions_the_two_texts_of_a_pair_cannot_be_told_apart(
    evaluate: Callable[[Encoder], tuple[Tensor, float]],
) -> None:
    model, losses = train("none", steps=150)
    logits, accuracy = evaluate(model)
    torch.testing.assert_close(*logits.chunk(2), atol=1e-5, rtol=0)
    assert min(losses) >= math.log(2) - 1e-5
    assert losses[-1] == pytest.approx(math.log(2), abs=0.02)
    assert accuracy == pytest.approx(0.5, abs=0.05)
