"""OpenAI's formats of errors and stream events."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from headway_server.preprocessing.pool import text_pool
from headway_server.transports.http.edge import Headers, Reply, to_json
from headway_server.transports.http.status import Failure

EVENT_STREAM: Final = b"text/event-stream"
DONE: Final = b"data: [DONE]\n\n"
MAX_NUMBERS_ON_LOOP: Final = 5_000
"""Maximum numbers formatted on the event loop, a few milliseconds."""

_NAMES: Final = (
    (re.compile(r"^parameters\.(?:sampling\.)?"), ""),
    (re.compile(r"^messages\.messages\b"), "messages"),
    (re.compile(r"^chat_template_kwargs_json\b"), "chat_template_kwargs"),
    (re.compile(r"\.reasoning$"), ".reasoning_content"),
    (re.compile(r"(\.tool_calls\[\d+\])\.arguments_json$"), r"\1.function.arguments"),
    (re.compile(r"^(tools\[\d+\])\.parameters_json_schema\b"), r"\1.function.parameters"),
    (re.compile(r"^constraint$"), "response_format"),
    (re.compile(r"^logit_biases\[\d+\](?:\.token_id|\.bias)?"), "logit_bias"),
    (re.compile(r"^stop_strings\b"), "stop"),
    (re.compile(r"^min_new_tokens\b"), "min_tokens"),
    (re.compile(r"^log_probabilities\.top_token_count\b"), "top_logprobs"),
    (re.compile(r"^(?:sample|image)_count\b"), "n"),
    (re.compile(r"^audios(?:\[0\])?"), "file"),
    (re.compile(r"^texts(?:\[0\])?"), "input"),
    (re.compile(r"^(?:format|include_timestamps)$"), "response_format"),
    (re.compile(r"^max_new_tokens\b"), "max_completion_tokens"),
)
"""Field names of tasks, and of OpenAI's API."""
_OF_COMPLETIONS: Final = {"top_logprobs": "logprobs", "max_completion_tokens": "max_tokens"}
"""The same for the older completions API."""


def name_of(field: str) -> str:
    """Translates a task's field name to OpenAI's."""
    for pattern, name in _NAMES:
        field = pattern.sub(name, field)
    return field


def name_in_completions(field: str) -> str:
    """Translates a task's field name to the completions API's."""
    name = name_of(field)
    return _OF_COMPLETIONS.get(name, name)


_OF_RESPONSES: Final = (
    (re.compile(r"^max_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"^response_format\.json_schema\.schema\b"), "text.format.schema"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
)
"""Names of chat completions' fields in responses, where they differ."""


def name_in_responses(field: str) -> str:
    """Translates a task's field name to that of `/v1/responses`."""
    field = name_of(field)
    for pattern, name in _OF_RESPONSES:
        field = pattern.sub(name, field)
    return field


def name_in_ranking(field: str) -> str:
    """Translates a task's field name to that of `/v1/rerank`."""
    return {"query_text": "query"}.get(field, re.sub(r"^texts\b", "documents", field))


def name_in_scoring(field: str) -> str:
    """Translates a task's field name to that of `/v1/score`."""
    return {"query_text": "text_1"}.get(field, re.sub(r"^texts\b", "text_2", field))


class OpenAIForm:
    """Format of OpenAI's errors."""

    def refuse(self, failure: Failure, headers: Mapping[str, str]) -> Reply:  # noqa: ARG002 (the protocol's)
        """See `Form`."""
        more: Headers = ()
        if (delay_s := failure.retry_after_s) is not None:
            more = (
                (b"retry-after", str(max(1, math.ceil(delay_s))).encode()),
                (b"retry-after-ms", str(math.ceil(delay_s * 1e3)).encode()),
            )
        if failure.http_status == 401:
            more = (*more, (b"www-authenticate", b"Bearer"))
        return Reply(status=failure.http_status, body=to_json(self._error(failure)), headers=more)

    def cut(self, failure: Failure) -> bytes:
        """See `Form`."""
        return event(self._error(failure))

    def _error(self, failure: Failure) -> dict[str, Any]:
        return {
            "error": {
                "message": failure.status.message,
                "type": failure.kind,
                "param": failure.field,
                "code": failure.code,
            }
        }

    def __repr__(self) -> str:
        return "OpenAIForm()"


OPENAI_FORM: Final = OpenAIForm()


def event(value: Any) -> bytes:
    """Writes an event of a stream."""
    return b"data: " + to_json(value) + b"\n\n"


async def formatted(make: Callable[[], dict[str, Any]], *, is_long: bool) -> Reply:
    """Formats an answer, off the event loop if it is long."""
    if not is_long:
        return Reply(body=to_json(make()))
    body = await asyncio.get_running_loop().run_in_executor(text_pool(), lambda: to_json(make()))
    return Reply(body=body)
