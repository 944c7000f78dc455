"""Settings of a recipe that a run would not read, given its data and its model: they are refused by name.

What no run of the task reads is refused where a recipe is read (`recipes/reads.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headway_training.checkpoint import CHECKPOINT_FILE, HUGGINGFACE, is_model_folder, read_checkpoint
from headway_training.data.public import Dataset
from headway_training.data.sources import OwnData, find_dataset_of
from headway_training.errors import RecipeError
from headway_training.kinds import find_task
from headway_training.models import ARCHITECTURES
from headway_training.recipes import (
    DataSettings,
    Recipe,
    TokenizerSettings,
    find_unread,
    refuse_unread,
    section_kinds,
)


def shows_attention(architecture: str) -> bool:
    """True if the attention weights of an architecture can be exported."""
    return architecture in ARCHITECTURES and ARCHITECTURES[architecture].shows_attention


def check_settings(recipe: Recipe, own: OwnData | None) -> None:
    """Checks that a run reads all settings that a recipe's file and `--set` give.

    Args:
        recipe: The recipe.
        own: The user's own files; None: the recipe's data set.

    Raises:
        RecipeError: There is a setting that it does not read; names it, and why.
        CheckpointError: The checkpoint that the run starts from cannot be read.
    """
    found = find_unread_of_run(recipe, own)
    values = {**recipe.model_dump(), "model": recipe.model}
    refuse_unread(recipe.name, {key: found[key] for key in sorted(found.keys() & recipe.given)}, values)


def find_unread_of_run(recipe: Recipe, own: OwnData | None) -> dict[str, str]:
    """The settings, `section.key`, that a run does not read, each with why; arguments as in `check_settings`."""
    dataset = None if own is not None else find_dataset_of(recipe)
    every = (f"{section}.{name}" for section, kind in section_kinds().items() for name in kind.model_fields)
    found = find_unread(recipe.task, (*every, "attention"))
    found |= dict(_of_data(recipe, dataset))
    found |= dict(_of_tokenizer(recipe))
    found |= dict(_of_model(recipe))
    return found | dict(find_task(recipe.task).unread(recipe, own, dataset))


def check_decided(recipe: Recipe, decided: dict[str, object]) -> None:
    """Checks that a recipe says no other than the data does of its model.

    Args:
        recipe: The recipe.
        decided: Fields of the model's configuration that the data decides.

    Raises:
        RecipeError: It does.
    """
    for name, value in decided.items():
        if f"model.{name}" in recipe.given and recipe.model[name] != value:
            raise RecipeError(
                f"{recipe.name}: model.{name} is {recipe.model[name]!r}, and the data makes it {value!r}; leave it out"
            )


def _of_data(recipe: Recipe, dataset: Dataset | None) -> Iterator[tuple[str, str]]:
    """What is not read on the run's data: the user's own, or a data set."""
    if dataset is None:
        for key in (*(f"data.{name}" for name in DataSettings.model_fields), *find_task(recipe.task).of_data_sets):
            yield key, "is not read, as the data is that of --train, --valid and --test"
    else:
        reads = ("dataset", *dataset.settings(recipe.data))
        for name in DataSettings.model_fields:
            if name not in reads:
                known = ", ".join(f"data.{one}" for one in reads)
                yield f"data.{name}", f"is not read by the data set {dataset.name}, which reads {known}"
        for name in ("multi_label", "label_separator", "text_pairs"):
            yield f"classification.{name}", "is not read by a data set, which has a text and a label; it is for --train"
    if not recipe.classification.multi_label:
        yield "classification.label_separator", "is not read without classification.multi_label=true"


def _of_tokenizer(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """All settings of a tokenizer, if the run trains none."""
    start, why = recipe.init.checkpoint, ""
    if start is not None and _is_there(start) and takes_tokenizer(recipe, start):
        why = f"the tokenizer is that of {start}"
    for name in TokenizerSettings.model_fields if why else ():
        yield f"tokenizer.{name}", f"is not read, as {why}"


def _is_there(start: Path) -> bool:
    return is_model_folder(start) or (start / CHECKPOINT_FILE).is_file()  # else the run is refused for that


def takes_tokenizer(recipe: Recipe, start: Path) -> bool:
    """True if a run that starts from a folder reads texts as its model did.

    Raises:
        CheckpointError: The folder holds no checkpoint.
    """
    if is_model_folder(start):
        return True
    return not (find_task(recipe.task).has_own_tokens and read_checkpoint(start).task != recipe.task)


def _of_model(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What the recipe's model does not read."""
    if not shows_attention(recipe.architecture):
        yield "attention", f"is not read, as the attention weights of {recipe.architecture!r} cannot be looked at"
    folder = find_task(recipe.task).folder
    if recipe.architecture == HUGGINGFACE and folder is not None and folder.reads_images:
        yield "model.max_length", "is not read by a model of images"
