"""What the benchmark asks: texts written for it and drawn pictures, or real data where the user has it.

With `HEADWAY_DATA_DIR` set, texts come from the test sets in that folder, as `headway-train data` leaves them.
"""

from __future__ import annotations

import asyncio
import csv
import gzip
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway_client.load import LoadTask
from headway_server.bundles import TOKENIZER_FILE, Bundle, Task
from headway_server.preprocessing import TextTokenizer

MAX_REAL_INPUTS = 256
"""Inputs that are taken of a data set, at even distances."""
LOAD_TASKS = {
    Task.GENERATION: LoadTask.GENERATE_TEXT,
    Task.TRANSLATION: LoadTask.TRANSLATE_TEXT,
    Task.TEXT_CLASSIFICATION: LoadTask.CLASSIFY_TEXT,
    Task.IMAGE_CLASSIFICATION: LoadTask.CLASSIFY_IMAGE,
}
"""What is measured, and how the load tester calls it."""

PROMPTS = (
    "DUKE:\n",
    "O",
    "The night is come, and",
    "FIRST SOLDIER:\nWho goes there?\n\nSECOND SOLDIER:\n",
    "LADY ANNE:\nMy lord, what news",
    "What have they promised us, the great men of this town? Bread",
    "MESSENGER:\nThe bridge is held, the river rises yet,\nAnd none of all our horse",
    "I saw him walk alone beneath the wall, his sword undrawn, his eyes upon the sea, and",
    "QUEEN:\nGive me the letter. Here he writes of peace,\nAnd here of war, and in between the two\nHe asks for gold;",
    "BROTHER:\nYou swore it.\n\nSISTER:\nI was a child, and swore what I was told.\n\nBROTHER:\n",
    "Come, let us leave this house before the morning finds us here. The old man sleeps, the dogs are fed and still, "
    "the gate is",
    "CAPTAIN:\nThree ships went out at dawn. One has come home,\nHer sails in rags, her master at the helm,\n"
    "And he will speak to no one but the king.\nThey say he saw a light upon the rocks\nWhere no man lives, and",
)
CAPTIONS = (
    "A dog runs.",
    "Two children are playing in the snow.",
    "A man is riding a bicycle.",
    "A woman in a green coat is buying apples at a market.",
    "Three friends are sitting at a table outside.",
    "A boy jumps into a lake.",
    "An old man is feeding pigeons in front of a church while a young couple takes pictures of him.",
    "People are waiting for a train.",
    "A girl with long brown hair is reading a book under a tree.",
    "Two workers in orange vests are repairing a road at night.",
    "A black dog with a yellow ball in its mouth is swimming across a small river.",
    "A street musician plays the guitar, and several people with umbrellas stand around him and listen.",
    "A mother is holding her baby.",
    "A football player in a white shirt tries to pass the ball to a teammate while two opponents run towards him.",
    "Someone is climbing a steep rock wall.",
    "A group of tourists, some of them with cameras around their necks, looks at a map next to a big fountain.",
)
HEADLINES = (
    "Oil prices fall as the storm weakens",
    "Late goal sends the home team to the cup final after extra time",
    "Prime minister and rebel leaders agree to talks after a week of fighting at the border",
    "New chip doubles battery life, its maker says",
    "Shares of the airline fall as the company cuts its profit forecast. Analysts had expected a small rise for the "
    "third quarter, but higher fuel costs and a weak summer season took their toll.",
    "Champion out in the first round",
    "Researchers release free software that finds security holes in web browsers. The program tests thousands of "
    "pages an hour and writes a report that people without training can read.",
    "Central bank leaves interest rates unchanged",
    "Election postponed after floods",
    "Swimmer breaks her own world record in the 200 metres and says that she can go faster",
    "Two telecom companies announce a merger worth nine billion dollars; regulators in three countries have to agree "
    "before it can be completed, which lawyers expect to take until the end of next year.",
    "Probe sends first pictures of a distant moon",
    "Thousands march for higher wages in the capital",
    "Coach resigns after the seventh defeat in a row, and the club says that it will not look for a new one before "
    "the season is over",
    "Video game sales rise",
    "Peace talks resume",
)


class InputError(Exception):
    """There is nothing a model can be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a model is asked."""

    source: str
    """Where they come from, for the report."""
    values: tuple[str | bytes, ...]


def load_inputs(bundle: Bundle, new_tokens: int) -> Inputs:
    """Takes the inputs for a model: of those for its task, the ones it can read.

    Args:
        bundle: The model.
        new_tokens: Tokens that must have room behind a prompt.

    Raises:
        InputError: The task is not measured, or the model can read none of them.
    """
    task = bundle.manifest.task
    if task not in LOAD_TASKS:
        raise InputError(f"{task} is not measured yet")
    if task is Task.IMAGE_CLASSIFICATION:
        return Inputs(source="pictures drawn by demo/draw.py", values=tuple(_draw_pictures()))
    source, texts = _real_texts(task) or ("texts written for this benchmark", _OWN_TEXTS[task])
    limit = _max_tokens(bundle, new_tokens)
    counts = [len(ids) for ids in encode_texts(bundle, texts)]
    fitting = tuple(text for text, count in zip(texts, counts, strict=True) if 0 < count <= limit)
    if not fitting:
        raise InputError(
            f"none of the {len(texts)} {source} has at most {limit} tokens (the shortest has {min(counts)}); "
            "choose a smaller --new-tokens or a model that holds more"
        )
    return Inputs(source=source, values=fitting)


_OWN_TEXTS = {
    Task.GENERATION: PROMPTS,
    Task.TRANSLATION: CAPTIONS,
    Task.TEXT_CLASSIFICATION: HEADLINES,
}


def _max_tokens(bundle: Bundle, new_tokens: int) -> int:
    limits = bundle.manifest.limits
    assert limits.max_input_tokens is not None, "the manifest's validator demands it of text models"
    if bundle.manifest.task is not Task.GENERATION:
        return limits.max_input_tokens
    assert limits.max_total_tokens is not None, "the manifest's validator demands it of decoders"
    return min(limits.max_input_tokens, limits.max_total_tokens - new_tokens)


def encode_texts(bundle: Bundle, texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """Encodes texts as the server does for the bundle's task: (T,) ids of each."""
    tokenizer = TextTokenizer.load(bundle.file(TOKENIZER_FILE))
    is_prompt = bundle.manifest.task is Task.GENERATION

    async def encode() -> list[NDArray[np.int64]]:
        each = tokenizer.encode_each(texts, add_special_tokens=not is_prompt)
        return [text.input_ids async for text in each]

    return asyncio.run(encode())


def _real_texts(task: Task) -> tuple[str, tuple[str, ...]] | None:
    """Reads the test set for a task; None without HEADWAY_DATA_DIR or where the set is not in it."""
    folder = os.environ.get("HEADWAY_DATA_DIR")
    if not folder:
        return None
    pattern, read = _REAL[task]
    file = next(iter(sorted(Path(folder).glob(pattern))), None)
    if file is None:
        return None
    texts = read(file)
    stride = max(1, len(texts) // MAX_REAL_INPUTS)
    return f"{file.parent.name}/{file.name}", tuple(texts[::stride][:MAX_REAL_INPUTS])


def _read_lines(file: Path) -> list[str]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [line.strip() for line in lines if line.strip()]


def _read_news(file: Path) -> list[str]:
    with gzip.open(file, "rt", encoding="utf-8", newline="") as rows:
        return [f"{title} {text}" for _, title, text in csv.reader(rows)]


def _read_play(file: Path) -> list[str]:
    """Reads the speeches of a play, each cut to a beginning of its own length."""
    speeches = [speech for speech in file.read_text(encoding="utf-8").split("\n\n") if speech]
    return [speech[: 20 + 10 * (index % 20)] for index, speech in enumerate(speeches)]


_REAL: dict[Task, tuple[str, Callable[[Path], list[str]]]] = {
    Task.GENERATION: ("tinyshakespeare/input.txt", _read_play),
    Task.TRANSLATION: ("multi30k/test_2016_flickr.en.gz", _read_lines),
    Task.TEXT_CLASSIFICATION: ("ag_news/test*.csv.gz", _read_news),
}
"""Of each task: the file below the data folder, and how it is read."""


def _draw_pictures() -> list[bytes]:
    """The demo's pictures as PNG; the demo is a folder of scripts, not a package."""
    file = Path(__file__).resolve().parents[1] / "demo" / "draw.py"
    spec = importlib.util.spec_from_file_location("headway_demo_draw", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pictures: dict[str, bytes] = module.draw_pictures()
    return list(pictures.values())
