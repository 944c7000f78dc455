"""Requests in Voyage's form: `input_type` chooses a prompt, and texts are cut by default."""

import pytest
from tiny_bundles import MAX_INPUT_TOKENS, write_topic_bundle

from headway_server.bundles import Task

LONG = "goal " * (2 * MAX_INPUT_TOKENS)


@pytest.fixture
def embedders(serve, tmp_path):
    """A server of a model with prompts and of one without."""
    prompts = {"query": "star ", "passage": "bank "}
    write_topic_bundle(tmp_path / "store", name="prompted", task=Task.TEXT_EMBEDDING, prompts=prompts)
    write_topic_bundle(tmp_path / "store", name="plain", task=Task.TEXT_EMBEDDING)
    return lambda: serve(store=tmp_path / "store")


async def test_a_type_of_inputs_is_a_prompt_and_lets_texts_be_cut(embedders):
    async with embedders() as serving:

        async def ask(path="/v1/embeddings", **body):
            answer = await serving.client.post(path, json={"input": ["goal"], "model": "prompted", **body})
            return answer.status_code, answer.json()

        async def vector(**body):
            code, answer = await ask(**body)
            assert code == 200, answer
            return answer["data"][0]["embedding"]

        for kind, name in (("query", "query"), ("document", "passage")):
            assert await vector(input_type=kind) == await vector(prompt_name=name) != await vector()
            assert await vector(input_type=kind, model="plain") == await vector(model="plain")
        assert await vector(input_type=None) == await vector()
        assert (await ask(input=[LONG]))[0] == 400
        assert (await ask(input=[LONG], input_type="query"))[0] == 200
        assert (await ask(input=[LONG], input_type="query", truncation=False))[0] == 400
        code, answer = await ask(input_type="query", prompt_name="query")
        assert (code, "prompt_name: is set together with input_type" in str(answer)) == (400, True)
        asked = {"query": "goal", "documents": [LONG, "star"], "model": "plain"}
        for more, code in (({}, 400), ({"top_k": 1}, 200), ({"top_k": 1, "truncation": False}, 400)):
            assert (await serving.client.post("/v1/rerank", json=asked | more)).status_code == code
