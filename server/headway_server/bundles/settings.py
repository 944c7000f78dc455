"""Settings of the versions of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

ROUTES_FILE: Final = "routes.json"


class VersionSettings(BaseModel):
    """Versions in the store, and which of them are served."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    poll_interval: Annotated[float, Field(ge=0, le=86400)] = 5
    """Interval of scans of the store for new, changed and removed bundles, in seconds; 0: only on SIGHUP or
    ScanStore."""
    max_versions: Annotated[int, Field(ge=1)] | None = None
    """Newest versions of each model to serve, beside versions in routes and versions loaded by calls. Default: every
    version in the store."""
    scan_timeout: Annotated[float, Field(gt=0, le=3600)] = 10
    """Timeout of a scan of the store, in seconds; loaded models stay served."""
    load_timeout: Annotated[float, Field(gt=0, le=86400)] = 300
    """Timeout of loading a bundle while the server runs, in seconds."""
    routes_file: Path | None = None
    """File of default versions, aliases and canaries. Default: `routes.json` in the store."""
    require_signed: Path | None = None
    """File of trusted public keys (Ed25519, PEM), one of which must have signed each bundle. Default: no signatures
    required. Needs `headway-server[signing]`."""
