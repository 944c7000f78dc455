"""Models that write codes in the delay pattern: MusicGen (Copet et al. 2023, arXiv 2306.05284), with EnCodec.

The layers are those of `transformers`; what is computed between them is written here, with a cache.

R rows of a step, T tokens or steps, F frames, K codebooks, V codes of a codebook, D channels, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import MusicgenForConditionalGeneration

from headway_export.errors import SourceError
from headway_export.huggingface.attention import attend_in_one_width, width_of_cache
from headway_export.huggingface.encodec import codec_layer, embed_codes, reach_of
from headway_export.huggingface.folder import ModelFolder, as_source_error, without_parametrizations
from headway_export.source import ExportSource
from headway_server.bundles import DelayedCodes, SamplingDefaults, SpecialTokens
from headway_training import folders
from headway_training.folders import plain_tokenizer
from headway_training.models.parts.attention import Attend, AttendCross

DELAYED_SPEAKERS: Final = ("MusicgenForConditionalGeneration",)
"""Architectures that write codes in the delay pattern."""
_LENGTH: Final = 512
"""Most tokens of a text, unless another length is asked for: T5's positions have no end."""
_FRAMES_PER_RUN: Final = 128
"""Frames of a window, beside those around it that are computed again."""
_DEFAULT_TOP_K: Final = 50
"""Of `generate`, where nothing is said."""
_NUM_RECURRENT: Final = 2
"""Layers of EnCodec's decoder up to the one that recurs."""


class MusicgenSpeaker(nn.Module):
    """A MusicGen of `transformers` as a `DelayedSpeaker`."""

    def __init__(self, model: nn.Module, delayed: DelayedCodes, *, max_source_length: int) -> None:
        super().__init__()
        self.model = cast("Any", model)
        self.delayed = delayed
        self.max_source_length = max_source_length
        self.max_length = delayed.steps_of(delayed.max_frames)
        config = self.model.config.decoder
        heads = int(config.num_attention_heads)
        self.cache_shape = (int(config.num_hidden_layers), heads, width_of_cache(config.hidden_size // heads))
        self.num_channels = int(self.model.audio_encoder.decoder.layers[_NUM_RECURRENT - 1].lstm.hidden_size)
        table = self.model.decoder.model.decoder.embed_positions
        self.register_buffer("positions", table.get_embedding(self.max_length, int(config.hidden_size)))

    def encode(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, D)."""
        memory = self.model.text_encoder(input_ids, return_dict=True).last_hidden_state
        project = getattr(self.model, "enc_to_dec_proj", None)
        return cast("Tensor", memory if project is None else project(memory))

    def cross_keys_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(B, T, D) -> for each layer of the decoder twice (B, T, H, D / H)."""
        attentions = [layer.encoder_attn for layer in self.model.decoder.model.decoder.layers]
        return [(_heads(own, own.k_proj(memory)), _heads(own, own.v_proj(memory))) for own in attentions]

    def step(self, read: Sequence[Tensor], position_ids: Tensor, attend: Attend, attend_cross: AttendCross) -> Tensor:
        """See `StepWriter`. Without the text all keys and values are 0, and so is what is attended to."""
        codes, condition = read
        decoder = self.model.decoder.model.decoder
        vectors = [table(codes[:, number]) for number, table in enumerate(decoder.embed_tokens)]
        states = torch.stack(vectors).sum(dim=0)[:, None] + cast("Tensor", self.positions)[position_ids]  # (R, 1, D)
        reads = condition[:, None, None]
        for number, layer in enumerate(decoder.layers):
            own, inner = layer.self_attn, layer.self_attn_layer_norm(states)
            query, key, value = (_heads(own, project(inner)) for project in (own.q_proj, own.k_proj, own.v_proj))
            found = attend_in_one_width(attend, query, key, value, layer=number)
            states = states + own.out_proj(found.flatten(2))
            own, inner = layer.encoder_attn, layer.encoder_attn_layer_norm(states)
            found = attend_cross(_heads(own, own.q_proj(inner)), layer=number)
            states = states + own.out_proj(found.flatten(2)) * reads
            inner = layer.final_layer_norm(states)
            states = states + layer.fc2(layer.activation_fn(layer.fc1(inner)))
        states = decoder.layer_norm(states)
        return torch.cat([head(states) for head in self.model.decoder.lm_heads], dim=-1)  # (R, 1, K * V)

    def states(self, codes: Tensor) -> Tensor:
        """See `DelayedSpeaker`."""
        codec = self.model.audio_encoder
        states = embed_codes(codec, codes)
        for layer in codec.decoder.layers[:_NUM_RECURRENT]:
            states = codec_layer(layer, states)
        return states.transpose(1, 2)

    def samples(self, states: Tensor) -> Tensor:
        """See `DelayedSpeaker`."""
        states = states.transpose(1, 2)
        for layer in self.model.audio_encoder.decoder.layers[_NUM_RECURRENT:]:
            states = codec_layer(layer, states)
        return states[:, 0]

    def expected_logits(self, input_ids: Tensor, codes: Tensor, condition: Tensor) -> Tensor:
        """See `DelayedSpeaker`."""
        mask = torch.ones_like(input_ids) * condition.long()[:, None]
        logits = self.model(
            encoder_outputs=(self.model.text_encoder(input_ids, return_dict=True).last_hidden_state,),
            attention_mask=mask,
            decoder_input_ids=codes[0].T,  # (K, T)
            use_cache=False,
        ).logits  # (K, T, V)
        return cast("Tensor", logits.transpose(0, 1).flatten(1))

    def expected_samples(self, codes: Tensor) -> Tensor:
        """See `DelayedSpeaker`."""
        return cast("Tensor", self.model.audio_encoder.decode(codes.transpose(1, 2)[None], [None]).audio_values[:, 0])


def _heads(attention: Any, states: Tensor) -> Tensor:
    """(B, T, D) -> (B, T, H, D / H)."""
    rows, length, _ = states.shape
    return states.view(rows, length, attention.num_heads, attention.head_dim)


def read_delayed_speaker(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a MusicGen.

    Raises:
        SourceError: The folder is incomplete, or its model cannot be served.
    """
    _check(folder)
    model = cast("Any", _load(folder))
    generation = folder.generation_config()
    delayed = _delayed_of(folder, model, generation)
    length = folder.options.max_length or _LENGTH
    with as_source_error():
        tokenizer = plain_tokenizer(folders.open_tokenizer(folder.path))
    if (largest := max(tokenizer.get_vocab().values())) >= (known := int(folder.config.text_encoder.vocab_size)):
        raise SourceError(
            f"{folder.path}: its tokenizer's largest token is {largest}, and the text encoder has {known} tokens; they "
            "do not belong together"
        )

    def speaker(of: nn.Module) -> MusicgenSpeaker:
        return MusicgenSpeaker(of, delayed, max_source_length=length).eval()

    source = folder.source(
        model,
        speaker(model),
        make_reference=lambda: speaker(_load(folder)),
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(),
        sampling_defaults=_sampling_of(generation, delayed.codebook_size),
        delayed=delayed,
    )
    return source, ()


def _load(folder: ModelFolder) -> nn.Module:
    return without_parametrizations(folder.load(MusicgenForConditionalGeneration))


def _check(folder: ModelFolder) -> None:
    """Checks that codes and samples are computed as they are here.

    Raises:
        SourceError: They are not.
    """
    decoder, codec, text = folder.config.decoder, folder.config.audio_encoder, folder.config.text_encoder
    demands = {
        "decoder.audio_channels": (decoder.audio_channels, 1),
        "decoder.pad_token_id": (decoder.pad_token_id, decoder.vocab_size),
        "decoder.scale_embedding": (bool(decoder.scale_embedding), False),
        "decoder.cross_attention_hidden_size": (decoder.cross_attention_hidden_size, None),
        "text_encoder.model_type": (text.model_type, "t5"),
        "audio_encoder.model_type": (codec.model_type, "encodec"),
        "audio_encoder.norm_type": (codec.norm_type, "weight_norm"),
        "audio_encoder.trim_right_ratio": (float(codec.trim_right_ratio), 1.0),
        "audio_encoder.audio_channels": (codec.audio_channels, 1),
        "audio_encoder.normalize": (bool(codec.normalize), False),
        "audio_encoder.chunk_length_s": (codec.chunk_length_s, None),
        "audio_encoder.codebook_size": (codec.codebook_size, decoder.vocab_size),
    }
    for name, (stated, needed) in demands.items():
        if stated != needed:
            what = " (stereo)" if name == "decoder.audio_channels" else ""
            raise SourceError(f"{folder.path}: {name} is {stated}{what}; {needed} is supported")


def _delayed_of(folder: ModelFolder, model: Any, generation: Any) -> DelayedCodes:
    """Describes how a model writes.

    Raises:
        SourceError: It begins otherwise, has fewer codebooks of the codec, or no room for audio.
    """
    decoder, codec = folder.config.decoder, folder.config.audio_encoder
    books = int(decoder.num_codebooks)
    for name in ("decoder_start_token_id", "pad_token_id"):
        stated = getattr(generation, name, None)
        if stated is not None and stated != decoder.vocab_size:
            raise SourceError(f"{folder.path}: {name} of generation is {stated}; {decoder.vocab_size} is supported")
    if len(model.audio_encoder.quantizer.layers) < books:
        raise SourceError(
            f"{folder.path}: its codec has {len(model.audio_encoder.quantizer.layers)} codebooks, and its decoder "
            f"writes {books}"
        )
    steps = generation.max_new_tokens or (generation.max_length or decoder.max_position_embeddings) - 1
    if (frames := int(steps) + 1 - books) < 1:
        raise SourceError(f"{folder.path}: generates {steps} tokens, of which {books} codebooks leave no frame")
    try:
        return DelayedCodes(
            sampling_rate=int(codec.sampling_rate),
            hop_length=math.prod(codec.upsampling_ratios),
            num_books=books,
            codebook_size=int(decoder.vocab_size),
            guidance_scale=max(1.0, float(generation.guidance_scale or 1.0)),
            max_frames=frames,
            context_frames=reach_of(model.audio_encoder.decoder.layers[_NUM_RECURRENT:]),
            frames_per_run=_FRAMES_PER_RUN,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise SourceError(f"{folder.path}: {first['loc'][0]} is {first['input']!r}: {first['msg']}") from error


def _sampling_of(generation: Any, size: int) -> SamplingDefaults:
    """Reads how one of so many codes is chosen."""
    if not generation.do_sample:
        return SamplingDefaults()
    top_k = _DEFAULT_TOP_K if generation.top_k is None else int(generation.top_k)
    values = {name: getattr(generation, name, None) for name in ("temperature", "top_p", "min_p")}
    given = {name: float(value) for name, value in values.items() if value is not None}
    return SamplingDefaults.model_validate({"temperature": 1.0, "top_k": min(top_k, size), **given})
