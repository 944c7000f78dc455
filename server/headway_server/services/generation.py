"""GenerationService."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Final

from headway.v1 import generation_service_pb2 as pb
from headway_server.decoding.sequence import Delta, TokenLogProbability
from headway_server.preprocessing import ReasoningForm, ReasoningReader, Said, Thought, join_parts
from headway_server.services.generation_requests import parse_request, read_prompt, read_prompts, tells_reasoning
from headway_server.services.messages import FINISH_REASONS, Response, build, find_model, signed
from headway_server.serving.answers import Answer
from headway_server.serving.host import ModelHost
from headway_server.tasks.generation.model import GeneratedText, GenerationModel
from headway_server.tasks.table import GENERATE_TEXTS

_MAX_TOKENS_ON_LOOP: Final = 100
"""With their alternatives. To find the text of one that was never asked for takes 20 µs."""


class GenerationService:
    """Answers from the host's decoder-only models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def GenerateText(self, request: pb.GenerateTextRequest, deadline: float | None) -> pb.GenerateTextResponse:
        """Continues every prompt, or every conversation."""
        arrived = time.monotonic()
        model = self._find(request)
        prompts, fields = read_prompts(request)
        answer = await model.generate(
            prompts,
            fields=fields,
            request=parse_request(
                request,
                sample_count=request.sample_count if request.HasField("sample_count") else 1,
                deadline=deadline,
            ),
        )
        form = model.reasoning_form if tells_reasoning(request) else None
        return await _build(answer, partial(_response, answer, model, form, arrived))

    async def StreamGenerateText(
        self, request: pb.StreamGenerateTextRequest, deadline: float | None
    ) -> AsyncGenerator[pb.StreamGenerateTextResponse, None]:
        """Continues a prompt or a conversation and sends the text as it appears."""
        arrived = time.monotonic()
        model = self._find(request)
        prompt, field = read_prompt(request)
        form = model.reasoning_form if tells_reasoning(request) else None
        reader = None if form is None else ReasoningReader(form)
        parts = model.stream(prompt, field=field, request=parse_request(request, deadline=deadline))
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, Delta):
                    yield _delta(part, model, (Said(part.output),) if reader is None else reader.feed(part.output))
                    continue
                if reader is not None and (rest := list(reader.end())):
                    held = Delta(output="", num_new_tokens=part.results[0].result.num_new_tokens)
                    yield _delta(held, model, rest)
                yield await _build(part, partial(_last_message, part, model, form, arrived))

    def _find(self, request: pb.GenerateTextRequest | pb.StreamGenerateTextRequest) -> GenerationModel:
        return find_model(self._host, GENERATE_TEXTS, request)


async def _build(answer: Answer[GeneratedText], make: Callable[[], Response]) -> Response:
    """Makes a response of an answer, off the event loop if it has many tokens: the text of each is to be found."""
    results = [text.result for text in answer.results]
    num_parts = sum(1 + len(token.top_tokens) for one in results for token in (*one.prompt_tokens, *one.tokens))
    return await build(num_parts, make, most_on_loop=_MAX_TOKENS_ON_LOOP)


def _response(
    answer: Answer[GeneratedText], model: GenerationModel, form: ReasoningForm | None, arrived: float
) -> pb.GenerateTextResponse:
    return pb.GenerateTextResponse(
        results=[_generated_text(text, model, form) for text in answer.results],
        **signed(model, answer.timings, arrived),
    )


def _delta(delta: Delta, model: GenerationModel, parts: Iterable[Thought | Said]) -> pb.StreamGenerateTextResponse:
    thought, said = join_parts(parts)
    return pb.StreamGenerateTextResponse(
        text_delta=said,
        reasoning_delta=thought,
        new_token_count=delta.num_new_tokens,
        tokens=_tokens(delta.tokens, model),
    )


def _last_message(
    answer: Answer[GeneratedText], model: GenerationModel, form: ReasoningForm | None, arrived: float
) -> pb.StreamGenerateTextResponse:
    (text,) = answer.results
    return pb.StreamGenerateTextResponse(
        new_token_count=text.result.num_new_tokens,
        result=_generated_text(text, model, form),
        **signed(model, answer.timings, arrived),
    )


def _generated_text(text: GeneratedText, model: GenerationModel, form: ReasoningForm | None) -> pb.GeneratedText:
    thought, said = ("", text.text) if form is None else form.read(text.text)
    return pb.GeneratedText(
        text=said,
        reasoning=thought,
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
