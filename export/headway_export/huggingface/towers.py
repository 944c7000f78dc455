"""Models of two towers that put images and texts into one space: CLIP, SigLIP and their kin.

A folder becomes two sources, one for each tower, whose bundles name one space.

B rows, T tokens, L tokens that a fixed length pads to, E width of the space.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder, as_source_error
from headway_export.huggingface.images import PREPROCESSOR_FILE, read_preprocessing
from headway_export.huggingface.patches import PatchReader, patches_of
from headway_export.huggingface.tokenizers import check_tokenizer, convert_pieces, read_pieces, sample_lines
from headway_export.source import ExportSource
from headway_export.source import open_tokenizer as open_tokenizer_file
from headway_server.bundles import TOKENIZER_FILE, Space, SpecialTokens, Task
from headway_training.folders import first_line, length_of, open_tokenizer, plain_tokenizer

ARCHITECTURES: Final = (
    "CLIPModel",
    "ChineseCLIPModel",
    "AltCLIPModel",
    "MetaClip2Model",
    "SiglipModel",
    "Siglip2Model",
)
TASKS: Final = (Task.IMAGE_EMBEDDING, Task.TEXT_EMBEDDING)
VECTOR_BOUND: Final = 1e-5
"""Largest difference of a number of a vector of length one between a tower alone and the whole model."""

_OF_PATCHES: Final = "siglip2"
"""Type of models that read patches of images whose proportions are kept, whose other form is of type `siglip`."""
_PIECES_FILE: Final = "spiece.model"
_SAMPLE_TEXTS: Final = ("a photo of a cat", "red", "two dogs and a very large house by the sea")
SAMPLE_LABELS: Final = ("a photo of a cat", "red", "two dogs and a very large house")
"""Labels of the caller that models of these are compared on."""


class HuggingFaceImageTower(nn.Module):
    """The tower of a model of `transformers` that reads images."""

    pooling = "tower"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """(B, 3, height, width) -> `embedding` (B, E) of length one."""
        output = cast("Any", self.model).get_image_features(pixel_values=pixel_values, return_dict=True)
        return {"embedding": functional.normalize(output.pooler_output, dim=-1)}


class HuggingFacePatchTower(nn.Module):
    """The tower of SigLIP 2 that reads patches of images of many sizes."""

    pooling = "tower"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.reader = PatchReader(cast("Any", model).vision_model)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """(B, 3, height, width), in whole patches -> `embedding` (B, E) of length one."""
        return {"embedding": functional.normalize(self.reader(pixel_values), dim=-1)}


class HuggingFaceTextTower(nn.Module):
    """The tower of a model of `transformers` that reads texts.

    One that was trained on texts of a fixed length reads them so here: its graph puts the padding around a text.
    """

    pooling = "tower"

    def __init__(self, model: nn.Module, reading: TextReading) -> None:
        super().__init__()
        self.model = model
        self.max_length = reading.max_length
        self.reading = reading

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """(B, T), (B, T), 1 at tokens and 0 behind them -> `embedding` (B, E) of length one."""
        if self.reading.is_fixed:
            input_ids, attention_mask = self._pad(input_ids, attention_mask)
        mask = {"attention_mask": attention_mask} if self.reading.reads_mask else {}
        output = cast("Any", self.model).get_text_features(input_ids=input_ids, return_dict=True, **mask)
        return {"embedding": functional.normalize(output.pooler_output, dim=-1)}

    def _pad(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T), (B, T) -> (B, L), (B, L)."""
        lengths = attention_mask.sum(dim=1, keepdim=True)  # (B, 1)
        places = torch.arange(self.max_length).unsqueeze(0)  # (1, L)
        if self.reading.pads_before:
            places = places - (self.max_length - lengths)  # (B, L), below 0 at padding
        is_token = (places >= 0) & (places < lengths)
        tokens = input_ids.gather(1, torch.minimum(places.clamp(min=0), lengths - 1))
        return torch.where(is_token, tokens, self.reading.pad_id), is_token.to(attention_mask.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReading:
    """How a tower reads a text."""

    max_length: int
    """Most tokens."""
    is_fixed: bool
    """True if every text is padded to that."""
    pads_before: bool
    """True if the padding comes before the text."""
    pad_id: int
    reads_mask: bool
    """True if the tower is told where the padding is."""


def is_two_towers(content: Mapping[str, Any]) -> bool:
    """True of the configuration of a model of two towers."""
    return any(name in ARCHITECTURES for name in content.get("architectures") or [])


def read_towers(folder: ModelFolder) -> tuple[tuple[ExportSource, ...], tuple[str, ...]]:
    """Reads a folder: one source for each tower, or for the one whose task is asked for, and no notes.

    Raises:
        SourceError: The folder is incomplete, or the model or what goes with it cannot be served.
    """
    asked = folder.options.task
    if asked not in (None, *TASKS):
        raise SourceError(f"{folder.path}: has towers for {' and '.join(TASKS)}, and --task is {asked}")
    if folder.options.evaluation_file is not None:
        raise SourceError(f"--evaluation: no metric of {' and '.join(TASKS)} is known; leave it out")
    reads_patches = folder.config.model_type == _OF_PATCHES
    preprocessing, is_bgr = read_preprocessing(folder, of_any_size=reads_patches)
    if is_bgr:
        raise SourceError(f"{folder.path}: {PREPROCESSOR_FILE} reverses the channels; towers are given RGB")
    tokenizer, read = read_tokenizer(folder)
    model: Any = folder.load(AutoModel)
    reading = _reading_of(folder, model, read)

    def tower_of(model: nn.Module, task: Task) -> nn.Module:
        if task is Task.TEXT_EMBEDDING:
            return HuggingFaceTextTower(model, reading).eval()
        return (HuggingFacePatchTower if reads_patches else HuggingFaceImageTower)(model).eval()

    def another(task: Task) -> nn.Module:
        return tower_of(folder.load(AutoModel), task)

    towers = {task: tower_of(model, task) for task in TASKS}
    _check_towers(folder, towers, read, tokenizer, (preprocessing.height, preprocessing.width))
    space = _space_of(folder, model)
    parts: dict[Task, dict[str, Any]] = {
        Task.IMAGE_EMBEDDING: {"image_preprocessing": preprocessing},
        Task.TEXT_EMBEDDING: {"tokenizer": tokenizer, "special_tokens": SpecialTokens(pad=reading.pad_id)},
    }
    sources = []
    for task, side in ((Task.IMAGE_EMBEDDING, "image"), (Task.TEXT_EMBEDDING, "text")):
        if asked in (None, task):
            of_tower = replace(folder, task=task, options=replace(folder.options, name=f"{folder.name()}-{side}"))
            sources.append(
                of_tower.source(
                    model,
                    towers[task],
                    make_reference=partial(another, task),
                    space=space,
                    part=f": the tower that reads {side}s",
                    **parts[task],
                )
            )
    return tuple(sources), ()


def _space_of(folder: ModelFolder, model: Any) -> Space:
    """Describes the space; its name is that of the family and a hash of the weights."""
    digest = hashlib.sha256()
    for file in sorted((*folder.path.glob("*.safetensors"), *folder.path.glob("*.bin"))):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    bias = getattr(model, "logit_bias", None)
    return Space(
        name=f"{folder.config.model_type}-{digest.hexdigest()[:12]}",
        probabilities="softmax" if bias is None else "sigmoid",
        scale=float(model.logit_scale.detach().double().exp()),
        bias=0.0 if bias is None else float(bias.detach()),
    )


def _reading_of(folder: ModelFolder, model: Any, tokenizer: Any) -> TextReading:
    """Says how the text tower reads.

    Raises:
        SourceError: More tokens are asked for than it takes.
    """
    text = folder.config.text_config

    def read(ids: Tensor, mask: Tensor) -> object:
        return model.get_text_features(input_ids=ids, attention_mask=mask)

    longest = min(length_of(model, text, read).usual, int(tokenizer.model_max_length))
    is_fixed = hasattr(folder.config, "vision_config") and folder.config.model_type.startswith("siglip")
    asked = folder.options.max_length
    if asked is not None and (asked > longest or is_fixed):
        reads = f"texts are padded to {longest} tokens" if is_fixed else f"the model takes {longest} tokens"
        raise SourceError(f"{folder.path}: --max-length {asked}: {reads}")
    pad_id = tokenizer.pad_token_id
    return TextReading(
        max_length=asked or longest,
        is_fixed=is_fixed,
        pads_before=tokenizer.padding_side == "left",
        pad_id=int(text.pad_token_id or 0) if pad_id is None else int(pad_id),
        reads_mask="attention_mask" in tokenizer.model_input_names,
    )


def _check_towers(
    folder: ModelFolder,
    towers: Mapping[Task, nn.Module],
    read: Any,
    tokenizer: Tokenizer,
    size: tuple[int, int],
) -> None:
    """Holds the vectors of the towers against those of the whole model, which reads what the folder's tokenizer makes.

    Raises:
        SourceError: They differ, or the model does not read such images.
    """
    text_tower = cast("HuggingFaceTextTower", towers[Task.TEXT_EMBEDDING])
    model: Any = text_tower.model
    padding = "max_length" if text_tower.reading.is_fixed else True
    inputs = read(
        list(_SAMPLE_TEXTS),
        padding=padding,
        max_length=text_tower.reading.max_length,
        truncation=True,
        return_tensors="pt",
    )
    pixels = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    try:
        with torch.inference_mode():
            whole = model(**_pixels_of(model, pixels), return_dict=True, **inputs)
            images = towers[Task.IMAGE_EMBEDDING](pixels)["embedding"]
            texts = [
                text_tower(ids, torch.ones_like(ids))["embedding"]
                for text in _SAMPLE_TEXTS
                for ids in [torch.tensor([_cut(tokenizer, text, text_tower.reading.max_length)])]
            ]
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{folder.path}: {type(model).__name__} does not read images of {size[0]} x {size[1]}, which "
            f"{PREPROCESSOR_FILE} asks for, or the tokens of its tokenizer ({first_line(error)})"
        ) from error
    for what, found, expected in (
        ("images", images, whole.image_embeds),
        ("texts", torch.cat(texts), whole.text_embeds),
    ):
        if not (error_size := float((found - expected).abs().max())) <= VECTOR_BOUND:
            raise SourceError(
                f"{folder.path}: the tower of {what} gives other vectors by itself than in {type(model).__name__} "
                f"(they differ by {error_size:.1e}, limit {VECTOR_BOUND:.0e}); not supported"
            )


def _pixels_of(model: Any, pixels: Tensor) -> dict[str, Tensor]:
    """Returns the inputs of a model for images, (B, 3, height, width)."""
    if model.config.model_type != _OF_PATCHES:
        return {"pixel_values": pixels}
    side = model.config.vision_config.patch_size
    patches = patches_of(pixels, side)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.int64),
        "spatial_shapes": torch.tensor([[size // side for size in pixels.shape[2:]]] * len(pixels)),
    }


def _cut(tokenizer: Tokenizer, text: str, length: int) -> list[int]:
    tokenizer.enable_truncation(length)
    ids = tokenizer.encode(text).ids
    tokenizer.no_truncation()
    return ids


# Tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelReader:
    """How a model reads labels of the caller, each by itself."""

    tokenizer: Tokenizer
    library: Any
    """The tokenizer of `transformers`."""
    max_length: int
    """Most tokens of a label."""

    @classmethod
    def of(cls, folder: ModelFolder) -> LabelReader:
        """Reads that of a folder whose texts are read by a tower.

        Raises:
            SourceError: There is no tokenizer that can be read, or more tokens are asked for than the tower takes.
        """
        tokenizer, library = read_tokenizer(folder)
        longest = int(folder.config.text_config.max_position_embeddings)
        if (asked := folder.options.max_length) is not None and asked > longest:
            raise SourceError(f"{folder.path}: --max-length {asked}: the model takes {longest} tokens")
        return cls(tokenizer=tokenizer, library=library, max_length=asked or longest)

    @property
    def parts(self) -> dict[str, Any]:
        """Fields of an `ExportSource`."""
        pad = self.library.pad_token_id
        return {"tokenizer": self.tokenizer, "special_tokens": SpecialTokens(pad=0 if pad is None else int(pad))}

    def samples(self) -> Mapping[str, Tensor]:
        """Returns `input_ids` and `attention_mask` of some labels, (C, T), padded to the most tokens."""
        inputs: Mapping[str, Tensor] = self.library(
            list(SAMPLE_LABELS),
            padding="max_length",
            max_length=self.max_length,
            truncation=True,
            return_tensors="pt",
        )
        return {name: inputs[name] for name in ("input_ids", "attention_mask")}

    def embed_samples(self, encoder: nn.Module) -> Tensor:
        """Returns the embeddings of these labels, (C, D), each by itself and without padding."""
        samples = self.samples()
        lengths = samples["attention_mask"].sum(dim=1).tolist()
        return torch.cat(
            [
                encoder(ids[None, :length], torch.ones(1, length, dtype=torch.int64))["embedding"]
                for ids, length in zip(samples["input_ids"], lengths, strict=True)
            ]
        )


def read_tokenizer(folder: ModelFolder) -> tuple[Tokenizer, Any]:
    """Returns the tokenizer, and that of `transformers`.

    Raises:
        SourceError: There is none that can be read, or it is not the model's.
    """
    with as_source_error():
        read = open_tokenizer(folder.path)
    tokenizer = plain_tokenizer(read) if hasattr(read, "backend_tokenizer") else _from_pieces(folder.path, read)
    folder.check_vocabulary(tokenizer)
    return tokenizer, read


def _from_pieces(path: Path, read: Any) -> Tokenizer:
    """Returns the tokenizer of a SigLIP folder, which canonicalizes a text and gives it to a SentencePiece model.

    Raises:
        SourceError: What is there reads otherwise than the folder's own tokenizer.
    """
    file = path / TOKENIZER_FILE
    if file.exists():
        tokenizer = open_tokenizer_file(file)
        tokenizer.no_padding()
        tokenizer.no_truncation()
    else:
        ids = {piece.piece: index for index, piece in enumerate(read_pieces(path / _PIECES_FILE).pieces)}
        special = [str(token) for token in read.all_special_tokens]
        tokenizer = convert_pieces(
            path / _PIECES_FILE, ids, unknown=str(read.unk_token), end=str(read.eos_token), special=special
        )
        steps = [
            *([normalizers.Lowercase()] if read.do_lower_case else []),
            normalizers.Replace(Regex("[" + "".join(f"\\x{ord(mark):02x}" for mark in string.punctuation) + "]"), ""),
            normalizers.Replace(Regex(r"[\s\x1c-\x1f]+"), " "),  # what Python takes for white space
            normalizers.Strip(),
        ]
        tokenizer.normalizer = normalizers.Sequence([*steps, tokenizer.normalizer])
    check_tokenizer(path, tokenizer, lambda line: read(line)["input_ids"], lines=sample_lines())
    return tokenizer
