"""gRPC-Web: every method of the servicers with one request, for clients of browsers, in binary and in base64.

The protocol: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-WEB.md
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from google.rpc import status_pb2

from headway_server.errors import InvalidInputError
from headway_server.preprocessing.pool import request_pool
from headway_server.transports.http.edge import Edge, Endpoint, Reply, Request, Stream
from headway_server.transports.http.procedures import HEAD_BYTES, CallContext, Procedure, envelope, open_envelope
from headway_server.transports.http.status import Failure

GRPC_WEB: Final = b"application/grpc-web"
GRPC_WEB_TEXT: Final = b"application/grpc-web-text"
_TRAILERS: Final = 0x80
"""Flag of the last envelope, which holds trailers."""
_DECODED_ON_LOOP_BYTES: Final = 2**20
_UNITS_S: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])", re.ASCII)
_PLAIN: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""Characters of a message that are not escaped."""


def web_endpoint(edge: Edge, name: str, procedure: Procedure, *, is_text: bool) -> Endpoint:
    """Makes the application of a method, whose messages travel in base64 if `is_text`."""
    prefix = GRPC_WEB_TEXT if is_text else GRPC_WEB
    form = _Form(is_text=is_text)

    async def answer(request: Request) -> Reply | Stream:
        body = await _decode(request.body) if is_text else request.body
        message = await procedure.parse(open_envelope(body))
        answered = procedure.behaviour(message, CallContext.of(request, _timeout_s(request.headers)))
        if procedure.is_stream:
            return Stream(parts=_parts(answered, form), media_type=form.media_type)
        response = await answered
        return Reply(body=form.written(response) + form.trailers(), media_type=form.media_type)

    max_bytes = procedure.max_bytes + HEAD_BYTES
    return Endpoint(
        edge,
        name,
        answer,
        form,
        max_bytes=max_bytes * 4 // 3 + 4 if is_text else max_bytes,
        media_types=frozenset({prefix, prefix + b"+proto"}),
        is_admin=procedure.is_admin,
        timeout_of=_timeout_s,
    )


class _Form:
    """How answers and errors are written; these come with status 200, as trailers."""

    def __init__(self, *, is_text: bool) -> None:
        self._is_text = is_text
        self.media_type = (GRPC_WEB_TEXT if is_text else GRPC_WEB) + b"+proto"

    def refuse(self, failure: Failure, headers: Mapping[str, str]) -> Reply:  # noqa: ARG002 (the protocol's)
        """See `Form`."""
        return Reply(body=self.cut(failure), media_type=self.media_type)

    def cut(self, failure: Failure) -> bytes:
        """See `Form`."""
        return self.trailers(failure.status)

    def written(self, message: Any) -> bytes:
        """Writes a message."""
        return self._encode(envelope(message.SerializeToString()))

    def trailers(self, status: status_pb2.Status | None = None) -> bytes:
        """Writes the end of a call that was answered, or has failed."""
        lines = ["grpc-status: 0"]
        if status is not None:
            details = base64.b64encode(status.SerializeToString()).rstrip(b"=").decode()
            lines = [
                f"grpc-status: {status.code}",
                f"grpc-message: {quote(status.message, safe=_PLAIN)}",
                f"grpc-status-details-bin: {details}",
            ]
        return self._encode(envelope("".join(f"{line}\r\n" for line in lines).encode(), _TRAILERS))

    def _encode(self, data: bytes) -> bytes:
        return base64.b64encode(data) if self._is_text else data

    def __repr__(self) -> str:
        return f"_Form({self.media_type.decode()})"


async def _parts(responses: AsyncGenerator[Any, None], form: _Form) -> AsyncGenerator[bytes, None]:
    async with aclosing(responses):
        async for response in responses:
            yield form.written(response)
    yield form.trailers()


async def _decode(body: bytes) -> bytes:
    """Reads base64, off the event loop if it is long."""
    try:
        if len(body) <= _DECODED_ON_LOOP_BYTES:
            return base64.b64decode(body, validate=True)
        return await asyncio.get_running_loop().run_in_executor(
            request_pool(), partial(base64.b64decode, body, validate=True)
        )
    except binascii.Error as error:
        raise InvalidInputError("request", f"is no base64 ({error}); send {GRPC_WEB.decode()}, or encode it") from None


def _timeout_s(headers: Mapping[str, str]) -> float | None:
    """Reads how long the caller waits.

    Raises:
        InvalidInputError: It is not written as gRPC writes it.
    """
    given = headers.get("grpc-timeout")
    if given is None:
        return None
    if (found := _TIMEOUT.fullmatch(given)) is None:
        raise InvalidInputError(
            "grpc-timeout", f"is {given[:20]!r}; give at most 8 digits and a unit of H, M, S, m, u, n"
        )
    return int(found[1]) * _UNITS_S[found[2]]
