"""Encoded audio is decoded to its end, whatever its header says, or refused with what to do.

The reader of training hears the same of the same files.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest
import soundfile

from headway_server.errors import InvalidInputError
from headway_server.preprocessing.audio import AudioDecoder, AudioLimits
from headway_training.data.audio import read_audio, to_float
from headway_training.errors import DataError

RATE = 16_000
LIMITS = AudioLimits(max_bytes=2**20, max_seconds=5.0)
DECODER = AudioDecoder(RATE, LIMITS)


def sound(seconds: float, rate: int = RATE) -> np.ndarray:
    return (0.3 * np.sin(np.arange(round(seconds * rate)) * 0.05)).astype(np.float32)


def encoded(form: str, subtype: str | None = None, *, seconds: float = 1.0, rate: int = RATE) -> bytes:
    file = BytesIO()
    soundfile.write(file, sound(seconds, rate), rate, format=form, subtype=subtype)
    return file.getvalue()


def without_length(flac: bytes, filler: int) -> bytes:
    """FLAC as what writes to a pipe leaves it: STREAMINFO tells no number of samples."""
    data = bytearray(flac)
    data[21] = data[21] & 0xF0 | filler & 0x0F
    data[22:26] = bytes([filler]) * 4
    return bytes(data)


def without_sizes(wav: bytes, riff: int, size: int) -> bytes:
    """WAV as what writes to a pipe leaves it."""
    place = wav.index(b"data") + 4
    riff_bytes, size_bytes = riff.to_bytes(4, "little"), size.to_bytes(4, "little")
    return b"".join((wav[:4], riff_bytes, wav[8:place], size_bytes, wav[place + 4 :]))


WAV = encoded("WAV", "PCM_16")
PIPED = {
    "flac, 0": without_length(encoded("FLAC"), 0),
    "flac, the most": without_length(encoded("FLAC"), 0xFF),
    "wav, 0": without_sizes(WAV, 0, 0),
    "wav, header only": without_sizes(WAV, 36, 0),
    "wav, the most": without_sizes(WAV, 0xFFFFFFFF, 0xFFFFFFFF),
    "wav, floats": without_sizes(encoded("WAV", "FLOAT"), 0, 0),
}


def heard_in_training(data: bytes) -> np.ndarray:
    return to_float(read_audio(data, RATE))


READERS = {"server": lambda data: DECODER.decode(data, "audios[0]").samples, "training": heard_in_training}
by_both = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@by_both
@pytest.mark.parametrize("name", PIPED)
def test_what_was_written_to_a_pipe_is_heard_whole(name: str, read: Callable[[bytes], np.ndarray]) -> None:
    heard = read(PIPED[name])
    assert len(heard) == RATE
    assert np.allclose(heard, sound(1.0), atol=1e-3)


def test_a_length_that_is_not_told_is_counted() -> None:
    long = encoded("FLAC", seconds=6.0)
    with pytest.raises(InvalidInputError, match=r"has 6\.0 seconds by its header, the limit is 5"):
        DECODER.decode(long, "audios[0]")
    with pytest.raises(InvalidInputError, match="has more than 5 seconds"):
        DECODER.decode(without_length(long, 0), "audios[0]")
    with pytest.raises(InvalidInputError, match="has no samples"):
        DECODER.decode(encoded("WAV", "PCM_16", seconds=0), "audios[0]")


@by_both
@pytest.mark.parametrize(("subtype", "rates"), [("OPUS", (48_000, 48_000)), ("VORBIS", (16_000, 22_050))])
def test_all_files_of_a_chain_are_heard(
    subtype: str, rates: tuple[int, ...], read: Callable[[bytes], np.ndarray]
) -> None:
    links = [encoded("OGG", subtype, rate=rate) for rate in rates]
    heard = read(b"".join(links))
    assert np.array_equal(heard, np.concatenate([read(link) for link in links]))
    assert len(heard) == pytest.approx(2 * RATE, abs=0.01 * RATE)


def test_a_chain_is_held_to_the_limit_as_a_whole() -> None:
    links = [encoded("OGG", "OPUS", rate=48_000)] * 2
    assert DECODER.decode(b"".join(links), "audios[0]").duration_s == pytest.approx(2.0, abs=0.01)
    with pytest.raises(InvalidInputError, match=r"seconds by its header and [45]\.\d before, the limit is 5"):
        DECODER.decode(b"".join(links * 3), "audios[0]")


def test_a_chain_of_files_that_hold_nothing_ends() -> None:
    file = BytesIO()
    soundfile.write(file, np.zeros(1), 48_000, format="OGG", subtype="OPUS")
    with pytest.raises(InvalidInputError, match="has more than 256 files in a chain"):
        DECODER.decode(file.getvalue() * 257, "audios[0]")


def as_floats(samples: np.ndarray) -> bytes:
    file = BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


@by_both
@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_two_channels_are_mixed(form: str, read: Callable[[bytes], np.ndarray]) -> None:
    file = BytesIO()
    soundfile.write(file, np.stack([sound(1.0), 0.5 * sound(1.0)], axis=1), RATE, format=form)
    heard = read(file.getvalue())
    assert np.abs(heard[2000:14_000] - 0.75 * sound(1.0)[2000:14_000]).max() < 0.02


@by_both
def test_each_channel_is_held_to_full_scale_before_they_are_mixed(read: Callable[[bytes], np.ndarray]) -> None:
    loud = np.tile(np.array([[2.5, -0.5]], np.float32), (RATE, 1))
    assert np.allclose(read(as_floats(loud)), 0.25, atol=1e-3)


@by_both
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_no_numbers_are_refused(value: float, read: Callable[[bytes], np.ndarray]) -> None:
    samples = sound(1.0)
    samples[99] = value
    with pytest.raises((InvalidInputError, DataError), match="has samples that are no finite numbers; repair it"):
        read(as_floats(samples))


@by_both
@pytest.mark.parametrize("data", [b"", b"no audio", encoded("FLAC")[:60], encoded("WAV", "PCM_16", seconds=0)])
def test_what_holds_no_audio_is_refused(data: bytes, read: Callable[[bytes], np.ndarray]) -> None:
    with pytest.raises((InvalidInputError, DataError)):
        read(data)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("M4A or MP4", b"\0\0\0 ftypM4A \0\0\0\0"),
        ("WebM or Matroska", b"\x1aE\xdf\xa3\x9fB\x86\x81"),
        ("AAC", b"\xff\xf1P\x80\x02\x1f\xfc"),
        ("AMR", b"#!AMR\n<"),
        ("AIFF", b"FORM\0\0\0\0AIFFCOMM"),
    ],
)
def test_what_is_known_and_not_read_is_refused_by_its_name(name: str, data: bytes) -> None:
    with pytest.raises(InvalidInputError, match=rf"audios\[0\]: is {name}, .*ffmpeg .* give WAV, FLAC, OGG"):
        DECODER.decode(data, "audios[0]")


def test_a_decoder_prints_nothing_of_a_damaged_file() -> None:
    damaged = bytearray(encoded("MP3"))
    damaged[1000::7] = bytes(len(damaged[1000::7]))
    program = (
        "import sys; from contextlib import suppress; from io import BytesIO; import soundfile\n"
        "data, how = sys.stdin.buffer.read(), sys.argv[1]\n"
        "if how == 'server':\n"
        "    from headway_server.log import configure_logging\n"
        "    configure_logging(level='info', line_format='json')\n"
        "with suppress(Exception):\n"
        "    if how == 'training':\n"
        "        from headway_training.data.audio import read_audio as read\n"
        "        read(data, 16_000)\n"
        "    else:\n"
        "        soundfile.read(BytesIO(data))\n"
        "if how == 'training':\n"
        "    import ctypes; ctypes.CDLL(None).perror(b'C may write again')\n"
        "print('last words', file=sys.stderr)\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program, how],
            input=bytes(damaged),
            stderr=subprocess.PIPE,
            env=os.environ,
            check=True,
        ).stderr
        for how in ("as it is", "server", "training")
    ]
    assert b"mpg123" in printed[0]
    assert printed[1] == b"last words\n"
    assert b"mpg123" not in printed[2]
    assert printed[2].startswith(b"C may write again")
    assert printed[2].endswith(b"last words\n")
