"""What breaks around the engine: nobody is left waiting, and what can go on goes on."""

import asyncio
import io
import threading
import time
from queue import SimpleQueue

import pytest
import structlog
from numpy_decoder import NumpyEncoder
from structlog.testing import capture_logs
from tiny_engine import BOS_ID, TOKENIZER, VOCAB_SIZE, make_decoder, make_sequence, running_engine, slow_down

from headway_server.decoding.core.engine import Engine
from headway_server.decoding.core.step import StepError, Stepper
from headway_server.decoding.output.text import TextAssembly
from headway_server.decoding.rules import TokenRule
from headway_server.errors import DrainingError
from headway_server.preprocessing import TextTokenizer
from headway_server.preprocessing.text import TokenDecoder

SECONDS = 20.0
"""After which a caller counts as one that waits for ever."""


class BrokenPipe(io.StringIO):
    def write(self, text: str) -> int:  # noqa: ARG002 (of a file's signature)
        raise BrokenPipeError(32, "Broken pipe")


@pytest.fixture
def broken_log():
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=BrokenPipe()), cache_logger_on_first_use=False)
    yield
    structlog.configure(**before)


def run(engine, *sequences):
    """Starts a call; it fails where it hangs."""
    return asyncio.ensure_future(asyncio.wait_for(engine.run(list(sequences)), SECONDS))


def fail_on_two(prefill):
    """Fails for prompts that begin with token 2."""

    def prefill_or_fail(slot, token_ids, start, **given):
        if token_ids[0] == 2:
            raise MemoryError("no room")
        return prefill(slot, token_ids, start, **given)

    return prefill_or_fail


async def test_a_log_that_cannot_be_written_changes_nothing_for_callers(broken_log):
    decoder = make_decoder(num_slots=3)
    decoder.prefill = fail_on_two(decoder.prefill)
    async with running_engine(decoder) as engine:
        slow_down(decoder, 0.005)
        good = run(engine, make_sequence([5], eos_id=None, max_new_tokens=40))
        with pytest.raises(StepError):
            await run(engine, make_sequence([2, 3]))
        assert (await good)[0].num_new_tokens == 40
        decode_step = decoder.decode
        decoder.decode = None  # every step fails now
        with pytest.raises(StepError):
            await run(engine, make_sequence([5], max_new_tokens=40, eos_id=None))
        decoder.decode = decode_step
        assert (await run(engine, make_sequence([5], eos_id=None, max_new_tokens=9)))[0].num_new_tokens == 9
        assert engine.is_alive


async def test_when_the_thread_ends_by_itself_every_caller_is_told_and_no_other_is_taken():
    decoder = make_decoder(num_slots=2)
    decode_step, num_steps = decoder.decode, 0

    def end_the_thread(*arguments):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            submit.set()
            submitted.wait(SECONDS)
            raise SystemExit
        return decode_step(*arguments)

    decoder.decode = end_the_thread
    submit, submitted = threading.Event(), threading.Event()
    async with running_engine(decoder) as engine:
        assert engine.is_alive
        calls = [run(engine, make_sequence([5, n], eos_id=None, max_new_tokens=30)) for n in range(2, 7)]
        await asyncio.to_thread(submit.wait, SECONDS)
        calls.append(run(engine, make_sequence([9], max_new_tokens=3)))  # it is in the inbox when the thread ends
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        submitted.set()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StepError] * 6
        assert not engine.is_alive
        with pytest.raises(StepError, match="has stopped"):
            await run(engine, make_sequence([5]))


async def test_an_engine_is_alive_from_its_start_to_its_close():
    engine = Engine(Stepper(make_decoder()))
    assert not engine.is_alive
    engine.start()
    assert engine.is_alive
    engine.close()
    assert not engine.is_alive


class PausingQueue:
    """An inbox that lets another thread come between a sender's decision to put sequences and their arrival."""

    def __init__(self) -> None:
        self._queue = SimpleQueue()
        self.get, self.get_nowait = self._queue.get, self._queue.get_nowait
        self.about_to_put = threading.Event()
        self.go_on = threading.Event()

    def put(self, message) -> None:
        if message is not None:
            self.about_to_put.set()
            self.go_on.wait(0.2)  # with a lock nobody comes, whatever the time
        self._queue.put(message)
        if message is None:
            self.go_on.set()


async def test_sequences_submitted_while_the_engine_is_closed_are_not_lost():
    decoder = make_decoder()
    slow_down(decoder, 0.02)  # so that the sequence has not ended when the engine is closed
    engine = Engine(Stepper(decoder))
    engine._inbox = PausingQueue()
    engine.start()
    sequence = make_sequence([5, 6], eos_id=None, max_new_tokens=60)
    submitting = asyncio.ensure_future(asyncio.to_thread(engine.submit, [sequence]))
    await asyncio.to_thread(engine._inbox.about_to_put.wait, SECONDS)
    await asyncio.to_thread(engine.close)
    await submitting
    with pytest.raises(DrainingError):
        await asyncio.wait_for(sequence.reply.result, SECONDS)


async def test_sentences_whose_encoder_output_is_unusable_end_alone():
    decoder, encoder = make_decoder(num_slots=4), NumpyEncoder(vocab_size=VOCAB_SIZE)
    encode = encoder.encode
    encoder.encode = lambda sources: encode(sources)[: 1 if len(sources) == 3 else None]  # one of three
    async with running_engine(decoder, encoder=encoder) as engine:
        slow_down(decoder, 0.005)
        running = make_sequence([5], start_ids=[BOS_ID], eos_id=None, max_new_tokens=60, wants_deltas=True)
        stream = engine.stream(running)
        await anext(stream)
        three = [make_sequence([n, 3], start_ids=[BOS_ID]) for n in (7, 8, 9)]
        outcomes = await asyncio.gather(*(run(engine, one) for one in three), return_exceptions=True)
        async for _ in stream:
            pass
        assert [type(outcome) for outcome in outcomes] == [StepError] * 3
        assert running.reply.result.result().num_new_tokens == 60
        (after,) = await run(engine, make_sequence([7, 3], start_ids=[BOS_ID], eos_id=None, max_new_tokens=5))
        assert after.num_new_tokens == 5


@pytest.mark.parametrize("eager", [True, False])
async def test_a_sequence_whose_text_cannot_be_made_ends_alone(eager):
    class CannotDecode(TokenDecoder):
        def __call__(self, token_ids):
            raise UnicodeError(f"no such characters: {token_ids}")

    cannot_decode = CannotDecode(TextTokenizer(TOKENIZER), frozenset())
    async with running_engine(make_decoder(num_slots=4)) as engine:
        good = [make_sequence([5, n], eos_id=None, max_new_tokens=30) for n in (3, 4, 6)]
        bad = make_sequence([5, 7], eos_id=None, max_new_tokens=8, wants_deltas=eager)
        bad.output = TextAssembly(cannot_decode, eager=eager)
        calls = [run(engine, one) for one in (good[0], bad, *good[1:])]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        alone = await run(engine, *(make_sequence([5, n], eos_id=None, max_new_tokens=30) for n in (3, 4, 6)))
    assert isinstance(outcomes.pop(1), StepError)
    assert [outcome[0].output for outcome in outcomes] == [result.output for result in alone]


async def test_a_hung_step_is_seen_and_closing_fails_its_callers_without_waiting_for_it():
    decoder = make_decoder()
    decode_step, hangs, goes_on = decoder.decode, threading.Event(), threading.Event()

    def hang(*arguments):
        hangs.set()
        goes_on.wait(60)
        return decode_step(*arguments)

    decoder.decode = hang
    engine = Engine(Stepper(decoder))
    engine.start()
    assert engine.stalled_s() == 0
    call = asyncio.ensure_future(engine.run([make_sequence([5], eos_id=None, max_new_tokens=9)]))
    await asyncio.to_thread(hangs.wait, SECONDS)
    await asyncio.sleep(0.2)
    assert engine.is_alive
    assert 0.1 < engine.stalled_s() < SECONDS
    with capture_logs() as logs:
        assert not await asyncio.to_thread(engine.close, 0.1)
    assert any("hang" in entry.get("at", "") for entry in logs)
    with pytest.raises(DrainingError):
        await asyncio.wait_for(call, SECONDS)
    goes_on.set()
    engine._threads[0].join(SECONDS)
    assert engine.stalled_s() == 0


class CostlyRule(TokenRule):
    """Allows every token, and takes a while to say so."""

    def __init__(self) -> None:
        self.num_asked = 0

    def allow(self, mask, logits) -> None:  # noqa: ARG002 (of the interface)
        self.num_asked += 1
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass

    def follow(self, token_id) -> TokenRule:  # noqa: ARG002 (every token may follow)
        return self


async def test_costly_rules_hold_up_their_own_sequences_and_not_the_others():
    decoder = make_decoder(num_slots=9)
    plain = [make_sequence([5, n], eos_id=None, max_new_tokens=40, temperature=1.0, seed=n) for n in range(2)]
    costly = [make_sequence([6, n], eos_id=None, max_new_tokens=4, temperature=1.0, seed=n) for n in range(7)]
    for sequence in costly:
        sequence.rule = CostlyRule()
    async with running_engine(decoder) as engine:
        together = await engine.run([*plain, *costly])
        sizes = decoder.decode_sizes.copy()
        alone = [
            (await engine.run([make_sequence([6, n], eos_id=None, max_new_tokens=4, temperature=1.0, seed=n)]))[0]
            for n in range(7)
        ]
    assert [result.output for result in together[2:]] == [result.output for result in alone]
    assert [sequence.rule.num_asked for sequence in costly] == [4] * 7  # none is asked twice for a token
    # Each of the 21 tokens after the first ones takes a step's budget, so they are spread over as many steps.
    assert sum(size > 2 for size in sizes) >= 21
    assert len(sizes) < 21 + 7 + 40, "the plain sequences get a token in every step"


async def test_a_costly_rule_is_asked_at_once_where_its_token_cannot_be_read_again(monkeypatch):
    decoder = make_decoder(num_slots=9)
    monkeypatch.setattr(decoder, "can_return", lambda length, num_read: length == num_read)
    costly = [make_sequence([6, n], eos_id=None, max_new_tokens=9, temperature=1.0, seed=n) for n in range(3)]
    for sequence in costly:
        sequence.rule = CostlyRule()
    async with running_engine(decoder) as engine:
        await engine.run(costly)
    assert [sequence.rule.num_asked for sequence in costly] == [9] * 3
    assert len(decoder.decode_sizes) <= 3 + 9, "all of them get a token in every step, however long it takes"
