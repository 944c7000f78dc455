"""Draws the picture of speed in the README from the first table of performance.md: python docs/speed.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # a script has its own folder there alone

from benchmarks.picture import draw_bars  # noqa: E402

PICTURE = DOCS / "images" / "speed.svg"
_MODELS = ("GPT-2 small", "BERT-base", "Whisper tiny")
_CALLERS = 8
_COLUMN = (1, 8, 32).index(_CALLERS)


def picture() -> str:
    """Returns the picture of the named models with so many callers, as the table has them."""
    table = (DOCS / "performance.md").read_text(encoding="utf-8").partition("## Beside other libraries\n")[2]
    panels: dict[str, dict[str, float]] = {}
    counted = ""
    for line in table.partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 6:
            continue
        counted = cells[0] or counted
        model, _, unit = counted.partition(",")
        if model in _MODELS:
            panel = panels.setdefault(f"{model}: {unit.split(';')[0].strip()} a second", {})
            if cells[1]:
                panel[f"headway int8, served ({cells[5]})"] = _number(cells[1])
            panel[cells[2]] = _number(cells[3])
    title = f"Two CPU cores, {_CALLERS} callers at once"
    return draw_bars(panels, title=title, about="headway answers over gRPC, the others in their own process")


def _number(cell: str) -> float:
    return float(re.split(r", ", cell)[_COLUMN].replace(",", ""))


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
