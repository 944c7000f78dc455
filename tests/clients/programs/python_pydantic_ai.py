"""Pydantic AI."""
# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///

import pydantic
from cases import BASE, CHAT, SENTENCE, VECTORS, case, run
from pydantic_ai import Agent, Embedder, NativeOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE, api_key="none")
model = OpenAIChatModel(CHAT, provider=provider)


class City(pydantic.BaseModel):
    name: str
    inhabitants: int


@case("chat")
async def chat():
    answer = await Agent(model).run("Who sat?")
    assert answer.output == SENTENCE


@case("stream")
async def stream():
    async with Agent(model).run_stream("Who sat?") as answer:
        assert "".join([piece async for piece in answer.stream_text(delta=True)]) == SENTENCE


@case("agent with a tool")
async def agent():
    called = []
    agent = Agent(model)

    @agent.tool_plain
    def weather(city: str) -> str:
        called.append(city)
        return "rain"

    assert (await agent.run("Rain?")).output == SENTENCE
    assert called == [SENTENCE]


@case("structured output by a tool")
async def by_tool():
    assert (await Agent(model, output_type=City).run("A city")).output.name == SENTENCE


@case("structured output by a schema")
async def by_schema():
    assert (await Agent(model, output_type=NativeOutput(City)).run("A city")).output.name == SENTENCE


@case("embeddings")
async def embeddings():
    answer = await Embedder(OpenAIEmbeddingModel(VECTORS, provider=provider)).embed_documents(["a cat", "a dog"])
    assert len(answer.embeddings) == 2


@case("responses")
async def responses():
    assert (await Agent(OpenAIResponsesModel(CHAT, provider=provider)).run("Who sat?")).output == SENTENCE


run()
