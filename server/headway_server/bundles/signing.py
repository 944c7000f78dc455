"""Signatures of bundles: Ed25519 (RFC 8032) over the bytes of the manifest, which has the SHA-256 of every file.

A signature is 64 bytes in `bundle.json.sig` beside the manifest, as `openssl pkeyutl -sign -rawin` writes it too. Keys
are PEM files: `openssl genpkey -algorithm ed25519` makes one, `openssl pkey -pubout` gives its public half.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway_server.bundles.manifest import MANIFEST_FILE, SIGNATURE_FILE
from headway_server.errors import BundleError, StoreError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----.+?-----END PUBLIC KEY-----", re.DOTALL)
_SIGNATURE_BYTES = 64
_MAX_KEY_FILE_BYTES = 2**20


class TrustedKeys:
    """Trusted keys, one of which must have signed a bundle."""

    def __init__(self, keys: list[Ed25519PublicKey]) -> None:
        self._keys = keys

    @classmethod
    def read(cls, file: Path) -> TrustedKeys:
        """Reads public keys, one or several PEM blocks; text between them is ignored.

        Raises:
            StoreError: The file cannot be read, has no key, or one that is not Ed25519; or `cryptography` is missing.
        """
        ed25519, serialization = _cryptography()
        try:
            with file.open("rb") as stream:
                blocks = _PEM.findall(stream.read(_MAX_KEY_FILE_BYTES))
            keys = [serialization.load_pem_public_key(block) for block in blocks]
        except (OSError, ValueError) as error:
            raise StoreError(f"{file}: cannot be read as public keys ({_why(error)})") from error
        if not keys or not all(isinstance(key, ed25519.Ed25519PublicKey) for key in keys):
            raise StoreError(
                f"{file}: must contain Ed25519 public keys in PEM; make one with: openssl pkey -in KEY.pem -pubout"
            )
        return cls(keys)

    def check(self, folder: Path, manifest: bytes) -> None:
        """Checks that one of the keys has signed a manifest.

        Args:
            folder: Of the bundle.
            manifest: The bytes that are parsed.

        Raises:
            BundleError: The signature is missing, or for another manifest or by another key.
        """
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 (an extra)

        file = folder / SIGNATURE_FILE
        if not file.is_file():
            raise BundleError(f"{folder}: {SIGNATURE_FILE} is missing, and this server takes signed bundles only")
        with file.open("rb") as stream:
            signature = stream.read(_SIGNATURE_BYTES + 1)
        for key in self._keys:
            try:
                key.verify(signature, manifest)
            except InvalidSignature:
                continue
            return
        raise BundleError(
            f"{folder}: {SIGNATURE_FILE} is not a signature of the manifest by a key that is trusted here"
        )

    def __repr__(self) -> str:
        return f"TrustedKeys({len(self._keys)})"


def sign_bundle(folder: Path, key_file: Path, password: bytes | None = None) -> None:
    """Signs the manifest of a bundle; an older signature is replaced.

    Args:
        folder: Of the bundle.
        key_file: Ed25519 private key in PEM.
        password: Password of that file; None without one.

    Raises:
        BundleError: The manifest is missing, or the signature cannot be written.
        StoreError: The key cannot be read; or `cryptography` is missing.
    """
    ed25519, serialization = _cryptography()
    try:
        key = serialization.load_pem_private_key(key_file.read_bytes(), password)
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{key_file}: cannot be read as a private key ({_why(error)})") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise StoreError(f"{key_file}: is no Ed25519 key; make one with: openssl genpkey -algorithm ed25519")
    try:
        (folder / SIGNATURE_FILE).write_bytes(key.sign((folder / MANIFEST_FILE).read_bytes()))
    except OSError as error:
        raise BundleError(f"{folder}: cannot be signed ({error.strerror})") from error


def _why(error: Exception) -> str:
    return error.strerror or "" if isinstance(error, OSError) else str(error)


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 (an extra)
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ImportError:
        raise StoreError("signatures need a library; run: pip install 'headway-server[signing]'") from None
    return ed25519, serialization
