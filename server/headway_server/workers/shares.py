"""The number of workers, and the share of each: cores, slots and queues."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from headway_server.batching.settings import MAX_AUDIOS, MAX_GRID_PROMPTS, MAX_IMAGES, MAX_TEXTS, BatchingSettings
from headway_server.bundles import Manifest, Task, read_manifest
from headway_server.decoding.settings import EngineSettings
from headway_server.errors import BundleError, ServerError
from headway_server.runtime import Runtime, available_bytes, usable_cores
from headway_server.serving.host import read_store
from headway_server.settings import ModelSettings, ServerSettings

_MOST_PARAMETERS: Final = 20_000_000
"""Parameters of a model whose calls cost more outside of the model than in it. Larger models gain from cores, not
processes."""
_COPIES: Final = 2
"""Copies of the weights in a worker with lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A number of workers, with the reason."""

    count: int
    reason: str


def choose_workers(settings: ServerSettings) -> Choice:
    """Chooses the number of workers; reads the manifests of the store for `auto`.

    Raises:
        ServerError: The store cannot be read, or several workers are not possible here.
    """
    if settings.workers == 1:
        return Choice(count=1, reason="as the settings say")
    if sys.platform != "linux":
        raise ServerError(f"--workers is for Linux, which shares a port out among processes; this is {sys.platform}")
    on_cuda = Runtime(device=settings.device, num_threads=1).device == "cuda"
    if settings.workers != "auto":
        if on_cuda:
            raise ServerError("--workers is for the CPU; one process uses a GPU best, so leave it out")
        return Choice(count=settings.workers, reason="as the settings say")
    if on_cuda:
        return Choice(count=1, reason="one process uses a GPU best")
    return suiting(settings, _read_manifests(settings))


def _read_manifests(settings: ServerSettings) -> list[Manifest]:
    manifests = []
    for path in read_store(settings)[0]:
        with suppress(BundleError):  # rejected by loading
            manifests.append(read_manifest(settings.store / path))
    return manifests


def suiting(settings: ServerSettings, manifests: Sequence[Manifest]) -> Choice:
    """Returns the number of workers for the models of a store on the CPU, for `--workers auto`."""
    count = settings.threads or usable_cores()
    large = [one.name for one in manifests if one.architecture.parameter_count > _MOST_PARAMETERS]
    if large:
        return Choice(count=1, reason=f"{_names(large)}: more than {_MOST_PARAMETERS:,} parameters, which cores share")
    if generating := [one.name for one in manifests if one.task is Task.GENERATION]:
        return Choice(count=1, reason=f"{_names(generating)}: one process shares slots and prefix cache among callers")
    reason = f"{count} cores, one for each worker, and no model has more than {_MOST_PARAMETERS:,} parameters"
    size = _COPIES * sum(file.size_bytes for manifest in manifests for file in manifest.files.values())
    available = available_bytes("cpu")
    if available is not None and size and count > (fitting := max(1, available // 2 // size)):
        count, reason = fitting, f"half of the memory fits the models {fitting} times"
    return Choice(count=count, reason=reason)


def _names(names: Sequence[str]) -> str:
    several = sorted(set(names))
    return ", ".join(several[:3]) + (", ..." if len(several) > 3 else "")


def share_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Distributes cores, neighbours together; with too few, workers share cores."""
    count = len(cores)
    return [
        tuple(cores[index * count // num_workers : (index + 1) * count // num_workers]) or (cores[index % count],)
        for index in range(num_workers)
    ]


def share_settings(settings: ServerSettings, num_workers: int) -> list[ServerSettings]:
    """Returns the settings of each worker: its share of cores, slots and queues.

    Limits of calls and bytes are not divided: all workers count them together.
    """
    num_cores = settings.threads or usable_cores()
    max_calls, max_bytes = settings.call_limits(available_bytes("cpu"))
    batching, connection = settings.batching, settings.connection

    def part(total: int, least: int = 1) -> int:
        return max(min(least, total), -(-total // num_workers))

    arriving = part(connection.max_arriving_mib, settings.max_message_mib)
    models: dict[str, ModelSettings] = {}
    for name, own in settings.models.items():
        parts = _parts_of_engine(own, part) | _parts_of_batching(own, part)
        models[name] = own.model_copy(update={field: parts[field] for field in parts.keys() & own.model_fields_set})
    common = settings.model_copy(
        update={
            "workers": num_workers,
            "max_calls": max_calls,
            "max_inflight_mib": max(1, max_bytes >> 20),
            "engine": settings.engine.model_copy(update=_parts_of_engine(settings.engine, part)),
            "batching": batching.model_copy(update=_parts_of_batching(batching, part)),
            "connection": connection.model_copy(update={"max_arriving_mib": arriving}),
            "models": models,
        }
    )
    ends = [index * num_cores // num_workers for index in range(num_workers + 1)]
    return [common.model_copy(update={"threads": max(1, end - start)}) for start, end in itertools.pairwise(ends)]


def _parts_of_batching(batching: BatchingSettings, part: Callable[..., int]) -> dict[str, int]:
    return {
        "max_waiting_texts": part(batching.max_waiting_texts, MAX_TEXTS),
        "max_waiting_images": part(batching.max_waiting_images, MAX_IMAGES),
        "max_waiting_audios": part(batching.max_waiting_audios, MAX_AUDIOS),
        "max_waiting_prompts": part(batching.max_waiting_prompts, MAX_GRID_PROMPTS),
        "max_waiting_mib": part(batching.max_waiting_mib),
    }


def _parts_of_engine(engine: EngineSettings, part: Callable[..., int]) -> dict[str, int]:
    parts = {"max_waiting": part(engine.max_waiting)}
    if engine.num_slots is not None:
        parts["num_slots"] = part(engine.num_slots)
    if engine.num_prefix_slots:
        parts["num_prefix_slots"] = part(engine.num_prefix_slots)
    return parts
