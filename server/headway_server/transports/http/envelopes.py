"""The envelopes in which messages of Connect travel, and the deadline of a call over HTTP."""

from __future__ import annotations

from typing import Final

from headway_server.errors import InvalidInputError
from headway_server.observers import current_call

HEAD_BYTES: Final = 5
"""Of an envelope: flags, and the length of its message."""


def deadline_of(timeout_s: float | None) -> float | None:
    """Returns when the caller of the present call stops waiting, who waits for so many seconds from its beginning.

    By `time.monotonic`; None where there is no deadline.
    """
    call = current_call()
    return None if timeout_s is None or call is None else call.started_at + timeout_s


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
