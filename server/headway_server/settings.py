"""Settings of the server: flags of the command line win over the environment (`HEADWAY_*`), which wins over defaults.

A setting of a group is `HEADWAY_<GROUP>__<NAME>` in the environment, such as `HEADWAY_ENGINE__NUM_SLOTS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import Precision
from headway_server.decoding.settings import EngineSettings
from headway_server.preprocessing import ImageLimits

_PIXELS_THAT_PILLOW_DECODES: Final = 89_000_000
"""Past this Pillow warns of a decompression bomb itself."""

_DEFAULT_PORT: Final = 50051
_MAX_TEXT_REQUEST_BYTES: Final = 8 * 2**20
_SHARE_OF_REQUESTS: Final = 8
TEXTS_OF_A_CALL: Final = 16
"""How many texts of the largest size a call may hold, or as many bytes in more and smaller ones."""
DEFAULT_MAX_TEXT_KIB: Final = 256
"""A thousand times the length of a news item, and tokenized in a third of a second."""


def _own_port(value: object) -> object:
    """Ignores the address that Kubernetes puts into HEADWAY_PORT where there is a Service named headway."""
    return _DEFAULT_PORT if isinstance(value, str) and value.startswith("tcp://") else value


class ServerSettings(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(
        env_prefix="HEADWAY_",
        env_nested_delimiter="__",
        env_ignore_empty=True,  # how compose files and manifests say that a variable is not set
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    store: Path
    """Folder that holds the bundles, `<store>/<model>/<version>/`."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of IPv4, :: for all."""
    port: Annotated[int, BeforeValidator(_own_port), Field(ge=0, le=65535)] = _DEFAULT_PORT
    """Port to listen on; 0 takes a free one, which the ready line names."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run; auto takes CUDA where it is."""
    precision: Precision | None = None
    """Variant to run; left out, the fastest that suits the device."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Cores that the models keep busy, together; left out, those this process may use."""
    lanes: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Runs of a model at a time, a core each where several have work; left out, as many as there are threads. With more
    than one, weights are held twice. On CUDA there is one."""
    max_message_mib: Annotated[int, Field(ge=1, le=1024)] = 64
    """Largest request, in MiB; what is larger is refused before it is read. Requests of texts are held to 8 MiB, or to
    32 times `max_text_kib` if that is more."""
    max_text_kib: Annotated[int, Field(ge=1, le=1024 * 1024)] = DEFAULT_MAX_TEXT_KIB
    """Largest text or prompt, in KiB of UTF-8; what is larger is refused before it is tokenized. A call may hold 16
    times as much in all."""
    max_image_mib: Annotated[float, Field(gt=0, le=1024)] = 16
    """Largest encoded image, in MiB."""
    max_image_megapixels: Annotated[float, Field(gt=0, le=_PIXELS_THAT_PILLOW_DECODES / 1e6)] = 20
    """Most pixels of an image, in millions: of what its header announces and of what it is resized to. Decoding takes
    up to 16 bytes a pixel, and no more than these are decoded at a time."""
    max_calls: Annotated[int, Field(ge=1)] = 4096
    """Calls that run at a time, whatever they ask for; further ones are refused before they are read."""
    max_inflight_mib: Annotated[int, Field(ge=1)] | None = None
    """MiB that the requests of running calls have together, as received; left out, an eighth of the memory there is
    when the server starts to listen, and twice the largest request at least. Further calls are refused before they are
    parsed."""
    drain_timeout: Annotated[float, Field(ge=0, le=3600)] = 30
    """Seconds that running calls have to finish after SIGTERM or Ctrl-C."""
    stall_timeout: Annotated[float, Field(ge=0, le=86400)] = 60
    """Seconds that a step or a batch may take before the server says that it is unhealthy; 0: any time."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people or for programs."""
    engine: EngineSettings = EngineSettings()
    """Of generation and translation models."""
    batching: BatchingSettings = BatchingSettings()
    """Of classifiers."""

    @property
    def max_text_bytes(self) -> int:
        """Largest text, in bytes of UTF-8."""
        return self.max_text_kib * 2**10

    @property
    def max_message_bytes(self) -> int:
        """Largest request, in bytes."""
        return self.max_message_mib * 2**20

    @property
    def max_text_request_bytes(self) -> int:
        """Largest request of a service that reads texts, in bytes."""
        return min(self.max_message_bytes, max(_MAX_TEXT_REQUEST_BYTES, 2 * TEXTS_OF_A_CALL * self.max_text_bytes))

    def max_inflight_bytes(self, available: int | None) -> int:
        """Returns the bytes that the requests of running calls may have together.

        Args:
            available: Memory there is, in bytes; None where nothing tells.
        """
        if self.max_inflight_mib is not None:
            return self.max_inflight_mib * 2**20
        return max(2 * self.max_message_bytes, (available or 0) // _SHARE_OF_REQUESTS)

    @property
    def image_limits(self) -> ImageLimits:
        """Sizes past which an image is refused."""
        return ImageLimits(max_bytes=int(self.max_image_mib * 2**20), max_pixels=int(self.max_image_megapixels * 1e6))
