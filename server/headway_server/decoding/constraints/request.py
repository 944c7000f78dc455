"""What a call asks of its texts."""

from __future__ import annotations

from dataclasses import dataclass

from headway_server.errors import InvalidInputError

MAX_SCHEMA_BYTES = 64 * 1024
MAX_REGEX_BYTES = 8 * 1024
MAX_CHOICES = 256
MAX_CHOICE_LENGTH = 1024

_KINDS = ("json_schema", "regex", "choices")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintRequest:
    """What the text must look like: exactly one of these."""

    json_schema: str | None = None
    """A JSON Schema, as JSON text: the text is a JSON value that it accepts."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choices: tuple[str, ...] | None = None
    """The text is one of these."""

    def __post_init__(self) -> None:
        kinds = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(f"a constraint is one of {', '.join(_KINDS)}; got {' and '.join(kinds) or 'none'}")

    @property
    def kind(self) -> str:
        """Which of them it is."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    def check_size(self, field: str) -> None:
        """Holds it to the limits; what it means is looked at when it is compiled.

        Args:
            field: What the request calls the constraint, such as `parameters.constraint`.

        Raises:
            InvalidInputError: It is too long, has too many choices, or the same one twice.
        """
        if self.json_schema is not None:
            _check_bytes(f"{field}.json_schema", self.json_schema, MAX_SCHEMA_BYTES)
        if self.regex is not None:
            _check_bytes(f"{field}.regex", self.regex, MAX_REGEX_BYTES)
        if self.choices is not None:
            _check_choices(f"{field}.choices.texts", self.choices)


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
            raise InvalidInputError(f"{field}[{index}]", f"is the same as {field}[{first[choice]}]; give each once")
        first[choice] = index
