"""Recipes: files that say how a model is trained, each with its command and what was measured."""

from headway_training.recipes.reader import list_recipes, read_recipe
from headway_training.recipes.settings import (
    AugmentationSettings,
    ClassificationSettings,
    DataSettings,
    OptimizationSettings,
    Recipe,
    TaskName,
    TokenizerSettings,
)

__all__ = [
    "AugmentationSettings",
    "ClassificationSettings",
    "DataSettings",
    "OptimizationSettings",
    "Recipe",
    "TaskName",
    "TokenizerSettings",
    "list_recipes",
    "read_recipe",
]
