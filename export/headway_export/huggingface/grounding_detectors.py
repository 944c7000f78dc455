"""Models that find objects of the caller's labels by reading these as one text together with the image.

B rows, T tokens of the text, M maps of features, N places of all maps, Q boxes of an image, H heads, K head width, D
model width.
"""

from __future__ import annotations

import math
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForZeroShotObjectDetection

from headway_export.differences import nearest_rows, relative_errors
from headway_export.errors import SourceError
from headway_export.huggingface.deformable import Places, SwinMaps, attend_to_places, flatten_maps, logit_of, waves_of
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.images import PREPROCESSOR_FILE, read_preprocessing
from headway_export.huggingface.towers import SAMPLE_LABELS, read_tokenizer
from headway_export.source import ExportSource
from headway_server.bundles import Detection, ImagePreprocessing, LabelPrompt, SpecialTokens
from headway_training.folders import first_line

GROUNDING_DETECTORS: Final = frozenset({"grounding-dino", "mm-grounding-dino"})
"""Families by model type."""
OUTPUT_BOUND: Final = 1e-3
"""Largest relative difference of logits and of sides of boxes between the graphs' arithmetic and the whole model.

Rounding alone moved boxes of the published tiny shape with random weights by up to 5e-4."""
_MOST_EXCHANGED: Final = 0.05
"""Share of the boxes that may differ by more: they are chosen by scores, and rounding may exchange two of them."""
_THRESHOLD: Final = 0.25
"""That of the library's post-processing."""
_SEPARATOR: Final = "."
_SAMPLE_SIDES: Final = (331, 417)
"""Height and width of the image that is compared, where a model reads several sizes."""
_LEAST_SHARE, _MOST_SHARE = 0.01, 0.99
"""Between these are the centre and the sides of a proposal, as shares of the image."""
_SIDE: Final = 0.05
"""Of a proposal of the first map; of each further map twice as much."""


class GroundingMaps(nn.Module):
    """The part of a Grounding DINO of `transformers` that reads images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        backbone = cast("Any", model).model.backbone.conv_encoder.model
        is_swin = backbone.config.model_type == "swin" and not backbone.config.use_absolute_embeddings
        self.swin = SwinMaps(backbone) if is_swin else None

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """(B, 3, height, width) -> `features` (B, N, D), the finest map first, `map_sizes` (B, M, 2)."""
        whole = cast("Any", self.model).model
        if self.swin is not None:
            maps = self.swin(pixel_values)
        else:
            maps = whole.backbone.conv_encoder.model(pixel_values, return_dict=True).feature_maps
        found: list[Tensor] = []
        for level, project in enumerate(whole.input_proj_vision):
            if level < len(maps):
                found.append(project(maps[level]))
            else:
                found.append(project(maps[-1] if level == len(maps) else found[-1]))
        features, sizes = flatten_maps(found)
        return {"features": features, "map_sizes": sizes}


class GroundingDecoder(nn.Module):
    """The part that reads labels and features of an image together; Liu et al. 2023 (arXiv 2303.05499), section 3.

    Nothing is limited to 50,000 before a softmax, as scores are in the library, where that is further than float32
    tells apart.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, features: Tensor, map_sizes: Tensor, input_ids: Tensor, attention_mask: Tensor
    ) -> dict[str, Tensor]:
        """Finds objects.

        Args:
            features: (B, N, D).
            map_sizes: Rows and columns of each map, (B, M, 2).
            input_ids: (B, T).
            attention_mask: (B, T), 1 at tokens and 0 behind them.

        Returns:
            `token_logits` (B, Q, T) and `boxes` (B, Q, 4).
        """
        head = cast("Any", self.model)
        whole, seen = head.model, attention_mask.bool()
        together, positions = phrases_of(input_ids, seen, whole.special_tokens)
        apart = (~together)[:, None].float() * torch.finfo(torch.float32).min  # (B, 1, T, T)
        text = whole.text_backbone(
            input_ids, apart, torch.zeros_like(input_ids), positions, return_dict=True
        ).last_hidden_state
        text = whole.text_projection(text)
        maps = Places.of(map_sizes, features.shape[1])
        image, text = self._encode(features, maps, text, seen, apart, positions)
        proposed, scores, logits = self._propose(maps, image, text, seen)
        best = scores.topk(whole.config.num_queries, dim=1)[1][..., None]  # (B, Q, 1)
        places = logits.gather(1, best.expand(-1, -1, 4)).sigmoid()
        if whole.config.embedding_init_target:
            states = whole.query_position_embeddings.weight.expand(input_ids.shape[0], -1, -1)
        else:
            states = proposed.gather(1, best.expand(-1, -1, proposed.shape[-1]))
        states, places = self._decode(maps, states, places, image, text, seen)
        found = whole.decoder.layer_norm(states)
        boxes = (head.bbox_embed[-1](found) + logit_of(places)).sigmoid()
        return {"token_logits": _similarity(head.class_embed[-1], found, text), "boxes": boxes}

    def _encode(  # noqa: PLR0917 (tensors in the order of the text)
        self, image: Tensor, maps: Places, text: Tensor, seen: Tensor, apart: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns image (B, N, D) and text (B, T, D), each having read the other."""
        whole = cast("Any", self.model).model
        centres = maps.centres
        waves = maps.waves(image.shape[-1], whole.config.positional_embedding_temperature)
        waves = waves + functional.embedding(maps.level, whole.level_embed)
        phrase_waves = waves_of(positions[..., None], text.shape[-1]).flatten(2)  # (B, T, D)
        for layer in whole.encoder.layers:
            image, text = _fuse(layer.fusion_layer, image, text, seen)
            text = _enhance(layer.text_enhancer_layer, text, apart, phrase_waves)
            block = layer.deformable_layer
            attended = attend_to_places(block.self_attn, image + waves, image, maps, centres)
            image = _feed_forward(block, block.self_attn_layer_norm(image + attended))
        return image, text

    def _propose(self, maps: Places, image: Tensor, text: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns of each place states (B, N, D), a score (B, N), and a box as logits (B, N, 4)."""
        whole = cast("Any", self.model).model
        sides = (_SIDE * 2.0**maps.level)[..., None].expand(-1, -1, 2)
        shares = torch.cat([maps.centres, sides], dim=-1)  # (B, N, 4)
        is_inside = ((shares > _LEAST_SHARE) & (shares < _MOST_SHARE)).all(dim=-1, keepdim=True)  # (B, N, 1)
        logits = torch.where(is_inside, torch.log(shares / (-shares + 1)), torch.inf)
        states = whole.enc_output_norm(whole.enc_output(torch.where(is_inside, image, 0.0)))
        products = _similarity(whole.encoder_output_class_embed, states, text)  # (B, N, T)
        scores = products.masked_fill(~seen[:, None], -torch.inf).amax(dim=-1)
        return states, scores, whole.encoder_output_bbox_embed(states) + logits

    def _decode(  # noqa: PLR0917 (tensors in the order of the text)
        self, maps: Places, states: Tensor, places: Tensor, image: Tensor, text: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns states of boxes (B, Q, D), and the places that the last layer began with (B, Q, 4)."""
        decoder = cast("Any", self.model).model.decoder
        mask = (~seen)[:, None, None].float() * torch.finfo(torch.float32).min  # (B, 1, 1, T)
        last = len(decoder.layers) - 1
        for number, layer in enumerate(decoder.layers):
            waves = decoder.reference_points_head(
                waves_of(places[:, :, (1, 0, 2, 3)], states.shape[-1] // 2).flatten(2)
            )
            asked = states + waves
            states = layer.self_attn_layer_norm(states + layer.self_attn(asked, asked, states)[0])
            read = layer.encoder_attn_text(states + waves, text, text, mask)[0]
            states = layer.encoder_attn_text_layer_norm(states + read)
            attended = attend_to_places(layer.encoder_attn, states + waves, image, maps, places)
            states = _feed_forward(layer, layer.encoder_attn_layer_norm(states + attended))
            if number < last:
                moved = decoder.bbox_embed[number](states) + logit_of(places)
                places = moved.sigmoid()
        return states, places


def phrases_of(input_ids: Tensor, seen: Tensor, separators: Tensor) -> tuple[Tensor, Tensor]:
    """Tells which tokens of a text attend to each other: those between two separators, and the second of these.

    Args:
        input_ids: (B, T), which ends with two separators.
        seen: (B, T), True at tokens and False behind them.
        separators: Their ids.

    Returns:
        True where they do, (B, T, T), and the place of each token among them, (B, T).
    """
    length = input_ids.shape[1]
    is_separator = (input_ids[..., None] == separators).any(dim=-1)
    number = is_separator.long().cumsum(dim=1) - is_separator.long()  # (B, T), of the phrase
    phrase = torch.where(seen, number, -1)
    places = torch.arange(length)
    together = (phrase[:, :, None] == phrase[:, None]) & seen[:, None]
    before = together & (places < places[:, None])
    return together | (places == places[:, None]), before.long().sum(dim=-1)


def _similarity(embedding: Any, states: Tensor, text: Tensor) -> Tensor:
    """Products of states and tokens, (B, Q, D), (B, T, D) -> (B, Q, T), as the kind of model scales them."""
    products: Tensor = states @ text.transpose(1, 2)
    if (bias := getattr(embedding, "bias", None)) is None:
        return products
    return products / math.sqrt(states.shape[-1]) + cast("Tensor", bias)


def _enhance(layer: Any, text: Tensor, apart: Tensor, waves: Tensor) -> Tensor:
    """Tokens of a phrase read each other, (B, T, D)."""
    asked = text + waves
    text = layer.layer_norm_before(text + layer.self_attn(asked, asked, text, apart)[0])
    return cast("Tensor", layer.layer_norm_after(text + layer.fc2(layer.activation(layer.fc1(text)))))


def _fuse(layer: Any, image: Tensor, text: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Image (B, N, D) and text (B, T, D) read each other."""
    attention = layer.attn
    image, text = layer.layer_norm_vision(image), layer.layer_norm_text(text)

    def heads(states: Tensor) -> Tensor:
        parts = states.reshape(*states.shape[:2], attention.num_heads, -1)
        return parts.transpose(1, 2)  # (B, H, ., K)

    query, key = heads(attention.vision_proj(image) * attention.scale), heads(attention.text_proj(text))
    of_image, of_text = heads(attention.values_vision_proj(image)), heads(attention.values_text_proj(text))
    scores = query @ key.transpose(-1, -2)  # (B, H, N, T)
    shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(dim=-1)
    to_image = attention.out_vision_proj((shares @ of_text).transpose(1, 2).flatten(2))
    to_text = attention.out_text_proj((scores.transpose(-1, -2).softmax(dim=-1) @ of_image).transpose(1, 2).flatten(2))
    return image + layer.vision_param * to_image, text + layer.text_param * to_text


def _feed_forward(layer: Any, states: Tensor) -> Tensor:
    return cast("Tensor", layer.final_layer_norm(states + layer.fc2(layer.activation_fn(layer.fc1(states)))))


class GroundingDetector(GroundingMaps):
    """A Grounding DINO of `transformers`, with what it reads of images, and of these together with labels."""

    def __init__(self, model: nn.Module, max_length: int) -> None:
        super().__init__(model)
        config = cast("Any", model).config
        self.decoder = GroundingDecoder(model)
        self.max_length = max_length
        self.width: int = config.d_model
        self.num_maps: int = config.num_feature_levels
        self.num_queries: int = config.num_queries


def read_grounding_detector(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a detector of the caller's labels, which it reads together with an image.

    Raises:
        SourceError: The folder is incomplete, or its model or what goes with it cannot be served.
    """
    preprocessing, is_bgr = read_preprocessing(folder, of_any_size=True)
    if is_bgr:
        raise SourceError(f"{folder.path / PREPROCESSOR_FILE}: turns colours around, and a detector reads RGB")
    config = folder.config
    if not config.two_stage:
        raise SourceError(f"{folder.path}: has queries of its own (two_stage is false); not supported")
    if config.position_embedding_type != "sine":
        raise SourceError(f"{folder.path}: has {config.position_embedding_type} positions; only sine is supported")
    tokenizer, library = read_tokenizer(folder)
    longest = min(int(config.max_text_len), int(config.text_config.max_position_embeddings))
    if (asked := folder.options.max_length) is not None and asked > longest:
        raise SourceError(f"{folder.path}: --max-length {asked}: the model takes {longest} tokens")

    def load() -> tuple[nn.Module, GroundingDetector]:
        model = folder.load(AutoModelForZeroShotObjectDetection)
        # Masks of texts are True and False, which the library's plain attention would add to scores.
        cast("Any", model).model.text_backbone.set_attn_implementation("sdpa")
        return model, GroundingDetector(model, asked or longest).eval()

    model, detector = load()
    prompt = _prompt_of(folder, library, cast("Any", model).model.special_tokens.tolist())
    _check_whole(folder, detector, library, preprocessing)
    source = folder.source(
        model,
        detector,
        make_reference=lambda: load()[1],
        image_preprocessing=preprocessing,
        tokenizer=tokenizer,
        special_tokens=SpecialTokens(pad=int(library.pad_token_id or 0)),
        detection=Detection(
            scores="best_sigmoid",
            num_queries=config.num_queries,
            max_objects=config.num_queries,
            labels="joined",
            prompt=prompt,
            threshold=_THRESHOLD,
        ),
    )
    return source, ()


def _prompt_of(folder: ModelFolder, library: Any, separators: list[int]) -> LabelPrompt:
    """Returns the tokens around and between labels.

    Raises:
        SourceError: The tokenizer puts others there than those that the model splits a text at, or its pieces of a
            label depend on the labels beside it.
    """
    frame = library(_SEPARATOR)["input_ids"]
    begin, separator, end = frame[0], frame[len(frame) // 2], frame[-1]
    labels = [library(label, add_special_tokens=False)["input_ids"] for label in SAMPLE_LABELS]
    joined = [begin, *(index for label in labels for index in (*label, separator)), end]
    text = f"{_SEPARATOR} ".join(SAMPLE_LABELS) + _SEPARATOR
    if not {begin, end, separator} <= set(separators) or joined != library(text)["input_ids"]:
        raise SourceError(
            f"{folder.path}: its tokenizer does not put the tokens {separators} around and between labels, at which "
            "the model splits a text; take the tokenizer of BERT (uncased), which such models are published with"
        )
    more = tuple(index for index in separators if index not in (begin, end, separator))
    return LabelPrompt(begin=begin, end=end, separator=separator, more_separators=more)


def _check_whole(
    folder: ModelFolder, detector: GroundingDetector, library: Any, preprocessing: ImagePreprocessing
) -> None:
    """Holds logits and boxes against those of the whole model.

    Raises:
        SourceError: They differ, or the model does not read such images or labels.
    """
    model: Any = detector.model
    inputs = library(f"{_SEPARATOR} ".join(SAMPLE_LABELS) + _SEPARATOR, return_tensors="pt")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    size = _SAMPLE_SIDES if preprocessing.keeps_proportions else preprocessing.largest
    pixels = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    try:
        with torch.inference_mode():
            whole = model(pixel_values=pixels, input_ids=ids, attention_mask=mask, return_dict=True)
            features = detector(pixels)
            found = detector.decoder(features["features"], features["map_sizes"], ids, mask)
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{folder.path}: {type(model).__name__} does not read images of {size[0]} x {size[1]}, or the tokens of "
            f"its tokenizer ({first_line(error)})"
        ) from error
    logits, boxes = whole.logits[0, :, : ids.shape[1]].numpy(), whole.pred_boxes[0].numpy()
    ours = found["token_logits"][0].numpy(), found["boxes"][0].numpy()
    order = nearest_rows(np.concatenate([logits, boxes], axis=1), np.concatenate(ours, axis=1))
    for what, other, own in (("logits", ours[0], logits), ("boxes", ours[1], boxes)):
        errors = relative_errors(other[order], own, of_softmax=False, least_size=1.0)
        if not (difference := float(np.quantile(errors, 1 - _MOST_EXCHANGED))) <= OUTPUT_BOUND:
            raise SourceError(
                f"{folder.path}: the graphs' arithmetic gives other {what} than {type(model).__name__} does "
                f"({_MOST_EXCHANGED:.0%} of the boxes differ by {difference:.1e} or more, limit {OUTPUT_BOUND:.0e}); "
                "not supported"
            )
