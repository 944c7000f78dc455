"""Nats per character of a running text, from the log-probabilities that a server answers of prompts.

The definition is that of docs/checkpoint.md, windows of the model's length at half a window's stride, but for two
things that a caller without the tokenizer cannot do: the text is cut before white space and not after a number of
tokens, and a window has one token less, as a prompt leaves room for an answer. The figures agree to a few thousandths
(0.002 on the shipped model).

A cut between a character and the white space after it does not change how byte-level tokenizers read the text. Where a
stretch of text as long as half a window has no white space, it is cut anywhere, and is read a little worse there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway_client import Client, GeneratedText, Model
from headway_training.errors import EvaluationError
from headway_training.served.sender import Sender


@dataclass(frozen=True, slots=True)
class TextScore:
    """What a model makes of a text."""

    nats: float
    """Negative log-likelihood of the tokens that were predicted."""
    num_characters: int
    """Characters that they stand for."""
    num_tokens: int
    """How many they are."""


class TextScorer:
    """Scores texts by one served model.

    Args:
        client: The client.
        model: The model.
        sender: Sends the requests.
    """

    def __init__(self, client: Client, model: Model, sender: Sender) -> None:
        self._client = client
        self._model = model
        self._sender = sender
        self._limit = min(model.max_input_token_count, model.max_token_count - 1)

    def score(self, text: str) -> TextScore:
        """Scores a text.

        Raises:
            EvaluationError: It is a single token.
            HeadwayError: A call fails.
        """
        pieces, counts = self._cut(text)
        windows = [_window(pieces, counts, index, self._limit) for index in range(len(pieces))]
        inputs = list(zip(windows, counts, strict=True))
        scores = self._sender.send(inputs, self._score_windows)
        first_token = scores[0][1]
        num_tokens = sum(counts) - 1
        if num_tokens == 0:
            raise EvaluationError("the text is a single token; nats per character need at least 2")
        return TextScore(sum(nats for nats, _ in scores), len(text) - len(first_token), num_tokens)

    def _cut(self, text: str) -> tuple[list[str], list[int]]:
        """Cuts a text into pieces of about half a window, and counts the tokens of each."""
        half = (self._limit + 1) // 2
        (sample,) = self._ask([text[:half]])
        size = max(1, round(half * min(len(text), half) / sample.prompt_token_count))
        pieces = cut_before_spaces(text, size)
        while True:
            answers = self._sender.send(pieces, self._ask, quiet=True)
            # The first token of a window is not predicted, so a piece must be shorter than one.
            pairs = zip(answers, pieces, strict=True)
            too_long = [answer.prompt_token_count >= self._limit and len(piece) > 1 for answer, piece in pairs]
            if not any(too_long):
                return pieces, [answer.prompt_token_count for answer in answers]
            pieces = [
                part
                for piece, split in zip(pieces, too_long, strict=True)
                for part in (cut_before_spaces(piece, (len(piece) + 1) // 2) if split else [piece])
            ]

    def _ask(self, prompts: Sequence[str], *, score: bool = False) -> Sequence[GeneratedText]:
        """Has prompts read, with as little after them as can be; longer ones lose their beginning."""
        answer = self._client.generate_text(
            prompts,
            model=self._model.name,
            model_version=self._model.version,
            max_new_tokens=1,
            temperature=0.0,
            truncate=True,
            prompt_log_probabilities=score,
        )
        return answer.results

    def _score_windows(self, windows: Sequence[tuple[str, int]]) -> Sequence[tuple[float, str]]:
        """Negative log-likelihood of the last tokens of each window, as many as it says; and its first token."""
        answers = self._ask([text for text, _ in windows], score=True)
        scores = []
        for (_, count), answer in zip(windows, answers, strict=True):
            tokens = answer.prompt_tokens[-count:]
            nats = -sum(token.log_probability for token in tokens if token.log_probability is not None)
            scores.append((nats, answer.prompt_tokens[0].text))
        return scores


def _window(pieces: Sequence[str], counts: Sequence[int], index: int, limit: int) -> str:
    """A piece with enough text before it to fill a window, more than which the server cuts off."""
    first, num_tokens = index, counts[index]
    while first > 0 and num_tokens < limit:
        first -= 1
        num_tokens += counts[first]
    return "".join(pieces[first : index + 1])


def cut_before_spaces(text: str, size: int) -> list[str]:
    """Cuts a text into pieces of about `size` characters, before white space that follows something else.

    Where there is none within half of `size` behind the place, the piece is cut at `size` characters.
    """
    pieces, start = [], 0
    while len(text) - start > size:
        end = start + size
        for candidate in range(end, start + size // 2, -1):
            if text[candidate].isspace() and not text[candidate - 1].isspace():
                end = candidate
                break
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]
