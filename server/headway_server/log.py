"""Structured log lines on stderr; stdout is for the ready line alone.

An error is logged with its traceback, without the values of variables: those are what callers sent.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
from contextlib import suppress
from typing import Final, Literal, TextIO, cast

import structlog
from structlog.typing import Processor

_MAX_FRAMES: Final = 20
"""Most frames of a traceback in a JSON line; the middle ones are left out."""
_PIECE_CHARACTERS: Final = 1024
"""In UTF-8 no more than the 4 KiB that a pipe has room for when it says that it has any."""
_GRPC_LOGGER: Final = "grpc._cython.cygrpc"


class _LossyStream:
    """A text stream that drops what cannot be written at once, so that a log that is closed or full delays no call."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._poll: select.poll | None = None
        with suppress(OSError, ValueError):  # a stream without a file has room
            if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode) or stat.S_ISSOCK(os.fstat(stream.fileno()).st_mode):
                self._poll = select.poll()
                self._poll.register(stream.fileno(), select.POLLOUT)

    def write(self, text: str) -> int:
        """Writes `text`, or drops it, or the rest of it."""
        with suppress(OSError):
            if self._poll is None:
                self._stream.write(text)
            else:
                for start in range(0, len(text), _PIECE_CHARACTERS):
                    if not self._poll.poll(0):
                        break
                    self._stream.write(text[start : start + _PIECE_CHARACTERS])
                    self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """Flushes what was written, or drops it."""
        with suppress(OSError):
            self._stream.flush()


def configure_logging(
    *, level: Literal["debug", "info", "warning", "error"], line_format: Literal["text", "json"]
) -> None:
    """Sends the lines of this package, of the libraries and of `warnings` to stderr in one format.

    Args:
        level: The lowest level that is logged.
        line_format: `text` for people, `json` for programs: one object a line.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderers = _renderers(line_format)
    stream = cast("TextIO", _LossyStream(sys.stderr))  # the loggers write and flush, and nothing else
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    # Of libraries only warnings and errors are logged.
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    logging.captureWarnings(True)
    logging.getLogger(_GRPC_LOGGER).addFilter(_is_about_the_server)


def _renderers(line_format: Literal["text", "json"]) -> list[Processor]:
    """Returns what formats a line. The defaults of both formats would print the variables of every frame."""
    if line_format == "json":
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=_MAX_FRAMES)
        return [structlog.processors.ExceptionRenderer(transformer), structlog.processors.JSONRenderer()]
    return [
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
    ]


def _is_about_the_server(record: logging.LogRecord) -> bool:
    """Returns False for gRPC's complaint about a caller that left while an answer was being written to it."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"  # a class of gRPC's private module
