"""Built-in inputs of load tests: short texts of several lengths, and small PNG images."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from headway_load.plan import LoadTask

PROMPTS = (
    "ROMEO:\n",
    "The king said to his men:\n",
    "First Citizen:\nWe have waited long enough at this gate, and no one",
    "What light is this that comes before the morning,\nAnd why",
    "My lord, the ships are back from the north and they bring news of the war. Shall I call",
    "O",
)
QUESTIONS = (
    "Hello!",
    "What is the highest mountain of Europe?",
    "Explain in two sentences why the sky is blue.",
    "I have flour, eggs, milk and two apples. What can I cook for four people in half an hour?",
    "Write a short poem about a lighthouse.",
)
SENTENCES = (
    "A dog runs.",
    "Two children are playing in the snow.",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "A woman is riding a bicycle down a busy street in the rain.",
    "Several people sit around a table in a small restaurant and look at a map together.",
    "A young boy jumps into a lake.",
)
HEADLINES = (
    "Stocks fall as oil prices climb for a third day",
    "Striker scores twice in the last ten minutes to win the cup",
    "Ministers meet to end the long dispute over fishing waters",
    "New chip doubles the battery life of small phones, its maker says after a year of tests in three countries",
    "Telescope finds water on a distant planet",
    "Airline to cut one job in ten after a weak summer; shares rise on the news while unions call for talks",
)

Pixel = tuple[int, int, int]
"""Red, green and blue, 0 to 255."""


def sample_inputs(task: LoadTask) -> list[str] | list[bytes]:
    """Returns the built-in inputs of a task."""
    if task.takes_images:
        return sample_images()
    texts = {
        LoadTask.GENERATE_TEXT: PROMPTS,
        LoadTask.CHAT: QUESTIONS,
        LoadTask.TRANSLATE_TEXT: SENTENCES,
        LoadTask.REWRITE_TEXT: SENTENCES,
        LoadTask.FILL_MASK: tuple(text.replace(" a ", " [MASK] ", 1) for text in HEADLINES if " a " in text),
    }
    return list(texts.get(task, HEADLINES))


def sample_images() -> list[bytes]:
    """Returns eight 32x32 images: a disc on a shaded ground, in different colours and positions."""
    return [encode_png(32, 32, _disc(index)) for index in range(8)]


def encode_png(width: int, height: int, pixel: Callable[[int, int], Pixel]) -> bytes:
    """Encodes an RGB image whose colour at column x and row y is `pixel(x, y)`."""
    rows = b"".join(
        b"\0" + b"".join(bytes(pixel(x, y)) for x in range(width))  # each row begins with its filter type, 0
        for y in range(height)
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB, no interlacing
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def _disc(index: int) -> Callable[[int, int], Pixel]:
    centre_x, centre_y, radius = 8 + 2 * index, 22 - index, 6 + index % 4

    def pixel(x: int, y: int) -> Pixel:
        if (x - centre_x) ** 2 + (y - centre_y) ** 2 <= radius**2:
            return (200 - 20 * index, 40 + 25 * index, 60 + 10 * index)
        return (90 + 3 * y, 140 + 2 * x, 250 - 4 * y)

    return pixel


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
