"""Decoders whose prompts may have images, such as LLaVA, Idefics 3, InternVL, Qwen-VL, Gemma, PaliGemma and Pixtral.

An encoder of images gives vectors in the place of those of tokens, in front of a causal language model. A folder's
processor is followed here and compared with: the pixels of tiles, and the tokens of conversations with images.

B images or tiles, M embeddings of one, T tokens, P asked positions, D model width, V vocabulary.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers.processing_utils import ProcessorMixin

from headway_export.errors import SourceError
from headway_export.huggingface.attention import asked_logits
from headway_export.huggingface.decoders import HuggingFaceDecoder, OwnDecoder, read_decoder, text_model
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.images import (
    LEVEL,
    LIMITS,
    PROCESSOR_FILE,
    normalization,
    open_image_processor,
    read_preprocessing,
)
from headway_export.reference import OwnSight
from headway_export.source import ExportSource, check_chat_template, find_chat_template
from headway_server.bundles import MOST_TILES, ImagePreprocessing, ImagePrompt, ImageTiles, SpecialTokens, demanded
from headway_server.errors import BundleError, InvalidInputError
from headway_server.preprocessing import ChatTemplate, ChatTurn, TurnImage, WrittenImages
from headway_server.preprocessing.tiles import TiledImage, TilePreprocessor
from headway_server.tasks.prompt_images import arranged, image_text
from headway_training.folders import first_line, quiet
from headway_training.models.parts.attention import Attend

_SAMPLE_SIZES: Final = ((640, 480), (301, 517), (64, 48), (1000, 333), (224, 224))
"""Width and height of the images that tiles and prompts are compared on."""
_QUESTION: Final = "What is it?"
_PIECES: Final = 8
"""In which the patches of an image of any size attend to all others."""
MOST_PIXELS: Final = 1280 * 28 * 28
"""Pixels of an image of any size at most: 1,280 tokens of Qwen2-VL. More is seldom asked for, and attention to them
would take gigabytes."""


_PALIGEMMA_TEMPLATE: Final = (
    "{% if messages|length != 1 or messages[0].role != 'user' %}"
    "{{ raise_exception('this model reads one turn of a user, and no conversation') }}{% endif %}"
    "{% if messages[0].content is string %}{{ bos_token + messages[0].content }}{% else %}"
    "{% for part in messages[0].content if part.type == 'image' %}<image>{% endfor %}{{ bos_token }}"
    "{% for part in messages[0].content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}{{ '\\n' }}"
)
"""As the processor of PaliGemma writes prompts, which has no template: images, then a text of one line."""


class PixtralProcessor(ProcessorMixin):  # type: ignore[misc]  # the library is untyped
    """What Pixtral and Mistral 3 do with conversations; the library's own needs torchvision."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        *,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",  # noqa: S107 (a word of prompts)
        image_break_token: str = "[IMG_BREAK]",  # noqa: S107 (a word of prompts)
        image_end_token: str = "[IMG_END]",  # noqa: S107 (a word of prompts)
        **_: Any,
    ) -> None:
        """Takes an image processor, a tokenizer and what `processor_config.json` says."""
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.cell = patch_size * spatial_merge_size
        """Pixels of a side of what a token stands for."""
        image_processor.patch_size = {"height": self.cell, "width": self.cell}
        self.image_token, self.break_token, self.end_token = image_token, image_break_token, image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

    def replace_image_token(self, image_inputs: Mapping[str, Any], image_idx: int, **_: Any) -> str:
        """Returns the tokens of an image: its rows, a break between them, and an end."""
        rows, columns = (int(side) // self.cell for side in image_inputs["image_sizes"][image_idx])
        return self.break_token.join([self.image_token * columns] * rows) + self.end_token


# Families


def _embed_by_features(model: Any, pixel_values: Tensor) -> Tensor:
    """(B, 3, height, width) -> (B, M, D), by the function that most families have."""
    return cast(
        "Tensor", model.base_model.get_image_features(pixel_values=pixel_values, return_dict=True).pooler_output
    )


def _embed_layers(model: Any, pixel_values: Tensor) -> Tensor:
    """The same of LLaVA, whose own function returns a list; and of ViP-LLaVA, which reads several layers."""
    base, config = model.base_model, model.config
    states = base.vision_tower(pixel_values, output_hidden_states=True, return_dict=True).hidden_states
    layers = getattr(config, "vision_feature_layers", None) or config.vision_feature_layer
    chosen = [states[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
    if getattr(config, "vision_feature_select_strategy", "default") == "default":
        chosen = [state[:, 1:] for state in chosen]  # without the class token
    return cast("Tensor", base.multi_modal_projector(torch.cat(chosen, dim=-1)))


def _embed_rows(model: Any, pixel_values: Tensor) -> Tensor:
    """The same of LLaVA-NeXT, with what stands behind a row of an image as the last: (B, M + 1, D)."""
    features = _embed_layers(model, pixel_values)
    end = model.base_model.image_newline.to(features.dtype)
    return torch.cat([features, end.expand(features.shape[0], 1, -1)], dim=1)


def _embed_tiles(model: Any, pixel_values: Tensor) -> Tensor:
    """The same of Idefics 3, whose own function looks for tiles that are nothing but padding."""
    base = model.base_model
    states = base.vision_model(pixel_values=pixel_values, return_dict=True).last_hidden_state
    return cast("Tensor", base.connector(states))


def _embed_cells(model: Any, pixel_values: Tensor) -> Tensor:
    """(B, 3, rows, cell, columns, cell) -> (B, rows columns, D), of Qwen2-VL and later.

    Patches attend to all others of their image, or of their window. What patches of one cell become is joined. Of
    Qwen3-VL vectors for the first layers of the decoder follow, (B, rows columns, D + ...).
    """
    tower = model.base_model.visual
    config, merge = tower.config, tower.spatial_merge_size
    batch, channels, rows, side, columns, _ = pixel_values.shape
    patch, inner = side // merge, merge * merge
    split = pixel_values.reshape(batch, channels, rows, merge, patch, columns, merge, patch)
    patches = split.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(batch, rows, columns, inner, -1)
    kernel = tower.patch_embed.proj
    weight = kernel.weight.sum(dim=2).flatten(1)  # a picture is the same in both frames that a patch has
    states = patches.to(weight.dtype) @ weight.T  # (B, rows, columns, inner, E)
    if kernel.bias is not None:
        states = states + kernel.bias
    down, across = _of_patches(rows, columns, merge)
    places = torch.stack([down, across], dim=-1).reshape(-1, 2)
    if hasattr(tower, "pos_embed"):
        states = states + _resampled(tower, down, across, (rows * merge, columns * merge))
    cos, sin = (table.reshape(rows, columns, inner, 1, -1) for table in tower.rotary_pos_emb(states, places))
    whole = getattr(config, "fullatt_block_indexes", None)
    window = 0 if whole is None else config.window_size // side
    mergers = zip(
        getattr(tower, "deepstack_visual_indexes", ()), getattr(tower, "deepstack_merger_list", ()), strict=True
    )
    further = dict(mergers)
    stacked: list[Tensor] = []
    for number, block in enumerate(tower.blocks):
        attention = block.attn
        heads = attention.qkv(block.norm1(states)).unflatten(-1, (3, attention.num_heads, -1))
        query, key, value = heads.unbind(-3)  # (B, rows, columns, inner, H, K)
        query, key = (_rotated(one, cos, sin) for one in (query, key))
        of_window = window if whole is not None and number not in whole else 0
        attended = _attend_cells(query, key, value, attention.scaling, of_window)
        states = states + attention.proj(attended.flatten(-2))
        states = states + block.mlp(block.norm2(states))
        if number in further:
            stacked.append(further[number](states.reshape(-1, states.shape[-1])))
    merged = tower.merger(states.reshape(-1, states.shape[-1]))
    return torch.cat([merged, *stacked], dim=-1).reshape(batch, rows * columns, -1)


def _embed_pixtral(model: Any, pixel_values: Tensor) -> Tensor:
    """The same of Pixtral and Mistral 3, which joins what patches of one cell become; (B, rows columns, D)."""
    base, config = model.base_model, model.config
    tower, projector = base.vision_tower, base.multi_modal_projector
    merge = getattr(config, "spatial_merge_size", 1)
    batch, channels, rows, side, columns, _ = pixel_values.shape
    patch, inner = side // merge, merge * merge
    split = pixel_values.reshape(batch, channels, rows, merge, patch, columns, merge, patch)
    patches = split.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(batch, rows, columns, inner, -1)
    kernel = tower.patch_conv.weight.flatten(1)
    states = tower.ln_pre(patches.to(kernel.dtype) @ kernel.T)  # (B, rows, columns, inner, E)
    turns = tower.patch_positional_embedding(states, _places(rows, columns, merge))
    cos, sin = (table.reshape(rows, columns, inner, 1, -1) for table in turns)
    layers, last = tower.transformer.layers, config.vision_feature_layer
    for layer in layers[: last if last >= 0 else len(layers) + 1 + last]:
        attention, normed = layer.attention, layer.attention_norm(states)
        parts = (attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed))
        query, key, value = (part.unflatten(-1, (attention.num_heads, -1)) for part in parts)
        query, key = (_rotated(one, cos, sin) for one in (query, key))
        attended = _attend_cells(query, key, value, attention.scaling, 0)
        states = states + attention.o_proj(attended.flatten(-2))
        states = states + layer.feed_forward(layer.ffn_norm(states))
    if hasattr(projector, "patch_merger"):
        joined = projector.norm(states).transpose(-1, -2).flatten(-2)  # (B, rows, columns, E inner)
        states = projector.patch_merger.merging_layer(joined)
    projected = projector.linear_2(projector.act(projector.linear_1(states)))
    return cast("Tensor", projected).reshape(batch, rows * columns, -1)


def _embed_gemma(model: Any, pixel_values: Tensor) -> Tensor:
    """The same of Gemma 4, which takes the mean of what patches of one cell become; (B, rows columns, D)."""
    base = model.base_model
    tower = base.vision_tower
    config, embedder = tower.config, tower.patch_embedder
    batch, channels, rows, side, columns, _ = pixel_values.shape
    pool = config.pooling_kernel_size
    patch, inner = side // pool, pool * pool
    split = pixel_values.reshape(batch, channels, rows, pool, patch, columns, pool, patch)
    patches = split.permute(0, 2, 5, 3, 6, 4, 7, 1).reshape(batch, rows, columns, inner, -1)
    weight = embedder.input_proj.weight
    down, across = _of_patches(rows, columns, pool)
    table = embedder.position_embedding_table
    placed = (table[0][across] + table[1][down]).flatten(2, 3)  # (rows, columns, inner, E)
    states = (2 * (patches - 0.5)).to(weight.dtype) @ weight.T + placed  # (B, rows, columns, inner, E)
    places = torch.stack([across, down], dim=-1).reshape(1, -1, 2)
    turns = tower.encoder.rotary_emb(states, places)
    cos, sin = (table.reshape(rows, columns, inner, 1, -1).chunk(2, dim=-1) for table in turns)
    for layer in tower.encoder.layers[: config.num_hidden_layers]:
        attention, normed = layer.self_attn, layer.input_layernorm(states)
        parts = (attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed))
        query, key, value = (part.unflatten(-1, (-1, attention.head_dim)) for part in parts)
        query, key, value = attention.q_norm(query), attention.k_norm(key), attention.v_norm(value)
        query, key = (
            torch.cat([_rotated(*each) for each in zip(one.chunk(2, dim=-1), cos, sin, strict=True)], dim=-1)
            for one in (query, key)
        )
        groups = attention.num_key_value_groups
        key, value = (one.repeat_interleave(groups, dim=-2) for one in (key, value))
        attended = attention.o_proj(_attend_cells(query, key, value, attention.scaling, 0).flatten(-2))
        states = states + layer.post_attention_layernorm(attended)
        read = layer.mlp(layer.pre_feedforward_layernorm(states))
        states = states + layer.post_feedforward_layernorm(read)
    pooled = states.float().mean(dim=3) * config.hidden_size**0.5
    if config.standardize:
        pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
    return cast("Tensor", base.embed_vision(inputs_embeds=pooled.to(weight.dtype))).reshape(batch, rows * columns, -1)


def _places(rows: int, columns: int, merge: int) -> Tensor:
    """Returns row and column of each patch of cells of `merge` by `merge`, cell by cell, (N, 2)."""
    down, across = _of_patches(rows, columns, merge)
    return torch.stack([down, across], dim=-1).reshape(-1, 2)


def _of_patches(rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Returns the row and the column of each patch, (rows, columns, merge, merge) each."""
    within = torch.arange(merge)
    down = (torch.arange(rows)[:, None] * merge + within)[:, None, :, None].expand(-1, columns, -1, merge)
    across = (torch.arange(columns)[:, None] * merge + within)[None, :, None, :].expand(rows, -1, merge, -1)
    return down, across


def _resampled(tower: Any, down: Tensor, across: Tensor, size: tuple[int, int]) -> Tensor:
    """Interpolates learned positions of a square grid linearly to an image's patches.

    Args:
        tower: Has the positions, (side side, E).
        down: Row of each patch, (rows, columns, merge, merge).
        across: Its column.
        size: Rows and columns of patches.

    Returns:
        (rows, columns, merge merge, E).
    """
    side, table = tower.num_grid_per_side, tower.pos_embed.weight
    total: Tensor | int = 0
    taps = []
    for place, count in zip((down, across), size, strict=True):
        at = place.float() * (side - 1) / max(count - 1, 1)
        low = at.floor()
        taps.append(((low.long(), 1 - (at - low)), ((low.long() + 1).clamp(max=side - 1), at - low)))
    for row, row_share in taps[0]:
        for column, column_share in taps[1]:
            total = total + table[row * side + column] * (row_share * column_share)[..., None]
    return cast("Tensor", total).flatten(2, 3)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.float().chunk(2, dim=-1)
    return (states * cos + torch.cat([-second, first], dim=-1) * sin).to(states.dtype)


def _attend_cells(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """Attention among the patches of an image, or of windows of `window` by `window` cells; 0: of the image.

    (B, rows, columns, inner, H, K) thrice -> the same.
    """
    batch, rows, columns, inner, heads, width = query.shape
    if not window:
        count = rows * columns * inner
        flat = [one.reshape(batch, count, heads, width).transpose(1, 2) for one in (query, key, value)]
        part = (count + _PIECES - 1) // _PIECES
        padded = functional.pad(flat[0], (0, 0, 0, _PIECES * part - count))
        pieces = padded.reshape(batch, heads, _PIECES, part, width).unbind(2)  # `chunk` cannot be traced
        found = []
        for piece in pieces:  # the scores of all would take gigabytes
            weights = (piece @ flat[1].transpose(2, 3) * scale).softmax(dim=-1, dtype=torch.float32)
            found.append(weights.to(query.dtype) @ flat[2])
        attended = torch.cat(found, dim=2)[:, :, :count].transpose(1, 2)
        return attended.reshape(batch, rows, columns, inner, heads, width)
    down, across = (rows + window - 1) // window, (columns + window - 1) // window  # windows; ONNX rounds to zero
    missing = (0, 0, 0, 0, 0, 0, 0, across * window - columns, 0, down * window - rows)

    def as_windows(states: Tensor) -> Tensor:
        padded = functional.pad(states, missing).reshape(batch, down, window, across, window, inner, heads, width)
        return padded.permute(0, 1, 3, 6, 2, 4, 5, 7).reshape(batch * down * across, heads, window**2 * inner, width)

    grouped = [as_windows(one) for one in (query, key, value)]
    is_there = functional.pad(torch.ones(rows, columns), (0, across * window - columns, 0, down * window - rows))
    is_there = is_there.reshape(down, window, across, window).permute(0, 2, 1, 3).reshape(down * across, 1, 1, -1)
    is_there = is_there.repeat_interleave(inner, dim=-1).repeat(batch, 1, 1, 1)
    scores = (grouped[0] @ grouped[1].transpose(2, 3) * scale).masked_fill(is_there == 0, torch.finfo(query.dtype).min)
    attended = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ grouped[2]
    parted = attended.reshape(batch, down, across, heads, window, window, inner, width).permute(0, 1, 4, 2, 5, 6, 3, 7)
    joined = parted.reshape(batch, down * window, across * window, inner, heads, width)
    return joined[:, :rows, :columns]


def _read_pixels(tiles: Tensor, _: Tensor, __: Any) -> dict[str, Tensor]:
    """Returns what a whole model reads of tiles, (N, 3, height, width)."""
    return {"pixel_values": tiles}


def _read_pixels_in_prompt(tiles: Tensor, _: Tensor, __: Any) -> dict[str, Tensor]:
    """The same of models that read the images of several prompts: (1, N, 3, height, width)."""
    return {"pixel_values": tiles[None]}


def _read_whole_first(tiles: Tensor, _: Tensor, __: Any) -> dict[str, Tensor]:
    """The same of LLaVA-NeXT, of the tiles of one image, the last of which is the whole."""
    return {"pixel_values": torch.cat([tiles[-1:], tiles[:-1]])[None]}


def _read_sized(tiles: Tensor, _: Tensor, __: Any) -> dict[str, Tensor]:
    """The same of Pixtral: (N, 3, rows, cell, columns, cell) as images, with their heights and widths."""
    count, channels, rows, side, columns = tiles.shape[:5]
    size = rows * side, columns * side
    return {"pixel_values": tiles.reshape(count, channels, *size), "image_sizes": torch.tensor([size] * count)}


def _read_patches(tiles: Tensor, input_ids: Tensor, model: Any) -> dict[str, Tensor]:
    """The same of Qwen2-VL: (N, 3, rows, cell, columns, cell) as patches of two equal frames, cell by cell."""
    merge = model.config.vision_config.spatial_merge_size
    count, channels, rows, side, columns, _ = tiles.shape
    patch = side // merge
    split = tiles.reshape(count, channels, rows, merge, patch, columns, merge, patch).permute(0, 2, 5, 3, 6, 1, 4, 7)
    frames = split[..., None, :, :].expand(*split.shape[:6], 2, patch, patch)
    return {
        "pixel_values": frames.reshape(count * rows * columns * merge**2, -1),
        "image_grid_thw": torch.tensor([[1, rows * merge, columns * merge]] * count),
        "mm_token_type_ids": (input_ids == model.config.image_token_id).int(),
    }


def _read_placed(tiles: Tensor, _: Tensor, model: Any) -> dict[str, Tensor]:
    """The same of Gemma 4: (N, 3, rows, cell, columns, cell) as patches, row by row, with their places."""
    count, channels, rows, side, columns, _width = tiles.shape
    pool = model.config.vision_config.pooling_kernel_size
    patch = side // pool
    split = tiles.reshape(count, channels, rows * pool, patch, columns * pool, patch).permute(0, 2, 4, 3, 5, 1)
    down, across = torch.meshgrid(torch.arange(rows * pool), torch.arange(columns * pool), indexing="ij")
    places = torch.stack([across, down], dim=-1).reshape(1, -1, 2).expand(count, -1, -1)
    return {"pixel_values": split.reshape(count, len(places[0]), -1), "image_position_ids": places}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeing:
    """What a family does with images."""

    processor: str | type[ProcessorMixin]
    """Class of its processor, or the name that the library has for it."""
    tower: str
    """Name of its image encoder in the model without its head."""
    embed: Callable[[Any, Tensor], Tensor] = _embed_by_features
    """Computes the embeddings of tiles."""
    read: Callable[[Tensor, Tensor, Any], Mapping[str, Tensor]] = _read_pixels
    """Returns what the whole model reads of tiles, beside the tokens of a prompt."""
    has_grid_positions: bool = False
    """True if tokens of images have rows and columns as positions."""
    layout: Literal["tiles", "rows"] = "tiles"
    """Order of the embeddings of tiles (`ImagePrompt.layout`)."""
    attention: Literal["causal", "image", "prompt"] = "causal"
    """Which tokens attend to later ones (`ImagePrompt.attention`)."""
    chat_template: str | None = None
    """How a conversation becomes a prompt, of a family that has prompts and no chat template."""
    words: Callable[[Any], Mapping[str, Any]]
    """Returns the fields of `ImagePrompt` that its processor says."""
    tiles: Callable[[Any], tuple[ImagePreprocessing, ImageTiles | None]] | None = None
    """Reads tiles from its image processor; None: an image is one."""
    pads: tuple[str, ...] = ()
    """Fields of its configuration with tokens that it reads as padding."""
    refused: Callable[[Any], str] = lambda _config: ""
    """Says why images of a model with a configuration cannot be read; empty: they can."""


def _words_of_llava(processor: Any) -> dict[str, Any]:
    return {"marker": processor.image_token, "embedding": processor.image_token}


def _words_of_tiles(processor: Any) -> dict[str, Any]:
    around, token = processor.fake_image_token, processor.image_token
    return {
        "marker": token,
        "embedding": token,
        "tile": f"{around}<row_{{row}}_col_{{column}}>",
        "row_end": "\n",
        "rows_end": "\n",
        "overview": f"{around}{processor.global_image_tag}",
        "after": around,
    }


def _words_of_internvl(processor: Any) -> dict[str, Any]:
    token = processor.image_token
    return {
        "marker": token,
        "embedding": token,
        "before": processor.start_image_token,
        "after": processor.end_image_token,
    }


def _words_of_gemma_4(processor: Any) -> dict[str, Any]:
    token = processor.image_token
    return {"marker": token, "embedding": token, "before": processor.boi_token, "after": processor.eoi_token}


def _refused_of_gemma_4(config: Any) -> str:
    both = config.get_text_config().use_bidirectional_attention
    return f"some of its layers attend to later tokens (use_bidirectional_attention is {both!r})" if both else ""


def _words_of_gemma(processor: Any) -> dict[str, Any]:
    token = processor.tokenizer.image_token
    before, after = processor.full_image_sequence.split(token * processor.image_seq_length)
    return {"marker": processor.boi_token, "embedding": token, "before": before, "after": after}


def _words_of_pixtral(processor: Any) -> dict[str, Any]:
    token = processor.image_token
    return {"marker": token, "embedding": token, "row_end": processor.break_token, "after": processor.end_token}


def _cells_of_pixtral(processor: Any) -> tuple[ImagePreprocessing, ImageTiles | None]:
    if not processor.do_resize or not processor.size.longest_edge:
        raise ValueError("images are not resized to a longer side, as its kin do")
    multiple = int(processor.patch_size["height"])
    longest = min(int(processor.size.longest_edge), int(MOST_PIXELS**0.5) // multiple * multiple)
    side = -(-longest // multiple) * multiple
    sizes = {"height": side, "width": side, "resize_size": longest, "multiple": multiple}
    return ImagePreprocessing(resize="cells", **sizes, **normalization(processor)), None


def _tiles_of_idefics(processor: Any) -> tuple[ImagePreprocessing, ImageTiles | None]:
    if not (processor.do_resize and processor.do_image_splitting and processor.size.longest_edge):
        raise ValueError("images are not resized and divided into tiles, as its kin do")
    side = int(dict(processor.max_image_size)["longest_edge"])
    return (
        ImagePreprocessing(height=side, width=side, resize="stretch", **normalization(processor)),
        ImageTiles(fit="longer_side", longer_side=int(processor.size.longest_edge)),
    )


def _tiles_of_next(processor: Any) -> tuple[ImagePreprocessing, ImageTiles | None]:
    side = int(processor.size.shortest_edge or processor.size.height)
    crop = processor.crop_size if processor.do_center_crop else None
    if not processor.do_resize or (crop and (crop.height, crop.width) != (side, side)):
        raise ValueError("images are not divided into squares of one size, as its kin do")
    points = [(int(height), int(width)) for height, width in processor.image_grid_pinpoints]
    if any(height % side or width % side for height, width in points):
        raise ValueError(f"a resolution is not of whole tiles of {side} x {side} pixels")
    resolutions = tuple((height // side, width // side) for height, width in points)
    return (
        ImagePreprocessing(height=side, width=side, resize="stretch", **normalization(processor)),
        ImageTiles(fit="resolutions", resolutions=resolutions),
    )


def _tiles_of_internvl(processor: Any) -> tuple[ImagePreprocessing, ImageTiles | None]:
    size = processor.size
    # Its processor divides images, whatever the settings of the image processor say.
    division = ImageTiles(fit="proportions", min_count=processor.min_patches, max_count=processor.max_patches)
    return (
        ImagePreprocessing(height=size.height, width=size.width, resize="stretch", **normalization(processor)),
        division if processor.max_patches > 1 else None,
    )


def _cells_of_qwen(processor: Any) -> tuple[ImagePreprocessing, ImageTiles | None]:
    multiple, size = int(processor.patch_size * processor.merge_size), processor.size
    if processor.temporal_patch_size != 2 or not processor.do_resize:
        raise ValueError("images are not resized to patches of two frames, as its kin do")
    least, most = int(size.shortest_edge), min(int(size.longest_edge), MOST_PIXELS)
    side = int(most**0.5) // multiple * multiple
    return (
        ImagePreprocessing(
            height=side,
            width=side,
            resize="pixels",
            multiple=multiple,
            min_pixels=least,
            max_pixels=most,
            **normalization(processor),
        ),
        None,
    )


def _cells_of_gemma(processor: Any) -> tuple[ImagePreprocessing, ImageTiles | None]:
    if not processor.do_resize:
        raise ValueError("images are not resized, as its kin do")
    multiple = int(processor.patch_size * processor.pooling_kernel_size)
    most = int(processor.max_soft_tokens)
    side = int(most**0.5) * multiple
    sizes = {"height": side, "width": side, "multiple": multiple, "max_pixels": most * multiple**2}
    return ImagePreprocessing(resize="area", **sizes, **normalization(processor)), None


_LLAVA: Final = Seeing(processor="LlavaProcessor", tower="vision_tower", embed=_embed_layers, words=_words_of_llava)
_NEXT: Final = Seeing(
    processor="LlavaNextProcessor",
    tower="vision_tower",
    embed=_embed_rows,
    read=_read_whole_first,
    layout="rows",
    words=_words_of_llava,
    tiles=_tiles_of_next,
)
_IDEFICS: Final = Seeing(
    processor="Idefics3Processor",  # that of SmolVLM does the same with images
    tower="vision_model",
    embed=_embed_tiles,
    read=_read_pixels_in_prompt,
    words=_words_of_tiles,
    tiles=_tiles_of_idefics,
)
_QWEN: Final = Seeing(
    processor="Qwen2VLProcessor",  # that of Qwen2.5-VL does the same with images
    tower="visual",
    embed=_embed_cells,
    read=_read_patches,
    has_grid_positions=True,
    words=_words_of_llava,
    tiles=_cells_of_qwen,
)
_PIXTRAL: Final = Seeing(
    processor=PixtralProcessor,
    tower="vision_tower",
    embed=_embed_pixtral,
    read=_read_sized,
    words=_words_of_pixtral,
    tiles=_cells_of_pixtral,
)
FAMILIES: Final[Mapping[str, Seeing]] = {
    "LlavaForConditionalGeneration": _LLAVA,
    "VipLlavaForConditionalGeneration": _LLAVA,
    "LlavaOnevisionForConditionalGeneration": replace(_NEXT, processor="LlavaOnevisionProcessor"),
    "LlavaNextForConditionalGeneration": _NEXT,
    "Idefics3ForConditionalGeneration": _IDEFICS,
    "SmolVLMForConditionalGeneration": _IDEFICS,
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": _QWEN,
    "Mistral3ForConditionalGeneration": _PIXTRAL,
    "Gemma3ForConditionalGeneration": Seeing(
        processor="Gemma3Processor", tower="vision_tower", attention="image", words=_words_of_gemma
    ),
    "Gemma4ForConditionalGeneration": Seeing(
        processor="Gemma4Processor",
        tower="vision_tower",
        embed=_embed_gemma,
        read=_read_placed,
        words=_words_of_gemma_4,
        tiles=_cells_of_gemma,
        pads=("image_token_id", "video_token_id", "audio_token_id"),
        refused=_refused_of_gemma_4,
    ),
    "PaliGemmaForConditionalGeneration": Seeing(
        processor="PaliGemmaProcessor",
        tower="vision_tower",
        attention="prompt",
        chat_template=_PALIGEMMA_TEMPLATE,
        words=_words_of_llava,
    ),
    "InternVLForConditionalGeneration": Seeing(
        processor="InternVLProcessor", tower="vision_tower", words=_words_of_internvl, tiles=_tiles_of_internvl
    ),
}
"""By architecture."""


# The model


class HuggingFaceSeeingDecoder(HuggingFaceDecoder):
    """A causal language model of `transformers` with an image encoder, as a `SeeingDecoder`."""

    def __init__(self, model: nn.Module, *, max_length: int, family: Seeing, cell: int | None) -> None:
        super().__init__(model, max_length=max_length)
        self._family = family
        self.cell = cell
        self.has_grid_positions = family.has_grid_positions

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> (B, M, D)."""
        return self._family.embed(self.model, pixel_values)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T), (B, T) -> (B, T, D)."""
        return super().hidden_states(self._padded(input_ids), position_ids, attend)

    def _padded(self, input_ids: Tensor) -> Tensor:
        """Puts padding in the place of tokens that the family reads as such."""
        config = cast("Any", self.model).config
        for token in (getattr(config, name, None) for name in self._family.pads):
            if token is not None:
                input_ids = torch.where(input_ids == token, config.get_text_config().pad_token_id, input_ids)
        return input_ids

    def hidden_states_with_media(
        self, input_ids: Tensor, position_ids: Tensor, attend: Attend, media: Sequence[Tensor]
    ) -> Tensor:
        """(B, T), (B, T), and (M,), (M, D), (B, T, 3) -> (B, T, D)."""
        places, embeddings, *offsets = media
        input_ids = self._padded(input_ids)
        text = text_model(self.model)
        embedded = text.get_input_embeddings()(input_ids)  # (B, T, D)
        own, *further = torch.split(embeddings.to(embedded.dtype), embedded.shape[-1], dim=-1)
        flat = embedded.flatten(0, 1).index_copy(0, places, own)
        stacked: dict[str, Any] = {}
        if further:
            stacked = {"visual_pos_masks": places, "deepstack_visual_embeds": further}
            text._deepstack_process = _add_at  # noqa: SLF001 (it looks places up in a mask, which no graph can)
        if getattr(text, "hidden_size_per_layer_input", 0):  # what each layer reads of tokens
            stacked["per_layer_inputs"] = text.get_per_layer_inputs(input_ids, embedded)
        if offsets:
            position_ids = position_ids + offsets[0].permute(2, 0, 1)  # (3, B, T)
        return self._read(
            input_ids,
            attend,
            inputs_embeds=flat.view_as(embedded),
            position_ids=position_ids,
            use_cache=False,
            **stacked,
        )


def _add_at(states: Tensor, places: Tensor, added: Tensor) -> Tensor:
    """Adds vectors, (M, D), to the states of some tokens, (M,), of all: (B, T, D) -> (B, T, D)."""
    flat = states.flatten(0, 1)
    return flat.index_copy(0, places, flat[places] + added).view_as(states)


class OwnSeeingDecoder(OwnDecoder, OwnSight):
    """A model of `transformers` that reads images, with its own attention."""

    def __init__(self, model: nn.Module, family: Seeing) -> None:
        super().__init__(model)
        self._family = family

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> (B, M, D)."""
        if self._family.layout == "rows":  # the library's function wants all tiles of an image
            return self._family.embed(self.model, pixel_values)
        base = cast("Any", self.model).base_model
        given = self._family.read(pixel_values, torch.zeros(1, 1, dtype=torch.int64), self.model)
        given = {name: value for name, value in given.items() if name != "mm_token_type_ids"}
        output = base.get_image_features(**given, return_dict=True)
        found = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        parts = [part if isinstance(part, Tensor) else torch.cat(list(part)) for part in found]
        return torch.cat([part.reshape(len(pixel_values), -1, part.shape[-1]) for part in parts], dim=-1)

    def image_logits(self, images: Tensor, input_ids: Tensor, positions: Tensor, num_given: int) -> Tensor:
        """Tiles (N, 3, height, width), (1, T), (P,) -> (1, P, V)."""
        if self._family.layout == "rows":
            embedded = cast("Any", self.model).get_input_embeddings()(input_ids)
            is_image = (input_ids == cast("Any", self.model).config.image_token_id)[..., None]
            embedded = embedded.masked_scatter(is_image, self.embed_images(images))
            with asked_logits(self.model, positions):
                output = self.model(inputs_embeds=embedded, use_cache=False, return_dict=True)
                return cast("Tensor", output.logits)
        with asked_logits(self.model, positions):
            given = dict(self._family.read(images, input_ids, self.model))
            given |= _token_types(self._family, input_ids, self.model, num_given)
            output = self.model(input_ids=input_ids, **given, use_cache=False, return_dict=True)
            return cast("Tensor", output.logits)


def _token_types(family: Seeing, input_ids: Tensor, model: nn.Module, num_given: int) -> dict[str, Tensor]:
    """Returns what tells a whole model which tokens, (1, T), attend to later ones; nothing if none does.

    It is 1 at images (Gemma 3), or 0 in the prompt and 1 behind it (PaliGemma).
    """
    if family.attention == "causal":
        return {}
    is_image = input_ids == cast("Any", model).config.image_token_id
    is_answer = torch.arange(input_ids.shape[1])[None] >= num_given
    return {"token_type_ids": (is_image if family.attention == "image" else is_answer).long()}


def _fix_tower(model: nn.Module, family: Seeing, side: tuple[int, int]) -> None:
    """Lets an image encoder attend by itself, and keeps positions that it would compute again for each image."""
    tower = getattr(cast("Any", model).base_model, family.tower)
    tower.set_attn_implementation("eager")
    embeddings = getattr(tower, "embeddings", None)
    if embeddings is None or not hasattr(embeddings, "num_patches_per_side"):
        return
    found: list[Tensor] = []
    hook = embeddings.position_embedding.register_forward_hook(lambda _module, inputs, _output: found.append(inputs[0]))
    with torch.inference_mode():
        tower(pixel_values=torch.zeros(1, 3, *side), return_dict=True)
    hook.remove()
    tower.embeddings = _FixedPositions(embeddings, found[0][0].clone())


class _FixedPositions(nn.Module):
    """Embeddings of the patches of an image of one size."""

    def __init__(self, embeddings: Any, positions: Tensor) -> None:
        super().__init__()
        self.patch_embedding = embeddings.patch_embedding
        self.position_embedding = embeddings.position_embedding
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, pixel_values: Tensor, **_: Any) -> Tensor:
        """(B, 3, height, width) -> (B, S, D)."""
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        return cast("Tensor", patches + self.position_embedding(self.positions))


# The processor


def read_seeing_decoder(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a causal language model, with its image encoder where it has one that is known here.

    Raises:
        SourceError: As `read_decoder`.
    """
    architectures = folder.config.architectures or ()
    family = FAMILIES.get(architectures[0]) if architectures else None
    if family is _LLAVA and folder.config.vision_config.model_type == "pixtral":
        family = _PIXTRAL
    if family is None:
        return read_decoder(folder)
    try:
        return read_decoder(folder, _Sight(folder, family))
    except _SightError as error:
        source, notes = read_decoder(folder)
        return source, (*notes, f"images: {error}")


def open_processor(folder: ModelFolder, processor: str | type[ProcessorMixin]) -> Any:
    """Opens a folder's processor, without what reads videos, which needs torchvision."""
    kind = getattr(transformers, processor) if isinstance(processor, str) else processor
    loose = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    file = folder.path / PROCESSOR_FILE
    stated = json.loads(file.read_bytes()) if file.exists() else {}
    takes = inspect.signature(kind.__init__).parameters.keys()
    others = dict.fromkeys(takes & {"video_processor", "feature_extractor"})
    known = takes - {"image_processor", "tokenizer", *others}
    tokenizer = folder.own_tokenizer()
    given = {name: value for name, value in stated.items() if name in known}
    template = tokenizer.chat_template or find_chat_template(folder.path)
    parts: dict[str, Any] = {"image_processor": open_image_processor(folder), "tokenizer": tokenizer, **others}
    return loose(**{**parts, **given, "chat_template": template})


class _SightError(SourceError):
    """Images cannot be served, and texts can."""


class _Sight:
    """How a family's folder is read; a `Sight`."""

    def __init__(self, folder: ModelFolder, family: Seeing) -> None:
        """Opens the processor.

        Raises:
            _SightError: It is not there, or prepares images in a way that a bundle cannot say.
        """
        self._folder = folder
        self._family = family
        self._tiles: ImageTiles | None = None
        if refused := family.refused(folder.config):
            raise _SightError(refused)
        try:
            with quiet():
                self._processor = open_processor(folder, family.processor)
            self._preprocessing, is_bgr = (
                read_preprocessing(folder) if family.tiles is None else (self._tile_preprocessing(family.tiles), False)
            )
        except Exception as error:  # the library raises many kinds
            raise _SightError(f"their processor cannot be followed ({first_line(error)})") from error
        if is_bgr:
            raise _SightError("they are read as BGR, which is not supported beside texts")

    def _tile_preprocessing(
        self, read: Callable[[Any], tuple[ImagePreprocessing, ImageTiles | None]]
    ) -> ImagePreprocessing:
        preprocessing, self._tiles = read(self._processor.image_processor)
        return preprocessing

    @property
    def chat_template(self) -> str | None:
        """See `Sight`."""
        return self._family.chat_template

    def adapt(self, model: nn.Module, *, max_length: int) -> HuggingFaceSeeingDecoder:
        """See `Sight`."""
        cell = self._preprocessing.multiple if self._preprocessing.has_cells else None
        return HuggingFaceSeeingDecoder(model, max_length=max_length, family=self._family, cell=cell)

    def own(self, model: nn.Module) -> OwnSeeingDecoder:
        """See `Sight`."""
        return OwnSeeingDecoder(model, self._family)

    def fields(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        special_tokens: SpecialTokens,
        chat_template: str | None,
        *,
        max_length: int,
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """See `Sight`.

        Raises:
            _SightError: There is no chat template, a prompt has no room for an image, or prompts or pixels are not
                those of `transformers`.
        """
        if chat_template is None:
            raise _SightError("they stand in conversations, and there is no chat template")
        words = dict(self._family.words(self._processor))
        token = tokenizer.token_to_id(words["embedding"])
        if token is None:
            raise _SightError(f"the tokenizer has no {words['embedding']}")
        sizes = self._preprocessing
        _fix_tower(model, self._family, (sizes.height, sizes.width))
        count, least = None, sizes.least_cells if sizes.has_cells else 0
        if not sizes.has_cells:
            with torch.inference_mode():
                count = self._family.embed(model, torch.zeros(1, 3, sizes.height, sizes.width)).shape[1]
            least = count
        if least >= max_length:
            raise _SightError(f"one takes {least} tokens, and a text has {max_length} at most; allow more")
        prompt = ImagePrompt(
            token=token,
            tokens_per_tile=count,
            tiles=self._tiles if self._family.layout == "tiles" else self._rows_of(count),
            layout=self._family.layout,
            positions="grid" if self._family.has_grid_positions else "sequence",
            attention=self._family.attention,
            **words,
        )
        try:
            preprocessor = TilePreprocessor(self._preprocessing, LIMITS, prompt.tiles)
        except BundleError as error:
            raise _SightError(first_line(error)) from error
        if (most := preprocessor.most_tiles) > MOST_TILES + 1:
            raise _SightError(f"one has up to {most} tiles, and {MOST_TILES + 1} is the most that is read")
        chat = check_chat_template(chat_template, tokenizer, special_tokens)
        generator = np.random.default_rng(0)
        for width, height in _SAMPLE_SIZES:
            coarse = generator.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3)).astype(np.uint8)
            picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
            self._check_image(prompt, chat, preprocessor, picture, model)
        note = f"images: {count} tokens each" if most == 1 else f"images: {count} tokens a tile, up to {most} tiles"
        if count is None:
            note = f"images: up to {sizes.most_cells:,} tokens each, one for {sizes.multiple} x {sizes.multiple} pixels"
        return {"image_preprocessing": self._preprocessing, "image_prompt": prompt}, (note,)

    def _rows_of(self, count: int | None) -> ImageTiles:
        """Returns the tiles of an image that has rows of all of them, with `count` vectors each."""
        known: dict[str, Any] = {"tile_rows": math.isqrt(demanded(count) - 1)}
        if limit := getattr(self._processor, "vision_aspect_ratio", ""):
            known |= {"most_read": int(limit.removeprefix("anyres_max_")), "is_of_one": True}
        return demanded(self._tiles).model_copy(update=known)

    def _check_image(
        self,
        prompt: ImagePrompt,
        chat: ChatTemplate,
        preprocessor: TilePreprocessor,
        picture: Image.Image,
        model: nn.Module,
    ) -> None:
        """Compares a conversation with an image with that of `transformers`.

        Raises:
            _SightError: Its tokens or pixels are others.
        """
        turn = ChatTurn(role="user", content=_QUESTION, parts=(TurnImage(field="image"), _QUESTION))
        content = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
        where = f"of {picture.width} x {picture.height}"
        try:
            with quiet():
                if self._processor.chat_template is None:
                    text = prompt.marker + _QUESTION
                else:
                    text = self._processor.apply_chat_template(
                        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
                    )
                expected = self._processor(text=text, images=[picture], add_special_tokens=False, return_tensors="np")
        except Exception as error:  # whatever the library raises
            raise _SightError(f"their processor fails ({first_line(error)})") from error
        tiled = preprocessor.prepare_decoded(picture, "image")
        written = WrittenImages(prompt.marker, [image_text(prompt, tiled.grid)])
        try:
            found = chat.prompt([turn], "conversation", images=written).input_ids
        except InvalidInputError as error:
            raise _SightError(f"a conversation with one {where}: {first_line(error)}") from error
        ids: NDArray[np.int64] = np.asarray(expected["input_ids"])[0]
        if not np.array_equal(found, ids):
            pairs = enumerate(zip(found, ids, strict=False))
            place = next((number for number, (ours, theirs) in pairs if ours != theirs), min(len(found), len(ids)))
            raise _SightError(
                f"a prompt with one {where} has {len(found)} tokens, and {len(ids)} in transformers, and is another "
                f"from token {place} on"
            )
        tiles = torch.from_numpy(tiled.tiles)
        pixels = np.asarray(expected["pixel_values"])
        read = self._family.read(tiles, torch.from_numpy(ids), model)["pixel_values"].numpy()
        if read.ndim == pixels.ndim == 3:  # some fill up with what is no patch
            pixels = pixels[:, : read.shape[1]]
        ours = read.reshape(pixels.shape)
        difference = float(np.abs(ours - pixels).max()) * max(self._preprocessing.std)
        if not difference <= LEVEL * 1.01:
            raise _SightError(
                f"one {where} is prepared in a way that a bundle cannot say (the largest difference is "
                f"{255 * difference:.1f} levels, a level of rounding is allowed)"
            )
        if prompt.layout == "rows":
            self._check_rows(prompt, tiled, model, where)

    def _check_rows(self, prompt: ImagePrompt, tiled: TiledImage, model: nn.Module, where: str) -> None:
        """Compares the order of an image's embeddings with that of `transformers`.

        Raises:
            _SightError: It is another.
        """
        tiles = torch.from_numpy(tiled.tiles)
        with torch.inference_mode():
            read = self._family.read(tiles, tiles, model)
            size = torch.tensor([[tiled.height, tiled.width]])
            whole = cast("Any", model).base_model.get_image_features(**read, image_sizes=size, return_dict=True)
            embedded = self._family.embed(model, tiles).float().numpy()
        [found], [expected] = arranged(prompt, tiled.grid, list(embedded)), whole.pooler_output
        theirs = expected.float().numpy()
        if found.shape != theirs.shape or not np.allclose(found, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max()):
            raise _SightError(f"the embeddings of one {where} are in another order than those of transformers")
