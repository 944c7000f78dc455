"""A model that speaks: a language model of text and of a codec's codes (AudioLM, Borsos et al. 2023; Bark).

B rows, T tokens, D model width, V vocabulary, F frames, K books, C codes of a book, A tokens of texts.

One vocabulary holds the A tokens of texts and, after them, the C codes of every book, book after book. A sequence is
the codes of a recording whose voice is to be taken, or none, then `<bos>`, the text, `<speech>`, and the codes of what
is said, frame by frame and in a frame book by book, until `<eos>`. So each code is predicted from all before it
(Copet et al. 2023, table 1: flattened; docs/decisions/codes-a-step.md says why not several codes a step).

Deviations from AudioLM and Bark: one stage, from text to codes, without semantic tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headway_training.models.architectures import architecture
from headway_training.models.base import AttentionKind
from headway_training.models.codec import Codec, CodecConfig
from headway_training.models.gpt import GPT, GPTConfig
from headway_training.models.parts.attention import Attend, causal_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSynthesizerConfig(CodecConfig):
    """Shape of a codec and of the language model of its codes.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    vocabulary_size: int
    """A, tokens of texts, special ones included."""
    num_voices: int
    """Voices that the model can be asked for by name."""
    history_frames: int = 50
    """Frames of a recording that a voice is taken from."""
    max_text_length: int = 200
    """Most tokens of a text, `<bos>` and `<speech>` included."""
    max_length: int
    """Most tokens of a sequence."""
    num_layers: int
    """Layers of the language model."""
    d_model: int
    """D."""
    num_heads: int
    """Attention heads."""
    d_ff: int
    """Inner width of the feed-forward networks."""
    dropout: float = 0.0
    """Of the language model, in training; 0 to below 1."""

    def __post_init__(self) -> None:
        CodecConfig.__post_init__(self)  # not super(): the decorator makes a new class with slots
        self._check_integers("vocabulary_size", "num_voices", "history_frames", "max_text_length")
        self.language_model()
        least = self.history_frames * self.num_books + self.max_text_length + self.num_books + 1
        if self.max_length < least:
            raise ValueError(
                f"max_length must be at least {least}, which a voice ({self.history_frames} x {self.num_books}), a "
                f"text ({self.max_text_length}) and a frame take, and is {self.max_length}"
            )

    def language_model(self) -> GPTConfig:
        """The shape of the language model."""
        return GPTConfig(
            vocabulary_size=self.vocabulary_size + self.num_books * self.codebook_size,
            max_length=self.max_length,
            num_layers=self.num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            dropout=self.dropout,
            positions="rotary",
        )


@architecture("speech_synthesizer", SpeechSynthesizerConfig, "speech_synthesis")
class SpeechSynthesizer(Codec):
    """A codec, whose weights a codec's checkpoint gives, and a language model of texts and its codes."""

    configuration: SpeechSynthesizerConfig
    voices: Tensor

    def __init__(self, configuration: SpeechSynthesizerConfig) -> None:
        super().__init__(configuration)
        self.max_length = configuration.max_length
        self.max_prompt_length = configuration.history_frames * configuration.num_books + configuration.max_text_length
        self.language_model = GPT(configuration.language_model())
        shape = configuration.num_voices, configuration.history_frames, configuration.num_books
        self.register_buffer("voices", torch.zeros(*shape, dtype=torch.int64))

    def use_attention(self, kind: AttentionKind) -> Self:
        """Chooses the language model's kernel, as `Model.use_attention` does."""
        self.language_model.use_attention(kind)
        return super().use_attention(kind)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """As `GPT.hidden_states`: (B, T) -> (B, T, D)."""
        return self.language_model.hidden_states(input_ids, position_ids, attend)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        return self.language_model.logits(hidden_states)

    def predict(self, input_ids: Tensor, chosen: Tensor | slice = slice(None)) -> Tensor:
        """int64 (B, T) -> logits (B, T, V) of the token that follows each; padding belongs on the right.

        With `chosen`, bool (B, T), those of these tokens alone, (N, V).
        """
        model, positions = self.language_model, torch.arange(input_ids.shape[1], device=input_ids.device)
        states = model.hidden_states(input_ids, positions, causal_attention(model.kernel))
        return model.logits(states[chosen])
