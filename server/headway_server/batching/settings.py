"""How stateless models are batched."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_TEXTS = 256
"""Most texts of a call."""
MAX_IMAGES = 64
"""Most images of a call."""


class BatchingSettings(BaseModel):
    """Sizes of batches and queues."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_batch_tokens: Annotated[int, Field(ge=1)] = 2048
    """Most tokens of a batch of texts, padding included; a longer text runs alone."""
    max_batch_images: Annotated[int, Field(ge=1)] = 8
    """Most images of a batch."""
    max_waiting_texts: Annotated[int, Field(ge=MAX_TEXTS)] = 4096
    """Most texts of a model that are admitted and not yet answered."""
    max_waiting_images: Annotated[int, Field(ge=MAX_IMAGES)] = 256
    """Most images of a model that are admitted and not yet answered."""
    max_waiting_mib: Annotated[int, Field(ge=1)] = 256
    """Most MiB of a model's images, or of its texts, that are admitted and not yet answered; a larger call is taken
    alone."""
