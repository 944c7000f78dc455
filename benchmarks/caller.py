"""The worker that calls a server with the client's load tester.

It runs with the client of the tree whose server it calls, because the protocol may differ between trees. Servers that speak
another protocol are called by the same load tester: only the sending of a call differs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np

from benchmarks.worker import serve
from headway_client import AsyncClient
from headway_client.load.plan import LoadPlan, LoadTask
from headway_client.load.recorder import OK, CallRecord, Recorder
from headway_client.load.runner import LoadRunner
from headway_client.load.sender import Sender
from headway_client.retry import NO_RETRIES

ECHO_METHOD = "/headway.benchmarks.Echo/Echo"
_WARM_UP_SHARE = 0.25
"""Of a measurement's time that passes before it, with the same callers; at least a call of each."""
_TIMEOUT_S = 600.0
_START_TIMEOUT_S = 120.0
_NEWCOMER_PERIOD_S = 1.0
_HTTP = {
    "litserve": ("/predict", lambda text: {"input": text}),
    "bentoml": ("/classify", lambda text: {"inputs": [text]}),
    "triton": (
        "/v2/models/classify/infer",
        lambda text: {"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}]},
    ),
}
"""Of each server that speaks HTTP: the path, and the JSON body of an input; images come in base64."""


class _Sends(Protocol):
    """Makes the calls of a load test."""

    async def probe(self) -> None:
        """Makes one call that nothing records."""

    async def send(self, call: CallRecord) -> None:
        """Makes one call and notes in the record what came back."""


class _Recording:
    """Keeps the record of every call, begun ones and those of the warm-up included."""

    def __init__(self, sender: _Sends) -> None:
        self._sender = sender
        self.calls: list[CallRecord] = []

    async def send(self, call: CallRecord) -> None:
        self.calls.append(call)
        await self._sender.send(call)


class _RawSender:
    """Sends prepared bytes in turn."""

    def __init__(self, exchange: Callable[[bytes], Awaitable[object]], payloads: Sequence[bytes]) -> None:
        self._exchange = exchange
        self._payloads = payloads
        self._next = 0

    async def probe(self) -> None:
        """Calls until the server answers."""
        begun_s = time.monotonic()
        while True:
            try:
                await self._exchange(self._payloads[0])
            except (OSError, EOFError, _NotReadyError):
                if time.monotonic() - begun_s > _START_TIMEOUT_S:
                    raise
                await asyncio.sleep(0.2)
            else:
                return

    async def send(self, call: CallRecord) -> None:
        payload = self._payloads[self._next % len(self._payloads)]
        self._next += 1
        clock = asyncio.get_running_loop().time
        call.input_count, call.sent_s = 1, clock()
        await self._exchange(payload)
        call.ended_s = clock()


class _NotReadyError(RuntimeError):
    """A server is not up yet, or has broken."""


class _HttpConnections:
    """POSTs to one path, with a connection for each call that runs at a time."""

    def __init__(self, address: str, path: str) -> None:
        self._host, port = address.rsplit(":", 1)
        self._port = int(port)
        self._head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: "
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, body: bytes) -> bytes:
        """Returns the answer's body.

        Raises:
            _NotReadyError: The server answered with a status of 500 or more.
            RuntimeError: It answered with another than 200.
        """
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        writer.write(f"{self._head}{len(body)}\r\n\r\n".encode() + body)
        header = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: *(\d+)", header, re.IGNORECASE)
        if length is None:
            raise RuntimeError(f"an answer without its length: {header!r}")
        answer = await reader.readexactly(int(length[1]))
        self._idle.append((reader, writer))
        status = int(header.split(b" ", 2)[1])
        if status != 200:
            raise (_NotReadyError if status >= 500 else RuntimeError)(f"status {status}: {answer[:200]!r}")
        return answer

    def close(self) -> None:
        """Closes all connections."""
        for _, writer in self._idle:
            writer.close()


class _WithParameters:
    """The client, with parameters for every call that a load plan does not know."""

    def __init__(self, client: AsyncClient, parameters: dict[str, Any]) -> None:
        self._client = client
        self._parameters = parameters

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self._client, name), **self._parameters)


class Caller:
    """Answers the requests of the benchmark."""

    def __init__(self) -> None:
        self._cases: dict[str, dict[str, Any]] = {}
        self._wave_s: dict[tuple[str, ...], float] = {}
        self._num_used: Counter[str] = Counter()
        """Inputs of each case that were sent: prompts are not asked twice, since a server remembers them."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Measures what a request asks for."""
        return asyncio.run((self._newcomers if "newcomers" in request else self._measure)(**request))

    async def _measure(self, *, case: str, callers: int, seconds: float, protocol: str, address: str) -> dict[str, Any]:
        """Keeps callers busy: rates a second, times in ms, and the processor time that the callers took."""
        key = (case, protocol, address, str(callers))
        async with self._sender(case, protocol, address) as sender:
            await sender.probe()
            plan = partial(self._plan, case, concurrency=callers)
            if key not in self._wave_s:  # how long it takes until everybody was answered once
                begun_s = time.perf_counter()
                await LoadRunner(plan(duration_s=min(0.05, seconds), warmup_s=0), sender).run()  # type: ignore[arg-type]
                self._wave_s[key] = time.perf_counter() - begun_s
            wave_s = self._wave_s[key]
            recording, cpu_s = _Recording(sender), time.process_time()
            timed = plan(duration_s=max(seconds, 2 * wave_s), warmup_s=max(_WARM_UP_SHARE * seconds, wave_s))
            begun_s = time.perf_counter()
            recorder = await LoadRunner(timed, recording).run()  # type: ignore[arg-type]  # another kind of sender
            cores = (time.process_time() - cpu_s) / (time.perf_counter() - begun_s)
        self._num_used[case] += len(recording.calls)
        data = self._read(case)
        has_tokens = timed.task in (LoadTask.GENERATE, LoadTask.TRANSLATE)
        cycle = callers * timed.max_new_tokens if data["weights"] and timed.max_new_tokens else 0
        return figures_of(recording.calls, recorder, cycle=cycle, has_tokens=has_tokens) | {"client_cores": cores}

    async def _newcomers(self, *, running: str, newcomers: str, num_running: int, count: int, address: str) -> Any:
        """Measures newcomers on an idle server, then one a second while other streams run: times in ms.

        Returns:
            `idle_first_token_ms` and `first_token_ms` of the newcomers, `gap_ms` between tokens of the running streams.
        """
        async with (
            self._sender(running, "headway", address) as streams,
            self._sender(newcomers, "headway", address) as new,
        ):

            async def come() -> CallRecord:
                call = CallRecord(intended_s=asyncio.get_running_loop().time())
                await new.send(call)
                return call

            idle = [await come() for _ in range(count)]
            plan = self._plan(running, concurrency=num_running, duration_s=3600, warmup_s=0)
            recording = _Recording(streams)
            runner = LoadRunner(plan, recording)  # type: ignore[arg-type]  # another kind of sender
            running_calls = asyncio.create_task(runner.run())
            while len(recording.calls) < num_running or not all(call.token_times_s for call in recording.calls):
                await asyncio.wait([running_calls], timeout=0.02)
                if running_calls.done():
                    running_calls.result()
            tasks = []
            for _ in range(count):
                tasks.append(asyncio.create_task(come()))
                await asyncio.sleep(_NEWCOMER_PERIOD_S)
            arrivals = await asyncio.gather(*tasks)
            for _ in range(2):  # begin no more, then end those that run
                runner.stop()
                await asyncio.sleep(0)
            await running_calls
        first_s, last_s = arrivals[0].sent_s, max(call.ended_s for call in arrivals)
        gaps = [
            gap
            for call in recording.calls
            for gap in np.diff(np.unique([time_s for time_s in _token_times(call) if first_s <= time_s <= last_s]))
        ]
        firsts = [[call.token_times_s[0][0] - call.sent_s for call in calls] for calls in (idle, arrivals)]
        return {
            "idle_first_token_ms": _spread(firsts[0], 95),
            "first_token_ms": _spread(firsts[1], 95),
            "gap_ms": _spread(gaps, 99),
        }

    def _plan(self, case: str, **fields: Any) -> LoadPlan:
        data = self._read(case)
        task = LoadTask(data["task"])
        return LoadPlan(
            task=task,
            stream=task is LoadTask.GENERATE,
            model=data["model"],
            model_version=data["version"],
            max_new_tokens=data["max_new_tokens"],
            beam_size=data["beam_size"] if data["beam_size"] > 1 else None,
            timeout_s=_TIMEOUT_S,
            **fields,
        )

    def _read(self, case: str) -> dict[str, Any]:
        if case not in self._cases:
            self._cases[case] = json.loads(Path(case).read_text(encoding="utf-8"))
        return self._cases[case]

    @asynccontextmanager
    async def _sender(self, case: str, protocol: str, address: str) -> AsyncIterator[_Sends]:
        data = self._read(case)
        texts = data["texts"] or data["images"]
        if protocol == "headway":
            inputs: list[Any] = data["texts"] or [base64.b64decode(image) for image in data["images"]]
            first = self._num_used[case] % len(inputs)
            async with AsyncClient(address, timeout_s=_TIMEOUT_S, retry=NO_RETRIES) as client:
                with_parameters: Any = _WithParameters(client, data["parameters"])
                plan = self._plan(case, concurrency=1)
                yield Sender(with_parameters, plan, [*inputs[first:], *inputs[:first]])
        elif protocol == "echo":
            async with grpc.aio.insecure_channel(address) as channel:
                echo = channel.unary_unary(ECHO_METHOD)
                yield _RawSender(echo, [text.encode() for text in texts])
        else:
            path, body = _HTTP[protocol]
            connections = _HttpConnections(address, path)
            yield _RawSender(connections.post, [json.dumps(body(text)).encode() for text in texts])
            connections.close()


def figures_of(calls: Sequence[CallRecord], recorder: Recorder, *, cycle: int, has_tokens: bool) -> dict[str, Any]:
    """Summarises a load test.

    Rates count what was done within the measured window: of a call that was running at its beginning or end, the part of
    its time that lies within. The load tester's own rate counts calls that ended within, which is coarse where calls take
    long.

    Args:
        calls: All calls, those of the warm-up included.
        recorder: With the window and the latencies.
        cycle: Tokens of one answer to every caller. The rate of streams is then taken over a whole number of cycles, so
            that it holds as many prompts as answers. 0 if answers differ in length.
        has_tokens: True if the answers are tokens.
    """
    start_s, end_s = recorder.start_s, recorder.end_s
    answered = [call for call in calls if call.outcome == OK]
    seconds = end_s - start_s
    figures: dict[str, Any] = {
        "inputs_per_s": sum(call.input_count * _part_within(call, start_s, end_s) for call in answered) / seconds,
        "latency_p50_ms": recorder.latency.percentile_ms(50),
        "latency_p99_ms": recorder.latency.percentile_ms(99),
        "call_count": len(recorder.latency),
        "error_count": len(calls) - len(answered),
    }
    if len(recorder.first_token):
        figures |= {
            "first_token_p50_ms": recorder.first_token.percentile_ms(50),
            "token_gap_p50_ms": recorder.token_gap.percentile_ms(50),
            "token_gap_p99_ms": recorder.token_gap.percentile_ms(99),
        }
        times_s = sorted(time_s for call in answered for time_s in _token_times(call) if start_s <= time_s < end_s)
        count = (len(times_s) - 1) // cycle * cycle if cycle else 0
        figures["tokens_per_s"] = count / (times_s[count] - times_s[0]) if count else len(times_s) / seconds
    elif has_tokens:
        figures["tokens_per_s"] = (
            sum(call.token_count * _part_within(call, start_s, end_s) for call in answered) / seconds
        )
    if answered:
        figures["variant"] = str(getattr(answered[-1].model, "variant", ""))
    return figures


def _part_within(call: CallRecord, start_s: float, end_s: float) -> float:
    """Returns the part of a call's time that lies within a window, 0 to 1."""
    overlap_s = min(call.ended_s, end_s) - max(call.sent_s, start_s)
    return max(0.0, overlap_s) / (call.ended_s - call.sent_s)


def _token_times(call: CallRecord) -> Iterator[float]:
    """Yields when each token of a stream came; tokens of one message came together."""
    last_count = 0
    for time_s, count in call.token_times_s:
        yield from [time_s] * (count - last_count)
        last_count = count


def _spread(seconds: Sequence[float], percentile: int) -> dict[str, float]:
    times_ms = np.array(seconds) * 1e3
    return {
        "median": round(float(np.median(times_ms)), 3),
        f"p{percentile}": round(float(np.percentile(times_ms, percentile)), 3),
        "max": round(float(times_ms.max()), 3),
        "count": len(times_ms),
    }


if __name__ == "__main__":
    serve(Caller().answer, ["grpcio", "headway-client"])
