"""Multi-head attention: against torch's own module, and what it does to an order."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headway_training.models.parts.attention import cross_attention, full_attention, padding_attention
from headway_training.models.parts.multi_head import CrossAttention, SelfAttention


def test_self_attention_is_torchs_multi_head_attention() -> None:
    ours, theirs = SelfAttention(32, 4), nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.query_key_value.weight)
        theirs.in_proj_bias.copy_(ours.query_key_value.bias)
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    hidden_states, mask = torch.randn(2, 6, 32), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    expected, _ = theirs(hidden_states, hidden_states, hidden_states, key_padding_mask=~mask.bool())
    torch.testing.assert_close(ours(hidden_states, padding_attention(mask)), expected)


def test_cross_attention_is_torchs_multi_head_attention() -> None:
    ours, theirs = CrossAttention(32, 4), nn.MultiheadAttention(32, 4, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat((ours.query.weight, ours.key_value.weight)))
        theirs.in_proj_bias.copy_(torch.cat((ours.query.bias, ours.key_value.bias)))
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    hidden_states, memory = torch.randn(2, 4, 32), torch.randn(2, 6, 32)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    expected, _ = theirs(hidden_states, memory, memory, key_padding_mask=~mask.bool())
    attend_cross = cross_attention([ours.keys_values(memory)], mask)
    torch.testing.assert_close(ours(hidden_states, attend_cross), expected)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(7)))
def test_self_attention_without_positions_is_permutation_equivariant(order: list[int]) -> None:
    attention, hidden_states = SelfAttention(32, 4), torch.randn(2, 7, 32)
    straight = attention(hidden_states, full_attention())
    permuted = attention(hidden_states[:, order], full_attention())
    torch.testing.assert_close(permuted, straight[:, order])
