"""Speech by steps that read and write numbers: many texts in few slots, against the same steps one by one."""

import asyncio
import io
import time

import numpy as np
import pytest
import tiny_bundles

from headway_server.decoding.settings import EngineSettings
from headway_server.errors import DeadlineError, MemoryUnavailableError
from headway_server.runtime import Runtime
from headway_server.settings import ServerSettings
from headway_server.tasks.synthesis.delayed import DelayedModel
from headway_server.tasks.synthesis.request import SynthesisRequest
from headway_server.tasks.synthesis.spectrogram import SpectrogramModel, SpectrogramWriter, draw_dropout

soundfile = pytest.importorskip("soundfile")

TEXTS = ["a", "abc", "b", "abcdefgh", "c"]
STEP = 1 / 32_768


@pytest.fixture
def load(tmp_path):
    """Loads a model of a kind with so many slots."""

    def loaded(kind, num_slots):
        write = {SpectrogramModel: tiny_bundles.write_murmur_bundle, DelayedModel: tiny_bundles.write_clap_bundle}
        settings = ServerSettings(store=tmp_path, engine=EngineSettings(num_slots=num_slots))
        return kind.load(write[kind](tmp_path), Runtime(device="cpu", num_threads=1), settings)

    return loaded


async def spoken(model, *texts, **options):
    model.start()
    try:
        answer = await model.synthesize(texts, request=SynthesisRequest(**options))
    finally:
        model.close()
    return [soundfile.read(io.BytesIO(one.audio), dtype="float32")[0] for one in answer.results]


async def test_spectrograms_of_waiting_texts_are_those_of_steps_one_by_one(load):
    speech = tiny_bundles.MURMUR
    found = await spoken(load(SpectrogramModel, 2), *TEXTS, sampling={"seed": 5}, voice="high")
    for text, samples in zip(TEXTS, found, strict=True):
        steps = min(40, 10 * len(text))  # 20 frames for each token, two a step
        random, last, frames = np.random.Generator(np.random.Philox(5)), np.float32(0), []
        for _ in range(steps):
            last = (last + np.float32(1) + draw_dropout(random, speech)[0, 0]) * np.float32(0.9)
            frames += [last, last]
        expected = np.repeat(np.clip(0.02 * np.array(frames), -1, 1 - STEP), speech.hop_length)
        np.testing.assert_allclose(samples, expected, atol=2 * STEP)


@pytest.mark.parametrize("num_slots", [2, 7])
async def test_codes_of_waiting_texts_are_those_of_steps_one_by_one(load, num_slots):
    clap, num_frames = tiny_bundles.CLAP, 30
    options = {"max_seconds": num_frames * 0.01, "sampling": {"temperature": 0.0}}
    found = await spoken(load(DelayedModel, num_slots), *TEXTS, **options)
    table = np.random.default_rng(0).normal(size=(clap.codebook_size + 1, 16)).astype(np.float32)
    codes = np.full((num_frames + 1, 2), clap.codebook_size)  # of each frame; the last row stands for no frame
    for step in range(num_frames + 1):
        read = [codes[step - 1 - book] if 0 <= step - 1 - book < num_frames else codes[-1] for book in range(2)]
        logits = 2 * sum(table[row[book]] for book, row in enumerate(read))  # without the text they are 0
        for book in range(2):
            if 0 <= step - book < num_frames:
                codes[step - book, book] = logits[8 * book : 8 * book + 8].argmax()
    expected = np.repeat(0.02 * codes[:-1].sum(axis=1), clap.hop_length)
    for samples in found:
        np.testing.assert_allclose(samples, expected, atol=2 * STEP)


async def test_a_text_whose_step_cannot_be_taken_fails_alone(load, monkeypatch):
    model, write = load(SpectrogramModel, 4), SpectrogramWriter.write

    def broken(writer, output):
        if writer.breaks:
            raise RuntimeError("broken")
        return write(writer, output)

    monkeypatch.setattr(SpectrogramWriter, "write", broken)
    monkeypatch.setattr(
        SpectrogramWriter, "breaks", property(lambda writer: writer._speaker[0, 0] == 0.5), raising=False
    )
    model.start()
    try:
        calls = [model.synthesize(["abc"], request=SynthesisRequest(voice=voice)) for voice in ("low", "high")]
        failed, answer = await asyncio.gather(*calls, return_exceptions=True)
        assert "could not be run" in str(failed)
        assert answer.results[0].num_new_tokens == 60
        with pytest.raises(DeadlineError):
            await model.synthesize(["abc"], request=SynthesisRequest(voice="high", deadline=time.monotonic()))
        assert model.usage().num_used_slots == 0
    finally:
        model.close()


def test_guidance_takes_two_slots(load):
    with pytest.raises(MemoryUnavailableError, match="a text takes 2 for its guidance; set --num-slots"):
        load(DelayedModel, 1)
