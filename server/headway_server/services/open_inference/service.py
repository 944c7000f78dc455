# ruff: noqa: ARG002 -- names and arguments of methods are the protocol's
"""GRPCInferenceService."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final

from headway.oip import grpc_predict_v2_pb2 as pb
from headway_server.errors import InvalidInputError, ModelNotFoundError, WrongTaskError
from headway_server.observers import current_call
from headway_server.preprocessing.pool import text_pool
from headway_server.services.open_inference.parameters import CONTENT_TYPE, read_hints, read_parameters
from headway_server.services.open_inference.statistics import Statistics
from headway_server.services.open_inference.tasks import (
    FINISH_REASON,
    InferCall,
    TensorTask,
    earlier_deadline,
    tensors_of,
)
from headway_server.services.open_inference.tensors import (
    Arrays,
    TensorSpec,
    add_output,
    has_typed_form,
    num_typed_elements,
    read_inputs,
)
from headway_server.services.procedure import StreamedCall, StreamedCalls
from headway_server.serving.families import ServedModel
from headway_server.serving.host import ModelHost, ModelState

PROBES: Final = frozenset({"ServerLive", "ServerReady", "ModelReady"})
"""Probe methods: they answer while the server drains, like health, and do not count as calls."""

_EXTENSIONS: Final = ("model_repository", "model_configuration", "statistics", "parameters", "binary_tensor_data")
_PLATFORM: Final = "onnxruntime_onnx"
_BACKEND: Final = "onnxruntime"
_FEW_ELEMENTS: Final = 10_000
"""Maximum typed elements read on the event loop, half a millisecond."""
_FEW_BYTES: Final = 2**20
"""Maximum bytes of a request read on the event loop: one or two copies of its tensors, a millisecond."""
_MAX_RUNNING: Final = 64
"""Maximum concurrent requests of a stream; further ones are read when one has ended."""
_FINAL: Final = "triton_final_response"
_OWN_STATES: Final = (ModelState.LOADING, ModelState.READY, ModelState.UNLOADING)
"""States of the protocol."""
_DATA_TYPES: Final[dict[str, pb.DataType.ValueType]] = {
    name.removeprefix("TYPE_"): number for name, number in pb.DataType.items()
} | {"BYTES": pb.TYPE_STRING}
_OWN_NAMES: Final = (
    (re.compile(r"^parameters\.(sampling|constraint)\."), "parameters."),
    (re.compile(r"^texts\b"), "text"),
    (re.compile(r"^pages(\[\d+\])\.boxes\b"), r"bbox\1"),
    (re.compile(r"^pages(\[\d+\])\.(width|height)\b"), r"page_size\1"),
    (re.compile(r"^pages\b"), "word"),
    (re.compile(r"^text_pairs\b"), "text_pair"),
    (re.compile(r"^target_prefixes\b"), "target_prefix"),
    (re.compile(r"^questions\b"), "question"),
    (re.compile(r"^contexts\b"), "context"),
    (re.compile(r"^images\b"), "image"),
    (re.compile(r"^audios\b"), "audio"),
    (re.compile(r"^prompts\[0\]\.box\b"), "box"),
    (re.compile(r"^prompts(\[0\](\.points)?)?(?=$|\[)"), "point"),
    (re.compile(r"^choices\.texts\b"), "choices"),
)
"""Names of headway's fields in this protocol."""


class OpenInferenceService:
    """Servicer of all models of a host, with the tensors of each task in `tasks.py`."""

    def __init__(
        self,
        host: ModelHost,
        *,
        statistics: Statistics,
        is_draining: Callable[[], bool],
        stall_timeout_s: float,
        max_text_request_bytes: int,
    ) -> None:
        """Makes the service of a host.

        Args:
            host: Its models.
            statistics: Statistics of the models.
            is_draining: Returns True while the server shuts down.
            stall_timeout_s: Seconds without progress after which a model is not ready; 0: no limit.
            max_text_request_bytes: Maximum bytes of a request to a text model.
        """
        self._host = host
        self._statistics = statistics
        self._is_draining = is_draining
        self._stall_timeout_s = stall_timeout_s
        self._max_text_request_bytes = max_text_request_bytes

    # Health

    async def ServerLive(self, request: pb.ServerLiveRequest, deadline: float | None) -> pb.ServerLiveResponse:
        """Answers."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, deadline: float | None) -> pb.ServerReadyResponse:
        """Returns whether calls are accepted and every model is healthy."""
        unhealthy = self._host.unhealthy(stall_timeout_s=self._stall_timeout_s)
        return pb.ServerReadyResponse(ready=not self._is_draining() and not unhealthy)

    async def ModelReady(self, request: pb.ModelReadyRequest, deadline: float | None) -> pb.ModelReadyResponse:
        """Returns whether a model can be called; False for an unknown one."""
        try:
            manifest = self._describe(request.name, request.version)[0].bundle.manifest
        except (ModelNotFoundError, WrongTaskError):
            return pb.ModelReadyResponse(ready=False)
        unhealthy = self._host.unhealthy(stall_timeout_s=self._stall_timeout_s)
        is_ready = f"{manifest.name}/{manifest.version}" not in unhealthy
        return pb.ModelReadyResponse(ready=is_ready and not self._is_draining())

    # Descriptions

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, deadline: float | None
    ) -> pb.ServerMetadataResponse:
        """Returns the server's name, version and extensions."""
        return pb.ServerMetadataResponse(name="headway", version=version("headway-server"), extensions=_EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, deadline: float | None) -> pb.ModelMetadataResponse:
        """Describes the tensors of a model."""
        model, task = self._describe(request.name, request.version)
        name = model.bundle.manifest.name
        manifests = [other.bundle.manifest for other in self._host.models]
        return pb.ModelMetadataResponse(
            name=name,
            versions=[manifest.version for manifest in manifests if manifest.name == name],
            platform=_PLATFORM,
            inputs=[_tensor_metadata(spec) for spec in task.inputs(model)],
            outputs=[_tensor_metadata(spec) for spec in task.outputs(model)],
        )

    async def ModelConfig(self, request: pb.ModelConfigRequest, deadline: float | None) -> pb.ModelConfigResponse:
        """Describes a model in Triton's format, for its clients and load testers."""
        model, task = self._describe(request.name, request.version)
        config = pb.ModelConfig(
            name=model.bundle.manifest.name,
            platform=_PLATFORM,
            backend=_BACKEND,
            input=[
                pb.ModelInput(
                    name=spec.name, data_type=_DATA_TYPES[spec.datatype], dims=spec.shape, optional=spec.is_optional
                )
                for spec in task.inputs(model)
            ],
            output=[
                pb.ModelOutput(name=spec.name, data_type=_DATA_TYPES[spec.datatype], dims=spec.shape)
                for spec in task.outputs(model)
            ],
            dynamic_batching=pb.ModelDynamicBatching(),
            model_transaction_policy=pb.ModelTransactionPolicy(decoupled=task.stream is not None),
        )
        return pb.ModelConfigResponse(config=config)

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest, deadline: float | None
    ) -> pb.ModelStatisticsResponse:
        """Returns the statistics of models."""
        if request.name:
            models = [self._host.peek(request.name, request.version)]
            if not request.version:
                name = models[0].bundle.manifest.name
                models = [model for model in self._host.models if model.bundle.manifest.name == name]
        else:
            models = list(self._host.models)
        return pb.ModelStatisticsResponse(model_stats=[self._statistics.message(model) for model in models])

    # The repository

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, deadline: float | None
    ) -> pb.RepositoryIndexResponse:
        """Lists the bundles of the host."""
        _check_repository(request.repository_name)
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=bundle.name, version=bundle.version, state=_state(bundle.state), reason=bundle.reason or ""
                )
                for bundle in self._host.bundles
                if not request.ready or bundle.state is ModelState.READY
            ]
        )

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, deadline: float | None
    ) -> pb.RepositoryModelLoadResponse:
        """Loads a model, or replaces it with the store's current version."""
        _check_repository(request.repository_name)
        await self._host.load(request.model_name, _named_version(request.parameters, "version"))
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, deadline: float | None
    ) -> pb.RepositoryModelUnloadResponse:
        """Unloads a model once its calls have ended."""
        _check_repository(request.repository_name)
        # Triton's clients always send whether to unload dependents, of which there are none here.
        named = _named_version(request.parameters, "version", "unload_dependents")
        await self._host.unload(request.model_name, named)
        return pb.RepositoryModelUnloadResponse()

    # Calls

    async def ModelInfer(self, request: pb.ModelInferRequest, deadline: float | None) -> pb.ModelInferResponse:
        """Answers tensors with tensors."""
        read = await self._read(request, deadline)
        return await read.infer()

    async def ModelStreamInfer(self, calls: StreamedCalls[pb.ModelInferRequest]) -> None:
        """Answers the messages of a stream concurrently, in order of completion.

        An error of a message is sent as a message, and the stream continues. The caller may instead ask for errors to
        end the stream, as Triton's clients can.
        """
        errors_end_it = calls.metadata.get("triton_grpc_error", "").lower() == "true"
        room = asyncio.Semaphore(_MAX_RUNNING)

        async def answer(call: StreamedCall[pb.ModelInferRequest]) -> None:
            try:
                if (failed := await self._answer(call, calls, errors_end_it)) is not None:
                    await calls.send(failed)
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as group:
                await room.acquire()  # before a request is read, so that waiting requests take no memory
                async for call in calls:
                    group.create_task(answer(call))
                    await room.acquire()
        except ExceptionGroup as failed:  # one error is enough
            raise failed.exceptions[0] from None

    async def _answer(
        self,
        call: StreamedCall[pb.ModelInferRequest],
        calls: StreamedCalls[pb.ModelInferRequest],
        errors_end_it: bool,
    ) -> pb.ModelStreamInferResponse | None:
        """Answers a call of a stream; returns the message of its error, sent after the call's memory is released."""
        request_id = ""
        try:
            async with call.answer() as request:
                request_id = request.id
                read = await self._read(request, calls.deadline)
                async with aclosing(read.stream()) as responses:
                    async for response in responses:
                        await calls.send(pb.ModelStreamInferResponse(infer_response=response))
        except Exception as error:
            if errors_end_it or calls.is_over:
                raise
            message = call.status_of(error).message
        else:
            return None
        failed = pb.ModelInferResponse(id=request_id)
        return pb.ModelStreamInferResponse(error_message=message, infer_response=failed)

    async def _read(self, message: pb.ModelInferRequest, deadline: float | None) -> _Request:
        """Finds the model of a request and reads its tensors and parameters.

        Raises:
            RequestError: The model does not exist, or the request does not match its tensors.
        """
        if not message.model_name:
            raise InvalidInputError("model_name", "is empty; name one of the models that RepositoryIndex lists")
        model = self._host.find_named(message.model_name, message.model_version)
        task = tensors_of(self._host.families, model)
        call = current_call()
        size = 0 if call is None else call.num_bytes  # ByteSize() would serialize the message again
        if task.reads_texts and size > self._max_text_request_bytes:
            raise InvalidInputError(
                "request",
                f"has {size} bytes, the limit of models of texts is {self._max_text_request_bytes}; send it in "
                "several calls",
            )
        parameters = read_parameters(message.parameters, task.parameters)
        outputs = _wanted_outputs(message, task.outputs(model))
        specs = task.inputs(model)
        if size <= _FEW_BYTES and num_typed_elements(message) <= _FEW_ELEMENTS:
            arrays = read_inputs(message, specs, max_rows=task.max_rows)
        else:
            loop = asyncio.get_running_loop()
            arrays = await loop.run_in_executor(
                text_pool(), partial(read_inputs, message, specs, max_rows=task.max_rows)
            )
        infer_call = InferCall(
            arrays=arrays,
            parameters=parameters,
            outputs=outputs,
            deadline=earlier_deadline(deadline, parameters),
        )
        return _Request(message=message, model=model, task=task, call=infer_call)

    def _describe(self, name: str, version_name: str) -> tuple[ServedModel, TensorTask]:
        model = self._host.peek(name, version_name)
        return model, tensors_of(self._host.families, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A parsed request with its model."""

    message: pb.ModelInferRequest
    model: ServedModel
    task: TensorTask
    call: InferCall

    async def infer(self) -> pb.ModelInferResponse:
        with self._own_names():
            arrays = await self.task.infer(self.model, self.call)
        if sum(array.size for array in arrays.values()) <= _FEW_ELEMENTS:
            return self._response(arrays)
        return await asyncio.get_running_loop().run_in_executor(text_pool(), self._response, arrays)

    async def stream(self) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """Yields responses; each states whether it is the last."""
        if self.task.stream is None or not self.task.streams(self.call):
            response = await self.infer()
            response.parameters[_FINAL].bool_param = True
            yield response
            return
        with self._own_names():
            async with aclosing(self.task.stream(self.model, self.call)) as parts:
                async for arrays in parts:
                    response = self._response(arrays)
                    response.parameters[_FINAL].bool_param = FINISH_REASON in arrays
                    yield response

    @contextmanager
    def _own_names(self) -> Iterator[None]:
        """Renames the fields of an error to this protocol's names."""
        try:
            yield
        except InvalidInputError as error:
            raise error.renamed(self._own_name) from None

    def _own_name(self, field: str) -> str:
        if field in (spec.name for spec in self.task.inputs(self.model)):
            return field
        if field in self.task.parameters:
            return f"parameters.{field}"
        for pattern, replacement in _OWN_NAMES:
            field = pattern.sub(replacement, field)
        return field

    def _response(self, arrays: Arrays) -> pb.ModelInferResponse:
        """Makes a response of the requested arrays."""
        manifest = self.model.bundle.manifest
        response = pb.ModelInferResponse(model_name=manifest.name, model_version=manifest.version, id=self.message.id)
        wanted = {name: array for name, array in arrays.items() if name in self.call.outputs}
        is_raw = bool(self.message.raw_input_contents) or not all(map(has_typed_form, wanted.values()))
        for name, array in wanted.items():
            add_output(response, name, array, is_raw=is_raw)
        return response


def _wanted_outputs(message: pb.ModelInferRequest, specs: Sequence[TensorSpec]) -> frozenset[str]:
    """Returns the names of the requested outputs; if none is named, of all but those on request."""
    known = [spec.name for spec in specs]
    for index, output in enumerate(message.outputs):
        if output.name not in known:
            raise InvalidInputError(
                f"outputs[{index}].name", f"is {output.name[:64]!r}; the model writes {', '.join(known)}"
            )
        if encoding := read_hints(f"outputs[{index}]", output.parameters):
            raise InvalidInputError(f"outputs[{index}].parameters.{CONTENT_TYPE}", f"is {encoding}; leave it out")
    named = frozenset(output.name for output in message.outputs)
    return named or frozenset(spec.name for spec in specs if not spec.is_on_request)


def _tensor_metadata(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)


def _state(state: ModelState) -> str:
    return state.name if state in _OWN_STATES else "UNAVAILABLE"


def _check_repository(name: str) -> None:
    if name:
        raise InvalidInputError("repository_name", f"is {name[:64]!r}; there is one store, leave it out")


def _named_version(parameters: Mapping[str, pb.ModelRepositoryParameter], *known: str) -> str:
    """Reads the version named by a call; empty if it names none."""
    for name in parameters:
        if name not in known:
            raise InvalidInputError(
                f"parameters.{name[:64]}", "is unknown; models are loaded unchanged from the store, by `version`"
            )
    return parameters["version"].string_param if "version" in parameters else ""
