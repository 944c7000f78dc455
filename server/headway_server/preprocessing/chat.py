"""A conversation to the prompt that continues it, by the bundle's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_server.bundles.manifest import SpecialTokens

Role: TypeAlias = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation as a model reads it."""

    text: str
    """The prompt as the template writes it, for people: its tokens are not found by encoding it."""
    input_ids: NDArray[np.int64]
    """(T,)"""


class ChatTemplate:
    """The chat template of a bundle, with the bundle's tokenizer: a conversation becomes token ids, not a text.

    Ids, because a text cannot tell the special tokens that the template writes from the same characters in what a
    person wrote: those are text here and stay text. So what `encode` gives is the prompt; encoding its `text` is not.
    """

    @classmethod
    def load(cls, file: Path, *, tokenizer_file: Path, special_tokens: SpecialTokens) -> ChatTemplate:
        """Loads a `chat_template.jinja` and tries it with a small conversation.

        Raises:
            BundleError: It is too large, is not a template, or does not work with the tokenizer.
        """
        raise NotImplementedError

    async def encode(self, conversations: Sequence[Sequence[ChatTurn]], *, fields: Sequence[str]) -> list[ChatPrompt]:
        """Makes the prompts of conversations, off the event loop, each ready for the model's next turn.

        Args:
            conversations: Each of at least one turn.
            fields: What the request calls each of them, such as `conversations[3]`, for messages.

        Raises:
            InvalidInputError: The template refuses a conversation, or makes too long a prompt of it.
            BundleError: The template fails; the caller of the server learns nothing of it but INTERNAL.
        """
        raise NotImplementedError
