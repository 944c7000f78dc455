"""The command line against a real server: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from typer.testing import CliRunner

from headway.v1 import common_pb2
from headway.v1 import generation_service_pb2 as pb
from headway_client import Client
from headway_client.cli import app, flags

Run = Callable[..., Any]


@pytest.fixture
def run(server: Any) -> Run:
    """Runs a command against the server."""

    def invoke(*arguments: str, stdin: str | None = None) -> Any:
        return CliRunner().invoke(app, list(arguments), input=stdin, env={"HEADWAY_SERVER": server.address})

    return invoke


def objects(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def test_generate_streams_the_text_of_an_argument(run: Run, server: Any) -> None:
    ended = run(
        "generate-text", "one two", "--max-new-tokens", "5", "--seed", "3", "--stop-string", "x", "--stop-string", "y"
    )
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "one two and so on\n", "")
    (request,) = server.rules.requests
    assert request.prompt == "one two"
    assert (request.parameters.max_new_tokens, request.parameters.sampling.seed) == (5, 3)
    assert list(request.parameters.stop_strings) == ["x", "y"]


def test_generate_prints_deltas_as_they_come(run: Run) -> None:
    ended = run("generate-text", "one", "--stream", "--json")
    *deltas, answer = objects(ended.stdout)
    assert "".join(delta["text"] for delta in deltas) == answer["text"] == "one and so on"
    assert answer["model"] == {"name": "rule", "version": "1", "variant": "fp32"}


def test_generate_heads_each_of_several_texts(run: Run) -> None:
    lines = "==> one <==\none and so on\n==> two <==\ntwo and so on\n"
    assert run("generate-text", "one", "two").stdout == lines
    assert run("generate-text", "one", "two", "--no-stream").stdout == lines


def test_json_is_one_object_a_line_in_the_order_of_the_inputs(run: Run, server: Any) -> None:
    ended = run("generate-text", "--json", "--batch-size", "2", stdin="one\n\ntwo\nthree\n")
    assert [answer["input"] for answer in objects(ended.stdout)] == ["one", "two", "three"]
    assert [len(request.prompts) for request in server.rules.requests] == [2, 1]
    assert objects(ended.stdout)[0]["finish_reason"] == "length"


def test_generate_sends_every_flag(run: Run, server: Any, tmp_path: Path) -> None:
    ended = run(
        *(
            "generate-text",
            "one",
            "--min-new-tokens",
            "2",
            "--max-new-tokens",
            "9",
            "--temperature",
            "0.5",
            "--top-k",
            "4",
        ),
        *("--top-p", "0.75", "--min-p", "0.25", "--repetition-penalty", "1.5", "--presence-penalty", "-0.5"),
        *("--frequency-penalty", "0.125", "--logit-bias", "17=-5", "--logit-bias", "3=1.5", "--seed", "3"),
        *(
            "--stop-token-id",
            "8",
            "--stop-token-id",
            "9",
            "--choice",
            "yes",
            "--choice",
            "no",
            "--echo",
            "--priority",
            "-7",
        ),
        *("--log-probabilities", "2", "--prompt-log-probabilities", "--truncate", "--sample-count", "1", "--no-stream"),
    )
    assert ended.exit_code == 0, ended.stderr
    (request,) = server.rules.requests
    assert request == pb.GenerateTextRequest(
        prompts=["one"],
        parameters=pb.GenerationParameters(
            max_new_tokens=9,
            min_new_tokens=2,
            sampling=common_pb2.SamplingParameters(temperature=0.5, top_k=4, top_p=0.75, min_p=0.25, seed=3),
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.125,
            logit_biases=[pb.LogitBias(token_id=17, bias=-5), pb.LogitBias(token_id=3, bias=1.5)],
            stop_token_ids=[8, 9],
            constraint=pb.Constraint(choices=pb.Choices(texts=["yes", "no"])),
        ),
        echo=True,
        priority=-7,
        truncate=True,
        sample_count=1,
        log_probabilities=pb.LogProbabilityOptions(top_token_count=2, include_prompt=True),
    )


def test_a_schema_is_a_file_or_json(run: Run, server: Any, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}', encoding="utf-8")
    for given in (str(file), '{"type": "integer"}'):
        assert run("generate-text", "one", "--json-schema", given).exit_code == 0
    run("generate-text", "one", "--regex", "[0-9]+")
    schema, same, regex = [request.parameters.constraint for request in server.rules.requests]
    assert schema == same == pb.Constraint(json_schema='{"type": "integer"}')
    assert regex == pb.Constraint(regex="[0-9]+")


def test_samples_are_headed_and_numbered(run: Run) -> None:
    ended = run("generate-text", "one", "--sample-count", "2")
    assert ended.stdout == "==> one [1] <==\none and so on\n==> one [2] <==\none and so on\n"
    answers = objects(run("generate-text", "one", "two", "--sample-count", "2", "--json").stdout)
    assert [(answer["input"], answer["sample_index"]) for answer in answers] == [
        *(("one", 0), ("one", 1)),
        *(("two", 0), ("two", 1)),
    ]


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_log_probabilities_follow_the_text(run: Run, stream: str) -> None:
    assert run(
        "generate-text", "one", "--log-probabilities", "1", "--prompt-log-probabilities", stream
    ).stdout.splitlines() == [
        "one and so on",
        "-  'one'  'one' -0.5000",
        "-0.5000  ' and'  ' and' -0.5000",
        "-0.5000  ' so'   ' so' -0.5000",
        "-0.5000  ' on'   ' on' -0.5000",
    ]


def test_chat_answers_the_messages_that_are_given(run: Run, server: Any) -> None:
    ended = run("chat", "--system", "be kind", "-m", "user: hi", "-m", "assistant:oh", "-m", "user:a: b", "--seed", "3")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "a: b and so on\n", "")
    (request,) = server.rules.requests
    turns = [(message.role, message.content) for message in request.conversation.messages]
    assert turns == [(1, "be kind"), (2, "hi"), (3, "oh"), (2, "a: b")]
    assert request.parameters.sampling.seed == 3
    answer = objects(run("chat", "-m", "user:hi", "--json").stdout)[-1]
    assert (answer["input"], answer["text"]) == ([{"role": "user", "content": "hi"}], "hi and so on")


def test_chat_goes_on_with_the_conversation_line_by_line(run: Run, server: Any) -> None:
    assert run("chat", stdin="hi\n\nmore\n").stdout == "hi and so on\nmore and so on\n"
    first, second = server.rules.requests
    assert [message.content for message in first.conversation.messages] == ["hi"]
    assert [message.content for message in second.conversation.messages] == ["hi", "hi and so on", "more"]


def test_piped_turns_end_with_the_first_failure(run: Run, server: Any, fault: Any) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.FAILED_PRECONDITION, message="rule has no chat template"))
    ended = run("chat", stdin="hi\nmore\n")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr == "headway: FAILED_PRECONDITION: rule has no chat template\n"


class Terminal:
    """A `headway chat` that a person types into."""

    def __init__(self, address: str) -> None:
        self.screen, typed = pty.openpty()
        command = [str(Path(sys.executable).with_name("headway")), "chat", "--server", address]
        environment = os.environ | {"TERM": "dumb"}
        self.process = subprocess.Popen(command, stdin=typed, stdout=typed, stderr=typed, env=environment)
        os.close(typed)
        self.unread = ""

    def read_until(self, text: str) -> None:
        """Waits until `text` is shown, after what was waited for before."""
        while text not in self.unread:
            ready, _, _ = select.select([self.screen], [], [], 20)
            assert ready, f"{text!r} does not come, only {self.unread!r}"
            self.unread += os.read(self.screen, 4096).decode()
        self.unread = self.unread.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.screen)


@pytest.fixture
def terminal(server: Any) -> Iterator[Terminal]:
    started = Terminal(server.address)
    yield started
    started.close()


def test_a_person_talks_corrects_and_interrupts(terminal: Terminal, server: Any, fault: Any) -> None:
    terminal.read_until("> ")
    terminal.type("hi\n")
    terminal.read_until("hi and so on")
    terminal.read_until("> ")
    server.rules.faults.append(fault(grpc.StatusCode.INVALID_ARGUMENT, message="is too long"))
    terminal.type("longer\n")
    terminal.read_until("headway: INVALID_ARGUMENT: is too long")
    terminal.read_until("> ")
    server.rules.delta_delay_s = 30.0
    terminal.type("slow one\n")
    terminal.read_until("slow one")  # what was typed
    terminal.read_until("slow")  # the first word of the answer
    terminal.process.send_signal(signal.SIGINT)
    terminal.read_until("> ")
    assert server.rules.cancelled.wait(10)
    server.rules.delta_delay_s = 0.0
    terminal.type("last\n")
    terminal.read_until("last and so on")
    contents = [message.content for message in server.rules.requests[-1].conversation.messages]
    assert contents == ["hi", "hi and so on", "slow one", "slow", "last"]
    terminal.read_until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0


def test_translate_answers_a_line_for_a_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "captions.txt"
    file.write_text("ein Hündchen\na cat\n", encoding="utf-8")
    assert run("translate-text", "--file", str(file)).stdout == "EIN HÜNDCHEN\nA CAT\n"
    assert run("translate-text", "a dog", "--stream").stdout == "A DOG\n"
    assert run("translate-text", "-f", "-", stdin="a\nb\n").stdout == "A\nB\n"


def test_classify_prints_labels_before_the_text(run: Run, server: Any) -> None:
    ended = run("classify-text", "good news", "--top-k", "2", "--model", "rule", "--model-version", "1")
    assert ended.stdout == "World 0.500, Sports 0.250\tgood news\n"
    assert (server.rules.requests[0].model, server.rules.requests[0].model_version) == ("rule", "1")
    assert len(objects(run("classify-text", "good news", "--json", "--top-k", "0").stdout)[0]["labels"]) == 3


def test_three_labels_are_printed_of_all(run: Run, server: Any) -> None:
    assert run("classify-text", "good news").stdout == "World 0.500, Sports 0.250, Business 0.125\tgood news\n"
    assert server.rules.requests[0].top_k == 0  # a model with fewer than three labels is no error


def test_label_reads_image_files(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"four")
    assert run("classify-image", str(file)).stdout == f"ship 0.500, airplane 0.250\t{file}\n"
    assert objects(run("classify-image", "--json", stdin=f"{file}\n").stdout)[0]["width"] == 4


def test_models_lists_what_is_loaded_and_tells_what_is_not(run: Run) -> None:
    ended = run("list-models")
    head, line = ended.stdout.splitlines()
    assert head.split()[:3] == ["NAME", "VERSION", "TASK"]
    assert line.split()[:7] == ["rule", "1", "generation", "fp32", "cpu", "1,234,567", "accuracy"]
    assert ended.stderr == "headway: not loaded: broken/1: model.onnx: wrong SHA-256\n"
    assert objects(run("list-models", "--json").stdout)[0]["task"] == "generation"
    assert len(run("list-models", "--task", "translation").stdout.splitlines()) == 1


def test_model_shows_one(run: Run) -> None:
    shown = run("get-model", "rule").stdout
    assert "1,234,567" in shown
    assert "temperature=0.5" in shown
    assert objects(run("get-model", "rule", "--json").stdout)[0]["manifest"] == {"schema_version": 1}


def test_bundles_are_listed_with_routes_aliases_and_problems(run: Run) -> None:
    ended = run("list-bundles")
    assert [line.split() for line in ended.stdout.splitlines()] == [
        ["NAME", "VERSION", "STATE", "REASON"],
        ["rule", "1", "ready"],
        ["rule", "2", "incomplete", "x", "is", "missing"],
        [],
        ["MODEL", "DEFAULT", "CANARY", "SHARE"],
        ["rule", "latest", "2", "0.125"],
        [],
        ["ALIAS", "MODEL", "VERSION"],
        ["old", "rule", "1"],
    ]
    assert ended.stderr == "headway: the store: the store has not answered for 10 s\n"
    assert objects(run("list-bundles", "--json").stdout)[0]["routes"][0]["canary_share"] == 0.125


def test_models_are_loaded_unloaded_and_routed(run: Run, server: Any) -> None:
    assert run("load-model", "rule", "--model-version", "1").stdout == "rule 1 (fp32) is ready\n"
    assert objects(run("load-model", "rule", "--json").stdout)[0]["name"] == "rule"
    unloaded = run("unload-model", "rule")
    assert (unloaded.exit_code, unloaded.stdout) == (0, "")
    assert "its canary still names rule 2, which is not loaded" in unloaded.stderr
    assert "still names" not in run("unload-model", "rule", "--model-version", "7").stderr
    assert len(run("scan-store").stdout.splitlines()) == 3
    assert objects(run("scan-store", "--json").stdout)[1]["state"] == "incomplete"
    ended = run("set-route", "rule", "--default-version", "1", "--canary-version", "2", "--canary-share", "0.1")
    assert ended.stdout.splitlines() == ["MODEL  DEFAULT  CANARY  SHARE", "rule   1        2       0.1"]
    assert ended.stderr == "headway: the change is lost when the server stops: routes.json cannot be written\n"
    assert server.rules.requests[-1].canary_share == 0.1
    assert run("set-route", "rule", "--canary-version", "2", "--canary-share", "1.5").exit_code == 2
    assert "no model has a route" in run("set-route", "rule").stderr
    assert objects(run("set-route", "rule", "--json").stdout)[0]["routes"] == []
    assert run("set-alias", "old", "rule").stdout.splitlines() == ["ALIAS  MODEL  VERSION", "old    rule   as routed"]
    assert objects(run("set-alias", "old", "rule", "--json").stdout)[0]["aliases"][0]["alias"] == "old"
    ended = run("set-alias", "old")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "", "headway: no model has an alias\n")
    assert [request.model for request in server.rules.requests[-3:]] == ["rule", "rule", ""]


def test_health_tells_by_its_exit_code(run: Run, server: Any) -> None:
    assert (run("health", "--wait", "5").exit_code, run("health").stdout) == (0, "serving\n")
    server.rules.serving = False
    ended = run("health", "--json")
    assert (ended.exit_code, objects(ended.stdout)[0]["status"]) == (1, "not_serving")
    assert run("health", "--wait", "0.1").exit_code == 1


def test_a_failed_call_is_one_line_on_stderr(run: Run, server: Any, fault: Any) -> None:
    server.rules.faults.append(fault(grpc.StatusCode.NOT_FOUND, message="no model is called 'x';\nloaded: rule"))
    ended = run("generate-text", "one", "--model", "x")
    assert (ended.exit_code, ended.stdout) == (1, "")
    assert ended.stderr == "headway: NOT_FOUND: no model is called 'x'; loaded: rule\n"


def test_an_error_about_an_element_names_the_input(run: Run, server: Any, fault: Any) -> None:
    violations = {"texts[1]": "is too long"}
    server.rules.faults.append(fault(grpc.StatusCode.INVALID_ARGUMENT, "texts[1]: is too long", violations=violations))
    ended = run("classify-text", "one", "two")
    assert ended.exit_code == 1
    assert ended.stderr == "headway: INVALID_ARGUMENT: texts[1]: is too long (that is 'two')\n"


def test_an_error_about_a_context_of_all_questions_names_none_of_them(run: Run, server: Any, fault: Any) -> None:
    for arguments, named in ((["who", "--context", "x"], ""), (["--pairs", "who\tx"], r" (that is 'who x')")):
        violations = {"contexts[0]": "is too long"}
        server.rules.faults.append(fault(grpc.StatusCode.INVALID_ARGUMENT, "is too long", violations=violations))
        ended = run("answer-question", *arguments)
        assert (ended.exit_code, ended.stderr) == (1, f"headway: INVALID_ARGUMENT: is too long{named}\n")


def test_a_context_is_sent_as_it_is_in_its_file_and_an_answer_is_one_line(
    run: Run, server: Any, tmp_path: Path
) -> None:
    file = tmp_path / "context.txt"
    file.write_bytes(b"a\r\nb\r\n")
    ended = run("answer-question", "who", "--context-file", str(file))
    assert ended.stdout == "0  4  0.500  a b\n"
    assert list(server.rules.requests[-1].contexts) == ["a\r\nb\r\n"]


def test_a_server_that_is_not_there_is_named(run: Run) -> None:
    ended = run("list-models", "--server", "127.0.0.1:1", "--timeout", "2")
    assert ended.exit_code == 1
    assert ended.stderr.endswith("is a headway-server running at 127.0.0.1:1?\n")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate-text", "one", "--no-such-option"], "No such option"),
        (["generate-text", "--file", "absent.txt"], "absent.txt: No such file"),
        (["classify-image", "absent.png"], "absent.png: No such file"),
        (["generate-text", "one", "--seed", "-1"], "out of range"),
        (["generate-text", "one", "--timeout", "0"], "timeout"),
        (["generate-text", "one", "--logit-bias", "17"], "'17' is not a token id and a number"),
        (["generate-text", "one", "--logit-bias", "a=1"], "'a=1' is not a token id and a number"),
        (["generate-text", "one", "--json-schema", "absent.json"], "absent.json: No such file"),
        (["generate-text", "one", "--regex", "a", "--choice", "a"], "regex and choices are given"),
        (["generate-text", "one", "--sample-count", "2", "--stream"], "a stream cannot have --sample-count"),
        (["chat", "-m", "hello"], "'hello' does not begin with system:, user:, assistant:"),
        (["chat", "-m", "human:hello"], "'human:hello' does not begin with"),
        (["load", "juggling", "--rate", "1"], "juggling"),
        (["load", "classify-text"], "give one of a rate, a replay"),
        (["load", "classify-text", "--rate", "1", "--concurrency", "1"], "give one of a rate, a replay"),
        (["load", "classify-text", "--rate", "1e9"], "10000"),
        (["load", "classify-text", "--rate", "1", "--duration", "1e9"], "3600"),
        (["load", "classify-text", "--rate", "1", "--stream"], "no streaming RPC"),
        (["load", "--rate", "1"], "there is nothing to call"),
        (["load", "classify-text", "--scenario", "absent.toml"], "absent.toml: No such file"),
        (["load", "classify-text", "--rate", "1", "--option", "top_k"], "'top_k' has no value"),
        (["load", "classify-text", "--rate", "1", "--option", "top_k=x"], "classify-text: "),
        (["load", "classify-text", "--rate", "1", "--slo", "quick"], "'quick' is no objective"),
        (["load", "classify-text", "--find-max"], "--find-max needs a --slo"),
        (["load-compare", "same.json", "same.json"], "same.json: No such file"),
    ],
)
def test_wrong_usage_ends_with_code_2(run: Run, server: Any, arguments: list[str], message: str) -> None:
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert server.rules.requests == []


def test_input_that_is_not_text_is_told(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"M\xfcnchen\n")
    ended = run("classify-text", "--file", str(file))
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert "not UTF-8" in ended.stderr


def test_the_installed_program_reads_stdin_and_survives_a_reader_that_leaves(server: Any) -> None:
    command = [str(Path(sys.executable).with_name("headway")), "translate-text", "--server", server.address]
    whole = subprocess.run(command, input="a dog\n", capture_output=True, text=True, check=True)
    assert (whole.stdout, whole.stderr) == ("A DOG\n", "")
    piped = f"{' '.join(command)} | head -n 1"
    left = subprocess.run(piped, input="word\n" * 5000, capture_output=True, text=True, shell=True, check=True)
    assert (left.stdout, left.stderr) == ("WORD\n", "")


def test_version(run: Run) -> None:
    assert run("--version").stdout.startswith("headway-client 0.")


def test_who_waits_for_a_server_that_is_not_there_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "_TOLD_AFTER_S", 0.2)
    ended = CliRunner().invoke(app, ["list-models", "--server", "127.0.0.1:1", "--timeout", "1"])
    told, failed = ended.stderr.splitlines()
    assert told == "headway: waiting for 127.0.0.1:1; Ctrl-C ends"
    assert failed.startswith("headway: UNAVAILABLE")


def test_who_calls_a_port_of_this_machine_where_nobody_listens_is_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "_REFUSED_S", 0.1)
    for server in ("127.0.0.1:1", "localhost:1"):
        ended = CliRunner().invoke(app, ["list-models", "--server", server])
        (told,) = ended.stderr.splitlines()
        assert told.startswith(f"headway: nothing listens at {server}; start a headway-server there, or give --timeout")
        assert ended.exit_code == 1


def test_who_is_answered_late_is_told_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "_TOLD_AFTER_S", 0.5)
    assert "waiting for" not in run("list-models").stderr


def test_a_scan_that_finds_nothing_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "scan_store", lambda _: ())
    ended = run("scan-store")
    assert (ended.stdout, ended.stderr) == ("", "headway: nothing has changed\n")
    assert run("scan-store", "--json").stdout == ""


def test_the_help_has_every_command_with_its_first_sentence(run: Run) -> None:
    """Which are read without importing the commands' modules."""
    shown = re.sub(r"\n {10,}", " ", run("--help").stdout)
    options, *groups = re.split(r"\n\n(?=\S[^\n]*:\n)", shown.partition("Options:")[2])
    assert "--install-completion" in options
    assert len(groups) > 3
    rows = dict(re.findall(r"^  ([a-z][\w-]*) {2,}(.*\.)$", "\n".join(groups), flags=re.MULTILINE))
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # of a group
    assert rows == {name: " ".join(one.help.partition("\n\n")[0].split()) for name, one in commands.items()}


def test_a_flag_has_one_spelling_in_all_commands() -> None:
    spellings: dict[str, set[tuple[str, ...]]] = {}
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]  # of a group
        for parameter in command.params:
            words = (*parameter.opts, *parameter.secondary_opts)
            for word in words if parameter.param_type_name == "option" else ():
                spellings.setdefault(word, set()).add(words)
    assert {word: found for word, found in spellings.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("embed-", {"embed-text", "embed-image"}), ("embed-text --norm", {"--normalize"}), ("spe", {"speak"})],
)
def test_a_shell_completes_commands_and_flags(typed: str, expected: set[str]) -> None:
    asked = {"_HEADWAY_COMPLETE": "complete_bash", "COMP_WORDS": f"headway {typed}"}
    environment = os.environ | asked | {"COMP_CWORD": str(len(typed.split()))}
    command = [str(Path(sys.executable).with_name("headway"))]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert set(completed.stdout.split()) == expected


WRITING = [
    ["generate-image", "a", "--output"],
    ["speak", "a", "--format", "wav", "--output"],
    ["caption", "IMAGE", "--attention"],
    ["segment", "IMAGE", "--everything", "--output"],
    ["segment", "IMAGE", "--everything", "--overlay"],
    ["classify-pixels", "IMAGE", "--output"],
    ["classify-pixels", "IMAGE", "--overlay"],
    ["estimate-depth", "IMAGE", "--output"],
    ["inspect-text", "a", "--picture"],
    ["inspect-image", "IMAGE", "--picture"],
    ["inspect-generation", "a", "--picture"],
    ["inspect-translation", "a", "--picture"],
    ["infer", "model", "--input", "x=[1]", "--output"],
    ["load", "classify-text", "--concurrency", "1", "--report"],
    ["load", "classify-text", "--concurrency", "1", "--html"],
    ["load-compare", "IMAGE", "IMAGE", "--html"],
]


def test_every_flag_that_writes_a_file_is_tried() -> None:
    writes = "Write .*|PNG file|Audio file|Draw .* FILE"
    flags = {
        (name, parameter.opts[0])
        for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]  # of a group
        for parameter in command.params
        if "FILE" in (parameter.metavar or "") and re.match(writes, parameter.help or "")
    }
    assert flags == {(words[0], words[-1]) for words in WRITING}


@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_file_in_no_folder_is_refused_before_a_call_is_made(command: list[str], tmp_path: Path, server: Any) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(b"x")
    file = tmp_path / "missing" / "out.png"
    words = [str(image) if word == "IMAGE" else word for word in command]
    ended = CliRunner().invoke(app, [*words, str(file)], env={"HEADWAY_SERVER": server.address})
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.replace("\n", "") == f"headway: {file}: cannot be written; name a file in an existing folder"
    assert not server.rules.requests
