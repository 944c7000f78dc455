"""The commands of `headway`, gathered."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from headway_client.cli import chat, embedding, load, server, tagging, tasks, translation

app = typer.Typer(
    name="headway",
    help="Calls a headway server.",
    epilog="Exit codes: 0 all went well, 1 a call failed, 2 the command line or an input file is wrong.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(tasks.generate)
app.command()(chat.chat)
app.command()(translation.translate)
app.command()(tasks.classify)
app.command()(tagging.tag)
app.command()(embedding.embed)
app.command()(tasks.label)
app.command()(embedding.embed_images)
app.command()(server.models)
app.command()(server.model)
app.command()(server.health)
app.command()(load.load)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headway-client {version('headway-client')}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Calls a headway server."""
