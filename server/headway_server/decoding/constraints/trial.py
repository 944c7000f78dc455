"""Tries schemas that may cost without bound in a process of their own, before they are compiled in the server.

The library bounds the work and the size of a grammar, but not how long it takes to merge subschemas: a few kilobytes
of `allOf` and `patternProperties` can keep it busy for minutes, and nothing stops it. Schemas of the usual keywords
cost milliseconds whatever they say; others are compiled elsewhere first, once, which takes a tenth of a second, and
refused if that is stopped.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

CPU_LIMIT_S = 1
"""Processor time of a trial, the start of the process included."""
MEMORY_LIMIT_BYTES = 32 * 2**20
"""Memory that a compiled schema may take."""
_WALL_LIMIT_S = 20
"""A trial that gets no processor is given up, too."""

# fmt: off
_ANNOTATIONS = frozenset({
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "examples", "title",
})
_USUAL = _ANNOTATIONS | {
    "additionalProperties", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems",
    "maxLength", "maximum", "minItems", "minLength", "minimum", "pattern", "prefixItems", "properties", "required",
    "type",
}
# fmt: on
_ALONE = frozenset(("$ref", "anyOf"))
"""Usual without others beside them, with which they would be merged."""
_NAMED = frozenset(("$defs", "definitions", "properties"))
"""Their keys are names, their values schemas."""
_VALUES = frozenset(("const", "default", "enum", "examples"))
"""What they hold is no schema."""

_CHILD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({cpu}, {cpu}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
grammar, tokenizer, before = sys.stdin.buffer.read().decode(), LLTokenizer("byte"), peak()
LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
sys.exit(3 if peak() - before > {memory} else 0)
"""


def needs_trial(schema: object) -> bool:
    """Whether a schema has keywords, or keywords beside each other, whose cost is not known to be small."""
    for part in _subschemas(schema):
        keywords = part.keys()
        if not keywords <= _USUAL and not (keywords <= _ANNOTATIONS | _ALONE and len(keywords & _ALONE) == 1):
            return True
    return False


def _subschemas(schema: object) -> Iterator[dict[str, Any]]:
    """Yields a schema and all within it, as far as the usual keywords lead."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, dict):
            yield part
            for keyword, value in part.items():
                if keyword in _NAMED and isinstance(value, dict):
                    waiting.extend(value.values())
                elif keyword not in _VALUES:
                    waiting.append(value)


def is_affordable(grammar: str) -> bool:
    """Compiles a grammar in a process of its own, which may end as it will.

    Returns:
        Whether that stayed within its limits; whether the grammar is right is not looked at.
    """
    child = _CHILD.format(cpu=CPU_LIMIT_S, memory=MEMORY_LIMIT_BYTES)
    try:
        done = subprocess.run(  # noqa: S603 -- this interpreter, and no word of the caller's on its command line
            [sys.executable, "-c", child],
            input=grammar.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_WALL_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
