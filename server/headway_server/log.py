"""Structured log lines on stderr; stdout is for the ready line alone.

An error is logged with its traceback, without the values of variables: those are what callers sent. Where a value or a
message holds what callers sent all the same, it stays within its line: no caller writes lines of his own.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from io import StringIO
from typing import Final, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, ExcInfo, Processor

_MAX_FRAMES: Final = 20
"""Most frames of a traceback in a JSON line; the middle ones are left out."""
_GRPC_LOGGER: Final = "grpc._cython.cygrpc"


class _LossyStream:
    """A text stream that drops what cannot be written, so that a closed log does not fail a call."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes `text`, or drops it."""
        with suppress(OSError):
            self._stream.write(text)
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
        _escape_values,
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write_traceback),
    ]


def _escape_values(_: object, __: str, line: EventDict) -> EventDict:
    """Escapes what would begin a new line or steer a terminal; JSON does so by itself."""
    for key, value in line.items():
        if isinstance(value, str) and not value.isprintable():
            line[key] = _escape(value)
    return line


def _write_traceback(stream: TextIO, error: ExcInfo) -> None:
    """Writes a traceback, each of its lines behind a mark, so that none reads as a line of the log."""
    text = StringIO()
    structlog.dev.plain_traceback(text, error)
    stream.write("".join(f"\n | {_escape(part)}" for part in text.getvalue().strip("\n").split("\n")))


def _escape(text: str) -> str:
    """Writes characters that are not printed as Python writes them in a string."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _is_about_the_server(record: logging.LogRecord) -> bool:
    """Returns False for gRPC's complaint about a caller that left while an answer was being written to it."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"  # a class of gRPC's private module
