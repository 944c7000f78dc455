"""Errors of the exporter.

ExportError              what this package raises; its message is for the user
├── SourceError          the checkpoint, or the module and its files, cannot be exported as they are
├── TraceError           PyTorch cannot turn the module into a graph
└── ParityError          an exported graph does not compute the same function
"""

from __future__ import annotations


class ExportError(Exception):
    """Base of every error this package raises."""


class SourceError(ExportError):
    """What is to be exported is incomplete or does not follow the protocol."""


class TraceError(ExportError):
    """PyTorch cannot turn the module into a graph."""


class ParityError(ExportError):
    """An exported graph does not compute the same function as the module."""
