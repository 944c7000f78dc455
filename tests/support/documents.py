"""Tables, names and commands of the documents, as tests hold them against the code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import typer

_FENCED = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)


def pages_of_today(root: Path) -> list[Path]:
    """The pages of what is so now, below the root: all but the changes, and what was tried on a day."""
    places = ("*.md", "docs/*.md", "benchmarks/*.md", "training/*.md", "models/*/*/*.md")
    found = sorted(page.relative_to(root) for place in places for page in root.glob(place))
    return [page for page in found if page.name != "CHANGELOG.md"]


def without_code(text: str) -> str:
    """A document without its blocks of code."""
    return _FENCED.sub("", text)


def rows(document: Path, head: str) -> list[list[str]]:
    """The cells of the rows of the tables below a row that begins with `head`."""
    lines = document.read_text(encoding="utf-8").split("\n")
    starts = [number for number, line in enumerate(lines) if line.startswith(f"| {head} |")]
    assert starts, f"{document.name} has no table {head}"
    table = []
    for start in starts:
        for line in lines[start + 2 :]:
            if not line.startswith("|"):
                break
            table.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return table


def names(text: str) -> set[str]:
    """What stands between backticks."""
    return set(re.findall(r"`([^`]+)`", text))


def first_names(document: Path, head: str) -> set[str]:
    """What stands between backticks in the first cells of a table."""
    return set().union(*(names(row[0]) for row in rows(document, head)))


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as a renderer of Markdown makes them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", without_code(text), flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        count = sum(one == anchor or re.fullmatch(rf"{re.escape(anchor)}-\d+", one) is not None for one in found)
        found.append(f"{anchor}-{count}" if count else anchor)
    return set(found)


def called(root: Path, documents: Iterable[Path], program: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the calls of a program in blocks of code and between backticks: where, and its words."""
    begin = re.compile(rf"(?:^|[\s`/(]){program}(?= [\w\-/.])([^`#|>)]*)")
    for document in documents:
        text = (root / document).read_text(encoding="utf-8")
        blocks = [re.sub(r"\\\n\s*", " ", block) for block in _FENCED.findall(text)]
        inline = [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", without_code(text))]
        for line in (line for block in (*blocks, *inline) for line in block.split("\n")):
            for found in begin.finditer(line):
                yield f"{document}: {line.strip()}", found[1].split()


def flags_of(app: typer.Typer) -> dict[str, set[str]]:
    """The flags of each command of a program, and under the empty name those of the program."""
    group = typer.main.get_command(app)
    commands = {"": group} | getattr(group, "commands", {})
    return {
        name: {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        for name, command in commands.items()
    }


def unknown_flags(words: Sequence[str], commands: Mapping[str, set[str]], default: str | None = None) -> list[str]:
    """The flags among a call's words that its command does not have; or the command, if there is none such.

    Args:
        words: Those after the program's name.
        commands: Flags of each command.
        default: The command that is meant where none is named.
    """
    stands_in = words[0].startswith("-") or words[0].isupper()  # the program's own flags, or any command of it
    command = words[0] if words[0] in commands else "" if stands_in and default is None else default
    if command is None:
        return [words[0]]
    flags = [match[0] for word in words if (match := re.match(r"--[a-z][\w-]*", word))]
    return [flag for flag in flags if flag not in commands[command] | {"--help"}]


def values_of(document: Path, key: str) -> set[str]:
    """The values of a key in a block of code, `key  a | b`, which may go on over further lines."""
    text = document.read_text(encoding="utf-8")
    found = re.search(rf"^ *{key}:? +(.*(?:\n +\| .*)*)", text, flags=re.MULTILINE)
    assert found, f"{document.name} has no {key}"
    return set(re.split(r"\s*\|\s*", found[1].strip()))
