"""Bundles that are signed, and servers that take no others."""

import shutil
import subprocess
from pathlib import Path

import pytest
import tiny_bundles
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from headway_server.bundles import (
    SIGNATURE_FILE,
    TrustedKeys,
    VersionSettings,
    describe_files,
    open_bundle,
    sign_bundle,
)
from headway_server.errors import BundleError, BundleRejectedError, StoreError
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings


def write_keys(folder: Path, name: str, key: object = None) -> tuple[Path, Path]:
    """Writes a private key and its public half."""
    key = key or ed25519.Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    pem = serialization.Encoding.PEM
    private.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())  # type: ignore[attr-defined]
    )
    public.write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    )
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path, "mine")


@pytest.fixture
def signed(tmp_path: Path, keys: tuple[Path, Path]) -> Path:
    folder = tiny_bundles.write_topic_bundle(tmp_path / "store").path
    sign_bundle(folder, keys[0])
    return folder


def test_a_signed_bundle_is_opened_by_who_trusts_the_key_and_by_who_asks_for_none(signed, keys):
    assert open_bundle(signed, TrustedKeys.read(keys[1])).manifest.name == "topics"
    assert open_bundle(signed).manifest.name == "topics"
    assert SIGNATURE_FILE not in describe_files(signed)


def test_one_of_several_keys_is_enough(signed, keys, tmp_path):
    _, other = write_keys(tmp_path, "other")
    both = tmp_path / "both.pem"
    both.write_bytes(b"the old one:\n" + other.read_bytes() + b"the new one:\n" + keys[1].read_bytes())
    open_bundle(signed, TrustedKeys.read(both))


def change_a_space(folder: Path) -> None:
    file = folder / "bundle.json"
    file.write_text(file.read_text() + " ")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / SIGNATURE_FILE).unlink(), "bundle.json.sig is missing, and this server takes signed"),
        (lambda folder: (folder / SIGNATURE_FILE).write_bytes(b""), "not a signature of the manifest"),
        (lambda folder: (folder / SIGNATURE_FILE).write_bytes(b"x" * 64), "not a signature of the manifest"),
        (lambda folder: (folder / SIGNATURE_FILE).write_bytes(b"x" * 10**6), "not a signature of the manifest"),
        (change_a_space, "not a signature of the manifest"),
        (lambda folder: (folder / "model.onnx").write_bytes(b"x"), "model.onnx has 1 bytes, the manifest says"),
    ],
)
def test_a_bundle_that_was_changed_after_it_was_signed_is_refused(signed, keys, damage, problem):
    damage(signed)
    with pytest.raises(BundleError, match=problem):
        open_bundle(signed, TrustedKeys.read(keys[1]))


def test_a_key_that_is_not_trusted_is_of_no_use(signed, tmp_path):
    private, public = write_keys(tmp_path, "other")
    with pytest.raises(BundleError, match="by a key that is trusted here"):
        open_bundle(signed, TrustedKeys.read(public))
    sign_bundle(signed, private)
    open_bundle(signed, TrustedKeys.read(public))


@pytest.mark.parametrize("content", [b"", b"nothing", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_a_file_that_holds_no_keys_is_refused(tmp_path, content):
    (tmp_path / "keys.pem").write_bytes(content)
    with pytest.raises(StoreError, match=r"keys\.pem: "):
        TrustedKeys.read(tmp_path / "keys.pem")


def test_keys_of_another_kind_are_refused(signed, tmp_path):
    private, public = write_keys(tmp_path, "ec", ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(StoreError, match="must contain Ed25519 public keys"):
        TrustedKeys.read(public)
    with pytest.raises(StoreError, match="is no Ed25519 key"):
        sign_bundle(signed, private)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_makes_the_same_signatures(signed, keys):
    command = ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", keys[0], "-in", signed / "bundle.json", "-out"]
    subprocess.run([*command, signed / "by-openssl"], check=True)
    assert (signed / "by-openssl").read_bytes() == (signed / SIGNATURE_FILE).read_bytes()


async def test_a_server_that_asks_for_signatures_takes_no_other_bundle(signed, keys, tmp_path, runtime):
    versions = VersionSettings(require_signed=keys[1], poll_interval=0)
    host = ModelHost.open(runtime, ServerSettings(store=tmp_path / "store", versions=versions))
    tiny_bundles.write_topic_bundle(tmp_path / "store", version="2")
    with pytest.raises(BundleRejectedError, match=r"topics/2: bundle\.json\.sig is missing"):
        await host.load("topics", "2")
    sign_bundle(tmp_path / "store" / "topics" / "2", keys[0])
    await host.load("topics", "2")
    assert len(host.models) == 2
    host.close()


def test_a_server_does_not_start_without_its_keys(signed, tmp_path, runtime):
    settings = ServerSettings(store=tmp_path / "store", versions=VersionSettings(require_signed=tmp_path / "none.pem"))
    with pytest.raises(StoreError, match=r"none\.pem: cannot be read as public keys"):
        ModelHost.open(runtime, settings)


def test_the_command_signs_bundles_that_are_whole(signed, keys):
    from typer.testing import CliRunner

    from headway_export.signing import app

    (signed / SIGNATURE_FILE).unlink()
    ended = CliRunner().invoke(app, [str(signed), "--key", str(keys[0])])
    assert (ended.exit_code, ended.stdout) == (0, f"signed {signed}\n")
    open_bundle(signed, TrustedKeys.read(keys[1]))
    (signed / "model.onnx").write_bytes(b"x")
    ended = CliRunner().invoke(app, [str(signed), "--key", str(keys[0])])
    assert ended.exit_code == 1
    assert ended.stderr.startswith("headway-sign: ")
