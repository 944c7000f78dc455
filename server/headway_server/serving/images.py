"""Images that callers have sent once and name by id from then on.

An id is a keyed hash of the image and of who has sent it. The key is drawn when the server starts, so an id tells
nothing of the image, and nobody can make one without sending the image; nor does it name an image to a caller with
another API key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from headway_server.errors import ImageNotFoundError, InvalidInputError
from headway_server.observers import CacheUsage, current_call
from headway_server.preprocessing import ImageLimits
from headway_server.preprocessing.image import check_headers
from headway_server.serving.lru_cache import LruCache

ID_LENGTH: Final = 32
"""Hexadecimal digits of an id: 128 bits."""
_MIB: Final = 2**20
_FEW_BYTES: Final = 256 * 1024
"""Images of so few are hashed on the event loop, in 0.2 ms at most."""


KeptImage: TypeAlias = tuple[bytes, bytes]
"""An encoded image, and what stands for it and for who has sent it."""
Elsewhere: TypeAlias = Callable[[Sequence[str]], Awaitable[Mapping[str, KeptImage]]]
"""Asks the other processes of the server for images, by names as `PreparedImages.look` takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentImage:
    """An encoded image of a call."""

    data: bytes
    field: str
    """What the request calls it, such as `images[3]`, for messages."""
    key: bytes
    """Stands for the image and for who has sent it."""


class PreparedImages:
    """Encoded images by id, bounded in bytes and in time. Used on the event loop alone; `usage` from any thread."""

    def __init__(self, *, max_mib: int = 0, ttl_s: float = 600.0, limits: ImageLimits | None = None) -> None:
        """Keeps nothing yet.

        Args:
            max_mib: Most MiB; 0 keeps none.
            ttl_s: Seconds without use after which an image is forgotten.
            limits: Sizes past which an image is refused.
        """
        self._kept: LruCache[str, KeptImage] = LruCache("prepared_images", max_bytes=max_mib * _MIB, ttl_s=ttl_s)
        self._limits = limits or ImageLimits(max_bytes=_MIB, max_pixels=_MIB)
        self._secret = secrets.token_bytes(32)
        self.elsewhere: Elsewhere | None = None
        """Asked for images that are not here, which are kept here then; None: this is the only process."""

    async def find(self, image_ids: Sequence[str], field: str = "image_ids[{}]") -> list[SentImage]:
        """Finds images by their ids, which counts as their use; `field` is as in `name_images`.

        Raises:
            ImageNotFoundError: There is no such image, or none any longer.
        """
        names = [_own(image_id) for image_id in image_ids if len(image_id) == ID_LENGTH]
        images = {name: kept for name in names if (kept := self._kept.get(name)) is not None}
        if self.elsewhere is not None and (absent := [name for name in names if name not in images]):
            for name, kept in (await self.elsewhere(absent)).items():
                images[name] = kept
                self._kept.put(name, kept, len(kept[0]))
        found = []
        for index, image_id in enumerate(image_ids):
            name = field.format(index)
            if (kept := images.get(_own(image_id))) is None:
                raise ImageNotFoundError(
                    f"{name}: no image is kept by this id; ids expire {self._kept.ttl_s:g} s after their last use, or "
                    "sooner where newer images need the room; send the image to PrepareImage again"
                )
            found.append(SentImage(data=kept[0], field=name, key=kept[1]))
        return found

    def look(self, name: str) -> KeptImage | None:
        """Returns an image for another process of the server, by its id and its sender; None: it is not here."""
        return self._kept.get(name)

    async def check(self, images: Sequence[SentImage]) -> None:
        """Checks that images can be kept, before anything is done for them.

        Raises:
            InvalidInputError: They are too many bytes together, or one is no image or too large.
        """
        await check_headers([one.data for one in images], [one.field for one in images], self._limits)
        if (num_bytes := sum(len(one.data) for one in images)) > self._kept.max_bytes:
            raise InvalidInputError(
                "images",
                f"has {num_bytes} bytes, this server keeps {self._kept.max_bytes} (--max-prepared-mib); send the "
                "images with each call instead",
            )

    def keep(self, images: Sequence[SentImage]) -> list[str]:
        """Keeps images that were checked, and returns their ids."""
        ids = [hmac.digest(self._secret, one.key, "sha256").hex()[:ID_LENGTH] for one in images]
        for image_id, one in zip(ids, images, strict=True):
            self._kept.put(_own(image_id), (one.data, one.key), len(one.data))
        return ids

    def usage(self) -> CacheUsage:
        """Returns how much is kept; called from any thread."""
        return self._kept.usage()

    def __repr__(self) -> str:
        return f"PreparedImages({self._kept!r})"


async def name_images(images: Sequence[bytes], field: str = "images[{}]") -> list[SentImage]:
    """Names images that a call brings, large ones off the event loop: it takes 0.6 ms a MiB.

    Args:
        images: The images.
        field: What the request calls them, with the place of each at `{}`.
    """

    def name() -> list[SentImage]:
        sender = _sender().encode()
        keys = [hashlib.sha256(sender + hashlib.sha256(data).digest()).digest() for data in images]
        return [
            SentImage(data=data, field=field.format(index), key=key)
            for index, (data, key) in enumerate(zip(images, keys, strict=True))
        ]

    return await asyncio.to_thread(name) if sum(map(len, images)) > _FEW_BYTES else name()


def _own(image_id: str) -> str:
    return f"{image_id} {_sender()}"


def _sender() -> str:
    """Returns the name of the API key or certificate of the present call; empty where there is none."""
    call = current_call()
    return "" if call is None or call.rights is None else call.rights.name
