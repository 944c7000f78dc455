"""Semantic Kernel."""
# /// script
# dependencies = ["semantic-kernel==1.45.0"]
# ///

import openai
from cases import BASE, CHAT, SENTENCE, VECTORS, case, run
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAITextEmbedding
from semantic_kernel.functions import kernel_function

client = openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)
service = OpenAIChatCompletion(ai_model_id=CHAT, async_client=client)


class Weather:
    """A plugin."""

    def __init__(self):
        self.asked = []

    @kernel_function(description="Says what it is like outside.")
    def weather(self, city: str) -> str:
        self.asked.append(city)
        return "rain"


@case("chat")
async def chat():
    answer = await ChatCompletionAgent(service=service, name="Teller").get_response("Who sat?")
    assert str(answer) == SENTENCE


@case("stream")
async def stream():
    pieces = ChatCompletionAgent(service=service, name="Teller").invoke_stream("Who sat?")
    assert "".join([str(piece) async for piece in pieces]) == SENTENCE


@case("agent with a tool")
async def agent():
    plugin = Weather()
    answer = await ChatCompletionAgent(service=service, name="Forecaster", plugins=[plugin]).get_response("Rain?")
    assert str(answer) == SENTENCE
    assert plugin.asked == [SENTENCE]


@case("embeddings")
async def embeddings():
    answer = await OpenAITextEmbedding(ai_model_id=VECTORS, async_client=client).generate_embeddings(["a cat", "a dog"])
    assert len(answer) == 2


run()
