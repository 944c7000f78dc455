"""Settings of an engine, a group of the server's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineSettings(BaseModel):
    """Capacity and scheduling of an engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    num_slots: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Sequences that run at once. Each takes cache for the model's maximum length, allocated at start. Left out: 32, or
    as many as half of the available memory holds."""
    num_prefix_slots: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Size of the prefix cache, in slots: prompts with the same beginning compute it once. 0 turns it off. Left out:
    one for every eight slots."""
    max_waiting: Annotated[int, Field(ge=0, le=100_000)] = 512
    """Sequences that may wait for a slot; calls beyond that are refused as overloaded."""
    priority_scope: Literal["caller", "server"] = "caller"
    """Whose texts one of higher priority passes: those of its own caller, or of all, where callers trust each other.
    Callers, each a connection or an API key, take turns by the tokens they ask for."""
    max_encoder_tokens: Annotated[int, Field(ge=1)] = 4096
    """Tokens of an encoder batch, padding included: it bounds how long newly admitted sequences hold up the running
    ones. A single longer source is encoded alone."""
    stream_interval_ms: Annotated[float, Field(ge=0, le=1000)] = 20
    """Least time between two deltas of a stream, in milliseconds; tokens that come faster are sent together. A message
    takes about 0.1 ms of a core here and as much at its reader. The first delta and the last one are not delayed."""
    speculation: Literal["off", "prompt-lookup"] = "off"
    """`prompt-lookup`: while a generation model runs up to eight sequences, their next tokens are drafted from what
    followed the same tokens earlier in the text, and verified together. Texts that copy get several tokens a step, and
    every text stays the same. The weights are loaded twice."""
