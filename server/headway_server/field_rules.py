"""The rules of the protocol's fields: ranges, sizes and defaults that are the same for every model.

They stand in the .proto files, as options of the fields (`rules.proto`), and are read once.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

import headway.v1
from headway.v1 import rules_pb2

_FLOATS: Final = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRules:
    """What values of a field are valid; see `FieldRules` of the protocol."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    max_element_count: int | None = None
    max_character_count: int | None = None
    max_byte_count: int | None = None
    default_number: float | None = None

    @classmethod
    def of(cls, field: FieldDescriptor) -> FieldRules:
        """Reads the rules of a field; whole numbers of an integer field are integers."""
        given = {option.name: value for option, value in field.GetOptions().Extensions[rules_pb2.rules].ListFields()}
        for name in ("minimum", "above", "maximum", "default_number"):
            if name in given and field.type not in _FLOATS:
                given[name] = int(given[name])
            elif name in given and field.type == FieldDescriptor.TYPE_FLOAT:
                given[name] = float(np.float32(given[name]))  # as callers send it: 0.01 is a little less
        return cls(**given)


@cache
def all_rules() -> Mapping[str, FieldRules]:
    """Returns the rules of every field that has some, by `Message.field`."""
    return {name: FieldRules.of(field) for name, field in _fields() if field.GetOptions().HasExtension(rules_pb2.rules)}


def rules_of(field: str) -> FieldRules:
    """Returns the rules of a field, `Message.field`.

    Raises:
        KeyError: It has none.
    """
    return all_rules()[field]


def maximum(field: str) -> int:
    """Returns the greatest number that an integer field `Message.field` takes."""
    most = rules_of(field).maximum
    assert most is not None, field
    return int(most)


def most_elements(field: str) -> int:
    """Returns how many elements a repeated field `Message.field` takes."""
    most = rules_of(field).max_element_count
    assert most is not None, field
    return most


def most_characters(field: str) -> int:
    """Returns how many characters a text, or an element, of a field `Message.field` takes."""
    most = rules_of(field).max_character_count
    assert most is not None, field
    return most


def most_bytes(field: str) -> int:
    """Returns how many bytes in UTF-8 a text, or an element, of a field `Message.field` takes."""
    most = rules_of(field).max_byte_count
    assert most is not None, field
    return most


def _fields() -> Iterator[tuple[str, FieldDescriptor]]:
    for module in pkgutil.iter_modules(headway.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"headway.v1.{module.name}")
            for message in file.DESCRIPTOR.message_types_by_name.values():
                yield from ((f"{message.name}.{field.name}", field) for field in message.fields)
