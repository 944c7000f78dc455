"""Connections of the HTTP port, with limits in number, bytes and time, which uvicorn lacks."""

from __future__ import annotations

import time
from typing import Any, Final

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD_BYTES: Final = 64 * 2**10
"""Largest request line with its headers."""
_PARSED_AT_ONCE_BYTES: Final = 2**10
"""Bytes parsed before a check for a complete request: at most sixty of the smallest requests."""
_PROBE_AGAIN_S: Final = 0.05
_PROBE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Bytes that a waiting client ignores, and that a disconnected one answers with a reset."""


class _AnyLength(int):
    """Length of a body that ends with its connection."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _AnyLength:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class _Flow(FlowControl):
    """Flow control of reading, which also stops while received bytes are unparsed."""

    is_paused = False

    def pause(self) -> None:
        """Stops reading until `resume`."""
        self.is_paused = True
        self.pause_reading()

    def resume(self) -> None:
        """Resumes reading."""
        self.is_paused = False
        self.resume_reading()

    def resume_reading(self) -> None:
        """Resumes reading, unless `pause` stopped it."""
        if not self.is_paused:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """A connection; the application finds it in the state of its scope.

    Attributes:
        max_connections: Limit of open connections; further ones are closed at once.
    """

    max_connections = 0
    flow: _Flow

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reads_head, self._head_bytes = True, 0
        self._awaits_head_since: float | None = time.monotonic()
        self._unread: tuple[int, float] | None = None
        self._sends_no_more = False
        self._unparsed = b""

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self.app_state = {"connection": self, "certificate_names": _certificate_names(transport)}
        if len(self.connections) > self.max_connections:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self.app_state = {}  # it references this connection
        self._unparsed, self.flow.is_paused = b"", False

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`. Data after a waiting request is parsed after its answer."""
        if self._is_idle and self._awaits_head_since is None:
            self._awaits_head_since = time.monotonic()
        self._unparsed = self._unparsed + data if self._unparsed else data
        self._parse()

    def _parse(self) -> None:
        """Parses received data, until a request has to wait for its predecessor."""
        data, start = self._unparsed, 0
        while start < len(data) and not self.pipeline and not self.transport.is_closing():
            part = data[start : start + _PARSED_AT_ONCE_BYTES]
            start += len(part)
            if self._reads_head:
                self._head_bytes += len(part)
                if self._head_bytes > _MAX_HEAD_BYTES and not self._has_head_within(part):
                    return
            self._feed(part)
        self._unparsed = data[start:]
        if self._unparsed:
            self.flow.pause()
        elif self.flow.is_paused:
            self.flow.resume()

    def _feed(self, data: bytes) -> None:
        """Parses bytes."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:  # its argument is the end of the head
            self._parse_without_offer(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _parse_without_offer(self, rest: bytes) -> None:
        """Parses a request with an upgrade offer (RFC 9110, 7.8) again; its body is still in this protocol."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("This server is no proxy.")
            return
        headers = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        head = b"%s %s HTTP/%s\r\n" % (method, self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"".join((head, *headers, b"\r\n", rest)))

    def on_response_complete(self) -> None:
        """See uvicorn. Pending data is parsed in a separate turn of the event loop."""
        super().on_response_complete()
        if self._unparsed:
            self.loop.call_soon(self._parse)

    @property
    def _is_idle(self) -> bool:
        """True if no call is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _has_head_within(self, data: bytes) -> bool:
        """Ends the connection if the headers are incomplete at their limit."""
        if self._head_bytes - len(data) <= _MAX_HEAD_BYTES and b"\r\n\r\n" in data[: _MAX_HEAD_BYTES + 4]:
            return True
        if self._is_idle:
            self.send_400_response("The headers have more than 64 KiB.")
        else:  # no message is possible within the previous answer
            self.abort()
        return False

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self.parser.should_upgrade():  # it is parsed again
            return
        self._awaits_head_since, self._reads_head, self._head_bytes = None, False, 0
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":  # no chunks: the end of the connection ends a stream
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's returns nothing
        """Answers a half-closed connection; a probe distinguishes it from a disconnect."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scope["scheme"] == "https":
            return False
        self._sends_no_more = True
        cycle.keep_alive = False
        self._probe()
        self.loop.call_later(_PROBE_AGAIN_S, self._probe)  # the reset of the first shows at the next write
        return True

    def _probe(self) -> None:
        """Detects a disconnect while no answer is sent."""
        if self.scope["http_version"] != "1.0" and not self.cycle.response_started and not self.transport.is_closing():
            self.transport.write(_PROBE)

    def on_message_complete(self) -> None:
        """See httptools. The next request's head follows, possibly before this one is answered."""
        if self.parser.should_upgrade():
            return
        self._reads_head = True
        super().on_message_complete()

    @property
    def is_unread(self) -> bool:
        """True if sending is blocked because the peer does not read."""
        return bool(self.flow.write_paused)

    def abort(self) -> None:
        """Closes the connection at once, and drops unsent data."""
        self.transport.abort()

    def sweep(self, now: float, *, head_timeout_s: float, unread_timeout_s: float) -> None:
        """Ends the connection past the timeouts for its header or for reading; 0: no limit."""
        if head_timeout_s and self._awaits_head_since is not None and now - self._awaits_head_since > head_timeout_s:
            self.abort()
            return
        if self._sends_no_more and not self.cycle.response_started:
            if self.scope["http_version"] == "1.0":  # no interim answers
                self.abort()
                return
            self._probe()
        size = self.transport.get_write_buffer_size()
        if not size:
            self._unread = None
        elif self._unread is None or self._unread[0] != size:
            self._unread = (size, now)
        elif unread_timeout_s and now - self._unread[1] > unread_timeout_s:
            self.abort()


def _certificate_names(transport: Any) -> tuple[str, ...]:
    """Returns the subject alternative names of the client's certificate, or else its common name."""
    certificate = transport.get_extra_info("peercert")
    if not certificate:
        return ()
    names = tuple(value for _, value in certificate.get("subjectAltName", ()))
    subject = (pair for group in certificate.get("subject", ()) for pair in group)
    return names or tuple(value for key, value in subject if key == "commonName")
