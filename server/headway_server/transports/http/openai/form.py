"""Errors in OpenAI's form, and events of a stream."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from headway_server.transports.http.edge import Headers, Reply, to_json
from headway_server.transports.http.status import Failure

EVENT_STREAM: Final = b"text/event-stream"
DONE: Final = b"data: [DONE]\n\n"

_NAMES: Final = (
    (re.compile(r"\bparameters\.(?:sampling\.)?"), ""),
    (re.compile(r"\bmessages\.messages\b"), "messages"),
    (re.compile(r"\bconstraint\.json_schema\b"), "response_format.json_schema.schema"),
    (re.compile(r"\bconstraint\.calls\b"), "tools"),
    (re.compile(r"\blogit_biases\[\d+\](?:\.token_id|\.bias)?"), "logit_bias"),
    (re.compile(r"\bstop_strings\b"), "stop"),
    (re.compile(r"\bmin_new_tokens\b"), "min_tokens"),
    (re.compile(r"\blog_probabilities\.top_token_count\b"), "top_logprobs"),
    (re.compile(r"\b(?:sample|image)_count\b"), "n"),
    (re.compile(r"\baudios(?:\[0\])?"), "file"),
    (re.compile(r"\btexts\b(?=\[|:|$)"), "input"),
    (re.compile(r"\bmax_new_tokens\b"), "max_completion_tokens"),
)
"""What the tasks call a field, and what OpenAI's API does."""
_OF_COMPLETIONS: Final = {"top_logprobs": "logprobs", "max_completion_tokens": "max_tokens"}
"""What the older API of completions calls the same."""


class OpenAIForm:
    """How OpenAI's API writes errors."""

    def __init__(self, others: Mapping[str, str] = MappingProxyType({})) -> None:
        """Takes the names that an API has in place of the usual ones."""
        self._names = tuple((pattern, others.get(name, name)) for pattern, name in _NAMES)

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
                "message": self._renamed(failure.status.message),
                "type": failure.kind,
                "param": None if failure.field is None else self._renamed(failure.field),
                "code": failure.code,
            }
        }

    def _renamed(self, text: str) -> str:
        for pattern, name in self._names:
            text = pattern.sub(name, text)
        return text

    def __repr__(self) -> str:
        return "OpenAIForm()"


OPENAI_FORM: Final = OpenAIForm()
COMPLETIONS_FORM: Final = OpenAIForm(_OF_COMPLETIONS)


def event(value: Any) -> bytes:
    """Writes an event of a stream."""
    return b"data: " + to_json(value) + b"\n\n"
