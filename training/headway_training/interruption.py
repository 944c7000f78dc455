"""Signals that end a run: the step under way is finished first, so that the state on disk is a whole one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Takes note of SIGINT and SIGTERM inside its `with` block; a second one has its usual effect."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __repr__(self) -> str:
        return f"StopSignal(received={self.received})"

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            self._handlers = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (the signature of handlers)
        self.received = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
