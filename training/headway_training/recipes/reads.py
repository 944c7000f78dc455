"""Which settings of a recipe the runs of each task read: all others are refused, so that none is set to no effect.

What is read on some data alone, or with some model, is told by `headway_training.unread`, which knows both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel

from headway_training.checkpoint import TaskName
from headway_training.errors import RecipeError
from headway_training.recipes.settings import OptimizationSettings, Recipe

_OF_SOME_TASKS = ("batch_size", "batch_tokens", "label_smoothing")
_EVERY_TASK = (
    *("name", "task", "description", "license", "tracker", "data", "model", "init", "lora", "result"),
    *(f"optimization.{name}" for name in OptimizationSettings.model_fields if name not in _OF_SOME_TASKS),
)
_ROWS = "optimization.batch_size"
_TOKENS = "optimization.batch_tokens"
_SMOOTHING = "optimization.label_smoothing"


def _augmentation(*names: str) -> tuple[str, ...]:
    return tuple(f"augmentation.{name}" for name in names)


_PHOTOGRAPHS = _augmentation("least_crop_area", "colour_change", "grey")
_OF_TASK: Mapping[TaskName, tuple[str, ...]] = MappingProxyType(
    {
        "generation": (
            *(_ROWS, _TOKENS, _SMOOTHING, "tokenizer", "sampling", "attention"),
            *_augmentation("subword_splitting"),
        ),
        "translation": (
            *(_TOKENS, _SMOOTHING, "tokenizer", "languages", "attention"),
            *_augmentation("subword_splitting"),
        ),
        "text_classification": (
            *(_TOKENS, _SMOOTHING, "tokenizer", "classification", "attention"),
            *_augmentation("token_dropout"),
        ),
        "token_classification": (
            *(_TOKENS, _SMOOTHING, "tokenizer", "attention"),
            *_augmentation("token_dropout", "subword_splitting", "join_texts"),
        ),
        "image_classification": (
            *(_ROWS, _SMOOTHING, "preprocessing", "attention"),
            *_augmentation("flip", "crop_padding"),
        ),
        "image_embedding": (
            *(_ROWS, "preprocessing", "distillation", "attention"),
            *_augmentation("flip"),
            *_PHOTOGRAPHS,
        ),
        "image_text_embedding": (
            *(_ROWS, _SMOOTHING, "tokenizer", "preprocessing", "attention"),
            *_augmentation("token_dropout", "white_background", "photograph_background", "coarse", "holes"),
            *_PHOTOGRAPHS,
        ),
        "segmentation": (_ROWS, "preprocessing", "segmentation", *_augmentation("coarse"), *_PHOTOGRAPHS),
        "captioning": (
            *(_ROWS, _SMOOTHING, "tokenizer", "preprocessing", "captioning"),
            *_augmentation("flip", "coarse", "holes"),
            *_PHOTOGRAPHS,
        ),
        "transcription": (
            *(_ROWS, _SMOOTHING, "tokenizer", "audio", "speech.language", "speech.least_source_share"),
            *("speech.join_share", "speech.silence_share", "speech.speed_change", "speech.gain_change"),
            *("speech.noise_share", "speech.hidden_bands", "speech.hidden_frames", "speech.alignment_share"),
        ),
        "autoencoding": (_ROWS, "preprocessing", *_augmentation("flip", "crop_padding")),
        "image_generation": (_ROWS, "tokenizer", "preprocessing", *_augmentation("flip", "crop_padding")),
        "audio_coding": (_ROWS,),
        "speech_synthesis": (
            *(_ROWS, _SMOOTHING, "tokenizer", "sampling", "speech.first_book_weight"),
            *_augmentation("join_texts", "other_speeds"),
        ),
    }
)


def reads_of(task: TaskName) -> tuple[str, ...]:
    """What runs of a task read: names of settings, `section.key` or, of whole sections, `section`."""
    return (*_EVERY_TASK, *_OF_TASK[task])


def find_unread(task: TaskName, given: Iterable[str]) -> dict[str, str]:
    """The settings that runs of a task do not read, each with what they read in its place.

    Args:
        task: The task.
        given: Settings, `section.key`; those that no recipe has are left to who checks names.
    """
    reads, kinds = reads_of(task), section_kinds()
    found = {}
    for key in sorted(given):
        section, _, name = key.partition(".")
        is_known = name in kinds[section].model_fields if section in kinds else section in Recipe.model_fields
        if not is_known or key in reads or section in reads:
            continue
        beside = [one for one in reads if one.startswith(f"{section}.")]
        if not name:
            found[key] = f"is not read for {task}"
        elif beside:
            found[key] = f"is not read for {task}, which reads {', '.join(one.partition('.')[2] for one in beside)}"
        else:
            known = sorted({one.partition(".")[0] for one in reads} & (kinds.keys() | {"model"}) - {"result"})
            found[key] = f"is not read for {task}, whose sections are {', '.join(known)}"
    return found


def refuse_unread(owner: str, found: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Refuses settings that nothing reads, but for those that are at their default.

    Args:
        owner: What the message begins with.
        found: The settings, each with why it is not read.
        values: The recipe's sections, as they were read.

    Raises:
        RecipeError: There is one of another value than its default.
    """
    wrong = {key: why for key, why in found.items() if not _is_default(key, values)}
    if wrong:
        told = "; ".join(f"{key} {why}" for key, why in wrong.items())
        out = " ".join(f"--set {key}=" for key in wrong)
        raise RecipeError(f"{owner}: {told}. Leave it out; what a recipe's file has is taken out by {out}")


def _is_default(key: str, values: Mapping[str, Any]) -> bool:
    section, _, name = key.partition(".")
    if section == "model":  # whose fields stand in recipes where they are not left to their defaults
        return False
    kind, value = (section_kinds()[section], values[section][name]) if name else (Recipe, values[section])
    field = kind.model_fields[name or section]
    return not field.is_required() and bool(value == field.default)


@cache
def section_kinds() -> Mapping[str, type[BaseModel]]:
    """The sections of a recipe, but for its model, which has the fields of its architecture."""
    kinds = {}
    for name, field in Recipe.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                kinds[name] = kind
    return MappingProxyType(kinds)
