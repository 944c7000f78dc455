"""The configuration file: what wins over it, what is refused, and how settings and their origins are printed."""

import asyncio
import os
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import tiny_bundles

from headway_server import cli
from headway_server.bundles import Precision
from headway_server.runtime import Runtime
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADWAY_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> str:
        path = tmp_path / "headway.toml"
        path.write_text(text)
        return str(path)

    return write_file


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    def config(*flags: str) -> str:
        cli.main(["config", *flags])
        return capsys.readouterr().out

    return config


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]):
    def start(*flags: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["config", *flags])
        assert ended.value.code == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        return captured.err

    return start


def origin_of(output: str, setting: str) -> str:
    (line,) = [line for line in output.splitlines() if line.removeprefix("# ").startswith(f"{setting} ")]
    return line.rpartition("# ")[2]


def test_flags_win_over_the_environment_over_the_file_over_defaults_and_each_is_named(write, printed, monkeypatch):
    file = write('store = "models"\nport = 1\nhost = "::1"\n[engine]\nnum_slots = 2\nmax_waiting = 3\n')
    monkeypatch.setenv("HEADWAY_PORT", "4")
    monkeypatch.setenv("HEADWAY_HOST", "localhost")
    monkeypatch.setenv("HEADWAY_ENGINE__MAX_WAITING", "5")
    output = printed("--config", file, "--port", "6")
    parsed = tomllib.loads(output)
    assert (parsed["store"], parsed["port"], parsed["host"]) == ("models", 6, "localhost")
    assert (parsed["engine"]["num_slots"], parsed["engine"]["max_waiting"]) == (2, 5)
    assert "threads" not in parsed
    assert origin_of(output, "port") == "flag --port"
    assert origin_of(output, "host") == "environment HEADWAY_HOST"
    assert origin_of(output, "max_waiting") == "environment HEADWAY_ENGINE__MAX_WAITING"
    assert origin_of(output, "num_slots") == f"file {file}"
    assert origin_of(output, "device") == "default"
    assert origin_of(output, "threads") == "default"


def test_what_is_printed_is_a_configuration_file_that_says_the_same(write, printed):
    flags = ("--store", "models", "--port", "6", "--no-reflection", "--max-waiting", "7", "--max-image-mib", "1.5")
    first = printed(*flags)
    second = printed("--config", write(first + '\n[models."gpt 2"]\nprecision = "int8"\nlanes = 1\n'))
    assert tomllib.loads(second) == tomllib.loads(first) | {"models": {"gpt 2": {"precision": "int8", "lanes": 1}}}


def test_the_file_may_be_named_by_the_environment(write, printed, monkeypatch):
    monkeypatch.setenv("HEADWAY_CONFIG", write('store = "models"'))
    assert tomllib.loads(printed())["store"] == "models"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "headway.toml: prot is no setting; did you mean port?"),
        ("[engine]\nnum_slot = 1", "headway.toml: engine.num_slot is no setting; did you mean num_slots?"),
        ("[models.a]\nlane = 1", "headway.toml: models.a.lane is no setting; did you mean lanes?"),
        ("[batching]\nzzz = 1", "batching.zzz is no setting; there are max_batch_images, max_batch_prompts"),
        ("port = 70000", "headway.toml: port is 70000: Input should be less than or equal to 65535"),
        ("[models.a]\nnum_slots = 0", "headway.toml: models.a.num_slots is 0: Input should be greater than"),
        ("port = ", "headway.toml: is not TOML: "),
        ("num_slots = 1", "headway.toml: num_slots is no setting; write it in the table [engine]"),
        ("engine = 3", "headway.toml: engine is 3: it is a group of settings, the table [engine]"),
        ('trace_endpoint = "here"', "trace_endpoint is 'here': must be a URL, such as http://"),
        ("port = 9\nhealth_port = 9", "port, health_port, metrics_port and http_port are 9, 9; give each its own"),
        ('tls_cert_file = "a"', "tls_cert_file and tls_key_file go together"),
        ('tls_client_ca_file = "a"', "tls_client_ca_file needs tls_cert_file"),
    ],
)
def test_a_wrong_file_is_one_line_with_place_value_and_nearest_name(write, refusal, text, message):
    assert message in refusal("--store", "models", "--config", write(text))


def test_a_file_that_is_not_there_is_refused(refusal):
    assert "absent.toml: No such file" in refusal("--store", "models", "--config", "absent.toml")


def test_misspelt_flags_and_variables_are_refused_with_the_nearest_name(refusal, monkeypatch):
    assert "unrecognized arguments: --sture m; did you mean --store?" in refusal("--sture", "m")
    assert refusal("--port") == "headway-server: argument --port: expected one argument\n"
    monkeypatch.setenv("HEADWAY_ENGINE__NUM_SLOT", "3")
    assert "HEADWAY_ENGINE__NUM_SLOT is no setting; did you mean num_slots?" in refusal("--store", "models")
    monkeypatch.setenv("HEADWAY_NUM_SLOTS", "3")
    assert "HEADWAY_NUM_SLOTS is no setting; did you mean HEADWAY_ENGINE__NUM_SLOTS?" in refusal("--store", "models")
    monkeypatch.delenv("HEADWAY_NUM_SLOTS")
    monkeypatch.setenv("HEADWAY_TREADS", "3")
    assert "environment: HEADWAY_TREADS is no setting; did you mean HEADWAY_THREADS?" in refusal("--store", "models")


def test_what_a_start_would_refuse_is_refused_before_it_is_printed(write, refusal, tmp_path):
    assert "no such folder" in refusal("--store", str(tmp_path / "absent"))
    assert "has no bundle" in refusal("--store", str(tmp_path))
    assert "absent: cannot be read as public keys (No such file" in refusal(
        "--store", "models", "--require-signed", "absent"
    )
    assert "headway.toml: Invalid JSON" in refusal("--store", "models", "--routes-file", write("no JSON"))


def test_settings_of_a_model_that_the_store_does_not_have_are_told(write, capsys):
    cli.main(["config", "--store", "models", "--config", write("[models.ag-new]\nlanes = 1\n")])
    assert capsys.readouterr().err == (
        "headway-server: models.ag-new: settings of a model that is not in the store; did you mean ag-news?\n"
    )


def test_variables_of_the_client_of_compose_and_of_kubernetes_are_no_mistakes(printed, monkeypatch):
    names = (
        "SERVER CA_FILE CLIENT_CERT_FILE CLIENT_KEY_FILE API_KEY TLS TLS_SERVER_NAME LOAD_BALANCING PROFILE "
        "MODELS BIND CPUS MEMORY GPU_PORT GPU_MEMORY SERVICE_HOST SERVICE_PORT SERVICE_PORT_GRPC PORT_50051_TCP"
    )
    for name in names.split():
        monkeypatch.setenv(f"HEADWAY_{name}", "something")
    assert tomllib.loads(printed("--store", "models"))["port"] == 50051


def test_a_model_has_settings_of_its_own_and_the_servers_for_the_rest(write):
    text = """
        [engine]
        num_slots = 2
        max_waiting = 3
        [models.mine]
        num_slots = 4
        max_batch_tokens = 5
        precision = "fp32"
    """
    settings = ServerSettings(store="models", config=write(text), precision="int8")
    mine, other = settings.for_model("mine"), settings.for_model("other")
    assert other is settings
    assert (mine.engine.num_slots, mine.engine.max_waiting) == (4, 3)
    assert (mine.batching.max_batch_tokens, mine.precision) == (5, Precision.FP32)
    assert mine.store == settings.store


def test_a_model_is_loaded_with_its_settings(tmp_path, write):
    tiny_bundles.write_topic_bundle(tmp_path / "store", name="one")
    tiny_bundles.write_topic_bundle(tmp_path / "store", name="two")
    config = write('[models.one]\nlanes = 1\nmax_waiting_texts = 256\n[models.two]\nprecision = "int8"')
    runtime = Runtime(device="cpu", num_threads=2, num_lanes=2)
    host = ModelHost.open(runtime, ServerSettings(store=tmp_path / "store", config=config))
    (one,) = host.models
    assert one._batcher._num_lanes == 1
    assert "of 256 texts" in repr(one)
    (two,) = host.rejected
    assert two.reason is not None
    assert "has no int8 variant" in two.reason
    assert runtime.num_lanes == 2
    host.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux alone")
def test_the_threads_of_a_model_of_low_priority_give_way_and_no_others_do(tmp_path, write):
    tiny_bundles.write_topic_bundle(tmp_path / "store", name="bulk")
    tiny_bundles.write_topic_bundle(tmp_path / "store", name="urgent")
    settings = ServerSettings(store=tmp_path / "store", config=write("[models.bulk]\npriority = -7"))
    before = set(threading.enumerate())
    host = ModelHost.open(Runtime(device="cpu", num_threads=1), settings)

    async def niceness() -> dict[str, int]:
        host.start()
        await asyncio.sleep(0.1)  # for the threads to begin
        threads = set(threading.enumerate()) - before
        return {thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in threads}

    found = asyncio.run(niceness())
    host.close()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert {name: value for name, value in found.items() if name.startswith("batcher")} == {
        f"batcher-{model}-{number}": value for model, value in (("bulk", 7), ("urgent", own)) for number in (0, 1)
    }
