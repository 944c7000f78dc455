"""What a model can do it does through every door that has a call for it: one table, every model, every way to ask.

The doors: gRPC, Connect, the Open Inference Protocol over gRPC and over HTTP, OpenAI's API, the command line. What the
page's panels offer is held by `tests/repository/test_ways_in.py`, and which deployment Ray asks by
`tests/ray/test_placement.py`.
"""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
from google.protobuf.json_format import MessageToJson
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from PIL import Image
from typer.testing import CliRunner

from headway.oip import grpc_predict_v2_pb2 as oip_pb
from headway.oip import grpc_predict_v2_pb2_grpc as oip_grpc
from headway_client.cli import app
from headway_server.bundles import Manifest, Task
from headway_server.services import service_descriptors
from headway_server.serving.abilities import Ability, PairAbility, space_of
from headway_server.serving.families import has_ability
from headway_server.tasks.table import FAMILIES, RPCS
from headway_server.transports.http import OPENAI_ABILITIES
from headway_server.transports.http.openai.ranking import RERANK_PATHS, SCORE_PATHS
from headway_server.transports.http.openai.text_embeddings import (
    EMBED_ALL_PATH,
    EMBED_PATH,
    EMBED_SPARSE_PATH,
    PREDICT_PATH,
)

from .conftest import Doors

METHODS = {
    method.name: (f"/{service.full_name}/{method.name}", method)
    for service in service_descriptors()
    for method in service.methods
}
IMAGE, MASK, AUDIO = object(), object(), object()
"""Stand for the bytes of a file."""
FEW = {"parameters": {"max_new_tokens": 2}}
MEAN, ROLLOUT = {"summary": 1, "layers": [0]}, {"summary": 3}
REQUESTS: dict[str, dict[str, Any]] = {
    "GenerateText": {"prompts": ["ROMEO:"], **FEW},
    "StreamGenerateText": {"prompt": "ROMEO:", **FEW},
    "TranslateText": {"texts": ["ein Hund"], **FEW},
    "StreamTranslateText": {"text": "ein Hund", **FEW},
    "RewriteText": {"texts": ["ein Hund"], **FEW},
    "StreamRewriteText": {"text": "ein Hund", **FEW},
    "CaptionImage": {"images": [IMAGE], "language": "en", **FEW},
    "StreamCaptionImage": {"image": IMAGE, "language": "en", **FEW},
    "TranscribeSpeech": {"audios": [AUDIO], **FEW},
    "StreamTranscribeSpeech": {"audio": AUDIO, **FEW},
    "SynthesizeSpeech": {"texts": ["one"], "parameters": {"max_duration_seconds": 0.1}},
    "StreamSynthesizeSpeech": {"text": "one", "parameters": {"max_duration_seconds": 0.1}},
    "ClassifyText": {"texts": ["goal"]},
    "ClassifyTokens": {"texts": ["goal"]},
    "ClassifyTokens pages": {"pages": [{"words": ["Ada", "Oslo"], "boxes": [0, 0, 9, 9, 600, 0, 999, 9]}]},
    "EmbedText": {"texts": ["goal"]},
    "EmbedText sparse": {"texts": ["goal"], "sparse": True},
    "EmbedText multi_vector": {"texts": ["goal"], "multi_vector": True},
    "ScoreText": {"texts": ["goal"], "text_pairs": ["star"]},
    "AnswerQuestion": {"questions": ["who"], "contexts": ["the Ada Lovelace"]},
    "FillMask": {"texts": ["the [MASK] ."]},
    "ClassifyImage": {"images": [IMAGE]},
    "ClassifyImage candidate_labels": {"images": [IMAGE], "candidate_labels": ["dog", "cat"]},
    "ClassifyAudio": {"audios": [AUDIO]},
    "ClassifyVideo": {"frames": [IMAGE, IMAGE]},
    "DetectObjects": {"images": [IMAGE]},
    "ClassifyPixels": {"images": [IMAGE]},
    "EstimateDepth": {"images": [IMAGE]},
    "EmbedImage": {"images": [IMAGE]},
    "GenerateImage": {"parameters": {"step_count": 1}},
    "StreamGenerateImage": {"parameters": {"step_count": 1}},
    "SegmentImage": {"image": IMAGE, "prompts": [{"points": [{"x": 9, "y": 9}]}]},
    "SegmentEverything": {"image": IMAGE, "points_per_side": 1},
    "RankImages": {"images": [IMAGE], "query_image": IMAGE},
    "RankImages query_text": {"images": [IMAGE], "query_text": "goal"},
    "RankTexts": {"texts": ["goal", "star"], "query_text": "goal"},
    "RankTexts query_image": {"texts": ["goal", "star"], "query_image": IMAGE},
    "InspectText": {"text": "goal", "attention": ROLLOUT},
    "InspectImage": {"image": IMAGE, "attention": ROLLOUT},
    "InspectGeneration": {"text": "ROMEO:", "attention": ROLLOUT},
    "InspectTranslation": {"text": "ein Hund", "attention": MEAN},
    "PrepareImage model": {"images": [IMAGE]},
}
"""A small request of every RPC, and of every field by which it asks for something else."""
WITHOUT_ONE_REQUEST = {"SegmentInteractively"}
"""RPCs whose requests are a stream, which gRPC alone has: `test_segmentation_service.py`, `test_client_calls.py`."""


def asked_by(key: str) -> Ability:
    name, _, field = key.partition(" ")
    asked = RPCS[name].with_field[field] if field else RPCS[name].asked
    assert isinstance(asked, Ability)
    return asked


def has(ability: Ability, manifest: Manifest, manifests: dict[str, Manifest]) -> bool:
    """True if a model can do that, in the company of the others."""
    if not has_ability(FAMILIES, manifest, ability):
        return False
    return not isinstance(ability, PairAbility) or any(
        space_of(each) == space_of(manifest)
        for each in manifests.values()
        if ability.partner in FAMILIES[each.task].made_for
    )


def filled(value: Any, doors: Doors) -> Any:
    """Puts the files in their places."""
    if isinstance(value, dict):
        return {name: filled(each, doors) for name, each in value.items()}
    if isinstance(value, list):
        return [filled(each, doors) for each in value]
    file = {id(IMAGE): "picture.png", id(MASK): "mask.png", id(AUDIO): "speech.wav"}.get(id(value))
    return value if file is None else (doors.folder / file).read_bytes()


def reason_of(error: grpc.RpcError) -> str:
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    return info.reason


@pytest.fixture(scope="module")
def channel(doors: Doors) -> Any:
    with grpc.insecure_channel(doors.address) as opened:
        yield opened


@pytest.fixture(scope="module")
def http(doors: Doors) -> Any:
    with httpx2.Client(base_url=doors.http, timeout=60) as opened:
        yield opened


def test_every_ability_of_the_table_has_a_request() -> None:
    keys = {
        key
        for name, rpc in RPCS.items()
        for key, asked in ((name, rpc.asked), *((f"{name} {field}", asked) for field, asked in rpc.with_field.items()))
        if isinstance(asked, Ability)
    }
    without = {"RankTexts query_image_id", "PrepareImage"}  # which is like query_image; of no model
    assert REQUESTS.keys() == keys - WITHOUT_ONE_REQUEST - without


@pytest.mark.parametrize("key", REQUESTS)
def test_grpc_and_connect_answer_for_every_model_that_can(doors: Doors, channel: Any, http: Any, key: str) -> None:
    path, method = METHODS[key.partition(" ")[0]]
    request_type, response_type = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = make(path, request_type.SerializeToString, response_type.FromString)
    ability, answered = asked_by(key), 0
    for name, manifest in doors.manifests.items():
        request = request_type(model=name, **filled(REQUESTS[key], doors))
        try:
            found = list(call(request)) if method.server_streaming else [call(request)]
            problem = None
        except grpc.RpcError as error:
            found, problem = [], error
        if not has(ability, manifest, doors.manifests):
            assert problem is not None, (name, key)
            assert reason_of(problem) == "WRONG_TASK", (name, key)
            assert f"is for {manifest.task} and cannot {ability.words}" in problem.details()
            continue
        answered += 1
        if problem is not None:  # of bundles without the graph for it, which says so by a reason of its own
            assert key.startswith("Inspect"), (name, problem)
            assert reason_of(problem) == "NO_ATTENTION", (name, problem)
            assert not any("attention" in variant.graphs for variant in manifest.variants.values())
            continue
        assert found
        if not method.server_streaming:
            answer = http.post(path, content=MessageToJson(request), headers={"content-type": "application/json"})
            assert answer.status_code == 200, (name, answer.text)
            assert answer.json().keys() == json.loads(MessageToJson(found[0])).keys()
    assert answered, "the store has a model for it"


CHAT = b'[{"role": "user", "content": "hi"}]'
TWO = [[1, 2]]
BY_TOKENS: list[dict[str, Any]] = [
    {"input_ids": TWO},
    {"input_ids": TWO, "attention_mask": [[1, 1]]},
    {"input_ids": TWO, "token_type_ids": [[0, 1]]},
]
OF_TEXTS: list[dict[str, Any]] = [{"text": [b"goal"]}, {"text": [b"goal"], "text_pair": [b"star"]}, *BY_TOKENS]
PAGE: dict[str, Any] = {"word": [[b"Ada", b"Oslo", b""]], "bbox": [[[0, 0, 9, 9], [600, 0, 999, 9], [0] * 4]]}
"""That of the request."""
PIXELS = np.full((1, 32, 32, 3), (200, 60, 60), np.uint8)
"""Those of the picture."""
OF_IMAGES: list[dict[str, Any]] = [{"image": [IMAGE]}, {"pixels": PIXELS}, {"pixel_values": None}]
WRITING: list[dict[str, Any]] = [{"text": [b"ein Hund"]}, {"text": [b"ein Hund"], "target_prefix": [b"A"]}]
TENSORS: dict[Task, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    Task.GENERATION: (
        [
            {"text": [b"ROMEO:"]},
            {"conversation": [CHAT]},
            {"input_ids": TWO},
            {"input_ids": TWO, "attention_mask": [[1, 1]]},
        ],
        {"max_new_tokens": 2, "seed": 7},
    ),
    Task.TRANSLATION: (WRITING, {"max_new_tokens": 2}),
    Task.TEXT_TO_TEXT: (WRITING, {"max_new_tokens": 2}),
    Task.CAPTIONING: (
        [{"image": [IMAGE]}, {"pixels": PIXELS}, {"image": [IMAGE], "target_prefix": [b"A"]}],
        {"max_new_tokens": 2, "target_language": "en"},
    ),
    Task.TRANSCRIPTION: ([{"audio": [AUDIO]}], {"max_new_tokens": 2}),
    Task.CTC_TRANSCRIPTION: ([{"audio": [AUDIO]}], {"max_new_tokens": 2}),
    Task.SPEECH_SYNTHESIS: ([{"text": [b"one"]}], {"max_duration_seconds": 0.1, "seed": 7}),
    Task.FLOW_SYNTHESIS: ([{"text": [b"one"]}], {"speaking_rate": 1.5, "seed": 7}),
    Task.STAGED_SYNTHESIS: ([{"text": [b"one"]}], {"max_duration_seconds": 0.1, "seed": 7}),
    Task.SPECTROGRAM_SYNTHESIS: ([{"text": [b"one"]}], {"max_duration_seconds": 0.1, "seed": 7}),
    Task.DELAYED_SYNTHESIS: ([{"text": [b"one"]}], {"max_duration_seconds": 0.1, "seed": 7}),
    Task.TEXT_CLASSIFICATION: (OF_TEXTS, {}),
    Task.TOKEN_CLASSIFICATION: (
        [{"text": [b"Ada Lovelace saw Paris"]}, PAGE, {**PAGE, "page_size": [[1000, 2000]]}],
        {},
    ),
    Task.TEXT_EMBEDDING: (OF_TEXTS, {}),
    Task.TEXT_SCORING: ([{"text": [b"goal"], "text_pair": [b"star"]}, {"text": [b"goal"]}, *BY_TOKENS], {}),
    Task.QUESTION_ANSWERING: ([{"question": [b"who"], "context": [b"the Ada Lovelace"]}], {"top_k": 2}),
    Task.FILL_MASK: ([{"text": [b"the [MASK] ."]}], {"targets": '["sea", "star"]'}),
    Task.IMAGE_CLASSIFICATION: (OF_IMAGES, {}),
    Task.IMAGE_EMBEDDING: (OF_IMAGES, {}),
    Task.AUDIO_CLASSIFICATION: ([{"audio": [AUDIO]}], {"top_k": 2}),
    Task.VIDEO_CLASSIFICATION: ([{"frame": [IMAGE, IMAGE]}], {"top_k": 2}),
    Task.OBJECT_DETECTION: (OF_IMAGES, {"threshold": 0.25, "max_object_count": 2}),
    Task.SEMANTIC_SEGMENTATION: (OF_IMAGES, {}),
    Task.DEPTH_ESTIMATION: (OF_IMAGES, {}),
    Task.SEGMENTATION: (
        [
            {"image": [IMAGE], "point": [[9, 9]], "point_is_inside": [True], "box": [[2, 2, 30, 30]]},
            {"pixels": PIXELS, "point": [[9, 9]], "point_is_inside": [True], "box": [[2, 2, 30, 30]]},
            {"image": [IMAGE], "point": [[9, 9]]},
        ],
        {},
    ),
    Task.IMAGE_GENERATION: (
        [
            {"prompt": [b""]},
            {"prompt": [b""], "negative_prompt": [b""], "image": [IMAGE], "mask": [MASK]},
            {"prompt": [b""], "pixels": PIXELS},
        ],
        {"step_count": 1, "seed": 7},
    ),
    Task.TENSORS: (
        [{"numbers": [[1, 2, 3], [4, 5, 6]], "category": [1, 4]}, {"image": None}, {"values": [[1, 2, 3]]}],
        {},
    ),
}
"""Examples of inputs, the first of the required ones, and parameters for every task. None: zeros of the described
shape."""


@dataclass(frozen=True, kw_only=True)
class Typed:
    """The RPC of a task, and what the first example's outputs are made of in its answer."""

    rpc: str
    request: dict[str, Any]
    outputs: dict[str, Callable[[Any], list[Any]]]


def each(path: str) -> Callable[[Any], list[Any]]:
    """Takes the values at a path of fields, of every element of the repeated ones."""

    def take(answer: Any) -> list[Any]:
        found = [answer]
        for name in path.split("."):
            field = found[0].DESCRIPTOR.fields_by_name[name] if found else None
            values = [getattr(one, name) for one in found]
            found = [value for many in values for value in many] if field and field.is_repeated else values
        return found

    return take


def named(path: str, name: str) -> dict[str, Callable[[Any], list[Any]]]:
    return {name: each(path)}


WRITTEN = named("results.log_probability", "log_probability") | named("results.new_token_count", "new_token_count")
LABELS = named("results.labels.label", "label") | named("results.labels.probability", "probability")
SEED: dict[str, Any] = {"seed": 7}
TYPED: dict[Task, Typed] = {
    Task.GENERATION: Typed(
        rpc="GenerateText",
        request={"prompts": ["ROMEO:"], "parameters": {"max_new_tokens": 2, "sampling": SEED}},
        outputs=named("results.text", "generated_text") | named("results.seed", "seed"),
    ),
    Task.TRANSLATION: Typed(
        rpc="TranslateText",
        request=REQUESTS["TranslateText"],
        outputs=named("results.text", "translated_text") | WRITTEN,
    ),
    Task.TEXT_TO_TEXT: Typed(
        rpc="RewriteText", request=REQUESTS["RewriteText"], outputs=named("results.text", "rewritten_text") | WRITTEN
    ),
    Task.CAPTIONING: Typed(
        rpc="CaptionImage", request=REQUESTS["CaptionImage"], outputs=named("results.text", "caption") | WRITTEN
    ),
    Task.TRANSCRIPTION: Typed(
        rpc="TranscribeSpeech",
        request=REQUESTS["TranscribeSpeech"],
        outputs=named("results.text", "text") | named("results.language", "language") | WRITTEN,
    ),
    Task.CTC_TRANSCRIPTION: Typed(
        rpc="TranscribeSpeech",
        request=REQUESTS["TranscribeSpeech"],
        outputs=named("results.text", "text") | WRITTEN,
    ),
    Task.SPEECH_SYNTHESIS: Typed(
        rpc="SynthesizeSpeech",
        request={"texts": ["one"], "parameters": {"max_duration_seconds": 0.1, "sampling": SEED}},
        outputs=named("results.audio", "audio") | named("results.sampling_rate", "sampling_rate"),
    ),
    Task.FLOW_SYNTHESIS: Typed(
        rpc="SynthesizeSpeech",
        request={"texts": ["one"], "parameters": {"speaking_rate": 1.5, "sampling": SEED}},
        outputs=named("results.audio", "audio") | named("results.new_token_count", "new_token_count"),
    ),
    Task.STAGED_SYNTHESIS: Typed(
        rpc="SynthesizeSpeech",
        request={"texts": ["one"], "parameters": {"max_duration_seconds": 0.1, "sampling": SEED}},
        outputs=named("results.audio", "audio") | named("results.new_token_count", "new_token_count"),
    ),
    Task.SPECTROGRAM_SYNTHESIS: Typed(
        rpc="SynthesizeSpeech",
        request={"texts": ["one"], "parameters": {"max_duration_seconds": 0.1, "sampling": SEED}},
        outputs=named("results.audio", "audio") | named("results.new_token_count", "new_token_count"),
    ),
    Task.DELAYED_SYNTHESIS: Typed(
        rpc="SynthesizeSpeech",
        request={"texts": ["one"], "parameters": {"max_duration_seconds": 0.1, "sampling": SEED}},
        outputs=named("results.audio", "audio") | named("results.new_token_count", "new_token_count"),
    ),
    Task.TEXT_CLASSIFICATION: Typed(rpc="ClassifyText", request=REQUESTS["ClassifyText"], outputs=LABELS),
    Task.TOKEN_CLASSIFICATION: Typed(
        rpc="ClassifyTokens",
        request={"texts": ["Ada Lovelace saw Paris"]},
        outputs=named("results.spans.label", "label")
        | named("results.spans.span.start", "start")
        | named("results.spans.words.end", "end_word"),
    ),
    Task.TEXT_EMBEDDING: Typed(
        rpc="EmbedText", request=REQUESTS["EmbedText"], outputs=named("results.values", "embedding")
    ),
    Task.TEXT_SCORING: Typed(rpc="ScoreText", request=REQUESTS["ScoreText"], outputs=named("results.score", "score")),
    Task.QUESTION_ANSWERING: Typed(
        rpc="AnswerQuestion",
        request={**REQUESTS["AnswerQuestion"], "top_k": 2},
        outputs=named("results.answers.text", "answer")
        | named("results.answers.span.start", "start")
        | named("results.answers.score", "score")
        | named("results.no_answer_score", "no_answer_score"),
    ),
    Task.FILL_MASK: Typed(
        rpc="FillMask",
        request={**REQUESTS["FillMask"], "targets": ["sea", "star"]},
        outputs=named("results.masks.tokens.filled_text", "filled_text")
        | named("results.masks.tokens.probability", "probability")
        | named("results.masks.tokens.token_id", "token_id"),
    ),
    Task.IMAGE_CLASSIFICATION: Typed(rpc="ClassifyImage", request=REQUESTS["ClassifyImage"], outputs=LABELS),
    Task.IMAGE_EMBEDDING: Typed(
        rpc="EmbedImage", request=REQUESTS["EmbedImage"], outputs=named("results.values", "embedding")
    ),
    Task.AUDIO_CLASSIFICATION: Typed(
        rpc="ClassifyAudio", request={**REQUESTS["ClassifyAudio"], "top_k": 2}, outputs=LABELS
    ),
    Task.VIDEO_CLASSIFICATION: Typed(
        rpc="ClassifyVideo",
        request={**REQUESTS["ClassifyVideo"], "top_k": 2},
        outputs=LABELS | named("results.frame_indices", "frame_index"),
    ),
    Task.OBJECT_DETECTION: Typed(
        rpc="DetectObjects",
        request={**REQUESTS["DetectObjects"], "threshold": 0.25, "max_object_count": 2},
        outputs=named("results.objects.label", "label")
        | named("results.objects.label_index", "label_index")
        | named("results.objects.score", "score"),
    ),
    Task.SEMANTIC_SEGMENTATION: Typed(
        rpc="ClassifyPixels",
        request=REQUESTS["ClassifyPixels"],
        outputs=named("results.class_map", "class_map")
        | named("results.labels.label", "label")
        | named("results.labels.label_index", "label_index")
        | named("results.labels.share", "share")
        | named("results.labels.score", "score")
        | named("results.labels.probability_map", "probability_map"),
    ),
    Task.DEPTH_ESTIMATION: Typed(
        rpc="EstimateDepth",
        request=REQUESTS["EstimateDepth"],
        outputs=named("results.png", "depth_map")
        | named("results.minimum", "minimum")
        | named("results.maximum", "maximum"),
    ),
    Task.SEGMENTATION: Typed(
        rpc="SegmentImage",
        request={
            "image": IMAGE,
            "mask_format": 2,
            "prompts": [{"points": [{"x": 9, "y": 9}], "box": {"left": 2, "top": 2, "right": 30, "bottom": 30}}],
        },
        outputs=named("results.masks.png", "mask") | named("results.masks.area", "area"),
    ),
    Task.IMAGE_GENERATION: Typed(
        rpc="GenerateImage",
        request={"parameters": {"step_count": 1, **SEED}},
        outputs=named("results.png", "image") | named("results.seed", "seed"),
    ),
}
DTYPES = {
    "UINT8": np.uint8,
    "BOOL": np.bool_,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": object,
}
CONTENTS = {
    "UINT8": "uint",
    "BOOL": "bool",
    "INT64": "int64",
    "UINT64": "uint64",
    "FP32": "fp32",
    "FP64": "fp64",
    "BYTES": "bytes",
}


class Tensors:
    """The four ways to send tensors to a model, each of which returns its outputs as arrays by name."""

    def __init__(self, doors: Doors, channel: Any, http: Any, model: str) -> None:
        self.stub = oip_grpc.GRPCInferenceServiceStub(channel)
        self.http = http
        self.model = model
        self.metadata = self.stub.ModelMetadata(oip_pb.ModelMetadataRequest(name=model))
        self.config = self.stub.ModelConfig(oip_pb.ModelConfigRequest(name=model)).config
        self.kinds = {one.name: one for one in self.metadata.inputs}
        self.examples, self.parameters = TENSORS[doors.manifests[model].task]
        self.doors = doors
        self.ways = (self.typed, self.raw, self.json, self.binary)

    def arrays(self, example: dict[str, Any]) -> dict[str, np.ndarray]:
        """Makes the inputs of an example, of the described datatypes and shapes."""
        made = {}
        for name, value in filled(example, self.doors).items():
            kind = self.kinds[name]
            zeros = np.zeros([max(length, 1) for length in kind.shape], DTYPES[kind.datatype])
            array = zeros if value is None else np.array(value, object)  # bytes as they are
            array = array if value is None or kind.datatype == "BYTES" else np.array(value, DTYPES[kind.datatype])
            assert array.ndim == len(kind.shape)
            assert all(length in (-1, own) for length, own in zip(kind.shape, array.shape, strict=True)), name
            made[name] = array
        return made

    def request(self, arrays: dict[str, np.ndarray]) -> Any:
        request = oip_pb.ModelInferRequest(model_name=self.model)
        for name, array in arrays.items():
            request.inputs.add(name=name, datatype=self.kinds[name].datatype, shape=array.shape)
        for one in self.metadata.outputs:
            request.outputs.add(name=one.name)
        for parameter, value in self.parameters.items():
            kinds = {str: "string_param", int: "int64_param", float: "double_param"}
            setattr(request.parameters[parameter], kinds[type(value)], value)
        return request

    def typed(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        request = self.request(arrays)
        for tensor, array in zip(request.inputs, arrays.values(), strict=True):
            getattr(tensor.contents, f"{CONTENTS[tensor.datatype]}_contents").extend(array.ravel().tolist())
        answer = self.stub.ModelInfer(request)
        assert not answer.raw_output_contents
        return {
            one.name: self.shaped(one, list(getattr(one.contents, f"{CONTENTS[one.datatype]}_contents")))
            for one in answer.outputs
        }

    def raw(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        request = self.request(arrays)
        request.raw_input_contents.extend(map(packed, arrays.values()))
        answer = self.stub.ModelInfer(request)
        outputs = zip(answer.outputs, answer.raw_output_contents, strict=True)
        return {one.name: self.shaped(one, unpacked(one.datatype, data)) for one, data in outputs}

    def json(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        inputs = []
        for name, array in arrays.items():
            one = {"name": name, "datatype": self.kinds[name].datatype, "shape": array.shape}
            if array.dtype == object:
                texts = [base64.b64encode(element).decode() for element in array.ravel()]
                inputs.append(one | {"data": texts, "parameters": {"content_type": "base64"}})
            else:
                inputs.append(one | {"data": array.tolist()})
        answer = self.http.post(
            self.path, json={"inputs": inputs, "outputs": self.named, "parameters": self.parameters}
        )
        assert answer.status_code == 200, answer.text
        found = {}
        for one in answer.json()["outputs"]:
            is_file = one.get("parameters", {}).get("content_type") == "base64"
            data = [base64.b64decode(text) for text in one["data"]] if is_file else one["data"]
            texts = [each.encode() if isinstance(each, str) else each for each in data]
            found[one["name"]] = self.shaped(SimpleNamespace(**one), texts)
        return found

    def binary(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        datas = list(map(packed, arrays.values()))
        inputs = [
            {"name": name, "datatype": self.kinds[name].datatype, "shape": array.shape}
            | {"parameters": {"binary_data_size": len(data)}}
            for (name, array), data in zip(arrays.items(), datas, strict=True)
        ]
        parameters = {**self.parameters, "binary_data_output": True}
        body = {"inputs": inputs, "outputs": self.named, "parameters": parameters}
        head = json.dumps(body).encode()
        headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
        answer = self.http.post(self.path, content=b"".join((head, *datas)), headers=headers)
        assert answer.status_code == 200, answer.text
        end = int(answer.headers["inference-header-content-length"])
        found = {}
        for one in json.loads(answer.content[:end])["outputs"]:
            start, end = end, end + one["parameters"]["binary_data_size"]
            found[one["name"]] = self.shaped(
                SimpleNamespace(**one), unpacked(one["datatype"], answer.content[start:end])
            )
        assert end == len(answer.content)
        return found

    @property
    def named(self) -> list[dict[str, str]]:
        return [{"name": one.name} for one in self.metadata.outputs]

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}/infer"

    def shaped(self, output: Any, values: list[Any]) -> np.ndarray:
        """Returns an output, whose datatype and shape are as described."""
        [kind] = [one for one in self.metadata.outputs if one.name == output.name]
        assert output.datatype == kind.datatype
        assert len(output.shape) == len(kind.shape)
        assert all(length in (-1, own) for length, own in zip(kind.shape, output.shape, strict=True)), output.name
        array = np.empty(len(values), DTYPES[kind.datatype])
        array[:] = values
        return array.reshape(list(output.shape))


def packed(array: np.ndarray) -> bytes:
    if array.dtype != object:
        return array.tobytes()
    return b"".join(part for element in array.ravel() for part in (len(element).to_bytes(4, "little"), element))


def unpacked(datatype: str, data: bytes) -> list[Any]:
    if datatype != "BYTES":
        return np.frombuffer(data, DTYPES[datatype]).tolist()
    found, end = [], 0
    while end < len(data):
        start = end + 4
        end = start + int.from_bytes(data[start - 4 : start], "little")
        found.append(data[start:end])
    return found


def test_every_task_has_examples_of_its_tensors() -> None:
    assert TENSORS.keys() == FAMILIES.keys()
    assert TYPED.keys() == FAMILIES.keys() - {Task.TENSORS}  # whose typed call is this protocol's


@pytest.mark.parametrize("task", TENSORS)
def test_tensors_answer_in_every_way_as_the_metadata_says_and_as_the_typed_call(
    doors: Doors, channel: Any, http: Any, task: Task
) -> None:
    names = [name for name, manifest in doors.manifests.items() if manifest.task is task]
    assert names
    for name in names:
        model = Tensors(doors, channel, http, name)
        assert model.stub.ModelReady(oip_pb.ModelReadyRequest(name=name)).ready, name
        assert http.get(f"/v2/models/{name}/ready").json() == {"ready": True}
        described = http.get(f"/v2/models/{name}").json()
        for side, configured in (("inputs", model.config.input), ("outputs", model.config.output)):
            tensors = getattr(model.metadata, side)
            assert tensors, name
            plain = [(one.name, one.datatype, list(one.shape)) for one in tensors]
            assert plain == [(one["name"], one["datatype"], one["shape"]) for one in described[side]]
            types = [oip_pb.DataType.Name(one.data_type).removeprefix("TYPE_") for one in configured]
            types = [one.replace("STRING", "BYTES") for one in types]
            assert plain == list(
                zip((one.name for one in configured), types, map(list, (one.dims for one in configured)), strict=True)
            )
        required = {one.name for one in model.config.input if not one.optional}
        paired = {"text_pair"} & model.kinds.keys() if doors.manifests[name].text_pairs == "required" else set()
        examples = [one for one in model.examples if paired <= one.keys() <= model.kinds.keys()]
        assert {each for example in examples for each in example} == model.kinds.keys(), name
        assert required <= examples[0].keys(), name

        for number, example in enumerate(examples):
            arrays = model.arrays(example)
            first, *others = [way(arrays) for way in model.ways]
            assert list(first) == [one.name for one in model.metadata.outputs], (name, example)
            for other in others:
                assert list(first) == list(other)
                for output, array in first.items():
                    np.testing.assert_array_equal(array, other[output], err_msg=f"{name} {output}", strict=True)
            check_forms(first)
            if not number:
                check_typed(channel, doors, name, first)
                by_file = first
            elif "pixels" in example and example.keys() - {"pixels"} == examples[0].keys() - {"image"}:
                for output, array in by_file.items():
                    np.testing.assert_array_equal(array, first[output], err_msg=f"{name} {output}", strict=True)
        *parts, last = model.stub.ModelStreamInfer(iter([streamed(model, examples[0])]))
        assert not last.error_message, (name, last.error_message)
        assert last.infer_response.parameters["triton_final_response"].bool_param
        assert bool(parts) or not model.config.model_transaction_policy.decoupled, name


def check_forms(outputs: dict[str, np.ndarray]) -> None:
    """Compares outputs that are forms of others with these."""

    def images(name: str, mode: str) -> np.ndarray:
        return np.stack([np.asarray(Image.open(io.BytesIO(file)).convert(mode)) for file in outputs[name]])

    if "pixels" in outputs:
        np.testing.assert_array_equal(outputs["pixels"], images("image", "RGB"), strict=True)
    if "mask_pixels" in outputs:
        np.testing.assert_array_equal(outputs["mask_pixels"], images("mask", "L") > 0, strict=True)
        assert outputs["mask_pixels"].sum(axis=(1, 2)).tolist() == outputs["area"].tolist()
    if "samples" in outputs:
        with wave.open(io.BytesIO(outputs["audio"][0])) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        np.testing.assert_allclose(outputs["samples"][0] * 2**15, samples)
        np.testing.assert_allclose(outputs["duration"] * outputs["sampling_rate"], [len(samples)], atol=1)


def test_other_forms_of_outputs_are_returned_if_they_are_named(http: Any) -> None:
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["one"]}
    body = {"inputs": [text], "parameters": {"max_duration_seconds": 0.1}}
    names = [one["name"] for one in http.post("/v2/models/telephone-speech/infer", json=body).json()["outputs"]]
    assert "audio" in names
    assert "samples" not in names
    body["outputs"] = [{"name": "samples"}]
    [samples] = http.post("/v2/models/telephone-speech/infer", json=body).json()["outputs"]
    assert samples["shape"] == [1, len(samples["data"])]
    body["parameters"]["format"] = "flac"
    answer = http.post("/v2/models/telephone-speech/infer", json=body)
    assert answer.json()["error"] == "parameters.format: must be wav if samples are asked for; leave it out"


def streamed(model: Tensors, example: dict[str, Any]) -> Any:
    arrays = model.arrays(example)
    request = model.request(arrays)
    request.raw_input_contents.extend(map(packed, arrays.values()))
    return request


def check_typed(channel: Any, doors: Doors, name: str, outputs: dict[str, np.ndarray]) -> None:
    """Compares outputs with the answer of the task's own RPC, if it has one."""
    manifest = doors.manifests[name]
    if (typed := TYPED.get(manifest.task)) is None:
        return
    is_sparse = manifest.embedding is not None and manifest.embedding.is_sparse
    path, method = METHODS[typed.rpc]
    request_type, response_type = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    call = channel.unary_unary(path, request_type.SerializeToString, response_type.FromString)
    more = {"sparse": True} if is_sparse else {}  # an answer without zeros
    given = typed.request if manifest.word_boxes is None else REQUESTS["ClassifyTokens pages"]
    answer = call(request_type(model=name, **filled(given, doors), **more))
    for output, take in typed.outputs.items():
        if output not in outputs:  # of models that read boxes alone
            assert manifest.word_boxes is None
            continue
        found, expected = outputs[output].ravel().tolist(), take(answer)
        found = [value for value in found if value] if is_sparse else found
        assert found, (name, output)
        if isinstance(found[0], float):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=f"{name} {output}")
        else:
            assert found == [one.encode() if isinstance(one, str) else one for one in expected], (name, output)


def test_segments_are_pointed_at_by_tensors(doors: Doors, channel: Any) -> None:
    stub = oip_grpc.GRPCInferenceServiceStub(channel)
    data = (doors.folder / "picture.png").read_bytes()

    def ask(**given: tuple[str, list[int], list[Any]]) -> Any:
        request = oip_pb.ModelInferRequest(model_name="segment")
        request.inputs.add(name="image", datatype="BYTES", shape=[1]).contents.bytes_contents.append(data)
        for name, (datatype, shape, values) in given.items():
            tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
            field = tensor.contents.fp32_contents if datatype == "FP32" else tensor.contents.bool_contents
            field.extend(values)
        return stub.ModelInfer(request)

    point, box = ("FP32", [2, 2], [9.0, 9.0, 20.0, 20.0]), ("FP32", [1, 4], [2.0, 2.0, 30.0, 30.0])
    inside = ("BOOL", [2], [True, False])
    for given in ({"point": point}, {"box": box}, {"point": point, "point_is_inside": inside, "box": box}):
        answer = ask(**given)
        masks = {each.name: each for each in answer.outputs}["mask"].contents.bytes_contents
        assert masks
        assert all(mask.startswith(b"\x89PNG") for mask in masks)
    for given, words in (
        ({"point_is_inside": inside}, "point_is_inside: has 2 elements for 0 points"),
        ({"point": ("FP32", [1, 2], [99.0, 9.0])}, "point[0]: is (99, 9), outside of the image"),
        ({"box": ("FP32", [1, 4], [9.0, 9.0, 2.0, 2.0])}, "box: is (9, 9, 2, 2)"),
        ({"box": ("FP32", [2, 4], [1.0] * 8)}, "box: has 2 rows; a call has one box"),
    ):
        with pytest.raises(grpc.RpcError) as error:
            ask(**given)
        assert words in error.value.details()


OPENAI: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/completions": {"prompt": "ROMEO:", "max_tokens": 2},
    "/v1/embeddings": {"input": ["goal", "star"]},
    EMBED_PATH: {"inputs": ["goal", "star"]},
    EMBED_SPARSE_PATH: {"inputs": ["goal", "star"]},
    EMBED_ALL_PATH: {"inputs": ["goal", "star"]},
    PREDICT_PATH: {"inputs": "goal"},
    "/v1/images/generations": {"prompt": "", "step_count": 1},
    "/v1/images/edits": {},
    "/v1/audio/speech": {"input": "one", "max_duration_seconds": 0.1},
    "/v1/audio/transcriptions": {},
    "/v1/audio/translations": {},
    "/tokenize": {"prompt": "ROMEO:"},
    "/detokenize": {"tokens": [1, 2]},
    **{key: {"query": "goal", "documents": ["star", "goal"]} for key in RERANK_PATHS},
    **{key: {"text_1": "goal", "text_2": ["star", "goal"]} for key in SCORE_PATHS},
}


@pytest.mark.parametrize("path", OPENAI_ABILITIES)
def test_openai_answers_for_every_model_that_can(doors: Doors, http: Any, path: str) -> None:
    answered = []
    for name, manifest in doors.manifests.items():
        if path.startswith("/v1/audio/trans"):
            audio = (doors.folder / "speech.wav").read_bytes()
            answer = http.post(path, data={"model": name}, files={"file": ("speech.wav", audio)})
        elif path == "/v1/images/edits":
            fields = {"model": name, "prompt": "", "step_count": "1"}
            answer = http.post(
                path, data=fields, files={"image": ("a.png", (doors.folder / "picture.png").read_bytes())}
            )
        else:
            answer = http.post(path, json={"model": name, **OPENAI[path]})
        if not has_ability(FAMILIES, manifest, OPENAI_ABILITIES[path]):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wrong_task"), (name, answer.text)
            continue
        answered.append(name)
        if answer.status_code != 200:  # what the bundle lacks, and not the door
            assert path in ("/v1/chat/completions", "/v1/responses"), (name, answer.text)
            assert answer.json()["error"]["code"] == "no_chat_template", (name, answer.text)
    assert answered or path == "/v1/audio/translations"  # which test_served_speech.py has a model for


def test_openai_gives_one_segment_of_a_transcriber_without_times(doors: Doors, http: Any) -> None:
    audio = (doors.folder / "speech.wav").read_bytes()
    [name] = (one for one, manifest in doors.manifests.items() if manifest.task == Task.TRANSCRIPTION)

    def post(form: str) -> Any:
        data, files = {"model": name, "response_format": form}, {"file": ("speech.wav", audio)}
        return http.post("/v1/audio/transcriptions", data=data, files=files)

    verbose, subtitles = post("verbose_json").json(), post("srt")
    assert [(one["start"], one["text"].strip()) for one in verbose["segments"]] == [(0, verbose["text"])]
    assert verbose["segments"][0]["end"] <= round(verbose["duration"], 3) + 0.1
    assert (subtitles.status_code, subtitles.json()["error"]["param"]) == (400, "response_format")


def test_openai_embeds_with_the_prompt_of_an_embedder(doors: Doors, http: Any) -> None:
    body = {"model": "vectors", "input": "star"}
    plain, prompted, wrong = (
        http.post("/v1/embeddings", json={**body, **more})
        for more in ({}, {"prompt_name": "query"}, {"prompt_name": "nope"})
    )
    assert plain.json()["data"][0]["embedding"] != prompted.json()["data"][0]["embedding"]
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt_name")


COMMANDS: dict[str, tuple[str, ...]] = {
    "GenerateText": ("generate-text", "ROMEO:", "--max-new-tokens", "2", "--no-stream"),
    "StreamGenerateText": ("generate-text", "ROMEO:", "--max-new-tokens", "2"),
    "TranslateText": ("translate-text", "ein Hund", "--max-new-tokens", "2"),
    "StreamTranslateText": ("translate-text", "ein Hund", "--max-new-tokens", "2", "--stream"),
    "RewriteText": ("rewrite-text", "ein Hund", "--max-new-tokens", "2"),
    "StreamRewriteText": ("rewrite-text", "ein Hund", "--max-new-tokens", "2", "--stream"),
    "CaptionImage": ("caption", "picture.png", "--language", "en", "--max-new-tokens", "2"),
    "StreamCaptionImage": ("caption", "picture.png", "--language", "en", "--max-new-tokens", "2", "--stream"),
    "TranscribeSpeech": ("transcribe", "speech.wav", "--max-new-tokens", "2"),
    "StreamTranscribeSpeech": ("transcribe", "speech.wav", "--max-new-tokens", "2", "--stream"),
    "SynthesizeSpeech": ("speak", "one", "--max-duration", "0.1", "-o", "spoken.wav"),
    "StreamSynthesizeSpeech": ("speak", "one", "--max-duration", "0.1", "-o", "-"),
    "ClassifyText": ("classify-text", "goal"),
    "ClassifyTokens": ("classify-tokens", "goal", "--json"),
    "EmbedText": ("embed-text", "goal"),
    "ClassifyTokens pages": ("classify-tokens", "--pages", "page.json"),
    "EmbedText sparse": ("embed-text", "goal", "--sparse"),
    "EmbedText multi_vector": ("embed-text", "goal", "--multi-vector"),
    "ScoreText": ("score-text", "goal", "--query", "star"),
    "AnswerQuestion": ("answer-question", "who", "--context", "the Ada Lovelace"),
    "FillMask": ("fill-mask", "the [MASK] ."),
    "ClassifyImage": ("classify-image", "picture.png"),
    "ClassifyImage candidate_labels": ("classify-image", "picture.png", "--candidate-label", "dog"),
    "ClassifyAudio": ("classify-audio", "speech.wav"),
    "ClassifyVideo": ("classify-video", "picture.png", "picture.png"),
    "DetectObjects": ("detect-objects", "picture.png"),
    "ClassifyPixels": ("classify-pixels", "picture.png"),
    "EstimateDepth": ("estimate-depth", "picture.png"),
    "EmbedImage": ("embed-image", "picture.png"),
    "GenerateImage": ("generate-image", "-o", "drawn.png", "--step-count", "1"),
    "StreamGenerateImage": ("generate-image", "-o", "drawn.png", "--step-count", "1", "--progress", "1"),
    "SegmentImage": ("segment", "picture.png", "--point", "9,9"),
    "SegmentEverything": ("segment", "picture.png", "--everything", "--points-per-side", "1", "--min-stability", "0"),
    "RankImages": ("rank-images", "picture.png", "--query-image", "picture.png"),
    "RankImages query_text": ("rank-images", "picture.png", "--query-text", "goal"),
    "RankTexts": ("rank-texts", "goal", "star", "--query-text", "goal"),
    "RankTexts query_image": ("rank-texts", "goal", "star", "--query-image", "picture.png"),
    "InspectText": ("inspect-text", "goal", "--summary", "mean"),
    "InspectImage": ("inspect-image", "picture.png", "--summary", "mean"),
    "InspectGeneration": ("inspect-generation", "ROMEO:", "--summary", "mean"),
    "InspectTranslation": ("inspect-translation", "ein Hund", "--summary", "mean"),
    "PrepareImage model": ("prepare-image", "picture.png"),
}


@pytest.mark.parametrize("key", REQUESTS)
def test_the_command_line_answers_for_every_model_that_can(
    doors: Doors, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.chdir(doors.folder)
    for name, manifest in doors.manifests.items():
        if not has(asked_by(key), manifest, doors.manifests):
            continue
        if key.startswith("Inspect") and not any("attention" in each.graphs for each in manifest.variants.values()):
            continue
        ended = CliRunner().invoke(app, [*COMMANDS[key], "--model", name, "--server", doors.address])
        assert ended.exit_code == 0, (name, ended.output)
        assert ended.stdout_bytes or key == "SegmentEverything", name
