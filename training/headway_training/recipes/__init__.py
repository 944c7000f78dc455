"""Recipes: files that say how a model is trained, each with its command and its measured result."""

from headway_training.recipes.reader import list_recipes, make_recipe, parse_setting, read_recipe
from headway_training.recipes.reads import find_unread, refuse_unread, section_kinds
from headway_training.recipes.settings import (
    AugmentationSettings,
    ClassificationSettings,
    DataSettings,
    InitSettings,
    LoraSettings,
    OptimizationSettings,
    Recipe,
    TokenizerSettings,
)

__all__ = [
    "AugmentationSettings",
    "ClassificationSettings",
    "DataSettings",
    "InitSettings",
    "LoraSettings",
    "OptimizationSettings",
    "Recipe",
    "TokenizerSettings",
    "find_unread",
    "list_recipes",
    "make_recipe",
    "parse_setting",
    "read_recipe",
    "refuse_unread",
    "section_kinds",
]
