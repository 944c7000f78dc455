"""Calls every RPC of the API and prints its answer."""

from __future__ import annotations

import io
import time
import wave
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TypeVar

import typer
from draw import draw_pictures, draw_scene
from PIL import Image, ImageOps

from headway_client import (
    Answer,
    Client,
    FailedPreconditionError,
    HeadwayError,
    LabelScore,
    SegmentPrompt,
    TextDelta,
)
from headway_client.options import SamplingOptions

ResultT = TypeVar("ResultT")

PROMPTS = (
    "DUKE:\nThe night is come, and",
    "FIRST SOLDIER:\nWho goes there?\n\nSECOND SOLDIER:\n",
)
STREAMED_PROMPT = "LADY ANNE:\nMy lord, what news"
CAPTIONS = (
    "A man is riding a bicycle.",
    "Two dogs are running through the snow.",
    "A young girl in a red dress is playing on the beach.",
    "Several people are standing in front of a building.",
    "A woman is reading a book on a bench in the park.",
)
STREAMED_CAPTION = "A boy in a blue shirt jumps into the water."
HEADLINES = (
    "Prime minister and rebel leaders agree to talks after a week of fighting at the border",
    "Late goal sends the home team to the cup final after extra time",
    "Shares of the airline fall as oil prices rise and the company cuts its profit forecast",
    "Researchers release free software that finds security holes in web browsers",
)
SAID = "three seven one"
NAMES = ("a ship", "a car", "a dog", "a person", "a tree", "a house")

_MAX_NEW_TOKENS = 100
_SAMPLING: SamplingOptions = {"temperature": 0.7, "top_p": 0.95, "seed": 7}
_INDENT = " " * 12


class Calls:
    """Calls a server's models: the first of each task, and for translation the one from English to German."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._models: dict[str, str] = {}
        self._pictures = draw_pictures()
        self._image, self._image_id, self._segment = b"", "", b""
        self._drawable = ""
        self._spoken = b""

    def call_every_rpc(self, images: list[Path]) -> list[str]:
        """Calls every RPC and prints a section for each; returns the names of those that failed."""
        calls: Mapping[str, Callable[[], None]] = {
            "ListModels": self.list_models,
            "GetModel": self.get_model,
            "GenerateText": self.generate_text,
            "StreamGenerateText": self.stream_generate_text,
            "TranslateText": self.translate_text,
            "StreamTranslateText": self.stream_translate_text,
            "ClassifyText": self.classify_text,
            "ClassifyTokens": self.classify_tokens,
            "EmbedText": self.embed_text,
            "InspectText": self.inspect_text,
            "ScoreText": self.score_text,
            "ClassifyImage": partial(self.classify_image, images),
            "DetectObjects": self.detect_objects,
            "EmbedImage": self.embed_image,
            "SynthesizeSpeech": self.synthesize_speech,
            "TranscribeSpeech": self.transcribe_speech,
            "GenerateImage": self.generate_image,
            "PrepareImage": partial(self.prepare_image, images),
            "SegmentImage": self.segment_image,
            "ClassifyImage with candidate labels": self.name_segment,
            "CaptionImage": self.caption_image,
        }
        failed = []
        for rpc, call in calls.items():
            try:
                call()
            except (HeadwayError, OSError) as error:
                _line("failed", str(error))
                failed.append(rpc)
        return failed

    def list_models(self) -> None:
        """ListModels. The later calls use these models."""
        _section("ListModels", "the loaded models")
        listing = self._client.list_models()
        for model in listing:
            if model.task == "image_generation" and model.task not in self._models:
                self._drawable = model.labels[-1] if model.labels else "a red fox"
            self._models.setdefault(model.task, model.name)
            _line("model", f"{model.name} {model.version}, {model.task.replace('_', ' ')}")
            _line("", f"{model.parameter_count:,} parameters, {model.variant} on {model.device}")
            for figure in model.quality:
                if figure.variant == model.variant:
                    data = f"{figure.example_count:,} examples of {figure.dataset}"
                    _line("", f"{figure.metric.replace('_', ' ')} {figure.value:.4g} on {data}")
        for bundle in listing.rejected_bundles:
            _line("rejected", f"{bundle.path}: {bundle.reason}")

    def get_model(self) -> None:
        """GetModel."""
        _section("GetModel", "one of them, with its manifest")
        for name in list(self._models.values())[:1]:
            _line("question", name)
            details = self._client.get_model(name)
            _line("answer", f"{details.model.description}")
            _line("", f"architecture {details.model.architecture}, licence {details.model.license}")
            _line("", f"manifest of {len(details.manifest_json):,} characters")

    def generate_text(self) -> None:
        """GenerateText."""
        _section("GenerateText", "two prompts, continued in one call")
        answer, seconds = _timed(
            lambda: self._client.generate_text(
                PROMPTS,
                model=self._model("generation"),
                truncate=True,
                max_new_tokens=_MAX_NEW_TOKENS,
                **_SAMPLING,
            )
        )
        for prompt, result in zip(PROMPTS, answer, strict=True):
            _line("question", prompt)
            _line("answer", result.text)
        _footer(answer, seconds, sum(result.new_token_count for result in answer))

    def stream_generate_text(self) -> None:
        """StreamGenerateText."""
        _section("StreamGenerateText", "a text while it is generated")
        _line("question", STREAMED_PROMPT)
        start_s = time.perf_counter()
        with self._client.stream_generate_text(
            STREAMED_PROMPT,
            model=self._model("generation"),
            truncate=True,
            max_new_tokens=_MAX_NEW_TOKENS,
            **_SAMPLING,
        ) as stream:
            _print_deltas(stream)
        _footer(stream.answer, time.perf_counter() - start_s, stream.answer[0].new_token_count)

    def translate_text(self) -> None:
        """TranslateText."""
        _section("TranslateText", "five English captions in German, in one call")
        answer, seconds = _timed(
            lambda: self._client.translate_text(CAPTIONS, source_language="en", target_language="de")
        )
        for caption, result in zip(CAPTIONS, answer, strict=True):
            _line("question", caption)
            _line("answer", result.text)
        _footer(answer, seconds, sum(result.new_token_count for result in answer))

    def stream_translate_text(self) -> None:
        """StreamTranslateText."""
        _section("StreamTranslateText", "a translation while it is generated")
        _line("question", STREAMED_CAPTION)
        start_s = time.perf_counter()
        with self._client.stream_translate_text(STREAMED_CAPTION, source_language="en", target_language="de") as stream:
            _print_deltas(stream)
        _footer(stream.answer, time.perf_counter() - start_s, stream.answer[0].new_token_count)

    def classify_text(self) -> None:
        """ClassifyText."""
        _section("ClassifyText", "headlines and their topics")
        answer, seconds = _timed(
            lambda: self._client.classify_text(HEADLINES, model=self._model("text_classification"))
        )
        for headline, result in zip(HEADLINES, answer, strict=True):
            _line("question", headline)
            _line("answer", _labels(result.labels))
        _footer(answer, seconds)

    def classify_tokens(self) -> None:
        """ClassifyTokens. A server without such a model says so, which counts as an answer."""
        _section("ClassifyTokens", "labelled spans of a text, such as names")
        _line("question", HEADLINES[0])
        try:
            answer = self._client.classify_tokens(HEADLINES[0], model=self._model("token_classification"))
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        spans = (f"{found.span.of(HEADLINES[0])} ({found.label})" for found in answer[0].spans)
        _line("answer", ", ".join(spans))
        _line("model", str(answer.model))

    def embed_text(self) -> None:
        """EmbedText. A server without such a model says so, which counts as an answer."""
        _section("EmbedText", "the embedding of a text")
        _line("question", HEADLINES[0])
        try:
            answer = self._client.embed_text(HEADLINES[0], model=self._model("text_embedding"))
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        values = answer[0].values
        _line("answer", f"{len(values)} values: {', '.join(f'{value:.3f}' for value in values[:4])} ...")
        _line("model", str(answer.model))

    def inspect_text(self) -> None:
        """InspectText. A model without an attention graph says so, which counts as an answer."""
        _section("InspectText", "attention of a text's tokens, through all layers")
        _line("question", HEADLINES[1])
        try:
            answer = self._client.inspect_text(
                HEADLINES[1], model=self._model("text_classification"), summary="rollout"
            )
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        inspection = answer[0]
        weights, width = inspection.attention.maps[0].weights, len(inspection.tokens)
        shares = [sum(weights[column::width]) / width for column in range(width)]  # means over all tokens that attend
        most = sorted(range(width), key=shares.__getitem__, reverse=True)[:5]
        _line("answer", ", ".join(f"{inspection.tokens[token].text.strip()} {shares[token]:.1%}" for token in most))
        _line("model", str(answer.model))

    def score_text(self) -> None:
        """ScoreText. A server without such a model says so, which counts as an answer."""
        _section("ScoreText", "scores of pairs of texts, such as a query and its documents")
        _line("question", HEADLINES[0])
        try:
            answer = self._client.score_text(HEADLINES[0], text_pairs=HEADLINES)
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        _line("answer", ", ".join(f"{result.score:.3f}" for result in answer))
        _line("model", str(answer.model))

    def classify_image(self, images: list[Path]) -> None:
        """ClassifyImage, with the demo's drawings in one call and each of the user's images in a separate call."""
        _section("ClassifyImage", "pictures drawn by demo/draw.py" + (", and yours" if images else ""))
        model = self._model("image_classification")
        pictures = list(self._pictures.values())
        answer, seconds = _timed(lambda: self._client.classify_image(pictures, model=model, top_k=3))
        for name, result in zip(self._pictures, answer, strict=True):
            _line("question", f"a drawing of: {name}")
            _line("answer", _labels(result.labels))
        _footer(answer, seconds)
        for path in images:
            _line("question", str(path))
            answer, seconds = _timed(partial(self._client.classify_image, path, model=model, top_k=3))
            _line("answer", f"{_labels(answer[0].labels)} ({answer[0].width}x{answer[0].height} pixels)")
            _footer(answer, seconds)

    def embed_image(self) -> None:
        """EmbedImage. A server without such a model says so, which counts as an answer."""
        _section("EmbedImage", "embeddings of the drawings, and their similarity")
        first, *others = self._pictures
        _line("question", f"a drawing of: {first}")
        try:
            pictures = list(self._pictures.values())
            answer = self._client.embed_image(pictures, model=self._model("image_embedding"))
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        vector, *vectors = (result.values for result in answer)
        cosines = [sum(a * b for a, b in zip(vector, other, strict=True)) for other in vectors]
        alike = ", ".join(f"{name} {cosine:.2f}" for name, cosine in zip(others, cosines, strict=True))
        _line("answer", f"{len(vector)} values; cosine with {alike}")
        _line("model", str(answer.model))

    def synthesize_speech(self) -> None:
        """SynthesizeSpeech: the next call transcribes the audio."""
        _section("SynthesizeSpeech", "a spoken text")
        try:
            answer, seconds = _timed(
                lambda: self._client.synthesize_speech([SAID], seed=1, model=self._model("speech_synthesis"))
            )
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        spoken = answer[0]
        self._spoken = spoken.audio
        _line("question", SAID)
        _line(
            "answer",
            f"{spoken.duration_seconds:.1f} s of {spoken.sampling_rate} Hz, {len(spoken.audio):,} bytes of WAV",
        )
        _footer(answer, seconds)

    def transcribe_speech(self) -> None:
        """TranscribeSpeech, of the audio from before."""
        _section("TranscribeSpeech", "the transcript of that speech")
        try:
            answer, seconds = _timed(
                lambda: self._client.transcribe_speech([self._spoken or _silence()], model=self._model("transcription"))
            )
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        _line("question", "the speech from above" if self._spoken else "silence, because no loaded model speaks")
        _line("answer", answer[0].text or "no speech")
        _footer(answer, seconds)

    def generate_image(self) -> None:
        """GenerateImage."""
        _section("GenerateImage", "an image from noise, in 20 steps")
        try:
            answer, seconds = _timed(
                lambda: self._client.generate_image(
                    self._drawable, step_count=20, seed=7, model=self._model("image_generation")
                )
            )
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        _line("question", self._drawable)
        drawn = answer[0]
        _line("answer", f"{drawn.width} x {drawn.height} pixels, {len(drawn.png):,} bytes of PNG, seed {drawn.seed}")
        _footer(answer, seconds)

    def prepare_image(self, images: list[Path]) -> None:
        """PrepareImage: the later calls use the image's id."""
        _section("PrepareImage", "an image is sent once and used by the later calls")
        name, image = ("a drawing of: ship", self._pictures["ship"]) if not images else (str(images[0]), images[0])
        self._image = image if isinstance(image, bytes) else image.read_bytes()
        (prepared,), seconds = _timed(lambda: self._client.prepare_image(self._image))
        self._image_id = prepared.image_id
        _line("question", name)
        _line("answer", f"id {prepared.image_id[:16]}...")
        _line("timing", f"{seconds * 1e3:.1f} ms")

    def detect_objects(self) -> None:
        """DetectObjects on a drawn scene."""
        _section("DetectObjects", "objects in a drawn picture, with their boxes")
        _line("question", "a star and a balloon")
        try:
            answer, seconds = _timed(
                lambda: self._client.detect_objects(draw_scene(), model=self._model("object_detection"))
            )
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        for found in answer[0].objects:
            left, top, right, bottom = (int(side) for side in astuple(found.box))
            _line("answer", f"{found.label} {found.score:.2f}, box {left},{top} to {right},{bottom}")
        _footer(answer, seconds)

    def segment_image(self) -> None:
        """SegmentImage: a click in the middle, its mask, and the part in the mask's box for the next call."""
        _section("SegmentImage", "the segment at a click in the middle")
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(self._image))).convert("RGB")  # upright, as masks are
        click = (picture.width / 2, picture.height / 2)
        _line("question", f"the segment at {click[0]:.0f},{click[1]:.0f}")
        try:
            answer, seconds = _timed(
                lambda: self._client.segment_image(
                    image_id=self._image_id,
                    prompts=SegmentPrompt(points=[click]),
                    model=self._model("segmentation"),
                )
            )
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        mask = answer[0].masks[0]
        left, top, right, bottom = (int(side) for side in astuple(mask.box))
        share = mask.area / (picture.width * picture.height)
        _line("answer", f"{mask.area:,} pixels, {share:.0%} of the image, box {left},{top} to {right},{bottom}")
        _line("", f"predicted IoU {mask.predicted_iou:.2f}; {len(answer[0].masks)} masks in all")
        _footer(answer, seconds)
        if mask.area:
            cut_out = io.BytesIO()
            picture.crop((left, top, right, bottom)).save(cut_out, "PNG")
            self._segment = cut_out.getvalue()

    def name_segment(self) -> None:
        """ClassifyImage with candidate labels, by a model of images and texts in one space."""
        _section("ClassifyImage", "a name for the segment, from a caller's list")
        _line("question", ", ".join(NAMES))
        try:
            answer, seconds = _timed(
                lambda: self._client.classify_image(
                    self._segment or self._image, candidate_labels=NAMES, templates=["a photo of {}"], top_k=3
                )
            )
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        _line("answer", _labels(answer[0].labels))
        _footer(answer, seconds)

    def caption_image(self) -> None:
        """CaptionImage, in German."""
        _section("CaptionImage", "a German caption of the whole image")
        try:
            answer, seconds = _timed(
                lambda: self._client.caption_image(
                    image_ids=[self._image_id], language="de", model=self._model("captioning")
                )
            )
        except FailedPreconditionError as error:
            _line("answer", str(error))
            return
        _line("answer", answer[0].text)
        _footer(answer, seconds)

    def _model(self, task: str) -> str | None:
        """Returns the model to call; without one the server's error lists its models."""
        return self._models.get(task)


def _timed(call: Callable[[], ResultT]) -> tuple[ResultT, float]:
    """Makes a call; returns its result and the seconds it took."""
    start_s = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start_s


def _silence() -> bytes:
    """One second of silence as a WAV file, for a server without speech synthesis."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(8000)
        audio.writeframes(bytes(16_000))
    return file.getvalue()


def _section(rpc: str, about: str) -> None:
    """Prints the heading of an RPC."""
    typer.echo()
    typer.secho(rpc, bold=True, nl=False)
    typer.echo(f"  {about}")


def _line(name: str, text: str) -> None:
    """Prints a named text, with aligned lines."""
    indented = text.strip("\n").replace("\n", f"\n{_INDENT}")
    typer.echo(f"  {name:<9} {indented}".rstrip())


def _print_deltas(deltas: Iterable[TextDelta]) -> None:
    """Prints a text while it arrives."""
    typer.echo(f"  {'answer':<9} ", nl=False)
    begun = False
    try:
        for delta in deltas:
            text = delta.text if begun else delta.text.lstrip("\n")
            begun = begun or bool(text)
            typer.echo(text.replace("\n", f"\n{_INDENT}"), nl=False)
    finally:
        typer.echo()


def _labels(scores: Iterable[LabelScore]) -> str:
    """Returns labels with their probabilities in percent."""
    return ", ".join(f"{score.label} {score.probability:.1%}" for score in scores)


def _footer(answer: Answer[object], round_trip_s: float, token_count: int = 0) -> None:
    """Prints the answering model and the timings."""
    timings = answer.timings
    parts = (
        f"{round_trip_s * 1e3:.1f} ms: waiting {timings.queue_s * 1e3:.1f}, "
        f"preprocessing {timings.preprocessing_s * 1e3:.1f}, inference {timings.inference_s * 1e3:.1f}"
    )
    rate = f"; {token_count} tokens, {token_count / round_trip_s:.0f} per second" if token_count else ""
    _line("model", str(answer.model))
    _line("timing", parts + rate)
