"""`headway-server`, and `python -m headway_server`.

Importing what serves takes a second, and the first process of a container ignores every signal that it has no handler
for: so a handler is set before that. Once the server runs it has handlers of its own, which drain it.

After that the process starts itself anew where that gets it huge pages (docs/operations.md has the figures); a signal
that comes meanwhile waits until the handler is set again.
"""

import os
import signal
import sys
from pathlib import Path

_ENDING = (signal.SIGTERM, signal.SIGINT)
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _take_huge_pages() -> None:
    """Starts the program anew, in the same process, with a C library that asks for huge pages for large allocations.

    It reads its tunables when a program starts, and nothing else makes it ask for the memory of ONNX Runtime: weights,
    and what operators write. Where `GLIBC_TUNABLES` is set, whoever starts the server has decided.
    """
    if sys.platform != "linux" or not sys.executable or "GLIBC_TUNABLES" in os.environ:
        return
    try:
        if "[madvise]" not in _PAGES.read_text(encoding="ascii"):
            return  # everyone gets huge pages, or nobody
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 (the program that runs already)
    except OSError:  # a sandbox may hide the file, or allow no new program: ordinary pages do
        return


def _end_at_once(number: int, frame: object) -> None:  # noqa: ARG001 (what Python hands to a handler)
    """Ends a process that does not serve yet."""
    sys.stderr.write("headway-server: stopped before it was ready\n")
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Runs the server."""
    for number in _ENDING:
        signal.signal(number, _end_at_once)
    # gRPC's core writes to stderr by itself and quotes what a peer sent; what fails raises an error besides. It reads
    # this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _take_huge_pages()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)  # which were held back while this program was started anew
    from headway_server.cli import main as serve  # noqa: PLC0415 (after the handlers are there)

    serve()


if __name__ == "__main__":
    main()
