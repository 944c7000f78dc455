"""ModelService."""

from __future__ import annotations

from typing import Any

import grpc

from headway.v1 import common_pb2, generation_service_pb2
from headway.v1 import model_service_pb2 as pb
from headway.v1 import model_service_pb2_grpc as pb_grpc
from headway_server.bundles import CHAT_TEMPLATE_FILE, Manifest, SamplingDefaults, Task
from headway_server.bundles.tags import TagSet
from headway_server.errors import InvalidInputError
from headway_server.serving.families import ServedModel
from headway_server.serving.host import ModelHost

_TASKS: dict[Task, pb.Task.ValueType] = {
    Task.GENERATION: pb.TASK_GENERATION,
    Task.TRANSLATION: pb.TASK_TRANSLATION,
    Task.TEXT_CLASSIFICATION: pb.TASK_TEXT_CLASSIFICATION,
    Task.TOKEN_CLASSIFICATION: pb.TASK_TOKEN_CLASSIFICATION,
    Task.IMAGE_CLASSIFICATION: pb.TASK_IMAGE_CLASSIFICATION,
}


class ModelService(pb_grpc.ModelServiceServicer):
    """Describes the models of a host."""

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
        return pb.GetModelResponse(model=_model_message(model), manifest_json=model.bundle.manifest.model_dump_json())


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
        default_parameters=_parameters(manifest.sampling_defaults) if manifest.sampling_defaults else None,
        quality=_quality(manifest),
        license=manifest.license,
        has_chat_template=CHAT_TEMPLATE_FILE in manifest.files,
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
