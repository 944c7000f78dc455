"""Constraints: texts that follow a JSON schema, a regular expression, or are one of several choices.

    grammar.py      validated constraints; the grammar of allowed texts, and its errors
    vocabulary.py   the bytes that every token adds to a text
    compiler.py     makes both a constraint that can be started for every sequence
    state.py        state of one sequence: the allowed tokens
    closing.py      the end of a JSON text within its maximum of tokens

docs/constraints.md lists supported features and the reasons for llguidance.
"""

from headway_server.decoding.constraints.compiler import CompiledConstraint, ConstraintCompiler
from headway_server.decoding.constraints.grammar import (
    MAX_CHOICE_LENGTH,
    MAX_CHOICES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    CallRequest,
    ConstraintRequest,
)
from headway_server.decoding.constraints.state import ConstraintState

__all__ = [
    "MAX_CHOICES",
    "MAX_CHOICE_LENGTH",
    "MAX_REGEX_BYTES",
    "MAX_SCHEMA_BYTES",
    "CallRequest",
    "CompiledConstraint",
    "ConstraintCompiler",
    "ConstraintRequest",
    "ConstraintState",
]
