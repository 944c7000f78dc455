"""Envelopes of Connect's messages, and the deadline of a call over HTTP."""

from __future__ import annotations

from typing import Final

from headway_server.errors import InvalidInputError
from headway_server.observers import current_call

HEAD_BYTES: Final = 5
"""Header of an envelope: flags, and the length of its message."""


def deadline_of(timeout_s: float | None) -> float | None:
    """Returns the deadline of the current call from a timeout that starts with the call.

    In seconds of `time.monotonic`; None without a timeout.
    """
    call = current_call()
    return None if timeout_s is None or call is None else call.started_at + timeout_s


def envelope(data: bytes, flags: int = 0) -> bytes:
    """Puts a message into an envelope."""
    return bytes((flags,)) + len(data).to_bytes(4, "big") + data


def open_envelope(body: bytes) -> bytes:
    """Returns the single message of a request from its envelope.

    Raises:
        InvalidInputError: The body is not one complete, uncompressed message.
    """
    if len(body) < HEAD_BYTES or int.from_bytes(body[1:HEAD_BYTES], "big") != len(body) - HEAD_BYTES:
        raise InvalidInputError("request", "is not one message in an envelope; send flags, length and message")
    if body[0]:
        raise InvalidInputError("request", f"has the flags {body[0]}; send it uncompressed")
    return body[HEAD_BYTES:]
