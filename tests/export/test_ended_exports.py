"""Exports that are told to end: nothing of them is left in the store, and what was there before stays."""

import signal
from pathlib import Path

import pytest
import tiny_huggingface
from typer.testing import CliRunner

from headway_export import cli, exporter
from headway_export.cli import app
from headway_export.huggingface import plain
from headway_server.bundles import staging, writer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bert"
    tiny_huggingface.write_model(folder, "bert", "ForSequenceClassification")
    tiny_huggingface.write_tokenizer(folder)
    return folder


def _within(owner, name: str, number: signal.Signals, monkeypatch) -> None:
    """Raises a signal, twice, when a function returns."""
    real = getattr(owner, name)

    def told(*given, **named):
        result = real(*given, **named)
        for _ in range(2):  # people press the keys again
            signal.raise_signal(number)
        return result

    monkeypatch.setattr(owner, name, told)


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ((plain, "save_tensors"), signal.SIGHUP),  # weights in fp32 are being written
        ((exporter, "save"), signal.SIGTERM),  # and a graph
        ((exporter, "write_manifest"), signal.SIGINT),
    ],
    ids=["weights", "graph", "manifest"],
)
def test_an_export_that_is_told_to_end_leaves_nothing(folder, tmp_path, monkeypatch, where, number):
    if where[0] is plain:
        monkeypatch.setattr("headway_export.huggingface.kinds.is_worth_mapping", lambda *_, **__: True)
    _within(*where, number, monkeypatch)
    store = tmp_path / "store"
    before = signal.getsignal(number)
    result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store), "--precision", "fp32"])
    assert result.exit_code == 128 + number
    assert f"stopped by {number.name}; no unfinished version is left" in " ".join(result.output.split())
    assert not store.exists() or not list(store.iterdir())
    assert signal.getsignal(number) is before


def test_a_version_stays_where_its_replacement_is_told_to_end(tmp_path, monkeypatch):
    """Even between the two renames."""
    store = tmp_path / "store"
    target = store / "model" / "1"
    target.mkdir(parents=True)
    (target / "old").touch()
    manifest = type("Manifest", (), {"name": "model", "version": "1"})
    monkeypatch.setattr(writer, "check_bundle", lambda _: manifest)
    real = Path.rename

    def rename(path: Path, to: Path) -> Path:
        moved = real(path, to)
        if path == target:
            raise KeyboardInterrupt
        return moved

    def replace_it() -> None:
        with staging.staging_folder(store) as staged:
            monkeypatch.setattr(Path, "rename", rename)
            writer.publish(staged, store, replace=True)

    with pytest.raises(KeyboardInterrupt):
        replace_it()
    assert [path.name for path in store.rglob("*")] == ["model", "1", "old"]


def test_a_version_that_exists_is_told_before_anything_is_made(folder, tmp_path, monkeypatch):
    (tmp_path / "bert" / "1").mkdir(parents=True)
    monkeypatch.setattr(exporter, "trace", lambda *_, **__: pytest.fail("a model is traced"))
    result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(tmp_path), "--precision", "fp32"])
    assert result.exit_code == 2
    assert "exists already; choose another --version" in " ".join(result.output.split())


def test_threads_that_may_not_handle_signals_export_too(monkeypatch):
    monkeypatch.setattr(cli.threading, "current_thread", lambda: None)
    with cli._ending_by_signals():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_removed_is_removed_whole_by_a_process_that_is_told_to_end(tmp_path, monkeypatch):
    (folder := tmp_path / ".staging-1").mkdir()
    real, calls = staging.shutil.rmtree, []

    def rmtree(path: Path, **options: object) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(path, **options)

    monkeypatch.setattr(staging.shutil, "rmtree", rmtree)
    with pytest.raises(KeyboardInterrupt):
        staging.remove_folder(folder)
    assert not folder.exists()
