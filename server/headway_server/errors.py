"""Errors of the server.

ServerError                   what this package raises
├── BundleError               a bundle cannot be used: it is damaged, incomplete, or of another schema
│   └── MachineBusyError      nobody knows yet: the machine was too busy to try or to load it
├── ConfigurationError        the configuration file cannot be read
├── AccessError               the access file, a certificate or its key cannot be used
├── StoreError                a store is missing, or none of its bundles can be served
├── RuntimeUnavailableError   ONNX Runtime, a device or a variant that was asked for is not there
│   └── MemoryUnavailableError  the state of a model does not fit into memory
├── ModelRunError             a model could not be run; logged where it was raised, and the caller learns no more
└── RequestError              a call cannot be answered; each transport has one table from these to its codes
    ├── InvalidInputError     a field of the request is wrong; names the field
    │   ├── UnknownFieldError     there is no such field; its name is the caller's
    │   ├── ContextLengthError    it is longer than the model can read
    │   ├── RequestTooLargeError  it has more bytes than the method takes
    │   └── MediaTypeError    it is of a type that the method does not read
    ├── ModelNotFoundError    there is no such model or version
    ├── ImageNotFoundError    there is no prepared image of this id, or none any longer
    ├── AnswerNotFoundError   there is no stored answer
    ├── ServiceNotFoundError  there is no service of that name
    ├── NotOfferedError       the method is one of a protocol that this server leaves out
    ├── BundleRejectedError   a bundle cannot be loaded, and the caller has asked for that
    ├── StoreUnavailableError the store cannot be looked at now
    ├── WrongTaskError        the model cannot do what was asked
    ├── NoChatTemplateError   the model cannot continue conversations
    ├── NoAlignmentError      the model cannot align words
    ├── NoAttentionError      the model cannot show what it attends to
    ├── UnknownCallerError    the call has no API key, or none that this server knows
    ├── ForbiddenError        the caller may not do this
    ├── OverloadedError       there is no room for the call now
    │   └── BudgetError       the caller has used up what it may ask
    ├── DrainingError         the server is shutting down, or the model is being unloaded
    ├── DeadlineError         the call's deadline passed
    └── CancelledError        the caller has gone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ServerError(Exception):
    """Base of every error of this package; its message is for the user."""


class BundleError(ServerError):
    """A bundle cannot be used."""


class MachineBusyError(BundleError):
    """A bundle could not be loaded in time because the machine was too busy; a retry may succeed."""


class ConfigurationError(ServerError):
    """The configuration file cannot be read."""


class AccessError(ServerError):
    """The access file, a certificate or its key cannot be used."""


class StoreError(ServerError):
    """A store is missing, or none of its bundles can be served."""


class RuntimeUnavailableError(ServerError):
    """ONNX Runtime, a device or a requested variant is unavailable."""


class MemoryUnavailableError(RuntimeUnavailableError):
    """The state of a model does not fit into memory."""


class ModelRunError(ServerError):
    """A model could not be run: a bug or a broken machine, never the caller's fault.

    The reason is logged where it is raised; the message is for the log as well.
    """


class RequestError(ServerError):
    """A call cannot be answered."""


class InvalidInputError(RequestError):
    """A field of a request is wrong."""

    def __init__(self, field: str, *parts: str) -> None:
        """Describes what is wrong.

        Args:
            field: Such as `texts[3]`.
            parts: Parts of the description: the value, the limit, what to do. The name of another field is a part of
                its own, a `FieldName`.
        """
        self.field = field
        self.parts = parts
        self.description = "".join(parts)
        super().__init__(f"{field}: {self.description}")

    def renamed(self, name_of: Callable[[str], str]) -> InvalidInputError:
        """Returns the error with field names translated to those of an API."""
        parts = (FieldName(name_of(part)) if isinstance(part, FieldName) else part for part in self.parts)
        return type(self)(name_of(self.field), *parts)


class FieldName(str):
    """The name of a field within a description."""

    __slots__ = ()


class UnknownFieldError(InvalidInputError):
    """The request has an unknown field. Its name is the caller's, the same in every API."""

    def renamed(self, name_of: Callable[[str], str]) -> InvalidInputError:  # noqa: ARG002 (there is none)
        """Returns the error itself."""
        return self


class ContextLengthError(InvalidInputError):
    """An input, with the requested new tokens, exceeds the maximum length of the model."""


class RequestTooLargeError(InvalidInputError):
    """The request has more bytes than its method takes."""


class MediaTypeError(InvalidInputError):
    """The method does not support the request's media type."""


class ModelNotFoundError(RequestError):
    """No such model or version is loaded."""


class AnswerNotFoundError(RequestError):
    """An answer is not stored."""


class ServiceNotFoundError(RequestError):
    """The server has no service of that name."""


class NotOfferedError(RequestError):
    """The method belongs to an extension of a protocol that the server does not have; the message says what to do."""


class ImageNotFoundError(RequestError):
    """No prepared image has this id; it may have expired."""


class BundleRejectedError(RequestError):
    """A bundle that the caller asked to load cannot be loaded; the version loaded before stays served."""


class StoreUnavailableError(RequestError):
    """The store cannot be read now, or there is none; loaded models stay served."""


class WrongTaskError(RequestError):
    """The model cannot do the requested task."""


class NoChatTemplateError(RequestError):
    """The model cannot continue conversations, because it has no chat template."""


class NoAlignmentError(RequestError):
    """The model cannot align words, because its graphs do not output attention."""


class NoAttentionError(RequestError):
    """The model cannot return attention weights, because its bundle has no graph for them."""


class UnknownCallerError(RequestError):
    """The call has no API key, or none that this server knows."""


class ForbiddenError(RequestError):
    """The caller may not do this."""


class OverloadedError(RequestError):
    """A limit of calls, bytes or time is reached."""

    def __init__(self, message: str, retry_after_s: float, *, is_late: bool = False) -> None:
        """`retry_after_s`: seconds the caller should wait; `is_late`: see the attribute."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_late = is_late
        """True if the call was admitted and ran out of time while it waited."""


class BudgetError(OverloadedError):
    """The caller's budget is used up."""


class DrainingError(RequestError):
    """The server is shutting down, or the model is being unloaded."""


class DeadlineError(RequestError):
    """The call's deadline passed."""


class CancelledError(RequestError):
    """The caller cancelled or disconnected."""


def is_failure(error: BaseException) -> bool:
    """Returns True for an `Exception` and for a panic of a Rust library, which is not one."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"  # its module cannot be imported


@contextmanager
def no_panics() -> Iterator[None]:
    """Turns a panic of a library into an `Exception`.

    Raises:
        RuntimeError: The library panicked.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise RuntimeError(f"a library panicked: {error}") from error
