"""Models that label images or make vectors of them, and how their images are prepared.

B images, C classes, T tokens (patches and what is put before them), D model width.
"""

from __future__ import annotations

import io
from typing import Any, Final, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder
from headway_export.source import ExportSource
from headway_server.bundles import ClassificationScheme, ImagePreprocessing
from headway_server.errors import BundleError
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.image import ImageLimits
from headway_training.folders import first_line, labels_of, quiet

PREPROCESSOR_FILE: Final = "preprocessor_config.json"
LEVEL: Final = 1 / 255
"""Largest difference of a channel, in 0 to 1, between our pixels and those of `transformers`: a level of rounding."""
POSITION_BOUND: Final = 1e-4
"""Largest relative difference that position embeddings of a fixed size may make."""

_INTERPOLATIONS: Final = {2: "bilinear", 3: "bicubic"}
"""By Pillow's numbers."""
_SAMPLE_SIZES: Final = ((64, 48), (301, 517), (517, 301), (640, 480), (224, 224), (1000, 333))
"""Width and height of the images that preprocessing is compared on."""
_LIMITS: Final = ImageLimits(max_bytes=2**26, max_pixels=2**24)
_POOLINGS: Final = ("cls", "mean")


class HuggingFaceImageClassifier(nn.Module):
    """A classifier of images of `transformers`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> logits (B, C)."""
        return cast("Tensor", self.model(pixel_values=pixel_values, return_dict=True).logits)


class HuggingFaceEmbeddingImageClassifier(nn.Module):
    """A classifier of images whose last layer reads one vector of each, which is its embedding."""

    pooling = "before_classifier"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.classifier = cast("nn.Module", model.classifier)
        model.classifier = nn.Identity()

    def logits_and_embedding(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, height, width) -> logits (B, C), vectors (B, D)."""
        pooled = self.model(pixel_values=pixel_values, return_dict=True).logits
        return self.classifier(pooled), pooled.flatten(1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> logits (B, C)."""
        return self.logits_and_embedding(pixel_values)[0]


class HuggingFaceImageEmbedder(nn.Module):
    """A vision model of `transformers` without a head, and a pooling."""

    def __init__(self, model: nn.Module, *, pooling: str) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """(B, 3, height, width) -> `embedding` (B, D)."""
        output = self.model(pixel_values=pixel_values, return_dict=True)
        if self.pooling == "pooler":
            return {"embedding": output.pooler_output.flatten(1)}
        states = output.last_hidden_state  # (B, T, D)
        return {"embedding": states[:, 0] if self.pooling == "class_token" else states.mean(dim=1)}


def read_image_classifier(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a classifier of images.

    Raises:
        SourceError: The folder is incomplete, or its model or its preprocessing cannot be served.
    """
    config = folder.config
    if config.num_labels == 1 or config.problem_type == "regression":
        raise SourceError(f"{folder.path}: has one output, a score; scores are served of texts alone")
    preprocessing = read_preprocessing(folder)
    model = folder.load(AutoModelForImageClassification)
    _fix_positions(folder, model, preprocessing)
    labels = labels_of(config)
    several = config.problem_type == "multi_label_classification"
    return (
        folder.source(
            model,
            _classifier_of(model),
            make_reference=lambda: _classifier_of(folder.load(AutoModelForImageClassification)),
            image_preprocessing=preprocessing,
            labels=labels,
            classification=(
                ClassificationScheme(kind="multi_label", thresholds=(0.5,) * len(labels)) if several else None
            ),
            evaluation=folder.evaluation(len(labels)),
        ),
        (),
    )


def _classifier_of(model: nn.Module) -> nn.Module:
    gives_vectors = isinstance(getattr(model, "classifier", None), nn.Module)
    kind = HuggingFaceEmbeddingImageClassifier if gives_vectors else HuggingFaceImageClassifier
    return kind(model).eval()


def read_image_embedder(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a vision model without a head.

    Raises:
        SourceError: As `read_image_classifier`, or it does not give the vectors that are asked for.
    """
    asked = folder.options.pooling
    if asked is not None and asked not in _POOLINGS:
        raise SourceError(f"--pooling {asked}: is none of {', '.join(_POOLINGS)}")
    preprocessing = read_preprocessing(folder)
    model, is_trained = _load_without_pooler(folder)
    pooling = {"cls": "class_token", "mean": "mean", None: "class_token" if is_trained else "pooler"}[asked]
    _fix_positions(folder, model, preprocessing)
    module = HuggingFaceImageEmbedder(model, pooling=pooling).eval()
    with torch.inference_mode():
        output = model(pixel_values=torch.zeros(1, 3, preprocessing.height, preprocessing.width), return_dict=True)
    states, pooled = getattr(output, "last_hidden_state", None), getattr(output, "pooler_output", None)
    if (pooled is None) if pooling == "pooler" else (states is None or states.ndim != 3):
        raise SourceError(
            f"{folder.path}: {type(model).__name__} gives no "
            f"{'pooled vector; give --pooling' if pooling == 'pooler' else 'row of tokens; leave --pooling out'}"
        )
    source = folder.source(
        model,
        module,
        make_reference=lambda: HuggingFaceImageEmbedder(_load_without_pooler(folder)[0], pooling=pooling),
        image_preprocessing=preprocessing,
        evaluation=folder.evaluation(),
    )
    return source, ()


def _load_without_pooler(folder: ModelFolder) -> tuple[nn.Module, bool]:
    """Loads a vision model, and tells whether it had a dense pooler, which is left out.

    Such a pooler was trained for another end, and most folders come without its weights.
    """
    model = folder.load(AutoModel, unused=("pooler.dense.",))
    is_trained = isinstance(getattr(getattr(model, "pooler", None), "dense", None), nn.Linear)
    if is_trained:
        cast("Any", model).pooler = None
    return model, is_trained


# Preprocessing


def read_preprocessing(folder: ModelFolder) -> ImagePreprocessing:
    """Reads how images are prepared, and compares the pixels with those of `transformers`.

    Raises:
        SourceError: It is not said, or a bundle cannot say it.
    """
    file = folder.path / PREPROCESSOR_FILE
    if not file.exists():
        raise SourceError(f"{folder.path}: has no {PREPROCESSOR_FILE}, which says how images are prepared")
    try:
        with quiet():
            processor = AutoImageProcessor.from_pretrained(
                folder.path, backend="pil", trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # the library raises many kinds
        raise SourceError(f"{file}: cannot be read ({first_line(error)})") from error
    try:
        settings = _map(processor)
        preprocessor = ImagePreprocessor(settings, _LIMITS)
    except (ValueError, BundleError) as error:
        raise SourceError(f"{file}: {first_line(error)}; such preprocessing is not supported") from error
    _check_pixels(folder, processor, preprocessor, settings)
    return settings


def _map(processor: Any) -> ImagePreprocessing:
    """Says in the manifest's words what an image processor does.

    Raises:
        ValueError: There are no such words.
    """
    if not processor.do_resize:
        raise ValueError("images are not resized, and a graph reads one size")
    if getattr(processor, "do_pad", None):
        raise ValueError("images are padded")
    if processor.resample not in _INTERPOLATIONS:
        raise ValueError(f"images are resized by filter {processor.resample}, and Pillow's 2 and 3 are known")
    # (pixel * factor - mean) / std, of a pixel in 0 to 1
    factor = 255 * float(processor.rescale_factor) if processor.do_rescale else 255.0
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ((0.0,) * 3, (1.0,) * 3)
    return ImagePreprocessing(
        **_map_size(processor),
        interpolation=_INTERPOLATIONS[processor.resample],
        mean=tuple(float(value) / factor for value in mean),
        std=tuple(float(value) / factor for value in std),
    )


def _map_size(processor: Any) -> dict[str, Any]:
    """Returns sizes and the way to them; errors as `_map`."""
    size, crop = processor.size, processor.crop_size if processor.do_center_crop else None
    values: dict[str, Any] = {}
    if size.shortest_edge and not size.longest_edge:
        edge = int(size.shortest_edge)
        if (share := getattr(processor, "crop_pct", None)) is not None:
            values = {"height": edge, "width": edge, "resize": "stretch"}
            if edge < 384:  # as ConvNeXt was trained: smaller images are cropped, larger ones are not
                values |= {"resize": "shorter_side", "resize_size": int(edge / share), "rounding": "down"}
        elif crop is None:
            raise ValueError("images keep their proportions and are not cropped, and a graph reads one size")
        else:
            values = {"resize": "shorter_side", "resize_size": edge, "rounding": "down"}
    elif size.height and size.width:
        values = {"height": int(size.height), "width": int(size.width), "resize": "stretch"}
        if crop is not None and (crop.height, crop.width) != (size.height, size.width):
            if size.height != size.width:
                raise ValueError("images are stretched to a size that is no square and then cropped")
            values["resize_size"] = int(size.height)
    else:
        raise ValueError(f"images are resized to {dict(size)}")
    if crop is not None:
        values |= {"height": int(crop.height), "width": int(crop.width)}
    return values


def _check_pixels(
    folder: ModelFolder, processor: Any, preprocessor: ImagePreprocessor, settings: ImagePreprocessing
) -> None:
    """Compares pixels of pictures of several sizes.

    Raises:
        SourceError: They differ by more than a level of rounding.
    """
    generator = np.random.default_rng(0)
    std = np.array(settings.std, np.float32)[:, None, None]
    for width, height in _SAMPLE_SIZES:
        coarse = generator.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3)).astype(np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
        file = io.BytesIO()
        picture.save(file, "PNG")
        found = preprocessor.prepare(file.getvalue()).pixel_values
        try:
            expected = np.asarray(processor(picture, return_tensors="np")["pixel_values"][0])
        except Exception as error:  # whatever the library raises
            raise SourceError(f"{folder.path / PREPROCESSOR_FILE}: cannot be followed ({first_line(error)})") from error
        difference = np.inf if found.shape != expected.shape else float(np.abs((found - expected) * std).max())
        if not difference <= LEVEL * 1.01:
            raise SourceError(
                f"{folder.path / PREPROCESSOR_FILE}: {type(processor).__name__} prepares an image of {width} x "
                f"{height} in a way that a bundle cannot say (the largest difference is {255 * difference:.1f} levels, "
                "a level of rounding is allowed); such preprocessing is not supported"
            )


def _height_and_width(stated: Any) -> tuple[int, int] | None:
    """Returns what a configuration states as one number, or as two."""
    pair = (stated, stated) if isinstance(stated, int) else tuple(stated or ())
    return (int(pair[0]), int(pair[1])) if len(pair) == 2 else None


def _fix_positions(folder: ModelFolder, model: nn.Module, preprocessing: ImagePreprocessing) -> None:
    """Interpolates position embeddings once, where a model would do it for every image.

    Raises:
        SourceError: The model does not read images of this size.
    """
    size = (preprocessing.height, preprocessing.width)
    pixels = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))
    try:
        with torch.inference_mode():
            expected = model(pixel_values=pixels, return_dict=True)[0]
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{folder.path}: {type(model).__name__} does not read images of {size[0]} x {size[1]}, which "
            f"{PREPROCESSOR_FILE} asks for ({first_line(error)})"
        ) from error
    parts: Any = getattr(cast("Any", model).base_model, "embeddings", None)
    table = getattr(parts, "position_embeddings", None)
    trained, patches = (_height_and_width(getattr(folder.config, name, None)) for name in ("image_size", "patch_size"))
    if not isinstance(table, nn.Parameter) or not hasattr(parts, "interpolate_pos_encoding") or trained == size:
        return
    assert patches is not None, "a model with positions of patches states their size"
    num_patches = (size[0] // patches[0]) * (size[1] // patches[1])
    with torch.no_grad():
        fixed = parts.interpolate_pos_encoding(torch.zeros(1, 1 + num_patches, table.shape[-1]), *size)
        parts.position_embeddings = nn.Parameter(fixed.clone())
        found = model(pixel_values=pixels, return_dict=True)[0]
    error_size = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if size[0] != size[1] or not error_size <= POSITION_BOUND:
        raise SourceError(
            f"{folder.path}: {type(model).__name__} was made for images of {trained and trained[0]} pixels, and its "
            f"positions cannot be fitted to {size[0]} x {size[1]}"
        )
