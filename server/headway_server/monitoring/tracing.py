"""Traces by OpenTelemetry: a span for each call in its caller's trace, and child spans of its work.

    call (server) ── queue ── batch                    models without state; a batch links the calls in it
                  └─ queue ── prefill ── decode        each sequence of a model that decodes

Child spans are created from events after their end, with the events' times.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from importlib.metadata import version
from typing import Final, Self

import grpc
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes, AttributeValue

from headway_server.observers import BatchEvent, Call, Observer, SequenceEvent
from headway_server.services.status import ending_of

_SERVICE: Final = "headway-server"
_CLOSE_TIMEOUT_S: Final = 3.0
"""Timeout for sending the last spans at shutdown, in seconds."""
_MAX_CHILDREN: Final = 64
"""Limit of child spans of a call; a call of 32 prompts with 16 samples would have 1,536."""
_LOG_INTERVAL_S: Final = 300.0
"""Interval of log lines about an unreachable collector, in seconds."""
_EXPORTER_LOG: Final = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_SERVER_ERRORS: Final = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE"})
"""Codes that make a server's span an error (OpenTelemetry's semantic conventions for gRPC); the others are the
caller's."""


class _Seldom(logging.Filter):
    """Rate-limits log lines to one every `_LOG_INTERVAL_S`, with the number of suppressed ones."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._logged_at = -_LOG_INTERVAL_S
        self._num_left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        with self._lock:
            now = time.monotonic()
            if now - self._logged_at < _LOG_INTERVAL_S:
                self._num_left_out += 1
                return False
            if self._num_left_out:
                record.msg = f"{record.getMessage()} ({self._num_left_out} similar lines before were suppressed)"
                record.args = ()
            self._logged_at, self._num_left_out = now, 0
            return True


class _CallSpan:
    """The open span of a traced call."""

    __slots__ = ("context", "num_children", "offset_ns", "span")

    def __init__(self, span: Span, offset_ns: int) -> None:
        self.span = span
        self.context = set_span_in_context(span, Context())
        self.num_children = 0
        self.offset_ns = offset_ns

    def wall_ns(self, monotonic_s: float) -> int:
        """Converts a time of `time.monotonic` to wall time, by the clock at the start of the call."""
        return int(monotonic_s * 1e9) + self.offset_ns


class Tracing(Observer):
    """Creates spans from events for a processor, which sends them."""

    def __init__(self, processor: SpanProcessor, *, sample_ratio: float = 1.0) -> None:
        """Traces a share of the calls.

        Args:
            processor: Receives ended spans, from any thread.
            sample_ratio: Share of the calls without a trace to be traced. Others follow their caller's decision.
        """
        resource = {SERVICE_VERSION: version(_SERVICE)}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            resource[SERVICE_NAME] = _SERVICE
        self._provider = TracerProvider(
            resource=Resource.create(resource),
            sampler=ALWAYS_ON,  # `call_started` samples: the library's sampling takes ten times as long as all metrics
            shutdown_on_exit=False,  # `close` does it, with a timeout
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(_SERVICE, version(_SERVICE))
        self._propagator = TraceContextTextMapPropagator()
        self._sample_ratio = sample_ratio
        self._spans: dict[int, _CallSpan] = {}  # by call

    @classmethod
    def sending_to(cls, endpoint: str, *, sample_ratio: float) -> Self:
        """Sends spans by OTLP over gRPC; without encryption for http://."""
        log = logging.getLogger(_EXPORTER_LOG)  # the library logs each attempt
        if not any(isinstance(each, _Seldom) for each in log.filters):
            log.addFilter(_Seldom())
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), sample_ratio=sample_ratio)

    def call_started(self, call: Call) -> None:
        """See `Observer`."""
        parent = call.parent_trace
        if not (random.random() < self._sample_ratio if parent is None else parent[1]):  # noqa: S311 (no secret)
            return
        offset_ns = time.time_ns() - time.monotonic_ns()
        service, _, method = call.method.strip("/").rpartition("/")
        attributes: dict[str, AttributeValue] = {"headway.call_id": call.call_id}
        if "." in service:
            attributes |= {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        else:  # a route of the HTTP port
            attributes["http.route"] = call.method
        span = self._tracer.start_span(
            call.method.strip("/"),
            self._propagator.extract(dict(call.metadata)),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=int(call.started_at * 1e9) + offset_ns,
        )
        call.span_trace_id = format_trace_id(span.get_span_context().trace_id)
        self._spans[call.call_id] = _CallSpan(span, offset_ns)

    def call_finished(self, call: Call, *, error: BaseException | None, duration_s: float) -> None:
        """See `Observer`."""
        recorded = self._spans.pop(call.call_id, None)
        if recorded is None:
            return
        span = recorded.span
        code, reason = ending_of(None if error is None else type(error))
        span.set_attribute("rpc.grpc.status_code", int(grpc.StatusCode[code].value[0]))
        if call.request_id:
            span.set_attribute("headway.request_id", call.request_id)
        if call.model is not None:
            span.set_attributes({"headway.model": call.model.name, "headway.model_version": call.model.version})
        if error is not None:  # without its message, which may quote the caller's texts
            span.set_attribute("error.type", reason)
            if code in _SERVER_ERRORS:
                span.set_status(Status(StatusCode.ERROR))
        if recorded.num_children > _MAX_CHILDREN:
            span.set_attribute("headway.left_out_spans", recorded.num_children - _MAX_CHILDREN)
        span.end(recorded.wall_ns(call.started_at + duration_s))

    def batch_finished(self, event: BatchEvent) -> None:
        """See `Observer`. The first traced call of the batch has the span; other calls are linked."""
        traced = [
            (recorded, member)
            for member in event.members()
            if (recorded := self._spans.get(member.call.call_id)) is not None
        ]
        finished_at = event.started_at + event.run_s
        links = [Link(recorded.span.get_span_context()) for recorded, _ in traced[1:]]
        for recorded, member in traced:
            self._add(recorded, "queue", member.arrived_at, event.started_at)
            attributes = {
                "headway.num_items": event.num_items,
                "headway.num_own_items": member.num_items,
                "headway.length": event.length,
                "headway.num_padded": event.num_padded,
            }
            span = self._add(recorded, "batch", event.started_at, finished_at, attributes=attributes, links=links)
            if recorded is traced[0][0] and span is not None:
                links = [Link(span.get_span_context())]

    def sequence_finished(self, event: SequenceEvent) -> None:
        """See `Observer`."""
        recorded = None if event.call is None else self._spans.get(event.call.call_id)
        if recorded is None:
            return
        self._add(recorded, "queue", event.arrived_at, event.started_at or event.finished_at)
        if not event.started_at:
            return
        attributes: Attributes = {
            "gen_ai.usage.input_tokens": event.num_input_tokens,
            "headway.num_cached_tokens": event.num_cached_tokens,
        }
        self._add(
            recorded, "prefill", event.started_at, event.first_token_at or event.finished_at, attributes=attributes
        )
        if event.first_token_at:
            attributes = {"gen_ai.usage.output_tokens": event.num_output_tokens, "headway.outcome": event.outcome}
            self._add(recorded, "decode", event.first_token_at, event.finished_at, attributes=attributes)

    def _add(
        self,
        recorded: _CallSpan,
        name: str,
        began: float,
        ended: float,
        *,
        attributes: Attributes = None,
        links: list[Link] | None = None,
    ) -> Span | None:
        """Adds an ended child span to a call's span; None past the limit."""
        recorded.num_children += 1
        if recorded.num_children > _MAX_CHILDREN:
            return None
        span = self._tracer.start_span(
            name, recorded.context, attributes=attributes, links=links, start_time=recorded.wall_ns(began)
        )
        span.end(recorded.wall_ns(ended))
        return span

    def close(self) -> None:
        """Sends the remaining spans, within `_CLOSE_TIMEOUT_S`."""
        ending = threading.Thread(target=self._provider.shutdown, name="tracing-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_TIMEOUT_S)

    def __repr__(self) -> str:
        return f"Tracing({len(self._spans)} open spans)"
