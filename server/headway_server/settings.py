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

_PIXELS_THAT_PILLOW_DECODES: Final = 89_000_000
"""Past this Pillow warns of a decompression bomb itself."""

_DEFAULT_PORT: Final = 50051
DEFAULT_MAX_TEXT_KIB: Final = 256
"""A thousand times the length of a news item, and tokenized in a third of a second."""


def _own_port(value: object) -> object:
    """Tells a port from the address of a Kubernetes Service, whose links set HEADWAY_PORT where it is named headway."""
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
    """Largest request, in MiB; what is larger is refused before it is read."""
    max_text_kib: Annotated[int, Field(ge=1, le=1024 * 1024)] = DEFAULT_MAX_TEXT_KIB
    """Largest text or prompt, in KiB of UTF-8; what is larger is refused before it is tokenized. A call may hold 16
    times as much in all."""
    max_image_mib: Annotated[float, Field(gt=0, le=1024)] = 16
    """Largest encoded image, in MiB."""
    max_image_megapixels: Annotated[float, Field(gt=0, le=_PIXELS_THAT_PILLOW_DECODES / 1e6)] = 20
    """Most pixels of an image, in millions: of what its header announces and of what it is resized to. Decoding takes
    up to 16 bytes a pixel, and no more than these are decoded at a time."""
    max_calls: Annotated[int, Field(ge=1)] = 4096
    """Most calls that run at a time, whatever they ask for; what comes beyond them is refused before it is read."""
    drain_timeout: Annotated[float, Field(ge=0, le=3600)] = 30
    """Seconds that running calls have to finish after SIGTERM or Ctrl-C."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people or for programs."""
    engine: EngineSettings = EngineSettings()
    """Of generation and translation models."""
    batching: BatchingSettings = BatchingSettings()
    """Of classifiers."""
