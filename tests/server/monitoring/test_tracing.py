"""Traces: from the caller's span through queue, batch, prefill and decode to the answer, as a collector gets them."""

import asyncio
import logging
import re
import signal
import subprocess
import sys

import grpc
import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otlp_collector import attributes, running_collector
from rpc_failures import failure_of
from tiny_engine import make_decoder, make_sequence, running_engine

from headway.v1 import text_classification_service_pb2 as pb
from headway_client import AsyncClient, Client
from headway_server.monitoring import tracing as tracing_module
from headway_server.monitoring.tracing import Tracing
from headway_server.observers import BatchEvent, BatchMember, ModelId
from headway_server.serving.calls import Calls

CLASSIFY = "headway.v1.TextClassificationService/ClassifyText"
PARENT_TRACE, PARENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traceparent(flags: str = "01") -> tuple[str, str]:
    return "traceparent", f"00-{PARENT_TRACE}-{PARENT_SPAN}-{flags}"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter) -> Tracing:
    return Tracing(SimpleSpanProcessor(exporter))


def test_a_collector_gets_the_call_and_what_was_done_for_it_in_the_trace_of_the_client(start_process, classifier_store):
    provider = TracerProvider()
    with running_collector() as collector:
        server = start_process(
            "--store", classifier_store, "--port", 0, "--trace-endpoint", collector.endpoint, "--log-format", "json",
            "--access-log",
        )  # fmt: skip
        address = re.search(r"ready on (\S+)", server.wait_ready())[1]
        with Client(address) as client:
            with provider.get_tracer("caller").start_as_current_span("work") as span:
                client.classify_text("a star")
            client.classify_text("a game")  # outside of every span
        server.process.send_signal(signal.SIGTERM)  # the last spans are sent before it ends
        assert server.wait_end() == 0
        spans = collector.wait_for(6)
        assert {"service.name": "headway-server"}.items() <= collector.resources[0].items()
    trace_id = trace.format_trace_id(span.get_span_context().trace_id)
    mine = {span.name: span for span in spans if span.trace_id.hex() == trace_id}
    assert mine.keys() == {CLASSIFY, "queue", "batch"}
    call = mine[CLASSIFY]
    assert call.parent_span_id.hex() == trace.format_span_id(span.get_span_context().span_id)
    assert {mine[name].parent_span_id for name in ("queue", "batch")} == {call.span_id}
    told = attributes(call)
    request_id = told.pop("headway.request_id")
    assert told == {
        "rpc.system": "grpc",
        "rpc.service": "headway.v1.TextClassificationService",
        "rpc.method": "ClassifyText",
        "rpc.grpc.status_code": 0,
        "headway.call_id": 1,
        "headway.model": "topics",
        "headway.model_version": "1",
    }
    queue, batch = mine["queue"], mine["batch"]
    times = [call.start_time_unix_nano, queue.start_time_unix_nano, queue.end_time_unix_nano]
    times += [batch.start_time_unix_nano, batch.end_time_unix_nano, call.end_time_unix_nano]
    assert times == sorted(times)
    assert attributes(batch)["headway.num_items"] == 1
    [other] = {span.trace_id for span in spans} - {call.trace_id}
    access = [line for line in server.log.read_text().splitlines() if '"event": "call"' in line]
    assert [trace_id in line and request_id in line for line in access] == [True, False]
    assert other.hex() in access[1]


async def test_the_async_client_sends_its_span_with_every_kind_of_call(serve, classifier_store, tracing, exporter):
    provider = TracerProvider()
    async with serve(classifier_store, observer=tracing) as serving, AsyncClient(f"127.0.0.1:{serving.port}") as client:
        with provider.get_tracer("caller").start_as_current_span("work") as span:
            await client.list_models()
    [call] = exporter.get_finished_spans()
    assert call.context.trace_id == span.get_span_context().trace_id
    assert call.parent.span_id == span.get_span_context().span_id


async def test_a_sequence_is_traced_through_queue_prefill_and_decode(tracing, exporter):
    calls = Calls(observer=tracing)
    async with (
        running_engine(make_decoder(prefill_chunk=8), observer=tracing) as engine,
        calls.answer("/headway.v1.GenerationService/GenerateText", metadata=[traceparent()]) as call,
    ):
        await engine.run([make_sequence(np.arange(2, 21), eos_id=None, max_new_tokens=5)])
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert list(spans) == ["queue", "prefill", "decode", "headway.v1.GenerationService/GenerateText"]
    root = spans["headway.v1.GenerationService/GenerateText"]
    assert all(span.parent.span_id == root.context.span_id for name, span in spans.items() if name != root.name)
    assert all(trace.format_trace_id(span.context.trace_id) == PARENT_TRACE for span in spans.values())
    assert trace.format_span_id(root.parent.span_id) == PARENT_SPAN
    assert spans["prefill"].attributes == {"gen_ai.usage.input_tokens": 19, "headway.num_cached_tokens": 0}
    assert spans["decode"].attributes == {"gen_ai.usage.output_tokens": 5, "headway.outcome": "length"}
    assert call.trace_id == PARENT_TRACE


async def test_the_calls_of_a_batch_are_linked(tracing, exporter):
    calls = Calls(observer=tracing)
    async with calls.answer("/a/one") as one, calls.answer("/a/two") as two, calls.answer("/a/three") as three:
        members = [BatchMember(call, call.started_at, 2) for call in (one, two, three)]
        tracing.batch_finished(
            BatchEvent(
                model=ModelId("m", "1"), num_items=6, length=3, num_padded=0,
                started_at=one.started_at, run_s=0.01, members=lambda: members,
            )
        )  # fmt: skip
    spans = exporter.get_finished_spans()
    batches = [span for span in spans if span.name == "batch"]
    roots = {span.name: span.context for span in spans if span.name.startswith("a/")}
    assert [link.context for link in batches[0].links] == [roots["a/two"], roots["a/three"]]
    assert [[link.context for link in batch.links] for batch in batches[1:]] == [[batches[0].context]] * 2
    assert {batch.context.trace_id for batch in batches} == {context.trace_id for context in roots.values()}


@pytest.mark.parametrize(
    ("ratio", "metadata", "is_traced"),
    [
        (0.0, (), False),
        (1.0, (), True),
        (0.0, (traceparent("01"),), True),
        (1.0, (traceparent("00"),), False),
        (1.0, (("traceparent", "no such thing"),), True),
        (0.0, (("traceparent", f"ff-{PARENT_TRACE}-{PARENT_SPAN}-01"),), False),
    ],
)
async def test_the_callers_choice_goes_before_the_share(exporter, ratio, metadata, is_traced):
    calls = Calls(observer=Tracing(SimpleSpanProcessor(exporter), sample_ratio=ratio))
    async with calls.answer("/a/one", metadata=metadata):
        pass
    assert bool(exporter.get_finished_spans()) == is_traced


async def test_a_share_of_the_calls_is_traced(exporter):
    calls = Calls(observer=Tracing(SimpleSpanProcessor(exporter), sample_ratio=0.25))
    for _ in range(800):
        async with calls.answer("/a/one"):
            pass
    assert 130 < len(exporter.get_finished_spans()) < 270  # 200 are expected; 5.7 standard deviations


async def test_errors_have_their_code_and_no_text_of_the_caller(serve, classifier_store, tracing, exporter):
    async with serve(classifier_store, observer=tracing) as serving:
        request = pb.ClassifyTextRequest(texts=["a"], model="private words")
        failure = await failure_of(serving.texts.ClassifyText(request))
    assert failure.code is grpc.StatusCode.NOT_FOUND
    [call] = exporter.get_finished_spans()
    assert (call.attributes["rpc.grpc.status_code"], call.attributes["error.type"]) == (5, "MODEL_NOT_FOUND")
    assert call.status.is_unset  # the caller's fault
    assert "private" not in call.to_json()


async def test_a_call_of_very_many_sequences_has_a_bounded_number_of_spans(tracing, exporter):
    calls = Calls(observer=tracing)
    async with running_engine(make_decoder(), observer=tracing) as engine, calls.answer("/a/many"):
        await engine.run([make_sequence([5], eos_id=None, max_new_tokens=1) for _ in range(40)])
    *children, call = exporter.get_finished_spans()
    assert len(children) == 64
    assert call.attributes["headway.left_out_spans"] == 40 * 3 - 64


async def test_a_collector_that_is_away_delays_nothing(serve, classifier_store):
    tracing = Tracing.sending_to("http://127.0.0.1:9", sample_ratio=1.0)
    async with serve(classifier_store, observer=tracing) as serving:
        async with asyncio.timeout(10):
            for _ in range(20):
                await serving.texts.ClassifyText(pb.ClassifyTextRequest(texts=["star"]))
    began = asyncio.get_running_loop().time()
    await asyncio.to_thread(tracing.close)
    assert asyncio.get_running_loop().time() - began < 5


def test_nothing_is_imported_for_what_is_switched_off():
    program = (
        "import sys, headway_server.cli, headway_client\n"
        "from headway_server.monitoring import Monitoring\n"
        "from headway_server.settings import ServerSettings\n"
        "from headway_server.observers import NO_OBSERVER\n"
        "assert Monitoring.open(ServerSettings(store='s')).observer is NO_OBSERVER\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('opentelemetry', 'prometheus_client')])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_a_server_without_the_extra_says_what_to_install(classifier_store):
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from headway_server.cli import main\n"
        f"main(['--store', {str(classifier_store)!r}, '--port', '0', '--trace-endpoint', 'http://127.0.0.1:9'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "install headway-server[tracing]" in ended.stderr


def test_the_log_says_once_in_a_while_that_the_collector_is_away(monkeypatch, caplog):
    Tracing.sending_to("http://127.0.0.1:1", sample_ratio=1.0).close()
    log = logging.getLogger(tracing_module._EXPORTER_LOG)
    (seldom,) = (each for each in log.filters if isinstance(each, tracing_module._Seldom))
    seldom._logged_at, seldom._num_left_out = -tracing_module._LOG_INTERVAL_S, 0
    for number in range(4):
        log.warning(f"Transient error, try {number}")
    monkeypatch.setattr(tracing_module, "_LOG_INTERVAL_S", 0.0)
    log.warning("Transient error, try 4")
    assert [record.getMessage() for record in caplog.records] == [
        "Transient error, try 0",
        "Transient error, try 4 (3 similar lines before were suppressed)",
    ]
