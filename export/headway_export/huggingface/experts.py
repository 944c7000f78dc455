"""Mixtures of experts of `transformers`, a layer as one operator.

`transformers` has one interface for the experts of its families: a router has chosen the experts of each token and
weighed them, and one module computes them. `give_experts` puts `Experts` in the place of that module.

Files mostly have a matrix of an expert in a tensor of its own. `stack_experts` puts those of a layer together, as
`transformers` does when it loads them, so that the files of a plain folder can be mapped.

N tokens, k experts of a token, E experts, D model width, I inner width.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightConverter, dot_natural_key

from headway_export.errors import SourceError
from headway_export.huggingface.adapters import widened
from headway_export.huggingface.published import Codes, Plain, Weight, stored_tensors
from headway_export.spool import save_tensors

_UNCHOSEN = -1e9
"""Score of an expert that the router has not chosen: its share is exactly 0."""


_LANES = 16
"""Numbers that a processor takes the logarithm of together. A remainder of fewer has other last bits, so each number is
repeated so often that its bits do not depend on its place."""
LAID_OUT_FILES: Final = "experts-*.safetensors"
"""Of a plain folder, with weights of experts as their operator reads them."""


class Experts(nn.Module):
    """Gated experts: down (silu(gate x) up x), or gpt-oss' form of it with a limit and biases (arXiv 2508.10925)."""

    def __init__(self, experts: nn.Module, keep: Callable[[Tensor], Tensor] = torch.Tensor.contiguous) -> None:
        """Takes over the weights of a module of `transformers`.

        Args:
            experts: That module.
            keep: Returns a tensor that is laid out anew as it is held from then on.
        """
        super().__init__()
        given = cast("Any", experts)
        is_limited = hasattr(given, "alpha") and hasattr(given, "limit")
        self.alpha, self.shift = (float(given.alpha), 1.0) if is_limited else (1.0, 0.0)
        self.limit = float(given.limit) if is_limited else None
        up, down = own_up, own_down = given.gate_up_proj.detach(), given.down_proj.detach()
        up_bias, down_bias = (given.gate_up_proj_bias, given.down_proj_bias) if given.has_bias else (None, None)
        if given.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        if given.is_concatenated:  # gates before ups; the operator takes them in turns
            up = up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            up_bias = None if up_bias is None else up_bias.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        self.up, self.down = (  # (E, 2 I, D), (E, D, I)
            nn.Parameter(matrices if matrices is own else keep(matrices))
            for matrices, own in ((up, own_up), (down, own_down))
        )
        self.up_bias = None if up_bias is None else nn.Parameter(up_bias.detach().contiguous())  # (E, 2 I)
        self.down_bias = None if down_bias is None else nn.Parameter(down_bias.detach())  # (E, D)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(N, D), int64 (N, k), (N, k) -> (N, D)."""
        if torch.onnx.is_in_onnx_export():
            return self._operator(hidden_states, top_k_index, top_k_weights)
        output = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            tokens, places = (top_k_index == expert).nonzero(as_tuple=True)
            inner = hidden_states[tokens] @ self.up[expert].T
            if self.up_bias is not None:
                inner = inner + self.up_bias[expert]
            gate, up = inner[:, ::2], inner[:, 1::2]
            if self.limit is not None:
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            result = gate * torch.sigmoid(self.alpha * gate) * (up + self.shift) @ self.down[expert].T
            if self.down_bias is not None:
                result = result + self.down_bias[expert]
            output.index_add_(0, tokens, result * top_k_weights[tokens, places, None].to(result.dtype))
        return output

    def _operator(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`com.microsoft::MoE`, which takes the softmax of scores and keeps the k highest."""
        weights = top_k_weights.float()
        scores = torch.full((hidden_states.shape[0], self.up.shape[0]), _UNCHOSEN)
        aligned = weights[..., None].expand(-1, -1, _LANES).log()[..., 0]
        scores = scores.scatter(1, top_k_index, aligned)  # (N, E)
        attributes: dict[str, Any] = {
            "k": top_k_index.shape[1],
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "normalize_routing_weights": 1,
            "activation_alpha": self.alpha,
            "activation_beta": self.shift,
        }
        if self.limit is not None:
            attributes["swiglu_limit"] = self.limit
        inputs = [hidden_states, scores.to(hidden_states.dtype), self.up, self.up_bias, self.down, self.down_bias]
        while inputs[-1] is None:
            inputs.pop()
        mixed = torch.onnx.ops.symbolic(
            "com.microsoft::MoE",
            inputs,
            attributes,
            dtype=hidden_states.dtype,
            shape=hidden_states.shape,
            version=1,
        )
        return mixed * weights.sum(dim=-1, keepdim=True).to(hidden_states.dtype)


def _is_the_same(own: nn.Module, experts: Experts) -> bool:
    """Compares experts with those of `transformers` on a few random tokens."""
    random = torch.Generator().manual_seed(0)
    num_experts, _, width = experts.up.shape
    hidden = torch.randn(4, width, generator=random)
    index = torch.stack([torch.randperm(num_experts, generator=random)[:2] for _ in range(4)])
    weights = torch.rand(4, index.shape[1], generator=random)
    with torch.inference_mode():
        expected, found = own(hidden, index, weights), experts(hidden, index, weights)
    return bool(torch.allclose(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max())))


def has_experts(model_class: type) -> bool:
    """Returns True if the experts of a class of models go through the interface of `transformers`."""
    return any(hasattr(part, "_apply_gate") for part in vars(sys.modules[model_class.__module__]).values())


def _as_tensor(weight: Weight) -> Tensor:
    return widened(weight) if isinstance(weight, Codes) else weight


def stack_experts(plain: Plain, config: Any) -> Plain:
    """Puts the weights of a layer's experts together, as `transformers` does when it loads them.

    Args:
        plain: Weights by the names of the folder's files.
        config: The configuration as `transformers` parses it.

    Returns:
        The same weights, of which those of experts have the names that the model has for them.
    """
    kinds = dict.fromkeys((config.model_type, config.get_text_config().model_type))
    transforms = [transform for kind in kinds for transform in get_checkpoint_conversion_mapping(kind) or ()]
    converters = [
        transform
        for transform in transforms
        if isinstance(transform, WeightConverter)
        and len(transform.target_patterns) == 1
        and any(isinstance(operation, MergeModulelist) for operation in transform.operations)
    ]
    stacked = dict(plain)
    parts: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    converter_of: dict[str, WeightConverter] = {}
    for name in sorted(plain, key=dot_natural_key):
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                parts[target].append((name, pattern))
                converter_of[target] = converter
                del stacked[name]
                break

    def reading(target: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            converter = deepcopy(converter_of[target])
            for name, pattern in parts[target]:
                converter.add_tensor(target, name, pattern, lambda name=name: _as_tensor(plain[name]()))
            (tensor,) = converter.convert(target).values()
            return cast("Tensor", tensor)

        return read

    return {**stacked, **{target: reading(target) for target in parts}}


def give_experts(model: nn.Module, owner: str, folder: Path | None = None) -> None:
    """Puts `Experts` in the place of the experts of a model of `transformers`.

    Args:
        model: The model.
        owner: What it is called in errors.
        folder: Where weights that are laid out anew are written, and mapped from; None: they are in memory.

    Raises:
        SourceError: Some experts of `owner` compute something else.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, part in parent.named_children()
        if hasattr(part, "gate_up_proj") and hasattr(part, "is_concatenated")
    ]
    count = 0

    def keep(matrices: Tensor) -> Tensor:
        if folder is None:
            return matrices.contiguous()
        nonlocal count
        count += 1
        file = folder / LAID_OUT_FILES.replace("*", f"{count:05}")
        save_tensors({"weight": matrices.contiguous()}, file)
        return stored_tensors([file])["weight"]()

    for parent, name in places:  # so that the weights of a layer's go before those of the next are laid out
        part = getattr(parent, name)
        experts = Experts(part, keep)
        if cast("Any", part).has_post_expert_norm or not _is_the_same(part, experts):
            raise SourceError(
                f"{owner}: its experts ({type(part).__name__}) are not gated by SiLU alone, as the operator for them is"
            )
        setattr(parent, name, experts)
