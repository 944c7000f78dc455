"""What a load test measures, counts and histograms of times.

Times are recorded in whole microseconds with three significant digits (HdrHistogram), which takes the same memory for a
thousand calls as for a million.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from hdrh.histogram import HdrHistogram

from headway_client.load.plan import MAX_DURATION_S
from headway_client.results import ModelReference

OK = "OK"


class TimeHistogram:
    """A histogram of times."""

    def __init__(self) -> None:
        self._histogram = HdrHistogram(1, int(2 * MAX_DURATION_S * 1e6), 3)

    def __len__(self) -> int:
        return int(self._histogram.get_total_count())

    def record(self, seconds: float, count: int = 1) -> None:
        """Adds a time, `count` times."""
        self._histogram.record_value(max(1, round(seconds * 1e6)), count)

    def percentile_ms(self, percentile: float) -> float:
        """Returns the time that `percentile` percent of the times do not exceed, in milliseconds; 0 without times."""
        return float(self._histogram.get_value_at_percentile(percentile)) / 1e3 if len(self) else 0.0

    def summary_ms(self) -> dict[str, float] | None:
        """Returns mean and percentiles in milliseconds; None without times."""
        if not len(self):
            return None
        return {
            "mean": round(float(self._histogram.get_mean_value()) / 1e3, 3),
            "p50": self.percentile_ms(50),
            "p90": self.percentile_ms(90),
            "p99": self.percentile_ms(99),
            "p99_9": self.percentile_ms(99.9),
            "max": float(self._histogram.get_max_value()) / 1e3,
        }

    def __repr__(self) -> str:
        return f"<TimeHistogram {len(self)} times, median {self.percentile_ms(50):g} ms>"


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """One call. Times are seconds on the event loop's clock."""

    intended_s: float
    """When the call was due. The caller's wait begins here, even if the load tester sends it later."""
    sent_s: float = 0.0
    ended_s: float = 0.0
    outcome: str = OK
    """`OK`, or the code of the failure."""
    input_count: int = 0
    token_count: int = 0
    token_times_s: list[tuple[float, int]] = field(default_factory=list)
    """For streams: when each delta arrived, and the number of tokens until then."""
    model: ModelReference | None = None


class Recorder:
    """Counts what happens in the measured phase.

    Latencies and outcomes are those of the calls that were due in it. Throughput counts the calls that were answered in
    it, whenever they were due, because a server that is behind still answers calls of the warm-up.
    """

    def __init__(self, start_s: float = 0.0, end_s: float = math.inf) -> None:
        """Measures from `start_s` to `end_s`, in seconds on the event loop's clock."""
        self.start_s = start_s
        self.end_s = end_s
        self.latency = TimeHistogram()
        """From the intended time to the answer."""
        self.send_delay = TimeHistogram()
        """From the intended time to the sending: how late the load tester was, or how long its limit held a call."""
        self.first_token = TimeHistogram()
        """From the intended time to the first token."""
        self.token_gap = TimeHistogram()
        """From token to token of a stream."""
        self.outcomes: Counter[str] = Counter()
        self.completed_count = 0
        """Calls that were answered in the measured phase."""
        self.input_count = 0
        """Their inputs."""
        self.token_count = 0
        """Their generated tokens."""
        self.outstanding_count = 0
        self.limit_count = 0
        """Calls that the limit of outstanding calls held back."""
        self.not_sent_count = 0
        """Calls that were still held back when the test ended."""
        self.model: ModelReference | None = None

    @property
    def ok_count(self) -> int:
        """Calls due in the measured phase that were answered."""
        return self.outcomes[OK]

    @property
    def error_counts(self) -> dict[str, int]:
        """Calls due in the measured phase that failed, by code."""
        return {code: count for code, count in sorted(self.outcomes.items()) if code != OK}

    def add(self, call: CallRecord) -> None:
        """Counts a call that has ended."""
        answered = call.outcome == OK
        self.model = call.model or self.model
        if answered and self.start_s <= call.ended_s < self.end_s:
            self.completed_count += 1
            self.input_count += call.input_count
            self.token_count += call.token_count
        if call.intended_s >= self.start_s:
            self.outcomes[call.outcome] += 1
            self.send_delay.record(call.sent_s - call.intended_s)
            if answered:
                self.latency.record(call.ended_s - call.intended_s)
                self._add_tokens(call)

    def _add_tokens(self, call: CallRecord) -> None:
        """Records the time of the first token and the gaps; tokens that arrive together share their gap equally."""
        last_s, last_count = call.intended_s, 0
        for time_s, count in call.token_times_s:
            if count <= last_count:
                continue
            if last_count == 0:
                self.first_token.record(time_s - call.intended_s)
            else:
                self.token_gap.record((time_s - last_s) / (count - last_count), count - last_count)
            last_s, last_count = time_s, count

    def __repr__(self) -> str:
        """Progress."""
        return f"<Recorder {self.ok_count} ok, {sum(self.error_counts.values())} failed, {self.latency!r}>"
