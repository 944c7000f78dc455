"""Statistics of every model in Triton's definition, counted from the server's events."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Final

from headway.oip import grpc_predict_v2_pb2 as pb
from headway_server.observers import BatchEvent, Call, ModelId, Observer, QueueEvent, StepEvent
from headway_server.serving.families import ServedModel

_NO_INFERENCE: Final = ("/headway.v1.ModelService/",)
"""Methods that describe a model without calling it."""


@dataclass(slots=True)
class _Times:
    """Count and total seconds of an event."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds

    def message(self) -> pb.StatisticDuration:
        return _duration(self.count, self.seconds)


def _duration(count: int, seconds: float) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=round(seconds * 1e9))


def _compute(count: int, seconds: float) -> dict[str, pb.StatisticDuration]:
    """Returns the three parts of computing, with one count as Triton's load tester requires."""
    nothing = _duration(count, 0.0)
    return {"compute_input": nothing, "compute_infer": _duration(count, seconds), "compute_output": nothing}


@dataclass(slots=True)
class _Counts:
    """Counters of one model."""

    answered: _Times = field(default_factory=_Times)
    failed: _Times = field(default_factory=_Times)
    queued: _Times = field(default_factory=_Times)
    num_runs: int = 0
    inputs_s: float = 0.0
    """Seconds of each run, times its inputs."""
    runs_by_size: dict[int, _Times] = field(default_factory=dict)
    last_inference_s: float = 0.0
    """Since 1970."""


class Statistics(Observer):
    """Counts the calls, inputs and runs of every model, over all protocols. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[ModelId, _Counts] = {}
        self._lock = threading.Lock()

    def call_finished(self, call: Call, *, error: BaseException | None, duration_s: float) -> None:
        """See `Observer`."""
        if call.model is None or call.method.startswith(_NO_INFERENCE):
            return
        with self._lock:
            counts = self._of(call.model)
            (counts.answered if error is None else counts.failed).add(duration_s)

    def left_queue(self, event: QueueEvent) -> None:
        """See `Observer`."""
        if event.reason != "started":
            return
        with self._lock:
            counts = self._of(event.model)
            counts.queued.add(event.queue_s)
            counts.last_inference_s = time.time()

    def batch_finished(self, event: BatchEvent) -> None:
        """See `Observer`."""
        self._add_run(event.model, event.num_items, event.run_s)

    def step_finished(self, event: StepEvent) -> None:
        """See `Observer`."""
        self._add_run(event.model, event.num_rows, event.run_s)

    def message(self, model: ServedModel) -> pb.ModelStatistics:
        """Returns the statistics of a model."""
        manifest = model.bundle.manifest
        with self._lock:
            counts = self._of(ModelId(manifest.name, manifest.version))
            return pb.ModelStatistics(
                name=manifest.name,
                version=manifest.version,
                last_inference=round(counts.last_inference_s * 1000),
                inference_count=counts.queued.count,
                execution_count=counts.num_runs,
                inference_stats=pb.InferStatistics(
                    success=counts.answered.message(),
                    fail=counts.failed.message(),
                    queue=counts.queued.message(),
                    **_compute(counts.queued.count, counts.inputs_s),
                ),
                batch_stats=[
                    pb.InferBatchStatistics(batch_size=size, **_compute(times.count, times.seconds))
                    for size, times in sorted(counts.runs_by_size.items())
                ],
            )

    def _add_run(self, model: ModelId, size: int, seconds: float) -> None:
        with self._lock:
            counts = self._of(model)
            counts.num_runs += 1
            counts.inputs_s += size * seconds
            counts.runs_by_size.setdefault(size, _Times()).add(seconds)

    def _of(self, model: ModelId) -> _Counts:
        counts = self._counts.get(model)
        if counts is None:
            counts = self._counts[model] = _Counts()
        return counts

    def __repr__(self) -> str:
        return f"Statistics({len(self._counts)} models)"
