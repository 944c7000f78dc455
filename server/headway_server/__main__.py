"""`headway-server`, and `python -m headway_server`.

Importing what serves takes a second, and the first process of a container ignores every signal that it has no handler
for: so a handler is set before that. Once the server runs it has handlers of its own, which drain it.
"""

import os
import signal
import sys


def _end_at_once(number: int, frame: object) -> None:  # noqa: ARG001 (what Python hands to a handler)
    """Ends a process that does not serve yet."""
    sys.stderr.write("headway-server: stopped before it was ready\n")
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Runs the server."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_at_once)
    from headway_server.cli import main as serve  # noqa: PLC0415 (after the handlers are there)

    serve()


if __name__ == "__main__":
    main()
