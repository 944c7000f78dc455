"""The sandbox of chat templates, and a trial of each template in its own process.

The sandbox restricts what a template accesses, but neither the memory of an expression nor the time of a loop without
output. So a template is tried first, with short, long and many turns, in a process with limits of the kernel.

The server runs this file as a program, which takes a tenth of a second and imports nothing of the server. It reads the
template, and exits with 0 if the trial stayed within the limits.
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
"""Limit of a trial's processor time."""
MEMORY_LIMIT_BYTES: Final = 256 * 2**20
"""Limit of a trial's additional address space."""
WALL_LIMIT_S: Final = 120.0
"""Timeout of a trial: until then, a busy machine gave it too little processor time."""
_TOO_MUCH: Final = 3

MAX_TEXT_LENGTH: Final = 2**19
"""Limit of the characters of a prompt."""
_MAX_PROCESSOR_S: Final = 1.0
PRINTED_TWINS: Final = range(0x1D800, 0x1DA00)
"""Twins of the first and last characters of special tokens: symbols of SignWriting."""
UNASSIGNED_TWINS: Final = range(0x60000, 0x70000)
"""Further twins, in an unassigned plane of Unicode, and replacements of the symbols themselves."""

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
    """The template refuses a conversation by `raise_exception`."""


class LimitError(Exception):
    """A template's output is too long, or it takes too long."""


def write(template: Template, values: dict[str, Any]) -> str:
    """Renders a template with `values`.

    Raises:
        LimitError: The output is too long, or takes too long; the time is checked at each piece of output.
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
    """Returns True if a template stays within the limits for conversations of all lengths, even if it fails.

    Raises:
        subprocess.TimeoutExpired: The machine is too busy; the next call retries.
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
    """Renders prompts as the server does. Errors of the template are ignored; the server finds them."""
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
    if statistics.exists():  # only Linux enforces this limit
        size = int(statistics.read_text().split()[0]) * resource.getpagesize() + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant turns for training; its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Returns the sandbox with the settings, names and extensions of chat templates in transformers."""
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
    """Formats JSON as chat templates expect: without the HTML escapes of Jinja's filter."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _escape_beyond_ascii(text) if ensure_ascii else text


def _escape_beyond_ascii(text: str) -> str:
    """Escapes as `json.dumps` does, except for twins, which are restored later."""
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
