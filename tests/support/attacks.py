"""Calls that ask much of a server, against one in a process of its own, and what they cost it.

    python tests/support/attacks.py --store models

For each attack: how the calls ended, how long a health check beside them took at most (how long the event loop did not
come around, and what the machine does besides), and how much memory the server took at most. One JSON line each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2_caller import Caller, frame

from headway.oip import grpc_predict_v2_pb2 as inference_pb
from headway.oip import grpc_predict_v2_pb2_grpc as inference_grpc
from headway.v1 import generation_service_pb2 as pb
from headway.v1 import generation_service_pb2_grpc as pb_grpc
from headway.v1 import image_classification_service_pb2 as images_pb
from headway.v1 import image_classification_service_pb2_grpc as images_grpc
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway.v1 import text_classification_service_pb2_grpc as texts_grpc

_PROBE_INTERVAL_S = 0.005
_HELD_S = 8.0


def varint(number: int) -> bytes:
    """Writes a number of the wire format."""
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def part(field: int, body: bytes) -> bytes:
    """Writes a field of bytes, or of a message."""
    return varint(field << 3 | 2) + varint(len(body)) + body


def constrained(**constraint: Any) -> pb.GenerateTextRequest:
    """A short generation under a constraint."""
    parameters = pb.GenerationParameters(max_new_tokens=1, constraint=pb.Constraint(**constraint))
    return pb.GenerateTextRequest(prompts=["a"], parameters=parameters)


Call: TypeAlias = Callable[[], Awaitable[Any]]

_PARAMETERS = pb.GenerateTextRequest.PARAMETERS_FIELD_NUMBER


class Attacks:
    """The attacks, by name; each makes its calls, ready to be sent."""

    def __init__(self, channel: grpc.aio.Channel, port: int) -> None:
        self._channel = channel
        self._port = port
        self._threads = ThreadPoolExecutor(32)
        self._inference = inference_grpc.GRPCInferenceServiceStub(channel)
        self._generation = pb_grpc.GenerationServiceStub(channel)
        self._texts = texts_grpc.TextClassificationServiceStub(channel)
        self._images = images_grpc.ImageClassificationServiceStub(channel)
        self.all: dict[str, Callable[[], list[Call]]] = {
            "none": list,
            "stack overflow in a schema": lambda: [self._constrain(json_schema='{"const": -9223372036854775808}')],
            "multiples of 3,000 digits": self._multiples,
            "24 slow expressions and a long text": self._slow_expressions,
            "33 million empty elements, gzip": lambda: [
                self._raw(part(_PARAMETERS, b"\x3a\x00" * 33_500_000), gzip=True)
            ],
            "10 million empty elements, gzip": lambda: [
                self._raw(part(_PARAMETERS, b"\x3a\x00" * 10_000_000), gzip=True)
            ],
            "4 million empty elements": lambda: [self._raw(part(_PARAMETERS, b"\x3a\x00" * 4_000_000))],
            "8 million packed numbers": lambda: [self._raw(part(_PARAMETERS, part(9, b"\1" * 8_000_000)))],
            "2.7 million unknown fields": lambda: [self._raw(b"\xf8\x01\x01" * 2_700_000)],
            "87,000 U+FDFA": lambda: [self._classify("\ufdfa" * 87_000)],
            "16 texts of 250 KiB": lambda: [self._classify(*["oil prices rose " * 16_000] * 16)],
            "60 MiB that is no image": lambda: self._no_images(60),
            "19 MiB that is no image": lambda: self._no_images(19),
            "19 MiB that is no image, as tensors": lambda: [self._infer("cifar10", "image", 19)],
            "19 MiB of text, as tensors": lambda: [self._infer("ag-news", "text", 19)],
            "32 bodies of 19 MiB that never end": lambda: [self._endless_body] * 32,
            "256 conversations of 1,024 turns": self._conversations,
        }

    def _constrain(self, **constraint: Any) -> Call:
        return partial(self._generation.GenerateText, constrained(**constraint))

    def _multiples(self) -> list[Call]:
        first, second = "9" * 2999 + "7", "9" * 2998 + "13"
        schema = f'{{"properties": {{"a": {{"multipleOf": {first}}}, "b": {{"multipleOf": {second}}}}}}}'
        return [self._constrain(json_schema=schema)]

    def _slow_expressions(self) -> list[Call]:
        slow = [self._constrain(regex=".*" * 4000 + "a" * index) for index in range(24)]
        return [*slow, self._classify("oil prices rose " * 4000)]

    def _raw(self, body: bytes, *, gzip: bool = False) -> Call:
        call = self._channel.unary_unary("/headway.v1.GenerationService/GenerateText")
        return partial(call, part(3, b"hi") + body, compression=grpc.Compression.Gzip if gzip else None)

    def _classify(self, *texts: str) -> Call:
        request = texts_pb.ClassifyTextRequest(model="ag-news", texts=texts, truncate=True)
        return partial(self._texts.ClassifyText, request)

    def _no_images(self, num_mib: int) -> list[Call]:
        request = images_pb.ClassifyImageRequest(images=[bytes(num_mib * 2**18)] * 4)
        return [partial(self._images.ClassifyImage, request)]

    def _infer(self, model: str, name: str, num_mib: int) -> Call:
        elements = [bytes(num_mib * 2**18)] * 4
        request = inference_pb.ModelInferRequest(
            model_name=model,
            inputs=[inference_pb.ModelInferRequest.InferInputTensor(name=name, datatype="BYTES", shape=[4])],
            raw_input_contents=[b"".join(len(element).to_bytes(4, "little") + element for element in elements)],
        )
        return partial(self._inference.ModelInfer, request)

    async def _endless_body(self) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._send_endless_body)

    def _send_endless_body(self) -> str:
        with Caller(self._port) as caller:
            stream = caller.begin("/headway.v1.TextClassificationService/ClassifyText")
            body = bytes(19 * 2**20)
            caller.send_slowly(stream, frame(part(3, body))[:-1], _HELD_S)
            status = caller.status(stream, _HELD_S / 2)
            return "held" if status is None else grpc_code(int(status))

    def _conversations(self) -> list[Call]:
        conversation = pb.Conversation(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="hi")] * 1024)
        request = pb.GenerateTextRequest(conversations=[conversation] * 256)
        return [partial(self._generation.GenerateText, request)]


class Prober:
    """A process that asks for health all the time, and knows how long it took at most."""

    def __init__(self, port: int) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=_probe, args=(port, theirs), daemon=True)
        self._process.start()
        self._ours.recv()

    def longest_s(self) -> float:
        """Returns the longest check since it was asked last."""
        self._ours.send(None)
        return float(self._ours.recv())

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def _probe(port: int, pipe: Connection) -> None:
    health = health_pb2_grpc.HealthStub(grpc.insecure_channel(f"127.0.0.1:{port}"))
    health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    pipe.send(None)
    longest_s = 0.0
    while True:
        began = time.monotonic()
        health.Check(health_pb2.HealthCheckRequest())
        longest_s = max(longest_s, time.monotonic() - began)
        time.sleep(_PROBE_INTERVAL_S)
        if pipe.poll():
            pipe.recv()
            pipe.send(longest_s)
            longest_s = 0.0


async def _end(call: Call) -> str:
    try:
        answer = await call()
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return answer if isinstance(answer, str) else "OK"


def grpc_code(number: int) -> str:
    """Returns the name of a status."""
    return next(code.name for code in grpc.StatusCode if code.value[0] == number)


def _memory_mib(pid: int, name: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


def _forget_peak(pid: int) -> float:
    """Makes the kernel forget the most memory that a process has had; returns what it has now, in MiB."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _memory_mib(pid, "VmRSS")


async def attack(port: int, pid: int) -> None:
    """Runs every attack against the server, and prints what it cost."""
    prober = Prober(port)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        for name, make in Attacks(channel, port).all.items():
            calls = make()
            await asyncio.sleep(0.3)
            prober.longest_s()
            before, began = _forget_peak(pid), time.monotonic()
            ends = Counter(await asyncio.gather(*map(_end, calls)))
            seconds = time.monotonic() - began
            await asyncio.sleep(0.3)
            outcome = {
                "attack": name,
                "ends": dict(ends),
                "seconds": round(seconds, 3),
                "longest_health_check_ms": round(prober.longest_s() * 1000, 1),
                "added_mib": round(_memory_mib(pid, "VmHWM") - before, 1),
            }
            sys.stdout.write(json.dumps(outcome) + "\n")
            sys.stdout.flush()
    prober.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", default="models")
    command = [sys.executable, "-m", "headway_server", "--store", parser.parse_args().store, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline().split()[3].rpartition(":")[2])
            asyncio.run(attack(port, server.pid))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
