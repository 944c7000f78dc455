"""The manifest of a bundle, `bundle.json`: all that a server needs to run the model (docs/bundle.md).

Axis names used in tensor shapes:

    batch          rows of a stateless graph, or of an encoder graph
    length         tokens of a row: T of the decoder's step, S of an encoder's input
    slots          rows of a decoder's step and of its state
    cache_length   positions of a state tensor per slot
    logits_length  positions of a row with requested logits
    likeliest      tokens that are ranked of each of these positions
    sources        sentences whose cross-attention tensors a decoder's step reads; `slots` is a multiple of it
    source_length  positions of those tensors
    prompts        prompts of a run, each with the embedding of its image
    points         points of a prompt
    masks          masks of a text
    height, width  sides of an image whose proportions are kept
    media          tokens of a step whose embeddings are given
    frames         frames of codes that are decoded in a run
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headway_server.bundles.tags import OF_WORDS, Aggregation, TagScheme, TagSet

Part = TypeVar("Part")

SCHEMA_VERSION = 1
MANIFEST_FILE = "bundle.json"
SIGNATURE_FILE = "bundle.json.sig"
"""Signature of the manifest, for servers that require one."""
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""Chat template of a generation model."""
ALIGNMENT = "alignment"
"""Output of a decoder: attention of each token to the tokens of the source, (slots, length, source_length) float32. A
row sums to one over the source's tokens and is 0 at padding."""
ATTENTION_KINDS = ("attention", "encoder_attention", "decoder_attention", "cross_attention")
"""Outputs of a graph `attention`, `<kind>_<layer>` with layers from 0, are a layer's attention weights, float32 (batch,
heads, rows, columns): a row is what one token attends with, over the tokens of the columns, and sums to one. An
encoder-decoder has the last three kinds, and any other model the first."""
NUM_LIKELIEST = "num_likeliest"
"""Input of a decoder that ranks its logits: number of the likeliest tokens, (1,) int64, from 1 to the vocabulary size.
Such a decoder has the three outputs below."""
LIKELIEST_IDS = "likeliest_ids"
"""Their ids, (slots, logits_length, likeliest) int64, by falling logit; the lower id first among equals."""
LIKELIEST_LOGITS = "likeliest_logits"
"""Their logits, (slots, logits_length, likeliest) float32."""
EXPONENTIAL_MEANS = "exponential_means"
"""The means of exp(logits) over the vocabulary, (slots, logits_length) float32."""
MEDIA_EMBEDDINGS = "media_embeddings"
"""Input of a decoder whose prompts may have images: embeddings that replace those of tokens, (media, width) float32."""
MEDIA_POSITIONS = "media_positions"
"""Input of such a decoder: places of these tokens among all of the step, row by row, (media) int64."""
POSITION_OFFSETS = "position_offsets"
"""Input of a decoder whose images have positions of a grid: (slots, length, 3) int64, added to `position_ids` for the
place of a token, its row and its column."""
ATTENDS_AHEAD = "attends_ahead"
"""Input of a decoder with prompts whose tokens may attend to later ones: true if all tokens of a step attend to each
other, (1) bool."""
IMAGE_EMBEDDINGS = "embeddings"
"""Output of a graph `image_encoder`: (batch, tokens, width) float32."""
SEGMENTATION_TENSORS = (("points", "point_labels", "earlier_mask", "has_earlier_mask"), ("masks", "predicted_iou"))
"""Inputs of a segmentation decoder after those that the encoder gives, and its outputs (docs/graphs.md)."""
DIFFUSION_TENSORS = {
    "denoiser": (("latent", "timestep", "label"), ()),
    "vae_decoder": (("latent",), ("pixel_values",)),
    "vae_encoder": (("pixel_values",), ("latent",)),
}
"""Inputs and outputs of the graphs of a class-conditional diffusion model (docs/graphs.md). The denoiser has one
output, named by what it predicts."""
TEXT_DIFFUSION_TENSORS = DIFFUSION_TENSORS | {
    "denoiser": (("latent", "timestep", "text", "text_mask"), ()),
    "text_encoder": (("input_ids", "attention_mask"), ("text",)),
}
"""Inputs and outputs of the graphs of a text-conditional diffusion model."""
MORE_DIFFUSION_TENSORS = {"denoiser": ("pooled", "inpainting", "guidance"), "text_encoder": ("pooled",)}
"""Inputs of a denoiser after these, and outputs of a text encoder, each of which a model may have."""
BBOX = "bbox"
"""Input of a token classifier that reads pages: the box of each token, (batch, length, 4), as `WordBoxes` says. Its
padding is 0."""
CODEC_TENSORS = (("codes", "state"), ("samples", "present_state"))
"""Inputs and outputs of the graph `codec_decoder` of a speech synthesis model (docs/graphs.md)."""
FLOW_TENSORS: Mapping[GraphRole, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text_encoder": (("input_ids", "duration_noise"), ("durations", "means", "deviations")),
    "waveform_decoder": (("latents",), ("samples",)),
}
"""Inputs and outputs of the graphs of a flow synthesis model (docs/graphs.md); with voices both also read `speaker`."""
EXCITED_TENSORS: Mapping[GraphRole, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text_encoder": (("input_ids",), ("durations", "means")),
    "pitch_predictor": (("latents",), ("curves",)),
    "waveform_decoder": (("latents", "curves", "noise"), ("samples",)),
}
"""The same of a model that is excited; with voices the first also reads `speaker`."""
NUM_CURVES = 4
"""Numbers of a frame in `curves`: the pitch of its halves in Hz, and their energy."""
STAGED_TENSORS = {
    "fine_decoder": (("codes", "book"), ("logits",)),
    "codec_decoder": (("codes",), ("samples",)),
}
"""Inputs and outputs of the graphs without a cache of a staged synthesis model (docs/graphs.md)."""
FRAMES = "frames"
"""Output of a decoder whose steps write frames of a spectrogram: float32 (slots, 1, numbers)."""
SPECTROGRAM_STEP = ("frame", "dropout", "speaker")
"""Inputs of such a decoder in place of tokens (docs/graphs.md)."""
SPECTROGRAM_TENSORS = {"waveform_decoder": (("spectrogram",), ("samples",))}
"""Inputs and outputs of the graph without a cache of a spectrogram synthesis model (docs/graphs.md)."""
DELAYED_STEP = ("codes", "condition")
"""Inputs of the decoder of a delayed synthesis model in place of tokens (docs/graphs.md)."""
DELAYED_TENSORS = {
    "codec_decoder": (("codes",), ("states",)),
    "waveform_decoder": (("states",), ("samples",)),
}
"""Inputs and outputs of its graphs without a cache (docs/graphs.md)."""
EXAMPLES_FILE = "examples.npz"
"""Inputs of a model of tensors by name, one row of a batch: a server warms up with them."""
BATCH_AXIS = "batch"
"""Name of the axis on which a server joins calls."""
VOICES_FILE = "voices.json"
"""Voices of a speech synthesis model: codec frames of a recording by name; a frame has a code of each codebook."""
CARD_FILE = "README.md"
LEARNING_CURVE_FILE = "learning-curve.svg"

NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""A model's name or version: 1 to 64 of a-z, 0-9, dot, underscore and hyphen, a letter or digit at both ends."""

Size = Annotated[int, Field(ge=1, le=2**24)]
"""A number of tokens, pixels or elements; far beyond any model's, and far below an overflow."""
Index = Annotated[int, Field(ge=0, lt=2**31)]
MOST_TILES: Final = 64
"""The most tiles of an image."""
Thousandth = Annotated[int, Field(ge=0, le=1000)]
Positive = Annotated[float, Field(gt=0)]
FilePath = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$")]
"""A relative path within the bundle's folder, with slashes."""


class Task(StrEnum):
    """Task of a model, with the values of the manifest and of the exporter's `--task`."""

    GENERATION = "generation"
    TRANSLATION = "translation"
    TEXT_TO_TEXT = "text_to_text"
    CAPTIONING = "captioning"
    TRANSCRIPTION = "transcription"
    CTC_TRANSCRIPTION = "ctc_transcription"
    TEXT_CLASSIFICATION = "text_classification"
    TOKEN_CLASSIFICATION = "token_classification"  # noqa: S105 (a task, not a password)
    IMAGE_CLASSIFICATION = "image_classification"
    TEXT_EMBEDDING = "text_embedding"
    TEXT_SCORING = "text_scoring"
    QUESTION_ANSWERING = "question_answering"
    FILL_MASK = "fill_mask"
    OBJECT_DETECTION = "object_detection"
    SEMANTIC_SEGMENTATION = "semantic_segmentation"
    DEPTH_ESTIMATION = "depth_estimation"
    IMAGE_EMBEDDING = "image_embedding"
    SEGMENTATION = "segmentation"
    IMAGE_GENERATION = "image_generation"
    AUDIO_CLASSIFICATION = "audio_classification"
    VIDEO_CLASSIFICATION = "video_classification"
    SPEECH_SYNTHESIS = "speech_synthesis"
    FLOW_SYNTHESIS = "flow_synthesis"
    STAGED_SYNTHESIS = "staged_synthesis"
    SPECTROGRAM_SYNTHESIS = "spectrogram_synthesis"
    DELAYED_SYNTHESIS = "delayed_synthesis"
    TENSORS = "tensors"

    @classmethod
    def _missing_(cls, value: object) -> Task | None:
        return next((task for task in TASK_PARTS if task == value), None)

    @classmethod
    def add(cls, name: str, parts: TaskParts) -> Task:
        """Registers a task outside of headway.

        Args:
            name: Name in manifests: lower case with underscores.
            parts: Required contents of its bundles.
        """
        task = str.__new__(cls, name)
        task._name_, task._value_ = name.upper(), name
        TASK_PARTS[task] = parts
        return task


ENCODER_DECODER_TASKS = (Task.TRANSLATION, Task.TEXT_TO_TEXT, Task.CAPTIONING, Task.TRANSCRIPTION)
"""Encoder-decoder tasks: text, image or audio to text."""
EMBEDDING_TASKS = (Task.TEXT_EMBEDDING, Task.IMAGE_EMBEDDING)
"""Tasks with an embedding and without logits."""


class Precision(StrEnum):
    """Precision of a variant's matrix products."""

    FP32 = "fp32"
    INT8 = "int8"
    """Weights in int8, activations in uint8 with a scale for each row."""
    INT8_STATIC = "int8-static"
    """As int8, but with fixed scales of activations where these are accurate enough."""
    INT4 = "int4"
    """Decoders only: weights in 4 bits in blocks of 32, the output projection and embedding tables in int8."""
    FP16 = "fp16"


class Record(BaseModel):
    """Base of the manifest's parts: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TensorSpec(Record):
    """A declared tensor of a graph."""

    name: str
    dtype: Literal[
        "float64",
        "float32",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
        "string",
    ]
    shape: tuple[Annotated[int, Field(ge=0, lt=2**31)] | str, ...]
    """A number for a fixed axis, a name for a dynamic one."""


class Graph(Record):
    """An ONNX file and its declared tensors."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    run_bytes: Annotated[int, Field(ge=1)] | None = None
    """Memory of a run with one text of `max_input_tokens`, or one sound of `window_samples`, beside the weights, by the
    values of the fp32 graph. None for a model of texts of at most 1,024 tokens, and of other inputs."""


class StateTensor(Record):
    """A state tensor of a decoder, an input `past` and an output `present` of each step."""

    past: str
    present: str
    update: Literal["in_place", "replace"]
    """`in_place`: past and present are one buffer, (slots, heads, cache_length, head_dim), and a step writes only its
    own positions: a key/value cache. `replace`: (slots, ...) of fixed size, replaced at each step: a recurrent
    state."""
    window: Annotated[int, Field(gt=0)] | None = None
    """Tokens that a token of the layer sees, itself included, if its cache is of that size: (slots, heads, rows,
    head_dim), with a fixed number of rows, from which a step drops the oldest. None: the cache has every position. For
    `in_place`."""
    initial: str | None = None
    """Output of the encoder, (batch, ...), with a slot's initial state; None: zeros. For `replace`."""

    @model_validator(mode="after")
    def _check_initial(self) -> StateTensor:
        if self.initial is not None and self.update != "replace":
            raise ValueError(f"state {self.past}: initial is for update replace, and this one's is {self.update}")
        if self.window is not None and self.update != "in_place":
            raise ValueError(f"state {self.past}: window is for update in_place, and this one's is {self.update}")
        return self


class ParityFigures(Record):
    """Deviation of a variant from PyTorch's fp32 on the exporter's grid of batch sizes and lengths."""

    max_relative_logit_error: float
    bound: float | None
    """The enforced bound; None for a variant judged by its task metric."""
    checked_shape_count: int
    greedy_token_count: int = 0
    """Compared tokens of greedy decoding; 0 for models that do not decode."""
    greedy_mismatch_count: int = 0
    rounded_count: int = 0
    """Answers past the bound whose difference is explained by what rounding does to PyTorch's own (docs/export.md)."""
    provider: str
    """Execution provider of the check."""


class QualityFigure(Record):
    """The task metric of a variant, measured with the server's runner."""

    metric: str
    value: float
    example_count: int
    dataset: str
    higher_is_better: bool
    signature: str = ""
    """The metric's own description of its settings, such as sacreBLEU's signature."""


class AgreementFigures(Record):
    """Agreement of a variant's answers with fp32's, on inputs without labels.

    Figures are `mean_kl_divergence` (nats a prediction), `worst_kl_divergence` (the largest mean over a label or a band
    of positions), `top_agreement` (share of tokens, labels or decisions that are fp32's, but for those of which fp32 is
    unsure), `mean_cosine` and `least_cosine` of vectors, `mean_mask_iou`, `mean_box_iou`, `mean_label_iou` of pixels,
    `mean_relative_error` of depth, and `correlation`, `least_correlation` and `iou_correlation` (how alike outputs vary
    over the inputs: 1, and 0 for a constant; the mean of all outputs, the least of a label, and that of predicted IoU).
    """

    dataset: str
    """Name of the file or the data set of the inputs; `generated` for random ones."""
    example_count: int
    prediction_count: int | None = None
    """Number of compared tokens, labels or vectors; None in older bundles."""
    figures: dict[str, float]
    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Confidence intervals of 0.9 of the means."""
    limits: dict[str, float]
    """Enforced bounds, on the worse end of an interval: upper bounds of divergences, lower bounds of other figures."""
    calibrated_on: Literal["other inputs", "these inputs"] | None = None
    """Data for the scales of an int8 cache or of fixed activations; None without such scales."""


class CalibrationFigures(Record):
    """Calibration error of a classifier, on the data of its quality figure.

    Expected calibration error (Guo et al. 2017), 0 to 1: of the likeliest label, or of every label where several may
    apply.
    """

    expected_calibration_error: Annotated[float, Field(ge=0, le=1)]
    uncalibrated: Annotated[float, Field(ge=0, le=1)]
    """Error with a temperature of 1."""
    bin_count: Size
    """Number of bins of equal width, by probability."""


class AttentionFigures(Record):
    """Deviation of the weights of the graph `attention` from PyTorch's fp32 on the exporter's grid of sizes."""

    max_weight_error: float
    """Largest difference of a weight; weights are from 0 to 1."""
    bound: float | None
    """The enforced bound; None for variants other than fp32."""
    max_row_sum_error: float
    """Largest difference of a row's sum from 1, bounded in every variant."""
    checked_shape_count: int


class BatchingFigures(Record):
    """Deviation of the rows of a batch from the same rows alone, of a model of tensors."""

    max_row_error: float
    """Largest relative difference of an output."""
    bound: float
    row_counts: tuple[Size, ...]
    """Rows of the compared batches."""


GraphRole = Literal[
    "model",
    "encoder",
    "decoder",
    "denoiser",
    "vae_decoder",
    "vae_encoder",
    "text_encoder",
    "coarse_decoder",
    "fine_decoder",
    "codec_decoder",
    "pitch_predictor",
    "waveform_decoder",
    "image_encoder",
    "attention",
]
"""Role of a graph."""


class Variant(Record):
    """The graphs of one precision."""

    device: Literal["cpu", "cuda"]
    """Intended device."""
    graphs: dict[GraphRole, Graph]
    """The graphs of `TASK_PARTS` for the task, `image_encoder` if prompts may have images, and `attention` if attention
    weights are available."""
    state: tuple[StateTensor, ...] = ()
    cross: tuple[str, ...] = ()
    """Encoder outputs, (batch, heads, length, head_dim), which are inputs of every decoder step under the same
    names."""
    alignment_layer: Index | None = None
    """Decoder layer, from 0, of the cross-attention in the output `alignment`; None without that output."""
    parity: ParityFigures
    quality: QualityFigure | None
    """None if the checkpoint had no evaluation data."""
    calibration: CalibrationFigures | None = None
    """Calibration of a classifier, measured with its quality."""
    attention: AttentionFigures | None = None
    """Figures of the graph `attention`; None without it."""
    agreement: AgreementFigures | None = None
    """Agreement with fp32 of any other variant: its criterion without evaluation data, informative beside a metric."""
    batching: BatchingFigures | None = None
    """Figures of the axis `batch` of a model of tensors; None: its calls run one by one."""

    @model_validator(mode="after")
    def _check_attention(self) -> Variant:
        """Checks that the outputs of the graph `attention` are weights."""
        if (graph := self.graphs.get("attention")) is not None and not attention_layers(graph.outputs):
            raise ValueError(f"graphs.attention: its outputs are not {', '.join(ATTENTION_KINDS)} with layers from 0")
        return self

    @model_validator(mode="after")
    def _check_tensors(self) -> Variant:
        """Checks that state, cross tensors and alignment are tensors of the graphs."""
        encoder = {spec.name for spec in self.graphs["encoder"].outputs} if "encoder" in self.graphs else set()
        inputs = {spec.name for spec in self.graphs["decoder"].inputs} if "decoder" in self.graphs else set()
        outputs = {spec.name for spec in self.graphs["decoder"].outputs} if "decoder" in self.graphs else set()
        initial = {state.initial for state in self.state if state.initial is not None}
        aligned = {ALIGNMENT} if self.alignment_layer is not None else set()
        for names, found, where in (
            ({state.past for state in self.state} | set(self.cross), inputs, "an input of the decoder"),
            ({state.present for state in self.state} | aligned, outputs, "an output of the decoder"),
            (initial | set(self.cross), encoder, "an output of the encoder"),
        ):
            if missing := names - found:
                raise ValueError(f"{min(missing)} is named as {where}, which has no such tensor")
        return self


def attention_layers(outputs: Sequence[TensorSpec]) -> dict[str, tuple[TensorSpec, ...]]:
    """Returns the outputs of a graph `attention` by kind, in the order of layers.

    Empty if they are not attention weights.
    """
    found: dict[str, dict[str, TensorSpec]] = {}
    for spec in outputs:
        kind, _, layer = spec.name.rpartition("_")
        if kind not in ATTENTION_KINDS or len(spec.shape) != 4 or not isinstance(spec.shape[1], int):
            return {}
        found.setdefault(kind, {})[layer] = spec
    if any(set(layers) != {str(number) for number in range(len(layers))} for layers in found.values()):
        return {}
    return {kind: tuple(layers[str(number)] for number in range(len(layers))) for kind, layers in found.items()}


class Architecture(Record):
    """Kind of network. Informative: a server runs the graphs without it."""

    kind: str
    parameter_count: int
    configuration: dict[str, str | int | float | bool | None]


class Origin(Record):
    """A model of a hub, at one commit."""

    id: str
    revision: str
    """Requested revision: a branch, a tag or a commit."""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class SpecialTokens(Record):
    """Ids of special tokens; None for one the model lacks."""

    pad: Index | None = None
    bos: Index | None = None
    """First input of an encoder-decoder's decoder; first token of a generation with an empty prompt."""
    eos: Index | None = None
    """End-of-text token."""
    more_eos: tuple[Index, ...] = ()
    """Further end tokens of generated text, such as the end of a turn beside the end of a document."""
    unk: Index | None = None
    mask: Index | None = None
    """Token that stands for a missing one, of a masked language model."""


class Limits(Record):
    """Limits of requests, in tokens."""

    max_input_tokens: Size | None = None
    """Limit of a prompt, a text or a source sentence, including special tokens; or patches of a captioning model's
    image, or positions of a window of audio. None for other images."""
    max_total_tokens: Size | None = None
    """Limit of prompt and continuation together, or of an encoder-decoder's output; None for classifiers. The length of
    a slot."""
    max_axis_sizes: dict[str, Size] = {}
    """Limits of dynamic axes of a model of tensors, by name."""


class ImagePreprocessing(Record):
    """Preprocessing of images to `pixel_values`, float32 (B, 3, height, width): RGB, resized, cropped, normalised."""

    height: Size
    width: Size
    resize: Literal[
        "stretch",
        "shorter_side",
        "longer_side",
        "smoothed",
        "inside",
        "fit",
        "pixels",
        "cells",
        "area",
        "nearest_side",
        "multiple",
        "patches",
    ]
    """`stretch`: to height and width, or to a square of `resize_size`. `shorter_side`: to a shorter side of
    `resize_size`, keeping proportions. A centre crop to height and width follows if the result is larger.
    `longer_side`: to a longer side of `height`, which is `width`, keeping proportions; what is missing on the right or
    below is 0 in `pixel_values`. `smoothed`: black is added on the right or below to a square, which a Gaussian
    smooths and linear interpolation resizes to `height`, which is `width`. `inside`: to a shorter side of the
    lesser of height and width, then to what fits into both, keeping proportions; it is centred on black. `fit`: to
    a shorter side of `resize_size`, or of less where the longer one would exceed `height`, which is `width`;
    proportions are kept, nothing is cropped, and the graphs have the axes `height` and `width`. `pixels`: to
    multiples of `multiple`, with `min_pixels` to `max_pixels` pixels, keeping proportions as far as that allows;
    `height` and `width` are the sides of the largest square. `cells`: to a longer side of `resize_size` if it is
    larger, then up to multiples of `multiple`; `height` and `width` are the sides of the largest square. `area`: to
    the largest multiples of `multiple` that keep proportions and have at most `max_pixels` pixels, of which
    `height` and `width` have the largest square. `nearest_side`: to `height` or to `width`, whichever changes the
    scale less, keeping proportions, and then to the nearest multiples of `multiple`. `multiple`: each side to the
    multiple of `multiple` below it. Of the last two, larger images than `max_pixels` are refused. `patches`: to the
    most pixels, `max_pixels` at most, whose sides are multiples of `multiple` above those that keep the
    proportions."""
    resize_size: Size | None = None
    multiple: Size = 1
    """Both sides of an image are multiples of it, rounded down for `fit` and `multiple`."""
    min_pixels: Size | None = None
    max_pixels: Size | None = None
    rounding: Literal["nearest", "down"] = "nearest"
    """Rounding of the longer side to whole pixels, for `shorter_side`."""
    crop_rounding: Literal["down", "even"] = "down"
    """Rounding of half pixels that a centre crop would begin at; `even`: to the even number, as torchvision's does."""
    interpolation: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
    """Name of Pillow's filter, with antialiasing except for `nearest`."""
    mean: tuple[float, float, float]
    """Mean of each channel, subtracted from values in 0 to 1."""
    std: tuple[Positive, Positive, Positive]
    """Standard deviation of each channel, by which the difference is divided."""

    @property
    def keeps_proportions(self) -> bool:
        """True if the graphs read images of many sizes."""
        return self.resize in ("fit", "nearest_side", "multiple", "patches") or self.has_cells

    @property
    def fills_square(self) -> bool:
        """True if an image is filled up on the right or below."""
        return self.resize in ("longer_side", "smoothed")

    @property
    def has_cells(self) -> bool:
        """True if an image of any size is a grid of squares of `multiple` pixels."""
        return self.resize in ("pixels", "cells", "area")

    @property
    def least_cells(self) -> int:
        """Squares of an image at least, where it is a grid of them."""
        return demanded(self.min_pixels) // self.multiple**2 if self.resize == "pixels" else 1

    @property
    def most_cells(self) -> int:
        """Squares of an image at most, where it is a grid of them."""
        most = self.height * self.width if self.resize == "cells" else demanded(self.max_pixels)
        return most // self.multiple**2

    def in_cells(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of an image that is a grid of squares."""
        if self.resize == "area":
            return self._of_area(width, height)
        return self.with_pixels(width, height) if self.resize == "pixels" else self._in_whole_cells(width, height)

    def _of_area(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of an image after `area`, as image processors of Gemma 4 compute them."""
        scale = math.sqrt(demanded(self.max_pixels) / (width * height))
        across, down = (math.floor(scale * side / self.multiple) for side in (width, height))
        if down == 0:
            across, down = min(width // height, self.most_cells), 1
        elif across == 0:
            across, down = 1, min(height // width, self.most_cells)
        return across * self.multiple, down * self.multiple

    def _in_whole_cells(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of an image after `cells`, as image processors of Pixtral compute them."""
        limit = demanded(self.resize_size)
        shrinks = max(height / limit, width / limit, 1.0)
        sides = (max(math.floor(side / shrinks), 1) for side in (width, height))
        across, down = (math.ceil(side / self.multiple) * self.multiple for side in sides)
        return across, down

    @property
    def axes(self) -> tuple[int | str, int | str]:
        """Axes of an image in the graphs, rows and columns: numbers, or names where images keep their proportions."""
        return ("height", "width") if self.keeps_proportions else (self.height, self.width)

    @property
    def largest(self) -> tuple[int, int]:
        """Height and width of the largest image that the graphs read; with `fit` it may lie on its side."""
        if self.resize == "nearest_side":
            return self.height, self._rounded(demanded(self.max_pixels) // self.height)
        if self.resize != "fit":
            return self.height, self.width
        shorter = min(self.resize_size or self.height, self.height)
        return self._rounded(shorter), self._rounded(self.width)

    def fitted(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of an image after `fit`, as image processors of DETR and YOLOS compute them."""
        assert self.resize_size is not None, "the validator demands it"
        shorter, longer, size = min(width, height), max(width, height), float(self.resize_size)
        if longer / shorter * size > self.height:
            size = self.height * float(shorter) / longer
        sides = round(size), int(size * longer / shorter)
        if sides[0] == shorter and (self.multiple == 1 or width >= height):  # YOLOS resizes upright ones even then
            sides = shorter, longer
        sides = self._rounded(sides[0]), self._rounded(sides[1])
        return sides if width <= height else (sides[1], sides[0])

    def within(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of an image after `longer_side`, as image processors of SAM compute them."""
        scale = self.height / max(width, height)
        return max(int(width * scale + 0.5), 1), max(int(height * scale + 0.5), 1)

    def nearest(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of an image after `nearest_side`, as image processors of DPT compute them."""
        scale = self.height / height
        if abs(1 - self.width / width) < abs(1 - scale):
            scale = self.width / width
        sides = (round(scale * side / self.multiple) * self.multiple for side in (width, height))
        return next(sides), next(sides)

    def whole(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of an image after `multiple`, as image processors of GLPN compute them."""
        return width - width % self.multiple, height - height % self.multiple

    def in_patches(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of an image after `patches`, as image processors of SigLIP 2 compute them."""
        least, most, precision = 1e-6, 100.0, 1e-5

        def at(scale: float) -> tuple[int, int]:
            across, down = (max(math.ceil(side * scale / self.multiple), 1) * self.multiple for side in (width, height))
            return across, down

        while most - least >= precision:
            scale = (least + most) / 2
            if math.prod(at(scale)) <= demanded(self.max_pixels):
                least = scale
            else:
                most = scale
        return at(least)

    def inside(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns width and height of an image after both steps of `inside`, as image processors of Donut do."""
        shorter, edge = min(width, height), min(self.width, self.height)
        first = (edge, int(edge * height / shorter)) if width <= height else (int(edge * width / shorter), edge)
        second = min(first[0], self.width), min(first[1], self.height)
        if second == first:
            return first, first
        if first[1] > first[0]:
            return first, (int(first[0] * second[1] / first[1]), second[1])
        return first, (second[0], int(first[1] * second[0] / first[0]))

    def with_pixels(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of an image after `pixels`, as image processors of Qwen2-VL compute them."""
        least, most, multiple = demanded(self.min_pixels), demanded(self.max_pixels), self.multiple
        sides = [max(round(side / multiple), 1) * multiple for side in (width, height)]
        if sides[0] * sides[1] > most:
            shrinks = math.sqrt(height * width / most)
            sides = [max(multiple, math.floor(side / shrinks / multiple) * multiple) for side in (width, height)]
        elif round(width / multiple) * round(height / multiple) * multiple**2 < least:
            grows = math.sqrt(least / (height * width))
            sides = [math.ceil(side * grows / multiple) * multiple for side in (width, height)]
        return sides[0], sides[1]

    def _rounded(self, side: int) -> int:
        """Returns the multiple below a side, and at least one."""
        return max(side - side % self.multiple, self.multiple)

    @model_validator(mode="after")
    def _check_fit(self) -> ImagePreprocessing:
        if self.resize == "fit" and (self.resize_size is None or self.height != self.width):
            raise ValueError("image_preprocessing: fit needs resize_size, and one limit as height and width")
        if self.fills_square and (self.resize_size is not None or self.height != self.width):
            raise ValueError(
                f"image_preprocessing: {self.resize} needs one size as height and width, and no resize_size"
            )
        if not self.keeps_proportions and self.multiple != 1:
            raise ValueError(f"image_preprocessing: multiple is for images of many sizes, and resize is {self.resize}")
        if self.resize == "pixels" and not (self.min_pixels and self.max_pixels):
            raise ValueError("image_preprocessing: pixels needs min_pixels and max_pixels")
        if self.resize == "cells" and (
            self.height != self.width
            or self.height != math.ceil((self.resize_size or 0) / self.multiple) * self.multiple
        ):
            raise ValueError("image_preprocessing: cells needs resize_size, and its next multiple as height and width")
        if self.resize in ("area", "nearest_side", "multiple", "patches") and not self.max_pixels:
            raise ValueError(f"image_preprocessing: {self.resize} needs max_pixels")
        if self.max_pixels and self.height * self.width > self.max_pixels:
            raise ValueError("image_preprocessing: height and width have more than max_pixels")
        return self


class ImageTiles(Record):
    """Division of an image into tiles, each of the height and width of `image_preprocessing`."""

    fit: Literal["longer_side", "proportions", "resolutions"]
    """`longer_side`: the image is resized to a longer side of `longer_side`, keeping proportions, then up to whole
    tiles. `proportions`: it is resized to the grid of `min_count` to `max_count` tiles whose proportions are nearest;
    of several, to the largest whose half the image covers. `resolutions`: it is resized into that of `resolutions`
    where most of it is kept, and least is left empty, keeping proportions, and is centred on black."""
    longer_side: Size | None = None
    min_count: Size = 1
    max_count: Size | None = None
    resolutions: tuple[tuple[Size, Size], ...] = ()
    """Heights and widths in tiles."""
    tile_rows: Size = 1
    """Rows and columns of embeddings of a tile, of `resolutions`."""
    most_read: Size | None = None
    """Tiles whose embeddings are read, of `resolutions`: those of more are interpolated to as many."""
    is_of_one: bool = False
    """True if only the image of a prompt with one image is divided; several are read as wholes,
    centred in squares of the mean colour."""

    def most_tiles(self, side: int) -> int:
        """Returns the number of tiles of an image at most, without the overview; `side` is a tile's in pixels."""
        if self.fit == "resolutions":
            return max(rows * columns for rows, columns in self.resolutions)
        if self.fit == "proportions":
            return demanded(self.max_count)
        return math.ceil(demanded(self.longer_side) / side) ** 2

    @model_validator(mode="after")
    def _check_sizes(self) -> ImageTiles:
        size = {"longer_side": self.longer_side, "proportions": self.max_count, "resolutions": self.resolutions}[
            self.fit
        ]
        if not size:
            raise ValueError(
                "tiles: longer_side needs longer_side, proportions max_count, and resolutions at least one of them"
            )
        if self.max_count is not None and not self.min_count <= self.max_count <= MOST_TILES:
            raise ValueError(f"tiles: min_count is at most max_count, and that at most {MOST_TILES}")
        return self


class ImagePrompt(Record):
    """The place of images in the prompts of a generation model."""

    marker: str
    """Text that the chat template writes for an image; a token of the tokenizer."""
    token: Index
    """Token that stands for an embedding."""
    embedding: str
    """The same as text."""
    tokens_per_tile: Size | None
    """Embeddings of a tile; None for one of each square of `multiple` pixels of `image_preprocessing`."""
    positions: Literal["sequence", "grid"] = "sequence"
    """Positions of an image's tokens. `grid`: row and column in it beside their place, and the next token follows the
    longer side (Qwen2-VL, arXiv 2409.12191, 2.1.1)."""
    attention: Literal["causal", "image", "prompt"] = "causal"
    """Tokens that attend to later ones: none, those of an image to each other (Gemma 3), or all of a prompt with images
    (PaliGemma)."""
    layout: Literal["tiles", "rows"] = "tiles"
    """Order of the embeddings of tiles. `tiles`: tile by tile, the whole image last. `rows`: the whole image first,
    then the rows of all tiles together without those of what is black, and behind each row the last embedding of a
    tile, which is that of no pixels (LLaVA-NeXT)."""
    before: str = ""
    """Text before an image."""
    tile: str = ""
    """Text before each tile, with {row} and {column} from 1."""
    row_end: str = ""
    """Text after a row of tiles, or between the rows of an image of any size."""
    rows_end: str = ""
    """Text after all rows."""
    overview: str = ""
    """Text before the whole image as one tile, which follows its tiles."""
    after: str = ""
    """Text after an image."""
    tiles: ImageTiles | None = None
    """None: an image is one tile."""


class ImageQuestion(Record):
    """Text that the encoder of a captioning model reads after an image, as tokens `input_ids`."""

    token: Index
    """Token in each place of `patches`, in front of the text."""
    before: tuple[Index, ...] = ()
    """Tokens between image and text."""
    after: tuple[Index, ...] = ()
    """Tokens after the text."""
    tasks: dict[str, str] = {}
    """Text that each name of a task stands for. {input} in it stands for the rest of a question; a name without it is
    all of a question."""
    default: str = ""
    """Question of a call without one."""

    @property
    def num_framing(self) -> int:
        """Tokens around a text."""
        return len(self.before) + len(self.after)

    def spelled_out(self, question: str) -> str | None:
        """Returns the text that a question stands for; None if a task that takes nothing is given anything."""
        for name, text in self.tasks.items():
            if name not in question:
                continue
            if "{input}" in text:
                return text.replace("{input}", question.replace(name, "").strip())
            return text if question.strip() == name else None
        return question


class AudioPreprocessing(Record):
    """Preprocessing of audio to a log-mel spectrogram: `input_features`, float32 (B, num_mel_bins, num_frames).

    The filters are Slaney's, from 0 Hz to `max_frequency`; docs/speech.md has the formula.
    """

    sampling_rate: Size
    """Sample rate of mono audio, in Hz."""
    num_mel_bins: Size
    fft_size: Size
    """Samples of a Fourier transform, with a Hann window."""
    hop_length: Size
    """Samples between frames."""
    num_frames: Size
    """Frames of a window, the encoder's input."""
    max_frequency: Positive = 8000.0

    @property
    def window_samples(self) -> int:
        """Samples of a window."""
        return self.num_frames * self.hop_length

    @property
    def window_s(self) -> float:
        """Seconds of a window."""
        return self.window_samples / self.sampling_rate

    @model_validator(mode="after")
    def _check_sizes(self) -> AudioPreprocessing:
        if self.hop_length > self.fft_size or self.fft_size > self.window_samples:
            raise ValueError(
                f"audio_preprocessing: hop_length {self.hop_length} is at most fft_size {self.fft_size}, which is at "
                f"most a window of {self.window_samples} samples"
            )
        return self


class FilterBank(Record):
    """Logarithms of a mel filter bank's energies, of frames of samples; docs/speech.md has the formula."""

    num_mel_bins: Size
    fft_size: Size
    """Samples of a Fourier transform."""
    frame_length: Size
    """Samples of a frame, under a symmetric window."""
    hop_length: Size
    """Samples between frames."""
    window: Literal["hann", "povey"]
    """`povey`: Hann's to the power of 0.85."""
    mel_scale: Literal["slaney", "kaldi"]
    """`slaney`: filters of equal area, triangles over frequencies. `kaldi`: filters of equal height, over mels."""
    min_frequency: Annotated[float, Field(ge=0)] = 0.0
    max_frequency: Positive
    is_centered: bool = False
    """True if a frame is around its place, and the audio is continued by zeros; one lies behind it otherwise."""
    scale: Positive = 1.0
    """Factor of samples."""
    preemphasis: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the sample before each that is subtracted from it."""
    preemphasizes: Literal["frames", "audio"] = "frames"
    removes_offset: bool = False
    """True if the mean of each frame is subtracted from it."""
    floor: Positive
    """Smallest energy, or with `adds_floor` what is added to each."""
    adds_floor: bool = False

    @model_validator(mode="after")
    def _check_sizes(self) -> FilterBank:
        if self.frame_length > self.fft_size or self.min_frequency >= self.max_frequency:
            raise ValueError(
                f"filter_bank: frame_length {self.frame_length} is at most fft_size {self.fft_size}, and min_frequency "
                f"{self.min_frequency:g} below max_frequency {self.max_frequency:g}"
            )
        return self


class Normalization(Record):
    """Normalization of a model's input."""

    of: Literal["all", "bins", "constants"]
    """To a mean of 0 and a variance of 1, over the whole input or each mel bin by itself; or by the two below."""
    mean: float = 0.0
    std: Positive = 1.0
    epsilon: Annotated[float, Field(ge=0)] = 0.0
    """Added to the variance, or with `in_deviation` to its root."""
    in_deviation: bool = False
    is_of_population: bool = False
    """True if the variance of a bin is the mean of its squared differences; False: their sum by one fewer than there
    are."""


class SoundPreprocessing(Record):
    """Preprocessing of audio for a graph `model`, or for an encoder that reads audio of any length.

    The graph reads `input_values`, float32 (batch, samples), or with a filter bank `input_features`, float32 (batch,
    frames, num_mel_bins times stacked_frames).
    """

    sampling_rate: Size
    """Sample rate of mono audio, in Hz."""
    filter_bank: FilterBank | None = None
    normalization: Normalization | None = None
    stacked_frames: Size = 1
    """Neighbouring frames that become one."""
    num_frames: Size | None = None
    """Frames that features are cut or filled with zeros to, before they are normalized; None: as many as there are."""
    min_samples: Size
    """Shorter audio is filled with silence."""
    window_samples: Size
    """Most samples of an input."""

    @property
    def input_name(self) -> str:
        """Name of the graph's input."""
        return "input_values" if self.filter_bank is None else "input_features"

    @property
    def axes(self) -> tuple[int | str, ...]:
        """Axes of the graph's input but the batch's."""
        if self.filter_bank is None:
            return ("samples",)
        return (self.num_frames or "frames", self.filter_bank.num_mel_bins * self.stacked_frames)

    def num_values(self, num_samples: int) -> int:
        """Returns the most numbers of the input of so many samples."""
        num_samples = max(num_samples, self.min_samples)
        if self.filter_bank is None:
            return num_samples
        num_frames = self.num_frames or num_samples // self.filter_bank.hop_length + 1
        return num_frames * self.filter_bank.num_mel_bins

    @model_validator(mode="after")
    def _check_sizes(self) -> SoundPreprocessing:
        if self.min_samples > self.window_samples:
            raise ValueError(f"sound: min_samples {self.min_samples} is at most window_samples, {self.window_samples}")
        is_of_features = self.stacked_frames > 1 or self.num_frames is not None
        is_of_bins = self.normalization is not None and self.normalization.of == "bins"
        if self.filter_bank is None and (is_of_features or is_of_bins):
            raise ValueError("sound.filter_bank: stacked_frames, num_frames and a normalization of bins need it")
        return self


class Ctc(Record):
    """Connectionist temporal classification (Graves et al. 2006): a token or a blank for each frame of audio.

    The graph has the output `logits`, float32 (batch, output_frames, tokens).
    """

    blank: Index
    """Token that writes nothing, and parts equal neighbours."""
    word_delimiter: Index | None = None
    """Token between words; None: the first token of a word begins with U+2581."""
    samples_per_frame: Size
    stride_samples: Index
    """Samples at either end of a window whose frames are taken from its neighbour, of audio longer than a window."""


class SpeechTokens(Record):
    """Control tokens of a transcription model; None for one the model lacks."""

    transcribe: Index | None = None
    """Task token: transcription in the spoken language."""
    translate: Index | None = None
    """Task token: translation to English."""
    no_timestamps: Index | None = None
    """Turns off timestamps."""
    first_timestamp: Index | None = None
    """Timestamp of the window's start; each further token is `timestamp_s` later. All tokens from it on are
    timestamps."""
    timestamp_s: Positive = 0.02
    max_initial_timestamp: Index | None = None
    """Limit of the first segment's start, in steps of `timestamp_s`."""
    start_of_previous: Index | None = None
    """Precedes the text before the audio."""
    begin_suppressed: tuple[Index, ...] = ()
    """Tokens suppressed at the first position."""


class PatchGrid(Record):
    """Grid of an image's patches, row by row, all of one size."""

    rows: Size
    columns: Size
    has_class_token: bool
    """True if a class token precedes the patches."""
    num_registers: Index = 0
    """Further tokens between class token and patches, which stand for no part of the image."""

    @property
    def num_leading(self) -> int:
        """Tokens that precede the patches."""
        return self.has_class_token + self.num_registers

    @property
    def num_tokens(self) -> int:
        """All tokens of an image."""
        return self.num_leading + self.rows * self.columns


class ClassificationScheme(Record):
    """Mapping of a classifier's logits to probabilities and to applying labels."""

    kind: Literal["single_label", "multi_label"] = "single_label"
    """`single_label`: softmax, and the likeliest label applies. `multi_label`: a sigmoid for each label."""
    temperature: Positive = 1.0
    """Divisor of the logits."""
    thresholds: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """Threshold of each label's probability; multi_label only."""


class LabelPrompt(Record):
    """Tokens around and between labels that are read as one text: `begin`, each label and `separator`, and `end`."""

    begin: Index
    end: Index
    separator: Index
    """Behind each label."""
    more_separators: tuple[Index, ...] = ()
    """Further tokens that split a text, and so may be in no label."""

    @property
    def splitting(self) -> frozenset[int]:
        """All tokens that no label may have."""
        return frozenset((self.begin, self.end, self.separator, *self.more_separators))


class Detection(Record):
    """Mapping of a detector's outputs to objects.

    The graph has the outputs `logits`, float32 (batch, num_queries, classes), and `boxes`, float32 (batch, num_queries,
    4): centre, width and height of each box, as shares of the image's width and height. With `labels` of the caller it
    has `label_queries`, float32 (batch, num_queries, D), and `logit_offsets`, float32 (batch, num_queries), in place of
    logits: the logit of a label is the product of its embedding, (D,), with the query, plus the offset.

    Where labels are `joined`, the graph `model` has `features`, float32 (batch, places, D), and `map_sizes`, int64
    (batch, maps, 2). The graph `decoder` reads these with `input_ids` and `attention_mask`, int64 (batch, length), and
    has `token_logits`, float32 (batch, num_queries, length), and `boxes`.
    """

    scores: Literal["softmax", "sigmoid", "best_sigmoid"]
    """`softmax`: a box has its likeliest label, of classes that are the labels and, last, no object. `sigmoid`: the
    classes are the labels, and each pair of a box and a label is an object by itself. `best_sigmoid`: a box has the
    likeliest of these labels."""
    num_queries: Size
    """Boxes of an image."""
    max_objects: Size
    """Most objects of an image, those of the highest scores."""
    labels: Literal["fixed", "embedded", "joined"] = "fixed"
    """`fixed`: the labels of the manifest. `embedded`: texts of the caller, which the graph `text_encoder` embeds.
    `joined`: texts of the caller, which the graph `decoder` reads as one text together with an image."""
    prompt: LabelPrompt | None = None
    """The text of labels that are joined."""
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Score up to which objects are left out where a call does not say."""
    nms_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Intersection over union above which the worse of two objects of a label is left out (non-maximum suppression),
    where a call does not say; None: none is."""

    @property
    def num_extra_classes(self) -> int:
        """Classes that are no labels."""
        return int(self.scores == "softmax")


class SemanticSegmentation(Record):
    """Labels of pixels.

    The graph has the output `logits`, float32 (batch, labels, rows, columns), which becomes a map of the whole image by
    linear interpolation. With `labels` of the caller it has `features`, float32 (batch, layers, tokens, width), and the
    graph `decoder` makes `logits`, float32 (batch, rows, columns), of these and the embedding of a label.
    """

    scores: Literal["softmax", "sum", "sigmoid"] = "softmax"
    """Scores of labels. `softmax`: of the logits. `sum`: the logits are sums over masks of the probability of the label
    times that of the pixel. `sigmoid`: of each logit by itself."""
    labels: Literal["fixed", "embedded"] = "fixed"
    """As in `Detection`."""


class Depth(Record):
    """Depth of pixels.

    The graph has the output `depth`, float32 (batch, rows, columns), which becomes a map of the whole image by cubic
    convolution.
    """

    kind: Literal["metric", "inverse", "unspecified"]
    """`metric`: metres from the camera. `inverse`: the inverse of the distance, up to an unknown scale and shift.
    `unspecified`: the checkpoint does not say."""


class VideoFrames(Record):
    """What a model reads of a video: `pixel_values`, float32 (batch, num_frames, 3, height, width)."""

    num_frames: Size
    """Frames, evenly from the first to the last."""


class StableMask(Record):
    """The least stability of the mask of several parts; below it, the likeliest of the other masks is taken.

    Stability is the number of cells above `offset` divided by that above `-offset`, and 1 of a mask without the latter.
    """

    offset: Positive
    least: Annotated[float, Field(ge=0, le=1)]


class Segmentation(Record):
    """How prompts of a segmentation model are answered (docs/segmentation.md)."""

    several_parts: Literal["in_turn", "at_once"] = "in_turn"
    """Runs of a prompt of several parts without an earlier mask. `in_turn`: its first part alone, and then all of them
    with that mask. `at_once`: all of them."""
    pixels: Literal["of_cells", "of_model_pixels"] = "of_cells"
    """What logits of an image's pixels are interpolated between: cells, or pixels of the model's input in the image,
    which are interpolated between cells."""
    stable_mask: StableMask | None = None
    """When the mask of several parts is not taken; None: it always is."""


class Space(Record):
    """An embedding space shared by several models, such as of images and texts."""

    name: Name
    """Name of the space; each training run has a space and a name of its own."""
    probabilities: Literal["softmax", "sigmoid"]
    """Mapping of `scale` * cosine + `bias` to the probability of an image-text pair: over all given texts (`softmax`),
    or of each alone (`sigmoid`)."""
    scale: Positive
    bias: float = 0.0


class Embedding(Record):
    """The output `embedding` of a model's graphs: float32 (batch, dimension)."""

    pooling: Annotated[str, Field(min_length=1)]
    """Pooling of states: `mean`, `max`, `first_token`, `last_token`, `class_token`, or a name of the module's."""
    dimension: Size
    prompts: dict[str, str] = {}
    """Prompts prepended to embedded texts, by name; for texts."""
    default_prompt: str | None = None
    """Name of the default prompt; None: no prompt by default."""
    space: Space | None = None
    """Space shared with other models; None: vectors are comparable only within the model."""
    pools_prompt: bool = True
    """False: the pooling leaves out the tokens of a prompt, which have 2 in `attention_mask`; all attend to them."""
    is_sparse: bool = False
    """True: each number is the weight of a token of the vocabulary, most are 0, and texts are compared by products."""

    @model_validator(mode="after")
    def _check_prompts(self) -> Embedding:
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ValueError(f"embedding.default_prompt: there is no prompt named {self.default_prompt}")
        return self


class LateInteraction(Record):
    """How a scorer of pairs compares the vectors of their tokens (ColBERT, Khattab and Zaharia 2020).

    The score is the sum, over the vectors of the query, of the largest product with a vector of the text. The graph has
    the output `token_vectors`, float32 (batch, length, dimension), of length one, and reads the two apart.
    """

    dimension: Size
    """Numbers of a token's vector."""
    max_query_tokens: Size
    """Limit of a query, with its marker and special tokens; that of a text is `limits.max_input_tokens`."""
    query_marker: Index | None = None
    """Token behind the first one of each query; None: none."""
    text_marker: Index | None = None
    """The same of each text."""
    query_filler: Index | None = None
    """Token that fills up queries to `max_query_tokens`, and whose vectors count; None: queries stay as they are."""
    attends_to_filler: bool = False
    """True if the tokens of a query attend to what fills it up."""
    skipped_tokens: tuple[Index, ...] = ()
    """Tokens of a text whose vectors do not count, such as punctuation."""


class Scoring(Record):
    """Mapping of a pair to a scorer's input, and of its logit to its score."""

    activation: Literal["none", "sigmoid"]
    template: str | None = None
    """Text with `{query}` and, after it, `{text}`, which stand for the pair; None: the tokenizer joins the two."""
    late_interaction: LateInteraction | None = None
    """For models that read the two texts apart; None: one run reads both, and gives a logit."""

    @model_validator(mode="after")
    def _check_template(self) -> Scoring:
        """Checks that the template has a place for each text."""
        if self.template is not None:
            self.joined("", "")
        return self

    def joined(self, query: str, text: str) -> str:
        """Returns a pair as one text.

        Raises:
            ValueError: The template has not one place for each.
        """
        before, has_query, rest = (self.template or "").partition("{query}")
        between, has_text, after = rest.partition("{text}")
        if not (has_query and has_text):
            raise ValueError("scoring.template: has not {query} and after it {text}")
        return f"{before}{query}{between}{text}{after}"


class Tagging(Record):
    """How spans are found by the tags of a token classifier."""

    scheme: TagScheme = "iob2"
    aggregation: Aggregation = "sequence"

    @model_validator(mode="after")
    def _check(self) -> Tagging:
        if self.scheme == "words" and self.aggregation not in OF_WORDS:
            raise ValueError(f"aggregation: the scheme words needs one of {', '.join(sorted(OF_WORDS))}")
        return self


class WordBoxes(Record):
    """Boxes of a page's words, which the graph reads of each token: x_min, y_min, x_max and y_max, the sides of a box.

    A token has the box of its word.
    """

    unit: Literal["thousandths", "fractions"]
    """Unit of the input `bbox`: whole thousandths of the page's width or height, rounded down, int64; or fractions of
    them, float32."""
    before: tuple[Thousandth, Thousandth, Thousandth, Thousandth]
    """Box of the special tokens before the words, in thousandths."""
    after: tuple[Thousandth, Thousandth, Thousandth, Thousandth]
    """The same of those behind them."""

    @property
    def dtype(self) -> Literal["int64", "float32"]:
        """Type of the input `bbox`."""
        return "int64" if self.unit == "thousandths" else "float32"


class DiscreteNoise(Record):
    """Noise of a discrete schedule: numbered steps of training, of which step t adds noise of the variance beta t."""

    num_train_steps: Annotated[int, Field(ge=500, le=100_000)]
    """Steps of training; at least twice those of a request."""
    betas: Literal["linear", "scaled_linear", "squared_cosine"]
    """Variances: evenly spaced from `beta_start` to `beta_end`; their roots evenly spaced; or of a squared cosine
    (Nichol and Dhariwal 2021), which reads neither."""
    beta_start: Annotated[float, Field(gt=0, lt=1)]
    beta_end: Annotated[float, Field(gt=0, lt=1)]
    has_zero_terminal_snr: bool = False
    """True if the schedule is rescaled so that no signal is left at its end (Lin et al. 2024, algorithm 1)."""
    spacing: Literal["leading", "trailing", "linspace"]
    """Times of the steps of an image: even from the first step of training, from the last one, or from both."""
    steps_offset: Annotated[int, Field(ge=0, lt=500)] = 0
    """Added to the times of the spacing `leading`."""
    ends_at_image: bool = True
    """False if DDIM and PNDM end at the noise of the first step of training, as the model's publisher has it."""
    has_karras_times: bool = False
    """True if DPM-Solver++, UniPC and Euler's method have times even in the seventh root of the noise (Karras et al.
    2022, equation 5)."""
    num_consistent_steps: Annotated[int, Field(ge=1, le=500)] = 50
    """Steps of training of a consistency model, of which the sampler `lcm` takes some."""


class Diffusion(Record):
    """Training objective of an image generation model's denoiser."""

    schedule: Literal["trigonometric", "discrete"]
    """Noise schedule of an image x and noise e. `trigonometric`: cos(pi t / 2) x + sin(pi t / 2) e at a time t from 0
    to 1. `discrete`: as `discrete` describes."""
    discrete: DiscreteNoise | None = None
    """None but for a discrete schedule."""
    prediction: Literal["velocity", "noise", "image"]
    """Prediction of the denoiser, and name of its output, for a latent a x + s e: a e - s x, e, or x."""
    condition: Literal["label", "text"] = "label"
    """Condition of an image: one of `labels`, or a text."""
    sampler: Literal["ddim", "dpm_solver_pp_2m", "euler", "euler_ancestral", "ddpm", "pndm", "unipc", "lcm"] = (
        "dpm_solver_pp_2m"
    )
    """Sampler of a request that names none; those after the third are for a discrete schedule."""
    step_count: Annotated[int, Field(ge=1, le=250)] | None = None
    """Steps of a request that names none; None: the protocol's default."""
    guidance_scale: Annotated[float, Field(ge=0, le=30)] | None = None
    """Scale of guidance of a request that names none; None: the protocol's default."""
    has_zero_negative: bool = False
    """True if an empty negative prompt has states of 0 instead of those of an empty text."""
    mask_cells: Literal["touched", "first"] = "touched"
    """Cells of a latent that a mask has generated anew: those with a white pixel, or those whose first pixel is white.
    """

    @model_validator(mode="after")
    def _check_schedule(self) -> Diffusion:
        if (self.schedule == "discrete") != (self.discrete is not None):
            raise ValueError("discrete: needed for the schedule discrete, and for no other")
        if self.prediction == "noise" and (self.discrete is None or self.discrete.has_zero_terminal_snr):
            raise ValueError("prediction: noise says nothing of an image where none of it is left")
        if self.discrete is None and self.sampler not in ("ddim", "dpm_solver_pp_2m", "euler"):
            raise ValueError(f"sampler: {self.sampler} is for the schedule discrete")
        return self


class AudioCodec(Record):
    """Mapping of a model's codes to audio.

    A frame has a code of every codebook. The token of a code is `first_code`, plus `codebook_size` for each preceding
    codebook, plus the code.
    """

    sampling_rate: Size
    """Sample rate, in Hz."""
    hop_length: Size
    """Samples per frame."""
    num_books: Size
    codebook_size: Size
    """Codes of a codebook."""
    first_code: Index
    """Token of the first code of the first codebook."""
    frames_per_run: Size
    """Frames of a run of the graph `codec_decoder`; the end of a sequence is padded with frames, which change nothing
    before them."""

    @property
    def num_codes(self) -> int:
        """Codes of all codebooks."""
        return self.num_books * self.codebook_size


class FlowSpeech(Record):
    """How a model of flow synthesis speaks (docs/speech.md)."""

    sampling_rate: Size
    """Sample rate, in Hz."""
    hop_length: Size
    """Samples of a frame."""
    num_channels: Size
    """Numbers of a frame."""
    noise_scale: Annotated[float, Field(ge=0)]
    """Factor of the noise of frames."""
    duration_noise_scale: Annotated[float, Field(ge=0)]
    """Factor of the noise of durations; 0: they are not drawn."""
    speaking_rate: Positive
    """Times as fast as durations of 1 say."""
    rounding: Literal["up", "nearest"] = "up"
    """How frames of a token are rounded; with `nearest` it has at least one."""
    is_excited: bool = False
    """True if frames are the means, and samples read their pitch and noise."""
    context_frames: Index
    """Frames on either side of a frame that its samples depend on."""
    frames_per_run: Size | None
    """Frames whose samples are computed together, beside `context_frames` on either side; None: all of an audio."""
    max_frames: Size
    """Most frames of a text's audio."""
    blank: Index | None = None
    """Token around each token of a text; None: there is none."""
    bare_tokens: tuple[Index, ...] = ()
    """Tokens that have no blank between each other, nor at either end of a text."""
    edge: Index | None = None
    """Token at either end of a text; None: there is none."""
    drops_unknown: bool = True
    """False if a text with characters that the vocabulary does not have is refused."""

    def tensors(self, *, has_voices: bool) -> dict[GraphRole, tuple[tuple[str, ...], tuple[str, ...]]]:
        """Returns the inputs and outputs of each graph."""
        tensors = EXCITED_TENSORS if self.is_excited else FLOW_TENSORS
        readers = [role for role in tensors if has_voices and not (self.is_excited and role != "text_encoder")]
        return {
            role: ((*inputs, "speaker") if role in readers else inputs, outputs)
            for role, (inputs, outputs) in tensors.items()
        }


class SpectrogramSpeech(Record):
    """How a model of spectrogram synthesis speaks (docs/speech.md): frames step by step, and samples of frames."""

    sampling_rate: Size
    """Sample rate, in Hz."""
    hop_length: Size
    """Samples of a frame."""
    num_bins: Size
    """Numbers of a frame."""
    frames_per_step: Size
    """Frames that a step writes; the next one reads the last of them."""
    num_layers: Size
    """Layers before the decoder, each with dropout, in speech too."""
    num_units: Size
    """Numbers of such a layer."""
    kept: Annotated[float, Field(ge=0, le=1)]
    """Probability that a number of such a layer is kept."""
    kept_scale: Positive
    """Factor of what is kept."""
    speaker_width: Size
    """Numbers of a voice."""
    end_probability: Positive
    """Speech ends with the step whose probabilities of the end, of all its frames, sum to this."""
    frames_per_token: Positive
    """Most frames for each token of a text."""
    context_frames: Index
    """Frames on either side of a frame that its samples depend on."""
    frames_per_run: Size
    """Frames whose samples are computed together, beside `context_frames` on either side."""


class DelayedCodes(Record):
    """How a model of delayed synthesis writes codes (docs/speech.md): of all codebooks at once, each a step later."""

    sampling_rate: Size
    """Sample rate, in Hz."""
    hop_length: Size
    """Samples of a frame."""
    num_books: Size
    codebook_size: Size
    """Codes of a codebook; the number stands for none."""
    guidance_scale: Annotated[float, Field(ge=1, le=100)]
    """How far logits are taken from those without the text; 1: they are those with the text."""
    max_frames: Size
    """Most frames of a text's audio, which it has unless a call asks for fewer."""
    context_frames: Index
    """Frames on either side of a frame that its samples depend on, by the graph `waveform_decoder`."""
    frames_per_run: Size
    """Frames whose samples are computed together, beside `context_frames` on either side."""

    @property
    def num_rows(self) -> int:
        """Slots that a text takes."""
        return 1 if self.guidance_scale == 1 else 2

    def steps_of(self, num_frames: int) -> int:
        """Returns the steps that write frames: the last codebook comes behind the others."""
        return num_frames + self.num_books - 1


class SamplingDefaults(Record):
    """Default parameters of generation requests."""

    max_new_tokens: Size | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_k: Index = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0


class SpeechStages(Record):
    """How a model of staged synthesis speaks (docs/speech.md): semantic tokens, coarse codes, fine codes, samples."""

    sampling_rate: Size
    """Sample rate, in Hz."""
    hop_length: Size
    """Samples of a frame."""
    num_books: Size
    codebook_size: Size
    """Codes of a codebook."""
    num_inputs: Size
    """Tokens that the graph `decoder` embeds. Token `t + num_inputs * (s + 1)` is the sum of tokens t and s."""
    text_offset: Index
    """Added to the tokens of a text."""
    text_pad: Index
    """Fills a text up to `limits.max_input_tokens`."""
    semantic_infer: Index
    """Follows the text."""
    min_end_probability: Annotated[float, Field(gt=0, le=1)] | None = None
    """Speech ends where the end is likelier; None: where it is drawn."""
    semantic_rate: Positive
    """Semantic tokens a second."""
    coarse_rate: Positive
    """Frames a second."""
    first_code: Index
    """Token of the first coarse code of the first codebook; below are semantic tokens."""
    num_coarse_books: Literal[2] = 2
    """Codebooks that the graph `coarse_decoder` writes."""
    coarse_pad: Index
    """Fills semantic tokens up to `coarse_input`."""
    coarse_infer: Index
    """Follows them."""
    coarse_input: Size
    """Semantic tokens that a window of coarse codes reads."""
    coarse_history: Size
    """Most codes before a window that it reads."""
    coarse_window: Size
    """Codes of a window."""
    coarse_sampling: SamplingDefaults = SamplingDefaults()
    """Of coarse codes; `sampling_defaults` is of semantic tokens."""
    fine_input: Size
    """Frames that the graph `fine_decoder` reads."""
    fine_history: Size
    """Frames between the beginnings of two windows of fine codes; most frames of a voice before the first."""
    fine_temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Of fine codes; 0 takes the likeliest."""

    @property
    def codes_per_token(self) -> float:
        """Coarse codes for each semantic token."""
        return self.coarse_rate / self.semantic_rate * self.num_coarse_books

    @property
    def coarse_length(self) -> int:
        """Positions of a window of coarse codes, with all that it reads."""
        return self.coarse_input + 1 + self.coarse_history + self.coarse_window


class Languages(Record):
    """BCP 47 codes of a translation model: one source and one target, or several with language tokens.

    A captioning model has only targets; so has a transcription model, whose targets are the spoken languages.
    """

    source: str = ""
    target: str = ""
    source_tokens: dict[str, Index] = {}
    """Instead of `source`: token before the source text, by source language."""
    target_tokens: dict[str, Index] = {}
    """Instead of `target`: decoder token after `bos`, by target language."""
    target_marks: dict[str, Index] = {}
    """Instead of `target`: token before the source text, by target language."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Source languages; none for captioning and transcription models."""
        return tuple(self.source_tokens) or ((self.source,) if self.source else ())

    @property
    def targets(self) -> tuple[str, ...]:
        """Target languages."""
        return tuple(self.target_tokens or self.target_marks) or (self.target,)

    @staticmethod
    def match(code: str, known: Sequence[str]) -> str | None:
        """Resolves a language code, ignoring case and treating `_` as `-`.

        An unknown code resolves to the first code that it is a prefix of, as `de` of `de-DE`.

        Args:
            code: Code of the caller; empty for the only one.
            known: `sources` or `targets`.
        """
        if not code:
            return known[0] if len(known) == 1 else None
        wanted = _normal(code)
        exact = [one for one in known if _normal(one) == wanted]
        return next(iter(exact or [one for one in known if _normal(one).startswith(f"{wanted}-")]), None)

    def __str__(self) -> str:
        return " to ".join(
            ", ".join(codes) if len(codes) <= 3 else f"{len(codes)} languages ({', '.join(codes[:3])}, ...)"
            for codes in (self.sources, self.targets)
            if codes
        )

    @model_validator(mode="after")
    def _check_sides(self) -> Languages:
        """Checks that each side is given once."""
        for side, given in (
            ("source", (self.source, self.source_tokens)),
            ("target", (self.target, self.target_tokens, self.target_marks)),
        ):
            if sum(map(bool, given)) != 1 and (side == "target" or any(given)):
                raise ValueError(f"languages: {side} is one language, or several with a token each")
        return self


def _normal(code: str) -> str:
    """Returns a language code in lower case, with hyphens."""
    return code.lower().replace("_", "-")


class BundleFile(Record):
    """Size and hash of a bundle's file."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, Field(ge=0, lt=2**63)]


class Manifest(Record):
    """`bundle.json`."""

    schema_version: Literal[1]
    name: Name
    version: Name
    task: Task
    description: str
    license: str
    architecture: Architecture
    origin: Origin | None = None
    """Source of the weights; informative."""
    variants: dict[Precision, Variant]
    special_tokens: SpecialTokens | None = None
    limits: Limits = Limits()
    labels: tuple[str, ...] = ()
    classification: ClassificationScheme | None = None
    """None: single_label with a temperature of 1."""
    text_pairs: Literal["never", "optional", "required"] = "never"
    """Text pairs as one input: never, optionally, or always."""
    embedding: Embedding | None = None
    """None without that output of the graphs."""
    scoring: Scoring | None = None
    """None but for text_scoring."""
    detection: Detection | None = None
    """None but for object_detection."""
    semantic_segmentation: SemanticSegmentation | None = None
    """None but for the task of this name."""
    depth: Depth | None = None
    """None but for depth_estimation."""
    video: VideoFrames | None = None
    """None but for video_classification."""
    segmentation: Segmentation | None = None
    """Of segmentation; None: the defaults."""
    tagging: Tagging | None = None
    """Of token_classification; None: the defaults."""
    word_boxes: WordBoxes | None = None
    """Of a token classifier that reads pages; None: it reads texts."""
    image_preprocessing: ImagePreprocessing | None = None
    image_prompt: ImagePrompt | None = None
    """Of a generation model whose conversations may have images."""
    patches: PatchGrid | None = None
    """Patches of an image, for models with attention weights of images and for captioning models."""
    image_question: ImageQuestion | None = None
    """Of a captioning model whose encoder reads a text with an image."""
    audio_preprocessing: AudioPreprocessing | None = None
    sound: SoundPreprocessing | None = None
    """Audio of a model without a decoder, or in place of `audio_preprocessing`."""
    ctc: Ctc | None = None
    """None but for ctc_transcription."""
    speech: SpeechTokens | None = None
    languages: Languages | None = None
    diffusion: Diffusion | None = None
    """None but for image_generation."""
    codec: AudioCodec | None = None
    """None but for speech_synthesis."""
    flow: FlowSpeech | None = None
    """None but for flow_synthesis."""
    stages: SpeechStages | None = None
    """None but for staged_synthesis."""
    spectrogram: SpectrogramSpeech | None = None
    """None but for spectrogram_synthesis."""
    delayed: DelayedCodes | None = None
    """None but for delayed_synthesis."""
    sampling_defaults: SamplingDefaults | None = None
    truncation_side: Literal["right", "left"] = "right"
    """Side of truncation of texts. Prompts of generation models are always truncated on the left."""
    prompt_prefix: tuple[Index, ...] = ()
    """Tokens before a text prompt, such as Llama's bos; chat templates write their own. Of an encoder-decoder: decoder
    tokens after `bos`."""
    suppressed_tokens: tuple[Index, ...] = ()
    """Tokens that are never generated; their probabilities are not redistributed."""
    media_tokens: tuple[Index, ...] = ()
    """Tokens that stand for images or sounds. A prompt with one is refused, unless it is an image's own."""
    opset: int
    """The highest opset of the graphs; required of a runtime for every variant."""
    libraries: dict[str, str]
    """Library versions of the export."""
    files: dict[FilePath, BundleFile]
    """Every other file of the bundle, by its relative path."""

    @property
    def tags(self) -> TagSet:
        """Tags of a token classifier.

        Raises:
            ValueError: The labels are not tags of the scheme.
        """
        return TagSet.parse(self.labels, (self.tagging or Tagging()).scheme)

    def weight_bytes(self, variant: Variant) -> int:
        """Returns the size of a variant's graphs that serve, with weights in files beside them; about the weights'."""
        files = [graph.file for role, graph in variant.graphs.items() if role != "attention"]
        return sum(file.size_bytes for path, file in self.files.items() if any(map(path.startswith, files)))

    @model_validator(mode="after")
    def _check_parts(self) -> Manifest:
        """Checks the parts required by the task."""
        parts = TASK_PARTS[self.task]
        for need in parts.needs:
            value: object = self
            for name in need.split("."):
                value = getattr(value, name)
            if not value:
                raise ValueError(f"{need}: {self.task} needs it")
        if missing := set(parts.files) - set(self.files):
            raise ValueError(f"files: {self.task} needs {min(missing)}")
        if CHAT_TEMPLATE_FILE in self.files and not parts.takes_chat_template:
            raise ValueError(f"files: {CHAT_TEMPLATE_FILE} belongs to {Task.GENERATION}, not to {self.task}")
        if parts.check is not None:
            parts.check(self)
        if (
            self.image_preprocessing is not None
            and self.image_prompt is None
            and self.patches is None
            and any("attention" in variant.graphs for variant in self.variants.values())
        ):
            raise ValueError("patches: an image model with a graph attention needs it")
        return self

    @model_validator(mode="after")
    def _check_variants(self) -> Manifest:
        """Checks that every variant has the graphs of the task, and that their files are listed."""
        if not self.variants:
            raise ValueError("variants: at least one is needed")
        is_text_conditioned = self.diffusion is not None and self.diffusion.condition == "text"
        graphs = tuple(TEXT_DIFFUSION_TENSORS) if is_text_conditioned else TASK_PARTS[self.task].graphs
        if self.image_prompt is not None:
            graphs += ("image_encoder",)
        if self.detection is not None and self.detection.labels == "embedded":
            graphs += ("text_encoder",)
        if self.detection is not None and self.detection.labels == "joined":
            graphs += ("decoder",)
        if self.semantic_segmentation is not None and self.semantic_segmentation.labels == "embedded":
            graphs += ("text_encoder", "decoder")
        if self.flow is not None and self.flow.is_excited:
            graphs = tuple(EXCITED_TENSORS)
        for precision, variant in self.variants.items():
            if set(variant.graphs) - {"attention"} != set(graphs):
                raise ValueError(f"variants.{precision}.graphs: {self.task} needs {', '.join(graphs)}")
            if unlisted := {graph.file for graph in variant.graphs.values()} - set(self.files):
                raise ValueError(f"variants.{precision}.graphs: {min(unlisted)} is not among the files")
        return self

    @model_validator(mode="after")
    def _check_word_boxes(self) -> Manifest:
        """Checks that a token classifier's graphs read boxes if and only if they are described, and in their unit."""
        if self.word_boxes is not None and (self.tagging or Tagging()).aggregation == "simple":
            raise ValueError("tagging.aggregation: simple labels parts of words, and word_boxes are of whole ones")
        expected = set() if self.word_boxes is None else {self.word_boxes.dtype}
        for precision, variant in self.variants.items():
            graph = variant.graphs.get("model") if self.task is Task.TOKEN_CLASSIFICATION else None
            found = {spec.dtype for spec in graph.inputs if spec.name == BBOX} if graph is not None else set()
            if found != expected:
                raise ValueError(
                    f"word_boxes: is for graphs of {Task.TOKEN_CLASSIFICATION} with an input {BBOX} in its unit, and "
                    f"needed for these; that of variants.{precision} is {', '.join(found) or 'missing'}"
                )
        return self

    @model_validator(mode="after")
    def _check_classifier(self) -> Manifest:
        """Checks that thresholds match the labels, and that embeddings are outputs of the graphs."""
        if self.classification is not None:
            needed = len(self.labels) if self.classification.kind == "multi_label" else 0
            if (found := len(self.classification.thresholds)) != needed:
                raise ValueError(
                    f"classification.thresholds: {self.classification.kind} with {len(self.labels)} labels needs "
                    f"{needed}, and there are {found}"
                )
        if self.embedding is not None:
            for precision, variant in self.variants.items():
                if "embedding" not in {spec.name for graph in variant.graphs.values() for spec in graph.outputs}:
                    raise ValueError(f"embedding: the graphs of variants.{precision} have no such output")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskParts:
    """Required contents of a task's bundles, beyond those of every bundle."""

    graphs: tuple[str, ...] = ("model",)
    """Graphs of each variant."""
    needs: tuple[str, ...]
    """Required fields of the manifest."""
    files: tuple[str, ...] = ()
    """Required files."""
    takes_chat_template: bool = False
    """True if a chat template is allowed."""
    check: Callable[[Manifest], object] | None = None
    """A further check; raises ValueError."""


def _check_image_prompt(manifest: Manifest) -> None:
    """Checks that a model with images in its prompts has all that they need."""
    if manifest.image_prompt is None:
        return
    prompt, sizes = manifest.image_prompt, manifest.image_preprocessing
    if sizes is None or (sizes.keeps_proportions and not sizes.has_cells):
        raise ValueError("image_prompt: needs image_preprocessing to one size, or to pixels")
    is_of_cells = sizes.has_cells
    if (prompt.tokens_per_tile is None) != is_of_cells or (is_of_cells and prompt.tiles is not None):
        raise ValueError("image_prompt: tokens_per_tile and tiles are of images that have one size")
    if prompt.tiles is not None and (most := prompt.tiles.most_tiles(min(sizes.height, sizes.width))) > MOST_TILES:
        raise ValueError(f"image_prompt.tiles: of a longer side are up to {most}, and the limit is {MOST_TILES}")
    if prompt.positions == "grid" and not is_of_cells:
        raise ValueError("image_prompt.positions: grid is of images of any size")
    if manifest.image_prompt.token not in manifest.media_tokens:
        raise ValueError("image_prompt.token: is not among media_tokens")


def _check_tags(manifest: Manifest) -> None:
    try:
        _ = manifest.tags
    except ValueError as error:
        raise ValueError(f"labels: {error}") from error


def _check_mask(manifest: Manifest) -> None:
    assert manifest.special_tokens is not None, "`TASK_PARTS` requires it"
    if manifest.special_tokens.mask is None:
        raise ValueError(f"special_tokens.mask: {manifest.task} needs it")


def _check_languages(manifest: Manifest) -> None:
    assert manifest.languages is not None, "`TASK_PARTS` requires it"
    if not manifest.languages.sources:
        raise ValueError(f"languages: source is one language, or several with a token each; {manifest.task} needs it")


def _check_patches(manifest: Manifest) -> None:
    patches = manifest.patches
    assert patches is not None, "`TASK_PARTS` requires it"
    if (question := manifest.image_question) is not None:
        most = demanded(manifest.limits.max_input_tokens) - patches.num_tokens - question.num_framing
        if most < 1:
            raise ValueError("image_question: limits.max_input_tokens leaves no room for a text behind an image")
        if question.spelled_out(question.default) is None:
            raise ValueError("image_question.default: is the name of a task with more than that")
    elif patches.num_tokens != manifest.limits.max_input_tokens:
        raise ValueError(
            f"patches: the decoder of {manifest.task} attends to the tokens of an image; there are "
            f"{patches.num_tokens}, and limits.max_input_tokens is {manifest.limits.max_input_tokens}"
        )


def _check_speech(manifest: Manifest) -> None:
    audio = manifest.audio_preprocessing
    if (audio is None) == (manifest.sound is None):
        raise ValueError(f"audio_preprocessing: {manifest.task} needs it, or sound in its place")
    if audio is None:
        return
    positions = manifest.limits.max_input_tokens
    assert positions is not None, "`TASK_PARTS` requires it"
    if audio.num_frames % positions:
        raise ValueError(
            f"audio_preprocessing: a window of {audio.num_frames} frames is not a multiple of "
            f"limits.max_input_tokens, {positions}"
        )


def _check_ctc(manifest: Manifest) -> None:
    sound, ctc = manifest.sound, manifest.ctc
    assert sound is not None, "`TASK_PARTS` requires it"
    assert ctc is not None, "`TASK_PARTS` requires it"
    unit = ctc.samples_per_frame
    if ctc.stride_samples % unit or sound.window_samples % unit or 2 * ctc.stride_samples >= sound.window_samples:
        raise ValueError(
            f"ctc: stride_samples {ctc.stride_samples} and sound.window_samples {sound.window_samples} are multiples "
            f"of samples_per_frame, {unit}, and two strides are shorter than a window"
        )


def _check_detection(manifest: Manifest) -> None:
    detection = manifest.detection
    assert detection is not None, "`TASK_PARTS` requires it"
    count = detection.num_queries
    if (detection.labels == "joined") != (detection.prompt is not None):
        raise ValueError("detection.prompt: is of labels that are joined, and required by these")
    _check_labels_of(manifest, "detection", detection.labels)
    for precision, variant in manifest.variants.items():
        encoder = variant.graphs.get("text_encoder")
        widths = {} if encoder is None else {spec.name: spec.shape[1:] for spec in encoder.outputs}
        expected: dict[str, dict[str, tuple[int | str, ...]]] = {
            "model": {"logits": (count, len(manifest.labels) + detection.num_extra_classes), "boxes": (count, 4)}
        }
        if detection.labels == "joined":
            of_model = {spec.name: spec.shape[1:] for spec in variant.graphs["model"].outputs}
            features, sizes = (of_model.get(name, ())[-1:] for name in ("features", "map_sizes"))
            maps = of_model.get("map_sizes", ())[:1]
            expected = {
                "model": {"features": ("places", *features), "map_sizes": (*maps, *sizes)},
                "decoder": {"token_logits": (count, "length"), "boxes": (count, 4)},
            }
        elif detection.labels == "embedded":
            width = widths.get("embedding", ("width",))
            of_image = {"label_queries": (count, *width), "logit_offsets": (count,), "boxes": (count, 4)}
            expected = {"model": of_image, "text_encoder": {"embedding": width}}
        for name, graph in variant.graphs.items():
            found = {spec.name: spec.shape[1:] for spec in graph.outputs}
            if found != (needed := expected.get(name, {})):
                raise ValueError(
                    f"variants.{precision}.graphs.{name}: has the outputs {found}; {manifest.task} needs {needed}"
                )


def _check_labels_of(manifest: Manifest, part: str, labels: str) -> None:
    """Checks that a model has labels, or what reads the caller's."""
    is_fixed = labels == "fixed"
    if is_fixed != bool(manifest.labels):
        raise ValueError(f"labels: {part}.labels is {labels}; such a model has {'' if is_fixed else 'no '}labels")
    if not is_fixed and (not manifest.limits.max_input_tokens or manifest.special_tokens is None):
        raise ValueError("limits.max_input_tokens and special_tokens: required by a model of the caller's labels")
    if not is_fixed and TOKENIZER_FILE not in manifest.files:
        raise ValueError(f"files: a model of the caller's labels requires {TOKENIZER_FILE}")


def _check_pixel_labels(manifest: Manifest) -> None:
    segmentation = demanded(manifest.semantic_segmentation)
    _check_labels_of(manifest, "semantic_segmentation", segmentation.labels)
    if segmentation.labels == "fixed":
        _check_pixel_map(manifest)
        return
    expected = {"model": ("features", 4), "text_encoder": ("embedding", 2), "decoder": ("logits", 3)}
    for precision, variant in manifest.variants.items():
        for role, graph in variant.graphs.items():
            found = [(spec.name, len(spec.shape)) for spec in graph.outputs]
            if found != [expected.get(role)] or any(isinstance(axis, str) for axis in graph.outputs[0].shape[1:]):
                raise ValueError(
                    f"variants.{precision}.graphs.{role}: has the outputs {found}, a name and a number of axes each; "
                    f"{manifest.task} needs {expected.get(role)}, and numbers behind the batch"
                )


def _check_pixel_map(manifest: Manifest) -> None:
    name, *leading = ("depth",) if manifest.task is Task.DEPTH_ESTIMATION else ("logits", len(manifest.labels))
    for precision, variant in manifest.variants.items():
        for role, graph in variant.graphs.items():
            found = {spec.name: spec.shape for spec in graph.outputs}
            shape = found.get(name, ())
            if len(found) != 1 or shape[1:-2] != tuple(leading) or len(shape) != 3 + len(leading):
                raise ValueError(
                    f"variants.{precision}.graphs.{role}: has the outputs {found}; {manifest.task} needs {name} "
                    f"{('batch', *leading, 'rows', 'columns')}"
                )


def _check_segmentation(manifest: Manifest) -> None:
    for precision, variant in manifest.variants.items():
        encoder, decoder = variant.graphs.get("encoder"), variant.graphs.get("decoder")
        if encoder is None or decoder is None:
            continue  # which is refused for that
        of_image = tuple(spec.name for spec in encoder.outputs)
        found = tuple(tuple(spec.name for spec in specs) for specs in (decoder.inputs, decoder.outputs))
        of_prompt, outputs = SEGMENTATION_TENSORS
        if not of_image or found != ((*of_image, *of_prompt), outputs):
            raise ValueError(
                f"variants.{precision}.graphs.decoder: has the tensors {found}; {manifest.task} needs the outputs of "
                f"the encoder, {of_image}, and {SEGMENTATION_TENSORS}"
            )


def _check_diffusion(manifest: Manifest) -> None:
    assert manifest.diffusion is not None, "`TASK_PARTS` requires it"
    is_text_conditioned = manifest.diffusion.condition == "text"
    if is_text_conditioned and (not manifest.limits.max_input_tokens or manifest.special_tokens is None):
        raise ValueError("limits.max_input_tokens and special_tokens: required by a text-conditioned model")
    if is_text_conditioned and TOKENIZER_FILE not in manifest.files:
        raise ValueError(f"files: a text-conditioned model requires {TOKENIZER_FILE}")
    if is_text_conditioned == bool(manifest.labels):
        expected = "no labels" if is_text_conditioned else "labels"
        raise ValueError(f"labels: a {manifest.diffusion.condition}-conditioned model requires {expected}")
    for precision, variant in manifest.variants.items():
        for role, tensors in (TEXT_DIFFUSION_TENSORS if is_text_conditioned else DIFFUSION_TENSORS).items():
            if (graph := {str(name): one for name, one in variant.graphs.items()}.get(role)) is None:
                continue  # which is refused for that
            found = tuple(tuple(spec.name for spec in specs) for specs in (graph.inputs, graph.outputs))
            further = tuple(name for name in MORE_DIFFUSION_TENSORS.get(role, ()) if name in (*found[0], *found[1]))
            inputs, outputs = tensors[0], tensors[1] or (manifest.diffusion.prediction,)
            needed = (inputs, outputs + further) if role == "text_encoder" else (inputs + further, outputs)
            if found != needed:
                raise ValueError(
                    f"variants.{precision}.graphs.{role}: has the tensors {found}; {manifest.task} needs {needed}"
                )


def _check_codec(manifest: Manifest) -> None:
    codec, limits = manifest.codec, manifest.limits
    assert codec is not None, "`TASK_PARTS` requires it"
    assert limits.max_input_tokens is not None, "`TASK_PARTS` requires it"
    assert limits.max_total_tokens is not None, "`TASK_PARTS` requires it"
    if manifest.special_tokens is None or manifest.special_tokens.eos is None:
        raise ValueError(f"special_tokens.eos: {manifest.task} needs it")
    if limits.max_total_tokens < limits.max_input_tokens + codec.num_books:
        raise ValueError(
            f"limits.max_total_tokens is {limits.max_total_tokens}; a prompt ({limits.max_input_tokens}) and a frame "
            f"({codec.num_books}) need more"
        )
    for precision in manifest.variants:
        _check_names(manifest, precision, {"codec_decoder": CODEC_TENSORS})


def _check_flow(manifest: Manifest) -> None:
    assert manifest.flow is not None, "`TASK_PARTS` requires it"
    tensors = {str(role): names for role, names in manifest.flow.tensors(has_voices=bool(manifest.labels)).items()}
    for precision in manifest.variants:
        _check_names(manifest, precision, tensors)


def _check_stages(manifest: Manifest) -> None:
    stages, limits = manifest.stages, manifest.limits
    assert stages is not None, "`TASK_PARTS` requires it"
    assert limits.max_input_tokens is not None, "`TASK_PARTS` requires it"
    assert limits.max_total_tokens is not None, "`TASK_PARTS` requires it"
    if manifest.special_tokens is None or manifest.special_tokens.eos is None:
        raise ValueError(f"special_tokens.eos: {manifest.task} needs it")
    if limits.max_total_tokens < limits.max_input_tokens + 2:
        raise ValueError(
            f"limits.max_total_tokens is {limits.max_total_tokens}; a text ({limits.max_input_tokens}), the token "
            "after it and a semantic token need more"
        )
    if stages.coarse_rate < stages.semantic_rate:
        raise ValueError(
            f"stages.coarse_rate is {stages.coarse_rate:g}, less than semantic_rate ({stages.semantic_rate:g})"
        )
    if stages.coarse_window % 2 or stages.coarse_history < stages.coarse_window:
        raise ValueError("stages.coarse_window: is an even number, and at most coarse_history")
    if stages.num_coarse_books > stages.num_books or stages.fine_history > stages.fine_input:
        raise ValueError("stages: needs num_books of 2 at least, and fine_history of fine_input at most")
    for precision in manifest.variants:
        _check_names(manifest, precision, STAGED_TENSORS)


def _check_spectrogram(manifest: Manifest) -> None:
    speech = demanded(manifest.spectrogram)
    step = {
        "frame": (speech.num_bins,),
        "dropout": (speech.num_layers, speech.num_units),
        "speaker": (speech.speaker_width,),
        FRAMES: (1, speech.frames_per_step * (speech.num_bins + 1)),
    }
    for precision, variant in manifest.variants.items():
        if (decoder := variant.graphs.get("decoder")) is not None:
            found = {spec.name: spec.shape[1:] for spec in (*decoder.inputs, *decoder.outputs) if spec.name in step}
            if found != step:
                raise ValueError(
                    f"variants.{precision}.graphs.decoder: has the tensors {found}; {manifest.task} needs {step} "
                    "behind the batch"
                )
        _check_names(manifest, precision, SPECTROGRAM_TENSORS)


def _check_delayed(manifest: Manifest) -> None:
    delayed = demanded(manifest.delayed)
    if (steps := delayed.steps_of(delayed.max_frames)) != manifest.limits.max_total_tokens:
        raise ValueError(
            f"limits.max_total_tokens is {manifest.limits.max_total_tokens}; delayed.max_frames takes {steps} steps"
        )
    step = {"codes": (delayed.num_books,), "condition": (), "logits": (1, delayed.num_books * delayed.codebook_size)}
    for precision, variant in manifest.variants.items():
        if (decoder := variant.graphs.get("decoder")) is not None:
            found = {spec.name: spec.shape[1:] for spec in (*decoder.inputs, *decoder.outputs) if spec.name in step}
            if found != step:
                raise ValueError(
                    f"variants.{precision}.graphs.decoder: has the tensors {found}; {manifest.task} needs {step} "
                    "behind the batch"
                )
        _check_names(manifest, precision, DELAYED_TENSORS)


def _check_names(
    manifest: Manifest, precision: Precision, needed: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
) -> None:
    """Checks the inputs and outputs of graphs that a variant has."""
    graphs = {str(role): graph for role, graph in manifest.variants[precision].graphs.items()}
    for role, tensors in needed.items():
        if (graph := graphs.get(role)) is None:
            continue  # which is refused for that
        found = tuple(tuple(spec.name for spec in specs) for specs in (graph.inputs, graph.outputs))
        if found != tensors:
            raise ValueError(
                f"variants.{precision}.graphs.{role}: has the tensors {found}; {manifest.task} needs {tensors}"
            )


def _check_tensors(manifest: Manifest) -> None:
    for precision, variant in manifest.variants.items():
        if (graph := variant.graphs.get("model")) is None:
            continue  # which is refused for that
        axes = {axis for spec in graph.inputs for axis in spec.shape if isinstance(axis, str)}
        if (BATCH_AXIS in axes) != (variant.batching is not None):
            raise ValueError(
                f"variants.{precision}.batching: stands with an axis {BATCH_AXIS} of the inputs, and only so"
            )
        for spec in (*graph.inputs, *graph.outputs):
            if spec.shape.count(BATCH_AXIS) > 1:
                raise ValueError(f"variants.{precision}.graphs.model: {spec.name} has the axis {BATCH_AXIS} twice")
        if unknown := manifest.limits.max_axis_sizes.keys() - axes | manifest.limits.max_axis_sizes.keys() & {
            BATCH_AXIS
        }:
            raise ValueError(f"limits.max_axis_sizes: {min(unknown)} is no dynamic axis of the inputs but {BATCH_AXIS}")


_OF_TEXTS = ("special_tokens", "limits.max_input_tokens")
TASK_PARTS: Final[dict[Task, TaskParts]] = {
    Task.GENERATION: TaskParts(
        graphs=("decoder",),
        needs=(*_OF_TEXTS, "limits.max_total_tokens"),
        files=(TOKENIZER_FILE,),
        takes_chat_template=True,
        check=_check_image_prompt,
    ),
    Task.TRANSLATION: TaskParts(
        graphs=("encoder", "decoder"),
        needs=(*_OF_TEXTS, "limits.max_total_tokens", "languages"),
        files=(TOKENIZER_FILE,),
        check=_check_languages,
    ),
    Task.CAPTIONING: TaskParts(
        graphs=("encoder", "decoder"),
        needs=(*_OF_TEXTS, "limits.max_total_tokens", "image_preprocessing", "patches"),
        files=(TOKENIZER_FILE,),
        check=_check_patches,
    ),
    Task.TRANSCRIPTION: TaskParts(
        graphs=("encoder", "decoder"),
        needs=(*_OF_TEXTS, "limits.max_total_tokens"),
        files=(TOKENIZER_FILE,),
        check=_check_speech,
    ),
    Task.CTC_TRANSCRIPTION: TaskParts(needs=("sound", "ctc"), files=(TOKENIZER_FILE,), check=_check_ctc),
    Task.TEXT_TO_TEXT: TaskParts(
        graphs=("encoder", "decoder"),
        needs=(*_OF_TEXTS, "limits.max_total_tokens"),
        files=(TOKENIZER_FILE,),
    ),
    Task.TEXT_CLASSIFICATION: TaskParts(needs=("labels", *_OF_TEXTS), files=(TOKENIZER_FILE,)),
    Task.TOKEN_CLASSIFICATION: TaskParts(needs=("labels", *_OF_TEXTS), files=(TOKENIZER_FILE,), check=_check_tags),
    Task.IMAGE_CLASSIFICATION: TaskParts(needs=("labels", "image_preprocessing")),
    Task.TEXT_EMBEDDING: TaskParts(needs=("embedding", *_OF_TEXTS), files=(TOKENIZER_FILE,)),
    Task.TEXT_SCORING: TaskParts(needs=("scoring", *_OF_TEXTS), files=(TOKENIZER_FILE,)),
    Task.QUESTION_ANSWERING: TaskParts(needs=_OF_TEXTS, files=(TOKENIZER_FILE,)),
    Task.FILL_MASK: TaskParts(needs=_OF_TEXTS, files=(TOKENIZER_FILE,), check=_check_mask),
    Task.OBJECT_DETECTION: TaskParts(needs=("image_preprocessing", "detection"), check=_check_detection),
    Task.SEMANTIC_SEGMENTATION: TaskParts(
        needs=("image_preprocessing", "semantic_segmentation"), check=_check_pixel_labels
    ),
    Task.DEPTH_ESTIMATION: TaskParts(needs=("image_preprocessing", "depth"), check=_check_pixel_map),
    Task.IMAGE_EMBEDDING: TaskParts(needs=("embedding", "image_preprocessing")),
    Task.SEGMENTATION: TaskParts(
        graphs=("encoder", "decoder"), needs=("image_preprocessing",), check=_check_segmentation
    ),
    Task.IMAGE_GENERATION: TaskParts(
        graphs=tuple(DIFFUSION_TENSORS), needs=("image_preprocessing", "diffusion"), check=_check_diffusion
    ),
    Task.AUDIO_CLASSIFICATION: TaskParts(needs=("labels", "sound")),
    Task.VIDEO_CLASSIFICATION: TaskParts(needs=("labels", "image_preprocessing", "video")),
    Task.SPEECH_SYNTHESIS: TaskParts(
        graphs=("codec_decoder", "decoder"),
        needs=(*_OF_TEXTS, "limits.max_total_tokens", "labels", "codec"),
        files=(TOKENIZER_FILE, VOICES_FILE),
        check=_check_codec,
    ),
    Task.FLOW_SYNTHESIS: TaskParts(
        graphs=tuple(FLOW_TENSORS),
        needs=("limits.max_input_tokens", "flow"),
        files=(TOKENIZER_FILE,),
        check=_check_flow,
    ),
    Task.STAGED_SYNTHESIS: TaskParts(
        graphs=("decoder", "coarse_decoder", *STAGED_TENSORS),
        needs=(*_OF_TEXTS, "limits.max_total_tokens", "stages"),
        files=(TOKENIZER_FILE, VOICES_FILE),
        check=_check_stages,
    ),
    Task.SPECTROGRAM_SYNTHESIS: TaskParts(
        graphs=("encoder", "decoder", *SPECTROGRAM_TENSORS),
        needs=(*_OF_TEXTS, "limits.max_total_tokens", "labels", "spectrogram"),
        files=(TOKENIZER_FILE, VOICES_FILE),
        check=_check_spectrogram,
    ),
    Task.DELAYED_SYNTHESIS: TaskParts(
        graphs=("encoder", "decoder", *DELAYED_TENSORS),
        needs=(*_OF_TEXTS, "limits.max_total_tokens", "delayed"),
        files=(TOKENIZER_FILE,),
        check=_check_delayed,
    ),
    Task.TENSORS: TaskParts(needs=(), files=(EXAMPLES_FILE,), check=_check_tensors),
}
"""Contents of bundles by task; serving is in `tasks/table.py`."""


def demanded(part: Part | None) -> Part:
    """Returns a part of a manifest whose task needs it (`TaskParts`): the validator has found it there."""
    assert part is not None, "the manifest's validator demands it"
    return part
