"""Attention scored by a network with one hidden layer (Bahdanau et al. 2014, section 3.1 and appendix A.1.2).

B sentences, G rows of a sentence, S source tokens, H width of a state, D width of an annotation, A hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headway_training.models.parts.attention import MASKED_SCORE


class AdditiveAttention(nn.Module):
    """Scores a state s and an annotation h by v^T tanh(W s + U h).

    Args:
        d_state: H.
        d_annotation: D.
        d_attention: A.
    """

    def __init__(self, d_state: int, d_annotation: int, d_attention: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_state, d_attention, bias=False)
        self.key = nn.Linear(d_annotation, d_attention)
        self.score = nn.Linear(d_attention, 1, bias=False)

    def keys(self, annotations: Tensor) -> Tensor:
        """U h of every annotation, (B, S, D) -> (B, S, A): once a sentence, since it does not depend on the state."""
        keys: Tensor = self.key(annotations)
        return keys

    def forward(self, states: Tensor, keys: Tensor, annotations: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Attends to the source.

        Args:
            states: (B, G, H).
            keys: (B, S, A), of `keys`.
            annotations: (B, S, D).
            source_mask: int64 (B, S), 1 at tokens and 0 at padding.

        Returns:
            The context, (B, G, D), and the weights, (B, G, S), which are 0 at padding.
        """
        hidden = torch.tanh(self.query(states)[:, :, None] + keys[:, None])  # (B, G, S, A)
        scores = self.score(hidden).squeeze(-1)  # (B, G, S)
        weights = torch.where(source_mask[:, None] != 0, scores, MASKED_SCORE).softmax(dim=-1)
        return weights @ annotations, weights
