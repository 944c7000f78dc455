"""Scaled dot-product attention: against the worked example, a loop, torch's own, and its masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from headway_training.models.parts.attention import (
    KERNELS,
    MASKED_SCORE,
    Kernel,
    RecordingKernel,
    causal_attention,
    cross_attention,
    full_attention,
    fused_attention,
    padding_attention,
    scaled_dot_product_attention,
)

both_kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)

sizes: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "queries": st.integers(1, 7),
        "keys": st.integers(1, 7),
        "groups": st.integers(1, 2),
        "heads_per_group": st.integers(1, 2),
        "head_dim": st.sampled_from([1, 5, 8]),
        "scoring": st.sampled_from(["usual", "scale", "bias", "both"]),
        "seed": st.integers(0, 2**31),
    }
)


class TestWorkedExample:
    """Three tokens, one head of width 10, causal.

    From 'Attention and Transformers', Machine Learning I, week 6: causal scaled dot-product attention of three tokens
    ('Answer the following'), d_model = 10, one head; figures rounded to two decimals there.
    """

    TOLERANCE = 0.015
    QUERY = torch.tensor(
        [
            [0.84, 1.22, -0.1, 0.68, -0.11, -0.54, -0.54, -0.74, -0.71, 0.09],
            [-0.42, 1.38, 0.96, 1.87, -0.58, 0.05, 0.45, -1.06, 0.21, -1.24],
            [-0.19, 0.33, -1.1, -0.27, -0.64, 0.75, -0.42, 0.51, -1.44, -0.48],
        ]
    )
    KEY = torch.tensor(
        [
            [0.16, -1.08, -0.9, 0.33, -0.65, -0.09, 0.83, -0.3, 0.51, -0.03],
            [-0.22, -0.74, -1.61, 0.89, 1.08, 1.66, 0.2, 1.18, 0.24, -1.74],
            [-0.19, 0.49, 0.43, 0.16, -1.04, -0.7, 0.33, -0.61, 0.94, 0.5],
        ]
    )
    VALUE = torch.tensor(
        [
            [0.54, -0.7, 0.14, 0.96, -0.74, -0.04, 0.11, 0.33, -0.03, 0.6],
            [-0.02, 0.49, 1.3, 1.81, -0.94, -0.6, -0.02, 1.24, -0.47, 0.89],
            [-0.04, -1.8, -0.44, -0.74, 0.05, 0.19, 0.35, -0.85, -0.43, 0.03],
        ]
    )
    WEIGHTS = torch.tensor([[1, 0, 0], [0.48, 0.52, 0], [0.23, 0.65, 0.13]])
    OUTPUT = torch.tensor(
        [
            [0.54, -0.7, 0.14, 0.96, -0.74, -0.04, 0.11, 0.33, -0.03, 0.6],
            [0.24, -0.08, 0.75, 1.4, -0.84, -0.33, 0.04, 0.81, -0.26, 0.75],
            [0.1, -0.07, 0.82, 1.3, -0.77, -0.37, 0.06, 0.77, -0.36, 0.72],
        ]
    )

    @both_kernels
    def test_output(self, kernel: Kernel) -> None:
        output = self.attend(kernel, self.VALUE)
        torch.testing.assert_close(output, self.OUTPUT, atol=self.TOLERANCE, rtol=0)

    @both_kernels
    def test_weights_are_what_the_unit_vectors_come_back_as(self, kernel: Kernel) -> None:
        weights = self.attend(kernel, F.pad(torch.eye(3), (0, 7)))[:, :3]
        torch.testing.assert_close(weights, self.WEIGHTS, atol=self.TOLERANCE, rtol=0)
        assert weights.triu(1).count_nonzero() == 0

    def attend(self, kernel: Kernel, value: Tensor) -> Tensor:
        query, key, value = (tensor[None, :, None] for tensor in (self.QUERY, self.KEY, value))  # (1, T, 1, K)
        return causal_attention(kernel)(query, key, value, layer=0)[0, :, 0]


@settings(max_examples=40, deadline=None)
@given(sizes)
def test_plain_attention_is_the_formula_query_by_query(size: dict[str, Any]) -> None:
    query, key, value, mask = make_tensors(size)
    bias, scale = make_scoring(size)
    context = scaled_dot_product_attention(query, key, value, mask, bias=bias, scale=scale)
    factor = 1 / math.sqrt(size["head_dim"]) if scale is None else scale
    for row, position, head in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        group = head // size["heads_per_group"]
        scores = key[row, :, group] @ query[row, position, head] * factor
        if bias is not None:
            scores = scores + bias[0, head, position]
        exponentials = scores.exp() * mask[row, 0, position]
        expected = (exponentials / exponentials.sum()) @ value[row, :, group]
        torch.testing.assert_close(context[row, position, head], expected, atol=1e-5, rtol=1e-5)


@both_kernels
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_caps_and_sinks_are_the_formula_query_by_query(kernel: Kernel, window: int, has_sinks: bool) -> None:
    torch.manual_seed(5)
    query, key, value = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    sinks, softcap = torch.randn(4) if has_sinks else None, 1.5
    context = causal_attention(kernel)(query, key, value, layer=0, window=window, softcap=softcap, sinks=sinks)
    for row, position, head in torch.cartesian_prod(torch.arange(2), torch.arange(6), torch.arange(4)).tolist():
        first = 0 if window is None else max(0, position + 1 - window)
        keys, values = (tensor[row, first : position + 1, head // 2] for tensor in (key, value))
        exponentials = (softcap * torch.tanh(keys @ query[row, position, head] / math.sqrt(8) / softcap)).exp()
        total = exponentials.sum() + (sinks[head].exp() if sinks is not None else 0)
        torch.testing.assert_close(context[row, position, head], exponentials / total @ values, atol=1e-5, rtol=1e-5)


def test_a_window_is_for_causal_attention() -> None:
    with pytest.raises(ValueError, match="window is 2, and attention is not causal"):
        full_attention()(*torch.randn(3, 1, 4, 1, 8), layer=0, window=2)


@settings(max_examples=40, deadline=None)
@given(sizes, st.booleans(), st.booleans())
def test_plain_attention_is_torchs_own(size: dict[str, Any], masked: bool, causal: bool) -> None:
    if causal:
        size = size | {"keys": size["queries"]}
    query, key, value, mask = make_tensors(size)
    arguments = (query, key, value, mask if masked else None)
    bias, scale = make_scoring(size)
    if causal and masked:
        mask |= torch.eye(size["keys"], dtype=torch.bool)  # no query without a key
    plain = scaled_dot_product_attention(*arguments, causal=causal, bias=bias, scale=scale)
    fused = fused_attention(*arguments, causal=causal, bias=bias, scale=scale)
    torch.testing.assert_close(plain, fused, atol=1e-5, rtol=1e-5)


@both_kernels
def test_a_query_that_may_see_nothing_is_no_nan_forwards_or_backwards(kernel: Kernel) -> None:
    query, key, value = (torch.randn(2, 4, 2, 8, requires_grad=True) for _ in range(3))
    attention_mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]])
    context = padding_attention(attention_mask, kernel)(query, key, value, layer=0)
    context.square().sum().backward()
    for tensor in (context, query.grad, key.grad, value.grad):
        assert tensor is not None
        assert tensor.isfinite().all()


def test_a_query_that_may_see_nothing_gets_the_mean_of_the_values() -> None:
    query, key, value = (torch.randn(1, 4, 2, 8) for _ in range(3))
    context = padding_attention(torch.zeros(1, 4))(query, key, value, layer=0)
    torch.testing.assert_close(context, value.mean(dim=1, keepdim=True).expand_as(context))


def test_the_masked_score_survives_half_precision() -> None:
    assert torch.tensor(MASKED_SCORE, dtype=torch.float16).isfinite()
    assert torch.tensor([MASKED_SCORE, -10_000.0]).softmax(dim=0)[0] == 0


@both_kernels
def test_masked_keys_have_no_influence_at_all(kernel: Kernel) -> None:
    query, key, value = (torch.randn(2, 5, 2, 8) for _ in range(3))
    attention_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    attend = padding_attention(attention_mask, kernel)
    before = attend(query, key, value, layer=0)
    hidden = ~attention_mask.bool()
    key[hidden], value[hidden] = 1e3, -1e3
    assert torch.equal(attend(query, key, value, layer=0), before)


@both_kernels
@pytest.mark.parametrize("position", range(4))
def test_causal_attention_ignores_later_tokens(kernel: Kernel, position: int) -> None:
    query, key, value = (torch.randn(1, 5, 2, 8) for _ in range(3))
    attend = causal_attention(kernel)
    before = attend(query, key, value, layer=0)[:, : position + 1]
    key[:, position + 1 :], value[:, position + 1 :] = 1e3, -1e3
    assert torch.equal(attend(query, key, value, layer=0)[:, : position + 1], before)


@both_kernels
def test_full_attention_lets_every_token_see_every_token(kernel: Kernel) -> None:
    query, key, value = (torch.randn(2, 5, 2, 8) for _ in range(3))
    expected = padding_attention(torch.ones(2, 5), kernel)(query, key, value, layer=0)
    torch.testing.assert_close(full_attention(kernel)(query, key, value, layer=0), expected)


@both_kernels
def test_cross_attention_serves_the_layer_that_is_named_however_often_and_in_whatever_order(kernel: Kernel) -> None:
    keys_values = [(torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)) for _ in range(3)]
    source_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    attend_cross = cross_attention(keys_values, source_mask, kernel)
    query = torch.randn(2, 4, 2, 8)
    for layer in (0, 1, 2, 2, 1, 0):
        expected = padding_attention(source_mask, kernel)(query, *keys_values[layer], layer=layer)
        assert torch.equal(attend_cross(query, layer=layer), expected)


def make_tensors(size: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value, and a mask (B, 1, T, S) that leaves every query a key."""
    generator = torch.Generator().manual_seed(size["seed"])
    rows, queries, keys, groups = size["rows"], size["queries"], size["keys"], size["groups"]
    query = torch.randn(rows, queries, groups * size["heads_per_group"], size["head_dim"], generator=generator)
    key, value = torch.randn(2, rows, keys, groups, size["head_dim"], generator=generator)
    mask = torch.rand(rows, 1, queries, keys, generator=generator) < 0.6
    mask[..., 0] |= ~mask.any(dim=-1)
    return query, key, value, mask


def make_scoring(size: dict[str, Any]) -> tuple[Tensor | None, float | None]:
    """A bias (1, H, T, S) and a scale, each None unless `scoring` asks for it."""
    generator = torch.Generator().manual_seed(size["seed"] + 1)
    shape = (1, size["groups"] * size["heads_per_group"], size["queries"], size["keys"])
    bias = torch.randn(shape, generator=generator) if size["scoring"] in ("bias", "both") else None
    return bias, 0.3 if size["scoring"] in ("scale", "both") else None


def test_a_recording_kernel_keeps_the_weights_that_it_averages_values_by() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, 5, heads, 8, generator=generator) for heads in (4, 2, 2))
    recorder = RecordingKernel()
    for causal in (False, True):
        context = recorder(query, key, value, causal=causal)
        torch.testing.assert_close(context, scaled_dot_product_attention(query, key, value, causal=causal))
    full, masked = recorder.weights
    assert full.shape == masked.shape == (2, 4, 5, 5)
    torch.testing.assert_close(full.sum(-1), torch.ones(2, 4, 5))
    assert (masked == masked.tril()).all()
    values = value.repeat_interleave(2, dim=2)
    torch.testing.assert_close(torch.einsum("bhts,bshk->bthk", masked, values), context)
