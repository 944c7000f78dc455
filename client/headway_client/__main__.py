"""The program `headway`; its libraries are the extra `cli`."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Runs the command line, or names the extra to install."""
    if missing := [name for name in ("rich", "typer") if find_spec(name) is None]:
        sys.stderr.write(
            f"headway: the command line needs {' and '.join(missing)}; run: pip install 'headway-client[cli]'\n"
        )
        sys.exit(2)
    from headway_client.cli import app  # noqa: PLC0415 (an extra)

    app()


if __name__ == "__main__":
    main()
