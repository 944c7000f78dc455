"""Errors of the server.

HeadwayError                  what this package raises
├── BundleError               a bundle that cannot be used: damaged, incomplete, of another schema
├── StoreError                a store that is missing or holds no bundle
├── RuntimeUnavailableError   ONNX Runtime, a provider or a variant that was asked for is not there
│   └── MemoryUnavailableError  the state of a model does not fit memory
└── RequestError              a call that cannot be answered; transports/grpc/status.py maps each kind to one gRPC code
    ├── InvalidInputError     a field of the request is wrong: names the field
    ├── ModelNotFoundError    no such model or version
    ├── WrongTaskError        the model cannot do this task
    ├── NoChatTemplateError   the model cannot continue conversations
    ├── NoAlignmentError      the model's bundle cannot tell which words became which
    ├── OverloadedError       the queue is full
    ├── DrainingError         the server is shutting down
    ├── DeadlineError         the call's deadline passed
    └── CancelledError        the caller has gone
"""

from __future__ import annotations


class HeadwayError(Exception):
    """Base of every error this package raises; its message is for the user."""


class BundleError(HeadwayError):
    """A bundle cannot be used."""


class StoreError(HeadwayError):
    """A store is missing or holds no bundle."""


class RuntimeUnavailableError(HeadwayError):
    """ONNX Runtime, an execution provider or a variant is not there."""


class MemoryUnavailableError(RuntimeUnavailableError):
    """The state of a model does not fit the memory there is."""


class RequestError(HeadwayError):
    """A call cannot be answered."""


class InvalidInputError(RequestError):
    """A field of a request is wrong."""

    def __init__(self, field: str, description: str) -> None:
        """Names the `field`, such as `texts[3]`, and says the limit, the value and what to do in `description`."""
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class ModelNotFoundError(RequestError):
    """No such model or version is loaded."""


class WrongTaskError(RequestError):
    """The model cannot do what was asked."""


class NoChatTemplateError(RequestError):
    """The model has no chat template, so it cannot continue conversations."""


class NoAlignmentError(RequestError):
    """The model's bundle does not give its attention, so it cannot tell which words became which."""


class OverloadedError(RequestError):
    """The waiting queue is full."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        """`retry_after_s` is what the caller is told to wait, in seconds."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(RequestError):
    """The server is shutting down."""


class DeadlineError(RequestError):
    """The call's deadline passed."""


class CancelledError(RequestError):
    """The caller has gone."""
