"""Parameters of a generation call, and its prompts as tokens within the model's limits.

Shapes: T tokens of a prompt.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_server.decoding.constraints import CallRequest, ConstraintRequest
from headway_server.errors import ContextLengthError, FieldName, InvalidInputError, NoChatTemplateError
from headway_server.field_rules import most_characters, most_elements
from headway_server.observers import note_truncated
from headway_server.preprocessing import (
    CallForm,
    ChatTemplate,
    ChatTurn,
    NoToolsError,
    PromptEnd,
    ReasoningForm,
    TextTokenizer,
    Tool,
    TurnImage,
    WrittenImages,
)
from headway_server.serving.limits import check_count, check_size_of_call, check_text, check_token_ids, num_bytes
from headway_server.tasks.parameters import (
    DecodingLimits,
    Given,
    LogProbabilityRequest,
    SamplingPlan,
    check_rules,
)

CONSTRAINT_FIELD: Final = "parameters.constraint"
"""Name of a constraint in the typed API."""
_CONTEXT_TOKENS: Final = 16
MAX_PROMPTS: Final = most_elements("GenerateTextRequest.prompts")
"""Maximum prompts or conversations of a call."""
MAX_SALT_LENGTH: Final = most_characters("GenerateTextRequest.cache_salt")
MAX_TURNS: Final = most_elements("Conversation.messages")
"""Maximum turns of a conversation."""
MAX_PARTS: Final = most_elements("ChatMessage.parts")
"""Maximum parts of a turn."""

Conversation: TypeAlias = tuple[ChatTurn, ...]
Prompt: TypeAlias = str | Conversation | NDArray[np.int64]
"""A text, a conversation, or token ids, (T,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools of a conversation, and the rules for calling them."""

    tools: tuple[Tool, ...]
    callable_names: tuple[str, ...]
    """Names of the tools that may be called."""
    is_required: bool = False
    """True: the answer is a tool call. False: text may precede or replace the calls."""
    allows_several: bool = True
    """True: the answer may have several calls, if the chat template supports it."""

    def constraint(self, form: CallForm, answer: ConstraintRequest | None = None) -> ConstraintRequest:
        """Returns the constraint that admits only calls of this form.

        Args:
            form: How the model calls tools.
            answer: Constraint of an answer without calls, by a JSON schema.

        Raises:
            InvalidInputError: The answer has a constraint of another kind.
        """
        if answer is not None and answer.json_schema is None:
            raise InvalidInputError(
                answer.name or CONSTRAINT_FIELD,
                "is set together with tools, and is no JSON schema; leave one of the two out",
            )
        tools = tuple((tool.name, tool.parameters) for tool in self.tools if tool.name in self.callable_names)
        calls = CallRequest(
            form=form,
            tools=tools,
            allows_text=not self.is_required,
            lenient=frozenset(tool.name for tool in self.tools if not tool.is_strict),
            text_schema=None if answer is None else answer.json_schema,
            allows_several=self.allows_several,
        )
        return ConstraintRequest(calls=calls, name="" if answer is None else answer.name)

    def name_of(self, field: str) -> str:
        """Returns the name in a request of a field of its constraint, `parameters.constraint.calls`."""
        found = re.fullmatch(rf"{re.escape(CONSTRAINT_FIELD)}\.calls(?:\[(\d+)\])?", field)
        if found is None:
            return field
        if found[1] is None:
            return "tools"
        indices = [index for index, tool in enumerate(self.tools) if tool.name in self.callable_names]
        return f"tools[{indices[int(found[1])]}].parameters_json_schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Parameters of a call, for all its prompts. Values out of range raise InvalidInputError."""

    parameters: Given = dataclasses.field(default_factory=dict)
    """Sampling parameters, whose ranges depend on the model. Unset ones take the model's defaults."""
    sample_count: int = 1
    """Continuations of each prompt; adjacent in the answer."""
    truncate: bool = False
    """True cuts the beginning off a prompt that is too long; False refuses it."""
    echo: bool = False
    """True repeats the prompt at the beginning of each text."""
    log_probabilities: LogProbabilityRequest | None = None
    """Log-probabilities to return; None: none."""
    priority: int = 0
    """Priority in the queue; higher goes first."""
    cache_salt: str = ""
    """Isolates the prefix cache: only prompts with the same salt share it."""
    deadline: float | None = None
    """End of the caller's wait, in seconds of `time.monotonic`."""
    tools: ToolUse | None = None
    """Tools; only with a conversation and without a constraint."""
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """JSON values by variable name, for the chat template of a conversation."""
    hints: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further such values, for a template that reads these variables; others are not given them."""
    end: PromptEnd = PromptEnd.NEW_TURN
    """How the prompt of a conversation ends."""
    shows_reasoning: bool = False
    """True: texts include the delimiters of reasoning, also a start delimiter at the end of the prompt."""

    def __post_init__(self) -> None:
        check_rules("sample_count", self.sample_count, "GenerateTextRequest.sample_count")
        check_rules("priority", self.priority, "GenerateTextRequest.priority")
        if len(self.cache_salt) > MAX_SALT_LENGTH:
            raise InvalidInputError(
                "cache_salt", f"has {len(self.cache_salt)} characters; at most {MAX_SALT_LENGTH}, such as a hash"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompt:
    """A prompt within the model's limits."""

    text: str | None
    """The caller's prompt or the rendered chat template; None for a prompt of token ids."""
    input_ids: NDArray[np.int64]
    """(T,)"""
    max_new_tokens: int
    truncated: bool
    shown: str = ""
    """Beginning of the text: empty, or the prompt with `echo`."""

    @property
    def context_ids(self) -> list[int]:
        """Its last tokens; decoding of the following text may depend on them."""
        last: list[int] = self.input_ids[-_CONTEXT_TOKENS:].tolist()
        return last


class PromptReader:
    """Reads prompts for one model."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        limits: DecodingLimits,
        chat_template: ChatTemplate | None,
        owner: str,
        prefix: Sequence[int] = (),
        media_tokens: Sequence[int] = (),
        image_token: int | None = None,
    ) -> None:
        """Takes the parts of the model `owner`.

        Args:
            tokenizer: The model's.
            limits: The model's.
            chat_template: The model's, if it has one.
            owner: Name of the model.
            prefix: Tokens put before a text prompt.
            media_tokens: Tokens that no caller may write, since they stand for images and sounds.
            image_token: The one of them that stands for an image's embedding, if the model reads images.
        """
        self._tokenizer = tokenizer
        self._limits = limits
        self._chat_template = chat_template
        self._owner = owner
        self._prefix = np.array(prefix, np.int64)
        self._media_tokens = np.array(media_tokens, np.int64)
        self._image_token = image_token

    def check_kind(self, prompts: Sequence[Prompt]) -> None:
        """Checks that the model supports this kind of prompts, before any work is done for a call.

        Raises:
            NoChatTemplateError: The prompts are conversations, and the model has no chat template.
        """
        if self._chat_template is None and any(isinstance(prompt, tuple) for prompt in prompts):
            raise NoChatTemplateError(
                f"{self._owner} has no chat template, so it continues prompts but no conversations; "
                "write the conversation as a prompt, or ask a model that has one"
            )

    def check_images(self, prompts: Sequence[Prompt]) -> None:
        """Checks that the model reads images, if conversations have some.

        Raises:
            InvalidInputError: It does not.
        """
        if self._image_token is None and (images := [one for prompt in prompts for one in images_of(prompt)]):
            raise InvalidInputError(
                images[0].field,
                f"is an image, and {self._owner} reads text alone; leave it out, or ask a model that reads images",
            )

    def call_form(self) -> CallForm:
        """Returns the model's form of tool calls.

        Raises:
            InvalidInputError: The chat template supports no tools.
        """
        assert self._chat_template is not None, "see check_kind"
        try:
            return self._chat_template.call_form
        except NoToolsError as problem:
            raise InvalidInputError(
                "tools",
                f"are set, and the chat template of {self._owner} {problem}; leave them out, or ask another model",
            ) from None

    def check_variables(self, variables: Mapping[str, Any], field: str) -> None:
        """Checks a caller's variables of the chat template; args and errors: `ChatTemplate.check_variables`."""
        if variables:
            assert self._chat_template is not None, "see check_kind"
            self._chat_template.check_variables(variables, field)

    @property
    def reasoning_form(self) -> ReasoningForm | None:
        """Delimiters of the model's reasoning, from its chat template; None if it has none."""
        return None if self._chat_template is None else self._chat_template.reasoning_form

    async def read(
        self,
        prompts: Sequence[Prompt],
        *,
        fields: Sequence[str],
        plan: SamplingPlan,
        truncate: bool,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        hints: Mapping[str, Any] | None = None,
        end: PromptEnd = PromptEnd.NEW_TURN,
        images: Sequence[WrittenImages] = (),
    ) -> list[FittedPrompt]:
        """Tokenizes prompts and fits them to the model's limits; stops at the first invalid prompt.

        Args:
            prompts: Texts, conversations or token ids, all of one kind, checked by `check_kind`.
            fields: Name of each in the request, for error messages.
            plan: The call's parameters.
            truncate: True cuts the beginning off a prompt that is too long; False refuses it.
            tools: Tools of a conversation.
            variables: Variables of the chat template, checked by `check_variables`.
            hints: Further variables, which only a template that reads them is given.
            end: How the prompt of a conversation ends.
            images: What stands for the images of each conversation; empty for a model that reads none.

        Raises:
            InvalidInputError: The chat template rejects a conversation, `fit_prompt` rejects a prompt, or a token id is
                not
            in the vocabulary.
        """
        fitted: list[FittedPrompt] = []
        if hints and self._chat_template is not None:
            variables = {
                **{name: value for name, value in hints.items() if name in self._chat_template.variables},
                **(variables or {}),
            }
        async with aclosing(self._encode(prompts, fields, tools, variables, end, images=images)) as encoded:
            async for text, input_ids in encoded:
                index = len(fitted)
                self._check_media(input_ids, fields[index], has_images=bool(images_of(prompts[index])))
                fitted.append(
                    fit_prompt(
                        text,
                        input_ids,
                        num_prefix_tokens=len(self._prefix) if isinstance(prompts[index], str) else 0,
                        field=fields[index],
                        plan=plan,
                        limits=self._limits,
                        truncate=truncate,
                    )
                )
        return fitted

    def _check_media(self, input_ids: NDArray[np.int64], field: str, *, has_images: bool) -> None:
        """Checks that no token of a prompt, (T,), stands for an image or a sound, but for its images' own.

        Raises:
            InvalidInputError: One does.
        """
        allowed = [] if self._image_token is None or not has_images else [self._image_token]
        if not len(self._media_tokens):
            return
        if len(found := np.setdiff1d(np.intersect1d(input_ids, self._media_tokens), allowed)):
            reads = "reads text alone" if self._image_token is None else "reads images in conversations"
            raise InvalidInputError(
                field,
                f"has {self._tokenizer.piece(int(found[0]))}, which stands for an image or a sound, and {self._owner} "
                f"{reads}; leave it out",
            )

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        field: str,
        add_special_tokens: bool,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        end: PromptEnd = PromptEnd.NEW_TURN,
        images: WrittenImages | None = None,
    ) -> NDArray[np.int64]:
        """Returns the tokens of a prompt, (T,), of any length; args and errors: `read`.

        `add_special_tokens` puts the model's first tokens before a text, as generation does.
        """
        written = [] if images is None else [images]
        async with aclosing(self._encode([prompt], [field], tools, variables, end, images=written)) as encoded:
            async for _, input_ids in encoded:
                skipped = len(self._prefix) if isinstance(prompt, str) and not add_special_tokens else 0
                return input_ids[skipped:]
        raise AssertionError("a prompt is encoded or refused")

    async def _encode(
        self,
        prompts: Sequence[Prompt],
        fields: Sequence[str],
        tools: Sequence[Tool],
        variables: Mapping[str, Any] | None,
        end: PromptEnd = PromptEnd.NEW_TURN,
        *,
        images: Sequence[WrittenImages] = (),
    ) -> AsyncGenerator[tuple[str | None, NDArray[np.int64]], None]:
        """Yields the text and the tokens (T,) of each prompt.

        The tokenizer's post-processor is not used: an end token would end the prompt. The manifest's `prompt_prefix`
        replaces its start tokens.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        conversations = [prompt for prompt in prompts if isinstance(prompt, tuple)]
        assert len(texts) in (0, len(prompts)), "a call has one kind"
        assert len(conversations) in (0, len(prompts)), "a call has one kind"
        async with aclosing(self._tokenizer.encode_each(texts, add_special_tokens=False)) as each:
            index = 0
            async for encoded in each:
                ids = encoded.input_ids
                yield texts[index], np.concatenate([self._prefix, ids]) if len(self._prefix) else ids
                index += 1
        for number, (conversation, field) in enumerate(zip(conversations, fields, strict=False)):
            assert self._chat_template is not None, "see check_kind"
            (prompt,) = await self._chat_template.encode(
                [conversation],
                fields=[field],
                tools=tools,
                variables=variables,
                end=end,
                images=images[number] if images_of(conversation) else None,
            )
            yield prompt.text, prompt.input_ids
        for input_ids, field in zip(prompts, fields, strict=True):
            if isinstance(input_ids, np.ndarray):
                check_token_ids(field, input_ids, self._limits.vocab_size - 1)
                yield None, input_ids

    def __repr__(self) -> str:
        return f"PromptReader({self._owner}, {'no' if self._chat_template is None else 'a'} chat template)"


def images_of(prompt: Prompt) -> list[TurnImage]:
    """Returns the images of a conversation in order; of another prompt none."""
    return [image for turn in prompt for image in turn.images] if isinstance(prompt, tuple) else []


def check_prompts(prompts: Sequence[Prompt], fields: Sequence[str], max_bytes: int) -> None:
    """Checks the prompts or conversations of a call, before any work is done for them.

    Args:
        prompts: Texts, conversations or tokens.
        fields: Name of each in the request, such as `prompts[3]`.
        max_bytes: Largest prompt, or conversation, in UTF-8.

    Raises:
        InvalidInputError: There are too few or too many, one fails `check_prompt`, or all together exceed the maximum
        bytes of a call.
    """
    if not prompts:
        raise InvalidInputError("prompts", f"is empty; give 1 to {MAX_PROMPTS}, or conversations instead")
    field = fields[0].partition("[")[0]
    check_count(field, len(prompts), MAX_PROMPTS)
    for prompt, name in zip(prompts, fields, strict=True):
        check_prompt(prompt, name, max_bytes)
    check_size_of_call(field, (text for prompt in prompts for text in _texts(prompt)), max_bytes)


def check_prompt(prompt: Prompt, field: str, max_bytes: int) -> None:
    """Checks one prompt or conversation; `field` is its name in the request.

    Raises:
        InvalidInputError: A text is empty, a conversation has no turns or too many, or the text in UTF-8 or the array
            of
        token ids exceeds `max_bytes`.
    """
    if isinstance(prompt, np.ndarray):
        check_count(field, len(prompt), max_bytes // prompt.itemsize, "leave out the first ones")
        return
    if not prompt and isinstance(prompt, str):
        raise InvalidInputError(field, "is empty; give at least one character, or a conversation instead")
    if isinstance(prompt, str):
        check_text(field, prompt, max_bytes)
        return
    check_count(f"{field}.messages", len(prompt), MAX_TURNS, "leave out the first ones")
    for index, turn in enumerate(prompt):
        if turn.content or not (turn.images or turn.role in ("assistant", "tool")):  # which may have said nothing
            check_text(f"{field}.messages[{index}].content", turn.content, max_bytes)
    if (size := sum(map(num_bytes, _texts(prompt)))) > max_bytes:
        raise InvalidInputError(
            field, f"has {size} bytes in all, the limit is {max_bytes}; leave out the first messages"
        )


def _texts(prompt: Prompt) -> list[str]:
    if isinstance(prompt, tuple):
        return [text for turn in prompt for text in turn.texts]
    return [prompt] if isinstance(prompt, str) else []


def fit_prompt(
    text: str | None,
    input_ids: NDArray[np.int64],
    *,
    num_prefix_tokens: int,
    field: str,
    plan: SamplingPlan,
    limits: DecodingLimits,
    truncate: bool,
) -> FittedPrompt:
    """Fits a prompt to the model's limits.

    A prompt may have `max_input_tokens`, and must leave room for `max_new_tokens`, or for one token if that is not set.
    A longer prompt is refused or truncated. Without `max_new_tokens`, the text may go on to the
    model's default number or maximum length, and truncation leaves room for the expected number (at most half of the
    model's length).

    Args:
        text: The prompt; None for a prompt of token ids.
        input_ids: (T,) its tokens.
        num_prefix_tokens: Model's prefix tokens at its beginning, which truncation keeps.
        field: Its name in the request.
        plan: The call's parameters.
        limits: The model's.
        truncate: True cuts a longer prompt.

    Raises:
        InvalidInputError: It has no tokens, is too long, or leaves no room for `max_new_tokens`.
    """
    total, requested = limits.max_total_tokens, plan.requested_new_tokens
    if len(input_ids) == 0:
        raise InvalidInputError(field, "has nothing the model reads; give it at least one word")
    limit = min(limits.max_input_tokens, total - (requested or 1))
    truncated = len(input_ids) > limit
    if truncated and not truncate:
        raise _too_long(len(input_ids), limit, field, requested, limits)
    if truncated:
        note_truncated()
        room = requested or min(plan.expected_new_tokens, total // 2)
        length = min(limit, total - room)
        kept = min(num_prefix_tokens, length)
        input_ids = np.concatenate([input_ids[:kept], input_ids[len(input_ids) - (length - kept) :]])
    left = total - len(input_ids)
    max_new_tokens = requested or min(plan.default_new_tokens or left, left)
    if plan.parameters.min_new_tokens > max_new_tokens:
        raise InvalidInputError(
            "parameters.min_new_tokens",
            f"is {plan.parameters.min_new_tokens}; must be from 0 to {max_new_tokens}, the most tokens that follow ",
            FieldName(field),
            "; ask for fewer, or set ",
            FieldName("max_new_tokens"),
            " too",
        )
    return FittedPrompt(text=text, input_ids=input_ids, max_new_tokens=max_new_tokens, truncated=truncated)


def _too_long(
    length: int, limit: int, field: str, requested_new_tokens: int | None, limits: DecodingLimits
) -> ContextLengthError:
    total = limits.max_total_tokens
    if length <= min(limits.max_input_tokens, total - 1):
        return ContextLengthError(
            "parameters.max_new_tokens",
            f"is {requested_new_tokens}; ",
            FieldName(field),
            f" has {length} tokens of the model's maximum of {total}, so at most "
            f"{total - length} can follow; ask for fewer, shorten the prompt, or set truncate to have it cut",
        )
    return ContextLengthError(
        field,
        f"has {length} tokens; at most {limit} leave room within the model's maximum of {total}; "
        "shorten it, or set truncate to have its beginning cut",
    )
