"""What the programs in Python share: the server's addresses, its models, and the cases that a client is tried on."""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)

HTTP = os.environ["HEADWAY_HTTP"]
"""Such as http://127.0.0.1:8080."""
GRPC = os.environ["HEADWAY_GRPC"]
"""Such as 127.0.0.1:50051."""
STORE = Path(os.environ["HEADWAY_STORE"])
"""The server's bundles, for their tokenizers."""
BASE = f"{HTTP}/v1"
CHAT, VECTORS, SCORER = "chat", "clip-text", "scorer"
SENTENCE, THOUGHT = "The cat sat", "Hello there"
"""What the model that converses says, and thinks."""
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "inhabitants": {"type": "integer"}},
    "required": ["name", "inhabitants"],
    "additionalProperties": False,
}


def write_tokenizer(model: str, folder: Path) -> None:
    """Writes a model's tokenizer as `transformers` reads it."""
    folder.mkdir()
    version = STORE / model / "1"
    (folder / "tokenizer.json").write_bytes((version / "tokenizer.json").read_bytes())
    tokenizer = json.loads((version / "tokenizer.json").read_text())
    names = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    names |= {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    special = json.loads((version / "bundle.json").read_text())["special_tokens"]
    tokens = {f"{name}_token": names[special[name]] for name in ("bos", "eos", "pad") if special.get(name) is not None}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def called(*command: str | Path, **variables: str) -> str:
    """Runs a command, whose exit status must be 0; returns what it printed."""
    ran = subprocess.run(
        command,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if ran.returncode:
        raise RuntimeError((ran.stdout + ran.stderr)[-1500:])
    return ran.stdout


def refused(error: type[E], call: Callable[[], object]) -> E:
    """Calls; returns the error of that type, which must be raised."""
    try:
        call()
    except error as raised:
        return raised
    raise RuntimeError(f"no {error.__name__} is raised")


_cases: list[tuple[str, str, Callable[[], Any]]] = []


def case(name: str, *, fails: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Adds a case: a function, asyncio's too, that raises unless the client does what it should.

    Args:
        name: For the table.
        fails: The reason, where it is known to.
    """

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _cases.append((name, fails, function))
        return function

    return add


def report(name: str, error: str = "", fails: str = "") -> None:
    """Prints a case's line."""
    print(json.dumps({"case": name, "ok": not error, "detail": error, "fails": fails}), file=sys.__stdout__, flush=True)


def run() -> None:
    """Runs all cases and prints a line of JSON for each; what else is printed goes to stderr.

    Functions of asyncio share a loop; others run where none does, on the same thread.
    """
    sys.stdout = sys.stderr
    with asyncio.Runner() as runner:
        for name, fails, function in _cases:
            error = ""
            try:
                result = function()
                if inspect.iscoroutine(result):
                    runner.run(result)
            except Exception as raised:
                traceback.print_exc()
                error = f"{type(raised).__name__}: {raised}"[:2000]
            report(name, error, fails)
