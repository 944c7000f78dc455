"""Continuous batching of decoders: sequence, scheduler, runner, sampler, engine (docs/engine.md)."""

from headway_server.engine.alignment import Alignment
from headway_server.engine.constraints import ConstraintRequest
from headway_server.engine.generation import GeneratedText, GenerationModel
from headway_server.engine.hypothesis import EarlyStopping
from headway_server.engine.model import Decoded
from headway_server.engine.phrases import PhraseRequest
from headway_server.engine.prompt import Conversation, Prompt
from headway_server.engine.reply import Piece
from headway_server.engine.request import LogProbabilityRequest, SamplingRequest
from headway_server.engine.sequence import FinishReason, TokenLogProbability
from headway_server.engine.settings import EngineSettings
from headway_server.engine.translated_text import TranslatedText, TranslationHypothesis
from headway_server.engine.translation import TranslationModel
from headway_server.engine.translation_request import (
    TranslationParameters,
    TranslationRequest,
    TranslationSampling,
)

__all__ = [
    "Alignment",
    "ConstraintRequest",
    "Conversation",
    "Decoded",
    "EarlyStopping",
    "EngineSettings",
    "FinishReason",
    "GeneratedText",
    "GenerationModel",
    "LogProbabilityRequest",
    "PhraseRequest",
    "Piece",
    "Prompt",
    "SamplingRequest",
    "TokenLogProbability",
    "TranslatedText",
    "TranslationHypothesis",
    "TranslationModel",
    "TranslationParameters",
    "TranslationRequest",
    "TranslationSampling",
]
