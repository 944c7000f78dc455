"""Structured log lines on stderr; stdout is for the ready line alone.

An error is logged with its traceback, without the values of variables: those are what callers sent. A line that is
written while a call is answered has the call's ids, and no message of an exception unless texts are asked for:
libraries quote in it what they were given. Where a line holds what callers sent all the same, that stays within it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import stat
import sys
import traceback
from contextlib import suppress
from io import StringIO
from typing import Any, Final, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from headway_server.observers import current_call

_MAX_FRAMES: Final = 20
"""Most frames of a traceback in a JSON line; the middle ones are left out."""
_PIECE_CHARACTERS: Final = 1024
"""In UTF-8 no more than the 4 KiB that a pipe has room for when it says that it has any."""
_GRPC_LOGGER: Final = "grpc._cython.cygrpc"
_OF_CALLS: Final = frozenset({"call_id", "incident"})
"""What lines of calls have, and no others."""
_LEFT_OUT: Final = "left out; --log-texts shows it"


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
    *,
    level: Literal["debug", "info", "warning", "error"],
    line_format: Literal["text", "json"],
    texts: bool = False,
    worker: int | None = None,
) -> None:
    """Sends the lines of this package, of the libraries and of `warnings` to stderr in one format.

    Args:
        level: The lowest level that is logged.
        line_format: `text` for people, `json` for programs: one object a line.
        texts: True shows the messages of exceptions in the lines of calls, which may quote what callers sent.
        worker: Which of a server's workers this process is; None: it is the only one.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        *([] if worker is None else [_name_worker(worker)]),
        _add_call_ids,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderers = _renderers(line_format, texts=texts)
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
    _silence_c()


def _silence_c() -> None:
    """Has C's own stream of errors write nowhere: what decodes MP3 prints there what is wrong with a caller's file.

    What is written to the descriptor stays: Python's tracebacks, and the last words of a process that crashes.
    """
    with suppress(OSError, ValueError, AttributeError):  # a C library that has no such variable prints on
        library = ctypes.CDLL(None)
        library.fopen.restype = ctypes.c_void_p
        if nowhere := library.fopen(os.fsencode(os.devnull), b"w"):
            ctypes.c_void_p.in_dll(library, "stderr").value = nowhere


def _renderers(line_format: Literal["text", "json"], *, texts: bool) -> list[Processor]:
    """Returns what formats a line. The defaults of both formats would print the variables of every frame."""
    if line_format == "json":
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=_MAX_FRAMES)
        rendered = structlog.processors.ExceptionRenderer(transformer)
        hide = [] if texts else [_hide_messages]
        return [rendered, *hide, structlog.processors.JSONRenderer()]
    return [
        *([] if texts else [_format_without_messages]),
        _escape_values,
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write_traceback),
    ]


def _escape_values(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Escapes what would begin a new line or steer a terminal; JSON does so by itself."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = _mark(value) if key == "exception" else _escape(value)
    return event


def _write_traceback(stream: TextIO, error: ExcInfo) -> None:
    text = StringIO()
    structlog.dev.plain_traceback(text, error)
    stream.write("\n" + _mark(text.getvalue()))


def _mark(traceback_text: str) -> str:
    """Puts a mark before each line of a traceback, so that none reads as a line of the log."""
    return "\n".join(f" | {_escape(part)}" for part in traceback_text.strip("\n").split("\n"))


def _escape(text: str) -> str:
    """Writes characters that are not printed as Python writes them in a string."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _name_worker(worker: int) -> Processor:
    """Returns what adds a worker's number to its lines."""

    def add(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
        event["worker"] = worker
        return event

    return add


def _add_call_ids(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Adds the ids of the call that the present task answers."""
    call = current_call()
    return event if call is None else {**event, **call.ids}


def _hide_messages(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Leaves out the messages of exceptions in a JSON line of a call."""
    if _OF_CALLS & event.keys():
        _hide_in(event.get("exception", ()))
    return event


def _hide_in(exceptions: Any) -> None:
    for exception in exceptions:
        exception |= {"exc_value": _LEFT_OUT, "exc_notes": []}
        _hide_in(exception.get("exceptions", ()))


def _format_without_messages(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Formats the traceback in a line of a call for people, with the types of exceptions alone."""
    error = event.get("exc_info")
    if not _OF_CALLS & event.keys() or not isinstance(error, BaseException):
        return event
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        lines = [*traceback.format_tb(cause.__traceback__), f"{type(cause).__qualname__}: {_LEFT_OUT}"]
        parts.insert(0, "".join(lines))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    del event["exc_info"]
    event["exception"] = "\n\n".join(parts)
    return event


def _is_about_the_server(record: logging.LogRecord) -> bool:
    """Returns False for gRPC's complaint about a caller that left while an answer was being written to it."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"  # a class of gRPC's private module
