"""ModelService."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic import ValidationError

from headway.v1 import common_pb2, generation_service_pb2
from headway.v1 import model_service_pb2 as pb
from headway_server.bundles import Manifest, SamplingDefaults, Task
from headway_server.errors import InvalidInputError
from headway_server.services.enums import WireEnum
from headway_server.services.messages import VARIANTS
from headway_server.serving.families import ServedModel
from headway_server.serving.finding import quoted
from headway_server.serving.host import BundleStatus, ModelHost, ModelState
from headway_server.serving.routes import Alias, Route, Routes

_STATES: Final = WireEnum(pb.BundleState, ModelState)


class ModelService:
    """Servicer that describes, loads and unloads the models of a host."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def ListModels(self, request: pb.ListModelsRequest, _deadline: float | None) -> pb.ListModelsResponse:
        """Lists the loaded models and the bundles that could not be loaded."""
        families = self._host.families
        _check_known("task", request.task, families)
        _check_known(
            "capability", request.capability, [one.name for family in families.values() for one in family.abilities]
        )
        models = [self._message(model) for model in self._host.models]
        return pb.ListModelsResponse(
            models=[
                model
                for model in models
                if request.task in ("", model.task) and request.capability in ("", *model.capabilities)
            ],
            rejected_bundles=[
                pb.RejectedBundle(path=rejected.path, reason=rejected.reason or "") for rejected in self._host.rejected
            ],
        )

    async def GetModel(self, request: pb.GetModelRequest, _deadline: float | None) -> pb.GetModelResponse:
        """Describes one model, including its manifest."""
        if not request.model:
            raise InvalidInputError("model", "is empty; name one of the models that ListModels lists")
        model = self._host.get(request.model, request.model_version)
        return pb.GetModelResponse(
            model=self._message(model),
            manifest_json=model.bundle.manifest.model_dump_json(),
        )

    async def ListBundles(self, _request: pb.ListBundlesRequest, _deadline: float | None) -> pb.ListBundlesResponse:
        """Lists the bundles of the store, and the routes."""
        return pb.ListBundlesResponse(
            bundles=_bundles(self._host.bundles),
            routes=_route_messages(self._host.routes),
            aliases=_alias_messages(self._host.routes),
            store_problem=self._host.store_problem or "",
        )

    async def LoadModel(self, request: pb.LoadModelRequest, _deadline: float | None) -> pb.LoadModelResponse:
        """Loads a version, or replaces it with the store's current one."""
        model = await self._host.load(request.model, request.model_version)
        return pb.LoadModelResponse(model=self._message(model))

    async def UnloadModel(self, request: pb.UnloadModelRequest, _deadline: float | None) -> pb.UnloadModelResponse:
        """Unloads one version or all."""
        await self._host.unload(request.model, request.model_version)
        return pb.UnloadModelResponse()

    async def ScanStore(self, _request: pb.ScanStoreRequest, _deadline: float | None) -> pb.ScanStoreResponse:
        """Scans the store now."""
        return pb.ScanStoreResponse(bundles=_bundles(await self._host.scan()))

    async def SetRoute(self, request: pb.SetRouteRequest, _deadline: float | None) -> pb.SetRouteResponse:
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

    async def SetAlias(self, request: pb.SetAliasRequest, _deadline: float | None) -> pb.SetAliasResponse:
        """Sets or removes another name of a model."""
        if request.model_version and not request.model:
            raise InvalidInputError("model_version", "requires model; leave it out to remove the alias")
        try:
            alias = Alias(model=request.model, version=request.model_version or None) if request.model else None
        except ValidationError as error:
            raise _invalid(error) from error
        reason = await self._host.set_alias(request.alias, alias)
        return pb.SetAliasResponse(not_kept_reason=reason or "", aliases=_alias_messages(self._host.routes))

    def _message(self, model: ServedModel) -> pb.Model:
        manifest = model.bundle.manifest
        languages = manifest.languages
        return pb.Model(
            name=manifest.name,
            version=manifest.version,
            task=manifest.task,
            description=manifest.description,
            architecture=manifest.architecture.kind,
            parameter_count=manifest.architecture.parameter_count,
            variant=VARIANTS.number(model.precision),
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
            capabilities=[
                ability.name for ability in self._host.families[manifest.task].abilities if ability.needs(manifest)
            ],
            embedding_dimension=manifest.embedding.dimension if manifest.embedding else 0,
            prompt_names=manifest.embedding.prompts if manifest.embedding else (),
            embedding_space=manifest.embedding.space.name if manifest.embedding and manifest.embedding.space else "",
        )


def _invalid(error: ValidationError) -> InvalidInputError:
    """Returns an error for the first invalid field of a route or an alias."""
    first = error.errors(include_url=False, include_input=False)[0]
    message = str(first["msg"]).removeprefix("Value error, ")
    field, _, description = message.partition(": ") if not first["loc"] else (str(first["loc"][0]), "", message)
    return InvalidInputError("model_version" if field == "version" else field, description)


def _bundles(bundles: Iterable[BundleStatus]) -> list[pb.BundleStatus]:
    return [
        pb.BundleStatus(
            name=bundle.name, version=bundle.version, state=_STATES.number(bundle.state), reason=bundle.reason or ""
        )
        for bundle in bundles
    ]


def _check_known(field: str, name: str, known: Iterable[str]) -> None:
    """Refuses the name of an unknown model.

    Raises:
        InvalidInputError: No model is listed by this name.
    """
    if name and name not in known:
        names = ", ".join(dict.fromkeys(known))
        raise InvalidInputError(field, f"is {quoted(name)}; must be one of {names}, or left out for all models")


def _labels(manifest: Manifest) -> tuple[str, ...]:
    """Returns the possible labels of an answer; the manifest of a token classifier has tags instead."""
    return manifest.tags.labels if manifest.task is Task.TOKEN_CLASSIFICATION else manifest.labels


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
            variant=VARIANTS.number(precision),
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
