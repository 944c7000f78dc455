"""Chat templates: from a conversation to the prompt of the next turn.

The template is a program trusted by the operator, as the graphs are. It runs in Jinja's immutable sandbox, as in
transformers (`template.py`), with limits of its output and its time.

Users' text is not trusted: "<|im_end|>" in it must stay text. Before the template runs, every character of users' text
with which a special token begins or ends is replaced by a twin. A twin is a symbol that is rare in text and that Python
prints unchanged. Special tokens in the template's output are then its own. Each becomes one stand-in character, twins
are restored, and the tokenizer recognizes special tokens only by their stand-ins. Otherwise the tokenizer is the
bundle's, so for ordinary conversations the ids are those of the written prompt.

Assistant turns count as the model's own text. They keep tokens that delimit reasoning, such as `</think>`, at which
templates cut earlier turns.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from jinja2 import Template, meta, nodes
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headway_server.bundles.manifest import SpecialTokens
from headway_server.errors import BundleError, InvalidInputError, MachineBusyError, no_panics
from headway_server.preprocessing.pool import text_pool
from headway_server.preprocessing.reasoning import ReasoningForm, is_reasoning_token
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
"""Largest template in bytes; templates with tools have up to 20 KiB."""
_FIRST_STAND_IN: Final = 0x50000
"""First stand-in character of special tokens, in an unassigned plane of Unicode."""
_MARK: Final = chr(_FIRST_STAND_IN - 16)
"""End of the content that the model continues, in the unassigned plane before it."""
_REASON_LENGTH: Final = 300
_MAX_NAMES_SHOWN: Final = 10
_MAX_NAME_SHOWN: Final = 64
_GIVEN: Final = ("messages", "add_generation_prompt", "tools")
"""Variables of every template, beside the named special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnImage:
    """An image of a turn: an encoded one, or the id of a prepared one."""

    data: bytes = b""
    image_id: str = ""
    field: str
    """Its field of the request, for error messages."""


class WrittenImages(NamedTuple):
    """What stands for the images of a conversation in its prompt."""

    marker: str
    """What the chat template writes for each."""
    texts: Sequence[str]
    """What replaces it, for each in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One turn of a conversation."""

    role: Role
    content: str
    """Its text."""
    parts: tuple[str | TurnImage, ...] = ()
    """Parts of the text and images in their order; empty without images."""
    reasoning: str = ""
    """Reasoning of an assistant turn, before its `content`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant turn."""
    tool_call_id: str = ""
    """Id of the call that a tool turn answers."""
    name: str = ""
    """Name of the speaker or of the tool, for templates that read it."""

    @property
    def images(self) -> tuple[TurnImage, ...]:
        """Its images in order."""
        return tuple(part for part in self.parts if isinstance(part, TurnImage))

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of a turn that users may have written."""
        return (
            self.content,
            self.reasoning,
            self.name,
            *(text for call in self.tool_calls for text in (call.name, call.arguments)),
        )

    def shown(self, disguise: Callable[[Any], Any]) -> dict[str, Any]:
        """Returns the turn as templates expect it, with users' text disguised."""
        calls = {"tool_calls": [call.shown(disguise) for call in self.tool_calls]} if self.tool_calls else {}
        answered = {"tool_call_id": disguise(self.tool_call_id)} if self.role == "tool" else {}
        thought = {"reasoning_content": disguise(self.reasoning)} if self.reasoning else {}
        named = {"name": disguise(self.name)} if self.name else {}
        content = [_shown_part(part, disguise) for part in self.parts] if self.parts else disguise(self.content)
        return {"role": self.role, "content": content, **thought, **calls, **answered, **named}


def _shown_part(part: str | TurnImage, disguise: Callable[[Any], Any]) -> dict[str, Any]:
    return {"type": "image"} if isinstance(part, TurnImage) else {"type": "text", "text": disguise(part)}


class PromptEnd(Enum):
    """How the prompt of a conversation ends."""

    NEW_TURN = "new turn"
    """With the beginning of the assistant's next turn."""
    TURNS = "turns"
    """With the end of the last turn."""
    OPEN_TURN = "open turn"
    """With the content of the last turn, which the model continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The prompt of a conversation."""

    text: str
    """The prompt's text, for people; encoding it may give other tokens."""
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
"""Sample conversations for testing a template; it may refuse some, such as those with a system turn."""


class ChatTemplate:
    """The chat template of a bundle, with its tokenizer: encodes a conversation.

    In a text, the template's special tokens look like the same characters in users' text. So the prompt is the ids from
    `encode`; encoding its `text` may give others.

    Safe to use from several threads: nothing changes after loading.
    """

    def __init__(self, template: Template, *, file: Path, tokens: _ControlTokens, names: dict[str, str]) -> None:
        """Takes the parts that `load` creates."""
        self._template = template
        self._file = file
        self._tokens = tokens
        self.names = names
        """Special tokens passed to the template, by name."""
        self._form: CallForm | NoToolsError
        self._reasoning: ReasoningForm | None = None
        self.variables: frozenset[str] = frozenset()
        """Free variables of the template."""
        self._no_tools: list[Tool] | None = None

    @property
    def call_form(self) -> CallForm:
        """The model's form of tool calls.

        Raises:
            NoToolsError: The template has no tools.
        """
        if isinstance(self._form, NoToolsError):
            raise self._form
        return self._form

    @property
    def reasoning_form(self) -> ReasoningForm | None:
        """The model's reasoning delimiters; None if its template has none."""
        return self._reasoning

    def check_variables(self, variables: Mapping[str, Any], field: str) -> None:
        """Checks a caller's variables of the template; `field` is their field of the request.

        Raises:
            InvalidInputError: The template reads no such variable, or the server sets it.
        """
        own = frozenset((*_GIVEN, *self.names, *self._template.environment.globals))
        for name in variables:
            if name in own:
                raise InvalidInputError(f"{field}.{name}", "is set by the server; leave it out")
            if name not in self.variables:
                known = ", ".join(sorted(self.variables - own)[:_MAX_NAMES_SHOWN]) or "none"
                raise InvalidInputError(
                    f"{field}.{name[:_MAX_NAME_SHOWN]}",
                    f"is not read by the model's chat template, which reads {known}; leave it out",
                )

    @classmethod
    def load(cls, file: Path, *, tokenizer_file: Path, special_tokens: SpecialTokens) -> ChatTemplate:
        """Loads a `chat_template.jinja` and tests it with small conversations.

        Args:
            file: The template.
            tokenizer_file: The bundle's `tokenizer.json`.
            special_tokens: Special tokens of the bundle; templates see `bos`, `eos`, `pad` and `unk` as `bos_token` and
                so on.

        Raises:
            BundleError: It is too large, is not a template, or does not work with the tokenizer.
            MachineBusyError: The machine is too busy for the test.
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
        except Exception as error:  # Jinja's errors, and those of deep nesting
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
        end: PromptEnd = PromptEnd.NEW_TURN,
        images: WrittenImages | None = None,
    ) -> list[ChatPrompt]:
        """Encodes conversations off the event loop, each as a prompt for the model's next turn.

        Stops at the first refusal, or on cancellation.

        Args:
            conversations: Each of at least one turn.
            fields: Field of each in the request, such as `conversations[3]`, for messages.
            tools: Tools for the model, if it has a `call_form`.
            variables: Further JSON variables of the template, checked by `check_variables`.
            end: How each prompt ends.
            images: What stands for the images of a single conversation.

        Raises:
            InvalidInputError: The template refuses a conversation, makes too long a prompt of it, fails with tools
                or variables, whose shape is the caller's, or does not write the turn to be continued, or each image.
            BundleError: The template fails without them.
        """
        loop = asyncio.get_running_loop()
        of_images = 0 if images is None else sum(map(len, images.texts))
        return [
            await loop.run_in_executor(
                text_pool(_length(turns, tools, variables) + of_images),
                partial(self.prompt, turns, field, tools, variables, end, images=images),
            )
            for turns, field in zip(conversations, fields, strict=True)
        ]

    def prompt(
        self,
        turns: Sequence[ChatTurn],
        field: str,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        end: PromptEnd = PromptEnd.NEW_TURN,
        *,
        images: WrittenImages | None = None,
    ) -> ChatPrompt:
        """Encodes one conversation on the caller's thread; arguments and errors are those of `encode`."""
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
            if end is not PromptEnd.OPEN_TURN:
                written = self._write(turns, tools, end is PromptEnd.NEW_TURN, variables)
            else:
                written = self._write(turns, tools, False, variables, mark=_MARK)
                written = self._cut(written, turns[-1], f"{field}.messages[{len(turns) - 1}]")
            return self._tokens.read(written if images is None else _with_images(written, images, field))
        except RefusedConversationError as error:
            reason = self._tokens.restore(str(error))[:_REASON_LENGTH]
            raise InvalidInputError(field, f"is not one the model's chat template has a prompt for: {reason}") from None
        except LimitError as error:
            raise InvalidInputError(
                field, f"is too long for the model's chat template, which {error}; leave out older turns"
            ) from None
        except InvalidInputError:
            raise
        except Exception as error:  # templates may raise any error
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
        mark: str = "",
    ) -> str:
        """Renders the prompt, with twins in users' text, and a mark at the end of the last turn's content."""
        people, model = self._tokens.disguise, self._tokens.disguise_own
        called = {call.call_id: call.name for turn in turns for call in turn.tool_calls}
        turns = [  # callers tell a result's call alone, and some templates read its name
            replace(turn, name=turn.name or called.get(turn.tool_call_id, "")) if turn.role == "tool" else turn
            for turn in turns
        ]
        messages = [
            turn.shown(partial(_disguised, disguise=model if turn.role == "assistant" else people)) for turn in turns
        ]
        if mark and isinstance(messages[-1]["content"], list):  # `_cut` refuses a turn that does not end with the mark
            messages[-1]["content"].append({"type": "text", "text": mark})
        elif mark:
            messages[-1]["content"] += mark
        values = {
            "documents": None,
            **{name: _disguised(value, people) for name, value in (variables or {}).items()},
            "messages": messages,
            "add_generation_prompt": goes_on,
            "tools": [tool.shown(partial(_disguised, disguise=people)) for tool in tools] or self._no_tools,
            **self.names,
        }
        return write(self._template, values)

    def _cut(self, written: str, turn: ChatTurn, field: str) -> str:
        """Returns a prompt up to the mark at the end of the last turn's content; `field` is the turn's.

        Raises:
            InvalidInputError: The turn has calls or no text, or the template writes another text.
        """
        if turn.tool_calls or not turn.content.strip():
            raise InvalidInputError(field, "has no text at its end to continue; send one, or have a new turn begun")
        before, found, _ = written.rpartition(_MARK)
        if found:
            return before.replace(_MARK, "")
        raise InvalidInputError(field, "cannot be continued: the model's chat template writes it as another text")

    def _failure(self, error: Exception) -> BundleError:
        return BundleError(f"{self._file}: fails ({error}); correct it and export the model again")

    def _try(self, tokenizer: Tokenizer) -> None:
        """Checks that prompts can be rendered, and that their ids are those of the bundle's tokenizer.

        Without tools, `tools` is None as in transformers, or an empty list if the template fails with None.

        Raises:
            BundleError: No sample has a prompt, or its ids differ.
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
            except Exception as error:  # templates may raise any error
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
    """Tokens reserved for the template, and a tokenizer that recognizes them only by stand-ins.

    These are the tokenizer's special tokens, and further added tokens in the template. An added token that the template
    looks for in content, such as `<tool_response>`, is allowed in both. Tokens that delimit reasoning are for the
    template and for assistant turns, which are the model's own text.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, parsed: nodes.Template, file: Path) -> None:
        added = tokenizer.get_added_tokens_decoder()
        looked_for = set(_texts_looked_for(parsed))
        named = {token.content for token in added.values() if token.content in source and not token.content.isspace()}
        delimiters = {token.content for token in added.values() if is_reasoning_token(token.content)}
        of_template = (named - looked_for) | (delimiters if delimiters & named else set())
        control = sorted(index for index, token in added.items() if token.special or token.content in of_template)
        self._stand_ins = {added[token_id].content: chr(_FIRST_STAND_IN + n) for n, token_id in enumerate(control)}
        self._control = _any_of(self._stand_ins)
        edges = sorted({edge for token in self._stand_ins if token.strip() for edge in (token[0], token[-1])})
        edges = [edge for edge in edges if not edge.isspace()]
        taken = set(source).union(*(token.content for token in added.values()))
        free = (chr(code) for code in chain(PRINTED_TWINS, UNASSIGNED_TWINS) if chr(code) not in taken)
        self._twins = dict(zip(edges, free, strict=False))
        # A twin in users' text is itself replaced by another character.
        own = {twin: chr(UNASSIGNED_TWINS[-1] - n) for n, twin in enumerate(self._twins.values())}
        reserved = (*self._stand_ins.values(), *own.values(), _MARK)
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
        self._own = _any_of([*kept, *self._twins, *(delimiters & self._stand_ins.keys())])
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(self._renamed(json.loads(tokenizer.to_str()))))
        except Exception as error:  # the library raises bare Exception
            raise BundleError(f"{file}: cannot be used for a chat ({error}); export the model without one") from error
        for token_id in control:
            found = self._tokenizer.token_to_id(self._stand_ins[added[token_id].content])
            if found != token_id:
                raise BundleError(f"{file}: has the added token {added[token_id].content} twice; remove one")

    def disguise(self, content: str) -> str:
        """Puts twins into users' text, except in texts that the template looks for."""
        return self._disguised.sub(self._twin, content.translate(self._forged))

    def disguise_own(self, content: str) -> str:
        """Puts twins into the model's text, except in reasoning delimiters as well."""
        return self._own.sub(self._twin, content.translate(self._forged))

    def _twin(self, found: re.Match[str]) -> str:
        return self._twins.get(found[0], found[0])

    def restore(self, written: str) -> str:
        """Restores twins in the template's output."""
        return written.translate(self._originals)

    def read(self, written: str) -> ChatPrompt:
        """Encodes the template's output."""
        distinguished = self.restore(self._control.sub(lambda match: self._stand_ins[match[0]], written))
        with no_panics():
            (encoding,) = self._tokenizer.encode_batch_fast(
                [distinguished], add_special_tokens=False
            )  # without the GIL
        return ChatPrompt(text=self.restore(written), input_ids=np.asarray(encoding.ids, np.int64))

    def _renamed(self, content: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of a `tokenizer.json` with the stand-ins in place of control tokens."""
        for token in content["added_tokens"]:
            token["content"] = self._name(token["content"])
        model = content["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {self._name(token): token_id for token, token_id in vocabulary.items()}
        else:  # unigram model: subwords with scores
            model["vocab"] = [(self._name(subword), score) for subword, score in vocabulary]
        if model.get("unk_token") is not None:
            model["unk_token"] = self._name(model["unk_token"])
        return content | {"post_processor": None, "truncation": None, "padding": None}

    def _name(self, token: str) -> str:
        return self._stand_ins.get(token, token)

    def __repr__(self) -> str:
        return f"{len(self._stand_ins)} control tokens"


def _with_images(written: str, images: WrittenImages, field: str) -> str:
    """Returns a prompt with what stands for each image.

    Raises:
        InvalidInputError: The template has not written a marker for each.
    """
    parts = written.split(images.marker)
    if len(parts) != len(images.texts) + 1:
        raise InvalidInputError(
            field,
            f"has {len(images.texts)} images, and the model's chat template shows {len(parts) - 1}; put them into the "
            "user's turns",
        )
    return parts[0] + "".join(text + part for text, part in zip(images.texts, parts[1:], strict=True))


def _disguised(value: Any, disguise: Callable[[str], str]) -> Any:
    """Puts twins into all texts of a JSON value."""
    if isinstance(value, str):
        return disguise(value)
    if isinstance(value, dict):
        return {disguise(key): _disguised(element, disguise) for key, element in value.items()}
    return [_disguised(element, disguise) for element in value] if isinstance(value, list) else value


def _length(turns: Sequence[ChatTurn], tools: Sequence[Tool], variables: Mapping[str, Any] | None) -> int:
    """Returns the number of characters of users' text."""
    said = sum(len(text) for turn in turns for text in turn.texts)
    said += _size(dict(variables)) if variables else 0
    return said + sum(len(tool.description) + len(tool.parameters) for tool in tools)


def _size(value: Any) -> int:
    """Returns the approximate number of characters of a JSON value, or some number above `MAX_TEXT_LENGTH`."""
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
    """Yields the literals that a template compares, or passes to a method, filter or test."""
    for node in parsed.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
        operands = (node.args or ()) if isinstance(node, nodes.Call | nodes.Filter | nodes.Test) else (node,)
        for operand in operands:
            for constant in (operand, *operand.find_all(nodes.Const)):
                if isinstance(constant, nodes.Const) and isinstance(constant.value, str) and constant.value:
                    yield constant.value


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern of the longest match of `texts`; without texts it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _read(file: Path) -> str:
    try:
        size = file.stat().st_size
        if size > MAX_TEMPLATE_BYTES:
            raise BundleError(f"{file}: has {size:,} bytes, a chat template at most {MAX_TEMPLATE_BYTES:,}; shorten it")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{file}: cannot be read ({error}); export the model again") from error
