"""What a model can do it does through every door that has a call for it: one table, every model, every way to ask.

The doors: gRPC, Connect, the Open Inference Protocol over gRPC and over HTTP, OpenAI's API, the command line. What the
page's panels offer is held by `tests/repository/test_ways_in.py`, and which deployment Ray asks by
`tests/ray/test_placement.py`.
"""

from __future__ import annotations

import json
from typing import Any

import grpc
import httpx2
import pytest
from google.protobuf.json_format import MessageToJson
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status
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

from .conftest import Doors

METHODS = {
    method.name: (f"/{service.full_name}/{method.name}", method)
    for service in service_descriptors()
    for method in service.methods
}
IMAGE, AUDIO = object(), object()
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
    "EmbedText": {"texts": ["goal"]},
    "ScoreText": {"texts": ["goal"]},
    "ClassifyImage": {"images": [IMAGE]},
    "ClassifyImage candidate_labels": {"images": [IMAGE], "candidate_labels": ["dog", "cat"]},
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
    file = {id(IMAGE): "picture.png", id(AUDIO): "speech.wav"}.get(id(value))
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


TENSORS: dict[Task, tuple[str, Any, dict[str, Any]]] = {
    Task.GENERATION: ("text", b"ROMEO:", {"max_new_tokens": 2}),
    Task.TRANSLATION: ("text", b"ein Hund", {"max_new_tokens": 2}),
    Task.TEXT_TO_TEXT: ("text", b"ein Hund", {"max_new_tokens": 2}),
    Task.CAPTIONING: ("image", IMAGE, {"max_new_tokens": 2, "target_language": "en"}),
    Task.TRANSCRIPTION: ("audio", AUDIO, {"max_new_tokens": 2}),
    Task.SPEECH_SYNTHESIS: ("text", b"one", {"max_duration_seconds": 0.1}),
    Task.TEXT_CLASSIFICATION: ("text", b"goal", {}),
    Task.TOKEN_CLASSIFICATION: ("text", b"goal", {}),
    Task.TEXT_EMBEDDING: ("text", b"goal", {}),
    Task.TEXT_SCORING: ("text", b"goal", {}),
    Task.IMAGE_CLASSIFICATION: ("image", IMAGE, {}),
    Task.IMAGE_EMBEDDING: ("image", IMAGE, {}),
    Task.SEGMENTATION: ("image", IMAGE, {"points_per_side": 1, "min_predicted_iou": 0.0, "min_stability": 0.0}),
    Task.IMAGE_GENERATION: ("prompt", b"", {"step_count": 1}),
}
"""A tensor and parameters for every task."""


def test_tensors_answer_for_every_model_over_grpc_and_http(doors: Doors, channel: Any, http: Any) -> None:
    stub = oip_grpc.GRPCInferenceServiceStub(channel)
    for name, manifest in doors.manifests.items():
        tensor, element, parameters = TENSORS[manifest.task]
        data = filled(element, doors)
        raw = len(data).to_bytes(4, "little") + data
        assert stub.ModelReady(oip_pb.ModelReadyRequest(name=name)).ready, name
        metadata = stub.ModelMetadata(oip_pb.ModelMetadataRequest(name=name))
        outputs = {each.name for each in metadata.outputs}
        assert outputs, name
        assert tensor in {each.name for each in metadata.inputs}, name
        assert len(stub.ModelConfig(oip_pb.ModelConfigRequest(name=name)).config.output) == len(outputs)

        request = oip_pb.ModelInferRequest(model_name=name, raw_input_contents=[raw])
        request.inputs.add(name=tensor, datatype="BYTES", shape=[1])
        for parameter, value in parameters.items():
            kinds = {str: "string_param", int: "int64_param", float: "double_param"}
            setattr(request.parameters[parameter], kinds[type(value)], value)
        answer = stub.ModelInfer(request)
        assert {each.name for each in answer.outputs} == outputs, name
        for described, given in zip(metadata.outputs, answer.outputs, strict=True):
            assert (described.name, described.datatype) == (given.name, given.datatype), name
            assert all(length in (-1, own) for length, own in zip(described.shape, given.shape, strict=True)), given
        *parts, last = stub.ModelStreamInfer(iter([request]))
        assert not last.error_message, (name, last.error_message)
        assert last.infer_response.parameters["triton_final_response"].bool_param
        if stub.ModelConfig(oip_pb.ModelConfigRequest(name=name)).config.model_transaction_policy.decoupled:
            assert parts, name

        assert http.get(f"/v2/models/{name}/ready").json() == {"ready": True}
        assert {each["name"] for each in http.get(f"/v2/models/{name}").json()["outputs"]} == outputs
        size = {"binary_data_size": len(raw)}
        head = json.dumps(
            {
                "inputs": [{"name": tensor, "datatype": "BYTES", "shape": [1], "parameters": size}],
                "parameters": {**parameters, "binary_data_output": True},
            }
        ).encode()
        headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
        answered = http.post(f"/v2/models/{name}/infer", content=head + raw, headers=headers)
        assert answered.status_code == 200, (name, answered.text)
        length = int(answered.headers["inference-header-content-length"])
        assert {each["name"] for each in json.loads(answered.content[:length])["outputs"]} == outputs


def test_files_are_no_texts_in_json(doors: Doors, http: Any) -> None:
    text = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["one"]}
    body = {"inputs": [text], "parameters": {"max_duration_seconds": 0.1}}
    answer = http.post("/v2/models/telephone-speech/infer", json=body)
    assert answer.status_code == 400
    assert "outputs: have audio, whose elements are files; name it with binary_data" in answer.json()["error"]
    body["outputs"] = [{"name": "duration"}, {"name": "seed"}]
    assert http.post("/v2/models/telephone-speech/infer", json=body).status_code == 200


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
    "/v1/images/generations": {"prompt": "", "step_count": 1},
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
    "ScoreText": ("score-text", "goal"),
    "ClassifyImage": ("classify-image", "picture.png"),
    "ClassifyImage candidate_labels": ("classify-image", "picture.png", "--candidate-label", "dog"),
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
