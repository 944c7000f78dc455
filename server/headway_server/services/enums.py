"""Mapping between enums of the protocol and of the server by the names of their values."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from headway_server.errors import InvalidInputError

if TYPE_CHECKING:  # exists in the stubs only
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

EnumT = TypeVar("EnumT", bound=Enum)
NumberT = TypeVar("NumberT", bound=int)


class WireEnum(Generic[EnumT, NumberT]):
    """An enum of the protocol with the values of a server enum after a prefix."""

    def __init__(self, wire: _EnumTypeWrapper[NumberT], own: type[EnumT], *, unspecified: EnumT | None = None) -> None:
        """Maps the values.

        Args:
            wire: Enum of the protocol, with values such as `FINISH_REASON_STOP`.
            own: Enum of the server, with values such as `STOP`.
            unspecified: Meaning of the unset value; None: invalid in a request.

        Raises:
            KeyError: The protocol has a value that the server lacks.
        """
        [prefix] = [name.removesuffix("UNSPECIFIED") for name, number in wire.items() if number == 0]
        self._names = {number: name for name, number in wire.items() if number}
        self._own: dict[int, EnumT] = {number: own[name.removeprefix(prefix)] for number, name in self._names.items()}
        self._numbers = {self._own[number]: number for number in self._names}
        if unspecified is not None:
            self._own[0] = unspecified

    def read(self, field: str, number: int) -> EnumT:
        """Returns the server's value for a number in a field of a request.

        Raises:
            InvalidInputError: The number is not a known value.
        """
        if (member := self._own.get(number)) is None:
            known = ", ".join(f"{name} ({known})" for known, name in self._names.items())
            raise InvalidInputError(field, f"is {number}; must be one of {known}")
        return member

    def number(self, member: EnumT) -> NumberT:
        """Returns the protocol's number of a server value."""
        return self._numbers[member]

    def __repr__(self) -> str:
        return f"WireEnum({', '.join(self._names.values())})"
