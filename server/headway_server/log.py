"""Structured log lines on stderr; stdout is for the ready line alone.

An error is logged with the places it passed and without the values of their variables: those are what callers sent.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Final, Literal, TextIO, cast

import structlog
from structlog.typing import Processor

_MAX_FRAMES: Final = 20
"""Of an error in a JSON line; the frames between its ends are left out."""
_GRPC_LOGGER: Final = "grpc._cython.cygrpc"


class _LossyStream:
    """A text stream that loses what cannot be written: a log that nobody reads must not fail a call."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes `text`, or loses it."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes what was written, or loses it."""
        with suppress(OSError):
            self._stream.flush()


def configure_logging(
    *, level: Literal["debug", "info", "warning", "error"], line_format: Literal["text", "json"]
) -> None:
    """Sends the lines of this package, of the libraries and of `warnings` to stderr in one format.

    Args:
        level: The least level that is logged.
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
    # Libraries are heard from warnings on: what they do in between is not the operator's business.
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    logging.captureWarnings(True)
    logging.getLogger(_GRPC_LOGGER).addFilter(_is_about_the_server)


def _renderers(line_format: Literal["text", "json"]) -> list[Processor]:
    """Returns what makes a line; the defaults of both formats would print the variables of every frame."""
    if line_format == "json":
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=_MAX_FRAMES)
        return [structlog.processors.ExceptionRenderer(transformer), structlog.processors.JSONRenderer()]
    return [
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
    ]


def _is_about_the_server(record: logging.LogRecord) -> bool:
    """Whether a record of gRPC's is about the server; a caller that left while it was written to is not."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"  # of gRPC's private module
