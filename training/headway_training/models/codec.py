"""A neural audio codec: samples to codes of several books, and back.

SoundStream (Zeghidour et al. 2021) and EnCodec (Defossez et al. 2022).

B rows, N samples, F frames of N / hop samples, D width of a latent, K books, C codes of a book, P positions that a
convolution has seen before.

All convolutions are causal, and what the decoder's have seen is an input and an output: frames can be decoded as they
come. An upsampling by s is a causal convolution of two positions to s times the channels, which become s positions: a
transposed convolution of 2 s positions and stride s, without the state of its output.

Deviations from Zeghidour et al. (2021): no adversarial loss, no quantizer dropout, no weight normalisation; leaky
rectifiers (slope 0.1, as Kong et al. 2020, HiFi-GAN) in place of ELU, whose exponential ONNX Runtime computes by other
instructions at the end of a thread's share, so that a row's last bits would depend on its batch; strides and widths are
for 8 kHz.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.base import Model
from headway_training.models.configuration import Configuration

_DILATIONS = (1, 3)
_KERNEL = 7
"""Positions that the first and the last convolution read."""
_SLOPE = 0.1
"""Of the activation below 0."""
_FIRST_LOUDNESS = 0.03
"""Of what is heard before training, beside what the decoder's layers give: about that of speech."""
_DECAY = 0.95
"""Share of a code, and of the count of what it stands for, that a step leaves as it was."""
_LEAST_USAGE = 0.05
"""Frames of a batch, in the mean, that a code must stand for; one of fewer is put where a latent is."""
COMMITMENT = 0.25
"""Weight of the distance of latents from their codes (van den Oord et al. 2017, section 3.2)."""


def _activate(states: Tensor) -> Tensor:
    return F.leaky_relu(states, _SLOPE)


def _initialise(module: nn.Module) -> None:
    """Draws weights that keep the variance of what they read (He et al. 2015), so that latents follow the samples."""
    for part in module.modules():
        if isinstance(part, nn.Conv1d):
            assert part.bias is not None, "convolutions have one here"
            nn.init.kaiming_normal_(part.weight, a=_SLOPE, nonlinearity="leaky_relu")
            nn.init.zeros_(part.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecConfig(Configuration):
    """Shape of a codec.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    sampling_rate: int = 8000
    """Samples a second."""
    strides: str = "5-4-4-2"
    """Factors by which blocks make a sequence shorter, the first block's first; their product is the hop, the samples
    of a frame."""
    width: int = 16
    """Channels at the sampling rate; twice as many after each block."""
    d_latent: int = 64
    """D."""
    num_books: int = 4
    """K."""
    codebook_size: int = 512
    """C."""

    def __post_init__(self) -> None:
        self._check_integers("sampling_rate", "width", "d_latent", "num_books", "codebook_size")
        if not all(part.isdecimal() and int(part) > 0 for part in self.strides.split("-")):
            raise ValueError(f"strides must be numbers of at least 1 joined by hyphens, and is {self.strides!r}")
        if self.sampling_rate % self.hop_length:
            raise ValueError(
                f"sampling_rate must be a multiple of the strides' product ({self.hop_length}), and is "
                f"{self.sampling_rate}"
            )

    @property
    def factors(self) -> tuple[int, ...]:
        """The strides as numbers."""
        return tuple(int(part) for part in self.strides.split("-"))

    @property
    def hop_length(self) -> int:
        """Samples of a frame."""
        return prod(self.factors)

    @property
    def frame_rate(self) -> int:
        """Frames a second."""
        return self.sampling_rate // self.hop_length

    def codec(self) -> CodecConfig:
        """The codec's own fields, of a configuration that has more."""
        return CodecConfig(**{name: getattr(self, name) for name in CodecConfig.__dataclass_fields__})


class CausalConvolution(nn.Module):
    """A convolution over what a sequence has brought so far."""

    def __init__(self, inner: int, outer: int, kernel_size: int, *, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(inner, outer, kernel_size, stride=stride, dilation=dilation)
        self.past_shape = inner, (kernel_size - 1) * dilation + 1 - stride
        """Channels and positions of what it has to be given of the inputs before."""

    def forward(self, inputs: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, inner, T), the last P inputs before them or None: zeros -> (B, outer, T / stride), the next last P."""
        num_past = self.past_shape[1]
        seen = F.pad(inputs, (num_past, 0)) if past is None else torch.cat([past, inputs], dim=2)
        return self.convolution(seen), seen[:, :, seen.shape[2] - num_past :]


class ResidualUnit(nn.Module):
    """A dilated convolution and one of a single position, added to their input (Zeghidour et al. 2021, figure 3)."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilated = CausalConvolution(width, width, 3, dilation=dilation)
        self.mixed = nn.Conv1d(width, width, 1)

    def forward(self, states: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, width, T), past -> the same shape, the next past."""
        inner, present = self.dilated(_activate(states), past)
        return states + self.mixed(_activate(inner)), present


class Upsampling(nn.Module):
    """Makes `factor` positions of each."""

    def __init__(self, inner: int, outer: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.spread = CausalConvolution(inner, outer * factor, 2)

    def forward(self, states: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, inner, T), past -> (B, outer, T factor), the next past."""
        spread, present = self.spread(_activate(states), past)  # (B, outer factor, T)
        rows, channels, length = spread.shape
        parts = spread.reshape(rows, channels // self.factor, self.factor, length)
        return parts.transpose(2, 3).reshape(rows, channels // self.factor, length * self.factor), present


class Downsampling(nn.Module):
    """Makes one position of `factor`."""

    def __init__(self, inner: int, outer: int, factor: int) -> None:
        super().__init__()
        self.gather = CausalConvolution(inner, outer, 2 * factor, stride=factor)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(B, inner, T) -> (B, outer, T / factor), and what a next part would need."""
        gathered: tuple[Tensor, Tensor] = self.gather(_activate(states))
        return gathered


class CodecEncoder(nn.Module):
    """Samples to latents."""

    def __init__(self, configuration: CodecConfig) -> None:
        super().__init__()
        width = configuration.width
        layers: list[nn.Module] = [CausalConvolution(1, width, _KERNEL)]
        for factor in configuration.factors:
            layers += [*(ResidualUnit(width, dilation) for dilation in _DILATIONS)]
            layers += [Downsampling(width, 2 * width, factor)]
            width *= 2
        self.layers = nn.ModuleList(layers)
        self.output = CausalConvolution(width, configuration.d_latent, 3)

    def forward(self, samples: Tensor) -> Tensor:
        """Float (B, N) -> (B, D, F)."""
        states = samples.unsqueeze(1)
        for layer in self.layers:
            states, _ = layer(states)
        latents: Tensor = self.output(_activate(states))[0]
        return latents


class CodecDecoder(nn.Module):
    """Latents to samples, in one piece or frame by frame."""

    def __init__(self, configuration: CodecConfig) -> None:
        super().__init__()
        factors = configuration.factors
        width = configuration.width << len(factors)
        layers: list[nn.Module] = [CausalConvolution(configuration.d_latent, width, _KERNEL)]
        for factor in reversed(factors):
            layers += [Upsampling(width, width // 2, factor)]
            layers += [*(ResidualUnit(width // 2, dilation) for dilation in _DILATIONS)]
            width //= 2
        self.layers = nn.ModuleList(layers)
        self.output = CausalConvolution(width, 1, _KERNEL)
        self._shapes = [one.past_shape for one in self.modules() if isinstance(one, CausalConvolution)]
        self.state_size = sum(channels * length for channels, length in self._shapes)
        """Numbers that all its convolutions have to be given of what came before."""

    def forward(self, latents: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D, F), state (B, state_size), zeros at the beginning -> samples (B, F hop), the next state."""
        pasts = self._split(state)
        presents: list[Tensor] = []
        for layer in self.layers:
            latents, present = layer(latents, next(pasts))
            presents.append(present)
        samples, present = self.output(_activate(latents), next(pasts))
        presents.append(present)
        return samples.squeeze(1), torch.cat([one.flatten(1) for one in presents], dim=1)

    def _split(self, state: Tensor) -> Iterator[Tensor]:
        """(B, state_size) -> what each convolution has seen, (B, channels, P)."""
        sizes = [channels * length for channels, length in self._shapes]
        parts = torch.split(state, sizes, dim=1)
        return iter([part.reshape(-1, *shape) for part, shape in zip(parts, self._shapes, strict=True)])


class Quantizer(nn.Module):
    """Residual vector quantization: each book says what the books before lack (Zeghidour et al. 2021, III-C).

    A code is the moving average of the latents that it stood for (van den Oord et al. 2017, appendix A.1).
    """

    books: Tensor
    usage: Tensor
    sums: Tensor

    def __init__(self, configuration: CodecConfig) -> None:
        super().__init__()
        shape = configuration.num_books, configuration.codebook_size
        self.register_buffer("books", torch.randn(*shape, configuration.d_latent))  # (K, C, D)
        self.register_buffer("sums", torch.zeros(*shape, configuration.d_latent))
        self.register_buffer("usage", torch.zeros(*shape))

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Latents (B, D, F) -> the codes' latents, codes (B, F, K), and the loss of each row (B).

        Gradients of what is returned first go to the latents as they are. In training, codes that stand for nothing
        are put where latents of this batch are, all of them in the first step (Zeghidour et al. 2021, section III-C).
        """
        target = latents.transpose(1, 2)  # (B, F, D)
        residual, found = target, torch.zeros_like(target)
        codes: list[Tensor] = []
        loss = target.new_zeros(len(target))
        for number in range(len(self.books)):
            points = residual.detach()
            if self.training:
                self._revive(number, points)
            chosen = self._nearest(self.books[number], points)  # (B, F)
            part = F.embedding(chosen, self.books[number])  # (B, F, D)
            if self.training:
                self._follow(number, points, chosen)
            loss = loss + COMMITMENT * (part - residual).square().mean(dim=(1, 2))
            found = found + part
            residual = residual - part
            codes.append(chosen)
        return (target + (found - target).detach()).transpose(1, 2), torch.stack(codes, dim=2), loss

    def latents(self, codes: Tensor) -> Tensor:
        """int64 (B, F, K) -> (B, D, F)."""
        parts = [F.embedding(codes[:, :, number], book) for number, book in enumerate(self.books)]
        return torch.stack(parts).sum(dim=0).transpose(1, 2)

    @staticmethod
    def _nearest(book: Tensor, points: Tensor) -> Tensor:
        """(C, D), (B, F, D) -> the codes nearest to points, (B, F)."""
        return (book.square().sum(dim=1) - 2 * points @ book.T).argmin(dim=2)

    @torch.no_grad()
    def _revive(self, number: int, points: Tensor) -> None:
        """Puts codes that are hardly used where points (B, F, D), drawn at random, are."""
        dead = self.usage[number] < _LEAST_USAGE  # (C)
        drawn = points.flatten(0, 1)[torch.randint(points.shape[0] * points.shape[1], dead.shape, device=dead.device)]
        for kept in (self.books, self.sums):
            kept[number] = torch.where(dead[:, None], drawn, kept[number])
        self.usage[number] = torch.where(dead, 1.0, self.usage[number])

    @torch.no_grad()
    def _follow(self, number: int, points: Tensor, chosen: Tensor) -> None:
        """Moves codes towards the points (B, F, D) that they were chosen for, (B, F)."""
        flat, rows = points.flatten(0, 1), chosen.flatten()
        counts = torch.zeros_like(self.usage[number]).index_add_(0, rows, flat.new_ones(len(rows)))
        sums = torch.zeros_like(self.sums[number]).index_add_(0, rows, flat)
        self.usage[number] = _DECAY * self.usage[number] + (1 - _DECAY) * counts
        self.sums[number] = _DECAY * self.sums[number] + (1 - _DECAY) * sums
        self.books[number] = self.sums[number] / self.usage[number].clamp(min=1e-6)[:, None]


class Codec(Model):
    """Samples to codes and back."""

    def __init__(self, configuration: CodecConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.encoder = CodecEncoder(configuration)
        self.quantizer = Quantizer(configuration)
        self.decoder = CodecDecoder(configuration)
        _initialise(self.encoder)
        _initialise(self.decoder)
        with torch.no_grad():
            self.decoder.output.convolution.weight *= _FIRST_LOUDNESS

    def encode(self, samples: Tensor) -> Tensor:
        """Float (B, N), N a multiple of the hop -> codes int64 (B, F, K)."""
        codes: Tensor = self.quantizer(self.encoder(samples))[1]
        return codes

    def decode(self, codes: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes int64 (B, F, K), state (B, state_size) or None: the beginning -> samples (B, N), the next state."""
        latents = self.quantizer.latents(codes)
        if state is None:
            state = latents.new_zeros(len(codes), self.decoder.state_size)
        decoded: tuple[Tensor, Tensor] = self.decoder(latents, state)
        return decoded

    def forward(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Float (B, N) -> what is heard of its codes (B, N), and the quantizer's loss of each row (B)."""
        latents, _, loss = self.quantizer(self.encoder(samples))
        return self.decoder(latents, latents.new_zeros(len(latents), self.decoder.state_size))[0], loss
