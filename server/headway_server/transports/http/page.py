"""The page at `/`: files of this package, with headers that keep the browser to them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_FOLDER: Final = Path(__file__).with_name("page")
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",  # a browser asks whether its copy is the server's
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Page(StaticFiles):
    """Serves the page."""

    def __init__(self) -> None:
        """Looks the files up; raises RuntimeError if the package was installed without them."""
        super().__init__(directory=_FOLDER, html=True)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """See starlette."""
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(404)  # a call of nothing that there is
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response
