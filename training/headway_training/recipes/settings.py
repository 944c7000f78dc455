"""The sections of a recipe; ranges and choices are checked when one is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from headway_training.checkpoint import (
    HUGGINGFACE,
    AudioPreprocessing,
    ImagePreprocessing,
    Languages,
    Name,
    Record,
    SamplingDefaults,
    TaskName,
    TextPairUse,
)
from headway_training.kinds import find_task
from headway_training.models import architectures_of
from headway_training.models.own import MODULE


def trainable(task: TaskName) -> tuple[str, ...]:
    """The architectures that can be trained for a task."""
    kind = find_task(task)
    return (
        *architectures_of(task),
        *([HUGGINGFACE] if kind.folder else []),
        *([MODULE] if kind.takes_modules else []),
    )


class DataSettings(Record):
    """The data set, and the shares held out of it."""

    dataset: str
    """Name of the data set, as `headway-train data` takes it."""
    valid_fraction: float = Field(default=0.05, ge=0.001, le=0.5)
    """Share of the training data held out for validation, where the data set has no validation part."""
    test_fraction: float = Field(default=0.1, ge=0.001, le=0.5)
    """Share of a plain text, from its end, that is test data, where the data set has no test part."""
    held_out_style: Literal["noto", "openmoji", "fluent"] | None = None
    """Style of emoji that is validated on, with `valid_fraction` of the concepts in every style, and not trained on;
    None: all emoji are trained on. For image_text_embedding."""


class InitSettings(Record):
    """Where the weights start from."""

    checkpoint: Path | None = None
    """Folder of a checkpoint, whose weights are loaded by name and whose tokenizer is taken, or of a model of
    `transformers`, for the architecture `huggingface`; None: fresh weights."""


class LoraSettings(Record):
    """Which matrices are added to a model folder's weights and trained in their place (Hu et al. 2021)."""

    rank: int = Field(default=8, ge=1, le=4096)
    """Width of the two matrices whose product is added to a weight."""
    alpha: float | None = Field(default=None, gt=0, le=1e6)
    """The product is multiplied by alpha / rank; None: twice the rank."""
    dropout: float = Field(default=0.0, ge=0, le=0.9)
    """Share of the inputs of the two matrices that is dropped."""
    target_modules: tuple[str, ...] = ()
    """Names, or last parts of names, of the linear layers; none: all but those of the head."""


class ClassificationSettings(Record):
    """What a text classifier reads and answers."""

    multi_label: bool = False
    """Whether a text may have several labels, or none; each label is then a decision of its own."""
    label_separator: str = "|"
    """The character between the labels of a text in the label column; read with `multi_label` alone."""
    text_pairs: TextPairUse = "never"
    """Whether an input may be (`optional`) or always is (`required`) a pair of texts, read as one."""

    @field_validator("label_separator")
    @classmethod
    def _check_label_separator(cls, value: str) -> str:
        if len(value) != 1 or value in '"\r\n' or value.isalnum():
            raise ValueError("it must be one character, and no letter, digit, double quote or line break")
        return value


class TokenizerSettings(Record):
    """How a byte-level BPE tokenizer is trained on the training text."""

    vocabulary_size: int = Field(default=8000, ge=260, le=1_000_000)
    """Most subwords, the 256 bytes and the special tokens included."""
    min_frequency: int = Field(default=2, ge=1, le=1_000_000)
    """Fewest occurrences of a pair that is merged."""
    lowercase: bool = False
    """Whether text is lower-cased, and brought to Unicode form NFKC, first."""
    treebank_words: bool = False
    """Whether text is cut where treebanks of English cut words: "do|n't", "can|not", every punctuation mark."""


class OptimizationSettings(Record):
    """How the weights are found."""

    epochs: float = Field(ge=0.001, le=100_000)
    """Passes over the training data."""
    max_steps: int = Field(default=0, ge=0, le=10**9)
    """Most optimizer steps; 0: as many as `epochs` needs."""
    batch_size: int = Field(default=64, ge=1, le=1_000_000)
    """Rows of a batch: windows of a text, or images."""
    batch_tokens: int = Field(default=4096, ge=1, le=10**8)
    """Most tokens of a batch of texts of similar length, padding included (longest x count)."""
    gradient_accumulation: int = Field(default=1, ge=1, le=100_000)
    """Parts that a process works through a batch in, one after another: the memory of one part, the gradient of all."""
    activation_checkpointing: bool = False
    """Whether the backward pass computes each layer's activations anew: less memory, about a third more time."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW (Loshchilov and Hutter 2019), or Muon (Jordan et al. 2024) for the matrices of the layers and AdamW for the
    rest. Muon's steps are scaled so that AdamW's learning rate and decay suit it (Liu et al. 2025, section 2.2)."""
    learning_rate: float = Field(default=1e-3, ge=1e-9, le=10)
    """Highest learning rate: reached after the warm-up, from where it falls to 0 like half a cosine."""
    warmup_fraction: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps over which the learning rate rises linearly."""
    weight_decay: float = Field(default=0.01, ge=0, le=10)
    """Decoupled weight decay of matrices; vectors and position tables are not decayed."""
    beta1: float = Field(default=0.9, ge=0, le=0.9999)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(default=0.98, ge=0, le=0.99999)
    """AdamW's decay of the mean squared gradient."""
    epsilon: float = Field(default=1e-8, ge=1e-12, le=1)
    """AdamW's term against division by zero."""
    gradient_clip: float = Field(default=1.0, ge=0, le=1e6)
    """Highest norm of the gradient; 0: no clipping."""
    label_smoothing: float = Field(default=0.0, ge=0, le=0.9)
    """Share of the target's probability that is spread over all classes (Szegedy et al. 2016)."""
    average_decay: float = Field(default=0.0, ge=0, le=0.99999)
    """Decay of the exponential moving average of the weights, which is validated and kept in their place; 0: none."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of matrix products; weights, moments and losses are fp32 either way."""
    evaluations: int = Field(default=10, ge=1, le=100_000)
    """Validations of a run, evenly spaced; the weights of the best one are kept."""
    patience: int = Field(default=0, ge=0, le=100_000)
    """Validations in a row without a better one that end the run; 0: it goes to its last step."""
    state_every_steps: int = Field(default=200, ge=1, le=10**9)
    """Steps between two states to resume from."""


class AugmentationSettings(Record):
    """What is changed at random in training examples."""

    flip: bool = False
    """Whether every second image, on average, is mirrored."""
    crop_padding: int = Field(default=0, ge=0, le=1000)
    """Pixels an image is shifted by at most, in each direction; the mean colour comes in at the edge."""
    token_dropout: float = Field(default=0.0, ge=0, le=0.9)
    """Share of a text's tokens that become the unknown token; for classifiers."""
    subword_splitting: float = Field(default=0.0, ge=0, le=0.9)
    """Probability that a subword is split into the two it was merged from, and each of these again, to the end of
    BPE-dropout (Provilkov et al. 2020). For translation, token classification, and half of the rows of generation."""
    least_crop_area: float = Field(default=1.0, ge=0.05, le=1)
    """Share of a photograph that is seen at least; for images with texts, as all below to `holes`, for segmentation,
    as `colour_change`, `grey` and `coarse`, for captioning, as these three and `holes`, and for image_embedding, as
    `colour_change` and `grey`."""
    white_background: float = Field(default=1.0, ge=0, le=1)
    """Share of drawings that lie on white; the others lie on colours."""
    photograph_background: float = Field(default=0.0, ge=0, le=1)
    """Share of drawings that lie on photographs instead."""
    colour_change: float = Field(default=0.0, ge=0, lt=1)
    """Share by which brightness, contrast and saturation change at most."""
    grey: float = Field(default=0.0, ge=0, le=1)
    """Share of images that lose their colours."""
    coarse: float = Field(default=0.0, ge=0, le=1)
    """Share of images that lose fine detail."""
    holes: float = Field(default=0.0, ge=0, le=1)
    """Share of images of which a square is covered."""
    join_texts: int = Field(default=1, ge=1, le=100)
    """Most texts that are joined to one example: neighbours for token classification, recordings of one speaker for
    speech_synthesis."""
    other_speeds: int = Field(default=0, ge=0, le=16)
    """Speeds beside their own that recordings are learned at in half of the examples, 15 % slower to 15 % faster, each
    with a pitch and so a voice of its own; for speech_synthesis."""


class SegmentationSettings(Record):
    """What a model that cuts out of images is asked in training."""

    prompts_per_image: int = Field(default=6, ge=1, le=256)
    """Prompts for each image of a batch."""
    click_rounds: int = Field(default=2, ge=1, le=16)
    """Times that each is answered: after the first, with another point where the answer was wrong."""


class CaptioningSettings(Record):
    """What a model that writes captions is shown in training."""

    captions_per_image: int = Field(default=4, ge=1, le=64)
    """Captions that are learned from each time a photograph is seen, of each language in turn."""
    text_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the batches that hold captions without photographs."""


class SpeechSettings(Record):
    """How windows of audio are made of recordings, and what is changed in them."""

    language: str = Field(default="en", min_length=2, max_length=35)
    """BCP 47 code of what is spoken."""
    least_source_share: float = Field(default=0.0, ge=0, le=0.5)
    """Least share of an epoch that each source of recordings has: those of a small one come several times."""
    join_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the windows that are filled with further recordings of the same source."""
    silence_share: float = Field(default=0.0, ge=0, le=0.5)
    """Share of the windows in which nobody speaks."""
    speed_change: float = Field(default=0.0, ge=0, le=0.5)
    """Share by which the speed of a recording changes at most, and its pitch with it."""
    gain_change: float = Field(default=0.0, ge=0, le=60)
    """Decibels by which a window becomes louder or quieter at most."""
    noise_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the windows with noise, 5 to 35 decibels below the speech, from white to brown."""
    hidden_bands: int = Field(default=0, ge=0, le=1024)
    """Most neighbouring mel bins that are hidden in a window (SpecAugment, Park et al. 2019)."""
    hidden_frames: int = Field(default=0, ge=0, le=100_000)
    """Most neighbouring frames that are hidden, at two places of a window."""
    alignment_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the loss that is the encoder's own, by connectionist temporal classification (Graves et al. 2006); for
    transcription."""
    first_book_weight: float = Field(default=1.0, gt=0)
    """Weight in the loss of a frame's first code, which says what is said; the mean over its codes is 1; for
    speech_synthesis."""


class DistillationSettings(Record):
    """How an image encoder learns from a moving average of itself (DINO, Caron et al. 2021)."""

    num_local_views: int = Field(default=4, ge=1, le=32)
    """Small views of each image, beside two of at least `augmentation.least_crop_area`."""
    local_size: int = Field(default=16, ge=1, le=4096)
    """Height and width of a small view, in pixels; a multiple of the patch size."""
    least_local_area: float = Field(default=0.1, ge=0.01, le=1)
    """Share of an image that a small view shows at least; at most it shows `augmentation.least_crop_area`."""
    d_hidden: int = Field(default=512, ge=1, le=65_536)
    """Width of the hidden layers of the projection head, which the checkpoint leaves out."""
    d_bottleneck: int = Field(default=128, ge=1, le=65_536)
    """Width of the head's vector of length one."""
    num_prototypes: int = Field(default=2048, ge=2, le=1_000_000)
    """Outputs of the head."""
    student_temperature: float = Field(default=0.1, gt=0, le=1)
    """Divides the student's outputs before the softmax."""
    first_teacher_temperature: float = Field(default=0.04, gt=0, le=1)
    """Divides the teacher's in the first step."""
    teacher_temperature: float = Field(default=0.04, gt=0, le=1)
    """Divides the teacher's after the warm-up."""
    temperature_warmup_fraction: float = Field(default=0.3, ge=0, le=1)
    """Share of the steps over which the teacher's temperature goes from the first to the last."""
    momentum: float = Field(default=0.99, ge=0, lt=1)
    """Share of the teacher that the first step leaves as it was; it rises to 1 like half a cosine."""
    centre_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Share of the centre of the teacher's outputs that a step leaves as it was."""
    frozen_fraction: float = Field(default=0.02, ge=0, le=1)
    """Share of the steps, from the first, in which the last layer does not learn."""


class Result(Record):
    """What the recipe's command gave."""

    command: str
    """The command."""
    hardware: str
    """What it ran on, and what else ran there."""
    wall_time_s: float
    """How long it took."""
    metric: str
    """What was measured on the test data."""
    value: float
    """The figure."""
    note: str = ""
    """Test data, further figures, the baseline."""


class Recipe(Record):
    """Everything that decides a training run."""

    name: Name
    """Name of the model in a store."""
    task: TaskName
    """What the model is for."""
    description: str
    """One sentence about the model."""
    license: str
    """Licence of the weights."""
    attention: bool = False
    """Whether exports of its checkpoints write the graph of the attention weights too, unless told otherwise."""
    tracker: str = "tensorboard"
    """Where curves go: a tracker that `accelerate` knows, such as `tensorboard` or `wandb`, or `none`."""
    data: DataSettings
    """The data."""
    model: dict[str, Any]
    """`architecture`, and the fields of its configuration that the data does not decide."""
    init: InitSettings = InitSettings()
    """Where the weights start from."""
    lora: LoraSettings | None = None
    """How a model folder is trained by LoRA; None: all its weights are trained."""
    optimization: OptimizationSettings
    """How the weights are found."""
    classification: ClassificationSettings = ClassificationSettings()
    """What a text classifier reads and answers; text_classification only."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    """How the tokenizer is trained; text only."""
    augmentation: AugmentationSettings = AugmentationSettings()
    """What is changed at random in training examples."""
    segmentation: SegmentationSettings = SegmentationSettings()
    """What a model that cuts out of images is asked in training; segmentation only."""
    captioning: CaptioningSettings = CaptioningSettings()
    """What a model that writes captions is shown in training; captioning only."""
    speech: SpeechSettings = SpeechSettings()
    """How windows of audio are made of recordings; transcription, and `first_book_weight` for speech_synthesis."""
    distillation: DistillationSettings = DistillationSettings()
    """How an image encoder learns from a moving average of itself; image_embedding only."""
    preprocessing: ImagePreprocessing | None = None
    """How an image becomes pixels; images only."""
    audio: AudioPreprocessing | None = None
    """How audio becomes features; transcription only."""
    languages: Languages | None = None
    """Languages of a translation."""
    sampling: SamplingDefaults | None = None
    """Parameters of a generation request that sets none."""
    result: Result | None = None
    """What the recipe gave; it decides nothing."""
    _given: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def given(self) -> frozenset[str]:
        """The settings that a file or `--set` has, as `section.key`; all others are defaults."""
        return self._given

    def noting(self, given: Iterable[str]) -> Self:
        """The same recipe with other `given` settings."""
        noted = self.model_copy()
        noted._given = frozenset(given)  # noqa: SLF001 (of the same class)
        return noted

    @property
    def architecture(self) -> str:
        """A name of `trainable`, as `gpt`."""
        return str(self.model["architecture"])

    @property
    def configuration(self) -> dict[str, Any]:
        """The fields of the model's configuration that the data does not decide."""
        return {name: value for name, value in self.model.items() if name != "architecture"}

    @model_validator(mode="after")
    def _check_task(self) -> Recipe:
        """Checks that model and sections fit the task."""
        architecture = self.model.get("architecture")
        if architecture not in (known := trainable(self.task)):
            needed = " or ".join(map(repr, known))
            raise ValueError(f"model.architecture is {architecture!r}; {self.task} needs {needed}")
        is_folder = architecture == HUGGINGFACE
        if is_folder and self.init.checkpoint is None:
            raise ValueError("model.architecture 'huggingface' starts from a model folder: give --init FOLDER")
        if self.lora is not None and not is_folder:
            raise ValueError("lora: is for a model folder of transformers, given with --init FOLDER")
        if self.preprocessing is not None and self.preprocessing.height != self.preprocessing.width:
            raise ValueError(
                f"preprocessing.height is {self.preprocessing.height} and width {self.preprocessing.width}; "
                "the models take square images"
            )
        find_task(self.task).check_recipe(self)
        return self
