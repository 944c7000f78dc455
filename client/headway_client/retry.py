"""When a failed call is tried again.

Only two failures are retried: UNAVAILABLE, and RESOURCE_EXHAUSTED if the server named a delay. They mean that the
server did not accept the call or could not finish it; every RPC may be repeated, those that change models too. Attempts
go on until the call's deadline. The delay is random, up to a bound that grows with every attempt ("full jitter"), so
that callers that failed together do not return together. It is never shorter than the server asked for, and never
longer than the time that is left.

A call whose connection broke after it was sent is sent once more and no oftener: if it is the call that ends servers,
it must not end all of them. gRPC says UNAVAILABLE of that too, and CANCELLED where a server stops; an answer of a
server's own has a reason, and a call that was never sent says that it could not connect.

A client retries within a budget, as gRPC's `retryThrottling` has it, so that retries do not multiply what servers are
asked when all of them fail. Failures that cost no server anything are free: calls that were never sent, and those that
a server has named a delay for. Nothing is hedged: a second copy of a call that runs would be computed as well.
"""

from __future__ import annotations

import random
import re
import threading
import time
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
_NEVER_SENT = re.compile(
    r"failed to connect|connection (refused|failure)|no healthy upstream|backend unhealthy|dns resolution"
    r"|name resolution",
    re.IGNORECASE,
)
"""How gRPC, and the proxies between, say that there was no connection to a healthy server to send a call on."""


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

    def __init__(self, policy: RetryPolicy, timeout_s: float, budget: RetryBudget) -> None:
        """Starts the clock of a call; all attempts and delays together may take `timeout_s` seconds."""
        super().__init__(timeout_s)
        self._policy = policy
        self._budget = budget
        self._failed_count = 0
        self._broken_count = 0

    def delay_s(self, error: CallError) -> float | None:
        """Counts a failed attempt; returns the seconds to wait before the next one, or None if `error` is final."""
        self._failed_count += 1
        most = self._policy.max_attempts
        if not is_retryable(error):
            return None
        is_free = error.retry_delay_s is not None or _was_never_sent(error)
        if (not is_free and not self._budget.note_failure()) or (most is not None and self._failed_count >= most):
            return None
        if _is_broken(error):
            self._broken_count += 1
            if self._broken_count >= self._policy.max_broken:
                return None
        jitter_s = random.uniform(0.0, self._policy.backoff_s(self._failed_count))  # noqa: S311 (not for secrets)
        delay_s = jitter_s + (error.retry_delay_s or 0.0)
        return delay_s if delay_s < self.remaining_s() else None

    def note_success(self) -> None:
        """Ends the call, which was answered."""
        self._budget.note_success()


def is_retryable(error: CallError) -> bool:
    """Returns whether a later attempt may succeed."""
    if isinstance(error, ResourceExhaustedError):
        return error.retry_delay_s is not None
    return isinstance(error, UnavailableError) or _is_broken(error)


def _is_broken(error: CallError) -> bool:
    """Returns whether the connection broke after the call was sent, as far as gRPC tells."""
    if isinstance(error, CallCancelledError):  # by a server that stops; `CANCELLED` is all that gRPC itself says then
        return not error.reason and error.message == "CANCELLED"
    return isinstance(error, UnavailableError) and not (error.reason or _was_never_sent(error))


def _was_never_sent(error: CallError) -> bool:
    return isinstance(error, UnavailableError) and not error.reason and bool(_NEVER_SENT.search(error.message))


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
