"""Models that label images or make vectors of them, and how their images are prepared.

B images, C classes, T tokens (patches and what is put before them), D model width.
"""

from __future__ import annotations

import io
import json
import math
from typing import Any, ClassVar, Final, cast, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    LevitImageProcessorPil,
    Owlv2ImageProcessorPil,
    ViTImageProcessorPil,
    YolosImageProcessorPil,
)
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from headway_export.errors import SourceError
from headway_export.huggingface.folder import ModelFolder
from headway_export.huggingface.patches import WholeImageProcessor
from headway_export.huggingface.timm_images import TimmImageProcessor
from headway_export.source import ExportSource
from headway_server.bundles import ClassificationScheme, ImagePreprocessing
from headway_server.errors import BundleError, InvalidInputError
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.image import ImageLimits
from headway_training.folders import TIMM, first_line, labels_of, quiet

PREPROCESSOR_FILE: Final = "preprocessor_config.json"
PROCESSOR_FILE: Final = "processor_config.json"
"""Where a processor of texts and images has the same, as newer folders do."""
LEVEL: Final = 1 / 255
"""Largest difference of a channel, in 0 to 1, between our pixels and those of `transformers`: a level of rounding."""
POSITION_BOUND: Final = 1e-4
"""Largest relative difference that position embeddings of a fixed size may make."""

_INTERPOLATIONS: Final = get_args(ImagePreprocessing.model_fields["interpolation"].annotation)
_LEVIT_SHARE: Final = 224 / 256
"""Share of a resized image's shorter side that LeViT crops, which its preprocessing does not state."""
_YOLOS_MULTIPLE: Final = 16
"""Multiple that YOLOS rounds sides down to, which its preprocessing does not state."""
_MOST_WHOLE_PIXELS: Final = 2**20
"""Maximum pixels of an image that is resized to no size, which the memory of a model's attention grows with."""
_MOST_ELONGATED: Final = 2.5
"""Maximum pixels of an image that is resized to one side, in squares of the stated size; a film has 2.39 to 1."""
_SAMPLE_SIZES: Final = ((64, 48), (301, 517), (517, 301), (640, 480), (224, 224), (1000, 333))
"""Width and height of the images that preprocessing is compared on."""
LIMITS: Final = ImageLimits(max_bytes=2**26, max_pixels=2**24)
_POOLINGS: Final = ("cls", "mean")


class _ImageModel(nn.Module):
    """A vision model of `transformers` that is given RGB images."""

    def __init__(self, model: nn.Module, *, is_bgr: bool) -> None:
        super().__init__()
        self.model = model
        self.is_bgr = is_bgr

    @property
    def num_leading_registers(self) -> int:
        """Tokens behind the class token that are of no patch: registers, and what DeiT distils to."""
        config, base = cast("Any", self.model).config, cast("Any", self.model).base_model
        is_distilled = hasattr(getattr(base, "embeddings", None), "distillation_token")
        return int(getattr(config, "num_register_tokens", None) or 0) + is_distilled

    def read(self, pixel_values: Tensor) -> Any:
        """(B, 3, height, width), RGB -> what the model answers."""
        if self.is_bgr:
            pixel_values = pixel_values.flip(1)
        return self.model(pixel_values=pixel_values, return_dict=True)


class HuggingFaceImageClassifier(_ImageModel):
    """A classifier of images of `transformers`."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> logits (B, C)."""
        return cast("Tensor", self.read(pixel_values).logits)


class HuggingFaceEmbeddingImageClassifier(_ImageModel):
    """A classifier of images whose last layer reads one vector of each, which is its embedding."""

    pooling = "before_classifier"

    def __init__(self, model: nn.Module, *, is_bgr: bool) -> None:
        super().__init__(model, is_bgr=is_bgr)
        self.classifier = cast("nn.Module", model.classifier)
        model.classifier = nn.Identity()

    def logits_and_embedding(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, height, width) -> logits (B, C), vectors (B, D)."""
        pooled = self.read(pixel_values).logits
        return self.classifier(pooled), pooled.flatten(1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, 3, height, width) -> logits (B, C)."""
        return self.logits_and_embedding(pixel_values)[0]


class HuggingFaceImageEmbedder(_ImageModel):
    """A vision model of `transformers` without a head, and a pooling."""

    def __init__(self, model: nn.Module, *, is_bgr: bool, pooling: str) -> None:
        super().__init__(model, is_bgr=is_bgr)
        self.pooling = pooling

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """(B, 3, height, width) -> `embedding` (B, D)."""
        output = self.read(pixel_values)
        if self.pooling == "pooler":
            return {"embedding": output.pooler_output.flatten(1)}
        states = output.last_hidden_state  # (B, T, D), or (B, D, rows, columns)
        if states.ndim == 4:
            states = states.flatten(2).transpose(1, 2)  # (B, T, D)
        return {"embedding": states[:, 0] if self.pooling == "class_token" else states.mean(dim=1)}


def read_image_classifier(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a classifier of images.

    Raises:
        SourceError: The folder is incomplete, or its model or its preprocessing cannot be served.
    """
    config = folder.config
    if config.num_labels == 1 or config.problem_type == "regression":
        raise SourceError(f"{folder.path}: has one output, a score; scores are served of texts alone")
    preprocessing, is_bgr = read_preprocessing(folder)
    model = folder.load(AutoModelForImageClassification)
    _fix_positions(folder, model, preprocessing)
    gives_vectors = _gives_vectors(model, preprocessing)
    kind = HuggingFaceEmbeddingImageClassifier if gives_vectors else HuggingFaceImageClassifier
    labels = labels_of(config)
    several = config.problem_type == "multi_label_classification"
    return (
        folder.source(
            model,
            kind(model, is_bgr=is_bgr).eval(),
            make_reference=lambda: kind(folder.load(AutoModelForImageClassification), is_bgr=is_bgr).eval(),
            image_preprocessing=preprocessing,
            labels=labels,
            classification=(
                ClassificationScheme(kind="multi_label", thresholds=(0.5,) * len(labels)) if several else None
            ),
            evaluation=folder.evaluation(len(labels)),
        ),
        (),
    )


def _gives_vectors(model: nn.Module, preprocessing: ImagePreprocessing) -> bool:
    """Tells whether a classifier's logits are what its layer `classifier` answers, and no mean of two heads."""
    layer = getattr(model, "classifier", None)
    if not isinstance(layer, nn.Module):
        return False
    answers: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _module, _inputs, answer: answers.append(answer))
    with torch.inference_mode():
        logits = model(pixel_values=_sample_pixels(preprocessing), return_dict=True).logits
    hook.remove()
    return len(answers) == 1 and answers[0] is logits


def read_image_embedder(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a vision model without a head.

    Raises:
        SourceError: As `read_image_classifier`, or it does not give the vectors that are asked for.
    """
    asked = folder.options.pooling
    if asked is not None and asked not in _POOLINGS:
        raise SourceError(f"--pooling {asked}: is none of {', '.join(_POOLINGS)}")
    preprocessing, is_bgr = read_preprocessing(folder)
    model, is_trained = _load_without_pooler(folder)
    _fix_positions(folder, model, preprocessing)
    with torch.inference_mode():
        output = model(pixel_values=_sample_pixels(preprocessing), return_dict=True)
    pooling = _pooling_of(folder, model, output, is_trained=is_trained)

    def embedder_of(model: nn.Module) -> nn.Module:
        return HuggingFaceImageEmbedder(model, is_bgr=is_bgr, pooling=pooling).eval()

    source = folder.source(
        model,
        embedder_of(model),
        make_reference=lambda: embedder_of(_load_without_pooler(folder)[0]),
        image_preprocessing=preprocessing,
        evaluation=folder.evaluation(),
    )
    return source, ()


def _pooling_of(folder: ModelFolder, model: nn.Module, output: Any, *, is_trained: bool) -> str:
    """Returns how a model's answer becomes a vector: as asked for, or else as its own heads read it.

    Raises:
        SourceError: The answer has no such vector, or several could be meant.
    """
    states = getattr(output, "last_hidden_state", None)  # (1, T, D), or (1, D, rows, columns)
    num_axes = 0 if states is None else states.ndim
    has_class_token = num_axes == 3 and any(name.endswith("cls_token") for name, _ in model.named_parameters())
    asked = folder.options.pooling
    name = f"{folder.path}: {type(model).__name__}"
    if asked == "mean" or (asked == "cls" and num_axes == 3):
        if num_axes not in (3, 4):
            raise SourceError(f"{name} gives no row of tokens and no map of features; leave --pooling out")
        return "class_token" if asked == "cls" else "mean"
    if asked == "cls":
        raise SourceError(f"{name} gives no row of tokens; give --pooling mean, or leave it out")
    if not is_trained and getattr(output, "pooler_output", None) is not None:
        return "pooler"
    if is_trained or has_class_token:
        return "class_token"
    raise SourceError(f"{name} gives no pooled vector and no class token; give --pooling mean")


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


class _FloatImageProcessor(ViTImageProcessorPil):  # type: ignore[misc]  # the library is untyped
    """The preprocessing of DINOv3, which resizes an image before its colours are whole numbers again.

    The library's own needs torchvision, whose resize of tensors this is.
    """

    def resize(self, image: Any, size: Any, resample: Any = None, **_: Any) -> Any:
        """(3, height, width) -> float32 (3, height, width) of `size`."""
        mode = Image.Resampling(resample).name.lower()
        pixels = torch.from_numpy(np.array(image, np.float32))[None]
        return functional.interpolate(pixels, (size.height, size.width), mode=mode, antialias=True)[0].numpy()


class _SquareImageProcessor(ViTImageProcessorPil):  # type: ignore[misc]  # the library is untyped
    """The preprocessing of SAM 2, whose own needs torchvision."""

    size: ClassVar = {"height": 1024, "width": 1024}
    image_mean = IMAGENET_DEFAULT_MEAN
    image_std = IMAGENET_DEFAULT_STD


_OWN_PROCESSORS: Final = {"DINOv3ViT": _FloatImageProcessor, "Sam2": _SquareImageProcessor}
"""In place of the library's, by what their names begin with."""


def read_preprocessing(
    folder: ModelFolder, *, of_any_size: bool = False, processor: Any = None
) -> tuple[ImagePreprocessing, bool]:
    """Reads how images are prepared, and compares the pixels with those of `transformers`.

    Args:
        folder: The folder.
        processor: The image processor of `transformers`; None: the folder's.
        of_any_size: True if the model reads images of several sizes.

    Returns:
        It, and True if the model reads BGR: a bundle prepares RGB.

    Raises:
        SourceError: It is not said, or a bundle cannot say it.
    """
    file = folder.path / PREPROCESSOR_FILE
    processor = open_image_processor(folder) if processor is None else processor
    is_bgr = bool(getattr(processor, "do_flip_channel_order", None))
    try:
        settings = _map(processor, of_any_size=of_any_size)
        preprocessor = ImagePreprocessor(settings, LIMITS)
    except (ValueError, BundleError) as error:
        raise SourceError(f"{file}: {first_line(error)}; such preprocessing is not supported") from error
    _check_pixels(folder, processor, preprocessor, settings, is_bgr=is_bgr)
    return settings, is_bgr


def open_image_processor(folder: ModelFolder) -> Any:
    """Opens the image processor of `transformers` that resizes by Pillow.

    Raises:
        SourceError: It is not there, or cannot be read.
    """
    if folder.config.model_type == TIMM:
        return TimmImageProcessor(AutoImageProcessor.from_pretrained(folder.path, local_files_only=True))
    file = next(
        (path for name in (PREPROCESSOR_FILE, PROCESSOR_FILE) if (path := folder.path / name).exists()),
        folder.path / PREPROCESSOR_FILE,
    )
    if not file.exists():
        raise SourceError(f"{folder.path}: has no {PREPROCESSOR_FILE}, which says how images are prepared")
    try:
        name = str(json.loads(file.read_bytes()).get("image_processor_type"))
        own: Any = next((kind for start, kind in _OWN_PROCESSORS.items() if name.startswith(start)), None)
        with quiet():
            processor = (own or AutoImageProcessor).from_pretrained(
                folder.path,
                **({} if own else {"backend": "pil", "trust_remote_code": False}),
                local_files_only=True,
            )
        return WholeImageProcessor(processor) if hasattr(processor, "max_num_patches") else processor
    except Exception as error:  # the library raises many kinds
        raise SourceError(f"{file}: cannot be read ({first_line(error)})") from error


def _map(processor: Any, *, of_any_size: bool) -> ImagePreprocessing:
    """Says in the manifest's words what an image processor does.

    Raises:
        ValueError: There are no such words.
    """
    if isinstance(processor, TimmImageProcessor):
        return processor.preprocessing()
    if not processor.do_resize:
        raise ValueError("images are not resized, and a graph reads one size")
    if getattr(processor, "do_thumbnail", None):
        return ImagePreprocessing(**_inside(processor), **normalization(processor))
    if isinstance(processor, Owlv2ImageProcessorPil):
        return ImagePreprocessing(**_smoothed(processor), **normalization(processor))
    square = (of_any_size and _bounded_size_of(processor)) or _square_of(processor)
    if getattr(processor, "do_pad", None) and not square and (not of_any_size or getattr(processor, "pad_size", None)):
        raise ValueError("images are padded")  # alone, an image of any size is not, unless to a stated one
    return ImagePreprocessing(**(square or _map_size(processor, of_any_size=of_any_size)), **normalization(processor))


def normalization(processor: Any) -> dict[str, Any]:
    """Returns the fields of `ImagePreprocessing` for the way that an image processor interpolates and normalises.

    Raises:
        ValueError: There are none.
    """
    interpolation = Image.Resampling(processor.resample).name.lower()
    if interpolation not in _INTERPOLATIONS:
        raise ValueError(f"images are resized by {interpolation}, and {', '.join(_INTERPOLATIONS)} are known")
    # (pixel * factor - offset - mean) / std, of a pixel in 0 to 1
    factor = 255 * float(processor.rescale_factor) if processor.do_rescale else 255.0
    offset = 1.0 if processor.do_rescale and getattr(processor, "rescale_offset", None) else 0.0
    mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ((0.0,) * 3, (1.0,) * 3)
    if getattr(processor, "include_top", None):  # EfficientNet divides by it once more
        std = [value * again for value, again in zip(std, processor.image_std, strict=True)]
    return {
        "interpolation": interpolation,
        "mean": tuple((float(value) + offset) / factor for value in mean),
        "std": tuple(float(value) / factor for value in std),
    }


def _square_of(processor: Any) -> dict[str, Any]:
    """Returns the size of a square that images fill along their longer side; nothing where they do not.

    Raises:
        ValueError: They keep their proportions, and the square is not filled up.
    """
    size = processor.size
    if size.shortest_edge or not size.longest_edge or processor.do_center_crop:
        return {}
    edge, padded = int(size.longest_edge), processor.pad_size if processor.do_pad else None
    if padded is None or (padded.height, padded.width) != (edge, edge):
        raise ValueError("images keep their proportions and are not padded to a square, and a graph reads one size")
    return {"height": edge, "width": edge, "resize": "longer_side"}


def _bounded_size_of(processor: Any) -> dict[str, Any]:
    """Returns how a depth model's images are resized without one size; nothing where they have one."""
    if (count := getattr(processor, "max_num_patches", None)) is not None:
        side = processor.patch_size * math.isqrt(count)
        sizes = {"resize": "patches", "multiple": processor.patch_size, "height": side, "width": side}
        return {**sizes, "max_pixels": count * processor.patch_size**2}
    size, multiple = processor.size, getattr(processor, "size_divisor", None)
    if multiple and not size and not hasattr(processor, "ensure_multiple_of"):
        side = int(_MOST_WHOLE_PIXELS**0.5) // multiple * multiple
        sizes = {"resize": "multiple", "multiple": multiple, "height": side, "width": side}
        return {**sizes, "max_pixels": side * side}
    if not getattr(processor, "keep_aspect_ratio", False):
        return {}
    sizes = {"multiple": processor.ensure_multiple_of, "height": int(size.height), "width": int(size.width)}
    return {**sizes, "resize": "nearest_side", "max_pixels": int(_MOST_ELONGATED * size.height * size.width)}


def _smoothed(processor: Any) -> dict[str, Any]:
    """Returns the size of a square that images are smoothed and interpolated to, as OWLv2's are.

    Raises:
        ValueError: They are not filled up to a square, or it becomes none.
    """
    height, width = int(processor.size.height), int(processor.size.width)
    if not processor.do_pad or height != width:
        raise ValueError("images are not filled up to a square")
    return {"height": height, "width": width, "resize": "smoothed"}


def _inside(processor: Any) -> dict[str, Any]:
    """Returns the size that images are centred in, as Donut's are.

    Raises:
        ValueError: They are turned, cropped, or not filled up.
    """
    size = processor.size
    if processor.do_align_long_axis:
        raise ValueError("images that lie on their side are turned (do_align_long_axis)")
    if not processor.do_pad or processor.do_center_crop or not (size.height and size.width):
        raise ValueError("images keep their proportions and are not padded, and a graph reads one size")
    return {"height": int(size.height), "width": int(size.width), "resize": "inside"}


def _map_size(processor: Any, *, of_any_size: bool) -> dict[str, Any]:
    """Returns sizes and the way to them; errors as `_map`."""
    size, crop = processor.size, processor.crop_size if processor.do_center_crop else None
    values: dict[str, Any] = {}
    if of_any_size and size.shortest_edge and size.longest_edge and crop is None:
        edge, limit = int(size.shortest_edge), int(size.longest_edge)
        multiple = _YOLOS_MULTIPLE if isinstance(processor, YolosImageProcessorPil) else 1
        return {"height": limit, "width": limit, "resize": "fit", "resize_size": edge, "multiple": multiple}
    if size.shortest_edge and not size.longest_edge:
        edge = int(size.shortest_edge)
        share = getattr(processor, "crop_pct", _LEVIT_SHARE if isinstance(processor, LevitImageProcessorPil) else None)
        if share is not None and crop is None:
            values = {"height": edge, "width": edge, "resize": "stretch"}
            if edge < 384:  # as ConvNeXt was trained: smaller images are cropped, larger ones are not
                values |= {"resize": "shorter_side", "resize_size": int(edge / share), "rounding": "down"}
        elif crop is None:
            raise ValueError("images keep their proportions and are not cropped, and a graph reads one size")
        else:
            values = {"resize": "shorter_side", "resize_size": int(edge / (share or 1)), "rounding": "down"}
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
    folder: ModelFolder,
    processor: Any,
    preprocessor: ImagePreprocessor,
    settings: ImagePreprocessing,
    *,
    is_bgr: bool,
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
        try:
            found = preprocessor.prepare(file.getvalue()).pixel_values
        except InvalidInputError:  # which is too elongated
            continue
        try:
            expected = np.asarray(processor(picture, return_tensors="np")["pixel_values"][0])
        except Exception as error:  # whatever the library raises
            raise SourceError(f"{folder.path / PREPROCESSOR_FILE}: cannot be followed ({first_line(error)})") from error
        expected = expected[::-1] if is_bgr else expected
        difference = np.inf if found.shape != expected.shape else float(np.abs((found - expected) * std).max())
        if not difference <= LEVEL * 1.01:
            raise SourceError(
                f"{folder.path / PREPROCESSOR_FILE}: {type(processor).__name__} prepares an image of {width} x "
                f"{height} in a way that a bundle cannot say (the largest difference is {255 * difference:.1f} levels, "
                "a level of rounding is allowed); such preprocessing is not supported"
            )


def _sample_pixels(preprocessing: ImagePreprocessing) -> Tensor:
    """Returns random pixels, (1, 3, height, width)."""
    return torch.rand(1, 3, preprocessing.height, preprocessing.width, generator=torch.Generator().manual_seed(0))


def _height_and_width(stated: Any) -> tuple[int, int] | None:
    """Returns what a configuration states as one number, or as two."""
    pair = (stated, stated) if isinstance(stated, int) else tuple(stated or ())
    return (int(pair[0]), int(pair[1])) if len(pair) == 2 else None


def _fix_positions(folder: ModelFolder, model: nn.Module, preprocessing: ImagePreprocessing) -> None:
    """Interpolates position embeddings once, where a model would do it for every image.

    Raises:
        SourceError: The model does not read images of this size, or answers one image in many ways.
    """
    size, pixels = (preprocessing.height, preprocessing.width), _sample_pixels(preprocessing)
    try:
        with torch.inference_mode():
            expected, again = (model(pixel_values=pixels, return_dict=True)[0] for _ in range(2))
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{folder.path}: {type(model).__name__} does not read images of {size[0]} x {size[1]}, which "
            f"{PREPROCESSOR_FILE} asks for ({first_line(error)})"
        ) from error
    if not torch.allclose(expected, again, rtol=0, atol=POSITION_BOUND * float(expected.abs().max())):
        raise SourceError(
            f"{folder.path}: {type(model).__name__} hides parts of an image at random, so it answers one image in many "
            'ways; give its encoder as a ViT, with "model_type": "vit" and "architectures": ["ViTModel"] in config.json'
        )
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
