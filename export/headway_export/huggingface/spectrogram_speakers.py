"""Models that speak by spectrograms: SpeechT5 (Ao et al. 2022, arXiv 2110.07205), with a vocoder (HiFi-GAN).

The layers are those of `transformers`; what is computed between them is written here, with a cache, and with the
dropout of the decoder's first layers as an input.

R rows of a step, S tokens of a text, T steps, F frames, M numbers of a frame, D model width, H heads, K head width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import patch

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import SpeechT5ForTextToSpeech, SpeechT5HifiGan, SpeechT5HifiGanConfig, SpeechT5Tokenizer

from headway_export.errors import SourceError
from headway_export.huggingface.attention import attend_in_one_width, width_of_cache
from headway_export.huggingface.flow_speakers import reach_of_generator
from headway_export.huggingface.folder import (
    ModelFolder,
    as_source_error,
    read_configuration,
    without_parametrizations,
)
from headway_export.huggingface.hub import HubModel, parse_id
from headway_export.huggingface.tokenizers import check_tokenizer, convert_pieces, sample_lines
from headway_export.source import ExportSource
from headway_server.bundles import VOICES_FILE, SpecialTokens, SpectrogramSpeech
from headway_training import folders
from headway_training.folders import first_line
from headway_training.models.parts.attention import Attend, AttendCross

SPECTROGRAM_SPEAKERS: Final = ("SpeechT5ForTextToSpeech",)
"""Architectures that speak by spectrograms."""
_VOCODER: Final = "vocoder"
"""Folder of the vocoder in that of a model, unless another is given."""
_VOICES: Final = "speaker_embeddings"
"""Folder of voices in that of a model, unless another is given."""
_FRAMES_PER_RUN: Final = 512
"""Frames of a window, beside those around it that are computed again."""
_END_PROBABILITY: Final = 0.5
"""`threshold` of `generate_speech`."""
_FRAMES_A_TOKEN: Final = 20.0
"""`maxlenratio` of `generate_speech`."""
_NUM_LINES: Final = 2_000
"""Texts whose tokens are compared."""
_MOST_VOICES: Final = 1_000
_MOST_VOICE_BYTES: Final = 16 * 2**20
"""Largest file of voices; published ones have 2 KB."""


class HuggingFaceSpectrogramSpeaker(nn.Module):
    """A SpeechT5 of `transformers` with its vocoder as a `SpectrogramSpeaker`."""

    def __init__(
        self, model: nn.Module, vocoder: nn.Module, speech: SpectrogramSpeech, *, max_source_length: int
    ) -> None:
        super().__init__()
        self.model = cast("Any", model)
        self.vocoder = vocoder
        self.speech = speech
        self.max_source_length = max_source_length
        config = self.model.config
        self.max_length = int(config.max_speech_positions)
        heads = int(config.decoder_attention_heads)
        self.cache_shape = (int(config.decoder_layers), heads, width_of_cache(config.hidden_size // heads))

    def encode(self, input_ids: Tensor) -> Tensor:
        """(B, S) -> (B, S, D)."""
        return cast("Tensor", self.model.speecht5.encoder(input_ids, return_dict=True).last_hidden_state)

    def cross_keys_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(B, S, D) -> for each layer of the decoder twice (B, S, H, K)."""
        attentions = [layer.encoder_attn for layer in self.model.speecht5.decoder.wrapped_decoder.layers]
        return [(_heads(own, own.k_proj(memory)), _heads(own, own.v_proj(memory))) for own in attentions]

    def step(self, read: Sequence[Tensor], position_ids: Tensor, attend: Attend, attend_cross: AttendCross) -> Tensor:
        """See `StepWriter`."""
        states, dropout, speaker = read
        decoder = self.model.speecht5.decoder
        prenet = decoder.prenet
        for number, layer in enumerate(prenet.layers):
            states = functional.relu(layer(states)) * dropout[:, number]
        places = prenet.encode_positions
        states = prenet.final_layer(states)[:, None] + places.alpha * places.pe[0][position_ids]  # (R, 1, D)
        states = torch.cat([states, functional.normalize(speaker)[:, None]], dim=-1)
        states = functional.relu(prenet.speaker_embeds_layer(states))
        for number, layer in enumerate(decoder.wrapped_decoder.layers):
            own = layer.self_attn
            query, key, value = (_heads(own, project(states)) for project in (own.q_proj, own.k_proj, own.v_proj))
            found = attend_in_one_width(attend, query, key, value, layer=number)
            states = layer.self_attn_layer_norm(states + own.out_proj(found.flatten(2)))
            own = layer.encoder_attn
            found = attend_cross(_heads(own, own.q_proj(states)), layer=number)
            states = layer.encoder_attn_layer_norm(states + own.out_proj(found.flatten(2)))
            states = layer.final_layer_norm(states + layer.feed_forward(states))
        return self._frames(states)

    def _frames(self, states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, V)."""
        postnet = self.model.speech_decoder_postnet
        return torch.cat([postnet.feat_out(states), postnet.prob_out(states)], dim=-1)

    def samples(self, spectrogram: Tensor) -> Tensor:
        """See `SpectrogramSpeaker`."""
        return cast("Tensor", self.vocoder(self.model.speech_decoder_postnet.postnet(spectrogram)))

    def expected_frames(self, input_ids: Tensor, frames: Tensor, dropout: Tensor, speaker: Tensor) -> Tensor:
        """See `SpectrogramSpeaker`; the dropout is put in the place of what the library draws."""
        kept = iter((dropout > 0).float().unbind(1))
        with patch.object(torch, "bernoulli", lambda *_, **__: next(kept)):
            states = self.model.speecht5.decoder(
                input_values=frames,
                encoder_hidden_states=self.encode(input_ids),
                speaker_embeddings=speaker,
                use_cache=False,
                return_dict=True,
            ).last_hidden_state
        return self._frames(states)[0]


def _heads(attention: Any, states: Tensor) -> Tensor:
    """(B, T, D) -> (B, T, H, K)."""
    rows, length, _ = states.shape
    return states.view(rows, length, attention.num_heads, attention.head_dim)


def read_spectrogram_speaker(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a SpeechT5 that speaks, with its vocoder and its voices.

    Raises:
        SourceError: A folder is incomplete, or its model cannot be served.
    """
    config = folder.config
    longest = int(config.max_text_positions)
    length = folder.options.max_length or longest
    if length > longest:
        raise SourceError(f"{folder.path}: --max-length {length}: the model reads {longest} tokens")
    vocoder = _vocoder_of(folder)
    speech = _speech_of(folder, vocoder)
    voices = _voices_of(folder, speech.speaker_width)
    with as_source_error():
        own = folders.open_tokenizer(folder.path)
    tokenizer = _tokenizer(folder, own)
    model = _load(folder)

    def speaker(of: nn.Module) -> HuggingFaceSpectrogramSpeaker:
        loaded = without_parametrizations(vocoder.load(SpeechT5HifiGan))
        return HuggingFaceSpectrogramSpeaker(of, loaded, speech, max_source_length=length).eval()

    content = ",\n".join(f"{json.dumps(name)}: {json.dumps(voice.tolist())}" for name, voice in voices.items())
    source = folder.source(
        model,
        speaker(model),
        make_reference=lambda: speaker(_load(folder)),
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(eos=int(own.eos_token_id)),
        labels=tuple(voices),
        spectrogram=speech,
    )
    return replace(source, documents={**source.documents, VOICES_FILE: f"{{\n{content}\n}}\n".encode()}), ()


def _load(folder: ModelFolder) -> nn.Module:
    return folder.load(SpeechT5ForTextToSpeech)


def _tokenizer(folder: ModelFolder, own: Any) -> Any:
    """Returns a tokenizer of characters that reads texts as the folder's own does.

    Raises:
        SourceError: It is of another kind.
    """
    if not isinstance(own, SpeechT5Tokenizer):
        raise SourceError(f"{folder.path}: reads by {type(own).__name__}; SpeechT5Tokenizer is supported")
    if own.normalize:
        raise SourceError(
            f"{folder.path}: spells numbers of a text out (normalize), which no bundle does; not supported"
        )
    ids = {str(piece): int(index) for piece, index in own.get_vocab().items()}
    special = list(dict.fromkeys(map(str, (*own.all_special_tokens, *own.added_tokens_encoder))))
    tokenizer = convert_pieces(
        Path(own.vocab_file), ids, unknown=str(own.unk_token), end=str(own.eos_token), special=special
    )
    lines = sample_lines(_NUM_LINES, pieces=[piece for piece in ids if piece not in special])
    check_tokenizer(folder.path, tokenizer, lambda line: own(line).input_ids, lines=lines)
    folder.check_vocabulary(tokenizer)
    return tokenizer


def _speech_of(folder: ModelFolder, vocoder: ModelFolder) -> SpectrogramSpeech:
    """Describes how a model speaks.

    Raises:
        SourceError: Its vocoder makes samples of other frames, or of another number for each.
    """
    config, generator = folder.config, vocoder.config
    if generator.model_in_dim != config.num_mel_bins:
        raise SourceError(
            f"{vocoder.path}: makes samples of {generator.model_in_dim} bins (model_in_dim), and {folder.path} writes "
            f"{config.num_mel_bins} (num_mel_bins); they do not belong together"
        )
    sizes = zip(generator.upsample_rates, generator.upsample_kernel_sizes, strict=True)
    if config.speech_decoder_postnet_kernel % 2 == 0 or any((size - rate) % 2 for rate, size in sizes):
        raise SourceError(f"{folder.path}: its convolutions change the number of frames; not supported")
    dropout = float(config.speech_decoder_prenet_dropout)
    if not 0 < dropout < 1:
        raise SourceError(f"{folder.path}: speech_decoder_prenet_dropout is {dropout:g}; between 0 and 1 is supported")
    postnet = int(config.speech_decoder_postnet_layers) * ((int(config.speech_decoder_postnet_kernel) - 1) // 2)
    return SpectrogramSpeech(
        sampling_rate=int(generator.sampling_rate),
        hop_length=math.prod(generator.upsample_rates),
        num_bins=int(config.num_mel_bins),
        frames_per_step=int(config.reduction_factor),
        num_layers=int(config.speech_decoder_prenet_layers),
        num_units=int(config.speech_decoder_prenet_units),
        kept=dropout,  # as `transformers` has it, which draws what is kept by the probability of dropout
        kept_scale=1 / (1 - dropout),
        speaker_width=int(config.speaker_embedding_dim),
        end_probability=_END_PROBABILITY,
        frames_per_token=_FRAMES_A_TOKEN,
        context_frames=postnet + reach_of_generator(generator),
        frames_per_run=_FRAMES_PER_RUN,
    )


def _vocoder_of(folder: ModelFolder) -> ModelFolder:
    """Returns the folder of the vocoder, fetched if it is an id of the hub.

    Raises:
        SourceError: There is none, or it is no HiFi-GAN.
    """
    given = folder.options.vocoder
    path, own = Path(given or folder.path / _VOCODER), folder.path / _VOCODER
    if given is not None and not path.is_dir() and (on_hub := parse_id(given)) is not None:
        hub = HubModel.find(*on_hub)
        hub.check_files(allow_pickle=folder.options.allow_pickle)
        hub.fetch_descriptions()
        hub.fetch_weights(hub.path, allow_pickle=folder.options.allow_pickle, is_mapped=False, tell=lambda _: None)
        path = hub.path
    if not path.is_dir():
        raise SourceError(
            f"{given}: is no folder here, and no id of the hub; name the vocoder's with --vocoder"
            if given is not None
            else f"{folder.path}: writes spectrograms, and has no folder {own.name} of what makes samples of them; "
            "name its vocoder with --vocoder, such as microsoft/speecht5_hifigan"
        )
    content = read_configuration(path)
    if not any(str(name) == SpeechT5HifiGan.__name__ for name in content.get("architectures") or ()):
        raise SourceError(f"{path}: is no {SpeechT5HifiGan.__name__}, which --vocoder takes")
    with as_source_error():
        config = SpeechT5HifiGanConfig.from_dict(content)
    return replace(folder, path=path, config=config, plain=None)


# Voices


def _voices_of(folder: ModelFolder, width: int) -> dict[str, NDArray[np.float32]]:
    """Reads voices, (E,) each, by name: of each file .npy, and each tensor of files .safetensors.

    Raises:
        SourceError: There are none, or too many, or a file cannot be read or holds other numbers.
    """
    place = folder.options.voices or folder.path / _VOICES
    if folder.options.voices is not None and not place.is_dir():
        raise SourceError(f"--voices {place}: is no folder")
    voices: dict[str, NDArray[np.float32]] = {}
    for name, array in _arrays_in(place):
        voice = np.atleast_1d(array.squeeze())
        if voice.dtype.kind != "f" or voice.shape != (width,) or not np.isfinite(voice).all() or not voice.any():
            raise SourceError(
                f"{place}: the voice {name} is {array.dtype} {array.shape}; a vector of {width} finite numbers is "
                "expected, which are not all 0"
            )
        if name in voices:
            raise SourceError(f"{place}: has the voice {name} twice")
        voices[name] = voice.astype(np.float32)
        if len(voices) > _MOST_VOICES:
            raise SourceError(f"{place}: has more than {_MOST_VOICES} voices, the most of a bundle; give fewer")
    if not voices:
        raise SourceError(
            f"{place}: has no voices; give a folder of x-vectors ({width} numbers each, .npy or .safetensors) with "
            "--voices"
        )
    return voices


def _arrays_in(place: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields the arrays of a folder by name; errors are those of `_voices_of`."""
    for file in sorted((*place.glob("*.npy"), *place.glob("*.safetensors"))):
        if file.stat().st_size > _MOST_VOICE_BYTES:
            raise SourceError(f"{file}: has {file.stat().st_size} bytes; one of voices has at most {_MOST_VOICE_BYTES}")
        try:
            if file.suffix == ".npy":
                yield file.stem, np.load(file, allow_pickle=False)
            else:
                yield from sorted(load_file(file).items())
        except (OSError, ValueError, EOFError, safetensors.SafetensorError) as error:
            raise SourceError(f"{file}: cannot be read ({first_line(error)})") from error
