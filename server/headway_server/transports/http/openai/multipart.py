"""Forms (multipart/form-data, RFC 7578), as calls with files send them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, parse_options_header

from headway_server.errors import InvalidInputError, UnknownFieldError

_MAX_PARTS: Final = 32


def read_form(content_type: str, body: bytes, known: Collection[str] | None) -> dict[str, bytes]:
    """Reads the parts of a form (RFC 7578) by name; those of a list, whose name ends in [], are joined by commas.

    Args:
        content_type: Header of the form.
        body: The form.
        known: Names of its fields; None: any.

    Raises:
        InvalidInputError: The body is not a form, or a part is unknown or repeated.
    """
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise InvalidInputError("content-type", "has no boundary; send multipart/form-data (RFC 7578)")
    fields: dict[str, bytes] = {}
    is_whole, num_parts = False, 0

    def keep(part: Field | File) -> None:
        nonlocal num_parts
        num_parts += 1
        if num_parts > _MAX_PARTS:
            raise InvalidInputError("body", f"has more than {_MAX_PARTS} parts, the limit")
        content = part.value if isinstance(part, Field) else part.file_object.getvalue()  # type: ignore[union-attr]
        name = (part.field_name or b"").decode("utf-8", errors="replace")
        if known is not None and name not in known:
            raise UnknownFieldError(name[:64], f"is not a field of this call; it takes {', '.join(known)}")
        if name.endswith("[]") and isinstance(part, Field) and name in fields:
            content = fields.pop(name) + b"," + (content or b"")
        if name in fields:
            raise InvalidInputError(name, "is given twice; give it once, and send a call for each file")
        fields[name] = content or b""

    def end() -> None:
        nonlocal is_whole
        is_whole = True

    config = {"MAX_MEMORY_FILE_SIZE": len(body)}  # no part is written to disk
    try:
        parser = FormParser("multipart/form-data", keep, keep, end, boundary=boundary, config=config)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidInputError("body", "is not a form; send multipart/form-data (RFC 7578)") from error
    if not is_whole:
        raise InvalidInputError("body", "is an incomplete form; its last part is missing")
    return fields


def form_text(name: str, value: bytes) -> str:
    """Returns a part as a text.

    Raises:
        InvalidInputError: It is not UTF-8.
    """
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(name[:64], "is not text in UTF-8") from error
