"""A tiny model that writes which tones it hears, trained by the recipe of speech on files of a user's own."""

import wave
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console

from headway_training.data.sources import OwnData
from headway_training.run import RunOptions, run_training

RECIPE = "telephone-transcriber"
TONES = {"low": 300, "middle": 900, "high": 2400}
RATE = 8000
SIZES = {
    "frames_per_position": 4,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "d_model": 32,
    "num_heads": 2,
    "d_ff": 64,
    "max_target_length": 16,
}
SETTINGS = (
    *(f"model.{name}={value}" for name, value in SIZES.items()),
    "model.dropout=0",
    "audio.num_mel_bins=16",
    "audio.num_frames=120",
    "tokenizer.vocabulary_size=280",
    "speech.join_share=0",
    "speech.speed_change=0.05",
    "speech.hidden_bands=0",
    "speech.hidden_frames=0",
    "speech.noise_share=0",
    "speech.gain_change=6",
    "optimization.optimizer=adamw",
    "optimization.epochs=200",
    "optimization.batch_size=12",
    "optimization.learning_rate=0.005",
    "optimization.label_smoothing=0",
    "optimization.average_decay=0",
    "optimization.evaluations=1",
    "tracker=none",
    "name=listener",
)


def tones(text: str, rate: int = RATE, seed: int = 0) -> np.ndarray:
    """What is heard of some of `TONES`: samples (N,) float64 with a little noise."""
    random = np.random.default_rng(seed)
    times = np.arange(int(0.2 * rate)) / rate
    pause = np.zeros(rate // 10)
    parts = [pause]
    for word in text.split():
        parts += [random.uniform(0.2, 0.5) * np.sin(2 * np.pi * TONES[word] * times), pause]
    samples = np.concatenate(parts)
    return samples + 0.002 * random.normal(size=len(samples))


def write_wav(path: Path, samples: np.ndarray, rate: int = RATE) -> None:
    """Writes mono samples as 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def write_tones(folder: Path, name: str, *, rate: int = RATE, seed: int = 0) -> Path:
    """Writes recordings of one tone and of two, and the table of what is heard in them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["file\ttranscript"]
    for number, words in enumerate([*product(TONES), *product(TONES, TONES)]):
        file = f"{name}-{number}.wav"
        write_wav(folder / file, tones(" ".join(words), rate, seed * 100 + number), rate)
        rows.append(f"{file}\t{' '.join(words)}")
    table = folder / f"{name}.tsv"
    table.write_text("\n".join(rows) + "\n")
    return table


def transcriber_checkpoint(folder: Path) -> Path:
    """Trains the model and returns its checkpoint; the files lie beside it."""
    files = folder / "files"
    train, valid = write_tones(files, "train", rate=2 * RATE), write_tones(files, "valid", seed=1)
    options = RunOptions(
        recipe=RECIPE,
        settings=SETTINGS,
        own_data=OwnData(train=str(train), valid=str(valid)),
        output=folder / "run",
    )
    return run_training(options, Console(quiet=True))
