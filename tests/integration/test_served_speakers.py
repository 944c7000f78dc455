"""VITS, SpeechT5 and MusicGen, exported by one command and served, against the samples of `transformers`.

Those of VITS and SpeechT5 are compared for the same noise, and those of MusicGen greedily. Kokoro is not of that
library; its samples are compared with those of the module that was exported, by the same noise.
"""

import io
import json
import shutil
import socket

import httpx2
import numpy as np
import pytest
import tiny_voices
import torch
import transformers
from served_sequences import export
from typer.testing import CliRunner

from headway_client import Client, InvalidArgumentError
from headway_export.cli import app
from headway_export.huggingface import FolderOptions
from headway_export.huggingface.style_speakers import read_style_speaker
from headway_server.bundles import read_manifest
from headway_server.tasks.synthesis.spectrogram import draw_dropout
from headway_server.transports.http.openai.requests import SpeechBody

from .conftest import serve

soundfile = pytest.importorskip("soundfile")

TEXTS = ["The knock, knock of a Kiosk!", "a", "the cook's book - like a thick black brick " * 6, "kk"]
SPEAKERS = {"num_speakers": 3, "speaker_embedding_size": 6}
ROUNDING = 1 / 32_768
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    HTTP_PORT = str(free.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_voices.write_vits(tmp_path_factory.mktemp("voices") / "vits", **SPEAKERS)


@pytest.fixture(scope="module")
def speecht5(tmp_path_factory):
    return tiny_voices.write_speecht5(tmp_path_factory.mktemp("voices") / "speecht5")


@pytest.fixture(scope="module")
def musicgen(tmp_path_factory):
    return tiny_voices.write_musicgen(tmp_path_factory.mktemp("voices") / "musicgen")


@pytest.fixture(scope="module")
def kokoro(tmp_path_factory):
    return tiny_voices.write_kokoro(tmp_path_factory.mktemp("voices") / "kokoro")


@pytest.fixture(scope="module")
def store(folder, speecht5, musicgen, kokoro, tmp_path_factory):
    store = export({"vits": folder, "speecht5": speecht5, "musicgen": musicgen}, tmp_path_factory.mktemp("store"))
    return export({"kokoro": kokoro}, store, "--allow-pickle")


@pytest.fixture(scope="module")
def address(store, tmp_path_factory):
    yield from serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log", "--http-port", HTTP_PORT)


@pytest.fixture(scope="module")
def client(address):
    with Client(address) as connected:
        yield connected


@pytest.fixture(scope="module")
def own(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.VitsModel.from_pretrained(folder).eval(), tokenizer


def spoken_by(own, text, *, seed, speaker=0, rate=1.0, monkeypatch):
    """The samples of `transformers`, whose noise is the server's of a seed."""
    model, tokenizer = own
    ids, random = tokenizer(text, return_tensors="pt").input_ids, np.random.Generator(np.random.Philox(seed))

    def of_durations(*_):
        return torch.from_numpy(random.standard_normal((1, 2, ids.shape[1]), np.float32))

    def of_frames(like):
        noise = random.standard_normal((like.shape[2], like.shape[1]), np.float32)
        return torch.from_numpy(noise.T[np.newaxis].copy())

    with monkeypatch.context() as patched, torch.inference_mode():
        patched.setattr(torch, "randn", of_durations)
        patched.setattr(torch, "randn_like", of_frames)
        return model(ids, speaker_id=speaker, speaking_rate=rate).waveform[0].numpy()


def samples_of(spoken):
    return soundfile.read(io.BytesIO(spoken.audio), dtype="float32")[0]


@pytest.mark.parametrize(("voice", "rate"), [("", None), ("2", 0.7)])
def test_samples_are_those_of_transformers_alone_together_and_streamed(own, client, monkeypatch, voice, rate):
    options = {"model": "vits", "voice": voice, "seed": 7, "speaking_rate": rate}
    together = client.synthesize_speech(TEXTS, **options).results
    asked = {"seed": 7, "speaker": int(voice or 0), "rate": rate or 1.0, "monkeypatch": monkeypatch}
    for text, spoken in zip(TEXTS, together, strict=True):
        expected, found = spoken_by(own, text, **asked), samples_of(spoken)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-4 + ROUNDING)
        assert spoken.seed == 7
        assert spoken.new_token_count * 8 == len(found) == round(spoken.duration_seconds * spoken.sampling_rate)
        [alone] = client.synthesize_speech(text, **options).results
        assert alone.audio == spoken.audio
        with client.stream_synthesize_speech(text, **options) as stream:
            pcm = b"".join(part.pcm for part in stream)
        assert spoken.audio.endswith(pcm)
        assert len(pcm) == 2 * len(found)
    longest = max(together, key=lambda one: one.new_token_count)
    assert longest.new_token_count > 2 * 512  # in several windows
    assert np.abs(samples_of(longest)).max() < 1.0


# SpeechT5


@pytest.fixture(scope="module")
def own_speecht5(speecht5):
    model = transformers.SpeechT5ForTextToSpeech.from_pretrained(speecht5).eval()
    vocoder = transformers.SpeechT5HifiGan.from_pretrained(speecht5 / "vocoder").eval()
    return model, vocoder, transformers.SpeechT5Tokenizer.from_pretrained(speecht5)


def drawn_by(random, speech):
    """What takes the place of `torch.bernoulli`: of the last step, what the server draws of it."""
    layers = []

    def draw(like, **_):
        if not layers:
            layers.extend(draw_dropout(random, speech) > 0)
        kept = torch.ones_like(like)
        kept[-1] = torch.from_numpy(layers.pop(0))
        return kept

    return draw


def spoken_by_speecht5(own, store, text, *, seed, voice):
    model, vocoder, tokenizer = own
    speech = read_manifest(store / "speecht5" / "1").spectrogram
    voice = torch.from_numpy(tiny_voices.XVECTORS[voice])[None]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "bernoulli", drawn_by(np.random.Generator(np.random.Philox(seed)), speech))
        return model.generate_speech(tokenizer(text, return_tensors="pt").input_ids, voice, vocoder=vocoder).numpy()


SPECTROGRAM_TEXTS = ["the old cook's book!", "a", "Zz the THICK  book", "like a thick black brick"]


@pytest.mark.parametrize(("voice", "seed"), [("", 8), ("bo", 7)])
def test_spectrograms_are_those_of_transformers_alone_together_and_streamed(own_speecht5, store, client, voice, seed):
    options = {"model": "speecht5", "voice": voice, "seed": seed}
    together = client.synthesize_speech(SPECTROGRAM_TEXTS, **options).results
    for text, spoken in zip(SPECTROGRAM_TEXTS, together, strict=True):
        expected = spoken_by_speecht5(own_speecht5, store, text, seed=seed, voice=voice or "ada")
        found = samples_of(spoken)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=1e-4 + ROUNDING)
        assert spoken.new_token_count * 8 == len(found) == round(spoken.duration_seconds * spoken.sampling_rate)
        [alone] = client.synthesize_speech(text, **options).results
        assert alone.audio == spoken.audio
        with client.stream_synthesize_speech(text, **options) as stream:
            parts = [part.pcm for part in stream]
        assert spoken.audio.endswith(b"".join(parts))
        assert sum(map(len, parts)) == 2 * len(found)
    assert len({one.audio for one in together}) == len(together)
    assert ("length" in {one.finish_reason for one in together}) == (voice == "bo")
    assert max(len(samples_of(one)) for one in together) > 64 * 8  # in several windows


def test_a_spectrogram_is_cut_at_the_asked_length(client):
    options = {"model": "speecht5", "voice": "bo", "seed": 7}
    [whole] = client.synthesize_speech(SPECTROGRAM_TEXTS[0], **options).results
    [cut] = client.synthesize_speech(SPECTROGRAM_TEXTS[0], max_duration_seconds=0.05, **options).results
    assert cut.finish_reason == "length"
    assert len(samples_of(cut)) == 800
    np.testing.assert_array_equal(samples_of(cut)[:600], samples_of(whole)[:600])


# Kokoro


PHONEMES = ["h\u0259l\u02c8o, v\u026ab!", "a", "t\u028a f\u02d0 n\u0259is, alo."]


@pytest.fixture(scope="module")
def own_kokoro(kokoro):
    return read_style_speaker(kokoro, FolderOptions(allow_pickle=True))[0].module


def spoken_by_kokoro(module, text, *, seed, voice, rate):
    ids = torch.tensor([[0, *(tiny_voices.KOKORO["vocab"][letter] for letter in text), 0]])
    random = np.random.Generator(np.random.Philox(seed))
    with torch.inference_mode():
        durations, frames = module.durations(ids, torch.tensor([tiny_voices.KOKORO_VOICES.index(voice)]))
        counts = torch.round(durations[0] / rate).clamp(min=1).long()
        frames = torch.repeat_interleave(frames, counts, dim=1)
        noise = random.standard_normal((1, frames.shape[1], module.speech.hop_length), np.float32)
        return module.samples(frames, module.curves(frames), torch.from_numpy(noise))[0].numpy()


@pytest.mark.parametrize(("voice", "rate"), [("", None), ("bo", 0.5)])
def test_phonemes_are_spoken_as_by_the_module_alone_together_and_streamed(own_kokoro, client, voice, rate):
    options = {"model": "kokoro", "voice": voice, "seed": 7, "speaking_rate": rate}
    together = client.synthesize_speech(PHONEMES, **options).results
    for text, spoken in zip(PHONEMES, together, strict=True):
        expected = spoken_by_kokoro(own_kokoro, text, seed=7, voice=voice or "ada", rate=rate or 1.0)
        found = samples_of(spoken)
        assert found.shape == expected.shape
        assert expected.std() > 0.02
        np.testing.assert_allclose(found, np.clip(expected, -1, 1), atol=2e-3)  # the pitch's rounding turns phases
        assert spoken.new_token_count * 80 == len(found) == round(spoken.duration_seconds * spoken.sampling_rate)
        [alone] = client.synthesize_speech(text, **options).results
        assert alone.audio == spoken.audio
        with client.stream_synthesize_speech(text, **options) as stream:
            pcm = b"".join(part.pcm for part in stream)
        assert spoken.audio.endswith(pcm)
        assert len(pcm) == 2 * len(found)
    other = client.synthesize_speech(PHONEMES[0], **{**options, "seed": 8}).results[0]
    assert len(other.audio) == len(together[0].audio)  # durations are not drawn
    assert other.audio != together[0].audio


def test_speech_of_phonemes_is_cut_at_the_asked_length(client):
    [cut] = client.synthesize_speech(PHONEMES[0], model="kokoro", max_duration_seconds=0.05).results
    assert cut.finish_reason == "length"
    assert len(samples_of(cut)) == 1_200


# MusicGen


MUSIC_TEXTS = ["a quiet flute", "drum", "a loud drum and a quiet flute and a drum"]


@pytest.fixture(scope="module")
def own_musicgen(musicgen):
    model = transformers.MusicgenForConditionalGeneration.from_pretrained(musicgen).eval()
    return model, transformers.AutoTokenizer.from_pretrained(musicgen)


@pytest.mark.parametrize("num_frames", [198, 5])
def test_music_is_that_of_transformers_alone_together_and_streamed(own_musicgen, client, num_frames):
    model, tokenizer = own_musicgen
    options = {"model": "musicgen", "temperature": 0, "max_duration_seconds": num_frames * 8 / 16_000}
    together = client.synthesize_speech(MUSIC_TEXTS, **options).results
    for text, spoken in zip(MUSIC_TEXTS, together, strict=True):
        asked = {"do_sample": False, "max_new_tokens": num_frames + 1}  # the second codebook is a step later
        expected = model.generate(**tokenizer(text, return_tensors="pt"), **asked)[0, 0].numpy()
        found = samples_of(spoken)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, np.clip(expected, -1, 1), atol=1e-4 + ROUNDING)
        assert (spoken.finish_reason, spoken.new_token_count) == ("length", 2 * num_frames)
        [alone] = client.synthesize_speech(text, **options).results
        assert alone.audio == spoken.audio
        with client.stream_synthesize_speech(text, **options) as stream:
            parts = [part.pcm for part in stream]
        assert spoken.audio.endswith(b"".join(parts))
        assert sum(map(len, parts)) == 2 * len(found)
    assert len({one.audio for one in together}) == len(together)


def test_codes_of_music_are_drawn_by_default_by_a_seed_and_among_the_likeliest(client):
    spoken = [
        client.synthesize_speech("a flute", model="musicgen", **options).results[0]
        for options in ({"seed": 1}, {"seed": 2}, {"seed": 1, "top_k": 2}, {"seed": 1}, {"top_k": 1})
    ]
    assert spoken[0].audio == spoken[3].audio
    assert len({one.audio for one in spoken}) == 4
    [greedy] = client.synthesize_speech("a flute", model="musicgen", temperature=0).results
    assert greedy.audio == spoken[4].audio
    assert {one.new_token_count for one in spoken} == {2 * 198}  # what the folder generates


def test_another_seed_or_voice_speaks_otherwise(client):
    spoken = [
        client.synthesize_speech("like a book", model="vits", **options).results[0].audio
        for options in ({"seed": 1}, {"seed": 2}, {"seed": 1, "voice": "1"}, {"seed": 1})
    ]
    assert spoken[0] == spoken[3]
    assert len(set(spoken)) == 3


def test_speech_is_cut_at_the_asked_length(client):
    options = {"model": "vits", "seed": 3}
    [whole] = client.synthesize_speech(TEXTS[2], **options).results
    [cut] = client.synthesize_speech(TEXTS[2], max_duration_seconds=0.1, **options).results
    assert cut.finish_reason == "length"
    assert whole.finish_reason != "length"
    np.testing.assert_array_equal(samples_of(cut)[:1000], samples_of(whole)[:1000])
    assert len(samples_of(cut)) == 1600


@pytest.mark.parametrize(
    ("model", "text", "options", "words"),
    [
        ("vits", "a", {"temperature": 0.5}, "sampling.temperature.*draws no codes"),
        ("vits", "a", {"speaking_rate": 9.0}, "speaking_rate.*0.25 to 4"),
        ("vits", "a", {"voice": "7"}, "voice.*0, 1, 2"),
        ("vits", "a" * 1_100, {}, "texts.*1100 tokens"),
        ("vits", "!?", {}, "texts.*has no text"),
        ("vits", "a", {"max_duration_seconds": 1e6}, "max_duration_seconds"),
        ("speecht5", "a", {"top_k": 5}, "sampling.top_k.*draws no codes"),
        ("speecht5", "a", {"speaking_rate": 2.0}, "speaking_rate.*its own rate"),
        ("speecht5", "a", {"voice": "7"}, "voice.*ada, bo"),
        ("speecht5", "a" * 41, {}, "texts.*43 tokens"),
        ("speecht5", "a", {"max_duration_seconds": 1e6}, "max_duration_seconds"),
        ("kokoro", "a", {"temperature": 0.5}, "sampling.temperature.*draws no codes"),
        ("kokoro", "a", {"voice": "7"}, "voice.*ada, bo"),
        ("kokoro", "ab\u03b8a", {}, r"texts.*'\u03b8' \(U\+03B8\) at character 2"),
        ("kokoro", "a" * 31, {}, "texts.*31 tokens"),
        ("kokoro", "a", {"max_duration_seconds": 61.0}, "max_duration_seconds"),
        ("musicgen", "a", {"top_k": 99}, "top_k"),
        ("musicgen", "a", {"voice": "7"}, "voice.*without a name"),
        ("musicgen", "a", {"speaking_rate": 2.0}, "speaking_rate"),
        ("musicgen", "a", {"max_duration_seconds": 1.0}, "max_duration_seconds"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, model, text, options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        client.synthesize_speech(text, model=model, **options)


def test_the_api_of_openai_speaks_at_a_speed(client):
    [expected] = client.synthesize_speech("like a book", model="vits", seed=5, speaking_rate=2.0).results
    body = {"model": "vits", "input": "like a book", "speed": 2, "seed": 5, "response_format": "wav"}
    answer = httpx2.post(f"http://127.0.0.1:{HTTP_PORT}/v1/audio/speech", json=body, timeout=60)
    assert answer.content == expected.audio


@pytest.mark.parametrize(("voices", "voice"), [((), ""), (("0", "1"), "alloy")])
def test_a_voice_that_clients_of_openai_always_name_is_ignored_where_voices_have_no_names(voices, voice):
    body = SpeechBody.read(b'{"model": "vits", "input": "like a book", "voice": "alloy"}')
    assert body.request(voices).voice == voice


def change(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refusal_of(folder, store, *flags):
    result = CliRunner().invoke(app, ["hf", str(folder), "--store", str(store), *flags])
    assert result.exit_code == 2, result.output
    assert not any(store.glob("*/*"))
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("changes", "flags", "words"),
    [
        ({"is_uroman": True}, (), "uroman"),
        ({"normalize": False}, (), "does not normalize texts"),
        ({}, ("--precision", "int8"), "in fp32 alone"),
    ],
)
def test_what_cannot_be_exported_is_refused(folder, tmp_path, changes, flags, words):
    changed = shutil.copytree(folder, tmp_path / "changed")
    change(changed / "tokenizer_config.json", **changes)
    assert words in refusal_of(changed, tmp_path / "store", *flags)


@pytest.mark.parametrize(
    ("part", "flags", "words"),
    [
        (None, (), "give --allow-pickle"),
        (None, ("--allow-pickle", "--precision", "int8"), "in fp32 alone"),
        (None, ("--allow-pickle", "--max-length", "33"), "reads 3 to 32 tokens"),
        (None, ("--allow-pickle", "--task", "transcription"), "speaks, which is flow_synthesis"),
        ("voices", ("--allow-pickle",), "has no voices"),
        ("kokoro-v1_0.pth", ("--allow-pickle",), "has 0 files of weights"),
    ],
)
def test_what_cannot_be_exported_of_a_style_speaker_is_refused(kokoro, tmp_path, part, flags, words):
    changed = shutil.copytree(kokoro, tmp_path / "changed")
    if part is not None:
        (changed / part).rename(tmp_path / "elsewhere")
    assert words in refusal_of(changed, tmp_path / "store", *flags)


@pytest.mark.parametrize(
    ("part", "changes", "flags", "words"),
    [
        ("vocoder", None, (), "name its vocoder with --vocoder"),
        ("vocoder", None, ("--vocoder", "nowhere"), "nowhere: is no folder here"),
        ("vocoder/config.json", {"model_in_dim": 7}, (), "makes samples of 7 bins"),
        ("vocoder/config.json", {"architectures": ["VitsModel"]}, (), "is no SpeechT5HifiGan"),
        ("speaker_embeddings", None, (), "with --voices"),
        ("speaker_embeddings", None, ("--voices", "nowhere"), "--voices nowhere: is no folder"),
        ("config.json", {"speaker_embedding_dim": 6}, (), "a vector of 6 finite numbers"),
        ("tokenizer_config.json", {"normalize": True}, (), "spells numbers of a text out"),
        ("config.json", {}, ("--max-length", "41"), "reads 40 tokens"),
        ("config.json", {}, ("--precision", "int8"), "in fp32 alone"),
    ],
)
def test_what_cannot_be_exported_of_a_spectrogram_speaker_is_refused(
    speecht5, tmp_path, part, changes, *, flags, words
):
    changed = shutil.copytree(speecht5, tmp_path / "changed")
    if changes is None:
        shutil.rmtree(changed / part)
    else:
        change(changed / part, **changes)
    assert words in refusal_of(changed, tmp_path / "store", *flags)


@pytest.mark.parametrize(
    ("part", "changes", "flags", "words"),
    [
        ("decoder", {"audio_channels": 2}, (), "decoder.audio_channels is 2 (stereo)"),
        ("audio_encoder", {"chunk_length_s": 1.0}, (), "audio_encoder.chunk_length_s is 1.0"),
        ("audio_encoder", {}, ("--precision", "int8"), "in fp32 alone"),
    ],
)
def test_what_cannot_be_exported_of_music_is_refused(musicgen, tmp_path, part, changes, *, flags, words):
    changed = shutil.copytree(musicgen, tmp_path / "changed")
    settings = json.loads((changed / "config.json").read_text())
    change(changed / "config.json", **{part: {**settings[part], **changes}})
    assert words in refusal_of(changed, tmp_path / "store", *flags)


def test_flags_of_a_spectrogram_speaker_are_for_it_alone(folder, tmp_path):
    assert "--voices is for spectrogram_synthesis" in refusal_of(folder, tmp_path / "store", "--voices", "nowhere")
