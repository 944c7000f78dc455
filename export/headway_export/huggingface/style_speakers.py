"""Models that speak in a style: Kokoro, of StyleTTS 2 (Li et al. 2023, arXiv 2306.07691) and iSTFTNet (Kaneko 2022).

An Albert and recurrent networks give how many frames each phoneme lasts. A generator is excited by sines of the pitch
(Wang et al. 2019, arXiv 1904.12088), and makes the spectrum of samples. Deviations from the original: phases are summed
in float64, and modulo a turn; the noise of the nine sines of a sample is drawn as one number, of the same distribution;
their first phases are 0, which the original draws and then leaves out.

B texts, T tokens, F frames, C channels, D numbers of a frame, E numbers of a style, G steps of the pitch (two a frame),
H sines, N steps of the spectrum, K its bins, S samples, V voices, R lengths of a text.
"""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AlbertConfig, AlbertModel, PretrainedConfig

from headway_export.errors import SourceError
from headway_export.huggingface.folder import FolderOptions, ModelFolder
from headway_export.huggingface.recurrence import recur
from headway_export.source import ExportSource
from headway_server.bundles import FlowSpeech, Origin, Task
from headway_training.folders import CONFIG_FILE, first_line

_RATE: Final = 24_000
_NUM_SINES: Final = 9
_AMPLITUDE: Final = 0.1
_VOICED_NOISE: Final = 0.003
_VOICED: Final = 10.0
"""Least pitch, in Hz, of a voiced step."""
_STEPS_A_FRAME: Final = 2
_EDGE: Final = 0
"""Token at either end of a text."""
_LEAST: Final = 3
"""Tokens of the shortest text: a phoneme between its ends."""
_MOST_SECONDS: Final = 60
"""Of a text's audio, whose samples are computed in one run."""
_PARTS: Final = ("bert", "bert_encoder", "predictor", "decoder", "text_encoder")
_KEYS: Final = ("n_token", "vocab", "istftnet", "plbert", "hidden_dim", "style_dim", "n_layer", "max_dur")
"""Of the configuration, by which these folders are known: they state no architecture."""
_UNREAD: Final = ("bert.pooler.", "bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
_WEIGHTS: Final = "*.pth"
_VOICES: Final = "voices"


class _Config(PretrainedConfig):  # type: ignore[misc]  # the library has no types here
    model_type = "kokoro"


class StyleSpeaker(nn.Module):
    """A Kokoro as an `ExcitedSpeaker`."""

    def __init__(
        self, config: Mapping[str, Any], weights: Mapping[str, Tensor], voices: Tensor, *, max_length: int | None
    ) -> None:
        """Makes the model in the sizes of its weights.

        Args:
            config: `config.json`.
            weights: By part and name, without norms of weights.
            voices: (V, R, 2 E), by the length of a text from 1 on.
            max_length: Most tokens of a text; None: as many as it reads.
        """
        super().__init__()
        hidden, style, depth = int(config["hidden_dim"]), int(config["style_dim"]), int(config["n_layer"])
        plbert = AlbertConfig(vocab_size=int(config["n_token"]), attn_implementation="eager", **config["plbert"])
        self.bert = AlbertModel(plbert)
        self.bert_encoder = nn.Linear(int(plbert.hidden_size), hidden)
        self.predictor = _Predictor(hidden, style, depth, int(config["max_dur"]))
        size = int(config["text_encoder_kernel_size"])
        self.text_encoder = _TextEncoder(int(config["n_token"]), hidden, depth, size)
        self.decoder = _Decoder(hidden, style, weights, config["istftnet"])
        self.voices = nn.Buffer(voices)
        self.hidden, self.style = hidden, style
        self.longest = min(int(plbert.max_position_embeddings), voices.shape[1] + 2)
        self.max_source_length = max_length or self.longest
        self.num_speakers = len(voices)
        hop = self.decoder.generator.scale * _STEPS_A_FRAME
        self.speech = FlowSpeech(
            sampling_rate=_RATE,
            hop_length=hop,
            num_channels=2 * (hidden + style),
            noise_scale=1.0,
            duration_noise_scale=0.0,
            speaking_rate=1.0,
            rounding="nearest",
            is_excited=True,
            context_frames=0,
            frames_per_run=None,
            max_frames=_MOST_SECONDS * _RATE // hop,
            edge=_EDGE,
            drops_unknown=False,
        )

    def durations(self, input_ids: Tensor, speaker: Tensor) -> tuple[Tensor, Tensor]:
        """Encodes texts with a token at either end.

        Args:
            input_ids: (B, T).
            speaker: (B,).

        Returns:
            Frames of each token at a rate of 1, (B, T), not rounded; numbers of a token's frames, (B, T, D).
        """
        row = torch.arange(input_ids.shape[1])[-1:] - (_LEAST - 1)  # (1,), by the number of phonemes
        voice = self.voices[speaker, row][:, None].repeat(1, input_ids.shape[1], 1)  # (B, T, 2 E)
        of_sound, of_prosody = voice.chunk(2, dim=-1)
        plbert = self.bert(input_ids, token_type_ids=torch.zeros_like(input_ids))
        states = self.bert_encoder(plbert.last_hidden_state)  # (B, T, C)
        states = self.predictor.text_encoder(states, of_prosody)  # (B, T, C + E)
        durations = torch.sigmoid(self.predictor.duration_proj.linear_layer(_recur(self.predictor.lstm, states)))
        return durations.sum(dim=-1), torch.cat([states, self.text_encoder(input_ids), of_sound], dim=-1)

    def curves(self, latents: Tensor) -> Tensor:
        """Returns pitch in Hz and energy of the halves of frames: (B, F, D) -> (B, F, 4)."""
        states = latents[..., : self.hidden + self.style]
        curves = self.predictor.curves(states, states[:, 0, self.hidden :])
        return torch.cat([curve.view(*latents.shape[:2], _STEPS_A_FRAME) for curve in curves], dim=-1)

    def samples(self, latents: Tensor, curves: Tensor, noise: Tensor) -> Tensor:
        """(B, F, D), (B, F, 4), (B, F, S / F) -> (B, S)."""
        text, of_sound = latents[..., self.hidden + self.style : -self.style], latents[:, 0, -self.style :]
        pitch, energy = (curve.flatten(1)[:, None] for curve in curves.chunk(2, dim=-1))
        return cast("Tensor", self.decoder(text, pitch, energy, of_sound, noise.flatten(1)))


def _recur(lstm: nn.LSTM, states: Tensor) -> Tensor:
    """(B, T, I) -> (B, T, C)."""
    return recur(lstm, states.transpose(0, 1)).transpose(0, 1)


def _lstm(inputs: int, outputs: int) -> nn.LSTM:
    return nn.LSTM(inputs, outputs // 2, bidirectional=True)


# Texts


class _TextEncoder(nn.Module):
    def __init__(self, num_tokens: int, hidden: int, depth: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, hidden)
        self.cnn = nn.ModuleList(
            nn.ModuleList([nn.Conv1d(hidden, hidden, size, padding=(size - 1) // 2), _Norm(hidden)])
            for _ in range(depth)
        )
        self.lstm = _lstm(hidden, hidden)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, C)."""
        states = self.embedding(input_ids)
        for convolution, norm in cast("Any", self.cnn):
            states = functional.leaky_relu(norm(convolution(states.transpose(1, 2)).transpose(1, 2)), 0.2)
        return _recur(self.lstm, states)


class _Norm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, states: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return functional.layer_norm(states, self.gamma.shape, self.gamma, self.beta)


class _StyledNorm(nn.Module):
    """A layer norm whose scale and shift are made of a style."""

    def __init__(self, style: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * channels)

    def forward(self, states: Tensor, style: Tensor) -> Tensor:
        """(B, T, C), (B, T, E) -> (B, T, C)."""
        scale, shift = self.fc(style[:, :1]).chunk(2, dim=-1)
        return cast("Tensor", (1 + scale) * functional.layer_norm(states, states.shape[-1:]) + shift)


class _StyledEncoder(nn.Module):
    def __init__(self, hidden: int, style: int, depth: int) -> None:
        super().__init__()
        self.lstms = nn.ModuleList(
            part for _ in range(depth) for part in (_lstm(hidden + style, hidden), _StyledNorm(style, hidden))
        )

    def forward(self, states: Tensor, style: Tensor) -> Tensor:
        """(B, T, C), (B, T, E) -> (B, T, C + E)."""
        for part in self.lstms:
            if isinstance(part, nn.LSTM):
                states = _recur(part, torch.cat([states, style], dim=-1))
            else:
                states = part(states, style)
        return torch.cat([states, style], dim=-1)


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_layer = nn.Linear(inputs, outputs)


class _Predictor(nn.Module):
    """Durations of tokens, and pitch and energy of frames."""

    def __init__(self, hidden: int, style: int, depth: int, max_duration: int) -> None:
        super().__init__()
        self.text_encoder = _StyledEncoder(hidden, style, depth)
        self.lstm = _lstm(hidden + style, hidden)
        self.duration_proj = _Linear(hidden, max_duration)
        self.shared = _lstm(hidden + style, hidden)
        self.F0, self.N = (
            nn.ModuleList(
                [
                    _Block(hidden, hidden, style),
                    _Block(hidden, hidden // 2, style, doubles=True),
                    _Block(hidden // 2, hidden // 2, style),
                ]
            )
            for _ in range(2)
        )
        self.F0_proj, self.N_proj = nn.Conv1d(hidden // 2, 1, 1), nn.Conv1d(hidden // 2, 1, 1)

    def curves(self, states: Tensor, style: Tensor) -> tuple[Tensor, Tensor]:
        """(B, F, C + E), (B, E) -> pitch in Hz and energy, (B, 1, G) each."""
        shared = _recur(self.shared, states).transpose(1, 2)
        curves = []
        for blocks, project in ((self.F0, self.F0_proj), (self.N, self.N_proj)):
            curve = shared
            for block in blocks:
                curve = block(curve, style)
            curves.append(project(curve))
        return curves[0], curves[1]


# Frames


class _StyledInstanceNorm(nn.Module):
    """A norm of each channel over all of an audio, whose scale and shift are made of a style."""

    def __init__(self, style: int, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * channels)
        self.norm = nn.InstanceNorm1d(channels, affine=True)

    def forward(self, states: Tensor, style: Tensor) -> Tensor:
        """(B, C, F), (B, E) -> (B, C, F)."""
        scale, shift = self.fc(style)[..., None].chunk(2, dim=1)
        centred = states - states.mean(dim=-1, keepdim=True)
        normal = centred * torch.rsqrt((centred * centred).mean(dim=-1, keepdim=True) + self.norm.eps)
        normal = normal * self.norm.weight[:, None] + self.norm.bias[:, None]
        return cast("Tensor", (1 + scale) * normal + shift)


class _Block(nn.Module):
    """A residual block, which may double the number of frames."""

    def __init__(self, inputs: int, outputs: int, style: int, *, doubles: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(inputs, outputs, 3, padding=1), nn.Conv1d(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = _StyledInstanceNorm(style, inputs), _StyledInstanceNorm(style, outputs)
        self.conv1x1 = nn.Conv1d(inputs, outputs, 1, bias=False) if inputs != outputs else nn.Identity()
        self.doubles = doubles
        self.pool = (
            nn.ConvTranspose1d(inputs, inputs, 3, stride=2, groups=inputs, padding=1, output_padding=1)
            if doubles
            else nn.Identity()
        )

    def forward(self, states: Tensor, style: Tensor) -> Tensor:
        """(B, C, F), (B, E) -> (B, C', F) or (B, C', 2 F)."""
        inner = self.pool(functional.leaky_relu(self.norm1(states, style), 0.2))
        inner = self.conv2(functional.leaky_relu(self.norm2(self.conv1(inner), style), 0.2))
        shortcut = torch.repeat_interleave(states, 2, dim=-1) if self.doubles else states
        return cast("Tensor", (inner + self.conv1x1(shortcut)) * math.sqrt(0.5))


class _Decoder(nn.Module):
    def __init__(self, hidden: int, style: int, weights: Mapping[str, Tensor], istftnet: Mapping[str, Any]) -> None:
        """Takes the widths that no configuration states from the weights."""
        super().__init__()
        width, narrow = (len(weights[f"decoder.{name}.weight"]) for name in ("encode.conv1", "asr_res.0"))
        last = int(istftnet["upsample_initial_channel"])
        self.encode = _Block(hidden + 2, width, style)
        self.decode = nn.ModuleList(
            _Block(width + 2 + narrow, last if is_last else width, style, doubles=is_last)
            for is_last in (False, False, False, True)
        )
        self.F0_conv, self.N_conv = (nn.Conv1d(1, 1, 3, stride=2, padding=1) for _ in range(2))
        self.asr_res = nn.Sequential(nn.Conv1d(hidden, narrow, 1))
        self.generator = _Generator(style, istftnet)

    def forward(self, text: Tensor, pitch: Tensor, energy: Tensor, style: Tensor, noise: Tensor) -> Tensor:
        """(B, F, C), (B, 1, G), (B, 1, G), (B, E), (B, S) -> (B, S)."""
        text = text.transpose(1, 2)
        curves = [self.F0_conv(pitch), self.N_conv(energy)]  # (B, 1, F) each
        states = self.encode(torch.cat([text, *curves], dim=1), style)
        more = [self.asr_res(text), *curves]
        for block in self.decode:
            states = block(torch.cat([states, *more], dim=1), style)
        return cast("Tensor", self.generator(states, style, pitch[:, 0], noise))


class _ResidualBlock(nn.Module):
    """Dilated convolutions with periodic activations (Ziyin et al. 2020, equation 3)."""

    def __init__(self, channels: int, size: int, dilations: list[int], style: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, size, dilation=step, padding=(size - 1) * step // 2) for step in dilations
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, size, padding=(size - 1) // 2) for _ in dilations)
        self.adain1, self.adain2 = (
            nn.ModuleList(_StyledInstanceNorm(style, channels) for _ in dilations) for _ in range(2)
        )
        self.alpha1, self.alpha2 = (
            nn.ParameterList(nn.Parameter(torch.ones(1, channels, 1)) for _ in dilations) for _ in range(2)
        )

    def forward(self, states: Tensor, style: Tensor) -> Tensor:
        """(B, C, F), (B, E) -> (B, C, F)."""
        first, second = ((self.convs1, self.adain1, self.alpha1), (self.convs2, self.adain2, self.alpha2))
        for steps in zip(zip(*first, strict=True), zip(*second, strict=True), strict=True):
            inner = states
            for convolution, norm, frequency in steps:
                inner = norm(inner, style)
                inner = convolution(inner + torch.sin(frequency * inner) ** 2 / frequency)
            states = states + inner
        return states


class _Generator(nn.Module):
    """Makes samples of frames, excited by sines of the pitch."""

    def __init__(self, style: int, istftnet: Mapping[str, Any]) -> None:
        super().__init__()
        sizes, dilations = istftnet["resblock_kernel_sizes"], istftnet["resblock_dilation_sizes"]
        rates, channels = istftnet["upsample_rates"], int(istftnet["upsample_initial_channel"])
        num_steps, self.hop = int(istftnet["gen_istft_n_fft"]), int(istftnet["gen_istft_hop_size"])
        self.num_bins = num_steps // 2 + 1
        self.scale = math.prod(rates) * self.hop
        self.m_source = nn.Module()
        self.m_source.l_linear = nn.Linear(_NUM_SINES, 1)
        self.ups, self.resblocks, self.noise_convs, self.noise_res = (nn.ModuleList() for _ in range(4))
        for number, (rate, size) in enumerate(zip(rates, istftnet["upsample_kernel_sizes"], strict=True)):
            self.ups.append(nn.ConvTranspose1d(channels, channels // 2, size, rate, padding=(size - rate) // 2))
            channels //= 2
            self.resblocks.extend(
                _ResidualBlock(channels, *shape, style) for shape in zip(sizes, dilations, strict=True)
            )
            step = math.prod(rates[number + 1 :])
            is_last = number == len(rates) - 1
            kernel, padding = (1, 0) if is_last else (2 * step, (step + 1) // 2)
            self.noise_convs.append(nn.Conv1d(num_steps + 2, channels, kernel, stride=step, padding=padding))
            self.noise_res.append(_ResidualBlock(channels, 11 if is_last else 7, [1, 3, 5], style))
        self.conv_post = nn.Conv1d(channels, num_steps + 2, 7, padding=3)
        self.num_blocks = len(sizes)
        forward, inverse, squares = _transforms(num_steps)
        self.forward_transform, self.inverse_transform, self.squares = map(nn.Buffer, (forward, inverse, squares))

    def forward(self, states: Tensor, style: Tensor, pitch: Tensor, noise: Tensor) -> Tensor:
        """(B, C, G), (B, E), (B, G), (B, S) -> (B, S)."""
        spectrum = self._spectrum(self._excitation(pitch, noise))
        for number, (convolution, block, up) in enumerate(zip(self.noise_convs, self.noise_res, self.ups, strict=True)):
            states = up(functional.leaky_relu(states, 0.1))
            if number == len(self.ups) - 1:
                states = torch.cat([states[..., 1:2], states], dim=-1)
            states = states + block(convolution(spectrum), style)
            blocks = self.resblocks[number * self.num_blocks : (number + 1) * self.num_blocks]
            states = torch.stack([each(states, style) for each in blocks]).sum(dim=0) / self.num_blocks
        states = self.conv_post(functional.leaky_relu(states))
        return self._inverted(torch.exp(states[:, : self.num_bins]), torch.sin(states[:, self.num_bins :]))

    def _excitation(self, pitch: Tensor, noise: Tensor) -> Tensor:
        """(B, G), (B, S) -> (B, S)."""
        merge, scale = cast("nn.Linear", self.m_source.l_linear), self.scale
        harmonics = pitch[:, None] * torch.arange(1, _NUM_SINES + 1)[:, None] / _RATE  # (B, H, G)
        turns = harmonics - torch.floor(harmonics)  # a sample
        after = torch.cumsum(turns.double() * scale, dim=-1)
        phases = (after - torch.floor(after)).float()[..., None]  # (B, H, G, 1), amid the samples of a step
        steps = turns[..., None] * scale
        before = functional.pad(steps[:, :, 1:], (0, 0, 1, 0))  # the first half step and the last one stand still
        behind = functional.pad(steps[:, :, 1:], (0, 0, 0, 1))
        offsets = (torch.arange(scale) + 0.5) / scale - 0.5  # (S / G,)
        phases = phases + offsets * torch.where(offsets < 0, before, behind)  # (B, H, G, S / G)
        is_voiced = (pitch > _VOICED).float()[:, :, None]  # (B, G, 1)
        weights = merge.weight[0]
        sines = (weights[:, None, None] * torch.sin(2 * math.pi * phases)).sum(dim=1) * _AMPLITUDE  # (B, G, S / G)
        loudness = is_voiced * _VOICED_NOISE + (1 - is_voiced) * _AMPLITUDE / 3
        noise = loudness * torch.linalg.vector_norm(weights) * noise.view(*pitch.shape, scale)
        return torch.tanh(sines * is_voiced + noise + merge.bias).flatten(1)

    def _spectrum(self, samples: Tensor) -> Tensor:
        """(B, S) -> magnitudes and phases, (B, 2 K, N)."""
        edge = self.num_bins - 1
        padded = torch.cat(
            [samples[:, 1 : edge + 1].flip(1), samples, samples[:, -edge - 1 : -1].flip(1)], dim=1
        )  # reflected
        real, imaginary = functional.conv1d(padded[:, None], self.forward_transform, stride=self.hop).chunk(2, dim=1)
        turned = torch.where(real < 0, torch.where(imaginary < 0, -math.pi, math.pi), 0.0)
        upright = torch.sign(imaginary) * (math.pi / 2)
        is_upright = real == 0
        phases = torch.where(is_upright, upright, torch.atan(imaginary / torch.where(is_upright, 1, real)) + turned)
        return torch.cat([torch.sqrt(real * real + imaginary * imaginary), phases], dim=1)

    def _inverted(self, magnitudes: Tensor, phases: Tensor) -> Tensor:
        """(B, K, N) each -> (B, S), by overlapping windows whose squares are divided out."""
        spectrum = torch.cat([magnitudes * torch.cos(phases), magnitudes * torch.sin(phases)], dim=1)
        sums = functional.conv_transpose1d(spectrum, self.inverse_transform, stride=self.hop)
        squares = functional.conv_transpose1d(torch.ones_like(spectrum[:1, :1]), self.squares, stride=self.hop)
        edge = self.num_bins - 1
        return (sums / squares.clamp(min=1e-11))[:, 0, edge:-edge]


def _transforms(num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the Fourier transform of a Hann window, (2 K, 1, W), its inverse, (2 K, 1, W), and the window's squares.

    The imaginary parts of the lowest and the highest bin are 0.
    """
    window = torch.hann_window(num_steps, dtype=torch.float64)
    bins, places = torch.arange(num_steps // 2 + 1)[:, None], torch.arange(num_steps)
    angles = 2 * math.pi * (bins * places % num_steps) / num_steps  # (K, W)
    cosines, sines = torch.cos(angles), torch.sin(angles)
    sines[0] = sines[-1] = 0
    counts = torch.full((len(bins), 1), 2 / num_steps, dtype=torch.float64)
    counts[0] = counts[-1] = 1 / num_steps
    forward = torch.cat([cosines, -sines]) * window
    inverse = torch.cat([counts * cosines, -counts * sines]) * window
    return forward.float()[:, None], inverse.float()[:, None], (window * window).float()[None, None]


# Folders


def is_style_speaker(path: Path) -> bool:
    """True of a folder of a Kokoro."""
    try:
        content = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and all(key in content for key in _KEYS)


def read_style_speaker(
    path: Path, options: FolderOptions, origin: Origin | None = None
) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a Kokoro and its voices.

    Raises:
        SourceError: The folder is incomplete, or its model cannot be served.
    """
    if options.task not in (None, Task.FLOW_SYNTHESIS):
        raise SourceError(f"{path}: speaks, which is {Task.FLOW_SYNTHESIS}, not {options.task}")
    if not options.allow_pickle:
        raise SourceError(
            f"{path}: give --allow-pickle to export it if you trust where it comes from: its weights and voices are "
            "pickled, of which tensors alone are read"
        )
    config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    vocabulary = _vocabulary_of(path, config)
    names, voices = _voices_of(path, 2 * int(config["style_dim"]))
    weights = _weights_of(path)

    def make() -> StyleSpeaker:
        module = StyleSpeaker(config, weights, voices, max_length=options.max_length)
        _load(path, module, weights)
        return module.eval()

    module = make()
    if not _LEAST <= module.max_source_length <= module.longest:
        raise SourceError(
            f"{path}: --max-length {options.max_length}: the model reads {_LEAST} to {module.longest} tokens, both "
            "ends of a text among them"
        )
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    folder = ModelFolder(
        path=path,
        task=Task.FLOW_SYNTHESIS,
        config=_Config(vocab_size=int(config["n_token"])),
        options=options,
        origin=origin,
    )
    source = folder.source(module, module, make_reference=make, tokenizer=tokenizer, labels=names, flow=module.speech)
    return source, ("texts are phonemes in the letters of the model's vocabulary: no phonemizer is run",)


def _vocabulary_of(path: Path, config: Mapping[str, Any]) -> dict[str, int]:
    vocabulary, count = config["vocab"], int(config["n_token"])
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise SourceError(f"{path}: vocab is no object with a number for each phoneme")
    for letter, index in vocabulary.items():
        if len(letter) != 1 or not isinstance(index, int) or not 0 < index < count:
            raise SourceError(
                f"{path}: vocab gives {letter[:16]!r} the number {index!r}; one character, and a number from 1 to "
                f"{count - 1} (n_token), is supported"
            )
    if len(set(vocabulary.values())) != len(vocabulary):
        raise SourceError(f"{path}: vocab gives two phonemes the same number; not supported")
    return vocabulary


def _voices_of(path: Path, width: int) -> tuple[tuple[str, ...], Tensor]:
    """Returns the names of voices, and the style of each by the length of a text, (V, R, 2 E).

    Raises:
        SourceError: There are none, or they do not fit.
    """
    files = sorted((path / _VOICES).glob("*.pt"))
    if not files:
        raise SourceError(f"{path}: has no voices ({_VOICES}/*.pt); fetch those that lie beside the model")
    voices: dict[str, Tensor] = {}
    for file in files:
        voice = _read_pickle(file)
        if not isinstance(voice, Tensor) or voice.ndim != 3 or voice.shape[1:] != (1, width) or not len(voice):
            raise SourceError(f"{file}: is no tensor of (lengths, 1, {width}), the style by the number of phonemes")
        if not torch.isfinite(voice).all():
            raise SourceError(f"{file}: has numbers that are not finite; fetch it again")
        voices[file.stem] = voice[:, 0].float()
    if len(lengths := {len(voice) for voice in voices.values()}) > 1:
        raise SourceError(f"{path}: its voices have styles for {min(lengths)} and for {max(lengths)} lengths")
    return tuple(voices), torch.stack(list(voices.values()))


def _weights_of(path: Path) -> dict[str, Tensor]:
    """Returns the weights by part and name, with norms of weights multiplied in.

    Raises:
        SourceError: There is no file of them, or several, or it holds something else.
    """
    files = sorted(path.glob(_WEIGHTS))
    if len(files) != 1:
        raise SourceError(f"{path}: has {len(files)} files of weights ({_WEIGHTS}); one is expected")
    parts = _read_pickle(files[0])
    if not isinstance(parts, dict) or any(not isinstance(parts.get(part), Mapping) for part in _PARTS):
        raise SourceError(f"{files[0]}: does not hold the weights of {', '.join(_PARTS)}")
    stored = {
        f"{part}.{name.removeprefix('module.')}": weight.float()
        for part in _PARTS
        for name, weight in parts[part].items()
        if isinstance(weight, Tensor) and weight.is_floating_point()
    }
    weights = {}
    for name, weight in stored.items():
        stem, _, end = name.rpartition(".")
        if end == "weight_v" and f"{stem}.weight_g" in stored:
            norms = torch.linalg.vector_norm(weight.flatten(1), dim=1)
            weights[f"{stem}.weight"] = weight * (stored[f"{stem}.weight_g"] / norms.view(-1, *[1] * (weight.ndim - 1)))
        elif end != "weight_g":
            weights[name] = weight
    return weights


def _load(path: Path, module: StyleSpeaker, weights: Mapping[str, Tensor]) -> None:
    """Loads weights; norms without weights of their own keep the neutral ones.

    Raises:
        SourceError: Some are missing, or of another shape.
    """
    own = module.state_dict()
    given = {name: weight for name, weight in weights.items() if name in own and weight.shape == own[name].shape}
    buffers = {name for name, _ in module.named_buffers()}
    missing = [
        name
        for name in own
        if name not in given and name not in buffers and ".norm." not in name and not name.startswith(_UNREAD)
    ]
    if missing:
        raise SourceError(
            f"{path}: {len(missing)} weights are not there, or of another shape ({min(missing)} is the first); fetch "
            "the folder again"
        )
    if wrong := sorted(name for name in own if name in weights and name not in given):
        raise SourceError(f"{path}: {wrong[0]} is of another shape; fetch the folder again")
    module.load_state_dict(given, strict=False)


def _read_pickle(file: Path) -> Any:
    """Returns what a file holds: tensors, of which no code is run.

    Raises:
        SourceError: It cannot be read, or holds something else.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise SourceError(f"{file}: cannot be read ({first_line(error)})") from error
