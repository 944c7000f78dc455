"""CLIP: puts images and texts into one space by two towers (Radford et al. 2021).

B images and as many texts, I image size, T tokens, D width of the space.

Deviations from the paper: the text tower sees a whole text in both directions and its tokens' mean stands for it; the
pairwise sigmoid loss is offered beside the softmax (Zhai et al. 2023); pairs of one subject do not repel each other
(Yang et al. 2022, section 3.1), as several drawings and names of one thing come in one batch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.architectures import architecture
from headway_training.models.base import AttentionKind, Model
from headway_training.models.configuration import Configuration
from headway_training.models.encoder import TextEncoder, TextEncoderConfig, masked_mean
from headway_training.models.parts.initialisation import initialise_truncated_normal
from headway_training.models.vit import ImageEncoder, ImageEncoderConfig, ImagePooling, ImageStem

ContrastiveLoss = Literal["softmax", "sigmoid"]
MAX_LOGIT_SCALE = 100.0
"""Largest factor of the similarities, as in the paper's section 2.5."""
_START: dict[ContrastiveLoss, tuple[float, float]] = {"softmax": (1 / 0.07, 0.0), "sigmoid": (10.0, -10.0)}
"""Scale and bias that training begins with, of the papers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CLIPConfig(Configuration):
    """Shape of the two towers and of their space.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    d_space: int
    """Width of the space."""
    loss: ContrastiveLoss = "softmax"
    """What a pair is compared with: all other texts of its image and images of its text (`softmax`), or each by itself
    (`sigmoid`)."""
    image_size: int
    """Height and width of an image, in pixels; a multiple of `patch_size`."""
    patch_size: int
    """Height and width of a patch, in pixels."""
    image_pooling: ImagePooling = "mean"
    """What stands for an image: a token of its own (`class_token`), or the mean of the patches (`mean`)."""
    stem: ImageStem = "patches"
    """What turns an image into tokens, as in `ImageEncoderConfig`."""
    image_num_layers: int
    """Layers of the image tower."""
    image_d_model: int
    """Width of the image tower."""
    image_num_heads: int
    """Attention heads of the image tower."""
    image_d_ff: int
    """Inner width of the image tower's feed-forward networks."""
    image_dropout: float = 0.0
    """Dropout of the image tower, as in `LayerConfig`."""
    image_num_registers: int = 0
    """Registers of the image tower, as in `ImageEncoderConfig`."""
    vocabulary_size: int
    """Tokens the text tower knows."""
    max_length: int
    """Most tokens of a text."""
    text_num_layers: int
    """Layers of the text tower."""
    text_d_model: int
    """Width of the text tower."""
    text_num_heads: int
    """Attention heads of the text tower."""
    text_d_ff: int
    """Inner width of the text tower's feed-forward networks."""
    text_dropout: float = 0.0
    """Dropout of the text tower, as in `LayerConfig`."""

    def __post_init__(self) -> None:
        self._check_integers("d_space")
        self._check_choice("loss", ContrastiveLoss)
        for side, tower in (("image", self.image_tower), ("text", self.text_tower)):
            try:
                tower()
            except ValueError as error:
                raise ValueError(f"{side} tower: {error}") from error

    def image_tower(self) -> ImageEncoderConfig:
        """The image tower's shape."""
        return ImageEncoderConfig(
            image_size=self.image_size,
            patch_size=self.patch_size,
            pooling=self.image_pooling,
            stem=self.stem,
            num_layers=self.image_num_layers,
            d_model=self.image_d_model,
            num_heads=self.image_num_heads,
            d_ff=self.image_d_ff,
            dropout=self.image_dropout,
            num_registers=self.image_num_registers,
        )

    def text_tower(self) -> TextEncoderConfig:
        """The text tower's shape."""
        return TextEncoderConfig(
            vocabulary_size=self.vocabulary_size,
            max_length=self.max_length,
            num_layers=self.text_num_layers,
            d_model=self.text_d_model,
            num_heads=self.text_num_heads,
            d_ff=self.text_d_ff,
            dropout=self.text_dropout,
        )


class ImageTower(ImageEncoder):
    """Embeds images."""

    def __init__(self, configuration: ImageEncoderConfig, d_space: int) -> None:
        super().__init__(configuration)
        self.initialise()
        self.projection = _make_projection(configuration.d_model, d_space)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Float (B, 3, I, I), normalised -> `embedding`, float (B, D) of length one."""
        return {"embedding": F.normalize(self.projection(self.pooled(pixel_values)).float(), dim=-1)}


class TextTower(TextEncoder):
    """Embeds texts."""

    pooling = "mean"
    """What stands for a text: the mean of its tokens' states."""

    def __init__(self, configuration: TextEncoderConfig, d_space: int) -> None:
        super().__init__(configuration)
        self.initialise()
        self.projection = _make_projection(configuration.d_model, d_space)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """int64 (B, T), and int64 (B, T), 1 at tokens and 0 at padding -> `embedding`, float (B, D) of length one."""
        pooled = masked_mean(self.hidden_states(input_ids, attention_mask), attention_mask)  # (B, text width)
        return {"embedding": F.normalize(self.projection(pooled).float(), dim=-1)}


@architecture("clip", CLIPConfig, "image_text_embedding")
class CLIP(Model):
    """Embeds images and texts so that what belongs together is near.

    Starts as its towers do; their projections from a normal distribution, truncated at two standard deviations of one
    over the square root of their input's width.
    """

    def __init__(self, configuration: CLIPConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.max_length = configuration.max_length
        self.image_tower = ImageTower(configuration.image_tower(), configuration.d_space)
        self.text_tower = TextTower(configuration.text_tower(), configuration.d_space)
        scale, bias = _START[configuration.loss]
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.logit_bias = nn.Parameter(torch.tensor(bias)) if configuration.loss == "sigmoid" else None

    def use_attention(self, kind: AttentionKind) -> Self:
        """Chooses the kernel of both towers, as `Model.use_attention` does."""
        self.image_tower.use_attention(kind)
        self.text_tower.use_attention(kind)
        return super().use_attention(kind)

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Float (B, 3, I, I), normalised -> (B, D) of length one."""
        embedding: Tensor = self.image_tower(pixel_values)["embedding"]
        return embedding

    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 (B, T), and int64 (B, T), 1 at tokens and 0 at padding -> (B, D) of length one."""
        embedding: Tensor = self.text_tower(input_ids, attention_mask)["embedding"]
        return embedding

    @property
    def scale(self) -> Tensor:
        """Factor of the cosines, a scalar; it is learned."""
        return self.logit_scale.exp().clamp(max=MAX_LOGIT_SCALE)

    def logits(self, images: Tensor, texts: Tensor) -> Tensor:
        """Embeddings (N, D) and (M, D) -> (N, M): cosines times the learned scale, plus the bias of `sigmoid`."""
        logits = images @ texts.transpose(0, 1) * self.scale
        return logits if self.logit_bias is None else logits + self.logit_bias

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """B images and B texts -> logits (B, B), an image in each row; the arguments are those of `embed_...`."""
        return self.logits(self.embed_images(pixel_values), self.embed_texts(input_ids, attention_mask))


def _make_projection(d_model: int, d_space: int) -> nn.Linear:
    projection = nn.Linear(d_model, d_space, bias=False)
    initialise_truncated_normal(projection, std=d_model**-0.5)
    return projection


def contrastive_loss(
    logits: Tensor, subjects: Tensor, loss: ContrastiveLoss, *, label_smoothing: float = 0.0
) -> Tensor:
    """The loss of a batch of pairs, summed over its rows.

    `softmax` is the mean of the cross-entropies of rows and of columns, whose target is shared evenly by the pairs of
    one subject. `sigmoid` is the binary cross-entropy of every image with every text.

    Args:
        logits: float (B, B), an image in each row and a text in each column.
        subjects: int64 (B,): what a pair shows; an image and a text of one subject belong together.
        loss: which.
        label_smoothing: share of a target that is spread over all texts or images; `softmax` only.
    """
    together = subjects[:, None] == subjects[None, :]  # (B, B), symmetric
    if loss == "sigmoid":
        return -F.logsigmoid(torch.where(together, logits, -logits)).sum()
    shares = together / together.sum(dim=1, keepdim=True)
    targets = shares * (1 - label_smoothing) + label_smoothing / len(subjects)
    by_row = F.cross_entropy(logits, targets, reduction="sum")
    by_column = F.cross_entropy(logits.transpose(0, 1), targets, reduction="sum")
    return (by_row + by_column) / 2
