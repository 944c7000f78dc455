"""How clients reach a server: address, TLS, client certificates, API keys, metadata; from arguments and environment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from rule_server import RuleServer
from typer.testing import CliRunner

import headway_client
from headway_client import NO_RETRIES, Client
from headway_client.cli import app
from headway_client.connection import Connection

Connect = Callable[..., Any]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The authority's certificate, and a client's certificate and key."""
    folder = tmp_path_factory.mktemp("certificates")
    client = authority.issue_cert("client@example.org")
    paths = {name: folder / f"{name}.pem" for name in ("ca_file", "client_cert_file", "client_key_file")}
    authority.cert_pem.write_to_path(str(paths["ca_file"]))
    client.cert_chain_pems[0].write_to_path(str(paths["client_cert_file"]))
    client.private_key_pem.write_to_path(str(paths["client_key_file"]))
    return paths


def serve(authority: trustme.CA, *, asks_clients: bool) -> Iterator[RuleServer]:
    certificate = authority.issue_cert("127.0.0.1")
    server = RuleServer(
        grpc.ssl_server_credentials(
            [(certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes())],
            root_certificates=authority.cert_pem.bytes() if asks_clients else None,
            require_client_auth=asks_clients,
        )
    )
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def tls_server(authority: trustme.CA) -> Iterator[RuleServer]:
    yield from serve(authority, asks_clients=False)


@pytest.fixture(scope="module")
def mutual_tls_server(authority: trustme.CA) -> Iterator[RuleServer]:
    """A server that refuses clients without a certificate."""
    yield from serve(authority, asks_clients=True)


def variables(**values: object) -> dict[str, str]:
    return {f"HEADWAY_{name.upper()}": str(value) for name, value in values.items()}


def test_the_server_is_taken_from_the_environment(server: Any, connect: Connect, monkeypatch: Any) -> None:
    monkeypatch.setenv("HEADWAY_SERVER", server.address)
    assert connect(None).call("generate_text", "one")[0].text == "one and so on"
    assert connect("127.0.0.1:1").client.server == "127.0.0.1:1"
    monkeypatch.delenv("HEADWAY_SERVER")
    assert connect(None).client.server == "127.0.0.1:50051"


def test_a_server_is_trusted_by_its_authority(tls_server: RuleServer, connect: Connect, files: dict[str, Path]) -> None:
    caller = connect(tls_server.address, ca_file=files["ca_file"])
    assert caller.call("generate_text", "one")[0].text == "one and so on"
    assert caller.stream("stream_generate_text", "one")[1][0].text == "one and so on"


@pytest.mark.parametrize("options", [{}, {"tls": True}])
def test_a_server_is_not_reached_without_its_authority(
    tls_server: RuleServer, connect: Connect, options: dict[str, Any]
) -> None:
    with pytest.raises(headway_client.UnavailableError):
        connect(tls_server.address, retry=NO_RETRIES, **options).call("generate_text", "one", timeout_s=5)


def test_an_authority_of_the_environment_can_be_overruled(
    server: Any, tls_server: RuleServer, connect: Connect, files: dict[str, Path], monkeypatch: Any
) -> None:
    monkeypatch.setenv("HEADWAY_CA_FILE", str(files["ca_file"]))
    assert len(connect(tls_server.address).call("generate_text", "one")) == 1
    assert len(connect(server.address, tls=False).call("generate_text", "one")) == 1


def test_a_client_shows_its_certificate(
    mutual_tls_server: RuleServer, connect: Connect, files: dict[str, Path], monkeypatch: Any
) -> None:
    address = mutual_tls_server.address
    with pytest.raises(headway_client.UnavailableError):
        connect(address, ca_file=files["ca_file"], retry=NO_RETRIES).call("health", timeout_s=5)
    assert len(connect(address, **files).call("generate_text", "one")) == 1
    for name, value in variables(**files).items():
        monkeypatch.setenv(name, value)
    assert len(connect(address).call("generate_text", "one")) == 1


def test_an_api_key_and_metadata_are_sent_with_every_call(server: Any, connect: Connect, monkeypatch: Any) -> None:
    caller = connect(server.address, api_key="secret", metadata=[("tenant", "7")])
    caller.call("generate_text", "one")
    caller.stream("stream_generate_text", "one")
    monkeypatch.setenv("HEADWAY_API_KEY", "from the environment\n")
    connect(server.address).call("generate_text", "one")
    first, second, third = server.rules.metadata
    assert (first["authorization"], first["tenant"]) == (second["authorization"], second["tenant"])
    assert (first["authorization"], first["tenant"]) == ("Bearer secret", "7")
    assert third["authorization"] == "Bearer from the environment"


def test_an_api_key_is_never_shown() -> None:
    with Client("127.0.0.1:1", api_key="secret") as client:
        assert "secret" not in repr(client)
    assert repr(Connection("host:1", api_key="secret")) == "<Connection to host:1, not encrypted>"
    assert repr(Connection("host:1", tls=True)) == "<Connection to host:1, TLS>"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"client_cert_file": "ca_file"}, ValueError, "client_key_file is missing"),
        ({"client_key_file": "ca_file"}, ValueError, "client_cert_file is missing"),
        ({"ca_file": "absent"}, FileNotFoundError, "absent"),
    ],
)
def test_wrong_files_are_refused_at_once(
    connect: Connect, files: dict[str, Path], options: dict[str, str], error: type[Exception], message: str
) -> None:
    given = {name: files.get(value, Path(value)) for name, value in options.items()}
    with pytest.raises(error, match=message):
        connect("127.0.0.1:1", **given)


def test_a_timeout_and_a_switch_are_checked(connect: Connect, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match="timeout_s is 0; must be above 0"):
        connect("127.0.0.1:1", timeout_s=0)
    monkeypatch.setenv("HEADWAY_TLS", "perhaps")
    with pytest.raises(ValueError, match="HEADWAY_TLS is 'perhaps'; must be 1 or 0"):
        connect("127.0.0.1:1")


def test_the_command_line_takes_flags_and_environment(mutual_tls_server: RuleServer, files: dict[str, Path]) -> None:
    rules = mutual_tls_server.rules
    flags = [
        *("--server", mutual_tls_server.address, "--ca-file", str(files["ca_file"]), "--api-key", "secret"),
        *("--client-cert-file", str(files["client_cert_file"]), "--client-key-file", str(files["client_key_file"])),
        *("--metadata", "Tenant=7=8", "--metadata", "trace=a"),
    ]
    ended = CliRunner().invoke(app, ["generate-text", "one", *flags])
    assert (ended.exit_code, ended.stdout) == (0, "one and so on\n")
    sent = rules.metadata[-1]
    assert (sent["authorization"], sent["tenant"], sent["trace"]) == ("Bearer secret", "7=8", "a")
    environment = variables(server=mutual_tls_server.address, api_key="other", tls=1, **files)
    ended = CliRunner().invoke(app, ["classify-text", "one"], env=environment)
    assert ended.exit_code == 0
    assert rules.metadata[-1]["authorization"] == "Bearer other"


def test_the_command_line_says_which_flag_may_be_missing_where_nobody_answers(
    mutual_tls_server: RuleServer, files: dict[str, Path]
) -> None:
    for flags, advice in (
        ((), "If it encrypts, give --tls or --ca-file"),
        (("--tls",), "give the authority of the server's certificate by --ca-file"),
        (("--ca-file", str(files["ca_file"])), "If it requires a client certificate, give --client-cert-file"),
    ):
        ended = CliRunner().invoke(app, ["health", "--server", mutual_tls_server.address, "--timeout", "5", *flags])
        assert ended.exit_code == 1
        assert advice in ended.stderr


def test_the_load_tester_takes_them_too(mutual_tls_server: RuleServer, files: dict[str, Path]) -> None:
    environment = variables(server=mutual_tls_server.address, **files)
    arguments = ["load", "classify-text", "--concurrency", "1", "--duration", "0.2", "--warmup", "0", "--json"]
    ended = CliRunner().invoke(app, [*arguments, "--api-key", "secret"], env=environment)
    assert ended.exit_code == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["server"], report["error_count"]) == (mutual_tls_server.address, 0)
    assert "secret" not in ended.stdout
    assert {sent["authorization"] for sent in mutual_tls_server.rules.metadata[-2:]} == {"Bearer secret"}


# Profiles


@pytest.fixture
def write_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes the file of profiles of this user."""

    def write(text: str) -> Path:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        path = tmp_path / "headway" / "profiles.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_a_profile_says_how_to_reach_a_server_for_client_command_line_and_load_tester(
    mutual_tls_server: RuleServer,
    connect: Connect,
    files: dict[str, Path],
    write_profiles: Callable[[str], Path],
    monkeypatch: Any,
) -> None:
    paths = "".join(f'{name} = "{path}"\n' for name, path in files.items())
    write_profiles(
        f'[mine]\nserver = "{mutual_tls_server.address}"\napi_key = "secret"\n{paths}[mine.metadata]\nTenant = 7\n'
    )
    rules = mutual_tls_server.rules
    connect(None, profile="mine").call("generate_text", "one")
    monkeypatch.setenv("HEADWAY_PROFILE", "mine")
    connect(None).call("generate_text", "one")
    arguments = ["load", "classify-text", "--concurrency", "1", "--duration", "0.1", "--warmup", "0"]
    for command in (["classify-text", "one", "--profile", "mine"], ["classify-text", "one"], arguments):
        ended = CliRunner().invoke(app, command)
        assert ended.exit_code == 0, ended.stderr
    assert {(sent["authorization"], sent["tenant"]) for sent in rules.metadata[-5:]} == {("Bearer secret", "7")}
    connect(None, api_key="other").call("generate_text", "one")
    assert rules.metadata[-1]["authorization"] == "Bearer other"


def test_a_profile_stands_in_place_of_the_environment_so_that_no_key_goes_astray(
    server: Any, connect: Connect, write_profiles: Callable[[str], Path], monkeypatch: Any
) -> None:
    write_profiles(f'[mine]\nserver = "{server.address}"\n')
    monkeypatch.setenv("HEADWAY_API_KEY", "of another server")
    monkeypatch.setenv("HEADWAY_TLS", "1")
    connect(None, profile="mine").call("generate_text", "one")
    assert CliRunner().invoke(app, ["classify-text", "one", "--profile", "mine"]).exit_code == 0
    assert all("authorization" not in sent for sent in server.rules.metadata)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[yours]", "has no profile 'mine'; it has yours"),
        ('[mine]\napikey = "secret"', "mine.apikey is no option; did you mean api_key"),
        ("[mine]\napi_key = 5", "mine.api_key must be a str"),
        ('[mine]\ntls = "secret"', "mine.tls must be a bool"),
        ('[mine]\nload_balancing = "least"', "load_balancing is 'least'; must be pick-first or round-robin"),
        ("[mine", "is not TOML"),
    ],
)
def test_a_wrong_profile_is_refused_without_its_values(
    connect: Connect, write_profiles: Callable[[str], Path], text: str, message: str
) -> None:
    write_profiles(text)
    with pytest.raises(ValueError, match=message) as caught:
        connect(None, profile="mine")
    assert "secret" not in str(caught.value)
    ended = CliRunner().invoke(app, ["list-models", "--profile", "mine"])
    assert ended.exit_code == 2
    assert message in ended.stderr


def test_a_file_of_profiles_may_be_named_and_must_be_there(connect: Connect, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HEADWAY_PROFILES_FILE", str(tmp_path / "absent.toml"))
    with pytest.raises(FileNotFoundError, match=r"absent\.toml"):
        connect(None, profile="mine")


# Several servers


def test_calls_go_to_several_servers_in_turn_and_on_to_those_that_are_left(connect: Connect) -> None:
    servers = [RuleServer(), RuleServer()]
    for server in servers:
        server.start()
    try:
        both = connect(",".join(server.address for server in servers))
        first = connect(both.client.server, load_balancing="pick-first")
        for caller, expected in ((both, [10, 10]), (first, [20, 0])):
            for server in servers:
                server.rules.metadata.clear()
            caller.call("generate_text", "one")  # both are connected when the second call comes, or soon after
            deadline = time.monotonic() + 10
            while caller is both and not all(server.rules.metadata for server in servers):
                assert time.monotonic() < deadline
                caller.call("generate_text", "one")
            for server in servers:
                server.rules.metadata.clear()
            for _ in range(20):
                caller.call("generate_text", "one")
            assert sorted((len(server.rules.metadata) for server in servers), reverse=True) == expected
        servers[0].stop()
        for _ in range(20):
            both.call("generate_text", "one")
    finally:
        for server in servers:
            server.close()


@pytest.mark.parametrize(
    "server", ["127.0.0.1", "127.0.0.1:", ":50051", "localhost:99999", "[::1]", "1.2.3.4:5,6.7.8.9"]
)
def test_an_address_without_a_port_is_refused(connect: Connect, server: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT, such as 127"):
        connect(server)


def test_several_servers_are_addresses_of_one_kind(connect: Connect) -> None:
    for several, message in (
        ("localhost:1,localhost:2", "or one name for all of them"),
        ("127.0.0.1:1,[::1]:2", "IPv4 and"),
    ):
        with pytest.raises(ValueError, match=message):
            connect(several)


def test_a_certificate_may_have_another_name_than_the_address(
    tls_server: RuleServer, authority: trustme.CA, connect: Connect, files: dict[str, Path]
) -> None:
    port = tls_server.address.rpartition(":")[2]
    twice = f"127.0.0.1:{port},127.0.0.1:{port}"
    caller = connect(twice, ca_file=files["ca_file"], tls_server_name="127.0.0.1")
    assert caller.call("generate_text", "one")[0].text == "one and so on"
    with pytest.raises(headway_client.UnavailableError):
        connect(twice, ca_file=files["ca_file"], tls_server_name="else.example.org", retry=NO_RETRIES).call(
            "generate_text", "one", timeout_s=5
        )


def test_wrong_metadata_is_refused(server: Any) -> None:
    for value in ("tenant", "=7"):
        ended = CliRunner().invoke(app, ["list-models", "--server", server.address, "--metadata", value])
        assert ended.exit_code == 2
        assert "is not a key and a value, such as tenant=7" in ended.stderr
