"""A tiny model that speaks: words are tones, voices are their pitch; trained in seconds by the recipes themselves."""

from pathlib import Path

import numpy as np
import soundfile
from rich.console import Console

from headway_training.data.sources import OwnData
from headway_training.run import RunOptions, run_training

RATE = 8000
HOP = 160
WORDS = {"low": 200, "high": 600, "both": 400}
"""Frequency of each word, in Hz."""
VOICES = {"ann": 1.0, "bob": 1.5}
"""What each speaker's frequencies are multiplied by."""
CODEC = {"width": 16, "d_latent": 8, "codebook_size": 16, "num_books": 2}
SPEAKER = {
    "max_length": 128,
    "history_frames": 5,
    "max_text_length": 24,
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 2,
    "d_ff": 64,
    "dropout": 0.0,
}


def write_recordings(folder: Path, repeats: int = 6, rate: int = RATE) -> Path:
    """Writes recordings of every word in every voice; returns their table."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    rows = ["file\tspeaker\ttranscript"]
    for number in range(repeats):
        for speaker, factor in VOICES.items():
            for word, frequency in WORDS.items():
                length = HOP * int(random.integers(8, 14)) * rate // RATE
                tone = np.sin(2 * np.pi * frequency * factor * np.arange(length) / rate + random.uniform(0, 6))
                name = f"{speaker}-{word}-{number}.wav"
                fade = np.minimum(1, np.minimum(np.arange(length), np.arange(length)[::-1]) / 40)
                soundfile.write(folder / name, 0.3 * tone * fade, rate)
                rows.append(f"{name}\t{speaker}\t{word}")
    table = folder / "recordings.tsv"
    table.write_text("\n".join(rows) + "\n")
    return table


def train(recipe: str, fields: dict[str, float], folder: Path, *more: str, table: Path, **options: object) -> Path:
    """Runs one of the two recipes on recordings; returns the checkpoint."""
    settings = [f"model.{name}={value}" for name, value in fields.items()]
    settings += ["optimization.evaluations=1", "optimization.epochs=1000", "tracker=none", *more]
    chosen = RunOptions(
        recipe=recipe,
        settings=tuple(settings),
        own_data=OwnData(train=str(table), valid=str(table)),
        output=folder,
        **options,  # type: ignore[arg-type]
    )
    return run_training(chosen, Console(quiet=True))


def write_voice_checkpoint(folder: Path, *, codec_steps: int = 100, steps: int = 100) -> Path:
    """Trains a codec and a model of its codes; returns the checkpoint of both."""
    table = write_recordings(folder / "recordings")
    rate = "optimization.learning_rate=0.005"
    codec = train("telephone-codec", CODEC, folder / "codec", rate, table=table, max_steps=codec_steps)
    own = ('name="tones"', "augmentation.join_texts=2", "speech.first_book_weight=1.0", rate)
    return train("telephone-speech", SPEAKER, folder / "speech", *own, table=table, max_steps=steps, init=codec)
