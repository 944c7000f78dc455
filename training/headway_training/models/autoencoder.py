"""A variational autoencoder: images to small latents, and back (Kingma and Welling 2014; Rombach et al. 2022, 3.1).

B rows, I image size, C channels of a latent, S side of a latent: the image size halved several times.

Deviations from Rombach et al. (2022): no attention in the lowest resolution, one residual block a resolution, and no
adversarial or perceptual loss, so that fine texture is smoothed. A latent is scaled channel by channel, by the mean and
deviation of all latents of the validation images.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.architectures import architecture
from headway_training.models.base import Model
from headway_training.models.configuration import Configuration

_NUM_GROUPS = 8
_MOST_LOG_VARIANCE = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoencoderConfig(Configuration):
    """Shape of an autoencoder of images.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    image_size: int
    """Height and width of an image, in pixels; a multiple of 2 to the power of `num_halvings`."""
    num_halvings: int = 2
    """Times that the sides of an image are halved on the way to its latent."""
    d_latent: int = 4
    """Channels of a latent."""
    width: int = 16
    """Channels at the image's own resolution, a multiple of 8; twice as many after each halving."""

    def __post_init__(self) -> None:
        self._check_integers("image_size", "num_halvings", "d_latent", "width")
        if self.image_size % (1 << self.num_halvings):
            raise ValueError(
                f"image_size must be a multiple of {1 << self.num_halvings} (2 to the power of num_halvings, "
                f"{self.num_halvings}), and is {self.image_size}"
            )
        if self.width % _NUM_GROUPS:
            raise ValueError(f"width must be a multiple of {_NUM_GROUPS}, and is {self.width}")

    @property
    def latent_size(self) -> int:
        """Height and width of a latent."""
        return self.image_size >> self.num_halvings

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a latent."""
        return self.d_latent, self.latent_size, self.latent_size

    @property
    def widths(self) -> list[int]:
        """Channels at each resolution, the image's first."""
        return [self.width << halving for halving in range(self.num_halvings + 1)]


class ResidualBlock(nn.Module):
    """Two convolutions, each after a group normalisation (Wu and He 2018) and SiLU, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(_NUM_GROUPS, width) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, kernel_size=3, padding=1) for _ in range(2))
        nn.init.zeros_(self.convolutions[1].weight)  # type: ignore[arg-type]  # a block starts as the identity

    def forward(self, states: Tensor) -> Tensor:
        """(B, width, H, W) -> the same shape."""
        inner = states
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            inner = convolution(F.silu(norm(inner)))
        return states + inner


class LatentEncoder(nn.Module):
    """Images to the mean and log-variance of their latents."""

    def __init__(self, configuration: AutoencoderConfig) -> None:
        super().__init__()
        widths = configuration.widths
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], kernel_size=3, padding=1)]
        for width, following in pairwise(widths):
            layers += [ResidualBlock(width), nn.Conv2d(width, following, kernel_size=3, stride=2, padding=1)]
        self.layers = nn.Sequential(*layers, ResidualBlock(widths[-1]))
        self.norm = nn.GroupNorm(_NUM_GROUPS, widths[-1])
        self.output = nn.Conv2d(widths[-1], 2 * configuration.d_latent, kernel_size=1)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Float (B, 3, I, I), normalised -> mean and log-variance, each (B, C, S, S)."""
        mean, log_variance = self.output(F.silu(self.norm(self.layers(pixel_values)))).chunk(2, dim=1)
        return mean, log_variance.clamp(-_MOST_LOG_VARIANCE, _MOST_LOG_VARIANCE)


class LatentDecoder(nn.Module):
    """Latents to images."""

    def __init__(self, configuration: AutoencoderConfig) -> None:
        super().__init__()
        widths = configuration.widths[::-1]
        layers: list[nn.Module] = [
            nn.Conv2d(configuration.d_latent, widths[0], kernel_size=3, padding=1),
            ResidualBlock(widths[0]),
        ]
        for width, following in pairwise(widths):
            layers += [
                nn.Upsample(scale_factor=2, mode="nearest"),
                nn.Conv2d(width, following, kernel_size=3, padding=1),
                ResidualBlock(following),
            ]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.GroupNorm(_NUM_GROUPS, widths[-1])
        self.output = nn.Conv2d(widths[-1], 3, kernel_size=3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """(B, C, S, S) -> (B, 3, I, I)."""
        images: Tensor = self.output(F.silu(self.norm(self.layers(latents))))
        return images


@architecture("autoencoder", AutoencoderConfig, "autoencoding")
class Autoencoder(Model):
    """Images to latents of about zero mean and unit variance, and back."""

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, configuration: AutoencoderConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.encoder = LatentEncoder(configuration)
        self.decoder = LatentDecoder(configuration)
        self.register_buffer("latent_mean", torch.zeros(configuration.d_latent, 1, 1))
        self.register_buffer("latent_std", torch.ones(configuration.d_latent, 1, 1))

    def encode(self, pixel_values: Tensor) -> Tensor:
        """The means of latents, scaled: float (B, 3, I, I), normalised -> (B, C, S, S)."""
        latents: Tensor = (self.encoder(pixel_values)[0] - self.latent_mean) / self.latent_std
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        """Images of scaled latents, as RGB values of 0 to 1 where the model is sure: (B, C, S, S) -> (B, 3, I, I)."""
        images: Tensor = self.decoder(latents * self.latent_std + self.latent_mean)
        return images

    def forward(self, pixel_values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sends images to latents and back (Kingma and Welling 2014, section 2.4).

        Args:
            pixel_values: float (B, 3, I, I), normalised.
            noise: float (B, C, S, S), standard normal.

        Returns:
            RGB values of 0 to 1, (B, 3, I, I), and the divergence of each latent from the standard normal in nats a
            number, (B,) (appendix B).
        """
        mean, log_variance = self.encoder(pixel_values)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean(dim=(1, 2, 3))
        return self.decoder(mean + (0.5 * log_variance).exp() * noise), divergence

    @torch.no_grad()
    def scale_latents(self, means: Tensor) -> None:
        """Sets what latents are scaled by, from the means of many latents (N, C, S, S) as the encoder gives them."""
        self.latent_mean.copy_(means.mean(dim=(0, 2, 3))[:, None, None])
        self.latent_std.copy_(means.std(dim=(0, 2, 3)).clamp(min=1e-3)[:, None, None])
