"""The Open Inference Protocol over HTTP: JSON as anybody sends it, and Triton's own client with binary data."""

import asyncio
import base64
import json
import tracemalloc

import numpy as np
import pytest
from triton_client import TritonError, triton_process

from headway_server.errors import InvalidInputError
from headway_server.transports.http.open_inference import InputPart, to_raw

MODEL = "/v2/models/topics"
TEXT = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["star goal atom", "goal"]}
IDS = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [[4, 5, 6]]}


@pytest.fixture(scope="module")
def triton():
    pytest.importorskip("geventhttpclient")
    with triton_process() as call:
        yield call


async def infer(serving, *, status=200, path=f"{MODEL}/infer", **body):
    answer = await serving.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def outputs(answer):
    return {output["name"]: output for output in answer["outputs"]}


async def test_models_are_described_and_answer_tensors_with_tensors(serve):
    async with serve() as serving:
        get = serving.client.get
        assert (await get("/v2/health/live")).json() == {"live": True}
        assert (await get("/v2/health/ready")).json() == {"ready": True}
        assert (await get(f"{MODEL}/ready")).json() == {"ready": True}
        none = await get("/v2/models/none/ready")
        assert (none.status_code, none.json()) == (400, {"ready": False})
        assert (await get("/v2")).json()["name"] == "headway"
        described = (await get(f"{MODEL}/versions/1")).json()
        assert described["versions"] == ["1"]
        assert described["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": [-1]}
        assert (await get(f"{MODEL}/config")).json()["input"][0]["data_type"] == "TYPE_STRING"
        answer = await infer(serving, id="7", inputs=[TEXT], parameters={"top_k": 1})
        assert (answer["model_name"], answer["model_version"], answer["id"]) == ("topics", "1", "7")
        found = outputs(answer)
        assert found["label"] == {"name": "label", "datatype": "BYTES", "shape": [2, 1], "data": ["science", "sports"]}
        assert found["probability"]["datatype"] == "FP32"
        assert all(0 < value <= 1 for value in found["probability"]["data"])
        assert found["truncated"]["data"] == [False, False]
        typed = (
            await serving.client.post(
                "/inference.GRPCInferenceService/ModelInfer",
                json={
                    "modelName": "topics",
                    "inputs": [
                        {
                            "name": "text",
                            "shape": [2],
                            "datatype": "BYTES",
                            "contents": {"bytesContents": ["c3RhciBnb2FsIGF0b20=", "Z29hbA=="]},
                        }
                    ],
                    "parameters": {"top_k": {"int64Param": 1}},
                },
            )
        ).json()
        values = next(o for o in typed["outputs"] if o["name"] == "probability")["contents"]["fp32Contents"]
        assert found["probability"]["data"] == pytest.approx(values)
        answer = await infer(serving, path=f"{MODEL}/versions/1/infer", inputs=[IDS], outputs=[{"name": "token_count"}])
        assert outputs(answer) == {
            "token_count": {"name": "token_count", "datatype": "INT64", "shape": [1], "data": [3]}
        }
        stats = (await get("/v2/models/stats")).json()["model_stats"]
        assert {one["name"] for one in stats} == {"colours", "tiny-generation", "topics"}
        index = (await serving.client.post("/v2/repository/index", json={"ready": True})).json()
        assert {"name": "topics", "version": "1", "state": "READY", "reason": ""} in index


async def test_a_prompt_is_continued(serve):
    async with serve() as serving:
        text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["the cat"]}
        answer = await infer(
            serving,
            path="/v2/models/tiny-generation/infer",
            inputs=[text],
            parameters={"max_new_tokens": 5, "seed": 2**64 - 1},
        )
        assert outputs(answer)["new_token_count"]["data"] == [5]
        assert outputs(answer)["seed"] == {"name": "seed", "datatype": "UINT64", "shape": [1], "data": [2**64 - 1]}


async def test_what_kserves_and_mlservers_clients_add_changes_no_answer(serve):
    body = {"inputs": [TEXT]}
    added = {
        "model_name": "topics",
        "model_version": "1",
        "parameters": {"content_type": "pd"},
        "inputs": [TEXT | {"parameters": {"content_type": "str"}}],
    }
    encoded = TEXT | {"parameters": {"content_type": "base64"}}
    encoded["data"] = [base64.b64encode(text.encode()).decode() for text in TEXT["data"]]
    listed = TEXT | {"parameters": {"content_type": "hg_jsonlist"}, "data": list(map(json.dumps, TEXT["data"]))}
    async with serve() as serving:
        plain, more, decoded, loaded = [
            (await serving.client.post("/v2/models/topics/infer", json=one)).json()["outputs"]
            for one in (body, added, {"inputs": [encoded]}, {"inputs": [listed]})
        ]
    assert plain == more == decoded == loaded


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("systemsharedmemory/status", "send the elements in the request"),
        ("systemsharedmemory/region/mine/register", "send the elements in the request"),
        ("cudasharedmemory/region/mine/unregister", "send the elements in the request"),
        ("trace/setting", "start the server with --trace-endpoint"),
        ("models/topics/trace/setting", "start the server with --trace-endpoint"),
        ("logging", "start the server with --log-level"),
    ],
)
async def test_extensions_that_are_not_offered_are_refused_with_what_to_do(serve, method, path, words):
    async with serve() as serving:
        answer = await serving.client.request(method, f"/v2/{path}", json=None if method == "GET" else {"any": 1})
    assert answer.status_code == 501
    assert words in answer.json()["error"]


WRONG = [
    ({"inputs": []}, 400, "text"),
    ({}, 400, "inputs: is missing"),
    ({"inputs": [TEXT], "input": 1}, 400, "input: is not supported"),
    ({"inputs": [TEXT | {"shape": [3]}]}, 400, "inputs[0].data: has 2 elements, and the shape [3] 3"),
    ({"inputs": [TEXT | {"shape": [-1]}]}, 400, "inputs[0].shape[0]: "),
    ({"inputs": [TEXT | {"data": ["a", 5]}]}, 400, "inputs[0].data: has an element that is not a string"),
    ({"inputs": [TEXT | {"data": None}]}, 400, "inputs[0].data: is missing"),
    *(
        ({"inputs": [each | {"datatype": name}]}, 400, f"inputs[0].datatype: is {name!r}; must be one of BOOL, UINT8")
        for name in ("OBJECT", "STR", "COMPLEX", "COMPLEX64", "VOID", "DATETIME64", "INT128", "STRING", "int64", "")
        for each in (TEXT, IDS, IDS | {"data": None, "parameters": {"binary_data_size": 0}})
    ),
    ({"inputs": [IDS | {"datatype": "BF16"}]}, 400, "inputs[0].data: of BF16 has no form in JSON; send it in binary"),
    ({"inputs": [IDS | {"datatype": "FP32"}]}, 400, "inputs[0].datatype: is 'FP32'; input_ids must be INT64 or"),
    ({"inputs": [TEXT | {"name": "words"}]}, 400, "inputs[0].name: is 'words'; the model reads text"),
    (
        {"inputs": [TEXT | {"parameters": {"shared_memory_region": "a"}}]},
        400,
        "has 'shared_memory_region'; shared memory is not offered; send",
    ),
    (
        {"inputs": [TEXT | {"data": None, "parameters": {"shared_memory_region": "a", "shared_memory_byte_size": 9}}]},
        400,
        "inputs[0].parameters: has 'shared_memory_",
    ),
    (
        {"inputs": [TEXT | {"parameters": {"content_type": "datetime"}}]},
        400,
        "is 'datetime'; must be one of np, pd, str, base64, hg_jsonlist",
    ),
    ({"inputs": [TEXT | {"parameters": {"content_type": "hg_jsonlist"}}]}, 400, "inputs[0]: is not in hg_jsonlist"),
    ({"inputs": [IDS | {"parameters": {"content_type": "hg_jsonlist"}}]}, 400, "is hg_jsonlist, which is for BYTES"),
    ({"inputs": [TEXT], "parameters": {"sequence_id": 7}}, 400, "parameters.sequence_id: sequences are not offered"),
    ({"inputs": [TEXT | {"parameters": {"content_type": "base64"}}]}, 400, "inputs[0]: is not in base64"),
    ({"inputs": [TEXT], "model_name": "other"}, 400, "model_name: is 'other', and the path has"),
    ({"inputs": [TEXT | {"parameters": {"binary_data_size": 5}}]}, 400, "binary_data_size: is 5"),
    ({"inputs": [IDS | {"data": [[4, 5], [6]]}]}, 400, "its rows differ"),
    ({"inputs": [IDS | {"data": [4, 5.5, 6]}]}, 400, "inputs[0].data: has an element that is not of INT64"),
    ({"inputs": [IDS | {"data": [4, True, "6"]}]}, 400, "inputs[0].data: has an element that is not of INT64"),
    ({"inputs": [IDS | {"data": ["x" * 10_000] + [""] * 9_999, "shape": [10_000]}]}, 400, "that is not of INT64"),
    ({"inputs": [IDS | {"data": [4, None, 6]}]}, 400, "inputs[0].data: has an element that is not of INT64"),
    ({"inputs": [IDS | {"data": [4, 5, 2**70]}]}, 400, "inputs[0].data: has an element that is not of INT64"),
    ({"inputs": [IDS | {"datatype": "INT8", "data": [4, 5, 200]}]}, 400, "not of INT8"),
    ({"inputs": [TEXT], "outputs": [{"name": "logits"}]}, 400, "outputs[0].name: is 'logits'"),
    (
        {"inputs": [TEXT], "outputs": [{"name": "label", "parameters": {"classification": 3}}]},
        400,
        "classification is not offered; ask for the outputs label and probability",
    ),
    ({"inputs": [TEXT], "parameters": {"top_p": 1}}, 400, "parameters.top_p: is unknown"),
    ({"inputs": [TEXT], "parameters": {"top_k": 2**80}}, 400, "more than 64 bits"),
    ({"inputs": [TEXT], "parameters": {"top_k": [1]}}, 400, "parameters.top_k: must be true, false"),
]


async def test_what_is_wrong_is_named(serve):
    async with serve() as serving:
        for body, status, message in WRONG:
            answer = await infer(serving, status=status, **body)
            assert message in answer["error"], (body, answer)
        answer = await infer(serving, status=404, path="/v2/models/none/infer", inputs=[TEXT])
        assert answer["error"].startswith("model 'none' is not loaded")
        assert (await serving.client.get("/v2/models/none")).status_code == 404
        for body in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
            answer = await serving.client.post(f"{MODEL}/infer", content=body)
            assert answer.status_code == 400, (body[:20], answer.text)
        for length in ("-1", "5000", "x", "9" * 5000):
            headers = {"inference-header-content-length": length}
            answer = await serving.client.post(f"{MODEL}/infer", content=b"{}", headers=headers)
            assert "inference-header-content-length" in answer.json()["error"]
        body = json.dumps({"inputs": [TEXT]}).encode()
        headers = {"inference-header-content-length": str(len(body))}
        answer = await serving.client.post(f"{MODEL}/infer", content=body + b"more", headers=headers)
        assert "leave 4 bytes behind the JSON" in answer.json()["error"]


async def test_texts_in_a_tensor_of_numbers_take_no_more_than_they_measure():
    part = InputPart(name="input_ids", shape=[9_000], datatype="INT64", data=["x" * 9_000, *[""] * 8_999])
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match=r"data: has an element that is not of INT64"):
            to_raw("data", part)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


async def test_parameters_of_the_repository_are_of_the_types_of_their_message(serve):
    async with serve() as serving:
        for value in (1.5, 2**63):
            body = {"parameters": {"config": value}}
            answer = await serving.client.post("/v2/repository/models/none/load", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"].startswith(f"parameters.config: is {value}; must be a truth value, a text")


async def test_a_page_of_another_origin_has_to_ask(serve):
    async with serve() as serving:
        body = json.dumps({"inputs": [TEXT]}).encode()
        assert (await serving.client.post(f"{MODEL}/infer", content=body)).status_code == 200
        headers = {"origin": "http://evil.example"}
        assert (await serving.client.post(f"{MODEL}/infer", content=body, headers=headers)).status_code == 415
        answer = await serving.client.post("/v2/repository/models/topics/unload", headers=headers)
        assert answer.status_code in (403, 415)


async def test_probes_say_no_while_the_server_drains(serve):
    async with serve() as serving:
        serving.server.calls.refuse_new()
        answer = await serving.client.get("/v2/health/ready")
        assert (answer.status_code, answer.json()) == (400, {"ready": False})
        assert (await serving.client.get("/v2/health/live")).status_code == 200
        assert (await serving.client.post(f"{MODEL}/infer", json={"inputs": [TEXT]})).status_code == 503


async def test_without_the_service_there_are_no_paths(serve):
    async with serve(open_inference=False) as serving:
        assert (await serving.client.get("/v2/health/live")).status_code == 404


async def test_tritons_own_client_over_http_gets_what_it_gets_over_grpc(serve, triton):
    texts = {"text": np.array([b"star goal atom", "goal \u00e4".encode()], object)}
    async with serve() as serving:

        def ask(name, *args, **options):
            return asyncio.to_thread(triton, serving.port, name, *args, **options)

        over_grpc = await asyncio.to_thread(triton, serving.grpc_port, "infer", "topics", texts)
        for binary in (True, False):
            arrays, response = await ask("infer_over_http", "topics", texts, binary=binary, request_id="9")
            assert response["id"] == "9"
            assert arrays.keys() == over_grpc.arrays.keys()
            for name, array in over_grpc.arrays.items():
                assert array.dtype == arrays[name].dtype
                assert (array == arrays[name]).all()
            wanted = {"label": False, "probability": True}
            arrays, response = await ask("infer_over_http", "topics", texts, binary=binary, outputs=wanted)
            assert ["data" in output for output in response["outputs"]] == [True, False]
            assert (arrays["probability"] == over_grpc.arrays["probability"]).all()
        assert await ask("ask_over_http", "is_server_live")
        assert await ask("ask_over_http", "is_server_ready")
        assert await ask("ask_over_http", "is_model_ready", "topics")
        assert not await ask("ask_over_http", "is_model_ready", "none")
        metadata = await ask("ask_over_http", "get_model_metadata", "colours")
        shape = next(one["shape"] for one in metadata["inputs"] if one["name"] == "pixel_values")
        pixels = np.zeros((1, *shape[1:]), np.float32)
        arrays, _ = await ask("infer_over_http", "colours", {"pixel_values": pixels})
        expected = await asyncio.to_thread(triton, serving.grpc_port, "infer", "colours", {"pixel_values": pixels})
        assert (arrays["probability"] == expected.arrays["probability"]).all()
        assert (await ask("ask_over_http", "get_server_metadata"))["name"] == "headway"
        assert (await ask("ask_over_http", "get_model_config", "topics"))["name"] == "topics"
        stats = await ask("ask_over_http", "get_inference_statistics", "topics")
        assert [one["name"] for one in stats["model_stats"]] == ["topics"]
        names = [one["name"] for one in await ask("ask_over_http", "get_model_repository_index")]
        assert "topics" in names
        with pytest.raises(TritonError, match="model 'none' is not loaded") as refused:
            await ask("infer_over_http", "none", texts)
        assert refused.value.code == "404"
        with pytest.raises(TritonError) as refused:
            await ask("ask_over_http", "load_model", "topics")
        assert refused.value.code == "409"  # the host has no store, and says so
        await ask("ask_over_http", "unload_model", "topics")
        assert not await ask("ask_over_http", "is_model_ready", "topics")
