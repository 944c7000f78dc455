"""Embeddings of images in the places of a prompt."""

import time

import numpy as np

from headway_server.bundles import ImagePrompt
from headway_server.preprocessing.tiles import Grid
from headway_server.serving.images import SentImage
from headway_server.tasks.prompt_images import PlacedImage, place_media

TOKEN = 7


def place(tiles, *, num_cut=0):
    """Places images of one embedding a row of their tiles, of whose tokens some were cut."""
    prompt = ImagePrompt(marker="<i>", token=TOKEN, embedding="<i>", tokens_per_tile=len(tiles[0][0]))
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
