"""Errors of the exporter.

ExportError              what this package raises; its message is for the user
├── SourceError          the checkpoint, or the module and its files, cannot be exported as they are
├── TraceError           the module cannot be turned into a graph
└── ParityError          an exported graph does not compute the same function
"""

from __future__ import annotations

import re
from typing import Final

_MOST_CHARACTERS: Final = 300
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_PLACES: Final = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : |/onnxruntime_src/\S+:\d+ .*?\) (?=\w)")


class ExportError(Exception):
    """Base of every error this package raises."""


class SourceError(ExportError):
    """What is to be exported is incomplete or does not follow the protocol."""


class TraceError(ExportError):
    """The module cannot be turned into a graph: PyTorch cannot trace it, or its graph has an unknown form."""


class ParityError(ExportError):
    """An exported graph does not compute the same function as the module."""


def reason_of(error: BaseException) -> str:
    """Returns what a foreign error says, in a line of readable length.

    A tracer tells whole graphs, and ONNX Runtime places in its source.
    """
    message = _PLACES.sub("", _COLOURS.sub("", str(error)))
    text = " ".join(message.split()) or type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."
