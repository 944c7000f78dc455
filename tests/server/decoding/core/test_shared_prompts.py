"""Prompts that share a beginning, samples of one prompt, and who goes first: the text is that of the naive loop."""

import asyncio

import numpy as np
from naive_decoding import naive_decode
from tiny_engine import EOS_ID, decode, make_decoder, make_sequence, random_prompt, running_engine, slow_down

from headway_server.decoding.core.engine import cancel
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.sequence import share_prompt

CHUNK = 8


def naive_text(prompt, *, eos_id=EOS_ID, **parameters) -> str:
    parameters = SamplingParameters(**({"max_new_tokens": 20} | parameters))
    token_ids, _ = naive_decode(make_decoder(num_slots=1), np.asarray(prompt), parameters, eos_id=eos_id)
    text = decode(token_ids)
    return text[: len(text) - min(len(text) - len(text.rstrip("\ufffd")), 3)]


async def test_a_prompt_with_a_known_beginning_reads_only_the_rest_and_continues_alike():
    rng = np.random.default_rng(1)
    beginning = rng.integers(2, 200, size=2 * CHUNK + 3)
    prompts = [np.concatenate([beginning, rng.integers(2, 200, size=length)]) for length in (1, 5, 9)]
    decoder = make_decoder(num_slots=2, num_prefix_slots=1)
    async with running_engine(decoder) as engine:
        results = [(await engine.run([make_sequence(prompt)]))[0] for prompt in prompts]
        cache = engine._stepper.prefix_cache
    assert [result.num_cached_tokens for result in results] == [0, 2 * CHUNK, 2 * CHUNK]
    assert cache.num_hit_tokens == 4 * CHUNK
    assert decoder.steps.count("prefill") == 3 + 1 + 2  # 20, 24 and 28 tokens, of which the latter two know 16
    assert [result.output for result in results] == [naive_text(prompt) for prompt in prompts]


async def test_many_prompts_over_few_kept_chunks_continue_as_if_alone():
    rng = np.random.default_rng(2)
    beginnings = [rng.integers(2, 200, size=20) for _ in range(6)]
    prompts = [
        np.concatenate([beginnings[rng.integers(6)][: rng.integers(1, 21)], random_prompt(rng, 12)]) for _ in range(80)
    ]
    seeds = range(len(prompts))
    async with running_engine(make_decoder(num_slots=4, num_prefix_slots=1)) as engine:
        sequences = [make_sequence(p, temperature=1.0, seed=s) for p, s in zip(prompts, seeds, strict=True)]
        results = await engine.run(sequences)
    assert sum(result.num_cached_tokens > 0 for result in results) > 10
    for prompt, seed, result in zip(prompts, seeds, results, strict=True):
        assert result.output == naive_text(prompt, temperature=1.0, seed=seed)


async def test_samples_of_a_prompt_read_it_once_and_each_is_that_of_a_call_of_its_own():
    prompt = np.arange(2, 2 + CHUNK + 4)
    decoder = make_decoder(num_slots=6)
    async with running_engine(decoder) as engine:
        sequences = [make_sequence(prompt, temperature=1.2, seed=5, sample=sample) for sample in range(6)]
        share_prompt(sequences)
        results = await engine.run(sequences)
    assert decoder.steps.count("prefill") == 2
    texts = [result.output for result in results]
    assert texts == [naive_text(prompt, temperature=1.2, seed=5, sample=sample) for sample in range(6)]
    shared = sequences[0].shared_prompt
    assert shared.logits is None, "nobody needs them any more"
    assert not shared.members
    assert len(set(texts)) == 6
    assert [result.num_cached_tokens for result in results] == [0] + 5 * [len(prompt)]


async def test_samples_past_the_slots_wait_and_are_the_same():
    prompt = np.arange(2, 2 + CHUNK + 4)
    for num_slots in (1, 2, 3):
        async with running_engine(make_decoder(num_slots=num_slots)) as engine:
            sequences = [make_sequence(prompt, temperature=1.2, seed=5, sample=sample) for sample in range(7)]
            share_prompt(sequences)
            others = [make_sequence([9, 8, 7], max_new_tokens=3) for _ in range(3)]
            results = await engine.run([*sequences, *others])
        for sample, result in enumerate(results[:7]):
            assert result.output == naive_text(prompt, temperature=1.2, seed=5, sample=sample)


async def test_a_sample_whose_first_sibling_is_cancelled_reads_the_prompt_itself():
    prompt = np.arange(2, 30)
    decoder = make_decoder(num_slots=1)
    slow_down(decoder, 0.005)
    async with running_engine(decoder) as engine:
        sequences = [make_sequence(prompt, temperature=1.2, seed=5, sample=s, eos_id=None) for s in range(3)]
        share_prompt(sequences)
        engine.submit(sequences)
        await asyncio.sleep(0.02)
        cancel(sequences[:1])
        await asyncio.gather(*(sequence.reply.result for sequence in sequences), return_exceptions=True)
    expected = naive_text(prompt, temperature=1.2, seed=5, sample=2, eos_id=None)
    assert sequences[2].reply.result.result().output == expected


async def test_a_higher_priority_goes_first_and_equal_ones_as_they_came():
    decoder = make_decoder(num_slots=1)
    async with running_engine(decoder) as engine:
        blocker = make_sequence([5], max_new_tokens=30, eos_id=None)
        waiting = [make_sequence([6, 7], max_new_tokens=2, eos_id=None) for _ in range(6)]
        for sequence, priority in zip(waiting, [0, -1, 5, 0, 5, 9], strict=True):
            sequence.priority = priority
        results = await engine.run([blocker, *waiting])
    assert results[0].started_at > results[-1].started_at  # the blocker came with them and has priority 0
    by_start = sorted(range(6), key=lambda index: results[1 + index].started_at)
    assert by_start == [5, 2, 4, 0, 3, 1]


async def test_a_stop_token_ends_the_text_and_is_not_part_of_it():
    prompt = [5, 9, 30]
    async with running_engine(make_decoder()) as engine:
        (whole,) = await engine.run([make_sequence(prompt, eos_id=None, temperature=1.0, seed=3, num_top_tokens=0)])
        token_ids = [token.token_id for token in whole.tokens]
        stop = next(token_id for i, token_id in enumerate(token_ids) if i > 3 and token_id not in token_ids[:i])
        (stopped,) = await engine.run(
            [make_sequence(prompt, eos_id=None, temperature=1.0, seed=3, stop_token_ids=(stop,))]
        )
    cut = token_ids.index(stop)
    assert stopped.finish_reason.value == "stop"
    assert stopped.num_new_tokens == cut + 1
    assert stopped.output == decode(token_ids[:cut]).rstrip("\ufffd")
