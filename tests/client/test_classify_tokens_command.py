"""`headway classify-tokens` against a real server: what it prints."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway_client.cli import app


def run(server: Any, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["classify-tokens", *arguments], env={"HEADWAY_SERVER": server.address})


def test_a_line_a_span_says_where_and_what_it_is(server: Any) -> None:
    ended = run(server, "good news", "--model", "rule", "--truncate")
    assert (ended.exit_code, ended.stdout) == (0, "0  4  noun  0.500  good\n")
    (request,) = server.rules.requests
    assert (list(request.texts), request.model, request.truncate) == (["good news"], "rule", True)


def test_several_texts_are_headed(server: Any) -> None:
    lines = "==> good news <==\n0  4  noun  0.500  good\n==> 🙂 dogs <==\n0  4  noun  0.500  🙂 do\n"
    assert run(server, "good news", "🙂 dogs").stdout == lines


def test_json_has_the_spans(server: Any) -> None:
    answer = json.loads(run(server, "good news", "--json").stdout)
    assert answer["spans"] == [{"label": "noun", "probability": 0.5, "span": {"start": 0, "end": 4}, "words": None}]


PAGE = {"words": ["due", "12.50"], "boxes": [[1, 2, 3, 4], [5, 6, 7, 8.5]], "width": 10, "height": 9}
FLAT = {"words": ["due", "12.50"], "boxes": [1, 2, 3, 4, 5, 6, 7, 8]}
TESSERACT = """level\tpage_num\tblock_num\tpar_num\tline_num\tword_num\tleft\ttop\twidth\theight\tconf\ttext
1\t1\t0\t0\t0\t0\t0\t0\t10\t9\t-1\t
5\t1\t1\t1\t1\t1\t1\t2\t2\t2\t96.1\tdue
5\t1\t1\t1\t1\t2\t4\t2\t1\t2\t95\t \n5\t1\t1\t1\t1\t3\t5\t6\t2\t2.5\t91\t12.50
"""


@pytest.mark.parametrize(
    ("content", "num_pages"),
    [
        (json.dumps(PAGE, indent=1), 1),
        (json.dumps([PAGE, FLAT]), 2),
        (f"{json.dumps(PAGE)}\n\n{json.dumps(FLAT)}\n", 2),
        (TESSERACT, 1),
    ],
)
def test_words_of_pages_are_read_from_a_file(server: Any, tmp_path: Path, content: str, num_pages: int) -> None:
    file = tmp_path / "pages"
    file.write_text(content, encoding="utf-8")
    ended = run(server, "--pages", str(file), "--model", "rule", "--truncate")
    assert (ended.exit_code, ended.stdout.count("1  2  sum  0.500  12.50\n")) == (0, num_pages)
    assert re.findall(r"==> (page \d) of ", ended.stdout) == [f"page {n + 1}" for n in range(num_pages)]
    (request,) = server.rules.requests
    first, *rest = request.pages
    assert (list(first.words), list(first.boxes)) == (["due", "12.50"], [1, 2, 3, 4, 5, 6, 7, 8.5])
    assert (first.width, first.height, request.truncate, len(request.texts)) == (10, 9, True, 0)
    assert [list(page.boxes) for page in rest] == [FLAT["boxes"]] * (num_pages - 1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no page; give an object of JSON with words and boxes"),
        ("[]", "holds no page; give an object of JSON with words and boxes"),
        ("{", "is neither JSON, nor an object of it on each line"),
        ('[{"words": ["a"]}]', "page 1: must be an object with words and boxes, or these with width and height"),
        ('{"words": "a", "boxes": []}', "words are a list of strings"),
        ('{"words": ["a"], "boxes": [["x"]]}', "boxes are four numbers for each word"),
        ('{"words": ["a"], "boxes": [], "width": "wide", "height": 1}', "width and height are numbers"),
    ],
)
def test_a_file_without_pages_is_refused_in_a_sentence(server: Any, tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "pages.json"
    file.write_text(content, encoding="utf-8")
    ended = run(server, "--pages", str(file))
    assert ended.exit_code == 2
    assert says in " ".join(ended.stderr.split())
    assert not server.rules.requests
