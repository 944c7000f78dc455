"""What the repository holds as a whole: sizes, documents and loose ends."""

from __future__ import annotations

import re
from pathlib import Path

from documents import anchors, called, without_code

_MIB = 1 << 20
_MAX_FILE_BYTES = 2 * _MIB
_MAX_MODELS_BYTES = 60 * _MIB

_LOOSE_ENDS = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b")


def _text(path: Path) -> str | None:
    """Text of a file; none for a file that is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def test_no_file_is_large_outside_of_the_models(root: Path, tracked_files: list[Path]) -> None:
    sizes = {path.as_posix(): (root / path).stat().st_size for path in tracked_files}
    large = {name: size for name, size in sizes.items() if size > _MAX_FILE_BYTES and not name.startswith("models/")}
    assert large == {}
    assert sum(size for name, size in sizes.items() if name.startswith("models/")) <= _MAX_MODELS_BYTES


def test_nothing_is_left_to_be_done_in_a_comment(root: Path, tracked_files: list[Path]) -> None:
    loose = []
    for path in tracked_files:
        if path.suffix in {".py", ".md", ".proto", ".toml", ".yml", ".sh"} or path.name in {"Makefile", "Dockerfile"}:
            lines = (_text(root / path) or "").splitlines()
            loose += [f"{path}:{number}" for number, line in enumerate(lines, start=1) if _LOOSE_ENDS.search(line)]
    assert loose == []


def test_the_readme_draws_every_folder(root: Path, tracked_files: list[Path]) -> None:
    folders = {path.parts[0] for path in tracked_files if len(path.parts) > 1 and not path.parts[0].startswith(".")}
    drawn = set(re.findall(r"^(\w+)/ ", (root / "README.md").read_text(), flags=re.MULTILINE))
    assert drawn == folders


def test_every_make_target_of_a_document_exists(root: Path, tracked_files: list[Path]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), flags=re.MULTILINE))
    pages = [path for path in tracked_files if path.suffix == ".md"]
    assert {where: words for where, words in called(root, pages, "make") if words[0] not in targets} == {}


def test_every_relative_link_of_a_document_leads_somewhere(root: Path, tracked_files: list[Path]) -> None:
    broken = []
    for path in (path for path in tracked_files if path.suffix == ".md"):
        text = without_code((root / path).read_text())
        for file, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
            target = root / path.parent / file if file else root / path
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                broken.append(f"{path}: {file}#{anchor}")
    assert broken == []


def test_the_help_names_every_target_a_user_may_call(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)[0].split())
    helped = set(re.findall(r"^([a-z-]+):.*## \S", makefile, flags=re.MULTILINE))
    assert phony == helped
