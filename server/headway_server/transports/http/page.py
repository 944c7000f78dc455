"""The page at `/`: files of this package, with a restrictive content security policy, and the gRPC port in its head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

_FOLDER: Final = Path(__file__).with_name("page")
_INDEX: Final = "index.html"
_PORT: Final = '<meta name="grpc-port" content="{}">'
_ANY_PORT: Final = _PORT.format(50051)
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",  # browsers revalidate their copy
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes(grpc_port: Callable[[], int]) -> list[Route]:
    """Returns a route for each file of the page; no other file is reachable."""
    files = {f"/{file.relative_to(_FOLDER).as_posix()}": file for file in sorted(_FOLDER.rglob("*.*"))}
    index = (_FOLDER / _INDEX).read_text(encoding="utf-8")

    async def answer(_: Request) -> Response:
        return HTMLResponse(index.replace(_ANY_PORT, _PORT.format(grpc_port())), headers=_HEADERS)

    first = [Route(path, answer, methods=["GET"]) for path in ("/", f"/{_INDEX}")]
    return [*first, *(_route(path, file) for path, file in files.items())]


def _route(path: str, file: Path) -> Route:
    async def answer(_: Request) -> Response:
        return FileResponse(file, headers=_HEADERS)

    return Route(path, answer, methods=["GET"])
