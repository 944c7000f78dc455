"""A caller that speaks HTTP/2 by hand, so that it can do what no gRPC library does: send half, read nothing."""

import socket
import struct
import time
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings


def frame(message: bytes) -> bytes:
    """Returns a message as gRPC sends it."""
    return b"\0" + struct.pack(">I", len(message)) + message


class Caller:
    """One connection."""

    def __init__(self, port: int, *, window: int | None = None) -> None:
        """Connects; `window` is how many bytes of an answer are taken."""
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.connection.initiate_connection()
        if window is not None:
            self.connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.events: list[h2.events.Event] = []
        self._flush()

    def begin(self, path: str, *metadata: tuple[str, str]) -> int:
        """Begins a call with its headers alone; returns the number of its stream."""
        stream = self.connection.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test")]
        self.connection.send_headers(
            stream, [*headers, ("content-type", "application/grpc"), ("te", "trailers"), *metadata]
        )
        self._flush()
        return stream

    def send(self, stream: int, data: bytes, *, ends: bool = True) -> None:
        """Sends data of a call, which must fit into the window."""
        self.connection.send_data(stream, data, end_stream=ends)
        self._flush()

    def send_slowly(self, stream: int, data: bytes, timeout_s: float) -> int:
        """Sends data of a call that goes on, as the server gives it room; returns how much was sent in time."""
        end, position = time.monotonic() + timeout_s, 0
        while position < len(data) and time.monotonic() < end and not self.has_ended(stream):
            room = min(
                self.connection.local_flow_control_window(stream),
                self.connection.max_outbound_frame_size,
                len(data) - position,
            )
            if room <= 0:
                self.read(0.05)
                continue
            self.send(stream, data[position : position + room], ends=False)
            position += room
        return position

    def has_ended(self, stream: int) -> bool:
        """True if the server has ended a call, as far as was read."""
        ends = (h2.events.StreamEnded, h2.events.StreamReset)
        return any(isinstance(event, ends) and event.stream_id == stream for event in self.events)

    def read(self, seconds: float) -> None:
        """Reads for a time, which also answers pings."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                data = self.socket.recv(2**16)
            except TimeoutError:
                return
            if not data:
                return
            try:
                self.events += self.connection.receive_data(data)
            except h2.exceptions.ProtocolError:  # the library takes nothing after a GOAWAY
                return
            self._flush()

    @property
    def was_sent_away(self) -> bool:
        """True if the server has sent GOAWAY."""
        return self.connection.state_machine.state is h2.connection.ConnectionState.CLOSED

    def header(self, stream: int, name: bytes) -> str | None:
        """Returns a header of a call's answer."""
        for event in self.events:
            if isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream:
                value = dict(event.headers or ()).get(name)
                return None if value is None else value.decode()
        return None

    def status(self, stream: int, timeout_s: float) -> str | None:
        """Waits for the status of a call; returns its number."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for event in self.events:
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    status = dict(event.headers or ()).get(b"grpc-status")
                    if event.stream_id == stream and status is not None:
                        return status.decode()
            self.read(0.1)
        return None

    def _flush(self) -> None:
        if data := self.connection.data_to_send():
            self.socket.settimeout(10)
            self.socket.sendall(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
