"""OpenAI's Responses API: a second form of the requests and answers of chat completions. Nothing is stored.

Items are turns in pieces: reasoning, a message and tool calls that follow each other are one turn of the assistant.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from headway_server.bundles import SamplingDefaults
from headway_server.decoding.sequence import Delta, FinishReason, TokenLogProbability
from headway_server.errors import InvalidInputError
from headway_server.observers import current_call
from headway_server.preprocessing import AnswerDelta
from headway_server.preprocessing.pool import text_pool
from headway_server.serving.answers import Answer
from headway_server.serving.limits import check_count
from headway_server.tasks.generation.model import GeneratedText, GenerationModel
from headway_server.tasks.generation.request import MAX_TURNS, GenerationRequest
from headway_server.tasks.generation.tools import MAX_TOOLS
from headway_server.transports.http.body import Many, Part
from headway_server.transports.http.edge import to_json
from headway_server.transports.http.openai.requests import (
    CalledFunction,
    CallPart,
    ChatBody,
    Function,
    ImagePart,
    ImageUrl,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    ModelBody,
    NamedChoice,
    NamedFunction,
    ReasoningEffort,
    RefusalPart,
    SamplingBody,
    TextFormat,
    TextPart,
    ToolName,
    ToolPart,
)
from headway_server.transports.http.openai.written_tokens import TokenCounts, TokenWriter
from headway_server.transports.http.status import Failure

NOTHING_STORED: Final = "answers are not stored; keep the answer to POST /v1/responses"
_LOGPROBS: Final = "message.output_text.logprobs"
_OWN_FIELDS: Final = (*SamplingBody.model_fields, "chat_template_kwargs")
"""Fields that a chat completion has too, under the same names."""


def _refuse(reason: str, *, but: Any = False) -> AfterValidator:
    """Returns a validator that refuses any value but one."""

    def check(value: Any) -> Any:
        if value != but:
            raise ValueError(reason)
        return value

    return AfterValidator(check)


def _check_kind(kind: str) -> str:
    if kind != "function":
        raise ValueError(f"is {kind[:64]!r}; this server calls no tools itself, so offer functions")
    return kind


def _kind_of(item: Any) -> Any:
    """Returns the type of an item; without one it is a message."""
    return item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None)


class ItemText(Part):
    """A text of an item."""

    without_effect: ClassVar = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "summary_text", "reasoning_text"]
    text: str


class ItemImage(Part):
    """An image of an item, as a data URL."""

    without_effect: ClassVar = frozenset({"detail", "prompt_cache_breakpoint"})

    type: Literal["input_image"]
    image_url: str


_Content = str | Many[ItemText | RefusalPart | ItemImage]


def _as_content(content: str | list[ItemText | RefusalPart | ItemImage]) -> str | list[TextPart | ImagePart]:
    """Returns the content of an item as that of a message of a chat completion: a text, or parts with images."""
    if isinstance(content, str):
        return content
    parts = [
        ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url))
        if isinstance(part, ItemImage)
        else TextPart(type="text", text=part.text)
        for part in content
    ]
    has_images = any(isinstance(part, ImagePart) for part in parts)
    return parts if has_images else "".join(part.text for part in content if not isinstance(part, ItemImage))


class MessageItem(Part):
    """A message."""

    without_effect: ClassVar = frozenset({"id", "phase", "status"})

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content


class CallItem(Part):
    """A call of a function by the assistant."""

    without_effect: ClassVar = frozenset({"caller", "id", "status"})

    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str


class ResultItem(Part):
    """The result of a call."""

    without_effect: ClassVar = frozenset({"caller", "id", "status"})

    type: Literal["function_call_output"]
    call_id: str
    output: _Content
    name: str = ""


class ReasoningItem(Part):
    """Reasoning of the assistant; its `content` is in place of the summary."""

    without_effect: ClassVar = frozenset({"encrypted_content", "id", "status"})

    type: Literal["reasoning"]
    summary: Many[ItemText] = Field(default_factory=list)
    content: Many[ItemText] = Field(default_factory=list)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind_of,
        custom_error_type="item",
        custom_error_message=(
            "is none of message, function_call, function_call_output and reasoning; items are not stored, so send "
            "each as it was instead of a reference to it (with store: false clients do)"
        ),
    ),
]


class FunctionTool(Part):
    """A function as a tool."""

    without_effect: ClassVar = frozenset({"output_schema"})

    type: Annotated[str, AfterValidator(_check_kind)]
    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False
    defer_loading: Literal[False] = False
    allowed_callers: Many[Literal["direct"]] = Field(default_factory=list)

    def part(self) -> ToolPart:
        """Converts the tool to that of a chat completion."""
        function = Function(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return ToolPart(type="function", function=function)


class FunctionChoice(Part):
    """The required tool."""

    type: Literal["function"]
    name: str


class SchemaFormat(JsonSchema):
    """JSON with a schema."""

    type: Literal["json_schema"]


class TextOptions(Part):
    """Format of the text. `verbosity` has no effect."""

    format: Annotated[TextFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] = "medium"


class ReasoningOptions(Part):
    """How the model reasons."""

    without_effect: ClassVar = frozenset({"context", "generate_summary", "mode", "summary"})

    effort: ReasoningEffort | None = None


class ResponseStreamOptions(Part):
    """Options of a stream."""

    without_effect: ClassVar = frozenset({"include_obfuscation"})


class ResponseBody(SamplingBody):
    """A request of `/v1/responses`, read as a chat completion. Fields of `SamplingBody` are extensions here too."""

    union_tags: ClassVar = SamplingBody.union_tags | {
        "json_schema",
        "text",
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
    }
    without_effect: ClassVar = (ModelBody.without_effect | {"max_tool_calls"}) - {
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "user",
    }
    """The rest is in the answer again."""

    input: str | Many[Item]
    instructions: str | None = None
    tools: Annotated[Many[FunctionTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    max_output_tokens: int | None = None
    include: Many[
        Literal[
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "file_search_call.results",
            "message.input_image.image_url",
            "message.output_text.logprobs",
            "reasoning.encrypted_content",
            "web_search_call.action.sources",
            "web_search_call.results",
        ]
    ] = Field(default_factory=list)
    """Of these only log-probabilities are in an answer; there are no items with the others."""
    top_logprobs: int = 0
    stream_options: ResponseStreamOptions | None = None
    truncation: Annotated[
        Literal["disabled", "auto"],
        _refuse("leaves out items of the conversation; set truncate to have the prompt cut", but="disabled"),
    ] = "disabled"
    background: Annotated[bool, _refuse("needs answers to be stored, and they are not; set stream instead")] = False
    previous_response_id: Annotated[
        Any, _refuse("refers to a stored answer, and none is; send the whole conversation in input")
    ] = None
    conversation: Annotated[
        Any, _refuse("refers to a stored conversation, and none is; send all of its items in input")
    ] = None
    prompt: Annotated[Any, _refuse("refers to a stored prompt, and none is; send its text in instructions")] = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """See `ChatBody`."""
    metadata: Annotated[dict[str, str], Field(max_length=16)] = Field(default_factory=dict)
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    def chat(self) -> ChatBody:
        """Returns the chat completion that this asks for.

        Raises:
            InvalidInputError: Two fields exclude each other, or there are too many turns.
        """
        wants_logprobs = _LOGPROBS in self.include
        if self.top_logprobs and not wants_logprobs:
            raise InvalidInputError("top_logprobs", f"requires {_LOGPROBS} in include; add it, or leave this out")
        if self.stream_options is not None and not self.stream:
            raise InvalidInputError("stream_options", "requires stream; set stream to true, or leave it out")
        if not isinstance(self.input, str):
            check_count("input", len(self.input), MAX_TURNS - 1, "leave out the first ones")
        turns = self._turns
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            chosen: Any = NamedChoice(type="function", function=NamedFunction(name=choice.name))
        else:
            chosen = choice
        wanted: Any = self.text.format
        if isinstance(wanted, SchemaFormat):
            schema = JsonSchema(name=wanted.name, schema=wanted.json_schema)
            wanted = JsonSchemaFormat(type="json_schema", json_schema=schema)
        same = {name: getattr(self, name) for name in _OWN_FIELDS if name in self.model_fields_set}
        return ChatBody(
            **same,
            messages=[turn.message() for turn in turns],
            max_completion_tokens=self.max_output_tokens,
            logprobs=wants_logprobs,
            top_logprobs=self.top_logprobs if wants_logprobs else None,
            response_format=wanted,
            tools=[tool.part() for tool in self.tools],
            tool_choice=chosen,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort,
        )

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Renames the fields of messages in errors to those of the items that they were made of."""
        try:
            yield
        except InvalidInputError as error:
            raise error.renamed(self._name_of) from error

    def _name_of(self, field: str) -> str:
        found = re.fullmatch(r"messages(?:\.messages)?(?:\[(?P<turn>\d+)\](?P<rest>.*))?", field)
        if found is None:
            return field
        return "input" if found["turn"] is None else self._turns[int(found["turn"])].name_of(found["rest"])

    @property
    def _turns(self) -> list[_Turn]:
        """Turns of the conversation."""
        turns: list[_Turn] = []
        if self.instructions:
            turns.append(_Turn("system", instructions=self.instructions))
        if isinstance(self.input, str):
            return [*turns, _Turn("user", input=self.input)]
        own: _Turn | None = None  # the assistant's, which may go on
        for index, item in enumerate(self.input):
            if isinstance(item, ResultItem) or (isinstance(item, MessageItem) and item.role != "assistant"):
                own = None
                turns.append(_Turn("tool" if isinstance(item, ResultItem) else item.role, **{f"input[{index}]": item}))
                continue
            if own is None or not own.takes(item):
                own = _Turn("assistant")
                turns.append(own)
            own.items[f"input[{index}]"] = item
        return turns


class _Turn:
    """A turn of a conversation, and the items that it is made of."""

    def __init__(self, role: str, **items: str | MessageItem | CallItem | ResultItem | ReasoningItem) -> None:
        """Makes a turn of items, or of a text, by their fields in the request."""
        self.role = role
        self.items = items

    def takes(self, item: MessageItem | CallItem | ReasoningItem) -> bool:
        """Returns True if an item belongs to this turn of the assistant too: reasoning, a message, calls."""
        last = next(reversed(self.items.values()))
        return isinstance(item, CallItem) or isinstance(last, ReasoningItem)

    @property
    def _calls(self) -> list[str]:
        """Fields of its calls."""
        return [name for name, item in self.items.items() if isinstance(item, CallItem)]

    def message(self) -> Message:
        """Returns the turn as a message of a chat completion; InvalidInputError if it has too many calls."""
        given: dict[str, Any] = {"role": self.role}
        calls = self._calls
        if len(calls) > MAX_TOOLS:
            raise InvalidInputError(
                calls[MAX_TOOLS], f"is one of {len(calls)} calls in a turn; at most {MAX_TOOLS}, so split the turn"
            )
        for item in self.items.values():
            match item:
                case str():
                    given["content"] = item
                case MessageItem():
                    given["content"] = _as_content(item.content)
                case ResultItem():
                    given |= {"content": _as_content(item.output), "tool_call_id": item.call_id, "name": item.name}
                case ReasoningItem():
                    thought = "".join(part.text for part in item.content or item.summary)
                    given["reasoning_content"] = "\n".join(filter(None, (given.get("reasoning_content"), thought)))
                case CallItem():
                    function = CalledFunction(name=item.name, arguments=item.arguments)
                    given.setdefault("tool_calls", []).append(CallPart(id=item.call_id, function=function))
        return Message(**given)

    def name_of(self, field: str) -> str:
        """Returns the request's name of a field of the turn's message, such as `.content`; empty: the message."""
        if called := re.match(r"\.tool_calls\[(\d+)\]", field):
            return self._calls[int(called[1])] + (".arguments" if "arguments" in field else "")
        for name, item in self.items.items():
            if isinstance(item, ResultItem) and field == ".tool_call_id":
                return f"{name}.call_id"
            if isinstance(item, ResultItem | MessageItem) and field.startswith(".content"):
                field = field.replace(".image_url.url", ".image_url")
                return name + (field if isinstance(item, MessageItem) else field.replace(".content", ".output", 1))
        return next(iter(self.items))


class ResponseWriter:
    """Formats the answer to one request: complete, or as events."""

    def __init__(self, model: GenerationModel, body: ResponseBody, request: GenerationRequest) -> None:
        """Formats an answer of a model to a request, which was read from a body."""
        call = current_call()
        self._model = model
        self._body = body
        self._tokens = TokenWriter(model, unknown_bytes=[])
        self._reader = model.answer_reader(request)
        self._wants_logprobs = request.log_probabilities is not None
        self._head = {
            "id": f"resp_{call.request_id if call is not None else secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.bundle.manifest.name,
        }
        self._items: list[_OutputItem] = []
        self._text = ""  # of the model so far, with delimiters and calls
        self._waiting: list[tuple[int, TokenLogProbability]] = []  # tokens with their offsets, possibly the message's
        self._num_events = 0

    def whole(self, answer: Answer[GeneratedText]) -> dict[str, Any]:
        """Formats a complete answer."""
        (text,) = answer.results
        offsets = text.text_offsets() if self._wants_logprobs else ()
        _ = [*self._take(text.text, zip(offsets, text.result.tokens, strict=True)), *self._end(is_cut=_is_cut(text))]
        return self._ended(text)

    async def events(self, parts: AsyncGenerator[Delta | Answer[GeneratedText], None]) -> AsyncGenerator[bytes, None]:
        """Formats a model's output as the events of a stream; errors name fields as the request does."""
        with self._body.naming():
            async with aclosing(parts):
                async for part in parts:
                    if not self._num_events:
                        begun = self._response("in_progress")
                        kinds = ("response.created", "response.in_progress")
                        yield b"".join([self.event(kind, response=begun) for kind in kinds])
                    if isinstance(part, Delta):
                        tokens = zip(part.text_offsets, part.tokens, strict=True)
                        if written := b"".join(self._take(part.output, tokens)):
                            yield written
                        continue
                    (text,) = part.results
                    yield await asyncio.get_running_loop().run_in_executor(text_pool(), self._last, text)

    def _last(self, text: GeneratedText) -> bytes:
        """Formats the last events of a stream."""
        written = b"".join(self._end(is_cut=_is_cut(text)))
        ended = self._ended(text)
        return written + self.event(f"response.{ended['status']}", response=ended)

    def cut(self, failure: Failure) -> bytes:
        """Formats the end of a stream that failed."""
        message, code = failure.status.message, failure.code
        error = self.event("error", code=code, message=message, param=failure.field)
        kind = "invalid_prompt" if failure.http_status < 500 else "server_error"
        if failure.http_status == 429:
            kind = "rate_limit_exceeded"
        for item in self._items:
            item.status = item.status.replace("in_progress", "incomplete")
        failed = self._response("failed") | {"error": {"code": kind, "message": message}}
        return error + self.event("response.failed", response=failed)

    def _take(self, output: str, tokens: Iterable[tuple[int, TokenLogProbability]]) -> Iterator[bytes]:
        """Takes a part of the model's text; yields the events of its content."""
        if self._wants_logprobs:
            self._text += output
            self._waiting += tokens
        yield from self._add(self._reader.feed(output))

    def _add(self, content: AnswerDelta) -> Iterator[bytes]:
        if content.reasoning:
            yield from self._open_as("reasoning")
            yield self._items[-1].add(content.reasoning, self)
        if content.text:
            yield from self._open_as("message")
            item = self._items[-1]
            entries = self._tokens.entries(self._tokens_of_message(item, content.text))
            item.entries += entries
            yield item.add(content.text, self, logprobs=entries)
        for call in content.calls:
            if call.call_id:
                yield from self._close()
                yield from self._open("function_call", call_id=call.call_id, name=call.name)
            if call.arguments:
                yield self._items[-1].add(call.arguments, self)

    def _tokens_of_message(self, item: _OutputItem, text: str) -> list[TokenLogProbability]:
        """Returns the tokens of a message's next text, without those of the reasoning before it."""
        if not self._wants_logprobs:
            return []
        if item.start is None:
            thought = next((other.text for other in self._items if other.kind == "reasoning"), None)
            start = 0
            if thought is not None and (form := self._model.reasoning_form) is not None:
                after = self._text.index(thought) + len(thought)
                start = self._text.index(form.end, after) + len(form.end)
            item.start = self._text.index(text, start)
        end = item.start + item.length + len(text)
        found = [token for offset, token in self._waiting if item.start <= offset < end]
        self._waiting = [(offset, token) for offset, token in self._waiting if offset >= end]
        return found

    def _open_as(self, kind: str) -> Iterator[bytes]:
        """Opens an item of a kind unless it is open already."""
        if not self._items or self._items[-1].kind != kind or self._items[-1].status != "in_progress":
            yield from self._close()
            yield from self._open(kind)

    def _open(self, kind: str, **fields: str) -> Iterator[bytes]:
        item = _OutputItem(kind, len(self._items), fields)
        self._items.append(item)
        yield from item.begin(self)

    def _close(self, *, is_cut: bool = False) -> Iterator[bytes]:
        """Ends the open item, if any."""
        if self._items and self._items[-1].status == "in_progress":
            yield from self._items[-1].end(self, is_cut=is_cut)

    def _end(self, *, is_cut: bool) -> Iterator[bytes]:
        """Ends the answer, which has at least a message or a call unless it was cut."""
        yield from self._add(self._reader.end())
        yield from self._close(is_cut=is_cut)
        if not is_cut and not any(item.kind != "reasoning" for item in self._items):
            yield from self._open("message")
            yield from self._close()

    def _ended(self, text: GeneratedText) -> dict[str, Any]:
        counts = TokenCounts.of([text])
        thoughts = "".join(item.text for item in self._items if item.kind == "reasoning")
        num_thought = min(self._model.count_tokens(thoughts), counts.num_new) if thoughts else 0
        usage = {
            "input_tokens": counts.num_read,
            "input_tokens_details": {"cached_tokens": counts.num_cached, "cache_write_tokens": 0},
            "output_tokens": counts.num_new,
            "output_tokens_details": {"reasoning_tokens": num_thought},
            "total_tokens": counts.num_read + counts.num_new,
        }
        if _is_cut(text):
            details = {"reason": "max_output_tokens"}
            return self._response("incomplete") | {"incomplete_details": details, "usage": usage}
        return self._response("completed") | {"completed_at": int(time.time()), "usage": usage}

    def _response(self, status: str) -> dict[str, Any]:
        """Formats the answer so far, with the settings of the request."""
        body = self._body
        defaults = self._model.bundle.manifest.sampling_defaults or SamplingDefaults()
        return {
            **self._head,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "output": [item.shown() for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": defaults.temperature if body.temperature is None else body.temperature,
            "text": _text_options(body.text),
            "tool_choice": _choice(body),
            "tools": [_tool(tool) for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": defaults.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def event(self, kind: str, **fields: Any) -> bytes:
        """Formats the next event of the stream."""
        numbered = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + to_json(numbered) + b"\n\n"

    def __repr__(self) -> str:
        return f"ResponseWriter({len(self._items)} items, {self._num_events} events)"


class _OutputItem:
    """An item of an answer, as its text comes."""

    def __init__(self, kind: str, index: int, fields: dict[str, str]) -> None:
        """Begins an item of a kind.

        Args:
            kind: `reasoning`, `message` or `function_call`.
            index: Its index in the answer.
            fields: Id and name of a call.
        """
        self.kind = kind
        self.status = "in_progress"
        self.length = 0
        """Characters of its text so far."""
        self.entries: list[dict[str, Any]] = []
        """Tokens of a message with their log-probabilities."""
        self.start: int | None = None
        """Where a message begins in the model's text, if known."""
        self._fields = fields
        self._parts: list[str] = []
        self._has_begun = False
        self._place = {"item_id": f"{_PREFIXES[kind]}_{secrets.token_hex(16)}", "output_index": index}
        self._part_place = self._place | _PART_INDICES.get(kind, {})

    @property
    def text(self) -> str:
        """Its text, or the arguments of a call."""
        return "".join(self._parts)

    def begin(self, writer: ResponseWriter) -> Iterator[bytes]:
        """Yields the events of its beginning."""
        yield writer.event("response.output_item.added", output_index=self._place["output_index"], item=self.shown())
        self._has_begun = True
        if self.kind != "function_call":
            yield writer.event(f"response.{_PARTS[self.kind]}.added", **self._part_place, part=self._part())

    def add(self, text: str, writer: ResponseWriter, **fields: Any) -> bytes:
        """Takes further text; returns its event."""
        self._parts.append(text)
        self.length += len(text)
        return writer.event(f"response.{_TEXTS[self.kind]}.delta", **self._part_place, delta=text, **fields)

    def end(self, writer: ResponseWriter, *, is_cut: bool) -> Iterator[bytes]:
        """Yields the events of its end."""
        self.status = "incomplete" if is_cut else "completed"
        name = "arguments" if self.kind == "function_call" else "text"
        more = {"logprobs": self.entries} if self.kind == "message" else {}
        yield writer.event(f"response.{_TEXTS[self.kind]}.done", **self._part_place, **{name: self.text}, **more)
        if self.kind != "function_call":
            yield writer.event(f"response.{_PARTS[self.kind]}.done", **self._part_place, part=self._part())
        yield writer.event("response.output_item.done", output_index=self._place["output_index"], item=self.shown())

    def shown(self) -> dict[str, Any]:
        """Formats it as it is so far."""
        head = {"id": self._place["item_id"], "type": self.kind, "status": self.status}
        parts = [self._part()] if self._has_begun else []
        match self.kind:
            case "reasoning":
                return head | {"summary": parts}
            case "message":
                return head | {"role": "assistant", "content": parts}
            case _:
                return head | {**self._fields, "arguments": self.text}

    def _part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "summary_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.entries}

    def __repr__(self) -> str:
        return f"_OutputItem({self.kind}, {self.status}, {self.length} characters)"


_PREFIXES: Final = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_PARTS: Final = {"reasoning": "reasoning_summary_part", "message": "content_part"}
_PART_INDICES: Final = {"reasoning": {"summary_index": 0}, "message": {"content_index": 0}}
_TEXTS: Final = {
    "reasoning": "reasoning_summary_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
}


def _is_cut(text: GeneratedText) -> bool:
    return text.result.finish_reason is FinishReason.LENGTH


def _choice(body: ResponseBody) -> Any:
    choice = body.tool_choice
    return choice.model_dump() if isinstance(choice, FunctionChoice) else choice or "auto"


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return tool.model_dump(include={"type", "name", "description", "parameters", "strict"})


def _text_options(options: TextOptions) -> dict[str, Any]:
    wanted = options.format or TextFormat(type="text")
    return {"format": wanted.model_dump(by_alias=True, exclude_none=True), "verbosity": options.verbosity}
