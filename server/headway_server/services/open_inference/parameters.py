"""Parameters of a request: scalars by name; each task defines its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, TypeGuard

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from headway.oip import grpc_predict_v2_pb2 as pb
from headway_server.errors import InvalidInputError
from headway_server.services.open_inference.refusals import NO_SHARED_MEMORY

_MAX_UINT64: Final = 2**64 - 1
_MAX_LIST_BYTES: Final = 2**16


class Kind(Enum):
    """Type of a parameter; the value is its description in error messages."""

    BOOLEAN = "a boolean"
    INTEGER = "a whole number"
    UINT64 = f"a whole number from 0 to {_MAX_UINT64}"
    NUMBER = "a number"
    TEXT = "a string"
    TEXTS = 'a string with a JSON array of strings, such as ["\\n"]'
    INTEGERS = "a string with a JSON array of whole numbers, such as [0, 2]"
    BIASES = "a string with a JSON array of pairs of a token and a number, such as [[42, -1.5]]"


_SINGLE: Final[Mapping[int, Kind]] = {
    FieldDescriptor.TYPE_BOOL: Kind.BOOLEAN,
    FieldDescriptor.TYPE_INT32: Kind.INTEGER,
    FieldDescriptor.TYPE_UINT64: Kind.UINT64,
    FieldDescriptor.TYPE_FLOAT: Kind.NUMBER,
    FieldDescriptor.TYPE_DOUBLE: Kind.NUMBER,
    FieldDescriptor.TYPE_STRING: Kind.TEXT,
    FieldDescriptor.TYPE_ENUM: Kind.TEXT,
}
_REPEATED: Final[Mapping[int, Kind]] = {
    FieldDescriptor.TYPE_STRING: Kind.TEXTS,
    FieldDescriptor.TYPE_INT32: Kind.INTEGERS,
}


def kinds_of(message: type[Message], *names: str) -> dict[str, Kind]:
    """Returns the types of parameters by the fields of a message: those of these names, or all."""
    found = {}
    for field in message.DESCRIPTOR.fields:
        kind = (_REPEATED if field.is_repeated else _SINGLE).get(field.type)
        if field.message_type is not None and field.message_type.name == "LogitBias":
            kind = Kind.BIASES
        if kind is not None and (not names or field.name in names):
            found[field.name] = kind
    return found


CONTENT_TYPE: Final = "content_type"
BASE64: Final = "base64"
JSON_LIST: Final = "hg_jsonlist"
ENCODED: Final = (BASE64, JSON_LIST)
"""Content types of BYTES whose elements are decoded: files in base64, and texts as values of JSON."""
_PLAIN_TYPES: Final = frozenset({"str", "np", "pd"})
"""Content types of MLServer's clients that describe the caller's own objects."""
_OF_BINARY_DATA: Final = frozenset({"binary_data_output", "binary_data_size", "binary_data"})
"""Parameters of HTTP's binary data, which some clients send over gRPC too, where they have no effect."""
_ADVICE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"),
        NO_SHARED_MEMORY,
    ),
    "classification": (
        "classification is not offered; ask for the outputs label and probability, with the parameter top_k"
    ),
    **dict.fromkeys(
        ("sequence_id", "sequence_start", "sequence_end"),
        "sequences are not offered; send the whole input in each request",
    ),
}
"""What to do instead of parameters of Triton's extensions."""


def read_hints(field: str, given: Mapping[str, pb.InferParameter]) -> str:
    """Reads the parameters of a tensor; returns the one of `ENCODED` that its elements are in, or an empty text.

    Raises:
        InvalidInputError: There is an unsupported one.
    """
    encoding = ""
    for name in given.keys() - _OF_BINARY_DATA:
        value = given[name].string_param
        if name != CONTENT_TYPE:
            advice = _ADVICE.get(name, f"the server knows {CONTENT_TYPE}; leave others out")
            raise InvalidInputError(f"{field}.parameters", f"has {name[:64]!r}; {advice}")
        if value in ENCODED:
            encoding = value
        elif value not in _PLAIN_TYPES:
            known = ", ".join((*sorted(_PLAIN_TYPES), *ENCODED))
            raise InvalidInputError(f"{field}.parameters.{CONTENT_TYPE}", f"is {value[:64]!r}; must be one of {known}")
    return encoding


def read_parameters(given: Mapping[str, pb.InferParameter], known: Mapping[str, Kind]) -> dict[str, Any]:
    """Reads the parameters of a request, lists as tuples.

    Args:
        given: Parameters of the request.
        known: Parameters of the task with their types.

    Raises:
        InvalidInputError: A parameter is unknown, or has the wrong type.
    """
    values: dict[str, Any] = {}
    for name in given:
        kind = known.get(name)
        is_plain = name == CONTENT_TYPE and given[name].string_param in (*_PLAIN_TYPES, JSON_LIST)
        if kind is None and (is_plain or name in _OF_BINARY_DATA):
            continue
        if kind is None:
            advice = _ADVICE.get(name, f"is unknown; this model's task has {', '.join(sorted(known))}")
            raise InvalidInputError(f"parameters.{name[:64]}", advice)
        values[name] = _read(name, given[name], kind)
    return values


def _read(name: str, parameter: pb.InferParameter, kind: Kind) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    value = None if choice is None else getattr(parameter, choice)
    if isinstance(value, str) and kind in _LISTS:
        value = _parse_list(value)
    if not _fits(value, kind):
        raise InvalidInputError(f"parameters.{name}", f"must be {kind.value}, and is {str(value)[:64]!r} ({choice})")
    return value


def _parse_list(text: str) -> Any:
    """Reads a JSON array as a tuple, with tuples for inner arrays; other values are returned unchanged."""
    if len(text) > _MAX_LIST_BYTES:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, list):
        return text
    return tuple(tuple(element) if isinstance(element, list) else element for element in value)


def _fits(value: object, kind: Kind) -> bool:
    if kind in _LISTS:
        return isinstance(value, tuple) and all(map(_LISTS[kind], value))
    return _SCALARS[kind](value)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return _is_integer(value) or isinstance(value, float)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bias(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and _is_integer(value[0]) and _is_number(value[1])


_SCALARS: Final[Mapping[Kind, Callable[[object], bool]]] = {
    Kind.BOOLEAN: lambda value: isinstance(value, bool),
    Kind.INTEGER: _is_integer,
    Kind.UINT64: lambda value: _is_integer(value) and 0 <= value <= _MAX_UINT64,
    Kind.NUMBER: _is_number,
    Kind.TEXT: _is_text,
}
_LISTS: Final[Mapping[Kind, Callable[[object], bool]]] = {
    Kind.TEXTS: _is_text,
    Kind.INTEGERS: _is_integer,
    Kind.BIASES: _is_bias,
}
"""Check of an element's type."""
