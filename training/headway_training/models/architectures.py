"""The architectures by name: a decorator enters a model's class, and everything else is derived from the entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from headway_training.models.base import AttentionKind, Model
from headway_training.models.configuration import Configuration, nearest

AnyModel = TypeVar("AnyModel", bound=Model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture that can be trained."""

    model: Callable[[Any], Model]
    """The model's class, which is made of a configuration."""
    configuration: type[Configuration]
    """The class of its shape."""
    tasks: tuple[str, ...]
    """The tasks that it can be trained for."""
    shows_attention: bool
    """Whether its attention weights can be exported."""


_ENTRIES: dict[str, Architecture] = {}
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(_ENTRIES)
"""By name."""


def architecture(
    name: str, configuration: type[Configuration], *tasks: str, shows_attention: bool = True
) -> Callable[[type[AnyModel]], type[AnyModel]]:
    """Enters a model's class, which is made of its configuration alone, under a name.

    Args:
        name: As a recipe's `model.architecture` and a checkpoint have it.
        configuration: The class of its shape, which no other architecture has.
        tasks: The tasks that it can be trained for.
        shows_attention: Whether its attention weights can be exported.

    Raises:
        ValueError: Another class has the name or the configuration.
    """

    def enter(model: type[AnyModel]) -> type[AnyModel]:
        for taken, other in _ENTRIES.items():
            if taken == name or other.configuration is configuration:
                raise ValueError(
                    f"architecture {name!r} of {model.__qualname__}: {taken!r} has that name or configuration "
                    "already; give another"
                )
        _ENTRIES[name] = Architecture(
            model=model, configuration=configuration, tasks=tasks, shows_attention=shows_attention
        )
        return model

    return enter


def architectures_of(task: str) -> tuple[str, ...]:
    """The names of the architectures that can be trained for a task."""
    return tuple(sorted(name for name, one in ARCHITECTURES.items() if task in one.tasks))


def architecture_of(configuration: Configuration) -> str:
    """The name of the architecture that has such configurations."""
    return next(name for name, one in ARCHITECTURES.items() if one.configuration is type(configuration))


def find_architecture(name: str) -> Architecture:
    """Returns the architecture of that name.

    Raises:
        ValueError: there is none; the message names the most similar one.
    """
    if name not in ARCHITECTURES:
        raise ValueError(
            f"there is no architecture {name!r}; did you mean {nearest(name, ARCHITECTURES)!r}? "
            f"Known are {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def make_configuration(name: str, values: Mapping[str, object]) -> Configuration:
    """Makes the configuration of an architecture from fields by name.

    Raises:
        ValueError: the architecture or a field is unknown (the message names the most similar one), or out of range.
    """
    return find_architecture(name).configuration.from_dict(values)


def build_model(
    name: str, configuration: Mapping[str, object] | Configuration, *, attention: AttentionKind = "plain"
) -> Model:
    """Builds a model with fresh weights.

    Args:
        name: of the architecture, such as `gpt`.
        configuration: that architecture's configuration, or its fields by name.
        attention: the kernel, as `Model.use_attention` takes it; the recurrent model's attention has only one.

    Returns:
        The architecture's model, such as a `GPT`, in training mode.

    Raises:
        ValueError: the architecture, a field or a value is wrong; the message names it and the limit.
    """
    if isinstance(configuration, Configuration):
        configuration = configuration.to_dict()
    made = make_configuration(name, configuration)
    return find_architecture(name).model(made).use_attention(attention)
