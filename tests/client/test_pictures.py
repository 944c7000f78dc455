"""Pictures of attention, and the commands that print and draw it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from headway_client import (
    Attention,
    AttentionMap,
    Box,
    ImageInspection,
    InspectedToken,
    TextInspection,
    TranslationInspection,
    pictures,
)

SVG = "{http://www.w3.org/2000/svg}"


def attention(rows: int, columns: int, *names: tuple[int | None, int | None]) -> Attention:
    """Even weights, in a map for each layer and head."""
    weights = (1 / columns,) * (rows * columns)
    return Attention(rows, columns, tuple(AttentionMap(layer, head, weights) for layer, head in names))


def tokens(*texts: str) -> tuple[InspectedToken, ...]:
    return tuple(InspectedToken(number, text, 0, 0) for number, text in enumerate(texts))


def texts_in(file: Path) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ET.parse(file).iter(f"{SVG}text")]


def test_one_map_is_a_heatmap_whose_tokens_are_named_on_both_sides(tmp_path: Path) -> None:
    inspection = TextInspection(tokens("[CLS]", "costs", "$5"), attention(3, 3, (None, None)), truncated=False)
    pictures.save(inspection, tmp_path / "one.svg")
    texts = texts_in(tmp_path / "one.svg")
    assert [texts.count(name) for name in ("[CLS]", "costs", "$5", "rollout")] == [2, 2, 2, 1]


def test_heads_are_small_multiples_named_along_the_edges(tmp_path: Path) -> None:
    heads = [(layer, head) for layer in range(2) for head in range(3)]
    inspection = TextInspection(tokens("a", "b"), attention(2, 2, *heads), truncated=False)
    pictures.save(inspection, tmp_path / "many.svg")
    texts = texts_in(tmp_path / "many.svg")
    assert [f"layer {layer}, head {head}" in texts for layer, head in heads] == [True] * 6
    assert texts.count("a") == 2 + 3  # beside each row of maps and below each column


def test_a_picture_is_the_same_file_every_time(tmp_path: Path) -> None:
    inspection = TextInspection(tokens("a", "b"), attention(2, 2, (0, None), (1, None)), truncated=False)
    for name in ("first.svg", "second.svg"):
        pictures.save(inspection, tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_a_translation_has_its_three_kinds_below_each_other(tmp_path: Path) -> None:
    inspection = TranslationInspection(
        source_tokens=tokens("one", "</s>"),
        target_tokens=tokens("<s>", "eins", "!"),
        translation="eins !",
        encoder_attention=attention(2, 2, (0, None)),
        decoder_attention=attention(3, 3, (0, None), (1, None)),
        cross_attention=attention(3, 2, (0, None), (1, None)),
        truncated=False,
    )
    pictures.save(inspection, tmp_path / "all.svg")
    texts = texts_in(tmp_path / "all.svg")
    assert {"encoder, layer 0", "decoder, layer 1", "cross, layer 1", "eins", "one"} <= set(texts)


def test_the_maps_of_an_image_are_laid_over_it(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20), "red").save(tmp_path / "image.png")
    boxes = [Box(10.0 + 10 * x, 10.0 * y, 20.0 + 10 * x, 10.0 + 10 * y) for y in (0, 1) for x in (0, 1)]
    inspection = ImageInspection(
        patches=(Box(0, 0, 0, 0), *boxes),
        patch_row_count=2,
        patch_column_count=2,
        attention=attention(5, 5, (0, 0), (0, 1)),
        width=40,
        height=20,
    )
    for source in (tmp_path / "image.png", (tmp_path / "image.png").read_bytes()):
        pictures.save(inspection, tmp_path / "overlay.png", image=source)
        with Image.open(tmp_path / "overlay.png") as drawn:
            assert drawn.width > drawn.height
    with pytest.raises(ValueError, match="needs the image"):
        pictures.save(inspection, tmp_path / "overlay.png")
    Image.new("RGB", (50, 20)).save(tmp_path / "other.png")
    with pytest.raises(ValueError, match="50 x 20 pixels, and 40 x 20 were inspected"):
        pictures.save(inspection, tmp_path / "overlay.png", image=tmp_path / "other.png")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    inspection = TextInspection(tokens("a"), attention(1, 1, *[(0, head) for head in range(401)]), truncated=False)
    with pytest.raises(ValueError, match="401 maps to draw, a picture shows 1 to 400"):
        pictures.save(inspection, tmp_path / "many.png")
    with pytest.raises(ValueError, match="known format"):
        pictures.save(inspection, tmp_path / "picture.foo")
    with pytest.raises(ValueError, match="0 maps"):
        pictures.save(TextInspection(tokens("a"), attention(1, 1), truncated=False), tmp_path / "none.png")
