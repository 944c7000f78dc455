"""ImageGenerationService."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from headway.v1 import image_generation_service_pb2 as pb
from headway_server.diffusion import DiffusionSampler
from headway_server.services.enums import WireEnum
from headway_server.services.images import image_of
from headway_server.services.messages import Parts, find_model, set_fields, signed, stream_of
from headway_server.serving.host import ModelHost
from headway_server.serving.images import name_images
from headway_server.tasks.image_generation.model import GeneratedImage, ImageGenerationModel, ImageProgress
from headway_server.tasks.image_generation.request import ImageGenerationRequest
from headway_server.tasks.table import GENERATE_IMAGES

_SAMPLERS: Final = WireEnum(pb.DiffusionSampler, DiffusionSampler)
_PARAMETERS: Final = {"step_count": "num_steps"} | {name: name for name in ("guidance_scale", "seed", "strength")}
"""Names of the message's fields in `ImageGenerationRequest`."""


class ImageGenerationService:
    """Servicer of image generation models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def GenerateImage(self, request: pb.GenerateImageRequest, deadline: float | None) -> pb.GenerateImageResponse:
        """Generates the images of a call."""
        arrived = time.monotonic()
        model = self._find(request)
        count = {"num_images": request.image_count} if request.HasField("image_count") else {}
        answer = await model.generate(await self._asked(request, **count), deadline=deadline)
        return pb.GenerateImageResponse(
            results=[_generated_image(image) for image in answer.results],
            **signed(model, answer.timings, arrived),
        )

    def StreamGenerateImage(
        self, request: pb.StreamGenerateImageRequest, deadline: float | None
    ) -> AsyncGenerator[pb.StreamGenerateImageResponse, None]:
        """Generates an image and streams its progress."""
        arrived = time.monotonic()
        model = self._find(request)

        async def begin() -> Parts[ImageProgress, GeneratedImage]:
            asked = await self._asked(request, preview_step_count=request.preview_step_count)
            return model.stream(asked, deadline=deadline)

        return stream_of(pb.StreamGenerateImageResponse, begin, model, arrived, delta=_progress, last=_last)

    def _find(self, request: pb.GenerateImageRequest | pb.StreamGenerateImageRequest) -> ImageGenerationModel:
        return find_model(self._host, GENERATE_IMAGES, request)

    async def _asked(
        self, request: pb.GenerateImageRequest | pb.StreamGenerateImageRequest, **more: Any
    ) -> ImageGenerationRequest:
        """Parses a request; unset fields take their defaults.

        Raises:
            InvalidInputError: A value is out of its range.
        """
        parameters = request.parameters
        given = {_PARAMETERS[field]: value for field, value in set_fields(parameters).items() if field in _PARAMETERS}
        if parameters.sampler:
            given["sampler"] = _SAMPLERS.read("parameters.sampler", parameters.sampler)
        if request.image or request.image_id:
            given["image"] = await image_of(self._host, request.image, request.image_id)
        if request.mask:
            [given["mask"]] = await name_images([request.mask], "mask")
        return ImageGenerationRequest(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            **given,
            **more,
        )


def _progress(part: ImageProgress) -> dict[str, Any]:
    return {
        "completed_step_count": part.num_made,
        "step_count": part.num_steps,
        "preview_png": part.preview or b"",
    }


def _last(image: GeneratedImage) -> dict[str, Any]:
    return {"completed_step_count": image.num_steps, "step_count": image.num_steps, "result": _generated_image(image)}


def _generated_image(image: GeneratedImage) -> pb.GeneratedImage:
    return pb.GeneratedImage(
        png=image.png, seed=image.seed, step_count=image.num_steps, width=image.width, height=image.height
    )
