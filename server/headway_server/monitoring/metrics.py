"""Metrics in Prometheus' format, with their own port and thread.

Each thread that reports events counts in its own cells, without a lock. An observation is a search of the bucket and
two additions, a quarter of the cost of the library's counters. A scrape adds up the cells of all threads, and reads the
gauges (queues, slots, states of models) from the server.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
import socketserver
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final, Self, TypeAlias

import psutil
import structlog
from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.registry import Collector

from headway_server.errors import ServerError
from headway_server.observers import (
    BatchEvent,
    Call,
    ModelEvent,
    ModelId,
    Observer,
    QueueEvent,
    SequenceEvent,
    StepEvent,
    TokensEvent,
)
from headway_server.runtime import Cores
from headway_server.services.procedure import is_look
from headway_server.services.status import ending_of
from headway_server.serving.calls import Calls
from headway_server.serving.families import ServedModel
from headway_server.serving.host import ModelHost, ModelState

_log = structlog.get_logger(__name__)

_MODEL: Final = ("model", "version")
_NO_MODEL: Final = ModelId("", "")
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHORT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LAG_INTERVAL_S: Final = 0.1
_MAX_SERIES: Final = 10_000
"""Limit of the series of a thread; further ones are dropped. Models and methods are few, so only a bug reaches it."""
_POLL_S: Final = 0.1
"""Timeout of `close` for the thread, in seconds."""
_READ_TIMEOUT_S: Final = 5.0
"""Timeout of a scrape for its request and for each piece of the answer, in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A metric: name, help and labels. Each combination of label values has a cell."""

    name: str
    """Name without `_total`, which Prometheus' format adds to counters."""
    help: str
    labels: tuple[str, ...] = _MODEL
    bounds: tuple[float, ...] | None = None
    """Upper bounds of a histogram's buckets; None for a counter or a gauge."""
    is_gauge: bool = False
    """True for a value read at each scrape."""

    @property
    def kind(self) -> str:
        """Type of the metric in Prometheus."""
        return "gauge" if self.is_gauge else "counter" if self.bounds is None else "histogram"

    def new_cell(self) -> list[float]:
        """Returns counts by bucket and their sum; for a counter only the sum."""
        return [0.0] * (1 if self.bounds is None else len(self.bounds) + 2)


_DURATION = Family(
    "headway_call_duration_seconds",
    "From the moment a call's request is there to its answer or error.",
    ("method", *_MODEL, "code"),
    _SECONDS,
)
_CALLS = Family(
    "headway_calls", "Calls that have ended, by how: OK or an error's code and reason.", (*_DURATION.labels, "reason")
)
_QUEUE = Family("headway_queue_duration_seconds", "How long inputs waited before they were computed.", _MODEL, _SECONDS)
_DROPPED = Family(
    "headway_inputs_dropped",
    "Inputs that left the queue uncomputed: expired or cancelled.",
    (*_MODEL, "reason"),
)
_BATCH_ITEMS = Family("headway_batch_items", "Inputs of a batch of a model without state.", _MODEL, _COUNTS)
_BATCH = Family(
    "headway_batch_duration_seconds", "How long a batch of a model without state ran.", _MODEL, _SHORT_SECONDS
)
_COMPUTED = Family(
    "headway_computed_tokens",
    "Tokens that runs computed, padding excluded: of batches, encoders, prefills and decode steps; an image is one.",
)
_PADDING = Family("headway_padding_tokens", "Tokens of padding that batches and encoders computed beside these.")
_STEP = Family(
    "headway_step_duration_seconds",
    "How long a run of a decoder, encoder or denoiser took, by kind: prefill, decode, verify, encode, denoise.",
    (*_MODEL, "kind"),
    _SHORT_SECONDS,
)
_STEP_ROWS = Family("headway_step_rows", "Sequences, beams or rows of a run, by kind.", (*_MODEL, "kind"), _COUNTS)
_FIRST_TOKEN = Family(
    "headway_first_token_seconds",
    "From a call's arrival to the first token of each of its sequences, beam searches excluded.",
    _MODEL,
    _SECONDS,
)
_GAP = Family(
    "headway_token_gap_seconds", "Between two tokens of a sequence, beam searches excluded.", _MODEL, _SHORT_SECONDS
)
_INPUT_TOKENS = Family("headway_input_tokens", "Tokens of prompts and sources of sequences that have ended.")
_CACHED_TOKENS = Family(
    "headway_prefix_cache_hit_tokens",
    "Tokens of these prompts that were not computed: the prefix cache or another sample had them.",
)
_OUTPUT_TOKENS = Family("headway_output_tokens", "Tokens that sequences that have ended produced.")
_SEQUENCES = Family(
    "headway_sequences",
    "Sequences that have ended, by finish reason, or expired, cancelled or failed.",
    (*_MODEL, "outcome"),
)
_LOADS = Family("headway_model_loads", "Bundles that were loaded, or could not be.", (*_MODEL, "result"))
_LOAD = Family("headway_model_load_duration_seconds", "How long loading a model took.", _MODEL, _SECONDS)
_LAG = Family(
    "headway_event_loop_lag_seconds",
    "How late the event loop got to a timer, ten times a second.",
    (),
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
_BUILD = Family("headway_build_info", "Version of the server; always 1.", ("version",), is_gauge=True)
_THREADS = Family("headway_threads", "Threads of the process, those of libraries included.", (), is_gauge=True)
_RUNNING = Family("headway_calls_running", "Calls that are being answered.", (), is_gauge=True)
_CORES = Family("headway_cores", "Cores that all models together keep busy.", (), is_gauge=True)
_BUSY = Family("headway_busy_lanes", "Lanes of all models that have work.", (), is_gauge=True)
_INFO = Family(
    "headway_model_info",
    "Loaded models: task, precision and device; always 1.",
    (*_MODEL, "task", "precision", "device"),
    is_gauge=True,
)
_STATE = Family(
    "headway_model_state",
    f"1 for the state that a bundle is in ({', '.join(ModelState)}), 0 for the others.",
    (*_MODEL, "state"),
    is_gauge=True,
)
_STALLED = Family(
    "headway_model_stalled_seconds",
    "Seconds since the last progress of a model's running work; 0 without any.",
    is_gauge=True,
)
_WAITING = Family("headway_inputs_waiting", "Inputs that wait to be computed.", is_gauge=True)
_SLOTS = Family("headway_slots", "Slots of a model that decodes.", is_gauge=True)
_USED_SLOTS = Family("headway_slots_used", "Slots with a sequence.", is_gauge=True)
_POSITIONS = Family(
    "headway_kv_cache_positions", "Tokens that the keys and values of all slots have room for.", is_gauge=True
)
_CACHE_LOOKUPS = Family(
    "headway_cache_lookups",
    "Lookups by cache: label_vectors, image_outputs, prepared_images.",
    (*_MODEL, "cache", "result"),
)
_CACHE_BYTES = Family("headway_cache_bytes", "Bytes of the entries by cache.", (*_MODEL, "cache"), is_gauge=True)
_USED_POSITIONS = Family("headway_kv_cache_positions_used", "Tokens with keys and values in the slots.", is_gauge=True)

_WORKERS = Family("headway_workers", "Processes of the server that answer calls.", (), is_gauge=True)
_RESTARTS = Family("headway_worker_restarts", "Workers that ended by themselves and were replaced.", ())

# In the order of a scrape. `_CALLS` uses the cells of `_DURATION`.
_COUNTED: Final = (
    *(_DURATION, _QUEUE, _DROPPED, _BATCH_ITEMS, _BATCH, _COMPUTED, _PADDING, _STEP, _STEP_ROWS, _FIRST_TOKEN, _GAP),
    *(_INPUT_TOKENS, _CACHED_TOKENS, _OUTPUT_TOKENS, _SEQUENCES, _LOADS, _LOAD, _LAG),
)
FAMILIES: Final = (
    *(_CALLS, *_COUNTED, _BUILD, _THREADS, _RUNNING, _CORES, _BUSY, _INFO, _STATE, _STALLED),
    *(_WAITING, _SLOTS, _USED_SLOTS, _POSITIONS, _USED_POSITIONS, _CACHE_LOOKUPS, _CACHE_BYTES, _WORKERS, _RESTARTS),
)
"""Every metric of this server, apart from the library's `process_*`."""

Sample: TypeAlias = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]
"""A metric as JSON values: name, help, type, and values by name and labels."""

_Cells = dict[tuple[Family, tuple[Any, ...]], list[float]]


class Metrics(Observer, Collector):
    """Counts events and answers scrapes."""

    def __init__(self) -> None:
        """Starts at zero, without a port."""
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self._local = threading.local()
        self._lock = threading.Lock()  # guards the next two
        self._shards: list[tuple[threading.Thread, _Cells]] = []
        self._ended: _Cells = {}  # counts of ended threads
        self._process = psutil.Process()
        self._server: _Server | None = None
        self._lag_task: asyncio.Task[None] | None = None
        self._host: ModelHost | None = None
        self._calls: Calls | None = None
        self._cores: Cores | None = None

    # Counting

    def call_finished(self, call: Call, *, error: BaseException | None, duration_s: float) -> None:
        """See `Observer`."""
        if is_look(call.method):
            return
        self._observe(_DURATION, (call.method, call.model, None if error is None else type(error)), duration_s)

    def left_queue(self, event: QueueEvent) -> None:
        """See `Observer`."""
        if event.reason == "started":
            self._observe(_QUEUE, event.model, event.queue_s)
        else:
            self._count(_DROPPED, (*event.model, event.reason))

    def batch_finished(self, event: BatchEvent) -> None:
        """See `Observer`."""
        model = event.model
        self._observe(_BATCH_ITEMS, model, event.num_items)
        self._observe(_BATCH, model, event.run_s)
        self._count(_COMPUTED, model, event.num_items * event.length - event.num_padded)
        self._count(_PADDING, model, event.num_padded)

    def step_finished(self, event: StepEvent) -> None:
        """See `Observer`."""
        labels = (*event.model, event.kind)
        self._observe(_STEP, labels, event.run_s)
        self._observe(_STEP_ROWS, labels, event.num_rows)
        self._count(_COMPUTED, event.model, event.num_tokens)
        if event.kind == "encode":
            self._count(_PADDING, event.model, event.num_padded)

    def tokens_produced(self, event: TokensEvent) -> None:
        """See `Observer`."""
        for seconds in event.first_token_s:
            self._observe(_FIRST_TOKEN, event.model, seconds)
        for seconds in event.gaps_s:
            self._observe(_GAP, event.model, seconds)

    def sequence_finished(self, event: SequenceEvent) -> None:
        """See `Observer`."""
        self._count(_INPUT_TOKENS, event.model, event.num_input_tokens)
        self._count(_CACHED_TOKENS, event.model, event.num_cached_tokens)
        self._count(_OUTPUT_TOKENS, event.model, event.num_output_tokens)
        self._count(_SEQUENCES, (*event.model, event.outcome))

    def model_changed(self, event: ModelEvent) -> None:
        """See `Observer`."""
        if event.state in {"ready", "failed"}:
            self._count(_LOADS, (*event.model, event.state))
            self._count(_LOADS, (*event.model, "failed"), 0)  # Prometheus sees no increase in a series that starts at 1
        if event.seconds is not None:
            self._observe(_LOAD, event.model, event.seconds)

    def _observe(self, family: Family, labels: tuple[Any, ...], value: float) -> None:
        assert family.bounds is not None, family.name
        cell = self._cell(family, labels)
        cell[bisect_left(family.bounds, value)] += 1
        cell[-1] += value

    def _count(self, family: Family, labels: tuple[Any, ...], value: float = 1) -> None:
        self._cell(family, labels)[-1] += value

    def _cell(self, family: Family, labels: tuple[Any, ...]) -> list[float]:
        try:
            cells: _Cells = self._local.cells
        except AttributeError:  # first event of the thread
            cells = self._local.cells = {}
            with self._lock:
                self._shards.append((threading.current_thread(), cells))
        cell = cells.get((family, labels))
        if cell is None:
            cell = family.new_cell()
            if len(cells) < _MAX_SERIES:
                cells[family, labels] = cell
        return cell

    # Reading

    def collect(self) -> Iterator[Metric]:
        """Yields every metric with its present values."""
        by_family: dict[Family, dict[tuple[Any, ...], list[float]]] = {family: {} for family in _COUNTED}
        for (family, labels), cell in self._sum().items():
            by_family[family][labels] = cell
        for model in by_family[_QUEUE]:  # 0, so that Prometheus sees the first one as an increase
            for reason in ("expired", "cancelled"):
                by_family[_DROPPED].setdefault((*model, reason), _DROPPED.new_cell())
        yield from _call_metrics(by_family.pop(_DURATION))
        for family, cells in by_family.items():
            yield _metric(family, cells)
        yield from self._look()

    def _sum(self) -> _Cells:
        """Adds up the cells of all threads, and merges those of ended threads."""
        total: _Cells = {}
        with self._lock:
            living: list[tuple[threading.Thread, _Cells]] = []
            for thread, cells in self._shards:
                if thread.is_alive():
                    living.append((thread, cells))
                else:
                    _add(self._ended, cells)
            self._shards = living
            for cells in (self._ended, *(cells for _, cells in living)):
                _add(total, cells)
        return total

    def _look(self) -> Iterator[Metric]:
        """Yields the values read from the server."""
        yield _gauge(_BUILD, [((version("headway-server"),), 1)])
        yield _gauge(_THREADS, [((), self._process.num_threads())])
        yield from _worker_metrics(1, 0)
        if self._host is None or self._calls is None or self._cores is None:
            return
        yield _gauge(_RUNNING, [((), self._calls.num_running)])
        yield _gauge(_CORES, [((), self._cores.count)])
        yield _gauge(_BUSY, [((), self._cores.num_busy)])
        yield from _model_gauges(self._host)

    # Running

    def listen(self, host: str, port: int) -> None:
        """Answers `GET /metrics` at an address, in a thread.

        Raises:
            ServerError: The address cannot be listened at.
        """
        self._server = _Server.listening(host, port, self.registry)

    def write(self, headers: Mapping[str, str]) -> tuple[Mapping[str, str], bytes]:
        """Answers `GET /metrics`; see `WriteMetrics`."""
        return _scraped(self.registry, headers)

    def samples(self) -> list[Sample]:
        """Returns the metrics for merging with those of other processes; thread-safe."""
        return [
            (
                metric.name,
                metric.documentation,
                metric.type,
                [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
            )
            for metric in self.registry.collect()
        ]

    @property
    def port(self) -> int | None:
        """Port of the metrics; None without one."""
        return None if self._server is None else int(self._server.server_address[1])

    def watch(self, host: ModelHost, calls: Calls, cores: Cores) -> None:
        """Starts to read values from these, and to measure the lag of the running event loop."""
        self._host, self._calls, self._cores = host, calls, cores
        self._lag_task = asyncio.create_task(self._measure_lag())

    async def _measure_lag(self) -> None:
        while True:
            due = time.monotonic() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._observe(_LAG, (), max(0.0, time.monotonic() - due))

    def close(self) -> None:
        """Stops listening."""
        if self._lag_task is not None and not self._lag_task.get_loop().is_closed():
            self._lag_task.cancel()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def __repr__(self) -> str:
        return f"Metrics(port {self.port})"


class WorkersMetrics(Collector):
    """The metrics of all workers of a server, each value with the label `worker`."""

    def __init__(self, ask: Callable[[], tuple[Mapping[int, Sequence[Sample]], int]]) -> None:
        """Takes a function that reads the workers' metrics.

        Args:
            ask: Returns the metrics of each running worker by its index, and the number of restarts; may block, and is
                called from any thread.
        """
        self._ask = ask
        self._server: _Server | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Returns no metrics, so that registration reads no worker."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yields every metric of every worker, and the metrics of the supervisor."""
        workers, num_restarts = self._ask()
        merged: dict[str, Metric] = {}
        for number, metrics in sorted(workers.items()):
            for name, meaning, kind, samples in metrics:
                if name in (_WORKERS.name, _RESTARTS.name):  # of each worker only
                    continue
                metric = merged.setdefault(name, Metric(name, meaning, kind))
                for sample, labels, value in samples:
                    metric.add_sample(sample, {**labels, "worker": str(number)}, value)
        yield from merged.values()
        yield from _worker_metrics(len(workers), num_restarts)

    def write(self, headers: Mapping[str, str]) -> tuple[Mapping[str, str], bytes]:
        """Answers `GET /metrics`; see `WriteMetrics`."""
        return _scraped(self.registry, headers)

    def listen(self, host: str, port: int) -> None:
        """Answers `GET /metrics` at an address, in a thread; errors are those of `Metrics.listen`."""
        self._server = _Server.listening(host, port, self.registry)

    def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def __repr__(self) -> str:
        return f"WorkersMetrics({self._server})"


class _Server(socketserver.TCPServer):
    """Answers scrapes one after another, in a single thread."""

    allow_reuse_address = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        handler = type("_Handler", (MetricsHandler,), {"registry": registry, "timeout": _READ_TIMEOUT_S})
        super().__init__((host, port), handler)

    @classmethod
    def listening(cls, host: str, port: int, registry: CollectorRegistry) -> Self:
        """Listens, in a thread of its own.

        Raises:
            ServerError: The address cannot be listened at.
        """
        try:
            server = cls(host, port, registry)
        except OSError as error:
            raise ServerError(
                f"cannot listen for metrics on {host}:{port}: {error.strerror or error}; "
                "stop what listens there or choose another --metrics-host or --metrics-port"
            ) from error
        threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True).start()
        _log.info("metrics", host=host, port=server.server_address[1], path="/metrics")
        return server

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 (the base's signature)
        """Logs an error of a scrape, often a disconnect."""
        _log.debug("a scrape of the metrics failed", client=str(client_address), exc_info=True)


def _scraped(registry: CollectorRegistry, headers: Mapping[str, str]) -> tuple[Mapping[str, str], bytes]:
    """Answers a scrape, as `MetricsHandler` does at the metrics' own port."""
    write, media_type = choose_encoder(headers.get("accept", ""))
    body, answer = write(registry), {"content-type": media_type, "vary": "accept, accept-encoding"}
    if gzip_accepted(headers.get("accept-encoding", "")):
        body, answer["content-encoding"] = gzip.compress(body), "gzip"
    return answer, body


def _add(total: _Cells, cells: _Cells) -> None:
    # A copy is a single step, while the owning thread continues to count.
    for key, cell in list(cells.items()):
        values = cell.copy()
        before = total.get(key)
        total[key] = values if before is None else [a + b for a, b in zip(before, values, strict=True)]


def _metric(family: Family, cells: dict[tuple[Any, ...], list[float]]) -> Metric:
    if family.bounds is None:
        counter = CounterMetricFamily(family.name, family.help, labels=family.labels)
        for labels, cell in cells.items():
            counter.add_metric(labels, cell[-1])
        return counter
    histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for labels, cell in cells.items():
        histogram.add_metric(labels, _buckets(family.bounds, cell), cell[-1])
    return histogram


def _buckets(bounds: tuple[float, ...], cell: list[float]) -> list[tuple[str, float]]:
    """Returns cumulative counts by upper bound, as in Prometheus' format."""
    count, buckets = 0.0, []
    for bound, added in zip((*map(float, bounds), "+Inf"), cell, strict=False):
        count += added
        buckets.append((str(bound), count))
    return buckets


def _call_metrics(cells: dict[tuple[Any, ...], list[float]]) -> Iterator[Metric]:
    """Yields the metrics of calls: durations by code, and counts by code and reason."""
    durations: dict[tuple[Any, ...], list[float]] = {}
    numbers: dict[tuple[Any, ...], list[float]] = {}
    for (method, model, kind), cell in cells.items():
        code, reason = ending_of(kind)
        labels = (method.lstrip("/"), *(model or _NO_MODEL), code)
        before = durations.get(labels)
        durations[labels] = cell if before is None else [a + b for a, b in zip(before, cell, strict=True)]
        numbers.setdefault((*labels, reason), [0.0])[0] += sum(cell[:-1])
        numbers.setdefault(
            (*labels[:-1], *ending_of(Exception)), [0.0]
        )  # 0, so that the first bug shows as an increase
    yield _metric(_CALLS, numbers)
    yield _metric(_DURATION, durations)


def _gauge(family: Family, values: Iterable[tuple[tuple[str, ...], float]]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(family.name, family.help, labels=family.labels)
    for labels, value in values:
        gauge.add_metric(labels, value)
    return gauge


def _worker_metrics(count: int, num_restarts: int) -> Iterator[Metric]:
    yield _gauge(_WORKERS, [((), count)])
    yield _metric(_RESTARTS, {(): [float(num_restarts)]})


def _model_gauges(host: ModelHost) -> Iterator[Metric]:
    """Yields the gauges of models and caches."""
    models = [(_model_id(model), model) for model in host.models]
    usages = [(model_id, model.usage()) for model_id, model in models]
    decoding = [(model_id, usage) for model_id, usage in usages if usage.num_slots]
    yield _gauge(
        _INFO,
        (
            ((*model_id, model.bundle.manifest.task.value, model.precision.value, model.device), 1)
            for model_id, model in models
        ),
    )
    yield _gauge(
        _STATE,
        (
            ((name, number, state.value), float(bundle.state is state))
            for bundle in host.bundles
            for name, _, number in [bundle.path.partition("/")]
            for state in ModelState
        ),
    )
    yield _gauge(_STALLED, ((model_id, model.stalled_s()) for model_id, model in models))
    yield _gauge(_WAITING, ((model_id, usage.num_waiting) for model_id, usage in usages))
    yield _gauge(_SLOTS, ((model_id, usage.num_slots) for model_id, usage in decoding))
    yield _gauge(_USED_SLOTS, ((model_id, usage.num_used_slots) for model_id, usage in decoding))
    yield _gauge(_POSITIONS, ((model_id, usage.num_positions) for model_id, usage in decoding))
    yield _gauge(_USED_POSITIONS, ((model_id, usage.num_used_positions) for model_id, usage in decoding))
    caches = [(model_id, cache) for model_id, usage in usages for cache in usage.caches]
    caches.append((_NO_MODEL, host.images.usage()))
    lookups = {
        (*model_id, cache.name, result): [float(count)]
        for model_id, cache in caches
        for result, count in (("hit", cache.num_hits), ("miss", cache.num_misses))
    }
    yield _metric(_CACHE_LOOKUPS, lookups)
    yield _gauge(_CACHE_BYTES, (((*model_id, cache.name), cache.num_bytes) for model_id, cache in caches))


def _model_id(model: ServedModel) -> ModelId:
    return ModelId(model.bundle.manifest.name, model.bundle.manifest.version)
