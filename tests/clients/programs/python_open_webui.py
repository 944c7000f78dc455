"""Open WebUI, by its own API."""
# /// script
# dependencies = ["open-webui==0.12.4", "torch==2.13.0"]
# ///

import atexit
import os
import secrets
import socket
import subprocess
import sys
import time

import requests
from cases import BASE, CHAT, SENTENCE, VECTORS, case, run

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
address = f"http://127.0.0.1:{port}"
SETTINGS = {
    "DATA_DIR": os.path.realpath("data"),
    "ENABLE_OLLAMA_API": "False",
    "OFFLINE_MODE": "True",
    "OPENAI_API_BASE_URL": BASE,
    "OPENAI_API_KEY": "none",
    "RAG_EMBEDDING_ENGINE": "openai",
    "RAG_EMBEDDING_MODEL": VECTORS,
    "RAG_OPENAI_API_BASE_URL": BASE,
    "RAG_OPENAI_API_KEY": "none",
    "WEBUI_SECRET_KEY": secrets.token_hex(16),
}
server = subprocess.Popen(
    ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)], env=os.environ | SETTINGS, stdout=sys.stderr
)
atexit.register(server.kill)
browser = requests.Session()
deadline = time.monotonic() + 240
while True:
    try:
        browser.get(f"{address}/health", timeout=5).raise_for_status()
        break
    except requests.RequestException:
        if server.poll() is not None or time.monotonic() > deadline:
            raise
        time.sleep(1)


def call(path, body=None):
    answer = browser.request("GET" if body is None else "POST", f"{address}{path}", json=body, timeout=60)
    assert answer.ok, answer.text
    return answer.json()


person = {"name": "Ada", "email": "ada@example.org", "password": secrets.token_hex(8)}
browser.headers["authorization"] = f"Bearer {call('/api/v1/auths/signup', person)['token']}"
ASK = {"model": CHAT, "messages": [{"role": "user", "content": "Who sat?"}]}


@case("models")
def models():
    assert CHAT in [model["id"] for model in call("/api/models")["data"]]


@case("chat")
def chat():
    answer = call("/api/chat/completions", {**ASK, "stream": False})
    assert answer["choices"][0]["message"]["content"] == SENTENCE


@case("stream")
def stream():
    answer = browser.post(f"{address}/api/chat/completions", json={**ASK, "stream": True}, timeout=60)
    assert "data: [DONE]" in answer.text, answer.text
    assert " sat" in answer.text, answer.text


@case("embeddings")
def embeddings():
    assert len(call("/api/embeddings", {"model": VECTORS, "input": ["a cat"]})["data"]) == 1


run()
