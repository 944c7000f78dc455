"""Validation of a speech synthesis call against the model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Elements
from dataclasses import dataclass, field
from typing import Any, Final

from headway_server.bundles import AudioCodec, SamplingDefaults
from headway_server.decoding.parameters import SamplingParameters
from headway_server.errors import InvalidInputError
from headway_server.field_rules import most_elements
from headway_server.tasks.parameters import check_rules, check_sampling
from headway_server.tasks.synthesis.encoding import AudioFormat

MAX_TEXTS: Final = most_elements("SynthesizeSpeechRequest.texts")
"""Maximum texts of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisRequest:
    """Parameters of a call, without its texts."""

    voice: str = ""
    """Name of a voice; empty: any voice."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Set parameters among temperature, top_k, top_p, min_p and seed."""
    speaking_rate: float | None = None
    """Times as fast as the model speaks by itself; None: once."""
    max_seconds: float | None = None
    """Maximum seconds of a text's audio; None: the model's maximum."""
    format: AudioFormat = AudioFormat.WAV
    """Format of complete audio."""
    deadline: float | None = None
    """End of the caller's wait, in seconds of `time.monotonic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisPlan:
    """Validated parameters of a call."""

    parameters: SamplingParameters
    """Sampling parameters without the seed."""
    seed: int | None
    """Seed of the caller; None: a random one for each text."""


def plan_synthesis(
    request: SynthesisRequest,
    *,
    codec: AudioCodec,
    max_frames: int,
    vocab_size: int,
    defaults: SamplingDefaults | None,
) -> SynthesisPlan:
    """Validates a call's parameters.

    Raises:
        InvalidInputError: A parameter is out of its range.
    """
    known = {"temperature", "top_k", "top_p", "min_p"}
    values = {**(defaults or SamplingDefaults()).model_dump(include=known), **request.sampling}
    seed = values.pop("seed", None)
    check_own_rate(request)
    num_frames = most_frames(request, max_frames, codec.hop_length / codec.sampling_rate)
    parameters = SamplingParameters(max_new_tokens=num_frames * codec.num_books, **values)
    check_sampling(parameters, vocab_size)
    return SynthesisPlan(parameters=parameters, seed=seed)


def check_rate(request: SynthesisRequest) -> float:
    """Returns the speaking rate of a call.

    Raises:
        InvalidInputError: It is out of its range.
    """
    if request.speaking_rate is None:
        return 1.0
    check_rules("parameters.speaking_rate", request.speaking_rate, "SynthesisParameters.speaking_rate")
    return request.speaking_rate


def check_own_rate(request: SynthesisRequest) -> None:
    """Checks that a model which has one speaking rate is asked for no other.

    Raises:
        InvalidInputError: It is.
    """
    if check_rate(request) != 1.0:
        raise InvalidInputError(
            "parameters.speaking_rate",
            f"is {request.speaking_rate:g}, and the model speaks at its own rate; leave it out",
        )


def check_draws_no_codes(request: SynthesisRequest, name: str) -> None:
    """Checks that a model without codes is asked for no sampling of them; its noise has the seed.

    Raises:
        InvalidInputError: It is.
    """
    for parameter in request.sampling:
        if parameter != "seed":
            raise InvalidInputError(
                f"parameters.sampling.{parameter}", f"is set, and {name} draws no codes; leave it out"
            )


def most_frames(request: SynthesisRequest, max_frames: int, frame_s: float) -> int:
    """Returns how many frames of `frame_s` seconds a text's audio may have, of the model's `max_frames`.

    Raises:
        InvalidInputError: The seconds that are asked for are out of range.
    """
    if request.max_seconds is None:
        return max_frames
    if not frame_s <= request.max_seconds <= max_frames * frame_s:
        raise InvalidInputError(
            "parameters.max_duration_seconds",
            f"is {request.max_seconds:g} seconds; must be from {frame_s:g} to {max_frames * frame_s:g}, the "
            "model's maximum; split the text",
        )
    return int(request.max_seconds / frame_s + 1e-6)


def check_voice(voice: str, known: Elements[str]) -> None:
    """Checks the name of a voice.

    Raises:
        InvalidInputError: The model has no voice of that name.
    """
    if voice and voice not in known:
        raise InvalidInputError(
            "voice", f"is {voice[:64]!r}; the model has {', '.join(known) or 'one, without a name'}"
        )
