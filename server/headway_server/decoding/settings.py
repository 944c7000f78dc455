"""Settings of an engine, embedded in the server's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineSettings(BaseModel):
    """How many sequences an engine holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_slots: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Sequences that run at once. Each takes the model's maximum length of cache, allocated at start. Left out: 32, or
    as many as half of the memory there is holds."""
    num_prefix_slots: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Slots' worth of memory that keeps the beginnings of prompts, so that prompts with the same beginning read it
    once; 0 turns that off. Left out: one to eight slots."""
    max_waiting: Annotated[int, Field(ge=0, le=100_000)] = 512
    """Sequences that may wait for a slot; past that a call is refused as overloaded."""
    max_encoder_tokens: Annotated[int, Field(ge=1)] = 4096
    """Tokens of an encoder batch, padding counted: what newly admitted sentences may hold up the running ones by.
    A single longer sentence goes alone."""
    stream_interval_ms: Annotated[float, Field(ge=0, le=1000)] = 20
    """Least time between two pieces of a stream, in milliseconds: tokens that come faster are sent together. A message
    costs about 0.1 ms of a core here and as much at its reader; the first piece and the last are not held back."""
    speculation: Literal["off", "prompt-lookup"] = "off"
    """Whether a generation model that runs one or two sequences drafts their next tokens by looking up what followed
    the last ones before, and verifies them together: several tokens a step where a text copies, and the same text. The
    weights are held twice."""
