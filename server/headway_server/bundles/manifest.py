"""The manifest of a bundle, `bundle.json`: all that a server must know to run the model (docs/bundle.md).

Axis names used in tensor shapes:

    batch          rows of a stateless graph, or of an encoder graph
    length         tokens of a row: T of the decoder's step, S of an encoder's input
    slots          rows of a decoder's step and of its state
    cache_length   positions a state tensor holds for a slot
    logits_length  positions of a row whose logits are asked for
    likeliest      tokens that are ranked of each of these positions
    sources        sentences whose cross-attention tensors a decoder's step reads; `slots` is a multiple of it
    source_length  positions of those tensors
    images         embeddings of a bank, which the prompts of a segmentation decoder are about
    prompts        prompts of a run
    points         points of a prompt
    frames         frames of codes that are decoded in a run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headway_server.bundles.tags import TagSet

Part = TypeVar("Part")

SCHEMA_VERSION = 1
MANIFEST_FILE = "bundle.json"
SIGNATURE_FILE = "bundle.json.sig"
"""Signature of the manifest, for servers that ask for one."""
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""Of a generation model that can continue conversations."""
ALIGNMENT = "alignment"
"""Output of a decoder: how much each token it reads attends to each token of the source, (slots, length,
source_length) float32. A row sums to one over the source's tokens and is 0 at padding."""
ATTENTION_KINDS = ("attention", "encoder_attention", "decoder_attention", "cross_attention")
"""Outputs of a graph `attention`, `<kind>_<layer>` with layers from 0, are a layer's attention weights, float32 (batch,
heads, rows, columns): a row is what one token attends with, over the tokens of the columns, and sums to one. An
encoder-decoder has the last three kinds, and any other model the first."""
NUM_LIKELIEST = "num_likeliest"
"""Input of a decoder that ranks its logits: how many of the likeliest tokens are wanted, (1,) int64, at least 1 and at
most the vocabulary. Such a decoder has the three outputs below."""
LIKELIEST_IDS = "likeliest_ids"
"""Their ids, (slots, logits_length, likeliest) int64, by falling logit; the lower id first among equals."""
LIKELIEST_LOGITS = "likeliest_logits"
"""Their logits, (slots, logits_length, likeliest) float32."""
EXPONENTIAL_MEANS = "exponential_means"
"""The means of exp(logits) over the vocabulary, (slots, logits_length) float32."""
SEGMENTATION_TENSORS = (
    ("embedding", "image_index", "points", "point_labels", "earlier_mask", "has_earlier_mask"),
    ("masks", "predicted_iou"),
)
"""Inputs and outputs of a decoder that answers prompts with masks (docs/graphs.md)."""
DIFFUSION_TENSORS = {
    "denoiser": (("latent", "timestep", "label"), ("velocity",)),
    "vae_decoder": (("latent",), ("pixel_values",)),
    "vae_encoder": (("pixel_values",), ("latent",)),
}
"""Inputs and outputs of the graphs of a model that draws images of labels (docs/graphs.md)."""
TEXT_DIFFUSION_TENSORS = DIFFUSION_TENSORS | {
    "denoiser": (("latent", "timestep", "text", "text_mask"), ("velocity",)),
    "text_encoder": (("input_ids", "attention_mask"), ("text",)),
}
"""The same of one that draws images of texts."""
CODEC_TENSORS = (("codes", "state"), ("samples", "present_state"))
"""Inputs and outputs of the graph `codec_decoder` of a model that speaks (docs/graphs.md)."""
VOICES_FILE = "voices.json"
"""Of a model that speaks: frames of a recording in each voice, by its name; a frame is a code of each book."""
CARD_FILE = "README.md"
LEARNING_CURVE_FILE = "learning-curve.svg"

NAME_PATTERN = r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""A model's name or version: 1 to 64 of a-z, 0-9, dot, underscore and hyphen, a letter or digit at both ends."""

Size = Annotated[int, Field(ge=1, le=2**24)]
"""Tokens, pixels or elements; many times what any model has, and little enough that sums of them are no surprise."""
Index = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
FilePath = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$")]
"""A path below the bundle's folder, with slashes; it does not lead out of it."""


class Task(StrEnum):
    """What a model was made for; the values are those of the manifest and of the exporter's `--task`."""

    GENERATION = "generation"
    TRANSLATION = "translation"
    TEXT_TO_TEXT = "text_to_text"
    CAPTIONING = "captioning"
    TRANSCRIPTION = "transcription"
    TEXT_CLASSIFICATION = "text_classification"
    TOKEN_CLASSIFICATION = "token_classification"  # noqa: S105 (a task, not a password)
    IMAGE_CLASSIFICATION = "image_classification"
    TEXT_EMBEDDING = "text_embedding"
    TEXT_SCORING = "text_scoring"
    IMAGE_EMBEDDING = "image_embedding"
    SEGMENTATION = "segmentation"
    IMAGE_GENERATION = "image_generation"
    SPEECH_SYNTHESIS = "speech_synthesis"

    @classmethod
    def _missing_(cls, value: object) -> Task | None:
        return next((task for task in TASK_PARTS if task == value), None)

    @classmethod
    def add(cls, name: str, parts: TaskParts) -> Task:
        """Adds a task that is no part of headway.

        Args:
            name: As in manifests: lower case with underscores.
            parts: What its bundles must hold.
        """
        task = str.__new__(cls, name)
        task._name_, task._value_ = name.upper(), name
        TASK_PARTS[task] = parts
        return task


ENCODER_DECODER_TASKS = (Task.TRANSLATION, Task.TEXT_TO_TEXT, Task.CAPTIONING, Task.TRANSCRIPTION)
"""Tasks whose models read a text, an image or audio with an encoder and write a text with a decoder."""
EMBEDDING_TASKS = (Task.TEXT_EMBEDDING, Task.IMAGE_EMBEDDING)
"""Tasks whose models give an embedding and no logits."""


class Precision(StrEnum):
    """Precision of a variant's matrix products."""

    FP32 = "fp32"
    INT8 = "int8"
    """Weights in int8, activations in uint8 with a scale a row."""
    INT8_STATIC = "int8-static"
    """The same, but where it is exact enough an activation has one scale, known when the graph is made."""
    INT4 = "int4"
    """Of decoders: weights in 4 bits with a scale for 32 of them, the output projection and tables in int8."""
    FP16 = "fp16"


class Record(BaseModel):
    """Base of the manifest's parts: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TensorSpec(Record):
    """A tensor a graph declares."""

    name: str
    dtype: Literal["float32", "float16", "int64", "int32", "int8", "bool"]
    shape: tuple[Annotated[int, Field(ge=0, lt=2**31)] | str, ...]
    """A number for a fixed axis, a name for a dynamic one."""


class Graph(Record):
    """An ONNX file and the tensors it declares."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class StateTensor(Record):
    """A tensor that a step of a decoder reads as `past` and writes as `present`."""

    past: str
    present: str
    update: Literal["in_place", "replace"]
    """`in_place`: past and present are one buffer, (slots, heads, cache_length, head_dim), into which a step writes its
    own positions: a key/value cache. `replace`: (slots, ...) of fixed size without positions, which a step writes as a
    whole: a recurrent state."""
    initial: str | None = None
    """Output of the encoder, (batch, ...), that fills a slot when its sentence begins; None: zeros. For `replace`."""

    @model_validator(mode="after")
    def _check_initial(self) -> StateTensor:
        if self.initial is not None and self.update != "replace":
            raise ValueError(f"state {self.past}: initial is for update replace, and this one's is {self.update}")
        return self


class ParityFigures(Record):
    """How far a variant is from PyTorch's fp32 on the exporter's grid of batch sizes and lengths."""

    max_relative_logit_error: float
    bound: float | None
    """The bound that was enforced; none for a variant that is judged by its task metric."""
    checked_shape_count: int
    greedy_token_count: int = 0
    """Greedily decoded tokens that were compared; 0 for models that do not decode."""
    greedy_mismatch_count: int = 0
    provider: str
    """Execution provider the check ran on."""


class QualityFigure(Record):
    """The task metric of a variant, measured through the runner that serves."""

    metric: str
    value: float
    example_count: int
    dataset: str
    higher_is_better: bool
    signature: str = ""
    """The metric's own description of its settings, such as sacreBLEU's signature."""


class AgreementFigures(Record):
    """How far the answers of a variant are from fp32's, on inputs whose right answers are not looked at.

    Figures are `mean_kl_divergence` (nats a prediction), `worst_kl_divergence` (the largest mean over a label or a band
    of positions), `top_agreement` (share of tokens, labels or decisions that are fp32's, but for those of which fp32 is
    unsure), `mean_cosine` and `least_cosine` of vectors, `mean_mask_iou`, and `correlation`, `least_correlation` and
    `iou_correlation` (how alike outputs vary over the inputs: 1, and 0 for a constant; the mean of all outputs, the
    least of a label, and that of predicted IoU).
    """

    dataset: str
    """Name of the file or the data set that they come from; `generated` where they were drawn."""
    example_count: int
    prediction_count: int | None = None
    """Tokens, labels or vectors that were compared; None in older bundles."""
    figures: dict[str, float]
    intervals: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Of figures that are means, from where to where they are with a confidence of 0.9."""
    limits: dict[str, float]
    """What was enforced, of an interval at its worse end: the most of a divergence, and the least of all others."""
    calibrated_on: Literal["other inputs", "these inputs"] | None = None
    """What the scales of an int8 cache or of fixed activations were taken from; None: there are none such."""


class CalibrationFigures(Record):
    """How far a classifier's probabilities are from its accuracy, on the data its quality was measured on.

    Expected calibration error (Guo et al. 2017), 0 to 1: of the likeliest label, or of every label where several may
    apply.
    """

    expected_calibration_error: Annotated[float, Field(ge=0, le=1)]
    uncalibrated: Annotated[float, Field(ge=0, le=1)]
    """With a temperature of 1."""
    bin_count: Size
    """Bins of equal width that predictions are put into by their probability."""


class AttentionFigures(Record):
    """How far the weights of the graph `attention` are from PyTorch's fp32 on the exporter's grid of sizes."""

    max_weight_error: float
    """Largest difference of a weight, which is from 0 to 1."""
    bound: float | None
    """The bound that was enforced; none for other variants than fp32."""
    max_row_sum_error: float
    """Largest difference of a row's sum from 1, held to a bound in every variant."""
    checked_shape_count: int


GraphRole = Literal[
    "model",
    "encoder",
    "decoder",
    "denoiser",
    "vae_decoder",
    "vae_encoder",
    "text_encoder",
    "codec_decoder",
    "attention",
]
"""What a graph is for."""


class Variant(Record):
    """The graphs of one precision."""

    device: Literal["cpu", "cuda"]
    """Where this variant is meant to run."""
    graphs: dict[GraphRole, Graph]
    """Those that `TASK_PARTS` names for the task, and `attention` where the attention weights can be looked at."""
    state: tuple[StateTensor, ...] = ()
    cross: tuple[str, ...] = ()
    """Encoder outputs, (batch, heads, length, head_dim), that every step of the decoder reads, under the same names."""
    alignment_layer: Index | None = None
    """Layer of the decoder, from 0, whose attention over the source the decoder's output `alignment` is; None where it
    has no such output."""
    parity: ParityFigures
    quality: QualityFigure | None
    """None where the checkpoint carried no evaluation data."""
    calibration: CalibrationFigures | None = None
    """Of classifiers, measured with their quality."""
    attention: AttentionFigures | None = None
    """Of the graph `attention`; None where there is none."""
    agreement: AgreementFigures | None = None
    """Of a variant other than fp32: its judge where there was no evaluation data, and a record beside its metric."""

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
    """Returns the outputs of a graph `attention` by their kind, in the order of the layers; empty if they are none."""
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
    """What kind of network it is. For people: a server runs the graphs without it."""

    kind: str
    parameter_count: int
    configuration: dict[str, str | int | float | bool | None]


class Origin(Record):
    """A model of a hub, at one commit."""

    id: str
    revision: str
    """What was asked for: a branch, a tag or a commit."""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class SpecialTokens(Record):
    """Ids of special tokens; None for one that the model does not have."""

    pad: Index | None = None
    bos: Index | None = None
    """What the decoder of an encoder-decoder reads first; first token of a generation with an empty prompt."""
    eos: Index | None = None
    """Token that ends a text."""
    more_eos: tuple[Index, ...] = ()
    """Further tokens that end a generated text, such as the end of a turn beside the end of a document."""
    unk: Index | None = None


class Limits(Record):
    """Sizes past which a request is refused, in tokens."""

    max_input_tokens: Size | None = None
    """Of a prompt, a text or a source sentence, special tokens included, or patches of an image that captions are
    written for, or positions of a window of audio; None for other images."""
    max_total_tokens: Size | None = None
    """Of prompt and continuation together, or of what an encoder-decoder writes; None for classifiers. The length of a
    slot."""


class ImagePreprocessing(Record):
    """How an image becomes `pixel_values`, float32 (B, 3, height, width): RGB, resized, cropped, normalised."""

    height: Size
    width: Size
    resize: Literal["stretch", "shorter_side"]
    """`stretch`: to height and width, or to a square of `resize_size`. `shorter_side`: keeping proportions, so that the
    shorter side is `resize_size`. A crop of height and width from the centre follows where that is larger."""
    resize_size: Size | None = None
    rounding: Literal["nearest", "down"] = "nearest"
    """How the longer side becomes whole pixels where proportions are kept."""
    interpolation: Literal["bilinear", "bicubic"]
    """Pillow's filter of that name, with antialiasing."""
    mean: tuple[float, float, float]
    """Subtracted from values in 0 to 1, a channel."""
    std: tuple[Positive, Positive, Positive]
    """Divides what is left, a channel."""


class AudioPreprocessing(Record):
    """How audio becomes `input_features`, float32 (B, num_mel_bins, num_frames): a log-mel spectrogram of a window.

    The filters are Slaney's, from 0 Hz to `max_frequency`; docs/speech.md has the formula.
    """

    sampling_rate: Size
    """Samples of mono audio a second."""
    num_mel_bins: Size
    fft_size: Size
    """Samples of a Fourier transform, under a Hann window."""
    hop_length: Size
    """Samples from one frame to the next."""
    num_frames: Size
    """Frames that the encoder reads at once: a window."""
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


class SpeechTokens(Record):
    """What a model of speech is told by tokens; None for what it cannot be told."""

    transcribe: Index | None = None
    """Task: to write what is said in the language that is spoken."""
    translate: Index | None = None
    """Task: to write it in English."""
    no_timestamps: Index | None = None
    """To write no times."""
    first_timestamp: Index | None = None
    """The beginning of the window; each further token is `timestamp_s` later. All tokens from it on are times."""
    timestamp_s: Positive = 0.02
    max_initial_timestamp: Index | None = None
    """Most steps of `timestamp_s` before the first segment of a window begins."""
    start_of_previous: Index | None = None
    """Comes before a text that the audio continues."""
    begin_suppressed: tuple[Index, ...] = ()
    """Never the first token that is written."""


class PatchGrid(Record):
    """How the tokens of an image lie in what the model reads of it, row by row, each as large as the others."""

    rows: Size
    columns: Size
    has_class_token: bool
    """True if a token that stands for no patch comes before those that do."""


class ClassificationScheme(Record):
    """How a classifier's logits become probabilities, and which labels apply."""

    kind: Literal["single_label", "multi_label"] = "single_label"
    """`single_label`: softmax, and the likeliest label applies. `multi_label`: a sigmoid a label."""
    temperature: Positive = 1.0
    """Divides the logits."""
    thresholds: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """Probability from which each label applies; multi_label only."""


class Space(Record):
    """What vectors of several models have in common: images and texts whose nearness means something."""

    name: Name
    """Models with the same name have the same space; another training run makes another space and another name."""
    probabilities: Literal["softmax", "sigmoid"]
    """How `scale` * cosine + `bias` becomes the probability that an image and a text belong together: over all given
    texts (`softmax`), or of each by itself (`sigmoid`)."""
    scale: Positive
    bias: float = 0.0


class Embedding(Record):
    """The output `embedding` of a model's graphs: float32 (batch, dimension)."""

    pooling: Annotated[str, Field(min_length=1)]
    """How states are pooled: `mean`, `max`, `first_token`, `last_token`, `class_token`, or a name of the module's."""
    dimension: Size
    prompts: dict[str, str] = {}
    """Texts that can be put before what is embedded, by name; for texts."""
    default_prompt: str | None = None
    """Name of the prompt of a call that names none; None: none is put before."""
    space: Space | None = None
    """The space that other models share; None: vectors compare with those of the same model alone."""

    @model_validator(mode="after")
    def _check_prompts(self) -> Embedding:
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ValueError(f"embedding.default_prompt: there is no prompt named {self.default_prompt}")
        return self


class Scoring(Record):
    """How the one logit of a scorer becomes its score."""

    activation: Literal["none", "sigmoid"]


class Diffusion(Record):
    """What the denoiser of a model that draws images was trained to undo."""

    schedule: Literal["trigonometric"]
    """How an image x and noise e are mixed at a time t from 0 to 1: cos(pi t / 2) x + sin(pi t / 2) e."""
    prediction: Literal["velocity"]
    """What the denoiser predicts: cos(pi t / 2) e - sin(pi t / 2) x."""
    condition: Literal["label", "text"] = "label"
    """What is drawn: one of `labels`, or what a text says."""


class AudioCodec(Record):
    """How the codes that a model writes become audio.

    A frame is a code of every book. A code's token is `first_code`, plus `codebook_size` for each book before its own,
    plus its number.
    """

    sampling_rate: Size
    """Samples a second."""
    hop_length: Size
    """Samples of a frame."""
    num_books: Size
    codebook_size: Size
    """Codes of a book."""
    first_code: Index
    """Token of the first code of the first book."""
    frames_per_run: Size
    """Frames that the graph `codec_decoder` is given at a time; the last ones of a sequence are followed by others,
    which change nothing before them."""

    @property
    def num_codes(self) -> int:
        """Of all books."""
        return self.num_books * self.codebook_size


class SamplingDefaults(Record):
    """The parameters of a generation request that does not set them."""

    max_new_tokens: Size | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_k: Index = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0


class Languages(Record):
    """BCP 47 codes of a translation model: of one source and one target, or of many, which tokens tell it.

    A captioner has targets alone, and so has a model of speech, whose targets are what is spoken.
    """

    source: str = ""
    target: str = ""
    source_tokens: dict[str, Index] = {}
    """In place of `source`: each language that is read, with the token that comes before its texts."""
    target_tokens: dict[str, Index] = {}
    """In place of `target`: each language that is written, with the token that the decoder reads after `bos`."""
    target_marks: dict[str, Index] = {}
    """In place of `target`: each language that is written, with the token that comes before the source."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The languages that are read; none of a captioner or a model of speech."""
        return tuple(self.source_tokens) or ((self.source,) if self.source else ())

    @property
    def targets(self) -> tuple[str, ...]:
        """The languages that are written."""
        return tuple(self.target_tokens or self.target_marks) or (self.target,)

    @staticmethod
    def match(code: str, known: Sequence[str]) -> str | None:
        """Returns the language that a code stands for, whatever its case and whether `-` or `_` joins its parts.

        A code that is none of them stands for the first that it is the beginning of, as `de` is of `de-DE`.

        Args:
            code: What a caller names; empty for the only one.
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
        """Checks that each side is told once."""
        for side, given in (
            ("source", (self.source, self.source_tokens)),
            ("target", (self.target, self.target_tokens, self.target_marks)),
        ):
            if sum(map(bool, given)) != 1 and (side == "target" or any(given)):
                raise ValueError(f"languages: {side} is one language, or several with a token each")
        return self


def _normal(code: str) -> str:
    """Returns a language's code in small letters, with hyphens."""
    return code.lower().replace("_", "-")


class BundleFile(Record):
    """Size and hash of a file of the bundle."""

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
    """Where the weights were fetched from; for people."""
    variants: dict[Precision, Variant]
    special_tokens: SpecialTokens | None = None
    limits: Limits = Limits()
    labels: tuple[str, ...] = ()
    classification: ClassificationScheme | None = None
    """None: single_label, and a temperature of 1."""
    text_pairs: Literal["never", "optional", "required"] = "never"
    """When a text model reads two texts as one input: never, where a second one is given, or always."""
    embedding: Embedding | None = None
    """None where the graphs have no such output."""
    scoring: Scoring | None = None
    """None but for text_scoring."""
    image_preprocessing: ImagePreprocessing | None = None
    patches: PatchGrid | None = None
    """Of images whose attention weights can be looked at, and of those that captions are written for."""
    audio_preprocessing: AudioPreprocessing | None = None
    speech: SpeechTokens | None = None
    languages: Languages | None = None
    diffusion: Diffusion | None = None
    """None but for image_generation."""
    codec: AudioCodec | None = None
    """None but for speech_synthesis."""
    sampling_defaults: SamplingDefaults | None = None
    truncation_side: Literal["right", "left"] = "right"
    """Which end of a text is cut where it is too long and a call says truncate. A prompt of generation is cut on the
    left, whatever this says."""
    prompt_prefix: tuple[Index, ...] = ()
    """Tokens that come before a prompt that is given as text, such as a Llama's bos; a conversation's template writes
    its own. Of an encoder-decoder: tokens that its decoder reads after `bos`."""
    suppressed_tokens: tuple[Index, ...] = ()
    """Tokens that are never generated, whatever their logits; their probability counts as the model gives it."""
    opset: int
    """The highest opset of the graphs: a runtime must support it to load every variant."""
    libraries: dict[str, str]
    """Versions of the libraries that made the bundle."""
    files: dict[FilePath, BundleFile]
    """Every other file of the bundle by its path below the bundle's folder."""

    @model_validator(mode="after")
    def _check_parts(self) -> Manifest:
        """Checks that the parts the task needs are there."""
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
            and self.patches is None
            and any("attention" in variant.graphs for variant in self.variants.values())
        ):
            raise ValueError("patches: an image model with a graph attention needs it")
        return self

    @model_validator(mode="after")
    def _check_variants(self) -> Manifest:
        """Checks that every variant has the graphs the task needs, and that their files are hashed."""
        if not self.variants:
            raise ValueError("variants: at least one is needed")
        draws_texts = self.diffusion is not None and self.diffusion.condition == "text"
        graphs = tuple(TEXT_DIFFUSION_TENSORS) if draws_texts else TASK_PARTS[self.task].graphs
        for precision, variant in self.variants.items():
            if set(variant.graphs) - {"attention"} != set(graphs):
                raise ValueError(f"variants.{precision}.graphs: {self.task} needs {', '.join(graphs)}")
            if unlisted := {graph.file for graph in variant.graphs.values()} - set(self.files):
                raise ValueError(f"variants.{precision}.graphs: {min(unlisted)} is not among the files")
        return self

    @model_validator(mode="after")
    def _check_classifier(self) -> Manifest:
        """Checks that thresholds are those of the labels, and that embeddings are outputs of the graphs."""
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
    """What a bundle of a task holds, beside what every bundle holds."""

    graphs: tuple[str, ...] = ("model",)
    """Graphs of each variant."""
    needs: tuple[str, ...]
    """Fields of the manifest that must not be empty."""
    files: tuple[str, ...] = ()
    """Files that must be there."""
    takes_chat_template: bool = False
    """True if there may be a chat template."""
    check: Callable[[Manifest], object] | None = None
    """What else is checked; raises ValueError."""


def _check_tags(manifest: Manifest) -> None:
    try:
        TagSet.parse(manifest.labels)
    except ValueError as error:
        raise ValueError(f"labels: {error}") from error


def _check_languages(manifest: Manifest) -> None:
    assert manifest.languages is not None, "it is among what is needed"
    if not manifest.languages.sources:
        raise ValueError(f"languages: source is one language, or several with a token each; {manifest.task} needs it")


def _check_patches(manifest: Manifest) -> None:
    patches = manifest.patches
    assert patches is not None, "it is among what is needed"
    count = patches.rows * patches.columns
    if patches.has_class_token or count != manifest.limits.max_input_tokens:
        raise ValueError(
            f"patches: the decoder of {manifest.task} attends to the patches of an image alone; there are {count}, and "
            f"limits.max_input_tokens is {manifest.limits.max_input_tokens}"
        )


def _check_speech(manifest: Manifest) -> None:
    audio = manifest.audio_preprocessing
    assert audio is not None, "it is among what is needed"
    positions = manifest.limits.max_input_tokens
    assert positions is not None, "it is among what is needed"
    if audio.num_frames % positions:
        raise ValueError(
            f"audio_preprocessing: a window of {audio.num_frames} frames is not a multiple of "
            f"limits.max_input_tokens, {positions}"
        )


def _check_segmentation(manifest: Manifest) -> None:
    for precision, variant in manifest.variants.items():
        if (graph := variant.graphs.get("decoder")) is None:
            continue  # which is refused for that
        found = tuple(tuple(spec.name for spec in specs) for specs in (graph.inputs, graph.outputs))
        if found != SEGMENTATION_TENSORS:
            raise ValueError(
                f"variants.{precision}.graphs.decoder: has the tensors {found}; {manifest.task} needs "
                f"{SEGMENTATION_TENSORS}"
            )


def _check_diffusion(manifest: Manifest) -> None:
    assert manifest.diffusion is not None, "it is among what is needed"
    draws_texts = manifest.diffusion.condition == "text"
    if draws_texts and (not manifest.limits.max_input_tokens or manifest.special_tokens is None):
        raise ValueError("limits.max_input_tokens and special_tokens: a model that draws texts needs them")
    if draws_texts and TOKENIZER_FILE not in manifest.files:
        raise ValueError(f"files: a model that draws texts needs {TOKENIZER_FILE}")
    if draws_texts == bool(manifest.labels):
        raise ValueError(
            f"labels: a model that draws each {manifest.diffusion.condition} has {'none' if draws_texts else 'some'}"
        )
    for precision, variant in manifest.variants.items():
        for role, tensors in (TEXT_DIFFUSION_TENSORS if draws_texts else DIFFUSION_TENSORS).items():
            if (graph := {str(name): one for name, one in variant.graphs.items()}.get(role)) is None:
                continue  # which is refused for that
            found = tuple(tuple(spec.name for spec in specs) for specs in (graph.inputs, graph.outputs))
            if found != tensors:
                raise ValueError(
                    f"variants.{precision}.graphs.{role}: has the tensors {found}; {manifest.task} needs {tensors}"
                )


def _check_codec(manifest: Manifest) -> None:
    codec, limits = manifest.codec, manifest.limits
    assert codec is not None, "it is among what is needed"
    assert limits.max_input_tokens is not None, "it is among what is needed"
    assert limits.max_total_tokens is not None, "it is among what is needed"
    if manifest.special_tokens is None or manifest.special_tokens.eos is None:
        raise ValueError(f"special_tokens.eos: {manifest.task} needs it")
    if limits.max_total_tokens < limits.max_input_tokens + codec.num_books:
        raise ValueError(
            f"limits.max_total_tokens is {limits.max_total_tokens}; a prompt ({limits.max_input_tokens}) and a frame "
            f"({codec.num_books}) need more"
        )
    for precision, variant in manifest.variants.items():
        if (graph := variant.graphs.get("codec_decoder")) is None:
            continue  # which is refused for that
        found = tuple(tuple(spec.name for spec in specs) for specs in (graph.inputs, graph.outputs))
        if found != CODEC_TENSORS:
            raise ValueError(
                f"variants.{precision}.graphs.codec_decoder: has the tensors {found}; {manifest.task} needs "
                f"{CODEC_TENSORS}"
            )


_OF_TEXTS = ("special_tokens", "limits.max_input_tokens")
TASK_PARTS: Final[dict[Task, TaskParts]] = {
    Task.GENERATION: TaskParts(
        graphs=("decoder",),
        needs=(*_OF_TEXTS, "limits.max_total_tokens"),
        files=(TOKENIZER_FILE,),
        takes_chat_template=True,
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
        needs=(*_OF_TEXTS, "limits.max_total_tokens", "audio_preprocessing"),
        files=(TOKENIZER_FILE,),
        check=_check_speech,
    ),
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
    Task.IMAGE_EMBEDDING: TaskParts(needs=("embedding", "image_preprocessing")),
    Task.SEGMENTATION: TaskParts(
        graphs=("encoder", "decoder"), needs=("image_preprocessing",), check=_check_segmentation
    ),
    Task.IMAGE_GENERATION: TaskParts(
        graphs=tuple(DIFFUSION_TENSORS), needs=("image_preprocessing", "diffusion"), check=_check_diffusion
    ),
    Task.SPEECH_SYNTHESIS: TaskParts(
        graphs=("codec_decoder", "decoder"),
        needs=(*_OF_TEXTS, "limits.max_total_tokens", "labels", "codec"),
        files=(TOKENIZER_FILE, VOICES_FILE),
        check=_check_codec,
    ),
}
"""The manifest's part of each task; how it is served is in `tasks/table.py`."""


def demanded(part: Part | None) -> Part:
    """Returns a part of a manifest whose task needs it (`TaskParts`): the validator has found it there."""
    assert part is not None, "the manifest's validator demands it"
    return part
