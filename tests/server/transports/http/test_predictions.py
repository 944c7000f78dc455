"""KServe's older protocol: instances in, predictions out, as the Open Inference Protocol answers the same inputs."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from headway_server.services.open_inference import tensors_of


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (250, 10, 10)).save(file, "PNG")
    return file.getvalue()


PICTURE = {"b64": base64.b64encode(picture()).decode()}


@pytest.fixture
def predict(serve):
    async def post(model, body, status=200):
        async with serve() as serving:
            answer = await serving.client.post(f"/v1/models/{model}:predict", json=body)
            assert answer.status_code == status, answer.text
            return answer.json()

    return post


@pytest.mark.parametrize("name", ["instances", "inputs"])
async def test_texts_are_predicted_row_by_row(serve, name):
    texts = ["star goal atom", "goal"]
    async with serve() as serving:
        body = {name: texts, "parameters": {"top_k": 2}}
        for path in ("topics:predict", "topics/versions/1:predict"):
            rows = (await serving.client.post(f"/v1/models/{path}", json=body)).json()["predictions"]
            assert [row["label"][0] for row in rows] == ["science", "sports"]
        tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": texts}
        infer = {"inputs": [tensor], "parameters": {"top_k": 2}}
        outputs = (await serving.client.post("/v2/models/topics/infer", json=infer)).json()["outputs"]
    same = {one["name"]: np.array(one["data"]).reshape(one["shape"]).tolist() for one in outputs}
    assert rows == [{"label": same["label"][row], "probability": same["probability"][row]} for row in (0, 1)]


async def test_images_come_in_base64_and_a_prompt_is_continued(serve):
    async with serve() as serving:
        post = serving.client.post
        for instances in ([PICTURE, PICTURE], [{"image": PICTURE}] * 2):
            rows = (await post("/v1/models/colours:predict", json={"instances": instances})).json()["predictions"]
            assert [row["label"][0] for row in rows] == ["red", "red"]
        body = {"instances": ["the cat", "the dog"], "parameters": {"max_new_tokens": 3}}
        texts = (await post("/v1/models/tiny-generation:predict", json=body)).json()["predictions"]
        assert len(texts) == 2
        assert all(isinstance(text, str) and text for text in texts)


async def test_every_model_is_listed_and_ready_for_kserve_and_for_openai(serve):
    async with serve() as serving:
        listed = (await serving.client.get("/v1/models")).json()
        assert listed["models"] == [model["id"] for model in listed["data"]]
        for name in listed["models"]:
            described = (await serving.client.get(f"/v1/models/{name}")).json()
            assert (described["name"], described["ready"], described["id"]) == (name, True, name)
        assert (await serving.client.get("/v1/models/none")).status_code == 404
        for model in serving.host.models:  # a prediction is made of outputs that the model has
            task = tensors_of(serving.host.families, model)
            assert set(task.predictions(model)) <= {spec.name for spec in task.outputs(model)}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "instances: must be given, or inputs, and not both"),
        ({"instances": ["a"], "inputs": ["a"]}, "instances: must be given, or inputs, and not both"),
        ({"instances": []}, "instances: is empty"),
        ({"instances": [1]}, "instances[0]: must be a text, or a file as"),
        ({"instances": [{"b64": "*"}]}, "instances[0].b64: is not base64"),
        ({"instances": ["a", {"words": "b"}]}, "instances[1]: has words, and instances[0] text; give all the same"),
        ({"instances": [{"words": "a"}]}, "is 'words'; the model reads text"),
        ({"instances": [{}]}, "inputs: lack text"),
        ({"instances": ["a"], "signature_name": "x"}, "signature_name: is not supported"),
        ({"instances": ["a"], "parameters": {"top": 1}}, "parameters.top: is unknown"),
        ({"instances": ["a"] * 2000}, "the first axis must be from 1 to"),
    ],
)
async def test_what_is_wrong_is_named(predict, body, words):
    assert words in (await predict("topics", body, 400))["error"]


async def test_texts_are_embedded_and_classified_as_text_embeddings_inference_does(serve):
    texts = ["star goal atom", "goal"]
    async with serve() as serving:

        async def ask(path, status=200, **body):
            answer = await serving.client.post(path, json=body)
            assert answer.status_code == status, answer.text
            return answer.json()

        same = (await ask("/v1/embeddings", model="topics", input=texts))["data"]
        assert await ask("/embed", inputs=texts) == [one["embedding"] for one in same]
        assert await ask("/embed", inputs=texts[0], truncate=True) == [same[0]["embedding"]]
        assert await ask("/embed", inputs="goal goal", normalize=False) == [[pytest.approx(4 / 3), 0, 0]]
        one = await ask("/predict", inputs=texts[0])
        assert await ask("/predict", inputs=texts[0], parameters={}) == one  # as the client of Hugging Face's hub asks
        assert [set(label) for label in one] == [{"score", "label"}] * 3
        assert one[0]["label"] == "science"
        both = await ask("/predict", inputs=[[text] for text in texts])
        assert both[0] == one
        assert both[1][0]["label"] == "sports"
        refusals = {
            "inputs: is missing": ("/embed", {}),
            "parameters: dictionary should have at most 0 items": ("/embed", {"inputs": "a", "parameters": {"a": 1}}),
            "inputs: is empty": ("/embed", {"inputs": []}),
            "inputs[1]: is empty": ("/embed", {"inputs": ["a", ""]}),
            "truncation_direction: input should be": ("/embed", {"inputs": "a", "truncation_direction": "left"}),
            "raw_scores: input should be False": ("/predict", {"inputs": "a", "raw_scores": True}),
            "inputs[1]: has 2 texts; give one, or a pair": ("/predict", {"inputs": [["a"], ["b", "c"]]}),
            "reads single texts": ("/predict", {"inputs": ["a", "b"]}),
        }
        for words, (path, body) in refusals.items():
            assert words in (await ask(path, 400, **body))["error"]["message"], body


async def test_a_model_that_is_not_there_is_not_found(predict):
    assert "not loaded" in (await predict("none", {"instances": ["a"]}, 404))["error"]
