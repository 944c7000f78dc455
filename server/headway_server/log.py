"""Structured log lines on stderr; stdout has only the ready line.

An error is logged with its traceback, without the values of variables: those are what callers sent. A line within a
call has the call's ids. It has messages of exceptions only with `--log-texts`, since libraries quote their inputs in
them. Where a line holds what callers sent all the same, that stays within it.
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
"""Limit of frames of a traceback in a JSON line; middle ones are left out."""
_PIECE_CHARACTERS: Final = 1024
"""At most 4 KiB in UTF-8, the room of a pipe that is ready for writing."""
_GRPC_LOGGER: Final = "grpc._cython.cygrpc"
_OF_CALLS: Final = frozenset({"call_id", "incident"})
"""Keys of the lines of calls only."""
_LEFT_OUT: Final = "left out; --log-texts shows it"


class _LossyStream:
    """A text stream that drops text it cannot write at once: a closed or full log delays no call."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._poll: select.poll | None = None
        with suppress(OSError, ValueError):  # a stream without a file never blocks
            if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode) or stat.S_ISSOCK(os.fstat(stream.fileno()).st_mode):
                self._poll = select.poll()
                self._poll.register(stream.fileno(), select.POLLOUT)

    def write(self, text: str) -> int:
        """Writes `text`, or as much of it as fits."""
        with suppress(OSError, ValueError):  # a full, a broken or a closed stream
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
        """Flushes the stream; errors are ignored."""
        with suppress(OSError, ValueError):
            self._stream.flush()


def configure_logging(
    *,
    level: Literal["debug", "info", "warning", "error"],
    line_format: Literal["text", "json"],
    texts: bool = False,
    worker: int | None = None,
) -> None:
    """Sends log lines of this package, of libraries and of `warnings` to stderr in one format.

    Args:
        level: Lowest level of the log.
        line_format: `text` for people, `json` for programs: one object a line.
        texts: Show the messages of exceptions in lines of calls, which may quote callers' texts.
        worker: Index of the worker; None: the only process.
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
    stream = cast("TextIO", _LossyStream(sys.stderr))  # loggers only write and flush
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
    """Silences C's `stderr` stream, to which the MP3 decoder prints errors in callers' files.

    Writes to the file descriptor stay: Python's tracebacks, and messages of a crash.
    """
    with suppress(OSError, ValueError, AttributeError):  # a C library without this variable keeps printing
        library = ctypes.CDLL(None)
        library.fopen.restype = ctypes.c_void_p
        if nowhere := library.fopen(os.fsencode(os.devnull), b"w"):
            ctypes.c_void_p.in_dll(library, "stderr").value = nowhere


def _renderers(line_format: Literal["text", "json"], *, texts: bool) -> list[Processor]:
    """Returns the processors that format a line; the libraries' defaults would print variables of frames."""
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
    """Escapes line breaks and terminal control characters; JSON does so by itself."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = _mark(value) if key == "exception" else _escape(value)
    return event


def _write_traceback(stream: TextIO, error: ExcInfo) -> None:
    text = StringIO()
    structlog.dev.plain_traceback(text, error)
    stream.write("\n" + _mark(text.getvalue()))


def _mark(traceback_text: str) -> str:
    """Prefixes each line of a traceback, so that none reads as a line of the log."""
    return "\n".join(f" | {_escape(part)}" for part in traceback_text.strip("\n").split("\n"))


def _escape(text: str) -> str:
    """Escapes unprintable characters as in a Python string."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _name_worker(worker: int) -> Processor:
    """Returns a processor that adds a worker's index to its lines."""

    def add(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
        event["worker"] = worker
        return event

    return add


def _add_call_ids(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Adds the ids of the current call."""
    call = current_call()
    return event if call is None else {**event, **call.ids}


def _hide_messages(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Removes the messages of exceptions from a JSON line of a call."""
    if _OF_CALLS & event.keys():
        _hide_in(event.get("exception", ()))
    return event


def _hide_in(exceptions: Any) -> None:
    for exception in exceptions:
        exception |= {"exc_value": _LEFT_OUT, "exc_notes": []}
        _hide_in(exception.get("exceptions", ()))


def _format_without_messages(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """Formats the traceback in a text line of a call, with only the types of exceptions."""
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
    """Returns False for gRPC's error about a client that disconnected during an answer."""
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "ExecuteBatchError"  # a class of gRPC's private module
