"""The real Triton client, in a process of its own: its messages have the names of the server's, and clash with them.

    with triton_process() as triton:
        answer = triton(port, "infer", "topics", {"text": np.array([b"goal"], object)})

Functions of this module that are called so run there; arguments and results are pickled.
"""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class TritonError(Exception):
    """What the client raised: code and message."""

    @property
    def code(self) -> str:
        return str(self.args[0])

    @property
    def message(self) -> str:
        return str(self.args[1])


@dataclass
class Answer:
    """A response as the client gives it."""

    arrays: dict[str, np.ndarray]
    model: tuple[str, str]
    request_id: str
    is_final: bool | None
    """None where the response does not say."""


@dataclass
class Received:
    """What a stream has given, in order."""

    answers: list[Answer] = field(default_factory=list)
    errors: list[tuple[str | None, str]] = field(default_factory=list)
    """Code, None of an error within the stream, and message."""


@contextmanager
def triton_process() -> Iterator[Callable[..., Any]]:
    """Starts the process; gives a function that calls one of this module's functions there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda port, name, *args, **options: pool.submit(_call, port, name, args, options).result(60)


def _call(port: int, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    from tritonclient.utils import InferenceServerException

    try:
        return globals()[name](port, *args, **options)
    except InferenceServerException as error:
        raise TritonError(error.status(), error.message()) from None


def _client(port: int) -> Any:
    import tritonclient.grpc

    return tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}")


def _inputs(arrays: dict[str, np.ndarray], datatypes: dict[str, str] | None = None) -> list[Any]:
    import tritonclient.grpc
    from tritonclient.utils import np_to_triton_dtype

    inputs = []
    for name, array in arrays.items():
        datatype = (datatypes or {}).get(name) or np_to_triton_dtype(array.dtype)
        tensor = tritonclient.grpc.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def _outputs(names: list[Any] | None) -> Any:
    import tritonclient.grpc

    made = tritonclient.grpc.InferRequestedOutput
    return None if names is None else [made(name) if isinstance(name, str) else name for name in names]


def _answer(result: Any) -> Answer:
    response = result.get_response()
    final = response.parameters.get("triton_final_response")
    return Answer(
        arrays={output.name: result.as_numpy(output.name) for output in response.outputs},
        model=(response.model_name, response.model_version),
        request_id=response.id,
        is_final=None if final is None else final.bool_param,
    )


def infer(port: int, model: str, arrays: dict[str, np.ndarray], **options: Any) -> Answer:
    """One call; `datatypes` and `outputs` by name, `shared_memory` is `inputs`, `outputs` or `one input of two`; the
    rest goes to the client."""
    import tritonclient.grpc

    inputs = _inputs(arrays, options.pop("datatypes", None))
    if (shared := options.pop("shared_memory", "")) == "outputs":
        requested = tritonclient.grpc.InferRequestedOutput("label")
        requested.set_shared_memory("mine", 64)
        options["outputs"] = [requested]
    elif shared:
        for tensor in inputs[: 1 if shared == "one input of two" else None]:
            tensor.set_shared_memory("mine", 64)
    with _client(port) as client:
        return _answer(client.infer(model, inputs, outputs=_outputs(options.pop("outputs", None)), **options))


def ask(port: int, method: str, *args: Any, **options: Any) -> Any:
    """What a method of the client returns; messages as dictionaries."""
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.message import Message

    with _client(port) as client:
        result = getattr(client, method)(*args, **options)
    return MessageToDict(result, preserving_proto_field_name=True) if isinstance(result, Message) else result


def infer_over_http(
    port: int,
    model: str,
    arrays: dict[str, np.ndarray],
    *,
    binary: bool = True,
    outputs: dict[str, bool] | None = None,
    **options: Any,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """One call over HTTP; `outputs` are those that are wanted and whether in binary. Returns arrays and JSON."""
    import tritonclient.http
    from tritonclient.utils import np_to_triton_dtype

    inputs = []
    for name, array in arrays.items():
        tensor = tritonclient.http.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        inputs.append(tensor.set_data_from_numpy(array, binary_data=binary))
    wanted = [tritonclient.http.InferRequestedOutput(name, binary_data=yes) for name, yes in (outputs or {}).items()]
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        result = client.infer(model, inputs, outputs=wanted or None, **options)
    response = result.get_response()
    return {output["name"]: result.as_numpy(output["name"]) for output in response["outputs"]}, response


def ask_over_http(port: int, method: str, *args: Any, **options: Any) -> Any:
    """What a method of the client over HTTP returns."""
    import tritonclient.http

    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return getattr(client, method)(*args, **options)


def stream(
    port: int, requests: list[tuple[str, dict[str, np.ndarray], dict[str, Any]]], headers: dict[str, str] | None = None
) -> Received:
    """Sends requests on one stream, all at once, and returns what came until each had its last response or an error."""
    from tritonclient.utils import InferenceServerException

    events: queue.Queue[Any] = queue.Queue()
    received = Received()
    with _client(port) as client:
        client.start_stream(lambda result, error: events.put((result, error)), headers=headers)
        with suppress(InferenceServerException):  # a stream that was refused has ended already, with an event
            for number, (model, arrays, options) in enumerate(requests):
                client.async_stream_infer(model, _inputs(arrays), request_id=str(number), **options)
        open_requests = len(requests)
        while open_requests:
            result, error = events.get(timeout=30)
            if error is not None:
                received.errors.append((error.status(), error.message()))
                open_requests = 0 if error.status() else open_requests - 1
                continue
            received.answers.append(answer := _answer(result))
            open_requests -= bool(answer.is_final)
        client.stop_stream()
    return received


def cancel_stream(port: int, model: str, arrays: dict[str, np.ndarray], parameters: dict[str, Any]) -> int:
    """Opens a stream, cancels it after its first response, and returns how many responses came."""
    events: queue.Queue[Any] = queue.Queue()
    with _client(port) as client:
        client.start_stream(lambda result, error: events.put((result, error)))
        client.async_stream_infer(model, _inputs(arrays), parameters=parameters)
        first, error = events.get(timeout=30)
        assert error is None, error
        client.stop_stream(cancel_requests=True)
        return 1 + sum(result is not None for result, _ in list(events.queue)) if first is not None else 0


def infer_many(port: int, model: str, texts: list[str], *, at_once: int) -> list[str]:
    """Many small calls of the asyncio client, so many at a time; the likeliest label of each."""
    import asyncio

    import tritonclient.grpc.aio

    async def run() -> list[str]:
        room = asyncio.Semaphore(at_once)
        async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{port}") as client:

            async def label(text: str) -> str:
                async with room:
                    inputs = _inputs({"text": np.array([text.encode()], object)})
                    result = await client.infer(model, inputs, outputs=_outputs(["label"]), parameters={"top_k": 1})
                    return str(result.as_numpy("label")[0, 0].decode())

            return list(await asyncio.gather(*map(label, texts)))

    return asyncio.run(run())


def infer_in_callbacks(port: int, model: str, texts: list[str]) -> list[str]:
    """Many calls by `async_infer`, whose answers come to callbacks; the likeliest label of each, in order."""
    labels: queue.Queue[tuple[int, str]] = queue.Queue()
    with _client(port) as client:
        for number, text in enumerate(texts):

            def take(result: Any, error: Any, number: int = number) -> None:
                labels.put((number, str(error) if result is None else result.as_numpy("label")[0, 0].decode()))

            client.async_infer(model, _inputs({"text": np.array([text.encode()], object)}), take)
        return [label for _, label in sorted(labels.get(timeout=30) for _ in texts)]


def stream_in_asyncio(port: int, model: str, prompts: list[str], parameters: dict[str, Any]) -> dict[str, str]:
    """Streams by the asyncio client, all prompts on one stream; the whole text of each by its request's id."""
    import asyncio

    import tritonclient.grpc.aio

    async def run() -> dict[str, str]:
        texts = {str(number): "" for number in range(len(prompts))}
        open_requests = len(prompts)
        last = asyncio.Event()

        async def requests() -> Any:
            for number, prompt in enumerate(prompts):
                inputs = _inputs({"text": np.array([prompt.encode()], object)})
                yield {"model_name": model, "inputs": inputs, "request_id": str(number), "parameters": parameters}
            await last.wait()

        async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{port}") as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None, error
                answer = _answer(result)
                texts[answer.request_id] += answer.arrays["generated_text"][0].decode()
                open_requests -= bool(answer.is_final)
                if not open_requests:
                    last.set()
        return texts

    return asyncio.run(run())


def fields_of_protocol(_port: int) -> dict[str, Any]:
    """The client's own declaration of every message, enum and method of the protocol (`describe_files`)."""
    from tritonclient.grpc import model_config_pb2, service_pb2

    return describe_files(service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR)


def describe_files(*files: Any) -> dict[str, Any]:
    """Messages to their fields, enums to their values, and methods to their types."""
    described: dict[str, Any] = {}

    def add(message: Any) -> None:
        described[message.full_name] = {
            each.name: (
                each.number,
                each.type,
                each.is_repeated,
                each.message_type and each.message_type.full_name,
                each.enum_type and each.enum_type.full_name,
                each.containing_oneof and each.containing_oneof.name,
            )
            for each in message.fields
        }
        for nested in message.nested_types:
            add(nested)

    for file in files:
        for message in file.message_types_by_name.values():
            add(message)
        for enum in file.enum_types_by_name.values():
            described[enum.full_name] = {value.name: value.number for value in enum.values}
        for service in file.services_by_name.values():
            described[service.full_name] = {
                method.name: (method.input_type.full_name, method.output_type.full_name,
                              method.client_streaming, method.server_streaming)
                for method in service.methods
            }  # fmt: skip
    return described
