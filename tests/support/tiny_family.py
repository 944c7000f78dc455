# ruff: noqa: ARG003 -- loaders of all families take the same arguments
"""A family of one small file, as a new task is added: a model that answers with what it was given, reversed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from headway_server.bundles import Bundle, Precision
from headway_server.errors import BundleError, DrainingError, MemoryUnavailableError
from headway_server.observers import NO_OBSERVER, ModelUsage, Observer
from headway_server.runtime import Heartbeat, Runtime
from headway_server.serving.answers import Answer, CallTimings
from headway_server.serving.families import Family
from headway_server.serving.limits import check_texts
from headway_server.serving.permits import Admission
from headway_server.settings import ServerSettings
from headway_server.tasks.table import CLASSIFY_TEXTS

FAMILY = Family(loader="tiny_family:Mirror.load", made_for=(CLASSIFY_TEXTS,))
MAY_GO_ON = threading.Event()
"""What loading a bundle waits for whose description is `slow`."""


class Mirror:
    """Reverses texts; a bundle's description says how it behaves."""

    def __init__(self, bundle: Bundle, settings: ServerSettings) -> None:
        self.bundle = bundle
        self.precision = Precision.FP32
        self.device = "cpu"
        self.is_alive = False
        self.is_closed = False
        self.hang = threading.Event()  # set while a "run" hangs
        self.heartbeat = Heartbeat()
        self.max_text_bytes = settings.max_text_bytes
        self.admission = Admission(limit=8, noun="texts", owner=bundle.manifest.name)

    @classmethod
    def load(
        cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER
    ) -> Mirror:
        if bundle.manifest.description == "broken":
            raise BundleError(f"{bundle.path}: its mirror is broken")
        if bundle.manifest.description == "huge":
            raise MemoryUnavailableError(f"{bundle.manifest.name}: does not fit")
        if bundle.manifest.description == "slow":
            assert MAY_GO_ON.wait(30), "nobody let the slow bundle go on"
        return cls(bundle, settings)

    def stalled_s(self) -> float:
        return self.heartbeat.stalled_s()

    def usage(self) -> ModelUsage:
        return ModelUsage(num_waiting=self.admission.num_admitted)

    def start(self) -> None:
        self.is_alive = True

    def close(self) -> bool:
        self.is_alive, self.is_closed = False, True
        return not self.hang.is_set()

    async def reverse(self, texts: Sequence[str], *, pause_s: float = 0.0) -> Answer[str]:
        """Reverses texts after a pause."""
        check_texts("texts", texts, 4, self.max_text_bytes)
        with self.admission.admit(len(texts)):
            await asyncio.sleep(pause_s)
            if self.is_closed:
                raise DrainingError("closed")
            results = [f"{text[::-1]} by {self.bundle.manifest.description}" for text in texts]
        return Answer(results=results, timings=CallTimings(queue_s=0.0, preprocessing_s=0.0, inference_s=pause_s))
