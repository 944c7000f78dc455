"""Heads: what turns an encoder's states into logits.

B rows, T tokens, D model width, C classes, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

TextPooling = Literal["first", "mean", "max"]


class SequenceHead(nn.Module):
    """Classifies a text by its first token, through BERT's tanh layer, or by the mean or the maximum of its tokens.

    The maximum of each number of a state over the text says whether anything in it spoke for a class, wherever it stood
    and however long the rest is (max-over-time pooling: Collobert et al. 2011, section 3.3; Kim 2014).
    """

    def __init__(self, d_model: int, num_classes: int, pooling: TextPooling, dropout: float) -> None:
        super().__init__()
        self.pooling = pooling
        self.pooler = nn.Linear(d_model, d_model) if pooling == "first" else None
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(d_model, num_classes)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T, D) and (B, T) -> (B, C)."""
        return self.classify(self.pool(hidden_states, attention_mask))

    def pool(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T, D) and (B, T) -> what the classes are told by, (B, D)."""
        if self.pooler is not None:
            pooled: Tensor = self.pooler(hidden_states[:, 0]).tanh()
            return pooled
        return (masked_max if self.pooling == "max" else masked_mean)(hidden_states, attention_mask)

    def classify(self, pooled: Tensor) -> Tensor:
        """(B, D) -> (B, C)."""
        logits: Tensor = self.output(self.dropout(pooled))
        return logits


class TokenHead(nn.Module):
    """Classifies every token."""

    def __init__(self, d_model: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(d_model, num_classes)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:  # noqa: ARG002 (heads are called alike)
        """(B, T, D) -> (B, T, C)."""
        logits: Tensor = self.output(self.dropout(hidden_states))
        return logits


class MaskedLanguageHead(nn.Module):
    """Prepares states for the tied output projection; its bias is added to what that gives (BERT's own code)."""

    def __init__(self, d_model: int, vocabulary_size: int) -> None:
        super().__init__()
        self.transform = nn.Linear(d_model, d_model)
        self.activation = nn.GELU()
        self.norm = nn.LayerNorm(d_model)
        self.bias = nn.Parameter(torch.zeros(vocabulary_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        transformed: Tensor = self.norm(self.activation(self.transform(hidden_states)))
        return transformed


def masked_mean(hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
    """Averages over the tokens that are not padding: (B, T, D) and (B, T) -> (B, D); zeros where there is no token."""
    weights = attention_mask.to(hidden_states.dtype)[..., None]  # (B, T, 1)
    return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


def masked_max(hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
    """Greatest over the tokens that are not padding: (B, T, D) and (B, T) -> (B, D); zeros where there is no token."""
    tokens = attention_mask.bool()[..., None]  # (B, T, 1)
    greatest = hidden_states.masked_fill(~tokens, torch.finfo(hidden_states.dtype).min).amax(dim=1)  # (B, D)
    return greatest.masked_fill(~tokens.any(dim=1), 0.0)
