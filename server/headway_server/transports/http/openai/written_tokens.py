"""Tokens in answers: their texts, log-probabilities and counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headway_server.decoding.sequence import TokenLogProbability
from headway_server.preprocessing.text import REPLACEMENT
from headway_server.tasks.generation.model import GeneratedText, GenerationModel


class TokenWriter:
    """Formats a model's tokens."""

    def __init__(self, model: GenerationModel, *, unknown_bytes: list[int] | None = None) -> None:
        """Formats tokens of a model; those whose bytes are unknown have the given ones."""
        self._model = model
        self._unknown_bytes = unknown_bytes

    def text(self, token_id: int, prefix: str = "") -> tuple[str, bytes | None]:
        r"""Formats a token, and its bytes if known; a part of a character as `\xe2\x82` after the prefix."""
        text, data = self._model.token_text(token_id), self._model.token_bytes(token_id)
        if data is not None and REPLACEMENT in text and data != text.encode():
            text = prefix + "".join(f"\\x{byte:02x}" for byte in data)
        return text, data

    def entries(self, tokens: Iterable[TokenLogProbability], number: int | None = None) -> list[dict[str, Any]]:
        """Formats tokens with their log-probabilities, each with the `number` likeliest ones at its position."""
        return [
            self._entry(token.token_id, token.log_probability)
            | {"top_logprobs": [self._entry(token_id, value) for token_id, value in token.top_tokens[:number]]}
            for token in tokens
        ]

    def ranks(self, tokens: Iterable[TokenLogProbability], number: int) -> list[dict[str, Any] | None]:
        """Formats tokens of a prompt in vLLM's form: itself and the `number` likeliest ones by id; None for the first.

        The rank of a token that is not among the likeliest is None.
        """
        return [None if token.log_probability is None else self._ranked(token, number) for token in tokens]

    def _ranked(self, token: TokenLogProbability, number: int) -> dict[str, Any]:
        found = {token.token_id: (token.log_probability, None)} | {
            token_id: (value, rank) for rank, (token_id, value) in enumerate(token.top_tokens[:number], start=1)
        }
        return {
            str(token_id): {"logprob": value, "rank": rank, "decoded_token": self._model.token_text(token_id)}
            for token_id, (value, rank) in found.items()
        }

    def _entry(self, token_id: int, log_probability: float | None) -> dict[str, Any]:
        text, data = self.text(token_id)
        return {"token": text, "logprob": log_probability, "bytes": self._unknown_bytes if data is None else list(data)}

    def __repr__(self) -> str:
        return f"TokenWriter({self._model!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Token counts of an answer."""

    num_read: int
    """Tokens of the prompts; samples share one."""
    num_cached: int = 0
    """Of these, tokens that were not computed."""
    num_new: int
    """Tokens produced."""

    @classmethod
    def of(cls, texts: Iterable[GeneratedText]) -> TokenCounts:
        """Counts the tokens of all texts of a call."""
        texts = list(texts)
        return cls(
            num_read=sum(text.num_prompt_tokens for text in texts if text.sample == 0),
            num_cached=sum(text.result.num_cached_tokens for text in texts if text.sample == 0),
            num_new=sum(text.result.num_new_tokens for text in texts),
        )

    def usage(self) -> dict[str, Any]:
        """Formats them as of completions and chat completions."""
        return {
            "prompt_tokens": self.num_read,
            "completion_tokens": self.num_new,
            "total_tokens": self.num_read + self.num_new,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
