"""Families of models and the interface of loaded models: the row types of `tasks/table.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol, TypeAlias, cast

from headway_server.bundles import Bundle, Manifest, Precision, Task
from headway_server.observers import ModelUsage, Observer
from headway_server.runtime import Device, Runtime, close_together
from headway_server.serving.abilities import Ability
from headway_server.settings import ServerSettings


class Worker(Protocol):
    """A part of a model with threads of its own: an engine, a batcher."""

    @property
    def is_alive(self) -> bool:
        """True from `start` to `close`, unless a thread has ended by itself."""

    def stalled_s(self) -> float:
        """Returns the seconds without progress of the current work; 0.0 if idle.

        A piece of work is a step of an engine or a run of a batch. Called on the event loop: it takes no lock that a
        run may hold.
        """

    def usage(self) -> ModelUsage:
        """Returns its usage. Called from any thread: it takes no lock that a run may hold."""

    def start(self) -> None:
        """Starts its threads; called with the event loop running."""

    def close(self) -> bool:
        """Stops; waiting inputs fail with DrainingError.

        May be called from any thread. Waits for what is running, `CLOSE_TIMEOUT_S` at most; False where a thread did
        not end in that time and was left behind (`join_threads`).
        """


class ServedModel:
    """The interface of a loaded model of any task; its life is that of its workers."""

    def __init__(self, bundle: Bundle, precision: Precision, device: Device) -> None:
        """Starts without workers.

        Args:
            bundle: The bundle.
            precision: Of the variant that runs.
            device: Where it runs.
        """
        self.bundle = bundle
        self.precision = precision
        self.device: Device = device
        self.workers: list[Worker] = []
        """Engines and batchers of the model."""
        self.closers: list[Callable[[], bool]] = []
        """Functions that close other threads, as `Worker.close`."""

    @property
    def is_alive(self) -> bool:
        """True from `start` to `close`, unless a worker has ended by itself."""
        return all(worker.is_alive for worker in self.workers)

    def stalled_s(self) -> float:
        """Returns the longest time of a worker without progress, in seconds; see `Worker`."""
        return max((worker.stalled_s() for worker in self.workers), default=0.0)

    def usage(self) -> ModelUsage:
        """Returns the usage of all workers; see `Worker`."""
        return sum((worker.usage() for worker in self.workers), ModelUsage(num_waiting=0))

    def start(self) -> None:
        """Starts the workers; called with the event loop running."""
        for worker in self.workers:
            worker.start()

    def close(self) -> bool:
        """Stops all workers at once; see `Worker`."""
        return close_together([*(worker.close for worker in self.workers), *self.closers])


Loader: TypeAlias = Callable[[Bundle, Runtime, ServerSettings, Observer], ServedModel]
"""Loads a bundle in the variant of the settings and the runtime, and runs it once.

Raises:
    BundleError: The bundle does not match its manifest, or cannot be run.
    MemoryUnavailableError: The model does not fit into memory.
    RuntimeUnavailableError: The bundle has no variant for this runtime, or not the requested one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a task is served. The manifest checks the contents of its bundles (`bundles/manifest.py`)."""

    loader: str
    """Name of a `Loader`, `module:object`. It is imported with the first bundle of the task: unused families cost
    nothing, and this layer depends on none."""
    made_for: tuple[Ability[Any], ...] = ()
    """Primary abilities: a call without a model's name prefers these models to others with the ability."""
    can: tuple[Ability[Any], ...] = ()
    """Further abilities of its models."""
    tensors: str | None = None
    """Name of a `TensorTask` of the Open Inference Protocol, `module:object`; None: its models have no tensors."""

    @property
    def abilities(self) -> tuple[Ability[Any], ...]:
        """All abilities that its models may have."""
        return self.made_for + self.can

    def has(self, ability: Ability[Any]) -> bool:
        """Returns True if some of its models have an ability."""
        return ability in self.made_for or ability in self.can

    def load(self, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer) -> ServedModel:
        """Loads a bundle of this family; errors are those of `Loader`."""
        return cast("Loader", resolve_name(self.loader))(bundle, runtime, settings, observer)


Families: TypeAlias = Mapping[Task, Family]
"""Families by task, in the order of preference of calls without a model's name, for further abilities."""


def served_families() -> Families:
    """Returns the table of `tasks/table.py`, imported by name, since this layer knows no tasks."""
    return cast("Families", resolve_name("headway_server.tasks.table:FAMILIES"))


def has_ability(families: Families, manifest: Manifest, ability: Ability[Any]) -> bool:
    """Returns True if a model has an ability, given a partner if it needs one."""
    family = families.get(manifest.task)
    return family is not None and family.has(ability) and bool(ability.needs(manifest))


def tasks_with(families: Families, ability: Ability[Any]) -> list[Task]:
    """Returns the tasks with an ability, in the order of preference of calls without a model's name."""
    able = [task for task, family in families.items() if family.has(ability)]
    return sorted(able, key=lambda task: ability not in families[task].made_for)
