"""Keeps padding out of the answers of models of `transformers` whose own code lets it in.

A convolution reads the token beside a text's last one, a Fourier transform reads all, and a summary of the last token
reads the last of the batch. Here each of these reads a text as if it were alone. Texts are padded on the right.

B rows, T tokens, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

_YOSO_HIDDEN: Final = -10_000.0
"""Of a mask: no part of the sum."""


def keep_padding_out(model: nn.Module) -> None:
    """Changes those parts of a model that read padding; none, for most families.

    Args:
        model: It is called with `attention_mask`, (B, T), by name.
    """
    texts, is_changed = _Texts(), False
    for module in list(model.modules()):
        if (change := _CHANGES.get(type(module).__name__)) is not None:
            change(module, texts)
            is_changed = True
    if is_changed:
        model.register_forward_hook(texts.end, always_call=True)
        body = cast("nn.Module", getattr(model, "base_model", model))  # which a model with adapters calls by itself
        for called in {id(one): one for one in (model, body)}.values():
            called.register_forward_pre_hook(texts.begin, with_kwargs=True)


class _Texts:
    """The texts that a model reads at the moment; hooks refer to it, so that a copy of the model has its own."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        """(B, T), 1 at tokens; None: no row is padded."""

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        if (mask := kwargs.get("attention_mask")) is not None:
            self.mask = mask

    def end(self, *_: Any) -> None:
        self.mask = None

    def masked(self, tensor: Tensor, axis: int) -> Tensor:
        """Puts zeros in the place of padding; T is the axis of the tensor, and B its first."""
        if self.mask is None:
            return tensor
        mask = self.mask.to(tensor.dtype)
        for place in (*range(1, axis), *range(axis + 1, tensor.ndim)):
            mask = mask.unsqueeze(place)
        return tensor * mask


def _masked_input(texts: _Texts, axis: int, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (texts.masked(inputs[0], axis), *inputs[1:])


def _masked_output(texts: _Texts, axis: int, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
    return texts.masked(output, axis)


def _mask_convolutions(attention: nn.Module, texts: _Texts) -> None:
    """ConvBERT (arXiv 2008.02496, section 3.2): keys of spans, and values of a span of tokens."""
    key, value = (cast("nn.Module", getattr(attention, name)) for name in ("key_conv_attn_layer", "conv_out_layer"))
    key.register_forward_pre_hook(partial(_masked_input, texts, 2))  # (B, D, T)
    value.register_forward_hook(partial(_masked_output, texts, 1))  # (B, T, D)


def _mask_skip(attention: nn.Module, texts: _Texts) -> None:
    """Nyströmformer (arXiv 2102.03902, section 3.3) and YOSO: a depthwise convolution of the values."""
    if (convolution := getattr(attention, "conv", None)) is not None:
        convolution.register_forward_pre_hook(partial(_masked_input, texts, 2))  # (B, H, T, K)


def _hide_padding(texts: _Texts, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gives attention a mask, (B, T), of 1 at tokens and of what it takes for nothing elsewhere."""
    mask = inputs[1] if texts.mask is None else torch.where(texts.mask > 0, 1.0, _YOSO_HIDDEN)
    return (inputs[0], mask, *inputs[2:])


def _mask_sums(attention: nn.Module, texts: _Texts) -> None:
    """YOSO (arXiv 2111.09714): the library passes 1 and 0, and reads 1 + mask / 10,000 as a whole number."""
    attention.register_forward_pre_hook(partial(_hide_padding, texts))
    _mask_skip(attention, texts)


def _mask_neighbours(embeddings: nn.Module, texts: _Texts) -> None:
    """MobileBERT (arXiv 2004.02984, section 3.1): each token is read with the one before and the one after."""
    words = cast("nn.Module", embeddings.word_embeddings)
    words.register_forward_hook(partial(_masked_output, texts, 1))  # (B, T, D)


def _summarize_text(texts: _Texts, summary: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Gives a summary its one vector, (B, 1, D), in the place of all states, (B, T, D)."""
    states, mask = inputs[0], texts.mask
    if mask is None or summary.summary_type not in ("last", "mean"):
        return None
    counts = mask.sum(dim=1)[:, None, None]  # (B, 1, 1)
    if summary.summary_type == "last":
        return (states.gather(1, (counts - 1).to(torch.int64).expand(-1, 1, states.shape[-1])), *inputs[1:])
    return (texts.masked(states, 1).sum(dim=1, keepdim=True) / counts, *inputs[1:])


def _mask_summary(summary: nn.Module, texts: _Texts) -> None:
    """XLNet, XLM and FlauBERT."""
    summary.register_forward_pre_hook(partial(_summarize_text, texts))


def _mask_transform(mixing: nn.Module, texts: _Texts) -> None:
    """FNet (arXiv 2105.03824, section 3.2)."""
    cast("Any", mixing).fourier_transform = partial(_transformed, texts)


def _transformed(texts: _Texts, states: Tensor) -> Tensor:
    """The real part of the discrete Fourier transform over tokens and width: (B, T, D) -> (B, T, D).

    It is C_T X C_D - S_T X S_D, of cosines and sines. Those of tokens have the length of each text as their period.
    """
    num_tokens, width = states.shape[1:]
    mask = states.new_ones(states.shape[:2]) if texts.mask is None else texts.mask
    periods = mask.sum(dim=1).to(torch.int64)[:, None, None]  # (B, 1, 1)
    there = mask[:, None, :]  # (B, 1, T)
    of_tokens = _angles(torch.arange(num_tokens, device=states.device), periods)  # (B, T, T)
    of_width = _angles(torch.arange(width, device=states.device), width)  # (D, D)
    cosines, sines = ((wave(of_tokens) * there).to(states.dtype) for wave in (torch.cos, torch.sin))
    real = cosines @ states @ of_width.cos().to(states.dtype)
    return real - sines @ states @ of_width.sin().to(states.dtype)


def _angles(numbers: Tensor, period: Tensor | int) -> Tensor:
    """Angles of a discrete Fourier transform, fp32; products are taken by their remainders, which are exact."""
    return (numbers[:, None] * numbers) % period / period * (2 * math.pi)


_CHANGES: Final[Mapping[str, Callable[[nn.Module, _Texts], None]]] = {
    "ConvBertSelfAttention": _mask_convolutions,
    "FNetBasicFourierTransform": _mask_transform,
    "FlaubertSequenceSummary": _mask_summary,
    "MobileBertEmbeddings": _mask_neighbours,
    "NystromformerSelfAttention": _mask_skip,
    "XLMSequenceSummary": _mask_summary,
    "XLNetSequenceSummary": _mask_summary,
    "YosoSelfAttention": _mask_sums,
}
"""By the names of classes of `transformers`."""
