"""What is told of a measurement: a few lines for people and one line of JSON for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass

from headway_client import Model, QualityFigure
from headway_training.served.measures import Measurement

TOLERANCES = {"nats_per_character": 0.005}
"""Distance from the card that a figure may have; a text is not cut quite as for the card (`text_score`)."""
DEFAULT_TOLERANCE = 0.05
"""In points, of metrics that have none of their own: what rounding to one decimal hides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """A measurement, of what, and how long it took."""

    model: Model
    dataset: str
    whole: bool
    """Whether all of the data was measured."""
    measurement: Measurement
    wall_time_s: float

    @property
    def card(self) -> QualityFigure | None:
        """The figure of the model's card for the same variant, metric and data, where it has one."""
        if not self.whole:
            return None
        wanted = (self.model.variant, self.measurement.metric, self.dataset)
        return next((one for one in self.model.quality if (one.variant, one.metric, one.dataset) == wanted), None)

    @property
    def agrees(self) -> bool | None:
        """Whether the figure is the card's within the tolerance; None where there is none to compare with."""
        if self.card is None:
            return None
        tolerance = TOLERANCES.get(self.measurement.metric, DEFAULT_TOLERANCE)
        return abs(self.measurement.value - self.card.value) <= tolerance

    def lines(self) -> str:
        """For people."""
        model, measured = self.model, self.measurement
        rate = measured.example_count / self.wall_time_s
        head = (
            f"{model.name} {model.version} ({model.variant}) on {self.dataset}: {measured.example_count:,} "
            f"{measured.unit} in {self.wall_time_s:,.1f} s, {rate:,.1f} {measured.unit}/s"
        )
        figures = [f"  {name}: {_shown(value)}" for name, value in measured.figures.items()]
        if self.card is None:
            note = "  the model's card has no figure for this data"
        else:
            verdict = "agrees" if self.agrees else "DIFFERS"
            note = f"  its card says {self.card.metric} {_shown(self.card.value)}: {verdict}"
        return "\n".join((head, *figures, note))

    def json(self) -> str:
        """For programs."""
        model = self.model
        return json.dumps(
            {
                "model": model.name,
                "version": model.version,
                "variant": model.variant,
                "device": model.device,
                "task": model.task.value,
                "dataset": self.dataset,
                "example_count": self.measurement.example_count,
                "unit": self.measurement.unit,
                "wall_time_s": round(self.wall_time_s, 3),
                "metric": self.measurement.metric,
                "value": self.measurement.value,
                "figures": dict(self.measurement.figures),
                "card_value": self.card.value if self.card else None,
                "agrees_with_card": self.agrees,
            }
        )


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"
