"""Haystack."""
# /// script
# dependencies = ["haystack-ai==3.4.1"]
# ///

from typing import Annotated

import haystack
from cases import BASE, CHAT, CITY, SENTENCE, VECTORS, case, run
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.tools import tool
from haystack.utils import Secret

COMMON = {"api_base_url": BASE, "api_key": Secret.from_token("none"), "max_retries": 0}


@tool
def weather(city: Annotated[str, "Its name"]) -> str:
    """Say what it is like outside."""
    return f"rain in {city}"


def generator(**options):
    return OpenAIChatGenerator(model=CHAT, **COMMON, **options)


@case("chat")
def chat():
    [reply] = generator().run([ChatMessage.from_user("Who sat?")])["replies"]
    assert reply.text == SENTENCE
    assert reply.meta["usage"]["completion_tokens"] == 4


@case("stream")
def stream():
    pieces = []
    generator(streaming_callback=pieces.append).run([ChatMessage.from_user("Who sat?")])
    assert "".join(piece.content for piece in pieces) == SENTENCE


@case("tools")
def tools():
    [reply] = generator(tools=[weather]).run([ChatMessage.from_user("Rain?")])["replies"]
    assert [call.arguments for call in reply.tool_calls] == [{"city": SENTENCE}]


@case("structured output")
def structured():
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    [reply] = generator(generation_kwargs={"response_format": schema}).run([ChatMessage.from_user("A city")])["replies"]
    assert SENTENCE in reply.text


@case("agent")
def agent():
    answer = Agent(chat_generator=generator(), tools=[weather]).run([ChatMessage.from_user("Rain?")])
    assert answer["messages"][-1].text == SENTENCE


@case("embeddings in a pipeline")
def embeddings():
    store = InMemoryDocumentStore()
    texts = [haystack.Document(content=text) for text in ("a cat sat", "a dog ran")]
    store.write_documents(OpenAIDocumentEmbedder(model=VECTORS, **COMMON).run(texts)["documents"])
    pipeline = haystack.Pipeline()
    pipeline.add_component("embedder", OpenAITextEmbedder(model=VECTORS, **COMMON))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    found = pipeline.run({"embedder": {"text": "a cat sat"}})["retriever"]["documents"]
    assert found[0].content == "a cat sat"


run()
