"""GenerationService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

from headway.v1 import generation_service_pb2 as pb
from headway_server.decoding.sequence import Delta, TokenLogProbability
from headway_server.preprocessing import AnswerDelta
from headway_server.preprocessing.pool import text_pool
from headway_server.services.generation_requests import Request, parse_request, read_prompts
from headway_server.services.images import images_of_prompts
from headway_server.services.messages import FINISH_REASONS, Response, build, find_model, signed
from headway_server.services.procedure import PARSED_ON_LOOP_BYTES
from headway_server.serving.answers import Answer
from headway_server.serving.host import ModelHost
from headway_server.tasks.generation.model import GeneratedText, GenerationModel
from headway_server.tasks.generation.request import GenerationRequest, Prompt
from headway_server.tasks.table import GENERATE_TEXTS

_MAX_TOKENS_ON_LOOP: Final = 100
"""Maximum tokens, with alternatives, on the event loop. Decoding an uncached token takes 20 µs."""


class GenerationService:
    """Servicer of generation models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def GenerateText(self, request: pb.GenerateTextRequest, deadline: float | None) -> pb.GenerateTextResponse:
        """Continues every prompt, or every conversation."""
        arrived = time.monotonic()
        model = self._find(request)
        count = request.sample_count if request.HasField("sample_count") else 1
        (prompts, fields), asked = await _read(request, deadline, count)
        images = await images_of_prompts(self._host, prompts)
        answer = await model.generate(prompts, fields=fields, request=asked, images=images)
        return await _build(answer, partial(_response, answer, model, asked, arrived))

    async def StreamGenerateText(
        self, request: pb.StreamGenerateTextRequest, deadline: float | None
    ) -> AsyncGenerator[pb.StreamGenerateTextResponse, None]:
        """Continues a prompt or a conversation and streams the text."""
        arrived = time.monotonic()
        model = self._find(request)
        ([prompt], [field]), asked = await _read(request, deadline)
        reader = model.answer_reader(asked)
        images = await images_of_prompts(self._host, [prompt])
        async with aclosing(model.stream_many([prompt], fields=[field], request=asked, images=images)) as parts:
            async for part in parts:
                if isinstance(part, Delta):
                    yield _delta(part, model, reader.feed(part.output))
                    continue
                if rest := reader.end():
                    last = Delta(output="", num_new_tokens=part.results[0].result.num_new_tokens)
                    yield _delta(last, model, rest)
                yield await _build(part, partial(_last_message, part, model, asked, arrived, reader.call_ids))

    def _find(self, request: Request) -> GenerationModel:
        return find_model(self._host, GENERATE_TEXTS, request)


async def _read(
    request: Request, deadline: float | None, sample_count: int = 1
) -> tuple[tuple[list[Prompt], list[str]], GenerationRequest]:
    """Parses a request, off the event loop if it is large: JSON of tools takes up to 0.1 s a MiB."""

    def read() -> tuple[tuple[list[Prompt], list[str]], GenerationRequest]:
        return read_prompts(request), parse_request(request, sample_count=sample_count, deadline=deadline)

    if request.ByteSize() <= PARSED_ON_LOOP_BYTES:
        return read()
    return await asyncio.get_running_loop().run_in_executor(text_pool(), read)


async def _build(answer: Answer[GeneratedText], make: Callable[[], Response]) -> Response:
    """Makes the response to a call, off the event loop if it has many tokens, each of which is decoded."""
    results = [text.result for text in answer.results]
    num_parts = sum(1 + len(token.top_tokens) for one in results for token in (*one.prompt_tokens, *one.tokens))
    return await build(num_parts, make, most_on_loop=_MAX_TOKENS_ON_LOOP)


def _response(
    answer: Answer[GeneratedText], model: GenerationModel, request: GenerationRequest, arrived: float
) -> pb.GenerateTextResponse:
    return pb.GenerateTextResponse(
        results=[_generated_text(text, model, request) for text in answer.results],
        **signed(model, answer.timings, arrived),
    )


def _delta(delta: Delta, model: GenerationModel, content: AnswerDelta) -> pb.StreamGenerateTextResponse:
    return pb.StreamGenerateTextResponse(
        text_delta=content.text,
        reasoning_delta=content.reasoning,
        tool_call_deltas=[
            pb.ToolCallDelta(index=call.index, id=call.call_id, name=call.name, arguments_delta=call.arguments)
            for call in content.calls
        ],
        new_token_count=delta.num_new_tokens,
        tokens=_tokens(delta.tokens, model),
    )


def _last_message(
    answer: Answer[GeneratedText],
    model: GenerationModel,
    request: GenerationRequest,
    arrived: float,
    call_ids: Sequence[str],
) -> pb.StreamGenerateTextResponse:
    (text,) = answer.results
    result = _generated_text(text, model, request)
    for call, call_id in zip(result.tool_calls, call_ids, strict=True):
        call.id = call_id
    return pb.StreamGenerateTextResponse(
        new_token_count=text.result.num_new_tokens, result=result, **signed(model, answer.timings, arrived)
    )


def _generated_text(text: GeneratedText, model: GenerationModel, request: GenerationRequest) -> pb.GeneratedText:
    read = model.answer_reader(request).read(text.text)
    return pb.GeneratedText(
        text=read.text,
        reasoning=read.reasoning,
        tool_calls=[pb.ToolCall(id=call.call_id, name=call.name, arguments_json=call.arguments) for call in read.calls],
        finish_reason=FINISH_REASONS.number(text.result.finish_reason),
        prompt_token_count=text.num_prompt_tokens,
        new_token_count=text.result.num_new_tokens,
        truncated=text.truncated,
        seed=text.seed,
        sample_index=text.sample,
        cached_prompt_token_count=text.result.num_cached_tokens,
        tokens=_tokens(text.result.tokens, model),
        prompt_tokens=_tokens(text.result.prompt_tokens, model),
    )


def _tokens(tokens: Iterable[TokenLogProbability], model: GenerationModel) -> list[pb.TokenLogProbability]:
    return [
        pb.TokenLogProbability(
            token_id=token.token_id,
            text=model.token_text(token.token_id),
            log_probability=token.log_probability,
            top_tokens=[
                pb.TokenCandidate(token_id=token_id, text=model.token_text(token_id), log_probability=log_probability)
                for token_id, log_probability in token.top_tokens
            ],
        )
        for token in tokens
    ]
