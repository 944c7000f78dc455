"""Errors in OpenAI's form, and events of a stream."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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
    (re.compile(r"\bsample_count\b"), "n"),
    (re.compile(r"\btexts\b(?=\[|:|$)"), "input"),
    (re.compile(r"\bmax_new_tokens\b"), "max_completion_tokens"),
)
"""What the tasks call a field, and what OpenAI's API does."""


class OpenAIForm:
    """How OpenAI's API writes errors."""

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
        return Reply(status=failure.http_status, body=to_json(_error(failure)), headers=more)

    def cut(self, failure: Failure) -> bytes:
        """See `Form`."""
        return event(_error(failure))

    def __repr__(self) -> str:
        return "OpenAIForm()"


OPENAI_FORM: Final = OpenAIForm()


def event(value: Any) -> bytes:
    """Writes an event of a stream."""
    return b"data: " + to_json(value) + b"\n\n"


def _error(failure: Failure) -> dict[str, Any]:
    return {
        "error": {
            "message": _renamed(failure.status.message),
            "type": failure.kind,
            "param": None if failure.field is None else _renamed(failure.field),
            "code": failure.code,
        }
    }


def _renamed(text: str) -> str:
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text
