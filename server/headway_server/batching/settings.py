"""How stateless models are batched."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TEXTS = 256
"""Most texts of a call."""
MAX_IMAGES = 64
"""Most images of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingSettings:
    """Sizes of batches and queues."""

    max_batch_tokens: int = 2048
    """Most tokens of a batch of texts, padding included; a longer text runs alone."""
    max_batch_images: int = 8
    """Most images of a batch."""
    max_waiting_texts: int = 4096
    """Most texts of a model that are admitted and not yet answered."""
    max_waiting_images: int = 256
    """Most images of a model that are admitted and not yet answered."""

    def __post_init__(self) -> None:
        minima = {
            "max_batch_tokens": 1,
            "max_batch_images": 1,
            "max_waiting_texts": MAX_TEXTS,
            "max_waiting_images": MAX_IMAGES,
        }
        for name, minimum in minima.items():
            if (value := getattr(self, name)) < minimum:
                raise ValueError(f"{name} is {value}, the least is {minimum}")
