"""Layers and their sublayers, against their equations and against torch's own modules."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.attention import (
    causal_attention,
    cross_attention,
    full_attention,
    padding_attention,
)
from headway_training.models.parts.embeddings import PositionedEmbedding
from headway_training.models.parts.layer import (
    CrossAttention,
    FeedForward,
    Layer,
    Residual,
    SelfAttention,
    Stack,
    make_norm,
)

PRE = LayerConfig(d_model=32, num_heads=4, d_ff=48)
POST = dataclasses.replace(PRE, norm="post")
LLAMA = LayerConfig(
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    d_ff=48,
    norm_kind="rms_norm",
    activation="silu",
    gated=True,
    biases=False,
    positions="rotary",
)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


def normal_cdf(x: Tensor) -> Tensor:
    return torch.distributions.Normal(0, 1).cdf(x)


FORMULAS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * normal_cdf(x),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("activation", FORMULAS)
def test_a_feed_forward_network_is_equation_2_with_its_activation(activation: str) -> None:
    network, x = FeedForward(dataclasses.replace(PRE, activation=activation)), torch.randn(2, 3, 32)
    inner = FORMULAS[activation](x @ network.input.weight.T + network.input.bias)
    torch.testing.assert_close(network(x), inner @ network.output.weight.T + network.output.bias)


@pytest.mark.parametrize("activation", FORMULAS)
def test_a_gated_network_multiplies_the_activation_of_one_projection_by_another(activation: str) -> None:
    network = FeedForward(dataclasses.replace(PRE, activation=activation, gated=True, biases=False))
    x, (gate, value) = torch.randn(2, 3, 32), network.input.weight.chunk(2)
    expected = (FORMULAS[activation](x @ gate.T) * (x @ value.T)) @ network.output.weight.T
    torch.testing.assert_close(network(x), expected)


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_rms_norm_divides_by_the_root_of_the_mean_square(eps: float) -> None:
    norm = make_norm(dataclasses.replace(LLAMA, norm_eps=eps))
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 32) + 1
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight)


def test_layer_norm_has_the_configured_epsilon() -> None:
    x = torch.randn(2, 3, 32)
    norm = make_norm(dataclasses.replace(PRE, norm_eps=0.5))
    torch.testing.assert_close(norm(x), F.layer_norm(x, (32,), eps=0.5))


def test_self_attention_is_torchs_multi_head_attention() -> None:
    ours, theirs = SelfAttention(PRE, 0), nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.query_key_value.weight)
        theirs.in_proj_bias.copy_(ours.query_key_value.bias)
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    hidden_states = torch.randn(2, 6, 32)
    expected, _ = theirs(hidden_states, hidden_states, hidden_states, key_padding_mask=~MASK.bool())
    torch.testing.assert_close(ours(hidden_states, padding_attention(MASK)), expected)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_heads_are_heads_whose_keys_and_values_repeat(num_kv_heads: int) -> None:
    grouped = SelfAttention(dataclasses.replace(PRE, num_kv_heads=num_kv_heads), 0)
    whole, kv_width = SelfAttention(PRE, 0), 8 * num_kv_heads
    assert grouped.query_key_value.out_features == 32 + 2 * kv_width
    for name in ("weight", "bias"):
        query, key, value = getattr(grouped.query_key_value, name).data.split([32, kv_width, kv_width])
        repeated = [
            head for part in (key, value) for head in part.split(8) for _ in range(4 // num_kv_heads)
        ]  # each head of 8 rows
        getattr(whole.query_key_value, name).data = torch.cat((query, *repeated))
    whole.output.load_state_dict(grouped.output.state_dict())
    hidden_states = torch.randn(2, 6, 32)
    for attend in (padding_attention(MASK), causal_attention()):
        torch.testing.assert_close(grouped(hidden_states, attend), whole(hidden_states, attend))


def test_cross_attention_is_torchs_multi_head_attention() -> None:
    ours, theirs = CrossAttention(PRE, 0), nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat((ours.query.weight, ours.key_value.weight)))
        theirs.in_proj_bias.copy_(torch.cat((ours.query.bias, ours.key_value.bias)))
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    hidden_states, memory = torch.randn(2, 4, 32), torch.randn(2, 6, 32)
    expected, _ = theirs(hidden_states, memory, memory, key_padding_mask=~MASK.bool())
    attend_cross = cross_attention([ours.keys_values(memory)], MASK)
    torch.testing.assert_close(ours(hidden_states, attend_cross), expected)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(7)))
def test_self_attention_without_positions_is_permutation_equivariant(order: list[int]) -> None:
    attention, hidden_states = SelfAttention(PRE, 0), torch.randn(2, 7, 32)
    straight = attention(hidden_states, full_attention())
    permuted = attention(hidden_states[:, order], full_attention())
    torch.testing.assert_close(permuted, straight[:, order])


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


@pytest.mark.parametrize("configuration", [PRE, POST, LLAMA], ids=["pre", "post", "llama"])
def test_a_layer_is_attention_and_then_feed_forward(configuration: LayerConfig) -> None:
    layer, x = Layer(configuration, 0), torch.randn(2, 3, 32)
    attend = full_attention()
    middle = layer.attention_residual(x, lambda y: layer.attention(y, attend))
    torch.testing.assert_close(layer(x, attend), layer.feed_forward_residual(middle, layer.feed_forward))


@pytest.mark.parametrize(("configuration", "kv_heads"), [(PRE, 4), (LLAMA, 2)], ids=["usual", "llama"])
def test_a_layer_names_itself_to_self_attention_and_then_to_attention_to_the_source(
    configuration: LayerConfig, kv_heads: int
) -> None:
    layer, asked = Layer(configuration, 5, cross=True), []
    assert layer.cross_attention is not None
    keys_values = layer.cross_attention.keys_values(torch.randn(2, 5, 32))
    cross = cross_attention([keys_values] * 6, torch.ones(2, 5))

    def attend(query: Tensor, key: Tensor, value: Tensor, *, layer: int) -> Tensor:
        asked.append(("self", layer, query.shape, key.shape, value.shape))
        return causal_attention()(query, key, value, layer=layer)

    def attend_cross(query: Tensor, *, layer: int) -> Tensor:
        asked.append(("cross", layer, query.shape))
        return cross(query, layer=layer)

    assert layer(torch.randn(2, 3, 32), attend, attend_cross).shape == (2, 3, 32)
    query = (2, 3, 4, 8)
    assert asked == [("self", 5, query, *[(2, 3, kv_heads, 8)] * 2), ("cross", 5, query)]


@pytest.mark.parametrize("configuration", [PRE, POST], ids=["pre", "post"])
def test_what_leaves_a_stack_is_normalised_once(configuration: LayerConfig) -> None:
    output = Stack(configuration, 2)(torch.randn(2, 3, 32), full_attention())
    torch.testing.assert_close(output, F.layer_norm(output, (32,)), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("norm_kind", ["layer_norm", "rms_norm"])
def test_a_stack_without_biases_has_none(norm_kind: str) -> None:
    configuration = dataclasses.replace(PRE, biases=False, norm_kind=norm_kind)
    names = [name for name, _ in Stack(configuration, 2, cross=True).named_parameters()]
    assert not [name for name in names if name.endswith("bias")]
    with_biases = [name for name, _ in Stack(PRE, 2, cross=True).named_parameters()]
    assert [name for name in with_biases if not name.endswith("bias")] == names


def test_an_embedding_scales_tokens_adds_positions_and_normalises_the_sum() -> None:
    embedding = PositionedEmbedding(PRE, 7, scaled=True, normalised=True)
    tokens, position_ids = torch.randn(2, 3, 32), torch.tensor([4, 0, 6])
    assert embedding.positions is not None
    expected = F.layer_norm(tokens * 32**0.5 + embedding.positions(position_ids), (32,))
    torch.testing.assert_close(embedding(tokens, position_ids), expected)
