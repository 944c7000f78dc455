"""The chat template of a folder, whose prompts are held against those of `transformers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder
from headway_export.source import check_chat_template, find_chat_template
from headway_server.bundles import SpecialTokens
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import ChatTemplate, ChatTurn, Tool, ToolCall
from headway_training.folders import first_line

_CALL: Final = ToolCall(call_id="a1B2c3D4e", name="clock", arguments='{"zone": "UTC", "digits": 2}')
_CALLS: Final = (
    ChatTurn(role="assistant", content="", tool_calls=(_CALL,)),
    ChatTurn(role="tool", content="noon", tool_call_id=_CALL.call_id),
)
_TOOL: Final = Tool(
    name="clock",
    description="Tells the <time>.",
    parameters='{"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}',
)
_ASKED: Final = ChatTurn(role="user", content="Hello.")
_ASKED_AGAIN: Final = ChatTurn(role="user", content="Who?")
_PLAIN: Final = {
    "one turn": (_ASKED,),
    "several turns": (_ASKED, ChatTurn(role="assistant", content=" Good day.\n"), _ASKED_AGAIN),
    "a system's turn": (ChatTurn(role="system", content="Be brief. "), _ASKED),
}
"""Conversations whose prompts are the same, or the folder is refused."""
_TURNS_IN_PARTS: Final = (
    "{% set turns = namespace(all=[]) %}{% for turn in messages %}{% set turns.all = turns.all + "
    "[dict(turn, content=[{'type': 'text', 'text': turn.content}] if turn.content is string else turn.content)] %}"
    "{% endfor %}{% set messages = turns.all +%}"
)
"""Put before a template that reads a turn's text as a list of parts alone, as those of models that see do."""
_FURTHER: Final[dict[str, tuple[Sequence[ChatTurn], Sequence[Tool]]]] = {
    "characters that special tokens have": ((ChatTurn(role="user", content="a < b | c > d [x] {y} 'z' \\ é"),), ()),
    "thinking in a turn": (
        (_ASKED, ChatTurn(role="assistant", content="<think>\nhm\n</think>\n\nGood day."), _ASKED_AGAIN),
        (),
    ),
    "thinking beside a turn": (
        (_ASKED, ChatTurn(role="assistant", content="Good day.", reasoning="hm"), _ASKED_AGAIN),
        (),
    ),
    "tools": ((_ASKED,), (_TOOL,)),
    "calls of tools": ((_ASKED, *_CALLS), (_TOOL,)),
}
"""Others: what differs is said in a note."""


def read_chat_template(
    folder: ModelFolder, own: Any, tokenizer: Tokenizer, special_tokens: SpecialTokens
) -> tuple[str | None, tuple[str, ...]]:
    """Returns a folder's chat template, with the special tokens that it names and a server does not give.

    Args:
        folder: The model's.
        own: Its tokenizer of `transformers`.
        tokenizer: What is inside.
        special_tokens: Of the bundle.

    Raises:
        SourceError: A server would refuse it, or makes other prompts of a plain conversation.
    """
    template = find_chat_template(folder.path)
    further = sorted(own.chat_template.keys() - {"default"}) if isinstance(own.chat_template, dict) else []
    notes: tuple[str, ...] = ()
    if further:
        notes = (f"chat template: the one named default is served, and not {', '.join(further)}",)
    if template is None:
        return None, notes
    if own.chat_template is None:  # it lies where a processor finds it, and no tokenizer
        own.chat_template = template
    in_parts = _needs_parts(own)
    if in_parts:
        template = _TURNS_IN_PARTS + template
    chat = check_chat_template(template, tokenizer, special_tokens)
    theirs = own.special_tokens_map
    names = {
        name: theirs.get(name, "")
        for name in sorted(chat.variables & {*theirs, *chat.names})
        if chat.names.get(name) != theirs.get(name, "")
    }
    if names:
        given = "".join(
            f"{{% set {name} = {json.dumps(token, ensure_ascii=False)} +%}}" for name, token in names.items()
        )
        template = given + template
        chat = check_chat_template(template, tokenizer, special_tokens)
    for kind, turns in _PLAIN.items():
        if problem := _difference(chat, own, turns, (), in_parts=in_parts):
            raise SourceError(
                f"{folder.path}: the chat template: a prompt of a conversation with {kind} is not that of transformers "
                f"({problem}); not supported"
            )
    differing = [
        f"{kind} ({problem})"
        for kind, (turns, tools) in _FURTHER.items()
        if ("tools" in chat.variables or not tools)
        and (problem := _difference(chat, own, turns, tools, in_parts=in_parts))
    ]
    if differing:
        notes += (
            f"chat template: prompts of conversations with {', with '.join(differing)} are not those of transformers",
        )
    return template, notes


def _needs_parts(own: Any) -> bool:
    """Returns True if a template leaves the text of a turn out unless it is a list of parts."""
    try:
        as_text, as_parts = (
            str(own.apply_chat_template(_messages([_ASKED], in_parts=in_parts), tokenize=False))
            for in_parts in (False, True)
        )
    except Exception:  # whatever a template raises
        return False
    return _ASKED.content not in as_text and _ASKED.content in as_parts


def _messages(turns: Sequence[ChatTurn], *, in_parts: bool) -> list[dict[str, Any]]:
    """Returns turns as `transformers` takes them."""
    messages = [turn.shown(_as_it_is) for turn in turns]
    if not in_parts:
        return messages
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def _difference(
    chat: ChatTemplate, own: Any, turns: Sequence[ChatTurn], tools: Sequence[Tool], *, in_parts: bool
) -> str:
    """Returns where a prompt differs from that of `transformers`; nothing if it does not, or both refuse."""
    messages = _messages(turns, in_parts=in_parts)
    asked = {
        "tools": [tool.shown(_as_it_is) for tool in tools] or None,
        "add_generation_prompt": True,
    }
    try:
        expected = own.apply_chat_template(messages, tokenize=False, **asked)
        ids = own.apply_chat_template(messages, tokenize=True, return_dict=False, **asked)
    except Exception:  # whatever a template raises where it has no prompt
        return ""
    try:
        found = chat.prompt(turns, "conversation", tools)
    except InvalidInputError as error:
        return f"refused: {first_line(error)}"
    if found.text == expected:
        return "" if found.input_ids.tolist() == list(ids) else "other tokens"
    pairs = zip(found.text, expected, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(found.text), len(expected)))
    return f"from character {place} on, {found.text[place : place + 20]!r} for {expected[place : place + 20]!r}"


def _as_it_is(value: Any) -> Any:
    return value
