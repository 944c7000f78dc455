"""KServe's SDK, REST v1 and v2, and gRPC."""
# /// script
# dependencies = ["kserve==0.21.0"]
# ///

from cases import GRPC, HTTP, case, run
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

TEXT = "Oil prices fall as the storm weakens"


def request():
    text = InferInput("text", [1], "BYTES", [TEXT])
    return InferRequest("ag-news", [text])


@case("REST v2")
async def rest():
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        assert await client.is_server_live(HTTP)
        assert await client.is_server_ready(HTTP)
        assert await client.is_model_ready(HTTP, "ag-news")
        answer = await client.infer(HTTP, request(), model_name="ag-news")
        assert "label" in [output.name for output in answer.outputs]


@case("REST v1")
async def first_protocol():
    async with InferenceRESTClient(RESTConfig(protocol="v1")) as client:
        answer = await client.infer(HTTP, {"instances": [TEXT]}, model_name="ag-news")
        assert len(answer["predictions"]) == 1


@case("gRPC")
async def by_grpc():
    async with InferenceGRPCClient(GRPC) as client:
        assert await client.is_server_ready()
        assert await client.is_model_ready("ag-news")
        answer = await client.infer(request())
        assert "label" in [output.name for output in answer.outputs]


run()
