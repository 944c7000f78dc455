"""Prompts as rows of the denoiser's inputs: the index of a label, or the encoder states of a text.

T tokens of a padded text, D width of their states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from headway_server.batching import Batcher, BatchGraph, Tensors
from headway_server.batching.batcher import BatchedResults
from headway_server.diffusion.engine import LABEL, TEXT_MASK, Condition
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import TextTokenizer
from headway_server.serving.limits import check_text
from headway_server.tasks.job import Job

INPUT_IDS: Final = "input_ids"
ATTENTION_MASK: Final = "attention_mask"
_MOST_SHOWN: Final = 64

ImagePrompt: TypeAlias = int | tuple[int, ...]
"""A prompt as read: the index of a label, or the tokens of a text. Equal prompts give equal images."""


class Prompts(Protocol):
    """Reader of a model's prompts."""

    async def read(self, field: str, text: str) -> ImagePrompt:
        """Reads a prompt; an empty one is unconditional.

        Raises:
            InvalidInputError: The model does not know it; the message names the field.
        """
        ...

    async def conditions(self, prompts: Sequence[ImagePrompt], job: Job[Any]) -> list[Condition]:
        """Returns the denoiser's row of each prompt of a call; errors are those of `Job.batch`."""
        ...


class LabelPrompts:
    """Prompts that are labels."""

    def __init__(self, labels: Sequence[str]) -> None:
        """Takes the model's labels in order; the index after the last is unconditional."""
        self._labels = labels
        self._folded = [label.casefold() for label in labels]

    async def read(self, field: str, text: str) -> ImagePrompt:
        """Finds a label, ignoring case."""
        if not text:
            return len(self._labels)
        if text.casefold() not in self._folded:
            shown = ", ".join(self._labels[:_MOST_SHOWN])
            raise InvalidInputError(field, f"is {text[:_MOST_SHOWN]!r}; this model knows {shown}: name one of these")
        return self._folded.index(text.casefold())

    async def conditions(self, prompts: Sequence[ImagePrompt], job: Job[Any]) -> list[Condition]:  # noqa: ARG002 (nothing is waited for)
        """Returns the indices."""
        return [{LABEL: np.array(prompt, np.int64)} for prompt in prompts]


class TextPrompts:
    """Prompts that are texts, encoded to states of a fixed number of tokens.

    The shape of a denoiser's row is then constant, and the states of a text do not depend on a batch.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        encoder: Batcher,
        *,
        max_tokens: int,
        pad_id: int,
        max_bytes: int,
        outputs: Sequence[str],
        has_zero_negative: bool,
    ) -> None:
        """Takes the model's parts.

        Args:
            tokenizer: Tokenizer of the bundle.
            encoder: Runs the graph `text_encoder`, a text at a time.
            max_tokens: T.
            pad_id: Padding token.
            max_bytes: Maximum bytes of a prompt in UTF-8.
            outputs: Names of the encoder's outputs, which are inputs of the denoiser.
            has_zero_negative: True if an empty negative prompt has states of 0.
        """
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._max_tokens = max_tokens
        self._pad_id = pad_id
        self._max_bytes = max_bytes
        self._outputs = tuple(outputs)
        self._has_zero_negative = has_zero_negative

    async def read(self, field: str, text: str) -> ImagePrompt:
        """Tokenizes a text; no tokens stand for states of 0."""
        if self._has_zero_negative and not text and field == "negative_prompt":
            return ()
        if text:
            check_text(field, text, self._max_bytes)
        [encoded] = [one async for one in self._tokenizer.encode_each([text], add_special_tokens=True)]
        if len(encoded) > self._max_tokens:
            raise InvalidInputError(
                field, f"has {len(encoded)} tokens, the model reads at most {self._max_tokens}; shorten it"
            )
        return tuple(encoded.input_ids.tolist())

    async def conditions(self, prompts: Sequence[ImagePrompt], job: Job[Any]) -> list[Condition]:
        """Runs the text encoder."""
        rows = [text_row(prompt, self._max_tokens, self._pad_id) for prompt in prompts if isinstance(prompt, tuple)]
        encoded: BatchedResults[Tensors] = await job.batch(
            self._encoder,
            rows,
            outputs=self._outputs,
            num_bytes=sum(tensor.nbytes for row in rows for tensor in row.values()),
            num_read=sum(len(prompt) for prompt in prompts if isinstance(prompt, tuple)),
        )
        return [
            {name: array if prompt else np.zeros_like(array) for name, array in found.items()}
            | {TEXT_MASK: row[ATTENTION_MASK]}
            for prompt, found, row in zip(prompts, encoded.results, rows, strict=True)
        ]


def text_row(token_ids: Sequence[int], max_tokens: int, pad_id: int) -> Tensors:
    """Returns a row of the text encoder's inputs: `input_ids` and `attention_mask`, int64 (T,)."""
    count = len(token_ids)
    input_ids = np.full(max_tokens, pad_id, np.int64)
    input_ids[:count] = token_ids
    return {INPUT_IDS: input_ids, ATTENTION_MASK: (np.arange(max_tokens) < count).astype(np.int64)}


def text_states_shapes(encoder: BatchGraph) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a text's outputs: its states, (T, D), and perhaps a pooled one, (P,)."""
    return {
        spec.name: tuple(axis for axis in spec.shape[1:] if isinstance(axis, int))
        for spec in encoder.session.graph.outputs
    }
