"""Questions about texts, with the parts of these that answer them.

A file has a JSON object on each line: `question`, `context` and `answers`, a list of texts, empty where the context has
no answer. As in SQuAD's data sets `answers` may be an object with that list as `text`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway_training.data.examples import Rows
from headway_training.data.files import read_lines
from headway_training.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions(Rows):
    """Questions, the texts they are about, and the answers that are right."""

    questions: list[str]
    contexts: list[str]
    answers: list[list[str]]
    """Of each question; none where its context has no answer."""


def read_questions(path: Path) -> Questions:
    """Reads a file of questions.

    Raises:
        MissingDataError: There is no such file.
        DataError: A line is malformed: names it.
    """
    found = Questions(questions=[], contexts=[], answers=[])
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: is no JSON ({error})") from error
        texts: list[Any] = [row.get(name) if isinstance(row, dict) else None for name in ("question", "context")]
        answers = _answers_of(row)
        if answers is None or not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(
                f"{path}, line {number}: expected an object with the texts question and context, and with answers, a "
                "list of texts"
            )
        for column, text in zip((found.questions, found.contexts), texts, strict=True):
            column.append(text)
        found.answers.append(answers)
    if not len(found):
        raise DataError(f"{path} has no questions; expected a JSON object on each line")
    return found


def _answers_of(row: Any) -> list[str] | None:
    """Returns the answers of a row; None if they are malformed."""
    answers = row.get("answers") if isinstance(row, dict) else None
    answers = answers.get("text") if isinstance(answers, dict) else answers
    return answers if isinstance(answers, list) and all(isinstance(one, str) for one in answers) else None
