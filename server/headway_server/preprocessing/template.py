"""The sandbox that chat templates run in, and a trial of each in a process of its own.

A sandbox keeps a template from what it may not touch, but not from taking all memory for a single expression, or for
ever in a loop that writes nothing. So a template is tried first, with short, long and many turns, in a process that the
kernel limits.

The server starts this file as a program, which takes a tenth of a second. As one it imports nothing of the server's. It
reads the template and ends with 0 if that stayed within the limits.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import time
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_LIMIT_S: Final = 5
"""Processor time of a trial."""
MEMORY_LIMIT_BYTES: Final = 256 * 2**20
"""What a trial may add to the address space of its process."""
WALL_LIMIT_S: Final = 120.0
"""A trial that has not used its processor time by then got too little of it to tell."""
_TOO_MUCH: Final = 3

MAX_TEXT_LENGTH: Final = 2**19
"""Characters of a prompt."""
_MAX_PROCESSOR_S: Final = 1.0
PRINTED_TWINS: Final = range(0x1D800, 0x1DA00)
"""Characters that stand for those which special tokens begin or end with: symbols of SignWriting."""
UNASSIGNED_TWINS: Final = range(0x60000, 0x70000)
"""Further ones, of a plane of Unicode where none is assigned; and those that stand for the symbols themselves."""

_KEPT: Final = frozenset((*PRINTED_TWINS, *UNASSIGNED_TWINS))
_LONG: Final = "A word, and \u00e4nother.\n" * 10_000
_CONVERSATIONS: Final = (
    [("user", "Hello there.")],
    [("system", "Be brief."), ("user", "Hello there.")],
    [("user", _LONG)],
    [("user", "Hello there."), ("assistant", "Good day.")] * 512,
)
_TOOLS: Final = [
    {"type": "function", "function": {"name": "tool", "description": _LONG, "parameters": {"type": "object"}}}
] * 2


class RefusedConversationError(TemplateError):
    """The template says, by `raise_exception`, that it has no prompt for such a conversation."""


class LimitError(Exception):
    """A template writes too much of a conversation, or takes too long."""


def write(template: Template, values: dict[str, Any]) -> str:
    """Returns what a template writes of `values`.

    Raises:
        LimitError: That is too much, or takes too long; the time is looked at whenever it has written something.
    """
    chunks: list[str] = []
    length, began = 0, time.thread_time()
    for chunk in template.generate(values):
        length += len(chunk)
        if length > MAX_TEXT_LENGTH:
            raise LimitError(f"writes more than {MAX_TEXT_LENGTH:,} characters of it")
        if time.thread_time() - began > _MAX_PROCESSOR_S:
            raise LimitError(f"takes more than {_MAX_PROCESSOR_S:.0f} s of a processor for it")
        chunks.append(chunk)
    return "".join(chunks)


@lru_cache(maxsize=32)
def passes_trial(source: str) -> bool:
    """Returns True if a template makes prompts of conversations of all lengths, or fails to, within the limits.

    Raises:
        subprocess.TimeoutExpired: The machine is too busy to tell; the next call tries again.
    """
    done = subprocess.run(  # noqa: S603 -- this interpreter and this file
        [sys.executable, "-P", str(Path(__file__).resolve())],
        input=source.encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=WALL_LIMIT_S,
        check=False,
    )
    return done.returncode == 0


def _try(source: str) -> None:
    """Makes prompts as the server will. That a template is wrong is for the server to find."""
    try:
        template = make_environment().from_string(source)
    except MemoryError:
        raise
    except Exception:
        return
    for turns in _CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in turns]
        names = {"bos_token": "<s>", "eos_token": "</s>", "documents": None}
        for tools in (None, _TOOLS):
            try:
                write(template, {"messages": messages, "add_generation_prompt": True, "tools": tools, **names})
            except MemoryError:
                raise
            except Exception:  # noqa: S112
                continue


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    statistics = Path("/proc/self/statm")
    if statistics.exists():  # on Linux, which alone holds a process to such a limit
        size = int(statistics.read_text().split()[0]) * resource.getpagesize() + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


class _GenerationBlock(Extension):
    """`{% generation %}` marks the model's own turns for training; what is in it is written as it stands."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Returns the sandbox with the settings, names and extensions that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().astimezone().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON as chat templates expect it: without the escapes for HTML that Jinja's own filter makes."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _escape_beyond_ascii(text) if ensure_ascii else text


def _escape_beyond_ascii(text: str) -> str:
    """Escapes as `json.dumps` does, but leaves twins, which later become what they stand for."""
    return re.sub(
        r"[^\x00-\x7f]",
        lambda found: found[0] if ord(found[0]) in _KEPT else json.dumps(found[0])[1:-1],
        text,
    )


def _raise_exception(message: object = "") -> None:
    raise RefusedConversationError(str(message))


if __name__ == "__main__":
    _limit()
    try:
        _try(sys.stdin.buffer.read().decode())
    except MemoryError:
        sys.exit(_TOO_MUCH)
