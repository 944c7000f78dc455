"""Constraints: texts that follow a JSON schema, a regular expression, or are one of several choices.

    request.py      what a call asks for, checked
    grammar.py      the grammar of the texts it allows, and what is wrong with it
    trial.py        whether a schema can be compiled at a reasonable cost
    vocabulary.py   the bytes that every token adds to a text
    compiler.py     both, made into a constraint that can be started for every sequence
    state.py        how far one sequence is: the tokens that may follow

`docs/constraints.md` says what is supported, and why the library is the one it is.
"""

from headway_server.decoding.constraints.compiler import CompiledConstraint, ConstraintCompiler
from headway_server.decoding.constraints.grammar import (
    MAX_CHOICE_LENGTH,
    MAX_CHOICES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    ConstraintRequest,
)
from headway_server.decoding.constraints.state import ConstraintState, fill_many

__all__ = [
    "MAX_CHOICES",
    "MAX_CHOICE_LENGTH",
    "MAX_REGEX_BYTES",
    "MAX_SCHEMA_BYTES",
    "CompiledConstraint",
    "ConstraintCompiler",
    "ConstraintRequest",
    "ConstraintState",
    "fill_many",
]
