"""The grammar of the texts that a request allows, in the library's own language."""

from __future__ import annotations

import json
from typing import Any

from llguidance import regex_to_lark

from headway_server.engine.constraints.request import ConstraintRequest
from headway_server.errors import InvalidInputError

_HEAD = '%llguidance {"no_forcing": true}\n'
"""Every token that can lead to an allowed text may follow, not only those the tokenizer would have chosen."""

_JSON_OPTIONS = {
    "whitespace_pattern": r"[ ]?|\n{1,2}[ \t]{0,32}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": True,
    "lenient": False,
}


def grammar(request: ConstraintRequest, field: str) -> str:
    """Writes the grammar of a request.

    Raises:
        InvalidInputError: The schema is not JSON.
    """
    if request.json_schema is not None:
        return f"{_HEAD}start: %json {json.dumps(_schema(request.json_schema, f'{field}.json_schema'))}"
    if request.regex is not None:
        return f"{_HEAD}start: /{regex_to_lark(request.regex, '')}/"
    assert request.choices is not None, "the request's own check"
    return f"{_HEAD}start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in request.choices)}"


def _schema(text: str, field: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(field, f"is not JSON ({error})") from error
    if not isinstance(schema, dict):
        raise InvalidInputError(field, f"is a JSON {type(schema).__name__}; must be an object such as {{}}")
    schema["x-guidance"] = _JSON_OPTIONS
    return schema
