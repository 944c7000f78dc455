"""Registry of the server's services, for all transports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from google.protobuf.descriptor import ServiceDescriptor

from headway.oip import grpc_predict_v2_pb2
from headway.v1 import (
    audio_classification_service_pb2,
    caption_service_pb2,
    depth_estimation_service_pb2,
    embedding_service_pb2,
    generation_service_pb2,
    image_classification_service_pb2,
    image_generation_service_pb2,
    image_service_pb2,
    inspection_service_pb2,
    mask_filling_service_pb2,
    model_service_pb2,
    object_detection_service_pb2,
    question_answering_service_pb2,
    ranking_service_pb2,
    segmentation_service_pb2,
    semantic_segmentation_service_pb2,
    speech_service_pb2,
    text_classification_service_pb2,
    text_to_text_service_pb2,
    translation_service_pb2,
    video_classification_service_pb2,
)
from headway_server.services import open_inference
from headway_server.services.audio_classification import AudioClassificationService
from headway_server.services.captioning import CaptionService
from headway_server.services.embedding import EmbeddingService
from headway_server.services.generation import GenerationService
from headway_server.services.image_classification import ImageClassificationService
from headway_server.services.image_generation import ImageGenerationService
from headway_server.services.images import ImageService
from headway_server.services.inspection import InspectionService
from headway_server.services.mask_filling import MaskFillingService
from headway_server.services.models import ModelService
from headway_server.services.object_detection import ObjectDetectionService
from headway_server.services.pixels import DepthEstimationService, SemanticSegmentationService
from headway_server.services.procedure import Procedure, procedures_of
from headway_server.services.question_answering import QuestionAnsweringService
from headway_server.services.ranking import RankingService
from headway_server.services.segmentation import SegmentationService
from headway_server.services.speech import SpeechService
from headway_server.services.text_classification import TextClassificationService
from headway_server.services.text_to_text import TextToTextService
from headway_server.services.translation import TranslationService
from headway_server.services.video_classification import VideoClassificationService
from headway_server.serving.abilities import Ability
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings
from headway_server.tasks.table import RPCS


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service of headway's own protocol."""

    file: Any
    """Module of its `.proto` file, which has this service only."""
    servicer: Callable[[ModelHost], object]
    """Makes its servicer."""

    @property
    def descriptor(self) -> ServiceDescriptor:
        """Its description."""
        service: ServiceDescriptor
        [service] = self.file.DESCRIPTOR.services_by_name.values()
        return service


SERVICES: Final = (
    Service(file=generation_service_pb2, servicer=GenerationService),
    Service(file=translation_service_pb2, servicer=TranslationService),
    Service(file=text_to_text_service_pb2, servicer=TextToTextService),
    Service(file=caption_service_pb2, servicer=CaptionService),
    Service(file=speech_service_pb2, servicer=SpeechService),
    Service(file=text_classification_service_pb2, servicer=TextClassificationService),
    Service(file=question_answering_service_pb2, servicer=QuestionAnsweringService),
    Service(file=mask_filling_service_pb2, servicer=MaskFillingService),
    Service(file=image_classification_service_pb2, servicer=ImageClassificationService),
    Service(file=audio_classification_service_pb2, servicer=AudioClassificationService),
    Service(file=video_classification_service_pb2, servicer=VideoClassificationService),
    Service(file=object_detection_service_pb2, servicer=ObjectDetectionService),
    Service(file=semantic_segmentation_service_pb2, servicer=SemanticSegmentationService),
    Service(file=depth_estimation_service_pb2, servicer=DepthEstimationService),
    Service(file=embedding_service_pb2, servicer=EmbeddingService),
    Service(file=image_generation_service_pb2, servicer=ImageGenerationService),
    Service(file=image_service_pb2, servicer=ImageService),
    Service(file=ranking_service_pb2, servicer=RankingService),
    Service(file=segmentation_service_pb2, servicer=SegmentationService),
    Service(file=inspection_service_pb2, servicer=InspectionService),
    Service(file=model_service_pb2, servicer=ModelService),
)
OPEN_INFERENCE: Final[ServiceDescriptor] = grpc_predict_v2_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]


def service_descriptors() -> list[ServiceDescriptor]:
    """Returns the descriptors of all services: headway's own and the Open Inference Protocol."""
    return [*(service.descriptor for service in SERVICES), OPEN_INFERENCE]


def service_abilities(descriptor: ServiceDescriptor) -> frozenset[Ability[Any]]:
    """Returns the abilities of a service's calls; it is healthy if a model has one of them."""
    return frozenset(ability for method in descriptor.methods for ability in RPCS[method.name].abilities)


def make_procedures(
    host: ModelHost,
    settings: ServerSettings,
    *,
    is_draining: Callable[[], bool],
    statistics: open_inference.Statistics | None = None,
) -> dict[str, Procedure]:
    """Returns the methods of all services by full name, `/package.Service/Method`.

    Args:
        host: Host of the models.
        settings: Settings of the server.
        is_draining: Returns True while the server shuts down.
        statistics: Statistics of the Open Inference Protocol, an observer of host and calls; None: no statistics.
    """
    found: dict[str, Procedure] = {}
    procedures = partial(
        procedures_of, max_bytes=settings.max_message_bytes, max_text_bytes=settings.max_text_request_bytes
    )
    for service in SERVICES:
        found |= procedures(service.descriptor, service.servicer(host))
    if settings.open_inference:
        servicer = open_inference.OpenInferenceService(
            host,
            statistics=statistics or open_inference.Statistics(),
            is_draining=is_draining,
            stall_timeout_s=settings.stall_timeout,
            max_text_request_bytes=settings.max_text_request_bytes,
        )
        found |= procedures(OPEN_INFERENCE, servicer, probes=open_inference.PROBES)
        found |= open_inference.refusals_of(OPEN_INFERENCE.full_name)
    return found
