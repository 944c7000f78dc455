"""ModelService."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import grpc
from pydantic import ValidationError

from headway.v1 import common_pb2, generation_service_pb2
from headway.v1 import model_service_pb2 as pb
from headway.v1 import model_service_pb2_grpc as pb_grpc
from headway_server.bundles import CHAT_TEMPLATE_FILE, LEARNING_CURVE_FILE, Bundle, Manifest, SamplingDefaults, Task
from headway_server.bundles.tags import TagSet
from headway_server.errors import InvalidInputError
from headway_server.serving.families import ServedModel
from headway_server.serving.host import BundleStatus, ModelHost, ModelState
from headway_server.serving.routes import Alias, Route, Routes

_TASKS: dict[Task, pb.Task.ValueType] = {task: pb.Task.Value(f"TASK_{task.name}") for task in Task}
_STATES: dict[ModelState, pb.BundleState.ValueType] = {
    state: pb.BundleState.Value(f"BUNDLE_STATE_{state.name}") for state in ModelState
}
_MAX_DRAWING_BYTES: Final = 1 << 18
ADMIN_METHODS: Final = frozenset(
    f"/{pb.DESCRIPTOR.package}.ModelService/{name}"
    for name in ("LoadModel", "UnloadModel", "ScanStore", "SetRoute", "SetAlias")
)
"""The RPCs that change what the server serves: every one of the protocol that is not a question."""


class ModelService(pb_grpc.ModelServiceServicer):
    """Describes the models of a host, and changes which they are."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def ListModels(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.ListModelsRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        """Lists the loaded models and the bundles that could not be loaded."""
        if request.task not in pb.Task.values():
            raise InvalidInputError("task", f"is {request.task}, which is no task; leave it out for all")
        models = [_model_message(model) for model in self._host.models]
        return pb.ListModelsResponse(
            models=[model for model in models if request.task in (pb.TASK_UNSPECIFIED, model.task)],
            rejected_bundles=[
                pb.RejectedBundle(path=rejected.path, reason=rejected.reason or "") for rejected in self._host.rejected
            ],
        )

    async def GetModel(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.GetModelRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelResponse:
        """Describes one model, manifest included."""
        if not request.model:
            raise InvalidInputError("model", "is empty; name one of the models that ListModels lists")
        model = self._host.get(request.model, request.model_version)
        return pb.GetModelResponse(
            model=_model_message(model),
            manifest_json=model.bundle.manifest.model_dump_json(),
            learning_curve_svg=await asyncio.to_thread(_learning_curve, model.bundle),
        )

    async def ListBundles(  # noqa: N802 (the method's name in the protocol)
        self, _request: pb.ListBundlesRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListBundlesResponse:
        """Lists the bundles of the store, and the routes."""
        return pb.ListBundlesResponse(
            bundles=_bundles(self._host.bundles),
            routes=_route_messages(self._host.routes),
            aliases=_alias_messages(self._host.routes),
            store_problem=self._host.store_problem or "",
        )

    async def LoadModel(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.LoadModelRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.LoadModelResponse:
        """Loads a version, or replaces it by what is in the store now."""
        model = await self._host.load(request.model, request.model_version)
        return pb.LoadModelResponse(model=_model_message(model))

    async def UnloadModel(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.UnloadModelRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.UnloadModelResponse:
        """Unloads one version or all."""
        await self._host.unload(request.model, request.model_version)
        return pb.UnloadModelResponse()

    async def ScanStore(  # noqa: N802 (the method's name in the protocol)
        self, _request: pb.ScanStoreRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ScanStoreResponse:
        """Looks at the store now."""
        return pb.ScanStoreResponse(bundles=_bundles(await self._host.scan()))

    async def SetRoute(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.SetRouteRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SetRouteResponse:
        """Sets default version and canary of a model."""
        try:
            route = Route(
                default_version=request.default_version or None,
                canary_version=request.canary_version or None,
                canary_share=request.canary_share,
            )
        except ValidationError as error:
            raise _invalid(error) from error
        reason = await self._host.set_route(request.model, route)
        return pb.SetRouteResponse(not_kept_reason=reason or "", routes=_route_messages(self._host.routes))

    async def SetAlias(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.SetAliasRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SetAliasResponse:
        """Sets or removes another name of a model."""
        if request.model_version and not request.model:
            raise InvalidInputError(
                "model_version", "is of a model, which is missing; leave it out to remove the alias"
            )
        try:
            alias = Alias(model=request.model, version=request.model_version or None) if request.model else None
        except ValidationError as error:
            raise _invalid(error) from error
        reason = await self._host.set_alias(request.alias, alias)
        return pb.SetAliasResponse(not_kept_reason=reason or "", aliases=_alias_messages(self._host.routes))


def _learning_curve(bundle: Bundle) -> str:
    """Reads the drawing of a bundle; empty where it has none, or one that is gone, or too large to be one."""
    described = bundle.manifest.files.get(LEARNING_CURVE_FILE)
    if described is None or described.size_bytes > _MAX_DRAWING_BYTES:
        return ""
    try:
        return bundle.file(LEARNING_CURVE_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _invalid(error: ValidationError) -> InvalidInputError:
    """Names the first wrong field of a route or an alias."""
    first = error.errors(include_url=False, include_input=False)[0]
    message = str(first["msg"]).removeprefix("Value error, ")
    field, _, description = message.partition(": ") if not first["loc"] else (str(first["loc"][0]), "", message)
    return InvalidInputError("model_version" if field == "version" else field, description)


def _bundles(bundles: Iterable[BundleStatus]) -> list[pb.BundleStatus]:
    return [
        pb.BundleStatus(
            name=bundle.name, version=bundle.version, state=_STATES[bundle.state], reason=bundle.reason or ""
        )
        for bundle in bundles
    ]


def _model_message(model: ServedModel) -> pb.Model:
    manifest = model.bundle.manifest
    languages = manifest.languages
    return pb.Model(
        name=manifest.name,
        version=manifest.version,
        task=_TASKS[manifest.task],
        description=manifest.description,
        architecture=manifest.architecture.kind,
        parameter_count=manifest.architecture.parameter_count,
        variant=model.precision.value,
        device=model.device,
        max_input_token_count=manifest.limits.max_input_tokens or 0,
        max_token_count=manifest.limits.max_total_tokens or 0,
        labels=_labels(manifest),
        source_language=languages.source if languages else "",
        target_language=languages.target if languages else "",
        source_languages=languages.sources if languages else (),
        target_languages=languages.targets if languages else (),
        default_parameters=_parameters(manifest.sampling_defaults) if manifest.sampling_defaults else None,
        quality=_quality(manifest),
        license=manifest.license,
        has_chat_template=CHAT_TEMPLATE_FILE in manifest.files,
        embedding_dimension=manifest.embedding.dimension if manifest.embedding else 0,
        prompt_names=manifest.embedding.prompts if manifest.embedding else (),
        embedding_space=manifest.embedding.space.name if manifest.embedding and manifest.embedding.space else "",
        translates_speech=manifest.speech is not None and manifest.speech.translate is not None,
        has_speech_timestamps=manifest.speech is not None and manifest.speech.first_timestamp is not None,
    )


def _labels(manifest: Manifest) -> tuple[str, ...]:
    """Returns the labels that an answer may name; the manifest of a token classifier has tags in their place."""
    of_tokens = manifest.task is Task.TOKEN_CLASSIFICATION
    return TagSet.parse(manifest.labels).labels if of_tokens else manifest.labels


def _parameters(defaults: SamplingDefaults) -> generation_service_pb2.GenerationParameters:
    return generation_service_pb2.GenerationParameters(
        max_new_tokens=defaults.max_new_tokens,
        sampling=common_pb2.SamplingParameters(
            temperature=defaults.temperature, top_k=defaults.top_k, top_p=defaults.top_p, min_p=defaults.min_p
        ),
        repetition_penalty=defaults.repetition_penalty,
        presence_penalty=defaults.presence_penalty,
        frequency_penalty=defaults.frequency_penalty,
    )


def _quality(manifest: Manifest) -> list[pb.QualityFigure]:
    return [
        pb.QualityFigure(
            variant=precision.value,
            metric=variant.quality.metric,
            value=variant.quality.value,
            example_count=variant.quality.example_count,
            dataset=variant.quality.dataset,
        )
        for precision, variant in sorted(manifest.variants.items())
        if variant.quality is not None
    ]


def _route_messages(routes: Routes) -> list[pb.Route]:
    return [
        pb.Route(
            model=name,
            default_version=route.default_version or "",
            canary_version=route.canary_version or "",
            canary_share=route.canary_share,
        )
        for name, route in sorted(routes.models.items())
    ]


def _alias_messages(routes: Routes) -> list[pb.Alias]:
    return [
        pb.Alias(alias=name, model=alias.model, model_version=alias.version or "")
        for name, alias in sorted(routes.aliases.items())
    ]
