"""Cohere for Python."""
# /// script
# dependencies = ["cohere==7.3.1"]
# ///

import cohere
from cases import HTTP, SCORER, case, run

DOCUMENTS = ["bank price", "goal match"]


@case("rerank v1")
def rerank_v1():
    answer = cohere.Client("none", base_url=HTTP).rerank(
        model=SCORER, query="goal", documents=DOCUMENTS, top_n=1, return_documents=True
    )
    assert [(result.index, result.document.text) for result in answer.results] == [(1, "goal match")]


@case("rerank v2")
async def rerank_v2():
    answer = cohere.ClientV2("none", base_url=HTTP).rerank(model=SCORER, query="goal", documents=DOCUMENTS)
    assert [result.index for result in answer.results] == [1, 0]
    answer = await cohere.AsyncClientV2("none", base_url=HTTP).rerank(model=SCORER, query="goal", documents=DOCUMENTS)
    assert answer.results[0].relevance_score > answer.results[1].relevance_score


run()
