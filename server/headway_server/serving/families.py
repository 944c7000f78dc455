"""How a task is served, and what every loaded model offers: the kinds of rows of `tasks/table.py`."""

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
    """What computes for a model in threads of its own: an engine, a batcher."""

    @property
    def is_alive(self) -> bool:
        """True from `start` to `close`, unless a thread has ended by itself."""

    def stalled_s(self) -> float:
        """Returns for how many seconds what is running has made no progress; 0.0 where nothing runs.

        A piece of work is a step of an engine or a run of a batch. Called on the event loop: it takes no lock that a
        run may hold.
        """

    def usage(self) -> ModelUsage:
        """Returns how much of it is in use. Called from any thread: it takes no lock that a run may hold."""

    def start(self) -> None:
        """Starts its threads; called with the event loop running."""

    def close(self) -> bool:
        """Stops; what still waits fails with DrainingError.

        May be called from any thread. Waits for what is running, `CLOSE_TIMEOUT_S` at most; False where a thread did
        not end in that time and was left behind (`join_threads`).
        """


class ServedModel:
    """What every loaded model offers, whatever its task: it lives as its workers do."""

    def __init__(self, bundle: Bundle, precision: Precision, device: Device) -> None:
        """Has no workers yet.

        Args:
            bundle: The bundle.
            precision: Of the variant that runs.
            device: Where it runs.
        """
        self.bundle = bundle
        self.precision = precision
        self.device: Device = device
        self.workers: list[Worker] = []
        """What computes for it."""
        self.closers: list[Callable[[], bool]] = []
        """How what else has threads is closed, as `Worker.close`."""

    @property
    def is_alive(self) -> bool:
        """True from `start` to `close`, unless a worker has ended by itself."""
        return all(worker.is_alive for worker in self.workers)

    def stalled_s(self) -> float:
        """Returns for how many seconds a worker has made no progress; see `Worker`."""
        return max((worker.stalled_s() for worker in self.workers), default=0.0)

    def usage(self) -> ModelUsage:
        """Returns how much of the model is in use; see `Worker`."""
        return sum((worker.usage() for worker in self.workers), ModelUsage(num_waiting=0))

    def start(self) -> None:
        """Starts the workers; called with the event loop running."""
        for worker in self.workers:
            worker.start()

    def close(self) -> bool:
        """Stops all workers at once; see `Worker`."""
        return close_together([*(worker.close for worker in self.workers), *self.closers])


Loader: TypeAlias = Callable[[Bundle, Runtime, ServerSettings, Observer], ServedModel]
"""Loads a bundle in the variant that the settings and the runtime ask for, and runs it once.

Raises:
    BundleError: The bundle does not hold what its manifest says, or cannot be run.
    MemoryUnavailableError: The model does not fit into memory.
    RuntimeUnavailableError: The bundle has no variant for this runtime, or not the one that was asked for.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a task is served. What its bundles must hold is the manifest's part (`bundles/manifest.py`)."""

    loader: str
    """Name of a `Loader`, `module:object`. It is imported with the first bundle of the task, so that nobody pays for
    families that are not used, and so that this layer knows none of them."""
    made_for: tuple[Ability[Any], ...] = ()
    """What a call that names no model takes a model of this task for, before models that can do it besides."""
    can: tuple[Ability[Any], ...] = ()
    """What its models can do besides."""
    tensors: str | None = None
    """Name of a `TensorTask` of the Open Inference Protocol, `module:object`; None: its models have no tensors."""

    @property
    def abilities(self) -> tuple[Ability[Any], ...]:
        """All that its models may be able to do."""
        return self.made_for + self.can

    def has(self, ability: Ability[Any]) -> bool:
        """Returns True if some of its models can do that."""
        return ability in self.made_for or ability in self.can

    def load(self, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer) -> ServedModel:
        """Loads a bundle of this family; errors are those of `Loader`."""
        return cast("Loader", resolve_name(self.loader))(bundle, runtime, settings, observer)


Families: TypeAlias = Mapping[Task, Family]
"""By task, in the order in which calls that name no model prefer those that can do something besides."""


def served_families() -> Families:
    """Returns the table of `tasks/table.py`, by its name: this layer does not know which tasks there are."""
    return cast("Families", resolve_name("headway_server.tasks.table:FAMILIES"))


def has_ability(families: Families, manifest: Manifest, ability: Ability[Any]) -> bool:
    """Returns True if a model can do something, given a partner where it needs one."""
    family = families.get(manifest.task)
    return family is not None and family.has(ability) and bool(ability.needs(manifest))


def tasks_with(families: Families, ability: Ability[Any]) -> list[Task]:
    """Returns the tasks whose models can do something, in the order in which calls that name no model prefer them."""
    able = [task for task, family in families.items() if family.has(ability)]
    return sorted(able, key=lambda task: ability not in families[task].made_for)
