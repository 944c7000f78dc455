"""Continuous batching of decoders: sequence, scheduler, runner, sampler, engine (docs/engine.md)."""

from headway_server.engine.constraints import ConstraintRequest
from headway_server.engine.generation import GeneratedText, GenerationModel
from headway_server.engine.model import Decoded
from headway_server.engine.prompt import Conversation, Prompt
from headway_server.engine.reply import Piece
from headway_server.engine.request import LogProbabilityRequest, SamplingRequest
from headway_server.engine.sequence import FinishReason, TokenLogProbability
from headway_server.engine.settings import EngineSettings
from headway_server.engine.translation import TranslatedText, TranslationModel

__all__ = [
    "ConstraintRequest",
    "Conversation",
    "Decoded",
    "EngineSettings",
    "FinishReason",
    "GeneratedText",
    "GenerationModel",
    "LogProbabilityRequest",
    "Piece",
    "Prompt",
    "SamplingRequest",
    "TokenLogProbability",
    "TranslatedText",
    "TranslationModel",
]
