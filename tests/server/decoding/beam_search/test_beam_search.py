"""Searches in an engine against the reference, one sentence at a time, whatever runs beside them."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from naive_beam_search import beam_search
from numpy_decoder import NumpyDecoder, NumpyEncoder
from random_searches import Spelled, differences, is_close_call, random_search, reference_config
from tiny_engine import BOS_ID, EOS_ID, make_sequence, running_engine

from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.parameters import EarlyStopping, SearchParameters
from headway_server.decoding.sequence import FinishReason

VOCAB_SIZE = 40
ENCODER = NumpyEncoder(vocab_size=VOCAB_SIZE)


def new_decoder(num_slots: int, **options) -> NumpyDecoder:
    return NumpyDecoder(num_slots=num_slots, **{"vocab_size": VOCAB_SIZE, "likely_id": EOS_ID} | options)


def random_source(rng: random.Random) -> np.ndarray:
    return np.array([rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 12))])


def log_probabilities_of(decoder: NumpyDecoder, source: np.ndarray):
    """Reads each beam from its beginning, in the first slot."""
    decoder.set_sources(ENCODER.encode([EncoderInput.of_tokens(source)]))

    def log_probabilities(beams):
        rows = []
        for beam in beams:
            for position, token_id in enumerate([BOS_ID, *beam]):
                logits = decoder.decode(np.array([token_id]), np.array([position]))
            rows.append(torch.from_numpy(logits[0]))
        return torch.stack(rows).double().log_softmax(dim=-1)

    return log_probabilities


def expected_of(decoder, source, search, max_new_tokens):
    options = {"eos": EOS_ID, "search": reference_config(search), "max_length": max_new_tokens}
    return beam_search(log_probabilities_of(decoder, source), **options), options


async def search_alone(source, search, *, max_new_tokens=20, decoder=None, **options):
    decoder = decoder or new_decoder(search.beam_size)
    async with running_engine(decoder, encoder=ENCODER) as engine:
        sequence = make_sequence(source, start_ids=[BOS_ID], search=search, max_new_tokens=max_new_tokens, **options)
        (result,) = await engine.run([sequence])
    return result


@pytest.mark.parametrize("seed", range(4))
async def test_random_searches_of_all_widths_find_what_the_reference_finds(seed):
    rng = random.Random(seed)
    cases = [(random_source(rng), random_search(rng, range(2, VOCAB_SIZE)), rng.randint(4, 14)) for _ in range(60)]
    options = {"likely_id": EOS_ID if seed % 2 else None}  # of some, the end is often the likeliest
    decoder, alone = new_decoder(40, **options), new_decoder(1, **options)
    async with running_engine(decoder, encoder=ENCODER, max_encoder_tokens=100) as engine:

        async def answer(source, search, max_new_tokens):
            await asyncio.sleep(rng.random() * 0.1)
            sequence = make_sequence(
                source, start_ids=[BOS_ID], search=search, max_new_tokens=max_new_tokens, output=Spelled()
            )
            return (await engine.run([sequence]))[0]

        results = await asyncio.gather(*(answer(*case) for case in cases))
    num_close = 0
    for case, result in zip(cases, results, strict=True):
        expected, options = expected_of(alone, *case)
        if found := differences(result.hypotheses, expected):
            num_close += 1
            assert is_close_call(log_probabilities_of(alone, case[0]), **options), (seed, case, found)
    assert num_close <= 2, seed
    assert len({len(result.hypotheses) for result in results}) > 3
    assert {one.finish_reason for result in results for one in result.hypotheses} >= {
        FinishReason.END_OF_SEQUENCE,
        FinishReason.LENGTH,
    }


async def test_a_search_finds_the_same_alone_and_in_company_to_the_last_bit():
    rng = random.Random(11)
    cases = [(random_source(rng), random_search(rng, range(2, VOCAB_SIZE), widths=(1, 4, 4, 8))) for _ in range(40)]
    async with running_engine(new_decoder(24), encoder=ENCODER) as engine:
        sequences = [make_sequence(source, start_ids=[BOS_ID], search=search) for source, search in cases]
        results = await engine.run(sequences)
    for (source, search), result in zip(cases, results, strict=True):
        assert (await search_alone(source, search)).hypotheses == result.hypotheses


async def test_one_beam_follows_the_likeliest_token():
    rng = random.Random(5)
    async with running_engine(new_decoder(12), encoder=ENCODER) as engine:
        sources = [random_source(rng) for _ in range(20)]
        searched = [make_sequence(source, start_ids=[BOS_ID], search=SearchParameters()) for source in sources]
        greedy = [make_sequence(source, start_ids=[BOS_ID]) for source in sources]
        results = await engine.run([*searched, *greedy])
    for one, other in zip(results[:20], results[20:], strict=True):
        assert (one.output, one.finish_reason) == (other.output, other.finish_reason)
        assert one.log_probability == pytest.approx(other.log_probability, abs=1e-5)
        assert (len(one.hypotheses), other.hypotheses) == (1, ())


async def test_a_result_is_that_of_its_best_hypothesis():
    search = SearchParameters(beam_size=5, num_hypotheses=5, early_stopping=EarlyStopping.NEVER)
    result = await search_alone(np.array([5, 6, 7]), search)
    best = result.hypotheses[0]
    assert (result.output, result.finish_reason) == (best.output, best.finish_reason)
    assert (result.num_new_tokens, result.log_probability) == (best.num_new_tokens, best.log_probability)
    scores = [hypothesis.score for hypothesis in result.hypotheses]
    assert scores == sorted(scores, reverse=True)
    assert len({hypothesis.token_ids for hypothesis in result.hypotheses}) == 5


async def test_no_output_is_found_twice_and_the_next_best_takes_its_place():
    search = SearchParameters(beam_size=5, num_hypotheses=5, early_stopping=EarlyStopping.NEVER)
    every = await search_alone(np.array([5, 6, 7]), search, output=Spelled())
    read = [Spelled(9).whole(hypothesis.token_ids) for hypothesis in every.hypotheses]
    first = {text: number for number, text in reversed(list(enumerate(read)))}
    assert 1 < len(first) < 5
    for count in (1, 2, 5):
        result = await search_alone(np.array([5, 6, 7]), replace(search, num_hypotheses=count), output=Spelled(9))
        expected = [every.hypotheses[number].token_ids for number in sorted(first.values())][:count]
        assert [hypothesis.token_ids for hypothesis in result.hypotheses] == expected


async def test_phrases_that_must_appear_do_and_those_that_must_not_do_not():
    rng = random.Random(6)
    search = SearchParameters(
        beam_size=6, num_hypotheses=6, required_phrases=((5, 6, 7), (9,)), forbidden_phrases=((3,), (4, 8))
    )
    for _ in range(10):
        result = await search_alone(random_source(rng), search, max_new_tokens=30)
        text = " ".join(["", *map(str, result.hypotheses[0].token_ids), ""])
        assert " 5 6 7 " in text
        assert " 9 " in text
        assert " 3 " not in text
        assert " 4 8 " not in text


async def test_what_cannot_have_every_phrase_has_as_many_as_it_can():
    search = SearchParameters(beam_size=4, num_hypotheses=4, required_phrases=((5, 6, 7), (9,), (10, 11)))
    result = await search_alone(np.array([5, 6, 7]), search, max_new_tokens=3)
    num_met = [
        sum(phrase in " ".join(map(str, one.token_ids)) for phrase in ("5 6 7", "9", "10 11"))
        for one in result.hypotheses
    ]
    assert num_met[0] == 2
    assert num_met == sorted(num_met, reverse=True)
    assert result.finish_reason is FinishReason.LENGTH


async def test_a_prefix_begins_every_hypothesis_and_counts():
    search = SearchParameters(beam_size=3, num_hypotheses=3, prefix_ids=(7, 7, 3), no_repeat_ngram_size=1)
    result = await search_alone(np.array([5, 6, 7]), search)
    for hypothesis in result.hypotheses:
        assert hypothesis.token_ids[:3] == (7, 7, 3)
        assert len(set(hypothesis.token_ids[3:])) == len(hypothesis.token_ids) - 3
        assert not {3, 7} & set(hypothesis.token_ids[3:])


@pytest.mark.parametrize("vocab_size", [2, 3, 7])
async def test_a_vocabulary_smaller_than_the_beams_is_enough(vocab_size):
    encoder = NumpyEncoder(vocab_size=vocab_size)
    search = SearchParameters(beam_size=8, num_hypotheses=8, no_repeat_ngram_size=2)
    decoder = NumpyDecoder(num_slots=16, vocab_size=vocab_size)
    async with running_engine(decoder, encoder=encoder) as engine:
        sequences = [make_sequence([1], start_ids=[0], search=search, max_new_tokens=30) for _ in range(2)]
        results = await engine.run(sequences)
    assert results[0].hypotheses == results[1].hypotheses
    assert 1 <= len(results[0].hypotheses) <= 8


async def test_where_nothing_may_follow_the_search_ends_with_what_there_is():
    forbidden = tuple((token_id,) for token_id in range(VOCAB_SIZE) if token_id != 5)
    search = SearchParameters(
        beam_size=2, required_phrases=((5, 6),), forbidden_phrases=forbidden, no_repeat_ngram_size=1
    )
    result = await search_alone(np.array([3]), search)
    assert result.hypotheses[0].token_ids == (5,)
    assert result.finish_reason is FinishReason.CONSTRAINT


async def test_alignments_are_of_the_tokens_that_were_handed_out():
    source = np.array([5, 6, 7, 8])
    search = SearchParameters(beam_size=4, num_hypotheses=3, wants_alignment=True)
    result = await search_alone(source, search)
    decoder = new_decoder(4)
    assert [len(hypothesis.token_ids) > 0 for hypothesis in result.hypotheses].count(True) >= 2
    for hypothesis in result.hypotheses:
        if not hypothesis.token_ids:
            assert hypothesis.alignment.shape == (0, 4)
            continue
        inputs = np.array([BOS_ID, *hypothesis.token_ids[:-1]])
        expected = decoder.align(0, ENCODER.encode([EncoderInput.of_tokens(source)])[0], inputs)
        np.testing.assert_array_equal(hypothesis.alignment, expected)


async def test_an_alignment_can_be_had_without_a_search():
    source = np.array([5, 6, 7, 8])
    async with running_engine(new_decoder(4), encoder=ENCODER) as engine:
        (result,) = await engine.run([make_sequence(source, start_ids=[BOS_ID], wants_alignment=True)])
    (hypothesis,) = result.hypotheses
    assert hypothesis.alignment.shape == (len(hypothesis.token_ids), 4)
    assert (hypothesis.output, hypothesis.log_probability) == (result.output, result.log_probability)
    assert hypothesis.score == pytest.approx(result.log_probability / result.num_new_tokens)


async def test_logits_that_are_not_finite_end_their_own_sentence():
    decoder = new_decoder(12)
    decode = decoder.decode
    [second] = (each.tensors["memory"] for each in ENCODER.encode([EncoderInput.of_tokens(np.array([5, 6, 8]))]))

    def spoil_the_second(token_ids, positions, first_slot=0, **options):
        logits = decode(token_ids, positions, first_slot, **options)
        sources = decoder.sources[first_slot]
        num_beams = len(logits) // len(sources)
        for number, source in enumerate(sources):
            if np.array_equal(source.tensors["memory"], second):
                logits[number * num_beams] = np.nan
        return logits

    decoder.decode = spoil_the_second
    search = SearchParameters(beam_size=4, num_hypotheses=4)
    async with running_engine(decoder, encoder=ENCODER) as engine:
        sequences = [make_sequence([5, 6, n], start_ids=[BOS_ID], search=search) for n in (7, 8, 9)]
        results = await asyncio.gather(*(engine.run([sequence]) for sequence in sequences), return_exceptions=True)
    failed = [isinstance(result, Exception) for result in results]
    assert failed == [False, True, False]
    for number, n in ((0, 7), (2, 9)):
        assert results[number][0].hypotheses == (await search_alone(np.array([5, 6, n]), search)).hypotheses
