"""Finds the chat template of what is exported, in the files that model hubs use."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headway_export.errors import SourceError
from headway_server.bundles import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, SpecialTokens
from headway_server.errors import BundleError
from headway_server.preprocessing import ChatTemplate

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_DEFAULT = "default"


def find_chat_template(folder: Path) -> str | None:
    """Returns the chat template that lies in a folder: a file of its own, or one in `tokenizer_config.json`.

    Raises:
        SourceError: It is there and cannot be read.
    """
    for name in (CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE):
        file = folder / name
        if file.exists() and (template := read_chat_template(file)) is not None:
            return template
    return None


def read_chat_template(file: Path) -> str | None:
    """Returns the chat template in a file: all of it, or `chat_template` of a JSON object, if that is there.

    Of several templates it is the one named `default`.

    Raises:
        SourceError: The file cannot be read, or none of its templates is the default.
    """
    try:
        text = file.read_bytes().decode("utf-8")  # ends of lines are kept as they are
        if file.suffix != ".json":
            return text
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: cannot be read as a chat template ({error})") from error
    template = content.get("chat_template") if isinstance(content, dict) else None
    if template is None or isinstance(template, str):
        return template
    named = _named(template)
    if _DEFAULT not in named:
        names = ", ".join(sorted(named)) or "none"
        raise SourceError(f"{file}: chat_template has no template named {_DEFAULT} (there is {names}); name one so")
    return named[_DEFAULT]


def check_chat_template(template: str, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
    """Tries a template as a server will, before anything takes time.

    Raises:
        SourceError: A server would refuse it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8", newline="")
        tokenizer.save(str(folder / TOKENIZER_FILE))
        try:
            ChatTemplate.load(
                folder / CHAT_TEMPLATE_FILE, tokenizer_file=folder / TOKENIZER_FILE, special_tokens=special_tokens
            )
        except BundleError as error:
            reason = str(error).removeprefix(f"{folder}/")
            raise SourceError(f"{reason}; a model without the file is exported for prompts alone") from error


def _named(templates: Any) -> dict[str, str]:
    """Returns templates by name from the list form, `[{"name": ..., "template": ...}]`."""
    if not isinstance(templates, list):
        return {}
    return {
        entry["name"]: entry["template"]
        for entry in templates
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
