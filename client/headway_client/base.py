"""What the blocking and the asyncio client hold alike: settings, state and deadlines."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from headway_client.channels import DEFAULT_SERVER, ChannelSettings
from headway_client.errors import ClientClosedError
from headway_client.retry import Attempts, RetryPolicy

DEFAULT_TIMEOUT_S = 60.0


class BaseClient:
    """Settings and state of a client."""

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Prepares a client; it connects with its first call.

        Args:
            server: Host and port, or another target of gRPC.
            timeout_s: Longest time of a call that names none, in seconds.
            retry: When a failed call is tried again. Default: `RetryPolicy()`.
            credentials: For TLS. Default: no encryption.
            metadata: Pairs sent with every call, such as an `authorization` token; keys are lower case.
        """
        self._settings = ChannelSettings(server=server, credentials=credentials, metadata=tuple(metadata))
        self._timeout_s = timeout_s
        self._retry = RetryPolicy() if retry is None else retry
        self._closed = False

    def __repr__(self) -> str:
        """Server, state and timeout."""
        state = "closed" if self._closed else "open"
        return f"<{type(self).__name__} {self._settings.server} {state}, timeout {self._timeout_s:g} s>"

    def _attempts(self, timeout_s: float | None, retry: RetryPolicy | None = None) -> Attempts:
        """Starts the clock of a call."""
        return Attempts(retry or self._retry, self._timeout_s if timeout_s is None else timeout_s)

    def _check_open(self) -> None:
        """Checks before every try of a call, since a client may be closed during the wait for the next one.

        Raises:
            ClientClosedError: The client is closed.
        """
        if self._closed:
            raise ClientClosedError(f"the client of {self._settings.server} is closed; make a new one")
