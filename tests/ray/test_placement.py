"""Which deployment answers which call, for every RPC and every way to call it. Needs no Ray."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny_bundles
from google.protobuf.json_format import MessageToJson
from google.protobuf.message_factory import GetMessageClass

from headway.v1 import model_service_pb2
from headway_ray.placement import Placements, place
from headway_ray.requests import HttpRequest, joined
from headway_server.bundles import Task, read_manifest
from headway_server.errors import InvalidInputError, ModelNotFoundError, WrongTaskError
from headway_server.services import service_descriptors
from headway_server.serving.abilities import Ability, Scope
from headway_server.serving.families import has_ability, tasks_with
from headway_server.serving.host import read_store
from headway_server.settings import ServerSettings
from headway_server.tasks.table import FAMILIES, RPCS
from headway_server.transports.http import OPENAI_ABILITIES

MODELS = Path(__file__).parents[2] / "models"
METHODS = {
    method.name: (f"/{service.full_name}/{method.name}", method)
    for service in service_descriptors()
    for method in service.methods
}


OF_THE_SERVER = [name for name, rpc in RPCS.items() if rpc.asked is Scope.SERVER and not rpc.is_of_all]


def placements_of(store: Path, *, is_shared: bool = False) -> Placements:
    settings = ServerSettings(store=store)
    paths, routes = read_store(settings)
    bundles = ((path, read_manifest(store / path)) for path in paths)
    return place(bundles, routes, settings, is_shared=is_shared)


@pytest.fixture(scope="module")
def shipped() -> Placements:
    return placements_of(MODELS)


def chosen(placements: Placements, path: str, content_type: str = "application/json", body: bytes = b"{}") -> Any:
    """The deployment that a request over HTTP goes to, or the error that it is refused with."""
    request = HttpRequest(path=path, content_type=content_type, body=body)
    choice = placements.choose(*request.asked())
    if choice.refusal is not None:
        return choice.refusal.error
    names = [each.deployment for each in choice.placements]
    return names if len(names) > 1 else names[0]


def envelope(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


def bodies(name: str, /, **fields: Any) -> list[tuple[str, bytes]]:
    """A request in every way in which it travels over HTTP, by its content type."""
    message = GetMessageClass(METHODS[name][1].input_type)(**fields)
    data, text = message.SerializeToString(), MessageToJson(message).encode()
    return [
        ("application/json; charset=utf-8", text),
        ("application/json", MessageToJson(message, preserving_proto_field_name=True).encode()),
        ("application/proto", data),
        ("application/connect+json", envelope(text)),
        ("application/connect+proto", envelope(data)),
    ]


@pytest.mark.parametrize("name", [name for name, rpc in RPCS.items() if isinstance(rpc.asked, Ability)])
def test_a_call_without_a_model_goes_to_the_one_that_can_and_else_is_refused(shipped, name):
    """As a server with the same models does: several translate, and several images are embedded."""
    ability = RPCS[name].asked
    able = [model for model in shipped.models if has_ability(FAMILIES, model.bundle.manifest, ability)]
    taken = [model for model in able if ability.prefers(model.bundle.manifest, model.precision)]
    by_task = (
        [model for model in taken if model.bundle.manifest.task is task] for task in tasks_with(FAMILIES, ability)
    )
    preferred = next(filter(None, by_task), [])
    for content_type, body in bodies(name):
        found = chosen(shipped, METHODS[name][0], content_type, body)
        if not able:
            assert isinstance(found, WrongTaskError), (name, content_type)
        elif len(preferred) > 1:
            assert isinstance(found, InvalidInputError), (name, content_type)
            assert "is empty and several models can" in str(found)
        else:
            assert found == preferred[0].placement.deployment, (name, content_type)


@pytest.mark.parametrize("name", [name for name, rpc in RPCS.items() if isinstance(rpc.asked, Ability)])
def test_a_call_that_names_a_model_goes_to_it_or_hears_who_can(shipped, name):
    for model in shipped.models:
        manifest = model.bundle.manifest
        for content_type, body in bodies(name, model=manifest.name):
            found = chosen(shipped, METHODS[name][0], content_type, body)
            asked = RPCS[name].asked_by({"model": manifest.name}.get)
            if has_ability(FAMILIES, manifest, asked):
                assert found == model.placement.deployment, (name, manifest.name, content_type)
            else:
                assert isinstance(found, WrongTaskError), (name, manifest.name, content_type)
                assert f"is for {manifest.task} and cannot {asked.words}" in str(found)


def test_what_a_field_asks_for_is_followed(shipped):
    space = shipped.find_named("clip-text", "").placement.deployment
    for name, fields in (
        ("ClassifyImage", {"candidate_labels": ["a dog"]}),
        ("RankImages", {"query_text": "a dog"}),
        ("RankTexts", {"query_image": b"image", "texts": ["a"]}),
    ):
        for content_type, body in bodies(name, **fields):
            assert chosen(shipped, METHODS[name][0], content_type, body) == space, (name, content_type)
    for source, target, model in (("de", "en", "multi30k-de-en"), ("en", "de", "multi30k-en-de")):
        for content_type, body in bodies("TranslateText", source_language=source, target_language=target):
            assert chosen(shipped, METHODS["TranslateText"][0], content_type, body) == model, content_type


@pytest.mark.parametrize("path", OPENAI_ABILITIES)
def test_calls_of_openai_go_to_the_model_that_they_name_or_mean(shipped, path):
    ability = OPENAI_ABILITIES[path]
    for model in (model.bundle.manifest.name for model in shipped.models):
        sent = [("application/json", json.dumps({"model": model}).encode()), form(model)]
        for content_type, body in (*sent, form(f"{model}/1")):
            found = chosen(shipped, path, content_type, body)
            manifest = shipped.find_named(model, "").bundle.manifest
            if has_ability(FAMILIES, manifest, ability):
                assert found == shipped.find_named(model, "").placement.deployment, (path, content_type)
            else:
                assert isinstance(found, WrongTaskError), (path, content_type)
    able = [model for model in shipped.models if has_ability(FAMILIES, model.bundle.manifest, ability)]
    found = chosen(shipped, path, *form(None))
    assert found == shipped.find(ability, "", "").placement.deployment if able else isinstance(found, WrongTaskError)


def form(model: str | None, file: bytes = b"RIFF\xff\0\r\n" * 9) -> tuple[str, bytes]:
    """A form as OpenAI's clients send it, with a boundary in upper and lower case."""
    parts = {"file": file} | ({} if model is None else {"model": model.encode()})
    lines = b"".join(
        b'--aBcD\r\nContent-Disposition: form-data; name="' + name.encode() + b'"\r\n\r\n' + value + b"\r\n"
        for name, value in parts.items()
    )
    return "multipart/form-data; boundary=aBcD", lines + b"--aBcD--\r\n"


def test_tensors_go_to_the_model_of_their_path_in_json_and_in_binary(shipped):
    for model in shipped.models:
        name, deployment = model.bundle.manifest.name, model.placement.deployment
        for path in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1"):
            for end in ("", "/infer", "/ready", "/config", "/stats"):
                binary = "application/octet-stream", b'{"inputs": []}\xff\0\xfe'
                for content_type, body in (("application/json", b"{}"), ("", b""), binary):
                    assert chosen(shipped, path + end, content_type, body) == deployment, path + end
    assert isinstance(chosen(shipped, "/v2/models/nope/infer"), ModelNotFoundError)
    assert isinstance(chosen(shipped, "/v2/models/nope/ready"), str)  # which says no


def test_lists_are_asked_of_every_deployment_and_one_that_is_named_of_one(shipped):
    names = [each.deployment for each in shipped.all]
    assert len(names) == len({model.placement for model in shipped.models}) == 14
    for path in ("/v1/models", "/v2/models/stats", "/v2/repository/index"):
        assert chosen(shipped, path) == names
    for name in ("ListModels", "ListBundles", "RepositoryIndex", "ModelStatistics"):
        for content_type, body in bodies(name):
            assert chosen(shipped, METHODS[name][0], content_type, body) == names
    for content_type, body in bodies("ModelStatistics", name="ag-news"):
        assert chosen(shipped, METHODS["ModelStatistics"][0], content_type, body) == "ag-news"
    assert chosen(shipped, "/v1/models/caption/1") == chosen(shipped, "/v1/models/caption") == "caption"
    for predict in ("/v1/models/caption:predict", "/v1/models/caption/versions/1:predict"):
        assert chosen(shipped, predict, "application/json", b'{"instances": ["a"]}') == "caption"
    for content_type, body in bodies("GetModel", model="caption"):
        assert chosen(shipped, METHODS["GetModel"][0], content_type, body) == "caption"


@pytest.mark.parametrize("name", OF_THE_SERVER)
def test_what_is_about_the_server_goes_to_one_deployment(shipped, name):
    for content_type, body in bodies(name):
        assert chosen(shipped, METHODS[name][0], content_type, body) == shipped.all[0].deployment


def test_what_is_no_request_goes_to_one_that_refuses_it(shipped):
    for content_type in ("application/json", "application/proto", "application/grpc-web", "text/plain", ""):
        for body in (b"", b"\xff\xff\xff", b"[" * 100_000, b"[1]", b"null"):
            for path in ("/headway.v1.CaptionService/CaptionImage", "/v1/audio/speech", "/", "/nope", "/v2/x"):
                assert chosen(shipped, path, content_type, body) is not None
    for content_type in ("multipart/form-data", "multipart/form-data; boundary=x"):
        assert chosen(shipped, "/v1/audio/transcriptions", content_type, b"\xff") == "telephone-transcriber"


def test_versions_and_aliases_mean_what_they_mean_to_a_server(tmp_path):
    tiny_bundles.write_topic_bundle(tmp_path, version="1")
    tiny_bundles.write_topic_bundle(tmp_path, version="2", task=Task.TEXT_EMBEDDING)
    tiny_bundles.write_colour_bundle(tmp_path)
    (tmp_path / "routes.json").write_text('{"aliases": {"news": {"model": "topics", "version": "1"}}}')
    placements = placements_of(tmp_path)
    path = METHODS["ClassifyText"][0]
    assert chosen(placements, path, body=b'{"model": "news"}') == "topics"
    assert chosen(placements, path, body=b'{"model": "topics"}') == "topics"
    wrong = chosen(placements, path, body=b'{"model": "topics", "modelVersion": "2"}')
    assert "topics/2 is for text_embedding" in str(wrong)
    assert "has no version '3'" in str(chosen(placements, path, body=b'{"model": "topics", "model_version": "3"}'))
    shared = placements_of(tmp_path, is_shared=True)
    assert {(each.deployment, each.model_id) for each in shared.all} == {("models", "topics"), ("models", "colours")}


def test_what_proxies_fetch_is_small_and_says_the_same(shipped):
    data = pickle.dumps(shipped)
    assert len(data) < 3_000 * len(shipped.models)
    again = pickle.loads(data)
    assert chosen(again, METHODS["CaptionImage"][0]) == "caption"


def test_answers_of_several_are_joined_and_what_they_share_stands_once():
    pb = model_service_pb2
    path = "/headway.v1.ModelService/ListBundles"
    route = pb.Route(model="a", default_version="2")
    answers = [
        pb.ListBundlesResponse(bundles=[pb.BundleStatus(name=name, version="1")], routes=[route]) for name in "ab"
    ]
    expected = pb.ListBundlesResponse(bundles=[*answers[0].bundles, *answers[1].bundles], routes=[route])
    written = [answer.SerializeToString() for answer in answers]
    assert pb.ListBundlesResponse.FromString(joined(path, "application/proto", written)) == expected
    texts = [MessageToJson(answer).encode() for answer in answers]
    assert json.loads(joined(path, "application/json", texts)) == json.loads(MessageToJson(expected))
    lists = [b'{"object": "list", "data": [1], "models": ["a"]}', b'{"object": "list", "data": [2], "models": ["b"]}']
    whole = {"object": "list", "data": [1, 2], "models": ["a", "b"]}
    assert json.loads(joined("/v1/models", "application/json", lists)) == whole
    assert json.loads(joined("/v2/repository/index", "application/json", [b"[1]", b"[2]"])) == [1, 2]
