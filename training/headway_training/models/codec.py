"""An audio codec: frames of samples to a few codes each, and back.

B rows, N samples, F frames, D width of a latent, W width of the layers, K books, C codes of a book, N = F hop.

A latent is residual vector quantized (Zeghidour et al. 2021, arXiv 2107.03312, section III-C). Encoder and decoder work
at the rate of the frames (as in Siuzdak 2023, arXiv 2306.00814): the encoder reads the logarithms of magnitude spectra,
the decoder's last layer makes two hops of samples for each frame, which are faded in and out and overlap by one hop.
Both have blocks of a convolution of each channel by itself and two linear maps (Liu et al. 2022, ConvNeXt).
Convolutions at the rate of the samples, as in Zeghidour et al., were tried before and learned far more slowly
(docs/experiments/voices.md).

The decoder is causal, and what its convolutions have seen, with the hop that overlaps, is an input and an output:
frames can be decoded as they come. The encoder reads one hop ahead, and its convolutions look to both sides.

Deviations from these papers: no adversarial loss, no quantizer dropout; latents have unit root mean square, so that
their scale cannot shrink to please the quantizer; the last layer makes samples and no Fourier coefficients; leaky
rectifiers (slope 0.1) in place of GELU, whose exponential ONNX Runtime computes by other instructions at the end of a
thread's share, so that a row's last bits would depend on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.base import Model
from headway_training.models.configuration import Configuration

_KERNEL = 7
"""Frames that a convolution reads."""
_WIDENING = 3
"""Width between a block's two linear maps, in widths of the block."""
_SLOPE = 0.1
"""Of the activation below 0."""
_FIRST_SCALE = 0.5
"""Of what a block adds, before training."""
_FIRST_LOUDNESS = 0.002
"""Deviation of the weights that make samples, before training."""
_LEAST_MAGNITUDE = 1e-3
"""Added to magnitudes before their logarithm is taken: 20 dB above the noise of 16 bits."""
_DECAY = 0.95
"""Share of a code, and of the count of what it stands for, that a step leaves as it was."""
_LEAST_USAGE = 0.05
"""Frames of a batch, in the mean, that a code must stand for; one of fewer is put where a latent is."""
COMMITMENT = 0.25
"""Weight of the distance of latents from their codes (van den Oord et al. 2017, section 3.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecConfig(Configuration):
    """Shape of a codec.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    sampling_rate: int = 8000
    """Samples a second; a multiple of `hop_length`."""
    hop_length: int = 160
    """Samples of a frame."""
    width: int = 256
    """W."""
    num_encoder_layers: int = 3
    """Blocks of the encoder."""
    num_decoder_layers: int = 4
    """Blocks of the decoder."""
    d_latent: int = 64
    """D."""
    num_books: int = 4
    """K."""
    codebook_size: int = 512
    """C."""

    def __post_init__(self) -> None:
        self._check_integers("sampling_rate", "hop_length", "width", "num_encoder_layers", "num_decoder_layers")
        self._check_integers("d_latent", "num_books", "codebook_size")
        if self.sampling_rate % self.hop_length:
            raise ValueError(
                f"sampling_rate must be a multiple of hop_length ({self.hop_length}), and is {self.sampling_rate}"
            )

    @property
    def frame_rate(self) -> int:
        """Frames a second."""
        return self.sampling_rate // self.hop_length

    def codec(self) -> CodecConfig:
        """The codec's own fields, of a configuration that has more."""
        return CodecConfig(**{name: getattr(self, name) for name in CodecConfig.__dataclass_fields__})


class CodecBlock(nn.Module):
    """A convolution of each channel by itself, and two linear maps, added to the input.

    Args:
        width: W.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, _KERNEL, groups=width)
        self.norm = nn.LayerNorm(width)
        self.input = nn.Linear(width, _WIDENING * width)
        self.output = nn.Linear(_WIDENING * width, width)
        self.scale = nn.Parameter(torch.full((width,), _FIRST_SCALE))

    def forward(self, states: Tensor, beside: Tensor) -> Tensor:
        """(B, F, W), and with what lies beside it (B, W, F + kernel - 1) -> (B, F, W)."""
        mixed = self.convolution(beside).transpose(1, 2)
        added: Tensor = self.output(F.leaky_relu(self.input(self.norm(mixed)), _SLOPE))
        return states + self.scale * added


class CodecEncoder(nn.Module):
    """Samples to latents."""

    window: Tensor

    def __init__(self, configuration: CodecConfig) -> None:
        super().__init__()
        self.hop = configuration.hop_length
        self.register_buffer("window", torch.hann_window(2 * self.hop), persistent=False)
        self.input = nn.Linear(self.hop + 1, configuration.width)
        self.layers = nn.ModuleList(CodecBlock(configuration.width) for _ in range(configuration.num_encoder_layers))
        self.norm = nn.LayerNorm(configuration.width)
        self.output = nn.Linear(configuration.width, configuration.d_latent)

    def forward(self, samples: Tensor) -> Tensor:
        """Float (B, N) -> (B, D, F), the root of the mean square over D being 1."""
        windows = F.pad(samples.float(), (0, self.hop)).unfold(1, 2 * self.hop, self.hop) * self.window  # (B, F, 2 hop)
        spectra = (torch.fft.rfft(windows).abs() + _LEAST_MAGNITUDE).log()  # (B, F, hop + 1)
        states = self.input(spectra / 3 + 1)  # speech has logarithms of about -6 to 2
        for layer in self.layers:
            states = layer(states, F.pad(states.transpose(1, 2), (_KERNEL // 2, _KERNEL // 2)))
        latents = self.output(self.norm(states))
        return F.rms_norm(latents, latents.shape[-1:]).transpose(1, 2)


class CodecDecoder(nn.Module):
    """Latents to samples, in one piece or frame by frame."""

    window: Tensor

    def __init__(self, configuration: CodecConfig) -> None:
        super().__init__()
        width, self.hop = configuration.width, configuration.hop_length
        self.register_buffer("window", torch.hann_window(2 * self.hop), persistent=False)
        self.input = nn.Linear(configuration.d_latent, width)
        self.layers = nn.ModuleList(CodecBlock(width) for _ in range(configuration.num_decoder_layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 2 * self.hop)
        nn.init.normal_(self.output.weight, std=_FIRST_LOUDNESS)
        nn.init.zeros_(self.output.bias)
        self._sizes = [*[width * (_KERNEL - 1)] * len(self.layers), self.hop]
        self.state_size = sum(self._sizes)
        """Numbers that it has to be given of the frames before."""

    def forward(self, latents: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D, F), state (B, state_size), zeros at the beginning -> samples (B, F hop), the next state."""
        *pasts, tail = torch.split(state, self._sizes, dim=1)
        states, presents = self.input(latents.transpose(1, 2)), list[Tensor]()
        for layer, past in zip(self.layers, pasts, strict=True):
            seen = torch.cat((torch.unflatten(past, 1, (-1, _KERNEL - 1)), states.transpose(1, 2)), dim=2)
            presents.append(seen[:, :, seen.shape[2] - (_KERNEL - 1) :].flatten(1))
            states = layer(states, seen)
        windows = self.output(self.norm(states)) * self.window  # (B, F, 2 hop)
        rising, falling = torch.split(windows, self.hop, dim=2)
        samples = rising + torch.cat((tail.unsqueeze(1), falling[:, :-1]), dim=1)
        return samples.flatten(1), torch.cat((*presents, falling[:, -1]), dim=1)


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
