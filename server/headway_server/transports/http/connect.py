"""The Connect protocol: every method of the servicers with one request, for browsers and `curl`, in JSON and binary.

The protocol: https://connectrpc.com/docs/protocol/
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from google.protobuf.json_format import MessageToJson, Parse, ParseError
from google.protobuf.message import Message
from google.rpc import status_pb2
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from headway_server.errors import InvalidInputError
from headway_server.preprocessing.pool import text_pool
from headway_server.services import Procedure
from headway_server.transports.http.edge import Edge, Endpoint, Handler, Reply, Request, Stream, to_json
from headway_server.transports.http.envelopes import HEAD_BYTES, deadline_of, envelope, open_envelope
from headway_server.transports.http.status import Failure

_JSON: Final = b"application/json"
_PROTO: Final = b"application/proto"
_JSON_STREAM: Final = b"application/connect+json"
_PROTO_STREAM: Final = b"application/connect+proto"
_END: Final = 2
"""Flag of the last envelope of a stream, with JSON."""
_MAX_TIMEOUT_DIGITS: Final = 10
_WRITTEN_ON_LOOP_BYTES: Final = 16 * 2**10
"""Limit of messages formatted as JSON on the event loop, in bytes; takes a few milliseconds."""
_MAX_DEPTH: Final = 64
_PARSED_FIELD: Final = re.compile(r"Failed to parse (\w+) field").match

_CODES: Final = {
    1: ("canceled", 499),
    2: ("unknown", 500),
    3: ("invalid_argument", 400),
    4: ("deadline_exceeded", 504),
    5: ("not_found", 404),
    6: ("already_exists", 409),
    7: ("permission_denied", 403),
    8: ("resource_exhausted", 429),
    9: ("failed_precondition", 400),
    10: ("aborted", 409),
    11: ("out_of_range", 400),
    12: ("unimplemented", 501),
    13: ("internal", 500),
    14: ("unavailable", 503),
    15: ("data_loss", 500),
    16: ("unauthenticated", 401),
}
"""Name and status of each of gRPC's codes, as the protocol defines them."""


class _UnaryForm:
    """Format of errors of unary methods."""

    def refuse(self, failure: Failure, headers: Mapping[str, str]) -> Reply:  # noqa: ARG002 (the protocol's)
        """See `Form`."""
        status = 415 if failure.http_status == 415 else _CODES.get(failure.status.code, _CODES[2])[1]
        return Reply(status=status, body=to_json(_error(failure.status)))

    def cut(self, failure: Failure) -> bytes:
        """See `Form`; there is no stream."""
        raise AssertionError(failure)


class _StreamForm:
    """Format of errors of streaming methods: the end of the stream, with status 200."""

    def refuse(self, failure: Failure, headers: Mapping[str, str]) -> Reply:
        """See `Form`."""
        if failure.http_status == 415:  # so that the client notices the wrong endpoint
            return Reply(status=415, body=to_json(_error(failure.status)))
        is_binary = headers.get("content-type", "").lower().startswith(_PROTO_STREAM.decode())
        return Reply(body=self.cut(failure), media_type=_PROTO_STREAM if is_binary else _JSON_STREAM)

    def cut(self, failure: Failure) -> bytes:
        """See `Form`."""
        return envelope(to_json({"error": _error(failure.status)}), _END)


def connect_routes(edge: Edge, procedures: Mapping[str, Procedure]) -> list[BaseRoute]:
    """Returns the routes of the methods."""
    methods = _Methods(edge, {name: one for name, one in procedures.items() if not one.takes_stream})
    services = sorted({name.rpartition("/")[0] for name in procedures})
    return [Route(f"{service}/{{method}}", methods) for service in services]


class _Methods:
    """The ASGI application of all methods."""

    def __init__(self, edge: Edge, procedures: Mapping[str, Procedure]) -> None:
        unary, stream = _UnaryForm(), _StreamForm()
        self._endpoints = {
            name: Endpoint(
                edge,
                name,
                _answer_in_parts(procedure) if procedure.is_stream else _answer_at_once(procedure),
                stream if procedure.is_stream else unary,
                max_bytes=procedure.max_bytes + (HEAD_BYTES if procedure.is_stream else 0),
                media_types=frozenset({_JSON_STREAM, _PROTO_STREAM} if procedure.is_stream else {_JSON, _PROTO}),
                is_admin=procedure.is_admin,
                timeout_of=_timeout_s,
            )
            for name, procedure in procedures.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise HTTPException(405, headers={"Allow": "POST"})
        await self._endpoints.get(scope["path"], self._unknown)(scope, receive, send)

    async def _unknown(self, scope: Scope, _: Receive, send: Send) -> None:
        message = f"there is no method {scope['path'][:200]}; a method with a stream of requests is called by gRPC"
        body = to_json({"code": "unimplemented", "message": message})
        headers = [(b"content-type", _JSON), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def __repr__(self) -> str:
        return f"_Methods({len(self._endpoints)})"


def _answer_at_once(procedure: Procedure) -> Handler:
    async def answer(request: Request) -> Reply:
        is_json = _is_json(request, _JSON)
        message = await _read(procedure, request, is_json=is_json)
        response = await procedure.answer(message, deadline_of(_timeout_s(request.headers)))
        return Reply(body=await _write(response, is_json=is_json), media_type=_JSON if is_json else _PROTO)

    return answer


def _answer_in_parts(procedure: Procedure) -> Handler:
    async def answer(request: Request) -> Stream:
        is_json = _is_json(request, _JSON_STREAM)
        opened = Request(headers=request.headers, path=request.path, body=open_envelope(request.body))
        message = await _read(procedure, opened, is_json=is_json)
        responses = procedure.answer(message, deadline_of(_timeout_s(request.headers)))
        return Stream(
            parts=_envelopes(responses, is_json=is_json), media_type=_JSON_STREAM if is_json else _PROTO_STREAM
        )

    return answer


async def _envelopes(responses: AsyncGenerator[Any, None], *, is_json: bool) -> AsyncGenerator[bytes, None]:
    async with aclosing(responses):
        async for response in responses:
            yield envelope(await _write(response, is_json=is_json))
    yield envelope(b"{}", _END)


def _is_json(request: Request, media_type: bytes) -> bool:
    return request.headers["content-type"].lower().startswith(media_type.decode())


async def _read(procedure: Procedure, request: Request, *, is_json: bool) -> Message:
    """Parses a body.

    Raises:
        InvalidInputError: It is not a message, or has too many fields.
    """
    if not is_json:
        message: Message = await procedure.parse(request.body)
        return message
    return await request.parse(lambda body: _parse_json(body, procedure.request_type))


def _parse_json(body: bytes, kind: type[Message]) -> Message:
    try:
        return Parse(body.decode() or "{}", kind(), max_recursion_depth=_MAX_DEPTH)
    except (ParseError, UnicodeError, RecursionError) as error:
        raise InvalidInputError("request", f"is not {kind.DESCRIPTOR.name} in JSON: {_problem_of(error)}") from None


def _problem_of(error: BaseException) -> str:
    """Says what the parser found; of a value of a wrong type, which it finds by running into it, only the field."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, ParseError) and isinstance(at.__cause__, TypeError) and (name := _PARSED_FIELD(str(at))):
            return f"the field {name[1]} has a value of a type that it does not take"
        at = at.__cause__
    return str(error)[:300]


async def _write(message: Message, *, is_json: bool) -> bytes:
    """Serializes a message; large JSON off the event loop."""
    if not is_json:
        return message.SerializeToString()
    if message.ByteSize() <= _WRITTEN_ON_LOOP_BYTES:
        return MessageToJson(message, indent=None, ensure_ascii=False).encode()
    text: str = await asyncio.get_running_loop().run_in_executor(
        text_pool(), lambda: MessageToJson(message, indent=None, ensure_ascii=False)
    )
    return text.encode()


def _timeout_s(headers: Mapping[str, str]) -> float | None:
    """Returns the caller's timeout in seconds.

    Raises:
        InvalidInputError: It is not a number of milliseconds.
    """
    given = headers.get("connect-timeout-ms")
    if given is None:
        return None
    if not (given.isdecimal() and given.isascii() and len(given) <= _MAX_TIMEOUT_DIGITS):
        limit = f"at most {_MAX_TIMEOUT_DIGITS} digits"
        raise InvalidInputError("connect-timeout-ms", f"is {given[:20]!r}; give milliseconds, {limit}")
    return int(given) / 1e3


def _error(status: status_pb2.Status) -> dict[str, Any]:
    """Formats an error of the protocol, with details."""
    error: dict[str, Any] = {"code": _CODES.get(status.code, _CODES[2])[0], "message": status.message}
    if status.details:
        error["details"] = [
            {
                "type": detail.type_url.rpartition("/")[2],
                "value": base64.b64encode(detail.value).rstrip(b"=").decode(),
            }
            for detail in status.details
        ]
    return error
