"""What happens around a call."""

import asyncio
import hashlib
import random

import pytest

from headway_server.errors import DeadlineError, DrainingError, ForbiddenError, OverloadedError, UnknownCallerError
from headway_server.observers import Observer
from headway_server.serving.access import Access, AccessFile
from headway_server.serving.calls import Calls, cache_scope, current_call


class Recorder(Observer):
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ends: list[str] = []
        self.callers: list[str] = []

    def call_started(self, call) -> None:
        self.ids.append(call.call_id)

    def call_finished(self, call, *, error, duration_s) -> None:
        assert call.call_id in self.ids
        assert duration_s >= 0
        self.ends.append(type(error).__name__)
        self.callers.append(call.caller)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def calls(recorder) -> Calls:
    return Calls(observer=recorder)


async def test_a_call_is_known_to_what_answers_it_and_to_the_tasks_that_begin_there(calls):
    assert current_call() is None
    async with calls.answer("/one") as call:
        assert current_call() is call
        assert await asyncio.create_task(_current()) is call
        assert repr(call).startswith("Call(/one, ")
    assert current_call() is None


async def _current():
    return current_call()


@pytest.mark.parametrize("error", [None, ValueError, asyncio.CancelledError])
async def test_what_waits_for_the_end_of_a_call_is_called_however_it_ends(calls, recorder, error):
    ended = []
    try:
        async with calls.answer("/one") as call:
            call.callbacks.append(lambda: ended.append(calls.num_running))
            assert calls.num_running == 1
            if error is not None:
                raise error
    except (ValueError, asyncio.CancelledError):
        assert error is not None
    assert ended == [0]
    assert recorder.ends == ["NoneType" if error is None else error.__name__]


async def test_a_stream_that_is_left_is_a_cancelled_call(calls, recorder):
    async def stream():
        async with calls.answer("/one"):
            yield 1
            yield 2

    responses = stream()
    assert await anext(responses) == 1
    assert calls.num_running == 1
    await asyncio.create_task(responses.aclose())  # in another context than it began in
    assert calls.num_running == 0
    assert recorder.ends == ["CancelledError"]


async def test_only_the_calls_own_time_limit_is_its_deadline(calls, recorder):
    with pytest.raises(DeadlineError, match=r"took longer than its 0\.01 s"):
        async with calls.answer("/one", timeout_s=0.01):
            await asyncio.sleep(10)
    with pytest.raises(TimeoutError):
        async with calls.answer("/two", timeout_s=10):
            raise TimeoutError
    assert recorder.ends == ["DeadlineError", "TimeoutError"]


async def test_a_drain_amid_random_calls_answers_what_was_taken_and_refuses_the_rest(calls, recorder):
    generator, outcomes = random.Random(7), []

    async def one() -> None:
        await asyncio.sleep(generator.uniform(0, 0.05))
        try:
            async with calls.answer("/one"):
                await asyncio.sleep(generator.uniform(0, 0.01))
            outcomes.append("answered")
        except DrainingError:
            outcomes.append("refused")

    async with asyncio.TaskGroup() as group:
        for _ in range(300):
            group.create_task(one())
        await asyncio.sleep(0.02)
        calls.refuse_new()
        async with asyncio.timeout(10):
            await calls.wait_idle()
    assert outcomes.count("answered") > 20
    assert outcomes.count("refused") > 20
    assert recorder.ends.count("NoneType") == outcomes.count("answered")
    assert len(set(recorder.ids)) == 300


async def test_refused_calls_are_observed_too(recorder):
    calls = Calls(max_calls=1, observer=recorder)
    async with calls.answer("/one"):
        with pytest.raises(OverloadedError):
            async with calls.answer("/two"):
                pass
    assert recorder.ends == ["OverloadedError", "NoneType"]
    assert repr(calls) == "Calls(0 running)"


def test_refused_callers_are_named_as_far_as_they_are_known(recorder):
    digest = hashlib.sha256(b"hw_mine").hexdigest()
    file = AccessFile.parse(f'[keys.mine]\nsha256 = "{digest}"\nscopes = []', "access.toml")
    calls = Calls(access=Access(file), observer=recorder)
    for key, error in (("hw_mine", ForbiddenError), ("hw_wrong", UnknownCallerError)):
        with pytest.raises(error):
            calls.identify("/one", metadata=[("x-api-key", key)], is_admin=True, caller="ipv4:192.0.2.1:9")
    assert recorder.callers == ["mine", "ipv4:192.0.2.1:9"]


async def test_callers_whom_nobody_knows_share_what_is_cached_by_their_own_connection_alone():
    def access_of(name):
        return Access(AccessFile.model_validate({"certificates": {name: {"scopes": ["model:*"]}}}))

    async def scope(calls, salt="", rights=None, **options):
        async with calls.answer("/one", rights=rights, **options):
            return cache_scope(salt)

    calls = Calls()
    by_proxy = {"caller": "10.0.0.1", "connection": "10.0.0.1:5000"}
    scopes = [
        await scope(calls, caller="10.0.0.1", connection="10.0.0.1:4000"),
        await scope(calls, caller="10.0.0.1", connection="10.0.0.1:4001"),  # another user of the same address
        await scope(calls, caller="ipv4:10.0.0.1:4002"),  # which names its connection by itself
        await scope(calls, **by_proxy),
        await scope(calls, **by_proxy, metadata=[("x-forwarded-for", "1.1.1.1")]),
        await scope(calls, **by_proxy, metadata=[("x-forwarded-for", "2.2.2.2")]),
        await scope(calls, **by_proxy, metadata=[("x-forwarded-for", "1.1.1.1, 2.2.2.2")]),  # who says to be the first
        await scope(calls, **by_proxy, metadata=[("forwarded", "for=1.1.1.1")]),
        await scope(calls, salt="ours"),
        await scope(calls, rights=access_of("known").identify((), ("known",)), **by_proxy),
    ]
    assert len(set(scopes)) == len(scopes)
    assert await scope(calls, caller="10.0.0.1", connection="10.0.0.1:4000") == scopes[0]
    assert await scope(calls, salt="ours", caller="elsewhere") == scopes[8]
