"""Work that may hang runs where it keeps nobody waiting."""

import asyncio
import gc
import threading
import weakref

import pytest

from headway_server.serving.own_thread import run_in_own_thread


async def test_its_result_and_its_errors_reach_whoever_waits():
    class Panic(BaseException):
        pass

    def fail() -> None:
        raise Panic

    assert await run_in_own_thread(lambda: 7, name="seven") == 7
    with pytest.raises(Panic):
        await run_in_own_thread(fail, name="fail")


async def test_what_hangs_holds_up_neither_the_loop_nor_other_work_nor_the_end_of_the_process():
    may_end = threading.Event()
    hanging = run_in_own_thread(lambda: may_end.wait(30), name="hanging")
    [thread] = [thread for thread in threading.enumerate() if thread.name == "hanging"]
    assert thread.daemon
    assert await run_in_own_thread(lambda: 7, name="seven") == 7
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    may_end.set()
    await asyncio.to_thread(thread.join)


async def test_what_the_function_belongs_to_is_free_when_it_is_awaited():
    class Model:
        def close(self) -> None:
            pass

    for _ in range(50):
        model = Model()
        alive = weakref.ref(model)
        closing = run_in_own_thread(model.close, name="close")
        del model
        await closing
        del closing
        assert alive() is None, gc.get_referrers(alive())
