"""Transcribers without a decoder: windows of long audio, and the memory that calls hold."""

import io
import itertools
import wave

import numpy as np
import pytest
import tiny_bundles
from tokenizers import Tokenizer, decoders, models

from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import Ctc, SoundPreprocessing
from headway_server.errors import InvalidInputError, OverloadedError
from headway_server.preprocessing import TextTokenizer
from headway_server.runtime import Runtime
from headway_server.settings import ServerSettings
from headway_server.tasks.speech.ctc import CtcModel, CtcReader, CtcStream, Frames, windows_of
from headway_server.tasks.speech.transcripts import SpeechRequest

MIB = 2**20
CTC = Ctc(blank=0, samples_per_frame=100, stride_samples=1_000)
SOUND = SoundPreprocessing(sampling_rate=1_000, min_samples=1, window_samples=6_000)


@pytest.fixture
def model(tmp_path):
    """The letter model, with room for a MiB of audio."""
    bundle = tiny_bundles.write_letter_bundle(tmp_path)
    settings = ServerSettings(store=tmp_path, batching=BatchingSettings(max_waiting_mib=1))
    return CtcModel.load(bundle, Runtime(device="cpu", num_threads=1), settings)


def wav(samples):
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setparams((1, 2, tiny_bundles.RATE, 0, "NONE", ""))
        opened.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


@pytest.mark.parametrize("num_samples", [1, 6_000, 6_001, 9_999, 10_000, 10_001, 25_050])
def test_the_frames_of_windows_are_those_of_the_whole(num_samples):
    windows = windows_of(num_samples, SOUND, CTC)
    frames = []
    for window in windows:
        assert window.end - window.start <= SOUND.window_samples
        first = window.start // CTC.samples_per_frame
        own = list(range(first, -(-window.end // CTC.samples_per_frame)))
        frames += own[window.left : window.right]
    assert frames == list(range(-(-num_samples // CTC.samples_per_frame)))
    assert all(later.start < one.end for one, later in itertools.pairwise(windows))


def letter_reader(delimiter):
    """Reads letters, some of which a tokenizer joins with what is before them; words end at a delimiter or a mark."""
    tokens = ["<pad>", "|", "a", "b", ".", "\u2581c", "\u2581d"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<pad>"))
    steps = [decoders.Replace("|", " "), decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Replace(" .", ".")]
    tokenizer.decoder = decoders.Sequence(steps)
    ctc = Ctc(blank=0, word_delimiter=delimiter, samples_per_frame=320, stride_samples=320)
    return CtcReader(TextTokenizer(tokenizer), ctc, 0.1)


@pytest.mark.parametrize("delimiter", [1, None])
@pytest.mark.parametrize("seed", range(20))
def test_windows_read_one_by_one_are_what_they_are_together(delimiter, seed):
    random, reader = np.random.default_rng(seed), letter_reader(delimiter)
    ids = random.choice(7, 400, p=[0.3, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1]) * (random.random(400) < random.uniform(0.3, 1))
    frames = Frames(ids, random.normal(size=400).astype(np.float32))
    tokens = reader.tokens(ids.tolist())
    segments = [reader.segment(part, frames) for part in reader.parts(reader.words(tokens))]
    stream, shown, settled = CtcStream(reader), "", []
    for number, cut in enumerate(np.split(np.arange(400), np.sort(random.choice(400, 12)))):
        text, new = stream.push(Frames(*(column[cut] for column in frames)))
        shown += text
        settled += new
        before = reader.tokens(ids[: cut[-1] + 1].tolist()) if len(cut) else []
        assert not number or not before or stream.num_tokens == len(before)
    assert reader.text(tokens).startswith(shown)
    assert settled == segments[: len(settled)]
    assert len(settled) >= len(segments) - 1
    assert len(reader.text(tokens)) - len(shown) < 100


async def test_long_audio_is_heard_as_it_is_in_one_window(model):
    model.start()
    text = "AB " * 30
    answer = await model.transcribe([wav(tiny_bundles.letters(text))], request=SpeechRequest())
    model.close()
    assert answer.results[0].text == text.strip()
    assert answer.results[0].num_windows == 6


async def test_audio_is_admitted_by_its_decoded_bytes_and_given_back(model):
    model.start()
    data = wav(tiny_bundles.letters("A" * 40))  # 4 s: 0.24 MiB, and 0.34 in three windows
    await model.transcribe([data], request=SpeechRequest())
    with pytest.raises(InvalidInputError, match="MiB decoded; the limit is 1 MiB"):
        await model.transcribe([data] * 2, request=SpeechRequest())
    with model._memory.admit(1, MIB // 2), pytest.raises(OverloadedError, match="bytes of decoded audio waiting"):
        await model.transcribe([data], request=SpeechRequest())
    with pytest.raises(InvalidInputError, match="is not audio of a supported format"):
        await model.transcribe([b"no audio"], request=SpeechRequest())
    model.close()
    assert all(not one.num_admitted and not one._num_bytes for one in (model._memory, model._admission))


async def test_a_model_whose_logits_are_not_numbers_answers_nothing(model, monkeypatch):
    model.start()
    run = model._batcher._graph.run
    monkeypatch.setattr(
        model._batcher._graph, "run", lambda *given: {name: out * np.nan for name, out in run(*given).items()}
    )
    with pytest.raises(Exception, match="could not be run"):
        await model.transcribe([wav(tiny_bundles.letters("A"))], request=SpeechRequest())
    model.close()
