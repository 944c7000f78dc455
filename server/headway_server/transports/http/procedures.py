"""The protocol's own methods for whatever calls them over HTTP, and the envelopes in which messages travel there.

`cli.py` hands over the methods of the servicers of `transports/grpc/`, which nothing here imports.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

from google.protobuf.message import Message

from headway_server.errors import InvalidInputError
from headway_server.observers import current_call
from headway_server.transports.http.edge import Request

HEAD_BYTES: Final = 5
"""Of an envelope: flags, and the length of its message."""


class Procedure(Protocol):
    """A method that can be called."""

    @property
    def request_type(self) -> type[Message]:
        """Of its request."""

    @property
    def behaviour(self) -> Callable[[Any, Any], Any]:
        """Answers a request and a `CallContext`: a coroutine, or an asynchronous generator of a stream."""

    @property
    def parse(self) -> Callable[[bytes], Awaitable[Any]]:
        """Makes a request of its bytes; raises InvalidInputError."""

    @property
    def is_stream(self) -> bool:
        """True if the answer is a stream."""

    @property
    def is_admin(self) -> bool:
        """True if it changes the server."""

    @property
    def max_bytes(self) -> int:
        """Largest request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """What a servicer may ask of its call."""

    deadline: float | None
    """When the caller stops waiting, by `time.monotonic`."""
    headers: Mapping[str, str]

    @classmethod
    def of(cls, request: Request, timeout_s: float | None) -> Self:
        """Describes the present call, whose caller waits for so many seconds from its beginning."""
        call = current_call()
        deadline = None if timeout_s is None or call is None else call.started_at + timeout_s
        return cls(deadline=deadline, headers=request.headers)

    def time_remaining(self) -> float | None:
        """Returns the seconds until the deadline; None where there is none."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the headers of the request."""
        return tuple(self.headers.items())


def envelope(data: bytes, flags: int = 0) -> bytes:
    """Puts a message into an envelope."""
    return bytes((flags,)) + len(data).to_bytes(4, "big") + data


def open_envelope(body: bytes) -> bytes:
    """Takes the one message of a request out of its envelope.

    Raises:
        InvalidInputError: There is not one, whole and as it is.
    """
    if len(body) < HEAD_BYTES or int.from_bytes(body[1:HEAD_BYTES], "big") != len(body) - HEAD_BYTES:
        raise InvalidInputError("request", "is not one message in an envelope; send flags, length and message")
    if body[0]:
        raise InvalidInputError("request", f"has the flags {body[0]}; send it as it is, not compressed")
    return body[HEAD_BYTES:]
