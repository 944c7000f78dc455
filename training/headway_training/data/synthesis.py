"""Speech that is made: captions of Multi30k, read by the synthesisers flite and eSpeak NG.

Both must be installed (`apt-get install flite espeak-ng`). The same versions make the same recordings of the same seed.

    synthesised/train.tar   recordings, FLAC, 8 kHz, mono: 000001.flac, ...
    synthesised/train.tsv   name, seconds, voice, transcript
    synthesised/valid.tar   ...
    synthesised/about.json  versions, seed, numbers
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from headway_training.data.audio import encode_audio, read_audio
from headway_training.data.files import read_lines
from headway_training.data.speech import RATE, spoken_words
from headway_training.errors import DataError

FOLDER = "synthesised"
ABOUT_FILE = "about.json"
PARTS: Mapping[str, str] = MappingProxyType({"train": "train", "valid": "val", "test": "test_2016_flickr"})
"""The file of Multi30k that each part's captions are of."""
HELD_OUT_CAPTIONS = 60
"""Captions that each synthesiser reads for validation, and for the test."""
_FLITE_VOICES = ("awb", "kal", "rms", "slt")
_ESPEAK_ACCENTS = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland")
_ESPEAK_VOICES = ("m1", "m2", "m3", "m4", "m5", "m6", "m7", "f1", "f2", "f3", "f4", "f5")
_TIMEOUT_S = 60.0


def synthesise(data_dir: Path, console: Console, *, num_captions: int, seed: int = 0) -> Path:
    """Makes the folder `synthesised`, whole or not at all.

    Args:
        data_dir: The folder of the data sets, with `multi30k`.
        console: Where progress is shown.
        num_captions: Captions of the training part that each synthesiser reads.
        seed: Chooses captions, voices, speeds and pitches.

    Raises:
        MissingDataError: A file of Multi30k is missing.
        DataError: A synthesiser is not installed or fails, or there are too few captions.
    """
    versions = {"flite": _version("flite", "--version"), "espeak-ng": _version("espeak-ng", "--version")}
    folder = data_dir / FOLDER
    staging = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        for number, (part, name) in enumerate(PARTS.items()):
            captions = _captions(data_dir / "multi30k" / f"{name}.en.gz")
            wanted = (num_captions if part == "train" else HELD_OUT_CAPTIONS) * len(_SPEAKERS)
            if wanted > len(captions):
                raise DataError(
                    f"{name}.en.gz has {len(captions):,} captions that can be read, and {wanted:,} are asked for: "
                    f"each of {len(_SPEAKERS)} synthesisers reads others"
                )
            random = np.random.default_rng((seed, number))
            _write(staging, part, [captions[i] for i in random.permutation(len(captions))[:wanted]], random, console)
        about = {"versions": versions, "seed": seed, "num_captions": num_captions}
        (staging / ABOUT_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _captions(path: Path) -> list[str]:
    """The distinct captions of a file that the model could write."""
    return list(dict.fromkeys(line.strip() for line in read_lines(path) if spoken_words(line) is not None))


def _write(folder: Path, part: str, captions: Sequence[str], random: np.random.Generator, console: Console) -> None:
    """Reads captions aloud, by each synthesiser in turn, and writes archive and table of a part."""
    seeds = random.integers(0, 2**31, len(captions)).tolist()
    speak = partial(_speak, list(_SPEAKERS.values()))
    rows = ["name\tseconds\tvoice\ttranscript"]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool, tarfile.open(folder / f"{part}.tar", "w") as archive:
        spoken = pool.map(speak, range(len(captions)), captions, seeds)
        for number, (voice, samples) in enumerate(
            track(spoken, part, len(captions), console=console, disable=not console.is_terminal), 1
        ):
            content = encode_audio(samples, RATE)
            member = tarfile.TarInfo(f"{number:06d}.flac")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
            rows.append(f"{number:06d}\t{len(samples) / RATE:.3f}\t{voice}\t{captions[number - 1]}")
    (folder / f"{part}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


_Speaker = Callable[[np.random.Generator, Path], tuple[str, list[str]]]
"""Chooses a voice: its name, and the command that reads what is on its standard input into a file."""


def _speak(speakers: Sequence[_Speaker], number: int, text: str, seed: int) -> tuple[str, NDArray[np.int16]]:
    """Reads a text by the synthesiser whose turn it is: the voice's name, and (N,)."""
    with tempfile.TemporaryDirectory() as folder:
        file, words = Path(folder, "text.txt"), Path(folder, "spoken.wav")
        file.write_text(text + "\n", encoding="utf-8")
        voice, command = speakers[number % len(speakers)](np.random.default_rng(seed), file)
        _run([*command, str(words)])
        return voice, read_audio(words, RATE, f"what {voice} has said")


def _flite(random: np.random.Generator, file: Path) -> tuple[str, list[str]]:
    voice, stretch = random.choice(_FLITE_VOICES), random.uniform(0.85, 1.2)
    command = ["flite", "-voice", str(voice), "--setf", f"duration_stretch={stretch:.3f}", "-f", str(file), "-o"]
    return f"flite {voice}", command


def _espeak(random: np.random.Generator, file: Path) -> tuple[str, list[str]]:
    voice = f"{random.choice(_ESPEAK_ACCENTS)}+{random.choice(_ESPEAK_VOICES)}"
    speed, pitch = int(random.integers(130, 191)), int(random.integers(25, 76))
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "-f", str(file), "-w"]
    return f"espeak-ng {voice}", command


_SPEAKERS: Mapping[str, _Speaker] = MappingProxyType({"flite": _flite, "espeak-ng": _espeak})


def _version(program: str, flag: str) -> str:
    """The version that a program says it has."""
    found = re.search(r"\d+\.\d[\w.-]*", _run([program, flag]))
    return found[0] if found else "unknown"


def _run(command: Sequence[str]) -> str:
    """Runs a synthesiser and returns what it prints.

    Raises:
        DataError: It is not installed, or fails.
    """
    try:
        done = subprocess.run(  # noqa: S603 (a fixed program and flags; the text is in a file)
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise DataError(f"{command[0]} is not installed; on Debian: apt-get install flite espeak-ng") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode and "--version" not in command:  # flite ends with 1 after its version
        raise DataError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout + done.stderr
