"""What a trainer needs of a task.

B rows, T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.batches import Batch
from headway_training.checkpoint import (
    TOKENIZER_FILE,
    Baseline,
    SpecialTokens,
)
from headway_training.data.captions import language_token, read_caption_table
from headway_training.data.examples import Splits
from headway_training.data.images import find_images, read_image_folder
from headway_training.data.speech import MOST_TEST_SECONDS, SPOKEN, Recordings, find_recordings, read_recordings
from headway_training.durable import replacing
from headway_training.errors import DataError, RecipeError
from headway_training.kinds import FileSettings, Labels, TaskKind
from headway_training.models import Model, build_model, make_configuration
from headway_training.models.own import FACTORY, MODULE, Factory, OwnModule, build_module
from headway_training.models.parts.attention import Kernel
from headway_training.recipes import Recipe
from headway_training.tokenizers import special_tokens, take_tokenizer, train_tokenizer
from headway_training.unread import takes_tokenizer

if TYPE_CHECKING:
    from headway_training.huggingface import ModelFolder

Metrics = dict[str, float | str]
Part = Literal["valid", "test"]
IGNORED = -100
"""A target that is not predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """Tensors of one optimizer step."""

    tensors: dict[str, Tensor]
    """By name; rows are the first axis of each. `targets` are int64, with `IGNORED` where nothing is predicted.

    Processes, and parts of a batch, take rows. A process that would have fewer rows than the others is given one more
    whose targets are all `IGNORED`: it must count for nothing in the loss and in what a model keeps of a batch."""
    num_units: int
    """Tokens or images, without padding, for the throughput."""

    def __post_init__(self) -> None:
        num_rows = len(self.tensors["targets"])
        others = {name: tuple(one.shape) for name, one in self.tensors.items() if one.shape[:1] != (num_rows,)}
        assert not others, f"rows are the first axis of every tensor: targets have {num_rows}, and others are {others}"

    @property
    def num_targets(self) -> int:
        """Predictions the loss is averaged over."""
        return int((self.tensors["targets"] != IGNORED).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """Data in the checkpoint on which the model can be measured again: texts or images."""

    texts: Iterable[Mapping[str, Any]] | None = None
    """Objects of `evaluation.jsonl`."""
    images: tuple[NDArray[np.uint8], NDArray[np.int64]] | None = None
    """(N, height, width, 3) pixels and (N,) labels."""
    arrays: Mapping[str, NDArray[Any]] | None = None
    """What a task of images without labels is measured on, by name."""


class Task(TaskKind, ABC):
    """Data, loss and metrics of one training run."""

    compares_rows: ClassVar[bool] = False
    """Whether the loss of a row depends on the other rows of its batch. The processes then gather what it needs of all
    rows (`headway_training.processes`), and a batch cannot be worked through in parts."""
    uses_all_weights: ClassVar[bool] = True
    """Whether every batch gives a gradient to every weight that is trained. Where some do not, the processes tell each
    other which weights have one."""

    in_order: ClassVar[str] = ""
    """Name of the tensor of tokens, (..., T), each predicted from those before it; empty: none is."""

    tokenizer: Tokenizer | None = None
    """The tokenizer; text only."""
    notes: tuple[str, ...] = ()
    """What is to be known of how the data is read, a sentence each."""
    _num_batches: int | None = None

    def __init__(self, recipe: Recipe, splits: Splits[Any]) -> None:
        self._recipe = recipe
        self._splits: Splits[Any] = splits

    @classmethod
    def variant(cls, train: Any) -> type[Task]:
        """The class that reads such training data: this one, or a subclass."""
        return cls

    @classmethod
    def make(cls, recipe: Recipe, splits: Splits[Any], folder: Path, source: ModelFolder | None) -> Task:
        """Makes it; arguments and errors are those of `make_task`."""
        return cls(recipe, splits)

    @property
    @abstractmethod
    def num_train_examples(self) -> int:
        """Examples of the training part: texts, pairs, images, or characters of a running text."""

    @abstractmethod
    def model_fields(self) -> dict[str, Any]:
        """Fields of the model's configuration that the data decides."""

    @abstractmethod
    def checkpoint_fields(self) -> dict[str, Any]:
        """Fields of the checkpoint's description that belong to the task."""

    @classmethod
    def run_module(cls, module: nn.Module, kernel: Kernel, *inputs: Tensor) -> Tensor:
        """Runs a module of the user's own on a batch's tensors, with a kernel for its attention -> logits."""
        answer: Tensor | Mapping[str, Tensor] = module(*inputs)
        return answer["logits"] if isinstance(answer, Mapping) else answer

    def model_section(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint says of the model of a recipe's section [model]: the fields of its configuration.

        Raises:
            ValueError: A field is unknown, missing or out of range.
        """
        values = {name: value for name, value in model.items() if name != "architecture"} | self.model_fields()
        if model["architecture"] == MODULE:
            return {FACTORY: values[FACTORY], **Factory(values[FACTORY]).arguments(values)}
        return make_configuration(model["architecture"], values).to_dict()

    def build(self, model: Mapping[str, Any]) -> Model:
        """Makes the model of a recipe's section [model], with fresh weights; errors are those of `model_section`."""
        section = self.model_section(model)
        if model["architecture"] == MODULE:
            return OwnModule(build_module(section), self.run_module)
        return build_model(model["architecture"], section)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the model's outputs; classifiers only."""
        return tuple(self.checkpoint_fields().get("labels", ()))

    def wrap(self, model: Model) -> Model:
        """What is trained: the model, or a module that holds it and what training alone needs."""
        return model

    def finished(self, model: nn.Module) -> nn.Module:
        """What a checkpoint holds of that which was trained: a model of the recipe's architecture."""
        return model.module if isinstance(model, OwnModule) else model

    def before_step(self, model: nn.Module, step: int, num_steps: int) -> None:
        """Prepares step `step` of `num_steps`, counted from 0; what it sets is a function of these alone."""

    def after_step(self, model: nn.Module, step: int, num_steps: int) -> None:
        """Follows the step's update of the weights; what it changes is in the model's state."""

    def num_batches(self, seed: int, epoch: int) -> int:
        """How many batches an epoch has: as many as the first, unless a task counts each."""
        if self._num_batches is None:
            self._num_batches = len(self.epoch_batches(seed, 0))
        return self._num_batches

    @abstractmethod
    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """The batches of one epoch, a function of its arguments alone."""

    @abstractmethod
    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Makes a batch's tensors, with random numbers from `generator`."""

    @abstractmethod
    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """Runs the model on a batch: (B, ..., classes), one prediction for each of its targets."""

    @abstractmethod
    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Measures the model, in evaluation mode, on a part of the data; `metric` is among the names."""

    def calibrate(self, model: nn.Module) -> None:
        """Fits, on the validation part, how logits become probabilities and decisions.

        Args:
            model: With its final weights, in evaluation mode.
        """

    @abstractmethod
    def measure_baseline(self) -> Baseline | None:
        """Fits a simple method to the training part and measures it on the test part; None if there is none."""

    @abstractmethod
    def evaluation_data(self) -> EvaluationData:
        """The test part, as the checkpoint carries it."""

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
        """The loss summed over the targets of these rows; summed over the processes, it is that of the batch.

        Random numbers that are not dropout's come with the batch, so that they are a row's own, whoever computes it.
        """
        return self.loss_of_logits(self.logits(model, tensors).float(), tensors["targets"], label_smoothing)

    def loss_of_logits(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy of logits, float (B, ..., classes), summed over their targets, (B, ...)."""
        return F.cross_entropy(
            logits.flatten(0, -2),
            targets.flatten(),
            ignore_index=IGNORED,
            label_smoothing=label_smoothing,
            reduction="sum",
        )

    def is_better(self, value: float, best: float | None) -> bool:
        """Whether a value of `metric` is better than the best so far."""
        return best is None or (value > best if self.higher_is_better else value < best)


class TextTask(Task):
    """A task whose model reads or writes text, with a tokenizer that is trained on the training part.

    Args of subclasses: a recipe, its data, the tokenizer, and the special tokens of a model folder where it has one.
    """

    tokenizer: Tokenizer

    @classmethod
    @abstractmethod
    def training_texts(cls, train: Any) -> Iterable[str]:
        """The texts of the training part."""

    @classmethod
    def marks(cls, recipe: Recipe, train: Any) -> Sequence[str]:
        """Tokens of the tokenizer that no text holds, such as those of languages."""
        return ()

    @classmethod
    def make(cls, recipe: Recipe, splits: Splits[Any], folder: Path, source: ModelFolder | None) -> Task:
        """As `Task.make`."""
        tokenizer = cls.make_tokenizer(recipe, splits.train, folder / TOKENIZER_FILE, source)
        make: Callable[..., Task] = cls
        return make(recipe, splits, tokenizer, *([] if source is None else [source.special_tokens]))

    @classmethod
    def make_tokenizer(cls, recipe: Recipe, train: Any, file: Path, source: ModelFolder | None) -> Tokenizer:
        """Reads the tokenizer from a run's file, or takes or trains it and writes it there.

        Raises:
            CheckpointError: That of the checkpoint which the recipe starts from cannot be taken.
        """
        if file.is_file():
            return Tokenizer.from_file(str(file))
        if source is not None:
            tokenizer = source.tokenizer
        elif recipe.init.checkpoint is not None and takes_tokenizer(recipe, recipe.init.checkpoint):
            tokenizer = take_tokenizer(recipe.init.checkpoint, recipe.task)
        else:
            texts, marks = cls.training_texts(train), cls.marks(recipe, train)
            tokenizer = train_tokenizer(texts, recipe.tokenizer, recipe.task, marks)
        with replacing(file) as staging:
            tokenizer.save(str(staging))
        return tokenizer


class ImageFolderTask(Task):
    """A task that reads a folder with a folder of images for each label, and the data sets of image classifiers."""

    data_of: ClassVar[tuple[str, ...]] = ("image_classification",)
    own_data: ClassVar[str] = "a folder with a folder of images for each label"

    @classmethod
    def read(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[Any, Labels]:
        """Reads the images of a folder, brought to the size of `preprocessing`."""
        return read_image_folder(Path(file), settings.preprocessing, labels)

    @classmethod
    def files_behind(cls, path: Path) -> list[Path]:
        """The images of a folder."""
        return [file for file, _ in find_images(path)] if path.is_dir() else [path]


class CaptionedImagesTask(Task):
    """A task that reads a table of images with captions."""

    own_data: ClassVar[str] = "a table with the columns `file`, an image's path, and `caption`"

    @classmethod
    def files_behind(cls, path: Path) -> list[Path]:
        """The table and its images."""
        return [path, *read_caption_table(path)]


class RecordingsTask(Task):
    """A task that reads a table of recordings."""

    own_data: ClassVar[str] = "a table with the columns `file`, a recording's path, `transcript` and `speaker`"
    columns: ClassVar[tuple[str, ...]] = SPOKEN
    """What the table must name of each recording."""

    @classmethod
    def read(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[Recordings, Labels]:
        """Reads the recordings of a table."""
        return read_recordings(Path(file), settings.sampling_rate, columns=cls.columns), ()

    @classmethod
    def check_own(cls, train: Any, valid: Any, test: Any) -> None:
        """The checkpoint carries the test part, so that it is to be short."""
        super().check_own(train, valid, test)
        if test.seconds > MOST_TEST_SECONDS:
            raise DataError(
                f"the test recordings are {test.seconds / 60:.0f} minutes long, and the checkpoint carries at most "
                f"{MOST_TEST_SECONDS // 60}; give fewer with --test"
            )

    @classmethod
    def files_behind(cls, path: Path) -> list[Path]:
        """The table and its recordings."""
        return [path, *(find_recordings(path) if path.is_file() else [])]


def check_head(recipe: Recipe, needed: str) -> None:
    """Checks what an encoder of texts answers: `sequence`, a whole text, or `token`.

    Raises:
        ValueError: It is the other.
    """
    head = recipe.model.get("head", "sequence")
    if head != needed and recipe.architecture == "encoder":
        raise ValueError(f"model.head is {head!r}; {recipe.task} needs {needed!r}")


class SpecialIds:
    """The ids of the special tokens of a tokenizer that has all four."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = special_tokens(tokenizer)
        pad, unk, bos, eos = self.tokens.pad, self.tokens.unk, self.tokens.bos, self.tokens.eos
        assert pad is not None and unk is not None and bos is not None and eos is not None  # noqa: PT018 (one fact)
        self.pad, self.unk, self.bos, self.eos = pad, unk, bos, eos


def language_token_id(tokenizer: Tokenizer, language: str) -> int:
    """The id of the token that a text in a language begins with.

    Raises:
        RecipeError: The tokenizer has none.
    """
    found = tokenizer.token_to_id(language_token(language))
    if found is None:
        raise RecipeError(
            f"the tokenizer has no token {language_token(language)}; start from a model of {language}, or from none"
        )
    return found


class Frame:
    """What stands around the tokens of a classifier's text, and fills up a batch.

    Args:
        tokenizer: Puts it there.
        tokens: Its special tokens; None: those of the kit's tokenizers.
        token_dropout: Share of tokens to hide.

    Raises:
        RecipeError: Tokens are to be hidden, and there is no unknown token to hide them behind.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: SpecialTokens | None = None, token_dropout: float = 0.0) -> None:
        self.tokens = tokens or special_tokens(tokenizer)
        assert self.tokens.pad is not None, "a classifier's tokenizer has one"
        self.pad = self.tokens.pad
        if token_dropout and self.tokens.unk is None:
            raise RecipeError(
                "augmentation.token_dropout hides tokens behind the unknown token, and the tokenizer has none; set it "
                "to 0"
            )
        self.unk = self.pad if self.tokens.unk is None else self.tokens.unk
        framed = tokenizer.encode("a")
        own = [i for i, mark in enumerate(framed.special_tokens_mask) if not mark]
        self.before, self.after = tuple(framed.ids[: own[0]]), tuple(framed.ids[own[-1] + 1 :])


def hide_tokens(input_ids: Tensor, mask: Tensor, rate: float, unknown: int, generator: torch.Generator) -> Tensor:
    """Replaces a share of the tokens, (B, T), by the unknown token."""
    if not rate:
        return input_ids
    hidden = (torch.rand(input_ids.shape, generator=generator) < rate) & mask.bool()
    return torch.where(hidden, unknown, input_ids)
