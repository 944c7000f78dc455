"""The engine over a tiny decoder with a real cache, against a loop that runs one request at a time."""

import asyncio
import time

import numpy as np
import pytest
from naive_decoding import naive_decode
from numpy_decoder import NumpyEncoder
from tiny_engine import (
    BOS_ID,
    EOS_ID,
    VOCAB_SIZE,
    decode,
    make_decoder,
    make_sequence,
    random_prompt,
    running_engine,
    slow_down,
)

from headway_server.decoding.core.engine import cancel
from headway_server.decoding.core.step import StepError
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.sequence import FinishReason
from headway_server.errors import CancelledError, DeadlineError, DrainingError, OverloadedError


def text_of(token_ids) -> str:
    """The text of all tokens at once, less what may be the beginning of a character."""
    text = decode(token_ids)
    return text[: len(text) - min(len(text) - len(text.rstrip("\ufffd")), 3)]


def random_parameters(rng: np.random.Generator) -> dict:
    """Greedy or sampled, of any length."""
    return {
        "max_new_tokens": int(rng.integers(1, 30)),
        "temperature": float(rng.choice([0.0, 0.0, 1.0, 1.7])),
        "top_k": int(rng.choice([0, 0, 3, 40])),
        "top_p": float(rng.choice([1.0, 0.5, 0.95])),
        "seed": int(rng.integers(2**32)),
    }


async def test_every_request_equals_the_naive_loop_whatever_runs_beside_it():
    rng = np.random.default_rng(1)
    requests = [(random_prompt(rng), random_parameters(rng)) for _ in range(60)]
    async with running_engine(make_decoder(num_slots=5)) as engine:
        sequences = [make_sequence(prompt, **parameters) for prompt, parameters in requests]
        results = await engine.run(sequences)
    alone = make_decoder(num_slots=1)
    lengths = set()
    for (prompt, parameters), result in zip(requests, results, strict=True):
        token_ids, reason = naive_decode(alone, prompt, SamplingParameters(**parameters), eos_id=EOS_ID)
        assert (result.output, result.num_new_tokens) == (text_of(token_ids), len(token_ids))
        assert result.finish_reason is reason
        lengths.add(result.num_new_tokens)
    assert len(lengths) > 5
    assert len({result.output for result in results}) > 30


async def test_a_request_is_the_same_alone_and_among_others():
    rng = np.random.default_rng(2)
    prompt = random_prompt(rng)
    for parameters in ({"max_new_tokens": 25}, {"max_new_tokens": 25, "temperature": 1.0, "seed": 3}):
        async with running_engine(make_decoder(num_slots=6)) as engine:
            (alone,) = await engine.run([make_sequence(prompt, eos_id=None, **parameters)])
            for _ in range(3):
                others = [make_sequence(random_prompt(rng), **random_parameters(rng)) for _ in range(9)]
                others.insert(int(rng.integers(9)), make_sequence(prompt, eos_id=None, **parameters))
                together = await engine.run(others)
                assert alone.output in {result.output for result in together}


async def test_decode_steps_batch_the_running_sequences():
    decoder = make_decoder(num_slots=8)
    async with running_engine(decoder) as engine:
        await engine.run([make_sequence([5, 6, 7], eos_id=None, max_new_tokens=40) for _ in range(8)])
    assert max(decoder.decode_sizes) == 8
    assert len(decoder.decode_sizes) < 8 * 40 / 3


async def test_at_most_one_prefill_chunk_lies_between_two_decode_steps():
    decoder = make_decoder(num_slots=4)
    async with running_engine(decoder) as engine:
        streaming = make_sequence([3], eos_id=None, max_new_tokens=60)
        newcomers = [make_sequence(np.arange(2, 32), eos_id=None, max_new_tokens=3) for _ in range(6)]
        await engine.run([streaming, *newcomers])
    from_first_decode = decoder.steps[decoder.steps.index("decode") : -decoder.steps[::-1].index("decode")]
    assert "prefill prefill" not in " ".join(from_first_decode)


async def test_a_stream_yields_the_deltas_of_the_result():
    rng = np.random.default_rng(3)
    async with running_engine(make_decoder()) as engine:
        for _ in range(10):
            sequence = make_sequence(random_prompt(rng), wants_deltas=True, max_new_tokens=25, temperature=1.5, seed=4)
            deltas = [delta async for delta in engine.stream(sequence)]
            result = sequence.reply.result.result()
            assert "".join(delta.output for delta in deltas) == result.output
            assert deltas[-1].num_new_tokens == result.num_new_tokens
            counts = [delta.num_new_tokens for delta in deltas]
            assert counts == sorted(counts)


async def test_tokens_that_come_faster_than_the_stream_interval_are_sent_together():
    async with running_engine(make_decoder(), stream_interval_ms=1000) as engine:
        sequence = make_sequence([5, 9, 30], eos_id=None, wants_deltas=True, max_new_tokens=25, num_top_tokens=0)
        deltas = [delta async for delta in engine.stream(sequence)]
        result = sequence.reply.result.result()
    assert [delta.num_new_tokens for delta in deltas] in ([1, 25], [25])  # a slow reader gets both at once
    assert "".join(delta.output for delta in deltas) == result.output
    assert [token for delta in deltas for token in delta.tokens] == list(result.tokens)


async def test_a_stop_string_ends_the_text_and_is_not_part_of_it():
    prompt = [5, 9, 30]
    async with running_engine(make_decoder()) as engine:
        sampled = {"temperature": 1.0, "seed": 12, "max_new_tokens": 30, "eos_id": None}
        (whole,) = await engine.run([make_sequence(prompt, **sampled)])
        stop = whole.output[6:9]
        end = whole.output.index(stop)
        sequence = make_sequence(prompt, stop_strings=("never there", stop), wants_deltas=True, **sampled)
        deltas = [delta.output async for delta in engine.stream(sequence)]
        result = sequence.reply.result.result()
    assert result.output == whole.output[:end] == "".join(deltas)
    assert result.finish_reason is FinishReason.STOP
    assert result.num_new_tokens < 30


async def test_one_token_can_be_all():
    async with running_engine(make_decoder()) as engine:
        (result,) = await engine.run([make_sequence([4, 5], max_new_tokens=1, eos_id=None)])
    assert (result.num_new_tokens, result.finish_reason) == (1, FinishReason.LENGTH)


async def test_the_end_of_the_sequence_is_counted_and_is_no_text():
    async with running_engine(make_decoder()) as engine:
        (whole,) = await engine.run([make_sequence([4, 5], max_new_tokens=10, eos_id=None)])
        third = naive_decode(
            make_decoder(num_slots=1), np.array([4, 5]), SamplingParameters(max_new_tokens=3), eos_id=None
        )[0][2]
        (ended,) = await engine.run([make_sequence([4, 5], max_new_tokens=10, eos_id=third)])
    assert ended.finish_reason is FinishReason.END_OF_SEQUENCE
    assert ended.num_new_tokens <= 3
    assert whole.output.startswith(ended.output)


async def test_a_cancelled_sequence_frees_its_slot_at_the_next_step():
    decoder = make_decoder(num_slots=1)
    slow_down(decoder, 0.02)
    async with running_engine(decoder) as engine:
        stream = engine.stream(make_sequence([3, 4], eos_id=None, max_new_tokens=60, wants_deltas=True))
        await anext(stream)
        next_one = asyncio.ensure_future(engine.run([make_sequence([3, 4], eos_id=None, max_new_tokens=3)]))
        await asyncio.sleep(0.05)
        assert not next_one.done()
        num_steps = decoder.steps.count("decode")
        await stream.aclose()
        await next_one
    assert decoder.steps.count("decode") <= num_steps + 1 + 2  # the one under way, and two after the prefill


async def test_a_caller_that_goes_takes_its_siblings_along():
    decoder = make_decoder(num_slots=2)
    async with running_engine(decoder) as engine:
        sequences = [make_sequence([3, 4], eos_id=None, max_new_tokens=60) for _ in range(50)]
        task = asyncio.ensure_future(engine.run(sequences))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await engine.run([make_sequence([3], max_new_tokens=2)]))[0].num_new_tokens == 2


async def test_a_deadline_holds_while_waiting_and_while_running():
    decoder = make_decoder(num_slots=1)
    async with running_engine(decoder) as engine:
        slow_down(decoder, 0.02)
        running = make_sequence([3, 4], eos_id=None, max_new_tokens=60, deadline=time.monotonic() + 0.6)
        waiting = make_sequence([3, 4], eos_id=None, max_new_tokens=60, deadline=time.monotonic() + 0.05)
        running_task, waiting_task = (asyncio.ensure_future(engine.run([one])) for one in (running, waiting))
        with pytest.raises(DeadlineError, match="waited for a free slot"):
            await waiting_task
        assert not running_task.done()
        with pytest.raises(DeadlineError, match="of at most 60 tokens"):
            await running_task


async def test_a_failed_prefill_ends_that_sequence_alone():
    decoder = make_decoder(num_slots=3)
    prefill = decoder.prefill

    def fail_on_two(slot, token_ids, start, **given):
        if token_ids[0] == 2:
            raise MemoryError("no room")
        return prefill(slot, token_ids, start, **given)

    decoder.prefill = fail_on_two
    async with running_engine(decoder) as engine:
        good = asyncio.ensure_future(engine.run([make_sequence([5], eos_id=None, max_new_tokens=40)]))
        with pytest.raises(StepError) as caught:
            await engine.run([make_sequence([2, 3])])
        assert "no room" not in str(caught.value)
        assert (await good)[0].num_new_tokens == 40


async def test_a_failed_decode_ends_those_in_slots_and_the_engine_goes_on():
    decoder = make_decoder(num_slots=2)
    decode_step = decoder.decode
    calls = []

    def fail_once(token_ids, *arguments):
        calls.append(len(token_ids))
        if len(calls) == 5:
            raise RuntimeError("the machine is ill")
        return decode_step(token_ids, *arguments)

    decoder.decode = fail_once
    async with running_engine(decoder) as engine:
        tasks = [
            asyncio.ensure_future(engine.run([make_sequence([5, n], eos_id=None, max_new_tokens=30)]))
            for n in range(2, 7)
        ]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, StepError)]
    assert len(failed) == calls[4]
    alone = make_decoder(num_slots=1)
    for n, outcome in enumerate(outcomes, 2):
        if not isinstance(outcome, StepError):
            parameters = SamplingParameters(max_new_tokens=30)
            expected = naive_decode(alone, np.array([5, n]), parameters, eos_id=None)[0]
            assert outcome[0].output == text_of(expected)


async def test_logits_that_are_not_finite_end_that_sequence_alone():
    decoder = make_decoder(num_slots=3)
    decoder.tokens[2] = np.nan
    async with running_engine(decoder) as engine:
        good = asyncio.ensure_future(
            engine.run([make_sequence([5], eos_id=None, max_new_tokens=10, temperature=1.0, top_k=2)])
        )
        with pytest.raises(StepError):
            await engine.run([make_sequence([2, 3])])
        assert (await good)[0].num_new_tokens == 10


async def test_closing_fails_what_is_not_finished_and_refuses_what_comes():
    decoder = make_decoder(num_slots=1)
    async with running_engine(decoder) as engine:
        slow_down(decoder, 0.02)
        tasks = [
            asyncio.ensure_future(engine.run([make_sequence([3, 4], eos_id=None, max_new_tokens=60)])) for _ in range(3)
        ]
        await asyncio.sleep(0.03)
        engine.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, DrainingError) for outcome in outcomes)
        with pytest.raises(DrainingError):
            await engine.run([make_sequence([3])])


async def test_a_thousand_random_requests_leave_every_slot_free():
    rng = np.random.default_rng(20)
    decoder = make_decoder(num_slots=7)
    async with running_engine(decoder) as engine:
        outcomes = await asyncio.gather(*(random_caller(rng, engine) for _ in range(1000)), return_exceptions=True)
        (last,) = await engine.run([make_sequence([3], max_new_tokens=2)])
    late = (DeadlineError, OverloadedError)  # refused once it could not finish in time any more
    kinds = {kind: sum(isinstance(outcome, kind) for outcome in outcomes) for kind in (list, late)}
    cancelled = sum(isinstance(outcome, asyncio.CancelledError | CancelledError) for outcome in outcomes)
    assert sum(kinds.values()) + cancelled == 1000
    assert min(*kinds.values(), cancelled) > 20
    assert last.num_new_tokens >= 1


async def random_caller(rng: np.random.Generator, engine):
    """A caller that may stream, set a deadline, or go."""
    await asyncio.sleep(float(rng.random()) * 0.8)
    deadline = time.monotonic() + float(rng.random()) * 0.3 if rng.random() < 0.2 else None
    streams = bool(rng.random() < 0.3)
    parameters = random_parameters(rng) | {"max_new_tokens": int(rng.integers(1, 12))}
    if rng.random() < 0.2:
        parameters["stop_strings"] = ("a", "zz")
    count = 1 if streams else int(rng.integers(1, 4))
    sequences = [
        make_sequence(random_prompt(rng, 20), deadline=deadline, wants_deltas=streams, **parameters)
        for _ in range(count)
    ]
    call = asyncio.ensure_future(read(engine, sequences[0]) if streams else engine.run(sequences))
    if rng.random() < 0.2:
        await asyncio.sleep(float(rng.random()) * 0.2)
        call.cancel()
    elif rng.random() < 0.1:
        cancel(sequences)
    return await call


async def read(engine, sequence):
    """Reads a stream to its end."""
    return [delta async for delta in engine.stream(sequence)]


async def test_translations_equal_the_naive_loop_in_any_company():
    rng = np.random.default_rng(9)
    sources = [random_prompt(rng, 25) for _ in range(40)]
    encoder = NumpyEncoder(vocab_size=VOCAB_SIZE)
    async with running_engine(make_decoder(num_slots=6), encoder=encoder, max_encoder_tokens=60) as engine:
        sequences = [make_sequence(source, start_ids=[BOS_ID], max_new_tokens=25) for source in sources]
        results = await engine.run(sequences)
    assert max(count * longest for count, longest in encoder.batch_shapes) <= 60
    assert max(count for count, _ in encoder.batch_shapes) > 1
    alone = make_decoder(num_slots=1)
    for source, result in zip(sources, results, strict=True):
        token_ids, reason = naive_decode(
            alone,
            source,
            SamplingParameters(max_new_tokens=25),
            eos_id=EOS_ID,
            source=encoder.encode([EncoderInput.of_tokens(source)])[0],
            start_ids=[BOS_ID],
        )
        assert (result.output, result.finish_reason) == (text_of(token_ids), reason)
        assert result.log_probability == pytest.approx(log_probability(alone, encoder, source, token_ids), abs=1e-4)
    assert {result.finish_reason for result in results} == {FinishReason.END_OF_SEQUENCE, FinishReason.LENGTH}


def log_probability(decoder, encoder, source, token_ids) -> float:
    """Sums the tokens' log-probabilities, in float64."""
    decoder.set_sources(encoder.encode([EncoderInput.of_tokens(source)]))
    total = 0.0
    for position, (token_id, next_id) in enumerate(zip([BOS_ID, *token_ids[:-1]], token_ids, strict=True)):
        logits = decoder.decode(np.array([token_id]), np.array([position]))[0].astype(np.float64)
        logits -= logits.max()
        total += logits[next_id] - np.log(np.exp(logits).sum())
    return total


async def test_a_failed_encoder_ends_its_sentences_alone():
    decoder, encoder = make_decoder(num_slots=4), NumpyEncoder(vocab_size=VOCAB_SIZE)
    encode = encoder.encode

    def fail_on_two(sources):
        if any(source.tensors["input_ids"][0] == 2 for source in sources):
            raise MemoryError("no room")
        return encode(sources)

    encoder.encode = fail_on_two
    async with running_engine(decoder, encoder=encoder) as engine:
        good = make_sequence([5], start_ids=[BOS_ID], eos_id=None, max_new_tokens=60, wants_deltas=True)
        stream = engine.stream(good)
        await anext(stream)  # it is encoded
        with pytest.raises(StepError):
            await engine.run([make_sequence([2, 3], start_ids=[BOS_ID])])
        async for _ in stream:
            pass
        assert good.reply.result.result().num_new_tokens == 60
