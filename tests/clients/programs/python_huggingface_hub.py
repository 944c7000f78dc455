"""Hugging Face's InferenceClient for Python."""
# /// script
# dependencies = ["huggingface_hub==2.4.0", "numpy==2.4.6"]
# ///

import json

from cases import BASE, CHAT, CITY, HTTP, SENTENCE, case, run
from huggingface_hub import AsyncInferenceClient, InferenceClient

client = InferenceClient(base_url=BASE, api_key="none")
ASK = {"model": CHAT, "messages": [{"role": "user", "content": "Who sat?"}]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says what it is like outside.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@case("chat")
async def chat():
    assert client.chat_completion(**ASK).choices[0].message.content == SENTENCE
    asynchronous = AsyncInferenceClient(base_url=BASE, api_key="none")
    assert (await asynchronous.chat_completion(**ASK)).choices[0].message.content == SENTENCE


@case("stream")
def stream():
    pieces = client.chat_completion(**ASK, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == SENTENCE


@case("tools")
def tools():
    [call] = client.chat_completion(**ASK, tools=[WEATHER], tool_choice="required").choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": SENTENCE}


@case("JSON schema")
def schema():
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    assert SENTENCE in client.chat_completion(**ASK, response_format=wanted).choices[0].message.content


@case("feature extraction of Text Embeddings Inference")
def features():
    assert InferenceClient(model=f"{HTTP}/embed", api_key="none").feature_extraction("a cat").shape[-1] > 1


run()
