"""The worker that calls a server with the client's load tester.

It runs with the client of the tree whose server it calls, since the protocol may differ between trees; a tree whose
load tester was a part of the client is called by this tree's, through the public names of the tree's client. Servers of
another protocol are called by the same load tester: only how a call is sent differs.
"""

import asyncio
import base64
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np

from benchmarks.worker import serve
from headway_client import AsyncClient
from headway_client.retry import NO_RETRIES
from headway_load import OK, CallRecord, LoadPlan, LoadRunner, LoadTask, Recorder, Sender, Workload

RAW_METHODS = {"echo": "/headway.benchmarks.Echo/Echo", "ctranslate2_served": "/headway.benchmarks.Texts/Answer"}
"""Of each server that takes a text over gRPC as it is: the method."""
_TASKS = {
    "generation": ("generate-text", "generate"),
    "translation": ("translate-text", "translate"),
    "text_classification": ("classify-text", "classify"),
    "text_embedding": ("embed-text",),
    "token_classification": ("classify-tokens",),
    "image_classification": ("classify-image", "label"),
}
"""By a bundle's task: what the load tester calls it, in this tree and in those up to commit 59592ab."""
_HTTP: dict[str, tuple[str, Callable[[str], Any]]] = {
    "infinity": ("/v1/embeddings", lambda text: {"model": "benchmark", "input": [text]}),
    "litserve": ("/predict", lambda text: {"input": text}),
    "bentoml": ("/classify", lambda text: {"inputs": [text]}),
    "triton": (
        "/v2/models/classify/infer",
        lambda text: {"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}]},
    ),
}
"""Of each server that speaks HTTP: the path, and the JSON body of an input; images come in base64."""
_WARM_UP_SHARE = 0.25
"""Of a measurement's time that passes before it, with the same callers; at least a call of each."""
_TIMEOUT_S = 600.0
_START_TIMEOUT_S = 120.0
_NEWCOMER_PERIOD_S = 1.0


class _NotReadyError(RuntimeError):
    """A server is not up yet, or has broken."""


class _RawSender:
    """Sends prepared bytes in turn; takes the place of the load tester's `Sender`."""

    def __init__(
        self, exchange: Callable[[bytes], Awaitable[object]], payloads: Sequence[bytes], token_counts: Sequence[int]
    ) -> None:
        self._exchange = exchange
        self._payloads = cycle(zip(payloads, token_counts, strict=True))

    async def probe(self) -> None:
        """Calls until the server answers."""
        give_up_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                await self._exchange(next(self._payloads)[0])
            except (OSError, EOFError, _NotReadyError, grpc.aio.AioRpcError):
                if time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(0.2)
            else:
                return

    async def send(self, call: CallRecord) -> None:
        """Makes one call; a failure ends the test."""
        payload, call.token_count = next(self._payloads)
        call.sent_s = asyncio.get_running_loop().time()
        await self._exchange(payload)
        call.ended_s = asyncio.get_running_loop().time()


class _Http:
    """POSTs to one path, on a connection for each call that runs at a time."""

    def __init__(self, address: str, path: str) -> None:
        self._address = address.split(":")
        self._head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: "
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, body: bytes) -> None:
        """Raises an error if the answer is none of status 200: `_NotReadyError` if the server may come up yet."""
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_connection(*self._address)
        writer.write(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
        header = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        answer = await reader.readexactly(int(header.partition("content-length:")[2].split()[0]))
        self.idle.append((reader, writer))
        status = int(header.split()[1])
        if status != 200:
            error = _NotReadyError if status == 404 or status >= 500 else RuntimeError
            raise error(f"status {status}: {answer!r:.200}")


def _recording(sender: Any) -> tuple[Any, list[CallRecord]]:
    """Returns a sender that keeps the record of every call, begun ones and those of the warm-up included."""
    calls: list[CallRecord] = []

    def send(call: CallRecord) -> Awaitable[None]:
        calls.append(call)
        sent: Awaitable[None] = sender.send(call)
        return sent

    return SimpleNamespace(send=send), calls


class Caller:
    """Answers the requests of the benchmark."""

    def __init__(self) -> None:
        self._cases: dict[str, dict[str, Any]] = {}
        self._wave_s: dict[tuple[object, ...], float] = {}
        self._num_used: Counter[str] = Counter()
        """Inputs of each case that were sent: a prompt is not asked twice, since a server remembers it."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Measures what a request asks for."""
        return asyncio.run((self._newcomers if "newcomers" in request else self._measure)(**request))

    async def _measure(self, *, case: str, callers: int, seconds: float, protocol: str, address: str) -> dict[str, Any]:
        """Keeps callers busy: rates a second, times in ms, and the cores that the callers took."""
        async with self._sender(case, protocol, address) as sender:
            await sender.probe()
            key = (case, protocol, address, callers)
            if key not in self._wave_s:  # how long it takes until everybody was answered once
                begun_s = time.perf_counter()
                await LoadRunner(self._plan(case, callers, min(0.05, seconds), 0), sender).run()
                self._wave_s[key] = time.perf_counter() - begun_s
            wave_s = self._wave_s[key]
            plan = self._plan(case, callers, max(seconds, 2 * wave_s), max(_WARM_UP_SHARE * seconds, wave_s))
            recorded, calls = _recording(sender)
            begun_s, cpu_s = time.perf_counter(), time.process_time()
            recorder = await LoadRunner(plan, recorded).run()
            cores = (time.process_time() - cpu_s) / (time.perf_counter() - begun_s)
        self._num_used[case] += len(calls)
        tokens_of_all = callers * (self._read(case)["max_new_tokens"] or 0) if self._read(case)["weights"] else 0
        has_tokens = self._read(case)["task"] in ("generation", "translation")
        window = recorder.start_s, recorder.end_s
        figures = figures_of(calls, *window, cycle_tokens=tokens_of_all, has_tokens=has_tokens)
        return figures | {"client_cores": cores}

    async def _newcomers(
        self, *, running: str, newcomers: str, num_running: int, count: int, address: str
    ) -> dict[str, Any]:
        """Measures newcomers on an idle server, then one a second while other streams run: first tokens and gaps."""
        async with (
            self._sender(running, "headway", address) as streams,
            self._sender(newcomers, "headway", address) as sender,
        ):

            async def come() -> CallRecord:
                call = CallRecord(intended_s=asyncio.get_running_loop().time())
                await sender.send(call)
                return call

            idle = [await come() for _ in range(count)]
            recorded, calls = _recording(streams)
            runner = LoadRunner(self._plan(running, num_running, 3600, 0), recorded)
            run = asyncio.create_task(runner.run())
            while sum(bool(call.token_times_s) for call in calls) < num_running and not run.done():
                await asyncio.wait([run], timeout=0.02)
            arrivals = []
            for _ in range(count):
                arrivals.append(asyncio.create_task(come()))
                await asyncio.sleep(_NEWCOMER_PERIOD_S)
            came = await asyncio.gather(*arrivals)
            for _ in range(2):  # begin no more, then end those that run
                runner.stop()
                await asyncio.sleep(0)
            await run
        first_s, last_s = came[0].sent_s, max(call.ended_s for call in came)
        times = [[t for t in _token_times(call) if first_s <= t <= last_s] for call in calls]
        return {
            "idle_first_token_ms": _spread([call.token_times_s[0][0] - call.sent_s for call in idle], 95),
            "first_token_ms": _spread([call.token_times_s[0][0] - call.sent_s for call in came], 95),
            "gap_ms": _spread(np.concatenate([np.diff(np.unique(stream)) for stream in times]), 99),
        }

    def _plan(self, case: str, callers: int, duration_s: float, warmup_s: float) -> Any:
        data = self._read(case)
        task = next((task for task in LoadTask if task.value in _TASKS[data["task"]]), None)
        if task is None:
            raise ValueError(f"the load tester of this tree has no task for {data['task']}")
        length: dict[str, Any] = {
            "concurrency": callers,
            "duration_s": duration_s,
            "warmup_s": warmup_s,
            "timeout_s": _TIMEOUT_S,
        }
        stream = data["task"] == "generation"
        options = {"model": data["model"], "model_version": data["version"], "max_new_tokens": data["max_new_tokens"]}
        if data["beam_size"] > 1:
            options["beam_size"] = data["beam_size"]
        options = {name: value for name, value in options.items() if value is not None} | data["parameters"]
        workload = Workload(task=task, inputs=self._inputs(case), stream=stream, options=options)
        return LoadPlan(workloads=(workload,), **length)

    def _inputs(self, case: str) -> list[Any]:
        """Returns the inputs, those first that were not used yet."""
        data = self._read(case)
        inputs = data["texts"] or [base64.b64decode(image) for image in data["images"]]
        first = self._num_used[case] % len(inputs)
        return [*inputs[first:], *inputs[:first]]

    def _read(self, case: str) -> dict[str, Any]:
        if case not in self._cases:
            self._cases[case] = json.loads(Path(case).read_text(encoding="utf-8"))
        return self._cases[case]

    @asynccontextmanager
    async def _sender(self, case: str, protocol: str, address: str) -> AsyncIterator[Any]:
        """Gives what makes the calls: an object with the methods `probe` and `send` of the load tester's `Sender`."""
        data = self._read(case)
        texts = data["texts"] or data["images"]
        token_counts = data["new_tokens"] or [data["max_new_tokens"] or 0] * len(texts)
        if protocol == "headway":
            async with AsyncClient(address, timeout_s=_TIMEOUT_S, retry=NO_RETRIES) as client:
                plan = self._plan(case, 1, 1, 0)
                yield Sender(client, plan)
        elif protocol in RAW_METHODS:
            async with grpc.aio.insecure_channel(address) as channel:
                exchange: Any = channel.unary_unary(RAW_METHODS[protocol])
                yield _RawSender(exchange, [text.encode() for text in texts], token_counts)
        else:
            path, body = _HTTP[protocol]
            http = _Http(address, path)
            yield _RawSender(http.post, [json.dumps(body(text)).encode() for text in texts], token_counts)
            for _, writer in http.idle:
                writer.close()


def figures_of(
    calls: Sequence[CallRecord], start_s: float, end_s: float, *, cycle_tokens: int, has_tokens: bool
) -> dict[str, Any]:
    """Summarises the calls of a load test, those of its warm-up included, for the window from `start_s` to `end_s`.

    Times are those of calls that ended after its beginning. Rates count what was done within it: of a call that was
    running at its beginning or end, the part of its time that lies within. (The load tester's own rate counts calls
    that ended within, which is coarse where calls take long.) If all answers have the same length, `cycle_tokens` is
    that of one answer to every caller: then the rate of streams is taken over a whole number of these, so that it holds
    as many prompts as answers.
    """
    recorder = Recorder()
    for call in (call for call in calls if call.ended_s >= start_s):
        recorder.add(call)
    answered = [call for call in calls if call.outcome == OK]
    parts = [
        max(0.0, min(call.ended_s, end_s) - max(call.sent_s, start_s)) / (call.ended_s - call.sent_s)
        for call in answered
    ]
    figures: dict[str, Any] = {
        "inputs_per_s": sum(parts) / (end_s - start_s),
        "latency_p50_ms": recorder.latency.percentile_ms(50),
        "latency_p99_ms": recorder.latency.percentile_ms(99),
        "call_count": len(recorder.latency),
        "error_count": len(calls) - len(answered),
    }
    if len(recorder.first_token):
        figures["first_token_p50_ms"] = recorder.first_token.percentile_ms(50)
        figures |= {f"token_gap_p{percent}_ms": recorder.token_gap.percentile_ms(percent) for percent in (50, 99)}
        times_s = sorted(time_s for call in answered for time_s in _token_times(call) if start_s <= time_s < end_s)
        count = (len(times_s) - 1) // cycle_tokens * cycle_tokens if cycle_tokens else 0
        per_s = count / (times_s[count] - times_s[0]) if count > 0 else len(times_s) / (end_s - start_s)
        figures["tokens_per_s"] = per_s
    elif has_tokens:
        tokens = sum(call.token_count * part for call, part in zip(answered, parts, strict=True))
        figures["tokens_per_s"] = tokens / (end_s - start_s)
    return figures


def _token_times(call: CallRecord) -> Iterator[float]:
    """Yields when each token of a stream came; tokens of one message came together."""
    last_count = 0
    for time_s, count in call.token_times_s:
        yield from [time_s] * (count - last_count)
        last_count = count


def _spread(seconds: Any, percent: int) -> dict[str, float]:
    """Summarises times in milliseconds."""
    median, high, highest = np.percentile(np.array(seconds) * 1e3, (50, percent, 100)).round(3).tolist()
    return {"median": median, f"p{percent}": high, "max": highest, "count": len(seconds)}


if __name__ == "__main__":
    serve(Caller().answer, ["grpcio", "headway-client"])
