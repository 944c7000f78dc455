"""A conversation to the prompt that continues it, by the bundle's chat template.

Special tokens are only what the template writes. What people write stays text, even if it reads like a special token:
the prompt is written with marks (template/marked_text.py), each special token of the template's becomes one character
that no text has, and the tokenizer that reads the result knows special tokens by those characters alone. In all else
that tokenizer is the bundle's own, so for any other conversation the ids are those of the written prompt.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from jinja2 import Template
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headway_server.bundles.manifest import SpecialTokens
from headway_server.errors import BundleError, InvalidInputError
from headway_server.preprocessing.pool import text_pool
from headway_server.preprocessing.template import (
    MAX_TEXT_LENGTH,
    LimitError,
    MarkedText,
    RefusedConversationError,
    TemplateEnvironment,
    write,
)

Role: TypeAlias = Literal["system", "user", "assistant"]

MAX_TEMPLATE_BYTES: Final = 64 * 2**10
"""Largest template that is loaded; those of models with tools have up to 20 KiB."""
_FIRST_STAND_IN: Final = 0x50000
"""The first of the characters that stand for special tokens, of a plane of Unicode where none is assigned."""
_MAX_REASON_LENGTH = 300


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


_SAMPLES: Final = (
    (ChatTurn(role="user", content="Hello there."),),
    (
        ChatTurn(role="user", content="Hello there."),
        ChatTurn(role="assistant", content="Good day. What is it?"),
        ChatTurn(role="user", content="A question: 1 + 1?"),
    ),
    (ChatTurn(role="system", content="Be brief."), ChatTurn(role="user", content="Hello there.")),
)
"""Conversations that a template is tried with; it may refuse some, such as those with a system's turn."""


class ChatTemplate:
    """The chat template of a bundle, with the bundle's tokenizer: a conversation becomes token ids, not a text.

    Ids, because a text cannot tell the special tokens that the template writes from the same characters in what a
    person wrote: those are text here and stay text. So what `encode` gives is the prompt; encoding its `text` is not.

    Safe to use from several threads: nothing of it changes after loading.
    """

    def __init__(self, template: Template, *, file: Path, reader: _GuardedTokenizer, names: dict[str, str]) -> None:
        """Makes a template of its parts; `load` makes the parts."""
        self._template = template
        self._file = file
        self._reader = reader
        self._names = names

    @classmethod
    def load(cls, file: Path, *, tokenizer_file: Path, special_tokens: SpecialTokens) -> ChatTemplate:
        """Loads a `chat_template.jinja` and tries it with small conversations.

        Args:
            file: The template.
            tokenizer_file: The bundle's `tokenizer.json`.
            special_tokens: Of the bundle: a template knows `bos` and `eos` as `bos_token` and `eos_token`.

        Raises:
            BundleError: It is too large, is not a template, or does not work with the tokenizer.
        """
        source = _read(file)
        tokenizer = _open_tokenizer(tokenizer_file)
        try:
            template = TemplateEnvironment().from_string(source)
        except Exception as error:  # besides Jinja's own, what deep nesting leads to
            raise BundleError(f"{file}: is not a template ({error}); correct it and export the model again") from error
        ids = {"bos_token": special_tokens.bos, "eos_token": special_tokens.eos}
        names = {name: (tokenizer.id_to_token(i) or "") if i is not None else "" for name, i in ids.items()}
        chat = cls(template, file=file, reader=_GuardedTokenizer(tokenizer, source, tokenizer_file), names=names)
        chat._try(tokenizer)
        return chat

    async def encode(self, conversations: Sequence[Sequence[ChatTurn]], *, fields: Sequence[str]) -> list[ChatPrompt]:
        """Makes the prompts of conversations, off the event loop, each ready for the model's next turn.

        Nothing follows the first refusal, and what has not begun when the caller goes is not done.

        Args:
            conversations: Each of at least one turn.
            fields: What the request calls each of them, such as `conversations[3]`, for messages.

        Raises:
            InvalidInputError: The template refuses a conversation, or makes too long a prompt of it.
            BundleError: The template fails; the caller of the server learns nothing of it but INTERNAL.
        """
        loop = asyncio.get_running_loop()
        return [
            await loop.run_in_executor(text_pool(), self.prompt, turns, field)
            for turns, field in zip(conversations, fields, strict=True)
        ]

    def prompt(self, turns: Sequence[ChatTurn], field: str) -> ChatPrompt:
        """Makes the prompt of one conversation, on the caller's thread; arguments and errors are those of `encode`."""
        length = sum(len(turn.content) for turn in turns)
        if length > MAX_TEXT_LENGTH:
            raise InvalidInputError(
                field, f"has {length:,} characters, a prompt at most {MAX_TEXT_LENGTH:,}; leave out older turns"
            )
        try:
            return self._make(turns)
        except RefusedConversationError as error:
            reason = str(error)[:_MAX_REASON_LENGTH]
            raise InvalidInputError(field, f"is not one the model's chat template has a prompt for: {reason}") from None
        except LimitError as error:
            raise InvalidInputError(
                field, f"is too long for the model's chat template, which {error}; leave out older turns"
            ) from None
        except Exception as error:  # what a wrong template leads to can be of any kind
            raise self._failure(error) from error

    def _make(self, turns: Sequence[ChatTurn]) -> ChatPrompt:
        text = self._write(turns)
        return ChatPrompt(text="".join(run for run, _ in text.runs()), input_ids=self._reader.encode(text))

    def _failure(self, error: Exception) -> BundleError:
        return BundleError(f"{self._file}: fails ({error}); correct it and export the model again")

    def _write(self, turns: Sequence[ChatTurn]) -> MarkedText:
        messages = [{"role": turn.role, "content": MarkedText(turn.content)} for turn in turns]
        return write(
            self._template,
            messages=messages,
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **self._names,
        )

    def _try(self, tokenizer: Tokenizer) -> None:
        """Checks that prompts can be made, and that special tokens are found where the bundle's tokenizer finds them.

        Raises:
            BundleError: No sample can be made a prompt of, or its special tokens are lost.
        """
        refusals: list[str] = []
        for turns in _SAMPLES:
            try:
                prompt = self._make(turns)
            except RefusedConversationError as error:
                refusals.append(str(error))
                continue
            except Exception as error:  # what a wrong template leads to can be of any kind
                raise self._failure(error) from error
            expected = tokenizer.encode(prompt.text, add_special_tokens=False).ids
            if prompt.input_ids.tolist() != expected:
                raise BundleError(
                    f"{self._file}: its special tokens cannot be told from what people write; join them to other text "
                    "with + or ~ or write them where they stand, and export the model again"
                )
        if len(refusals) == len(_SAMPLES):
            raise BundleError(f"{self._file}: has a prompt for no conversation ({refusals[0]}); correct it")

    def __repr__(self) -> str:
        return f"ChatTemplate({self._file}, {self._reader!r})"


class _GuardedTokenizer:
    """The bundle's tokenizer, but that control tokens are known only by stand-ins: characters that no text has.

    Control tokens are those added to the vocabulary as special, and added ones that the template names.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, file: Path) -> None:
        added = tokenizer.get_added_tokens_decoder()
        control = sorted(
            token_id
            for token_id, token in added.items()
            if token.special or (token.content in source and not token.content.isspace())
        )
        self._stand_ins = {added[token_id].content: chr(_FIRST_STAND_IN + n) for n, token_id in enumerate(control)}
        longest_first = sorted(self._stand_ins, key=len, reverse=True)
        self._control = _any_of(longest_first)
        self._forged = _any_of(self._stand_ins.values())
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(self._renamed(json.loads(tokenizer.to_str()))))
        except Exception as error:  # the library raises bare Exception
            raise BundleError(f"{file}: cannot be used for a chat ({error}); export the model without one") from error
        for token_id in control:
            found = self._tokenizer.token_to_id(self._stand_ins[added[token_id].content])
            if found != token_id:
                raise BundleError(f"{file}: holds the added token {added[token_id].content} twice; remove one")

    def encode(self, text: MarkedText) -> NDArray[np.int64]:
        """Returns the ids of a written prompt, (T,)."""
        plain = "".join(self._guarded(run, is_content) for run, is_content in text.runs())
        return np.asarray(self._tokenizer.encode(plain, add_special_tokens=False).ids, np.int64)

    def _guarded(self, run: str, is_content: bool) -> str:
        if is_content:
            return self._forged.sub("\N{REPLACEMENT CHARACTER}", run)
        return self._control.sub(lambda match: self._stand_ins[match[0]], run)

    def _renamed(self, content: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of a `tokenizer.json` with the stand-ins in place of control tokens."""
        for token in content["added_tokens"]:
            token["content"] = self._name(token["content"])
        model = content["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {self._name(token): token_id for token, token_id in vocabulary.items()}
        else:  # of a unigram model: pieces and their scores
            model["vocab"] = [(self._name(piece), score) for piece, score in vocabulary]
        if model.get("unk_token") is not None:
            model["unk_token"] = self._name(model["unk_token"])
        return content | {"post_processor": None, "truncation": None, "padding": None}

    def _name(self, token: str) -> str:
        return self._stand_ins.get(token, token)

    def __repr__(self) -> str:
        return f"{len(self._stand_ins)} control tokens"


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the first of `texts` that is there; nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _read(file: Path) -> str:
    try:
        size = file.stat().st_size
        if size > MAX_TEMPLATE_BYTES:
            raise BundleError(f"{file}: has {size:,} bytes, a chat template at most {MAX_TEMPLATE_BYTES:,}; shorten it")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{file}: cannot be read ({error}); export the model again") from error


def _open_tokenizer(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise BundleError(f"{file}: cannot be read as a tokenizer ({error}); export the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
