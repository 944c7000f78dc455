"""Starting weights of the models, as their papers or common practice have them."""

from __future__ import annotations

import math

import torch
from torch import nn

from headway_training.models.parts.layer import PackedLinear


def initialise_normal(model: nn.Module, std: float = 0.02) -> None:
    """Draws the matrices of linear maps and embeddings from N(0, std^2) and zeroes biases (GPT-2)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        _zero_bias(module)


def initialise_truncated_normal(model: nn.Module, std: float = 0.02) -> None:
    """Draws them from N(0, std^2) truncated at two standard deviations, and zeroes biases (BERT, ViT)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        _zero_bias(module)


def initialise_xavier(model: nn.Module, d_model: int) -> None:
    """Draws linear maps uniformly as in Glorot and Bengio (2010), and embeddings from N(0, 1 / d_model).

    Maps that share one matrix here, such as query, key and value, are drawn one by one. An embedding of that size has
    unit variance once it is scaled by sqrt(d_model), and gives logits of unit variance where it is tied.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=d_model**-0.5)
        _zero_bias(module)
    for module in model.modules():
        if isinstance(module, PackedLinear) and len(module.widths) > 1:
            for part in torch.split(module.weight.data, module.widths):
                nn.init.xavier_uniform_(part)


def scale_residual_outputs(model: nn.Module, num_residuals: int) -> None:
    """Divides the matrices that write into the residual stream by sqrt(num_residuals) (Radford et al. 2019, 2.3)."""
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.output.weight", "feed_forward.output.weight")):
            parameter.data.div_(math.sqrt(num_residuals))


def _zero_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
