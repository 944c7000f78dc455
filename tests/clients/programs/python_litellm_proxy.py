"""LiteLLM as a proxy, called by OpenAI's package."""
# /// script
# dependencies = ["litellm[proxy]==1.108.7", "openai==3.57.0"]
# ///

import atexit
import json
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
from cases import BASE, CHAT, SCORER, SENTENCE, VECTORS, case, run

# The configuration of docs/http.md, with a line for each model.
MODELS = {
    name: {"model_name": name, "litellm_params": {"model": f"hosted_vllm/{name}", "api_base": BASE, "api_key": "none"}}
    for name in (CHAT, VECTORS, SCORER)
}
KEY = f"sk-{secrets.token_hex(24)}"
settings = {
    "model_list": list(MODELS.values()),
    "general_settings": {"master_key": KEY},
    "router_settings": {"disable_cooldowns": True},
}
Path("config.yaml").write_text(json.dumps(settings))  # JSON is YAML
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
address = f"http://127.0.0.1:{port}"
proxy = subprocess.Popen(
    ["litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)], stdout=sys.stderr
)
atexit.register(proxy.kill)
client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
deadline = time.monotonic() + 120
while True:
    try:
        client.models.list()
        break
    except openai.APIConnectionError:
        if proxy.poll() is not None or time.monotonic() > deadline:
            raise
        time.sleep(0.5)
ASK = {"model": CHAT, "messages": [{"role": "user", "content": "Who sat?"}]}


@case("chat")
def chat():
    assert client.chat.completions.create(**ASK).choices[0].message.content == SENTENCE


@case("stream")
def stream():
    pieces = client.chat.completions.create(**ASK, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == SENTENCE


@case("tools")
def tools():
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    [call] = client.chat.completions.create(**ASK, tools=[tool]).choices[0].message.tool_calls
    assert call.function.name == "weather"


@case("responses")
def responses():
    assert client.responses.create(model=CHAT, input="Who sat?").output_text == SENTENCE


@case("messages of Anthropic")
def messages():
    body = {"model": CHAT, "max_tokens": 20, "messages": ASK["messages"]}
    answer = client.post("/v1/messages", body=body, cast_to=object)
    assert answer["content"][0]["text"] == SENTENCE


@case("embeddings")
def embeddings():
    assert len(client.embeddings.create(model=VECTORS, input=["a cat", "a dog"]).data) == 2


@case("rerank")
def rerank():
    body = {"model": SCORER, "query": "goal", "documents": ["bank price", "goal match"]}
    answer = client.post("/rerank", body=body, cast_to=object)
    assert answer["results"][0]["index"] == 1


run()
