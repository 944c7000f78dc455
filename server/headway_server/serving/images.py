"""Images that callers have sent once and name by id from then on.

An id is a keyed hash of the image and of who has sent it. The key is drawn when the server starts, so an id tells
nothing of the image, and nobody can make one without sending the image; nor does it name an image to a caller with
another API key. Several processes of a server have one key, and keep the images in files (`image_files.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headway_server.errors import ImageNotFoundError, InvalidInputError
from headway_server.observers import CacheUsage, current_call
from headway_server.preprocessing import ImageLimits
from headway_server.preprocessing.image import check_headers
from headway_server.serving.image_files import NOUN, ImageFiles, KeptImage
from headway_server.serving.lru_cache import LruCache

ID_LENGTH: Final = 32
"""Hexadecimal digits of an id: 128 bits."""
SECRET_BYTES: Final = 32
_MIB: Final = 2**20
_FEW_BYTES: Final = 256 * 1024
"""Images of so few are hashed on the event loop, in 0.2 ms at most."""


class ImageMemory:
    """Keeps images in the memory of this process. Used on the event loop alone; `usage` from any thread."""

    def __init__(self, *, max_mib: int, ttl_s: float) -> None:
        """Keeps nothing yet.

        Args:
            max_mib: Most MiB; 0 keeps none.
            ttl_s: Seconds without use after which an image is forgotten.
        """
        self.max_bytes = max_mib * _MIB
        self.ttl_s = ttl_s
        self._kept: LruCache[str, KeptImage] = LruCache(NOUN, max_bytes=self.max_bytes, ttl_s=ttl_s)

    def room(self, num_bytes: int) -> int:
        """See `ImageFiles`."""
        return num_bytes

    async def find(self, names: Sequence[str]) -> dict[str, KeptImage]:
        """See `ImageFiles`."""
        return {name: kept for name in names if (kept := self._kept.get(name)) is not None}

    async def keep(self, images: Mapping[str, KeptImage]) -> None:
        """See `ImageFiles`."""
        for name, image in images.items():
            self._kept.put(name, image, len(image[0]))

    def usage(self) -> CacheUsage:
        """See `ImageFiles`."""
        return self._kept.usage()

    def __repr__(self) -> str:
        return f"ImageMemory({self._kept!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentImage:
    """An encoded image of a call."""

    data: bytes
    field: str
    """What the request calls it, such as `images[3]`, for messages."""
    key: bytes
    """Stands for the image and for who has sent it."""


class PreparedImages:
    """Encoded images by id. Used on the event loop alone; `usage` from any thread."""

    def __init__(
        self,
        store: ImageMemory | ImageFiles | None = None,
        *,
        limits: ImageLimits | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Takes what keeps the images.

        Args:
            store: Keeps them; None: nothing is kept.
            limits: Sizes past which an image is refused.
            secret: The key of ids; None: one that is drawn now.
        """
        self._store = store or ImageMemory(max_mib=0, ttl_s=600.0)
        self._limits = limits or ImageLimits(max_bytes=_MIB, max_pixels=_MIB)
        self._secret = secret or secrets.token_bytes(SECRET_BYTES)

    async def find(self, image_ids: Sequence[str], field: str = "image_ids[{}]") -> list[SentImage]:
        """Finds images by their ids, which counts as their use; `field` is as in `name_images`.

        Raises:
            ImageNotFoundError: There is no such image, or none any longer.
        """
        images = await self._store.find([_own(image_id) for image_id in image_ids if len(image_id) == ID_LENGTH])
        found = []
        for index, image_id in enumerate(image_ids):
            name = field.format(index)
            if (kept := images.get(_own(image_id))) is None:
                raise ImageNotFoundError(
                    f"{name}: no image is kept by this id; ids expire {self._store.ttl_s:g} s after their last use, or "
                    "sooner where newer images need the room; send the image to PrepareImage again"
                )
            found.append(SentImage(data=kept[0], field=name, key=kept[1]))
        return found

    async def check(self, images: Sequence[SentImage]) -> None:
        """Checks that images can be kept, before anything is done for them.

        Raises:
            InvalidInputError: They are too many bytes together, or one is no image or too large.
        """
        await check_headers([one.data for one in images], [one.field for one in images], self._limits)
        if (num_bytes := sum(self._store.room(len(one.data)) for one in images)) > self._store.max_bytes:
            raise InvalidInputError(
                "images",
                f"has {num_bytes} bytes, this server keeps {self._store.max_bytes} (--max-prepared-mib); send the "
                "images with each call instead",
            )

    async def keep(self, images: Sequence[SentImage]) -> list[str]:
        """Keeps images that were checked, and returns their ids.

        Raises:
            OverloadedError: They cannot be kept now.
        """
        ids = [hmac.digest(self._secret, one.key, "sha256").hex()[:ID_LENGTH] for one in images]
        names = map(_own, ids)
        await self._store.keep({name: (one.data, one.key) for name, one in zip(names, images, strict=True)})
        return ids

    def usage(self) -> CacheUsage:
        """Returns how much is kept; called from any thread."""
        return self._store.usage()

    def __repr__(self) -> str:
        return f"PreparedImages({self._store!r})"


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
