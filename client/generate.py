"""Writes the blocking client from the asyncio one: `client.py` from `async_client.py`, `streams.py` from its twin.

    python client/generate.py            # writes what has changed
    python client/generate.py --check    # writes nothing; fails if a file is outdated

It works on tokens: `async` and `await` are dropped, and names lose a leading `Async` or `async_`. Code that must wait
differently has a pair of such names in `headway_client/waiting.py` and `headway_client/channel.py`. Docstrings and
comments change with the code, examples included; prose of one client alone is in `_PROSE`.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from itertools import accumulate
from pathlib import Path

FOLDER = Path(__file__).parent / "headway_client"
TWINS = {"async_client.py": "client.py", "async_streams.py": "streams.py"}
"""Files to read, and files to write."""

_NAMES = {
    "aclose": "close",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "StopAsyncIteration": "StopIteration",
}
_PREFIX = re.compile(r"^(_?)(?:Async(?=[A-Z])|async_)")
_PROSE = {
    "The asyncio client": "The blocking client",
    "an asyncio call": "a blocking call",
    "from one event loop.": ". Threads may share it.",
    "Asynchronous iterator": "Iterator",
    "`async with`": "`with`",
}
_HEADING = "# Generated from {source} by `make client`; change that file.\n"


def blocking(source: str) -> str:
    """Returns the blocking twin of an asyncio module, not yet formatted."""
    begins = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    text, end = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (row, column), (end_row, end_column) = token.start, token.end
        if token.type == tokenize.ENDMARKER:
            break
        text += source[end : begins[row - 1] + column]
        end = begins[end_row - 1] + end_column
        if token.type == tokenize.NAME and token.string in {"async", "await"}:
            end += 1  # the blank behind it
        else:
            text += _exchanged(token)
    return text


def _exchanged(token: tokenize.TokenInfo) -> str:
    """Returns the blocking text of a token."""
    if token.type == tokenize.NAME:
        return _name(token.string)
    if token.type not in {tokenize.STRING, tokenize.COMMENT}:
        return token.string
    text = token.string
    for before, after in _PROSE.items():
        text = text.replace(f" {before}" if after[0] == "." else before, after)
    prose_and_code = text.split("```")
    prose_and_code[1::2] = [re.sub(r"\b(?:async|await) ", "", code) for code in prose_and_code[1::2]]
    return re.sub(r"\w+", lambda word: _name(word[0]), "```".join(prose_and_code))


def _name(name: str) -> str:
    return _NAMES.get(name) or _PREFIX.sub(r"\1", name)


def generate(name: str) -> str:
    """Returns the expected twin of the module `name`."""
    path = FOLDER / TWINS[name]
    text = _HEADING.format(source=name) + blocking((FOLDER / name).read_text(encoding="utf-8"))
    ruff = Path(sys.executable).parent / "ruff"
    for command in (["check", "--select", "I,F401", "--fix-only", "--quiet"], ["format", "--quiet"]):
        ran = subprocess.run(  # noqa: S603 (ruff of this environment)
            [ruff, *command, "--no-cache", "--stdin-filename", path, "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        )
        text = ran.stdout
    return text


def main(*, is_check: bool) -> int:
    """Writes the twins, or names the outdated ones; returns the exit code."""
    fresh = {name: generate(name) for name in TWINS}
    old = [name for name, text in fresh.items() if _text(FOLDER / TWINS[name]) != text]
    for name in old:
        if is_check:
            sys.stderr.write(f"{TWINS[name]} is outdated ({name} has changed); run: make client\n")
        else:
            (FOLDER / TWINS[name]).write_text(fresh[name], encoding="utf-8")
    return 1 if is_check and old else 0


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(is_check="--check" in sys.argv[1:]))
