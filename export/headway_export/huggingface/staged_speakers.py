"""Models that speak in stages: Bark, whose codec is EnCodec (Defossez et al. 2022, arXiv 2210.13438).

The layers are those of `transformers`; what is computed between them is written here, with a cache and with shapes that
do not depend on values.

B texts or windows, T tokens, F frames, K codebooks, C codes of a codebook, D model width, H heads, V vocabulary, S
samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional
from transformers import BarkModel
from transformers.models.bark.generation_configuration_bark import BarkGenerationConfig

from headway_export.errors import SourceError
from headway_export.huggingface.attention import attend_in_one_width
from headway_export.huggingface.encodec import codec_layer, embed_codes
from headway_export.huggingface.folder import ModelFolder, as_source_error, without_parametrizations
from headway_export.source import ExportSource
from headway_server.bundles import VOICES_FILE, SamplingDefaults, SpecialTokens, SpeechStages
from headway_training import folders
from headway_training.folders import first_line, plain_tokenizer
from headway_training.models.parts.attention import Attend

STAGED_SPEAKERS: Final = ("BarkModel",)
"""Architectures that speak in stages."""
_VOICES: Final = "speaker_embeddings_path.json"
"""Names the files of voices."""
_PROMPTS: Final = {"semantic": "semantic_prompt", "coarse": "coarse_prompt", "fine": "fine_prompt"}
_MOST_VOICE_BYTES: Final = 2**20
"""Largest file of a voice; published ones have 10 to 100 KB."""
_KEPT: Final = 2_048
"""Semantic tokens and coarse frames that are kept of the end of a voice: more than any stage reads."""
_DEFAULT_TOP_K: Final = 50
"""Of `generate`, where nothing is said."""


class BarkStage(nn.Module):
    """A stage of Bark that writes token after token, as a `Decoder`."""

    def __init__(self, model: nn.Module, *, max_length: int, num_outputs: int) -> None:
        super().__init__()
        self.model = cast("Any", model)
        self.max_length = max_length
        self.num_outputs = num_outputs

    def embed(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, D); a pair of tokens is the sum of both."""
        table = self.model.input_embeds_layer
        size = table.num_embeddings
        beside = input_ids // size
        added = table((beside - 1).clamp(min=0)) * (beside > 0).unsqueeze(-1)
        return cast("Tensor", table(input_ids % size) + added)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T), (B, T) -> (B, T, D)."""
        places = self.model.position_embeds_layer
        states = self.embed(input_ids) + places(position_ids.clamp(max=places.num_embeddings - 1))
        for number, block in enumerate(self.model.layers):
            own = block.attn
            query, key, value = (
                part.unflatten(-1, (own.num_heads, own.head_dim))
                for part in own.att_proj(block.layernorm_1(states)).chunk(3, dim=-1)
            )  # (B, T, H, D / H)
            states = states + own.out_proj(attend_in_one_width(attend, query, key, value, layer=number).flatten(2))
            states = states + block.mlp(block.layernorm_2(states))
        return cast("Tensor", self.model.layernorm_final(states))

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, V)."""
        return cast("Tensor", self.model.lm_head(hidden)[..., : self.num_outputs])

    def expected(self, input_ids: Tensor) -> Tensor:
        """Logits of the original, (B, T) -> (B, T, V)."""
        return cast("Tensor", self.model(inputs_embeds=self.embed(input_ids)).logits[..., : self.num_outputs])


class BarkSpeaker(nn.Module):
    """A Bark of `transformers` as a `StagedSpeaker`."""

    def __init__(self, model: nn.Module, stages: SpeechStages, *, max_source_length: int, max_length: int) -> None:
        super().__init__()
        self.model = cast("Any", model)
        self.stages = stages
        self.max_source_length = max_source_length
        coarse = self.model.coarse_acoustics
        self.semantic = BarkStage(self.model.semantic, max_length=max_length, num_outputs=stages.first_code + 1)
        self.coarse = BarkStage(
            coarse, max_length=stages.coarse_length, num_outputs=int(coarse.config.output_vocab_size)
        )

    def fine(self, codes: Tensor, book: Tensor) -> Tensor:
        """See `StagedSpeaker`."""
        model = self.model.fine_acoustics
        states = model.position_embeds_layer.weight[: self.stages.fine_input]  # (F, D)
        for number, table in enumerate(model.input_embeds_layers):
            states = states + table(codes[..., number]) * (number <= book)[:, None, None]
        for block in model.layers:
            own = block.attn
            query, key, value = (
                part.unflatten(-1, (own.num_heads, own.head_dim)).transpose(1, 2)
                for part in own.att_proj(block.layernorm_1(states)).chunk(3, dim=-1)
            )  # (B, H, F, D / H)
            context = functional.scaled_dot_product_attention(query, key, value)
            states = states + own.out_proj(context.transpose(1, 2).flatten(2))
            states = states + block.mlp(block.layernorm_2(states))
        heads = torch.stack([head.weight for head in model.lm_heads])  # (K - 1, V, D)
        weights = heads[book - model.config.n_codes_given][:, : self.stages.codebook_size]
        return cast("Tensor", model.layernorm_final(states) @ weights.transpose(1, 2))

    def expected_fine(self, codes: Tensor, book: int) -> Tensor:
        """See `StagedSpeaker`."""
        logits = self.model.fine_acoustics(book, codes).logits
        return cast("Tensor", logits[..., : self.stages.codebook_size])

    def samples(self, codes: Tensor) -> Tensor:
        """See `StagedSpeaker`."""
        codec = self.model.codec_model
        states = embed_codes(codec, codes)
        for layer in codec.decoder.layers:
            states = codec_layer(layer, states)
        return states[:, 0]

    def expected_samples(self, codes: Tensor) -> Tensor:
        """See `StagedSpeaker`."""
        return cast("Tensor", self.model.codec_decode(codes.transpose(1, 2)))


def read_staged_speaker(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a Bark.

    Raises:
        SourceError: The folder is incomplete, or its model cannot be served.
    """
    generation = _generation_of(folder)
    model = cast("Any", _load(folder))
    semantic = generation.semantic_config
    stages = _stages_of(folder, model, generation)
    length = int(semantic.max_input_semantic_length)
    positions = int(model.semantic.config.block_size)
    most = min(int(semantic.max_new_tokens or positions), positions - length)
    if folder.options.max_length is not None:
        raise SourceError(f"--max-length: {folder.path} reads texts of {length} tokens, as it was trained")
    if most < 1:
        raise SourceError(
            f"{folder.path}: has {positions} positions, and texts of {length} tokens leave none for speech"
        )
    with as_source_error():
        tokenizer = plain_tokenizer(folders.open_tokenizer(folder.path))
    if (largest := max(tokenizer.get_vocab().values()) + stages.text_offset) >= stages.num_inputs:
        raise SourceError(
            f"{folder.path}: its tokenizer's largest token is {largest} with text_encoding_offset, and the semantic "
            f"model has {stages.num_inputs} tokens; they do not belong together"
        )
    voices, notes = _voices_of(folder, stages)

    def speaker(of: nn.Module) -> BarkSpeaker:
        return BarkSpeaker(of, stages, max_source_length=length, max_length=length + 1 + most).eval()

    content = ",\n".join(f"{json.dumps(name)}: {json.dumps(voice)}" for name, voice in voices.items())
    source = folder.source(
        model,
        speaker(model),
        make_reference=lambda: speaker(_load(folder)),
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(eos=int(semantic.eos_token_id)),
        labels=tuple(voices),
        stages=stages,
        sampling_defaults=_sampling_of(semantic, stages.first_code + 1),
    )
    return replace(source, documents={**source.documents, VOICES_FILE: f"{{\n{content}\n}}\n".encode()}), notes


def _load(folder: ModelFolder) -> nn.Module:
    return without_parametrizations(folder.load(BarkModel))


def _generation_of(folder: ModelFolder) -> Any:
    """Returns the generation configuration, with those of the stages."""
    file = folder.path / "generation_config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        known = ("semantic_config", "coarse_acoustics_config", "fine_acoustics_config", "sample_rate", "codebook_size")
        return BarkGenerationConfig(**{name: content[name] for name in known if name in content})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise SourceError(f"{file}: cannot be read ({first_line(error)})") from error


def _stages_of(folder: ModelFolder, model: Any, generation: Any) -> SpeechStages:
    """Reads how the stages follow each other.

    Raises:
        SourceError: They do so in a way that is not supported.
    """
    semantic, coarse, fine = (
        generation.semantic_config,
        generation.coarse_acoustics_config,
        generation.fine_acoustics_config,
    )
    codec, of_fine = model.codec_model.config, model.fine_acoustics.config
    first, size = int(semantic.semantic_vocab_size), int(generation.codebook_size)
    has_layers = [len(model.semantic.layers), len(model.coarse_acoustics.layers)]
    demands = {
        "semantic_config.eos_token_id": (semantic.eos_token_id, first),
        "semantic_config.semantic_pad_token": (semantic.semantic_pad_token, first),
        "coarse_acoustics_config.n_coarse_codebooks": (coarse.n_coarse_codebooks, 2),
        "num_layers of the coarse model": (has_layers[1], has_layers[0]),
        "fine_acoustics_config.n_fine_codebooks": (fine.n_fine_codebooks, of_fine.n_codes_total),
        "codec_config.use_causal_conv": (bool(codec.use_causal_conv), True),
        "codec_config.norm_type": (codec.norm_type, "weight_norm"),
        "codec_config.trim_right_ratio": (float(codec.trim_right_ratio), 1.0),
        "codec_config.audio_channels": (codec.audio_channels, 1),
        "codec_config.normalize": (bool(codec.normalize), False),
        "codebook_size of generation_config.json": (size, codec.codebook_size),
    }
    for name, (stated, needed) in demands.items():
        if stated != needed:
            raise SourceError(f"{folder.path}: {name} is {stated}; {needed} is supported")
    if model.coarse_acoustics.config.block_size < coarse.max_coarse_input_length + 1 + coarse.max_coarse_history:
        raise SourceError(
            f"{folder.path}: the coarse model has {model.coarse_acoustics.config.block_size} positions, fewer than its "
            "windows"
        )
    if of_fine.block_size < fine.max_fine_input_length:
        raise SourceError(
            f"{folder.path}: the fine model has {of_fine.block_size} positions, fewer than max_fine_input_length "
            f"({fine.max_fine_input_length})"
        )
    with _in_range():
        return SpeechStages(
            sampling_rate=int(generation.sample_rate),
            hop_length=int(np.prod(codec.upsampling_ratios)),
            num_books=int(fine.n_fine_codebooks),
            codebook_size=size,
            num_inputs=int(model.semantic.config.input_vocab_size),
            text_offset=int(semantic.text_encoding_offset),
            text_pad=int(semantic.text_pad_token),
            semantic_infer=int(semantic.semantic_infer_token),
            min_end_probability=semantic.min_eos_p or None,
            semantic_rate=float(semantic.semantic_rate_hz),
            coarse_rate=float(coarse.coarse_rate_hz),
            first_code=first,
            coarse_pad=int(coarse.coarse_semantic_pad_token),
            coarse_infer=int(coarse.coarse_infer_token),
            coarse_input=int(coarse.max_coarse_input_length),
            coarse_history=int(coarse.max_coarse_history),
            coarse_window=int(coarse.sliding_window_len),
            coarse_sampling=_sampling_of(coarse, size),
            fine_input=int(fine.max_fine_input_length),
            fine_history=int(fine.max_fine_history_length),
            fine_temperature=1.0 if fine.temperature is None else float(fine.temperature),
        )


def _sampling_of(settings: Any, size: int) -> SamplingDefaults:
    """Reads how a stage chooses one of so many tokens."""
    if not settings.do_sample:
        return SamplingDefaults()
    values: dict[str, Any] = {
        "temperature": 1.0 if settings.temperature is None else settings.temperature,
        "top_k": min(_DEFAULT_TOP_K if settings.top_k is None else settings.top_k, size),
    }
    values |= {name: getattr(settings, name) for name in ("top_p", "min_p") if getattr(settings, name) is not None}
    with _in_range():
        return SamplingDefaults.model_validate(values)


@contextmanager
def _in_range() -> Iterator[None]:
    """Names a value that is out of its range.

    Raises:
        SourceError: There is one.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SourceError(f"generation_config.json: {where} is {first['input']!r}: {first['msg']}") from error


# Voices


def _voices_of(folder: ModelFolder, stages: SpeechStages) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Reads history prompts, those that `speaker_embeddings_path.json` names and files of `.npz`; and notes.

    Raises:
        SourceError: A file cannot be read, or holds other arrays.
    """
    found: dict[str, Mapping[str, Any]] = {}
    missing: list[str] = []
    if (file := folder.path / _VOICES).exists():
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            named = {str(name): dict(paths) for name, paths in content.items() if name != "repo_or_path"}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise SourceError(f"{file}: cannot be read ({first_line(error)})") from error
        for name, paths in named.items():
            files = {prompt: _inside(folder.path, file, paths.get(prompt)) for prompt in _PROMPTS.values()}
            if all(one.exists() for one in files.values()):
                found[name] = {prompt: _load_array(one) for prompt, one in files.items()}
            else:
                missing.append(name)
    for one in sorted((*folder.path.glob("*.npz"), *folder.path.glob("speaker_embeddings/**/*.npz"))):
        found[one.stem] = _load_array(one)
    voices = {name: _voice(folder.path, name, arrays, stages) for name, arrays in found.items()}
    notes: tuple[str, ...] = ()
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        notes = (f"{_VOICES} names voices whose files are not there, which are left out: {names}",)
    return voices, notes


def _inside(folder: Path, file: Path, given: Any) -> Path:
    if not isinstance(given, str) or not (path := folder / given).resolve().is_relative_to(folder.resolve()):
        raise SourceError(f"{file}: names {str(given)[:64]!r}, which is no file of the folder")
    return path


def _load_array(file: Path) -> Any:
    if file.stat().st_size > _MOST_VOICE_BYTES:
        raise SourceError(f"{file}: has {file.stat().st_size} bytes; a voice has at most {_MOST_VOICE_BYTES}")
    try:
        loaded = np.load(file, allow_pickle=False)
        return {name: loaded[name] for name in _PROMPTS.values()} if file.suffix == ".npz" else loaded
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise SourceError(
            f"{file}: cannot be read ({first_line(error)}); a voice has {', '.join(_PROMPTS.values())}"
        ) from error


def _voice(folder: Path, name: str, arrays: Mapping[str, NDArray[Any]], stages: SpeechStages) -> dict[str, Any]:
    """Returns the ends of a voice's prompts that are read, frame by frame."""
    rows = {"semantic": (None, stages.first_code), "coarse": (2, stages.codebook_size)}
    rows["fine"] = (stages.num_books, stages.codebook_size)
    lengths = {"semantic": _KEPT, "coarse": _KEPT, "fine": stages.fine_history}
    voice = {}
    for part, prompt in _PROMPTS.items():
        array, (books, stop) = arrays[prompt], rows[part]
        shape = f"({'' if books is None else f'{books}, '}T)"
        right = array.ndim == 1 if books is None else array.ndim == 2 and len(array) == books
        if not right or array.dtype.kind not in "iu" or (array.size and not 0 <= array.min() <= array.max() < stop):
            raise SourceError(
                f"{folder}: the {prompt} of voice {name} is {array.dtype} {array.shape}; integers from 0 to {stop - 1} "
                f"of {shape} are expected"
            )
        length = lengths[part]
        voice[part] = array.T[-length:].tolist()
    return voice
