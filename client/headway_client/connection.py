"""How a client reaches its server: address, encryption, API key, channel options; and what both clients share.

What a caller does not give is taken from the environment: HEADWAY_SERVER, HEADWAY_TLS, HEADWAY_CA_FILE,
HEADWAY_CLIENT_CERT_FILE, HEADWAY_CLIENT_KEY_FILE, HEADWAY_API_KEY.

A call is part of the caller's trace: where the program uses OpenTelemetry, the present span's context goes with it.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, TypedDict, Unpack

import grpc
import grpc.aio

from headway_client.errors import ClientClosedError
from headway_client.retry import Attempts, RetryPolicy

DEFAULT_SERVER: Final = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S: Final = 60.0
MAX_RESPONSE_BYTES: Final = 64 * 2**20
"""Largest response that a client accepts; 256 embeddings of 4,096 values are 4 MiB."""

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


class ConnectionOptions(TypedDict, total=False):
    """How to reach a server. What is not given is taken from the environment."""

    tls: Annotated[bool | None, "Encrypt the connection. Default: if a certificate file is given."]
    ca_file: Annotated[
        str | os.PathLike[str] | None, "PEM file of the certificate authorities to trust. Default: gRPC's own list."
    ]
    client_cert_file: Annotated[
        str | os.PathLike[str] | None, "PEM file of the client's certificate chain, for servers that ask for one."
    ]
    client_key_file: Annotated[str | os.PathLike[str] | None, "PEM file of the client certificate's private key."]
    api_key: Annotated[str | None, "API key, sent with every call as `authorization: Bearer KEY`."]
    metadata: Annotated[Sequence[tuple[str, str]] | None, "Pairs sent with every call; keys are lower case."]
    credentials: Annotated[grpc.ChannelCredentials | None, "Channel credentials of gRPC, instead of the files."]


class Connection:
    """Where a server is and how to reach it."""

    def __init__(self, server: str | None = None, **options: Unpack[ConnectionOptions]) -> None:
        """Takes the options, and what is not given from the environment.

        Raises:
            OSError: A certificate or key file cannot be read.
            TypeError: There is no such option.
            ValueError: A client certificate is given without its key, or HEADWAY_TLS is neither true nor false.
        """
        if unknown := options.keys() - ConnectionOptions.__optional_keys__:
            raise TypeError(f"a connection has no option {', '.join(sorted(map(repr, unknown)))}")
        self.server = server or os.environ.get("HEADWAY_SERVER") or DEFAULT_SERVER
        """Host and port, or another target that gRPC knows, such as `unix:/run/headway.sock`."""
        # In the order that gRPC takes them.
        files = [
            options.get("ca_file") or os.environ.get("HEADWAY_CA_FILE"),
            options.get("client_key_file") or os.environ.get("HEADWAY_CLIENT_KEY_FILE"),
            options.get("client_cert_file") or os.environ.get("HEADWAY_CLIENT_CERT_FILE"),
        ]
        credentials = options.get("credentials")
        tls = options.get("tls")
        if tls is None:
            tls = _flag("HEADWAY_TLS") or credentials is not None or any(files)
        if tls and credentials is None:
            credentials = _credentials(files)
        self._credentials = credentials if tls else None
        self.metadata = tuple(options.get("metadata") or ())
        """Sent with every call."""
        # A key that was read from a file ends with a newline.
        if api_key := (options.get("api_key") or os.environ.get("HEADWAY_API_KEY", "")).strip():
            self.metadata += (("authorization", f"Bearer {api_key}"),)

    @property
    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """What is sent with a call now: `metadata`, and the caller's span where it uses OpenTelemetry."""
        if "opentelemetry.trace" not in sys.modules:  # nobody has made a span
            return self.metadata
        from opentelemetry import propagate  # noqa: PLC0415 (an optional library, which is here then)

        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return (*self.metadata, *carrier.items())

    def open(self) -> grpc.Channel:
        """Opens a channel for blocking calls."""
        if self._credentials is None:
            return grpc.insecure_channel(self.server, self._channel_options())
        return grpc.secure_channel(self.server, self._credentials, self._channel_options())

    def open_async(self) -> grpc.aio.Channel:
        """Opens a channel for the running event loop."""
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.server, self._channel_options())
        return grpc.aio.secure_channel(self.server, self._credentials, self._channel_options())

    def _channel_options(self) -> Sequence[tuple[str, int]]:
        return (
            ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
            # A restarted server is found again within a second instead of gRPC's two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # A proxy of the environment cannot reach a server on this machine.
            ("grpc.enable_http_proxy", 0 if _is_loopback(self.server) else 1),
        )

    def __repr__(self) -> str:
        """Server and encryption; never the API key."""
        return f"<Connection to {self.server}, {'TLS' if self._credentials else 'not encrypted'}>"


class BaseClient:
    """What the blocking and the asyncio client share: connection, timeout, retries and whether they are closed."""

    def __init__(
        self,
        server: str | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        """Prepares a client, as `Client` describes."""
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s:g}; must be above 0")
        self._connection = Connection(server, **options)
        self._timeout_s = timeout_s
        self._retry = RetryPolicy() if retry is None else retry
        self._closed = False

    @property
    def server(self) -> str:
        """Host and port of the server, or its other gRPC target."""
        return self._connection.server

    def _attempts(self, timeout_s: float | None, retry: RetryPolicy | None = None) -> Attempts:
        """Starts the clock of a call."""
        return Attempts(retry or self._retry, self._timeout_s if timeout_s is None else timeout_s)

    def _check_open(self) -> None:
        """Checks, before each attempt, that the client was not closed, which may happen while it waits to retry.

        Raises:
            ClientClosedError: The client is closed.
        """
        if self._closed:
            raise ClientClosedError(f"the client of {self.server} is closed; make a new one")

    def __repr__(self) -> str:
        """Server, state and timeout."""
        state = "closed" if self._closed else "open"
        return f"<{type(self).__name__} {self.server} {state}, timeout {self._timeout_s:g} s>"


def _credentials(files: Sequence[str | os.PathLike[str] | None]) -> grpc.ChannelCredentials:
    """Reads the files of the certificate authorities, of the client's key and of its certificate."""
    _, key_file, cert_file = files
    if (cert_file is None) != (key_file is None):
        missing = "client_key_file" if key_file is None else "client_cert_file"
        raise ValueError(f"{missing} is missing; give the client's certificate and its key, or neither")
    return grpc.ssl_channel_credentials(*(None if path is None else Path(path).read_bytes() for path in files))


def _flag(variable: str) -> bool:
    value = os.environ.get(variable, "").strip().lower()
    if value not in _TRUE | _FALSE:
        raise ValueError(f"{variable} is {value!r}; must be 1 or 0")
    return value in _TRUE


def _is_loopback(server: str) -> bool:
    """Returns whether `server` is an address of this machine itself."""
    host = server.rpartition("://")[2].lstrip("/").rpartition(":")[0].strip("[]")
    if server.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
