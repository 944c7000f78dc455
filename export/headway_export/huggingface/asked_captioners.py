"""Models that write about an image what a text asks of them, such as Florence-2: its encoder reads image and text.

The embeddings of an image stand in front of those of a text in the encoder of an encoder-decoder of texts. What is
asked is a task by its name, which the folder's processor spells out.

B images, M tokens of an image, S those of image and text, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from headway_export.candidate import named_source
from headway_export.errors import SourceError
from headway_export.huggingface.attention import ATTENTION, check_logits, running
from headway_export.huggingface.captioners import with_written_tokens, written_length
from headway_export.huggingface.encoder_decoders import (
    HuggingFaceEncoderDecoder,
    OwnEncoderDecoder,
    random_tokens,
    read_generation_config,
)
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.images import read_preprocessing
from headway_export.huggingface.vision_language import open_processor
from headway_export.reference import translation_logits
from headway_export.source import ExportSource, Readable
from headway_server.bundles import ImageQuestion, PatchGrid
from headway_server.tasks.captioning.model import framed_question
from headway_training.folders import first_line, quiet

ASKED_CAPTIONERS: Final = ("Florence2ForConditionalGeneration",)
"""Architectures that write about an image what a text asks of them."""
_DEFAULT: Final = "<CAPTION>"
_WRITTEN: Final = re.compile(r"(?!</?(?:s|pad|unk|mask|image)>)</?[a-z]+(?:_[0-9]+)?>")
"""Tokens of places and of what stands around them, which are part of a text."""


class HuggingFaceAskedCaptioner(HuggingFaceEncoderDecoder):
    """A model of `transformers` that reads a text with an image, as an `ImageToText` that reads questions."""

    reads_questions = True

    def __init__(self, model: nn.Module, *, grid: PatchGrid, max_source_length: int, max_target_length: int) -> None:
        """Adapts a model; other arguments and errors are those of `HuggingFaceEncoderDecoder`.

        Args:
            model: The model.
            grid: Tokens of an image.
            max_source_length: Most tokens of an image and a text.
            max_target_length: Most tokens of what is written.
        """
        super().__init__(
            model,
            max_source_length=max_source_length,
            max_target_length=max_target_length,
            decoder=_language(model).decoder,
        )
        self.grid = grid.rows, grid.columns
        self.num_leading_tokens = grid.num_leading
        self._encoder = _language(model).encoder

    def encode(  # type: ignore[override]  # the protocol is another
        self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor
    ) -> Tensor:
        """(B, 3, height, width), (B, S), (B, S) -> (B, S, D); the first M tokens stand for the image."""
        features = cast("Any", self.model).get_image_features(pixel_values, return_dict=True).pooler_output
        embedded = cast("Any", self.model).get_input_embeddings()(input_ids)
        places = torch.arange(input_ids.shape[1])
        of_image = features[:, places.clamp(max=features.shape[1] - 1)]
        embedded = torch.where((places < features.shape[1])[None, :, None], of_image, embedded)
        return self._encode(attention_mask, inputs_embeds=embedded, attention_mask=attention_mask)


class OwnAskedCaptioner(OwnEncoderDecoder):
    """A model of `transformers` that reads a text with an image, with its own attention."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, decoder=_language(model).decoder)

    def encode_source(self, source: Any) -> Tensor:
        """Pixels (1, 3, height, width) and tokens (1, S) by name -> (1, S, D)."""
        model = cast("Any", self.model)
        embedded = model.get_input_embeddings()(source["input_ids"])
        is_image = (source["input_ids"] == model.config.image_token_id)[..., None]
        features = model.get_image_features(source["pixel_values"], return_dict=True).pooler_output
        embedded = embedded.masked_scatter(is_image, features.to(embedded.dtype))
        return cast("Tensor", _language(model).encoder(inputs_embeds=embedded, return_dict=True).last_hidden_state)

    def _read(self, source: Any) -> dict[str, Tensor]:
        return dict(source)


def _language(model: nn.Module) -> Any:
    return cast("Any", model).model.language_model


def read_asked_captioner(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model that writes about an image what a text asks of it.

    Raises:
        SourceError: The folder is incomplete, or its model or its preprocessing cannot be served.
    """
    preprocessing, is_bgr = read_preprocessing(folder)
    if is_bgr:
        raise SourceError(f"{folder.path}: reads images as BGR, which is not supported for {folder.task}")
    tokenizer = with_written_tokens(folder.tokenizer(), _WRITTEN)
    start = read_generation_config(folder)
    model = folder.load(AutoModelForImageTextToText)
    vision = folder.config.vision_config
    pixels = np.random.default_rng(0).normal(size=(3, preprocessing.height, preprocessing.width)).astype(np.float32)
    with torch.inference_mode():
        num_tokens = _embed(model, pixels).shape[1]
    side = int(np.prod(vision.patch_stride))
    rows, columns = (-(-size // side) for size in (preprocessing.height, preprocessing.width))
    if num_tokens != 1 + rows * columns:
        raise SourceError(
            f"{folder.path}: an image is {num_tokens} tokens, which are no {rows} x {columns} patches and one"
        )
    grid = PatchGrid(rows=rows, columns=columns, has_class_token=True)
    question, notes = _read_question(folder, grid)
    texts = folder.config.text_config
    most_source = int(texts.max_position_embeddings)
    if most_source <= num_tokens + question.num_framing:
        raise SourceError(f"{folder.path}: an image is {num_tokens} tokens, and the model reads {most_source}")
    length, length_notes = written_length(folder, most_source, usual=most_source)
    ids = framed_question(question, grid, random_tokens(folder, 7))
    source: Readable = {"pixel_values": pixels, "input_ids": ids}
    target = random_tokens(folder, min(48, length))
    owner = f"{folder.path}: {type(model).__name__}"
    with torch.inference_mode():
        given = {name: torch.from_numpy(array)[None] for name, array in named_source(source).items()}
        expected = model(**given, decoder_input_ids=torch.from_numpy(target)[None], use_cache=False).logits
    with running(owner):
        _language(model).set_attn_implementation(ATTENTION)
        cast("Any", model).model.vision_tower.set_attn_implementation("eager")
        module = HuggingFaceAskedCaptioner(model, grid=grid, max_source_length=most_source, max_target_length=length)
        compute = partial(translation_logits, module, source, target)
        found = compute()
    check_logits(found, expected[0].float().numpy(), owner, compute)
    exported = folder.source(
        model,
        module,
        make_reference=lambda: OwnAskedCaptioner(folder.load(AutoModelForImageTextToText)),
        tokenizer=tokenizer,
        special_tokens=start.special_tokens,
        prompt_prefix=start.prefix,
        suppressed_tokens=start.suppressed_tokens,
        image_preprocessing=preprocessing,
        image_question=question,
        evaluation=folder.evaluation(),
    )
    return exported, (*start.notes, *notes, *length_notes)


def _embed(model: nn.Module, pixels: np.ndarray) -> Tensor:
    return cast(
        "Tensor", cast("Any", model).get_image_features(torch.from_numpy(pixels)[None], return_dict=True).pooler_output
    )


def _read_question(folder: ModelFolder, grid: PatchGrid) -> tuple[ImageQuestion, tuple[str, ...]]:
    """Reads how a text stands behind an image, and compares it with what the folder's processor makes of it.

    Raises:
        SourceError: The processor is not there, or makes something else.
    """
    try:
        with quiet():
            processor = open_processor(folder, "Florence2Processor")
    except Exception as error:  # the library raises many kinds
        raise SourceError(f"{folder.path}: its processor cannot be followed ({first_line(error)})") from error
    tokenizer = processor.tokenizer
    question = ImageQuestion(
        token=processor.image_token_id,
        before=(tokenizer.bos_token_id,),
        after=(tokenizer.eos_token_id,),
        tasks={**processor.task_prompts_without_inputs, **processor.task_prompts_with_input},
        default=_DEFAULT,
    )
    exported = folder.tokenizer()
    picture = Image.new("RGB", (64, 48))
    for name in (*question.tasks, "a cat on <loc_1><loc_2>"):
        asked = name if "{input}" not in question.tasks.get(name, "") else f"{name} a green car, and <loc_7>"
        with quiet():
            expected = processor(text=asked, images=picture, return_tensors="np")["input_ids"][0]
        text = question.spelled_out(asked)
        ids = np.array(exported.encode(text, add_special_tokens=False).ids, np.int64)
        if not np.array_equal(framed_question(question, grid, ids), expected):
            raise SourceError(f"{folder.path}: {asked} becomes other tokens than those of its processor")
    return question, (f"asked by a question; {_DEFAULT} without one",)
