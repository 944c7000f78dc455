"""Compares libraries that split texts into sentences, on cases that are hard to split (docs/translation.md).

    pip install sentencex pysbd syntok sentence-splitter sentencesplit nupunkt blingfire
    python benchmarks/sentence_splitters.py

Prints a line for each library that is installed, and with --verbose the cases it splits otherwise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, TypeAlias

Split: TypeAlias = Callable[[str, str], Sequence[str]]
"""Takes a language and a text."""

# A bar marks where a sentence ends.
CASES = (
    ("en", "Dr. Smith met Mr. Jones at 5 p.m. in Washington.| They talked."),
    ("en", "It costs 3.50 dollars.| That is 2.5 times as much."),
    ("en", 'He said, "Stop! Wait for me." and ran away.| Nobody stopped.'),
    ("en", '"Where are you going?" she asked.| "Home," he said.'),
    ("en", "Well... I do not know.| Perhaps..."),
    ("en", "See Fig. 3 and cf. Sec. 2, e.g. the table.| It is clear."),
    ("en", "The U.S. Army is here.| The U.S. is big."),
    ("en", "First line of a heading\n\n|Then a paragraph begins.| And ends."),
    ("en", "1. Buy milk.\n|2. Buy bread.\n|3. Go home."),
    ("en", "- Buy milk\n|- Buy bread"),
    ("en", "No space here.|Another sentence begins."),
    ("en", "Visit www.example.com/a.html now.| Or write to a.b@example.org."),
    ("en", "I love it \N{GRINNING FACE}!| Really \N{GRINNING FACE} |Do you?"),
    ("en", "What?!| No way!!!| (Really.)| Yes."),
    ("en", "J. R. R. Tolkien wrote it.| So did C. S. Lewis."),
    ("en", "Version 1.2.3 is out.| Download it at 10.30 a.m. today."),
    ("en", "Apple Inc. was founded in 1976.| Its CEO is known."),
    ("en", "A hard\nline break within a sentence.| And more."),
    ("de", "Wir treffen uns am 3. Mai um 14.30 Uhr.| Bis dann!"),
    ("de", "Das ist z. B. gut, d. h. besser als bzw. so gut wie Nr. 5.| Ja."),
    ("de", "Am 1. Januar 2020 begann es.| Der 2. Weltkrieg endete 1945.| Danach kam Frieden."),
    ("de", "„Komm!“, rief sie.| „Nein.“| Er blieb."),
    ("de", "Prof. Dr. Müller wohnt in der Bahnhofstr. 7.| Er ist nett."),
    ("de", "Das kostet ca. 1.000 Euro, inkl. MwSt.| Gut."),
    ("fr", "M. Dupont est arrivé.| Il a dit : « Bonjour ! »| Puis il est parti."),
    ("es", "¿Qué hora es?| ¡Son las 3.30!| Vale."),
    ("zh", "今天天气很好。|我们去公园吧！|你来吗？|好。"),  # noqa: RUF001 (the marks of Chinese)
    ("zh", "他说：“你好。我很好。”|然后走了。"),  # noqa: RUF001
    ("ja", "今日は晴れです。|公園に行きましょう。"),
    ("hi", "यह एक वाक्य है।| यह दूसरा है।"),
    ("ru", "Это т. е. пример.| А это второй, напр. такой."),  # noqa: RUF001 (Cyrillic letters)
    ("el", "Πού πας;| Σπίτι."),
)


def _syntok(module: Any) -> Split:
    def split(_language: str, text: str) -> list[str]:
        paragraphs = module.process(text)
        return ["".join(token.spacing + token.value for token in sentence) for each in paragraphs for sentence in each]

    return split


def _by_line(module: Any) -> Split:
    def split(language: str, text: str) -> list[str]:
        splitter = module.SentenceSplitter(language=language)
        return [sentence for line in text.split("\n") for sentence in splitter.split(line)]

    return split


LIBRARIES: dict[str, tuple[str, Callable[[Any], Split]]] = {
    "sentencex": ("sentencex", lambda module: module.segment),
    "sentencesplit": ("sentencesplit", lambda module: lambda language, text: module.Segmenter(language).segment(text)),
    "pysbd": ("pysbd", lambda module: lambda language, text: module.Segmenter(language).segment(text)),
    "syntok": ("syntok.segmenter", _syntok),
    "sentence-splitter": ("sentence_splitter", _by_line),
    "nupunkt": ("nupunkt", lambda module: lambda _, text: module.sent_tokenize(text)),
    "blingfire": ("blingfire", lambda module: lambda _, text: module.text_to_sentences(text).split("\n")),
}
"""Module of each library, and how it is called."""


def borders(sentences: Sequence[str]) -> set[int]:
    """Returns where sentences end, in characters that are no white space."""
    ends, place = set(), 0
    for sentence in sentences:
        place += len("".join(sentence.split()))
        ends.add(place)
    return ends


def judge(split: Split, *, verbose: bool) -> dict[str, int]:
    """Counts the cases that are split rightly, the borders that should not be, and those that are missing."""
    counts = {"right": 0, "false_borders": 0, "missed_borders": 0, "refused": 0}
    for language, marked in CASES:
        wanted = borders(marked.split("|"))
        try:
            sentences = split(language, marked.replace("|", ""))
        except Exception as error:  # each library has its own for a language that it does not have
            counts["refused"] += 1
            counts["missed_borders"] += len(wanted) - 1
            if verbose:
                print(f"  {language}: {error}")
            continue
        found = borders(sentences)
        counts["right"] += found == wanted
        counts["false_borders"] += len(found - wanted)
        counts["missed_borders"] += len(wanted - found)
        if verbose and found != wanted:
            print(f"  {language}: {list(sentences)}")
    return counts


def main() -> None:
    """Prints what each library makes of the cases; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--verbose", action="store_true", help="print the cases that are split otherwise")
    verbose = parser.parse_args().verbose
    results: dict[str, dict[str, int]] = {}
    for name, (module, make) in LIBRARIES.items():
        try:
            split = make(import_module(module))
        except ImportError:
            print(f"{name}: is not installed")
            continue
        counts = results[f"{name} {version(name)}"] = judge(split, verbose=verbose)
        print(f"{name} {version(name)}: of {len(CASES)} cases", ", ".join(f"{n} {what}" for what, n in counts.items()))
    print(json.dumps({"cases": len(CASES), "results": results}))


if __name__ == "__main__":
    main()
