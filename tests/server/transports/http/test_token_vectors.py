"""Vectors of tokens, by a model of late interaction, at every door."""

import asyncio

import numpy as np
import pytest
from tiny_bundles import write_token_bundle, write_topic_bundle

from headway_client import Client, FailedPreconditionError, InvalidArgumentError
from headway_server.bundles import Task
from headway_server.tasks.text import scorer

TEXTS = ["star goal price goal", "bank"]
QUERY = "goal star"


async def test_vectors_of_tokens_are_the_same_at_every_door_and_make_the_score(serve, tmp_path, monkeypatch):
    write_token_bundle(tmp_path / "store")
    write_topic_bundle(tmp_path / "store", name="vectors", task=Task.TEXT_EMBEDDING)
    async with serve(store=tmp_path / "store") as serving:

        def call():
            with Client(f"127.0.0.1:{serving.grpc_port}") as client:
                [asked] = client.embed_text([QUERY], multi_vector=True, prompt_name="query")
                found = client.embed_text(TEXTS, multi_vector=True).results
                scores = [one.score for one in client.score_text(QUERY, text_pairs=TEXTS)]
                with pytest.raises(FailedPreconditionError, match="cannot embed texts as a vector of each token"):
                    client.embed_text(TEXTS, multi_vector=True, model="vectors")
                monkeypatch.setattr(scorer, "MOST_VECTOR_BYTES", 12 * 6)  # six vectors of three numbers
                with pytest.raises(InvalidArgumentError, match=r"texts: have 7 tokens, whose .*; send fewer texts"):
                    client.embed_text(TEXTS, multi_vector=True)
                monkeypatch.undo()
                return asked, found, scores

        asked, found, scores = await asyncio.to_thread(call)
        assert [one.text.strip() for one in asked.token_vectors] == ["[CLS]", "goal", "star", *["[UNK]"] * 5]
        assert [one.text.strip() for one in found[0].token_vectors] == ["[CLS]", "star", "goal", "goal"], (
            "price is skipped"
        )
        assert (asked.token_count, found[0].token_count, found[0].truncated) == (3, 5, False)
        query, *texts = (np.array([one.values for one in each.token_vectors]) for each in (asked, *found))
        np.testing.assert_allclose(np.linalg.norm(query, axis=1), 1, rtol=1e-6)
        np.testing.assert_allclose([(query @ text.T).max(axis=1).sum() for text in texts], scores, rtol=1e-6)

        answer = (await serving.client.post("/embed_all", json={"inputs": TEXTS})).json()
        for row, text in zip(answer, texts, strict=True):
            np.testing.assert_allclose(row, text, rtol=1e-6)
        [again] = (await serving.client.post("/embed_all", json={"inputs": QUERY, "prompt_name": "query"})).json()
        np.testing.assert_allclose(again, query, rtol=1e-6)

        inputs = [{"name": "text", "datatype": "BYTES", "shape": [2], "data": TEXTS}]
        names = [{"name": name} for name in ("token_vectors", "token_id", "vector_count")]
        body = {"inputs": inputs, "outputs": names}
        answer = (await serving.client.post("/v2/models/colbert/infer", json=body)).json()
        tensors = {one["name"]: np.reshape(one["data"], one["shape"]) for one in answer["outputs"]}
        assert tensors["vector_count"].tolist() == [4, 2]
        assert tensors["token_vectors"].shape == (2, 4, 3)
        np.testing.assert_allclose(tensors["token_vectors"][0], texts[0], rtol=1e-6)
        np.testing.assert_allclose(tensors["token_vectors"][1, :2], texts[1], rtol=1e-6)
        assert not tensors["token_vectors"][1, 2:].any()
        assert tensors["token_id"][1].tolist() == [1, found[1].token_vectors[1].token_id, 0, 0]
        for more, words in (
            ({"outputs": [], "parameters": {"prompt_name": "query"}}, "parameters.prompt_name: is set without"),
            ({"outputs": []}, "text_pair: is empty, and model colbert reads pairs of texts"),
        ):
            refused = await serving.client.post("/v2/models/colbert/infer", json={**body, **more})
            assert (refused.status_code, words in refused.text) == (400, True), refused.text
