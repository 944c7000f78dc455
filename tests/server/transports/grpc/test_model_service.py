"""ModelService through a real channel."""

import grpc
import pytest
import tiny_bundles
from rpc_failures import failure_of
from tiny_engine import make_decoder, make_generation_model

from headway.v1 import common_pb2
from headway.v1 import model_service_pb2 as pb
from headway.v1.common_pb2 import SamplingParameters
from headway.v1.generation_service_pb2 import GenerationParameters
from headway_server.bundles import Manifest, SamplingDefaults
from headway_server.services.models import ModelService
from headway_server.serving.host import ModelHost


async def test_models_are_listed_by_name_and_version_with_what_they_are(serving):
    response = await serving.models.ListModels(pb.ListModelsRequest())
    assert [(model.name, model.version) for model in response.models] == [("colours", "1"), ("topics", "1")]
    colours, topics = response.models
    assert (topics.task, topics.variant, topics.device) == ("text_classification", common_pb2.VARIANT_FP32, "cpu")
    assert (topics.max_input_token_count, topics.max_token_count) == (tiny_bundles.MAX_INPUT_TOKENS, 0)
    assert list(topics.labels) == list(tiny_bundles.TOPICS)
    assert (colours.task, colours.max_input_token_count) == ("image_classification", 0)
    figure = topics.quality[0]
    assert (figure.variant, figure.metric, figure.value, figure.example_count) == (
        common_pb2.VARIANT_FP32,
        "accuracy",
        99.5,
        200,
    )
    assert list(topics.capabilities) == ["classify_text", "embed_text", "rank_text", "inspect_text"]
    assert not response.rejected_bundles


async def test_models_are_listed_for_one_task(serving):
    response = await serving.models.ListModels(pb.ListModelsRequest(task="image_classification"))
    assert [model.name for model in response.models] == ["colours"]
    response = await serving.models.ListModels(pb.ListModelsRequest(task="translation"))
    assert not response.models


async def test_models_are_listed_that_can_do_something(serving):
    response = await serving.models.ListModels(pb.ListModelsRequest(capability="embed_text"))
    assert [model.name for model in response.models] == ["topics"]


@pytest.mark.parametrize("field", ["task", "capability"])
async def test_a_name_by_which_no_model_is_listed_is_refused_with_those_there_are(serving, field):
    failure = await failure_of(serving.models.ListModels(pb.ListModelsRequest(**{field: "nothing"})))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert "'nothing'; must be one of " in failure.message


async def test_a_model_comes_with_its_whole_manifest(serving):
    response = await serving.models.GetModel(pb.GetModelRequest(model="topics"))
    assert response.model.name == "topics"
    manifest = Manifest.model_validate_json(response.manifest_json)
    assert manifest.files["model.onnx"].size_bytes > 0


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (pb.GetModelRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GetModelRequest(model="nothing"), grpc.StatusCode.NOT_FOUND),
        (pb.GetModelRequest(model="topics", model_version="2"), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_a_model_that_is_not_there_is_refused(serving, request_, code):
    assert (await failure_of(serving.models.GetModel(request_))).code is code


async def test_what_a_call_need_not_set_is_told():
    defaults = SamplingDefaults(
        max_new_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.125,
    )
    service = ModelService(ModelHost([make_generation_model(make_decoder(), defaults=defaults)]))
    answer = await service.GetModel(pb.GetModelRequest(model="tiny-generation"), None)
    assert answer.model.default_parameters == GenerationParameters(
        max_new_tokens=9,
        sampling=SamplingParameters(temperature=0.5, top_k=4, top_p=0.75, min_p=0.25),
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.125,
    )
