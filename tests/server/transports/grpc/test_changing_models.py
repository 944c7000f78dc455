"""ModelService: models are loaded, replaced, unloaded and routed while calls are answered."""

import asyncio
import shutil

import grpc
import pytest
import tiny_bundles
from rpc_failures import failure_of
from waiting import until

from headway.v1 import model_service_pb2 as pb
from headway.v1 import text_classification_service_pb2 as texts_pb
from headway_server.serving.abilities import Effect
from headway_server.tasks.table import RPCS


@pytest.fixture
async def serving(serve, tmp_path):
    """A server whose store the test may change; it looks there only when asked."""
    tiny_bundles.write_topic_bundle(tmp_path)
    async with serve(tmp_path, versions={"poll_interval": 0}) as started:
        yield started


async def version_that_answers(serving, model: str = "topics", version: str = "") -> str:
    request = texts_pb.ClassifyTextRequest(texts=["goal team"], model=model, model_version=version)
    return (await serving.texts.ClassifyText(request)).model.version


async def bundles(serving) -> dict[str, int]:
    listing = await serving.models.ListBundles(pb.ListBundlesRequest())
    return {f"{bundle.name}/{bundle.version}": bundle.state for bundle in listing.bundles}


async def test_a_version_is_loaded_routed_and_unloaded(serving, tmp_path):
    tiny_bundles.write_topic_bundle(tmp_path, version="2")
    answer = await serving.models.LoadModel(pb.LoadModelRequest(model="topics"))
    assert (answer.model.name, answer.model.version) == ("topics", "2")
    assert await version_that_answers(serving) == "2"
    kept = await serving.models.SetRoute(pb.SetRouteRequest(model="topics", default_version="1"))
    assert kept == pb.SetRouteResponse(routes=[pb.Route(model="topics", default_version="1")])
    assert await version_that_answers(serving) == "1"
    assert await version_that_answers(serving, version="2") == "2"
    await serving.models.SetRoute(
        pb.SetRouteRequest(model="topics", default_version="1", canary_version="2", canary_share=1.0)
    )
    assert await version_that_answers(serving) == "2"
    named = await serving.models.SetAlias(pb.SetAliasRequest(alias="stable", model="topics", model_version="1"))
    assert named == pb.SetAliasResponse(aliases=[pb.Alias(alias="stable", model="topics", model_version="1")])
    assert await version_that_answers(serving, "stable") == "1"
    listing = await serving.models.ListBundles(pb.ListBundlesRequest())
    assert list(listing.routes) == [pb.Route(model="topics", default_version="1", canary_version="2", canary_share=1.0)]
    assert list(listing.aliases) == [pb.Alias(alias="stable", model="topics", model_version="1")]
    await serving.models.UnloadModel(pb.UnloadModelRequest(model="topics", model_version="2"))
    assert await version_that_answers(serving) == "1"
    assert await bundles(serving) == {"topics/1": pb.BUNDLE_STATE_READY, "topics/2": pb.BUNDLE_STATE_AVAILABLE}
    assert await serving.models.SetAlias(pb.SetAliasRequest(alias="stable")) == pb.SetAliasResponse()
    assert len((await serving.models.SetRoute(pb.SetRouteRequest(model="topics"))).routes) == 0
    failure = await failure_of(serving.models.SetAlias(pb.SetAliasRequest(alias="stable")))
    assert failure.code is grpc.StatusCode.NOT_FOUND


async def test_the_store_is_scanned_on_request(serving, tmp_path):
    tiny_bundles.write_colour_bundle(tmp_path)
    folder = tiny_bundles.write_topic_bundle(tmp_path, version="2").path
    (folder / "model.onnx").unlink()
    response = await serving.models.ScanStore(pb.ScanStoreRequest())
    assert list(response.bundles) == [
        pb.BundleStatus(name="colours", version="1", state=pb.BUNDLE_STATE_READY),
        pb.BundleStatus(name="topics", version="2", state=pb.BUNDLE_STATE_INCOMPLETE, reason="model.onnx is missing"),
    ]
    shutil.rmtree(tmp_path)
    failure = await failure_of(serving.models.ScanStore(pb.ScanStoreRequest()))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STORE_UNAVAILABLE")
    listing = await serving.models.ListBundles(pb.ListBundlesRequest())
    assert listing.store_problem == "the store cannot be read (No such file or directory)"
    assert await version_that_answers(serving) == "1"


async def test_a_bundle_that_cannot_be_loaded_is_refused_with_its_reason_and_without_the_stores_place(
    serving, tmp_path
):
    (tiny_bundles.write_topic_bundle(tmp_path, version="2").path / "extra.bin").write_bytes(b"x")
    failure = await failure_of(serving.models.LoadModel(pb.LoadModelRequest(model="topics", model_version="2")))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BUNDLE_REJECTED")
    assert failure.message.startswith("topics/2: extra.bin is not in the manifest")
    assert str(tmp_path) not in failure.message
    assert await version_that_answers(serving) == "1"


@pytest.mark.parametrize(
    ("method", "request_", "code", "field"),
    [
        ("LoadModel", pb.LoadModelRequest(), "INVALID_ARGUMENT", "model"),
        ("LoadModel", pb.LoadModelRequest(model="../etc"), "INVALID_ARGUMENT", "model"),
        ("LoadModel", pb.LoadModelRequest(model="topics", model_version="../1"), "INVALID_ARGUMENT", "model_version"),
        ("LoadModel", pb.LoadModelRequest(model="topics", model_version="3"), "NOT_FOUND", None),
        ("UnloadModel", pb.UnloadModelRequest(), "NOT_FOUND", None),
        ("UnloadModel", pb.UnloadModelRequest(model="topics", model_version="3"), "NOT_FOUND", None),
        ("SetRoute", pb.SetRouteRequest(), "NOT_FOUND", None),
        ("SetRoute", pb.SetRouteRequest(model="topics", default_version="3"), "NOT_FOUND", None),
        ("SetRoute", pb.SetRouteRequest(model="topics", default_version="A"), "INVALID_ARGUMENT", "default_version"),
        ("SetRoute", pb.SetRouteRequest(model="topics", canary_share=0.5), "INVALID_ARGUMENT", "canary_share"),
        (
            "SetRoute",
            pb.SetRouteRequest(model="topics", canary_version="1", canary_share=float("nan")),
            "INVALID_ARGUMENT",
            "canary_share",
        ),
        ("SetAlias", pb.SetAliasRequest(model="topics"), "INVALID_ARGUMENT", "alias"),
        ("SetAlias", pb.SetAliasRequest(alias="a", model="../b"), "INVALID_ARGUMENT", "model"),
        ("SetAlias", pb.SetAliasRequest(alias="a", model_version="1"), "INVALID_ARGUMENT", "model_version"),
    ],
)
async def test_a_change_that_means_nothing_is_refused(serving, method, request_, code, field):
    failure = await failure_of(getattr(serving.models, method)(request_))
    assert (failure.code.name, failure.field) == (code, field)
    assert await bundles(serving) == {"topics/1": pb.BUNDLE_STATE_READY}


async def test_calls_go_on_without_a_failure_while_their_model_is_replaced(serving, tmp_path):
    versions: list[str] = []
    is_over = asyncio.Event()

    async def keep_asking() -> None:
        while not is_over.is_set():
            versions.append(await version_that_answers(serving))

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(keep_asking())
        for version in ("2", "3"):
            tiny_bundles.write_topic_bundle(tmp_path, version=version)
            await serving.models.LoadModel(pb.LoadModelRequest(model="topics"))
            await serving.models.LoadModel(pb.LoadModelRequest(model="topics"))
            await until(lambda version=version: versions[-1] == version)
        await serving.models.UnloadModel(pb.UnloadModelRequest(model="topics", model_version="3"))
        await until(lambda: versions[-1] == "2")
        is_over.set()
    assert set(versions) == {"1", "2", "3"}


def test_every_rpc_that_is_not_a_question_is_for_administrators():
    service = pb.DESCRIPTOR.services_by_name["ModelService"]
    for method in service.methods:
        is_question = method.name.startswith(("List", "Get"))
        assert RPCS[method.name].effect is (Effect.LOOKS if is_question else Effect.CHANGES), method.name
