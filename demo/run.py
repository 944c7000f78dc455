"""Starts a real server on the shipped models and puts examples of every RPC to it.

    python demo/run.py [IMAGE]... [--audio FILE]... [--store models]

The exit code is 0 if no answer was wrong, 1 if one was or a call failed, 2 if a file or the store does not exist.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from calls import Calls
from server_process import ServerFailedError, running_server

from headway_client import Client


def main(
    images: Annotated[list[Path] | None, typer.Argument(metavar="[IMAGE]...", help="Your images.")] = None,
    audio: Annotated[list[Path] | None, typer.Option("--audio", help="Your recordings.")] = None,
    store: Annotated[Path, typer.Option("--store", help="Folder of the bundles.")] = Path("models"),
) -> None:
    """Starts a real server on the shipped models and puts examples of every RPC to it."""
    for path in (*(images or ()), *(audio or ())):
        if not path.is_file():
            _fail(f"{path}: no such file", 2)
    if not store.is_dir():
        _fail(f"{store}: no such folder; --store must name a folder of bundles", 2)
    started_s = time.perf_counter()
    try:
        with running_server(store) as (address, ready):
            typer.echo(f"{ready.removeprefix('headway-server ')} after {time.perf_counter() - started_s:.1f} s")
            with Client(address, timeout_s=120) as client:
                client.wait_ready()
                failed = Calls(client).call_every_rpc(images or (), audio or ())
    except ServerFailedError as error:
        _fail(str(error), 1)
    if failed:
        _fail(f"wrong or failed: {'; '.join(failed)}", 1)
    typer.echo(f"No answer was wrong; {time.perf_counter() - started_s:.1f} s in all. The server has stopped.")


def _fail(message: str, exit_code: int) -> NoReturn:
    typer.echo(f"demo: {message}", err=True)
    raise typer.Exit(exit_code)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    app()
