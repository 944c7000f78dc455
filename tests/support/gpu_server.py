"""A server in a process of its own, for the tests that need a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READY = "headway-server ready on "


def server_command(store: Path, *flags: str) -> tuple[list[str], dict[str, str]]:
    """A server's command, and an environment without settings of others."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    return [sys.executable, "-m", "headway_server", "--store", str(store), "--port", "0", *flags], environment


@contextmanager
def serve(store: Path, log: Path, *flags: str) -> Iterator[str]:
    """Runs a server; yields its ready line."""
    command, environment = server_command(store, *flags)
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        # CUDA's libraries may have something to say before.
        line = next((line for line in process.stdout if line.startswith(READY)), None)
        assert line, log.read_text()
        yield line
    finally:
        process.terminate()
        code = process.wait(60)
        process.stdout.close()
    assert code == 0, log.read_text()
