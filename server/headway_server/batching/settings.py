"""How stateless models are batched."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from headway_server.field_rules import most_elements
from headway_server.runtime import Device

MAX_TEXTS = most_elements("EmbedTextRequest.texts")
"""Maximum texts of a call."""
MAX_IMAGES = most_elements("EmbedImageRequest.images")
"""Maximum images of a call."""
MAX_AUDIOS = most_elements("TranscribeSpeechRequest.audios")
"""Maximum audios of a call."""
MAX_ROWS = 2**16
"""Maximum rows of a call of tensors."""
MAX_GRID_PROMPTS = 1024
"""Maximum prompts of a call that run together: a grid of 32 by 32 points."""


_BATCH_TOKENS: Final[dict[Device, int]] = {"cpu": 512, "cuda": 4096}
_BATCH_IMAGES: Final[dict[Device, int]] = {"cpu": 16, "cuda": 32}
_BATCH_PROMPTS: Final[dict[Device, int]] = {"cpu": 4, "cuda": 64}
_DENOISING_ROWS: Final[dict[Device, int]] = {"cpu": 16, "cuda": 64}
_BATCH_ROWS: Final = 64
_BATCH_RUN_S: Final = 10e-3
"""Seconds that the rows of a batch of tensors would run one by one; together they take less."""
_CPU_BATCH_PIXELS: Final = 2 * 224 * 224
"""Maximum pixels of a batch of preprocessed images on the CPU; a batch of two may have more."""


class BatchingSettings(BaseModel):
    """Sizes of batches and queues."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum tokens of a batch of texts, including padding; a longer text runs alone. Left out: 512 on the CPU, whose
    caches fit the activations of a larger model only for small batches (docs/lanes.md), and 4096 on CUDA."""
    max_batch_images: Annotated[int, Field(ge=1)] | None = None
    """Maximum images of a batch. Left out: 32 on CUDA; on the CPU the number with the pixels of two preprocessed images
    of 224 x 224, at least 2 and at most 16."""
    max_waiting_texts: Annotated[int, Field(ge=MAX_TEXTS)] = 4096
    """Maximum admitted and unanswered texts of a model."""
    max_waiting_images: Annotated[int, Field(ge=MAX_IMAGES)] = 256
    """Maximum admitted and unanswered images of a model."""
    max_waiting_audios: Annotated[int, Field(ge=MAX_AUDIOS)] = 256
    """Maximum admitted and unanswered audios of a model without a decoder."""
    max_batch_prompts: Annotated[int, Field(ge=1)] | None = None
    """Maximum prompts of a batch of a segmentation model, over all images and callers. Left out: 4 on the CPU, whose
    caches fit few activations, and 64 on CUDA."""
    max_waiting_prompts: Annotated[int, Field(ge=MAX_GRID_PROMPTS)] = 4096
    """Maximum admitted and unanswered prompts of a segmentation model."""
    max_batch_rows: Annotated[int, Field(ge=1)] | None = None
    """Maximum rows of a batch of a model of tensors. Left out: 64 on CUDA; on the CPU as many as would run in 10 ms one
    by one, at least 2 and at most 64."""
    max_waiting_rows: Annotated[int, Field(ge=MAX_ROWS)] = 262_144
    """Maximum admitted and unanswered rows of a model of tensors."""
    max_denoising_rows: Annotated[int, Field(ge=2)] | None = None
    """Maximum rows of a denoising step of an image generation model; a guided image takes two. Left out: 16 on the CPU
    and 64 on CUDA."""
    max_waiting_mib: Annotated[int, Field(ge=1)] = 256
    """Maximum MiB of a model's admitted and unanswered inputs in decoded form: images and their
    pixels, texts and their tokens, phrases in all forms, vectors of labels, masks, latents, audio, tensors. A larger
    call is admitted when it is alone; one of several audios is refused."""

    @property
    def max_waiting_bytes(self) -> int:
        """`max_waiting_mib`, in bytes."""
        return self.max_waiting_mib * 2**20

    def batch_tokens(self, device: Device) -> int:
        """Returns the maximum tokens of a batch on a device."""
        return self.max_batch_tokens or _BATCH_TOKENS[device]

    def batch_images(self, device: Device, num_pixels: int) -> int:
        """Returns the maximum images of `num_pixels` pixels of a batch on a device."""
        if self.max_batch_images:
            return self.max_batch_images
        most = _BATCH_IMAGES[device]
        return most if device == "cuda" else max(2, min(most, _CPU_BATCH_PIXELS // num_pixels))

    def batch_rows(self, run_s: float | None) -> int:
        """Returns the maximum rows of a batch of tensors; one row runs `run_s` seconds on the CPU, None: on CUDA."""
        if self.max_batch_rows:
            return self.max_batch_rows
        return _BATCH_ROWS if run_s is None else max(2, min(_BATCH_ROWS, round(_BATCH_RUN_S / run_s)))

    def denoising_rows(self, device: Device) -> int:
        """Returns the maximum rows of a denoising step on a device."""
        return self.max_denoising_rows or _DENOISING_ROWS[device]

    def batch_prompts(self, device: Device) -> int:
        """Returns the maximum prompts of a batch on a device."""
        return self.max_batch_prompts or _BATCH_PROMPTS[device]
