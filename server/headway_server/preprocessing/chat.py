"""A conversation to the prompt that continues it, by the bundle's chat template.

The template is a program that the operator trusts, as the graphs beside it. It runs as transformers runs it, in Jinja's
immutable sandbox (`template.py`), with a cap on how much it writes and how long it takes.

What people write is not trusted: "<|im_end|>" in it must stay text. So while the template runs, a twin stands in what
people wrote for every character that a special token begins or ends with: a symbol that hardly any text has, and that
Python prints as it is. The special tokens in what the template then writes are its own. Each of them becomes one
stand-in character, twins become what they were, and the tokenizer that reads the result knows special tokens by their
stand-ins alone. In all else that tokenizer is the bundle's own, so for any other conversation the ids are those of the
written prompt.

The assistant's turns are the model's own text, by the caller's word. They keep the tokens that mark thinking, such as
`</think>`: templates cut an earlier turn there.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from jinja2 import Template, meta, nodes
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headway_server.bundles.manifest import SpecialTokens
from headway_server.errors import BundleError, InvalidInputError, MachineBusyError, no_panics
from headway_server.preprocessing.pool import text_pool
from headway_server.preprocessing.reasoning import ReasoningForm, marks_thinking
from headway_server.preprocessing.template import (
    CPU_LIMIT_S,
    MAX_TEXT_LENGTH,
    MEMORY_LIMIT_BYTES,
    PRINTED_TWINS,
    UNASSIGNED_TWINS,
    WALL_LIMIT_S,
    LimitError,
    RefusedConversationError,
    make_environment,
    passes_trial,
    write,
)
from headway_server.preprocessing.text import open_tokenizer
from headway_server.preprocessing.tools import CallForm, NoToolsError, Tool, ToolCall, find_form

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

MAX_TEMPLATE_BYTES: Final = 64 * 2**10
"""Largest template that is loaded; those of models with tools have up to 20 KiB."""
_FIRST_STAND_IN: Final = 0x50000
"""The first of the characters that stand for special tokens, of a plane of Unicode where none is assigned."""
_REASON_LENGTH: Final = 300
_MAX_NAMES_SHOWN: Final = 10
_MAX_NAME_SHOWN: Final = 64
_GIVEN: Final = ("messages", "add_generation_prompt", "tools")
"""What a template is given of every conversation, beside special tokens by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One turn of a conversation."""

    role: Role
    content: str
    reasoning: str = ""
    """Of the assistant: what it thought before it said `content`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of the assistant."""
    tool_call_id: str = ""
    """Of a tool, whose result the content is: the call that it answers."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All that a person may have written."""
        return (
            self.content,
            self.reasoning,
            *(text for call in self.tool_calls for text in (call.name, call.arguments)),
        )

    def shown(self, disguise: Callable[[Any], Any]) -> dict[str, Any]:
        """Returns the turn as templates expect it, with all that people wrote disguised."""
        calls = {"tool_calls": [call.shown(disguise) for call in self.tool_calls]} if self.tool_calls else {}
        answered = {"tool_call_id": disguise(self.tool_call_id)} if self.role == "tool" else {}
        thought = {"reasoning_content": disguise(self.reasoning)} if self.reasoning else {}
        return {"role": self.role, "content": disguise(self.content), **thought, **calls, **answered}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation as a model reads it."""

    text: str
    """The prompt as the template writes it, for people; encoding it may give other tokens."""
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
    """The chat template of a bundle, with the bundle's tokenizer: makes token ids of a conversation.

    A text would not do: special tokens that the template writes look like the same characters in what a person wrote.
    So the prompt is the ids that `encode` gives; encoding its `text` gives others.

    Safe to use from several threads: nothing changes after loading.
    """

    def __init__(self, template: Template, *, file: Path, tokens: _ControlTokens, names: dict[str, str]) -> None:
        """Makes a template of its parts; `load` makes the parts."""
        self._template = template
        self._file = file
        self._tokens = tokens
        self.names = names
        """Special tokens that it is given, by name."""
        self._form: CallForm | NoToolsError
        self._reasoning: ReasoningForm | None = None
        self.variables: frozenset[str] = frozenset()
        """Names that the template reads and does not set itself."""
        self._no_tools: list[Tool] | None = None

    @property
    def call_form(self) -> CallForm:
        """How the model calls tools.

        Raises:
            NoToolsError: It does not, by its template.
        """
        if isinstance(self._form, NoToolsError):
            raise self._form
        return self._form

    @property
    def reasoning_form(self) -> ReasoningForm | None:
        """How the model marks what it thinks; None if its template names no such marks."""
        return self._reasoning

    def check_variables(self, variables: Mapping[str, Any], field: str) -> None:
        """Checks what a caller gives the template beside a conversation; the request calls it `field`.

        Raises:
            InvalidInputError: The template reads no variable of such a name, or the server gives it.
        """
        own = frozenset((*_GIVEN, *self.names, *self._template.environment.globals))
        for name in variables:
            if name in own:
                raise InvalidInputError(f"{field}.{name}", "is given by the server; leave it out")
            if name not in self.variables:
                known = ", ".join(sorted(self.variables - own)[:_MAX_NAMES_SHOWN]) or "none"
                raise InvalidInputError(
                    f"{field}.{name[:_MAX_NAME_SHOWN]}",
                    f"is not read by the model's chat template, which reads {known}; leave it out",
                )

    @classmethod
    def load(cls, file: Path, *, tokenizer_file: Path, special_tokens: SpecialTokens) -> ChatTemplate:
        """Loads a `chat_template.jinja` and tries it with small conversations.

        Args:
            file: The template.
            tokenizer_file: The bundle's `tokenizer.json`.
            special_tokens: Of the bundle: a template knows `bos`, `eos`, `pad` and `unk` as `bos_token` and so on.

        Raises:
            BundleError: It is too large, is not a template, or does not work with the tokenizer.
            MachineBusyError: The machine is too busy to tell.
        """
        source = _read(file)
        try:
            passes = passes_trial(source)
        except subprocess.TimeoutExpired as late:
            raise MachineBusyError(
                f"{file}: could not be tried within {WALL_LIMIT_S:g} s, because the machine is busy; load the model "
                "again when it is not"
            ) from late
        if not passes:
            raise BundleError(
                f"{file}: takes more than {CPU_LIMIT_S} s of a processor or {MEMORY_LIMIT_BYTES >> 20} MiB for some "
                "conversations; correct it and export the model again"
            )
        tokenizer = open_tokenizer(tokenizer_file)
        environment = make_environment()
        try:
            parsed = environment.parse(source)
            template = environment.from_string(source)
        except Exception as error:  # besides Jinja's own, what deep nesting leads to
            raise BundleError(f"{file}: is not a template ({error}); correct it and export the model again") from error
        names = {"bos_token": "", "eos_token": ""}
        for name in ("bos", "eos", "pad", "unk"):
            if (index := getattr(special_tokens, name)) is not None and (token := tokenizer.id_to_token(index)):
                names[f"{name}_token"] = token
        tokens = _ControlTokens(tokenizer, source + "".join(names.values()), parsed, tokenizer_file)
        chat = cls(template, file=file, tokens=tokens, names=names)
        chat.variables = frozenset(meta.find_undeclared_variables(parsed))
        chat._try(tokenizer)
        special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        try:
            ends = [*special_tokens.more_eos, *([] if special_tokens.eos is None else [special_tokens.eos])]
            chat._form = find_form(chat._write, ChatTurn, special, ends)
        except NoToolsError as problem:
            chat._form = problem
        chat._reasoning = ReasoningForm.find(source, tokenizer)
        return chat

    async def encode(
        self,
        conversations: Sequence[Sequence[ChatTurn]],
        *,
        fields: Sequence[str],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[ChatPrompt]:
        """Makes the prompts of conversations, off the event loop, each ready for the model's next turn.

        Stops at the first refusal, and when the caller goes.

        Args:
            conversations: Each of at least one turn.
            fields: What the request calls each of them, such as `conversations[3]`, for messages.
            tools: What the model is shown, if it has a `call_form`.
            variables: Values of JSON that the template is given by these names, which `check_variables` has passed.

        Raises:
            InvalidInputError: The template refuses a conversation, makes too long a prompt of it, or fails with tools
                or variables, whose shape is the caller's.
            BundleError: The template fails without them.
        """
        loop = asyncio.get_running_loop()
        return [
            await loop.run_in_executor(
                text_pool(_length(turns, tools, variables)), self.prompt, turns, field, tools, variables
            )
            for turns, field in zip(conversations, fields, strict=True)
        ]

    def prompt(
        self,
        turns: Sequence[ChatTurn],
        field: str,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Makes the prompt of one conversation, on the caller's thread; arguments and errors are those of `encode`."""
        for index, turn in enumerate(turns):
            if (turn.role == "tool" or turn.tool_calls) and isinstance(self._form, NoToolsError):
                raise InvalidInputError(
                    f"{field}.messages[{index}]",
                    f"is of a tool, and the model's chat template {self._form}; leave it out",
                )
        length = _length(turns, tools, variables)
        if length > MAX_TEXT_LENGTH:
            raise InvalidInputError(
                field, f"has {length:,} characters, a prompt at most {MAX_TEXT_LENGTH:,}; leave out older turns"
            )
        try:
            return self._tokens.read(self._write(turns, tools, variables=variables))
        except RefusedConversationError as error:
            reason = self._tokens.restore(str(error))[:_REASON_LENGTH]
            raise InvalidInputError(field, f"is not one the model's chat template has a prompt for: {reason}") from None
        except LimitError as error:
            raise InvalidInputError(
                field, f"is too long for the model's chat template, which {error}; leave out older turns"
            ) from None
        except Exception as error:  # what a wrong template leads to can be of any kind
            given = {
                "tools": bool(tools),
                "calls of tools": any(turn.tool_calls or turn.role == "tool" for turn in turns),
                "values of its variables": bool(variables),
            }
            if not any(given.values()):
                raise self._failure(error) from error
            reason = self._tokens.restore(str(error))[:_REASON_LENGTH]
            beside = " and ".join(what for what, is_there in given.items() if is_there)
            raise InvalidInputError(
                field, f"makes the model's chat template fail with the {beside} ({reason}); give others, or none"
            ) from error

    def _write(
        self,
        turns: Sequence[ChatTurn],
        tools: Sequence[Tool] = (),
        goes_on: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Writes the prompt, with twins in what people wrote."""
        people, model = self._tokens.disguise, self._tokens.disguise_own
        values = {
            "documents": None,
            **{name: _disguised(value, people) for name, value in (variables or {}).items()},
            "messages": [
                turn.shown(partial(_disguised, disguise=model if turn.role == "assistant" else people))
                for turn in turns
            ],
            "add_generation_prompt": goes_on,
            "tools": [tool.shown(partial(_disguised, disguise=people)) for tool in tools] or self._no_tools,
            **self.names,
        }
        return write(self._template, values)

    def _failure(self, error: Exception) -> BundleError:
        return BundleError(f"{self._file}: fails ({error}); correct it and export the model again")

    def _try(self, tokenizer: Tokenizer) -> None:
        """Checks that prompts can be made, and that they are read as the bundle's tokenizer reads them.

        Without tools a template is given none, as transformers does, or an empty list if it fails without one.

        Raises:
            BundleError: No sample can be made a prompt of, or its ids are others.
        """
        try:
            self._try_samples(tokenizer)
        except BundleError:
            self._no_tools = []
            try:
                self._try_samples(tokenizer)
            except BundleError:
                self._no_tools = None
            else:
                return
            raise

    def _try_samples(self, tokenizer: Tokenizer) -> None:
        refusals: list[str] = []
        for turns in _SAMPLES:
            try:
                prompt = self._tokens.read(self._write(turns))
            except RefusedConversationError as error:
                refusals.append(str(error))
                continue
            except Exception as error:  # what a wrong template leads to can be of any kind
                raise self._failure(error) from error
            expected = tokenizer.encode(prompt.text, add_special_tokens=False).ids
            if prompt.input_ids.tolist() != expected:
                raise BundleError(
                    f"{self._file}: its prompts cannot be read with special tokens set apart; write each of them as a "
                    "whole, and export the model again"
                )
        if len(refusals) == len(_SAMPLES):
            raise BundleError(
                f"{self._file}: has a prompt for no conversation ({refusals[0][:_REASON_LENGTH]}); correct it"
            )

    def __repr__(self) -> str:
        return f"ChatTemplate({self._file}, {self._tokens!r})"


class _ControlTokens:
    """The tokens that a template may write and people may not, and a tokenizer that knows them by stand-ins alone.

    These are the tokens that the tokenizer added as special, and further added ones that the template writes. Another
    added token that the template looks for in what was said, such as `<tool_response>`, is for both. Those that mark
    thinking are for the template and for the model, whose own text an assistant's turn is.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, parsed: nodes.Template, file: Path) -> None:
        added = tokenizer.get_added_tokens_decoder()
        looked_for = set(_texts_looked_for(parsed))
        named = {token.content for token in added.values() if token.content in source and not token.content.isspace()}
        marks = {token.content for token in added.values() if marks_thinking(token.content)}
        of_template = (named - looked_for) | (marks if marks & named else set())
        control = sorted(index for index, token in added.items() if token.special or token.content in of_template)
        self._stand_ins = {added[token_id].content: chr(_FIRST_STAND_IN + n) for n, token_id in enumerate(control)}
        self._control = _any_of(self._stand_ins)
        edges = sorted({edge for token in self._stand_ins if token.strip() for edge in (token[0], token[-1])})
        edges = [edge for edge in edges if not edge.isspace()]
        taken = set(source).union(*(token.content for token in added.values()))
        free = (chr(code) for code in chain(PRINTED_TWINS, UNASSIGNED_TWINS) if chr(code) not in taken)
        self._twins = dict(zip(edges, free, strict=False))
        # Where people write a twin, another character stands for it.
        own = {twin: chr(UNASSIGNED_TWINS[-1] - n) for n, twin in enumerate(self._twins.values())}
        reserved = (*self._stand_ins.values(), *own.values())
        self._forged = str.maketrans(dict.fromkeys(reserved, "\N{REPLACEMENT CHARACTER}") | own)
        meant = {twin: edge for edge, twin in self._twins.items()} | {other: twin for twin, other in own.items()}
        self._originals = str.maketrans(meant)
        kept = [
            text
            for text in looked_for
            if not self._twins.keys().isdisjoint(text)
            and not any(text in token or token in text for token in self._stand_ins)
        ]
        self._disguised = _any_of([*kept, *self._twins])
        self._own = _any_of([*kept, *self._twins, *(marks & self._stand_ins.keys())])
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(self._renamed(json.loads(tokenizer.to_str()))))
        except Exception as error:  # the library raises bare Exception
            raise BundleError(f"{file}: cannot be used for a chat ({error}); export the model without one") from error
        for token_id in control:
            found = self._tokenizer.token_to_id(self._stand_ins[added[token_id].content])
            if found != token_id:
                raise BundleError(f"{file}: holds the added token {added[token_id].content} twice; remove one")

    def disguise(self, content: str) -> str:
        """Puts twins into what people wrote, except where it says what the template looks for."""
        return self._disguised.sub(self._twin, content.translate(self._forged))

    def disguise_own(self, content: str) -> str:
        """Puts twins into what the model wrote, except where it marks its thinking, too."""
        return self._own.sub(self._twin, content.translate(self._forged))

    def _twin(self, found: re.Match[str]) -> str:
        return self._twins.get(found[0], found[0])

    def restore(self, written: str) -> str:
        """Takes the twins out of what the template wrote."""
        return written.translate(self._originals)

    def read(self, written: str) -> ChatPrompt:
        """Makes the prompt of what the template wrote."""
        told_apart = self.restore(self._control.sub(lambda match: self._stand_ins[match[0]], written))
        with no_panics():
            (encoding,) = self._tokenizer.encode_batch_fast([told_apart], add_special_tokens=False)  # without the GIL
        return ChatPrompt(text=self.restore(written), input_ids=np.asarray(encoding.ids, np.int64))

    def _renamed(self, content: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of a `tokenizer.json` with the stand-ins in place of control tokens."""
        for token in content["added_tokens"]:
            token["content"] = self._name(token["content"])
        model = content["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {self._name(token): token_id for token, token_id in vocabulary.items()}
        else:  # of a unigram model: subwords and their scores
            model["vocab"] = [(self._name(subword), score) for subword, score in vocabulary]
        if model.get("unk_token") is not None:
            model["unk_token"] = self._name(model["unk_token"])
        return content | {"post_processor": None, "truncation": None, "padding": None}

    def _name(self, token: str) -> str:
        return self._stand_ins.get(token, token)

    def __repr__(self) -> str:
        return f"{len(self._stand_ins)} control tokens"


def _disguised(value: Any, disguise: Callable[[str], str]) -> Any:
    """Puts twins into all texts of a value of JSON."""
    if isinstance(value, str):
        return disguise(value)
    if isinstance(value, dict):
        return {disguise(key): _disguised(element, disguise) for key, element in value.items()}
    return [_disguised(element, disguise) for element in value] if isinstance(value, list) else value


def _length(turns: Sequence[ChatTurn], tools: Sequence[Tool], variables: Mapping[str, Any] | None) -> int:
    """Returns how many characters people wrote."""
    said = sum(len(text) for turn in turns for text in turn.texts)
    said += _size(dict(variables)) if variables else 0
    return said + sum(len(tool.description) + len(tool.parameters) for tool in tools)


def _size(value: Any) -> int:
    """Returns about how many characters a value of JSON has, or a number above `MAX_TEXT_LENGTH` if it has more."""
    size, rest = 0, [value]
    while rest and size <= MAX_TEXT_LENGTH:
        one = rest.pop()
        if isinstance(one, dict):
            size += sum(map(len, one))
            one = list(one.values())
        if isinstance(one, list):
            size += len(one)
            rest += one
        elif isinstance(one, str):
            size += len(one)
        else:
            size += one.bit_length() // 3 + 1 if isinstance(one, int) else 1
    return size


def _texts_looked_for(parsed: nodes.Template) -> Iterator[str]:
    """Yields the texts that a template compares with others, or hands to a method, filter or test."""
    for node in parsed.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        operands = (node.args or ()) if isinstance(node, nodes.Call | nodes.Filter | nodes.Test) else (node,)
        for operand in operands:
            for constant in (operand, *operand.find_all(nodes.Const)):
                if isinstance(constant, nodes.Const) and isinstance(constant.value, str) and constant.value:
                    yield constant.value


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of `texts` that is there; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _read(file: Path) -> str:
    try:
        size = file.stat().st_size
        if size > MAX_TEMPLATE_BYTES:
            raise BundleError(f"{file}: has {size:,} bytes, a chat template at most {MAX_TEMPLATE_BYTES:,}; shorten it")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{file}: cannot be read ({error}); export the model again") from error
