"""How many digits are recognised: as recorded, after the codec, and spoken by a served model.

    python docs/journal/digits.py --codec runs/telephone-codec/checkpoint --server 127.0.0.1:50051

The judge is a small convolutional network, trained here on the recorded digits of the training part of FSDD and on
nothing else. It is measured on the test part, on the same recordings after the codec, and on digits that a server says:
each digit in each voice of FSDD, `--repeats` times with other seeds.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import soundfile
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_client import Client
from headway_training.checkpoint import AudioPreprocessing, load_model
from headway_training.data.audio import LogMel, to_float
from headway_training.data.sources import data_folder
from headway_training.data.speech import RATE, Recordings, read_digits
from headway_training.models import Codec, SpeechSynthesizer
from headway_training.tasks.codec import padded

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_AUDIO = AudioPreprocessing(
    sampling_rate=RATE, num_mel_bins=40, fft_size=256, hop_length=80, num_frames=240, max_frequency=RATE / 2
)
_ROWS = 64


class Judge(nn.Module):
    """Log-mel spectrograms (B, M, F) to logits of the ten digits (B, 10)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 24, 48, 96)
        layers: list[nn.Module] = []
        for inner, outer in pairwise(widths):
            layers += [nn.Conv2d(inner, outer, 3, stride=2, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]
            layers += [nn.Conv2d(outer, outer, 3, padding=1, groups=outer), nn.Conv2d(outer, outer, 1), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.output = nn.Sequential(nn.Dropout(0.3), nn.Linear(2 * widths[-1], len(WORDS)))

    def forward(self, features: Tensor) -> Tensor:
        """The logits."""
        states = self.layers(features[:, None])  # (B, C, M / 8, F / 8)
        logits: Tensor = self.output(torch.cat([states.mean(dim=(2, 3)), states.amax(dim=(2, 3))], dim=1))
        return logits


def main(  # noqa: PLR0917 (typer makes options of them)
    codec: Annotated[Path | None, typer.Option(help="Checkpoint of a codec, or of a model that speaks.")] = None,
    server: Annotated[str, typer.Option(help="Address of a server with the model.")] = "",
    model: str = "telephone-speech",
    repeats: Annotated[int, typer.Option(min=1, help="Times that each digit is said in each voice.")] = 5,
    epochs: Annotated[int, typer.Option(min=1)] = 12,
    seed: int = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
) -> None:
    """Trains the judge and prints what it recognises, in percent, of all and of each voice."""
    folder = data_folder(data_dir) / "fsdd"
    train, test = (read_digits(folder / f"{part}.tar.gz") for part in ("train", "test_3-4"))
    judge = train_judge(train, epochs, seed)
    recorded = [to_float(one) for one in test.samples]
    _report("recorded", judge, recorded, test.texts, test.speakers)
    if codec is not None:
        _report("after the codec", judge, _through(codec, test), test.texts, test.speakers)
    if server:
        voices = sorted(set(train.speakers))
        asked = [(word, voice, number) for number in range(repeats) for voice in voices for word in WORDS]
        with Client(server) as client:
            said = [_say(client, model, word, voice, number) for word, voice, number in asked]
        _report(f"spoken by {model}", judge, said, [one[0] for one in asked], [one[1] for one in asked])


def train_judge(digits: Recordings, epochs: int, seed: int) -> Judge:
    """Trains on digits somewhere in a window, at changing speed and loudness and with a little noise."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    judge = Judge().train()
    log_mel = LogMel(_AUDIO)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=3e-3, weight_decay=0.05)
    num_steps = epochs * -(-len(digits) // _ROWS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps)
    labels = torch.tensor([WORDS.index(word) for word in digits.texts])
    samples = [to_float(one) for one in digits.samples]
    for _ in range(epochs):
        order = random.permutation(len(digits))
        for start in range(0, len(order), _ROWS):
            rows = order[start : start + _ROWS]
            windows = np.stack([_window(samples[row], random) for row in rows])
            loss = F.cross_entropy(judge(log_mel.features(torch.from_numpy(windows))), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return judge.eval()


def _window(samples: NDArray[np.float32], random: np.random.Generator | None = None) -> NDArray[np.float32]:
    """A window, (N,), that begins with a recording, or changed at random as in training."""
    length = _AUDIO.window_samples
    window = np.zeros(length, np.float32)
    samples = samples[:length]
    if random is None:
        window[: len(samples)] = samples
        return window
    speed = random.uniform(0.85, 1.15)
    places = np.arange(0, len(samples) - 1, speed)
    samples = np.interp(places, np.arange(len(samples)), samples).astype(np.float32)[:length]
    start = int(random.integers(length - len(samples) + 1))
    window[start : start + len(samples)] = samples
    level = float(np.sqrt(np.mean(samples**2)))
    window += (random.standard_normal(length) * level * 10 ** random.uniform(-3, -0.7)).astype(np.float32)
    return np.asarray(window * np.float32(10 ** random.uniform(-0.4, 0.4)))


@torch.inference_mode()
def _through(checkpoint: Path, recordings: Recordings) -> list[NDArray[np.float32]]:
    """What is heard of the codes of recordings."""
    model, _ = load_model(checkpoint)
    assert isinstance(model, Codec | SpeechSynthesizer), "the checkpoint has no codec"
    heard = []
    for samples in recordings.samples:
        whole = torch.from_numpy(padded(to_float(samples), model.configuration.hop_length))[None]
        heard.append(model.decode(model.encode(whole))[0][0].numpy())
    return heard


def _say(client: Client, model: str, word: str, voice: str, seed: int) -> NDArray[np.float32]:
    """A digit as the served model says it."""
    answer = client.synthesize_speech([word], voice=voice, seed=seed, model=model)
    samples: NDArray[np.float32] = soundfile.read(io.BytesIO(answer[0].audio), dtype="float32")[0]
    return samples


@torch.inference_mode()
def _report(
    what: str, judge: Judge, heard: Iterable[NDArray[np.float32]], words: Sequence[str], speakers: Sequence[str]
) -> None:
    windows = np.stack([_window(samples) for samples in heard])
    named = judge(LogMel(_AUDIO).features(torch.from_numpy(windows))).argmax(dim=1)
    right = (named == torch.tensor([WORDS.index(word) for word in words])).numpy()
    of_voices = {voice: right[[one == voice for one in speakers]].mean() for voice in sorted(set(speakers))}
    told = ", ".join(f"{voice} {share:.1%}" for voice, share in of_voices.items())
    typer.echo(f"{what}: {right.mean():.1%} of {len(right)} digits ({told})")


if __name__ == "__main__":
    typer.run(main)
