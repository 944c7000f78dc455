"""Grammar of the texts of a constraint, in the library's language, and translation of the library's errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from llguidance import regex_to_lark

from headway_server.decoding.constraints.vocabulary import Vocabulary
from headway_server.errors import FieldName, InvalidInputError
from headway_server.field_rules import most_bytes, most_characters, most_elements
from headway_server.preprocessing import CALL_ID, CALL_ID_PATTERN, CallForm

MAX_SCHEMA_BYTES = most_bytes("Constraint.json_schema")
MAX_REGEX_BYTES = most_bytes("Constraint.regex")
MAX_CHOICES = most_elements("Choices.texts")
MAX_CHOICE_LENGTH = most_characters("Choices.texts")

_KINDS = ("json_schema", "regex", "choices", "calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """Calls of tools, in the form that a model writes them."""

    form: CallForm
    tools: tuple[tuple[str, str], ...]
    """Names of the tools that may be called, and the JSON Schemas of their arguments."""
    lenient: frozenset[str] = frozenset()
    """Names of tools whose schemas may have keywords that are not supported; these are not enforced."""
    text_schema: str | None = None
    """A JSON Schema of a text without calls; None: any text."""
    allows_text: bool
    """True if the text may be, or begin with, anything but a call."""
    allows_several: bool
    """True if several calls may follow each other."""

    @property
    def schemas(self) -> list[str]:
        """All JSON Schemas."""
        return [schema for _, schema in self.tools] + ([] if self.text_schema is None else [self.text_schema])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintRequest:
    """Constraint of a text. Exactly one kind is set."""

    json_schema: str | None = None
    """A JSON Schema, as JSON text. The text is a JSON value that it accepts."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choices: tuple[str, ...] | None = None
    """The text is one of these."""
    calls: CallRequest | None = None
    """The text is, or ends with, calls of tools."""
    name: str = field(default="", compare=False)
    """Its name in the request, for error messages; empty: the one that is given when it is compiled."""

    def __post_init__(self) -> None:
        kinds = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(f"a constraint is one of {', '.join(_KINDS)}; got {' and '.join(kinds) or 'none'}")

    @property
    def special_ids(self) -> frozenset[int]:
        """Special tokens that it allows."""
        if self.calls is None:
            return frozenset()
        return frozenset(index for _, index in self.calls.form.special_tokens)

    def parts(self, field: str) -> Iterator[tuple[str, ConstraintRequest]]:
        """Yields the constraint of each schema of calls by itself, with its field; `field` is that of them all."""
        if self.calls is None:
            return
        for index, tool in enumerate(self.calls.tools):
            alone = replace(self.calls, tools=(tool,), text_schema=None)
            yield f"{field}.calls[{index}]", ConstraintRequest(calls=alone)
        if self.calls.text_schema is not None:
            yield f"{field}.json_schema", ConstraintRequest(json_schema=self.calls.text_schema)

    @property
    def num_characters(self) -> int:
        """How long it is in all."""
        schemas = () if self.calls is None else self.calls.schemas
        texts = (self.json_schema or "", self.regex or "", *(self.choices or ()), *schemas)
        return sum(map(len, texts))

    @property
    def kind(self) -> str:
        """Name of the set field."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    def check_size(self, field: str) -> None:
        """Checks the limits of size; compilation checks the content.

        Args:
            field: Name of the constraint in the request, such as `parameters.constraint`.

        Raises:
            InvalidInputError: It is too long, has too many choices, or the same one twice.
        """
        if self.json_schema is not None:
            _check_bytes(f"{field}.json_schema", self.json_schema, MAX_SCHEMA_BYTES)
        if self.regex is not None:
            _check_bytes(f"{field}.regex", self.regex, MAX_REGEX_BYTES)
        if self.choices is not None:
            _check_choices(f"{field}.choices.texts", self.choices)
        if self.calls is not None:
            _check_bytes(f"{field}.json_schema", self.calls.text_schema or "", MAX_SCHEMA_BYTES)
            _check_bytes(f"{field}.calls", "".join(self.calls.schemas), MAX_SCHEMA_BYTES)


def _check_bytes(field: str, text: str, limit: int) -> None:
    size = len(text.encode(errors="surrogatepass"))
    if size > limit:
        raise InvalidInputError(field, f"has {size} bytes of UTF-8; at most {limit}, so make it shorter")


def _check_choices(field: str, choices: tuple[str, ...]) -> None:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidInputError(field, f"has {len(choices)} elements; must be 1 to {MAX_CHOICES}")
    first: dict[str, int] = {}
    for index, choice in enumerate(choices):
        if not 1 <= len(choice) <= MAX_CHOICE_LENGTH:
            raise InvalidInputError(
                f"{field}[{index}]", f"has {len(choice)} characters; must be 1 to {MAX_CHOICE_LENGTH}"
            )
        if choice in first:
            earlier = FieldName(f"{field}[{first[choice]}]")
            raise InvalidInputError(f"{field}[{index}]", "is the same as ", earlier, "; give each once")
        first[choice] = index


_HEAD = '%llguidance {"no_forcing": true}\nstart: '
"""All tokens that lead to an allowed text may follow, not only the tokenizer's choice."""

_JSON_OPTIONS = {
    # One space, or a new line with indentation: a model that may write white space without end does so.
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n[ \t]{0,20}",
    "item_separator": ",",
    "key_separator": ":",
    # oneOf as anyOf would allow texts that the schema forbids.
    "coerce_one_of": False,
}
"""Set last, so that a schema cannot override them."""

_MAX_MULTIPLE = 10_000
_MAX_MULTIPLES = 100_000
"""Limit of multipleOf, whose automaton has as many states; the library has no limit."""

_JSON_CHARACTERS = frozenset(map(chr, range(0x20, 0x7F)))


def write_grammar(request: ConstraintRequest, vocabulary: Vocabulary, field: str) -> str:
    """Writes the grammar of a request.

    Args:
        request: Within its limits of size.
        vocabulary: The model's.
        field: Name of the constraint in the request with its kind, such as `parameters.constraint.regex`.

    Raises:
        InvalidInputError: The schema is not JSON or too costly, or the vocabulary cannot spell the texts.
    """
    if request.json_schema is not None:
        return f"{_HEAD}{_write_schema(request.json_schema, vocabulary, field)}"
    if request.calls is not None:
        return f"{_HEAD}{_write_calls(request.calls, vocabulary, field)}"
    if request.regex is not None:
        pattern = f"/{regex_to_lark(request.regex, '')}/"
        if vocabulary.spells_everything:
            return f"{_HEAD}{pattern}"
        alphabet = "".join(f"\\x{{{ord(character):x}}}" for character in sorted(vocabulary.characters))
        return f"{_HEAD}TEXT\nTEXT: {pattern} & /[{alphabet}]*/"
    assert request.choices is not None, "the request's own check"
    if not vocabulary.spells_everything:
        for index, choice in enumerate(request.choices):
            _check_spelling(choice, vocabulary, f"{field}.texts[{index}]", "it")
    return f"{_HEAD}{' | '.join(map(json.dumps, request.choices))}"


def _write_schema(text: str, vocabulary: Vocabulary, field: str, *, lenient: bool = False) -> str:
    """Writes the rule of the values that a schema accepts, apart from unsupported keywords if `lenient`."""
    schema = _read_schema(text, field)
    _check_multiples(schema, field)
    if not vocabulary.spells_everything:
        _check_spelling("".join(_JSON_CHARACTERS), vocabulary, field, "JSON")
    return f"%json {json.dumps({**schema, 'x-guidance': {**_JSON_OPTIONS, 'lenient': lenient}})}"


def _write_calls(request: CallRequest, vocabulary: Vocabulary, field: str) -> str:
    """Writes the rules of tool calls. Text outside of calls has no `trigger`, and a call follows each trigger."""
    form = request.form
    if not vocabulary.spells_everything:
        texts = (form.head, form.middle, form.between or "", form.end)
        literals = (piece for text in texts for piece, token in form.pieces(text) if token is None and piece != CALL_ID)
        _check_spelling("".join((*literals, *(name for name, _ in request.tools))), vocabulary, field, "calls")
    calls = [
        f"{_write_literal(form, name + form.middle)} "
        + _write_schema(schema, vocabulary, field, lenient=name in request.lenient)
        for name, schema in request.tools
    ]
    more = f"({_write_literal(form, form.between)} call)*" if request.allows_several and form.between else ""
    trigger, rest = form.trigger, form.head.removeprefix(form.trigger)
    opening = _write_literal(form, trigger)
    start, text = f"{opening} calls", []
    if request.allows_text and request.text_schema is not None:
        start = f"answer | {start}"
        text = [f"answer: {_write_schema(request.text_schema, vocabulary, field)}"]
    elif request.allows_text:
        start = "TEXT | opening calls"
    return "\n".join(
        (
            start,
            *text,
            f"calls: {_write_literal(form, rest)} call {more} {_write_literal(form, form.end)}",
            f"call: {' | '.join(calls)}",
            f"opening{'' if trigger in dict(form.special_tokens) else '[lazy]'}: TEXT {opening}",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){regex_to_lark(re.escape(trigger), '')}(?s:.*)/",
            f"ID: /{CALL_ID_PATTERN}/",
        )
    )


def _write_literal(form: CallForm, text: str) -> str:
    """Writes a text of a form, with its special tokens as such."""
    return " ".join(
        f"<[{token}]>" if token is not None else "ID" if piece == CALL_ID else json.dumps(piece)
        for piece, token in form.pieces(text)
    )


def without_tokens(request: ConstraintRequest) -> ConstraintRequest:
    """Returns a request that costs as much, for a vocabulary of bytes: each special token of its calls is the first."""
    if request.calls is None or not request.special_ids:
        return request
    form = request.calls.form
    bytes_alone = replace(form, special_tokens=tuple((token, 0) for token, _ in form.special_tokens))
    return replace(request, calls=replace(request.calls, form=bytes_alone))


def _read_schema(text: str, field: str) -> dict[str, Any]:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant, parse_int=_read_integer)
        json.dumps(schema, allow_nan=False, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            field, f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except UnicodeEncodeError as error:
        raise InvalidInputError(field, "has half of a surrogate pair, which is no character") from error
    except _UnsafeIntegerError as error:
        raise InvalidInputError(field, f"has the number {error}; so near to -2^63 none is supported") from error
    except ValueError as error:
        raise InvalidInputError(field, "has a number that JSON does not have: NaN, infinite or too long") from error
    except RecursionError as error:
        raise InvalidInputError(field, "is nested too deeply") from error
    if not isinstance(schema, dict):
        raise InvalidInputError(field, "must be a JSON object; {} accepts every value")
    return schema


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


class _UnsafeIntegerError(ValueError):
    """An integer that is -2^63 as a float, which overflows the stack of the library (llguidance 1.9.1)."""


def _read_integer(digits: str) -> int:
    number = int(digits)
    if 0 <= number + 2**63 < 1024:
        raise _UnsafeIntegerError(digits)
    return number


def _check_multiples(schema: dict[str, Any], field: str) -> None:
    """Limits the cost of multipleOf. Schemas may be combined, so the least common multiple of all counts."""
    multiples = [_multiple(value, field) for value in _values_of("multipleOf", schema)]
    least = 1
    for multiple in multiples:
        least = math.lcm(least, multiple)
        if least > _MAX_MULTIPLE or least * len(multiples) > _MAX_MULTIPLES:
            shown = f"{least}" if least < 10**18 else "of many digits"
            raise InvalidInputError(
                field,
                f"has {len(multiples)} times multipleOf, with the least common multiple {shown} (less factors 2 and "
                f"5); at most {_MAX_MULTIPLE}, and {_MAX_MULTIPLES} times their number",
            )


def _multiple(value: float, field: str) -> int:
    """Returns the digits of a number as an integer without its factors 2 and 5, which take few states."""
    sign, digits, _ = Decimal(repr(value)).as_tuple()
    number = int("".join(map(str, digits)))
    if sign or not number:
        raise InvalidInputError(field, f"has a multipleOf {value}; must be above 0")
    for factor in (2, 5):
        while number % factor == 0:
            number //= factor
    return number


def _values_of(key: str, schema: object) -> Iterator[float]:
    """Yields the numbers that are values of `key` anywhere in a schema."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(number := value.get(key), int | float) and not isinstance(number, bool):
                yield number
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _check_spelling(text: str, vocabulary: Vocabulary, field: str, what: str) -> None:
    if missing := sorted(set(text) - vocabulary.characters):
        shown = ", ".join(map(repr, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise InvalidInputError(field, f"cannot be met: the model's vocabulary lacks characters for {what}: {shown}")


# Patterns of the library's errors, and messages for the caller; `{0}` is the first group, cut to one short line.
_SCHEMA_COMPLAINTS = (
    (r"Unimplemented keys: \[(.*?)\]", "has keywords that are not supported: {0}"),
    (r"Unknown format: (.*)", "has a format that is not supported: {0}"),
    (r"oneOf constraints are not supported", "has a oneOf whose alternatives may overlap; use anyOf"),
    (
        r"schema too large",
        "is too large when its combinations are written out; use fewer allOf and anyOf within each other",
    ),
    (r"recursion limit exceeded", "is nested too deeply: at most about 100 levels"),
    (r"Invalid type: (.*)", "has a type that JSON does not have: {0}"),
    (r"Pointer '(.*)' does not exist", "refers to {0}, which is not in it"),
    (r"Resource '(.*)' is not present", "refers to {0}; only references within the schema are followed"),
    (r"min/maxProperties only supported", "has minProperties or maxProperties with properties that are not required"),
    (r"patternProperty regexes /(.*)/ are not disjoint", "has patternProperties that may match the same key: {0}"),
    (
        r"Failed to generate regex for (\w+) range",
        "has a minimum and maximum that are too far apart in digits ({0} range)",
    ),
    (
        r"Unable to determine if regex is empty",
        "has a pattern that is too complex together with its lengths or another pattern",
    ),
    (r"'multipleOf' has too many digits", "has a multipleOf with too many digits"),
    (r"(Expected [^']* for '\w+'(?: item)?, got .*)", "is not a schema: {0}"),
    (r": (\w+ must be an? [\w ]*)", "is not a schema: {0}"),
)
_PATTERN_COMPLAINTS = (
    (r"lookarounds not supported", "has an anchor or a word border within, which is not supported"),
    (r"look-around, including", "has look-around, which is not supported"),
    (r"\nerror: ([\w ,/()<='-]+)", "is no regular expression: {0}"),
)
_COMPLAINTS = (
    (r"Unsatisfiable schema: (.*)", "allows no text: {0}"),
    (r"NoExtension", "allows no text that the model can write"),
    (r"too many|too big|too complex|fuel|limit", "is too complex; use smaller repetitions and fewer alternatives"),
)
_MAX_QUOTED = 120


def explain(complaint: str, request: ConstraintRequest) -> str:
    """Returns why the library refuses a grammar, in the caller's terms."""
    complaint = complaint.partition("\n   1 | ")[0]  # then it quotes the grammar
    known: list[tuple[str, str]] = [*_PATTERN_COMPLAINTS, *_COMPLAINTS]
    if request.json_schema is not None or request.calls is not None:
        patterns = [(pattern, f"has a pattern that {meaning}") for pattern, meaning in _PATTERN_COMPLAINTS]
        known = [*patterns, *_SCHEMA_COMPLAINTS, *_COMPLAINTS]
    for pattern, meaning in known:
        if found := re.search(pattern, complaint):
            quoted = [" ".join(str(group).split())[:_MAX_QUOTED] for group in found.groups()]
            return meaning.format(*quoted)
    return "is not supported; use a simpler one"
