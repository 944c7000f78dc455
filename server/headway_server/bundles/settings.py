"""How a store is watched, and which of its versions are served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

ROUTES_FILE: Final = "routes.json"


class VersionSettings(BaseModel):
    """New versions in the store, and which of them are served."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    poll_interval: Annotated[float, Field(ge=0, le=86400)] = 5
    """Seconds between two looks at the store for bundles that are new, changed or gone; 0: only when asked, by SIGHUP
    or by ScanStore."""
    max_versions: Annotated[int, Field(ge=1)] | None = None
    """Versions of each model to serve, the newest; those that routes name or that were loaded by a call are served as
    well. Left out: every version of the store."""
    scan_timeout: Annotated[float, Field(gt=0, le=3600)] = 10
    """Seconds that a look at the store may take; what was loaded is served on where it takes longer."""
    load_timeout: Annotated[float, Field(gt=0, le=86400)] = 300
    """Seconds that loading a bundle may take while the server serves."""
    routes_file: Path | None = None
    """File that keeps default versions, aliases and canaries over a restart; left out, `routes.json` in the store."""
    require_signed: Path | None = None
    """File with public keys (Ed25519, PEM) of which one must have signed a bundle; left out, none need be signed. Needs
    `headway-server[signing]`."""
