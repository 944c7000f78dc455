"""Metrics, traces and the access log: observers switched on by the settings (docs/monitoring.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from headway_server.errors import ServerError
from headway_server.observers import Observer, WriteMetrics, joined
from headway_server.runtime import Cores
from headway_server.serving.calls import Calls
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings

if TYPE_CHECKING:
    from headway_server.monitoring.metrics import Metrics, Sample
    from headway_server.monitoring.tracing import Tracing


class Monitoring:
    """The observers of a server. Their libraries are imported only if the settings need them."""

    def __init__(self, *, metrics: Metrics | None, tracing: Tracing | None, others: tuple[Observer, ...]) -> None:
        """Takes the observers; `open` creates them."""
        self._metrics = metrics
        self._tracing = tracing
        self.observer = joined([each for each in (tracing, metrics, *others) if each is not None])
        """Reports to all of them; `NO_OBSERVER` without any. Traces come first, since the others report their ids."""

    @classmethod
    def open(cls, settings: ServerSettings, *, listens: bool = True) -> Self:
        """Creates the observers. Metrics can be read from now on, while models are loading.

        Args:
            settings: Of the server.
            listens: False for a worker: its supervisor serves the metrics.

        Raises:
            ServerError: The metrics' port is taken, or the libraries for traces are not installed.
        """
        metrics: Metrics | None = None
        tracing: Tracing | None = None
        others: tuple[Observer, ...] = ()
        if settings.trace_endpoint is not None:
            tracing = _open_tracing(settings.trace_endpoint, settings.trace_sample_ratio)
        if settings.metrics_port is not None or (settings.http_port is not None and settings.http_metrics):
            from headway_server.monitoring.metrics import Metrics  # noqa: PLC0415 (only where it is used)

            metrics = Metrics()
            if settings.metrics_port is not None and listens:
                metrics.listen(settings.metrics_host, settings.metrics_port)
        if settings.access_log:
            from headway_server.monitoring.access_log import AccessLog  # noqa: PLC0415 (as above)

            others = (AccessLog(texts=settings.log_texts),)
        return cls(metrics=metrics, tracing=tracing, others=others)

    def start(self, host: ModelHost, calls: Calls, cores: Cores) -> None:
        """Starts the gauges, which are read rather than reported; called with the event loop running."""
        if self._metrics is not None:
            self._metrics.watch(host, calls, cores)

    @property
    def write_metrics(self) -> WriteMetrics | None:
        """Returns the answer to scrapes, or None without metrics."""
        return None if self._metrics is None else self._metrics.write

    def collect(self) -> list[Sample]:
        """Returns the present values of all metrics; thread-safe."""
        return [] if self._metrics is None else self._metrics.samples()

    def close(self) -> None:
        """Sends the remaining traces, and ends the threads."""
        if self._metrics is not None:
            self._metrics.close()
        if self._tracing is not None:
            self._tracing.close()

    def __repr__(self) -> str:
        return f"Monitoring({self.observer!r})"


def _open_tracing(endpoint: str, sample_ratio: float) -> Tracing:
    try:
        from headway_server.monitoring.tracing import Tracing  # noqa: PLC0415 (an extra brings its libraries)
    except ImportError as error:
        raise ServerError(
            f"--trace-endpoint needs OpenTelemetry ({error}); install headway-server[tracing], or leave it out"
        ) from error
    return Tracing.sending_to(endpoint, sample_ratio=sample_ratio)
