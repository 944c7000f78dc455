"""What is exported: a module with everything a bundle says of it, from a checkpoint or from the user's own files.

N examples, C labels, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights
from tokenizers import Tokenizer
from torch import nn

from headway_export.errors import SourceError
from headway_export.graphs import parameter_count
from headway_export.requirements import needed_flags
from headway_export.rewriting import Blocks
from headway_export.tasks.table import task_of, tasks_where
from headway_server.bundles import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_FILE,
    Architecture,
    AudioCodec,
    AudioPreprocessing,
    ClassificationScheme,
    Ctc,
    DelayedCodes,
    Depth,
    Detection,
    Diffusion,
    FlowSpeech,
    ImagePreprocessing,
    ImagePrompt,
    ImageQuestion,
    Languages,
    Limits,
    Origin,
    SamplingDefaults,
    Scoring,
    Segmentation,
    SemanticSegmentation,
    SoundPreprocessing,
    Space,
    SpecialTokens,
    SpectrogramSpeech,
    SpeechStages,
    SpeechTokens,
    Tagging,
    Task,
    VideoFrames,
    WordBoxes,
)
from headway_server.bundles.tags import Aggregation, TagScheme
from headway_server.errors import BundleError
from headway_server.preprocessing import ChatTemplate
from headway_training.checkpoint import (
    CHECKPOINT_FILE,
    HUGGINGFACE,
    IMAGE_EVALUATION_FILE,
    WEIGHTS_FILE,
    Checkpoint,
    TextPairUse,
    TrainingRecord,
    load_model,
    load_tokenizer,
    read_checkpoint,
)
from headway_training.errors import DataError, TrainingError
from headway_training.models import CLIP
from headway_training.models.own import find_factory, raised
from headway_training.models.protocols import lacking
from headway_training.tokenizers import encode_texts

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
"""Where model hubs put a chat template that is not a file of its own."""

Readable = NDArray[Any] | Mapping[str, NDArray[Any]]
"""What an encoder reads of one input: an array, or several by the names that its graph gives them."""

RecordType = TypeVar("RecordType", bound=BaseModel)
RowType = TypeVar("RowType", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """P segments of images, and the prompts that ask for them."""

    image_index: NDArray[np.int64]
    """(P,), the image of each."""
    points: NDArray[np.float32]
    """(P, 2), a place in each, as shares of the image's width and height."""
    boxes: NDArray[np.float32]
    """(P, 4): left, top, right, bottom, likewise."""
    masks: NDArray[np.uint8]
    """(P, height width / 8), by `numpy.packbits`."""

    def mask(self, row: int, height: int, width: int) -> NDArray[np.bool_]:
        """Returns a segment's pixels, (height, width)."""
        bits = np.unpackbits(self.masks[row], count=height * width)
        return bits.reshape(height, width).astype(np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueObjects:
    """P objects of images."""

    image_index: NDArray[np.int64]
    """(P,), the image of each."""
    boxes: NDArray[np.float32]
    """(P, 4): left, top, right, bottom, as shares of the image's width and height."""
    labels: NDArray[np.int64]
    """(P,)."""

    def take(self, rows: NDArray[np.int64]) -> TrueObjects:
        """Returns the objects of some images, ascending, as those of the images that are left."""
        kept = np.isin(self.image_index, rows)
        places = np.searchsorted(rows, self.image_index[kept])
        return TrueObjects(image_index=places, boxes=self.boxes[kept], labels=self.labels[kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationData:
    """Examples that a task metric is measured on."""

    dataset: str
    metric: str
    higher_is_better: bool
    texts: Sequence[str] = ()
    text_pairs: Sequence[str] | None = None
    """The second text of each, empty where there is none; None: no text has one."""
    references: Sequence[str] = ()
    """Translations of the texts, or what is said in the recordings."""
    answers: Sequence[Sequence[str]] = ()
    """The answers that are right, of each question in `texts` about its context in `text_pairs`."""
    languages: Sequence[tuple[str, str]] = ()
    """Codes of source and target of each translation, empty for the only one; none: empty for all."""
    recordings: Sequence[NDArray[np.int16]] = ()
    """Mono audio, (S,) each, at most a window."""
    rate: int = 0
    """Samples of the recordings a second."""
    groups: Sequence[str] = ()
    """Where each recording comes from."""
    captions: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """Captions of each image, by language."""
    spans: Sequence[Collection[tuple[int, int, str]]] = ()
    """Start, end and label of the spans of each text."""
    labels: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """(N,), the class of each; where several labels may apply, (N, C), 1 for each that does."""
    images: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 0, 0, 3), np.uint8))
    """(N, height, width, 3), already resized and cropped."""
    segments: Segments | None = None
    """What is to be found in the images, for segmentation."""
    objects: TrueObjects | None = None
    """What is to be found in the images, for object_detection."""
    sequences: Sequence[NDArray[np.int64]] = ()
    """Tokens of voice, text and speech, (T,) each, for speech_synthesis."""
    prompt_lengths: Sequence[int] = ()
    """How many tokens of each come before the speech."""

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.images) or len(self.recordings) or len(self.texts) or len(self.sequences)

    def take(self, rows: NDArray[np.int64]) -> EvaluationData:
        """Returns some of the examples."""
        segments = self.segments
        if segments is not None:
            kept = np.isin(segments.image_index, rows)
            places = np.searchsorted(rows, segments.image_index[kept])
            arrays = {name: getattr(segments, name)[kept] for name in ("points", "boxes", "masks")}
            segments = Segments(image_index=places, **arrays)
        lists = (
            "texts",
            "text_pairs",
            "references",
            "answers",
            "languages",
            "recordings",
            "groups",
            "spans",
            "sequences",
        )
        taken: dict[str, Any] = {
            name: [values[row] for row in rows]
            for name in (*lists, "sequences", "prompt_lengths")
            if (values := getattr(self, name))  # a task has some of them
        }
        taken |= {name: getattr(self, name)[rows] for name in ("labels", "images") if len(getattr(self, name))}
        captions = {code: [written[row] for row in rows] for code, written in self.captions.items()}
        objects = None if self.objects is None else self.objects.take(rows)
        return replace(self, captions=captions, segments=segments, objects=objects, **taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """A module with everything a bundle says of it."""

    name: str
    task: Task
    module: nn.Module
    """fp32, on the CPU, in evaluation mode. It is what is traced."""
    make_reference: Callable[[], nn.Module]
    """Makes the model a second time, as `module` was made and from the same files: what an export is held against. It
    follows the protocol of the task too, or attends by itself (`OwnText`, `OwnTarget`)."""
    description: str
    license: str
    architecture: Architecture
    limits: Limits
    tokenizer: Tokenizer | None = None
    special_tokens: SpecialTokens | None = None
    chat_template: str | None = None
    """Jinja that makes a prompt of a conversation; for generation."""
    labels: tuple[str, ...] = ()
    classification: ClassificationScheme | None = None
    """How logits become probabilities; None: single_label, and a temperature of 1."""
    text_pairs: TextPairUse = "never"
    """When a text classifier reads two texts as one input: never, where a second one is given, or always."""
    image_preprocessing: ImagePreprocessing | None = None
    image_prompt: ImagePrompt | None = None
    """How images stand in the prompts of a generation model; None: it reads none."""
    image_question: ImageQuestion | None = None
    """How a text stands behind an image that is written about; None: it reads none."""
    semantic_segmentation: SemanticSegmentation | None = None
    """How the outputs of a model that labels pixels become scores."""
    depth: Depth | None = None
    """Meaning of the outputs of a model that estimates depth."""
    detection: Detection | None = None
    """How the outputs of a detector become objects."""
    video: VideoFrames | None = None
    """What a model reads of a video; None: it reads none."""
    segmentation: Segmentation | None = None
    """How prompts of a segmentation model are answered; None: the manifest's defaults."""
    diffusion: Diffusion | None = None
    """How a published model draws; None: it draws as the kit's own do, or not at all."""
    audio_preprocessing: AudioPreprocessing | None = None
    sound: SoundPreprocessing | None = None
    """How audio is prepared for a model without a decoder."""
    ctc: Ctc | None = None
    """How the frames of a transcription model become tokens."""
    codec: AudioCodec | None = None
    flow: FlowSpeech | None = None
    """How a model of flow synthesis speaks."""
    stages: SpeechStages | None = None
    """How a model of staged synthesis speaks."""
    spectrogram: SpectrogramSpeech | None = None
    """How a model of spectrogram synthesis speaks."""
    delayed: DelayedCodes | None = None
    """How a model of delayed synthesis writes codes."""
    speech: SpeechTokens | None = None
    languages: Languages | None = None
    sampling_defaults: SamplingDefaults | None = None
    attention: bool = False
    """True to write the graph of the attention weights too, where `ExportOptions` do not say."""
    scoring: Scoring | None = None
    """How the logit of a scorer becomes its score."""
    tagging: Tagging | None = None
    """How spans are found by a token classifier's tags; None: the manifest's defaults."""
    word_boxes: WordBoxes | None = None
    """Of a token classifier that reads pages; None: it reads texts."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that can be put before what is embedded, by name."""
    default_prompt: str | None = None
    """Name of the one that is put before where none is asked for."""
    pools_prompt: bool = True
    """False for an embedder whose pooling leaves out the tokens of a prompt, which have 2 in `attention_mask`."""
    has_sparse_vectors: bool = False
    """True for vectors of weights of the vocabulary's tokens."""
    space: Space | None = None
    """The space that the vectors share with those of another model."""
    truncation_side: Literal["right", "left"] = "right"
    """Which end of a text is cut that is too long."""
    prompt_prefix: tuple[int, ...] = ()
    """Tokens that come before a prompt that is given as text; for generation."""
    media_tokens: tuple[int, ...] = ()
    """Tokens that stand for images or sounds, which the graph does not read."""
    suppressed_tokens: tuple[int, ...] = ()
    """Tokens that are never generated."""
    evaluation: EvaluationData | None = None
    texts: tuple[str, ...] = ()
    """Texts that int8 is held against fp32 on where there is no evaluation data; none: drawn ones."""
    images: NDArray[np.uint8] | Sequence[NDArray[np.uint8]] | None = None
    """N of (height, width, 3), already resized and cropped, that int8 is held against fp32 on likewise."""
    recordings: tuple[NDArray[np.float32], ...] = ()
    """Mono audio, (S,) each, at the model's rate and at most a window, that int8 is held against fp32 on likewise."""
    texts_name: str = ""
    """Where the texts, images or recordings come from."""
    training: TrainingRecord | None = None
    origin: Origin | None = None
    """What the weights were fetched as."""
    documents: Mapping[str, bytes] = field(default_factory=dict)
    """Files that go into the bundle as they are, by their paths in it."""
    reference_name: str = "PyTorch"
    """What an export is held against, for the card."""
    kept: Mapping[bytes, Callable[[], Blocks]] = field(default_factory=dict)
    """Reads the blocks of a weight that came in 4 bits, which int4 keeps, by `digest_of`. The other weights of such a
    model came in more bits, and are int8 there."""

    checkpoint_files: tuple[Path, ...] = ()
    """Files of safetensors that the module was read from. Weights that are there in fp32 need not be written for a
    variant that is not kept."""

    def __post_init__(self) -> None:
        if self.tokenizer is not None:  # the caller decides on both
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()

    @property
    def has_token_types(self) -> bool:
        """True if the module reads which text of a pair each token belongs to."""
        number = getattr(self.module, "num_token_types", None)
        return self.text_pairs != "never" and isinstance(number, int) and number > 1

    def encode(
        self, texts: Sequence[str], max_tokens: int | None = None, *, frame: bool = True
    ) -> list[NDArray[np.int64]]:
        """Tokenizes texts as a server does.

        Args:
            texts: The texts.
            max_tokens: Where longer ones are cut.
            frame: True to add the special tokens that the tokenizer puts around a text.

        Returns:
            The ids of each text, (T,).
        """
        assert self.tokenizer is not None, "a text model has its tokenizer"
        return [np.array(ids, np.int64) for ids in encode_texts(self.tokenizer, texts, max_tokens, special=frame)]

    def encode_sources(
        self, texts: Sequence[str], languages: Sequence[tuple[str, str]] = ()
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Tokenizes what an encoder-decoder reads, as a server does.

        Args:
            texts: The texts.
            languages: Codes of source and target of each; none: a model of translations has one of each.

        Returns:
            For each text the ids of the source, (S,), and those that the decoder reads before it writes.

        Raises:
            SourceError: The model does not have a language, or has several and none is named.
        """
        limit = self.limits.max_input_tokens
        assert limit is not None, "the source has read the module's lengths"
        pairs = []
        for text, codes in zip(texts, languages or [("", "")] * len(texts), strict=True):
            before, start = self._given_tokens(*codes)
            (ids,) = self.encode([text], limit - len(before))
            pairs.append((np.concatenate([before, ids]), start))
        return pairs

    def caption_start(self, language: str) -> NDArray[np.int64]:
        """Returns the tokens that the decoder of a captioner reads before it writes in a language, (P,).

        Of a model of speech: in what is spoken.
        """
        return self._given_tokens("", language)[1]

    def _given_tokens(self, source: str, target: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the tokens that come before a source, and those that the decoder reads before it writes."""
        assert self.special_tokens is not None, "a text model has its special tokens"
        before: list[int | None] = []
        start = [self.special_tokens.bos, *self.prompt_prefix]
        if self.languages is not None:
            spoken = self._language(source, self.languages.sources) if self.languages.sources else ""
            written = self._language(target, self.languages.targets)
            before = [self.languages.target_marks.get(written), self.languages.source_tokens.get(spoken)]
            start.append(self.languages.target_tokens.get(written))
        if self.speech is not None:
            start += [self.speech.transcribe, self.speech.no_timestamps]
        given = ([token for token in tokens if token is not None] for tokens in (before, start))
        first, second = (np.array(tokens, np.int64) for tokens in given)
        return first, second

    def _language(self, code: str, known: Sequence[str]) -> str:
        found = Languages.match(code, known)
        if found is None:
            says = f"no language {code}" if code else "several languages, and an example names none"
            raise SourceError(f"{self.name}: has {says}; it has {', '.join(known)}")
        return found


def sources_from_checkpoint(path: Path, *, name: str | None = None) -> tuple[ExportSource, ...]:
    """Reads a checkpoint of the kit (docs/checkpoint.md): one source, or one for each tower of a model of two.

    Args:
        path: Its folder.
        name: The model's name in the store; None takes the checkpoint's. Of two towers, `-image` and `-text` follow it.

    Raises:
        SourceError: It is not a checkpoint, is damaged, or is of a task that cannot be exported.
    """
    module, checkpoint = _load(path)
    if not isinstance(module, CLIP):
        return (_from_loaded(path, module, checkpoint, name),)
    return _from_towers(path, module, checkpoint, name or checkpoint.name)


def from_checkpoint(path: Path, *, name: str | None = None) -> ExportSource:
    """Reads a checkpoint that is one source; the arguments and errors are those of `sources_from_checkpoint`."""
    return _from_loaded(path, *_load(path), name)


def _load(path: Path) -> tuple[nn.Module, Checkpoint]:
    try:
        return load_model(path)
    except TrainingError as error:
        raise SourceError(str(error)) from error


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return load_tokenizer(path)
    except TrainingError as error:
        raise SourceError(str(error)) from error


def _from_towers(path: Path, model: CLIP, checkpoint: Checkpoint, name: str) -> tuple[ExportSource, ...]:
    """Makes a source of each tower; int8 is held against fp32 on the checkpoint's evaluation data."""
    weights = hashlib.sha256((path / WEIGHTS_FILE).read_bytes()).hexdigest()
    space = Space(
        name=f"{checkpoint.name}-{weights[:12]}",
        probabilities=model.configuration.loss,
        scale=model.scale.item() / (checkpoint.classification.temperature if checkpoint.classification else 1),
        bias=0.0 if model.logit_bias is None else model.logit_bias.item(),
    )
    texts, images = _read_pairs(path, checkpoint)

    def tower_of(model: CLIP, task: Task) -> nn.Module:
        return model.image_tower if task is Task.IMAGE_EMBEDDING else model.text_tower

    def source(task: Task, side: str, **parts: Any) -> ExportSource:
        tower = tower_of(model, task)
        return ExportSource(
            name=f"{name}-{side}",
            task=task,
            module=tower,
            make_reference=lambda: tower_of(cast("CLIP", _load(path)[0]), task),
            description=f"{checkpoint.description} This is the tower that reads {side}s.",
            license=checkpoint.license,
            architecture=Architecture(
                kind=checkpoint.architecture,
                parameter_count=parameter_count(tower),
                configuration=checkpoint.configuration,
            ),
            limits=limits_of(tower, task),
            space=space,
            texts_name=checkpoint.evaluation.dataset if checkpoint.evaluation else "",
            training=checkpoint.training,
            **parts,
        )

    preprocessing = _convert(ImagePreprocessing, checkpoint.image_preprocessing)
    tokens = _convert(SpecialTokens, checkpoint.special_tokens)
    return (
        source(Task.IMAGE_EMBEDDING, "image", image_preprocessing=preprocessing, images=images),
        source(Task.TEXT_EMBEDDING, "text", tokenizer=_load_tokenizer(path), special_tokens=tokens, texts=texts),
    )


def _read_pairs(path: Path, checkpoint: Checkpoint) -> tuple[tuple[str, ...], NDArray[np.uint8] | None]:
    """Reads the texts and the images of a checkpoint's evaluation data, where it has some."""
    if checkpoint.evaluation is None:
        return (), None
    try:
        lines = (path / checkpoint.evaluation.file).read_text(encoding="utf-8").split("\n")
        texts = tuple(TextRow.model_validate_json(line).text for line in lines if line.strip())
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(f"{path}: its evaluation data cannot be read ({error}); see docs/checkpoint.md") from error
    return texts, read_images(path)


def read_images(path: Path) -> NDArray[np.uint8]:
    """Reads the images of a checkpoint's evaluation data: those of vectors judge no more than how near they stay."""
    try:
        with np.load(path / IMAGE_EVALUATION_FILE) as arrays:
            images: NDArray[np.uint8] = arrays["images"]
            return images
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(f"{path}: its evaluation data cannot be read ({error}); see docs/checkpoint.md") from error


def _from_loaded(path: Path, module: nn.Module, checkpoint: Checkpoint, name: str | None) -> ExportSource:
    tokenizer = _load_tokenizer(path) if checkpoint.reads_text else None
    task = _exportable(checkpoint.task)
    exported = task_of(task)
    exported.check_labels(checkpoint.labels)
    return ExportSource(
        name=name or checkpoint.name,
        task=task,
        module=module,
        make_reference=lambda: _load(path)[0],
        description=checkpoint.description,
        license=checkpoint.license,
        architecture=Architecture(
            kind=checkpoint.architecture,
            parameter_count=parameter_count(module),
            configuration=checkpoint.configuration,
        ),
        limits=limits_of(module, task),
        tokenizer=tokenizer,
        special_tokens=_convert(SpecialTokens, checkpoint.special_tokens),
        labels=checkpoint.labels,
        classification=_convert(ClassificationScheme, checkpoint.classification),
        text_pairs=checkpoint.text_pairs,
        image_preprocessing=_convert(ImagePreprocessing, checkpoint.image_preprocessing),
        audio_preprocessing=_convert(AudioPreprocessing, checkpoint.audio_preprocessing),
        languages=(
            Languages(target_tokens=checkpoint.language_tokens)
            if checkpoint.language_tokens
            else _convert(Languages, checkpoint.languages)
        ),
        sampling_defaults=_convert(SamplingDefaults, checkpoint.sampling_defaults),
        attention=checkpoint.attention,
        training=checkpoint.training,
        **exported.parts_of_checkpoint(path, module, checkpoint),
    )


def checkpoint_beside(path: Path) -> Checkpoint | None:
    """Reads what a run has written beside the model folder of `transformers` that it leaves; None in another folder.

    Raises:
        SourceError: It is damaged.
    """
    if not (path / CHECKPOINT_FILE).is_file():
        return None
    try:
        checkpoint = read_checkpoint(path)
    except TrainingError as error:
        raise SourceError(str(error)) from error
    return checkpoint if checkpoint.architecture == HUGGINGFACE else None


def with_record(source: ExportSource, checkpoint: Checkpoint, *, license_name: str | None = None) -> ExportSource:
    """Adds to what a model folder says what the run that left it has found: temperature, thresholds, its record."""
    return replace(
        source,
        description=checkpoint.description,
        license=license_name or checkpoint.license,
        classification=_convert(ClassificationScheme, checkpoint.classification),
        text_pairs=checkpoint.text_pairs,
        sampling_defaults=_convert(SamplingDefaults, checkpoint.sampling_defaults) or source.sampling_defaults,
        training=checkpoint.training,
    )


def from_factory(
    factory: str,
    weights: Path,
    *,
    task: str,
    name: str,
    tokenizer_file: Path | None = None,
    special_tokens: SpecialTokens | None = None,
    chat_template_file: Path | None = None,
    labels: Sequence[str] = (),
    multi_label: bool = False,
    text_pairs: TextPairUse = "never",
    tagging: Tagging | None = None,
    image_preprocessing: ImagePreprocessing | None = None,
    languages: Languages | None = None,
    evaluation_file: Path | None = None,
    description: str = "",
    license_name: str = "not stated",
) -> ExportSource:
    """Takes a module from outside the kit (docs/bring-your-own.md).

    Args:
        factory: `package.module:function`; the function returns the module.
        weights: safetensors file, loaded strictly.
        task: The task it follows the protocol of.
        name: The model's name in the store.
        tokenizer_file: `tokenizer.json`, for text.
        special_tokens: Ids with a meaning of their own, for text.
        chat_template_file: Jinja, or a `tokenizer_config.json` that holds it, for generation.
        labels: Names in the order of the outputs, for classifiers.
        multi_label: True if several labels may apply to a text: those with a probability of at least 0.5.
        text_pairs: When two texts are read as one input, for text classification.
        tagging: How spans are found by tags, for token classification; None: the manifest's defaults.
        image_preprocessing: For images.
        languages: For translation.
        evaluation_file: Evaluation data in the format of docs/checkpoint.md.
        description: One sentence.
        license_name: Of the weights.

    Raises:
        SourceError: Something is missing or does not fit.
    """
    exportable = _exportable(task)
    exported = task_of(exportable)
    if exported.is_of_the_kit:
        raise SourceError(f"--task {task}: such a model is exported from a checkpoint of the kit; give its folder")
    _check_flags(
        exportable,
        {
            "--tokenizer": tokenizer_file is not None,
            "--labels": bool(labels),
            "--languages": languages is not None,
            "--preprocessing": image_preprocessing is not None,
            "--multi-label": multi_label,
            "--text-pairs": text_pairs != "never",
            "--tag-scheme": tagging is not None,
            "--chat-template": chat_template_file is not None,
        },
    )
    exported.check_labels(labels, tagging)
    chat_template = read_chat_template(chat_template_file) if chat_template_file else None
    if chat_template_file is not None and chat_template is None:
        raise SourceError(f"{chat_template_file}: holds no chat_template")
    module = _build(factory, weights)
    return ExportSource(
        name=name,
        task=exportable,
        module=module,
        make_reference=lambda: _build(factory, weights),
        description=description or f"{type(module).__name__}, exported from {factory}.",
        license=license_name,
        architecture=Architecture(
            kind=type(module).__name__, parameter_count=parameter_count(module), configuration={"factory": factory}
        ),
        limits=limits_of(module, exportable),
        tokenizer=open_tokenizer(tokenizer_file) if tokenizer_file else None,
        special_tokens=special_tokens or SpecialTokens() if "--tokenizer" in needed_flags(exportable) else None,
        chat_template=chat_template,
        labels=tuple(labels),
        classification=(
            ClassificationScheme(kind="multi_label", thresholds=(0.5,) * len(labels)) if multi_label else None
        ),
        text_pairs=text_pairs,
        tagging=tagging,
        image_preprocessing=image_preprocessing,
        languages=languages,
        evaluation=(
            read_evaluation(evaluation_file, exportable, evaluation_file.name, len(labels)) if evaluation_file else None
        ),
        **exported.parts_of_factory(factory, module),
    )


def make_tagging(scheme: TagScheme | None, aggregation: Aggregation | None) -> Tagging:
    """Returns how spans are found; None stands for the manifest's default.

    Raises:
        SourceError: The two do not fit each other.
    """
    given = {"scheme": scheme, "aggregation": aggregation}
    try:
        return Tagging.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise SourceError(f"--tag-scheme {scheme}: {error.errors()[0]['ctx']['error']}") from error


def limits_of(module: nn.Module, task: Task) -> Limits:
    """Reads the lengths that a module states.

    Raises:
        SourceError: It does not state them.
    """
    exported = task_of(task)
    try:
        return exported.limits(module)
    except (AttributeError, TypeError) as error:
        lacks = ", ".join(map(repr, lacking(module, *exported.protocols)))
        what = f"has no {lacks}" if lacks else f"does not say how long its inputs are ({error})"
        raise SourceError(f"{type(module).__name__} {what}; {task} needs it (docs/bring-your-own.md)") from error


def _exportable(task: str) -> Task:
    known = tasks_where(lambda one: one.is_read)
    if task not in map(str, known):
        raise SourceError(f"task {task}: cannot be exported; this version exports {', '.join(known)}")
    return Task(task)


def _check_flags(task: Task, given: Mapping[str, bool]) -> None:
    """Checks that everything the task needs is given, and nothing that it does not take."""
    exported = task_of(task)
    if missing := [flag for flag in needed_flags(task) if not given[flag]]:
        raise SourceError(f"--task {task} needs {', '.join(missing)}")
    for flag, is_given in given.items():
        if is_given and flag not in exported.flags:
            made = tasks_where(lambda one: one.is_read and not one.is_of_the_kit)
            tasks = [one for one in made if flag in task_of(one).flags]
            raise SourceError(f"{flag} is for {', '.join(tasks)}, not for {task}; leave it out")


def _convert(record: type[RecordType], value: BaseModel | None) -> RecordType | None:
    """Turns a checkpoint's record into the manifest's of the same fields."""
    return None if value is None else record.model_validate(value.model_dump())


def _build(factory: str, weights: Path) -> nn.Module:
    """Makes the module of a factory, with its weights.

    Raises:
        SourceError: There is no such factory, it makes no module, or the weights are not the module's.
    """
    module = find_made(factory)
    if not isinstance(module, nn.Module):
        raise SourceError(f"--model {factory}: returned {type(module).__name__}; it must return a torch.nn.Module")
    load_strictly(module, weights, factory)
    return module.float().eval()


def find_made(factory: str) -> Any:
    """Returns what a factory makes.

    Raises:
        SourceError: There is no such factory.
    """
    try:
        make = find_factory(factory)
    except ValueError as error:
        raise SourceError(f"--model {error}") from error
    try:
        return make()
    except (Exception, SystemExit) as error:  # whatever its code raises
        raise SourceError(f"--model {factory}: {raised(error)}") from error


def load_strictly(module: nn.Module, weights: Path, factory: str) -> None:
    """Loads the weights of a module.

    Raises:
        SourceError: They are not the module's.
    """
    try:
        load_weights(module, str(weights))
    except (RuntimeError, SafetensorError, OSError) as error:
        raise SourceError(f"{weights}: does not fit the module of {factory}: {error}") from error


def open_tokenizer(file: Path) -> Tokenizer:
    """Opens a `tokenizer.json`.

    Raises:
        SourceError: It cannot be read.
    """
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise SourceError(f"{file}: cannot be read as a tokenizer ({error})") from error


# Chat templates


class _NamedTemplate(BaseModel):
    """One of several templates in `tokenizer_config.json`."""

    name: str
    template: str


_PROCESSORS_TEMPLATE_FILE = "chat_template.json"


def find_chat_template(folder: Path) -> str | None:
    """Returns the chat template that lies in a folder: in a file of its own or another, as models that see have it.

    Raises:
        SourceError: It is there and cannot be read.
    """
    for name in (CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, _PROCESSORS_TEMPLATE_FILE):
        file = folder / name
        if file.exists() and (template := read_chat_template(file)) is not None:
            return template
    return None


def read_chat_template(file: Path) -> str | None:
    """Returns the chat template in a file: all of it, or `chat_template` of a JSON object, if that is there.

    Of several templates it is the one named `default`.

    Raises:
        SourceError: The file cannot be read, or none of its templates is the default.
    """
    try:
        text = file.read_bytes().decode("utf-8")  # ends of lines are kept as they are
        if file.suffix != ".json":
            return text
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise SourceError(f"{file}: cannot be read as a chat template ({error})") from error
    template = content.get("chat_template") if isinstance(content, dict) else None
    if template is None or isinstance(template, str):
        return template
    try:
        named = {entry.name: entry.template for entry in TypeAdapter(list[_NamedTemplate]).validate_python(template)}
    except ValidationError as error:
        raise SourceError(f"{file}: chat_template is neither a text nor a list of named templates") from error
    if "default" not in named:
        names = ", ".join(sorted(named)) or "none"
        raise SourceError(f"{file}: chat_template has no template named default (there is {names}); name one so")
    return named["default"]


def check_chat_template(template: str, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> ChatTemplate:
    """Tries a template as a server will, before anything takes time, and returns it as one.

    Raises:
        SourceError: A server would refuse it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8", newline="")
        tokenizer.save(str(folder / TOKENIZER_FILE))
        try:
            return ChatTemplate.load(
                folder / CHAT_TEMPLATE_FILE, tokenizer_file=folder / TOKENIZER_FILE, special_tokens=special_tokens
            )
        except BundleError as error:
            reason = str(error).removeprefix(f"{folder}/")
            raise SourceError(f"{reason}; a model without the file is exported for prompts alone") from error


# Evaluation data


class TextRow(BaseModel):
    """A text of evaluation data."""

    text: str


def read_evaluation(file: Path, task: Task, dataset: str, num_labels: int) -> EvaluationData:
    """Reads evaluation data in the format of docs/checkpoint.md.

    Raises:
        SourceError: The file cannot be read, or does not hold data of the task.
    """
    exported = task_of(task)
    if not exported.metrics:
        raise SourceError(f"{file}: no metric of {task} is known, so it is not judged on evaluation data")
    try:
        examples = exported.read_examples(file, num_labels)
        metric = exported.metric(examples.pop("metric", exported.metrics[0].name))
        return EvaluationData(dataset=dataset, metric=metric.name, higher_is_better=metric.higher_is_better, **examples)
    except (OSError, ValueError, KeyError, DataError) as error:
        raise SourceError(
            f"{file}: cannot be read as evaluation data of {task} ({error}); see docs/checkpoint.md"
        ) from error


def has_metric(source: ExportSource) -> bool:
    """True if evaluation data of a model can be read and judged on; that of texts has no boxes."""
    return bool(task_of(source.task).metrics) and source.word_boxes is None


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Reads lines of JSON."""
    lines = file.read_text(encoding="utf-8").split("\n")  # not splitlines: a text may hold other ends of lines
    return [json.loads(line) for line in lines if line.strip()]


def validated(row: type[RowType], rows: list[dict[str, Any]]) -> list[RowType]:
    """Checks the rows of a file.

    Raises:
        ValueError: One does not have the fields it needs.
    """
    read = []
    for number, content in enumerate(rows, 1):
        try:
            read.append(row.model_validate(content))
        except ValidationError as error:
            what = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ValueError(f"example {number}: {what}") from error
    return read
