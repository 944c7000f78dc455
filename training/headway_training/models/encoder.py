"""Encoder: reads a text in both directions (Devlin et al. 2019), under one of three heads.

B rows, T tokens, D model width, C classes, V vocabulary.

Deviations from BERT: a window of tokens may be read before the first layer; with token types, a text is all of type 0
unless the caller says otherwise; the head that told whether one sentence follows another is a sequence head like any
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headway_training.models.base import Model
from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.attention import padding_attention
from headway_training.models.parts.embeddings import PositionedEmbedding, TokenEmbedding
from headway_training.models.parts.heads import MaskedLanguageHead, SequenceHead, TextPooling, TokenHead, masked_mean
from headway_training.models.parts.initialisation import initialise_truncated_normal
from headway_training.models.parts.layer import Stack
from headway_training.models.parts.window import TokenWindow

EncoderHead = Literal["sequence", "token", "masked_language"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(LayerConfig):
    """Shape of an encoder.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    vocabulary_size: int
    """Tokens the model knows."""
    max_length: int
    """Most tokens of a text."""
    num_layers: int
    """Layers."""
    head: EncoderHead = "sequence"
    """What is answered: a class of the text (`sequence`), of every token (`token`), or the tokens that were masked
    (`masked_language`)."""
    num_classes: int = 0
    """Classes of a sequence or token head; 0 for a masked-language head, whose classes are the vocabulary."""
    pooling: TextPooling = "first"
    """What a sequence head reads: the first token through BERT's tanh layer (`first`), or the tokens' mean (`mean`) or
    maximum (`max`)."""
    num_token_types: int = 0
    """Kinds of tokens that have embeddings of their own (BERT: 2, for the texts of a pair); 0 for none."""
    window: int = 0
    """Tokens on each side that a token is read with before the first layer; 0 for none."""

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)  # not super(): slots make the dataclass anew
        self._check_integers("vocabulary_size", "max_length", "num_layers")
        self._check_integers("num_token_types", "num_classes", "window", minimum=0)
        self._check_choice("head", EncoderHead)
        self._check_choice("pooling", TextPooling)
        if self.head == "masked_language" and self.num_classes != 0:
            raise ValueError(f"num_classes must be 0 with a masked_language head, and is {self.num_classes}")
        if self.head != "masked_language" and self.num_classes < 1:
            raise ValueError(f"num_classes must be at least 1 with a {self.head} head, and is {self.num_classes}")


class Encoder(Model):
    """Classifies a text or its tokens.

    Starts from a normal distribution of standard deviation 0.02, cut off at two of them (BERT's own code).
    """

    def __init__(self, configuration: EncoderConfig) -> None:
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
        self.head = _make_head(configuration)
        initialise_truncated_normal(self)

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Computes the last layer's states.

        Args:
            input_ids: int64 (B, T).
            attention_mask: int64 (B, T), 1 at tokens and 0 at padding.
            token_type_ids: int64 (B, T); None: all 0. Not read by a model without token types.

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
        hidden_states: Tensor = self.stack(embedded, padding_attention(attention_mask, self.kernel))
        return hidden_states

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Computes the head's logits; the arguments are those of `hidden_states`.

        Returns:
            float: (B, C) of a sequence head, (B, T, C) of a token head, (B, T, V) of a masked-language head.
        """
        return self._logits(self.hidden_states(input_ids, attention_mask, token_type_ids), attention_mask)

    @property
    def pooling(self) -> str:
        """What an embedding is: the `mean` or `max` of the tokens, or the `first_token`."""
        if not isinstance(self.head, SequenceHead):
            return "mean"
        return "first_token" if self.head.pooling == "first" else self.head.pooling

    def logits_and_embedding(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes the logits of `forward`, and (B, D): what a sequence head tells classes by, else the tokens' mean.

        The arguments are those of `hidden_states`.
        """
        hidden_states = self.hidden_states(input_ids, attention_mask, token_type_ids)
        if isinstance(self.head, SequenceHead):
            pooled = self.head.pool(hidden_states, attention_mask)
            return self.head.classify(pooled), pooled
        return self._logits(hidden_states, attention_mask), masked_mean(hidden_states, attention_mask)

    def logits_at(self, places: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Computes a masked-language head's logits of some tokens alone, as the vocabulary's product is most of it.

        Args:
            places: bool (B, T), true at N tokens.
            input_ids: int64 (B, T).
            attention_mask: int64 (B, T), 1 at tokens and 0 at padding.

        Returns:
            float (N, V), row by row.

        Raises:
            TypeError: the model has another head.
        """
        if not isinstance(self.head, MaskedLanguageHead):
            raise TypeError(f"logits_at needs a masked_language head; the model has a {self.configuration.head} head")
        return self._logits(self.hidden_states(input_ids, attention_mask)[places], attention_mask)

    def _logits(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """What the head tells of the last layer's states."""
        if isinstance(self.head, MaskedLanguageHead):
            return self.tokens.logits(self.head(hidden_states)) + self.head.bias  # (..., V)
        logits: Tensor = self.head(hidden_states, attention_mask)
        return logits


def _make_head(configuration: EncoderConfig) -> nn.Module:
    d_model, num_classes, dropout = configuration.d_model, configuration.num_classes, configuration.dropout
    if configuration.head == "sequence":
        return SequenceHead(d_model, num_classes, configuration.pooling, dropout)
    if configuration.head == "token":
        return TokenHead(d_model, num_classes, dropout)
    return MaskedLanguageHead(d_model, configuration.vocabulary_size)
