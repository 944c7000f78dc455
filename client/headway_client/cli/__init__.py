"""The command line, `headway`: one command for each RPC, `chat` to talk to a model, and the load tester.

A command's module is imported when the command is run. So the version and the list of commands come without gRPC.
"""

from __future__ import annotations

import os
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import CodeType
from typing import Annotated, Any

# gRPC's core logs every failed handshake to stderr; the call's error already tells it. gRPC reads this at import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import typer
from typer.core import TyperGroup

__all__ = ["app"]

_COMMANDS: dict[str, dict[str, tuple[str, ...]]] = {
    "Texts": {
        "generation": ("generate-text", "chat"),
        "text_to_text": ("translate-text", "rewrite-text"),
        "classification": ("classify-text", "classify-tokens", "embed-text", "score-text"),
        "answers": ("answer-question", "fill-mask"),
        "images": ("rank-texts",),
    },
    "Images and videos": {
        "captions": ("caption",),
        "image_generation": ("generate-image",),
        "classification": ("classify-image", "classify-video", "embed-image"),
        "detection": ("detect-objects",),
        "pixels": ("classify-pixels", "estimate-depth"),
        "segmentation": ("segment",),
        "images": ("rank-images", "prepare-image"),
    },
    "Sounds": {
        "speech": ("transcribe", "speak"),
        "classification": ("classify-audio",),
    },
    "Arrays, and what a model attends to": {
        "tensors": ("infer",),
        "inspection": ("inspect-text", "inspect-image", "inspect-generation", "inspect-translation"),
    },
    "Server": {
        "models": (
            "list-models",
            "get-model",
            "list-bundles",
            "load-model",
            "unload-model",
            "scan-store",
            "set-route",
            "set-alias",
            "health",
        ),
    },
    "Load tests": {
        "load": ("load", "load-compare"),
    },
}
"""The commands by their groups and modules. The function of a command has its name."""
_MODULES = {name: module for group in _COMMANDS.values() for module, names in group.items() for name in names}


class _Commands(TyperGroup):
    """Commands that are made when they are asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        del self.commands  # the one below takes its place

    @cached_property
    def commands(self) -> dict[str, Any]:  # type: ignore[override]  # all of them, for who looks through them
        """All commands by name."""
        return {name: _make(name) for name in _MODULES}

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (of the base class)
        """Returns the names of all commands, by groups."""
        return list(_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 (of the base class)
        """Makes a command; None if there is none of that name."""
        return _make(cmd_name) if cmd_name in _MODULES else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 (of the base class)
        """Writes the commands by groups, with the first sentence of each."""
        width = max(map(len, _MODULES))
        for group, modules in _COMMANDS.items():
            with formatter.section(group):
                rows = [(name.ljust(width), _sentence(name)) for names in modules.values() for name in names]
                formatter.write_dl(rows)


def _make(name: str) -> Any:
    """Imports the module of a command, and makes the command of its function."""
    one = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    one.command(name)(getattr(import_module(f"{__name__}.{_MODULES[name]}"), _function_of(name)))
    return typer.main.get_command(one)


def _sentence(name: str) -> str:
    """Returns the first paragraph of a command's docstring, from the code of its module, which is not imported."""
    module = f"{__name__}.{_MODULES[name]}"
    spec = find_spec(module)
    assert spec is not None, "a test makes every command"
    code = spec.loader.get_code(module)  # type: ignore[union-attr]  # loaders of modules in files and archives have it
    constants = (one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == _function_of(name))
    return " ".join(str(next(constants).co_consts[0]).partition("\n\n")[0].split())


def _function_of(name: str) -> str:
    return name.replace("-", "_")


app = typer.Typer(
    cls=_Commands,
    name="headway",
    help="Calls a headway server.",
    epilog="Exit codes: 0 success, 1 a call failed, 2 the command line or an input file is wrong, "
    "3 a load test missed an objective.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 (takes as long as half of typer)

        typer.echo(f"headway-client {version('headway-client')}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Calls a headway server."""
