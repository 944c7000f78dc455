"""The access log: one line for every finished call."""

from __future__ import annotations

import structlog

from headway_server.observers import Call, Observer
from headway_server.services.status import ending_of

_log = structlog.get_logger(__name__)


class AccessLog(Observer):
    """Logs every call at the level `info`."""

    def __init__(self, *, texts: bool = False) -> None:
        """`texts`: log the messages of errors, which may quote the caller's texts."""
        self._texts = texts

    def call_finished(self, call: Call, *, error: BaseException | None, duration_s: float) -> None:
        """Writes the line."""
        code, reason = ending_of(None if error is None else type(error))
        fields: dict[str, object] = {"code": code, "duration_ms": round(duration_s * 1e3, 3)}
        if call.caller:
            fields["caller"] = call.caller
        if call.model is not None:
            fields |= {"model": call.model.name, "version": call.model.version}
        if error is not None:
            fields["reason"] = reason
            if self._texts:
                fields["message"] = str(error)
        _log.info("call", method=call.method, **fields, **call.ids)

    def __repr__(self) -> str:
        return "AccessLog()"
