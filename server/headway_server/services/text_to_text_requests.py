"""Parsing of translation and text-to-text requests. The model checks ranges."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headway.v1 import common_pb2, text_to_text_service_pb2
from headway.v1 import translation_service_pb2 as pb
from headway_server.decoding.parameters import EarlyStopping
from headway_server.services.enums import WireEnum
from headway_server.services.messages import set_fields
from headway_server.tasks.text_to_text.phrases import PhraseRequest
from headway_server.tasks.text_to_text.request import TextToTextParameters, TextToTextRequest

_EARLY_STOPPING: Final = WireEnum(common_pb2.EarlyStopping, EarlyStopping, unspecified=EarlyStopping.HEURISTIC)


def parse_rewrite_request(
    request: text_to_text_service_pb2.RewriteTextRequest | pb.TranslateTextRequest, *, deadline: float | None
) -> TextToTextRequest:
    """Parses the common parameters of translation and text-to-text requests.

    Args:
        request: The request.
        deadline: End of the caller's wait, in seconds of `time.monotonic`.

    Raises:
        InvalidInputError: `early_stopping` has a value that this server does not know.
    """
    return TextToTextRequest(
        parameters=parse_parameters(request.parameters),
        truncate=request.truncate,
        target_prefixes=tuple(request.target_prefixes),
        phrases=tuple(
            PhraseRequest(required=tuple(each.required), forbidden=tuple(each.forbidden))
            for each in request.phrase_constraints
        ),
        deadline=deadline,
    )


def parse_request(request: pb.TranslateTextRequest, *, deadline: float | None) -> TextToTextRequest:
    """Parses the parameters of a translation request; args and errors are those of `parse_rewrite_request`."""
    return replace(
        parse_rewrite_request(request, deadline=deadline),
        wants_alignment=request.include_alignment,
        split_sentences=request.split_sentences,
        source_language=request.source_language,
        target_language=request.target_language,
    )


def parse_parameters(parameters: common_pb2.DecodingParameters) -> TextToTextParameters:
    """Parses decoding parameters; unset fields take their defaults.

    Raises:
        InvalidInputError: `early_stopping` has a value that this server does not know.
    """
    return TextToTextParameters(
        max_new_tokens=parameters.max_new_tokens if parameters.HasField("max_new_tokens") else None,
        min_new_tokens=parameters.min_new_tokens,
        max_length_ratio=parameters.max_length_ratio if parameters.HasField("max_length_ratio") else None,
        beam_size=parameters.beam_size if parameters.HasField("beam_size") else 1,
        num_hypotheses=parameters.hypothesis_count if parameters.HasField("hypothesis_count") else 1,
        length_penalty=parameters.length_penalty if parameters.HasField("length_penalty") else 1.0,
        early_stopping=_EARLY_STOPPING.read("parameters.early_stopping", parameters.early_stopping),
        no_repeat_ngram_size=parameters.no_repeat_ngram_size,
        sampling=set_fields(parameters.sampling),
    )
