"""Layers, against their equations."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.attention import causal_attention, cross_attention, full_attention
from headway_training.models.parts.embeddings import PositionedEmbedding
from headway_training.models.parts.feed_forward import FeedForward
from headway_training.models.parts.layer import CrossLayer, Layer, Residual, Stack

PRE = LayerConfig(d_model=32, num_heads=2, d_ff=48)
POST = dataclasses.replace(PRE, norm="post")


def test_feed_forward_relu_is_equation_2() -> None:
    network, x = FeedForward(8, 16, "relu"), torch.randn(2, 3, 8)
    expected = (x @ network.input.weight.T + network.input.bias).clamp(min=0) @ network.output.weight.T
    torch.testing.assert_close(network(x), expected + network.output.bias)


def test_feed_forward_gelu_is_x_times_the_normal_distribution() -> None:
    network, x = FeedForward(8, 16, "gelu"), torch.randn(2, 3, 8)
    inner = network.input(x)
    expected = network.output(inner * torch.distributions.Normal(0, 1).cdf(inner))
    torch.testing.assert_close(network(x), expected)


def test_pre_norm_normalises_what_the_sublayer_reads() -> None:
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(Residual(PRE)(x, torch.sin), x + F.layer_norm(x, (32,)).sin())


def test_post_norm_normalises_the_sum() -> None:
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(Residual(POST)(x, torch.sin), F.layer_norm(x + x.sin(), (32,)))


def test_dropout_falls_on_what_the_sublayer_adds_in_training_alone() -> None:
    residual, x = Residual(dataclasses.replace(PRE, dropout=0.5)), torch.randn(2, 3, 32)
    added = residual(x, torch.ones_like) - x
    assert set(added.round(decimals=4).unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(residual.eval()(x, torch.ones_like), x + 1)


@pytest.mark.parametrize("configuration", [PRE, POST], ids=["pre", "post"])
def test_a_layer_is_attention_and_then_feed_forward(configuration: LayerConfig) -> None:
    layer, x = Layer(configuration), torch.randn(2, 3, 32)
    attend = full_attention()
    middle = layer.attention_residual(x, lambda y: layer.attention(y, attend))
    torch.testing.assert_close(layer(x, attend), layer.feed_forward_residual(middle, layer.feed_forward))


def test_a_cross_layer_asks_for_self_attention_and_then_for_attention_to_the_source() -> None:
    layer, asked = CrossLayer(PRE), []
    keys_values = layer.cross_attention.keys_values(torch.randn(2, 5, 32))
    cross = cross_attention([keys_values], torch.ones(2, 5))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        asked.append(("self", query.shape, key.shape, value.shape))
        return causal_attention()(query, key, value)

    def attend_cross(query: torch.Tensor) -> torch.Tensor:
        asked.append(("cross", query.shape))
        return cross(query)

    assert layer(torch.randn(2, 3, 32), attend, attend_cross).shape == (2, 3, 32)
    assert asked == [("self", *[(2, 3, 2, 16)] * 3), ("cross", (2, 3, 2, 16))]


@pytest.mark.parametrize("configuration", [PRE, POST], ids=["pre", "post"])
def test_what_leaves_a_stack_is_normalised_once(configuration: LayerConfig) -> None:
    output = Stack(configuration, 2)(torch.randn(2, 3, 32), full_attention())
    torch.testing.assert_close(output, F.layer_norm(output, (32,)), atol=1e-3, rtol=1e-3)


def test_an_embedding_scales_tokens_adds_positions_and_normalises_the_sum() -> None:
    embedding = PositionedEmbedding(PRE, 7, scaled=True, normalised=True)
    tokens, position_ids = torch.randn(2, 3, 32), torch.tensor([4, 0, 6])
    assert embedding.positions is not None
    expected = F.layer_norm(tokens * 32**0.5 + embedding.positions(position_ids), (32,))
    torch.testing.assert_close(embedding(tokens, position_ids), expected)
