"""`headway-train evaluate`: measures a model that a server runs, through the client, and compares with its card.

Needs the client: `headway-training[evaluate]`.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_type_hints

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import track

from headway_client import Client, HeadwayError, Model, QualityFigure, SegmentPrompt, Task
from headway_client.options import (
    CaptionImageOptions,
    ClassifyImageOptions,
    ClassifyTextOptions,
    ClassifyTokensOptions,
    GenerateImageOptions,
    SegmentImageOptions,
    TranscribeSpeechOptions,
    TranslateTextOptions,
)
from headway_training.checkpoint import TaskName
from headway_training.data.audio import encode_audio
from headway_training.data.captions import CaptionedImages
from headway_training.data.examples import (
    LabeledImages,
    LabeledTexts,
    MultiLabeledTexts,
    ParallelTexts,
    PlainText,
    Rows,
    SpanLabeledTexts,
)
from headway_training.data.files import cut_before_spaces
from headway_training.data.images import find_images
from headway_training.data.pictures import DescribedImages, Pictures
from headway_training.data.sources import data_folder, file_names, read_examples, read_splits
from headway_training.data.speech import Recordings, read_recordings
from headway_training.errors import DataError, EvaluationError
from headway_training.metrics import (
    accuracy,
    corpus_bleu,
    frechet_distance,
    macro_f1,
    multi_label_f1,
    nearest_neighbour_labels,
    r_precision,
    score_transcripts,
    span_scores,
)
from headway_training.recipes import ClassificationSettings, Recipe, list_recipes, parse_setting, read_recipe

if TYPE_CHECKING:
    from headway_training.tasks.segmentation import MeasuredPicture

TOLERANCES = {"nats_per_character": 0.005}
"""Largest difference from the card that still agrees; a text is not cut quite as for the card (`_score_text`)."""
DEFAULT_TOLERANCE = 0.05
"""Of other metrics, in points: what rounding to one decimal hides."""
_CALL_OPTIONS: Mapping[Task, type] = {
    Task.TRANSLATION: TranslateTextOptions,
    Task.TEXT_CLASSIFICATION: ClassifyTextOptions,
    Task.TOKEN_CLASSIFICATION: ClassifyTokensOptions,
    Task.IMAGE_CLASSIFICATION: ClassifyImageOptions,
    Task.CAPTIONING: CaptionImageOptions,
    Task.TRANSCRIPTION: TranscribeSpeechOptions,
    Task.SEGMENTATION: SegmentImageOptions,
    Task.IMAGE_GENERATION: GenerateImageOptions,
}
"""Options of the client's call; those of generation do not bear on how likely a text is."""
_SET_BY_MEASUREMENT = {"model", "model_version", "top_k", "text_pairs", "image_id", "image_ids", "mask_format"}
_SET_OF_DRAWINGS = {"seed", "image_count", "image", "mask", "strength"}
"""Options of a drawing that the measurement sets, or that would draw over an image."""
_NUM_CANDIDATES = 100
"""Texts that a drawing's own is looked for among (Xu et al. 2018, section 4.1)."""
_OTHER_LABELS = {"candidate_labels", "hypothesis_template", "independent_labels"}
"""Options that would have a model choose among other labels than the data's."""
_RECIPE_TASKS: Mapping[str, tuple[str, ...]] = {Task.IMAGE_EMBEDDING: ("image_text_embedding", "image_embedding")}
"""Of recipes' tasks that are not the model's alone: an image tower is measured with the text tower of its space."""
_UNITS = {
    Task.IMAGE_EMBEDDING: "pictures",
    Task.TRANSLATION: "sentences",
    Task.IMAGE_CLASSIFICATION: "images",
    Task.CAPTIONING: "images",
    Task.TRANSCRIPTION: "recordings",
    Task.SEGMENTATION: "pictures",
    Task.IMAGE_GENERATION: "images",
    Task.GENERATION: "characters",
}


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
    label_separator: str = "|"
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
        return _UNITS.get(self.model.task, "texts")

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
                "task": model.task.value,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImages(Rows):
    """Image files with a label each."""

    images: list[bytes]
    labels: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbouringImages(EncodedImages):
    """Image files whose labels are to be found by those of the images that are nearest."""

    known: EncodedImages
    """The images that are looked among."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionedFiles(Rows):
    """Image files with captions."""

    images: list[bytes]
    captions: list[Mapping[str, Sequence[str]]]
    """Of each, by language; where it is not known, under the empty name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptedFiles(Rows):
    """Image files, each with what draws its like."""

    images: list[bytes]
    prompts: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedFiles(Rows):
    """Pictures with segments to find."""

    pictures: list[MeasuredPicture]


_PICTURES = (Pictures, CaptionedFiles, SegmentedFiles, NeighbouringImages, PromptedFiles)
"""Examples that are not labels of images."""


@dataclass(frozen=True, slots=True)
class TestData:
    """Data to measure on."""

    name: str
    """Its name in words."""
    examples: Any
    """The examples of the model's task."""
    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of the examples' indices."""


def evaluate_served(options: EvaluationOptions, console: Console) -> Report:
    """Measures a model that a server runs.

    Raises:
        EvaluationError: A call fails, or the model cannot be measured so.
        DataError: The data cannot be read, or has a label that the model does not know.
    """
    if options.dataset is not None and options.file is not None:
        raise EvaluationError("--data and --file are both given; name one of them")
    settings = dict(map(_parse_option, options.settings))
    try:
        with Client(options.server, timeout_s=options.timeout_s) as client:
            details = client.get_model(options.model, model_version=options.model_version)
            model = details.model
            _check_settings(settings, model)
            if options.file is not None:
                manifest, language = json.loads(details.manifest_json), str(settings.get("language", ""))
                data = read_file(model, options.file, manifest, options.label_separator, language)
            else:
                data = read_dataset(model, options.dataset, data_folder(options.data_dir))
            examples = _first(data.examples, options.limit)
            start_s = time.perf_counter()
            figures = _Measurement(client, model, settings, options, console).measure(examples, data.labels)
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


def _parse_option(setting: str) -> tuple[str, Any]:
    name, value = parse_setting(setting)
    if not name.isidentifier():
        raise EvaluationError(f"--option {setting}: expected NAME=VALUE, such as beam_size=4")
    return name, value


def _check_settings(settings: Mapping[str, Any], model: Model) -> None:
    """Checks that the client's call takes the options."""
    kind = _CALL_OPTIONS.get(model.task)
    set_here = _SET_BY_MEASUREMENT | (_SET_OF_DRAWINGS if model.task is Task.IMAGE_GENERATION else set())
    known = sorted(set(get_type_hints(kind)) - set_here - _OTHER_LABELS) if kind else []
    for name in settings:
        if name not in known:
            raise EvaluationError(
                f"{name} is no option of measuring {model.task}; these are: {', '.join(known) or 'none'}"
            )


def read_dataset(model: Model, name: str | None, folder: Path) -> TestData:
    """Reads the test part of a data set.

    Args:
        model: The model that is to be measured.
        name: Name of the data set; None: that of the recipe that makes a model of this name.
        folder: The folder of the public data sets.

    Raises:
        EvaluationError: No recipe has such data for the model's task and languages.
        DataError: The data is missing or malformed, or has a label that the model does not know.
    """
    recipe = _find_recipe(model, name)
    splits = read_splits(recipe, folder, None)
    test = splits.test
    if isinstance(test, Pictures):
        return TestData(splits.test_name, test)
    if model.task is Task.SEGMENTATION:
        from headway_training.tasks.segmentation import SegmentationTask  # noqa: PLC0415 (torch, which others need not)

        return TestData(splits.test_name, SegmentedFiles(pictures=SegmentationTask(recipe, splits).measured("test")))
    if isinstance(test, CaptionedImages):
        captions: list[Mapping[str, Sequence[str]]] = [
            {one: test.captions[one][row] for one in test.captions} for row in range(len(test))
        ]
        return TestData(splits.test_name, CaptionedFiles(images=list(map(_encode_png, test.images)), captions=captions))
    if isinstance(test, DescribedImages):
        return TestData(splits.test_name, PromptedFiles(images=list(map(_encode_png, test.images)), prompts=test.names))
    if model.task is Task.IMAGE_EMBEDDING:
        known = _encode_images(splits.train)
        nearest = NeighbouringImages(images=_encode_images(test).images, labels=test.labels.tolist(), known=known)
        return TestData(splits.test_name, nearest, splits.labels)
    if unknown := sorted(set(splits.labels) - set(model.labels)):
        raise DataError(
            f"{recipe.data.dataset}: the label {unknown[0]!r} is not one that {model.name} answers: "
            f"{', '.join(model.labels[:20])}"
        )
    if isinstance(test, LabeledImages):
        test = _encode_images(test)
    return TestData(splits.test_name, test, splits.labels)


def _find_recipe(model: Model, name: str | None) -> Recipe:
    """The recipe whose data is measured."""
    languages = (model.source_language, model.target_language)
    tasks = _RECIPE_TASKS.get(model.task, (model.task,))
    own = model.name.removesuffix("-image") if model.task in _RECIPE_TASKS else model.name
    is_file = name is not None and name.endswith(".toml")
    files = [str(name)] if is_file else [file.stem for file in list_recipes()]
    recipes = [recipe for recipe in map(read_recipe, files) if recipe.task in tasks]
    recipes = [
        one for one in recipes if one.languages is None or (one.languages.source, one.languages.target) == languages
    ]
    for recipe in recipes:
        if is_file or ((recipe.name == own) if name is None else (recipe.data.dataset == name)):
            return recipe
    known = ", ".join(sorted({recipe.data.dataset for recipe in recipes})) or "none"
    between = f" from {languages[0]} to {languages[1]}" if languages[0] else ""
    what = f"{model.name} is the name of no recipe's model" if name is None else f"--data {name} is not for this model"
    raise EvaluationError(
        f"{what}; it is for {model.task}{between}, for which there are the data sets: {known}. "
        "Name one with --data, or your own data with --file"
    )


def _encode_images(examples: LabeledImages) -> EncodedImages:
    return EncodedImages(images=[_encode_png(image) for image in examples.images], labels=examples.labels.tolist())


def _encode_png(image: NDArray[np.uint8]) -> bytes:
    """Encodes an image, (height, width, 3), without loss."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


def read_file(
    model: Model, file: str, manifest: Mapping[str, Any], label_separator: str, language: str = ""
) -> TestData:
    """Reads the user's own data, in the form that `headway-train run --test` takes for the model's task.

    Args:
        model: The model that is to be measured.
        file: The file, two files with a comma between them, or a folder of images.
        manifest: Of the model's bundle.
        label_separator: The character between the labels of a text, if several may apply.
        language: That captions are asked for in; empty: the model's default.

    Raises:
        DataError: The data is missing or malformed, or has a label that the model does not know.
    """
    if model.task is Task.IMAGE_CLASSIFICATION or (
        model.labels and model.task is Task.IMAGE_GENERATION
    ):  # as they are: the server brings them to the model's size
        found = find_images(Path(file))
        labels = tuple(sorted({label for _, label in found}))
        if unknown := sorted(set(labels) - set(model.labels)):
            raise DataError(f"{file}: the label {unknown[0]!r} is not among those of the model")
        images = EncodedImages(
            images=[path.read_bytes() for path, _ in found], labels=[labels.index(label) for _, label in found]
        )
        return TestData(file_names(file), images, labels)
    if model.task is Task.IMAGE_GENERATION:
        captioned = _read_captioned(Path(file), language)
        prompts = [next(iter(one.values()))[0] for one in captioned.captions]
        return TestData(file_names(file), PromptedFiles(images=captioned.images, prompts=prompts))
    if model.task in (Task.IMAGE_EMBEDDING, Task.CAPTIONING):
        return TestData(file_names(file), _read_captioned(Path(file), language))
    if model.task is Task.TRANSCRIPTION:
        rate = int((manifest.get("audio_preprocessing") or {})["sampling_rate"])
        return TestData(file_names(file), read_recordings(Path(file), rate))
    if model.task is Task.SEGMENTATION:
        raise DataError("--file: masks are read from no file of your own; --data names a data set to measure on")
    classification = ClassificationSettings(
        multi_label=(manifest.get("classification") or {}).get("kind") == "multi_label",
        text_pairs=manifest.get("text_pairs") or "never",
        label_separator=label_separator,
    )
    task = cast("TaskName", model.task.value)
    examples, labels = read_examples(task, file, model.labels, classification=classification)
    return TestData(file_names(file), examples, labels)


def _read_captioned(file: Path, language: str) -> CaptionedFiles:
    """Reads lines of an image's path, a tab and a caption in one language; an image may have several lines.

    Raises:
        DataError: A line has no tab, or an image cannot be read.
    """
    captions: dict[str, list[str]] = {}
    try:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            path, tab, caption = line.partition("\t")
            if line.strip() and not (path and tab and caption.strip()):
                raise DataError(f"{file}, line {number}: expected the path of an image, a tab and a caption")
            if line.strip():
                captions.setdefault(path, []).append(caption.strip())
        images = [(file.parent / path).read_bytes() for path in captions]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as captions of images: {error}") from error
    if not images:
        raise DataError(f"{file} holds no caption")
    return CaptionedFiles(images=images, captions=[{language: one} for one in captions.values()])


def _first(examples: Any, limit: int | None) -> Any:
    """The first `limit` examples, or characters of a running text; the pictures of a data set are measured whole.

    Raises:
        EvaluationError: There is a limit, and only the whole can be measured.
    """
    if limit is not None and isinstance(examples, Pictures):
        raise EvaluationError("--limit: recall is that among all pictures, which are measured whole; leave it out")
    if limit is None or limit >= len(examples):
        return examples
    if isinstance(examples, PlainText):
        return PlainText(examples.text[:limit])
    return examples.take(np.arange(limit))


class _Measurement:
    """Asks a served model, a few requests at a time, and measures its answers."""

    def __init__(
        self, client: Client, model: Model, settings: Mapping[str, Any], options: EvaluationOptions, console: Console
    ) -> None:
        self._client = client
        self._model = model
        self._batch_size = options.batch_size
        self._concurrency = options.concurrency
        self._console = console
        self._named = {"model": model.name, "model_version": model.version}
        self._options = {**settings, **self._named}
        # A text past the model's limit is cut, as it is when a card is made.
        self._text_options = {"truncate": True, **self._options}

    def measure(  # noqa: PLR0911 (a case for each kind of data)
        self, examples: Any, labels: Sequence[str]
    ) -> dict[str, float | str]:
        """The figures of some examples; the first one is the metric of the model's task."""
        if isinstance(examples, _PICTURES) or self._model.task is Task.IMAGE_GENERATION:
            return self._measure_pictures(examples, labels)
        if isinstance(examples, PlainText):
            return self._score_text(examples.text)
        if isinstance(examples, ParallelTexts):
            texts = self._ask(
                examples.sources,
                lambda part: [result.text for result in self._client.translate_text(part, **self._text_options)],
            )
            score, signature = corpus_bleu(texts, examples.targets)
            return {"sacrebleu": score, "sacrebleu_signature": signature}
        if isinstance(examples, Recordings):
            audios = [encode_audio(samples, examples.sampling_rate) for samples in examples.samples]
            transcripts = self._ask(audios, self._transcribe)
            return dict(score_transcripts(transcripts, examples.texts, examples.sources))
        if isinstance(examples, SpanLabeledTexts):
            found = self._ask(examples.texts, self._find_spans)
            expected = [[(start, end, labels[label]) for start, end, label in row] for row in examples.spans]
            precision, recall, f1 = span_scores(found, expected)  # type: ignore[arg-type]  # labels are names on both sides
            return {"span_f1": f1, "span_precision": precision, "span_recall": recall}
        if isinstance(examples, MultiLabeledTexts):
            selected = self._ask(_pairs(examples), lambda part: self._classify(part, labels))
            truth = [[index in row for index in range(len(labels))] for row in examples.labels]
            micro, macro = multi_label_f1(selected, truth)
            return {"micro_f1": micro, "macro_f1": macro}
        if isinstance(examples, LabeledTexts):
            predicted = self._ask(_pairs(examples), lambda part: self._classify(part, None))
        else:
            predicted = self._ask(examples.images, self._label)
        actual = [labels[index] for index in examples.labels]
        return {"accuracy": accuracy(predicted, actual), "macro_f1": macro_f1(predicted, actual)}

    def _measure_pictures(self, examples: Any, labels: Sequence[str]) -> dict[str, float | str]:
        """The figures of a task of images that does not name labels."""
        if self._model.task is Task.IMAGE_GENERATION:
            return self._measure_drawings(examples, labels)
        if isinstance(examples, NeighbouringImages):
            return self._measure_neighbours(examples)
        if isinstance(examples, SegmentedFiles):
            return self._measure_segments(examples)
        if isinstance(examples, CaptionedFiles) and self._model.task is Task.CAPTIONING:
            return self._measure_captions(examples)
        return self._measure_recalls(examples)

    def _measure_drawings(
        self, examples: PromptedFiles | EncodedImages, labels: Sequence[str]
    ) -> dict[str, float | str]:
        """How well drawings of the data's prompts show what they were asked for, and how near they are to its images.

        Each prompt is drawn once, with its index as the seed. What tells is another model that the server has: for
        labels a classifier that knows them all, for texts an embedder of images with a partner that reads texts.
        """
        prompts = (
            [labels[label] for label in examples.labels] if isinstance(examples, EncodedImages) else examples.prompts
        )
        if len(prompts) < 2:
            raise EvaluationError("a distance between sets of images needs at least two of each; there is one")
        judge, reader = self._find_judges()
        drawn = self._ask(list(enumerate(prompts)), self._draw, "drawing")
        named: Any = {"model": judge.name, "model_version": judge.version}

        vectors, known = (self._embed_images(images, "images", named) for images in (drawn, examples.images))
        figures: dict[str, float | str] = {"frechet_distance": frechet_distance(vectors, known), "judge": judge.name}
        if reader is None:

            def label(images: Sequence[bytes]) -> list[str]:
                return [one.labels[0].label for one in self._client.classify_image(images, top_k=1, **named)]

            return {"label_accuracy": accuracy(self._ask(drawn, label, "naming drawings"), prompts), **figures}
        texts = list(dict.fromkeys(prompts))

        def read(part: Sequence[str]) -> list[NDArray[np.float32]]:
            answer = self._client.embed_text(part, truncate=True, model=reader.name, model_version=reader.version)
            return list(answer.to_numpy())

        similarity = vectors @ np.stack(self._ask(texts, read, "reading texts")).T
        return {"r_precision": r_precision(similarity, _candidates(prompts, texts)), **figures}

    def _find_judges(self) -> tuple[Model, Model | None]:
        """The model that looks at drawings, and the one that reads texts into its space; None for labels.

        Raises:
            EvaluationError: The server has no such model.
        """
        models = self._client.list_models().models
        if self._model.labels:
            classifiers = [one for one in models if one.task is Task.IMAGE_CLASSIFICATION and one.embedding_dimension]
            knowing = [one for one in classifiers if set(self._model.labels) <= set(one.labels)]
            if not knowing:
                raise EvaluationError(
                    f"no loaded classifier of images that gives embeddings knows the labels of {self._model.name}; "
                    "load one too"
                )
            return knowing[-1], None
        readers = {one.embedding_space: one for one in models if one.task is Task.TEXT_EMBEDDING}
        for one in reversed(models):
            if one.task is Task.IMAGE_EMBEDDING and one.embedding_space and one.embedding_space in readers:
                return one, readers[one.embedding_space]
        raise EvaluationError(
            "no loaded embedder of images shares its space with a loaded embedder of texts; load two such models too"
        )

    def _draw(self, part: Sequence[tuple[int, str]]) -> list[bytes]:
        return [self._client.generate_image(prompt, seed=seed, **self._options).results[0].png for seed, prompt in part]

    def _measure_recalls(self, examples: Pictures | CaptionedFiles) -> dict[str, float | str]:
        """Recall of images and texts by the vectors of two models that share a space."""
        from headway_training.tasks.contrastive import (  # noqa: PLC0415 (torch, which other tasks do without)
            caption_recalls,
            measure_recalls,
        )

        space = self._model.embedding_space
        models = self._client.list_models(Task.TEXT_EMBEDDING).models
        partners = [model for model in models if space and model.embedding_space == space]
        if not partners:
            raise EvaluationError(f"{self._model.name} shares its space with no loaded model of texts; load that too")
        partner = partners[-1]

        def texts(lines: Sequence[str]) -> NDArray[np.float32]:
            def embed(part: Sequence[str]) -> list[NDArray[np.float32]]:
                answer = self._client.embed_text(part, truncate=True, model=partner.name, model_version=partner.version)
                return list(answer.to_numpy())

            return np.stack(self._ask(lines, embed, "reading texts"))

        def images(kind: str) -> NDArray[np.float32]:
            encoded = [_encode_png(image) for image in getattr(examples, kind).images]
            return self._embed_images(encoded, kind.replace("_", " "))

        if isinstance(examples, Pictures):
            return dict(measure_recalls(examples, images=images, texts=texts))
        vectors = self._embed_images(examples.images, "images")
        captions = [[text for several in row.values() for text in several] for row in examples.captions]
        return dict(caption_recalls(captions, vectors, texts))

    def _measure_neighbours(self, examples: NeighbouringImages) -> dict[str, float | str]:
        """Accuracy of labels by the votes of the nearest images that have one."""
        known = self._embed_images(examples.known.images, "known images")
        asked = self._embed_images(examples.images, "images")
        found = nearest_neighbour_labels(known, np.array(examples.known.labels), asked)
        return {"knn_accuracy": accuracy(found, examples.labels)}

    def _embed_images(
        self, images: Sequence[bytes], what: str, options: Mapping[str, Any] | None = None
    ) -> NDArray[np.float32]:
        """The vectors of image files, (N, D), by the model that is measured or by that which `options` name."""
        options = self._options if options is None else options

        def embed(part: Sequence[bytes]) -> list[NDArray[np.float32]]:
            return list(self._client.embed_image(part, **options).to_numpy())

        return np.stack(self._ask(images, embed, f"looking at {what}"))

    def _measure_captions(self, examples: CaptionedFiles) -> dict[str, float | str]:
        """CIDEr-D, BLEU and METEOR of the captions in each language of the data."""
        from headway_training.tasks.captioning import score_captions  # noqa: PLC0415 (torch, as above)

        options = {name: value for name, value in self._options.items() if name != "language"}
        written = {
            language: self._ask(examples.images, partial(self._caption, options, language))
            for language in examples.captions[0]
        }
        references = {language: [row[language] for row in examples.captions] for language in written}
        return dict(score_captions(written, references))

    def _caption(self, options: Mapping[str, Any], language: str, images: Sequence[bytes]) -> list[str]:
        chosen = {**options, "language": language} if language else options
        return [result.text for result in self._client.caption_image(images, **chosen)]

    def _measure_segments(self, examples: SegmentedFiles) -> dict[str, float | str]:
        """Mean IoU at one point and at one box, by the kind of picture."""
        from headway_training.tasks.segmentation import mean_ious  # noqa: PLC0415 (torch, as above)

        found: dict[str, list[float]] = {}
        for kind, values in self._ask(examples.pictures, lambda part: [self._cut_out(one) for one in part]):
            for name, numbers in values.items():
                found.setdefault(name if name == "iou_error" else f"{kind}_{name}", []).extend(numbers)
        return dict(mean_ious(found))

    def _cut_out(self, picture: MeasuredPicture) -> tuple[str, dict[str, list[float]]]:
        """The kind of a picture, and the IoU of what its points and its boxes are answered with."""
        height, width = picture.image.shape[:2]
        scale = np.array((width, height, width, height), np.float32)
        points = [SegmentPrompt(points=[(float(x), float(y))]) for x, y in picture.points * scale[:2]]
        boxes = [
            SegmentPrompt(box=(left, top, right, bottom))
            for left, top, right, bottom in (picture.boxes * scale).tolist()
        ]
        found: dict[str, list[float]] = {}
        for name, prompts in (("point", points), ("box", boxes)):
            answer = self._client.segment_image(_encode_png(picture.image), prompts=prompts, **self._options)
            for row, result in enumerate(answer):
                segment = picture.mask(row)
                masks = [mask.to_numpy() for mask in result.masks]
                ious = [float((mask & segment).sum() / (mask | segment).sum()) for mask in masks]
                found.setdefault(name, []).append(ious[0])  # the mask that the model is surest of
                found.setdefault(f"{name}_best", []).append(max(ious))
                errors = [abs(mask.predicted_iou - iou) for mask, iou in zip(result.masks, ious, strict=True)]
                found.setdefault("iou_error", []).extend(errors)
        return picture.kind, found

    def _ask(
        self, inputs: Sequence[Any], call: Callable[[Sequence[Any]], Sequence[Any]], what: str = "measuring"
    ) -> list[Any]:
        """Answers every input, in order; the first error of a call ends it."""
        parts = [inputs[start : start + self._batch_size] for start in range(0, len(inputs), self._batch_size)]
        with ThreadPoolExecutor(max_workers=self._concurrency) as pool:
            answers = track(
                pool.map(call, parts),
                what,
                total=len(parts),
                console=self._console,
                disable=not self._console.is_terminal,
            )
            return [answer for part in answers for answer in part]

    def _find_spans(self, texts: Sequence[str]) -> list[list[tuple[int, int, str]]]:
        answer = self._client.classify_tokens(texts, **self._text_options)
        return [[(span.start, span.end, span.label) for span in result.spans] for result in answer]

    def _transcribe(self, audios: Sequence[bytes]) -> list[str]:
        return [result.text for result in self._client.transcribe_speech(audios, **self._options)]

    def _label(self, images: Sequence[bytes]) -> list[str]:
        return [result.labels[0].label for result in self._client.classify_image(images, top_k=1, **self._options)]

    def _classify(self, pairs: Sequence[tuple[str, str]], labels: Sequence[str] | None) -> list[Any]:
        """The likeliest label of each text; or, given the labels, whether each of them applies.

        Texts with a pair go in a call of their own, as a call has pairs or none.
        """
        answers: dict[int, Any] = {}
        for has_pair in (False, True):
            own = [index for index, (_, pair) in enumerate(pairs) if bool(pair) == has_pair]
            if own:
                more = {"text_pairs": [pairs[index][1] for index in own]} if has_pair else {}
                options = {**self._text_options, **more, "top_k": 1 if labels is None else 0}
                results = self._client.classify_text([pairs[index][0] for index in own], **options)
                answers |= zip(own, results, strict=True)
        scores = [answers[index].labels for index in range(len(pairs))]
        if labels is None:
            return [row[0].label for row in scores]
        selected = [{score.label for score in row if score.selected} for row in scores]
        return [[label in row for label in labels] for row in selected]

    def _score_text(self, text: str) -> dict[str, float | str]:
        """Nats per character of a running text, from the log-probabilities that the server answers of prompts.

        The definition is that of docs/checkpoint.md, windows of the model's length at half a window's stride. A caller
        has no tokenizer, so the text is cut before white space and not after a number of tokens, and a prompt has one
        token less than a window, as it leaves room for an answer. The figures agree to a few thousandths.
        """
        limit = min(self._model.max_input_token_count, self._model.max_token_count - 1)
        chunks, counts = self._cut(text, limit)
        windows = []
        for index in range(len(chunks)):
            first, num_tokens = index, counts[index]
            while first > 0 and num_tokens < limit:  # the server cuts off the rest
                first -= 1
                num_tokens += counts[first]
            windows.append(("".join(chunks[first : index + 1]), counts[index]))

        def score(part: Sequence[tuple[str, int]]) -> list[tuple[float, int]]:
            answers = self._read_prompts([window for window, _ in part], score=True)
            return [
                (
                    -sum(token.log_probability or 0.0 for token in answer.prompt_tokens[-count:]),
                    len(answer.prompt_tokens[0].text),
                )
                for (_, count), answer in zip(part, answers, strict=True)
            ]

        scores = self._ask(windows, score)
        num_tokens = sum(counts) - 1  # the text's first token has nothing before it
        if num_tokens == 0:
            raise EvaluationError("the text is a single token; nats per character need at least 2")
        nats = sum(one for one, _ in scores)
        return {"nats_per_character": nats / (len(text) - scores[0][1]), "nats_per_token": nats / num_tokens}

    def _cut(self, text: str, limit: int) -> tuple[list[str], list[int]]:
        """Cuts a text into chunks of about half a window, each shorter than `limit`, and counts their tokens."""
        half = (limit + 1) // 2
        (sample,) = self._read_prompts([text[:half]])
        chunks = list(cut_before_spaces([text], max(1, round(half * min(len(text), half) / sample.prompt_token_count))))
        while True:
            counts = [answer.prompt_token_count for answer in self._ask(chunks, self._read_prompts, "counting tokens")]
            is_long = [count >= limit and len(chunk) > 1 for count, chunk in zip(counts, chunks, strict=True)]
            if not any(is_long):
                return chunks, counts
            chunks = [
                part
                for chunk, long in zip(chunks, is_long, strict=True)
                for part in (cut_before_spaces([chunk], (len(chunk) + 1) // 2) if long else [chunk])
            ]

    def _read_prompts(self, prompts: Sequence[str], *, score: bool = False) -> Sequence[Any]:
        """Has prompts read, with one token after them; longer ones lose their beginning."""
        answer = self._client.generate_text(
            prompts,
            model=self._model.name,
            model_version=self._model.version,
            max_new_tokens=1,
            temperature=0.0,
            truncate=True,
            prompt_log_probabilities=score,
        )
        return answer.results


def _candidates(prompts: Sequence[str], texts: Sequence[str]) -> NDArray[np.int64]:
    """The numbers of each prompt's text and of up to 99 others, always the same ones: (N, K)."""
    random, count = np.random.default_rng(0), min(_NUM_CANDIDATES, len(texts))
    rows = []
    for prompt in prompts:
        own = texts.index(prompt)
        others = random.choice(len(texts) - 1, count - 1, replace=False)
        rows.append([own, *(others + (others >= own))])
    return np.array(rows, np.int64)


def _pairs(examples: LabeledTexts | MultiLabeledTexts) -> list[tuple[str, str]]:
    """Texts with what they are paired with; empty if there is nothing."""
    return list(zip(examples.texts, examples.text_pairs or [""] * len(examples), strict=True))
