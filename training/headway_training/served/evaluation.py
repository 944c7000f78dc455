"""A whole measurement of a served model: its options, and the report that is compared with the card."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from rich.console import Console

from headway_client import Client, HeadwayError, Model, QualityFigure
from headway_client.options import (
    CaptionImageOptions,
    ClassifyImageOptions,
    ClassifyTextOptions,
    ClassifyTokensOptions,
    GenerateImageOptions,
    SegmentImageOptions,
    SynthesizeSpeechOptions,
    TranscribeSpeechOptions,
    TranslateTextOptions,
)
from headway_training.data.sources import data_folder
from headway_training.errors import EvaluationError
from headway_training.recipes import parse_setting
from headway_training.served.data import DEFAULT_LABEL_SEPARATOR, first_examples, read_dataset, read_file
from headway_training.served.measurement import Measurement

TOLERANCES = {"nats_per_character": 0.005}
"""Largest difference from the card that still agrees; a text is not cut quite as for the card (`_score_text`)."""
DEFAULT_TOLERANCE = 0.05
"""Of other metrics, in points: what rounding to one decimal hides."""
_SET_BY_MEASUREMENT = {"model", "model_version", "top_k", "text_pairs", "image_id", "image_ids", "mask_format"}
"""Options that the measurement sets."""
_OTHER_LABELS = {"candidate_labels", "hypothesis_template", "independent_labels"}
"""Options that would have a model choose among other labels than the data's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """How the models of a task are measured."""

    unit: str = "texts"
    """What an example is."""
    options: type | None = None
    """Options of the client's call; None: there are none that bear on the figure."""
    sets: frozenset[str] = frozenset()
    """Those that the measurement sets, and of a drawing those that would draw over an image."""


_TASKS: Mapping[str, _Measured] = {
    "generation": _Measured(unit="characters"),
    "translation": _Measured(unit="sentences", options=TranslateTextOptions),
    "text_classification": _Measured(options=ClassifyTextOptions),
    "token_classification": _Measured(options=ClassifyTokensOptions),
    "image_classification": _Measured(unit="images", options=ClassifyImageOptions),
    "image_embedding": _Measured(unit="pictures"),
    "captioning": _Measured(unit="images", options=CaptionImageOptions),
    "transcription": _Measured(unit="recordings", options=TranscribeSpeechOptions),
    "segmentation": _Measured(unit="pictures", options=SegmentImageOptions),
    "speech_synthesis": _Measured(options=SynthesizeSpeechOptions, sets=frozenset({"seed", "voice", "format"})),
    "image_generation": _Measured(
        unit="images",
        options=GenerateImageOptions,
        sets=frozenset({"seed", "image_count", "image", "mask", "strength"}),
    ),
}
"""By the name that a server has for it; of any other nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Arguments of `headway-train evaluate`."""

    model: str
    """Name of the model."""
    model_version: str = ""
    """Its version; empty: the latest one loaded."""
    server: str
    """Host and port."""
    dataset: str | None = None
    """Data set whose test part is measured, or a recipe's file; None: that of the recipe named like the model."""
    file: str | None = None
    """The user's own data instead."""
    data_dir: Path | None = None
    """Folder of the public data sets."""
    label_separator: str = DEFAULT_LABEL_SEPARATOR
    """The character between the labels of a text in `file`, if several may apply."""
    limit: int | None = None
    """Most examples, or characters of a running text."""
    batch_size: int = 16
    """Inputs of a request."""
    concurrency: int = 4
    """Requests in flight at a time."""
    settings: tuple[str, ...] = ()
    """`NAME=VALUE`: options of the client's call."""
    timeout_s: float = 300.0
    """Longest time of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A measurement: of what, its figures, and how long it took."""

    model: Model
    dataset: str
    is_whole: bool
    """Whether all of the data was measured."""
    metric: str
    """Name of the task's metric, as model cards have it."""
    figures: Mapping[str, float | str]
    """The metric, and what else was measured with it; a metric's own signature is a string."""
    example_count: int
    wall_time_s: float

    @property
    def value(self) -> float:
        """The metric's value."""
        return float(self.figures[self.metric])

    @property
    def unit(self) -> str:
        """What an example is."""
        return _TASKS.get(self.model.task, _Measured()).unit

    @property
    def card(self) -> QualityFigure | None:
        """The figure of the model's card for the same variant, metric and data; None if it has none."""
        wanted = (self.model.variant, self.metric, self.dataset)
        figures = self.model.quality if self.is_whole else ()
        return next((one for one in figures if (one.variant, one.metric, one.dataset) == wanted), None)

    @property
    def agrees(self) -> bool | None:
        """Whether the figure is the card's within the tolerance; None if the card has none."""
        if self.card is None:
            return None
        return abs(self.value - self.card.value) <= TOLERANCES.get(self.metric, DEFAULT_TOLERANCE)

    def lines(self) -> str:
        """For people."""
        model, rate = self.model, self.example_count / self.wall_time_s
        head = (
            f"{model.name} {model.version} ({model.variant}) on {self.dataset}: {self.example_count:,} "
            f"{self.unit} in {self.wall_time_s:,.1f} s, {rate:,.1f} {self.unit}/s"
        )
        figures = [f"  {name}: {_shown(value)}" for name, value in self.figures.items()]
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
                "task": model.task,
                "dataset": self.dataset,
                "example_count": self.example_count,
                "unit": self.unit,
                "wall_time_s": round(self.wall_time_s, 3),
                "metric": self.metric,
                "value": self.value,
                "figures": dict(self.figures),
                "card_value": self.card.value if self.card else None,
                "agrees_with_card": self.agrees,
            }
        )


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def evaluate_served(options: EvaluationOptions, console: Console) -> Report:
    """Measures a model that a server runs.

    Raises:
        EvaluationError: A call fails, or the model cannot be measured so.
        DataError: The data cannot be read, or has a label that the model does not know.
    """
    settings = dict(map(_parse_option, options.settings))
    _check_sources(options)
    try:
        with Client(options.server, timeout_s=options.timeout_s) as client:
            details = client.get_model(options.model, model_version=options.model_version)
            model = details.model
            _check_settings(settings, model, of_file=options.file is not None)
            if options.file is not None:
                manifest, language = json.loads(details.manifest_json), str(settings.get("language", ""))
                data = read_file(model, options.file, manifest, options.label_separator, language)
            else:
                data = read_dataset(model, options.dataset, data_folder(options.data_dir))
            examples = first_examples(data.examples, options.limit)
            start_s = time.perf_counter()
            figures = Measurement(
                client,
                model,
                settings,
                batch_size=options.batch_size,
                concurrency=options.concurrency,
                console=console,
            ).measure(examples, data.labels)
    except HeadwayError as error:
        raise EvaluationError(str(error)) from error
    except (TypeError, ValueError) as error:  # of the client: an option's value has a wrong type or range
        raise EvaluationError(f"the client's call cannot be made: {error}") from error
    whole = len(examples) == len(data.examples)
    return Report(
        model=model,
        dataset=data.name if whole else f"{data.name}, the first {len(examples):,}",
        is_whole=whole,
        metric=next(iter(figures)),
        figures=figures,
        example_count=len(examples),
        wall_time_s=time.perf_counter() - start_s,
    )


def _check_sources(options: EvaluationOptions) -> None:
    """Checks that what is said of the data is said of the data that is read."""
    if options.file is not None:
        if options.dataset is not None:
            raise EvaluationError("--data and --file are both given; name one of them")
        if options.data_dir is not None:
            raise EvaluationError("--data-dir holds public data sets, and --file is none; leave one of them out")
        return
    if options.label_separator != DEFAULT_LABEL_SEPARATOR:
        raise EvaluationError("--label-separator is read of --file alone; leave it out")


def _parse_option(setting: str) -> tuple[str, Any]:
    name, value = parse_setting(setting)
    if not name.isidentifier():
        raise EvaluationError(f"--option {setting}: expected NAME=VALUE, such as beam_size=4")
    return name, value


def _check_settings(settings: Mapping[str, Any], model: Model, *, of_file: bool) -> None:
    """Checks that the client's call takes the options."""
    measured = _TASKS.get(model.task, _Measured())
    kind, set_here = measured.options, _SET_BY_MEASUREMENT | measured.sets
    if model.task == "captioning" and not of_file:  # a data set says the languages of its captions
        set_here = set_here | {"language"}
    known = sorted(set(get_type_hints(kind)) - set_here - _OTHER_LABELS) if kind else []
    for name in settings:
        if name not in known:
            raise EvaluationError(
                f"{name} is no option of measuring {model.task}; these are: {', '.join(known) or 'none'}"
            )
