"""Transcriber: writes what is said (Whisper; Radford et al. 2022, arXiv 2212.04356, section 2.2).

B windows of audio, M mel bins, F frames of a window, S positions that the encoder makes of them, T tokens of a
transcript, D model width, H heads, K head width, V vocabulary.

Deviations from the paper: both convolutions may have a stride of 2, as there are few words in the 40 ms of four frames
and attention takes a quarter of the time; keys have biases, tokens are scaled by sqrt(D) on the way in, and sines and
cosines take turns in the encoder's positions, as in the kit's other models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.models.architectures import architecture
from headway_training.models.configuration import LayerConfig
from headway_training.models.parts.attention import full_attention
from headway_training.models.parts.embeddings import PositionedEmbedding, SinusoidalPositions, TokenEmbedding
from headway_training.models.parts.initialisation import initialise_truncated_normal, initialise_xavier
from headway_training.models.parts.layer import Stack
from headway_training.models.writer import Writer

STRIDES: Mapping[int, tuple[int, int]] = MappingProxyType({2: (1, 2), 4: (2, 2)})
"""Of both convolutions, by the frames that a position stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriberConfig(LayerConfig):
    """Shape of a transcriber; `positions` are those of the decoder, as the encoder's are sinusoidal.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    num_mel_bins: int
    """Numbers in a frame of audio."""
    num_frames: int
    """Frames of a window, which the encoder reads at once; a multiple of `frames_per_position`."""
    frames_per_position: int = 2
    """Frames that a position stands for: 2, as in the paper, or 4."""
    vocabulary_size: int
    """Tokens."""
    max_target_length: int
    """Most tokens of a transcript, those that it begins with included."""
    num_encoder_layers: int
    """Number of encoder layers."""
    num_decoder_layers: int
    """Number of decoder layers."""

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)  # not super(): the decorator makes a new class with slots
        self._check_integers("num_mel_bins", "num_frames", "vocabulary_size", "max_target_length")
        self._check_integers("num_encoder_layers", "num_decoder_layers")
        if self.frames_per_position not in STRIDES:
            raise ValueError(f"frames_per_position must be 2 or 4, and is {self.frames_per_position!r}")
        if self.num_frames % self.frames_per_position:
            raise ValueError(
                f"num_frames must be a multiple of frames_per_position ({self.frames_per_position}), and is "
                f"{self.num_frames}"
            )


@architecture("transcriber", TranscriberConfig, "transcription")
class Transcriber(Writer):
    """Predicts the next token of a transcript from a window of audio and the transcript so far.

    Starts as a `Transformer` does; convolutions start as He et al. (2015) have it.
    """

    target_name = "a transcript"

    def __init__(self, configuration: TranscriberConfig) -> None:
        super().__init__()
        self.configuration = configuration
        self.max_source_length = configuration.num_frames // configuration.frames_per_position
        self.max_target_length = configuration.max_target_length
        width = configuration.d_model
        self.convolutions = nn.ModuleList(
            nn.Conv1d(channels, width, kernel_size=3, stride=stride, padding=1)
            for channels, stride in zip(
                (configuration.num_mel_bins, width), STRIDES[configuration.frames_per_position], strict=True
            )
        )
        self.source_positions = SinusoidalPositions(self.max_source_length, width)
        self.source_dropout = nn.Dropout(configuration.dropout)
        self.encoder = Stack(configuration, configuration.num_encoder_layers)
        self.tokens = TokenEmbedding(configuration.vocabulary_size, width)
        self.target_embedding = PositionedEmbedding(configuration, configuration.max_target_length, scaled=True)
        self.decoder = Stack(configuration, configuration.num_decoder_layers, cross=True)
        initialise_xavier(self, width)
        if isinstance(self.target_embedding.positions, nn.Embedding):
            initialise_truncated_normal(self.target_embedding.positions)
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv1d)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)

    def encode(self, input_features: Tensor) -> Tensor:
        """Hears windows of audio: a log-mel spectrogram, float (B, M, F) -> the memory, float (B, S, D).

        Raises:
            ValueError: the windows are of another length.
        """
        if input_features.shape[-1] != self.configuration.num_frames:
            raise ValueError(
                f"a window must have {self.configuration.num_frames} frames, and has {input_features.shape[-1]}"
            )
        states = input_features
        for convolution in self.convolutions:
            states = F.gelu(convolution(states))
        position_ids = torch.arange(self.max_source_length, device=states.device)
        states = states.transpose(1, 2) + self.source_positions(position_ids)  # (B, S, D)
        memory: Tensor = self.encoder(self.source_dropout(states), full_attention(self.kernel))
        return memory

    def forward(self, input_features: Tensor, target_ids: Tensor) -> Tensor:
        """Predicts, at every token of a transcript, the one that follows it.

        Args:
            input_features: float (B, M, F).
            target_ids: int64 (B, T), padded on the right.

        Returns:
            Logits, float (B, T, V).

        Raises:
            ValueError: a transcript is longer than its limit, or the windows are of another length.
        """
        return self.write(self.encode(input_features), target_ids)

    def write(self, memory: Tensor, target_ids: Tensor) -> Tensor:
        """As `forward`, of windows that have been heard: (B, S, D), int64 (B, T) -> (B, T, V)."""
        return self.logits(self.target_states(target_ids, self.cross_keys_values(memory)))
