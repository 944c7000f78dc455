"""Folders of decoders that read images: what is read of them, and what is said where images cannot be served."""

import json

import numpy as np
import pytest
import tiny_seers
import torch
from tiny_seers import SIDE

from headway_export.candidate import media_of
from headway_export.huggingface import FolderOptions, from_folder
from headway_export.reference import generation_logits
from headway_server.preprocessing.image import ImageLimits
from headway_server.preprocessing.tiles import Grid, TilePreprocessor


@pytest.mark.parametrize("family", tiny_seers.FAMILIES)
def test_the_way_of_images_into_prompts_is_read(tmp_path, family):
    """Reading compares tokens and pixels with those of the folder's processor."""
    source, notes = from_folder(tiny_seers.write_seer(tmp_path / family, family), FolderOptions())
    of_any_size = family.startswith("qwen") or family in ("pixtral", "mistral3", "gemma4")
    of_rows = family in ("llava_next", "llava_onevision")
    tokens = None if of_any_size else 5 if of_rows else 1 if source.image_prompt.tiles else 4
    assert source.image_prompt.tokens_per_tile == tokens
    assert source.image_prompt.token in source.media_tokens
    most = 70 if family == "gemma4" else 64
    said = f"images: up to {most} tokens each, one for 16 x 16 pixels" if of_any_size else f"images: {tokens} tokens"
    assert any(note.startswith(said) for note in notes)
    tiles = torch.rand(2, 3, 3, SIDE, 5, SIDE) if of_any_size else torch.rand(2, 3, SIDE, SIDE)
    own = source.make_reference()
    with torch.inference_mode():
        embedded = source.module.embed_images(tiles)
        torch.testing.assert_close(embedded, own.embed_images(tiles), rtol=1e-4, atol=1e-5)
        if source.image_prompt.attention != "causal":  # what is exported is held against the model where it is served
            return
        image = [source.image_prompt.token] * embedded.shape[1]
        ids = np.array([5, 6, *image, 7, 8, 9, *image, 10, 11])
        media = media_of(source, ids, tiles.numpy(), embedded.numpy())
        given = [torch.from_numpy(media.positions), torch.from_numpy(np.stack(media.embeddings))]
        given += [] if media.offsets is None else [torch.from_numpy(media.offsets)[None]]
        asked = torch.arange(len(ids))
        found = generation_logits(source.module, ids, media=tuple(given))
        given = torch.from_numpy(ids)[None], asked, len(ids)
        expected = own.image_logits(tiles, *given)[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def without_template(folder):
    (folder / "chat_template.jinja").unlink()


def with_another_processor(folder):
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "do_image_splitting": False}))


def with_many_tiles(folder):
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "size": {"longest_edge": 9 * SIDE}}))


def without_processor(folder):
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()


def with_a_template_without_images(folder):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<s>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
        "{% endfor %}</s>{% endfor %}"
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without_template, "they stand in conversations, and there is no chat template"),
        (with_another_processor, "images are not resized and divided into tiles"),
        (with_many_tiles, "one has up to 82 tiles, and 65 is the most"),
        (without_processor, "has no preprocessor_config.json"),
        (with_a_template_without_images, "their processor fails"),
    ],
)
def test_without_all_that_images_need_texts_are_served_and_the_reason_is_said(tmp_path, damage, reason):
    folder = tiny_seers.write_seer(tmp_path / "smolvlm", "smolvlm")
    damage(folder)
    source, notes = from_folder(folder, FolderOptions())
    assert source.image_prompt is None
    assert source.media_tokens
    [said] = [note for note in notes if reason in note]
    assert said.startswith("images: ")


def test_an_image_has_the_tiles_of_its_size(tmp_path):
    source, _ = from_folder(tiny_seers.write_seer(tmp_path / "smolvlm", "smolvlm"), FolderOptions())
    limits = ImageLimits(max_bytes=2**20, max_pixels=2**22)
    preprocessor = TilePreprocessor(source.image_preprocessing, limits, source.image_prompt.tiles)
    for size, grid in {(64, 48): (3, 3), (480, 16): (1, 3), (16, 480): (3, 1), (1, 1): (3, 3)}.items():
        assert preprocessor.grid(*size) == Grid(*grid)
        tiled = preprocessor.prepare_decoded(tiny_seers.draw_picture(*size), "image")
        assert (tiled.grid, len(tiled.tiles)) == (Grid(*grid), grid[0] * grid[1] + 1)
    assert preprocessor.most_tiles == 10
