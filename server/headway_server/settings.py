"""Settings of the server: flags win over the environment (`HEADWAY_*`), over a TOML file, over defaults.

A setting of a group is `HEADWAY_<GROUP>__<NAME>` in the environment, such as `HEADWAY_ENGINE__NUM_SLOTS`. The docstring
of the class and of each field is what `--help` shows. In the file it stands in the table of its group.
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
"""For more pixels Pillow itself warns of a decompression bomb."""

_DEFAULT_PORT: Final = 50051
_MAX_TEXT_REQUEST_BYTES: Final = 8 * 2**20
_SHARE_OF_REQUESTS: Final = 8
_FEWEST_CALLS: Final = 256
_MOST_CALLS: Final = 4096
_MOST_WORKERS: Final = 256
TEXTS_OF_A_CALL: Final = 16
"""How many texts of the largest size a call may hold, or as many bytes in more and smaller ones."""
DEFAULT_MAX_TEXT_KIB: Final = 256
"""A thousand times the length of a news item; tokenized in a third of a second."""


def _number_of_workers(value: object) -> object:
    """Checks a number of processes, or `auto`."""
    if value == "auto" or (str(value).isdecimal() and 1 <= int(str(value)) <= _MOST_WORKERS):
        return value if value == "auto" else int(str(value))
    raise ValueError(f"must be auto, or a number from 1 to {_MOST_WORKERS}")


def _check_url(url: str) -> str:
    """Checks that a collector is named by a URL."""
    if not re.fullmatch(r"https?://\S+", url):
        raise ValueError("must be a URL, such as http://127.0.0.1:4317")
    return url


def _check_origin(origin: str) -> str:
    """Checks that an origin is one that a browser may send."""
    if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
        raise ValueError("must be an origin without a path, such as https://app.example.org, or *")
    return origin


def _short_flags(**groups: type[BaseModel]) -> dict[str, str]:
    """Names the flags of groups without their group: `--num-slots` for `num_slots` of `engine`."""
    flags = ((group, name.replace("_", "-")) for group, model in groups.items() for name in model.model_fields)
    return {f"{group}.{flag}": flag for group, flag in flags}


class ModelSettings(EngineSettings, BatchingSettings):
    """Settings of one model, in place of the server's: the table `[models.NAME]` of the configuration file."""

    precision: Precision | None = None
    """Variant to run."""
    lanes: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Most runs of the model at a time; no more than the server's."""
    priority: Annotated[int, Field(ge=-19, le=0)] = 0
    """How the model shares cores with others that have work: below 0 its threads give way, and at -10 they get about a
    tenth of what those at 0 get. Heeded on Linux."""


class ConnectionSettings(BaseModel):
    """What a connection may hold, and for how long calls wait for their callers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_connections: Annotated[int, Field(ge=1)] | None = None
    """Connections that are open at a time; further ones are closed at once. Left out: as many as three quarters of the
    file descriptors that this process may open, 10,000 at most."""
    max_streams: Annotated[int, Field(ge=1)] = 1024
    """Calls that a connection may have open at a time; a client keeps further ones back until others have ended."""
    max_connection_age: Annotated[float, Field(ge=0)] = 3600
    """Seconds, give or take a tenth, after which a connection is told to go away, so that its caller is balanced anew;
    0: never."""
    max_connection_age_grace: Annotated[float, Field(ge=0)] = 600
    """Seconds that calls have to end on a connection that was told to go away for its age; then they are cut off."""
    max_connection_idle: Annotated[float, Field(ge=0)] = 1800
    """Seconds without a call after which a connection is closed; 0: never."""
    keepalive_time: Annotated[float, Field(ge=1)] = 60
    """Seconds of silence after which a peer is asked whether it is still there; 20 seconds later it is given up."""
    min_ping_interval: Annotated[float, Field(ge=0)] = 10
    """Seconds between two pings of a client; one that pings more often is told to calm down, and cut off."""
    request_timeout: Annotated[float, Field(ge=0)] = 20
    """Seconds that a caller has to send its request once it has begun a call; 0: any time."""
    max_arriving_mib: Annotated[int, Field(ge=1)] = 512
    """Memory in MiB reserved for requests still being received after 250 ms, each counted as the largest allowed. When
    full, the oldest are refused. It also limits the number of open request streams."""
    unread_timeout: Annotated[float, Field(ge=0)] = 60
    """Seconds that a message of a stream may wait for its reader before the call is ended; 0: any time."""

    def max_arriving(self, max_message_bytes: int) -> int:
        """Returns how many requests may be slow to arrive, of which each may hold so many bytes."""
        return max(1, self.max_arriving_mib * 2**20 // max_message_bytes)


class ServerSettings(BaseSettings):
    """Serves the bundles of a store over gRPC.

    Other commands: `headway-server config` prints the settings and where each was taken from, and `headway-server keys`
    makes API keys.
    """

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
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        cli_shortcuts=_short_flags(
            engine=EngineSettings, batching=BatchingSettings, connection=ConnectionSettings, versions=VersionSettings
        ),
        cli_show_env_vars=True,
    )

    config: Path | None = None
    """TOML file of settings; flags and the environment win over it."""
    store: Path
    """Folder that holds the bundles, `<store>/<model>/<version>/`."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of IPv4, :: for all."""
    port: Annotated[int, Field(ge=0, le=65535)] = _DEFAULT_PORT
    """Port to listen on; 0 takes a free one, which the ready line names."""
    workers: Annotated[Literal["auto"] | int, BeforeValidator(_number_of_workers)] = 1
    """Processes that answer at the port, each with cores of its own and models of its own; for many small calls on many
    cores (docs/scaling.md). `auto`: as many as suit the models and the cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run; auto takes CUDA where there is a device."""
    precision: Precision | None = None
    """Variant to run; left out, the fastest that suits the device."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Cores that all models together keep busy; left out, those that this process may use."""
    lanes: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Most runs of a model at a time, a core each; left out, as many as there are threads. With more than one, weights
    are held twice. On CUDA there is one."""
    map_weights: bool = True
    """Read weights that lie beside a graph from their file, mapped, where ONNX Runtime does not lay them out anew; on
    the CPU. Files of a loaded version must not be overwritten then, only replaced. Off, they are copied."""
    tls_cert_file: Path | None = None
    """PEM file of the server's certificate and those between it and its authority. With it every connection is
    encrypted. It is read again when it changes, as the other files of certificates are."""
    tls_key_file: Path | None = None
    """PEM file of the certificate's private key, without a password."""
    tls_client_ca_file: Path | None = None
    """PEM file of the authorities whose clients are let in; every client must show a certificate of theirs."""
    access_file: Path | None = None
    """TOML file of who may call: API keys and certificates, their scopes and budgets (`headway-server keys`). Left out,
    everyone may call, and only this machine may change the server."""
    health_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port that answers health checks alone and is not encrypted, for probes that know no certificates; 0 takes a free
    one, which the log names. Left out, health is answered with everything else, and there alone."""
    reflection: bool = True
    """Tells every caller which services and messages there are, as grpcurl asks."""
    max_message_mib: Annotated[int, Field(ge=1, le=1024)] = 20
    """Largest request, in MiB; what is larger is refused before it is read. gRPC copies a request on the event loop, 20
    MiB in some 30 ms. Requests of texts are held to 8 MiB, or to
    32 times `max_text_kib` if that is more."""
    max_text_kib: Annotated[int, Field(ge=1, le=1024 * 1024)] = DEFAULT_MAX_TEXT_KIB
    """Largest text or prompt, in KiB of UTF-8; what is larger is refused before it is tokenized. A call may hold 16
    times as much in all."""
    max_image_mib: Annotated[float, Field(gt=0, le=1024)] = 16
    """Largest encoded image, in MiB."""
    max_image_megapixels: Annotated[float, Field(gt=0, le=_PIXELS_THAT_PILLOW_DECODES / 1e6)] = 20
    """Most pixels of an image, in millions, by its header and after it is resized. Decoding takes up to 16 bytes a
    pixel, and at most this many pixels are decoded at a time."""
    max_audio_seconds: Annotated[float, Field(gt=0, le=86400)] = 600
    """Longest audio, in seconds; what is longer is refused while it is decoded. Decoded audio takes 64 KB a second, and
    its spectrogram half as much or more."""
    max_prepared_mib: Annotated[int, Field(ge=0, le=1024 * 1024)] = 64
    """MiB of images that are kept for callers who send them once and name them by id (PrepareImage); 0: none."""
    max_image_outputs_mib: Annotated[int, Field(ge=0, le=1024 * 1024)] = 8
    """MiB of vectors and probabilities that each model of images keeps, so that an image that comes again is not
    computed again; 0: none."""
    max_image_embeddings_mib: Annotated[int, Field(ge=0, le=1024 * 1024)] = 64
    """MiB of embeddings of images that each segmentation model keeps; 0: none. Its streams may hold as many besides, or
    64 MiB if that is more."""
    image_ttl: Annotated[float, Field(gt=0, le=86400)] = 600
    """Seconds without use after which a prepared image, or what a model made of an image, is forgotten."""
    max_calls: Annotated[int, Field(ge=1)] | None = None
    """Calls that run at a time, whatever they ask for; further ones are refused before they are parsed. Health checks
    are none of them. Left out, as many as half of the memory there is holds requests of texts, 256 at least and 4096 at
    most."""
    max_inflight_mib: Annotated[int, Field(ge=1)] | None = None
    """MiB that the requests of running calls may have together; further calls are refused when they have been received
    and before they are parsed. Left out, an eighth of the memory there is once the models are loaded, or twice the
    largest request if that is more."""
    max_attention_mib: Annotated[int, Field(ge=1, le=1024)] = 48
    """Most MiB of attention weights that a call of the inspection service may have computed, and all such calls to a
    model together: layers x heads x tokens x tokens x 4 bytes. The Python client reads answers of up to 64 MiB."""
    open_inference: bool = True
    """Speak the Open Inference Protocol too; counting the statistics that it tells takes 5 µs a call."""
    drain_timeout: Annotated[float, Field(ge=0, le=3600)] = 30
    """Seconds that running calls have to finish after SIGTERM or Ctrl-C."""
    stall_timeout: Annotated[float, Field(ge=0, le=86400)] = 60
    """Seconds that a step or a batch may take before the server says that it is unhealthy; 0: any time."""
    stall_exit: bool = False
    """End the process, with exit code 70, when a step, a batch or the event loop has made no progress for
    `stall_timeout`; for servers that a supervisor starts again."""
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
    trace_endpoint: Annotated[str, AfterValidator(_check_url)] | None = None
    """Where traces are sent by OTLP over gRPC, such as http://collector:4317. Left out, there are none. Needs the extra
    `tracing`."""
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the calls to trace, where the caller's own trace does not say."""
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port for HTTP, at the same address: the page, OpenAI's API, every method by Connect and gRPC-Web, the Open
    Inference Protocol, /livez, /readyz and /metrics; 0 takes a free one, which the ready line names. Left out, there is
    none. Needs the extra `http`."""
    http_metrics: bool = True
    """Answer /metrics at the HTTP port too; with an access file, to callers who have a key."""
    http_cors_origins: tuple[Annotated[str, AfterValidator(_check_origin)], ...] = ()
    """Origins whose pages may call the HTTP port, such as https://app.example.org, or * for all. Left out, pages of no
    other origin may."""
    engine: EngineSettings = EngineSettings()
    """Models that decode: what they write are texts, translations, captions, transcripts or speech."""
    batching: BatchingSettings = BatchingSettings()
    """All others: classifiers, embeddings, segmentation, drawing."""
    versions: VersionSettings = VersionSettings()
    """New versions in the store, and which of them are served."""
    connection: ConnectionSettings = ConnectionSettings()
    """Connections and the calls on them."""
    models: CliSuppress[Mapping[str, ModelSettings]] = Field(default_factory=dict)
    """Settings of models by their names, from the configuration file."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Puts the configuration file behind the environment; see `BaseSettings`."""
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
        """Returns the settings of a model: its own where it has any, else the server's."""
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
        return self.model_copy(update=groups | {name: given[name] for name in ("precision", "lanes") if name in given})

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
    def audio_limits(self) -> AudioLimits:
        """Sizes past which audio is refused."""
        return AudioLimits(
            max_bytes=self.max_message_bytes,
            max_seconds=self.max_audio_seconds,
        )

    @property
    def image_limits(self) -> ImageLimits:
        """Sizes past which an image is refused."""
        return ImageLimits(max_bytes=int(self.max_image_mib * 2**20), max_pixels=int(self.max_image_megapixels * 1e6))
