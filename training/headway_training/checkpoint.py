"""A checkpoint: what a training run leaves and the exporter reads (docs/checkpoint.md).

The description is `checkpoint.json`, a `Checkpoint`; the weights, the tokenizer and the evaluation data lie beside it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights
from tokenizers import Tokenizer
from torch import nn

from headway_training.errors import CheckpointError
from headway_training.kinds import find_task, metric_names
from headway_training.models import build_model, find_architecture
from headway_training.models.own import MODULE, build_module, import_own

_NAMES_SHOWN = 20
"""Of tensors that are not loaded, in the line that says so."""
SCHEMA_VERSION = 1
CHECKPOINT_FILE = "checkpoint.json"
HUGGINGFACE = "huggingface"
"""Architecture of a checkpoint, or of a recipe's model, that is a model folder of `transformers`."""
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
TEXT_EVALUATION_FILE = "evaluation.jsonl"
IMAGE_EVALUATION_FILE = "evaluation.npz"


def _check_task_name(name: str) -> str:
    find_task(name)
    return name


def _check_metric(name: str) -> str:
    if name not in (known := metric_names()):
        raise ValueError(f"{name!r} is the metric of no task; these are: {', '.join(sorted(known))}")
    return name


TaskName = Annotated[str, AfterValidator(_check_task_name)]
"""A name that a task is registered under (`headway_training.kinds`)."""
TextPairUse = Literal["never", "optional", "required"]
"""Whether a text model reads two texts as one input: never, if a second one is given, or always."""
Scalar = str | int | float | bool | None
"""A value of a model's configuration."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$")]
"""A model's name in a store: 1 to 64 of a-z, 0-9, dot, underscore and hyphen, a letter or digit at both ends."""


class Record(BaseModel):
    """Base of checkpoints' and recipes' parts: immutable, with unknown keys and infinite numbers refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SpecialTokens(Record):
    """Ids of the special tokens; None for one that the model does not have."""

    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    unk: int | None = None


class ImagePreprocessing(Record):
    """How an image becomes pixels (`headway_training.data.images`); the fields are those of a bundle's."""

    height: int = Field(ge=1)
    width: int = Field(ge=1)
    resize: Literal["stretch", "shorter_side"] = "stretch"
    resize_size: int | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @model_validator(mode="after")
    def _check_resize_size(self) -> ImagePreprocessing:
        """Checks that a crop fits into the resized image."""
        least = max(self.height, self.width)
        if self.resize == "shorter_side" and (self.resize_size is None or self.resize_size < least):
            raise ValueError(
                f"resize_size is {self.resize_size}; resize 'shorter_side' needs at least {least}, "
                "the larger of height and width"
            )
        if self.resize == "stretch" and self.resize_size is not None:
            raise ValueError(f"resize_size is {self.resize_size}; it is for resize 'shorter_side', leave it out")
        return self


class AudioPreprocessing(Record):
    """How audio becomes a log-mel spectrogram (`headway_training.data.audio`); the fields are those of a bundle's."""

    sampling_rate: int = Field(ge=1000, le=192_000)
    """Samples of mono audio a second."""
    num_mel_bins: int = Field(ge=1, le=1024)
    """Numbers of a frame."""
    fft_size: int = Field(ge=2, le=65_536)
    """Samples of a Fourier transform."""
    hop_length: int = Field(ge=1)
    """Samples from one frame to the next."""
    num_frames: int = Field(ge=2)
    """Frames of a window, which the model hears at once."""
    max_frequency: float = Field(gt=0)
    """Where the filters end, in hertz."""

    @property
    def window_samples(self) -> int:
        """Samples of a window."""
        return self.num_frames * self.hop_length

    @model_validator(mode="after")
    def _check_sizes(self) -> AudioPreprocessing:
        """Checks that frames lie within a window, and filters within what the rate can hold."""
        if not self.hop_length <= self.fft_size <= self.window_samples:
            raise ValueError(
                f"fft_size is {self.fft_size}; it must be at least hop_length, {self.hop_length}, and at most a window "
                f"of {self.window_samples} samples"
            )
        if self.max_frequency > self.sampling_rate / 2:
            raise ValueError(
                f"max_frequency is {self.max_frequency:g}; {self.sampling_rate} samples a second hold at most "
                f"{self.sampling_rate / 2:g} hertz"
            )
        return self


class Classification(Record):
    """How a classifier's logits become probabilities, and which labels apply."""

    kind: Literal["single_label", "multi_label"] = "single_label"
    """`single_label`: softmax, and the likeliest label applies. `multi_label`: a sigmoid for each label."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits; fitted on validation data (`headway_training.calibration`)."""
    thresholds: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """Probability from which each label applies, chosen on validation data; multi_label only."""


class Languages(Record):
    """BCP 47 codes of a translation model."""

    source: str
    target: str


class SamplingDefaults(Record):
    """Parameters of a generation request that sets none."""

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class Evaluation(Record):
    """The evaluation data in the checkpoint, and the metric to measure on it."""

    file: str
    dataset: str
    metric: Annotated[str, AfterValidator(_check_metric)]
    higher_is_better: bool


class Baseline(Record):
    """The figure of a simple method on the same test data."""

    name: str
    metric: str
    value: float


class TrainingRecord(Record):
    """How the weights were trained, for the model card; keys that other versions write are ignored."""

    model_config = ConfigDict(extra="ignore")

    recipe: str
    command: str
    seed: int
    step_count: int
    epoch_count: float
    wall_time_s: float
    hardware: str
    libraries: dict[str, str]
    train_dataset: str
    train_example_count: int
    dataset_license: str
    dataset_home: str
    metrics: dict[str, float | str]
    """Measured on the test data, by name; a metric's own signature is a string, such as `sacrebleu_signature`."""
    baseline: Baseline | None
    history: tuple[dict[str, float], ...] = ()
    """One entry a validation: `step`, `train_loss` and the validation metrics."""


class Checkpoint(Record):
    """`checkpoint.json`."""

    schema_version: Literal[1] = 1
    modules: tuple[str, ...] = ()
    """Python modules outside this package that register the task or the architecture."""
    name: Name
    task: TaskName
    description: str
    license: str
    architecture: str
    """A name of `ARCHITECTURES`. `huggingface`: the folder is one of `transformers` too, and has its configuration.
    `module`: what `configuration` names, a `factory` and its arguments, makes it."""
    configuration: dict[str, Scalar]
    special_tokens: SpecialTokens | None = None
    labels: tuple[str, ...] = ()
    classification: Classification | None = None
    """None: single_label, with a temperature of 1."""
    text_pairs: TextPairUse = "never"
    image_preprocessing: ImagePreprocessing | None = None
    audio_preprocessing: AudioPreprocessing | None = None
    languages: Languages | None = None
    language_tokens: dict[str, int] = {}
    """Each language of captions or of speech, with the token that the decoder reads after `bos`."""
    sampling_defaults: SamplingDefaults | None = None
    attention: bool = False
    """Whether its exports write the graph of the attention weights too, unless told otherwise."""
    evaluation: Evaluation | None = None
    training: TrainingRecord | None = None

    @property
    def reads_text(self) -> bool:
        """Whether it has a tokenizer."""
        return self.special_tokens is not None

    @field_validator("architecture")
    @classmethod
    def _check_architecture(cls, name: str) -> str:
        if name not in (HUGGINGFACE, MODULE):
            find_architecture(name)
        return name

    @model_validator(mode="after")
    def _check_task(self) -> Checkpoint:
        """Checks that the parts the task needs are there."""
        find_task(self.task).check_description(self)
        if self.classification is not None:
            needed = len(self.labels) if self.classification.kind == "multi_label" else 0
            if len(self.classification.thresholds) != needed:
                raise ValueError(
                    f"classification.thresholds: there are {len(self.classification.thresholds)}; "
                    f"{self.classification.kind} with {len(self.labels)} labels needs {needed}"
                )
        return self


def write_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    model: nn.Module,
    *,
    tokenizer: Tokenizer | None = None,
    texts: Iterable[Mapping[str, Any]] | None = None,
    images: tuple[NDArray[np.uint8], NDArray[np.int64]] | None = None,
    arrays: Mapping[str, NDArray[Any]] | None = None,
    write_weights: Callable[[Path], None] | None = None,
) -> None:
    """Writes a checkpoint, or replaces the one that is there: readers see the old one or the new one, never a part.

    Args:
        folder: Its folder; parents are made.
        checkpoint: The description.
        model: The module whose weights are stored, as fp32.
        tokenizer: The tokenizer, for text.
        texts: The objects of `evaluation.jsonl`.
        images: (N, height, width, 3) pixels and (N,) labels of `evaluation.npz`.
        arrays: What `evaluation.npz` holds instead, by name.
        write_weights: Writes weights and tokenizer into a folder, in place of the above.
    """
    staging = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        (staging / CHECKPOINT_FILE).write_text(checkpoint.model_dump_json(indent=2) + "\n", encoding="utf-8")
        if write_weights is not None:
            write_weights(staging)
        else:
            save_weights(model.float(), str(staging / WEIGHTS_FILE))
            if tokenizer is not None:
                tokenizer.save(str(staging / TOKENIZER_FILE))
        if texts is not None:
            lines = (json.dumps(dict(example), ensure_ascii=False) + "\n" for example in texts)
            (staging / TEXT_EVALUATION_FILE).write_text("".join(lines), encoding="utf-8")
        if images is not None:
            arrays = {"images": images[0], "labels": images[1]}
        if arrays is not None:
            np.savez_compressed(staging / IMAGE_EVALUATION_FILE, allow_pickle=False, **arrays)
        _replace_folder(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace_folder(staging: Path, folder: Path) -> None:
    """Renames `staging` to `folder`; a folder that is already there is moved aside first, and removed afterwards."""
    aside = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
    if folder.exists():
        folder.rename(aside)
    staging.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads and checks the description of the checkpoint in the folder `path`.

    Raises:
        CheckpointError: There is no checkpoint, it has another schema, a field is wrong or a file is missing.
    """
    file = path / CHECKPOINT_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{path} is not a checkpoint: it holds no {CHECKPOINT_FILE}. "
            f"`headway-train run` leaves one in <output>/checkpoint.{_hint_below(path)}"
        )
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{file} has schema version {version!r}; this version of headway reads {SCHEMA_VERSION}. "
            "Train again, or use the version that wrote it."
        )
    try:
        for module in content.get("modules", ()):
            import_own(str(module))
        checkpoint = Checkpoint.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{file} is not a valid checkpoint: {_describe(error)}") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: modules: {error}") from error
    _check_files(path, checkpoint)
    return checkpoint


def _hint_below(path: Path) -> str:
    """Names the checkpoint below the folder, in case the folder of a run was named."""
    return f" Did you mean {path / 'checkpoint'}?" if (path / "checkpoint" / CHECKPOINT_FILE).is_file() else ""


def _describe(error: ValidationError) -> str:
    """One line for pydantic's findings."""
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'checkpoint'}: {item['msg']}" for item in error.errors())


def _check_files(path: Path, checkpoint: Checkpoint) -> None:
    """Checks that every file that the description needs is there."""
    needed = [] if checkpoint.architecture == HUGGINGFACE else [WEIGHTS_FILE]  # which may be in shards
    if checkpoint.reads_text:
        needed.append(TOKENIZER_FILE)
    if checkpoint.evaluation is not None:
        needed.append(checkpoint.evaluation.file)
    missing = [name for name in needed if not (path / name).is_file()]
    if missing:
        raise CheckpointError(f"{path} is incomplete: {', '.join(missing)} is missing. Copy the whole folder.")


def load_model(path: Path) -> tuple[nn.Module, Checkpoint]:
    """Builds the model of the checkpoint in the folder `path` and loads its weights.

    Returns:
        The module, fp32, on the CPU and in evaluation mode, and the checkpoint's description.

    Raises:
        CheckpointError: As `read_checkpoint`; or the configuration or the weights do not fit the architecture.
    """
    checkpoint = read_checkpoint(path)
    if checkpoint.architecture == HUGGINGFACE:
        raise CheckpointError(f"{path} holds a model of transformers, which transformers loads")
    try:
        model = (
            build_module(checkpoint.configuration)
            if checkpoint.architecture == MODULE
            else build_model(checkpoint.architecture, dict(checkpoint.configuration))
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path / CHECKPOINT_FILE}: configuration: {error}") from error
    try:
        load_weights(model, path / WEIGHTS_FILE)
    except (RuntimeError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{path / WEIGHTS_FILE} does not fit the configuration: {error}") from error
    return model.eval(), checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWeights:
    """What `load_matching_weights` found, by the names of tensors."""

    loaded: tuple[str, ...]
    """In the model and in the checkpoint, of one shape."""
    missing: tuple[str, ...]
    """In the model alone: they stay as they are."""
    unexpected: tuple[str, ...]
    """In the checkpoint alone: they are left out."""
    reshaped: tuple[str, ...]
    """In both with different shapes, which follow the name: they stay as they are in the model."""
    other_labels: tuple[str, ...] = ()
    """Of the last layer, for other labels: they stay as they are in the model."""

    def describe(self) -> str:
        """A line for each kind that there is."""
        kinds = (
            ("not in the checkpoint, so they start fresh", self.missing),
            ("of another shape in the checkpoint, so they start fresh", self.reshaped),
            ("for other labels in the checkpoint, so they start fresh", self.other_labels),
            ("in the checkpoint alone, so they are left out", self.unexpected),
        )
        lines = [f"  {what}: {_shortened(names)}" for what, names in kinds if names]
        return "\n".join([f"{len(self.loaded)} tensors are loaded", *lines])


def _shortened(names: Sequence[str]) -> str:
    """Names, or the first of them and how many more there are."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


@torch.no_grad()
def load_matching_weights(model: nn.Module, path: Path, labels: Sequence[str] = ()) -> LoadedWeights:
    """Copies into a model the weights of the checkpoint in the folder `path` that have its names and shapes.

    Where the checkpoint has other labels than `labels`, its last layer is left out.

    Raises:
        CheckpointError: As `read_checkpoint`; the weights cannot be read, or no matrix of them fits.
    """
    checkpoint = read_checkpoint(path)
    try:
        stored = load_file(path / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path / WEIGHTS_FILE} cannot be read: {error}") from error
    own = model.state_dict()
    common = [name for name in own if name in stored]
    same = [name for name in common if own[name].shape == stored[name].shape]
    others = [name for name in same if _is_head(name)] if tuple(labels) != checkpoint.labels else []
    loaded = [name for name in same if name not in others]
    for name in loaded:
        own[name].copy_(stored[name])
    if not any(own[name].ndim > 1 for name in loaded):
        raise CheckpointError(
            f"{path}: none of its matrices ({checkpoint.architecture}) has a name and shape of the model's"
        )
    filled = {own[name].data_ptr() for name in loaded}  # a tied weight is stored under one of its names
    return LoadedWeights(
        loaded=tuple(loaded),
        missing=tuple(name for name in own if name not in stored and own[name].data_ptr() not in filled),
        unexpected=tuple(name for name in stored if name not in own),
        other_labels=tuple(others),
        reshaped=tuple(
            f"{name} {tuple(stored[name].shape)} in place of {tuple(own[name].shape)}"
            for name in common
            if own[name].shape != stored[name].shape
        ),
    )


def _is_head(name: str) -> bool:
    """True of the last layer of the kit's classifiers."""
    return name.startswith(("head.output.", "output."))


def is_model_folder(path: Path) -> bool:
    """True if a folder is one of `transformers`."""
    return (path / "config.json").is_file()


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads the tokenizer of the checkpoint in the folder `path`.

    Raises:
        CheckpointError: The file is missing or is no tokenizer.
    """
    file = path / TOKENIZER_FILE
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
