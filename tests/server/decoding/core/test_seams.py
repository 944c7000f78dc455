"""Places where other kinds of models move in: what an encoder reads, what a decoder starts from, what tokens become."""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from naive_decoding import naive_decode
from numpy_decoder import WIDTH, NumpyEncoder
from tiny_engine import BOS_ID, EOS_ID, VOCAB_SIZE, decode, make_decoder, make_sequence, random_prompt, running_engine

from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.output.text import TextAssembly
from headway_server.decoding.parameters import SamplingParameters, SearchParameters
from headway_server.decoding.runner.encoder import CrossTensors
from headway_server.decoding.sequence import Sequence

ENCODER = NumpyEncoder(vocab_size=VOCAB_SIZE)
LANGUAGES = (40, 41, 42)


class SpectrogramEncoder:
    """Reads float frames (F, bands) and makes a position of every two of them."""

    def __init__(self, bands: int) -> None:
        self.weights = np.random.default_rng(5).normal(size=(2 * bands, WIDTH)).astype(np.float32)
        self.batches: list[list[int]] = []

    def encode(self, inputs):
        self.batches.append([each.cost for each in inputs])
        return [self._encode(each.tensors["frames"]) for each in inputs]

    def _encode(self, frames):
        pairs = frames.reshape(len(frames) // 2, -1)
        return CrossTensors(num_positions=len(pairs), tensors={"memory": np.tanh(pairs @ self.weights)[np.newaxis]})


def tokens_of(result) -> list[int]:
    return [token.token_id for token in result.tokens]


def without_end(token_ids) -> list[int]:
    return [token_id for token_id in token_ids if token_id != EOS_ID]


def listening(frames, start_ids, *, search=None, **parameters) -> Sequence:
    parameters = SamplingParameters(**({"max_new_tokens": 12, "num_top_tokens": 0} | parameters))
    return Sequence(
        prompt_ids=np.array(start_ids),
        source=EncoderInput({"frames": frames}, len(frames) // 2),
        parameters=parameters,
        output=TextAssembly(decode),
        eos_id=EOS_ID,
        search=search,
    )


async def test_an_encoder_reads_what_it_likes_and_its_batches_are_cut_by_cost():
    rng = np.random.default_rng(2)
    encoder = SpectrogramEncoder(bands=3)
    sounds = [rng.normal(size=(2 * count, 3)).astype(np.float32) for count in (4, 9, 5, 30, 2, 7)]
    async with running_engine(make_decoder(num_slots=6), encoder=encoder, max_encoder_tokens=20) as engine:
        results = await engine.run([listening(frames, [BOS_ID, LANGUAGES[0], 50]) for frames in sounds])
    assert all(len(costs) == 1 or len(costs) * max(costs) <= 20 for costs in encoder.batches)
    assert [cost for costs in encoder.batches for cost in costs] == [4, 9, 5, 30, 2, 7]
    alone = make_decoder(num_slots=1)
    for frames, result in zip(sounds, results, strict=True):
        token_ids, reason = naive_decode(
            alone,
            None,
            SamplingParameters(max_new_tokens=12),
            eos_id=EOS_ID,
            source=encoder._encode(frames),
            start_ids=[BOS_ID, LANGUAGES[0], 50],
        )
        assert (tokens_of(result), result.finish_reason) == (without_end(token_ids), reason)
    assert len({result.output for result in results}) == len(sounds)


@pytest.mark.parametrize("num_start", [1, 2, 3, 11])  # 11 is more than a chunk
async def test_a_decoder_starts_from_several_tokens_like_the_naive_loop(num_start):
    rng = np.random.default_rng(num_start)
    sources = [random_prompt(rng, longest=12) for _ in range(24)]
    starts = [[BOS_ID, *rng.choice(LANGUAGES, size=num_start - 1)] for _ in sources]
    options = [
        {"temperature": float(rng.choice([0.0, 1.2])), "seed": n, "max_new_tokens": 15, "num_top_tokens": 0}
        for n in range(24)
    ]
    async with running_engine(make_decoder(num_slots=5), encoder=ENCODER) as engine:
        sequences = [
            make_sequence(source, start_ids=start, **some)
            for source, start, some in zip(sources, starts, options, strict=True)
        ]
        results = await asyncio.gather(*(engine.run([sequence]) for sequence in sequences))
    alone = make_decoder(num_slots=1)
    for source, start, some, (result,) in zip(sources, starts, options, results, strict=True):
        token_ids, reason = naive_decode(
            alone,
            source,
            SamplingParameters(**some),
            eos_id=EOS_ID,
            source=ENCODER.encode([EncoderInput.of_tokens(source)])[0],
            start_ids=start,
        )
        assert (tokens_of(result), result.finish_reason) == (without_end(token_ids), reason)
    assert len({result.output for (result,) in results}) > 15


async def test_a_search_from_several_tokens_finds_what_one_with_a_prefix_finds():
    rng = np.random.default_rng(9)
    sources = [random_prompt(rng, longest=12) for _ in range(16)]
    starts = [[int(rng.choice(LANGUAGES)), int(rng.integers(2, VOCAB_SIZE))] for _ in sources]
    widths = [int(rng.choice([2, 4, 5])) for _ in sources]
    async with running_engine(make_decoder(num_slots=16), encoder=ENCODER) as engine:
        started = [
            make_sequence(
                source,
                start_ids=[BOS_ID, *start],
                max_new_tokens=9,
                search=SearchParameters(beam_size=width, num_hypotheses=width, length_penalty=0.0),
            )
            for source, start, width in zip(sources, starts, widths, strict=True)
        ]
        forced = [
            make_sequence(
                source,
                start_ids=[BOS_ID],
                max_new_tokens=11,
                search=SearchParameters(
                    beam_size=width, num_hypotheses=width, length_penalty=0.0, prefix_ids=tuple(start)
                ),
            )
            for source, start, width in zip(sources, starts, widths, strict=True)
        ]
        results = await asyncio.gather(*(engine.run([sequence]) for sequence in [*started, *forced]))
    found = [[one.token_ids for one in result.hypotheses] for (result,) in results]
    for start, ours, theirs in zip(starts, found[:16], found[16:], strict=True):
        assert [(*start, *token_ids) for token_ids in ours] == theirs


async def test_what_a_sequence_starts_from_is_not_aligned():
    decoder = make_decoder()
    async with running_engine(decoder, encoder=ENCODER) as engine:
        source = np.array([5, 6, 7, 8])
        sequence = make_sequence(
            source, start_ids=[BOS_ID, *LANGUAGES], wants_alignment=True, eos_id=None, max_new_tokens=6
        )
        (result,) = await engine.run([sequence])
    (hypothesis,) = result.hypotheses
    assert hypothesis.alignment.shape == (6, 4)
    inputs = np.array([BOS_ID, *LANGUAGES, *hypothesis.token_ids[:-1]])
    expected = decoder.align(0, ENCODER.encode([EncoderInput.of_tokens(source)])[0], inputs, 4)
    np.testing.assert_array_equal(hypothesis.alignment, expected)


@dataclass(frozen=True)
class Frame:
    """Codes that sound together."""

    codes: tuple[int, ...]


class FrameAssembly:
    """Makes a frame of every three tokens, and ends a sequence with its fifth frame."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._num_taken = 0

    def push(self, token_id: int) -> bool:
        self._token_ids.append(token_id)
        return len(self._token_ids) == 15

    def take(self) -> list[Frame]:
        frames = self.finish()
        taken, self._num_taken = frames[self._num_taken :], len(frames)
        return taken

    def finish(self) -> list[Frame]:
        return self.whole(self._token_ids)

    def whole(self, token_ids) -> list[Frame]:
        return [Frame(tuple(token_ids[i : i + 3])) for i in range(0, len(token_ids) - 2, 3)]

    def join(self, parts) -> list[Frame]:
        return [frame for part in parts for frame in part]


async def test_tokens_become_whatever_the_assembler_makes_of_them():
    async with running_engine(make_decoder()) as engine:
        sequence = make_sequence(
            [7, 9], output=FrameAssembly(), eos_id=None, wants_deltas=True, max_new_tokens=40, temperature=1.0
        )
        deltas = [delta async for delta in engine.stream(sequence)]
        result = sequence.reply.result.result()
        plain = make_sequence([7, 9], eos_id=None, num_top_tokens=0, max_new_tokens=15, temperature=1.0)
        (same,) = await engine.run([plain])
    token_ids = [token.token_id for token in same.tokens]
    assert result.output == [Frame(tuple(token_ids[i : i + 3])) for i in range(0, 15, 3)]
    assert [frame for delta in deltas for frame in delta.output] == result.output
    assert (result.finish_reason.value, result.num_new_tokens) == ("stop", 15)
