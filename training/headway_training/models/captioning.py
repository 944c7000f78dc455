"""Captioner: says in words what an image shows (Vinyals et al. 2015; Xu et al. 2015), as a transformer.

B images, C captions of each, T tokens of a caption, S patches of an image, I image size, D decoder width, H heads,
K head width, V vocabulary.

The image encoder has the names and shapes of CLIP's image tower, so that a captioner can start from one. Deviation from
the papers: the decoder is that of a Transformer (Vaswani et al. 2017) in pre-norm order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from headway_training.models.architectures import architecture
from headway_training.models.base import AttentionKind
from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.embeddings import PositionedEmbedding, TokenEmbedding
from headway_training.models.parts.initialisation import initialise_truncated_normal, initialise_xavier
from headway_training.models.parts.layer import Stack
from headway_training.models.vit import ImageEncoder, ImageEncoderConfig, ImageStem
from headway_training.models.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionerConfig(LayerConfig):
    """Shape of an image encoder and of the decoder that reads it, whose layers the fields without `image_` describe.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    image_size: int
    """Height and width of an image, in pixels; a multiple of `patch_size`."""
    patch_size: int
    """Height and width of a patch, in pixels."""
    stem: ImageStem = "patches"
    """What turns an image into tokens, as in `ImageEncoderConfig`."""
    image_num_layers: int
    """Layers of the image encoder."""
    image_d_model: int
    """Width of the image encoder."""
    image_num_heads: int
    """Attention heads of the image encoder."""
    image_d_ff: int
    """Inner width of the image encoder's feed-forward networks."""
    image_dropout: float = 0.0
    """Dropout of the image encoder, as in `LayerConfig`."""
    image_num_registers: int = 0
    """Registers of the image encoder, as in `ImageEncoderConfig`."""
    vocabulary_size: int
    """Tokens of all languages together."""
    max_target_length: int
    """Most tokens of a caption, `bos` and the token of its language included."""
    num_layers: int
    """Layers of the decoder."""

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)  # not super(): the decorator makes a new class with slots
        self._check_integers("vocabulary_size", "max_target_length", "num_layers")
        try:
            self.image_tower()
        except ValueError as error:
            raise ValueError(f"image encoder: {error}") from error

    def image_tower(self) -> ImageEncoderConfig:
        """The image encoder's shape."""
        return ImageEncoderConfig(
            image_size=self.image_size,
            patch_size=self.patch_size,
            pooling="mean",
            stem=self.stem,
            num_layers=self.image_num_layers,
            d_model=self.image_d_model,
            num_heads=self.image_num_heads,
            d_ff=self.image_d_ff,
            dropout=self.image_dropout,
            num_registers=self.image_num_registers,
        )


@architecture("captioner", CaptionerConfig, "captioning")
class Captioner(Writer):
    """Predicts the next token of a caption from an image and the caption so far.

    The decoder starts as that of a `Transformer` does, the image encoder as a `ViT`'s. What the decoder reads in place
    of an image, where captions are learned without one, is a state of its own that starts from zero.
    """

    target_name = "a caption"

    def __init__(self, configuration: CaptionerConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.max_target_length = configuration.max_target_length
        width = configuration.d_model
        self.image_tower = ImageEncoder(configuration.image_tower())
        self.bridge = nn.Linear(configuration.image_d_model, width)
        self.nothing = nn.Parameter(torch.zeros(1, 1, width))
        self.tokens = TokenEmbedding(configuration.vocabulary_size, width)
        self.target_embedding = PositionedEmbedding(configuration, configuration.max_target_length, scaled=True)
        self.decoder = Stack(configuration, configuration.num_layers, cross=True)
        initialise_xavier(self, width)
        if isinstance(self.target_embedding.positions, nn.Embedding):
            initialise_truncated_normal(self.target_embedding.positions)
        self.image_tower.initialise()

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches that the decoder attends to."""
        side = self.configuration.image_size // self.configuration.patch_size
        return side, side

    def use_attention(self, kind: AttentionKind) -> Self:
        """Chooses the kernel of encoder and decoder, as `Model.use_attention` does."""
        self.image_tower.use_attention(kind)
        return super().use_attention(kind)

    def encode(self, pixel_values: Tensor) -> Tensor:
        """Reads images: float (B, 3, I, I), normalised -> the memory, float (B, S, D), patches row by row."""
        memory: Tensor = self.bridge(self.image_tower.hidden_states(pixel_values))
        return memory

    def forward(self, target_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        """Predicts, at every token of a caption, the one that follows it.

        Args:
            target_ids: int64 (B, C, T), padded on the right: captions of one image each C.
            pixel_values: float (B, 3, I, I), normalised; None: the captions are without an image.

        Returns:
            Logits, float (B, C, T, V).

        Raises:
            ValueError: a caption is longer than its limit, or the images are of another size.
        """
        rows, captions = target_ids.shape[:2]
        keys_values = [
            (key.repeat_interleave(captions, dim=0), value.repeat_interleave(captions, dim=0))
            for key, value in self.cross_keys_values(self.read(pixel_values, rows))
        ]
        hidden_states = self.target_states(target_ids.flatten(0, 1), keys_values)
        return torch.unflatten(self.logits(hidden_states), 0, (rows, captions))

    def read(self, pixel_values: Tensor | None, rows: int) -> Tensor:
        """What the decoder attends to in training: the memory of images, (B, S, D), or of none, (rows, 1, D)."""
        return self.nothing.expand(rows, -1, -1) if pixel_values is None else self.encode(pixel_values)
