"""Every call of the API, asked and shown; one method an RPC."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import show
from draw import draw_pictures
from samples import CAPTIONS, HEADLINES, PROMPTS, STREAMED_CAPTION, STREAMED_PROMPT

from headway_client import Client, FailedPreconditionError, HeadwayError, Task
from headway_client.options import SamplingOptions, SharedTranslateOptions

_SAMPLING: SamplingOptions = {
    "max_new_tokens": 100,
    "temperature": 0.7,
    "top_p": 0.95,
    "seed": 7,
}
_ENGLISH_TO_GERMAN: SharedTranslateOptions = {"source_language": "en", "target_language": "de"}

ResultT = TypeVar("ResultT")


class Conversation:
    """Calls a server's models, the first of each task; of those that translate, the one from English to German."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._models: dict[Task, str] = {}

    def call_everything(self, images: list[Path]) -> list[str]:
        """Calls every RPC and prints a section of each; returns the names of those that were not answered."""
        calls: dict[str, Callable[[], None]] = {
            "ListModels": self.list_models,
            "GetModel": self.get_model,
            "GenerateText": self.generate,
            "StreamGenerateText": self.stream_generate,
            "TranslateText": self.translate,
            "StreamTranslateText": self.stream_translate,
            "ClassifyText": self.classify,
            "ClassifyTokens": self.classify_tokens,
            "EmbedText": self.embed,
            "ClassifyImage": partial(self.label, images),
        }
        failed = []
        for rpc, call in calls.items():
            try:
                call()
            except (HeadwayError, OSError) as error:
                show.line("failed", str(error))
                failed.append(rpc)
        return failed

    def list_models(self) -> None:
        """ListModels; the models are kept for the calls that follow."""
        show.section("ListModels", "what the server has loaded")
        listing = self._client.models()
        for model in listing:
            self._models.setdefault(model.task, model.name)
            show.line("model", f"{model.name} {model.version}, {model.task.replace('_', ' ')}")
            show.line("", f"{model.parameter_count:,} parameters, {model.variant} on {model.device}")
            for figure in model.quality:
                if figure.variant == model.variant:
                    data = f"{figure.example_count:,} examples of {figure.dataset}"
                    show.line("", f"{figure.metric.replace('_', ' ')} {figure.value:.4g} on {data}")
        for bundle in listing.rejected_bundles:
            show.line("rejected", f"{bundle.path}: {bundle.reason}")

    def get_model(self) -> None:
        """GetModel."""
        show.section("GetModel", "everything about one of them")
        for name in list(self._models.values())[:1]:
            show.line("question", name)
            details = self._client.model(name)
            show.line("answer", f"{details.model.description}")
            show.line("", f"architecture {details.model.architecture}, licence {details.model.license}")
            show.line("", f"manifest of {len(details.manifest_json):,} characters")

    def generate(self) -> None:
        """GenerateText."""
        show.section("GenerateText", "prompts, continued together in one call")
        model = self._model(Task.GENERATION)
        answer, seconds = _timed(lambda: self._client.generate(PROMPTS, model=model, truncate=True, **_SAMPLING))
        for prompt, result in zip(PROMPTS, answer, strict=True):
            show.line("question", prompt)
            show.line("answer", result.text)
        show.footer(answer, seconds, sum(result.new_token_count for result in answer))

    def stream_generate(self) -> None:
        """StreamGenerateText."""
        show.section("StreamGenerateText", "the text as it appears")
        show.line("question", STREAMED_PROMPT)
        begun_s = time.perf_counter()
        model = self._model(Task.GENERATION)
        with self._client.stream_generate(STREAMED_PROMPT, model=model, truncate=True, **_SAMPLING) as stream:
            show.stream("answer", stream)
        show.footer(stream.answer, time.perf_counter() - begun_s, stream.answer[0].new_token_count)

    def translate(self) -> None:
        """TranslateText."""
        show.section("TranslateText", "English to German, in one call")
        answer, seconds = _timed(lambda: self._client.translate(CAPTIONS, **_ENGLISH_TO_GERMAN))
        for caption, result in zip(CAPTIONS, answer, strict=True):
            show.line("question", caption)
            show.line("answer", result.text)
        show.footer(answer, seconds, sum(result.new_token_count for result in answer))

    def stream_translate(self) -> None:
        """StreamTranslateText."""
        show.section("StreamTranslateText", "the translation as it appears")
        show.line("question", STREAMED_CAPTION)
        begun_s = time.perf_counter()
        with self._client.stream_translate(STREAMED_CAPTION, **_ENGLISH_TO_GERMAN) as stream:
            show.stream("answer", stream)
        show.footer(stream.answer, time.perf_counter() - begun_s, stream.answer[0].new_token_count)

    def classify(self) -> None:
        """ClassifyText."""
        show.section("ClassifyText", "headlines and their topics")
        answer, seconds = _timed(lambda: self._client.classify(HEADLINES, model=self._model(Task.TEXT_CLASSIFICATION)))
        for headline, result in zip(HEADLINES, answer, strict=True):
            show.line("question", headline)
            show.line("answer", show.labels(result.labels))
        show.footer(answer, seconds)

    def classify_tokens(self) -> None:
        """ClassifyTokens; a server without a model for it says so, and that is an answer."""
        show.section("ClassifyTokens", "spans of a text, such as names")
        show.line("question", HEADLINES[0])
        try:
            answer = self._client.classify_tokens(HEADLINES[0], model=self._model(Task.TOKEN_CLASSIFICATION))
        except FailedPreconditionError as error:
            show.line("answer", str(error))
        else:
            spans = (f"{HEADLINES[0][span.start : span.end]} ({span.label})" for span in answer[0].spans)
            show.line("answer", ", ".join(spans))
            show.line("model", str(answer.model))

    def embed(self) -> None:
        """EmbedText; a server without a model for it says so, and that is an answer."""
        show.section("EmbedText", "a text as a vector")
        show.line("question", HEADLINES[0])
        try:
            answer = self._client.embed(HEADLINES[0], model=self._model(Task.TEXT_EMBEDDING))
        except FailedPreconditionError as error:
            show.line("answer", str(error))
        else:
            values = answer[0].values
            show.line("answer", f"{len(values)} values: {', '.join(f'{value:.3f}' for value in values[:4])} ...")
            show.line("model", str(answer.model))

    def label(self, images: list[Path]) -> None:
        """ClassifyImage, with the demo's drawings in one call and each of the user's images in a call of its own."""
        show.section("ClassifyImage", "pictures drawn by demo/draw.py" + (", and yours" if images else ""))
        model = self._model(Task.IMAGE_CLASSIFICATION)
        pictures = draw_pictures()
        answer, seconds = _timed(lambda: self._client.label(list(pictures.values()), model=model, top_k=3))
        for name, result in zip(pictures, answer, strict=True):
            show.line("question", f"a drawing of: {name}")
            show.line("answer", show.labels(result.labels))
        show.footer(answer, seconds)
        for path in images:
            show.line("question", str(path))
            answer, seconds = _timed(partial(self._client.label, path, model=model, top_k=3))
            show.line("answer", f"{show.labels(answer[0].labels)} ({answer[0].width}x{answer[0].height} pixels)")
            show.footer(answer, seconds)

    def _model(self, task: Task) -> str:
        """Name of the model to ask; without one the server is asked all the same, and says what it has."""
        return self._models.get(task, "")


def _timed(call: Callable[[], ResultT]) -> tuple[ResultT, float]:
    """Makes a call; returns its result and the seconds it took."""
    begun_s = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begun_s
