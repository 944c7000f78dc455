"""Reads what a translation request says of how to translate. Ranges are checked by the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headway.v1 import common_pb2
from headway.v1 import translation_service_pb2 as pb
from headway_server.decoding.parameters import EarlyStopping
from headway_server.errors import InvalidInputError
from headway_server.serving.limits import check_size_of_call, num_bytes
from headway_server.tasks.translation.phrases import PhraseRequest
from headway_server.tasks.translation.request import TranslationParameters, TranslationRequest, TranslationSampling

_EARLY_STOPPING: Final[dict[int, EarlyStopping]] = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_FIRST: EarlyStopping.FIRST,
    pb.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def parse_request(
    request: pb.TranslateTextRequest, *, max_text_bytes: int, deadline: float | None
) -> TranslationRequest:
    """Reads what a unary request asks for beside its texts.

    Args:
        request: The request.
        max_text_bytes: Most bytes of a target prefix in UTF-8.
        deadline: When the caller stops waiting, by `time.monotonic`.

    Raises:
        InvalidInputError: There are prefixes or phrases for some texts only, one is too large, or a choice is unknown.
    """
    num_texts = len(request.texts)
    prefixes, phrases = tuple(request.target_prefixes), request.phrase_constraints
    _check_one_each("target_prefixes", len(prefixes), num_texts)
    _check_one_each("phrase_constraints", len(phrases), num_texts)
    _check_prefixes([f"target_prefixes[{index}]" for index in range(len(prefixes))], prefixes, max_text_bytes)
    return TranslationRequest(
        parameters=parse_parameters(request.parameters),
        truncate=request.truncate,
        target_prefixes=prefixes,
        phrases=tuple(
            PhraseRequest(required=tuple(each.required), forbidden=tuple(each.forbidden)) for each in phrases
        ),
        wants_alignment=request.include_alignment,
        split_sentences=request.split_sentences,
        deadline=deadline,
    )


def parse_stream_request(
    request: pb.StreamTranslateTextRequest, *, max_text_bytes: int, deadline: float | None
) -> TranslationRequest:
    """Reads what a streaming request asks for beside its text; args and errors are those of `parse_request`."""
    prefixes = (request.target_prefix,) if request.target_prefix else ()
    _check_prefixes(["target_prefix"][: len(prefixes)], prefixes, max_text_bytes)
    return TranslationRequest(
        parameters=parse_parameters(request.parameters),
        truncate=request.truncate,
        target_prefixes=prefixes,
        wants_alignment=request.include_alignment,
        deadline=deadline,
    )


def parse_parameters(parameters: pb.TranslationParameters) -> TranslationParameters:
    """Reads how to decode; a field that is not set takes its default.

    Raises:
        InvalidInputError: `early_stopping` has a value that this server does not know.
    """
    early_stopping = _EARLY_STOPPING.get(parameters.early_stopping)
    if early_stopping is None:
        raise InvalidInputError(
            "parameters.early_stopping",
            f"is {parameters.early_stopping}; must be EARLY_STOPPING_FIRST (1), EARLY_STOPPING_HEURISTIC (2) or "
            "EARLY_STOPPING_NEVER (3)",
        )
    return TranslationParameters(
        max_new_tokens=parameters.max_new_tokens if parameters.HasField("max_new_tokens") else None,
        max_length_ratio=parameters.max_length_ratio if parameters.HasField("max_length_ratio") else None,
        beam_size=parameters.beam_size if parameters.HasField("beam_size") else 1,
        num_hypotheses=parameters.hypothesis_count if parameters.HasField("hypothesis_count") else 1,
        length_penalty=parameters.length_penalty if parameters.HasField("length_penalty") else 1.0,
        early_stopping=early_stopping,
        no_repeat_ngram_size=parameters.no_repeat_ngram_size,
        sampling=_parse_sampling(parameters.sampling),
    )


def _parse_sampling(sampling: common_pb2.SamplingParameters) -> TranslationSampling | None:
    """Reads how to draw tokens; None at temperature 0, where nothing is drawn."""
    if sampling.temperature == 0:
        return None
    return TranslationSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
    )


def _check_one_each(field: str, count: int, num_texts: int) -> None:
    if count not in (0, num_texts):
        raise InvalidInputError(
            field,
            f"has {count} elements for {num_texts} texts; give one for every text, empty where there is nothing to "
            "say, or none at all",
        )


def _check_prefixes(fields: Sequence[str], prefixes: Sequence[str], max_bytes: int) -> None:
    for field, prefix in zip(fields, prefixes, strict=True):
        if (size := num_bytes(prefix)) > max_bytes:
            raise InvalidInputError(field, f"has {size} bytes, the limit is {max_bytes}; shorten it")
    check_size_of_call("target_prefixes", prefixes, max_bytes)
