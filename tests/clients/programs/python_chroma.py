"""Chroma's embedding function for OpenAI's API."""
# /// script
# dependencies = ["chromadb==1.5.9", "openai==3.57.0"]
# ///

import chromadb
from cases import BASE, VECTORS, case, run
from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction


@case("a collection is filled and queried")
def collection():
    vectors = OpenAIEmbeddingFunction(api_key="none", api_base=BASE, model_name=VECTORS)
    texts = chromadb.EphemeralClient().create_collection("texts", embedding_function=vectors)
    texts.add(ids=["cat", "dog"], documents=["a cat sat", "a dog ran"])
    assert texts.query(query_texts=["a cat sat"], n_results=1)["ids"] == [["cat"]]


run()
