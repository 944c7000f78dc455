"""Damages inputs that are right, for drills and tests: bytes of any kind, and fields of protobuf messages."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_NUMBERS: Final = (b"0", b"-1", b"1e999", b"-9223372036854775808", b"9223372036854775807", b"1" * 400, b"NaN", b"0.1")
_BYTES: Final = (
    *(b"\0", b"\xff", b"\x80\x80\x80\x80\x80\x01", b"\n", b'"', b"\\", b"\xed\xa0\x80", b"\xef\xb7\xba", b"{", b"["),
)
_MAX_BYTES: Final = 2**18
_SIGNED, _UNSIGNED, _REAL = ("INT32", "INT64", "ENUM"), ("UINT32", "UINT64"), ("FLOAT", "DOUBLE")
_TEXTS: Final = ("", "\0", "(", '["a"]', "[" * 500, "x" * 999)


def mutate(rng: random.Random, data: bytes, others: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """Damages an input in one to eight places: parts are replaced, cut out, repeated, or taken from other inputs.

    `words` are what its format is made of; they are put in among odd numbers and bytes.
    """
    mutated = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        start = rng.randrange(len(mutated) + 1)
        stop = min(len(mutated), start + rng.choice((0, 1, 2, 4, 8, 64, 512)))
        match rng.randrange(6):
            case 0:
                mutated[start:stop] = rng.choice((*words, *_BYTES, *_NUMBERS))
            case 1:
                mutated[start:stop] = b""
            case 2:
                mutated[start:stop] = rng.randbytes(stop - start)
            case 3:
                other = rng.choice(others)
                begin = rng.randrange(len(other) + 1)
                mutated[start:stop] = other[begin : begin + rng.choice((4, 32, 256))]
            case 4:
                mutated[start:stop] = bytes(mutated[start:stop]) * rng.choice((2, 3, 50))
            case _ if mutated:
                mutated[min(start, len(mutated) - 1)] ^= 1 << rng.randrange(8)
    return bytes(mutated[:_MAX_BYTES])


def mutate_message(rng: random.Random, message: Message, words: Sequence[str] = ()) -> Message:
    """Returns a copy of a message with one field changed, at any depth, to an odd value of its type.

    `words` are names that mean something to who reads it: values of strings, and keys of maps.
    """
    mutated = type(message)()
    mutated.CopyFrom(message)
    owner, field = rng.choice(list(_fields(mutated)))
    if field.message_type:  # a map of messages; an entry is made by looking it up
        owner = getattr(owner, field.name)[rng.choice(words)]
        field = rng.choice(owner.DESCRIPTOR.fields)
    if not field.is_repeated:
        setattr(owner, field.name, _value(rng, field, words, getattr(owner, field.name)))
        return mutated
    items = getattr(owner, field.name)
    if len(items):
        index = rng.randrange(len(items))
        items[index] = _value(rng, field, words, items[index])
    else:
        items.append(_value(rng, field, words, b""))
    return mutated


def _fields(message: Any) -> Iterator[tuple[Any, FieldDescriptor]]:
    """Yields the fields of a message and of those in it: all but messages, and maps of messages."""
    for field in message.DESCRIPTOR.fields:
        inner = getattr(message, field.name)
        if not field.message_type:
            yield message, field
        elif field.message_type.GetOptions().map_entry:
            yield message, field
            for key in list(inner):
                yield from _fields(inner[key])
        elif field.is_repeated:
            for each in inner:
                yield from _fields(each)
        elif message.HasField(field.name):
            yield from _fields(inner)


def _value(rng: random.Random, field: FieldDescriptor, words: Sequence[str], old: Any) -> Any:
    """Returns an odd value for a field; bytes are those it has, with one changed, or half of them."""
    kind = _KINDS[field.cpp_type]
    if kind == "STRING":
        if field.type == FieldDescriptor.TYPE_STRING:
            return rng.choice((*words, *_TEXTS))
        changed = bytearray(old or b"\0")
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed[: rng.choice((len(changed), len(changed) // 2))])
    if kind == "BOOL":
        return rng.random() < 0.5
    if kind in _REAL:
        return rng.choice((0.0, -1.0, 0.5, 1e300 if kind == "DOUBLE" else 1e30, float("inf"), float("nan")))
    num_bits = 64 if kind.endswith("64") else 32
    if kind in _UNSIGNED:
        return rng.choice((0, 1, 2, 7, 255, 2**31, 2**num_bits - 1))
    return rng.choice((0, 1, -1, 2, 7, 255, 2**31 - 1, 2 ** (num_bits - 1) - 1, -(2 ** (num_bits - 1))))


_KINDS: Final = {
    getattr(FieldDescriptor, f"CPPTYPE_{kind}"): kind for kind in (*_SIGNED, *_UNSIGNED, *_REAL, "BOOL", "STRING")
}
