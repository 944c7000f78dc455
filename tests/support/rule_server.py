# ruff: noqa: N802, ARG002 -- methods carry the names and arguments of the API
"""A real gRPC server in this process that answers the API by simple rules, and fails when it is told to."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from headway.v1 import (
    audio_classification_service_pb2,
    audio_classification_service_pb2_grpc,
    common_pb2,
    depth_estimation_service_pb2,
    depth_estimation_service_pb2_grpc,
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    image_classification_service_pb2,
    image_classification_service_pb2_grpc,
    mask_filling_service_pb2,
    mask_filling_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    object_detection_service_pb2,
    object_detection_service_pb2_grpc,
    question_answering_service_pb2,
    question_answering_service_pb2_grpc,
    ranking_service_pb2,
    ranking_service_pb2_grpc,
    semantic_segmentation_service_pb2,
    semantic_segmentation_service_pb2_grpc,
    text_classification_service_pb2,
    text_classification_service_pb2_grpc,
    text_to_text_service_pb2,
    text_to_text_service_pb2_grpc,
    translation_service_pb2,
    translation_service_pb2_grpc,
    video_classification_service_pb2,
    video_classification_service_pb2_grpc,
)

MODEL = common_pb2.ModelReference(name="rule", version="1", variant=common_pb2.VARIANT_FP32)
LEVELS = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABEAAAAACB2fwVAAAADUlEQVR4nGNgYPj/HwADAgH/5ncLrgAAAABJRU5ErkJggg=="
)
"""A PNG of two pixels of 16 bits: 0 and 65535."""
TIMINGS = common_pb2.Timings(
    total=duration_pb2.Duration(seconds=1, nanos=500_000_000), queue=duration_pb2.Duration(nanos=250_000_000)
)


@dataclass
class Fault:
    """A failure the server answers instead of a result."""

    code: grpc.StatusCode
    message: str = "told to fail"
    reason: str = ""
    violations: dict[str, str] = field(default_factory=dict)
    retry_delay_s: float | None = None

    def status(self) -> Any:
        details = []
        if self.reason:
            details.append(error_details_pb2.ErrorInfo(reason=self.reason, domain="headway", metadata={"limit": "8"}))
        if self.violations:
            bad = error_details_pb2.BadRequest()
            for name, description in self.violations.items():
                bad.field_violations.add(field=name, description=description)
            details.append(bad)
        if self.retry_delay_s is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_delay_s * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=code_pb2.Code.Value(self.code.name), message=self.message)
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return rpc_status.to_status(status)


class Rules:
    """What the server does; tests change it while it runs."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.times_s: list[float] = []
        self.faults: deque[Fault] = deque()
        self.fault_after_deltas: Fault | None = None
        self.delay_s = 0.0
        self.delta_delay_s = 0.0
        self.stall: tuple[float, float] | None = None  # from and until, on the clock of time.monotonic
        self.running = 0
        self.most_running = 0
        self.admitted = threading.Event()
        self.cancelled = threading.Event()
        self.serving = True
        self.omit_result = False

    async def admit(self, request: Any, context: Any) -> None:
        """Takes note of a call, and delays or fails it as told."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.admitted.set()
        self.times_s.append(time.monotonic())
        if self.faults:
            await context.abort_with_status(self.faults.popleft().status())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
            if self.stall is not None and self.stall[0] <= time.monotonic() < self.stall[1]:
                await asyncio.sleep(self.stall[1] - time.monotonic())
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1

    async def words(self, text: str, context: Any) -> AsyncIterator[str]:
        """Hands out a text word by word; the words joined are the text."""
        try:
            for index, word in enumerate(text.split(" ")):
                if index > 0 and self.fault_after_deltas is not None:
                    await context.abort_with_status(self.fault_after_deltas.status())
                if index > 0:
                    await asyncio.sleep(self.delta_delay_s)
                yield word if index == 0 else " " + word
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise


def continuations(prompt: str, request: Any, num_samples: int = 1) -> list[generation_service_pb2.GeneratedText]:
    words = len(prompt.split())
    with_tokens = request.HasField("log_probabilities")
    with_prompt = with_tokens and request.log_probabilities.include_prompt
    return [
        generation_service_pb2.GeneratedText(
            text=f"{prompt} and so on",
            finish_reason=common_pb2.FINISH_REASON_LENGTH,
            prompt_token_count=words,
            new_token_count=words + 3,
            seed=7,
            sample_index=sample,
            cached_prompt_token_count=1,
            tokens=[token(word, -0.5, request) for word in (" and", " so", " on")] if with_tokens else (),
            prompt_tokens=[token(prompt, None, request)] if with_prompt else (),
        )
        for sample in range(num_samples)
    ]


def token(text: str, log_probability: float | None, request: Any) -> generation_service_pb2.TokenLogProbability:
    return generation_service_pb2.TokenLogProbability(
        token_id=len(text),
        text=text,
        log_probability=log_probability,
        top_tokens=[
            generation_service_pb2.TokenCandidate(token_id=index, text=text, log_probability=-0.5 - index)
            for index in range(request.log_probabilities.top_token_count)
        ],
    )


def last_turn(conversation: Any) -> str:
    return str(conversation.messages[-1].content)


def translation(text: str, request: Any) -> translation_service_pb2.TranslatedText:
    count = request.parameters.hypothesis_count
    return translation_service_pb2.TranslatedText(
        text=text.upper(),
        log_probability=-1.5,
        finish_reason=common_pb2.FINISH_REASON_END_OF_SEQUENCE,
        source_token_count=len(text.split()),
        new_token_count=len(text.split()),
        score=-0.75,
        hypotheses=[hypothesis(text, rank) for rank in range(count)] if count > 1 else (),
        alignments=[alignment(text)] if request.include_alignment else (),
        seed=request.parameters.sampling.seed if request.parameters.HasField("sampling") else None,
        sentence_count=1,
    )


def rewritten(text: str, request: Any) -> text_to_text_service_pb2.RewrittenText:
    count = request.parameters.hypothesis_count
    return text_to_text_service_pb2.RewrittenText(
        text=text.upper(),
        log_probability=-1.5,
        finish_reason=common_pb2.FINISH_REASON_END_OF_SEQUENCE,
        source_token_count=len(text.split()),
        new_token_count=len(text.split()),
        score=-0.75,
        hypotheses=[
            text_to_text_service_pb2.RewriteHypothesis(text=text.upper() + "!" * rank, score=-0.75 - rank)
            for rank in range(count)
            if count > 1
        ],
    )


def hypothesis(text: str, rank: int) -> translation_service_pb2.TranslationHypothesis:
    return translation_service_pb2.TranslationHypothesis(
        text=text.upper() + "!" * rank,
        log_probability=-1.5 - rank,
        score=-0.75 - rank,
        finish_reason=common_pb2.FINISH_REASON_END_OF_SEQUENCE,
        new_token_count=len(text.split()),
    )


def alignment(text: str) -> translation_service_pb2.Alignment:
    """Says that each word became the one in its place; the last source token is the end of the sentence."""
    spans = [common_pb2.TextSpan(start=match.start(), end=match.end()) for match in re.finditer(r"\S+", text)]
    share = 0.5 / len(spans)
    rows = [[share + 0.5 * (place == at) for at in range(len(spans))] for place in range(len(spans))]
    return translation_service_pb2.Alignment(
        source_tokens=[*spans, common_pb2.TextSpan(start=len(text), end=len(text))],
        target_tokens=[
            translation_service_pb2.TokenAlignment(span=span, source_attention=[*row, 0.0])
            for span, row in zip(spans, rows, strict=True)
        ],
    )


def labels(top_k: int, *names: str) -> list[common_pb2.LabelScore]:
    scores = [common_pb2.LabelScore(label=name, probability=0.5**index) for index, name in enumerate(names, 1)]
    return scores[: top_k or None]


class Generation(generation_service_pb2_grpc.GenerationServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def GenerateText(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        prompts = [*request.prompts, *map(last_turn, request.conversations)]
        samples = request.sample_count if request.HasField("sample_count") else 1
        results = [text for prompt in prompts for text in continuations(prompt, request, samples)]
        return generation_service_pb2.GenerateTextResponse(results=results, model=MODEL, timings=TIMINGS)

    async def StreamGenerateText(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.rules.admit(request, context)
        prompt = last_turn(request.conversation) if request.HasField("conversation") else request.prompt
        (result,) = continuations(prompt, request)
        count = 0
        if prompt == "ponder":
            yield generation_service_pb2.StreamGenerateTextResponse(reasoning_delta="hm")
        async for word in self.rules.words(result.text, context):
            count += 1
            tokens = [token(word, -0.5, request)] if request.HasField("log_probabilities") else ()
            yield generation_service_pb2.StreamGenerateTextResponse(
                text_delta=word, new_token_count=count, tokens=tokens
            )
        if not self.rules.omit_result:
            yield generation_service_pb2.StreamGenerateTextResponse(
                new_token_count=count, result=result, model=MODEL, timings=TIMINGS
            )


class Translation(translation_service_pb2_grpc.TranslationServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def TranslateText(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        results = [translation(text, request) for text in request.texts]
        return translation_service_pb2.TranslateTextResponse(results=results, model=MODEL, timings=TIMINGS)

    async def StreamTranslateText(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.rules.admit(request, context)
        result = translation(request.text, request)
        count = 0
        async for word in self.rules.words(result.text, context):
            count += 1
            yield translation_service_pb2.StreamTranslateTextResponse(text_delta=word, new_token_count=count)
        yield translation_service_pb2.StreamTranslateTextResponse(
            new_token_count=count, result=result, model=MODEL, timings=TIMINGS
        )


class Rewriting(text_to_text_service_pb2_grpc.TextToTextServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def RewriteText(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        results = [rewritten(text, request) for text in request.texts]
        return text_to_text_service_pb2.RewriteTextResponse(results=results, model=MODEL, timings=TIMINGS)

    async def StreamRewriteText(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.rules.admit(request, context)
        result = rewritten(request.text, request)
        count = 0
        async for word in self.rules.words(result.text, context):
            count += 1
            yield text_to_text_service_pb2.StreamRewriteTextResponse(text_delta=word, new_token_count=count)
        yield text_to_text_service_pb2.StreamRewriteTextResponse(
            new_token_count=count, result=result, model=MODEL, timings=TIMINGS
        )


class Answer(text_classification_service_pb2_grpc.TextClassificationServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def ClassifyText(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        results = [
            text_classification_service_pb2.TextClassification(
                labels=labels(request.top_k, "World", "Sports", "Business"), token_count=len(text.split())
            )
            for text in request.texts
        ]
        return text_classification_service_pb2.ClassifyTextResponse(results=results, model=MODEL, timings=TIMINGS)

    async def ClassifyTokens(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        span = text_classification_service_pb2.LabeledSpan(
            label="noun", probability=0.5, span=common_pb2.TextSpan(end=4)
        )
        results = [
            text_classification_service_pb2.TokenClassification(spans=[span], token_count=2) for _ in request.texts
        ]
        word = text_classification_service_pb2.WordSpan(start=1, end=2)
        for page in request.pages:
            start = len(page.words[0]) + 1
            characters = common_pb2.TextSpan(start=start, end=start + len(page.words[1]))
            found = text_classification_service_pb2.LabeledSpan(
                label="sum", probability=0.5, span=characters, words=word
            )
            results.append(text_classification_service_pb2.TokenClassification(spans=[found], token_count=4))
        return text_classification_service_pb2.ClassifyTokensResponse(results=results, model=MODEL, timings=TIMINGS)


class Answering(question_answering_service_pb2_grpc.QuestionAnsweringServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def AnswerQuestion(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        answers = [
            question_answering_service_pb2.ExtractedAnswer(text=text[:4], span=common_pb2.TextSpan(end=4), score=0.5)
            for text in request.contexts
        ]
        results = [
            question_answering_service_pb2.QuestionAnswers(answers=[one], token_count=2, window_count=1)
            for one in answers
        ]
        return question_answering_service_pb2.AnswerQuestionResponse(results=results, model=MODEL, timings=TIMINGS)


class Filling(mask_filling_service_pb2_grpc.MaskFillingServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def FillMask(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        token = mask_filling_service_pb2.MaskToken(token=" sea", token_id=7, probability=0.5, filled_text="the sea")
        mask = mask_filling_service_pb2.FilledMask(span=common_pb2.TextSpan(start=4, end=10), tokens=[token])
        results = [mask_filling_service_pb2.FilledText(masks=[mask], token_count=2) for _ in request.texts]
        return mask_filling_service_pb2.FillMaskResponse(results=results, model=MODEL, timings=TIMINGS)


class Sounds(audio_classification_service_pb2_grpc.AudioClassificationServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def ClassifyAudio(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        label = common_pb2.LabelScore(label="bell", probability=0.75, selected=True)
        results = [
            audio_classification_service_pb2.AudioClassification(
                labels=[label], duration_seconds=len(audio), truncated=True
            )
            for audio in request.audios
        ]
        return audio_classification_service_pb2.ClassifyAudioResponse(results=results, model=MODEL, timings=TIMINGS)


class Videos(video_classification_service_pb2_grpc.VideoClassificationServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def ClassifyVideo(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        label = common_pb2.LabelScore(label="dancing", probability=0.75, selected=True)
        result = video_classification_service_pb2.VideoClassification(labels=[label], frame_indices=[0, 0, 1])
        return video_classification_service_pb2.ClassifyVideoResponse(results=[result], model=MODEL, timings=TIMINGS)


class Detection(object_detection_service_pb2_grpc.ObjectDetectionServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def DetectObjects(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        box = common_pb2.Box(left=1, top=2, right=3.5, bottom=4)
        found = object_detection_service_pb2.DetectedObject(label="dog", label_index=7, score=0.5, box=box)
        results = [
            object_detection_service_pb2.ObjectDetection(objects=[found], width=len(image), height=2)
            for image in (*request.images, *request.image_ids)
        ]
        return object_detection_service_pb2.DetectObjectsResponse(results=results, model=MODEL, timings=TIMINGS)


class Pixels(semantic_segmentation_service_pb2_grpc.SemanticSegmentationServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def ClassifyPixels(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        label = semantic_segmentation_service_pb2.PixelLabel(label="sky", label_index=2, share=1, score=0.5)
        results = [
            semantic_segmentation_service_pb2.PixelClassification(
                class_map=LEVELS, labels=[label], width=len(image), height=2
            )
            for image in (*request.images, *request.image_ids)
        ]
        return semantic_segmentation_service_pb2.ClassifyPixelsResponse(results=results, model=MODEL, timings=TIMINGS)


class Depth(depth_estimation_service_pb2_grpc.DepthEstimationServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def EstimateDepth(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        results = [
            depth_estimation_service_pb2.DepthMap(png=LEVELS, minimum=1, maximum=3, kind=1, width=len(image), height=2)
            for image in (*request.images, *request.image_ids)
        ]
        return depth_estimation_service_pb2.EstimateDepthResponse(results=results, model=MODEL, timings=TIMINGS)


class Embedding(embedding_service_pb2_grpc.EmbeddingServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def EmbedText(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        results = [
            embedding_service_pb2.TextEmbedding(values=[float(text) if text.isdigit() else 0.5, -0.5], token_count=2)
            for text in request.texts
        ]
        return embedding_service_pb2.EmbedTextResponse(results=results, model=MODEL, timings=TIMINGS)

    async def EmbedImage(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        results = [
            embedding_service_pb2.ImageEmbedding(values=[len(image), 0.25], width=len(image), height=1)
            for image in request.images
        ]
        return embedding_service_pb2.EmbedImageResponse(results=results, model=MODEL, timings=TIMINGS)


class Ranking(ranking_service_pb2_grpc.RankingServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def ScoreText(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        num_results = max(len(request.texts), len(request.text_pairs))
        results = [ranking_service_pb2.TextScore(score=0.5, token_count=2)] * num_results
        return ranking_service_pb2.ScoreTextResponse(results=results, model=MODEL, timings=TIMINGS)


class Images(image_classification_service_pb2_grpc.ImageClassificationServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def ClassifyImage(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        results = [
            image_classification_service_pb2.ImageClassification(
                labels=labels(request.top_k, "ship", "airplane"), width=len(image), height=1
            )
            for image in request.images
        ]
        return image_classification_service_pb2.ClassifyImageResponse(results=results, model=MODEL, timings=TIMINGS)


class Models(model_service_pb2_grpc.ModelServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.model = model_service_pb2.Model(
            name="rule",
            version="1",
            task="generation",
            description="Answers by rule.",
            variant=common_pb2.VARIANT_FP32,
            device="cpu",
            parameter_count=1_234_567,
            default_parameters=generation_service_pb2.GenerationParameters(
                sampling=common_pb2.SamplingParameters(temperature=0.5, min_p=0.0), repetition_penalty=1.25
            ),
            quality=[
                model_service_pb2.QualityFigure(
                    variant=common_pb2.VARIANT_FP32, metric="accuracy", value=90.5, example_count=10
                )
            ],
        )

    async def ListModels(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        rejected = [model_service_pb2.RejectedBundle(path="broken/1", reason="model.onnx: wrong SHA-256")]
        is_asked_for = request.task in ("", self.model.task) and request.capability in ("", *self.model.capabilities)
        models = [self.model] if is_asked_for else []
        return model_service_pb2.ListModelsResponse(models=models, rejected_bundles=rejected)

    async def GetModel(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        return model_service_pb2.GetModelResponse(model=self.model, manifest_json='{"schema_version": 1}')

    async def ListBundles(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        ready, incomplete = model_service_pb2.BUNDLE_STATE_READY, model_service_pb2.BUNDLE_STATE_INCOMPLETE
        return model_service_pb2.ListBundlesResponse(
            bundles=[
                model_service_pb2.BundleStatus(name="rule", version="1", state=ready),
                model_service_pb2.BundleStatus(name="rule", version="2", state=incomplete, reason="x is missing"),
            ],
            routes=[model_service_pb2.Route(model="rule", canary_version="2", canary_share=0.125)],
            aliases=[model_service_pb2.Alias(alias="old", model="rule", model_version="1")],
            store_problem="the store has not answered for 10 s",
        )

    async def LoadModel(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        return model_service_pb2.LoadModelResponse(model=self.model)

    async def UnloadModel(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        return model_service_pb2.UnloadModelResponse()

    async def ScanStore(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        return model_service_pb2.ScanStoreResponse(bundles=(await self.ListBundles(request, context)).bundles)

    async def SetRoute(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        routes = [model_service_pb2.Route()] if request.default_version else []
        for route in routes:
            route.MergeFromString(request.SerializeToString())  # it has the same fields
        return model_service_pb2.SetRouteResponse(not_kept_reason="routes.json cannot be written", routes=routes)

    async def SetAlias(self, request: Any, context: Any) -> Any:
        await self.rules.admit(request, context)
        aliases = [model_service_pb2.Alias()] if request.model else []
        for alias in aliases:
            alias.MergeFromString(request.SerializeToString())  # it has the same fields
        return model_service_pb2.SetAliasResponse(aliases=aliases)


class Health(health_pb2_grpc.HealthServicer):
    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    async def Check(self, request: Any, context: Any) -> Any:
        statuses = health_pb2.HealthCheckResponse
        return statuses(status=statuses.SERVING if self.rules.serving else statuses.NOT_SERVING)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        told = None
        while True:
            if told is not self.rules.serving:
                told = self.rules.serving
                yield await self.Check(request, context)
            await asyncio.sleep(0.01)


class RuleServer:
    """The server, on an event loop and a thread of its own; it can be stopped and started again on its port."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.rules = Rules()
        self._credentials = credentials
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rule-server", daemon=True)
        self._thread.start()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._submit(self._start()).result(10)

    def stop(self) -> None:
        self._submit(self._stop()).result(10)

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _submit(self, coroutine: Any) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _start(self) -> None:
        server = grpc.aio.server()
        rules = self.rules
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(Generation(rules), server)
        translation_service_pb2_grpc.add_TranslationServiceServicer_to_server(Translation(rules), server)
        text_to_text_service_pb2_grpc.add_TextToTextServiceServicer_to_server(Rewriting(rules), server)
        text_classification_service_pb2_grpc.add_TextClassificationServiceServicer_to_server(Answer(rules), server)
        image_classification_service_pb2_grpc.add_ImageClassificationServiceServicer_to_server(Images(rules), server)
        question_answering_service_pb2_grpc.add_QuestionAnsweringServiceServicer_to_server(Answering(rules), server)
        mask_filling_service_pb2_grpc.add_MaskFillingServiceServicer_to_server(Filling(rules), server)
        audio_classification_service_pb2_grpc.add_AudioClassificationServiceServicer_to_server(Sounds(rules), server)
        video_classification_service_pb2_grpc.add_VideoClassificationServiceServicer_to_server(Videos(rules), server)
        object_detection_service_pb2_grpc.add_ObjectDetectionServiceServicer_to_server(Detection(rules), server)
        semantic_segmentation_service_pb2_grpc.add_SemanticSegmentationServiceServicer_to_server(Pixels(rules), server)
        depth_estimation_service_pb2_grpc.add_DepthEstimationServiceServicer_to_server(Depth(rules), server)
        embedding_service_pb2_grpc.add_EmbeddingServiceServicer_to_server(Embedding(rules), server)
        ranking_service_pb2_grpc.add_RankingServiceServicer_to_server(Ranking(rules), server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(Models(rules), server)
        health_pb2_grpc.add_HealthServicer_to_server(Health(rules), server)
        address = f"127.0.0.1:{self.port}"
        if self._credentials is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, self._credentials)
        await server.start()
        self._server = server

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
