"""The tasks by name, and what is known of each before its data is read.

A task is one class (`tasks/`), which the decorator `register` enters here. Recipes and their checks, readers of files,
tokenizers, checkpoints and model folders derive what depends on the task from it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from headway_training.errors import DataError

ROWS, TOKENS, SMOOTHING = "optimization.batch_size", "optimization.batch_tokens", "optimization.label_smoothing"


def augmentation(*names: str) -> tuple[str, ...]:
    """The names of settings of the section `augmentation`."""
    return tuple(f"augmentation.{name}" for name in names)


PHOTOGRAPHS = augmentation("least_crop_area", "colour_change", "grey")
"""Settings by which photographs are changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderKind:
    """What models of `transformers` can be trained for a task."""

    auto_class: str
    """The library's class that makes them."""
    model_types: str
    """The library's table of the model types that have such a model."""
    inputs: tuple[str, ...]
    """Names of the tensors that the task gives, in their order."""
    noun: str
    """What such a model is called."""
    heads: tuple[str, ...] = ()
    """Ends of the library's classes, of which a folder must hold one with all weights; none: a head may be new."""

    @property
    def reads_images(self) -> bool:
        """True if it has an image processor, and no tokenizer."""
        return "pixel_values" in self.inputs

    @property
    def needs_padding(self) -> bool:
        """True if texts of several lengths are one batch, which a token fills up."""
        return "attention_mask" in self.inputs


Labels = tuple[str, ...]
"""Names of labels, in the order of their indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """What a recipe says of the files of the user's own data."""

    classification: Any
    """`ClassificationSettings`: what the rows of a text classifier hold."""
    preprocessing: Any = None
    """`ImagePreprocessing` with the size of images; None: there are none."""
    sampling_rate: int | None = None
    """Samples a second that recordings are brought to; None: those of the first one."""


class TaskKind:
    """What a task declares of itself. A class that is not registered is a base, or a variant for other data."""

    name: ClassVar[str]
    """As recipes and checkpoints have it."""
    unit: ClassVar[Literal["tokens", "images", "clips", "windows"]]
    """What the throughput counts."""
    metric: ClassVar[str]
    """What the best weights are selected by."""
    higher_is_better: ClassVar[bool]
    """Whether more of it is better."""
    evaluation_metric: ClassVar[str] = ""
    """What an exporter measures on the checkpoint's evaluation data; empty: `metric`."""
    more_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics of its variants for other data."""

    settings: ClassVar[tuple[str, ...]]
    """The settings of a recipe that runs read beside those that all tasks read: `section.key`, or a whole section."""
    sections: ClassVar[tuple[str, ...]] = ()
    """Sections without defaults that a recipe must have."""
    starts_from: ClassVar[str] = ""
    """What the checkpoint is that a run has to start from, and why; empty: a run may start from none."""
    described: ClassVar[tuple[str, ...]] = ()
    """Fields that a checkpoint's description must have."""
    folder: ClassVar[FolderKind | None] = None
    """Which model folders of `transformers` can be trained; None: none."""
    takes_modules: ClassVar[bool] = False
    """Whether modules of the user's own can be trained (`docs/bring-your-own.md`)."""

    data_of: ClassVar[tuple[str, ...]] = ()
    """Names of the tasks whose data sets are read; none: its own."""
    own_data: ClassVar[str] = ""
    """What --train, --valid and --test name, in words; empty: nothing, the task reads its own data sets alone."""
    of_data_sets: ClassVar[tuple[str, ...]] = ()
    """Settings that are read of its data sets alone, beside the section `data`: own data takes their place too."""
    sentence: ClassVar[str] = "Is trained for a task of one's own"
    """What a model on own data does, without a full stop; `{count}` and `{labels}` stand for its labels."""

    frame: ClassVar[str] = "<bos> $A <eos>"
    """What stands around a text's tokens; empty: nothing, and the tokenizer has no special tokens."""
    has_own_tokens: ClassVar[bool] = False
    """Whether the tokenizer of another task's checkpoint cannot be taken."""

    @classmethod
    def check_recipe(cls, recipe: Any) -> None:
        """Checks a `Recipe` further than its fields' ranges.

        Raises:
            ValueError: Something is missing or does not fit together.
        """
        for section in cls.sections:
            if getattr(recipe, section) is None:
                raise ValueError(f"the section [{section}] is missing; {cls.name} needs it")
        if cls.starts_from and recipe.init.checkpoint is None:
            raise ValueError(f"{cls.name} {cls.starts_from}, and give its checkpoint with --init FOLDER")

    @classmethod
    def check_description(cls, checkpoint: Any) -> None:
        """Checks a `Checkpoint` further than its fields' ranges.

        Raises:
            ValueError: Something is missing or does not fit together.
        """
        for field in cls.described:
            if not getattr(checkpoint, field):
                raise ValueError(f"{field}: {cls.name} needs {'them' if field.endswith('s') else 'it'}")

    @classmethod
    def unread(cls, recipe: Any, own: Any, dataset: Any) -> Iterator[tuple[str, str]]:
        """The settings, `section.key`, that a run does not read for its data or its model, each with why.

        Args:
            recipe: The `Recipe`.
            own: The user's files, `OwnData`; None: the data set.
            dataset: The recipe's public `Dataset`; None: the user's files.
        """
        yield from ()

    @classmethod
    def read(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[Any, Labels]:
        """Reads a part of the user's own data: the examples, and the labels, of which tasks without labels have none.

        Args:
            file: A file, two files with a comma between them, or a folder.
            labels: Known labels in the order of their indices; None: those of the file.
            settings: What the recipe says of it.

        Raises:
            DataError: Data is missing or malformed, a label is not known, or the task reads no files of the user's.
        """
        raise DataError(f"{cls.name} reads its own data set; leave out --train, --valid and --test")

    @classmethod
    def sampling_rate(cls, recipe: Any) -> int | None:
        """Samples a second that a run's recordings are brought to; None: it has none.

        Raises:
            ValueError: The recipe's model cannot be made.
            CheckpointError: The checkpoint that the run starts from cannot be read.
        """
        return None

    @classmethod
    def check_own(cls, train: Any, valid: Any, test: Any) -> None:
        """Checks that the parts of the user's own data belong together.

        Raises:
            DataError: They do not.
        """
        if any(type(part) is not type(train) for part in (valid, test)):
            raise DataError(f"--train, --valid and --test must be of one form: each {cls.own_data}")

    @classmethod
    def read_own(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[Any, Labels]:
        """As `read`, of data to train on."""
        return cls.read(file, labels, settings)

    @classmethod
    def files_behind(cls, path: Path) -> Iterable[Path]:
        """All files that a file or folder of the user's data stands for."""
        return [path]

    @classmethod
    def describe_own(cls, file: str, labels: Labels, source: str) -> str:
        """One sentence about a model that is trained on the user's data.

        Args:
            file: The training data.
            labels: Its labels.
            source: The training data in words.
        """
        shown = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
        return f"{cls.sentence.format(count=len(labels), labels=shown)}; trained on {source}."


AnyKind = TypeVar("AnyKind", bound=TaskKind)
_KINDS: dict[str, type[TaskKind]] = {}


def register(kind: type[AnyKind]) -> type[AnyKind]:
    """Enters a task's class under its name.

    Raises:
        ValueError: Another class has the name.
    """
    if kind.name in _KINDS:
        raise ValueError(f"task {kind.name!r} of {kind.__qualname__}: {_KINDS[kind.name].__qualname__} has that name")
    _KINDS[kind.name] = kind
    return kind


def task_names() -> tuple[str, ...]:
    """The names of all tasks."""
    import_module("headway_training.tasks")  # which registers those of the package; it stands above this module
    return tuple(_KINDS)


def find_task(name: str) -> type[TaskKind]:
    """Returns the task of that name.

    Raises:
        ValueError: There is none; the message names the nearest.
    """
    known = task_names()
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"there is no task {name!r}; did you mean {nearest!r}? Known are {', '.join(known)}")
    return _KINDS[name]


def metric_names() -> set[str]:
    """The names of the metrics of all tasks."""
    kinds = [find_task(name) for name in task_names()]
    return {one for kind in kinds for one in (kind.metric, kind.evaluation_metric, *kind.more_metrics) if one}
