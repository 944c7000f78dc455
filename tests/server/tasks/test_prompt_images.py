"""Embeddings of images in the places of a prompt."""

import time

import numpy as np
import pytest

from headway_server.bundles import ImagePrompt, ImageTiles
from headway_server.errors import InvalidInputError
from headway_server.preprocessing.tiles import Grid
from headway_server.serving.images import SentImage
from headway_server.tasks.prompt_images import (
    PlacedImage,
    arranged,
    blocks_of,
    num_embeddings,
    place_media,
    shown_images,
)

TOKEN = 7


def place(tiles, *, num_cut=0, attention="causal"):
    """Places images of one embedding a row of their tiles, of whose tokens some were cut."""
    prompt = ImagePrompt(marker="<i>", token=TOKEN, embedding="<i>", tokens_per_tile=len(tiles[0][0]))
    prompt = prompt.model_copy(update={"attention": attention})
    images = [
        PlacedImage(sent=SentImage(data=b"", field="image", key=bytes([index]) * 32), grid=Grid(1, 1))
        for index in range(len(tiles))
    ]
    num_tokens = sum(len(tile) for one in tiles for tile in one) - num_cut
    return place_media(np.array([1, *[TOKEN] * num_tokens, 2]), prompt, images, tiles, field="prompts[0]")


def test_tokens_of_images_have_the_rows_of_their_tiles_in_order():
    tiles = [tuple(np.full((2, 3), 10 * image + tile, np.float32) for tile in range(2)) for image in range(2)]
    media = place(tiles, num_cut=3)
    assert [row[0] for row in media.embeddings] == [1, 10, 10, 11, 11]
    assert [key[:1] + key[32:33] for key in media.keys] == [b"\0\3", b"\1\0", b"\1\1", b"\1\2", b"\1\3"]
    part = media.between(3, 5)
    assert (part.positions.tolist(), [row[0] for row in part.embeddings]) == ([0, 1], [10, 11])


def test_large_images_are_not_copied_on_the_event_loop():
    tiles = [(np.empty((1000, 8192), np.float32),)] * 32  # 1 GiB as a copy
    began = time.thread_time()
    media = place(tiles)
    assert time.thread_time() - began < 0.25
    assert np.shares_memory(media.embeddings[-1], tiles[0][0])


def test_images_that_a_cut_has_taken_are_not_among_those_that_are_shown():
    prompt = ImagePrompt(marker="<i>", token=TOKEN, embedding="<i>", tokens_per_tile=3)
    sent = SentImage(data=b"", field="image", key=b"")
    images = [PlacedImage(sent=sent, grid=Grid(1, columns)) for columns in (1, 2)]  # of 6 and 9 tokens
    shown = [[one.grid.columns for one in shown_images(prompt, images, count)] for count in (15, 10, 9, 1, 0)]
    assert shown == [[1, 2], [1, 2], [2], [2], []]


def test_tokens_of_an_image_or_of_a_prompt_attend_to_each_other():
    positions = np.array([2, 3, 4, 7, 8])
    prompt = ImagePrompt(marker="<i>", token=TOKEN, embedding="<i>", tokens_per_tile=1)
    kinds = [prompt.model_copy(update={"attention": kind}) for kind in ("causal", "image", "prompt")]
    found = [blocks_of(kind, positions, 12) for kind in kinds]
    assert found == [(), ((2, 5), (7, 9)), ((0, 12),)]


@pytest.mark.parametrize("attention", ["image", "prompt"])
def test_tokens_that_attend_to_each_other_are_not_cut(attention):
    tiles = [(np.zeros((2, 3), np.float32),)] * 2
    assert place(tiles, attention=attention).blocks == (((1, 5),) if attention == "image" else ((0, 6),))
    with pytest.raises(InvalidInputError, match="would be cut within its images"):
        place(tiles, num_cut=1, attention=attention)


@pytest.mark.parametrize(("most_read", "size"), [(None, (4, 6)), (1, (1, 2))])
def test_rows_of_all_tiles_stand_behind_the_whole_without_what_is_black(most_read, size):
    """Tiles of 2 x 2 embeddings, 3 x 3 of them, of whose 6 x 6 the first row and the last are black."""
    tiles = ImageTiles(fit="resolutions", resolutions=((3, 3),), tile_rows=2, most_read=most_read)
    prompt = ImagePrompt(marker="<i>", token=TOKEN, embedding="<i>", tokens_per_tile=5, layout="rows", tiles=tiles)
    grid = Grid(3, 3, 4, 6)
    places = np.arange(36.0).reshape(3, 2, 3, 2).transpose(0, 2, 1, 3).reshape(9, 4)
    parts = [np.append(place, -2)[:, np.newaxis].astype(np.float32) for place in (*places, [-1] * 4)]
    [found] = arranged(prompt, grid, parts)
    assert len(found) == num_embeddings(prompt, grid) == 4 + size[0] * (size[1] + 1)
    assert found[:4].tolist() == [[-1]] * 4
    rows = found[4:].reshape(size[0], size[1] + 1)
    assert rows[:, -1].tolist() == [-2] * size[0]
    if most_read is None:
        assert rows[:, :-1].tolist() == np.arange(36.0).reshape(6, 6)[1:5].tolist()
    else:
        assert rows[0, :-1].tolist() == [16.0, 19.0]  # between rows 2 and 3, at columns 1 and 4
