"""An audio codec: frames of samples to a few codes each, and back.

B rows, N samples, F frames, D width of a latent, W width of the layers, K books, C codes of a book, N = F hop.

A latent is residual vector quantized (Zeghidour et al. 2021, arXiv 2107.03312, section III-C). Encoder and decoder work
at the rate of the frames (as in Siuzdak 2023, arXiv 2306.00814): the encoder reads the logarithms of magnitude spectra,
the decoder's last layer makes two hops of samples for each frame, which are faded in and out and overlap by one hop.
Both have blocks of a convolution of each channel by itself and two linear maps (Liu et al. 2022, ConvNeXt).
Convolutions at the rate of the samples, as in Zeghidour et al., were tried before and learned far more slowly
(docs/journal/voices.md).

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

from headway_training.models.architectures import architecture
from headway_training.models.base import Model
from headway_training.models.configuration import Configuration
from headway_training.processes import gather_rows, sum_over_processes

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

    A code is the moving average of the latents that it stood for (van den Oord et al. 2017, appendix A.1). It moves at
    the end of a step, by the latents of all processes and of all parts of the batch.
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
        # Of this step: how many latents each code stood for, and their sum, (K, C, 1 + D); and the latents with the
        # largest draws, up to K C, each after its draw, (n, 1 + D).
        self._moments: Tensor | None = None
        self._drawn = torch.empty(0)

    def begin_step(self) -> None:
        """Forgets latents that no step has used."""
        self._moments, self._drawn = None, torch.empty(0)

    def forward(self, latents: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Latents (B, D, F) -> the codes' latents, codes (B, F, K), and the loss of each row (B).

        Gradients of what is returned first go to the latents as they are. With `draws`, float (B, F), random numbers of
        0 to 1, it is noted what `end_step` learns of these latents; where a number is below 0, nothing is.
        """
        target = latents.transpose(1, 2)  # (B, F, D)
        residual, found = target, torch.zeros_like(target)
        codes, residuals = list[Tensor](), list[Tensor]()
        loss = target.new_zeros(len(target))
        for number in range(len(self.books)):
            chosen = self._nearest(self.books[number], residual.detach())  # (B, F)
            part = F.embedding(chosen, self.books[number])  # (B, F, D)
            residuals.append(residual)
            loss = loss + COMMITMENT * (part - residual).square().mean(dim=(1, 2))
            found = found + part
            residual = residual - part
            codes.append(chosen)
        if draws is not None:
            self._note(target, residuals, codes, draws)
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
    def _note(self, latents: Tensor, residuals: list[Tensor], codes: list[Tensor], draws: Tensor) -> None:
        """Adds to the step latents (B, F, D), what each book was to say of them, and the codes (B, F) that it chose."""
        num_books, size, _ = self.books.shape
        counted = (draws >= 0).flatten().float()  # (B F)
        moments = []
        for residual, chosen in zip(residuals, codes, strict=True):
            points = torch.cat((torch.ones_like(residual[..., :1]), residual), dim=2).float()  # (B, F, 1 + D)
            weighted = points.flatten(0, 1) * counted[:, None]
            moments.append(weighted.new_zeros(size, weighted.shape[1]).index_add_(0, chosen.flatten(), weighted))
        total = torch.stack(moments)
        self._moments = total if self._moments is None else self._moments + total
        found = torch.cat((draws[..., None], latents.float()), dim=2).flatten(0, 1)  # (B F, 1 + D)
        self._drawn = _largest(torch.cat((self._drawn, found)) if len(self._drawn) else found, num_books * size)

    @torch.no_grad()
    def end_step(self) -> None:
        """Moves codes towards the latents that they stood for in this step.

        Codes that hardly stand for any are put where latents drawn at random are, all of them in the first step
        (Zeghidour et al. 2021, section III-C).
        """
        if self._moments is None:
            return
        moments = sum_over_processes(self._moments)
        drawn = _largest(gather_rows(self._drawn), self.usage.numel())
        before = self.usage.clone()
        self.usage.lerp_(moments[..., 0], 1 - _DECAY)
        self.sums.lerp_(moments[..., 1:], 1 - _DECAY)
        self.books.copy_(self.sums / self.usage.clamp(min=1e-6)[..., None])
        dead = torch.minimum(before, self.usage) < _LEAST_USAGE  # (K, C)
        if dead.any():
            self._revive(dead, drawn)
        self.begin_step()

    def _revive(self, dead: Tensor, drawn: Tensor) -> None:
        """Puts dead codes, bool (K, C), at what the books before leave of the drawn latents, (n, 1 + D).

        Each has a latent of its own as far as they go: of one that is a code already, nothing is left for a later book.
        """
        num_counted = (drawn[:, 0] >= 0).sum()
        places = torch.arange(dead.numel(), device=dead.device).view_as(dead) % num_counted.clamp(min=1)
        for number, gone in enumerate(dead):
            points = drawn[places[number], 1:]  # (C, D)
            for book in self.books[:number]:
                points = points - F.embedding(self._nearest(book, points[None])[0], book)
            for kept in (self.books, self.sums):
                kept[number] = torch.where(gone[:, None], points, kept[number])
            self.usage[number] = torch.where(gone, 1.0, self.usage[number])


def _largest(drawn: Tensor, count: int) -> Tensor:
    """The latents with the largest draws, which stand before them, (n, 1 + D): at most `count`, in falling order."""
    return drawn[drawn[:, 0].topk(min(count, len(drawn))).indices]


@architecture("codec", CodecConfig, "audio_coding")
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

    def forward(self, samples: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Float (B, N) -> what is heard of its codes (B, N), and the quantizer's loss of each row (B).

        `draws` are those of `Quantizer`.
        """
        latents, _, loss = self.quantizer(self.encoder(samples), draws)
        return self.decoder(latents, latents.new_zeros(len(latents), self.decoder.state_size))[0], loss
