"""The requests of TranslationService and how its responses are read, as `requests` and `responses` do for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from headway.v1 import common_pb2
from headway.v1 import translation_service_pb2 as pb
from headway_client import responses
from headway_client.calls import StreamCall, UnaryCall
from headway_client.options import SharedTranslateOptions, TranslationDecodingOptions
from headway_client.requests import Texts, as_text, as_texts
from headway_client.results import Answer
from headway_client.translation_results import (
    Alignment,
    EarlyStopping,
    PhraseConstraints,
    TextSpan,
    TokenAlignment,
    TranslatedText,
    TranslationHypothesis,
)

_EARLY_STOPPING: dict[EarlyStopping, pb.EarlyStopping.ValueType] = {
    EarlyStopping.FIRST: pb.EARLY_STOPPING_FIRST,
    EarlyStopping.HEURISTIC: pb.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.NEVER: pb.EARLY_STOPPING_NEVER,
}


def translate(
    texts: Texts,
    *,
    target_prefix: Texts = (),
    phrases: PhraseConstraints | Sequence[PhraseConstraints] = (),
    split_sentences: bool = False,
    beam_size: int | None = None,
    hypotheses: int | None = None,
    early_stopping: EarlyStopping | str | None = None,
    **options: Unpack[SharedTranslateOptions],
) -> UnaryCall[pb.TranslateTextResponse, Answer[TranslatedText]]:
    """TranslateText; the arguments are those of `options.TranslateOptions`.

    Raises:
        ValueError: There is no such way of stopping early.
    """
    request = pb.TranslateTextRequest(texts=as_texts("texts", texts), split_sentences=split_sentences)
    count = len(request.texts)
    prefixes = [target_prefix] * count if isinstance(target_prefix, str) else as_texts("target_prefix", target_prefix)
    request.target_prefixes.extend(prefixes)
    for one in [phrases] * count if isinstance(phrases, PhraseConstraints) else phrases:
        request.phrase_constraints.add(
            required=as_texts("required", one.required), forbidden=as_texts("forbidden", one.forbidden)
        )
    _fill(request, **options)
    if beam_size is not None:
        request.parameters.beam_size = beam_size
    if hypotheses is not None:
        request.parameters.hypothesis_count = hypotheses
    if early_stopping is not None:
        request.parameters.early_stopping = _EARLY_STOPPING[EarlyStopping(early_stopping)]
    return UnaryCall(
        path="/headway.v1.TranslationService/TranslateText",
        request=request,
        response_type=pb.TranslateTextResponse,
        read=lambda reply: responses.answer(reply, reply.results, translated_text, count),
    )


def stream_translate(
    text: str, *, target_prefix: str = "", **options: Unpack[SharedTranslateOptions]
) -> StreamCall[pb.StreamTranslateTextResponse, TranslatedText]:
    """StreamTranslateText; the arguments are those of `options.StreamTranslateOptions`."""
    request = pb.StreamTranslateTextRequest(
        text=as_text("text", text), target_prefix=as_text("target_prefix", target_prefix)
    )
    _fill(request, **options)
    return StreamCall(
        path="/headway.v1.TranslationService/StreamTranslateText",
        request=request,
        parse=pb.StreamTranslateTextResponse.FromString,
        read=lambda piece: (
            responses.answer(piece, [piece.result], translated_text, 1) if piece.HasField("result") else None
        ),
    )


def translated_text(message: pb.TranslatedText) -> TranslatedText:
    """Reads a translation."""
    return TranslatedText(
        text=message.text,
        log_probability=message.log_probability,
        finish_reason=responses.finish_reason(message.finish_reason),
        source_token_count=message.source_token_count,
        new_token_count=message.new_token_count,
        truncated=message.truncated,
        score=message.score,
        hypotheses=tuple(_hypothesis(hypothesis) for hypothesis in message.hypotheses),
        alignments=tuple(_alignment(alignment) for alignment in message.alignments),
        seed=message.seed if message.HasField("seed") else None,
        sentence_count=message.sentence_count or 1,  # an older server does not say it
    )


def _fill(
    request: pb.TranslateTextRequest | pb.StreamTranslateTextRequest,
    *,
    model: str = "",
    model_version: str = "",
    truncate: bool = False,
    source_language: str = "",
    target_language: str = "",
    alignment: bool = False,
    **decoding: Unpack[TranslationDecodingOptions],
) -> None:
    """Sets what both requests have."""
    request.model = model
    request.model_version = model_version
    request.truncate = truncate
    request.source_language = source_language
    request.target_language = target_language
    request.include_alignment = alignment
    request.parameters.CopyFrom(_parameters(**decoding))


def _parameters(
    *,
    max_new_tokens: int | None = None,
    max_length_ratio: float | None = None,
    length_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
) -> pb.TranslationParameters:
    """Fields that are None stay unset, so that the defaults of the protocol apply."""
    draws = sample or any(value is not None for value in (temperature, top_k, top_p, min_p, seed))
    if draws and temperature is None:
        temperature = 1.0
    return pb.TranslationParameters(
        max_new_tokens=max_new_tokens,
        max_length_ratio=max_length_ratio,
        length_penalty=length_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        sampling=common_pb2.SamplingParameters(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
        if draws
        else None,
    )


def _hypothesis(message: pb.TranslationHypothesis) -> TranslationHypothesis:
    return TranslationHypothesis(
        text=message.text,
        log_probability=message.log_probability,
        score=message.score,
        finish_reason=responses.finish_reason(message.finish_reason),
        new_token_count=message.new_token_count,
        alignment=_alignment(message.alignment) if message.HasField("alignment") else None,
    )


def _alignment(message: pb.Alignment) -> Alignment:
    return Alignment(
        source_tokens=tuple(TextSpan(span.start, span.end) for span in message.source_tokens),
        target_tokens=tuple(
            TokenAlignment(TextSpan(token.span.start, token.span.end), tuple(token.source_attention))
            for token in message.target_tokens
        ),
    )
