"""JSON bodies as models that are validated once.

Unknown fields are refused by name. Nulls, and fields without effect, are ignored.
"""

from __future__ import annotations

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

    union_names: ClassVar[frozenset[str]] = frozenset()
    """Names of union members among its parts, which are not names of fields."""

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
        first = max(errors, key=lambda each: len(each["loc"]) if each["loc"][0] == errors[0]["loc"][0] else 0)
        is_unknown = first["type"] == "extra_forbidden"
        given = {0, len(first["loc"]) - 1} if is_unknown else {0}  # positions that are not union members
        names = [
            part
            for index, part in enumerate(first["loc"])
            if index in given or not (isinstance(part, str) and ("[" in part or part in cls._unions()))
        ]
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names).lstrip(".")
        if is_unknown:
            near = nearest_name(field, cls.model_fields) if len(names) == 1 else ""
            return UnknownFieldError(field, f"is not supported by this server; leave it out{near}")
        if first["type"] == "missing":
            return InvalidInputError(field, "is missing; give it")
        if first["type"] == "value_error":  # of a validator of this server
            return InvalidInputError(field, str(first["ctx"]["error"]))
        return InvalidInputError(field, str(first["msg"])[:1].lower() + str(first["msg"])[1:])

    @classmethod
    def _unions(cls) -> frozenset[str]:
        return cls.union_names | {"str", "int", "float", "bool"}
