"""Tensors and parameters of each task: a `TensorTask` for each, named in `tasks/table.py`.

N inputs of a call, T tokens of a text, K returned labels, D width of an embedding, M spans, continuations, segments,
images or masks of all inputs together.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import wave
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pkgutil import resolve_name
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway.v1 import (
    audio_classification_service_pb2,
    common_pb2,
    generation_service_pb2,
    image_generation_service_pb2,
    object_detection_service_pb2,
    question_answering_service_pb2,
    segmentation_service_pb2,
    semantic_segmentation_service_pb2,
    speech_service_pb2,
    translation_service_pb2,
    video_classification_service_pb2,
)
from headway_server.batching.settings import MAX_IMAGES, MAX_TEXTS
from headway_server.bundles import CHAT_TEMPLATE_FILE
from headway_server.bundles import TensorSpec as BundleSpec
from headway_server.decoding.constraints import ConstraintRequest
from headway_server.decoding.parameters import EarlyStopping
from headway_server.decoding.sequence import Delta
from headway_server.diffusion import DiffusionSampler
from headway_server.errors import InvalidInputError, WrongTaskError
from headway_server.preprocessing import ChatTurn
from headway_server.preprocessing.pool import image_pool, text_pool
from headway_server.services.messages import build
from headway_server.services.open_inference.parameters import Kind, kinds_of
from headway_server.services.open_inference.tensors import (
    BYTES,
    Arrays,
    TensorSpec,
    datatype_of,
    decode_texts,
    files_array,
    object_array,
    texts_array,
)
from headway_server.serving.families import Families, ServedModel
from headway_server.serving.images import SentImage, name_images
from headway_server.tasks.captioning.model import CaptioningModel
from headway_server.tasks.detection.model import DetectionParameters, ObjectDetector
from headway_server.tasks.generation.model import GeneratedText, GenerationModel
from headway_server.tasks.generation.request import MAX_PROMPTS, GenerationRequest, Prompt
from headway_server.tasks.image_generation.model import ImageGenerationModel
from headway_server.tasks.image_generation.request import ImageGenerationRequest
from headway_server.tasks.images.classifier import ImageClassifier
from headway_server.tasks.images.model import Images
from headway_server.tasks.mask_filling.model import FilledText, MaskFiller
from headway_server.tasks.outputs import ScoredLabel
from headway_server.tasks.pixels.model import DepthEstimator, PixelClassifier
from headway_server.tasks.pixels.zero_shot import ZeroShotPixelClassifier
from headway_server.tasks.question_answering.model import QuestionAnswerer, QuestionRequest
from headway_server.tasks.segmentation.decoder import MAX_POINTS
from headway_server.tasks.segmentation.model import (
    EverythingRequest,
    MaskFormat,
    Point,
    SegmentationModel,
    SegmentMask,
    SegmentPrompt,
)
from headway_server.tasks.sounds.classifier import MAX_AUDIOS as MAX_CLASSIFIED_AUDIOS
from headway_server.tasks.sounds.classifier import AudioClassifier
from headway_server.tasks.speech.transcripts import (
    MAX_AUDIOS,
    SpeechDelta,
    SpeechRequest,
    SpeechTask,
    Transcriber,
    Transcript,
)
from headway_server.tasks.stateless import late_interaction
from headway_server.tasks.synthesis.encoding import AudioFormat
from headway_server.tasks.synthesis.request import MAX_TEXTS as MAX_SPOKEN
from headway_server.tasks.synthesis.request import SynthesisRequest
from headway_server.tasks.synthesis.synthesizer import SpeechPart, SpokenText, Synthesizer
from headway_server.tasks.tensors.graph import batch_axis_of
from headway_server.tasks.tensors.model import TensorModel
from headway_server.tasks.text.classifier import TextClassifier
from headway_server.tasks.text.model import TextInputs, TextModel, TokenInputs
from headway_server.tasks.text.scorer import TextScorer
from headway_server.tasks.text_to_text.answer import WrittenText
from headway_server.tasks.text_to_text.model import TextToTextModel
from headway_server.tasks.text_to_text.request import MAX_TEXTS as MAX_SOURCES
from headway_server.tasks.text_to_text.request import TextToTextParameters, TextToTextRequest
from headway_server.tasks.tokens.classifier import TokenClassifier
from headway_server.tasks.tokens.pages import Page, PageInputs
from headway_server.tasks.video.classifier import MAX_FRAMES, VideoClassifier

_MAX_MASK_PIXELS: Final = 2**24
"""Maximum pixels of all masks of an answer, each an element of JSON; files take a hundredth."""
_FEW_BYTES: Final = 2**16
"""Maximum characters of conversations parsed on the event loop, half a millisecond."""
FINISH_REASON: Final = "finish_reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """A request, read."""

    arrays: Arrays
    """Its inputs."""
    parameters: Mapping[str, Any]
    """Set parameters."""
    outputs: frozenset[str]
    """Names of the requested outputs."""
    deadline: float | None
    """End of the caller's wait, in seconds of `time.monotonic`."""

    def select(self, *names: str) -> dict[str, Any]:
        """Returns the set parameters among these names."""
        return {name: self.parameters[name] for name in names if name in self.parameters}


Specs: TypeAlias = Callable[[ServedModel], tuple[TensorSpec, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTask:
    """Tensor interface of a task's models."""

    inputs: Specs
    """Input tensors."""
    outputs: Specs
    """Output tensors."""
    parameters: Mapping[str, Kind]
    max_rows: int | None
    """Maximum inputs of a call; None: the models check the shapes of inputs."""
    infer: Callable[[Any, InferCall], Awaitable[Arrays]]
    """Answers a call. Its errors are those of the task."""
    stream: Callable[[Any, InferCall], AsyncGenerator[Arrays, None]] | None = None
    """Answers a call in parts, the last with `FINISH_REASON`; None for a task without parts."""
    streams: Callable[[InferCall], bool] = lambda _: True
    """Returns True if a streamed call is answered in parts."""
    predictions: Callable[[ServedModel], tuple[str, ...]] = lambda _: ()
    """Outputs that have one row for each row of the first input, of which a prediction consists; () if none has."""
    reads_texts: bool = True
    """True if its requests are texts, which have a smaller size limit than images."""


def _always(*names: str) -> Callable[[ServedModel], tuple[str, ...]]:
    """Returns the predictions of a task whose models all have them."""
    return lambda _: names


# Texts


_TEXT: Final = TensorSpec(name="text", datatype=BYTES, shape=(-1,))
_TEXT_PAIR: Final = TensorSpec(name="text_pair", datatype=BYTES, shape=(-1,), is_optional=True)
_INPUT_IDS: Final = TensorSpec(name="input_ids", datatype="INT64", shape=(-1, -1), is_optional=True)
_MASK: Final = TensorSpec(name="attention_mask", datatype="INT64", shape=(-1, -1), is_optional=True)
_TYPES: Final = TensorSpec(name="token_type_ids", datatype="INT64", shape=(-1, -1), is_optional=True)
_TOKEN_VECTORS: Final = ("token_vectors", "token_id", "vector_count")
"""Outputs of models of late interaction."""
_TOKEN_COUNT: Final = TensorSpec(name="token_count", datatype="INT64", shape=(-1,))
_TRUNCATED: Final = TensorSpec(name="truncated", datatype="BOOL", shape=(-1,))
_LABELS: Final = (
    TensorSpec(name="label", datatype=BYTES, shape=(-1, -1)),
    TensorSpec(name="probability", datatype="FP32", shape=(-1, -1)),
    TensorSpec(name="selected", datatype="BOOL", shape=(-1, -1)),
)


def _embedding(model: ServedModel) -> tuple[TensorSpec, ...]:
    embedding = model.bundle.manifest.embedding
    if embedding is None:
        return ()
    return (TensorSpec(name="embedding", datatype="FP32", shape=(-1, embedding.dimension)),)


def _text_specs(model: ServedModel) -> tuple[TensorSpec, ...]:
    assert isinstance(model, TextModel), "its family requires it"
    pairs = model.bundle.manifest.text_pairs
    pair = () if pairs == "never" else (replace(_TEXT_PAIR, is_optional=pairs == "optional"),)
    if late_interaction(model.bundle.manifest) is not None:  # each text of a pair has tokens of its own
        return (_TEXT, replace(_TEXT_PAIR, is_optional=True))  # and those of a text may be asked for
    return (_TEXT, *pair, _INPUT_IDS, _MASK, *((_TYPES,) if model.has_types else ()))


def _wanted_embedding(call: InferCall) -> Literal["none", "raw", "normalized"]:
    if "embedding" not in call.outputs:
        return "none"
    return "normalized" if call.parameters.get("normalize", True) else "raw"


def _texts(call: InferCall, name: str) -> list[str]:
    """Reads an input of texts.

    Raises:
        InvalidInputError: It is missing, or not UTF-8.
    """
    if name not in call.arrays:
        raise InvalidInputError("inputs", f"lack {name}; give it, or an alternative to it")
    return decode_texts(name, call.arrays[name])


def _token_rows(call: InferCall, name: str = "input_ids") -> list[NDArray[np.int64]]:
    """Returns the tokens of each text, (T,), without padding.

    Raises:
        InvalidInputError: Texts are given too, or the shapes of tensors differ.
    """
    ids: NDArray[np.int64] = call.arrays[name]
    if given := {"text", "text_pair", "conversation"} & call.arrays.keys():
        raise InvalidInputError("inputs", f"have {min(given)} together with input_ids; give one of the two")
    mask = call.arrays.get("attention_mask")
    if mask is None:
        return list(ids)
    if mask.shape != ids.shape:
        raise InvalidInputError("attention_mask", f"has shape {list(mask.shape)}, and {name} {list(ids.shape)}")
    if ((mask != 0) & (mask != 1)).any():
        raise InvalidInputError("attention_mask", "has values that are neither 1, a token, nor 0, padding")
    return [row[kept] for row, kept in zip(ids, mask.astype(np.bool_), strict=True)]


def _text_inputs(call: InferCall) -> TextInputs | TokenInputs:
    if "input_ids" not in call.arrays:
        if given := {"attention_mask", "token_type_ids"} & call.arrays.keys():
            raise InvalidInputError("inputs", f"have {min(given)} without input_ids; give these too")
        pairs = _texts(call, "text_pair") if "text_pair" in call.arrays else None
        return TextInputs(texts=_texts(call, "text"), text_pairs=pairs, **call.select("truncate"))
    if call.parameters.get("truncate"):
        raise InvalidInputError("parameters.truncate", "is set together with input_ids; shorten these yourself")
    if "token_type_ids" not in call.arrays:
        return TokenInputs(input_ids=_token_rows(call))
    shapes = [list(call.arrays[name].shape) for name in ("token_type_ids", "input_ids")]
    if shapes[0] != shapes[1]:
        raise InvalidInputError("token_type_ids", f"has shape {shapes[0]}, and input_ids {shapes[1]}")
    return TokenInputs(input_ids=_token_rows(call), type_ids=_token_rows(call, "token_type_ids"))


def _label_arrays(labels: Sequence[Sequence[ScoredLabel]]) -> Arrays:
    """Returns tensors of labels, (N, K)."""
    return {
        "label": texts_array([[scored.label for scored in row] for row in labels]),
        "probability": np.array([[scored.probability for scored in row] for row in labels], np.float32),
        "selected": np.array([[scored.is_selected for scored in row] for row in labels], np.bool_),
    }


def _embedding_array(rows: Iterable[NDArray[np.float32] | None]) -> Arrays:
    """Returns the tensor of embeddings, (N, D), if there are any."""
    vectors = [row for row in rows if row is not None]
    return {"embedding": np.stack(vectors)} if vectors else {}


def _length_arrays(results: Iterable[Any]) -> Arrays:
    rows = list(results)
    return {
        "token_count": np.array([row.num_tokens for row in rows], np.int64),
        "truncated": np.array([row.truncated for row in rows], np.bool_),
    }


async def _classify_texts(model: TextClassifier, call: InferCall) -> Arrays:
    inputs, embedding = _text_inputs(call), _wanted_embedding(call)
    if call.outputs.isdisjoint(("label", "probability", "selected")) and embedding != "none":
        embedded = await model.embed(inputs, normalize=embedding == "normalized", deadline=call.deadline)
        return {**_embedding_array(one.values for one in embedded.results), **_length_arrays(embedded.results)}
    answer = await model.classify(
        inputs,
        top_k=call.parameters.get("top_k", 0),
        threshold=call.parameters.get("threshold"),
        embedding=embedding,
        deadline=call.deadline,
    )
    return {
        **_label_arrays([one.labels for one in answer.results]),
        **_embedding_array(one.embedding for one in answer.results),
        **_length_arrays(answer.results),
    }


async def _embed_texts(model: TextModel, call: InferCall) -> Arrays:
    answer = await model.embed(
        _text_inputs(call),
        normalize=call.parameters.get("normalize"),
        deadline=call.deadline,
        **call.select("prompt_name"),
    )
    return {**_embedding_array(one.values for one in answer.results), **_length_arrays(answer.results)}


def _score_specs(model: ServedModel) -> tuple[TensorSpec, ...]:
    found = [TensorSpec(name="score", datatype="FP32", shape=(-1,)), _TOKEN_COUNT, _TRUNCATED]
    if (late := late_interaction(model.bundle.manifest)) is not None:
        kinds = ("FP32", (-1, -1, late.dimension)), ("INT64", (-1, -1)), ("INT64", (-1,))
        found += [
            TensorSpec(name=name, datatype=datatype, shape=shape, is_on_request=True)
            for name, (datatype, shape) in zip(_TOKEN_VECTORS, kinds, strict=True)
        ]
    return tuple(found)


async def _embed_tokens(model: TextScorer, call: InferCall) -> Arrays:
    """Embeds the tokens of `text`; shorter texts are padded with zeros to the largest `vector_count`."""
    inputs = TextInputs(texts=_texts(call, "text"), **call.select("truncate"))
    prompt_name = call.parameters.get("prompt_name", "")
    answer = await model.embed_tokens(inputs, prompt_name=prompt_name, deadline=call.deadline)
    counts = [len(one.token_ids) for one in answer.results]

    def pad() -> Arrays:
        longest = max(counts)
        rows = [(one.vectors, one.token_ids, longest - len(one.token_ids)) for one in answer.results]
        vectors = np.stack([np.pad(vectors, ((0, more), (0, 0))) for vectors, _, more in rows])
        ids = np.stack([np.pad(ids, (0, more)) for _, ids, more in rows])
        arrays: Arrays = dict(zip(_TOKEN_VECTORS, (vectors, ids, np.array(counts, np.int64)), strict=True))
        return {**_length_arrays(answer.results), **arrays}

    return await asyncio.get_running_loop().run_in_executor(text_pool(), pad)


async def _score_texts(model: TextScorer, call: InferCall) -> Arrays:
    vectors: Arrays = {}
    if not call.outputs.isdisjoint(_TOKEN_VECTORS):
        vectors = await _embed_tokens(model, call)
        if "score" not in call.outputs:
            return vectors
    elif "prompt_name" in call.parameters:
        raise InvalidInputError("parameters.prompt_name", f"is set without {_TOKEN_VECTORS[0]}; leave it out")
    answer = await model.score(_text_inputs(call), deadline=call.deadline)
    return {
        "score": np.array([one.score for one in answer.results], np.float32),
        **vectors,
        **_length_arrays(answer.results),
    }


# Tokens


_WORD: Final = TensorSpec(name="word", datatype=BYTES, shape=(-1, -1))
_BBOX: Final = TensorSpec(name="bbox", datatype="FP64", shape=(-1, -1, 4))
_PAGE_SIZE: Final = TensorSpec(name="page_size", datatype="FP64", shape=(-1, 2), is_optional=True)
_WORD_SPANS: Final = tuple(TensorSpec(name=name, datatype="INT64", shape=(-1,)) for name in ("first_word", "end_word"))


def _reads_pages(model: ServedModel) -> bool:
    return model.bundle.manifest.word_boxes is not None


def _page_inputs(call: InferCall) -> PageInputs:
    """Reads pages, whose rows of words are filled up with empty ones.

    Raises:
        InvalidInputError: A tensor is missing, or the shapes of tensors differ.
    """
    for spec in (_WORD, _BBOX):
        if spec.name not in call.arrays:
            raise InvalidInputError("inputs", f"lack {spec.name}; give it")
    words, boxes = call.arrays["word"], call.arrays["bbox"]
    sizes = call.arrays.get("page_size", np.zeros((len(words), 2)))
    if boxes.shape[:2] != words.shape:
        raise InvalidInputError("bbox", f"has shape {list(boxes.shape)}, and word {list(words.shape)}")
    if len(sizes) != len(words):
        raise InvalidInputError("page_size", f"has {len(sizes)} rows for {len(words)} pages; give one for each")
    pages: list[Page] = []
    for row, own, size in zip(words, boxes, sizes.tolist(), strict=True):
        count = max((place for place, word in enumerate(row, 1) if word), default=0)
        texts = decode_texts(f"word[{len(pages)}]", row[:count])
        pages.append(Page(words=texts, boxes=own[:count].ravel(), width=size[0], height=size[1]))
    return PageInputs.of(pages, **call.select("truncate"))


async def _classify_tokens(model: TokenClassifier, call: InferCall) -> Arrays:
    of_pages = _reads_pages(model)
    inputs = _page_inputs(call) if of_pages else TextInputs(texts=_texts(call, "text"), **call.select("truncate"))
    answer = await model.classify(inputs, embedding=_wanted_embedding(call), deadline=call.deadline)
    spans = [(index, span) for index, text in enumerate(answer.results) for span in text.spans]
    return {
        "text_index": np.array([index for index, _ in spans], np.int64),
        "label": texts_array([span.label for _, span in spans]),
        "probability": np.array([span.probability for _, span in spans], np.float32),
        "start": np.array([span.start for _, span in spans], np.int64),
        "end": np.array([span.end for _, span in spans], np.int64),
        **{
            spec.name: np.array([span.words[side] for _, span in spans if span.words], np.int64)
            for side, spec in enumerate(_WORD_SPANS if of_pages else ())
        },
        **_embedding_array(one.embedding for one in answer.results),
        **_length_arrays(answer.results),
    }


# Answers and masks


_ANSWERING: Final = kinds_of(
    question_answering_service_pb2.AnswerQuestionRequest,
    "top_k",
    "max_answer_token_count",
    "window_token_count",
    "overlap_token_count",
    "no_answer_threshold",
    "split_words",
)


async def _answer_questions(model: QuestionAnswerer, call: InferCall) -> Arrays:
    given = call.parameters
    request = QuestionRequest(
        questions=_texts(call, "question"),
        contexts=_texts(call, "context"),
        top_k=given.get("top_k", 0),
        max_answer_tokens=given.get("max_answer_token_count", 0),
        window_tokens=given.get("window_token_count", 0),
        overlap_tokens=given.get("overlap_token_count"),
        no_answer_threshold=given.get("no_answer_threshold"),
        splits_words=given.get("split_words", False),
    )
    results = (await model.answer(request, deadline=call.deadline)).results
    found = [(index, one) for index, result in enumerate(results) for one in result.answers]
    return await build(
        len(found),
        lambda: {
            "context_index": np.array([index for index, _ in found], np.int64),
            "answer": texts_array([one.text for _, one in found]),
            "score": np.array([one.score for _, one in found], np.float32),
            "start": np.array([one.start for _, one in found], np.int64),
            "end": np.array([one.end for _, one in found], np.int64),
            "no_answer_score": np.array([one.no_answer_score for one in results], np.float32),
            "token_count": np.array([one.num_tokens for one in results], np.int64),
            "window_count": np.array([one.num_windows for one in results], np.int64),
        },
    )


async def _fill_masks(model: MaskFiller, call: InferCall) -> Arrays:
    inputs = TextInputs(texts=_texts(call, "text"), **call.select("truncate"))
    answer = await model.fill(
        inputs,
        top_k=call.parameters.get("top_k", 0),
        targets=call.parameters.get("targets", ()),
        deadline=call.deadline,
    )
    return await build(
        sum(len(mask.tokens) for text in answer.results for mask in text.masks),
        lambda: _token_arrays(answer.results),
    )


def _token_arrays(results: Sequence[FilledText]) -> Arrays:
    """Returns tensors of the tokens of all masks, (M,), and of the texts, (N,)."""
    found = [(index, mask, token) for index, text in enumerate(results) for mask in text.masks for token in mask.tokens]
    return {
        "text_index": np.array([index for index, _, _ in found], np.int64),
        "start": np.array([mask.start for _, mask, _ in found], np.int64),
        "end": np.array([mask.end for _, mask, _ in found], np.int64),
        "token": texts_array([token.token for _, _, token in found]),
        "token_id": np.array([token.token_id for _, _, token in found], np.int64),
        "probability": np.array([token.probability for _, _, token in found], np.float32),
        "filled_text": texts_array([token.filled_text for _, _, token in found]),
        **_length_arrays(results),
    }


# Images


_IMAGE: Final = TensorSpec(name="image", datatype=BYTES, shape=(-1,))
_PIXELS: Final = TensorSpec(name="pixels", datatype="UINT8", shape=(-1, -1, -1, 3), is_optional=True)
"""Images of one size, (N, height, width, 3) in RGB, in place of files."""


def _image_specs(model: ServedModel) -> tuple[TensorSpec, ...]:
    preprocessing = model.bundle.manifest.image_preprocessing
    assert preprocessing is not None, "the manifest's validator requires it"
    shape = (-1, 3, *(axis if isinstance(axis, int) else -1 for axis in preprocessing.axes))
    return (_IMAGE, _PIXELS, TensorSpec(name="pixel_values", datatype="FP32", shape=shape, is_optional=True))


async def _images_or_values(call: InferCall) -> Images:
    """Returns the images of a call, or their pixel values.

    Raises:
        InvalidInputError: The call has none, or several kinds of them.
    """
    if len(call.arrays) != 1:
        raise InvalidInputError("inputs", f"have {len(call.arrays)} of image, pixels and pixel_values; give one")
    return call.arrays["pixel_values"] if "pixel_values" in call.arrays else await _images(call)


async def _classify_images(model: ImageClassifier, call: InferCall) -> Arrays:
    images = await _images_or_values(call)
    embedding = _wanted_embedding(call)
    if call.outputs.isdisjoint(("label", "probability", "selected")) and embedding != "none":
        embedded = await model.embed(images, normalize=embedding == "normalized", deadline=call.deadline)
        return _embedding_array(one.values for one in embedded.results)
    answer = await model.classify(
        images, top_k=call.parameters.get("top_k", 0), embedding=embedding, deadline=call.deadline
    )
    return {
        **_label_arrays([one.labels for one in answer.results]),
        **_embedding_array(one.embedding for one in answer.results),
    }


async def _classify_video(model: VideoClassifier, call: InferCall) -> Arrays:
    answer = await model.classify(_files(call, "frame"), top_k=call.parameters.get("top_k", 0), deadline=call.deadline)
    return {
        **_label_arrays([one.labels for one in answer.results]),
        "frame_index": np.array([one.frame_indices for one in answer.results], np.int64),
    }


async def _classify_audios(model: AudioClassifier, call: InferCall) -> Arrays:
    answer = await model.classify(
        _files(call, "audio"),
        top_k=call.parameters.get("top_k", 0),
        truncate=call.parameters.get("truncate", False),
        deadline=call.deadline,
    )
    return {
        **_label_arrays([one.labels for one in answer.results]),
        "duration": np.array([one.duration_s for one in answer.results], np.float32),
        "truncated": np.array([one.is_truncated for one in answer.results]),
    }


_DETECTING: Final = kinds_of(
    object_detection_service_pb2.DetectObjectsRequest, "threshold", "nms_threshold", "max_object_count", "labels"
)
_OF_DETECTION: Final = {"max_object_count": "max_objects"}
"""Names of `DetectionParameters` that differ from the protocol's."""


async def _detect_objects(model: ObjectDetector, call: InferCall) -> Arrays:
    given = {_OF_DETECTION.get(name, name): value for name, value in call.select(*_DETECTING).items()}
    parameters = DetectionParameters(**given)
    images = await _images_or_values(call)
    results = (await model.detect(images, parameters, deadline=call.deadline)).results
    counts = [len(result.objects.scores) for result in results]
    labels = np.concatenate([result.objects.labels for result in results])
    names = results[0].names
    return await build(
        len(labels),
        lambda: {
            "image_index": np.repeat(np.arange(len(results)), counts),
            "label": texts_array([names[label] for label in labels.tolist()]),
            "label_index": labels,
            "score": np.concatenate([result.objects.scores for result in results]),
            "box": np.concatenate([result.objects.boxes for result in results]),
        },
    )


_CLASSIFYING: Final = kinds_of(semantic_segmentation_service_pb2.ClassifyPixelsRequest, "labels")


async def _classify_pixels(model: PixelClassifier | ZeroShotPixelClassifier, call: InferCall) -> Arrays:
    labels_asked = call.select(*_CLASSIFYING).get("labels", ())
    images = await _images_or_values(call)
    results = (await model.classify(images, labels_asked, deadline=call.deadline)).results
    labels = [one for result in results for one in result.labels]
    return {
        "class_map": files_array([result.class_map for result in results]),
        "image_index": np.repeat(np.arange(len(results)), [len(result.labels) for result in results]),
        "label": texts_array([one.label for one in labels]),
        "label_index": np.array([one.index for one in labels], np.int64),
        "share": np.array([one.share for one in labels], np.float32),
        "score": np.array([one.score for one in labels], np.float32),
        "probability_map": files_array([one.probability_map for one in labels]),
    }


async def _estimate_depth(model: DepthEstimator, call: InferCall) -> Arrays:
    results = (await model.estimate(await _images_or_values(call), deadline=call.deadline)).results
    return {
        "depth_map": files_array([result.png for result in results]),
        "minimum": np.array([result.minimum for result in results], np.float32),
        "maximum": np.array([result.maximum for result in results], np.float32),
        "depth_kind": texts_array([model.depth.kind] * len(results)),
    }


# Generation


_SAMPLING: Final = kinds_of(common_pb2.SamplingParameters)
_GENERATION: Final = _SAMPLING | kinds_of(generation_service_pb2.GenerationParameters)
"""Parameters with the names of `SamplingParameters`."""
_CONSTRAINTS: Final = {"json_schema": Kind.TEXT, "regex": Kind.TEXT, "choices": Kind.TEXTS}


def _generation_specs(model: ServedModel) -> tuple[TensorSpec, ...]:
    has_template = CHAT_TEMPLATE_FILE in model.bundle.manifest.files
    conversation = TensorSpec(name="conversation", datatype=BYTES, shape=(-1,), is_optional=True)
    return (_TEXT, *((conversation,) if has_template else ()), _INPUT_IDS, _MASK)


def _generation_request(call: InferCall) -> GenerationRequest:
    parameters = call.select(*_GENERATION)
    constraints = call.select(*_CONSTRAINTS)
    if len(constraints) > 1:
        raise InvalidInputError(f"parameters.{max(constraints)}", f"is set together with {min(constraints)}; set one")
    if constraints:
        parameters["constraint"] = ConstraintRequest(**constraints)
    # Triton's 1 precedes its 2, and unset precedes both: a call can lower its priority, not raise it.
    priority = -call.parameters.get("priority", 0)
    return GenerationRequest(
        parameters=parameters,
        priority=priority,
        deadline=call.deadline,
        **call.select("sample_count", "truncate", "echo"),
    )


async def _prompts(call: InferCall) -> tuple[list[Prompt], list[str]]:
    """Reads the prompts of a call, and the name of each for error messages."""
    prompts: list[Prompt]
    if "input_ids" in call.arrays:
        name, prompts = "input_ids", list(_token_rows(call))
    elif "conversation" in call.arrays:
        name, texts = "conversation", _texts(call, "conversation")
        if "text" in call.arrays:
            raise InvalidInputError("inputs", "have text together with conversation; give one of the two")
        if sum(map(len, texts)) <= _FEW_BYTES:
            prompts = _read_conversations(texts)
        else:
            prompts = await asyncio.get_running_loop().run_in_executor(text_pool(), _read_conversations, texts)
    else:
        name, prompts = "text", list(_texts(call, "text"))
    return prompts, [f"{name}[{index}]" for index in range(len(prompts))]


def _read_conversations(texts: Sequence[str]) -> list[Prompt]:
    return [_read_conversation(f"conversation[{index}]", text) for index, text in enumerate(texts)]


def _read_conversation(field: str, text: str) -> tuple[ChatTurn, ...]:
    """Reads a JSON array of turns.

    Raises:
        InvalidInputError: It is not an array of turns.
    """
    problem = InvalidInputError(
        field,
        'must be a JSON array of turns such as {"role": "user", "content": "..."}; a role is system, user or assistant',
    )
    try:
        turns = json.loads(text)
    except (ValueError, RecursionError):
        raise problem from None
    if not isinstance(turns, list):
        raise problem
    for turn in turns:
        if not isinstance(turn, dict) or turn.keys() != {"role", "content"} or not isinstance(turn["content"], str):
            raise problem
        if turn["role"] not in ("system", "user", "assistant"):
            raise problem
    return tuple(ChatTurn(role=turn["role"], content=turn["content"]) for turn in turns)


def _generated_arrays(texts: Sequence[GeneratedText], generated: Sequence[str]) -> Arrays:
    return {
        "generated_text": texts_array(generated),
        FINISH_REASON: texts_array([text.result.finish_reason.value for text in texts]),
        "prompt_token_count": np.array([text.num_prompt_tokens for text in texts], np.int64),
        "new_token_count": np.array([text.result.num_new_tokens for text in texts], np.int64),
        "seed": np.array([text.seed for text in texts], np.uint64),
        "truncated": np.array([text.truncated for text in texts], np.bool_),
    }


async def _generate(model: GenerationModel, call: InferCall) -> Arrays:
    request = _generation_request(call)
    prompts, fields = await _prompts(call)
    answer = await model.generate(prompts, fields=fields, request=request)
    return _generated_arrays(answer.results, [text.text for text in answer.results])


async def _stream_generation(model: GenerationModel, call: InferCall) -> AsyncGenerator[Arrays, None]:
    request = _generation_request(call)
    [prompt], [field] = await _prompts(call)
    async with aclosing(model.stream(prompt, field=field, request=request)) as parts:
        async for part in parts:
            if isinstance(part, Delta):
                yield _delta_arrays("generated_text", part)
            else:
                yield _generated_arrays(part.results, [""])


def _delta_arrays(name: str, delta: Delta) -> Arrays:
    return {name: texts_array([delta.output]), "new_token_count": np.array([delta.num_new_tokens], np.int64)}


def _has_one_row(call: InferCall) -> bool:
    return all(len(array) == 1 for array in call.arrays.values())


# Translation, text to text and captioning

_SEARCH: Final = {
    name: kind
    for name, kind in kinds_of(common_pb2.DecodingParameters).items()
    if name not in ("hypothesis_count", "early_stopping")
}
"""Parameters with the names of `TextToTextParameters`."""
_TRANSLATION: Final = kinds_of(
    translation_service_pb2.TranslateTextRequest, "split_sentences", "source_language", "target_language"
)
"""Parameters of translation alone."""


def _search_parameters(call: InferCall) -> TextToTextParameters:
    given = call.parameters
    early_stopping = given.get("early_stopping", EarlyStopping.HEURISTIC.value)
    if early_stopping not in (kinds := [kind.value for kind in EarlyStopping]):
        raise InvalidInputError("parameters.early_stopping", f"is {early_stopping[:64]!r}; must be {', '.join(kinds)}")
    return TextToTextParameters(
        num_hypotheses=given.get("hypothesis_count", 1),
        early_stopping=EarlyStopping(early_stopping),
        sampling=call.select(*_SAMPLING),
        **call.select(*_SEARCH),
    )


def _text_to_text_request(call: InferCall) -> TextToTextRequest:
    prefixes, questions = (decode_texts(name, call.arrays.get(name, ())) for name in ("target_prefix", "question"))
    return TextToTextRequest(
        parameters=_search_parameters(call),
        target_prefixes=tuple(prefixes),
        questions=tuple(questions),
        deadline=call.deadline,
        **call.select("truncate", *_TRANSLATION),
    )


def _written_arrays(name: str, texts: Sequence[WrittenText], written: Sequence[str]) -> Arrays:
    return {
        name: texts_array(written),
        FINISH_REASON: texts_array([text.finish_reason.value for text in texts]),
        "source_token_count": np.array([text.num_source_tokens for text in texts], np.int64),
        "new_token_count": np.array([text.num_new_tokens for text in texts], np.int64),
        "log_probability": np.array([text.log_probability for text in texts], np.float32),
        "score": np.array([text.score for text in texts], np.float32),
        "truncated": np.array([text.truncated for text in texts], np.bool_),
    }


async def _write(name: str, model: TextToTextModel, call: InferCall) -> Arrays:
    answer = await model.write(_texts(call, "text"), request=_text_to_text_request(call))
    return _all_written(name, answer.results)


def _all_written(name: str, texts: Sequence[WrittenText]) -> Arrays:
    found = [(index, hypothesis) for index, text in enumerate(texts) for hypothesis in text.hypotheses or (text,)]
    return {
        **_written_arrays(name, texts, [text.text for text in texts]),
        "hypothesis_text_index": np.array([index for index, _ in found], np.int64),
        "hypothesis_text": texts_array([hypothesis.text for _, hypothesis in found]),
        "hypothesis_score": np.array([hypothesis.score for _, hypothesis in found], np.float32),
    }


async def _stream_written(name: str, model: TextToTextModel, call: InferCall) -> AsyncGenerator[Arrays, None]:
    [text] = _texts(call, "text")
    async with aclosing(model.stream(text, field="text[0]", request=_text_to_text_request(call))) as parts:
        async for part in parts:
            if isinstance(part, Delta):
                yield _delta_arrays(name, part)
            else:
                yield _written_arrays(name, part.results, [""])


def _streams_written(call: InferCall) -> bool:
    """Returns True unless the call has a search, which may still replace its output, or split sentences."""
    return (
        _has_one_row(call) and call.parameters.get("beam_size", 1) == 1 and not call.parameters.get("split_sentences")
    )


_COMMON: Final = {"timeout": Kind.UINT64, "triton_enable_empty_final_response": Kind.BOOLEAN}
"""Parameters of every task: timeout in microseconds, and a flag for the last response, which is always set."""


_TARGET_PREFIX: Final = TensorSpec(name="target_prefix", datatype=BYTES, shape=(-1,), is_optional=True)
_IMAGE_QUESTION: Final = TensorSpec(name="question", datatype=BYTES, shape=(-1,), is_optional=True)
_SEARCHING: Final = _SAMPLING | kinds_of(common_pb2.DecodingParameters)


def _written_specs(name: str) -> tuple[TensorSpec, ...]:
    """Returns the outputs of a task whose output texts are called `name`."""
    return (
        TensorSpec(name=name, datatype=BYTES, shape=(-1,)),
        TensorSpec(name=FINISH_REASON, datatype=BYTES, shape=(-1,)),
        TensorSpec(name="source_token_count", datatype="INT64", shape=(-1,)),
        TensorSpec(name="new_token_count", datatype="INT64", shape=(-1,)),
        TensorSpec(name="log_probability", datatype="FP32", shape=(-1,)),
        TensorSpec(name="score", datatype="FP32", shape=(-1,)),
        _TRUNCATED,
        TensorSpec(name="hypothesis_text_index", datatype="INT64", shape=(-1,)),
        TensorSpec(name="hypothesis_text", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="hypothesis_score", datatype="FP32", shape=(-1,)),
    )


async def _caption_images(model: CaptioningModel, call: InferCall) -> Arrays:
    answer = await model.caption(await _images(call), request=_text_to_text_request(call))
    return _all_written("caption", [one.written for one in answer.results])


async def _stream_caption(model: CaptioningModel, call: InferCall) -> AsyncGenerator[Arrays, None]:
    [image] = await _images(call)
    parts = model.stream_caption(image, field="image[0]", request=_text_to_text_request(call))
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, Delta):
                yield _delta_arrays("caption", part)
            else:
                yield _written_arrays("caption", [one.written for one in part.results], [""])


def _files(call: InferCall, name: str) -> list[bytes]:
    """Reads an input of files.

    Raises:
        InvalidInputError: It is missing.
    """
    if name not in call.arrays:
        raise InvalidInputError("inputs", f"lack {name}; give it")
    files: list[bytes] = call.arrays[name].tolist()
    return files


async def _images(call: InferCall) -> list[bytes]:
    """Reads the images as files; pixels are written as such.

    Raises:
        InvalidInputError: There are none, or both kinds.
    """
    pixels = call.arrays.get("pixels")
    if pixels is None:
        return _files(call, "image")
    if "image" in call.arrays:
        raise InvalidInputError("inputs", "have image together with pixels; give one of the two")
    if not pixels.size:
        raise InvalidInputError("pixels", f"has shape {list(pixels.shape)}, without a pixel")
    return await asyncio.get_running_loop().run_in_executor(image_pool(), _write_images, pixels)


def _write_images(pixels: NDArray[np.uint8]) -> list[bytes]:
    """Writes pixels (N, H, W, 3) as files, in the format that takes the least time."""
    files = [BytesIO() for _ in pixels]
    for one, file in zip(pixels, files, strict=True):
        Image.fromarray(one).save(file, "BMP")
    return [file.getvalue() for file in files]


async def _read_images(files: Sequence[bytes], mode: Literal["RGB", "L"]) -> NDArray[np.uint8]:
    """Reads images of one size that the server has written: (N, H, W, 3), or (N, H, W) of grey ones."""

    def read() -> NDArray[np.uint8]:
        return np.stack([np.asarray(Image.open(BytesIO(file)).convert(mode)) for file in files])

    return await asyncio.get_running_loop().run_in_executor(image_pool(), read)


async def _image(files: Sequence[bytes], name: str) -> SentImage:
    """Returns the one image of an input.

    Raises:
        InvalidInputError: There are several.
    """
    if len(files) != 1:
        raise InvalidInputError(name, f"has {len(files)} elements; a call is about one image")
    [image] = await name_images(files, name)
    return image


# Speech


_SEGMENTS: Final = (
    TensorSpec(name="segment_audio_index", datatype="INT64", shape=(-1,)),
    TensorSpec(name="segment_text", datatype=BYTES, shape=(-1,)),
    TensorSpec(name="segment_start", datatype="FP32", shape=(-1,)),
    TensorSpec(name="segment_end", datatype="FP32", shape=(-1,)),
    TensorSpec(name="word_segment_index", datatype="INT64", shape=(-1,)),
    TensorSpec(name="word_text", datatype=BYTES, shape=(-1,)),
    TensorSpec(name="word_start", datatype="FP32", shape=(-1,)),
    TensorSpec(name="word_end", datatype="FP32", shape=(-1,)),
)
_TRANSCRIPTION: Final = kinds_of(
    speech_service_pb2.TranscribeSpeechRequest,
    "language",
    "task",
    "prompt",
    "include_timestamps",
    "condition_on_previous",
)


def _speech_request(call: InferCall) -> SpeechRequest:
    task = call.parameters.get("task", SpeechTask.TRANSCRIBE.value)
    if task not in (tasks := [each.value for each in SpeechTask]):
        raise InvalidInputError("parameters.task", f"is {task[:64]!r}; must be {' or '.join(tasks)}")
    return SpeechRequest(
        parameters=_search_parameters(call),
        task=SpeechTask(task),
        timestamps=call.parameters.get("include_timestamps", False),
        deadline=call.deadline,
        **call.select("language", "prompt", "condition_on_previous"),
    )


def _transcript_arrays(transcripts: Sequence[Transcript], texts: Sequence[str]) -> Arrays:
    segments = [(index, segment) for index, one in enumerate(transcripts) for segment in one.segments]
    words = [(index, word) for index, (_, segment) in enumerate(segments) for word in segment.words]
    hypotheses = [(index, found) for index, one in enumerate(transcripts) for found in one.hypotheses or (one,)]
    return {
        "text": texts_array(texts),
        "language": texts_array([one.language for one in transcripts]),
        "duration": np.array([one.duration_s for one in transcripts], np.float32),
        FINISH_REASON: texts_array([one.finish_reason.value for one in transcripts]),
        "new_token_count": np.array([one.num_new_tokens for one in transcripts], np.int64),
        "log_probability": np.array([one.log_probability for one in transcripts], np.float32),
        "score": np.array([one.score for one in transcripts], np.float32),
        "segment_audio_index": np.array([index for index, _ in segments], np.int64),
        "segment_text": texts_array([segment.text for _, segment in segments]),
        "segment_start": np.array([segment.start_s for _, segment in segments], np.float32),
        "segment_end": np.array([segment.end_s for _, segment in segments], np.float32),
        "word_segment_index": np.array([index for index, _ in words], np.int64),
        "word_text": texts_array([word.text for _, word in words]),
        "word_start": np.array([word.start_s for _, word in words], np.float32),
        "word_end": np.array([word.end_s for _, word in words], np.float32),
        "hypothesis_audio_index": np.array([index for index, _ in hypotheses], np.int64),
        "hypothesis_text": texts_array([found.text for _, found in hypotheses]),
        "hypothesis_score": np.array([found.score for _, found in hypotheses], np.float32),
    }


async def _transcribe(model: Transcriber, call: InferCall) -> Arrays:
    answer = await model.transcribe(_files(call, "audio"), request=_speech_request(call))
    return _transcript_arrays(answer.results, [one.text for one in answer.results])


async def _stream_transcript(model: Transcriber, call: InferCall) -> AsyncGenerator[Arrays, None]:
    [audio] = _files(call, "audio")
    async with aclosing(model.stream(audio, name="audio[0]", request=_speech_request(call))) as parts:
        async for part in parts:
            if isinstance(part, SpeechDelta):
                count = np.array([part.num_new_tokens], np.int64)
                yield {"text": texts_array([part.text]), "new_token_count": count}
            else:
                yield _transcript_arrays(part.results, [""])


_AUDIO_FORMATS: Final = {form.name.lower(): form for form in AudioFormat}
_VOICE: Final = ("temperature", "top_k", "top_p", "min_p", "seed")


def _synthesis_request(call: InferCall) -> SynthesisRequest:
    form = call.parameters.get("format", "wav")
    if form not in _AUDIO_FORMATS:
        raise InvalidInputError("parameters.format", f"is {form[:64]!r}; must be one of {', '.join(_AUDIO_FORMATS)}")
    return SynthesisRequest(
        sampling=call.select(*_VOICE),
        speaking_rate=call.parameters.get("speaking_rate"),
        max_seconds=call.parameters.get("max_duration_seconds"),
        format=_AUDIO_FORMATS[form],
        deadline=call.deadline,
        **call.select("voice"),
    )


def _spoken_arrays(model: Synthesizer, texts: Sequence[SpokenText]) -> Arrays:
    return {
        "audio": files_array([one.audio for one in texts]),
        "sampling_rate": np.array([model.sampling_rate] * len(texts), np.int64),
        "duration": np.array([one.duration_s for one in texts], np.float32),
        FINISH_REASON: texts_array([one.finish_reason.value for one in texts]),
        "new_token_count": np.array([one.num_new_tokens for one in texts], np.int64),
        "seed": np.array([one.seed for one in texts], np.uint64),
    }


def _samples(recordings: Sequence[bytes]) -> Arrays:
    """Returns samples of 16 bits as numbers from -1 to 1, FP32 (N, S); shorter ones are padded with 0."""
    rows = [np.frombuffer(pcm, "<i2").astype(np.float32) / 2**15 for pcm in recordings]
    length = max(map(len, rows))
    return {"samples": np.stack([np.pad(row, (0, length - len(row))) for row in rows])}


def _read_samples(files: Sequence[bytes]) -> Arrays:
    recordings = []
    for file in files:
        with wave.open(BytesIO(file)) as opened:
            recordings.append(opened.readframes(opened.getnframes()))
    return _samples(recordings)


async def _synthesize(model: Synthesizer, call: InferCall) -> Arrays:
    request = _synthesis_request(call)
    if "samples" in call.outputs and request.format is not AudioFormat.WAV:
        raise InvalidInputError("parameters.format", "must be wav if samples are asked for; leave it out")
    answer = await model.synthesize(_texts(call, "text"), request=request)
    arrays = _spoken_arrays(model, answer.results)
    if "samples" not in call.outputs:
        return arrays
    loop = asyncio.get_running_loop()
    files = [one.audio for one in answer.results]
    return {**arrays, **await loop.run_in_executor(text_pool(), _read_samples, files)}


async def _stream_speech(model: Synthesizer, call: InferCall) -> AsyncGenerator[Arrays, None]:
    [text] = _texts(call, "text")
    async with aclosing(model.stream(text, field="text[0]", request=_synthesis_request(call))) as parts:
        async for part in parts:
            if isinstance(part, SpeechPart):
                count = np.array([part.num_new_tokens], np.int64)
                yield {"audio": files_array([part.pcm]), "new_token_count": count, **_samples([part.pcm])}
            else:
                yield {**_spoken_arrays(model, part.results), **_samples([b""])}


# Image generation and segmentation


_SAMPLERS: Final = {sampler.value: sampler for sampler in DiffusionSampler}
_DIFFUSION: Final = kinds_of(image_generation_service_pb2.DiffusionParameters) | kinds_of(
    image_generation_service_pb2.GenerateImageRequest, "image_count"
)


async def _generate_images(model: ImageGenerationModel, call: InferCall) -> Arrays:
    given = call.select("guidance_scale", "seed", "strength")
    own_names = {"image_count": "num_images", "step_count": "num_steps"}
    given |= {own: call.parameters[name] for name, own in own_names.items() if name in call.parameters}
    if (sampler := call.parameters.get("sampler")) is not None:
        if sampler not in _SAMPLERS:
            known = ", ".join(_SAMPLERS)
            raise InvalidInputError("parameters.sampler", f"is {sampler[:64]!r}; must be one of {known}")
        given["sampler"] = _SAMPLERS[sampler]
    for name in ("prompt", "negative_prompt"):
        if name == "prompt" or name in call.arrays:
            texts = _texts(call, name)
            if len(texts) != 1:
                raise InvalidInputError(name, f"has {len(texts)} elements; a call has one, and image_count images")
            [given[name]] = texts
    if not call.arrays.keys().isdisjoint(("image", "pixels")):
        given["image"] = await _image(await _images(call), "image")
    if "mask" in call.arrays:
        given["mask"] = await _image(_files(call, "mask"), "mask")
    answer = await model.generate(ImageGenerationRequest(**given), deadline=call.deadline)
    files = [one.png for one in answer.results]
    return {
        "image": files_array(files),
        "seed": np.array([one.seed for one in answer.results], np.uint64),
        "step_count": np.array([one.num_steps for one in answer.results], np.int64),
        **({"pixels": await _read_images(files, "RGB")} if "pixels" in call.outputs else {}),
    }


_EVERYTHING: Final = {
    name: kind
    for name, kind in kinds_of(segmentation_service_pb2.SegmentEverythingRequest).items()
    if name in EverythingRequest.__dataclass_fields__
}
"""Parameters with the names of `EverythingRequest`."""


def _segment_prompt(call: InferCall) -> SegmentPrompt | None:
    """Reads a segmentation prompt; None for an everything request."""
    points, inside = call.arrays.get("point"), call.arrays.get("point_is_inside")
    box = call.arrays.get("box")
    if inside is not None and (points is None or len(inside) != len(points)):
        count = 0 if points is None else len(points)
        raise InvalidInputError("point_is_inside", f"has {len(inside)} elements for {count} points; give one for each")
    if box is not None and len(box) != 1:
        raise InvalidInputError("box", f"has {len(box)} rows; a call has one box")
    if points is None and box is None:
        return None
    coordinates = [] if points is None else points.tolist()
    are_inside = [True] * len(coordinates) if inside is None else inside.tolist()
    return SegmentPrompt(
        points=tuple(Point(x, y, is_inside) for (x, y), is_inside in zip(coordinates, are_inside, strict=True)),
        box=None if box is None else tuple(box[0].tolist()),
    )


async def _mask_pixels(masks: Sequence[SegmentMask]) -> NDArray[np.bool_]:
    """Returns the pixels of masks, (M, H, W).

    Raises:
        InvalidInputError: They are too many for one answer.
    """
    if not masks:
        return np.zeros((0, 0, 0), np.bool_)
    size = len(masks), masks[0].height, masks[0].width
    if math.prod(size) > _MAX_MASK_PIXELS:
        raise InvalidInputError(
            "outputs", f"have mask_pixels, of shape {list(size)}; the limit is {_MAX_MASK_PIXELS} pixels, ask for mask"
        )
    return await _read_images([mask.png or b"" for mask in masks], "L") > 0


async def _segment(model: SegmentationModel, call: InferCall) -> Arrays:
    prompt, asked = _segment_prompt(call), call.select(*_EVERYTHING)
    image = await _image(await _images(call), "image")
    if prompt is None:
        if "max_mask_count" in call.parameters:
            raise InvalidInputError("max_mask_count", "requires point or box; leave it out")
        async with await model.segment_everything(
            image, EverythingRequest(**asked), mask_format=MaskFormat.PNG, deadline=call.deadline
        ) as found:
            masks = [mask async for mask in found.masks]
    else:
        if asked:
            raise InvalidInputError(min(asked), "is set together with point or box; it is for calls that have neither")
        most = call.parameters.get("max_mask_count", 0)
        answer = await model.segment(
            image, [prompt], max_masks=most, mask_format=MaskFormat.PNG, deadline=call.deadline
        )
        [masks] = answer.results
    return {
        "mask": files_array([mask.png or b"" for mask in masks]),
        "predicted_iou": np.array([mask.predicted_iou for mask in masks], np.float32),
        "stability": np.array([mask.stability for mask in masks], np.float32),
        "mask_box": np.array([mask.box for mask in masks], np.int64).reshape(-1, 4),
        "area": np.array([mask.area for mask in masks], np.int64),
        **({"mask_pixels": await _mask_pixels(masks)} if "mask_pixels" in call.outputs else {}),
    }


def _text_to_text(name: str, further: dict[str, Kind]) -> TensorTask:
    """Returns a task with output texts called `name` and `further` parameters."""
    return TensorTask(
        inputs=lambda _: (_TEXT, _TARGET_PREFIX),
        outputs=lambda _: _written_specs(name),
        parameters=_COMMON | _SEARCHING | {"truncate": Kind.BOOLEAN} | further,
        max_rows=MAX_SOURCES,
        predictions=_always(name),
        infer=partial(_write, name),
        stream=partial(_stream_written, name),
        streams=_streams_written,
    )


TEXT_CLASSIFICATION: Final = TensorTask(
    inputs=_text_specs,
    outputs=lambda model: (*_LABELS, *_embedding(model), _TOKEN_COUNT, _TRUNCATED),
    parameters=_COMMON
    | {"top_k": Kind.INTEGER, "threshold": Kind.NUMBER, "truncate": Kind.BOOLEAN, "normalize": Kind.BOOLEAN},
    max_rows=MAX_TEXTS,
    predictions=_always("label", "probability"),
    infer=_classify_texts,
)
TOKEN_CLASSIFICATION: Final = TensorTask(
    inputs=lambda model: (_WORD, _BBOX, _PAGE_SIZE) if _reads_pages(model) else (_TEXT,),
    outputs=lambda model: (
        TensorSpec(name="text_index", datatype="INT64", shape=(-1,)),
        TensorSpec(name="label", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="probability", datatype="FP32", shape=(-1,)),
        TensorSpec(name="start", datatype="INT64", shape=(-1,)),
        TensorSpec(name="end", datatype="INT64", shape=(-1,)),
        *(_WORD_SPANS if _reads_pages(model) else ()),
        *_embedding(model),
        _TOKEN_COUNT,
        _TRUNCATED,
    ),
    parameters=_COMMON | {"truncate": Kind.BOOLEAN, "normalize": Kind.BOOLEAN},
    max_rows=MAX_TEXTS,
    infer=_classify_tokens,
)
QUESTION_ANSWERING: Final = TensorTask(
    inputs=lambda _: (
        TensorSpec(name="question", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="context", datatype=BYTES, shape=(-1,)),
    ),
    outputs=lambda _: (
        TensorSpec(name="context_index", datatype="INT64", shape=(-1,)),
        TensorSpec(name="answer", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="score", datatype="FP32", shape=(-1,)),
        TensorSpec(name="start", datatype="INT64", shape=(-1,)),
        TensorSpec(name="end", datatype="INT64", shape=(-1,)),
        TensorSpec(name="no_answer_score", datatype="FP32", shape=(-1,)),
        _TOKEN_COUNT,
        TensorSpec(name="window_count", datatype="INT64", shape=(-1,)),
    ),
    parameters=_COMMON | _ANSWERING,
    max_rows=MAX_TEXTS,
    infer=_answer_questions,
)
FILL_MASK: Final = TensorTask(
    inputs=lambda _: (_TEXT,),
    outputs=lambda _: (
        TensorSpec(name="text_index", datatype="INT64", shape=(-1,)),
        TensorSpec(name="start", datatype="INT64", shape=(-1,)),
        TensorSpec(name="end", datatype="INT64", shape=(-1,)),
        TensorSpec(name="token", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="token_id", datatype="INT64", shape=(-1,)),
        TensorSpec(name="probability", datatype="FP32", shape=(-1,)),
        TensorSpec(name="filled_text", datatype=BYTES, shape=(-1,)),
        _TOKEN_COUNT,
        _TRUNCATED,
    ),
    parameters=_COMMON | {"top_k": Kind.INTEGER, "targets": Kind.TEXTS, "truncate": Kind.BOOLEAN},
    max_rows=MAX_TEXTS,
    infer=_fill_masks,
)
IMAGE_CLASSIFICATION: Final = TensorTask(
    inputs=_image_specs,
    outputs=lambda model: (*_LABELS, *_embedding(model)),
    parameters=_COMMON | {"top_k": Kind.INTEGER, "normalize": Kind.BOOLEAN},
    max_rows=MAX_IMAGES,
    predictions=_always("label", "probability"),
    infer=_classify_images,
    reads_texts=False,
)
AUDIO_CLASSIFICATION: Final = TensorTask(
    inputs=lambda _: (TensorSpec(name="audio", datatype=BYTES, shape=(-1,)),),
    outputs=lambda _: (
        *_LABELS,
        TensorSpec(name="duration", datatype="FP32", shape=(-1,)),
        TensorSpec(name="truncated", datatype="BOOL", shape=(-1,)),
    ),
    parameters=_COMMON | kinds_of(audio_classification_service_pb2.ClassifyAudioRequest, "top_k", "truncate"),
    max_rows=MAX_CLASSIFIED_AUDIOS,
    predictions=_always("label", "probability"),
    infer=_classify_audios,
    reads_texts=False,
)
VIDEO_CLASSIFICATION: Final = TensorTask(
    inputs=lambda _: (TensorSpec(name="frame", datatype=BYTES, shape=(-1,)),),
    outputs=lambda _: (*_LABELS, TensorSpec(name="frame_index", datatype="INT64", shape=(-1, -1))),
    parameters=_COMMON | kinds_of(video_classification_service_pb2.ClassifyVideoRequest, "top_k"),
    max_rows=MAX_FRAMES,
    infer=_classify_video,
    reads_texts=False,
)
OBJECT_DETECTION: Final = TensorTask(
    inputs=_image_specs,
    outputs=lambda _: (
        TensorSpec(name="image_index", datatype="INT64", shape=(-1,)),
        TensorSpec(name="label", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="label_index", datatype="INT64", shape=(-1,)),
        TensorSpec(name="score", datatype="FP32", shape=(-1,)),
        TensorSpec(name="box", datatype="FP32", shape=(-1, 4)),
    ),
    parameters=_COMMON | _DETECTING,
    max_rows=MAX_IMAGES,
    infer=_detect_objects,
    reads_texts=False,
)
SEMANTIC_SEGMENTATION: Final = TensorTask(
    inputs=_image_specs,
    outputs=lambda _: (
        TensorSpec(name="class_map", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="image_index", datatype="INT64", shape=(-1,)),
        TensorSpec(name="label", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="label_index", datatype="INT64", shape=(-1,)),
        TensorSpec(name="share", datatype="FP32", shape=(-1,)),
        TensorSpec(name="score", datatype="FP32", shape=(-1,)),
        TensorSpec(name="probability_map", datatype=BYTES, shape=(-1,)),
    ),
    parameters=_COMMON | _CLASSIFYING,
    max_rows=MAX_IMAGES,
    infer=_classify_pixels,
    reads_texts=False,
)
DEPTH_ESTIMATION: Final = TensorTask(
    inputs=_image_specs,
    outputs=lambda _: (
        TensorSpec(name="depth_map", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="minimum", datatype="FP32", shape=(-1,)),
        TensorSpec(name="maximum", datatype="FP32", shape=(-1,)),
        TensorSpec(name="depth_kind", datatype=BYTES, shape=(-1,)),
    ),
    parameters=_COMMON,
    max_rows=MAX_IMAGES,
    infer=_estimate_depth,
    reads_texts=False,
)
TEXT_EMBEDDING: Final = TensorTask(
    inputs=_text_specs,
    outputs=lambda model: (*_embedding(model), _TOKEN_COUNT, _TRUNCATED),
    parameters=_COMMON | {"truncate": Kind.BOOLEAN, "normalize": Kind.BOOLEAN, "prompt_name": Kind.TEXT},
    max_rows=MAX_TEXTS,
    predictions=_always("embedding"),
    infer=_embed_texts,
)
TEXT_SCORING: Final = TensorTask(
    inputs=_text_specs,
    outputs=_score_specs,
    parameters=_COMMON | {"truncate": Kind.BOOLEAN, "prompt_name": Kind.TEXT},
    max_rows=MAX_TEXTS,
    predictions=_always("score"),
    infer=_score_texts,
)
IMAGE_EMBEDDING: Final = TensorTask(
    inputs=_image_specs,
    outputs=_embedding,
    parameters=_COMMON | {"normalize": Kind.BOOLEAN},
    max_rows=MAX_IMAGES,
    predictions=_always("embedding"),
    infer=_classify_images,
    reads_texts=False,
)
GENERATION: Final = TensorTask(
    inputs=_generation_specs,
    outputs=lambda _: (
        TensorSpec(name="generated_text", datatype=BYTES, shape=(-1,)),
        TensorSpec(name=FINISH_REASON, datatype=BYTES, shape=(-1,)),
        TensorSpec(name="prompt_token_count", datatype="INT64", shape=(-1,)),
        TensorSpec(name="new_token_count", datatype="INT64", shape=(-1,)),
        TensorSpec(name="seed", datatype="UINT64", shape=(-1,)),
        _TRUNCATED,
    ),
    parameters=_COMMON
    | _GENERATION
    | _CONSTRAINTS
    | kinds_of(generation_service_pb2.GenerateTextRequest, "sample_count", "truncate", "echo")
    | {"priority": Kind.UINT64},
    max_rows=MAX_PROMPTS,
    predictions=_always("generated_text"),
    infer=_generate,
    stream=_stream_generation,
    streams=lambda call: _has_one_row(call) and call.parameters.get("sample_count", 1) == 1,
)
TRANSLATION: Final = _text_to_text("translated_text", _TRANSLATION)
TEXT_TO_TEXT: Final = _text_to_text("rewritten_text", {})
CAPTIONING: Final = TensorTask(
    inputs=lambda model: (
        *(_IMAGE, _PIXELS, _TARGET_PREFIX),
        *((_IMAGE_QUESTION,) if model.bundle.manifest.image_question is not None else ()),
    ),
    outputs=lambda _: _written_specs("caption"),
    parameters=_COMMON | _SEARCHING | {"target_language": Kind.TEXT},
    max_rows=MAX_IMAGES,
    predictions=_always("caption"),
    infer=_caption_images,
    stream=_stream_caption,
    streams=_streams_written,
    reads_texts=False,
)
TRANSCRIPTION: Final = TensorTask(
    inputs=lambda _: (TensorSpec(name="audio", datatype=BYTES, shape=(-1,)),),
    outputs=lambda _: (
        TensorSpec(name="text", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="language", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="duration", datatype="FP32", shape=(-1,)),
        TensorSpec(name=FINISH_REASON, datatype=BYTES, shape=(-1,)),
        TensorSpec(name="new_token_count", datatype="INT64", shape=(-1,)),
        TensorSpec(name="log_probability", datatype="FP32", shape=(-1,)),
        TensorSpec(name="score", datatype="FP32", shape=(-1,)),
        *_SEGMENTS,
        TensorSpec(name="hypothesis_audio_index", datatype="INT64", shape=(-1,)),
        TensorSpec(name="hypothesis_text", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="hypothesis_score", datatype="FP32", shape=(-1,)),
    ),
    parameters=_COMMON | _SEARCHING | _TRANSCRIPTION,
    max_rows=MAX_AUDIOS,
    predictions=_always("text"),
    infer=_transcribe,
    stream=_stream_transcript,
    streams=_streams_written,
    reads_texts=False,
)
SPEECH_SYNTHESIS: Final = TensorTask(
    inputs=lambda _: (_TEXT,),
    outputs=lambda _: (
        TensorSpec(name="audio", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="sampling_rate", datatype="INT64", shape=(-1,)),
        TensorSpec(name="duration", datatype="FP32", shape=(-1,)),
        TensorSpec(name=FINISH_REASON, datatype=BYTES, shape=(-1,)),
        TensorSpec(name="new_token_count", datatype="INT64", shape=(-1,)),
        TensorSpec(name="seed", datatype="UINT64", shape=(-1,)),
        TensorSpec(name="samples", datatype="FP32", shape=(-1, -1), is_on_request=True),
    ),
    parameters=_COMMON
    | {name: _SAMPLING[name] for name in _VOICE}
    | kinds_of(speech_service_pb2.SynthesizeSpeechRequest, "voice", "format")
    | kinds_of(speech_service_pb2.SynthesisParameters),
    max_rows=MAX_SPOKEN,
    predictions=_always("audio"),
    infer=_synthesize,
    stream=_stream_speech,
    streams=lambda call: _has_one_row(call) and "format" not in call.parameters,  # format is for complete audio
)
IMAGE_GENERATION: Final = TensorTask(
    inputs=lambda _: (
        TensorSpec(name="prompt", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="negative_prompt", datatype=BYTES, shape=(-1,), is_optional=True),
        replace(_IMAGE, is_optional=True),
        _PIXELS,
        TensorSpec(name="mask", datatype=BYTES, shape=(-1,), is_optional=True),
    ),
    outputs=lambda _: (
        _IMAGE,
        TensorSpec(name="seed", datatype="UINT64", shape=(-1,)),
        TensorSpec(name="step_count", datatype="INT64", shape=(-1,)),
        replace(_PIXELS, is_optional=False, is_on_request=True),
    ),
    parameters=_COMMON | _DIFFUSION,
    max_rows=1,
    infer=_generate_images,
    reads_texts=False,
)
SEGMENTATION: Final = TensorTask(
    inputs=lambda _: (
        _IMAGE,
        _PIXELS,
        TensorSpec(name="point", datatype="FP32", shape=(-1, 2), is_optional=True),
        TensorSpec(name="point_is_inside", datatype="BOOL", shape=(-1,), is_optional=True),
        TensorSpec(name="box", datatype="FP32", shape=(-1, 4), is_optional=True),
    ),
    outputs=lambda _: (
        TensorSpec(name="mask", datatype=BYTES, shape=(-1,)),
        TensorSpec(name="predicted_iou", datatype="FP32", shape=(-1,)),
        TensorSpec(name="stability", datatype="FP32", shape=(-1,)),
        TensorSpec(name="mask_box", datatype="INT64", shape=(-1, 4)),
        TensorSpec(name="area", datatype="INT64", shape=(-1,)),
        TensorSpec(name="mask_pixels", datatype="BOOL", shape=(-1, -1, -1), is_on_request=True),
    ),
    parameters=_COMMON | _EVERYTHING | kinds_of(segmentation_service_pb2.SegmentImageRequest, "max_mask_count"),
    max_rows=MAX_POINTS,
    infer=_segment,
    reads_texts=False,
)


# Tensors


def _graph_specs(specs: Sequence[BundleSpec]) -> tuple[TensorSpec, ...]:
    """Returns tensors of a graph as callers see them."""
    return tuple(
        TensorSpec(
            name=spec.name,
            datatype=datatype_of(spec.dtype),
            shape=tuple(axis if isinstance(axis, int) else -1 for axis in spec.shape),
        )
        for spec in specs
    )


async def _infer_tensors(model: TensorModel, call: InferCall) -> Arrays:
    arrays = {
        name: object_array(decode_texts(name, array.ravel())).reshape(array.shape) if array.dtype == object else array
        for name, array in call.arrays.items()
    }
    outputs = [spec.name for spec in model.outputs if spec.name in call.outputs]
    [found] = (await model.infer(arrays, outputs=outputs, deadline=call.deadline)).results
    return found


def _row_outputs(model: TensorModel) -> tuple[str, ...]:
    """Returns the outputs with a row for each row of the inputs, if the rows of all inputs come first."""
    if any(batch_axis_of(spec) != 0 for spec in model.inputs):
        return ()
    return tuple(spec.name for spec in model.outputs if batch_axis_of(spec) == 0)


TENSORS: Final = TensorTask(
    inputs=lambda model: _graph_specs(cast("TensorModel", model).inputs),
    outputs=lambda model: _graph_specs(cast("TensorModel", model).outputs),
    parameters=_COMMON,
    max_rows=None,
    predictions=lambda model: _row_outputs(cast("TensorModel", model)),
    infer=_infer_tensors,
    reads_texts=False,
)


def tensors_of(families: Families, model: ServedModel) -> TensorTask:
    """Returns the tensor interface of a model.

    Raises:
        WrongTaskError: It has none.
    """
    manifest = model.bundle.manifest
    name = families[manifest.task].tensors
    if name is None:
        raise WrongTaskError(f"model {manifest.name} is for {manifest.task}, which has no tensors; call its own RPC")
    return cast("TensorTask", resolve_name(name))


def earlier_deadline(deadline: float | None, parameters: Mapping[str, Any]) -> float | None:
    """Returns the earlier of `deadline` and the parameter `timeout`, in seconds of `time.monotonic`."""
    timeout_us: int = parameters.get("timeout", 0)
    if not timeout_us:  # 0: no timeout
        return deadline
    own = time.monotonic() + timeout_us / 1e6
    return own if deadline is None else min(own, deadline)
