"""Models that speak by normalizing flows: VITS (Kim et al. 2021, arXiv 2106.06103), and MMS-TTS, which is of it.

The layers are those of `transformers`; what is computed between them is written here, without random numbers and
without shapes that depend on values: the attention over relative positions (Shaw et al. 2018, equations 3 and 4), the
WaveNet of a flow, and the rational quadratic spline of durations, inverted (Durkan et al. 2019, appendix A.3). A model
is held against `transformers` before it is exported.

B texts, T tokens, F frames, C channels, D channels of a frame, H heads, K head width, W positions on either side, N
bins, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final, cast
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import VitsModel, VitsTokenizer

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder, as_source_error, without_parametrizations
from headway_export.huggingface.tokenizers import check_tokenizer, sample_lines
from headway_export.source import ExportSource
from headway_server.bundles import FlowSpeech
from headway_server.preprocessing import TextTokenizer
from headway_server.tasks.synthesis.flow import FlowText
from headway_training import folders

FLOW_SPEAKERS: Final = ("VitsModel",)
"""Architectures that speak by flows."""
_LENGTH: Final = 2_048
"""Most tokens of a text, unless another length is asked for: attention takes memory by its square."""
_FRAMES_A_TOKEN: Final = 16
"""Most frames of a text's audio, for each token of the longest: speech has about three."""
_FRAMES_PER_RUN: Final = 512
"""Frames of a window, beside those around it that are computed again: about a fifth more, of MMS-TTS."""
_LEAST: Final = 1e-3
"""Least width, height and slope of a spline's bins."""
_BOUND: Final = 1e-4
"""Largest difference from the samples of `transformers`, which are from -1 to 1, and relative one of durations."""
_NUM_LINES: Final = 400
"""Texts whose tokens are compared; `transformers` looks up each character in the whole vocabulary."""
_NUM_TRIED: Final = 20
"""Tokens of the text that a model is held against `transformers` on."""


class HuggingFaceFlowSpeaker(nn.Module):
    """A VITS of `transformers` as a `FlowSpeaker`."""

    def __init__(self, model: nn.Module, speech: FlowSpeech, *, max_source_length: int) -> None:
        """Takes the model, whose layers attend by this module's attention afterwards."""
        super().__init__()
        self.model = cast("Any", model)
        self.speech = speech
        self.max_source_length = max_source_length
        config = self.model.config
        self.num_speakers = int(config.num_speakers) if config.num_speakers > 1 else 0
        for layer in self.model.text_encoder.encoder.layers:
            layer.attention = _RelativeAttention(layer.attention)

    def durations(
        self, input_ids: Tensor, noise: Tensor, speaker: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encodes texts.

        Args:
            input_ids: (B, T).
            noise: (B, 2, T), scaled.
            speaker: (B,); None: the model has one.

        Returns:
            Frames of each token at a rate of 1, (B, T), not rounded; means and deviations of a token's frames, (B, T,
            D).
        """
        encoder, config = self.model.text_encoder, self.model.config
        states = encoder.embed_tokens(input_ids) * math.sqrt(config.hidden_size)  # (B, T, C)
        mask = torch.ones_like(states[..., :1])
        for layer in encoder.encoder.layers:
            states = layer(states, padding_mask=mask)[0]
        means, log_variances = encoder.project(states.transpose(1, 2)).transpose(1, 2).chunk(2, dim=-1)
        conditioning = self._conditioning(speaker)
        predict = self._drawn_durations if config.use_stochastic_duration_prediction else self._mean_durations
        logarithms = predict(states.transpose(1, 2), conditioning, noise)  # (B, 1, T)
        return torch.exp(logarithms[:, 0]), means, torch.exp(log_variances)

    def samples(self, latents: Tensor, speaker: Tensor | None = None) -> Tensor:
        """(B, F, D), (B,) -> (B, S)."""
        conditioning, latents = self._conditioning(speaker), latents.transpose(1, 2)  # (B, D, F)
        for flow in reversed(self.model.flow.flows):
            first, second = latents.flip(1).chunk(2, dim=1)
            states = _wave_net(flow.wavenet, flow.conv_pre(first), conditioning)
            latents = torch.cat([first, second - flow.conv_post(states)], dim=1)
        return cast("Tensor", self.model.decoder(latents, conditioning)[:, 0])

    def _conditioning(self, speaker: Tensor | None) -> Tensor | None:
        """(B,) -> (B, C, 1)."""
        return None if speaker is None else cast("Tensor", self.model.embed_speaker(speaker)[..., None])

    def _mean_durations(self, states: Tensor, conditioning: Tensor | None, _: Tensor) -> Tensor:
        return cast("Tensor", self.model.duration_predictor(states, torch.ones_like(states[:, :1]), conditioning))

    def _drawn_durations(self, states: Tensor, conditioning: Tensor | None, noise: Tensor) -> Tensor:
        """(B, C, T), (B, C, 1), (B, 2, T) -> (B, 1, T)."""
        predictor, mask = self.model.duration_predictor, torch.ones_like(states[:, :1])
        states = predictor.conv_pre(states)
        if conditioning is not None:
            states = states + predictor.cond(conditioning)
        states = predictor.conv_proj(predictor.conv_dds(states, mask))
        latents, (affine, _, *splines) = noise, predictor.flows  # the first spline is not inverted by VITS itself
        for flow in reversed(splines):
            first, second = latents.flip(1).chunk(2, dim=1)
            hidden = flow.conv_proj(flow.conv_dds(flow.conv_pre(first), mask, states))  # (B, 3 N - 1, T)
            bins = hidden.unflatten(1, (first.shape[1], -1)).transpose(2, 3)  # (B, 1, T, 3 N - 1)
            scale = math.sqrt(flow.filter_channels)
            widths, heights, slopes = bins.split([flow.num_bins, flow.num_bins, flow.num_bins - 1], dim=-1)
            inverted = _inverted_spline(second, widths / scale, heights / scale, slopes, bound=flow.tail_bound)
            latents = torch.cat([first, inverted], dim=1)
        latents = (latents.flip(1) - affine.translate) * torch.exp(-affine.log_scale)
        return cast("Tensor", latents[:, :1])


class _RelativeAttention(nn.Module):
    """Attention whose scores and values have a part for each of the nearest relative positions."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = cast("Any", attention)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """(B, T, C) -> (B, T, C)."""
        own = self.attention
        shape = (*hidden_states.shape[:2], own.num_heads, own.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (own.q_proj, own.k_proj, own.v_proj)
        )  # (B, H, T, K)
        query = query * own.scaling
        scores = query @ key.transpose(2, 3)  # (B, H, T, T)
        window, places = own.window_size, torch.arange(hidden_states.shape[1])
        distances = places - places[:, None]  # (T, T)
        index = distances.clamp(-window, window) + window
        of_keys = (query @ own.emb_rel_k[0].T).gather(-1, index.expand(*scores.shape[:2], -1, -1))
        weights = torch.softmax(scores + of_keys * (distances.abs() <= window), dim=-1)
        columns = places[:, None] + torch.arange(-window, window + 1)  # (T, 2 W + 1)
        is_inside = (columns >= 0) & (columns < hidden_states.shape[1])
        near = columns.clamp(min=0).minimum(places[-1:])
        of_values = weights.gather(-1, near.expand(*scores.shape[:2], -1, -1)) * is_inside
        attended = weights @ value + of_values @ own.emb_rel_v[0]
        return own.out_proj(attended.transpose(1, 2).flatten(2)), None


def _wave_net(net: Any, inputs: Tensor, conditioning: Tensor | None) -> Tensor:
    """Gated convolutions of a WaveNet: (B, C, F), (B, E, 1) -> (B, C, F)."""
    size, outputs = net.hidden_size, torch.zeros_like(inputs)
    given = None if conditioning is None else net.cond_layer(conditioning)
    for number, (convolution, mix) in enumerate(zip(net.in_layers, net.res_skip_layers, strict=True)):
        gates = convolution(inputs)
        if given is not None:
            gates = gates + given[:, 2 * size * number : 2 * size * (number + 1)]
        mixed = mix(torch.tanh(gates[:, :size]) * torch.sigmoid(gates[:, size:]))
        outputs = outputs + mixed[:, -size:]
        if number < net.num_layers - 1:
            inputs = inputs + mixed[:, :size]
    return outputs


def _inverted_spline(outputs: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, *, bound: float) -> Tensor:
    """Inverts a monotonic rational quadratic spline on -bound to bound, and the identity outside.

    Args:
        outputs: Of the spline, (B, 1, T).
        widths: Logits of the widths of bins, (B, 1, T, N).
        heights: Logits of their heights.
        slopes: At their inner borders, before a softplus, (B, 1, T, N - 1).
        bound: Where the identity begins.
    """
    num_bins = widths.shape[-1]

    def borders(logits: Tensor) -> Tensor:
        sizes = _LEAST + (1 - _LEAST * num_bins) * torch.softmax(logits, dim=-1)
        inner = 2 * bound * torch.cumsum(sizes, dim=-1)[..., :-1] - bound
        return functional.pad(functional.pad(inner, (1, 0), value=-bound), (0, 1), value=bound)  # (B, 1, T, N + 1)

    outer = math.log(math.exp(1 - _LEAST) - 1)  # a slope of 1
    derivatives = _LEAST + functional.softplus(functional.pad(slopes, (1, 1), value=outer))  # (B, 1, T, N + 1)
    xs, ys = borders(widths), borders(heights)
    inside = outputs.clamp(-bound, bound)
    index = (inside[..., None] >= ys[..., 1:-1]).sum(dim=-1, keepdim=True)  # (B, 1, T, 1)
    low_x, high_x, low_y, high_y, low, high = (
        of_borders.gather(-1, index + side)[..., 0] for of_borders in (xs, ys, derivatives) for side in (0, 1)
    )
    rise, slope = high_y - low_y, (high_y - low_y) / (high_x - low_x)
    bend, above = low + high - 2 * slope, inside - low_y
    a = rise * (slope - low) + above * bend
    b = rise * low - above * bend
    c = -slope * above
    root = 2 * c / (-b - torch.sqrt((b * b - 4 * a * c).clamp(min=0)))
    return torch.where(outputs.abs() <= bound, root * (high_x - low_x) + low_x, outputs)


def read_flow_speaker(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a VITS.

    Raises:
        SourceError: The folder is incomplete, or its tokenizer or its model cannot be served.
    """
    config = folder.config
    with as_source_error():
        own = folders.open_tokenizer(folder.path)
    if not isinstance(own, VitsTokenizer):
        raise SourceError(f"{folder.path}: reads by {type(own).__name__}; VitsTokenizer is supported")
    tokenizer = _tokenizer(folder, own)
    length = folder.options.max_length or _LENGTH
    flow = _flow_of(config, own, tokenizer, length)
    _check_tokens(folder, own, tokenizer, flow)
    model = _load(folder)
    module = HuggingFaceFlowSpeaker(model, flow, max_source_length=length).eval()
    _check_samples(folder, module, flow)
    source = folder.source(
        model,
        module,
        make_reference=lambda: HuggingFaceFlowSpeaker(_load(folder), flow, max_source_length=length).eval(),
        tokenizer=tokenizer,
        labels=tuple(map(str, range(module.num_speakers))),
        flow=flow,
    )
    notes = []
    if own.phonemize:
        notes.append(
            "texts are phonemes as espeak writes them (en-us, with stress and punctuation): no phonemizer is run"
        )
    return source, tuple(notes)


def _load(folder: ModelFolder) -> nn.Module:
    return without_parametrizations(folder.load(VitsModel))


def _flow_of(config: Any, own: VitsTokenizer, tokenizer: Tokenizer, length: int) -> FlowSpeech:
    hop, context = math.prod(config.upsample_rates), _context_of(config)
    special = [own.convert_tokens_to_ids(token) for token in own.all_special_tokens]
    known = set(tokenizer.get_vocab().values())
    return FlowSpeech(
        sampling_rate=config.sampling_rate,
        hop_length=hop,
        num_channels=config.flow_size,
        noise_scale=config.noise_scale,
        duration_noise_scale=config.noise_scale_duration if config.use_stochastic_duration_prediction else 0.0,
        speaking_rate=config.speaking_rate,
        context_frames=context,
        frames_per_run=max(_FRAMES_PER_RUN, context),
        max_frames=_FRAMES_A_TOKEN * length,
        blank=0 if own.add_blank else None,
        bare_tokens=tuple(sorted(token for token in special if token in known)) if own.add_blank else (),
    )


def _context_of(config: Any) -> int:
    """Returns the frames on either side of one that its samples depend on: the reach of flows and generator."""
    steps = (config.wavenet_dilation_rate**layer for layer in range(config.prior_encoder_num_wavenet_layers))
    of_flows = config.prior_encoder_num_flows * sum((config.wavenet_kernel_size - 1) // 2 * step for step in steps)
    return int(reach_of_generator(config) + of_flows)


def reach_of_generator(config: Any) -> int:
    """Returns the frames on either side of one that its samples depend on in a generator (HiFi-GAN)."""
    of_blocks = max(
        sum((size - 1) // 2 * (dilation + 1) for dilation in dilations)
        for size, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
    )
    reach = _reach(7)
    for rate, size in zip(reversed(config.upsample_rates), reversed(config.upsample_kernel_sizes), strict=True):
        reach = -(-(reach + of_blocks + size - 1) // rate)
    return int(reach + _reach(7))


def _reach(kernel_size: int) -> int:
    return (kernel_size - 1) // 2


# Texts


def _tokenizer(folder: ModelFolder, own: VitsTokenizer) -> Tokenizer:
    """Returns a tokenizer that gives a token for each character of a text, without blanks.

    Raises:
        SourceError: Texts are prepared in a way that is not supported.
    """
    if own.is_uroman:
        raise SourceError(
            f"{folder.path}: reads texts that uroman has written in Latin letters (is_uroman), which no bundle does; "
            "not supported"
        )
    vocabulary = {str(token): int(index) for token, index in own.encoder.items()}
    letters = [token for token in vocabulary if len(token) == 1]
    if not (own.normalize or own.phonemize):
        raise SourceError(f"{folder.path}: does not normalize texts (normalize); not supported")
    lowers = own.normalize and not own.phonemize
    if capitals := [letter for letter in letters if lowers and letter.lower() != letter]:
        raise SourceError(f"{folder.path}: its vocabulary has capitals ({capitals[0]!r}) and lower case; not supported")
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=letters[0]))
    steps: list[normalizers.Normalizer] = [normalizers.Lowercase()] if lowers else []
    if own.language == "ron":
        steps.append(normalizers.Replace("\u021b", "\u0163"))
    inside = "".join(f"\\x{{{ord(letter):x}}}" for letter in letters)
    steps.append(normalizers.Replace(Regex(f"[^{inside}]"), ""))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(r"\A\s+|\s+\z"), "")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:[\s\S])"), "isolated")
    return tokenizer


def _check_tokens(folder: ModelFolder, own: VitsTokenizer, tokenizer: Tokenizer, flow: FlowSpeech) -> None:
    """Compares tokens of drawn texts with those of `transformers`.

    Raises:
        SourceError: They differ.
    """
    text, letters = FlowText(TextTokenizer(tokenizer), flow), "".join(own.encoder)
    asked = {"normalize": False} if own.phonemize else {}
    own.phonemize, phonemizes = False, own.phonemize

    def original(line: str) -> list[int]:
        return list(own(_known(line, letters) if phonemizes else line, **asked).input_ids)

    class Spread:
        """A tokenizer with blanks."""

        @staticmethod
        def encode(line: str) -> Any:
            ids = np.array(tokenizer.encode(line).ids, np.int64)
            return type("Encoded", (), {"ids": text.interspersed(ids).tolist() if len(ids) else original(line)})

    try:
        lines = sample_lines(_NUM_LINES, pieces=[letters[start : start + 7] for start in range(0, len(letters), 3)])
        check_tokenizer(folder.path, cast("Any", Spread), original, lines=lines)
    finally:
        own.phonemize = phonemizes


def _known(line: str, letters: Iterable[str]) -> str:
    return "".join(letter for letter in line if letter in set(letters)).strip()


# Samples


def _check_samples(folder: ModelFolder, module: HuggingFaceFlowSpeaker, flow: FlowSpeech) -> None:
    """Compares the durations and the samples of a text with those of `transformers`, for the same noise.

    Raises:
        SourceError: They differ: the model computes something that is not read.
    """
    generator, noise, logarithms = torch.Generator().manual_seed(0), list[Tensor](), list[Tensor]()
    ids = torch.randint(0, module.model.config.vocab_size, (1, _NUM_TRIED), generator=generator)
    speaker = torch.tensor([module.num_speakers - 1]) if module.num_speakers else None

    normal = torch.randn

    def draw(*shape: int) -> Tensor:
        noise.append(normal(shape, generator=generator))
        return noise[-1]

    own = cast("Any", _load(folder))
    own.duration_predictor.register_forward_hook(lambda *given: logarithms.append(given[-1]))
    with torch.inference_mode():
        with (
            patch.object(torch, "randn", draw),
            patch.object(torch, "randn_like", lambda like: draw(*like.shape)),
        ):
            expected = own(ids, speaker_id=None if speaker is None else int(speaker)).waveform[0]
        of_durations = noise[0] if len(noise) > 1 else torch.zeros(1, 2, _NUM_TRIED)
        durations = torch.exp(logarithms[0])[0]  # (1, T)
        owners = torch.repeat_interleave(
            torch.arange(_NUM_TRIED), torch.ceil(durations[0] * (1.0 / flow.speaking_rate)).long()
        )
        found, means, deviations = module.durations(ids, of_durations * flow.duration_noise_scale, speaker)
        latents = means[:, owners] + noise[-1].transpose(1, 2) * deviations[:, owners] * flow.noise_scale
        samples = module.samples(latents, speaker)[0]
    differences = {
        "durations": float(((found - durations).abs() / (1 + durations)).max()),
        "samples": float((samples - expected).abs().max()),
    }
    for what, difference in differences.items():
        if not difference <= _BOUND:
            raise SourceError(
                f"{folder.path}: {what} differ by {difference:.1e} from those of transformers (bound {_BOUND:.0e}); it "
                "is not supported"
            )
