"""MLServer's command and codecs."""
# /// script
# dependencies = ["mlserver==1.7.1"]
# ///

import json
from pathlib import Path

import grpc
from cases import GRPC, HTTP, called, case, run
from mlserver.codecs import StringCodec
from mlserver.grpc.converters import ModelInferRequestConverter, ModelInferResponseConverter
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub
from mlserver.types import InferenceRequest, InferenceResponse

TEXTS = ["Oil prices fall as the storm weakens", "The team won the match"]


@case("batch by REST")
def batch():
    asked = InferenceRequest(inputs=[StringCodec.encode_input("text", TEXTS)])
    Path("asked.jsonl").write_text(asked.model_dump_json(exclude_none=True) + "\n")
    files = ["-i", "asked.jsonl", "-o", "answered.jsonl"]
    called("mlserver", "infer", "-u", HTTP.removeprefix("http://"), "-m", "ag-news", *files)
    [line] = Path("answered.jsonl").read_text().splitlines()
    check(InferenceResponse.model_validate(json.loads(line)))


@case("gRPC, by its converters")
def by_grpc():
    asked = InferenceRequest(inputs=[StringCodec.encode_input("text", TEXTS)])
    with grpc.insecure_channel(GRPC) as channel:
        stub = GRPCInferenceServiceStub(channel)
        check(
            ModelInferResponseConverter.to_types(
                stub.ModelInfer(ModelInferRequestConverter.from_types(asked, model_name="ag-news"), timeout=30)
            )
        )


def check(answer):
    labels = next(output for output in answer.outputs if output.name == "label")
    assert len(StringCodec.decode_output(labels)) % len(TEXTS) == 0


run()
