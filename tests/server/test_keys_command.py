"""`headway-server keys`: makes, lists and removes keys, and keeps only their hashes."""

import stat
from hashlib import sha256
from pathlib import Path

import pytest

from headway_server import cli
from headway_server.serving.access import Access, AccessFile


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "access.toml"
    monkeypatch.setenv("HEADWAY_ACCESS_FILE", str(path))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Runs the command; returns what it printed."""

    def command(*arguments: str) -> str:
        cli.main(["keys", *arguments])
        return capsys.readouterr().out

    return command


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]):
    def command(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["keys", *arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err

    return command


def test_a_new_key_is_printed_once_and_its_hash_kept(run, file):
    key = run("create", "search", "--scope", "model:gpt*", "--scope", "admin", "--calls-per-s", "2.5").strip()
    assert key not in file.read_text()
    assert sha256(key.encode()).hexdigest() in file.read_text()
    caller = Access(AccessFile.read(file)).identify([("x-api-key", key)])
    assert (caller.name, caller.grant.scopes, caller.grant.calls_per_s) == ("search", ("model:gpt*", "admin"), 2.5)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_what_stands_in_the_file_stays_there_with_its_comments_and_its_mode(run, file):
    kept = '# who may call\n[anonymous]\nscopes = ["task:generation"]  # a demo\n'
    file.write_text(kept)
    file.chmod(0o600)
    run("create", "one", "--scope", "admin", "--expires", "2100-01-31")
    run("create", "two.b", "--scope", "admin", "--concurrency", "3", "--tokens-per-minute", "9", "--burst", "2")
    assert file.read_text().startswith(kept)
    assert (
        run("list")
        == "one  admin  expires=2100-01-31T00:00:00\ntwo.b  admin  burst=2 concurrency=3 tokens_per_minute=9\n"
    )
    run("revoke", "one")
    assert run("list").startswith("two.b")
    run("revoke", "two.b")
    assert file.read_text().rstrip() == kept.rstrip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["access.toml"]


def test_an_expired_key_is_listed_as_such(run, file):
    run("create", "old", "--scope", "admin", "--expires", "2020-01-31")
    assert run("list").endswith("EXPIRED\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("create", "taken", "--scope", "admin"), "has a key taken; choose another name"),
        (("create", "new", "--scope", "admn"), "keys.new.scopes.0: must be admin, task:TASK or model:NAME"),
        (("create", "a b", "--scope", "admin"), "keys.a b: a name has 1 to 64 letters"),
        (("create", "new", "--scope", "admin", "--concurrency", "0"), "keys.new.concurrency: Input should be greater"),
        (("create", "new"), "the following arguments are required: --scope"),
        (("revoke", "absent"), "has no key absent"),
    ],
)
def test_what_cannot_be_done_is_refused_and_the_file_stays_as_it_is(run, refusal, file, arguments, message):
    run("create", "taken", "--scope", "admin")
    before = file.read_text()
    assert message in refusal(*arguments)
    assert file.read_text() == before


def test_the_file_must_be_named_and_a_key_that_does_not_stand_alone_is_not_removed(refusal, file, monkeypatch):
    file.write_text(f'keys.a = {{ sha256 = "{"0" * 64}", scopes = [] }}\n')
    assert "has no table of its own; remove it by hand" in refusal("revoke", "a")
    monkeypatch.delenv("HEADWAY_ACCESS_FILE")
    assert "--access-file is missing; give it, or set HEADWAY_ACCESS_FILE" in refusal("list")


@pytest.mark.parametrize("command", [("create", "new", "--scope", "admin"), ("list",), ("revoke", "new")])
def test_a_file_that_cannot_be_read_is_one_line(refusal, tmp_path, command):
    line = refusal(*command, "--access-file", str(tmp_path))
    assert line == f"headway-server: {tmp_path}: cannot be read: Is a directory\n"
