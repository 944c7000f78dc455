"""One call of a load test."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from headway_client.async_client import AsyncClient
from headway_client.errors import CallError, ProtocolError
from headway_client.load.plan import LoadPlan, LoadTask
from headway_client.load.recorder import CallRecord
from headway_client.results import Answer
from headway_client.streams import AsyncTextStream

Input = str | bytes


class Sender:
    """Makes the calls of a plan and notes in their records what came back."""

    def __init__(self, client: AsyncClient, plan: LoadPlan, inputs: Sequence[Input]) -> None:
        """Calls by `client`, with the inputs in turn.

        Raises:
            ValueError: There are no inputs.
        """
        if not inputs:
            raise ValueError("a load test needs at least one input")
        self._client = client
        self._plan = plan
        self._inputs = inputs
        self._next = 0

    async def probe(self) -> None:
        """Makes one call that nothing records.

        Raises:
            HeadwayError: It failed.
        """
        call = CallRecord(intended_s=0.0)
        await self._answer(self._take(), call)

    async def send(self, call: CallRecord) -> None:
        """Makes one call; a failure is a result too."""
        clock = asyncio.get_running_loop().time
        inputs = self._take()
        call.input_count = len(inputs)
        call.sent_s = clock()
        try:
            answer = await self._answer(inputs, call)
        except CallError as error:
            call.outcome = error.code.name
        except ProtocolError:
            call.outcome = "PROTOCOL_ERROR"
        else:
            call.model = answer.model
            call.token_count = sum(getattr(result, "new_token_count", 0) for result in answer)
        call.ended_s = clock()

    def _take(self) -> list[Any]:
        """The inputs of the next call."""
        first, count = self._next, len(self._inputs)
        self._next = (first + self._plan.batch_size) % count
        return [self._inputs[(first + offset) % count] for offset in range(self._plan.batch_size)]

    async def _answer(self, inputs: list[Any], call: CallRecord) -> Answer[Any]:
        return await (self._stream(inputs[0], call) if self._plan.stream else self._call(inputs))

    async def _call(self, inputs: list[Any]) -> Answer[Any]:
        plan, client = self._plan, self._client
        named: Any = {"model": plan.model, "model_version": plan.model_version, "timeout_s": plan.timeout_s}
        match plan.task:
            case LoadTask.GENERATE:
                return await client.generate(inputs, max_new_tokens=plan.max_new_tokens, **named)
            case LoadTask.TRANSLATE:
                return await client.translate(
                    inputs, max_new_tokens=plan.max_new_tokens, beam_size=plan.beam_size, **named
                )
            case LoadTask.CLASSIFY:
                return await client.classify(inputs, **named)
            case LoadTask.LABEL:
                return await client.label(inputs, **named)

    async def _stream(self, text: str, call: CallRecord) -> Answer[Any]:
        clock = asyncio.get_running_loop().time
        async with self._open_stream(text) as stream:
            async for piece in stream:
                call.token_times_s.append((clock(), piece.new_token_count))
            return stream.answer

    def _open_stream(self, text: str) -> AsyncTextStream[Any, Any]:
        plan = self._plan
        opened = self._client.stream_generate if plan.task is LoadTask.GENERATE else self._client.stream_translate
        return opened(
            text,
            model=plan.model,
            model_version=plan.model_version,
            max_new_tokens=plan.max_new_tokens,
            timeout_s=plan.timeout_s,
        )
