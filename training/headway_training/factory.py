"""Factories of the user's own, looked for by name before their code runs: PyTorch, which they import, takes seconds."""

from __future__ import annotations

import ast
import difflib
import pkgutil
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

FORM = "give it as package.module:function, importable from here"
DEFAULT_FUNCTION = "build"
"""The function of a factory's name without one."""


def check_factory(name: str, default: str | None = DEFAULT_FUNCTION) -> None:
    """Checks that what `package.module:function` names is there, as far as its source shows.

    Args:
        name: The name.
        default: The function where none is named; None: any module will do.

    Raises:
        ValueError: There is no such module or function; a similar name is told, if there is one.
    """
    module, _, function = name.partition(":")
    file = _find_source(name, module)
    function = function or default or ""
    names = _names_of(file) if function and file is not None else None
    if names is not None and function not in names:
        raise ValueError(f"{name}: {module} has no function {function!r}{_similar(function, names)}; {FORM}")


def _find_source(name: str, module: str) -> Path | None:
    """Finds the file of a module, from the folder at hand first; None if it has no source, or is imported already."""
    if module in sys.modules:
        return None
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        path: Sequence[str] | None = None
        spec: ModuleSpec | None = None
        for depth, part in enumerate(parts := module.split("."), start=1):
            whole = ".".join(parts[:depth])
            parent = spec
            spec = _find_spec(whole, path) if part and path != [] else None
            if spec is None:
                if parent is not None and _makes_modules(parent):
                    return None
                known = [found.name for found in pkgutil.iter_modules([here] if path is None else path)]
                raise ValueError(f"{name}: No module named {whole!r}{_similar(part, known)}; {FORM}")
            path = list(spec.submodule_search_locations or ())
    finally:
        sys.path.remove(here)
    return None if spec is None else _source_of(spec)


def _source_of(spec: ModuleSpec) -> Path | None:
    return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None


def _makes_modules(package: ModuleSpec) -> bool:
    """True if the code of a package may say where its modules are, or make them."""
    source = _source_of(package)
    names = set() if source is None else _names_of(source)
    return names is None or not names.isdisjoint(("__path__", "modules", "meta_path"))


def _find_spec(module: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """As `importlib.util.find_spec`, which imports the packages that a module is in."""
    found = (finder.find_spec(module, path) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _names_of(file: Path) -> set[str] | None:
    """Returns all names that a module's source gives to anything; None if others may come as it is run."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):  # told when it is imported
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return None if names & {"*", "__getattr__", "exec", "globals", "locals", "setattr", "vars"} else names


def _similar(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, sorted(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""
