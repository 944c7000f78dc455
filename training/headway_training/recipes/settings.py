"""The sections of a recipe, each checked when it is made; a message gives the limit and the value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from headway_training.checkpoint import ImagePreprocessing, Languages, SamplingDefaults, TextPairUse
from headway_training.recipes.ranges import check_range as _check_range
from headway_training.recipes.regularization import DistillationSettings, PretrainingSettings, RegularizationSettings
from headway_training.recipes.results import Idea, Result

TaskName = Literal["generation", "translation", "text_classification", "token_classification", "image_classification"]

ARCHITECTURES: Mapping[TaskName, tuple[str, ...]] = MappingProxyType(
    {
        "generation": ("gpt",),
        "translation": ("transformer", "recurrent"),
        "text_classification": ("encoder",),
        "token_classification": ("encoder",),
        "image_classification": ("vit",),
    }
)
"""The architectures that each task trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Which data set is used, and what is held out of it."""

    dataset: str
    """Name of the data set, as `headway-train data` takes it."""
    valid_fraction: float = 0.05
    """Share of the training data held out for model selection, where the data set has no validation part."""
    test_fraction: float = 0.1
    """Share of a plain text, from its end, that is test data, where the data set has no test part."""

    def __post_init__(self) -> None:
        _check_range("valid_fraction", self.valid_fraction, 0.001, 0.5)
        _check_range("test_fraction", self.test_fraction, 0.001, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationSettings:
    """What a text classifier reads and answers."""

    multi_label: bool = False
    """Whether a text may have several labels, or none; each is then a decision of its own."""
    label_separator: str = "|"
    """What separates the labels of a text in its label column; with `multi_label` alone."""
    text_pairs: TextPairUse = "never"
    """Whether an input may be (`optional`) or always is (`required`) a pair of texts, read as one."""

    def __post_init__(self) -> None:
        if len(self.label_separator) != 1 or self.label_separator in '"\r\n' or self.label_separator.isalnum():
            raise ValueError(
                f"label_separator is {self.label_separator!r}; it must be one character, neither a letter, a digit, a "
                "double quote nor a line break"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """How a tokenizer is trained on the training text."""

    kind: Literal["bpe", "characters"] = "bpe"
    """`bpe`: byte-level byte-pair encoding, which can spell any text. `characters`: one token a character."""
    vocabulary_size: int = 8000
    """Most tokens of a `bpe` tokenizer, the 256 bytes and special tokens included."""
    lowercase: bool = False
    """Whether text is lower-cased and put into Unicode form NFKC first."""
    join_punctuation: bool = False
    """Whether the spaces, brackets and quotes that the Penn treebank's tokenization sets apart are put back first, so
    that its texts ("it is n't -lrb- so -rrb- .") and those people write ("it isn't (so).") read alike."""
    min_frequency: int = 2
    """Fewest occurrences of a pair that is merged."""
    treebank_words: bool = False
    """Whether a `bpe` tokenizer cuts where treebanks of English do: "do|n't", "can|not", every punctuation mark."""

    def __post_init__(self) -> None:
        _check_range("vocabulary_size", self.vocabulary_size, 260, 1_000_000)
        _check_range("min_frequency", self.min_frequency, 1, 1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizationSettings:
    """How the weights are found."""

    epochs: float
    """Passes over the training data."""
    max_steps: int = 0
    """Most optimizer steps; 0 means as many as `epochs` needs."""
    batch_size: int = 64
    """Rows of a batch: windows of a text, or images."""
    batch_tokens: int = 4096
    """Most tokens of a batch of texts, padding included (longest x count); it bounds length-bucketed batches."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW (Loshchilov and Hutter 2019), or Muon (Jordan et al. 2024) for the matrices of the layers and AdamW for the
    rest; Muon's steps are scaled so that AdamW's learning rate and decay suit them (Liu et al. 2025, section 2.2)."""
    learning_rate: float = 1e-3
    """Highest learning rate, reached after the warm-up."""
    final_learning_rate: float = 0.0
    """What a cosine schedule ends with, as a share of the highest."""
    schedule: Literal["cosine", "inverse_sqrt"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_fraction: float = 0.05
    """Share of the steps in which the learning rate rises linearly."""
    weight_decay: float = 0.01
    """AdamW's decay; biases, gains of normalisations and position tables are left out."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.98
    """AdamW's decay of the mean squared gradient."""
    epsilon: float = 1e-8
    """AdamW's term against division by zero."""
    gradient_clip: float = 1.0
    """Highest norm of the gradient; 0 turns clipping off."""
    label_smoothing: float = 0.0
    """Share of the target's probability spread over all classes (Szegedy et al. 2016)."""
    average_decay: float = 0.0
    """Decay of the exponential moving average of the weights, which is what is evaluated and kept; 0 turns it off."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of matrix products; the weights are fp32 either way."""
    evaluations: int = 10
    """Validations of a run, evenly spaced; the best weights are kept."""
    state_every_steps: int = 200
    """Steps after which the state to resume from is written."""

    def __post_init__(self) -> None:
        _check_range("epochs", self.epochs, 0.001, 100_000)
        _check_range("max_steps", self.max_steps, 0, 10**9)
        _check_range("batch_size", self.batch_size, 1, 1_000_000)
        _check_range("batch_tokens", self.batch_tokens, 1, 10**8)
        _check_range("learning_rate", self.learning_rate, 1e-9, 10)
        _check_range("final_learning_rate", self.final_learning_rate, 0, 1)
        _check_range("warmup_fraction", self.warmup_fraction, 0, 1)
        _check_range("weight_decay", self.weight_decay, 0, 10)
        _check_range("beta1", self.beta1, 0, 0.9999)
        _check_range("beta2", self.beta2, 0, 0.99999)
        _check_range("epsilon", self.epsilon, 1e-12, 1)
        _check_range("gradient_clip", self.gradient_clip, 0, 1e6)
        _check_range("label_smoothing", self.label_smoothing, 0, 0.9)
        _check_range("average_decay", self.average_decay, 0, 0.99999)
        _check_range("evaluations", self.evaluations, 1, 100_000)
        _check_range("state_every_steps", self.state_every_steps, 1, 10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentationSettings:
    """What is changed at random in training examples."""

    flip: bool = False
    """Mirrors every second image."""
    random_operations: int = 0
    """Random changes of shape and colour that every image gets (`headway_training.image_augmentation`); 0 is none."""
    random_strength: float = 0.3
    """How strong they are, 0 to 1."""
    crop_padding: int = 0
    """Pixels an image is shifted by at most, in each direction; what comes in is the mean colour."""
    token_dropout: float = 0.0
    """Share of a text's tokens that a classifier does not get to see: they become the unknown token."""
    piece_splitting: float = 0.0
    """Probability that a piece of a text falls into the two it was merged from, and these again: to the end of
    BPE-dropout (Provilkov et al. 2020). For translation, token classification, and half of the rows of generation."""
    join_texts: int = 1
    """Most neighbouring texts that are joined to one for a token classifier."""

    def __post_init__(self) -> None:
        _check_range("random_operations", self.random_operations, 0, 10)
        _check_range("random_strength", self.random_strength, 0, 1)
        _check_range("crop_padding", self.crop_padding, 0, 1000)
        _check_range("token_dropout", self.token_dropout, 0, 0.9)
        _check_range("piece_splitting", self.piece_splitting, 0, 0.9)
        _check_range("join_texts", self.join_texts, 1, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything a training is made of."""

    name: str
    """Name of the model in a store."""
    task: TaskName
    """What the model is for."""
    description: str
    """One sentence about the model."""
    license: str
    """Licence of the weights."""
    data: DataSettings
    """The data."""
    model: dict[str, Any]
    """`architecture`, and the fields of its configuration that the data does not decide."""
    optimization: OptimizationSettings
    """How the weights are found."""
    regularization: RegularizationSettings = field(default_factory=RegularizationSettings)
    """What else keeps the model from learning its data by heart."""
    distillation: DistillationSettings = field(default_factory=DistillationSettings)
    """A larger model to learn from."""
    pretraining: PretrainingSettings = field(default_factory=PretrainingSettings)
    """What an encoder learns first."""
    classification: ClassificationSettings = field(default_factory=ClassificationSettings)
    """What a text classifier reads and answers; text_classification only."""
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    """How the tokenizer is trained; text only."""
    augmentation: AugmentationSettings = field(default_factory=AugmentationSettings)
    """What is changed at random in training examples."""
    preprocessing: ImagePreprocessing | None = None
    """How an image becomes pixels; images only."""
    languages: Languages | None = None
    """Languages of a translation."""
    sampling: SamplingDefaults | None = None
    """What a generation request takes for parameters it does not set."""
    results: tuple[Result, ...] = ()
    """What the recipe gave; it decides nothing."""
    ideas: tuple[Idea, ...] = ()
    """What was tried; it decides nothing."""

    def __post_init__(self) -> None:
        architecture, head = self.model.get("architecture"), self.model.get("head", "sequence")
        if architecture not in (known := ARCHITECTURES[self.task]):
            needed = " or ".join(map(repr, known))
            raise ValueError(f"model.architecture is {architecture!r}; {self.task} needs {needed}")
        needed = "token" if self.task == "token_classification" else "sequence"
        if head != needed:
            raise ValueError(f"model.head is {head!r}; {self.task} needs {needed!r}")
        if self.task == "image_classification" and self.preprocessing is None:
            raise ValueError("the section [preprocessing] is missing; image_classification needs it")
        if self.preprocessing is not None and self.preprocessing.height != self.preprocessing.width:
            raise ValueError(
                f"preprocessing.height is {self.preprocessing.height} and width {self.preprocessing.width}; "
                "the models take square images"
            )
        if self.task == "translation" and self.languages is None:
            raise ValueError("the section [languages] is missing; translation needs it")
