"""A recurrent encoder-decoder with additive attention, for translation (Bahdanau et al. 2014, arXiv 1409.0473).

B sentences, G rows of a sentence (its beams; one in training), T target tokens, S source tokens, E width of embeddings,
H width of recurrent states, A width of the attention's hidden layer, V vocabulary. An annotation is the encoder's state
at a source token, 2H wide: one recurrent state from each direction.

Deviations from the paper:
- One vocabulary, and where `tie_embeddings` says so one matrix, serves both languages and the output.
- The reset gate is applied after the product with the state, as torch's GRU does, not before it.
- The output reads the newest state and not the one before it (the paper: t_i = U_o s_{i-1} + V_o E y_{i-1} + C_o c_i).
- Dropout on embeddings, on annotations where attention scores them, and on the input of the output layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from headway_training.models.architectures import architecture
from headway_training.models.base import Model, check_length
from headway_training.models.configuration import Configuration
from headway_training.models.parts.attention import MASKED_SCORE
from headway_training.models.parts.embeddings import TokenEmbedding

Recur = Callable[[nn.GRU, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Runs a bidirectional GRU over padded rows: inputs (B, S, E) and mask (B, S) -> states (B, S, 2H), forward and
backward ones side by side, and the last state of each direction, (2, B, H). Exported graphs are given another one."""


def recur_packed(gru: nn.GRU, inputs: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Runs a GRU over rows that are padded on the right, skipping the padding; states at padding are zeros."""
    if inputs.is_meta:  # only shapes are computed: there are no lengths to pack by
        whole: tuple[Tensor, Tensor] = gru(inputs)
        return whole
    lengths = attention_mask.sum(dim=1).cpu()
    packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
    states, last = gru(packed)
    padded, _ = pad_packed_sequence(states, batch_first=True, total_length=inputs.shape[1])
    return padded, last


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig(Configuration):
    """Shape of a recurrent encoder-decoder.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    vocabulary_size: int
    """Tokens of both languages together."""
    max_source_length: int
    """Most tokens of a source sentence."""
    max_target_length: int
    """Most tokens of a translation, its first token included."""
    d_embedding: int
    """Width of the embeddings, and of what the output projection reads."""
    d_state: int
    """Width of a recurrent state; an annotation of a source token is twice as wide."""
    d_attention: int
    """Width of the attention's hidden layer."""
    dropout: float = 0.0
    """Probability, in training, of dropping an element of embeddings, scored annotations and the output layers' input;
    0 to below 1."""
    tie_embeddings: bool = True
    """One matrix is the source embedding, the target embedding and the output projection; else there are three."""

    def __post_init__(self) -> None:
        self._check_integers("vocabulary_size", "max_source_length", "max_target_length")
        self._check_integers("d_embedding", "d_state", "d_attention")
        self._check_flags("tie_embeddings")
        self._check_share("dropout")


@architecture("recurrent", RecurrentConfig, "translation", shows_attention=False)
class RecurrentTranslator(Model):
    """Predicts the next target token from a source sentence and the target so far, one token after another.

    Starts from Xavier-uniform matrices, orthogonal ones between states, and embeddings of N(0, 1/E).
    """

    def __init__(self, configuration: RecurrentConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.max_source_length = configuration.max_source_length
        self.max_target_length = configuration.max_target_length
        embedding, state = configuration.d_embedding, configuration.d_state
        size, tied = (configuration.vocabulary_size, embedding), configuration.tie_embeddings
        self.tokens = TokenEmbedding(*size)
        self.source_tokens = None if tied else TokenEmbedding(*size)
        self.output = None if tied else nn.Linear(embedding, configuration.vocabulary_size, bias=False)
        self.encoder = nn.GRU(embedding, state, batch_first=True, bidirectional=True)
        self.first_state = nn.Linear(state, state)
        self.attention = AdditiveAttention(state, 2 * state, configuration.d_attention)
        self.token_gates = nn.Linear(embedding, 3 * state)
        self.context_gates = nn.Linear(2 * state, 3 * state, bias=False)
        self.state_gates = StateGates(state)
        self.readout = nn.Linear(state + embedding + 2 * state, 2 * embedding)
        self.dropout = nn.Dropout(configuration.dropout)
        self._initialise()

    def encode_source(
        self, input_ids: Tensor, attention_mask: Tensor, recur: Recur = recur_packed
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
        """Reads source sentences.

        Args:
            input_ids: int64 (B, S).
            attention_mask: int64 (B, S), 1 at tokens and 0 at padding.
            recur: runs the encoder's GRU.

        Returns:
            Two tuples: annotations (B, S, 2H) and attention's keys (B, S, A), which every step reads; and the first
            state (B, H), computed from the backward state at the first token (appendix A.2.2).
        """
        tokens = self.tokens if self.source_tokens is None else self.source_tokens
        annotations, last = recur(self.encoder, self._embed(tokens, input_ids), attention_mask)  # (B, S, 2H), (2, B, H)
        first_state = torch.tanh(self.first_state(last[1]))  # (B, H)
        return (annotations, self.attention.keys(self.dropout(annotations))), (first_state,)

    def step(
        self, token_ids: Tensor, states: tuple[Tensor], cross: tuple[Tensor, Tensor], source_mask: Tensor
    ) -> tuple[Tensor, tuple[Tensor], Tensor]:
        """Reads one target token a row.

        Args:
            token_ids: int64 (B, G).
            states: the state so far, (B, G, H).
            cross: annotations (B, S, 2H) and keys (B, S, A).
            source_mask: int64 (B, S), 1 at tokens and 0 at padding.

        Returns:
            Logits (B, G, V), the next state (B, G, H), and the attention to the source, (B, G, S).
        """
        embedded = self._embed(self.tokens, token_ids)  # (B, G, E)
        state, context, weights = self._advance(self.token_gates(embedded), states[0], cross, source_mask)
        return self._logits(state, embedded, context), (state,), weights

    def forward(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Predicts, at every target token, the one that follows it.

        What does not depend on the state is computed for the whole target at once.

        Args:
            source_ids: int64 (B, S).
            source_mask: int64 (B, S), 1 at tokens and 0 at padding.
            target_ids: int64 (B, T), padded on the right.

        Returns:
            Logits, float (B, T, V).

        Raises:
            ValueError: a sentence is longer than its limit.
        """
        check_length("a source sentence", source_ids.shape[1], self.max_source_length)
        check_length("a target sentence", target_ids.shape[1], self.max_target_length)
        cross, (first_state,) = self.encode_source(source_ids, source_mask)
        embedded = self._embed(self.tokens, target_ids)  # (B, T, E)
        state = first_state[:, None]  # (B, 1, H)
        states, contexts = [], []
        for gates in self.token_gates(embedded).split(1, dim=1):  # each (B, 1, 3H)
            state, context, _ = self._advance(gates, state, cross, source_mask)
            states.append(state)
            contexts.append(context)
        return self._logits(torch.cat(states, dim=1), embedded, torch.cat(contexts, dim=1))

    def _embed(self, tokens: TokenEmbedding, token_ids: Tensor) -> Tensor:
        """int64 (...) -> (..., E)."""
        embedded: Tensor = self.dropout(tokens(token_ids) * self.configuration.d_embedding**0.5)
        return embedded

    def _advance(
        self, token_gates: Tensor, state: Tensor, cross: tuple[Tensor, Tensor], source_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attends with the state (B, G, H); returns the next state, the context (B, G, 2H), the weights (B, G, S)."""
        annotations, keys = cross
        context, weights = self.attention(state, keys, annotations, source_mask)
        return self.state_gates(token_gates + self.context_gates(context), state), context, weights

    def _logits(self, state: Tensor, embedded: Tensor, context: Tensor) -> Tensor:
        """(..., H), (..., E), (..., 2H) -> (..., V): a maxout of pairs, projected (appendix A.2.2)."""
        pairs = self.readout(self.dropout(torch.cat((state, embedded, context), dim=-1)))  # (..., 2E)
        hidden = self.dropout(torch.maximum(*pairs.chunk(2, dim=-1)))  # (..., E)
        logits: Tensor = self.tokens.logits(hidden) if self.output is None else self.output(hidden)
        return logits

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                if "bias" in name:
                    nn.init.zeros_(parameter)
            elif "tokens" in name:
                nn.init.normal_(parameter, std=self.configuration.d_embedding**-0.5)
            elif "weight_hh" in name or name.startswith("state_gates"):
                for gate in parameter.data.chunk(3):
                    nn.init.orthogonal_(gate)
            else:
                nn.init.xavier_uniform_(parameter)


class AdditiveAttention(nn.Module):
    """Scores a state s and an annotation h by v^T tanh(W s + U h) (section 3.1 and appendix A.1.2).

    Args:
        d_state: H.
        d_annotation: 2H.
        d_attention: A.
    """

    def __init__(self, d_state: int, d_annotation: int, d_attention: int) -> None:
        super().__init__()
        self.query = nn.Linear(d_state, d_attention, bias=False)
        self.key = nn.Linear(d_annotation, d_attention)
        self.score = nn.Linear(d_attention, 1, bias=False)

    def keys(self, annotations: Tensor) -> Tensor:
        """U h of every annotation, (B, S, 2H) -> (B, S, A); computed once a sentence, as it does not depend on s."""
        keys: Tensor = self.key(annotations)
        return keys

    def forward(self, states: Tensor, keys: Tensor, annotations: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Attends to the source.

        Args:
            states: (B, G, H).
            keys: (B, S, A), as the method `keys` returns them.
            annotations: (B, S, 2H).
            source_mask: int64 (B, S), 1 at tokens and 0 at padding.

        Returns:
            The context, (B, G, 2H), and the weights, (B, G, S), which are 0 at padding.
        """
        hidden = torch.tanh(self.query(states)[:, :, None] + keys[:, None])  # (B, G, S, A)
        scores = self.score(hidden).squeeze(-1)  # (B, G, S)
        weights = torch.where(source_mask[:, None] != 0, scores, MASKED_SCORE).softmax(dim=-1)
        return weights @ annotations, weights


class StateGates(nn.Module):
    """The part of a gated recurrent unit that reads the state: its products and gates (Cho et al. 2014).

    Args:
        d_state: H.
    """

    def __init__(self, d_state: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d_state, 3 * d_state)

    def forward(self, gates: Tensor, state: Tensor) -> Tensor:
        """Computes the next state.

        Args:
            gates: (..., 3H), what the inputs add to the reset gate, the update gate and the candidate.
            state: (..., H).

        Returns:
            (..., H).
        """
        reset, update, candidate = gates.chunk(3, dim=-1)
        state_reset, state_update, state_candidate = self.linear(state).chunk(3, dim=-1)
        kept = torch.sigmoid(update + state_update)
        proposed = torch.tanh(candidate + torch.sigmoid(reset + state_reset) * state_candidate)
        following: Tensor = proposed + kept * (state - proposed)
        return following
