"""Modules of the user's own: found by name, made with arguments, and trained as the kit's models are.

A factory is named `package.module:function`, as `headway-export --model` has it (docs/bring-your-own.md). A checkpoint
names one too, and who reads a checkpoint may not know who wrote it: so a factory is a class of modules, or a function
that says of itself that it returns one, and never whatever else can be imported.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from headway_training.factory import DEFAULT_FUNCTION, FORM, check_factory
from headway_training.models.base import Model
from headway_training.models.configuration import nearest

MODULE = "module"
"""Architecture of a recipe's model, or of a checkpoint, that is a module of the user's own."""
FACTORY = "factory"
"""The field of such a model that names its factory."""
_CALLERS = frozenset(("headway_export", "headway_training", "importlib"))
"""Packages that import and call what is the user's."""
_KINDS = (bool, int, float, str)

RunModule = Callable[..., Tensor]
"""Runs a module for a task, with a kernel for its attention, on the task's tensors -> logits."""


def import_own(name: str) -> ModuleType:
    """Imports the Python module of `package.module` or `package.module:function`, from the folder at hand first.

    Raises:
        ValueError: It cannot be imported.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return import_module(name.partition(":")[0])
    except ModuleNotFoundError as error:
        if error.name and f"{name.partition(':')[0]}.".startswith(f"{error.name}."):
            raise ValueError(f"{name}: {error}; {FORM}") from error
        raise ValueError(f"{name}: {raised(error)}") from error
    except (Exception, SystemExit) as error:  # whatever its code raises
        raise ValueError(f"{name}: {raised(error)}") from error
    finally:
        sys.path.remove(here)  # the first of that name, wherever the module has put others


def find_factory(name: str) -> Callable[..., Any]:
    """Finds what `package.module:function` names; the function is `build` where none is named.

    Raises:
        ValueError: There is no such module or function.
    """
    check_factory(name)
    module, function = import_own(name), name.partition(":")[2] or DEFAULT_FUNCTION
    found: Any = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"{name}: {module.__name__} has no function {function!r}; {FORM}")
    return found  # type: ignore[no-any-return]  # told by `callable`


def raised(error: BaseException) -> str:
    """Says what code of the user's raised, and where: the last line of it, if the error came from a line at all."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):  # says its file and line itself
        return told
    places = [
        place
        for place in traceback.extract_tb(error.__traceback__)
        if not place.filename.startswith("<") and _CALLERS.isdisjoint(Path(place.filename).parts)
    ]
    return f"{told} ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else told


@dataclasses.dataclass(frozen=True, slots=True)
class Factory:
    """A factory whose module can be trained, and made again from a checkpoint.

    Args:
        name: `package.module:function`.

    Raises:
        ValueError: There is none, it does not say that it returns a module, or a parameter of it has no default.
    """

    name: str
    make: Callable[..., Any] = dataclasses.field(init=False)
    parameters: tuple[str, ...] = dataclasses.field(init=False)
    """What it can be given, by name."""

    def __post_init__(self) -> None:
        make = find_factory(self.name)
        if not _returns_module(make):
            raise ValueError(
                f"{self.name}: does not say that it returns a torch.nn.Module; write it as a class of modules, or "
                "with `-> nn.Module`, since an export calls it by the word of a checkpoint alone"
            )
        parameters = inspect.signature(make).parameters
        named = [one for one in parameters.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        if bare := [one.name for one in named if one.default is one.empty]:
            raise ValueError(
                f"{self.name}: its parameter {bare[0]} has no default; give it one, as a factory is called without "
                "arguments too"
            )
        object.__setattr__(self, "make", make)
        object.__setattr__(self, "parameters", tuple(one.name for one in named))

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of some values that are its parameters."""
        return {name: value for name, value in values.items() if name in self.parameters}

    def check(self, names: Mapping[str, Any]) -> None:
        """Checks what it is asked to be given.

        Raises:
            ValueError: It has no such parameter, or a value is neither a number, a word nor true or false.
        """
        for name, value in names.items():
            if name not in self.parameters:
                known = dict.fromkeys(self.parameters)
                hint = f"; did you mean {nearest(name, known)!r}?" if known else ""
                raise ValueError(f"{self.name} has no parameter {name!r}{hint} It has {', '.join(known) or 'none'}")
            if not isinstance(value, _KINDS):
                raise ValueError(f"{name} must be a number, a word, true or false, and is {value!r}")

    def build(self, values: Mapping[str, Any]) -> nn.Module:
        """Makes the module with those of some values that are its parameters.

        Raises:
            ValueError: It makes no module.
        """
        try:
            module = self.make(**self.arguments(values))
        except (Exception, SystemExit) as error:  # whatever its code raises
            raise ValueError(f"{self.name}: {raised(error)}") from error
        if not isinstance(module, nn.Module):
            raise ValueError(f"{self.name} returned {type(module).__name__}; it must return a torch.nn.Module")
        return module


def build_module(configuration: Mapping[str, Any]) -> nn.Module:
    """Makes the module that a checkpoint's configuration describes: its `factory`, and the arguments of that.

    Raises:
        ValueError: There is no such factory, or it does not take the arguments.
    """
    values = dict(configuration)
    factory = Factory(str(values.pop(FACTORY, "")))
    factory.check(values)
    return factory.build(values)


class OwnModule(Model):
    """A module of the user's own, called as the kit's models are; what it offers beyond is found on it too.

    Args:
        module: The module.
        run: How it is run for the task.
    """

    def __init__(self, module: nn.Module, run: RunModule) -> None:
        super().__init__()
        self.module = module
        self._run = run

    def forward(self, *inputs: Tensor) -> Tensor:
        """The tensors of a task -> logits."""
        return self._run(self.module, self.kernel, *inputs)

    def __getattr__(self, name: str) -> Any:
        """What the module has, where this has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def is_own(model: object) -> bool:
    """True of a model, or of a class, that is not of this package."""
    kind = model if isinstance(model, type) else type(model)
    return kind is OwnModule or not kind.__module__.startswith("headway_training.")


def _returns_module(make: Callable[..., Any]) -> bool:
    """True of a class of modules, and of a function that is annotated to return one."""
    if isinstance(make, type):
        return issubclass(make, nn.Module)
    try:
        returned = typing.get_type_hints(make).get("return")
    except Exception:  # an annotation may be any expression
        return False
    return isinstance(returned, type) and issubclass(returned, nn.Module)
