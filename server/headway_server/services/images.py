"""ImageService, and the images of requests: sent with a call, or prepared."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headway.v1 import image_service_pb2 as pb
from headway_server.batching.settings import MAX_IMAGES
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import TurnImage
from headway_server.services.messages import signed
from headway_server.serving.answers import NO_TIMINGS
from headway_server.serving.host import ModelHost
from headway_server.serving.images import SentImage, name_images
from headway_server.serving.limits import check_count
from headway_server.tasks.generation.model import GenerationModel
from headway_server.tasks.generation.request import Prompt
from headway_server.tasks.generation.request import images_of as images_of_conversation
from headway_server.tasks.images.model import ImageModel
from headway_server.tasks.table import PREPARE_IMAGES


class ImageService:
    """Stores images for calls that name them by id."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def PrepareImage(self, request: pb.PrepareImageRequest, deadline: float | None) -> pb.PrepareImageResponse:
        """Stores images, and computes a model's outputs if one is named."""
        arrived = time.monotonic()
        check_count("images", len(request.images), MAX_IMAGES)
        model = self._find(request.model, request.model_version)
        images = await name_images(list(request.images))
        await self._host.images.check(images)
        timings = NO_TIMINGS
        if model is not None:
            timings = (await model.prepare(images, deadline=deadline)).timings
        image_ids = await self._host.images.put(images)
        return pb.PrepareImageResponse(
            results=[pb.PreparedImage(image_id=image_id) for image_id in image_ids],
            **signed(model, timings, arrived),
        )

    def _find(self, name: str, version: str) -> ImageModel | GenerationModel | None:
        """Returns the named model, or None.

        Raises:
            RequestError: It does not exist, or reads no images.
        """
        if not name:
            if version:
                raise InvalidInputError("model_version", "requires model; name the model too")
            return None
        return self._host.find_able(PREPARE_IMAGES, name, version)


async def images_of(
    host: ModelHost, images: Sequence[bytes], image_ids: Sequence[str], max_ids: int = MAX_IMAGES
) -> list[bytes] | list[SentImage]:
    """Returns the images of a request, sent with it or prepared.

    Raises:
        InvalidInputError: It has both kinds, or too few or too many images.
        ImageNotFoundError: A prepared image does not exist.
    """
    if not image_ids:
        check_count("images", len(images), MAX_IMAGES)
        return list(images)
    if images:
        raise InvalidInputError("image_ids", "is set together with images; give one of them")
    check_count("image_ids", len(image_ids), max_ids)
    return await host.images.find(image_ids)


async def images_of_prompts(host: ModelHost, prompts: Sequence[Prompt]) -> list[list[SentImage]]:
    """Returns the images of each prompt, sent with it or prepared; none if no prompt has any.

    Raises:
        InvalidInputError: There are too many.
        ImageNotFoundError: A prepared image does not exist.
    """
    images = [images_of_conversation(prompt) for prompt in prompts]
    if not any(images):
        return []
    if further := [one for of_prompt in images for one in of_prompt][MAX_IMAGES:]:
        raise InvalidInputError(
            further[0].field, f"is image {MAX_IMAGES + 1} of the call, the limit is {MAX_IMAGES}; leave out older turns"
        )
    return [[await _image_of_turn(host, one) for one in of_prompt] for of_prompt in images]


async def _image_of_turn(host: ModelHost, image: TurnImage) -> SentImage:
    if image.image_id:
        [found] = await host.images.find([image.image_id], image.field)
        return found
    [named] = await name_images([image.data], image.field)
    return named


async def image_of(host: ModelHost, image: bytes, image_id: str, prefix: str = "") -> SentImage:
    """Returns the one image of a request; errors as `images_of`.

    Args:
        host: Host with the prepared images.
        image: The image; empty for a prepared one.
        image_id: Id of a prepared image; empty for one sent with the request.
        prefix: Prefix of both fields' names.
    """
    if image_id and image:
        raise InvalidInputError(f"{prefix}image_id", f"is set together with {prefix}image; give one of them")
    if image_id:
        [found] = await host.images.find([image_id], f"{prefix}image_id")
        return found
    [named] = await name_images([image], f"{prefix}image")
    return named
