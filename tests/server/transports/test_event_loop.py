"""No call keeps the event loop from others: the largest requests of every method, on the models of this repository."""

import asyncio
import base64
import http.client
import io
import json
import math
import re
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import grpc
import numpy as np
import pytest
from edge import make_application
from google.protobuf.message_factory import GetMessageClass
from loop_turns import LongestTurn, longest_turn
from PIL import Image
from tiny_answers import write_answer_bundle, write_mask_bundle
from tiny_bundles import (
    write_box_bundle,
    write_letter_bundle,
    write_loudness_bundle,
    write_map_bundle,
    write_motion_bundle,
)
from tiny_engine import byte_tokenizer, make_chat_template, make_decoder, make_generation_model
from tiny_hearing import make_speech_model
from tiny_tagger import BOXES, write_tagger_bundle

from headway_server.bundles import Task
from headway_server.errors import InvalidInputError
from headway_server.observers import NO_OBSERVER
from headway_server.runtime import Runtime
from headway_server.services import service_descriptors
from headway_server.serving.finding import path_of
from headway_server.serving.host import ModelHost
from headway_server.settings import ServerSettings
from headway_server.tasks.detection.model import ObjectDetector
from headway_server.tasks.generation.model import GenerationModel
from headway_server.tasks.mask_filling.model import MaskFiller
from headway_server.tasks.pixels.model import DepthEstimator, PixelClassifier
from headway_server.tasks.question_answering.model import QuestionAnswerer
from headway_server.tasks.sounds.classifier import AudioClassifier
from headway_server.tasks.speech.ctc import CtcModel
from headway_server.tasks.speech.transcripts import SpeechRequest
from headway_server.tasks.tokens.classifier import TokenClassifier
from headway_server.tasks.video.classifier import VideoClassifier
from headway_server.transports.http import HttpServer

MODELS = Path(__file__).parents[3] / "models"
METHODS = {
    f"{service.full_name.rpartition('.')[2]}/{method.name}": method
    for service in service_descriptors()
    for method in service.methods
}
MOST_S = 0.05
ENDS = ("OK", "200")
READ_AND_REFUSED = re.compile(
    r"has \d+ tokens|no loaded model can|shows no tools|has no tensors in this|only writes what is said|"
    r"valid integer|has 8000"
)
"""What a text of the most bytes is too long for, and what no model here does."""
TRIES = 3
"""A machine that does much besides may make a turn seem long once, hardly thrice."""

TEMPLATE = "{% for message in messages %}<bos>{{ message.role }}: {{ message.content }}\n{% endfor %}<bos>assistant:"
KIB = 2**10
LONG = ("the oil prices of the year rose and fell again " * 6000)[: 256 * KIB]
"""Of the most bytes that a text may have."""
TEXTS = [LONG, *["prices rose again"] * 255]
SENTENCES = "The sun is up. " * 3


def picture(side: int = 1000) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(side).integers(0, 255, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()


def sound(seconds: float) -> bytes:
    samples = np.random.default_rng(1).normal(0, 2000, round(seconds * 8000)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(8000)
        opened.writeframes(samples.tobytes())
    return file.getvalue()


def white(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side), 255).save(file, "PNG")
    return file.getvalue()


SMALL, LARGE = picture(64), picture(2300)
GRID = [{"points": [{"x": 5 + 0.1 * i, "y": 9}] * 5} for i in range(256)]
ALL_TOKENS = {"top_token_count": 20, "include_prompt": True}

REQUESTS: dict[str, list[dict[str, Any]]] = {
    "CaptionService/CaptionImage": [
        {"language": "en", "images": [LARGE], "prefixes": [LONG]},
        {
            "language": "en",
            "images": [SMALL] * 16,
            "parameters": {"beam_size": 16, "hypothesis_count": 16, "max_new_tokens": 8},
            "include_attention": True,
        },
    ],
    "CaptionService/StreamCaptionImage": [
        {"language": "en", "image": LARGE, "prefix": LONG},
        {"language": "en", "image": SMALL, "include_attention": True},
    ],
    "GenerationService/GenerateText": [
        {"model": "shakespeare", "prompts": TEXTS, "truncate": True, "parameters": {"max_new_tokens": 1}},
        {
            "model": "shakespeare",
            "prompts": ["the king " * 20] * 34,
            "sample_count": 16,
            "parameters": {"max_new_tokens": 1, "constraint": {"regex": "[a-z ]{1,1000}"}},
        },
        {
            "model": "shakespeare",
            "prompts": ["the king " * 20] * 64,
            "echo": True,
            "parameters": {"max_new_tokens": 1},
            "log_probabilities": ALL_TOKENS,
        },
    ],
    "GenerationService/StreamGenerateText": [
        {"model": "shakespeare", "prompt": LONG, "truncate": True, "echo": True},
        {
            "model": "tiny-generation",
            "prompt": "the dog " * 900,
            "parameters": {"max_new_tokens": 1},
            "log_probabilities": ALL_TOKENS,
        },
        {"model": "tiny-generation", "conversation": {"messages": [{"role": "ROLE_USER", "content": "the dog"}] * 256}},
        {
            "model": "tiny-generation",
            "conversation": {"messages": [{"role": "ROLE_USER", "content": "the dog"}]},
            "tools": [{"name": "a", "parameters_json_schema": '{"a": [' + ",".join(["1.5"] * 900_000) + "]}"}],
        },
    ],
    "ImageClassificationService/ClassifyImage": [
        {"model": "cifar10", "images": [LARGE]},
        {"model": "cifar10", "images": [SMALL] * 64},
        {
            "model": "clip-image",
            "images": [SMALL],
            "candidate_labels": [f"label {i}" for i in range(4096)],
        },
    ],
    "EmbeddingService/EmbedImage": [{"model": "clip-image", "images": [SMALL] * 64}],
    "AudioClassificationService/ClassifyAudio": [{"audios": [sound(60)] * 4, "truncate": True}],
    "SemanticSegmentationService/ClassifyPixels": [{"images": [LARGE]}, {"images": [SMALL] * 64}],
    "DepthEstimationService/EstimateDepth": [{"images": [LARGE]}, {"images": [SMALL] * 64}],
    "VideoClassificationService/ClassifyVideo": [{"frames": [LARGE]}, {"frames": [SMALL] * 256}],
    "ObjectDetectionService/DetectObjects": [
        {"model": "boxes", "images": [LARGE]},
        {"model": "boxes", "images": [SMALL] * 64, "threshold": 0, "labels": ["red"] * 256},
    ],
    "ImageGenerationService/GenerateImage": [
        {"image_count": 16, "parameters": {"step_count": 2}},
        {"image": picture(), "mask": white(1000), "parameters": {"step_count": 1}},
    ],
    "ImageGenerationService/StreamGenerateImage": [
        {"image": LARGE, "parameters": {"step_count": 3}, "preview_step_count": 1},
    ],
    "ImageService/PrepareImage": [{"images": [LARGE]}, {"images": [SMALL] * 64, "model": "cifar10"}],
    "InspectionService/InspectText": [{"model": "ag-news", "text": LONG, "truncate": True}],
    "InspectionService/InspectImage": [{"model": "cifar10", "image": SMALL}],
    "InspectionService/InspectGeneration": [{"model": "shakespeare", "text": LONG, "truncate": True}],
    "InspectionService/InspectTranslation": [
        {"model": "multi30k-en-de", "text": "a man " * 50, "translation": "ein mann " * 40},
        {"model": "multi30k-en-de", "text": "a man", "translation": LONG},
    ],
    "RankingService/RankImages": [{"query_text": "a cat", "images": [SMALL] * 64, "model": "clip-image"}],
    "RankingService/RankTexts": [
        {"query_text": "a cat", "texts": [f"text {i}" for i in range(4096)], "model": "clip-text"},
        {"query_text": "a cat", "texts": TEXTS, "model": "clip-text", "truncate": True},
    ],
    "SegmentationService/SegmentImage": [{"image": SMALL, "prompts": GRID}, {"image": LARGE, "prompts": GRID[:20]}],
    "SegmentationService/SegmentEverything": [
        {
            "image": SMALL,
            "points_per_side": 16,
            "min_predicted_iou": 0.0,
            "min_stability": 0.0,
            "max_overlap": 1.0,
        },
    ],
    "SegmentationService/SegmentInteractively": [
        {"image": SMALL, "points": [{"x": 9, "y": 9}] * 64},
        {"points": [{"x": 9, "y": 9}] * 64, "restart": True},
    ],
    "SpeechService/TranscribeSpeech": [
        {"model": "telephone-transcriber", "audios": [sound(60)]},
        {
            "model": "telephone-transcriber",
            "audios": [sound(1)] * 16,
            "parameters": {"beam_size": 8, "hypothesis_count": 8},
        },
        {"model": "letters", "audios": [sound(60)] * 4, "include_timestamps": True},
    ],
    "SpeechService/StreamTranscribeSpeech": [
        {"model": "telephone-transcriber", "audio": sound(60)},
        {"model": "letters", "audio": sound(60)},
    ],
    "SpeechService/SynthesizeSpeech": [
        {"texts": ["four two"] * 16, "parameters": {"max_duration_seconds": 0.5}},
        {"texts": [LONG]},
    ],
    "SpeechService/StreamSynthesizeSpeech": [{"text": "four two one", "parameters": {"max_duration_seconds": 1.0}}],
    "TextClassificationService/ClassifyText": [{"model": "ag-news", "texts": TEXTS, "truncate": True}],
    "TextClassificationService/ClassifyTokens": [
        {"model": "ud-ewt-pos", "texts": TEXTS, "truncate": True},
        {"model": "ud-ewt-pos", "texts": ["the oil price rose " * 40] * 64},
        {"model": "tagger", "pages": [{"words": ["Ada"] * 7_000, "boxes": [1, 2, 3, 4] * 7_000}], "truncate": True},
        {"model": "tagger", "pages": [{"words": ["Ada-" * 40] * 27, "boxes": [9] * 108}] * 256, "truncate": True},
    ],
    "QuestionAnsweringService/AnswerQuestion": [
        {"questions": ["who"], "contexts": ["the oil price rose. " * 3_000], "top_k": 100, "window_token_count": 256},
        {"questions": ["who"] * 256, "contexts": ["Ada Lovelace saw Oslo"], "top_k": 100},
        {"questions": ["who"], "contexts": ["a." * 1_000] * 32},
    ],
    "MaskFillingService/FillMask": [
        {"texts": ["[MASK]" * 64] * 16, "top_k": 10},
        {"texts": ["[MASK] " + LONG[:-8], "the [MASK]"]},
        {"texts": ["[MASK]"] * 256, "top_k": 100, "targets": ["star"] * 256},
        {"texts": ["[MASK] " + "<[" * 120_000] * 16, "truncate": True, "top_k": 1},
    ],
    "EmbeddingService/EmbedText": [{"model": "clip-text", "texts": TEXTS, "truncate": True}],
    "RankingService/ScoreText": [{"texts": TEXTS, "text_pairs": TEXTS, "truncate": True}],
    "TextToTextService/RewriteText": [{"texts": TEXTS, "truncate": True}],
    "TextToTextService/StreamRewriteText": [{"text": LONG, "truncate": True}],
    "TranslationService/TranslateText": [
        {"model": "multi30k-en-de", "texts": TEXTS, "truncate": True, "parameters": {"max_new_tokens": 1}},
        {"model": "multi30k-en-de", "texts": [LONG], "split_sentences": True},
        {"model": "multi30k-en-de", "texts": ["a man"] * 2, "target_prefixes": [LONG] * 2},
        {
            "model": "multi30k-en-de",
            "texts": ["a man"] * 256,
            "phrase_constraints": [{"forbidden": [f"word {i}" for i in range(16)]}] * 256,
            "parameters": {"max_new_tokens": 1},
        },
        {
            "model": "multi30k-en-de",
            "texts": ["a man sits on a bench and reads " * 6] * 8,
            "include_alignment": True,
            "parameters": {"beam_size": 16, "hypothesis_count": 16, "max_new_tokens": 24},
        },
    ],
    "TranslationService/StreamTranslateText": [
        {"model": "multi30k-en-de", "text": LONG, "truncate": True, "include_alignment": True},
        {"model": "multi30k-en-de", "text": "a man", "target_prefix": LONG},
    ],
    "ModelService/ListModels": [{}],
    "ModelService/GetModel": [{"model": "segment"}],
    "ModelService/ListBundles": [{}],
    "ModelService/UnloadModel": [{"model": "multi30k-de-en"}],
    "ModelService/LoadModel": [{"model": "multi30k-de-en"}],
    "ModelService/ScanStore": [{}],
    "ModelService/SetRoute": [{"model": "ag-news"}],
    "ModelService/SetAlias": [{"alias": "news", "model": "ag-news"}],
    "GRPCInferenceService/ServerLive": [{}],
    "GRPCInferenceService/ServerReady": [{}],
    "GRPCInferenceService/ModelReady": [{"name": "ag-news"}],
    "GRPCInferenceService/ServerMetadata": [{}],
    "GRPCInferenceService/ModelMetadata": [{"name": "segment"}],
    "GRPCInferenceService/ModelConfig": [{"name": "segment"}],
    "GRPCInferenceService/ModelStatistics": [{}],
    "GRPCInferenceService/RepositoryIndex": [{}],
    "GRPCInferenceService/RepositoryModelUnload": [{"model_name": "multi30k-de-en"}],
    "GRPCInferenceService/RepositoryModelLoad": [{"model_name": "multi30k-de-en"}],
}
"""Of each method, by what it would take on the event loop: many, long, and what answers are made of."""


def tensor(name: str, texts: list[bytes]) -> dict[str, Any]:
    tensor = {"name": name, "datatype": "BYTES", "shape": [len(texts)]}
    raw = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return {"inputs": [tensor], "raw_input_contents": [raw]}


for _method in ("ModelInfer", "ModelStreamInfer"):
    REQUESTS[f"GRPCInferenceService/{_method}"] = [
        {"model_name": "ag-news"} | tensor("text", [LONG.encode()] + [b"prices"] * 255),
        {"model_name": "cifar10"} | tensor("image", [LARGE]),
    ]

CALL = {"model": "shakespeare", "max_tokens": 1}
CHAT = {"model": "tiny-generation", "max_tokens": 8, "logprobs": True, "top_logprobs": 20, "n": 16}
ROUTES: dict[str, list[Any]] = {
    "/v1/completions": [
        CALL | {"prompt": LONG},
        CALL | {"prompt": ["the king " * 20] * 8, "n": 8, "logprobs": 5, "echo": True},
        CALL | {"prompt": "the king " * 20, "stream": True, "logprobs": 5, "n": 16},
        CALL | {"prompt": [list(range(50)) * 4] * 64},
        CALL | {"prompt": [1.5] * 12_000},
    ],
    "/v1/chat/completions": [
        CHAT | {"messages": [{"role": "user", "content": "the dog"}] * 128},
        CHAT | {"messages": [{"role": "user", "content": "the dog"}] * 128, "stream": True},
    ],
    "/v1/embeddings": [
        {"model": "ag-news", "input": [LONG, *["prices rose"] * 255], "truncate": True},
        {"model": "ag-news", "input": [[1, 2, 3, 4] * 10] * 256},
    ],
    "/v1/images/generations": [{"model": "fashion-mnist-diffusion", "prompt": "Sneaker", "n": 10}],
    "/v1/audio/speech": [{"model": "telephone-speech", "input": LONG, "voice": "george"}],
    "/tokenize": [
        {"model": "shakespeare", "prompt": LONG, "return_token_strs": True},
        {"model": "shakespeare", "prompt": "To be, or not to be. " * 12_000},
    ],
    "/detokenize": [{"model": "shakespeare", "tokens": [40, 41, 42] * 10_000}],
    "/v1/audio/transcriptions": [sound(60)],
    "/v1/audio/translations": [sound(60)],
    "/headway.v1.TextClassificationService/ClassifyText": [{"model": "ag-news", "texts": TEXTS, "truncate": True}],
    "/headway.v1.ImageClassificationService/ClassifyImage": [
        {"model": "cifar10", "images": [base64.b64encode(picture(1900)).decode()]}
    ],
    "/v2/models/ag-news/infer": [
        {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [256], "data": TEXTS}]},
    ],
    "/v2/models/cifar10/infer": [
        {
            "inputs": [
                {
                    "name": "pixel_values",
                    "datatype": "FP32",
                    "shape": [8, 3, 32, 32],
                    "data": np.zeros(8 * 3 * 32 * 32).tolist(),
                }
            ]
        },
    ],
    "/headway.v1.SegmentationService/SegmentImage": [{"prompts": [{"points": [{}] * 8_000}]}],
    "/v1/models/ag-news:predict": [{"instances": TEXTS, "parameters": {"truncate": True}}],
    "/v1/models/cifar10:predict": [{"instances": [{"b64": base64.b64encode(picture(1900)).decode()}]}],
    "/v2/models/segment/infer": [
        {
            "inputs": [
                {
                    "name": "image",
                    "datatype": "BYTES",
                    "shape": [1],
                    "data": [base64.b64encode(picture(1900)).decode()],
                    "parameters": {"content_type": "base64"},
                },
                {"name": "point", "datatype": "FP32", "shape": [1, 2], "data": [9, 9]},
            ],
            "parameters": {"max_mask_count": 1},
            "outputs": [{"name": "mask_pixels"}],
        }
    ],
    "/embed": [{"model": "ag-news", "inputs": [LONG, *["prices rose"] * 255], "truncate": True}],
    "/predict": [{"model": "ag-news", "inputs": [[text] for text in TEXTS], "truncate": True}],
    "/v1/models": [None],
    "/v1/models/ag-news": [None],
    "/livez": [None],
    "/readyz": [None],
    "/": [None],
}
"""Bodies that are posted to each route; None is fetched."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A server whose event loop has a thread of its own."""

    grpc_port: int
    http_port: int
    turn: LongestTurn

    def check(self, ask: Callable[[], str]) -> None:
        """Makes a call, and again where the event loop seems to have been kept."""
        turns: list[tuple[float, str]] = []
        while len(turns) < TRIES:
            self.turn.forget()
            end = ask()
            turns.append((self.turn.seconds, self.turn.callback))
            if turns[-1][0] < MOST_S:
                break
        assert min(turns)[0] < MOST_S, turns
        assert end.startswith(ENDS) or READ_AND_REFUSED.search(end), end

    def call(self, name: str, requests: list[dict[str, Any]]) -> str:
        """Calls a method over gRPC with a message, or with several where it takes a stream."""
        method = METHODS[name]
        kind, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        path = f"/{method.containing_service.full_name}/{method.name}"
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        messages = [kind(**request) for request in requests]
        how = {"request_serializer": kind.SerializeToString, "response_deserializer": answer.FromString}
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}", options=options) as channel:
            try:
                if method.client_streaming:
                    list(channel.stream_stream(path, **how)(iter(messages)))
                elif method.server_streaming:
                    list(channel.unary_stream(path, **how)(messages[0]))
                else:
                    channel.unary_unary(path, **how)(messages[0])
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()}"
        return "OK"

    def fetch(self, path: str, body: Any) -> str:
        """Calls a route over HTTP: posts a form with audio, or JSON, or fetches where there is nothing to post."""
        if not isinstance(body, bytes):
            kind, data = "application/json", None if body is None else json.dumps(body).encode()
        else:
            parts = [(b'name="model"', b"telephone-transcriber"), (b'name="file"; filename="a.wav"', body)]
            heads = (b"--b0undary\r\ncontent-disposition: form-data; " + head + b"\r\n\r\n" for head, _ in parts)
            form = b"".join(head + part + b"\r\n" for head, (_, part) in zip(heads, parts, strict=True))
            kind, data = "multipart/form-data; boundary=b0undary", form + b"--b0undary--\r\n"
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port)
        connection.request("GET" if data is None else "POST", path, data, {"content-type": kind})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return f"{answer.status} {content[:200].decode(errors='replace')}"


def _long_model(folder: Path) -> GenerationModel:
    """A model that continues long prompts and conversations."""
    vocab_size = byte_tokenizer().get_vocab_size()
    return make_generation_model(
        make_decoder(num_slots=16, max_length=4096, prefill_chunk=256, vocab_size=vocab_size),
        chat_template=make_chat_template(folder, TEMPLATE),
        max_input_tokens=4000,
        max_total_tokens=4096,
    )


@pytest.fixture(scope="module")
def serving(tmp_path_factory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("loop")
    versions = {"routes_file": folder / "routes.json"}
    settings = ServerSettings(store=MODELS, port=0, http_port=0, drain_timeout=0, versions=versions)
    started: Future[Serving] = Future()
    ended = Event()
    long_model = _long_model(folder)
    loads = [
        (QuestionAnswerer.load, write_answer_bundle(folder / "store", max_input_tokens=512)),
        (MaskFiller.load, write_mask_bundle(folder / "store", max_input_tokens=512)),
        (TokenClassifier.load, write_tagger_bundle(folder / "store", word_boxes=BOXES)),
        (ObjectDetector.load, write_box_bundle(folder / "store")),
        (PixelClassifier.load, write_map_bundle(folder / "store")),
        (DepthEstimator.load, write_map_bundle(folder / "store", Task.DEPTH_ESTIMATION, name="depths")),
        (CtcModel.load, write_letter_bundle(folder / "store")),
        (AudioClassifier.load, write_loudness_bundle(folder / "store")),
        (VideoClassifier.load, write_motion_bundle(folder / "store")),
    ]

    async def serve() -> None:
        runtime = Runtime(device="cpu", num_threads=1)
        host = ModelHost.open(runtime, settings)
        models = [long_model, *(load(bundle, runtime, settings) for load, bundle in loads)]
        for model in models:
            host._put(path_of(model), model)
            host._entries[path_of(model)].is_asked_for = True  # so that it stays, though the store has no such bundle
        server = make_application(host, settings)
        server.doors.append(HttpServer(server))
        port = await server.start()
        with longest_turn() as turn:
            started.set_result(Serving(grpc_port=port, http_port=server.ports[1], turn=turn))
            await asyncio.to_thread(ended.wait)
        await server.stop()

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    yield started.result(120)
    ended.set()
    thread.join()


def test_every_method_is_among_them():
    assert set(REQUESTS) == set(METHODS)


async def test_a_prompt_of_a_model_of_speech_lets_it_go_on():
    model, request = make_speech_model(NO_OBSERVER), SpeechRequest(prompt=LONG, language="en")
    model.start()
    best = math.inf
    with longest_turn() as turn:
        for _ in range(TRIES):
            turn.forget()
            with pytest.raises(InvalidInputError, match=r"prompt: has \d+ tokens, the limit is"):
                await model.transcribe([sound(0.2)], request=request)
            best = min(best, turn.seconds)
    model.close()
    assert best < MOST_S


CALLS = [
    (name, requests if METHODS[name].client_streaming else [request])
    for name, requests in REQUESTS.items()
    for request in requests[: 1 if METHODS[name].client_streaming else None]
]


@pytest.mark.parametrize(("name", "requests"), CALLS, ids=[name for name, _ in CALLS])
def test_a_call_lets_the_event_loop_go_on(serving, name, requests):
    serving.check(lambda: serving.call(name, requests))


@pytest.mark.parametrize(("path", "number"), [(path, number) for path in ROUTES for number in range(len(ROUTES[path]))])
def test_a_request_over_http_lets_the_event_loop_go_on(serving, path, number):
    serving.check(lambda: serving.fetch(path, ROUTES[path][number]))
