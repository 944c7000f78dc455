"""Settings of the server: flags of the command line win over the environment (`HEADWAY_*`), which wins over defaults.

A setting of a group is `HEADWAY_<GROUP>__<NAME>` in the environment, such as `HEADWAY_ENGINE__NUM_SLOTS`. The docstring
of the class and of each field is what `--help` shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import Precision, VersionSettings
from headway_server.decoding.settings import EngineSettings
from headway_server.preprocessing import ImageLimits

_PIXELS_THAT_PILLOW_DECODES: Final = 89_000_000
"""For more pixels Pillow itself warns of a decompression bomb."""

_DEFAULT_PORT: Final = 50051
_MAX_TEXT_REQUEST_BYTES: Final = 8 * 2**20
_SHARE_OF_REQUESTS: Final = 8
_FEWEST_CALLS: Final = 256
_MOST_CALLS: Final = 4096
TEXTS_OF_A_CALL: Final = 16
"""How many texts of the largest size a call may hold, or as many bytes in more and smaller ones."""
DEFAULT_MAX_TEXT_KIB: Final = 256
"""A thousand times the length of a news item; tokenized in a third of a second."""


def _own_port(value: object) -> object:
    """Ignores the address that Kubernetes puts into HEADWAY_PORT where there is a Service named headway."""
    return _DEFAULT_PORT if isinstance(value, str) and value.startswith("tcp://") else value


def _short_flags(**groups: type[BaseModel]) -> dict[str, str]:
    """Names the flags of groups without their group too: `--num-slots` beside `--engine.num-slots`."""
    flags = ((group, name.replace("_", "-")) for group, model in groups.items() for name in model.model_fields)
    return {f"{group}.{flag}": flag for group, flag in flags}


class ServerSettings(BaseSettings):
    """Serves the bundles of a store over gRPC."""

    model_config = SettingsConfigDict(
        env_prefix="HEADWAY_",
        env_nested_delimiter="__",
        env_ignore_empty=True,  # how compose files and manifests say that a variable is not set
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_prog_name="headway-server",
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_shortcuts=_short_flags(engine=EngineSettings, batching=BatchingSettings, versions=VersionSettings),
        cli_show_env_vars=True,
    )

    store: Path
    """Folder that holds the bundles, `<store>/<model>/<version>/`."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of IPv4, :: for all."""
    port: Annotated[int, BeforeValidator(_own_port), Field(ge=0, le=65535)] = _DEFAULT_PORT
    """Port to listen on; 0 takes a free one, which the ready line names."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run; auto takes CUDA where there is a device."""
    precision: Precision | None = None
    """Variant to run; left out, the fastest that suits the device."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Cores that all models together keep busy; left out, those that this process may use."""
    lanes: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Most runs of a model at a time, a core each; left out, as many as there are threads. With more than one, weights
    are held twice. On CUDA there is one."""
    max_message_mib: Annotated[int, Field(ge=1, le=1024)] = 64
    """Largest request, in MiB; what is larger is refused before it is read. Requests of texts are held to 8 MiB, or to
    32 times `max_text_kib` if that is more."""
    max_text_kib: Annotated[int, Field(ge=1, le=1024 * 1024)] = DEFAULT_MAX_TEXT_KIB
    """Largest text or prompt, in KiB of UTF-8; what is larger is refused before it is tokenized. A call may hold 16
    times as much in all."""
    max_image_mib: Annotated[float, Field(gt=0, le=1024)] = 16
    """Largest encoded image, in MiB."""
    max_image_megapixels: Annotated[float, Field(gt=0, le=_PIXELS_THAT_PILLOW_DECODES / 1e6)] = 20
    """Most pixels of an image, in millions, by its header and after it is resized. Decoding takes up to 16 bytes a
    pixel, and at most this many pixels are decoded at a time."""
    max_calls: Annotated[int, Field(ge=1)] | None = None
    """Calls that run at a time, whatever they ask for; further ones are refused before they are read. Left out, as many
    as half of the memory there is holds requests of texts, 256 at least and 4096 at most."""
    max_inflight_mib: Annotated[int, Field(ge=1)] | None = None
    """MiB that the requests of running calls may have together; further calls are refused when they have been received
    and before they are parsed. Left out, an eighth of the memory there is once the models are loaded, or twice the
    largest request if that is more."""
    open_inference: bool = True
    """Speak the Open Inference Protocol too; counting the statistics that it tells takes 5 µs a call."""
    drain_timeout: Annotated[float, Field(ge=0, le=3600)] = 30
    """Seconds that running calls have to finish after SIGTERM or Ctrl-C."""
    stall_timeout: Annotated[float, Field(ge=0, le=86400)] = 60
    """Seconds that a step or a batch may take before the server says that it is unhealthy; 0: any time."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people or for programs."""
    log_texts: bool = False
    """Log also what may quote the texts of callers: the messages of errors."""
    access_log: bool = False
    """Log one line a call, when it has ended."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of the metrics in Prometheus' format; 0 takes a free one, which the log names. Left out, there are none."""
    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address that the metrics are read at."""
    trace_endpoint: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    """Where traces are sent by OTLP over gRPC, such as http://collector:4317. Left out, there are none. Needs the extra
    `tracing`."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the calls to trace, where the caller's own trace does not say."""
    engine: EngineSettings = EngineSettings()
    """Generation and translation models."""
    batching: BatchingSettings = BatchingSettings()
    """Classifiers and embeddings."""
    versions: VersionSettings = VersionSettings()
    """New versions in the store, and which of them are served."""

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

    def call_limits(self, available: int | None) -> tuple[int, int]:
        """Returns how many calls may run at a time, and how many bytes their requests may have together.

        Args:
            available: Memory there is, in bytes; None where it is not known.
        """
        held = (available or 0) // 2 // self.max_text_request_bytes
        max_calls = self.max_calls or min(max(held, _FEWEST_CALLS), _MOST_CALLS)
        if self.max_inflight_mib is not None:
            return max_calls, self.max_inflight_mib * 2**20
        return max_calls, max(2 * self.max_message_bytes, (available or 0) // _SHARE_OF_REQUESTS)

    @property
    def image_limits(self) -> ImageLimits:
        """Sizes past which an image is refused."""
        return ImageLimits(max_bytes=int(self.max_image_mib * 2**20), max_pixels=int(self.max_image_megapixels * 1e6))
