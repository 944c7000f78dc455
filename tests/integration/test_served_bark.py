"""Bark, exported by one command and served, against the samples that `transformers` makes greedily."""

import io
import json
import socket

import httpx2
import numpy as np
import pytest
import tiny_barks
import torch
import transformers
from served_sequences import export

from headway_client import Client, InvalidArgumentError

from .conftest import serve

soundfile = pytest.importorskip("soundfile")

TEXTS = ["the cat sat on a mat", "a dog", "the dog sang to its cat and the cat sang to the mat on a mat"]
NO_VOICE, NAMED, LONE = VOICES = ["", "v2/en_speaker_1", "own"]
ROUNDING = 1 / 32_768
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    HTTP_PORT = str(free.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_barks.write_bark(tmp_path_factory.mktemp("voices") / "bark")


@pytest.fixture(scope="module")
def address(folder, tmp_path_factory):
    store = export({"bark": folder}, tmp_path_factory.mktemp("store"))
    yield from serve(store, "fp32", tmp_path_factory.mktemp("log") / "server.log", "--http-port", HTTP_PORT)


@pytest.fixture(scope="module")
def client(address):
    with Client(address) as connected:
        yield connected


@pytest.fixture(scope="module")
def own(folder):
    model = transformers.BarkModel.from_pretrained(folder).eval()
    settings = json.loads((folder / "generation_config.json").read_text())
    model.generation_config.update(**settings)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def spoken_by(own, text, *, voice, **options):
    """The samples of `transformers`, which takes the likeliest fine code at a temperature of 1."""
    model, tokenizer = own
    given = tokenizer(text, padding="max_length", max_length=tiny_barks.INPUT, return_tensors="pt")
    seed = {NAMED: (1,), LONE: (5, 7)}.get(voice)
    history = None
    if seed is not None:
        history = {name: torch.from_numpy(array) for name, array in tiny_barks.prompts(*seed).items()}
    with torch.inference_mode():
        return model.generate(
            given.input_ids,
            attention_mask=given.attention_mask,
            history_prompt=history,
            do_sample=False,
            fine_temperature=1.0,
            semantic_min_eos_p=0.08,  # `generate` does not read it of the folder
            **options,
        )[0].numpy()


def samples_of(spoken):
    return soundfile.read(io.BytesIO(spoken.audio), dtype="float32")[0]


@pytest.mark.parametrize("voice", VOICES)
def test_samples_are_those_of_transformers_alone_together_and_streamed(own, client, voice):
    options = {"model": "bark", "voice": voice, "temperature": 0}
    together = client.synthesize_speech(TEXTS, **options).results
    assert len({one.audio for one in together}) == len(TEXTS)
    for text, spoken in zip(TEXTS, together, strict=True):
        found = samples_of(spoken)
        if (voice, text) == (LONE, TEXTS[1]):  # it ends before it begins, of which `generate` makes no audio
            assert len(found) >= 8
        else:
            expected = spoken_by(own, text, voice=voice)
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, np.clip(expected, -1, 1), atol=1e-4 + ROUNDING)
        assert len(found) == round(spoken.duration_seconds * spoken.sampling_rate)
        assert spoken.new_token_count * 8 == len(found) * tiny_barks.BOOKS
    [alone] = client.synthesize_speech(TEXTS[0], **options).results
    assert alone.audio == together[0].audio
    with client.stream_synthesize_speech(TEXTS[0], **options) as stream:
        pcm = b"".join(part.pcm for part in stream)
    assert together[0].audio.endswith(pcm)
    assert (together[1].finish_reason == "length") == (voice != NAMED)
    assert np.abs(samples_of(alone)).mean() > 0.01


def test_codes_are_drawn_by_default_and_by_a_seed(client):
    spoken = [
        client.synthesize_speech(TEXTS[0], model="bark", **options).results[0].audio
        for options in ({"seed": 1}, {"seed": 2}, {"seed": 1, "voice": NAMED}, {"seed": 1})
    ]
    assert spoken[0] == spoken[3]
    assert len(set(spoken)) == 3


def test_speech_is_cut_at_the_asked_length(own, client):
    options = {"model": "bark", "temperature": 0, "max_duration_seconds": 0.005}
    [cut] = client.synthesize_speech(TEXTS[2], **options).results
    assert cut.finish_reason == "length"
    expected = spoken_by(own, TEXTS[2], voice="", semantic_max_new_tokens=10)
    np.testing.assert_allclose(samples_of(cut), np.clip(expected, -1, 1), atol=1e-4 + ROUNDING)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("the " * 17, {}, "texts.*17 tokens"),
        ("", {}, "texts"),
        ("a dog", {"voice": "nobody"}, "voice.*v2/en_speaker_1, own"),
        ("a dog", {"speaking_rate": 2.0}, "speaking_rate"),
        ("a dog", {"max_duration_seconds": 60}, "max_duration_seconds"),
        ("a dog", {"top_k": 1_000}, "top_k"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, text, options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        client.synthesize_speech(text, model="bark", **options)


def test_the_api_of_openai_speaks_in_a_voice(client):
    [expected] = client.synthesize_speech("a dog", model="bark", seed=5, voice=NAMED).results
    body = {"model": "bark", "input": "a dog", "voice": NAMED, "seed": 5, "response_format": "wav"}
    answer = httpx2.post(f"http://127.0.0.1:{HTTP_PORT}/v1/audio/speech", json=body, timeout=60)
    assert answer.content == expected.audio
