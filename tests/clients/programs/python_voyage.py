"""Voyage for Python."""
# /// script
# dependencies = ["voyageai==0.5.0"]
# ///

import voyageai
from cases import BASE, SCORER, VECTORS, case, run

client = voyageai.Client(api_key="none", base_url=BASE, max_retries=0)


@case("embeddings")
def embeddings():
    assert len(client.embed(["a cat", "a dog"], model=VECTORS).embeddings) == 2


@case("rerank")
def rerank():
    answer = client.rerank("goal", ["bank price", "goal match"], model=SCORER, top_k=1)
    assert [result.index for result in answer.results] == [1]


run()
