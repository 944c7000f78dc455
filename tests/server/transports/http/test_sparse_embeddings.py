"""Sparse vectors of texts, over gRPC and in the form of Text Embeddings Inference."""

import asyncio

import numpy as np
import pytest
from tiny_bundles import write_topic_bundle

from headway_client import Client, FailedPreconditionError
from headway_server.bundles import Task

TEXTS = ["star goal goal", "goal"]


@pytest.fixture
def sparse(serve, tmp_path):
    """A server of a model of sparse vectors and one of dense ones."""
    write_topic_bundle(tmp_path / "store", name="splade", task=Task.TEXT_EMBEDDING, has_sparse_vectors=True)
    write_topic_bundle(tmp_path / "store", name="vectors", task=Task.TEXT_EMBEDDING)
    return lambda: serve(store=tmp_path / "store")


async def test_sparse_vectors_have_the_numbers_that_are_not_zero(sparse):
    async with sparse() as serving:

        def call():
            with Client(f"127.0.0.1:{serving.grpc_port}") as client:
                dense = client.embed_text(TEXTS, model="vectors", normalize=False).to_numpy()
                answer = client.embed_text(TEXTS, sparse=True)
                unit = client.embed_text(TEXTS, sparse=True, normalize=True).results[0]
                ranked = client.rank_texts(TEXTS, query_text="goal", model="splade").results
                with pytest.raises(FailedPreconditionError, match="cannot embed texts as sparse vectors"):
                    client.embed_text(TEXTS, sparse=True, model="vectors")
                with pytest.raises(FailedPreconditionError, match="cannot embed texts"):
                    client.embed_text(TEXTS, model="splade")
                return dense, answer, unit, ranked, client.list_models("text_embedding").models

        dense, answer, unit, ranked, models = await asyncio.to_thread(call)
        assert answer.model.name == "splade"
        for row, result in zip(dense, answer.results, strict=True):
            assert list(result.indices) == np.flatnonzero(row).tolist() != []
            np.testing.assert_allclose(result.values, row[row != 0])
        np.testing.assert_allclose(np.linalg.norm(unit.values), 1, rtol=1e-6)
        with pytest.raises(ValueError, match="the vectors are sparse"):
            answer.to_numpy()
        products = dense @ dense[1]  # not cosines
        assert [one.index for one in ranked] == np.argsort(-products).tolist()
        np.testing.assert_allclose([one.score for one in ranked], np.sort(products)[::-1], rtol=1e-6)
        assert {one.name: "embed_text_sparsely" in one.capabilities for one in models} == {
            "splade": True,
            "vectors": False,
        }

        found = (await serving.client.post("/embed_sparse", json={"inputs": TEXTS})).json()
        assert [[one["index"] for one in row] for row in found] == [list(one.indices) for one in answer.results]
        values = [one["value"] for row in found for one in row]
        np.testing.assert_allclose(values, [value for one in answer.results for value in one.values])
        for path, body in {
            "/embed": {"inputs": "a", "model": "splade"},
            "/v1/embeddings": {"input": "a", "model": "splade"},
            "/embed_sparse": {"inputs": "a", "model": "vectors"},
        }.items():
            refused = await serving.client.post(path, json=body)
            assert (refused.status_code, "cannot embed texts" in refused.text) == (400, True), refused.text
            can = "embed texts as sparse vectors" if body["model"] == "splade" else "embed texts"
            assert f"; it can {can}, rank texts by a text" in refused.text
