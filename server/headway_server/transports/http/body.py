"""JSON bodies as models that are validated once.

Unknown fields are refused by name. Nulls, and fields without effect, are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from headway_server.configuration import nearest_name
from headway_server.errors import InvalidInputError, UnknownFieldError

_Element = TypeVar("_Element")
Many: TypeAlias = Annotated[list[_Element], Field(fail_fast=True)]
"""A list that reports only its first wrong element: reporting each takes as long as reading a hundred, and blocks every
thread."""

JSON_OBJECT: Final = TypeAdapter(dict[str, Any])


class Part(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted with any value, because they change no answer."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        """Leaves out nulls, and fields without effect."""
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None and key not in cls.without_effect}


class Body(Part):
    """A request."""

    union_tags: ClassVar[frozenset[str]] = frozenset()
    """Tags of union members among its parts. They and the names of parts are not names of fields."""

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Reads a request.

        Raises:
            InvalidInputError: It is not JSON, or a field is wrong.
        """
        try:
            found = JSON_OBJECT.validate_json(body)
        except ValidationError as error:
            reason = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise InvalidInputError("request", f"is not a JSON object ({reason[:200]}); send one") from None
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            raise cls._problem(error) from None

    @classmethod
    def _problem(cls, error: ValidationError) -> InvalidInputError:
        """Describes the first wrong field; for a union, in the closest member."""
        errors = error.errors(include_url=False, include_input=False)
        of_others = {each["loc"][:-1] for each in errors if _is_type(each)}  # members of unions that are not meant

        def closeness(each: Mapping[str, Any]) -> tuple[int, bool]:
            loc = each["loc"]
            is_other = any(loc[:length] in of_others for length in range(len(loc)))
            return (len(loc), not is_other) if loc[0] == errors[0]["loc"][0] else (0, False)

        first = max(errors, key=closeness)
        is_unknown = first["type"] == "extra_forbidden"
        names = cls._names(first["loc"], ends_with_field=is_unknown or first["type"] == "missing")
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")
        if is_unknown:
            near = nearest_name(field, cls.model_fields) if len(names) == 1 else ""
            return UnknownFieldError(field, f"is not supported by this server; leave it out{near}")
        if first["type"] == "missing":
            return InvalidInputError(field, "is missing; give it")
        if first["type"] == "value_error":  # of a validator of this server
            return InvalidInputError(field, str(first["ctx"]["error"]))
        if _is_type(first):
            types = dict.fromkeys(
                each["ctx"]["expected"] for each in errors if _is_type(each) and cls._names(each["loc"]) == names
            )
            return InvalidInputError(field, f"input should be {' or '.join(types)}")
        if first["type"] == "model_type":
            return InvalidInputError(field, "input should be an object")
        return InvalidInputError(field, str(first["msg"])[:1].lower() + str(first["msg"])[1:])

    @classmethod
    def _names(cls, loc: tuple[int | str, ...], *, ends_with_field: bool = False) -> list[int | str]:
        """Returns the path of an error without the members of unions."""
        given = {0, len(loc) - 1} if ends_with_field else {0}  # positions that are not union members
        members = cls.union_tags | {"str", "int", "float", "bool"} | _names_of_parts(Part)
        return [
            part
            for index, part in enumerate(loc)
            if index in given or not (isinstance(part, str) and ("[" in part or part in members))
        ]


def _names_of_parts(kind: type[Part]) -> set[str]:
    return {kind.__name__}.union(*map(_names_of_parts, kind.__subclasses__()))


def _is_type(error: Mapping[str, Any]) -> bool:
    """Returns True if an object has another `type` than a model."""
    return bool(error["type"] == "literal_error" and error["loc"][-1] == "type")
