"""Speech by flows: windows, tokens with blanks, and the audio that calls hold."""

import io

import numpy as np
import pytest
import tiny_bundles

from headway_server.batching.settings import BatchingSettings
from headway_server.errors import InvalidInputError
from headway_server.runtime import Runtime
from headway_server.settings import ServerSettings
from headway_server.tasks.synthesis.flow import FlowModel, FlowText, frame_counts
from headway_server.tasks.synthesis.request import SynthesisRequest

soundfile = pytest.importorskip("soundfile")


@pytest.fixture
def model(tmp_path):
    """The whistle model, with room for a MiB of audio."""
    settings = ServerSettings(store=tmp_path, batching=BatchingSettings(max_waiting_mib=1))
    bundle = tiny_bundles.write_whistle_bundle(tmp_path)
    return FlowModel.load(bundle, Runtime(device="cpu", num_threads=1), settings)


async def spoken(model, *texts, **options):
    model.start()
    try:
        answer = await model.synthesize(texts, request=SynthesisRequest(**options))
    finally:
        model.close()
    return [soundfile.read(io.BytesIO(one.audio))[0] for one in answer.results]


async def test_letters_follow_each_other_through_windows(model):
    [samples] = await spoken(model, "abc", sampling={"seed": 1})
    frames = samples[:: tiny_bundles.WHISTLE.hop_length]
    assert len(frames) > 7 * 20  # of three letters and four blanks
    loud = np.round(frames / 0.02).astype(int)
    changes = loud[np.flatnonzero(np.diff(loud, prepend=-1))].tolist()
    assert changes == [0, 1, 0, 2, 0, 3, 0]


async def test_texts_with_too_much_audio_for_one_call_are_refused(model):
    texts = ["a" * 50] * 16
    with pytest.raises(InvalidInputError, match="texts: have more than 1 MiB of audio"):
        await spoken(model, *texts, speaking_rate=0.25)


@pytest.mark.parametrize(
    ("bare", "expected"),
    [((), [0, 5, 0, 7, 0, 7, 0, 6, 0]), ((7,), [0, 5, 0, 7, 7, 0, 6, 0]), ((5, 7, 6), [5, 7, 7, 6])],
)
def test_blanks_surround_tokens_but_bare_ones(bare, expected):
    flow = tiny_bundles.WHISTLE.model_copy(update={"bare_tokens": bare})
    assert FlowText(None, flow).interspersed(np.array([5, 7, 7, 6])).tolist() == expected


@pytest.mark.parametrize(
    ("durations", "rate", "expected"),
    [([0.2, 1.0, 2.5], 1.0, 5), ([0.2, 1.0, 2.5], 2.0, 4), ([0.0, 0.0], 1.0, 1), ([np.inf, np.nan], 1.0, 2**31)],
)
def test_durations_are_rounded_up_after_the_rate(durations, rate, expected):
    total, counts = frame_counts(np.array(durations, np.float32), rate)
    assert total == expected
    assert counts.min() >= 0
