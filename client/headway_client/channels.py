"""How a client connects: the options of its channel."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

DEFAULT_SERVER = "127.0.0.1:50051"
MAX_RESPONSE_BYTES = 64 * 1024 * 1024
"""Largest response that is accepted: 256 embeddings of 4,096 values are 4 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """Where a server is and how it is reached."""

    server: str = DEFAULT_SERVER
    """Host and port, or any other target that gRPC knows, such as `unix:/run/headway.sock`."""
    credentials: grpc.ChannelCredentials | None = None
    """Of `grpc.ssl_channel_credentials`; None connects without encryption."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Sent with every call, such as an `authorization` token; keys are lower case."""

    def options(self) -> Sequence[tuple[str, int]]:
        """Channel arguments of gRPC.

        A server that was restarted is found again within a second, not after gRPC's own wait of up to two minutes,
        and a proxy of the environment is left aside for a server on this machine.
        """
        return (
            ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.enable_http_proxy", 0 if is_loopback(self.server) else 1),
        )

    def open(self) -> grpc.Channel:
        """A channel for blocking calls."""
        if self.credentials is None:
            return grpc.insecure_channel(self.server, self.options())
        return grpc.secure_channel(self.server, self.credentials, self.options())

    def open_async(self) -> grpc.aio.Channel:
        """A channel for the running event loop."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(self.server, self.options())
        return grpc.aio.secure_channel(self.server, self.credentials, self.options())


def is_loopback(server: str) -> bool:
    """Whether `server` is an address of this machine itself."""
    host = server.rpartition("://")[2].lstrip("/").rpartition(":")[0].strip("[]")
    if server.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
