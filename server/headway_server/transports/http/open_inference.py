"""The Open Inference Protocol over HTTP, with Triton's extensions: tensors as JSON or as binary data after it.

The protocols: https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md and
https://github.com/triton-inference-server/server/tree/main/docs/protocol. A request is converted to a message of the
same protocol over gRPC, whose service answers it (`docs/oip.md`). Tensors, parameters and errors are therefore equal in
both.
"""

from __future__ import annotations

import asyncio
import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from google.protobuf.message import Message
from pydantic import BeforeValidator, Field
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from headway.oip import grpc_predict_v2_pb2 as pb
from headway_server.errors import InvalidInputError
from headway_server.preprocessing.pool import text_pool
from headway_server.services import Procedure
from headway_server.services.open_inference.parameters import BASE64, CONTENT_TYPE, read_hints
from headway_server.transports.http.body import Body, Many, Part
from headway_server.transports.http.edge import Edge, Endpoint, Handler, Reply, Request, to_json
from headway_server.transports.http.status import Failure

SERVICE: Final = f"/{pb.DESCRIPTOR.services_by_name['GRPCInferenceService'].full_name}"
_HEADER_LENGTH: Final = "inference-header-content-length"
_MEDIA_TYPES: Final = frozenset({b"application/json", b"application/octet-stream", b""})
"""Media types; Triton's clients send none."""
_MAX_COMMAND_BYTES: Final = 64 * 2**10
_WRITTEN_ON_LOOP_BYTES: Final = 32 * 2**10
"""Maximum bytes of outputs written as JSON on the event loop, a few milliseconds."""
_BYTES: Final = "BYTES"
_DATATYPES: Final = tuple(
    name.removeprefix("TYPE_").replace("STRING", _BYTES) for name, number in pb.DataType.items() if number
)
_NOT_IN_JSON: Final = "BF16"
"""Datatype without a NumPy equivalent."""

_MAX_PARAMETERS: Final = 256


def _check_parameter(value: object) -> object:
    """Refuses what the protocol has no parameter of, before each kind in turn says that it is not of it."""
    if not isinstance(value, bool | int | float | str):
        raise ValueError("must be true, false, a number or a string; write a list as a string with a JSON array")
    return value


Parameters: TypeAlias = Annotated[
    dict[str, Annotated[bool | int | float | str, BeforeValidator(_check_parameter)]],
    Field(max_length=_MAX_PARAMETERS),
]
_Count = Annotated[int, Field(ge=0, lt=2**31)]


class InputPart(Part):
    """An input tensor."""

    name: str
    shape: Annotated[Many[_Count], Field(max_length=8)]
    datatype: str
    parameters: Parameters = Field(default_factory=dict)
    data: list[Any] | None = None


class OutputPart(Part):
    """A requested output tensor."""

    name: str
    parameters: Parameters = Field(default_factory=dict)


class InferBody(Body):
    """A request of `infer`, without its binary data."""

    id: str = ""
    model_name: str = ""
    """The name in the path, if it is given; KServe's client repeats it."""
    model_version: str = ""
    parameters: Parameters = Field(default_factory=dict)
    inputs: Many[InputPart]
    outputs: Many[OutputPart] = Field(default_factory=list)


class CommandBody(Body):
    """A request that changes or lists the repository."""

    ready: bool = False
    parameters: Parameters = Field(default_factory=dict)


class _Form:
    """Format of errors."""

    def refuse(self, failure: Failure, headers: Mapping[str, str]) -> Reply:  # noqa: ARG002 (the protocol's)
        """See `Form`."""
        more: tuple[tuple[bytes, bytes], ...] = ()
        if (delay_s := failure.retry_after_s) is not None:
            more = ((b"retry-after", str(max(1, math.ceil(delay_s))).encode()),)
        return Reply(status=failure.http_status, body=to_json({"error": failure.status.message}), headers=more)

    def cut(self, failure: Failure) -> bytes:
        """See `Form`; there is no stream."""
        raise AssertionError(failure)


ERROR_FORM: Final = _Form()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """A path with a method of the service."""

    path: str
    method: str
    ask: Callable[[Mapping[str, str], CommandBody], Message]
    """Makes the request from the path's parameters and the body."""
    take: Callable[[dict[str, Any]], Any] = lambda answer: answer
    """Converts the response to the answer's body."""
    is_post: bool = False


def _named(kind: Callable[..., Message]) -> Callable[[Mapping[str, str], CommandBody], Message]:
    return lambda path, _: kind(name=path.get("model", ""), version=path.get("version", ""))


def _command(kind: Callable[..., Message]) -> Callable[[Mapping[str, str], CommandBody], Message]:
    def ask(path: Mapping[str, str], body: CommandBody) -> Message:
        message = kind(model_name=path["model"])
        set_parameters(message.parameters, body.parameters)  # type: ignore[attr-defined]  # both kinds have it
        return message

    return ask


_MODEL: Final = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
_PATHS: Final = (
    _Path(path="/v2", method="ServerMetadata", ask=lambda *_: pb.ServerMetadataRequest()),
    _Path(path="/v2/models/stats", method="ModelStatistics", ask=_named(pb.ModelStatisticsRequest)),
    *(
        _Path(path=model + end, method=method, ask=_named(kind), take=take)
        for model in _MODEL
        for end, method, kind, take in (
            ("", "ModelMetadata", pb.ModelMetadataRequest, lambda answer: answer),
            ("/config", "ModelConfig", pb.ModelConfigRequest, lambda answer: answer["config"]),
            ("/stats", "ModelStatistics", pb.ModelStatisticsRequest, lambda answer: answer),
        )
    ),
    _Path(
        path="/v2/repository/index",
        method="RepositoryIndex",
        ask=lambda _, body: pb.RepositoryIndexRequest(ready=body.ready),
        take=lambda answer: answer["models"],
        is_post=True,
    ),
    *(
        _Path(path=f"/v2/repository/models/{{model}}/{end}", method=method, ask=_command(kind), is_post=True)
        for end, method, kind in (
            ("load", "RepositoryModelLoad", pb.RepositoryModelLoadRequest),
            ("unload", "RepositoryModelUnload", pb.RepositoryModelUnloadRequest),
        )
    ),
)

_REFUSED: Final = {
    "/v2/systemsharedmemory/{rest:path}": "SystemSharedMemoryStatus",
    "/v2/cudasharedmemory/{rest:path}": "CudaSharedMemoryStatus",
    "/v2/trace/setting": "TraceSetting",
    "/v2/models/{model}/trace/setting": "TraceSetting",
    "/v2/logging": "LogSettings",
}
"""Paths of extensions that are refused, each with a method that says so."""


def open_inference_routes(edge: Edge, procedures: Mapping[str, Procedure]) -> list[BaseRoute]:
    """Returns the routes of the protocol; none without its service."""
    infer = procedures.get(f"{SERVICE}/ModelInfer")
    if infer is None:
        return []
    form = ERROR_FORM
    answering = Endpoint(
        edge,
        "/v2/models/MODEL/infer",
        _infer(infer),
        form,
        max_bytes=infer.max_bytes,
        media_types=_MEDIA_TYPES,
    )
    probes = {
        "/v2/health/live": ("ServerLive", pb.ServerLiveRequest, "live"),
        "/v2/health/ready": ("ServerReady", pb.ServerReadyRequest, "ready"),
        **{f"{model}/ready": ("ModelReady", pb.ModelReadyRequest, "ready") for model in _MODEL},
    }
    return [
        *(
            Route(path, _probe(procedures[f"{SERVICE}/{method}"], kind, name), methods=["GET"])
            for path, (method, kind, name) in probes.items()
        ),
        *(
            Route(
                path.path,
                Endpoint(
                    edge,
                    _shown(path.path),
                    _answer(path, procedure := procedures[f"{SERVICE}/{path.method}"]),
                    form,
                    max_bytes=_MAX_COMMAND_BYTES if path.is_post else 0,
                    media_types=_MEDIA_TYPES,
                    is_admin=procedure.is_admin,
                ),
                methods=["POST" if path.is_post else "GET"],
            )
            for path in _PATHS
        ),
        *(Route(f"{model}/infer", answering, methods=["POST"]) for model in _MODEL),
        *(
            Route(
                path,
                Endpoint(
                    edge,
                    _shown(path),
                    _refuse(procedures[f"{SERVICE}/{method}"]),
                    form,
                    media_types=_MEDIA_TYPES,
                    max_bytes=_MAX_COMMAND_BYTES,
                ),
                methods=["GET", "POST"],
            )
            for path, method in _REFUSED.items()
        ),
    ]


def _probe(procedure: Procedure, kind: Callable[..., Message], name: str) -> Callable[..., Any]:
    """Makes a probe with status 200 for yes and 400 for no, as in the protocol; it does not count as a call."""

    async def answer(request: StarletteRequest) -> Response:
        path = request.path_params
        asked = kind(name=path["model"], version=path.get("version", "")) if path else kind()
        response = await procedure.answer(asked, None)
        is_true = getattr(response, name)
        headers = {"cache-control": "no-store"}
        return Response(to_json({name: is_true}), 200 if is_true else 400, headers, media_type="application/json")

    return answer


def _answer(path: _Path, procedure: Procedure) -> Handler:
    async def answer(request: Request) -> Reply:
        body = await request.parse(lambda body: CommandBody.read(body or b"{}"))
        response = await procedure.answer(path.ask(request.path, body), None)
        return Reply(body=to_json(path.take(_plain(response))))

    return answer


def _shown(path: str) -> str:
    """Returns a path with its parameters in capitals, as in documents and metrics."""
    return re.sub(r"{(\w+)(:path)?}", lambda name: name[1].upper(), path)


def _refuse(procedure: Procedure) -> Handler:
    async def answer(_: Request) -> Reply:
        await procedure.answer(None, None)
        raise AssertionError(procedure)

    return answer


def _infer(procedure: Procedure) -> Handler:
    async def answer(request: Request) -> Reply:
        head, data = _split(request)
        message, wants_binary = await Request(headers=request.headers, path=request.path, body=head).parse(
            lambda body: _read(InferBody.read(body), data, request.path)
        )
        response = await procedure.answer(message, None)
        if sum(map(len, response.raw_output_contents)) <= _WRITTEN_ON_LOOP_BYTES:
            return _reply(response, wants_binary)
        return await asyncio.get_running_loop().run_in_executor(text_pool(), _reply, response, wants_binary)

    return answer


def _split(request: Request) -> tuple[bytes, memoryview]:
    """Splits a body into JSON and binary data.

    Raises:
        InvalidInputError: The header with the length of the JSON is invalid.
    """
    given = request.headers.get(_HEADER_LENGTH, str(len(request.body)))
    if not (given.isdecimal() and given.isascii()) or len(given) > 10 or int(given) > len(request.body):
        raise InvalidInputError(_HEADER_LENGTH, f"is {given[:20]!r}; give the length of the JSON in the body")
    length = int(given)
    return request.body[:length], memoryview(request.body)[length:]


def _read(
    body: InferBody, data: memoryview, path: Mapping[str, str]
) -> tuple[pb.ModelInferRequest, Callable[[str], bool]]:
    """Makes the message of a request, with raw tensors, and the predicate of outputs requested in binary.

    Raises:
        InvalidInputError: A tensor does not match its shape and datatype, or the binary data has another size.
    """
    for name, given, own in (
        ("model_name", body.model_name, path["model"]),
        ("model_version", body.model_version, path.get("version", body.model_version)),
    ):
        if given not in ("", own):
            raise InvalidInputError(name, f"is {given[:64]!r}, and the path has {own!r}; leave it out")
    message = pb.ModelInferRequest(
        model_name=path["model"], model_version=path.get("version", body.model_version), id=body.id
    )
    parameters = dict(body.parameters)
    by_default = parameters.pop("binary_data_output", False) is True
    set_parameters(message.parameters, parameters)
    for index, part in enumerate(body.inputs):
        if part.datatype not in _DATATYPES:
            raise InvalidInputError(
                f"inputs[{index}].datatype", f"is {part.datatype[:20]!r}; must be one of {', '.join(_DATATYPES)}"
            )
        of_part = dict(part.parameters)
        size = of_part.pop("binary_data_size", None)
        tensor = message.inputs.add(name=part.name, datatype=part.datatype, shape=part.shape)
        set_parameters(tensor.parameters, of_part)
        read_hints(f"inputs[{index}]", tensor.parameters)  # before elements are missed that are elsewhere
        if size is None:
            message.raw_input_contents.append(to_raw(f"inputs[{index}].data", part))
            continue
        if part.data is not None or not isinstance(size, int) or not 0 <= size <= len(data):
            raise InvalidInputError(
                f"inputs[{index}].parameters.binary_data_size",
                f"is {size}; give the bytes of it behind the JSON, or data",
            )
        message.raw_input_contents.append(bytes(data[:size]))
        data = data[size:]
    if data:
        raise InvalidInputError(
            "inputs", f"leave {len(data)} bytes behind the JSON unused; set binary_data_size of each input"
        )
    binary: dict[str, bool] = {}
    for output in body.outputs:
        of_output = dict(output.parameters)
        binary[output.name] = of_output.pop("binary_data", by_default) is True
        set_parameters(message.outputs.add(name=output.name).parameters, of_output)
    return message, lambda name: binary.get(name, by_default)


def to_raw(field: str, part: InputPart) -> bytes:
    """Converts elements in JSON, nested or flat, to raw bytes.

    Raises:
        InvalidInputError: Their number does not match the shape, or an element does not match the datatype.
    """
    if part.data is None:
        raise InvalidInputError(field, "is missing; give the elements, or binary_data_size")
    if part.datatype == _NOT_IN_JSON:
        raise InvalidInputError(field, f"of {_NOT_IN_JSON} has no form in JSON; send it in binary")
    try:
        # dtype object: an array of strings would take the longest text's memory for each.
        given = np.array(part.data, object).ravel()
        has_rows = list in map(type, given)
    except (TypeError, ValueError):
        has_rows = True
    if has_rows:
        raise InvalidInputError(field, f"is not an array of {part.datatype}: its rows differ in length")
    if (count := math.prod(part.shape)) != given.size:
        raise InvalidInputError(field, f"has {given.size} elements, and the shape {part.shape} {count}")
    kinds = set(map(type, given))
    if part.datatype == _BYTES:
        if not kinds <= {str}:
            raise InvalidInputError(field, "has an element that is not a string")
        return raw_bytes(element.encode(errors="surrogatepass") for element in given)
    elements = np.array(given.tolist() if kinds <= {bool, int, float} else [None])
    dtype = _dtype(part.datatype)
    with np.errstate(over="ignore"):  # values past the range become infinite, which tasks refuse
        values = elements.astype(dtype) if not elements.size or elements.dtype.kind in _KINDS[dtype.kind] else None
    if values is None or (dtype.kind in "iu" and (values != elements).any()):
        raise InvalidInputError(field, f"has an element that is not of {part.datatype}")
    return values.tobytes()


def raw_bytes(elements: Iterable[bytes]) -> bytes:
    """Returns the raw form of elements of BYTES."""
    return b"".join(piece for element in elements for piece in (len(element).to_bytes(4, "little"), element))


_KINDS: Final = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""Kinds of arrays accepted for another kind."""


def _dtype(datatype: str) -> np.dtype[Any]:
    """Returns the memory layout of a datatype's elements."""
    return np.dtype(datatype.lower().replace("fp", "float")).newbyteorder("<")


def _reply(response: pb.ModelInferResponse, wants_binary: Callable[[str], bool]) -> Reply:
    """Writes an answer, with outputs requested in binary behind the JSON."""
    outputs: list[dict[str, Any]] = []
    behind: list[bytes] = []
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        written = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if wants_binary(output.name):
            behind.append(raw)
            outputs.append(written | {"parameters": {"binary_data_size": len(raw)}})
        else:
            outputs.append(written | _in_json(elements_of(output.datatype, raw)))
    head = {"model_name": response.model_name, "model_version": response.model_version}
    body = to_json(head | ({"id": response.id} if response.id else {}) | {"outputs": outputs})
    if not behind:
        return Reply(body=body)
    length = ((_HEADER_LENGTH.encode(), str(len(body)).encode()),)
    return Reply(body=b"".join((body, *behind)), media_type=b"application/octet-stream", headers=length)


def elements_of(datatype: str, raw: bytes) -> list[Any]:
    """Returns raw elements as numbers, truth values or bytes."""
    if datatype != _BYTES:
        values: list[Any] = np.frombuffer(raw, _dtype(datatype)).tolist()
        return values
    elements, end = list[bytes](), 0
    while end < len(raw):
        start = end + 4
        end = start + int.from_bytes(raw[start - 4 : start], "little")
        elements.append(raw[start:end])
    return elements


def _in_json(elements: list[Any]) -> dict[str, Any]:
    """Writes elements as values of JSON; files are in base64, which the content type of MLServer's clients says."""
    if not elements or not isinstance(elements[0], bytes):
        return {"data": elements}
    try:
        return {"data": [element.decode() for element in elements]}
    except UnicodeDecodeError:
        encoded = [base64.b64encode(element).decode() for element in elements]
        return {"data": encoded, "parameters": {CONTENT_TYPE: BASE64}}


def set_parameters(parameters: Any, given: Mapping[str, bool | int | float | str]) -> None:
    """Sets parameters of a message, each in the field for its type.

    Raises:
        InvalidInputError: An integer has more than 64 bits, or the message has no field for the type.
    """
    for name, value in given.items():
        match value:
            case bool():
                kind = "bool_param"
            case int() if -(2**63) <= value < 2**63:
                kind = "int64_param"
            case int() if 0 <= value < 2**64:
                kind = "uint64_param"
            case float():
                kind = "double_param"
            case str():
                kind = "string_param"
            case _:
                raise InvalidInputError(f"parameters.{name[:64]}", "is a number of more than 64 bits")
        parameter = parameters[name]
        if kind not in parameter.DESCRIPTOR.fields_by_name:
            raise InvalidInputError(
                f"parameters.{name[:64]}", f"is {value}; must be a truth value, a text, or a whole number of 64 bits"
            )
        setattr(parameter, kind, value)


def _plain(message: Message) -> dict[str, Any]:
    """Converts a message to JSON: names of the protocol, integers as numbers, all fields present."""
    return {
        field.name: _plain_value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if field.is_repeated or field.message_type is None or message.HasField(field.name)
    }


def _plain_value(field: Any, value: Any) -> Any:
    values = value if field.is_repeated else (value,)
    written: list[Any]
    if field.message_type is not None:
        written = [_plain(each) for each in values]
    elif field.enum_type is not None:
        written = [field.enum_type.values_by_number[each].name for each in values]
    else:
        written = list(values)
    return written if field.is_repeated else written[0]
