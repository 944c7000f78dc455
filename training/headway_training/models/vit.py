"""ViT: reads images by their patches, and classifies or embeds them (Dosovitskiy et al. 2021).

B rows, I image size, L tokens (patches, and the class token where there is one), D model width, C classes.

Deviations from the paper: `pooling` and `stem` offer another way each beside the paper's; the head is one linear map in
pretraining too; positions may also be sinusoidal or rotary, over the patches row by row; registers may come after the
patches (Darcet et al. 2024), and have positions of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.architectures import architecture
from headway_training.models.base import Model
from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.attention import full_attention
from headway_training.models.parts.embeddings import PositionedEmbedding
from headway_training.models.parts.initialisation import initialise_truncated_normal
from headway_training.models.parts.layer import Stack

ImagePooling = Literal["class_token", "mean"]
ImageStem = Literal["patches", "convolutions", "strided_convolutions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEncoderConfig(LayerConfig):
    """Shape of what turns an image into states.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    image_size: int
    """Height and width of an image, in pixels; a multiple of `patch_size`."""
    patch_size: int
    """Height and width of a patch, in pixels."""
    num_layers: int
    """Number of layers."""
    pooling: ImagePooling = "class_token"
    """What stands for the image: a token of its own (`class_token`, the paper's), or the mean of the patches
    (`mean`)."""
    stem: ImageStem = "patches"
    """What turns an image into tokens: one linear map of each patch (`patches`, the paper's), or for each halving of
    its sides a convolution and a pooling (`convolutions`) or a convolution at every second place
    (`strided_convolutions`, a quarter of the arithmetic); the patch size must then be 2, 4, 8 ..."""
    num_registers: int = 0
    """Learned tokens that belong to no patch and are read by none but the layers, which keep there what is about the
    whole image, and not in patches that show little (Darcet et al. 2024)."""

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)  # not super(): the decorator makes a new class with slots
        self._check_integers("image_size", "patch_size", "num_layers")
        self._check_integers("num_registers", minimum=0)
        self._check_choice("pooling", ImagePooling)
        self._check_choice("stem", ImageStem)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size ({self.patch_size}), and is {self.image_size}"
            )
        if self.stem != "patches":
            self._check_convolutions()

    @property
    def num_tokens(self) -> int:
        """Number of patches of an image, plus one if there is a class token; registers are not counted."""
        return self.grid_size**2 + (self.pooling == "class_token")

    @property
    def grid_size(self) -> int:
        """Patches along a side of an image."""
        return self.image_size // self.patch_size

    def _check_convolutions(self) -> None:
        if self.patch_size < 2 or self.patch_size & (self.patch_size - 1):
            raise ValueError(
                f"patch_size is {self.patch_size}; with stem {self.stem!r} it must be a power of two, 2 or more"
            )
        if self.d_model % (self.patch_size // 2):
            raise ValueError(
                f"d_model must be a multiple of patch_size / 2 ({self.patch_size // 2}) with stem {self.stem!r}, "
                f"and is {self.d_model}"
            )


class ImageEncoder(Model):
    """Turns an image into states: the part that models of images share, which call `initialise` when they are whole.

    Starts from a normal distribution truncated at two standard deviations: 0.02, and one over the square root of the
    numbers in a patch for the map of patches. The class token starts from zero, convolutions as `ConvolutionStem` says,
    registers as matrices do.
    """

    def __init__(self, configuration: ImageEncoderConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.patches = _make_patches(configuration)
        self.class_token = (
            nn.Parameter(torch.zeros(1, 1, configuration.d_model)) if configuration.pooling == "class_token" else None
        )
        num_registers = configuration.num_registers
        self.registers = nn.Parameter(torch.zeros(1, num_registers, configuration.d_model)) if num_registers else None
        self.embedding = PositionedEmbedding(configuration, configuration.num_tokens + num_registers)
        self.stack = Stack(configuration, configuration.num_layers)

    def hidden_states(self, pixel_values: Tensor, *, interpolate: bool = False) -> Tensor:
        """Computes the last layer's states.

        Args:
            pixel_values: float (B, 3, image_size, image_size), normalised.
            interpolate: True to take images of another size too, square and a multiple of `patch_size`: the learned
                positions of patches are interpolated.

        Returns:
            float (B, L, D); the class token, where there is one, is the first; registers are left out.

        Raises:
            ValueError: the images are of another size, or positions that are not learned are to be interpolated.
        """
        size = self.configuration.image_size
        height, width = pixel_values.shape[-2:]
        is_resized = interpolate and height == width and height != size and height % self.configuration.patch_size == 0
        if (height, width) != (size, size) and not is_resized:
            raise ValueError(f"images must be {size} x {size} pixels, and are {(height, width)}")
        tokens = self.patches(pixel_values).flatten(2).transpose(1, 2)  # (B, patches, D)
        if self.class_token is not None:
            tokens = torch.cat((self.class_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)  # (B, L, D)
        length = tokens.shape[1]
        if self.registers is not None:
            tokens = torch.cat((tokens, self.registers.expand(tokens.shape[0], -1, -1)), dim=1)
        if is_resized:
            positioned = self.embedding.add(tokens, self._positions_of(height // self.configuration.patch_size))
            attend = full_attention(self.kernel)
        else:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
            attend = self.embedding.attention(full_attention(self.kernel), position_ids)
            positioned = self.embedding(tokens, position_ids)
        hidden_states: Tensor = self.stack(positioned, attend)
        return hidden_states if self.registers is None else hidden_states[:, :length]

    def pooled(self, pixel_values: Tensor, *, interpolate: bool = False) -> Tensor:
        """Float (B, 3, image_size, image_size) -> (B, D), as `pooling` says; `interpolate` as `hidden_states`."""
        hidden_states = self.hidden_states(pixel_values, interpolate=interpolate)  # (B, L, D)
        return hidden_states.mean(dim=1) if self.class_token is None else hidden_states[:, 0]

    def _positions_of(self, grid_size: int) -> Tensor:
        """Position embeddings of an image of `grid_size` patches a side, (L and registers, D)."""
        positions = self.embedding.positions
        if not isinstance(positions, nn.Embedding):
            raise ValueError(f"positions are {self.configuration.positions!r}; interpolation needs 'learned'")
        own = self.configuration.grid_size
        parts = [int(self.class_token is not None), own * own, self.num_trailing_registers]
        before, patches, after = torch.split(positions.weight, parts)
        square = patches.transpose(0, 1).reshape(1, -1, own, own)  # (1, D, own, own)
        resized = F.interpolate(square, size=(grid_size, grid_size), mode="bicubic")
        return torch.cat((before, resized[0].flatten(1).transpose(0, 1), after))

    @property
    def num_trailing_registers(self) -> int:
        """Tokens after those of `hidden_states` that layers attend to, which stand for no patch."""
        return self.configuration.num_registers

    @property
    def pooling(self) -> str:
        """The image's embedding: the state of its `class_token`, or the `mean` of its patches' states."""
        return self.configuration.pooling

    def initialise(self) -> None:
        """Draws all weights."""
        initialise_truncated_normal(self)
        if self.registers is not None:
            nn.init.trunc_normal_(self.registers, std=0.02, a=-0.04, b=0.04)
        if isinstance(self.patches, ConvolutionStem):
            self.patches.initialise()
            return
        std = (3 * self.configuration.patch_size**2) ** -0.5
        nn.init.trunc_normal_(self.patches.weight, std=std, a=-2 * std, b=2 * std)
        assert self.patches.bias is not None
        nn.init.zeros_(self.patches.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig(ImageEncoderConfig):
    """Shape of a ViT.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    num_classes: int
    """Number of classes."""

    def __post_init__(self) -> None:
        ImageEncoderConfig.__post_init__(self)  # not super(): the decorator makes a new class with slots
        self._check_integers("num_classes")


@architecture("vit", ViTConfig, "image_classification")
class ViT(ImageEncoder):
    """Classifies images by the state that stands for them."""

    def __init__(self, configuration: ViTConfig) -> None:
        super().__init__(configuration)
        self.output = nn.Linear(configuration.d_model, configuration.num_classes)
        self.initialise()

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Float (B, 3, image_size, image_size) -> logits (B, C)."""
        return self.logits_and_embedding(pixel_values)[0]

    def logits_and_embedding(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the logits of `forward`, and the embedding that the head reads, (B, D)."""
        pooled = self.pooled(pixel_values)
        return self.output(pooled), pooled


@architecture("image_encoder", ImageEncoderConfig, "image_embedding")
class ImageEmbedder(ImageEncoder):
    """Embeds images by the state that stands for them."""

    def __init__(self, configuration: ImageEncoderConfig) -> None:
        super().__init__(configuration)
        self.initialise()

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Float (B, 3, image_size, image_size), normalised -> `embedding`, float (B, D)."""
        return {"embedding": self.pooled(pixel_values)}


def _make_patches(configuration: ImageEncoderConfig) -> nn.Conv2d | ConvolutionStem:
    if configuration.stem != "patches":
        strided = configuration.stem == "strided_convolutions"
        return ConvolutionStem(configuration.d_model, configuration.patch_size, strided=strided)
    return nn.Conv2d(3, configuration.d_model, configuration.patch_size, stride=configuration.patch_size)


class ConvolutionStem(nn.Module):
    """Halves an image's sides by convolutions until a pixel stands for a patch (Hassani et al. 2021, section 3.3).

    A stage is a convolution of 3 x 3, ReLU, and the maximum of 3 x 3 pixels at every second place. On small images
    convolutions learn what neighbouring pixels mean in fewer epochs than a map of patches.

    Args:
        d_model: channels of the last stage; each stage before it has half as many as the next.
        patch_size: pixels a side that a token stands for: 2 to the power of the number of stages.
        strided: the convolution is computed at every second place, and there is no maximum (Xiao et al. 2021).
    """

    def __init__(self, d_model: int, patch_size: int, *, strided: bool = False) -> None:
        super().__init__()
        num_stages = patch_size.bit_length() - 1
        widths = [3, *(d_model >> (num_stages - 1 - stage) for stage in range(num_stages))]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(width, following, kernel_size=3, stride=2 if strided else 1, padding=1)
            for width, following in pairwise(widths)
        )
        self.pool = nn.Identity() if strided else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Float (B, 3, I, I) -> (B, D, I / patch_size, I / patch_size)."""
        states = pixel_values
        if self.training:  # channels last in memory: 0.6 of the time on a CPU under bf16
            states = states.contiguous(memory_format=torch.channels_last)
            for convolution in self.convolutions:
                states = torch.relu(self.pool(convolution(states)))  # the same, of a quarter of the numbers
            return states
        for convolution in self.convolutions:
            states = self.pool(torch.relu(convolution(states)))  # ONNX Runtime makes one kernel of convolution and ReLU
        return states

    def initialise(self) -> None:
        """Draws weights for ReLU (He et al. 2015)."""
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv2d)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)
