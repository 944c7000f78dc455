"""Encoder: reads a text in both directions (Devlin et al. 2019) and classifies it, or its tokens.

B rows, T tokens, D model width, W tokens on each side, C classes, V vocabulary.

Deviations from BERT:
- Tokens may be read together with their neighbours before the first layer (`TokenWindow`).
- In a model with token types, every token is of type 0 unless the caller gives types.
- Next-sentence prediction has no head of its own; a sequence head serves.
Deviations of the window from Collobert et al. (2011), section 3.2: it is one sublayer of a residual network, normalised
and added to what it reads, and not the whole model; beyond the ends of a text there are zeros and no padding word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.architectures import architecture
from headway_training.models.base import Model
from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.attention import padding_attention
from headway_training.models.parts.embeddings import PositionedEmbedding, TokenEmbedding
from headway_training.models.parts.initialisation import initialise_truncated_normal
from headway_training.models.parts.layer import Stack

EncoderHead = Literal["sequence", "token"]
TextPooling = Literal["first", "mean", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoderConfig(LayerConfig):
    """Shape of what turns a text into states.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    vocabulary_size: int
    """Tokens the model knows."""
    max_length: int
    """Most tokens of a text."""
    num_layers: int
    """Number of layers."""
    num_token_types: int = 0
    """Token types, each with an embedding (BERT: 2, for the two texts of a pair); 0 for none."""
    window: int = 0
    """Neighbours on each side that a token is read together with before the first layer; 0 for none."""

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)  # not super(): the decorator makes a new class with slots
        self._check_integers("vocabulary_size", "max_length", "num_layers")
        self._check_integers("num_token_types", "window", minimum=0)


class TextEncoder(Model):
    """Turns a text into states: the part that models of texts share, which call `initialise` when they are whole.

    Starts from a normal distribution with standard deviation 0.02, truncated at two deviations (BERT's code).
    """

    def __init__(self, configuration: TextEncoderConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.max_length = configuration.max_length
        self.num_token_types = configuration.num_token_types
        self.tokens = TokenEmbedding(configuration.vocabulary_size, configuration.d_model)
        self.token_types = (
            nn.Embedding(configuration.num_token_types, configuration.d_model)
            if configuration.num_token_types
            else None
        )
        self.embedding = PositionedEmbedding(
            configuration, configuration.max_length, normalised=configuration.norm == "post"
        )
        self.window = (
            TokenWindow(configuration.d_model, configuration.window, configuration.dropout)
            if configuration.window
            else None
        )
        self.stack = Stack(configuration, configuration.num_layers)

    def initialise(self) -> None:
        """Draws all weights."""
        initialise_truncated_normal(self)

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Computes the last layer's states.

        Args:
            input_ids: int64 (B, T).
            attention_mask: int64 (B, T), 1 at tokens and 0 at padding.
            token_type_ids: int64 (B, T); None: all 0. A model without token types ignores it.

        Returns:
            float (B, T, D).
        """
        embedded = self.tokens(input_ids)  # (B, T, D)
        if self.token_types is not None:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            embedded = embedded + self.token_types(types)
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        embedded = self.embedding(embedded, position_ids)
        if self.window is not None:
            embedded = self.window(embedded, attention_mask)
        attend = self.embedding.attention(padding_attention(attention_mask, self.kernel), position_ids)
        hidden_states: Tensor = self.stack(embedded, attend)
        return hidden_states


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(TextEncoderConfig):
    """Shape of an encoder with a head.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    head: EncoderHead = "sequence"
    """What the model predicts: a class of the text (`sequence`) or of every token (`token`)."""
    num_classes: int = 0
    """Classes, at least 1."""
    pooling: TextPooling = "first"
    """What a sequence head reads: the first token through BERT's tanh layer (`first`), or the tokens' mean (`mean`) or
    maximum (`max`)."""

    def __post_init__(self) -> None:
        TextEncoderConfig.__post_init__(self)  # not super(): the decorator makes a new class with slots
        self._check_integers("num_classes")
        self._check_choice("head", EncoderHead)
        self._check_choice("pooling", TextPooling)


@architecture("encoder", EncoderConfig, "text_classification", "token_classification")
class Encoder(TextEncoder):
    """Classifies a text or its tokens."""

    def __init__(self, configuration: EncoderConfig) -> None:
        super().__init__(configuration)
        self.head = _make_head(configuration)
        self.initialise()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Computes the logits; the arguments are those of `hidden_states`.

        Returns:
            float: (B, C) from a sequence head, (B, T, C) from a token head.
        """
        logits: Tensor = self.head(self.hidden_states(input_ids, attention_mask, token_type_ids), attention_mask)
        return logits

    @property
    def pooling(self) -> str:
        """The text's embedding: the `mean` or `max` of its tokens' states, or the state of its `first_token`."""
        if not isinstance(self.head, SequenceHead):
            return "mean"
        return "first_token" if self.head.pooling == "first" else self.head.pooling

    def logits_and_embedding(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes the logits of `forward` and an embedding of the text; the arguments are those of `hidden_states`.

        Returns:
            The logits, and float (B, D): what a sequence head pools; with another head, the mean of the tokens' states.
        """
        hidden_states = self.hidden_states(input_ids, attention_mask, token_type_ids)
        if isinstance(self.head, SequenceHead):
            pooled = self.head.pool(hidden_states, attention_mask)
            return self.head.classify(pooled), pooled
        return self.head(hidden_states, attention_mask), masked_mean(hidden_states, attention_mask)


def _make_head(configuration: EncoderConfig) -> nn.Module:
    d_model, num_classes, dropout = configuration.d_model, configuration.num_classes, configuration.dropout
    if configuration.head == "sequence":
        return SequenceHead(d_model, num_classes, configuration.pooling, dropout)
    return TokenHead(d_model, num_classes, dropout)


class TokenWindow(nn.Module):
    """Adds to each token a projection of it and its W neighbours on each side (Collobert et al. 2011, section 3.2).

    Attention has to learn from data which tokens are neighbours, and a few hundred thousand tokens teach it badly. The
    spelling of a word shows in neighbouring subwords.
    """

    def __init__(self, d_model: int, width: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.norm = nn.LayerNorm(d_model)
        self.project = nn.Linear((2 * width + 1) * d_model, d_model)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T, D) and (B, T) -> (B, T, D); padding is read as zeros."""
        own = self.norm(hidden_states) * attention_mask.to(hidden_states.dtype)[..., None]  # (B, T, D)
        padded = F.pad(own, (0, 0, self.width, self.width))  # (B, T + 2W, D)
        length = hidden_states.shape[1]
        neighbours = [padded[:, first : first + length] for first in range(2 * self.width + 1)]
        window = torch.cat(neighbours, dim=-1)  # (B, T, (2W + 1) D)
        read: Tensor = self.dropout(self.activation(self.project(window)))
        return hidden_states + read


class SequenceHead(nn.Module):
    """Classifies a text by its first token, through BERT's tanh layer, or by the mean or maximum of its tokens.

    The maximum of each feature over the text shows whether any token gave evidence for a class, wherever it stands and
    however long the text is (max-over-time pooling: Collobert et al. 2011, section 3.3; Kim 2014).
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
        """(B, T, D) and (B, T) -> (B, D)."""
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


def masked_mean(hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
    """Averages the states of all tokens but padding: (B, T, D) and (B, T) -> (B, D); zeros for a row without tokens."""
    weights = attention_mask.to(hidden_states.dtype)[..., None]  # (B, T, 1)
    return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


def masked_max(hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
    """Maximum over all tokens but padding: (B, T, D) and (B, T) -> (B, D); zeros for a row without tokens."""
    tokens = attention_mask.bool()[..., None]  # (B, T, 1)
    greatest = hidden_states.masked_fill(~tokens, torch.finfo(hidden_states.dtype).min).amax(dim=1)  # (B, D)
    return greatest.masked_fill(~tokens.any(dim=1), 0.0)
