"""Connection of a client to its server: address, encryption, API key, channel options.

Options left out come from a profile, if the caller or HEADWAY_PROFILE names one, or else from the environment:
HEADWAY_SERVER, HEADWAY_TLS, HEADWAY_CA_FILE, HEADWAY_CLIENT_CERT_FILE, HEADWAY_CLIENT_KEY_FILE,
HEADWAY_TLS_SERVER_NAME, HEADWAY_API_KEY, HEADWAY_LOAD_BALANCING. A profile replaces all of these, so that no key of the
environment is sent to a profile's server. Profiles are tables of a TOML file (`profiles_file`).

If the program uses OpenTelemetry, the context of the current span is sent with each call.
"""

from __future__ import annotations

import ipaddress
import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, TypedDict, Unpack

import grpc
import grpc.aio

DEFAULT_SERVER: Final = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S: Final = 60.0
MAX_RESPONSE_BYTES: Final = 64 * 2**20
"""Largest response that a client accepts; 256 embeddings of 4,096 values are 4 MiB."""

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


class LoadBalancing(StrEnum):
    """Choice among several addresses."""

    PICK_FIRST = "pick-first"
    """All calls to the first address that answers."""
    ROUND_ROBIN = "round-robin"
    """Calls to the healthy addresses in turn."""


class ConnectionOptions(TypedDict, total=False):
    """Options of a connection. Those left out come from a profile or from the environment."""

    profile: Annotated[str | None, "Profile to take the other options from, in place of the environment."]
    tls: Annotated[bool | None, "Encrypt the connection. Default: if a certificate file is given."]
    ca_file: Annotated[
        str | os.PathLike[str] | None, "PEM file of the certificate authorities to trust. Default: gRPC's own list."
    ]
    client_cert_file: Annotated[
        str | os.PathLike[str] | None, "PEM file of the client's certificate chain, for servers that ask for one."
    ]
    client_key_file: Annotated[str | os.PathLike[str] | None, "PEM file of the client certificate's private key."]
    tls_server_name: Annotated[
        str | None, "Name that the server's certificate must have. Default: the host of its address."
    ]
    load_balancing: Annotated[
        LoadBalancing | None,
        "Choice among several addresses: pick-first or round-robin. Default: round-robin where SERVER lists several.",
    ]
    api_key: Annotated[str | None, "API key, sent with every call as `authorization: Bearer KEY`."]
    metadata: Annotated[Sequence[tuple[str, str]] | None, "Pairs sent with every call; keys are lower case."]
    credentials: Annotated[grpc.ChannelCredentials | None, "Channel credentials of gRPC, in place of the files."]


_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
"""Schemes of gRPC targets."""
_FILES: Final = ("ca_file", "client_key_file", "client_cert_file")  # in the order that gRPC takes them
_VARIABLES: Final = {
    name: f"HEADWAY_{name.upper()}"
    for name in ("server", "tls", *_FILES, "tls_server_name", "load_balancing", "api_key")
}
"""Options of environment and profiles; a profile may also have a table of metadata."""


class Connection:
    """Address of a server and the way to reach it."""

    def __init__(self, server: str | None = None, **options: Unpack[ConnectionOptions]) -> None:
        """Takes the options; those left out come from a profile or from the environment.

        Raises:
            OSError: A certificate or key file, or the file of profiles, cannot be read.
            TypeError: An option is unknown.
            ValueError: A client certificate lacks its key, an option has an unknown value, one of several addresses is
                a name, or the profile is missing or wrong.
        """
        if unknown := options.keys() - ConnectionOptions.__optional_keys__:
            raise TypeError(f"a connection has no option {', '.join(sorted(map(repr, unknown)))}")
        settled = settle({"server": server, **options})
        self.server: str = settled["server"]
        """Host and port, several separated by commas, or another gRPC target, such as `dns:///server:50051` or
        `unix:/run/headway.sock`."""
        self._target = _target(self.server)
        files = [settled.get(name) for name in _FILES]
        credentials = settled.get("credentials")
        tls = settled.get("tls")
        if tls is None:
            tls = credentials is not None or any(files)
        if tls and credentials is None:
            credentials = _credentials(files)
        self._credentials: grpc.ChannelCredentials | None = credentials if tls else None
        self._tls_server_name: str = settled.get("tls_server_name", "")
        several = LoadBalancing.ROUND_ROBIN if "," in self.server else LoadBalancing.PICK_FIRST
        self._load_balancing = LoadBalancing(settled.get("load_balancing") or several)
        self.metadata: tuple[tuple[str, str], ...] = tuple(settled.get("metadata") or ())
        """Sent with every call."""
        # A key that was read from a file ends with a newline.
        if api_key := settled.get("api_key", "").strip():
            self.metadata += (("authorization", f"Bearer {api_key}"),)

    @property
    def call_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of a call: `metadata`, and the caller's span if it uses OpenTelemetry."""
        if "opentelemetry.trace" not in sys.modules:  # nobody has made a span
            return self.metadata
        from opentelemetry import propagate  # noqa: PLC0415 (an optional library, which is here then)

        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return (*self.metadata, *carrier.items())

    def open(self) -> grpc.Channel:
        """Opens a channel for blocking calls."""
        if self._credentials is None:
            return grpc.insecure_channel(self._target, self._channel_options())
        return grpc.secure_channel(self._target, self._credentials, self._channel_options())

    def open_async(self) -> grpc.aio.Channel:
        """Opens a channel for the running event loop."""
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._target, self._channel_options())
        return grpc.aio.secure_channel(self._target, self._credentials, self._channel_options())

    def _channel_options(self) -> Sequence[tuple[str, int | str]]:
        name = self._tls_server_name
        return (
            ("grpc.service_config", self._service_config()),
            *((("grpc.ssl_target_name_override", name),) if name and self._credentials else ()),
            ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
            # A restarted server is found again within a second instead of gRPC's two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # A proxy of the environment cannot reach a server on this machine.
            ("grpc.enable_http_proxy", 0 if all(map(_is_loopback, self.server.split(","))) else 1),
        )

    def _service_config(self) -> str:
        """Returns the load balancing as a service config of gRPC (`service_config.proto`).

        Round robin watches the health of every address: a draining or unhealthy one gets no calls. A server without
        health checks counts as healthy.
        """
        config: dict[str, Any] = {"loadBalancingConfig": [{self._load_balancing.replace("-", "_"): {}}]}
        if self._load_balancing is LoadBalancing.ROUND_ROBIN:
            config["healthCheckConfig"] = {"serviceName": ""}
        return json.dumps(config)

    def __repr__(self) -> str:
        """Server and encryption; never the API key."""
        return f"<Connection to {self.server}, {'TLS' if self._credentials else 'not encrypted'}>"


def _credentials(files: Sequence[str | os.PathLike[str] | None]) -> grpc.ChannelCredentials:
    """Reads the files: certificate authorities, client key, client certificate."""
    _, key_file, cert_file = files
    if (cert_file is None) != (key_file is None):
        missing = "client_key_file" if key_file is None else "client_cert_file"
        raise ValueError(f"{missing} is missing; give the client's certificate and its key, or neither")
    return grpc.ssl_channel_credentials(*(None if path is None else Path(path).read_bytes() for path in files))


def settle(options: Mapping[str, Any]) -> dict[str, Any]:
    """Completes the options of a connection from a profile or the environment, and with the default server.

    Raises:
        OSError: The file of profiles cannot be read.
        ValueError: The profile is missing or wrong, or a variable has an unknown value.
    """
    given = {name: value for name, value in options.items() if value is not None}
    profile = given.pop("profile", None) or os.environ.get("HEADWAY_PROFILE")
    found = _read_profile(profile) if profile else _read_environment()
    settled = {"server": DEFAULT_SERVER} | found | given
    choices = list(LoadBalancing)
    if (balancing := settled.get("load_balancing") or choices[0]) not in choices:
        raise ValueError(f"load_balancing is {balancing!r}; must be {' or '.join(choices)}")
    return settled


def profiles_file() -> Path:
    """Returns the profiles file: HEADWAY_PROFILES_FILE, or headway/profiles.toml in the configuration folder."""
    if named := os.environ.get("HEADWAY_PROFILES_FILE"):
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "headway" / "profiles.toml"


def _read_environment() -> dict[str, Any]:
    found: dict[str, Any] = {
        name: value for name, variable in _VARIABLES.items() if (value := os.environ.get(variable, "").strip())
    }
    if "tls" in found:
        if (switch := found["tls"].lower()) not in _TRUE | _FALSE:
            raise ValueError(f"{_VARIABLES['tls']} is {found['tls']!r}; must be 1 or 0")
        # Where it is off, a certificate file turns it on.
        found["tls"] = True if switch in _TRUE else None
    return found


def _read_profile(name: str) -> dict[str, Any]:
    """Reads a table of the profiles file. Errors never show its values: one is a key."""
    path = profiles_file()
    try:
        profiles = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is not TOML: {error}") from None
    profile = profiles.get(name)
    if not isinstance(profile, dict):
        raise ValueError(f"{path}: has no profile {name!r}; it has {', '.join(sorted(profiles)) or 'none'}")
    found = dict(profile)
    for option, value in found.items():
        kind = {"tls": bool, "metadata": dict}.get(option, str)
        if option not in (*_VARIABLES, "metadata"):
            near = get_close_matches(option, [*_VARIABLES, "metadata"], n=1)
            raise ValueError(f"{path}: {name}.{option} is no option{f'; did you mean {near[0]}?' if near else ''}")
        if not isinstance(value, kind):
            raise ValueError(f"{path}: {name}.{option} must be a {kind.__name__}")
    for file in _FILES:
        if file in found:
            found[file] = Path(found[file]).expanduser()
    if "metadata" in found:
        found["metadata"] = [(key.lower(), str(value)) for key, value in found["metadata"].items()]
    return found


def _target(server: str) -> str:
    """Returns the gRPC target of a server, or of several addresses separated by commas.

    Raises:
        ValueError: An address has no port (gRPC would take 443), or one of several is a name (gRPC takes only one).
    """
    if "://" in server or server.startswith(_SCHEMES):
        return server
    for address in server.split(","):
        host, _, port = address.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"server: {address!r} is not HOST:PORT, such as 127.0.0.1:50051")
    if "," not in server:
        return server
    addresses = [address.strip() for address in server.split(",")]
    versions = set()
    for address in addresses:
        try:
            versions.add(ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).version)
        except ValueError:
            raise ValueError(
                f"server: {address!r} is not an IP address with a port; of several servers give IP addresses, or one "
                "name for all of them, such as dns:///servers.example.org:50051"
            ) from None
    if len(versions) > 1:
        raise ValueError(f"server: {server!r} mixes IPv4 and IPv6 addresses; give only one kind")
    return f"ipv{versions.pop()}:{','.join(addresses)}"


def _is_loopback(server: str) -> bool:
    """Returns True for a loopback address."""
    host = server.rpartition("://")[2].lstrip("/").rpartition(":")[0].strip("[]")
    if server.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
