"""Prepared images: sent once, then referred to by id.

An id is a keyed hash of the image and its sender. The key is random at each start of the server, so an id reveals
nothing of the image and cannot be forged. It is useless to a caller with another API key. The processes of a server
share the key, and keep images in files (`image_files.py`).
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
from headway_server.serving.image_files import NOUN, CachedImage, ImageFiles
from headway_server.serving.lru_cache import LruCache

ID_LENGTH: Final = 32
"""Hexadecimal digits of an id: 128 bits."""
SECRET_BYTES: Final = 32
_MIB: Final = 2**20
_FEW_BYTES: Final = 256 * 1024
"""Maximum bytes of an image hashed on the event loop, at most 0.2 ms."""


class ImageMemory:
    """A cache of images in this process. For the event loop's thread; `usage` is thread-safe."""

    def __init__(self, *, max_mib: int, ttl_s: float) -> None:
        """Starts empty.

        Args:
            max_mib: Capacity in MiB; 0: no cache.
            ttl_s: Time to live in seconds, since the last use.
        """
        self.max_bytes = max_mib * _MIB
        self.ttl_s = ttl_s
        self._cache: LruCache[str, CachedImage] = LruCache(NOUN, max_bytes=self.max_bytes, ttl_s=ttl_s)

    def room(self, num_bytes: int) -> int:
        """See `ImageFiles`."""
        return num_bytes

    async def find(self, names: Sequence[str]) -> dict[str, CachedImage]:
        """See `ImageFiles`."""
        return {name: cached for name in names if (cached := self._cache.get(name)) is not None}

    async def put(self, images: Mapping[str, CachedImage]) -> None:
        """See `ImageFiles`."""
        for name, image in images.items():
            self._cache.put(name, image, len(image[0]))

    def usage(self) -> CacheUsage:
        """See `ImageFiles`."""
        return self._cache.usage()

    def __repr__(self) -> str:
        return f"ImageMemory({self._cache!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentImage:
    """An encoded image of a call."""

    data: bytes
    field: str
    """Field of the request, such as `images[3]`, for error messages."""
    key: bytes
    """Key of the image and its sender."""


class PreparedImages:
    """Encoded images by id. For the event loop's thread; `usage` is thread-safe."""

    def __init__(
        self,
        store: ImageMemory | ImageFiles | None = None,
        *,
        limits: ImageLimits | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Starts with a cache of images.

        Args:
            store: The cache; None: no cache.
            limits: Limits of images.
            secret: Key of ids; None: a random one.
        """
        self._store = store or ImageMemory(max_mib=0, ttl_s=600.0)
        self._limits = limits or ImageLimits(max_bytes=_MIB, max_pixels=_MIB)
        self._secret = secret or secrets.token_bytes(SECRET_BYTES)

    async def find(self, image_ids: Sequence[str], field: str = "image_ids[{}]") -> list[SentImage]:
        """Finds images by id, which counts as use; `field` is as in `name_images`.

        Raises:
            ImageNotFoundError: An id is unknown or expired.
        """
        images = await self._store.find([_own(image_id) for image_id in image_ids if len(image_id) == ID_LENGTH])
        found = []
        for index, image_id in enumerate(image_ids):
            name = field.format(index)
            if (cached := images.get(_own(image_id))) is None:
                raise ImageNotFoundError(
                    f"{name}: no image has this id; ids expire {self._store.ttl_s:g} s after their last use, or "
                    "sooner where newer images need the room; send the image to PrepareImage again"
                )
            found.append(SentImage(data=cached[0], field=name, key=cached[1]))
        return found

    async def check(self, images: Sequence[SentImage]) -> None:
        """Checks that images can be cached, before any other work.

        Raises:
            InvalidInputError: They have too many bytes in all, or one is not an image or too large.
        """
        await check_headers([one.data for one in images], [one.field for one in images], self._limits)
        if (num_bytes := sum(self._store.room(len(one.data)) for one in images)) > self._store.max_bytes:
            raise InvalidInputError(
                "images",
                f"has {num_bytes} bytes, this server keeps {self._store.max_bytes} (--max-prepared-mib); send the "
                "images with each call instead",
            )

    async def put(self, images: Sequence[SentImage]) -> list[str]:
        """Caches checked images, and returns their ids.

        Raises:
            OverloadedError: They cannot be cached now.
        """
        ids = [hmac.digest(self._secret, one.key, "sha256").hex()[:ID_LENGTH] for one in images]
        names = map(_own, ids)
        await self._store.put({name: (one.data, one.key) for name, one in zip(names, images, strict=True)})
        return ids

    def usage(self) -> CacheUsage:
        """Returns the usage of the cache; thread-safe."""
        return self._store.usage()

    def __repr__(self) -> str:
        return f"PreparedImages({self._store!r})"


async def name_images(images: Sequence[bytes], field: str = "images[{}]") -> list[SentImage]:
    """Hashes the images of a call, large ones off the event loop: it takes 0.6 ms a MiB.

    Args:
        images: The images.
        field: Field of the request, with `{}` for the index.
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
    """Returns the name of the current call's API key or certificate; empty without one."""
    call = current_call()
    return "" if call is None or call.rights is None else call.rights.name
