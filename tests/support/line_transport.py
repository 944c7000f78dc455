"""A second transport, as small as one can be: a line of JSON asks, a line of JSON answers, one call a connection."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

from headway_server.errors import InvalidInputError, OverloadedError, RequestError
from headway_server.serving.calls import Calls
from headway_server.serving.host import ModelHost
from headway_server.tasks.table import CLASSIFY_TEXTS


class LineTransport:
    """Answers `{"texts": [...], "pause_s": 0.1, "timeout_s": 1}` by the tiny family's models."""

    def __init__(self, host: ModelHost, calls: Calls) -> None:
        self._host = host
        self._calls = calls

    @asynccontextmanager
    async def listening(self) -> Any:
        """Listens as long as the context lasts; gives the port."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        try:
            reply = await self._call(line)
        except RequestError as error:  # this transport's table of errors
            reply = {"error": type(error).__name__, "message": str(error)}
            if isinstance(error, InvalidInputError):
                reply["field"] = error.field
            if isinstance(error, OverloadedError):
                reply["retry_after_s"] = error.retry_after_s
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()
        writer.close()

    async def _call(self, line: bytes) -> dict[str, Any]:
        request = json.loads(line)
        async with self._calls.answer(
            "/lines/reverse",
            metadata=[("user", request.get("user", ""))],
            num_bytes=len(line),
            timeout_s=request.get("timeout_s"),
        ):
            model = self._host.find(CLASSIFY_TEXTS, request.get("model", ""), "")
            answer = await model.reverse(request["texts"], pause_s=request.get("pause_s", 0.0))
            return {"results": answer.results}


async def ask(port: int, **request: Any) -> dict[str, Any]:
    """Sends a request and returns its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(json.dumps(request).encode() + b"\n")
    reply: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    await writer.wait_closed()
    return reply
