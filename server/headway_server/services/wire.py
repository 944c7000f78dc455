"""Counts the fields of a request before it is parsed.

An element of a repeated field takes two bytes on the wire and more than a hundred as a message. Parsing a request
within its limit of bytes may therefore take gigabytes and seconds. Counted are the fields on the wire, including those
of nested messages, and packed integers, whose one byte becomes eight. Texts and bytes take their own size and are
skipped.

The wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from headway_server.errors import InvalidInputError

MAX_FIELDS: Final = 8_192
"""Maximum fields of a request, including nested ones. The largest conversation and the most biases have 3,073 each,
and the largest translation with a phrase for each text 1,024."""
MAX_PACKED: Final = 65_536
"""Maximum integers in the packed fields of a request. Packed floats take their own size and are not counted."""
FEW_BYTES: Final = 512
"""Maximum bytes of a request that is not counted: at most 256 empty elements, of 131 bytes each."""
_MAX_DEPTH: Final = 64
_VARINT: Final = 0
_BYTES: Final = 2
_SIZES: Final = {1: 8, 3: 0, 4: 0, 5: 4}
"""Bytes of the other wire types: 64 bits, the ends of a group (its fields are counted), 32 bits."""

_FLOATS: Final = frozenset(
    {
        FieldDescriptor.TYPE_DOUBLE,
        FieldDescriptor.TYPE_FLOAT,
        FieldDescriptor.TYPE_FIXED64,
        FieldDescriptor.TYPE_FIXED32,
        FieldDescriptor.TYPE_SFIXED64,
        FieldDescriptor.TYPE_SFIXED32,
    }
)
_CONTINUED: Final = bytes(range(0x80, 0x100))
"""Continuation bytes of a varint."""
_Part: TypeAlias = tuple[str, Any]
"""A counted field: its name, and the descriptor of its messages or None for packed integers."""


def check_fields(data: bytes, message: Descriptor) -> None:
    """Checks the number of fields of a request. Takes about 0.3 µs a field, and nothing up to `FEW_BYTES`.

    Args:
        data: The request on the wire.
        message: Descriptor of its message.

    Raises:
        InvalidInputError: There are more than `MAX_FIELDS`, more than `MAX_PACKED` packed integers, or the bytes are
            not a message.
    """
    if len(data) <= FEW_BYTES:
        return
    try:
        _Counter(data).count(_parts_of(message), 0, len(data), "", 0)
    except LookupError:  # a byte past the end, or an unknown wire type
        raise no_message() from None


class _Counter:
    """Counters of a request."""

    __slots__ = ("_data", "_num_fields", "_num_packed")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_fields = self._num_packed = 0

    def count(self, parts: dict[int, _Part], position: int, end: int, path: str, depth: int) -> None:
        """Counts the fields of the message from `position` to `end`."""
        data = self._data
        while position < end:
            tag = data[position]
            position += 1
            if tag > 0x7F:
                tag, position = _varint(data, tag, position)
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise _too_many(_join(path, parts.get(tag)), f"fields of the request to more than {MAX_FIELDS}")
            kind = tag & 7
            if kind == _BYTES:
                size = data[position]
                position += 1
                if size > 0x7F:
                    size, position = _varint(data, size, position)
                if (part := parts.get(tag)) is not None and position + size <= end:
                    self._look_into(part, position, position + size, path, depth)
                position += size
            elif kind == _VARINT:
                while data[position] > 0x7F:
                    position += 1
                position += 1
            else:
                position += _SIZES[kind]
        if position != end:
            raise no_message()

    def _look_into(self, part: _Part, start: int, end: int, path: str, depth: int) -> None:
        """Counts the content of a message or of a packed field."""
        if depth == _MAX_DEPTH:
            raise no_message()
        if part[1] is not None:
            self.count(_parts_of(part[1]), start, end, _join(path, part), depth + 1)
            return
        self._num_packed += len(self._data[start:end].translate(None, _CONTINUED))
        if self._num_packed > MAX_PACKED:
            raise _too_many(_join(path, part), f"numbers of the request to more than {MAX_PACKED}")


def _varint(data: bytes, first: int, position: int) -> tuple[int, int]:
    """Reads the rest of a varint after a first continuation byte; returns the number and its end."""
    value, shift = first & 0x7F, 7
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise no_message()


@cache
def _parts_of(message: Descriptor) -> dict[int, _Part]:
    """Returns the counted fields of a message by wire tag."""
    return {
        field.number << 3 | _BYTES: (field.name, field.message_type)
        for field in message.fields
        if field.type == FieldDescriptor.TYPE_MESSAGE or _is_packed(field)
    }


def _is_packed(field: FieldDescriptor) -> bool:
    """Returns True for a repeated field of integers, which may be packed."""
    can_be = field.cpp_type not in (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)
    return bool(field.is_repeated) and can_be and field.type not in _FLOATS


def _join(path: str, part: _Part | None) -> str:
    """Returns the path of a field for error messages; that of its parent if the field is unknown."""
    name = "" if part is None else part[0]
    return f"{path}.{name}" if path and name else path or name or "request"


def _too_many(field: str, what: str) -> InvalidInputError:
    return InvalidInputError(field, f"brings the {what}; send several calls, or fewer elements")


def no_message() -> InvalidInputError:
    """Returns the error for bytes that are not a message of the method."""
    return InvalidInputError(
        "request", "is not a message of this method; send what its .proto file says, with strings in UTF-8"
    )
