"""Measurements of a load test: counts, and histograms of times.

Times are recorded in whole microseconds by HdrHistogram; its memory does not grow with the calls. Recorders of several
processes and histograms of several reports can be added up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from headway_client import ModelReference
from headway_load.objectives import TimeLimits
from headway_load.plan import MAX_DURATION_S, MAX_TIMEOUT_S

try:
    from hdrh.histogram import HdrHistogram
except ImportError:  # an extra
    HdrHistogram = None

OK = "OK"
_MAX_US = int((2 * MAX_DURATION_S + MAX_TIMEOUT_S) * 1e6)
_COUNTS = ("good_count", "completed_count", "input_count", "token_count", "limit_count", "not_sent_count")
_TIMES = ("latency", "send_delay", "first_token", "token_gap")
_NO_LIMITS = TimeLimits()
_NUM_INTERVALS = 100
_MIN_INTERVAL_S = 0.5


class TimeHistogram:
    """A histogram of times."""

    def __init__(self, num_digits: int = 3) -> None:
        """Records times with `num_digits` significant digits.

        Raises:
            ImportError: HdrHistogram is not installed.
        """
        if HdrHistogram is None:
            raise ImportError("HdrHistogram is not installed; run: pip install 'headway-client[load]'")
        self._histogram = HdrHistogram(1, _MAX_US, num_digits)

    @classmethod
    def decode(cls, encoded: str) -> Self:
        """Reads the output of `encode`."""
        histogram = cls()
        histogram.__setstate__(encoded)
        return histogram

    def encode(self) -> str:
        """Writes the histogram in HdrHistogram's own format (version 2, compressed, base64)."""
        return str(self._histogram.encode().decode("ascii"))

    def __getstate__(self) -> str:
        return self.encode()

    def __setstate__(self, encoded: str) -> None:
        self._histogram = HdrHistogram.decode(encoded)

    def __len__(self) -> int:
        return int(self._histogram.get_total_count())

    def record(self, seconds: float, count: int = 1) -> None:
        """Adds a time, `count` times."""
        self._histogram.record_value(min(max(1, round(seconds * 1e6)), _MAX_US), count)

    def add(self, other: TimeHistogram) -> None:
        """Adds the times of another histogram with the same digits."""
        self._histogram.add(other._histogram)

    def percentile_ms(self, percentile: float) -> float:
        """Returns a percentile of the times in milliseconds; 0 without times."""
        return float(self._histogram.get_value_at_percentile(percentile)) / 1e3 if len(self) else 0.0

    def statistic_ms(self, name: str) -> float:
        """Returns `mean`, `max` or a percentile such as `p99.9`, in milliseconds; 0 without times."""
        if name == "mean":
            return float(self._histogram.get_mean_value()) / 1e3 if len(self) else 0.0
        return self.percentile_ms(100.0 if name == "max" else float(name.removeprefix("p")))

    def summary_ms(self) -> dict[str, float] | None:
        """Returns mean and percentiles in milliseconds; None without times."""
        if not len(self):
            return None
        names = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
        return {name.replace(".", "_"): round(self.statistic_ms(name), 3) for name in names}

    def __repr__(self) -> str:
        return f"<TimeHistogram {len(self)} times, median {self.percentile_ms(50):g} ms>"


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """One call. Times are seconds on the event loop's clock."""

    workload: int = 0
    """Workload number in the plan."""
    intended_s: float
    """Due time. The caller's wait begins here, even if the call is sent later."""
    sent_s: float = 0.0
    ended_s: float = 0.0
    outcome: str = OK
    """`OK`, or the code of the failure."""
    input_count: int = 0
    token_count: int = 0
    token_times_s: list[tuple[float, int]] = field(default_factory=list)
    """For streams: arrival time of each delta, and the tokens until then."""
    model: ModelReference | None = None


@dataclass(slots=True)
class Interval:
    """A part of the measured phase."""

    due_count: int = 0
    """Calls due in it."""
    completed_count: int = 0
    """Calls answered in it."""
    failed_count: int = 0
    """Failed calls due in it."""
    latency: TimeHistogram = field(default_factory=lambda: TimeHistogram(2))
    """Latency of the calls due in it."""

    def add(self, other: Interval) -> None:
        """Adds the same interval of another process."""
        self.due_count += other.due_count
        self.completed_count += other.completed_count
        self.failed_count += other.failed_count
        self.latency.add(other.latency)


class Recorder:
    """Measurements of the measured phase.

    Latencies and outcomes are of calls due in it. Throughput counts calls answered in it, whenever they were due: a
    server that lags still answers calls of the warm-up.
    """

    def __init__(
        self,
        start_s: float = 0.0,
        end_s: float = math.inf,
        limits: TimeLimits = _NO_LIMITS,
    ) -> None:
        """Measures from `start_s` to `end_s`, in seconds on the event loop's clock.

        Args:
            start_s: Beginning of the measured phase.
            end_s: Its end; only a finite phase is divided into intervals.
            limits: Time limits of goodput, by workload.
        """
        self.start_s = start_s
        self.end_s = end_s
        self.limits = limits
        self.interval_s = max(_MIN_INTERVAL_S, (end_s - start_s) / _NUM_INTERVALS)
        self.intervals: dict[int, Interval] = {}
        """Workloads by number."""
        self.latency = TimeHistogram()
        """From the intended time to the answer."""
        self.send_delay = TimeHistogram()
        """From the intended time to the sending: lateness of the load tester, or wait for its limit."""
        self.first_token = TimeHistogram()
        """From the intended time to the first token."""
        self.token_gap = TimeHistogram()
        """From token to token of a stream."""
        self.outcomes: Counter[str] = Counter()
        self.good_count = 0
        """Calls due in the measured phase and answered within the limits."""
        self.completed_count = 0
        """Calls answered in the measured phase."""
        self.input_count = 0
        """Inputs of these calls."""
        self.token_count = 0
        """Generated tokens of these calls."""
        self.limit_count = 0
        """Calls held back by the limit of outstanding calls."""
        self.not_sent_count = 0
        """Calls still held back at the end of the test."""
        self.model: ModelReference | None = None
        """The answering model, if it was a single one."""

    @classmethod
    def merged(cls, recorders: Iterable[Recorder]) -> Self:
        """Adds up recorders of the same phase."""
        whole = cls()
        models = set()
        for recorder in recorders:
            models.add(recorder.model)
            whole.start_s, whole.end_s, whole.interval_s = recorder.start_s, recorder.end_s, recorder.interval_s
            whole.outcomes.update(recorder.outcomes)
            for name in _COUNTS:
                setattr(whole, name, getattr(whole, name) + getattr(recorder, name))
            for name in _TIMES:
                getattr(whole, name).add(getattr(recorder, name))
            for number, interval in recorder.intervals.items():
                whole.intervals.setdefault(number, Interval()).add(interval)
        models.discard(None)
        whole.model = models.pop() if len(models) == 1 else None
        return whole

    @property
    def ok_count(self) -> int:
        """Answered calls due in the measured phase."""
        return self.outcomes[OK]

    @property
    def error_counts(self) -> dict[str, int]:
        """Failed calls due in the measured phase, by code."""
        return {code: count for code, count in sorted(self.outcomes.items()) if code != OK}

    def add(self, call: CallRecord) -> None:
        """Counts an ended call."""
        answered = call.outcome == OK
        self.model = call.model or self.model
        if answered and self.start_s <= call.ended_s < self.end_s:
            self.completed_count += 1
            self.input_count += call.input_count
            self.token_count += call.token_count
            self._interval(call.ended_s).completed_count += 1
        if call.intended_s >= self.start_s:
            self.outcomes[call.outcome] += 1
            self.send_delay.record(call.sent_s - call.intended_s)
            interval = self._interval(call.intended_s)
            interval.due_count += 1
            interval.failed_count += not answered
            if answered:
                self.latency.record(call.ended_s - call.intended_s)
                interval.latency.record(call.ended_s - call.intended_s)
                self._add_tokens(call)
                self.good_count += self._is_good(call)

    def _interval(self, time_s: float) -> Interval:
        number = 0 if math.isinf(self.end_s) else int((time_s - self.start_s) / self.interval_s)
        interval = self.intervals.get(number)
        if interval is None:
            interval = self.intervals[number] = Interval()
        return interval

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

    def _is_good(self, call: CallRecord) -> bool:
        limits, times = self.limits, [pair for pair in call.token_times_s if pair[1] > 0]
        if limits.latency_s is not None and call.ended_s - call.intended_s >= limits.latency_s:
            return False
        if limits.first_token_s is not None and times and times[0][0] - call.intended_s >= limits.first_token_s:
            return False
        if limits.mean_gap_s is None or not times or times[-1][1] <= times[0][1]:
            return True
        return (times[-1][0] - times[0][0]) / (times[-1][1] - times[0][1]) < limits.mean_gap_s

    def __repr__(self) -> str:
        """Progress."""
        return f"<Recorder {self.ok_count} ok, {sum(self.error_counts.values())} failed, {self.latency!r}>"
