"""The command line, `headway`."""

from headway_client.cli.app import app

__all__ = ["app"]
