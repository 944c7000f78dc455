"""The table of `docs/clients.md`: what was tried of each client, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.clients.client import Case, Client

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
HEAD = "| client | packages | tried | passed | why the others do not |"


def row(client: Client, cases: list[Case]) -> str:
    """Writes a client's row."""
    passed = sum(not case.error for case in cases)
    reasons = "; ".join(f"{case.name}: {case.fails}" for case in cases if case.fails)
    tried = "; ".join(case.name for case in cases)
    return f"| {client.title} | {client.versions} | {tried} | {passed} of {len(cases)} | {reasons} |"


def told_rows(page: Path = PAGE) -> dict[str, str]:
    """Reads the rows of the page, by client."""
    lines = _lines(page)
    begin, end = _span(lines)
    return {line.split("|")[1].strip(): line for line in lines[begin:end]}


def write_rows(rows: Iterable[str], page: Path = PAGE) -> None:
    """Puts rows in place of those on the page."""
    lines = _lines(page)
    begin, end = _span(lines)
    lines[begin:end] = rows
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(page: Path) -> list[str]:
    return page.read_text(encoding="utf-8").splitlines()


def _span(lines: list[str]) -> tuple[int, int]:
    begin = lines.index(HEAD) + 2
    return begin, next((i for i in range(begin, len(lines)) if not lines[i].startswith("|")), len(lines))
