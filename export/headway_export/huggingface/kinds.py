"""The kinds of models that are read, and the kind that a folder is of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from headway_export.errors import SourceError
from headway_export.huggingface.adapters import CONFIG_FILE as ADAPTER_FILE
from headway_export.huggingface.adapters import Adapter
from headway_export.huggingface.asked_captioners import ASKED_CAPTIONERS, read_asked_captioner
from headway_export.huggingface.captioners import CAPTIONERS, read_captioner
from headway_export.huggingface.decoders import check_decoder
from headway_export.huggingface.delayed_speakers import DELAYED_SPEAKERS, read_delayed_speaker
from headway_export.huggingface.depth_estimators import read_depth_estimator
from headway_export.huggingface.detectors import DETECTORS, read_detector
from headway_export.huggingface.embedders import TEXT_ENCODERS, Layout, read_embedder, read_layout, unread_notes
from headway_export.huggingface.encoder_decoders import read_rewriter
from headway_export.huggingface.encoders import ENCODER_DECODER_CLASSIFIERS, read_classifier
from headway_export.huggingface.families import check_family, check_heads
from headway_export.huggingface.flow_speakers import FLOW_SPEAKERS, read_flow_speaker
from headway_export.huggingface.folder import (
    DOCUMENTS,
    FolderOptions,
    ModelFolder,
    as_source_error,
    check_is_dense,
    check_weights,
    in_a_sentence,
    model_name,
    num_experts,
    parse_configuration,
    read_configuration,
    weight_files,
    working_bytes_of,
)
from headway_export.huggingface.gguf_files import describe_gguf, find_gguf, unpack_weights, write_descriptions
from headway_export.huggingface.grounding_detectors import GROUNDING_DETECTORS
from headway_export.huggingface.hub import HubModel, parse_id
from headway_export.huggingface.image_generators import is_pipeline, read_pipeline
from headway_export.huggingface.images import PREPROCESSOR_FILE, read_image_classifier, read_image_embedder
from headway_export.huggingface.late_interaction import compares_tokens, read_late_interaction
from headway_export.huggingface.mask_fillers import read_mask_filler
from headway_export.huggingface.named_tensors import read_named_tensors
from headway_export.huggingface.plain import (
    PlainFolder,
    is_worth_mapping,
    make_plain,
    scratch_or_default,
    temporary_folder,
    widened_bytes,
)
from headway_export.huggingface.published import check_quantization, describe_quantization, quantization_of
from headway_export.huggingface.question_answerers import read_question_answerer
from headway_export.huggingface.rerankers import is_reranker, read_reranker
from headway_export.huggingface.segmenters import ARCHITECTURES, read_segmenter
from headway_export.huggingface.semantic_segmenters import SEMANTIC_HEADS, read_semantic_segmenter
from headway_export.huggingface.settings import folder_notes, length_notes, truncation_side
from headway_export.huggingface.sounds import SOUND_CLASSIFIERS, read_ctc, read_sound_classifier
from headway_export.huggingface.spectrogram_speakers import SPECTROGRAM_SPEAKERS, read_spectrogram_speaker
from headway_export.huggingface.speech import SPEECH_HEADS, read_transcriber
from headway_export.huggingface.staged_speakers import STAGED_SPEAKERS, read_staged_speaker
from headway_export.huggingface.static import read_static, static_part
from headway_export.huggingface.style_speakers import is_style_speaker, read_style_speaker
from headway_export.huggingface.text_pairs import PAIRS, read_text_pair
from headway_export.huggingface.towers import is_two_towers, read_towers
from headway_export.huggingface.translators import TRANSLATORS, read_translator
from headway_export.huggingface.videos import read_video_classifier
from headway_export.huggingface.vision_language import read_seeing_decoder
from headway_export.source import ExportSource, checkpoint_beside, with_record
from headway_export.space import check_disk
from headway_server.bundles import EMBEDDING_TASKS, Origin, Precision, Task
from headway_training.checkpoint import Checkpoint
from headway_training.folders import CONFIG_FILE, TIMM


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Models of one task that one function reads."""

    task: Task
    heads: tuple[str, ...]
    """What the names of their architectures end with."""
    is_encoder_decoder: bool = False
    """True for models of an encoder and a decoder."""
    encoder_decoders: frozenset[str] = frozenset()
    """Model types with a decoder that are read beside encoders."""
    may_have_decoder: bool = False
    """True if both are read, whatever their family."""
    read: Callable[[ModelFolder], tuple[ExportSource, tuple[str, ...]]]
    """Returns what is exported, and notes for the user, a sentence each."""
    check: Callable[[Path, Any], None] = check_is_dense
    """Raises `SourceError` if a configuration tells that the model cannot be served."""


def read_scorer(folder: ModelFolder) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model that scores texts: a decoder by its words, or an encoder by its one output or by its tokens."""
    if compares_tokens(folder.path, folder.config.architectures or []):
        return read_late_interaction(folder)
    is_decoder = folder.is_of("ForCausalLM", "LMHeadModel")
    return read_reranker(folder) if is_decoder else read_classifier(folder)


_ENDINGS: Final = ("For", "LMHead")
"""What heads begin with that any family may have; other heads are whole names of architectures."""
KINDS: Final = (
    Kind(task=Task.GENERATION, heads=("ForCausalLM", "LMHeadModel"), read=read_seeing_decoder, check=check_decoder),
    Kind(task=Task.TRANSLATION, heads=TRANSLATORS, is_encoder_decoder=True, read=read_translator),
    Kind(task=Task.TRANSCRIPTION, heads=SPEECH_HEADS, is_encoder_decoder=True, read=read_transcriber),
    Kind(task=Task.FLOW_SYNTHESIS, heads=FLOW_SPEAKERS, read=read_flow_speaker),
    Kind(task=Task.STAGED_SYNTHESIS, heads=STAGED_SPEAKERS, read=read_staged_speaker),
    Kind(
        task=Task.SPECTROGRAM_SYNTHESIS,
        heads=SPECTROGRAM_SPEAKERS,
        is_encoder_decoder=True,
        read=read_spectrogram_speaker,
    ),
    Kind(task=Task.DELAYED_SYNTHESIS, heads=DELAYED_SPEAKERS, is_encoder_decoder=True, read=read_delayed_speaker),
    Kind(task=Task.CTC_TRANSCRIPTION, heads=("ForCTC",), read=read_ctc),
    Kind(task=Task.AUDIO_CLASSIFICATION, heads=SOUND_CLASSIFIERS, read=read_sound_classifier),
    Kind(
        task=Task.CAPTIONING,
        heads=CAPTIONERS,
        encoder_decoders=frozenset(("vision-encoder-decoder",)),
        read=read_captioner,
    ),
    Kind(
        task=Task.CAPTIONING,
        heads=ASKED_CAPTIONERS,
        encoder_decoders=frozenset(("florence2",)),
        read=read_asked_captioner,
    ),
    Kind(task=Task.TEXT_TO_TEXT, heads=("ForConditionalGeneration",), is_encoder_decoder=True, read=read_rewriter),
    Kind(task=Task.TEXT_TO_TEXT, heads=PAIRS, is_encoder_decoder=True, read=read_text_pair),
    Kind(
        task=Task.TEXT_CLASSIFICATION,
        heads=("ForSequenceClassification",),
        encoder_decoders=ENCODER_DECODER_CLASSIFIERS,
        read=read_classifier,
    ),
    Kind(task=Task.TOKEN_CLASSIFICATION, heads=("ForTokenClassification",), read=read_classifier),
    Kind(task=Task.QUESTION_ANSWERING, heads=("ForQuestionAnswering",), read=read_question_answerer),
    Kind(task=Task.FILL_MASK, heads=("ForMaskedLM",), read=read_mask_filler),
    Kind(task=Task.TEXT_SCORING, heads=(), encoder_decoders=ENCODER_DECODER_CLASSIFIERS, read=read_scorer),
    Kind(task=Task.TEXT_EMBEDDING, heads=(), encoder_decoders=frozenset(TEXT_ENCODERS), read=read_embedder),
    Kind(
        task=Task.IMAGE_CLASSIFICATION,
        heads=("ForImageClassification", "ForImageClassificationWithTeacher"),
        read=read_image_classifier,
    ),
    Kind(
        task=Task.OBJECT_DETECTION,
        heads=("ForObjectDetection",),
        encoder_decoders=frozenset(DETECTORS) | GROUNDING_DETECTORS,
        read=read_detector,
    ),
    Kind(task=Task.SEMANTIC_SEGMENTATION, heads=SEMANTIC_HEADS, read=read_semantic_segmenter),
    Kind(task=Task.DEPTH_ESTIMATION, heads=("ForDepthEstimation",), read=read_depth_estimator),
    Kind(task=Task.VIDEO_CLASSIFICATION, heads=("ForVideoClassification",), read=read_video_classifier),
    Kind(task=Task.SEGMENTATION, heads=ARCHITECTURES, read=read_segmenter),
    Kind(task=Task.IMAGE_EMBEDDING, heads=(), read=read_image_embedder),
    Kind(task=Task.TENSORS, heads=(), read=read_named_tensors, may_have_decoder=True),
)


Sources = tuple[ExportSource, ...]
"""One, or one for each tower of a model of two."""


def sources_from_folder(
    path: Path, options: FolderOptions, tell: Callable[[str], None] = lambda _: None
) -> tuple[Sources, tuple[str, ...]]:
    """Reads a model folder.

    Args:
        path: Holds `config.json`, weights, and a tokenizer; or an adapter, or a file of GGUF, which it may be itself.
        options: What is asked for beside it.
        tell: Called with a sentence before weights are fetched, where an adapter names a base of the hub.

    Returns:
        What is exported, and notes for the user, a sentence each.

    Raises:
        SourceError: The folder is incomplete, or its model is of a kind that cannot be served.
    """
    if (file := find_gguf(path)) is not None:
        return _from_gguf(file, options)
    if not (path / CONFIG_FILE).exists() and (adapter := Adapter.read(path)) is not None:
        return _merged(adapter, options, tell)
    _check_base(path, options)
    with in_a_sentence(str(path)):
        if (known := _read_otherwise(path, options)) is not None:
            source, notes = known
            return options.given.add_to((source,)), notes
        if (checkpoint := checkpoint_beside(path)) is None:
            return _Description.read(path, options).load(options)
        options = _asked_by(checkpoint, path, options)
        sources, notes = _Description.read(path, options).load(options)
    return tuple(with_record(source, checkpoint, license_name=options.license_name) for source in sources), notes


def _read_otherwise(path: Path, options: FolderOptions) -> tuple[ExportSource, tuple[str, ...]] | None:
    """Reads a folder that is described in another way than those of `transformers`; None: it is not."""
    if is_pipeline(path):
        return read_pipeline(path, options)
    if (part := static_part(path)) is not None:
        return read_static(path, part, options)
    return read_style_speaker(path, options) if is_style_speaker(path) else None


def from_folder(path: Path, options: FolderOptions) -> tuple[ExportSource, tuple[str, ...]]:
    """Reads a model folder that is one source, as `sources_from_folder` does."""
    (source,), notes = sources_from_folder(path, options)
    return source, notes


def sources_from_hub(
    model_id: str, revision: str | None, options: FolderOptions, tell: Callable[[str], None] = lambda _: None
) -> tuple[Sources, tuple[str, ...]]:
    """Fetches a model of the hub into the library's cache and reads it; weights only after all else has been read.

    Args:
        model_id: Its id, `ORG/NAME`.
        revision: A branch, a tag or a commit; None: the hub's default.
        options: What is asked for beside it.
        tell: Called with a sentence before weights are fetched.

    Returns:
        What `sources_from_folder` does.

    Raises:
        SourceError: It cannot be fetched, or `sources_from_folder` refuses it.
    """
    model = HubModel.find(model_id, revision)
    if model.holds_adapter:
        model.fetch_adapter()
        adapter = Adapter.read(model.path, model_id)
        assert adapter is not None, "it has been fetched"
        return _merged(adapter, options, tell)
    _check_base(Path(model_id), options)
    try:
        with in_a_sentence(model_id):
            model.check_files(allow_pickle=options.allow_pickle)
            model.fetch_descriptions()
            if is_style_speaker(model.path):
                raise SourceError(
                    f"{model_id}: is read from a folder with its weights (*.pth) and voices (voices/*.pt), which are "
                    "not fetched; download it, and give the folder"
                )
            if (part := static_part(model.path)) is not None:
                model.fetch_weights(part, allow_pickle=options.allow_pickle, is_mapped=False, tell=tell)
                source, notes = read_static(model.path, part, options, model.origin)
                return options.given.add_to((source,)), notes
            description = _Description.read(model.path, options)
            model.fetch_weights(
                description.weights,
                working=working_bytes_of(description.config, description.task, options.max_length),
                allow_pickle=options.allow_pickle,
                is_mapped=not options.keeps_fp32,
                tell=tell,
            )
            return description.load(options, model.origin)
    except SourceError as error:
        raise SourceError(str(error).replace(str(model.path), model_id)) from error


def _from_gguf(file: Path, options: FolderOptions) -> tuple[Sources, tuple[str, ...]]:
    """Reads a file of GGUF; its weights after all else.

    Raises:
        SourceError: `transformers` does not read it, or its model cannot be served.
    """
    if options.adapter is not None:
        raise SourceError(f"{file}: an adapter is merged into a folder of transformers; give that with --base")
    _check_base(file, options)
    with in_a_sentence(str(file)):
        plain = temporary_folder(file.stem, options.scratch)
        write_descriptions(file, plain.path)
        for beside in file.parent.iterdir():
            if DOCUMENTS.fullmatch(beside.name):
                (plain.path / beside.name).symlink_to(beside.resolve())
        try:
            description = _Description.read(plain.path, options)
            kept = unpack_weights(file, plain.path, options.precisions or ())
            stated = {"quantized": describe_gguf(file)}
            return replace(description, plain=replace(plain, kept=kept), stated=stated).load(options)
        except SourceError as error:
            raise SourceError(str(error).replace(str(plain.path), str(file))) from error


def _merged(adapter: Adapter, options: FolderOptions, tell: Callable[[str], None]) -> tuple[Sources, tuple[str, ...]]:
    """Reads the base of an adapter, as a model that is called by the adapter's name.

    Raises:
        SourceError: The base is not stated, or cannot be read.
    """
    if options.adapter is not None:
        raise SourceError(
            f"{adapter.path}: is an adapter itself, and {options.adapter.path} is one of it; merge it with peft first, "
            "and name the model that comes of it with --base"
        )
    if (base := options.base or adapter.base) is None:
        raise SourceError(f"{adapter.path}: does not say what it is an adapter of; name that with --base")
    with_adapter = replace(
        options, name=options.name or model_name(adapter.title.rpartition("/")[2]), base=base, adapter=adapter
    )
    if Path(base).is_dir():
        return sources_from_folder(Path(base), with_adapter, tell)
    revision = None if options.base else adapter.settings.get("revision")
    if (on_hub := parse_id(base, revision)) is None:
        raise SourceError(
            f"{adapter.path}: its base {base} is no folder here, and no id of the hub; name it with --base"
        )
    return sources_from_hub(*on_hub, with_adapter, tell)


def _check_base(path: Path, options: FolderOptions) -> None:
    if options.base is not None and options.adapter is None:
        raise SourceError(f"--base {options.base}: is for an adapter, and {path} has no {ADAPTER_FILE}; leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Description:
    """What a folder says of its model, without the weights."""

    path: Path
    weights: Path
    """Folder of the weights: the folder itself, or that of the encoder."""
    content: Mapping[str, Any]
    """Of `config.json`."""
    config: Any
    """The same as `transformers` parses it."""
    kind: Kind | None
    """None: a model of two towers."""
    plain: PlainFolder | None = None
    """The temporary folder that `path` is, if it is one."""
    stated: Mapping[str, str] = field(default_factory=dict)
    """What the manifest says of the weights as they came, by a word each."""

    @property
    def task(self) -> Task:
        """What the model does; a model of two towers is one of images and one of texts."""
        return Task.IMAGE_EMBEDDING if self.kind is None else self.kind.task

    @classmethod
    def read(cls, path: Path, options: FolderOptions) -> _Description:
        """Reads it.

        Raises:
            SourceError: The configuration is missing, or its model is of a kind that cannot be served.
        """
        layout = read_layout(path)
        weights = path if layout is None else layout.transformer
        content = read_configuration(weights)
        check_quantization(str(path), content)
        if layout is None and options.task != Task.TENSORS and is_two_towers(content):
            if options.pooling is not None or options.prompts:
                flag = "--pooling" if options.pooling is not None else "--prompt"
                raise SourceError(f"{path}: {flag} is not for a model of two towers; leave it out")
            config = parse_configuration(path, content)
            return cls(path=path, weights=path, content=content, config=config, kind=None)
        kind = _kind_of(path, content, options.task or _told_task(path, content, layout, options))
        if options.pooling is not None and kind.task not in EMBEDDING_TASKS:
            raise SourceError(f"--pooling is for {' and '.join(EMBEDDING_TASKS)}, and the task is {kind.task}")
        if options.prompts and kind.task is not Task.TEXT_EMBEDDING:
            raise SourceError(f"--prompt is for {Task.TEXT_EMBEDDING}, and the task is {kind.task}")
        if (options.tag_scheme or options.aggregation) and kind.task is not Task.TOKEN_CLASSIFICATION:
            flag = "--tag-scheme" if options.tag_scheme else "--aggregation"
            raise SourceError(f"{flag} is for {Task.TOKEN_CLASSIFICATION}, and the task is {kind.task}")
        if kind.task is not Task.TENSORS and (own_flag := options.flag_of_tensors):
            raise SourceError(f"{own_flag} is for {Task.TENSORS}, and the task is {kind.task}")
        if kind.task is not Task.SPECTROGRAM_SYNTHESIS and (own_flag := options.flag_of_spectrograms):
            raise SourceError(f"{own_flag} is for {Task.SPECTROGRAM_SYNTHESIS}, and the task is {kind.task}")
        check_family(path, content, kind.task)
        config = parse_configuration(weights, content)
        kind.check(path, config)
        return cls(path=path, weights=weights, content=content, config=config, kind=kind)

    def load(self, options: FolderOptions, origin: Origin | None = None) -> tuple[Sources, tuple[str, ...]]:
        """Returns what is exported, and notes.

        Raises:
            SourceError: The folder is incomplete, or its model cannot be served.
        """
        has_experts = num_experts(self.config) > 0
        comes_otherwise = options.adapter is not None or quantization_of(self.content) is not None
        with as_source_error():
            is_mapped = (
                self.plain is not None
                or comes_otherwise
                or is_worth_mapping(
                    self.weights,
                    options.scratch,
                    options.precisions or (Precision.FP32,),
                    has_experts=has_experts,
                )
            )
        keeps_fp32 = options.keeps_fp32 and not (self.plain is not None and self.plain.kept)
        task = self.task
        count = check_weights(
            self.weights,
            working=working_bytes_of(self.config, task, options.max_length),
            allow_pickle=options.allow_pickle,
            is_mapped=is_mapped and not keeps_fp32,
        )
        if self.plain is None and is_mapped:
            place = scratch_or_default(options.scratch)
            check_disk(str(self.path), place, widened_bytes(count, options.precisions or (), has_experts=has_experts))
            unpacked = self._unpacked(options)
            try:
                return unpacked.load(options, origin)
            except SourceError as error:
                raise SourceError(str(error).replace(str(unpacked.path), str(self.path))) from error
        folder = ModelFolder(
            path=self.path,
            task=task,
            config=self.config,
            options=options,
            origin=origin,
            plain=self.plain,
            stated=self.stated,
        )
        if self.kind is None:
            sources, notes = read_towers(folder)
        else:
            source, notes = self.kind.read(folder)
            sources = (source,)
        if task is not Task.TEXT_EMBEDDING and not compares_tokens(self.path, self.config.architectures or []):
            notes += unread_notes(self.path)
        notes += folder_notes(self.weights, self.content, task) + _note_of_version(self.content)
        if longest := max(
            (one.limits.max_input_tokens or 0 for one in sources if one.tokenizer is not None), default=0
        ):
            notes += length_notes(self.weights, longest)
        side = truncation_side(self.weights)
        sources = tuple(
            replace(source, truncation_side=side) if source.tokenizer is not None else source for source in sources
        )
        return options.given.add_to(sources), (*self._notes_of_weights(), *notes, *_note_of_code(self.content))

    def _unpacked(self, options: FolderOptions) -> _Description:
        """Returns the description of a plain folder with the same model."""
        files = weight_files(self.weights, {file.name for file in self.weights.iterdir()}, allow_pickle=False)
        paths = [self.weights / file for file in files]
        plain, content = make_plain(
            self.path,
            self.weights,
            paths,
            self.content,
            config=self.config,
            adapter=options.adapter,
            scratch=options.scratch,
        )
        weights = plain.path / self.weights.relative_to(self.path)
        quantization = quantization_of(self.content)
        stated = {} if quantization is None else {"quantized": describe_quantization(quantization)}
        if options.adapter is not None:
            stated |= {"adapter": options.adapter.title, "base": str(options.base)}
        config = parse_configuration(weights, content)
        return replace(
            self, path=plain.path, weights=weights, content=content, config=config, plain=plain, stated=stated
        )

    def _notes_of_weights(self) -> Iterator[str]:
        """Says what has become of weights that came otherwise than `transformers` has them."""
        if (quantized := self.stated.get("quantized")) is not None:
            kept = len(self.plain.kept) if self.plain is not None else 0
            as_it_is = f"int4 keeps {kept} of them as they are, and " if kept else ""
            yield f"weights came quantized ({quantized}): {as_it_is}every other precision is of their widened values"
        if (adapter := self.stated.get("adapter")) is not None:
            yield f"the adapter {adapter} is merged into {self.stated['base']}"


def _note_of_code(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Says that a folder names code of its own for a model that `transformers` knows."""
    if not content.get("auto_map"):
        return ()
    return (
        f"{CONFIG_FILE} names code of the folder's own (auto_map), which is never run: transformers' own "
        f"{content.get('model_type')} has read it",
    )


def _asked_by(checkpoint: Checkpoint, path: Path, options: FolderOptions) -> FolderOptions:
    """Returns the options with what the checkpoint says where they say nothing."""
    length, evaluation = checkpoint.configuration.get("max_length"), checkpoint.evaluation
    if checkpoint.task == Task.TOKEN_CLASSIFICATION:  # trained on the tags of all subwords
        options = replace(
            options, tag_scheme=options.tag_scheme or "iob2", aggregation=options.aggregation or "sequence"
        )
    return replace(
        options,
        name=options.name or checkpoint.name,
        max_length=options.max_length or (int(length) if length else None),
        evaluation_file=options.evaluation_file or (path / evaluation.file if evaluation else None),
        evaluation_name=None if options.evaluation_file or evaluation is None else evaluation.dataset,
    )


def _note_of_version(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Says that a configuration was written by a newer `transformers` than the one that has read it."""
    stated = str(content.get("transformers_version", ""))
    written, own = (tuple(map(int, re.findall(r"\d+", version)[:2])) for version in (stated, transformers.__version__))
    if written <= own:
        return ()
    return (
        f"{CONFIG_FILE} was written by transformers {stated}, and {transformers.__version__} has read it, which "
        "ignores what it does not know",
    )


def _told_task(path: Path, content: Mapping[str, Any], layout: Layout | None, options: FolderOptions) -> str | None:
    """Returns the task of a model without a head of its own, where the folder or the options tell it."""
    names = [str(name) for name in content.get("architectures") or []]
    if is_reranker(path, names) or compares_tokens(path, names):
        return str(Task.TEXT_SCORING)
    says_how = content.get("model_type") == TIMM or (path / PREPROCESSOR_FILE).exists()
    sees = says_how and not content.keys() & {
        "text_config",
        "decoder",
    }
    if sees and names and all(name.endswith("Model") and _kind_named(name) is None for name in names):
        return str(Task.IMAGE_EMBEDDING)
    return str(Task.TEXT_EMBEDDING) if layout is not None or options.pooling is not None else None


def _kind_of(path: Path, content: Mapping[str, Any], asked: str | None) -> Kind:
    """Returns the kind of model that a folder holds.

    Raises:
        SourceError: It cannot be told, or is none that this command exports.
    """
    known = ", ".join(kind.task for kind in KINDS)
    if asked is not None:
        if not (kinds := [kind for kind in KINDS if kind.task == asked]):
            raise SourceError(f"--task {asked}: this command exports {known}")
        return _of_its_parts(path, content, kinds[0])
    architectures = content.get("architectures") or []
    found = {kind.task: kind for name in architectures if (kind := _kind_named(str(name))) is not None}
    if len(found) != 1:
        check_heads(path, [str(name) for name in architectures])
        raise SourceError(
            f"{path}: the task cannot be told from architectures {json.dumps(architectures)}; "
            f"give it with --task, one of {known}"
        )
    (kind,) = found.values()
    holds_decoder = kind.is_encoder_decoder and not content.get("is_encoder_decoder")
    if holds_decoder and content.get("model_type") in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        kind = next(kind for kind in KINDS if kind.task is Task.GENERATION)  # of the language model inside
    return _of_its_parts(path, content, kind)


def _kind_named(architecture: str) -> Kind | None:
    """Returns the kind of an architecture: by its whole name, or by the longest head that it ends with."""
    heads = {
        head: kind
        for kind in KINDS
        for head in kind.heads
        if architecture == head or (head.startswith(_ENDINGS) and architecture.endswith(head))
    }
    return heads[max(heads, key=len)] if heads else None


def _of_its_parts(path: Path, content: Mapping[str, Any], kind: Kind) -> Kind:
    """Returns a kind, if it has an encoder and a decoder where the model does.

    Raises:
        SourceError: One of them has them and the other does not.
    """
    has_decoder = bool(content.get("is_encoder_decoder")) and content.get("model_type") not in kind.encoder_decoders
    if has_decoder != kind.is_encoder_decoder and not kind.may_have_decoder:
        what = "an encoder-decoder" if content.get("is_encoder_decoder") else "no encoder-decoder"
        raise SourceError(f"{path}: is {what} ({content.get('model_type')}), and is not exported for {kind.task}")
    return kind
