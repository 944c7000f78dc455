"""Latent diffusion (Rombach et al. 2022) with a diffusion transformer (DiT, Peebles and Xie 2023).

B rows, C channels and S side of a latent, P patch size, L patches of a latent, D model width, N classes, T tokens of a
text.

It draws what a class says, which is added to the time, or what a text says: then each layer attends to the states of
the text's tokens between its self-attention and its feed-forward network (Chen et al. 2023, PixArt-alpha, section 2.3).

A latent x and noise e are mixed along an angle: x(t) = cos(pi t / 2) x + sin(pi t / 2) e, with t from 0, the image, to
1, the noise. The model predicts the velocity v = cos(pi t / 2) e - sin(pi t / 2) x, which is dx(t) / d(angle). This is
v-prediction (Salimans and Ho 2022, section 4 and appendix D) and at the same time flow matching along the trigonometric
path (Albergo and Vanden-Eijnden 2023, section 3.2; Ma et al. 2024, GVP).

Deviations from Peebles and Xie (2023): positions are learned; the variance is not predicted; a patch of one cell of the
latent may be a token. Deviations from Chen et al. (2023): the text encoder is small and trained with the denoiser, and
each layer has a modulation of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.architectures import architecture
from headway_training.models.autoencoder import Autoencoder, AutoencoderConfig
from headway_training.models.base import AttentionKind, Model
from headway_training.models.configuration import LayerConfig
from headway_training.models.encoder import TextEncoder, TextEncoderConfig
from headway_training.models.parts.attention import Attend, AttendCross, cross_attention, full_attention
from headway_training.models.parts.initialisation import initialise_truncated_normal
from headway_training.models.parts.layer import CrossAttention, FeedForward, SelfAttention

_TIMESTEP_WIDTH = 256
_TIMESTEP_SCALE = 1000.0
_LONGEST_PERIOD = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDiffusionConfig(AutoencoderConfig):
    """Shape of an autoencoder and of the diffusion transformer on its latents.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    patch_size: int = 1
    """Height and width of a patch, in cells of the latent."""
    num_layers: int
    """Layers of the transformer."""
    d_model: int
    """Width of the transformer."""
    num_heads: int
    """Attention heads."""
    d_ff: int
    """Inner width of the feed-forward networks."""
    num_classes: int = 0
    """Classes that images are drawn of; the class of this number stands for none of them. 0: texts in their place."""
    vocabulary_size: int = 0
    """Tokens of the texts that images are drawn of; 0: classes in their place."""
    max_length: int = 0
    """Most tokens of a text, special tokens included."""
    text_num_layers: int = 0
    """Layers of the text encoder, whose widths and heads are the transformer's."""
    text_dropout: float = 0.0
    """Dropout of the text encoder, as in `LayerConfig`."""

    def __post_init__(self) -> None:
        AutoencoderConfig.__post_init__(self)  # not super(): the decorator makes a new class with slots
        self._check_integers("patch_size", "num_layers")
        self._check_integers("num_classes", "vocabulary_size", minimum=0)
        if bool(self.num_classes) == bool(self.vocabulary_size):
            raise ValueError(
                f"images are drawn of classes or of texts: one of num_classes ({self.num_classes}) and "
                f"vocabulary_size ({self.vocabulary_size}) must be 0, and the other not"
            )
        self.layer()
        if self.vocabulary_size:
            self.text_encoder()
        if self.latent_size % self.patch_size:
            raise ValueError(
                f"patch_size must be a divisor of the latent's side ({self.latent_size}), and is {self.patch_size}"
            )

    def layer(self) -> LayerConfig:
        """The shape of the transformer's layers."""
        return LayerConfig(
            d_model=self.d_model, num_heads=self.num_heads, d_ff=self.d_ff, activation="gelu_tanh", positions="none"
        )

    def text_encoder(self) -> TextEncoderConfig:
        """The shape of what reads the texts."""
        return TextEncoderConfig(
            vocabulary_size=self.vocabulary_size,
            max_length=self.max_length,
            num_layers=self.text_num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            dropout=self.text_dropout,
        )


class TimestepEmbedding(nn.Module):
    """Times as sines and cosines of many periods, then two linear maps (Peebles and Xie 2023, section 3.2)."""

    frequencies: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__()
        half = _TIMESTEP_WIDTH // 2
        exponents = torch.arange(half, dtype=torch.float32) / half
        self.register_buffer("frequencies", _TIMESTEP_SCALE * _LONGEST_PERIOD**-exponents, persistent=False)
        self.maps = nn.Sequential(nn.Linear(_TIMESTEP_WIDTH, d_model), nn.SiLU(), nn.Linear(d_model, d_model))

    def forward(self, timestep: Tensor) -> Tensor:
        """Float (B,), 0 to 1 -> (B, D)."""
        angles = timestep.float()[:, None] * self.frequencies.float()  # (B, 128)
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
        embedded: Tensor = self.maps(waves.to(self.maps[0].weight.dtype))  # type: ignore[arg-type]
        return embedded


class DiffusionTextEncoder(TextEncoder):
    """Turns a text into the states that a denoiser attends to."""

    def __init__(self, configuration: TextEncoderConfig) -> None:
        super().__init__(configuration)
        self.initialise()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 (B, T), and int64 (B, T), 1 at tokens and 0 at padding -> (B, T, D)."""
        return self.hidden_states(input_ids, attention_mask)


class DiffusionLayer(nn.Module):
    """Self-attention and a feed-forward network, shifted, scaled and gated by the condition (adaLN-Zero).

    The gates start at 0, so a layer starts as the identity (Peebles and Xie 2023, section 3.2). Of a model that reads
    texts, attention to the text lies between the two, whose output starts at 0 too (Chen et al. 2023, section 2.3).
    """

    def __init__(self, configuration: LayerConfig, number: int, *, reads_text: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(configuration.d_model, eps=1e-6, elementwise_affine=False)
        self.attention = SelfAttention(configuration, number)
        self.cross_attention = CrossAttention(configuration, number) if reads_text else None
        self.feed_forward = FeedForward(configuration)
        self.modulation = nn.Linear(configuration.d_model, 6 * configuration.d_model)

    def forward(
        self, states: Tensor, condition: Tensor, attend: Attend, attend_cross: AttendCross | None = None
    ) -> Tensor:
        """(B, L, D), (B, 1, D) -> (B, L, D); a layer that reads texts needs `attend_cross`."""
        shift, scale, gate, shift_inner, scale_inner, gate_inner = self.modulation(condition).chunk(6, dim=-1)
        states = states + gate * self.attention(self.norm(states) * (1 + scale) + shift, attend)
        if self.cross_attention is not None:
            assert attend_cross is not None, "a layer that reads texts needs attend_cross"
            states = states + self.cross_attention(states, attend_cross)
        result: Tensor = states + gate_inner * self.feed_forward(self.norm(states) * (1 + scale_inner) + shift_inner)
        return result


class Denoiser(Model):
    """The diffusion transformer: predicts the velocity of noisy latents."""

    def __init__(self, configuration: LatentDiffusionConfig) -> None:
        super().__init__()
        self.configuration = configuration
        layer = configuration.layer()
        width, numbers = configuration.d_model, configuration.d_latent * configuration.patch_size**2
        num_patches = (configuration.latent_size // configuration.patch_size) ** 2
        self.patches = nn.Linear(numbers, width)
        self.positions = nn.Parameter(torch.zeros(num_patches, width))
        self.timestep = TimestepEmbedding(width)
        reads_text = configuration.vocabulary_size > 0
        self.classes = None if reads_text else nn.Embedding(configuration.num_classes + 1, width)
        self.layers = nn.ModuleList(
            DiffusionLayer(layer, number, reads_text=reads_text) for number in range(configuration.num_layers)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, numbers)
        initialise_truncated_normal(self)
        nn.init.trunc_normal_(self.positions, std=0.02, a=-0.04, b=0.04)
        zeroed = [*(one.modulation for one in self.layers), self.modulation, self.output]
        zeroed += [one.output for one in self._cross_attentions()]
        for module in zeroed:
            assert isinstance(module, nn.Linear)
            nn.init.zeros_(module.weight)

    def forward(self, latent: Tensor, timestep: Tensor, what: Tensor, text_mask: Tensor | None = None) -> Tensor:
        """Predicts velocities; each row has a time, and a class or a text, of its own.

        Args:
            latent: float (B, C, S, S), x(t).
            timestep: float (B,), t, 0 to 1.
            what: int64 (B,), the class, 0 to N; N stands for no class. Or float (B, T, D), the states of a text.
            text_mask: int64 (B, T), 1 at tokens and 0 at padding; None for classes.

        Returns:
            float (B, C, S, S).
        """
        # An axis of one token, so that all products are of (B, tokens, width).
        embedded = self.timestep(timestep)
        if self.classes is not None:
            embedded = embedded + self.classes(what)
        condition = F.silu(embedded)[:, None]  # (B, 1, D)
        states = self.patches(self._cut(latent)) + self.positions  # (B, L, D)
        attend_cross: AttendCross | None = None
        if text_mask is not None:
            keys_values = [one.keys_values(what) for one in self._cross_attentions()]
            attend_cross = cross_attention(keys_values, text_mask, self.kernel)
        attend = full_attention(self.kernel)
        for layer in self.layers:
            states = layer(states, condition, attend, attend_cross)
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        return self._join(self.output(self.norm(states) * (1 + scale) + shift))

    def _cross_attentions(self) -> list[CrossAttention]:
        """Of each layer; none of a model of classes."""
        return [one for layer in self.layers if isinstance(one := layer.cross_attention, CrossAttention)]

    def _cut(self, latent: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, L, C P P)."""
        shape, size = self.configuration, self.configuration.patch_size
        grid = shape.latent_size // size
        apart = latent.reshape(-1, shape.d_latent, grid, size, grid, size)
        return apart.permute(0, 2, 4, 1, 3, 5).reshape(-1, grid * grid, shape.d_latent * size * size)

    def _join(self, patches: Tensor) -> Tensor:
        """(B, L, C P P) -> (B, C, S, S)."""
        shape, size = self.configuration, self.configuration.patch_size
        grid = shape.latent_size // size
        apart = patches.reshape(-1, grid, grid, shape.d_latent, size, size)
        return apart.permute(0, 3, 1, 4, 2, 5).reshape(-1, *shape.latent_shape)


@architecture("latent_diffusion", LatentDiffusionConfig, "image_generation")
class LatentDiffusion(Autoencoder):
    """An autoencoder, whose weights an autoencoder's checkpoint gives, and a denoiser of its latents."""

    configuration: LatentDiffusionConfig

    def __init__(self, configuration: LatentDiffusionConfig) -> None:
        super().__init__(configuration)
        self.denoiser = Denoiser(configuration)
        self.text_encoder = (
            DiffusionTextEncoder(configuration.text_encoder()) if configuration.vocabulary_size else None
        )
        """None of a model that draws classes."""

    def use_attention(self, kind: AttentionKind) -> Self:
        """Chooses the kernel of denoiser and text encoder, as `Model.use_attention` does."""
        self.denoiser.use_attention(kind)
        if self.text_encoder is not None:
            self.text_encoder.use_attention(kind)
        return super().use_attention(kind)


def mix(latents: Tensor, noise: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
    """x(t) and its velocity, as the head of this module has them: (B, C, S, S) twice, (B,) -> twice (B, C, S, S)."""
    angle = timestep[:, None, None, None] * (math.pi / 2)
    cos, sin = angle.cos(), angle.sin()
    return cos * latents + sin * noise, cos * noise - sin * latents
