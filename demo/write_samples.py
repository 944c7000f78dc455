"""Writes the pictures and the recording of demo/samples, which the documents' commands name.

python demo/write_samples.py
"""

from __future__ import annotations

import io
import wave
from pathlib import Path

from draw import draw_pictures, draw_scene
from examples import SAID, SAMPLES
from server_process import running_server

from headway_client import Client

DRAWN = {"scene.png": draw_scene(), "dog.png": draw_pictures()["dog"]}
"""The sample pictures, by file."""


def main() -> None:
    """Draws the pictures, and has the shipped model speak word by word."""
    for name, picture in DRAWN.items():
        (SAMPLES / name).write_bytes(picture)
    models = Path(__file__).parents[1] / "models"
    with (
        running_server(models) as (address, _),
        Client(address) as client,
        wave.open(str(SAMPLES / "said.wav"), "wb") as said,
    ):
        client.wait_ready()
        said.setparams((1, 2, 8000, 0, "NONE", ""))
        for word in client.synthesize_speech(SAID.split(), voice="theo", seed=1, model="telephone-speech"):
            with wave.open(io.BytesIO(word.audio)) as part:
                said.writeframes(part.readframes(part.getnframes()))


if __name__ == "__main__":
    main()
