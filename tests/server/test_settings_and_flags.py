"""Flags, environment and defaults."""

import pytest

from headway_server import cli
from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import Precision, VersionSettings
from headway_server.configuration import misspelt_variable
from headway_server.decoding.settings import EngineSettings
from headway_server.settings import ConnectionSettings, ServerSettings

pytestmark = pytest.mark.usefixtures("logging_as_it_was")

MIB = 2**20


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ServerSettings.model_fields:
        monkeypatch.delenv(f"HEADWAY_{name.upper()}", raising=False)


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch):
    """Parses flags and returns the settings, without serving."""

    def parse(*flags: str) -> ServerSettings:
        seen: list[ServerSettings] = []
        monkeypatch.setattr(cli, "_serve", seen.append)
        cli.main(flags)
        return seen[0]

    return parse


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]):
    """Starts a server that must not start; returns what it says on stderr."""

    def start(*flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(flags)
        assert ended.value.code == 2
        return capsys.readouterr().err

    return start


def test_flags_win_over_the_environment_which_wins_over_defaults(settings_of, monkeypatch):
    monkeypatch.setenv("HEADWAY_PORT", "1111")
    monkeypatch.setenv("HEADWAY_DEVICE", "cpu")
    monkeypatch.setenv("HEADWAY_ENGINE__NUM_SLOTS", "7")
    monkeypatch.setenv("HEADWAY_ENGINE__MAX_WAITING", "8")
    settings = settings_of("--store", "models", "--port", "2222", "--num-slots", "9", "--precision", "int8")
    assert (settings.port, settings.device, settings.host) == (2222, "cpu", "127.0.0.1")
    assert (settings.engine.num_slots, settings.engine.max_waiting) == (9, 8)
    assert settings.precision is Precision.INT8


def test_the_store_may_come_from_the_environment(settings_of, monkeypatch):
    monkeypatch.setenv("HEADWAY_STORE", "models")
    assert str(settings_of().store) == "models"


def test_an_empty_variable_is_as_good_as_none(settings_of, monkeypatch):
    monkeypatch.setenv("HEADWAY_PRECISION", "")
    monkeypatch.setenv("HEADWAY_THREADS", "")
    monkeypatch.setenv("HEADWAY_ENGINE__NUM_SLOTS", "")
    settings = settings_of("--store", "models")
    assert (settings.precision, settings.threads, settings.engine) == (None, None, EngineSettings())


PORTS = [name for name in ServerSettings.model_fields if name.endswith("port")]


@pytest.mark.parametrize("name", PORTS)
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_links_of_a_kubernetes_service_change_nothing(settings_of, monkeypatch, tmp_path, name, protocol):
    """Of one named headway, headway-http and so on, whose variables have the names of settings."""
    service = f"HEADWAY_{name.upper()}".removesuffix("_PORT")
    parts = {"": f"{protocol}://10.0.0.1:7", "_PROTO": protocol, "_PORT": "7", "_ADDR": "10.0.0.1"}
    links = {f"{service}_PORT_7_{protocol.upper()}{part}": value for part, value in parts.items()}
    links |= {f"{service}_PORT": parts[""], f"{service}_SERVICE_HOST": "10.0.0.1", f"{service}_SERVICE_PORT": "7"}
    for variable, value in (links | {f"{service}_SERVICE_PORT_HTTP": "7"}).items():
        monkeypatch.setenv(variable, value)
    assert settings_of("--store", "models") == ServerSettings(store="models")
    assert getattr(settings_of("--store", "models", f"--{name.replace('_', '-')}", "2222"), name) == 2222
    assert misspelt_variable(ServerSettings) is None
    file = tmp_path / "headway.toml"
    file.write_text(f"{name} = 3333\n")
    assert getattr(settings_of("--store", "models", "--config", str(file)), name) == 3333
    monkeypatch.setenv(f"{service}_PORT", "http")
    with pytest.raises(SystemExit):
        settings_of("--store", "models")


def test_every_flag_reaches_its_setting(settings_of):
    values = {
        "--host": "::1",
        "--threads": "3",
        "--max-message-mib": "4",
        "--max-text-kib": "5",
        "--max-image-mib": "5.5",
        "--max-image-megapixels": "6.5",
        "--max-waiting": "7",
        "--max-batch-tokens": "8",
        "--max-batch-images": "9",
        "--max-waiting-texts": "300",
        "--max-waiting-images": "301",
        "--max-waiting-mib": "302",
        "--max-calls": "303",
        "--max-inflight-mib": "304",
        "--drain-timeout": "1.5",
        "--stall-timeout": "2.5",
        "--log-level": "debug",
        "--log-format": "json",
    }
    settings = settings_of("--store", "models", *(part for pair in values.items() for part in pair))
    for flag, value in values.items():
        name = flag.removeprefix("--").replace("-", "_")
        groups = (settings, settings.engine, settings.batching)
        assert str(next(getattr(group, name) for group in groups if hasattr(group, name))) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "headway-server: --store is missing; give it, or set HEADWAY_STORE\n"),
        (("--store", "m", "--port", "70000"), "--port (HEADWAY_PORT) is '70000': Input should be less than"),
        (
            ("--store", "m", "--device", "tpu"),
            "--device (HEADWAY_DEVICE) is 'tpu': Input should be 'auto', 'cpu'",
        ),
        (
            ("--store", "m", "--num-slots", "0"),
            "--num-slots (HEADWAY_ENGINE__NUM_SLOTS) is '0': Input should be greater",
        ),
    ],
)
def test_a_wrong_flag_is_one_line_with_flag_variable_and_value(refusal, flags, message):
    line = refusal(*flags)
    assert message in line
    assert line.count("\n") == 1


def test_an_environment_that_cannot_be_read_is_one_line(refusal, monkeypatch):
    monkeypatch.setenv("HEADWAY_ENGINE", "seven")
    line = refusal("--store", "m")
    assert "HEADWAY_<GROUP>__<NAME>" in line
    assert line.count("\n") == 1


def test_a_flag_does_not_name_the_group_of_its_setting(settings_of, refusal):
    flags = ("--store", "models", "--num-slots", "3", "--max-waiting", "4", "--max-batch-tokens", "5")
    settings = settings_of(*flags)
    assert (settings.engine.num_slots, settings.engine.max_waiting, settings.batching.max_batch_tokens) == (3, 4, 5)
    assert "did you mean --num-slots?" in refusal("--store", "models", "--engine.num-slots", "3")


def test_an_unknown_flag_is_refused(refusal):
    assert "unrecognized arguments: --sture m" in refusal("--sture", "m")


def test_help_lists_every_setting_with_its_default_its_variable_and_what_it_does(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "(default: 50051) [env: HEADWAY_PORT]" in output
    groups = {
        "": ServerSettings,
        "ENGINE__": EngineSettings,
        "BATCHING__": BatchingSettings,
        "CONNECTION__": ConnectionSettings,
        "VERSIONS__": VersionSettings,
    }
    own = {"engine", "batching", "connection", "versions", "models"}  # models are of the configuration file
    for group, settings in groups.items():
        for name, field in settings.model_fields.items():
            if name not in own:
                assert f"--{name.replace('_', '-')}" in output
                assert f"[env: HEADWAY_{group}{name.upper()}]" in output
                assert field.description


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 8 * MIB),
        ({"max_text_kib": 512}, 16 * MIB),
        ({"max_text_kib": 4096}, 20 * MIB),
        ({"max_text_kib": 1024, "max_message_mib": 64}, 32 * MIB),
        ({"max_message_mib": 2}, 2 * MIB),
    ],
)
def test_a_request_of_texts_is_held_to_what_its_texts_may_have(settings, expected):
    assert ServerSettings(store="m", **settings).max_text_request_bytes == expected


@pytest.mark.parametrize(
    ("settings", "available_mib", "expected"),
    [
        ({}, 1024 * 64, (4096, 8192 * MIB)),
        ({}, 1024 * 16, (1024, 2048 * MIB)),
        ({}, 1024, (256, 128 * MIB)),
        ({"max_message_mib": 96}, 1024, (256, 192 * MIB)),
        ({"max_message_mib": 4}, 1024, (256, 128 * MIB)),
        ({"max_calls": 7, "max_inflight_mib": 9}, 1024 * 64, (7, 9 * MIB)),
    ],
)
def test_how_many_calls_run_at_a_time_follows_from_the_memory_there_is(settings, available_mib, expected):
    assert ServerSettings(store="m", **settings).call_limits(available_mib * MIB) == expected


def test_where_the_memory_is_not_known_the_fewest_calls_run():
    assert ServerSettings(store="m").call_limits(None) == (256, 40 * MIB)
