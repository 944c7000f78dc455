"""OpenAI's edits of images: a form of an image, perhaps a mask, and the fields of a generation."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from headway_server.errors import InvalidInputError
from headway_server.preprocessing.pool import request_pool
from headway_server.serving.answers import Answer
from headway_server.serving.host import ModelHost
from headway_server.serving.images import name_images
from headway_server.tasks.image_generation.model import GeneratedImage
from headway_server.tasks.table import GENERATE_IMAGES
from headway_server.transports.http.edge import Reply, Request
from headway_server.transports.http.openai.form import formatted
from headway_server.transports.http.openai.multipart import form_text, read_form
from headway_server.transports.http.openai.requests import ImageEditBody

IMAGE_EDITS_PATH: Final = "/v1/images/edits"
_FILES: Final = ("image", "image[]", "mask")
_NUMBERS: Final = ("n", "step_count", "seed", "guidance_scale", "strength")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request, checked."""

    body: ImageEditBody
    image: bytes
    mask: bytes | None

    @classmethod
    def read(cls, request: Request) -> _Asked:
        """Reads a form.

        Raises:
            InvalidInputError: The body is not a form, or a field is missing, unknown or invalid.
        """
        fields = read_form(request.headers.get("content-type", ""), request.body, None)
        texts = {name: form_text(name, value) for name, value in fields.items() if name not in _FILES}
        given: dict[str, object] = dict(texts)
        for name in _NUMBERS:
            with suppress(ValueError, KeyError):  # what is no number is refused with the other fields
                given[name] = int(texts[name]) if name in ("n", "step_count", "seed") else float(texts[name])
        image = fields.get("image", fields.get("image[]"))
        if image is None:
            raise InvalidInputError("image", "is missing; send the image to edit as a part of the form")
        if "image" in fields and "image[]" in fields:
            raise InvalidInputError("image", "is given twice; this server edits one image a call")
        return cls(body=ImageEditBody.read(json.dumps(given).encode()), image=image, mask=fields.get("mask"))


class ImageEditEndpoint:
    """Answers calls."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def answer(self, request: Request) -> Reply:
        """Edits an image."""
        asked = await asyncio.get_running_loop().run_in_executor(request_pool(), _Asked.read, request)
        model = self._host.find_able(GENERATE_IMAGES, *asked.body.name_and_version)
        [image] = await name_images([asked.image], "image")
        mask = None if asked.mask is None else (await name_images([asked.mask], "mask"))[0]
        wanted = asked.body.request(*model.size, image=image, mask=mask)
        answer = await model.generate(wanted, deadline=None)
        return await formatted(lambda: images_of(answer, as_url=asked.body.response_format == "url"), is_long=True)

    def __repr__(self) -> str:
        return "ImageEditEndpoint()"


def images_of(answer: Answer[GeneratedImage], *, as_url: bool) -> dict[str, Any]:
    """Returns the images of an answer, as the API has them."""
    name, head = ("url", "data:image/png;base64,") if as_url else ("b64_json", "")
    return {
        "created": int(time.time()),
        "data": [{name: head + base64.b64encode(image.png).decode(), "seed": image.seed} for image in answer.results],
        "output_format": "png",
        "size": f"{answer.results[0].width}x{answer.results[0].height}",
    }
