"""LlamaIndex."""
# /// script
# dependencies = ["llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"]
# ///

import pydantic
from cases import BASE, CHAT, SENTENCE, VECTORS, case, run
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

COMMON = {"api_base": BASE, "api_key": "none", "max_retries": 0}
model = OpenAILike(model=CHAT, is_chat_model=True, is_function_calling_model=True, context_window=8192, **COMMON)
vectors = OpenAILikeEmbedding(model_name=VECTORS, **COMMON)


class City(pydantic.BaseModel):
    """A city."""

    name: str
    inhabitants: int


def weather(city: str) -> str:
    """Say what it is like outside."""
    return f"rain in {city}"


@case("chat")
async def chat():
    assert model.chat([ChatMessage(role="user", content="Who sat?")]).message.content == SENTENCE
    assert (await model.acomplete("Who sat?")).text == SENTENCE


@case("stream")
async def stream():
    assert [piece.text async for piece in await model.astream_complete("Who sat?")][-1] == SENTENCE


@case("completions")
def completions():
    assert OpenAILike(model="shakespeare", max_tokens=8, **COMMON).complete("ROMEO:").text


@case("tools")
def tools():
    answer = model.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="Rain?", tool_required=True)
    [call] = model.get_tool_calls_from_response(answer)
    assert call.tool_kwargs == {"city": SENTENCE}


@case("structured output")
def structured():
    assert model.structured_predict(City, PromptTemplate("A city")).name == SENTENCE


@case("agent")
async def agent():
    answer = await FunctionAgent(tools=[weather], llm=model).run("Rain?")
    assert str(answer) == SENTENCE


@case("embeddings")
async def embeddings():
    assert len(await vectors.aget_text_embedding_batch(["a cat", "a dog"])) == 2


@case("index and query")
def index():
    Settings.llm, Settings.embed_model, Settings.tokenizer = model, vectors, str.split
    documents = [Document(text="a cat sat on the mat"), Document(text="a dog ran")]
    answer = VectorStoreIndex.from_documents(documents).as_query_engine().query("Who sat?")
    assert str(answer) == SENTENCE
    assert answer.source_nodes


run()
