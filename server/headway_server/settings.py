"""Settings of the server: flags win over the environment (`HEADWAY_*`), over a TOML file, over defaults.

A setting of a group is `HEADWAY_<GROUP>__<NAME>` in the environment, such as `HEADWAY_ENGINE__NUM_SLOTS`. In the file
it is a key of the table of its group. `--help` shows the docstrings of the class and its fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSuppress,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import Precision, VersionSettings
from headway_server.configuration import ConfigFile, own_variables
from headway_server.decoding.settings import EngineSettings
from headway_server.preprocessing import ImageLimits
from headway_server.preprocessing.audio import AudioLimits

_PIXELS_THAT_PILLOW_DECODES: Final = 89_000_000
"""Pillow's own limit, past which it warns of a decompression bomb."""

_DEFAULT_PORT: Final = 50051
_MAX_TEXT_REQUEST_BYTES: Final = 8 * 2**20
_SHARE_OF_REQUESTS: Final = 8
_FEWEST_CALLS: Final = 256
_MOST_CALLS: Final = 4096
_MOST_WORKERS: Final = 256
TEXTS_OF_A_CALL: Final = 16
"""Limit of a call's texts, as a multiple of the largest text."""
DEFAULT_MAX_TEXT_KIB: Final = 256
"""A thousand news items; tokenized in a third of a second."""


def _number_of_workers(value: object) -> object:
    """Checks a number of processes, or `auto`."""
    if value == "auto" or (str(value).isdecimal() and 1 <= int(str(value)) <= _MOST_WORKERS):
        return value if value == "auto" else int(str(value))
    raise ValueError(f"must be auto, or a number from 1 to {_MOST_WORKERS}")


def _check_url(url: str) -> str:
    """Checks the URL of a collector."""
    if not re.fullmatch(r"https?://\S+", url):
        raise ValueError("must be a URL, such as http://127.0.0.1:4317")
    return url


def _check_origin(origin: str) -> str:
    """Checks the form of an origin: scheme and host, without a path."""
    if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
        raise ValueError("must be an origin without a path, such as https://app.example.org, or *")
    return origin


def _short_flags(**groups: type[BaseModel]) -> dict[str, str]:
    """Names the flags of groups without their group: `--num-slots` for `num_slots` of `engine`."""
    flags = ((group, name.replace("_", "-")) for group, model in groups.items() for name in model.model_fields)
    return {f"{group}.{flag}": flag for group, flag in flags}


class ModelSettings(EngineSettings, BatchingSettings):
    """Settings of one model, which override the server's: the table `[models.NAME]` of the configuration file."""

    precision: Precision | None = None
    """Variant to run."""
    truncate_texts: bool = False
    """Shorten texts and prompts that are too long, as with `truncate` of a request."""
    lanes: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Concurrent runs of the model; at most the server's."""
    priority: Annotated[int, Field(ge=-19, le=0)] = 0
    """Scheduling priority of the model's threads beside other models. Below 0 they yield: at -10 they get about a tenth
    of the processor time of threads at 0. Linux only."""


class ConnectionSettings(BaseModel):
    """Limits of connections, and timeouts of slow callers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_connections: Annotated[int, Field(ge=1)] | None = None
    """Limit of open connections; further ones are closed at once. Default: three quarters of the process's file
    descriptors, at most 10,000."""
    max_streams: Annotated[int, Field(ge=1)] = 1024
    """Concurrent calls of a connection; clients queue further ones."""
    max_connection_age: Annotated[float, Field(ge=0)] = 3600
    """Lifetime of a connection in seconds, plus or minus a tenth. Then a GOAWAY makes the client reconnect, which
    rebalances it; 0: no limit."""
    max_connection_age_grace: Annotated[float, Field(ge=0)] = 600
    """Seconds for calls to finish after a connection's lifetime; then they are cancelled."""
    max_connection_idle: Annotated[float, Field(ge=0)] = 1800
    """Idle timeout of a connection without calls, in seconds; 0: no limit."""
    keepalive_time: Annotated[float, Field(ge=1)] = 60
    """Seconds without traffic before a keepalive ping; a peer that does not answer within 20 seconds is
    disconnected."""
    min_ping_interval: Annotated[float, Field(ge=0)] = 10
    """Shortest interval of a client's pings, in seconds; a client that pings more often is disconnected."""
    request_timeout: Annotated[float, Field(ge=0)] = 20
    """Timeout for receiving a request, in seconds from its headers; 0: no limit."""
    max_arriving_mib: Annotated[int, Field(ge=1)] = 512
    """Memory in MiB reserved for requests still being received after 250 ms, each counted as the largest allowed. When
    full, the oldest are refused. It also limits the number of open request streams."""
    unread_timeout: Annotated[float, Field(ge=0)] = 60
    """Timeout for sending a message of a stream to a client that does not read, in seconds; 0: no limit."""

    def max_arriving(self, max_message_bytes: int) -> int:
        """Returns the limit of requests still being received, for requests of `max_message_bytes`."""
        return max(1, self.max_arriving_mib * 2**20 // max_message_bytes)


class ServerSettings(BaseSettings):
    """Serves the bundles of a store over gRPC.

    Other commands: `headway-server config` prints the settings and their sources; `headway-server keys` makes API keys.
    """

    model_config = SettingsConfigDict(
        env_prefix="HEADWAY_",
        env_nested_delimiter="__",
        env_ignore_empty=True,  # compose files and manifests leave a variable unset so
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_prog_name="headway-server",
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        cli_shortcuts=_short_flags(
            engine=EngineSettings, batching=BatchingSettings, connection=ConnectionSettings, versions=VersionSettings
        ),
        cli_show_env_vars=True,
    )

    config: Path | None = None
    """TOML file of settings; flags and the environment override it."""
    store: Path
    """Folder of the bundles, `<store>/<model>/<version>/`."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of IPv4, :: for all."""
    port: Annotated[int, Field(ge=0, le=65535)] = _DEFAULT_PORT
    """Port to listen on; 0: a free one, shown by the ready line."""
    workers: Annotated[Literal["auto"] | int, BeforeValidator(_number_of_workers)] = 1
    """Processes behind the port, each with its own cores and models; for many small calls on many cores
    (docs/scaling.md). `auto`: chosen by the models and the cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models; `auto`: CUDA if there is one."""
    precision: Precision | None = None
    """Variant to run. Default: the fastest for the device."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Cores for all models together. Default: the cores available to the process."""
    lanes: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Concurrent runs of a model, one core each. Default: the number of threads. More than one doubles the memory of
    weights. CUDA has one."""
    map_weights: bool = True
    """Memory-map weight files beside a graph, except for weights that ONNX Runtime repacks; CPU only. Files of a loaded
    version may be replaced but not overwritten. Off: weights are copied."""
    tls_cert_file: Path | None = None
    """PEM file of the server's certificate chain; turns on TLS for every connection. This and the other certificate
    files are reloaded when they change."""
    tls_key_file: Path | None = None
    """PEM file of the certificate's private key, without a password."""
    tls_client_ca_file: Path | None = None
    """PEM file of the authorities of clients (mTLS); every client must present a certificate that they signed."""
    access_file: Path | None = None
    """TOML file of API keys and certificates with their scopes and budgets (`headway-server keys`). Default: anyone may
    call, and only this machine may change the server."""
    health_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Separate port for health checks without TLS, for probes without certificates; 0: a free one, shown in the log.
    Default: health checks at the gRPC port only."""
    reflection: bool = True
    """Server reflection: lists services and messages, as for grpcurl."""
    max_message_mib: Annotated[int, Field(ge=1, le=1024)] = 20
    """Largest request, in MiB; larger ones are refused unread. gRPC copies a request on the event loop: 20 MiB take
    about 30 ms. Requests of texts have a limit of 8 MiB, or 32 times `max_text_kib` if that is more."""
    max_text_kib: Annotated[int, Field(ge=1, le=1024 * 1024)] = DEFAULT_MAX_TEXT_KIB
    """Largest text or prompt, in KiB of UTF-8; larger ones are refused before tokenization. The limit of a whole call
    is 16 times as much."""
    truncate_texts: bool = False
    """Shorten texts and prompts that are too long, as with `truncate` of a request, for clients that send whole
    documents. Answers say so: `truncated` in gRPC, the header `x-truncated-texts` over HTTP."""
    max_image_mib: Annotated[float, Field(gt=0, le=1024)] = 16
    """Largest encoded image, in MiB."""
    max_image_megapixels: Annotated[float, Field(gt=0, le=_PIXELS_THAT_PILLOW_DECODES / 1e6)] = 20
    """Largest image in millions of pixels, both as declared in its header and after resizing. Decoding takes up to 16
    bytes a pixel, and decodes at most this many pixels at a time."""
    max_audio_seconds: Annotated[float, Field(gt=0, le=86400)] = 600
    """Longest audio, in seconds; longer audio is refused while it is decoded. Decoded audio takes 64 KB a second, and
    its spectrogram half as much or more."""
    max_prepared_mib: Annotated[int, Field(ge=0, le=1024 * 1024)] = 64
    """Cache of prepared images (PrepareImage), in MiB; 0: none."""
    max_image_outputs_mib: Annotated[int, Field(ge=0, le=1024 * 1024)] = 8
    """Cache of each image model's embeddings and probabilities, in MiB; 0: none."""
    max_image_embeddings_mib: Annotated[int, Field(ge=0, le=1024 * 1024)] = 64
    """Cache of each segmentation model's image embeddings, and of the features of a detector that reads labels and
    image together, in MiB; 0: none. Open streams of a segmentation model may use as much again, or 64 MiB if that is
    more."""
    image_ttl: Annotated[float, Field(gt=0, le=86400)] = 600
    """Time to live of prepared images and of cached outputs of images, in seconds since their last use."""
    max_calls: Annotated[int, Field(ge=1)] | None = None
    """Limit of concurrent calls, apart from health checks; further ones are refused before they are parsed. Default:
    requests of texts that fit into half of the memory, from 256 to 4096."""
    max_inflight_mib: Annotated[int, Field(ge=1)] | None = None
    """Memory for the requests of running calls, in MiB; further calls are refused before they are parsed. Default: an
    eighth of the memory available once the models are loaded, or twice the largest request if that is more."""
    max_attention_mib: Annotated[int, Field(ge=1, le=1024)] = 48
    """Memory for attention weights in MiB, of an inspection call and of all such calls of a model: layers x heads x
    tokens x tokens x 4 bytes. The Python client reads answers of up to 64 MiB."""
    open_inference: bool = True
    """Serve the Open Inference Protocol; its statistics cost 5 µs a call."""
    drain_timeout: Annotated[float, Field(ge=0, le=3600)] = 30
    """Seconds for running calls to finish after SIGTERM or Ctrl-C."""
    stall_timeout: Annotated[float, Field(ge=0, le=86400)] = 60
    """Seconds without progress of a step or a batch before health checks fail; 0: no limit."""
    stall_exit: bool = False
    """Exit with code 70 when a step, a batch or the event loop stalls for `stall_timeout`; for use with a supervisor
    that restarts the server."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of the log."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log: text for people, or JSON lines."""
    log_texts: bool = False
    """Log the messages of errors, which may quote callers' texts."""
    access_log: bool = False
    """Log a line for every finished call."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of the metrics, in Prometheus' format; 0: a free one, shown in the log. Default: none."""
    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address of the metrics."""
    trace_endpoint: Annotated[str, AfterValidator(_check_url)] | None = None
    """Collector of traces by OTLP over gRPC, such as http://collector:4317. Default: no tracing. Needs the extra
    `tracing`."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of calls to trace, unless the caller's trace decides."""
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port for HTTP, at the same address: the page, OpenAI's API, every method by Connect, the Open
    Inference Protocol, /livez, /readyz and /metrics; 0: a free one, shown by the ready line. Default: no HTTP port.
    Needs the extra `http`."""
    http_metrics: bool = True
    """Serve /metrics at the HTTP port too; with an access file, a key is required."""
    http_cors_origins: tuple[Annotated[str, AfterValidator(_check_origin)], ...] = ()
    """CORS origins allowed at the HTTP port, such as https://app.example.org, or * for all. Default: the same origin
    only."""
    engine: EngineSettings = EngineSettings()
    """Autoregressive models: text generation, translation, captioning, transcription and speech synthesis."""
    batching: BatchingSettings = BatchingSettings()
    """All other models: classification, embeddings, segmentation and image generation."""
    versions: VersionSettings = VersionSettings()
    """Versions in the store, and which of them are served."""
    connection: ConnectionSettings = ConnectionSettings()
    """Connections and the calls on them."""
    models: CliSuppress[Mapping[str, ModelSettings]] = Field(default_factory=dict)
    """Settings by model name, from the configuration file."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Adds the configuration file after the environment; see `BaseSettings`."""
        assert isinstance(env_settings, EnvSettingsSource)
        return init_settings, own_variables(env_settings), ConfigFile(settings_cls)

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together; give both, or neither")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file needs tls_cert_file and tls_key_file; give them too")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        ports = [port for port in (self.port, self.health_port, self.metrics_port, self.http_port) if port]
        if len(set(ports)) < len(ports):
            raise ValueError(
                "port, health_port, metrics_port and http_port are "
                + ", ".join(map(str, ports))
                + "; give each its own"
            )
        return self

    def for_model(self, name: str) -> ServerSettings:
        """Returns a model's own settings, or the server's without any."""
        own = self.models.get(name)
        if own is None:
            return self
        given = {field: getattr(own, field) for field in own.model_fields_set}
        groups = {
            group: getattr(self, group).model_copy(
                update={field: given.pop(field) for field in kind.model_fields if field in given}
            )
            for group, kind in (("engine", EngineSettings), ("batching", BatchingSettings))
        }
        shared = {field: value for field, value in given.items() if field in ServerSettings.model_fields}
        return self.model_copy(update=groups | shared)

    @property
    def tls_files(self) -> tuple[Path, Path, Path | None] | None:
        """Files of the server's certificate, of its key and of the clients' authorities; None without encryption."""
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        return self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file

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
        """Returns the limits of concurrent calls and of the bytes of their requests.

        Args:
            available: Memory of the machine in bytes; None: unknown.
        """
        held = (available or 0) // 2 // self.max_text_request_bytes
        max_calls = self.max_calls or min(max(held, _FEWEST_CALLS), _MOST_CALLS)
        if self.max_inflight_mib is not None:
            return max_calls, self.max_inflight_mib * 2**20
        return max_calls, max(2 * self.max_message_bytes, (available or 0) // _SHARE_OF_REQUESTS)

    @property
    def audio_limits(self) -> AudioLimits:
        """Limits of audio."""
        return AudioLimits(
            max_bytes=self.max_message_bytes,
            max_seconds=self.max_audio_seconds,
        )

    @property
    def image_limits(self) -> ImageLimits:
        """Limits of images."""
        return ImageLimits(max_bytes=int(self.max_image_mib * 2**20), max_pixels=int(self.max_image_megapixels * 1e6))
