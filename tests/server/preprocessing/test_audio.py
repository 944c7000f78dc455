"""Encoded audio is decoded to its end, whatever its header says, or refused with what to do."""

import os
import subprocess
import sys
from io import BytesIO

import numpy as np
import pytest
import soundfile

from headway_server.errors import InvalidInputError
from headway_server.preprocessing.audio import AudioDecoder, AudioLimits

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


@pytest.mark.parametrize("name", PIPED)
def test_what_was_written_to_a_pipe_is_heard_whole(name: str) -> None:
    heard = DECODER.decode(PIPED[name], "audios[0]")
    assert heard.duration_s == pytest.approx(1.0)
    assert np.allclose(heard.samples, sound(1.0), atol=1e-3)


def test_a_length_that_is_not_told_is_counted() -> None:
    long = encoded("FLAC", seconds=6.0)
    with pytest.raises(InvalidInputError, match=r"has 6\.0 seconds by its header, the limit is 5"):
        DECODER.decode(long, "audios[0]")
    with pytest.raises(InvalidInputError, match="has more than 5 seconds"):
        DECODER.decode(without_length(long, 0), "audios[0]")
    with pytest.raises(InvalidInputError, match="has no samples"):
        DECODER.decode(encoded("WAV", "PCM_16", seconds=0), "audios[0]")


@pytest.mark.parametrize(("subtype", "rates"), [("OPUS", (48_000, 48_000)), ("VORBIS", (16_000, 22_050))])
def test_all_files_of_a_chain_are_heard(subtype: str, rates: tuple[int, ...]) -> None:
    links = [encoded("OGG", subtype, rate=rate) for rate in rates]
    alone = [DECODER.decode(link, "audios[0]").samples for link in links]
    heard = DECODER.decode(b"".join(links), "audios[0]")
    assert np.array_equal(heard.samples, np.concatenate(alone))
    assert heard.duration_s == pytest.approx(2.0, abs=0.01)
    with pytest.raises(InvalidInputError, match=r"seconds by its header and [45]\.\d before, the limit is 5"):
        DECODER.decode(b"".join(links * 3), "audios[0]")


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
        "import sys; from io import BytesIO; import soundfile\n"
        "if sys.argv[1] == 'logs':\n"
        "    from headway_server.log import configure_logging\n"
        "    configure_logging(level='info', line_format='json')\n"
        "try: soundfile.read(BytesIO(sys.stdin.buffer.read()))\n"
        "except soundfile.SoundFileError: pass\n"
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
        for how in ("as it is", "logs")
    ]
    assert b"mpg123" in printed[0]
    assert printed[1] == b"last words\n"
