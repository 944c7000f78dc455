"""Statistics of every model in Triton's definition, counted from the server's events."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from headway.oip import grpc_predict_v2_pb2 as pb
from headway_server.observers import BatchEvent, Call, ModelId, Observer, StepEvent
from headway_server.services.procedure import is_look
from headway_server.serving.families import ServedModel


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


@dataclass(slots=True)
class _Counts:
    """Counters of one model."""

    answered: _Times = field(default_factory=_Times)
    failed: _Times = field(default_factory=_Times)
    cached: _Times = field(default_factory=_Times)
    queued: _Times = field(default_factory=_Times)
    preprocessed: _Times = field(default_factory=_Times)
    computed: _Times = field(default_factory=_Times)
    num_inputs: int = 0
    num_runs: int = 0
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
        if call.model is None or is_look(call.method):
            return
        with self._lock:
            counts = self._of(call.model)
            if error is not None:
                counts.failed.add(duration_s)
                return
            counts.last_inference_s = time.time() - duration_s
            counts.answered.add(duration_s)
            if not call.num_computed:
                counts.cached.add(duration_s)
                return
            counts.num_inputs += call.num_computed
            counts.queued.add(call.queue_s)
            counts.preprocessed.add(call.preprocessing_s)
            counts.computed.add(call.inference_s)

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
                inference_count=counts.num_inputs,
                execution_count=counts.num_runs,
                inference_stats=pb.InferStatistics(
                    success=counts.answered.message(),
                    fail=counts.failed.message(),
                    queue=counts.queued.message(),
                    compute_input=counts.preprocessed.message(),
                    compute_infer=counts.computed.message(),
                    compute_output=_duration(counts.computed.count, 0.0),
                    cache_hit=counts.cached.message(),
                ),
                batch_stats=[
                    pb.InferBatchStatistics(
                        batch_size=size,
                        compute_input=_duration(times.count, 0.0),
                        compute_infer=times.message(),
                        compute_output=_duration(times.count, 0.0),
                    )
                    for size, times in sorted(counts.runs_by_size.items())
                ],
            )

    def _add_run(self, model: ModelId, size: int, seconds: float) -> None:
        with self._lock:
            counts = self._of(model)
            counts.num_runs += 1
            counts.runs_by_size.setdefault(size, _Times()).add(seconds)

    def _of(self, model: ModelId) -> _Counts:
        counts = self._counts.get(model)
        if counts is None:
            counts = self._counts[model] = _Counts()
        return counts

    def __repr__(self) -> str:
        return f"Statistics({len(self._counts)} models)"
