"""The requests of GenerationService, as `requests` makes those of the other services."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from headway.v1 import common_pb2
from headway.v1 import generation_service_pb2 as pb
from headway_client import responses
from headway_client.calls import StreamCall, UnaryCall
from headway_client.conversation import (
    ChatMessage,
    Conversation,
    Conversations,
    Role,
    as_conversation,
    as_conversations,
)
from headway_client.options import GenerateOptions, SamplingOptions, StreamGenerateOptions
from headway_client.requests import Texts, as_text, as_texts
from headway_client.results import Answer, GeneratedText

_ROLES = {Role.SYSTEM: pb.ROLE_SYSTEM, Role.USER: pb.ROLE_USER, Role.ASSISTANT: pb.ROLE_ASSISTANT}


def generate(
    prompts: Texts, **options: Unpack[GenerateOptions]
) -> UnaryCall[pb.GenerateTextResponse, Answer[GeneratedText]]:
    """GenerateText; the arguments are those of `options.GenerateOptions`."""
    return _unary(pb.GenerateTextRequest(prompts=as_texts("prompts", prompts)), **options)


def chat(
    conversations: Conversations, **options: Unpack[GenerateOptions]
) -> UnaryCall[pb.GenerateTextResponse, Answer[GeneratedText]]:
    """GenerateText with conversations; the arguments are those of `options.GenerateOptions`."""
    messages = [_conversation(turns) for turns in as_conversations("conversations", conversations)]
    return _unary(pb.GenerateTextRequest(conversations=messages), **options)


def stream_generate(
    prompt: str, **options: Unpack[StreamGenerateOptions]
) -> StreamCall[pb.StreamGenerateTextResponse, GeneratedText]:
    """StreamGenerateText; the arguments are those of `options.StreamGenerateOptions`."""
    return _stream(pb.StreamGenerateTextRequest(prompt=as_text("prompt", prompt)), **options)


def stream_chat(
    conversation: Conversation, **options: Unpack[StreamGenerateOptions]
) -> StreamCall[pb.StreamGenerateTextResponse, GeneratedText]:
    """StreamGenerateText with a conversation; the arguments are those of `options.StreamGenerateOptions`."""
    message = _conversation(as_conversation("conversation", conversation))
    return _stream(pb.StreamGenerateTextRequest(conversation=message), **options)


def _unary(
    request: pb.GenerateTextRequest, *, samples: int | None = None, **options: Unpack[StreamGenerateOptions]
) -> UnaryCall[pb.GenerateTextResponse, Answer[GeneratedText]]:
    _fill(request, **options)
    if samples is not None:
        request.sample_count = samples
    count = (len(request.prompts) + len(request.conversations)) * (1 if samples is None else samples)
    return UnaryCall(
        path="/headway.v1.GenerationService/GenerateText",
        request=request,
        response_type=pb.GenerateTextResponse,
        read=lambda reply: responses.answer(reply, reply.results, responses.generated_text, count),
    )


def _stream(
    request: pb.StreamGenerateTextRequest, **options: Unpack[StreamGenerateOptions]
) -> StreamCall[pb.StreamGenerateTextResponse, GeneratedText]:
    _fill(request, **options)
    return StreamCall(
        path="/headway.v1.GenerationService/StreamGenerateText",
        request=request,
        parse=pb.StreamGenerateTextResponse.FromString,
        read=lambda piece: (
            responses.answer(piece, [piece.result], responses.generated_text, 1) if piece.HasField("result") else None
        ),
        read_tokens=lambda piece: responses.token_log_probabilities(piece.tokens),
    )


def _fill(
    request: pb.GenerateTextRequest | pb.StreamGenerateTextRequest,
    *,
    model: str = "",
    model_version: str = "",
    truncate: bool = False,
    echo: bool = False,
    log_probabilities: int | None = None,
    prompt_log_probabilities: bool = False,
    priority: int = 0,
    **sampling: Unpack[SamplingOptions],
) -> None:
    """Sets what both requests have."""
    request.model = model
    request.model_version = model_version
    request.truncate = truncate
    request.echo = echo
    request.priority = priority
    request.parameters.CopyFrom(_parameters(**sampling))
    if log_probabilities is not None or prompt_log_probabilities:
        request.log_probabilities.CopyFrom(
            pb.LogProbabilityOptions(top_token_count=log_probabilities or 0, include_prompt=prompt_log_probabilities)
        )


def _parameters(
    *,
    max_new_tokens: int | None = None,
    min_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    json_schema: str | Mapping[str, Any] | None = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
) -> pb.GenerationParameters:
    """Fields that are None stay unset, so that the model's own defaults apply."""
    return pb.GenerationParameters(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        sampling=common_pb2.SamplingParameters(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        ),
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_biases=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in (logit_bias or {}).items()],
        stop_strings=as_texts("stop", stop),
        stop_token_ids=stop_token_ids,
        constraint=_constraint(json_schema, regex, choices),
    )


def _constraint(
    json_schema: str | Mapping[str, Any] | None, regex: str | None, choices: Sequence[str] | None
) -> pb.Constraint | None:
    given = [
        name
        for name, value in (("json_schema", json_schema), ("regex", regex), ("choices", choices))
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; a text can have one constraint")
    if json_schema is not None:
        return pb.Constraint(json_schema=json_schema if isinstance(json_schema, str) else json.dumps(json_schema))
    if regex is not None:
        return pb.Constraint(regex=as_text("regex", regex))
    if choices is not None:
        return pb.Constraint(choices=pb.Choices(texts=as_texts("choices", choices)))
    return None


def _conversation(turns: Sequence[ChatMessage]) -> pb.Conversation:
    return pb.Conversation(messages=[pb.ChatMessage(role=_ROLES[turn.role], content=turn.content) for turn in turns])
