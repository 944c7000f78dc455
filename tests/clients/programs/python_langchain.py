"""LangChain for Python."""
# /// script
# dependencies = ["langchain-openai==1.7.4", "langchain==1.5.2"]
# ///

import pydantic
from cases import BASE, CHAT, SENTENCE, VECTORS, case, run
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

COMMON = {"base_url": BASE, "api_key": "none", "max_retries": 0}
model = ChatOpenAI(model=CHAT, **COMMON)


class City(pydantic.BaseModel):
    """A city."""

    name: str
    inhabitants: int


@tool
def weather(city: str) -> str:
    """Say what it is like outside."""
    return f"rain in {city}"


@case("chat")
async def chat():
    answer = model.invoke("Who sat?")
    assert answer.content == SENTENCE
    assert answer.usage_metadata["output_tokens"] == 4
    assert len(await model.abatch(["Who sat?"] * 3)) == 3


@case("stream")
async def stream():
    assert "".join([piece.content async for piece in model.astream("Who sat?")]) == SENTENCE


@case("completions")
def completions():
    assert OpenAI(model="shakespeare", max_tokens=8, **COMMON).invoke("ROMEO:")


@case("tools")
def tools():
    [call] = model.bind_tools([weather]).invoke("Rain?").tool_calls
    assert call["args"] == {"city": SENTENCE}
    [call] = model.bind_tools([weather], tool_choice="weather").invoke("Rain?").tool_calls


@case("structured output")
def structured():
    for method in ("json_schema", "function_calling", "json_mode"):
        answer = model.with_structured_output(City, method=method, include_raw=True).invoke("A city, in JSON")
        assert method == "json_mode" or answer["parsed"].name == SENTENCE, answer


@case("agent")
def agent():
    answer = create_agent(model, [weather]).invoke({"messages": [("user", "Rain?")]})
    assert [message.type for message in answer["messages"]] == ["human", "ai", "tool", "ai"]
    assert answer["messages"][2].content == f"rain in {SENTENCE}"


@case("embeddings")
def embeddings():
    # The client counts tokens by a file of OpenAI's, which it fetches; and sends tokens, which no other model has.
    vectors = OpenAIEmbeddings(model=VECTORS, check_embedding_ctx_length=False, **COMMON)
    assert len(vectors.embed_documents(["a cat", "a dog"])) == 2


run()
