"""`headway-server keys`: makes, lists and removes API keys. The access file holds only their hashes."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from headway_server.errors import AccessError
from headway_server.serving.access import AccessFile, format_grant, new_key, read_text
from headway_server.serving.files import replace_file

_ENVIRONMENT: Final = "HEADWAY_ACCESS_FILE"
_BUDGETS: Final = {
    "calls-per-s": (float, "calls a second, on average"),
    "burst": (int, "calls at once after a pause (default: --calls-per-s)"),
    "concurrency": (int, "concurrent calls"),
    "tokens-per-minute": (int, "input and output tokens, on average"),
}


def main(arguments: Sequence[str]) -> None:
    """Runs `headway-server keys` with the arguments after it."""
    parser = argparse.ArgumentParser(prog="headway-server keys", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="make a key, print it once, and add its hash to the file")
    create.add_argument("name", help="name of the key: letters, digits, '.', '_' and '-'")
    create.add_argument(
        "--scope",
        action="append",
        required=True,
        dest="scopes",
        help="scope: admin, task:TASK or model:NAME, where * matches any characters; may be repeated",
    )
    for budget, (kind, text) in _BUDGETS.items():
        create.add_argument(f"--{budget}", type=kind, help=text)
    create.add_argument("--expires", type=datetime.fromisoformat, help="expiry, such as 2027-01-31 (UTC)")
    list_ = commands.add_parser("list", help="print name, scopes and budget of every key")
    revoke = commands.add_parser("revoke", help="remove a key from the file")
    revoke.add_argument("name")
    for command in (create, list_, revoke):
        command.add_argument(
            "--access-file",
            type=Path,
            default=os.environ.get(_ENVIRONMENT) or None,
            help=f"access file (TOML) [env: {_ENVIRONMENT}]",
        )
    given = parser.parse_args(list(arguments))
    if given.access_file is None:
        parser.error(f"--access-file is missing; give it, or set {_ENVIRONMENT}")
    try:
        if given.command == "create":
            _create(given)
        elif given.command == "list":
            _list(given.access_file)
        else:
            _revoke(given.access_file, given.name)
    except AccessError as error:
        parser.exit(2, f"headway-server: {error}\n")


def _create(given: argparse.Namespace) -> None:
    """Adds a key to the file and prints it."""
    path: Path = given.access_file
    text = read_text(path) or ""
    if given.name in AccessFile.parse(text, str(path)).keys:
        raise AccessError(f"{path}: has a key {given.name}; choose another name, or revoke that one first")
    names = ["scopes", *(budget.replace("-", "_") for budget in _BUDGETS), "expires"]
    options = {name: value for name in names if (value := getattr(given, name)) is not None}
    key = new_key()
    _write(path, f"{text.rstrip()}\n\n{format_grant(given.name, key, options)}".lstrip())
    sys.stdout.write(f"{key}\n")
    sys.stderr.write(f"Save this key now: {path} holds only its hash. A running server accepts it within seconds.\n")


def _list(path: Path) -> None:
    for name, grant in sorted(AccessFile.read(path).keys.items()):
        fields = grant.model_dump(mode="json", exclude_none=True, exclude={"sha256", "scopes"})
        ended = "  EXPIRED" if grant.expires is not None and _utc(grant.expires) <= datetime.now(UTC) else ""
        budget = " ".join(f"{field}={value}" for field, value in fields.items())
        sys.stdout.write(f"{name}  {','.join(grant.scopes)}  {budget}".rstrip() + ended + "\n")


def _revoke(path: Path, name: str) -> None:
    """Removes only the table of a key from the file."""
    before = AccessFile.read(path)
    if name not in before.keys:
        raise AccessError(f"{path}: has no key {name}")
    header = re.compile(rf"^\s*\[\s*keys\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*\]")
    kept, is_inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.lstrip().startswith("["):
            is_inside = header.match(line) is not None
        if not is_inside:
            kept.append(line)
    text = "".join(kept)
    after = before.model_copy(update={"keys": {key: grant for key, grant in before.keys.items() if key != name}})
    if AccessFile.parse(text, str(path)) != after:
        raise AccessError(f"{path}: the key {name} has no table of its own; remove it by hand")
    _write(path, text)


def _write(path: Path, text: str) -> None:
    """Checks the new text and replaces the file atomically.

    Raises:
        AccessError: The text is wrong, or the file cannot be written.
    """
    AccessFile.parse(text, str(path))
    try:
        replace_file(path, text)
    except OSError as error:
        raise AccessError(f"{path}: cannot be written: {error.strerror}") from error


def _utc(when: datetime) -> datetime:
    return when if when.tzinfo else when.replace(tzinfo=UTC)
