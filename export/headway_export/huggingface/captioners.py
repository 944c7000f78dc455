"""Models that write what an image shows: captions, the text in it, or its content (ViT-GPT2, TrOCR, BLIP, Donut).

An image encoder gives the memory that a decoder of texts attends to, all of it: a class token and what else comes
before the patches are in it too. The decoder follows `encoder_decoders.py`.

B images, S tokens of an image, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, VisionEncoderDecoderModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.blip.modeling_blip_text import BlipTextSelfAttention
from transformers.models.trocr.modeling_trocr import TrOCRAttention

from headway_export.errors import SourceError
from headway_export.huggingface.attention import ATTENTION, asked_logits, check_logits, injected_attention, running
from headway_export.huggingface.encoder_decoders import (
    DecoderStart,
    HuggingFaceEncoderDecoder,
    cross_attentions,
    random_tokens,
    read_generation_config,
)
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.images import read_preprocessing
from headway_export.reference import OwnTarget, translation_logits
from headway_export.source import ExportSource
from headway_export.tracing import alignment_layer
from headway_server.bundles import ImagePreprocessing, SpecialTokens

CAPTIONERS: Final = ("VisionEncoderDecoderModel", "BlipForConditionalGeneration")
"""Architectures that write what an image shows."""
_TASK: Final = re.compile(r"<s_([^<>/]+)>")
_FIELD: Final = re.compile(r"</?s_[^<>]+>|<[^<>]+/>")
"""Tokens of Donut's tasks, fields and values."""
_PRETRAINED: Final = frozenset(("<s_iitcdip>", "<s_synthdog>"))
"""Tasks that any model of Donut was trained with first."""
_USUAL_LENGTH: Final = 256
"""Most tokens of a caption where nobody asks for another length."""


class HuggingFaceWriter(HuggingFaceEncoderDecoder):
    """A model of `transformers` whose encoder and decoder are of two families."""

    def __init__(self, model: nn.Module, *, max_source_length: int, max_target_length: int) -> None:
        """Adapts a model, whose decoder attends by `ATTENTION`.

        Args:
            model: The model.
            max_source_length: S.
            max_target_length: Most tokens of what is written.

        Raises:
            SourceError: As `HuggingFaceEncoderDecoder`.
        """
        writer = writer_of(model)
        decoder = cast("nn.Module", cast("Any", writer).get_decoder())
        super().__init__(
            model, max_source_length=max_source_length, max_target_length=max_target_length, decoder=decoder
        )
        projection = cast("Any", writer).get_output_embeddings()
        self._head = next(part for part in writer.children() if any(one is projection for one in part.modules()))
        parameters = inspect.signature(decoder.forward).parameters
        self._constants = {"is_decoder": True} if "is_decoder" in parameters else {}
        self._first_position: int | None = None
        if "position_ids" in parameters:  # counted from behind the padding token by RoBERTa
            self._first_position = first_position(decoder)

    def _decoder_inputs(self, position_ids: Tensor) -> dict[str, Any]:
        if self._first_position is None:
            return self._constants
        return {**self._constants, "position_ids": position_ids + self._first_position}

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        return cast("Tensor", self._head(hidden_states))


class HuggingFaceCaptioner(HuggingFaceWriter):
    """A model of `transformers` that writes about images, as an `ImageToText`."""

    def __init__(self, model: nn.Module, *, grid: tuple[int, int], num_tokens: int, max_target_length: int) -> None:
        """Adapts a model; other arguments and errors are those of `HuggingFaceWriter`.

        Args:
            model: The model.
            grid: Rows and columns of patches.
            num_tokens: S.
            max_target_length: Most tokens of a caption.
        """
        super().__init__(model, max_source_length=num_tokens, max_target_length=max_target_length)
        self.grid = grid
        self.num_leading_tokens = num_tokens - grid[0] * grid[1]

    def encode(self, pixel_values: Tensor) -> Tensor:  # type: ignore[override]  # the protocol is another
        """(B, 3, height, width) -> (B, S, D)."""
        return memory_of(self.model, pixel_values=pixel_values)


class OwnCaptioner(OwnTarget):
    """A model of `transformers` that writes about images, with its own attention."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._layers = cross_attentions(writer_of(model))

    def encode_source(self, source: Tensor) -> Tensor:
        """(1, 3, height, width) -> (1, S, D)."""
        return states_of(self.model, pixel_values=source)

    def target_logits(
        self, source: Tensor, target_ids: Tensor, positions: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(1, 3, height, width), (1, T), (P,) -> (1, P, V), (1, H, T, S)."""
        weights: list[Tensor] = []
        layer = self._layers[alignment_layer(len(self._layers))]

        def note(_module: nn.Module, _inputs: Any, outputs: tuple[Tensor | None, ...]) -> None:
            weights.extend(part for part in outputs if isinstance(part, Tensor) and part.ndim == 4)

        hook = layer.register_forward_hook(note)
        try:
            with asked_logits(writer_of(self.model), positions):
                logits = self._logits(source, target_ids, memory)
        finally:
            hook.remove()
        return logits, weights[-1]

    def _logits(self, source: Tensor, target_ids: Tensor, memory: Tensor | None) -> Tensor:
        return _own_logits(self.model, source, target_ids, memory)


def writer_of(model: nn.Module) -> nn.Module:
    """Returns the decoder of a model, with its output projection."""
    of_images = cast("Any", model)
    return cast("nn.Module", of_images.decoder if hasattr(of_images, "decoder") else of_images.text_decoder)


def memory_of(model: nn.Module, **source: Tensor) -> Tensor:
    """Returns what the decoder of a model attends to: B images, or texts with their mask -> (B, S, D)."""
    states, bridge = states_of(model, **source), getattr(model, "enc_to_dec_proj", None)
    return states if bridge is None else cast("Tensor", bridge(states))


def states_of(model: nn.Module, **source: Tensor) -> Tensor:
    """Returns what the encoder of a model makes of a source: -> (B, S, E)."""
    whole = cast("Any", model)
    encoder = whole.encoder if hasattr(whole, "encoder") else whole.vision_model
    return cast("Tensor", encoder(**source, return_dict=True).last_hidden_state)


def _own_logits(model: nn.Module, pixel_values: Tensor, target_ids: Tensor, states: Tensor | None = None) -> Tensor:
    """(1, 3, height, width), (1, T), None or what `states_of` returns -> (1, T, V)."""
    of_images = cast("Any", model)
    if not isinstance(model, VisionEncoderDecoderModel):
        if states is not None:
            output = of_images.text_decoder(input_ids=target_ids, encoder_hidden_states=states, return_dict=True)
        else:
            output = of_images(pixel_values=pixel_values, input_ids=target_ids, return_dict=True)
        return cast("Tensor", output.logits)
    read = {"pixel_values": pixel_values}
    if states is not None:
        read = {"encoder_outputs": BaseModelOutput(last_hidden_state=states)}
    output = of_images(**read, decoder_input_ids=target_ids, use_cache=False, output_attentions=True, return_dict=True)
    return cast("Tensor", output.logits)


def first_position(decoder: nn.Module) -> int:
    """Returns the position of a text's first token in the table of a decoder."""
    embeddings = getattr(decoder, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


class _WrittenTrOCR(TrOCRAttention):  # type: ignore[misc]  # the library is untyped
    """Attention of TrOCR, which writes it out, through the interface."""

    def forward(self, hidden_states: Tensor, key_value_states: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """(B, T, D), None or (B, S, E) -> (B, T, D)."""
        source = hidden_states if key_value_states is None else key_value_states
        projected = self.q_proj(hidden_states), self.k_proj(source), self.v_proj(source)
        query, key, value = (_heads(states, self.head_dim) for states in projected)
        context, _weights = injected_attention(self, query, key, value, None, scaling=self.scaling)
        return self.out_proj(context.flatten(2)), None


class _WrittenBlip(BlipTextSelfAttention):  # type: ignore[misc]  # the library is untyped
    """Attention of BLIP's decoder, which writes it out, through the interface."""

    def forward(
        self, hidden_states: Tensor, _mask: Tensor | None = None, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """(B, T, D), None or (B, S, E) -> (B, T, D)."""
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        projected = self.query(hidden_states), self.key(source), self.value(source)
        query, key, value = (_heads(states, self.attention_head_size) for states in projected)
        context, _weights = injected_attention(self, query, key, value, None)
        return context.flatten(2), None


def _heads(states: Tensor, head_dim: int) -> Tensor:
    """(B, T, H * K) -> (B, H, T, K)."""
    return states.reshape(*states.shape[:-1], -1, head_dim).transpose(1, 2)


def inject(writer: nn.Module) -> None:
    """Lets a decoder attend by what it is given."""
    cast("Any", writer).set_attn_implementation(ATTENTION)
    for part in writer.modules():
        for written in (_WrittenTrOCR, _WrittenBlip):
            if type(part) is written.__base__:
                part.__class__ = written


def read_captioner(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model that writes what an image shows.

    Raises:
        SourceError: The folder is incomplete, or its model or its preprocessing cannot be served.
    """
    preprocessing, is_bgr = read_preprocessing(folder)
    if is_bgr:
        raise SourceError(f"{folder.path}: reads images as BGR, which is not supported for {folder.task}")
    tokenizer = folder.tokenizer()
    if _is_donut(folder):
        tokenizer = with_written_tokens(tokenizer, _FIELD)
    start = _read_start(folder, tokenizer)
    model = _load(folder)
    length, notes = _length(folder, writer_of(model))
    pixels = torch.from_numpy(
        np.random.default_rng(0).normal(size=(1, 3, preprocessing.height, preprocessing.width)).astype(np.float32)
    )
    target = random_tokens(folder, min(48, length))
    owner = f"{folder.path}: {type(model).__name__}"
    with torch.inference_mode():
        num_tokens = memory_of(model, pixel_values=pixels).shape[1]
        expected = _own_logits(model, pixels, torch.from_numpy(target)[None])[0].float().numpy()
    grid = _grid(folder, preprocessing, num_tokens)
    with running(owner):
        inject(writer_of(model))
        module = HuggingFaceCaptioner(model, grid=grid, num_tokens=num_tokens, max_target_length=length)
        compute = partial(translation_logits, module, pixels[0].numpy(), target)
        found = compute()
    check_logits(found, expected, owner, compute)
    source = folder.source(
        model,
        module,
        make_reference=lambda: OwnCaptioner(_load(folder)),
        tokenizer=tokenizer,
        special_tokens=start.special_tokens,
        prompt_prefix=start.prefix,
        suppressed_tokens=start.suppressed_tokens,
        image_preprocessing=preprocessing,
        evaluation=folder.evaluation(),
    )
    return source, start.notes + notes


def _load(folder: ModelFolder) -> nn.Module:
    model = folder.load(AutoModelForImageTextToText)
    for part in writer_of(model).modules():
        table = getattr(part, "weights", None)
        if isinstance(table, Tensor) and table.is_meta:  # computed positions, which the library leaves without numbers
            positions = cast("Any", part)
            positions.weights = positions.get_embedding(*table.shape, positions.padding_idx)
    return model


def _is_donut(folder: ModelFolder) -> bool:
    """Returns True if a decoder's prompt names a task and what is asked, and its text is fields between tokens."""
    return bool(getattr(getattr(folder.config, "encoder", None), "model_type", None) == "donut-swin")


def with_written_tokens(tokenizer: Tokenizer, written: re.Pattern[str]) -> Tokenizer:
    """Makes special tokens of a form part of the text, such as those around fields."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["special"] and written.fullmatch(token["content"]) is None
    return Tokenizer.from_str(json.dumps(content))


def _task_of_donut(folder: ModelFolder, tokenizer: Tokenizer) -> int:
    """Returns the token that names the task of a model of Donut: the only one of its form that nothing closes.

    Raises:
        SourceError: There are several, or none.
    """
    added = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items()}
    named = [
        name
        for name in added
        if (found := _TASK.fullmatch(name)) and f"</s_{found[1]}>" not in added and name not in _PRETRAINED
    ]
    if len(named) == 1:
        return added[named[0]]
    stated = folder.generation_config().decoder_start_token_id
    if stated in [added[name] for name in named]:
        return int(stated)
    raise SourceError(
        f"{folder.path}: does not say which task it was trained for: its tokenizer has {', '.join(named) or 'no'} "
        "tokens of tasks, and decoder_start_token_id is none of them"
    )


def _read_start(folder: ModelFolder, tokenizer: Tokenizer) -> DecoderStart:
    """Reads what a caption starts from, and ends with.

    Raises:
        SourceError: It is not said.
    """
    if _is_donut(folder):
        return read_generation_config(folder, start=_task_of_donut(folder, tokenizer))
    if folder.config.model_type != "blip":
        return read_generation_config(folder)
    texts = folder.config.text_config  # BLIP's own loop has them there
    special = SpecialTokens(pad=texts.pad_token_id, bos=int(texts.bos_token_id), eos=int(texts.sep_token_id))
    return DecoderStart(special_tokens=special, prefix=(), suppressed_tokens=(), notes=())


def _length(folder: ModelFolder, writer: nn.Module) -> tuple[int, tuple[str, ...]]:
    """Returns the most tokens of a caption, and a note if the decoder could write more.

    Raises:
        SourceError: More are asked for than it takes.
    """
    decoder = cast("Any", writer).get_decoder()
    most = int(cast("Any", writer).config.max_position_embeddings) - first_position(decoder)
    return written_length(folder, most, usual=most if _is_donut(folder) else _USUAL_LENGTH)


def written_length(folder: ModelFolder, most: int, usual: int) -> tuple[int, tuple[str, ...]]:
    """Returns the most tokens of a caption, and a note if the model could write more.

    Args:
        folder: The model's.
        most: What it can write.
        usual: What it may write where nobody asks for another length.

    Raises:
        SourceError: More are asked for than it takes.
    """
    asked = folder.options.max_length
    if asked is not None and asked > most:
        raise SourceError(f"{folder.path}: --max-length {asked}: the model writes {most} tokens")
    length = asked or min(most, usual)
    if length < most and asked is None:
        return length, (f"captions of at most {length} tokens: the model writes {most}; --max-length N changes it",)
    return length, ()


def _grid(folder: ModelFolder, preprocessing: ImagePreprocessing, num_tokens: int) -> tuple[int, int]:
    """Returns the rows and columns of the patches that an image's last tokens are.

    Raises:
        SourceError: They are no grid of square patches.
    """
    config = folder.config
    vision = getattr(config, "encoder", None) or config.vision_config
    side = getattr(vision, "patch_size", None)
    if isinstance(side, int) and _is_donut(folder):
        side *= 2 ** (len(vision.depths) - 1)  # each stage but the last joins four
    if isinstance(side, int) and preprocessing.height % side == 0 and preprocessing.width % side == 0:
        grid = preprocessing.height // side, preprocessing.width // side
        if 0 <= num_tokens - grid[0] * grid[1] < grid[1]:
            return grid
    raise SourceError(
        f"{folder.path}: an image of {preprocessing.width} x {preprocessing.height} pixels is {num_tokens} tokens "
        f"({vision.model_type}), which are no grid of square patches; this encoder is not supported"
    )
