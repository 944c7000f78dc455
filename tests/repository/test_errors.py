"""Every error of the project has a name of its own."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import grpc

import headway_client
import headway_client.errors
import headway_export.errors
import headway_server.errors
import headway_training.errors

PACKAGES = (headway_client.errors, headway_server.errors, headway_training.errors, headway_export.errors)


def errors_of(module: ModuleType) -> list[type[Exception]]:
    """The errors that a module defines."""
    kinds = inspect.getmembers(module, inspect.isclass)
    return [kind for _, kind in kinds if issubclass(kind, Exception) and kind.__module__ == module.__name__]


def test_no_two_packages_have_an_error_of_the_same_name() -> None:
    names = Counter(kind.__name__ for module in PACKAGES for kind in errors_of(module))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_errors_of_a_package_are_one_tree_that_its_docstring_draws() -> None:
    for module in PACKAGES:
        kinds = errors_of(module)
        roots = [kind for kind in kinds if not set(kind.__mro__[1:]) & set(kinds)]
        assert len(roots) == 1, module.__name__
        assert [kind.__name__ for kind in kinds if kind.__name__ not in (module.__doc__ or "")] == []


def test_no_code_that_the_server_answers_is_unexpected_to_the_client(root: Path) -> None:
    documented = re.findall(r"^\| ([A-Z_]+) \| [A-Z_]+ \|", (root / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    assert len(documented) > 10
    kinds = {code: headway_client.errors.error_type(grpc.StatusCode[code]) for code in {*documented, "UNIMPLEMENTED"}}
    assert headway_client.UnexpectedStatusError not in kinds.values()
    assert kinds["INTERNAL"] is headway_client.InternalError
