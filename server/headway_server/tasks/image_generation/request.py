"""Validated parameters of an image generation call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headway_server.diffusion import DiffusionSampler
from headway_server.errors import InvalidInputError
from headway_server.field_rules import maximum, rules_of
from headway_server.serving.images import SentImage

MAX_GENERATED_IMAGES: Final = maximum("GenerateImageRequest.image_count")
"""Maximum images of a call."""
MAX_STEPS: Final = maximum("DiffusionParameters.step_count")
"""Maximum steps of an image."""
MIN_GUIDANCE: Final = rules_of("DiffusionParameters.guidance_scale").minimum or 0
MAX_GUIDANCE: Final = rules_of("DiffusionParameters.guidance_scale").maximum or 0
DEFAULT_STEPS: Final = int(rules_of("DiffusionParameters.step_count").default_number or 0)
DEFAULT_GUIDANCE: Final = rules_of("DiffusionParameters.guidance_scale").default_number or 0
DEFAULT_STRENGTH: Final = 0.8
"""Default strength of an edit without a mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGenerationRequest:
    """Parameters of a call.

    Raises:
        InvalidInputError: A value is out of its range; the message gives the limit and the value.
    """

    prompt: str = ""
    """A label of the model, or any text if it has none; empty: unconditional."""
    negative_prompt: str = ""
    """Prompt that guidance leads away from; empty: unconditional."""
    num_images: int = 1
    num_steps: int | None = None
    """None: the model's own, or `DEFAULT_STEPS`."""
    guidance_scale: float | None = None
    """None: the model's own, or `DEFAULT_GUIDANCE`."""
    sampler: DiffusionSampler | None = None
    """None: the model's own."""
    seed: int | None = None
    """Seed of the first image; further images take the next ones. None: random."""
    image: SentImage | None = None
    """Image to edit."""
    mask: SentImage | None = None
    """Mask whose white pixels are regenerated; None: all pixels."""
    strength: float | None = None
    """Share of the steps made from the image to edit; None: the default."""
    preview_step_count: int = 0
    """Steps between two previews of a stream; 0: no previews."""

    def __post_init__(self) -> None:
        _check("image_count", self.num_images, 1, MAX_GENERATED_IMAGES, "; send several calls")
        if self.num_steps is not None:
            _check("parameters.step_count", self.num_steps, 1, MAX_STEPS)
        if self.guidance_scale is not None:
            _check("parameters.guidance_scale", self.guidance_scale, MIN_GUIDANCE, MAX_GUIDANCE)
        _check("preview_step_count", self.preview_step_count, 0, MAX_STEPS)
        if self.strength is not None:
            if self.image is None:
                raise InvalidInputError(
                    "parameters.strength", "is set without an image to edit; send one, or leave it out"
                )
            if not 0 < self.strength <= 1:  # false for NaN too
                raise InvalidInputError("parameters.strength", f"is {self.strength:g}; it is above 0 and at most 1")
        if self.mask is not None and self.image is None:
            raise InvalidInputError(self.mask.field, "is set without an image; send the image that it belongs to")

    @property
    def share(self) -> float:
        """Share of the steps that is made, the last ones: all of them, or fewer for an edit."""
        return self.strength or (DEFAULT_STRENGTH if self.image is not None and self.mask is None else 1.0)


def _check(field: str, value: float, least: float, most: float, advice: str = "") -> None:
    if not least <= value <= most:  # false for NaN too
        shown = str(value) if isinstance(value, int) else f"{value:g}"  # a whole number may be too large for a float
        raise InvalidInputError(field, f"is {shown[:64]}; it goes from {least:g} to {most:g}{advice}")
