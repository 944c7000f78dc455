"""`headway-sign`: signs bundles, so that servers can be told to take only those."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from headway_server.bundles import open_bundle, sign_bundle
from headway_server.errors import ServerError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Folders STORE/MODEL/VERSION.")],
    *,
    key: Annotated[Path, typer.Option(help="Ed25519 private key in PEM (openssl genpkey -algorithm ed25519).")],
    password_variable: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the password of KEY.")
    ] = None,
) -> None:
    """Check every file of BUNDLE and sign its manifest; the signature is written beside it."""
    password = None if password_variable is None else os.environ.get(password_variable, "").encode()
    try:
        for folder in bundles:
            open_bundle(folder.resolve())
            sign_bundle(folder, key, password)
            typer.echo(f"signed {folder}")
    except ServerError as error:
        typer.echo(f"headway-sign: {error}", err=True)
        raise typer.Exit(1) from error
