"""Models that segment what prompts point at: Segment Anything (SAM) and SAM 2.

The library's decoders give one mask or the others; here they give all, and read prompts of any lengths together.

B images, N prompts, Q points and T tokens of a prompt, M masks of a prompt, S side of a mask in cells, E width, G side
of the encoder's map, L = G G places of it, H heads, K head width, R rows of places that attend together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForMaskGeneration

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.images import PREPROCESSOR_FILE, read_preprocessing
from headway_export.source import ExportSource
from headway_server.bundles import Segmentation, StableMask
from headway_server.tasks.segmentation.decoder import TOP_LEFT
from headway_training.folders import CONFIG_FILE
from headway_training.models.parts.attention import scaled_dot_product_attention

SEGMENTERS: Final = ("sam", "sam2", "sam2_video")
"""Families by model type; published folders of SAM 2 are of videos, whose part for images is read."""
ARCHITECTURES: Final = (
    *("SamModel", "Sam2Model", "Sam2VideoModel"),
    *("SamHQModel", "Sam3Model", "Sam3TrackerModel", "Sam3VideoModel", "Sam3TrackerVideoModel"),
    *("Sam3LiteTextModel", "EdgeTamModel", "EdgeTamVideoModel"),
)
"""What their folders call them, and those of families that are refused by name."""
_ATTENTION: Final = "headway_prompts"
"""Name that attention is registered by which hides tokens that are not there."""
_MOST_SCORES: Final = 1 << 21
"""Attention scores of a head that an encoder computes together: 512 of the 4,096 places of SAM attend at a time."""
_CELLS_OF_A_PLACE: Final = 4
"""Cells along a side of a place: two transposed convolutions double it twice."""

_visible: ContextVar[Tensor | None] = ContextVar("visible", default=None)
"""Which tokens of the prompts are there: bool (N, 1, 1, T)."""


def _attend(  # the library's own signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (of similarities, which no prompt has)
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, in pieces where its scores are many: (B, H, L, K), twice (B, H, S, K) -> (B, L, H, K)."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if getattr(module, "reads_tokens", False):
        return scaled_dot_product_attention(query, key, value, _visible.get(), scale=scaling), None
    count, length = query.shape[1], key.shape[1]
    if not isinstance(count, int) or not isinstance(length, int) or count * length <= _MOST_SCORES:
        return scaled_dot_product_attention(query, key, value, scale=scaling), None
    pieces = torch.split(query, max(1, _MOST_SCORES // length), dim=1)
    return torch.cat([scaled_dot_product_attention(one, key, value, scale=scaling) for one in pieces], dim=1), None


transformers.AttentionInterface.register(_ATTENTION, _attend)


@contextmanager
def _seeing(visible: Tensor) -> Iterator[None]:
    token = _visible.set(visible)
    try:
        yield
    finally:
        _visible.reset(token)


class _PlacedAttention(nn.Module):
    """Attention of SAM's image encoder with relative positions (Li et al. 2022, MViTv2, section 4.1), in rows.

    The library's own holds the scores of all places at once, 768 MiB of a layer of SAM ViT-B.
    """

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own
        if own.use_rel_pos:
            for name, table in (("rows", own.rel_pos_h), ("columns", own.rel_pos_w)):
                side = (len(table) + 1) // 2
                self.register_buffer(name, own.get_rel_pos(side, side, table).detach().clone(), persistent=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """(B, rows, columns, E) -> the same shape."""
        own, (batch, height, width, _) = self.own, hidden_states.shape
        packed = own.qkv(hidden_states).reshape(batch, height * width, 3, own.num_attention_heads, -1)
        query, key, value = (one.transpose(1, 2) for one in packed.unbind(2))  # (B, H, L, K)
        key = key.transpose(-2, -1)
        step = max(1, _MOST_SCORES // (height * width * width))
        contexts = []
        for start in range(0, height, step):
            some = query[:, :, start * width : min(start + step, height) * width]  # (B, H, R columns, K)
            scores = (some * own.scale) @ key
            if own.use_rel_pos:
                scores = self._placed(scores, torch.unflatten(some, 2, (-1, width)), start)
            contexts.append(scores.softmax(dim=-1) @ value)
        context = torch.cat(contexts, dim=2).transpose(1, 2).reshape(batch, height, width, -1)
        return own.proj(context), None

    def _placed(self, scores: Tensor, query: Tensor, start: int) -> Tensor:
        """Adds what queries (B, H, R, columns, K) of rows from `start` on have for the row and the column of a key."""
        _, heads, count, width, _ = query.shape
        rows = cast("Tensor", self.rows)[start : start + count].transpose(1, 2)  # (R, K, rows)
        columns = cast("Tensor", self.columns).transpose(1, 2)  # (columns, K, columns)
        of_rows = query.permute(2, 0, 1, 3, 4).flatten(1, 3) @ rows  # (R, B H columns, rows)
        of_rows = torch.unflatten(of_rows, 1, (-1, heads, width)).permute(1, 2, 0, 3, 4)
        of_columns = query.permute(3, 0, 1, 2, 4).flatten(1, 3) @ columns  # (columns, B H R, columns)
        of_columns = torch.unflatten(of_columns, 1, (-1, heads, count)).permute(1, 2, 3, 0, 4)
        apart = torch.unflatten(scores, 2, (count, width))
        apart = torch.unflatten(apart, -1, (-1, width))  # (B, H, R, columns, rows, columns)
        return (apart + of_rows[..., :, None] + of_columns[..., None, :]).flatten(4).flatten(2, 3)


class _Encoder(nn.Module):
    """Images to what prompts are answered from."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision, self.decoder = model.vision_encoder, model.mask_decoder

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """(B, 3, height, width) -> `embedding` (B, E, G, G)."""
        return {"embedding": self.vision(pixel_values, return_dict=True).last_hidden_state}


class _PyramidEncoder(_Encoder):
    """That of SAM 2 (Ravi et al. 2024, section 4): beside the embedding, features of two higher resolutions."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.no_memory = model.no_memory_embedding

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """(B, 3, height, width) -> `embedding` (B, E, G, G), `features_0` (B, E / 8, S, S), `features_1` between."""
        finest, finer, coarse = self.vision(pixel_values, return_dict=True).fpn_hidden_states
        return {
            "embedding": coarse + self.no_memory.reshape(1, -1, 1, 1),
            "features_0": self.decoder.conv_s0(finest),
            "features_1": self.decoder.conv_s1(finer),
        }


class _Decoder(nn.Module):
    """Prompts to masks; the encoder's outputs are those of each prompt's image."""

    first_mask_token = 1
    """Number of output tokens before those of the masks; the last of them is that of the IoU."""
    ends_boxes = False
    """True if the token that ends points ends boxes, too."""

    def __init__(self, model: Any, places: Tensor) -> None:
        super().__init__()
        self.prompts, self.decoder = model.prompt_encoder, model.mask_decoder
        self.register_buffer("places", places.detach().clone(), persistent=False)  # (1, E, G, G)
        for layer in self.decoder.transformer.layers:
            layer.self_attn.reads_tokens = layer.cross_attn_image_to_token.reads_tokens = True

    def forward(
        self,
        *,
        embedding: Tensor,
        points: Tensor,
        point_labels: Tensor,
        earlier_mask: Tensor | None = None,
        has_earlier_mask: Tensor | None = None,
        **features: Tensor,
    ) -> dict[str, Tensor]:
        """Computes the masks of prompts; arguments and result are those of `MaskDecoder`.

        Args:
            embedding: float (N, E, G, G), of each prompt's image.
            points: float (N, Q, 2)
            point_labels: int64 (N, Q)
            earlier_mask: float (N, S, S)
            has_earlier_mask: int64 (N,)
            features: what else the encoder gives.
        """
        tokens, visible = self._tokens(points, point_labels)
        dense = self._dense(earlier_mask, has_earlier_mask)
        with _seeing(visible[:, None, None]):
            tokens, image = self.decoder.transformer(
                point_embeddings=tokens[:, None],
                image_embeddings=embedding + dense,
                image_positional_embeddings=self.places,
                attention_similarity=None,
            )
        tokens = tokens[:, 0]  # (N, T, E)
        image = torch.unflatten(image[:, 0].transpose(1, 2), 2, embedding.shape[2:])  # (N, E, G, G)
        of_masks = tokens[:, self.first_mask_token :]
        weights = [part(of_masks[:, at]) for at, part in enumerate(self.decoder.output_hypernetworks_mlps)]
        cells = self._enlarge(image, features)
        masks = torch.unflatten(torch.stack(weights, dim=1) @ cells.flatten(2), 2, cells.shape[2:])  # (N, M, S, S)
        predicted_iou = self.decoder.iou_prediction_head(tokens[:, self.first_mask_token - 1])
        return {"masks": masks.float(), "predicted_iou": predicted_iou.float()}

    def _output_tokens(self) -> Tensor:
        """Returns the tokens before those of points, (tokens, E)."""
        return torch.cat((self.decoder.iou_token.weight, self.decoder.mask_tokens.weight))

    def _kinds(self) -> Tensor:
        """What is added to the place of a point, by its label: (4, E)."""
        return torch.cat([kind.weight for kind in self.prompts.point_embed])

    def _tokens(self, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Output tokens, those of points and the one that ends them, (N, T, E), and which are there, (N, T)."""
        centres = points + 0.5 / self.prompts.input_image_size  # the library counts places from centres of pixels
        places = self.prompts.shared_embedding(centres[:, None])[:, 0]  # (N, Q, E)
        outputs, end = self._output_tokens(), self.prompts.not_a_point_embed.weight
        count = points.shape[0]
        tokens = (
            outputs.expand(count, -1, -1),
            (places + self._kinds()[labels.clamp(min=0)]).to(outputs.dtype),
            end.expand(count, 1, -1),
        )
        has_box = (labels >= TOP_LEFT).any(dim=1, keepdim=True)
        there = (
            torch.ones_like(labels[:, :1], dtype=torch.bool).expand(-1, len(outputs)),
            labels >= 0,
            torch.ones_like(has_box) if self.ends_boxes else ~has_box,
        )
        return torch.cat(tokens, dim=1), torch.cat(there, dim=1)

    def _dense(self, earlier_mask: Tensor | None, has_earlier_mask: Tensor | None) -> Tensor:
        """What is added to the image: (N, E, G, G), or (1, E, 1, 1)."""
        nothing: Tensor = self.prompts.no_mask_embed.weight.reshape(1, -1, 1, 1)
        if earlier_mask is None:
            return nothing
        read: Tensor = self.prompts.mask_embed(earlier_mask[:, None])
        return (
            read if has_earlier_mask is None else torch.where(has_earlier_mask[:, None, None, None] > 0, read, nothing)
        )

    def _enlarge(self, image: Tensor, features: dict[str, Tensor]) -> Tensor:
        """(N, E, G, G) -> (N, E / 8, S, S)."""
        decoder = self.decoder
        cells = _doubled(decoder.upscale_conv1, image)
        if "features_1" in features:
            cells = cells + features["features_1"]
        cells = _doubled(decoder.upscale_conv2, decoder.activation(decoder.upscale_layer_norm(cells)))
        if "features_0" in features:
            cells = cells + features["features_0"]
        return cast("Tensor", decoder.activation(cells))


def _doubled(part: Any, maps: Tensor) -> Tensor:
    """Applies a `ConvTranspose2d` by the operator that it is made of: a graph with the other is traced twice."""
    return torch.convolution(
        maps, part.weight, part.bias, part.stride, part.padding, part.dilation, True, part.output_padding, part.groups
    )


class _PyramidDecoder(_Decoder):
    """That of SAM 2, with a first token that tells whether there is an object, which is not asked for."""

    first_mask_token = 2
    ends_boxes = True

    def _output_tokens(self) -> Tensor:
        return torch.cat((self.decoder.obj_score_token.weight, super()._output_tokens()))

    def _kinds(self) -> Tensor:
        return cast("Tensor", self.prompts.point_embed.weight)


class HuggingFaceSegmenter(nn.Module):
    """A segmenter of `transformers`, by the protocol of segmentation."""

    def __init__(self, model: Any, *, in_rows: bool = True) -> None:
        """Takes a model apart.

        Args:
            model: The library's.
            in_rows: True to change its encoder so that it takes less memory; False to leave the library's own.
        """
        super().__init__()
        is_pyramid = hasattr(model, "no_memory_embedding")
        model.mask_decoder.transformer.config._attn_implementation = _ATTENTION  # noqa: SLF001 (the library's setting)
        if in_rows and is_pyramid:
            model.vision_encoder.backbone.config._attn_implementation = _ATTENTION  # noqa: SLF001
        elif in_rows:
            for layer in model.vision_encoder.layers:
                layer.attn = _PlacedAttention(layer.attn)
        places = model.get_image_wide_positional_embeddings()
        self.mask_size = _CELLS_OF_A_PLACE * places.shape[-1]
        self.encoder = _PyramidEncoder(model) if is_pyramid else _Encoder(model)
        self.decoder = (_PyramidDecoder if is_pyramid else _Decoder)(model, places)


def read_segmenter(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a segmenter.

    Raises:
        SourceError: The folder is incomplete, or its model or its preprocessing cannot be served.
    """
    config = folder.config
    if config.model_type not in SEGMENTERS:
        raise SourceError(
            f"{folder.path}: segments images as {config.model_type}, and how its prompts are read is not known; known "
            f"are {', '.join(sorted(SEGMENTERS))}"
        )
    preprocessing, is_bgr = read_preprocessing(folder)
    file = folder.path / PREPROCESSOR_FILE
    if is_bgr:
        raise SourceError(f"{file}: turns colours around, and a segmenter reads RGB")
    side = config.prompt_encoder_config.image_size
    if not isinstance(side, int) or preprocessing.largest != (side, side):
        raise SourceError(
            f"{file}: prepares images of {preprocessing.height} x {preprocessing.width}, and {config.model_type} reads "
            f"{side} x {side}; write that there"
        )
    is_square = preprocessing.resize == "stretch"
    if is_square != config.model_type.startswith("sam2"):
        raise SourceError(
            f"{file}: {'stretches images to a square' if is_square else 'keeps proportions of images'}, which is not "
            f"what {config.model_type} was trained on; take the file that was published with it"
        )
    model = folder.load(AutoModelForMaskGeneration)

    def make_reference() -> nn.Module:
        return HuggingFaceSegmenter(folder.load(AutoModelForMaskGeneration, attention="sdpa"), in_rows=False).eval()

    source = folder.source(
        model,
        HuggingFaceSegmenter(model).eval(),
        make_reference=make_reference,
        image_preprocessing=preprocessing,
        segmentation=_scheme_of(folder),
        evaluation=folder.evaluation(),
    )
    return source, ((_OF_IMAGES_ALONE,) if config.model_type == "sam2_video" else ())


_OF_IMAGES_ALONE: Final = "its part for images is exported; the memory that follows objects through a video is left out"


def _scheme_of(folder: ModelFolder) -> Segmentation:
    """Says how the library's processors and models answer prompts.

    Raises:
        SourceError: The stability that is asked of a mask is none.
    """
    if not folder.config.model_type.startswith("sam2"):
        return Segmentation(several_parts="at_once", pixels="of_model_pixels")
    decoder = folder.config.mask_decoder_config
    if not decoder.dynamic_multimask_via_stability:
        return Segmentation(several_parts="at_once")
    offset, least = decoder.dynamic_multimask_stability_delta, decoder.dynamic_multimask_stability_thresh
    if not offset > 0 or not 0 <= least <= 1:
        raise SourceError(
            f"{folder.path / CONFIG_FILE}: dynamic_multimask_stability_delta is {offset}, which must be above 0, and "
            f"dynamic_multimask_stability_thresh is {least}, which goes from 0 to 1"
        )
    return Segmentation(several_parts="at_once", stable_mask=StableMask(offset=offset, least=least))
