"""When a failed call is tried again.

Three failures are retried: UNAVAILABLE, CANCELLED if nobody says why, and RESOURCE_EXHAUSTED if the server named a
delay. They mean that the server did not accept the call or could not finish it; every RPC may be repeated, those that
change models too. Attempts go on until the call's deadline. The delay is random, up to a bound that grows with every
attempt ("full jitter"), so that callers that failed together do not return together. It is never shorter than the
server asked for, and never longer than the time that is left.

What is decided is decided by the code, by the details of the status, and by the state of the connection; never by
words, which differ between versions of gRPC and between proxies:

- With `ErrorInfo` or `RetryInfo`, a server has refused the call. It may be sent again as often as there is time.
- Without them gRPC itself gave up the call, or a proxy did. It was never sent if there was no connection when the
  attempt began and none could be made by the time it failed (TRANSIENT_FAILURE): nobody listens, certificates are
  wrong, no server of several is healthy. That too may be repeated at will.
- Else the call was sent and its connection broke: UNAVAILABLE, or CANCELLED where a server stops. It is sent once more
  and no oftener: if it is the call that ends servers, it must not end all of them.

The state of the connection is looked at just before and just after an attempt, so three cases are taken for another.
As broken count the answer of a proxy that has no server, unless it has details, and a call that could not be sent if
a connection is made in the very moment of its failure. As never sent counts a call for which a connection was made
and lost within the attempt, if the next one was refused already.

A client retries within a budget, as gRPC's `retryThrottling` has it, so that retries do not multiply what servers are
asked when all of them fail. Failures that cost no server anything are free: calls that were never sent, and those that
a server has named a delay for. Nothing is hedged: a second copy of a call that runs would be computed as well.
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
"""Attempts after which the delay grows no more, so that its power stays a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how soon a failed call is tried again.

    Raises:
        ValueError: A number is out of its range.
    """

    max_attempts: int | None = None
    """Most attempts of a call, the first included; 1 turns retries off. None: as many as there is time for."""
    max_broken: int = 2
    """Most attempts that may end with a broken connection after the call was sent."""
    initial_backoff_s: float = 0.1
    """Longest delay before the second attempt, in seconds."""
    max_backoff_s: float = 2.0
    """Longest delay before any attempt, in seconds."""
    multiplier: float = 2.0
    """Growth of the longest delay from attempt to attempt."""
    budget: int = 1000
    """Failures of a client's calls, half of which it may retry before calls succeed again; 0: any number. So as many
    calls as that may be running when a server ends."""
    budget_ratio: float = 0.1
    """What a call that succeeds gives back of a failure: so retries are at most a tenth of what succeeds."""

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
    """What a client may still retry (gRFC A6, "Throttling Retry Attempts"). May be used by any thread."""

    def __init__(self, policy: RetryPolicy) -> None:
        """Starts with all of it."""
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
    """The end of a call's or a wait's time."""

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

        `connectivity` tells the state of the connection at this moment; SHUTDOWN once the client is closed.
        """
        super().__init__(timeout_s)
        self._policy = policy
        self._budget = budget
        self._connectivity = connectivity
        self._was_connected = False
        self._failed_count = 0
        self._broken_count = 0

    def begin(self) -> float:
        """Looks at the connection before an attempt; returns the seconds that the attempt may take."""
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
        """Ends the call, which was answered."""
        self._budget.note_success()


def _is_retryable(error: CallError, *, is_lost: bool) -> bool:
    """Returns whether a later attempt may succeed; `is_lost` if neither a server's answer nor the client ended it."""
    if isinstance(error, ResourceExhaustedError):
        return error.retry_delay_s is not None
    # A server that stops resets its calls, of which gRPC makes CANCELLED without details.
    return isinstance(error, UnavailableError) or (isinstance(error, CallCancelledError) and is_lost)


class Readiness(Deadline):
    """A wait until a server serves: a context manager for one health check after another.

    It takes the failures that mean that the server is not there yet; every other one goes on.
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
            DeadlineExceededError: There is no time for another one.
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
