"""GenerationService."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from headway.v1 import generation_service_pb2 as pb
from headway.v1 import generation_service_pb2_grpc as pb_grpc
from headway_server.bundles import Task
from headway_server.engine import Decoded, FinishReason, GeneratedText, GenerationModel, Piece, SamplingRequest
from headway_server.registry import ModelRegistry
from headway_server.services.messages import (
    check_text,
    check_texts,
    deadline_of,
    model_reference,
    timings_of_call,
)
from headway_server.settings import DEFAULT_MAX_TEXT_KIB

MAX_PROMPTS = 256

FINISH_REASONS = {
    FinishReason.END_OF_SEQUENCE: pb.FINISH_REASON_END_OF_SEQUENCE,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


class GenerationService(pb_grpc.GenerationServiceServicer):
    """Answers from the registry's decoder-only models."""

    def __init__(self, registry: ModelRegistry, *, max_text_bytes: int = DEFAULT_MAX_TEXT_KIB * 2**10) -> None:
        """Answers from `registry`; a text of more than `max_text_bytes` in UTF-8 is refused unread."""
        self._registry = registry
        self._max_text_bytes = max_text_bytes

    async def GenerateText(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.GenerateTextRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GenerateTextResponse:
        """Continues every prompt."""
        arrived = time.monotonic()
        model = self._find(request)
        prompts = list(request.prompts)
        answer = await model.generate(
            prompts,
            fields=check_texts("prompts", prompts, MAX_PROMPTS, self._max_text_bytes),
            sampling=parse_sampling(request.sampling),
            truncate=request.truncate,
            deadline=deadline_of(context),
        )
        return pb.GenerateTextResponse(
            results=[_generated_text(text) for text in answer.results],
            model=model_reference(model),
            timings=timings_of_call(answer.timings, arrived),
        )

    async def StreamGenerateText(  # noqa: N802 (the method's name in the protocol)
        self, request: pb.StreamGenerateTextRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[pb.StreamGenerateTextResponse, None]:
        """Continues a prompt and sends the text as it appears."""
        arrived = time.monotonic()
        model = self._find(request)
        parts = model.stream(
            request.prompt,
            field=check_text("prompt", request.prompt, self._max_text_bytes),
            sampling=parse_sampling(request.sampling),
            truncate=request.truncate,
            deadline=deadline_of(context),
        )
        async with aclosing(parts):
            async for part in parts:
                yield _piece(part) if isinstance(part, Piece) else _last_message(part, model, arrived)

    def _find(self, request: pb.GenerateTextRequest | pb.StreamGenerateTextRequest) -> GenerationModel:
        model = self._registry.find(Task.GENERATION, request.model, request.model_version)
        assert isinstance(model, GenerationModel)  # by the registry's table of loaders
        return model


def parse_sampling(sampling: pb.SamplingParameters) -> SamplingRequest:
    """Reads sampling parameters; a field that is not set becomes None. Ranges are checked by the model."""
    return SamplingRequest(
        max_new_tokens=sampling.max_new_token_count if sampling.HasField("max_new_token_count") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_strings=tuple(sampling.stop_strings),
    )


def _piece(piece: Piece) -> pb.StreamGenerateTextResponse:
    return pb.StreamGenerateTextResponse(text_delta=piece.text, new_token_count=piece.num_new_tokens)


def _last_message(
    answer: Decoded[GeneratedText], model: GenerationModel, arrived: float
) -> pb.StreamGenerateTextResponse:
    (text,) = answer.results
    return pb.StreamGenerateTextResponse(
        new_token_count=text.result.num_new_tokens,
        result=_generated_text(text),
        model=model_reference(model),
        timings=timings_of_call(answer.timings, arrived),
    )


def _generated_text(text: GeneratedText) -> pb.GeneratedText:
    return pb.GeneratedText(
        text=text.result.text,
        finish_reason=FINISH_REASONS[text.result.finish_reason],
        prompt_token_count=text.num_prompt_tokens,
        new_token_count=text.result.num_new_tokens,
        truncated=text.truncated,
        seed=text.seed,
    )
