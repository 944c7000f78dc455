"""KServe's older protocol, v1: instances of one input become a call with tensors, and its rows predictions.

The protocol: https://kserve.github.io/website/docs/concepts/architecture/data-plane/v1-protocol. Its list of models
and its question whether one is ready are a part of OpenAI's answers at the same paths.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.routing import BaseRoute, Route

from headway.oip import grpc_predict_v2_pb2 as pb
from headway_server.errors import InvalidInputError, WrongTaskError
from headway_server.preprocessing.pool import text_pool
from headway_server.services import Procedure
from headway_server.services.open_inference import tensors_of
from headway_server.services.open_inference.tensors import BYTES, TensorSpec, object_array
from headway_server.serving.host import ModelHost
from headway_server.transports.http.body import Body, Many
from headway_server.transports.http.edge import Edge, Endpoint, Reply, Request, to_json
from headway_server.transports.http.open_inference import (
    ERROR_FORM,
    SERVICE,
    InputPart,
    Parameters,
    elements_of,
    raw_bytes,
    set_parameters,
    to_raw,
)

_MOST_AXES: Final = 7
"""Of a row; a tensor in JSON has one more."""
_BASE64: Final = "b64"


class PredictBody(Body):
    """A request of `:predict`."""

    instances: Many[Any] | None = None
    inputs: Many[Any] | None = None
    """The same by another name."""
    parameters: Parameters | None = None
    """Parameters of the task, as in the Open Inference Protocol."""

    def rows(self) -> list[Any]:
        """Returns the instances.

        Raises:
            InvalidInputError: There are none, or both names are used.
        """
        if (self.instances is None) == (self.inputs is None):
            raise InvalidInputError("instances", "must be given, or inputs, and not both")
        if not (rows := self.inputs if self.instances is None else self.instances):
            raise InvalidInputError("instances", "is empty; give one or more")
        return rows


def prediction_routes(edge: Edge, host: ModelHost, procedures: Mapping[str, Procedure]) -> list[BaseRoute]:
    """Returns the routes of predictions; none without the Open Inference Protocol."""
    infer = procedures.get(f"{SERVICE}/ModelInfer")
    if infer is None:
        return []
    handler = _Predictions(host, infer).answer
    answering = Endpoint(edge, "/v1/models/MODEL:predict", handler, ERROR_FORM, max_bytes=infer.max_bytes)
    paths = ("/v1/models/{model}:predict", "/v1/models/{model}/versions/{version}:predict")
    return [Route(path, answering, methods=["POST"]) for path in paths]


class _Predictions:
    """Answers from the models of a host."""

    def __init__(self, host: ModelHost, infer: Procedure) -> None:
        self._host = host
        self._infer = infer

    async def answer(self, request: Request) -> Reply:
        """Predicts each instance."""
        name, version = request.path["model"], request.path.get("version", "")
        model = self._host.find_named(name, version)
        task = tensors_of(self._host.families, model)
        predictions = task.predictions(model)
        if not predictions:
            manifest = model.bundle.manifest
            raise WrongTaskError(
                f"model {manifest.name} ({manifest.task}) is not known to give one result for each instance; call "
                f"/v2/models/{manifest.name}/infer"
            )

        def read(data: bytes) -> pb.ModelInferRequest:
            message = pb.ModelInferRequest(model_name=name, model_version=version)
            body = PredictBody.read(data)
            set_parameters(message.parameters, body.parameters or {})
            _add_inputs(message, body.rows(), task.inputs(model))
            message.outputs.extend(pb.ModelInferRequest.InferRequestedOutputTensor(name=one) for one in predictions)
            return message

        message = await request.parse(read)
        response = await self._infer.answer(message, None)
        write = asyncio.get_running_loop().run_in_executor
        return Reply(body=await write(text_pool(), _written, response))

    def __repr__(self) -> str:
        return f"_Predictions({self._host!r})"


def _add_inputs(message: pb.ModelInferRequest, instances: list[Any], specs: Sequence[TensorSpec]) -> None:
    """Adds the inputs of instances: each is a row of the first input, or an object with a row of several.

    Raises:
        InvalidInputError: An instance has other inputs than the first, or a row is none of its input.
    """
    rows = [_named(instance, specs[0].name) for instance in instances]
    by_name = {spec.name: spec for spec in specs}
    for index, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise InvalidInputError(
                f"instances[{index}]", f"has {', '.join(row)}, and instances[0] {', '.join(rows[0])}; give all the same"
            )
    for name in rows[0]:
        spec, values = by_name.get(name), [row[name] for row in rows]
        if spec is not None and (spec.datatype != BYTES or len(spec.shape) > 1):
            part = InputPart(name=name, datatype=spec.datatype, shape=[len(values), *_shape_of(values[0])], data=values)
            message.inputs.add(name=name, datatype=spec.datatype, shape=part.shape)
            message.raw_input_contents.append(to_raw("instances", part))
            continue
        elements = [_element(f"instances[{index}]", row[name]) for index, row in enumerate(rows)]
        message.inputs.add(name=name, datatype=BYTES, shape=[len(rows)])
        message.raw_input_contents.append(raw_bytes(elements))


def _shape_of(row: Any) -> list[int]:
    """Returns the sizes of nested lists, by their first elements."""
    sizes: list[int] = []
    while isinstance(row, list) and len(sizes) < _MOST_AXES:
        sizes.append(len(row))
        row = row[0] if row else None
    return sizes


def _named(instance: Any, only: str) -> dict[str, Any]:
    return instance if isinstance(instance, dict) and instance.keys() != {_BASE64} else {only: instance}


def _element(field: str, given: Any) -> bytes:
    """Reads a text, or a file as `{"b64": "..."}`."""
    if isinstance(given, str):
        return given.encode(errors="surrogatepass")
    if isinstance(given, dict) and given.keys() == {_BASE64} and isinstance(given[_BASE64], str):
        try:
            return binascii.a2b_base64(given[_BASE64], strict_mode=True)
        except ValueError as error:
            raise InvalidInputError(f"{field}.{_BASE64}", f"is not base64 ({error})") from None
    raise InvalidInputError(field, f'must be a text, or a file as {{"{_BASE64}": "..."}}')


def _written(response: pb.ModelInferResponse) -> bytes:
    """Writes a prediction for each row: the only output, or an object of all."""
    columns: dict[str, list[Any]] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        elements = object_array([_plain(one) for one in elements_of(output.datatype, raw)])
        columns[output.name] = elements.reshape(list(output.shape)).tolist()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return to_json({"predictions": [next(iter(row.values())) if len(row) == 1 else row for row in rows]})


def _plain(element: Any) -> Any:
    """Writes BYTES as a text, or as a file in base64."""
    if not isinstance(element, bytes):
        return element
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {_BASE64: base64.b64encode(element).decode()}
