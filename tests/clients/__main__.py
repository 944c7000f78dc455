"""python -m tests.clients [NAME ...]: runs other people's clients against a server, and compares docs/clients.md."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Annotated

import typer
from tests.clients.client import Client, ClientError, clients
from tests.clients.models import write_store
from tests.clients.table import row, told_rows, write_rows
from tests.drills.server import ROOT, running


@contextmanager
def _refusing_proxy() -> Iterator[tuple[str, list[str]]]:
    """A proxy that refuses all; yields its address, and a list that gets whom it was asked for."""
    asked: list[str] = []

    class Refusal(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            line = self.rfile.readline(65536).decode("latin-1").split()
            if len(line) > 1:
                asked.append(line[1])
            self.wfile.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def _http_address(log: Path) -> str:
    """The HTTP address that the server has logged."""
    line = next(line for line in log.read_text(encoding="utf-8").splitlines() if " http " in line)
    return "http://127.0.0.1:" + line.split("port=")[1].split()[0]


def _run(client: Client, folder: Path, variables: dict[str, str]) -> tuple[str, list[str]]:
    """Runs a client; returns its row, and what was not as expected."""
    with _refusing_proxy() as (proxy, asked):
        names = [name for scheme in ("http", "https", "all") for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY")]
        local = dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
        cases = client.run(client.install(folder), {**variables, **dict.fromkeys(names, proxy), **local})
    wrong = [
        f"{case.name}: {case.error or 'passes, although a reason is given'}" for case in cases if not case.is_expected
    ]
    wrong += [f"it called {whom}" for whom in sorted(set(asked))]
    return row(client, cases), wrong if cases else ["it tried nothing"]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Programs, such as python_openai; left out: all.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the environments are kept.")] = Path(".clients"),
    write: Annotated[bool, typer.Option("--write", help="Write the rows into docs/clients.md.")] = False,
) -> None:
    """Runs other people's clients against a server, and compares their rows with docs/clients.md."""
    chosen = {client.title: client for client in clients() if not names or client.name in names}
    if not chosen or (names and len(chosen) != len(set(names))):
        raise typer.BadParameter(f"there are {', '.join(client.name for client in clients())}")
    failures, rows, told = [], {}, told_rows()
    folder = folder.resolve()
    with tempfile.TemporaryDirectory() as made:
        write_store(store := Path(made) / "store")
        with running("--http-port", "0", "--num-slots", "8", store=store) as server:
            variables = {
                "HEADWAY_HTTP": _http_address(server.log),
                "HEADWAY_GRPC": server.address,
                "HEADWAY_STORE": str(store),
                "HEADWAY_PROTO": str(ROOT / "proto"),
            }
            for title, client in chosen.items():
                try:
                    rows[title], wrong = _run(client, folder, variables)
                    print(rows[title], flush=True)  # noqa: T201 (it is a program)
                except ClientError as error:
                    wrong = [str(error)]
                failures += [f"{client.name}: {what}" for what in wrong]
    if write:
        known = told | rows
        write_rows(known[client.title] for client in clients() if client.title in known)
    else:
        failures += [
            f"docs/clients.md says {told.get(title)}" for title, line in rows.items() if told.get(title) != line
        ]
    for failure in failures:
        print(failure, file=sys.stderr)  # noqa: T201
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
