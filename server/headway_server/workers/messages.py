"""What a supervisor tells a worker, and a worker its supervisor and the supervisor the world."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from headway_server.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a worker is and has."""

    index: int
    num_workers: int
    settings: ServerSettings
    cores: tuple[int, ...]
    """Those that it runs on."""
    counts: int
    """File descriptor of what all workers count together."""
    folder: Path
    """Of all processes of the server, and of no others."""
    image_secret: bytes
    """Key of the ids of prepared images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the ready line says."""

    address: str
    num_models: int
    num_rejected: int
    device: str
    num_threads: int
    num_lanes: int
    http: str | None = None
    num_workers: int = 1

    def announce(self) -> None:
        """Writes the line to stdout, where nothing else is ever written."""
        workers = f" workers={self.num_workers}" if self.num_workers > 1 else ""
        http = f" http={self.http}" if self.http else ""
        sys.stdout.write(
            f"headway-server ready on {self.address} models={self.num_models} rejected={self.num_rejected} "
            f"device={self.device} threads={self.num_threads} lanes={self.num_lanes}{workers}{http}\n"
        )
        sys.stdout.flush()
