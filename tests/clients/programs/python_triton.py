"""Triton's client, gRPC and HTTP."""
# /// script
# dependencies = ["tritonclient[all]==2.73.0"]
# ///

from queue import Queue

import numpy as np
import tritonclient.grpc as by_grpc
import tritonclient.grpc.aio as by_aio
import tritonclient.http as by_http
from cases import GRPC, HTTP, VECTORS, case, refused, run

TEXT = np.array([b"Oil prices fall as the storm weakens"], object)
DOORS = {
    "gRPC": (by_grpc, by_grpc.InferenceServerClient(GRPC)),
    "HTTP": (by_http, by_http.InferenceServerClient(HTTP.removeprefix("http://"))),
}


def text_of(door, text=TEXT):
    given = door.InferInput("text", list(text.shape), "BYTES")
    given.set_data_from_numpy(text)
    return given


def probe(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("ag-news")


def describe(client):
    client.get_server_metadata()
    client.get_model_metadata("ag-news")
    client.get_model_config("ag-news")
    client.get_inference_statistics("ag-news")
    assert client.get_model_repository_index()


def infer(door, client):
    answer = client.infer("ag-news", [text_of(door)], outputs=[door.InferRequestedOutput("label")])
    assert answer.as_numpy("label").shape[0] == 1
    answer = client.infer(VECTORS, [text_of(door, np.array([b"a cat", b"a dog"], object))])
    assert answer.as_numpy("embedding").shape[0] == 2


def refuse(door, client, error):
    assert "none" in str(refused(error, lambda: client.infer("none", [text_of(door)])))


for name, (door, client) in DOORS.items():
    case(f"{name}: health")(lambda client=client: probe(client))
    case(f"{name}: metadata, configuration, statistics, repository")(lambda client=client: describe(client))
    case(f"{name}: infer")(lambda door=door, client=client: infer(door, client))
    case(f"{name}: errors")(lambda door=door, client=client: refuse(door, client, by_grpc.InferenceServerException))


@case("gRPC: stream")
def stream():
    client, answers = by_grpc.InferenceServerClient(GRPC), Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(
        "shakespeare", [text_of(by_grpc, np.array([b"ROMEO:"], object))], parameters={"max_new_tokens": 20}
    )
    client.stop_stream()
    pieces = [answers.get() for _ in range(answers.qsize())]
    assert not any(error for _, error in pieces), pieces
    assert b"".join(result.as_numpy("generated_text")[0] for result, _ in pieces)


@case("gRPC: asyncio")
async def asynchronous():
    async with by_aio.InferenceServerClient(GRPC) as client:
        answer = await client.infer("ag-news", [text_of(by_grpc)])
        assert answer.as_numpy("label").shape[0] == 1


run()
