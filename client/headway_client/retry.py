"""Retries of failed calls.

Three failures are retried: UNAVAILABLE, CANCELLED without a reason, and RESOURCE_EXHAUSTED with the server's delay.
They mean that the server did not accept the call or could not finish it. Every RPC may be repeated, including those
that change models. Attempts go on until the call's deadline. The delay is random, up to a bound that grows with every
attempt ("full jitter"): callers that failed together do not return together. It is never shorter than the server asked
for, and never longer than the remaining time.

Decisions depend on the code, the details of the status, and the state of the connection. Messages do not count: they
differ between versions of gRPC and between proxies.

- With `ErrorInfo` or `RetryInfo`, a server refused the call. It is retried as long as there is time.
- Without them gRPC itself or a proxy gave up the call. It was never sent if there was no connection when the attempt
  began and none when it failed (TRANSIENT_FAILURE): nobody listens, certificates are wrong, no server is healthy. It is
  retried as long as there is time.
- Otherwise the call was sent and its connection broke: UNAVAILABLE, or CANCELLED if a server stops. It is retried once:
  a call that crashes servers must not crash all of them.

The state of the connection is read just before and just after an attempt, so three cases are misjudged. Two count as
broken: a proxy's answer without details that it has no server, and an unsent call if a connection is made at the moment
of its failure. One counts as never sent: a connection made and lost within the attempt, if the next one was already
refused.

A client has a retry budget, like gRPC's `retryThrottling`: retries do not multiply the load when all servers fail. Free
are the failures that cost no server anything: calls never sent, and refusals with a delay. Calls are not hedged: the
server would compute both copies.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import grpc

from headway_client.errors import (
    CallCancelledError,
    CallError,
    DeadlineExceededError,
    ResourceExhaustedError,
    UnavailableError,
)

_READY_POLL_S = 0.05
_MOST_GROWTH = 64
"""Attempts after which the delay no longer grows; keeps its power finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Number and delays of retries.

    Raises:
        ValueError: A number is out of its range.
    """

    max_attempts: int | None = None
    """Most attempts of a call, the first included; 1: no retries. None: until the deadline."""
    max_broken: int = 2
    """Most attempts that end with a broken connection after the call was sent."""
    initial_backoff_s: float = 0.1
    """Longest delay before the second attempt, in seconds."""
    max_backoff_s: float = 2.0
    """Longest delay before any attempt, in seconds."""
    multiplier: float = 2.0
    """Growth of the longest delay from attempt to attempt."""
    budget: int = 1000
    """Size of the retry budget in failures; retries stop when half of it is used. 0: no limit."""
    budget_ratio: float = 0.1
    """Part of a failure that a successful call gives back: at 0.1, one retry for ten successes."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}; must be at least 1")
        if self.max_broken < 1:
            raise ValueError(f"max_broken is {self.max_broken}; must be at least 1")
        if not 0 < self.initial_backoff_s <= self.max_backoff_s:
            raise ValueError(
                f"initial_backoff_s is {self.initial_backoff_s}; must be above 0 and at most max_backoff_s, "
                f"{self.max_backoff_s}"
            )
        if self.multiplier < 1:
            raise ValueError(f"multiplier is {self.multiplier}; must be at least 1")
        if self.budget < 0:
            raise ValueError(f"budget is {self.budget}; must be at least 0")
        if not 0 <= self.budget_ratio <= 1:
            raise ValueError(f"budget_ratio is {self.budget_ratio}; must be from 0 to 1")

    def backoff_s(self, attempt: int) -> float:
        """Returns the longest delay after attempt number `attempt` (from 1), in seconds."""
        return min(self.max_backoff_s, self.initial_backoff_s * self.multiplier ** min(attempt - 1, _MOST_GROWTH))


NO_RETRIES = RetryPolicy(max_attempts=1)


class RetryBudget:
    """Retry budget of a client (gRFC A6, "Throttling Retry Attempts"). Thread-safe."""

    def __init__(self, policy: RetryPolicy) -> None:
        """Starts with the full budget."""
        self._most = policy.budget
        self._ratio = policy.budget_ratio
        self._left = float(self._most)
        self._lock = threading.Lock()

    def note_failure(self) -> bool:
        """Counts a failure; returns True if it may be retried."""
        with self._lock:
            self._left = max(0.0, self._left - 1)
            return not self._most or self._left > self._most / 2

    def note_success(self) -> None:
        """Gives a part of a failure back."""
        if self._left < self._most:
            with self._lock:
                self._left = min(self._most, self._left + self._ratio)

    def __repr__(self) -> str:
        return f"RetryBudget({self._left:g} of {self._most})"


class Deadline:
    """Deadline of a call or a wait."""

    def __init__(self, timeout_s: float) -> None:
        """Starts the clock."""
        self._end_s = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Returns the seconds that are left, at least 0."""
        return max(0.0, self._end_s - time.monotonic())


class Attempts(Deadline):
    """The attempts of one call before its deadline."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float,
        budget: RetryBudget,
        connectivity: Callable[[], grpc.ChannelConnectivity],
    ) -> None:
        """Starts the clock of a call; all attempts and delays together may take `timeout_s` seconds.

        `connectivity` returns the current state of the connection; SHUTDOWN once the client is closed.
        """
        super().__init__(timeout_s)
        self._policy = policy
        self._budget = budget
        self._connectivity = connectivity
        self._was_connected = False
        self._failed_count = 0
        self._broken_count = 0

    def begin(self) -> float:
        """Reads the connection's state before an attempt; returns the attempt's time limit in seconds."""
        self._was_connected = self._connectivity() is grpc.ChannelConnectivity.READY
        return self.remaining_s()

    def delay_s(self, error: CallError) -> float | None:
        """Counts a failed attempt; returns the seconds to wait before the next one, or None if `error` is final."""
        state = self._connectivity()
        self._failed_count += 1
        most = self._policy.max_attempts
        is_refused = bool(error.reason) or error.retry_delay_s is not None
        if not _is_retryable(error, is_lost=not is_refused and state is not grpc.ChannelConnectivity.SHUTDOWN):
            return None
        has_no_connection = not self._was_connected and state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
        was_never_sent = not is_refused and has_no_connection and isinstance(error, UnavailableError)
        is_free = error.retry_delay_s is not None or was_never_sent
        if (not is_free and not self._budget.note_failure()) or (most is not None and self._failed_count >= most):
            return None
        if not is_refused and not was_never_sent:
            self._broken_count += 1
            if self._broken_count >= self._policy.max_broken:
                return None
        jitter_s = random.uniform(0.0, self._policy.backoff_s(self._failed_count))  # noqa: S311 (not for secrets)
        delay_s = jitter_s + (error.retry_delay_s or 0.0)
        return delay_s if delay_s < self.remaining_s() else None

    def note_success(self) -> None:
        """Ends an answered call."""
        self._budget.note_success()


def _is_retryable(error: CallError, *, is_lost: bool) -> bool:
    """Returns True if a later attempt may succeed; `is_lost`: ended neither by a server's answer nor by the client."""
    if isinstance(error, ResourceExhaustedError):
        return error.retry_delay_s is not None
    # A stopping server resets its calls; gRPC reports CANCELLED without details.
    return isinstance(error, UnavailableError) or (isinstance(error, CallCancelledError) and is_lost)


class Readiness(Deadline):
    """A wait until a server serves: a context manager for one health check after another.

    It absorbs failures that mean that the server is not there yet; others propagate.
    """

    def __init__(self, server: str, timeout_s: float) -> None:
        """Starts the clock of a wait for `server` of at most `timeout_s` seconds."""
        super().__init__(timeout_s)
        self._server = server
        self._timeout_s = timeout_s
        self._last = "it answers that it is not serving"

    def pause_s(self) -> float:
        """Returns the seconds to wait before the next check.

        Raises:
            DeadlineExceededError: The time is over.
        """
        if self.remaining_s() <= _READY_POLL_S:
            raise DeadlineExceededError(
                f"the server at {self._server} was not ready within {self._timeout_s:g} s: {self._last}",
                grpc.StatusCode.DEADLINE_EXCEEDED,
            )
        return _READY_POLL_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, UnavailableError | DeadlineExceededError):
            self._last = error.message
            return True
        return False
