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
    │   ├── RequestTooLargeError  it has more bytes than the method takes
    │   └── MediaTypeError    it is of a type that the method does not read
    ├── ModelNotFoundError    there is no such model or version
    ├── ImageNotFoundError    there is no prepared image of this id, or none any longer
    ├── ServiceNotFoundError  there is no service of that name
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
    """Base of every error this package raises; its message is for the user."""


class BundleError(ServerError):
    """A bundle cannot be used."""


class MachineBusyError(BundleError):
    """A bundle could not be tried or loaded in time, because the machine was too busy; another try may tell."""


class ConfigurationError(ServerError):
    """The configuration file cannot be read."""


class AccessError(ServerError):
    """The access file, a certificate or its key cannot be used."""


class StoreError(ServerError):
    """A store is missing, or none of its bundles can be served."""


class RuntimeUnavailableError(ServerError):
    """ONNX Runtime, a device or a variant that was asked for is not there."""


class MemoryUnavailableError(RuntimeUnavailableError):
    """The state of a model does not fit into memory."""


class ModelRunError(ServerError):
    """A model could not be run: a bug or a broken machine, never the caller's fault.

    Whoever raises it has logged the reason; its message is for the log too.
    """


class RequestError(ServerError):
    """A call cannot be answered."""


class InvalidInputError(RequestError):
    """A field of a request is wrong."""

    def __init__(self, field: str, *parts: str) -> None:
        """Describes what is wrong.

        Args:
            field: Such as `texts[3]`.
            parts: Of the description: the value, the limit, what to do. Where they name another field, it is a part of
                its own, a `FieldName`.
        """
        self.field = field
        self.parts = parts
        self.description = "".join(parts)
        super().__init__(f"{field}: {self.description}")

    def renamed(self, name_of: Callable[[str], str]) -> InvalidInputError:
        """Returns the error with the names that an API has for its fields; the rest stays as it is."""
        parts = (FieldName(name_of(part)) if isinstance(part, FieldName) else part for part in self.parts)
        return type(self)(name_of(self.field), *parts)


class FieldName(str):
    """The name of a field within a description."""

    __slots__ = ()


class UnknownFieldError(InvalidInputError):
    """The request has a field that there is not. Its name is the caller's, and no API has another for it."""

    def renamed(self, name_of: Callable[[str], str]) -> InvalidInputError:  # noqa: ARG002 (there is none)
        """Returns the error itself."""
        return self


class RequestTooLargeError(InvalidInputError):
    """The request has more bytes than its method takes."""


class MediaTypeError(InvalidInputError):
    """The request is of a type that its method does not read."""


class ModelNotFoundError(RequestError):
    """No such model or version is loaded."""


class ServiceNotFoundError(RequestError):
    """The server has no service of that name."""


class ImageNotFoundError(RequestError):
    """No prepared image has this id, or none any longer."""


class BundleRejectedError(RequestError):
    """A bundle cannot be loaded, and the caller has asked for that; what was loaded before is served on."""


class StoreUnavailableError(RequestError):
    """The store cannot be looked at now, or there is none; what was loaded before is served on."""


class WrongTaskError(RequestError):
    """The model cannot do what was asked."""


class NoChatTemplateError(RequestError):
    """The model cannot continue conversations, because it has no chat template."""


class NoAlignmentError(RequestError):
    """The model cannot align words, because its graphs do not give its attention."""


class NoAttentionError(RequestError):
    """The model cannot show what it attends to, because its bundle has no graph for it."""


class UnknownCallerError(RequestError):
    """The call has no API key, or none that this server knows."""


class ForbiddenError(RequestError):
    """The caller may not do this."""


class OverloadedError(RequestError):
    """There is no room for the call now."""

    def __init__(self, message: str, retry_after_s: float, *, is_late: bool = False) -> None:
        """`retry_after_s` is how many seconds the caller is asked to wait; `is_late` says that it has waited."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_late = is_late
        """True if the call was let in, and waited until there was no time left to answer it."""


class BudgetError(OverloadedError):
    """The caller has used up what it may ask."""


class DrainingError(RequestError):
    """The server is shutting down, or the model is being unloaded."""


class DeadlineError(RequestError):
    """The call's deadline passed."""


class CancelledError(RequestError):
    """The caller has gone."""


def is_failure(error: BaseException) -> bool:
    """Returns True for an `Exception`, and for a panic of a library that is written in Rust, which is none."""
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
