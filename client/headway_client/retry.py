"""When a failed call is tried again.

Only failures that say the server did not take the call, or could not finish it, are tried again: UNAVAILABLE, and
RESOURCE_EXHAUSTED where the server named a wait. Every RPC of the API is free of side effects, so a second try is
safe. The wait grows from try to try and is drawn at random below its bound ("full jitter"), so that callers that
failed together do not come back together; it is never shorter than what the server asked for and never longer than
what is left of the call's deadline.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Self

import grpc

from headway_client.errors import CallError, DeadlineExceededError, ResourceExhaustedError, UnavailableError

_READY_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how soon a failed call is tried again.

    Raises:
        ValueError: A number is out of its range.
    """

    max_attempts: int = 5
    """Most tries of a call, the first included; 1 turns retries off."""
    initial_backoff_s: float = 0.1
    """Longest wait before the second try, in seconds."""
    max_backoff_s: float = 2.0
    """Longest wait before any try, in seconds."""
    multiplier: float = 2.0
    """Growth of the longest wait from try to try."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts: at least 1 is needed, got {self.max_attempts}")
        if not 0 < self.initial_backoff_s <= self.max_backoff_s:
            raise ValueError(
                "initial_backoff_s: above 0 and at most max_backoff_s is needed, "
                f"got {self.initial_backoff_s} with max_backoff_s {self.max_backoff_s}"
            )
        if self.multiplier < 1:
            raise ValueError(f"multiplier: at least 1 is needed, got {self.multiplier}")

    def backoff_s(self, attempt: int) -> float:
        """Longest wait after try number `attempt` (from 1), in seconds."""
        return min(self.max_backoff_s, self.initial_backoff_s * self.multiplier ** (attempt - 1))


NO_RETRIES = RetryPolicy(max_attempts=1)


class Attempts:
    """The tries of one call within its deadline."""

    def __init__(self, policy: RetryPolicy, timeout_s: float) -> None:
        """Starts the clock of a call that may take `timeout_s` seconds, all its tries and waits together."""
        self._policy = policy
        self._deadline_s = time.monotonic() + timeout_s
        self._failed_count = 0

    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline_s - time.monotonic())

    def delay_s(self, error: CallError) -> float | None:
        """Takes note of a failed try; seconds to wait before the next one, or None if `error` is final."""
        self._failed_count += 1
        if self._failed_count >= self._policy.max_attempts or not is_retryable(error):
            return None
        # Not for secrets: spreads callers in time.
        jitter_s = random.uniform(0.0, self._policy.backoff_s(self._failed_count))  # noqa: S311
        delay_s = jitter_s + (error.retry_delay_s or 0.0)
        return delay_s if delay_s < self.remaining_s() else None


def is_retryable(error: CallError) -> bool:
    """Whether the failure is one that a later try may not meet."""
    if isinstance(error, ResourceExhaustedError):
        return error.retry_delay_s is not None
    return isinstance(error, UnavailableError)


class Readiness:
    """A wait for a server to serve: a context that takes the failures of one question after another."""

    def __init__(self, server: str, timeout_s: float) -> None:
        """Starts the clock of a wait for `server` of at most `timeout_s` seconds."""
        self._server = server
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._last = "it answers that it is not serving"

    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline_s - time.monotonic())

    def pause_s(self) -> float:
        """Seconds to wait before the next question.

        Raises:
            DeadlineExceededError: There is no time for one.
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
        """Takes note of a server that is not there yet; every other failure goes on."""
        if isinstance(error, UnavailableError | DeadlineExceededError):
            self._last = error.message
            return True
        return False
