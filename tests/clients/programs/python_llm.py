"""llm, the command."""
# /// script
# dependencies = ["llm==0.36"]
# ///

import json
from pathlib import Path

from cases import BASE, CHAT, SENTENCE, called, case, run

home = Path("llm")
home.mkdir()
model = {"model_id": "here", "model_name": CHAT, "api_base": BASE, "supports_schema": True, "supports_tools": True}
(home / "extra-openai-models.yaml").write_text(json.dumps([model]))


def llm(*arguments):
    return called("llm", *arguments, LLM_USER_PATH=str(home.resolve()), OPENAI_API_KEY="none").strip()


@case("prompt, streamed and whole")
def prompt():
    assert llm("-m", "here", "Who sat?") == SENTENCE
    assert llm("-m", "here", "--no-stream", "-s", "Tell.", "Who sat?") == SENTENCE


@case("conversation")
def conversation():
    assert llm("-c", "Who else?") == SENTENCE


@case("schema")
def schema():
    assert json.loads(llm("-m", "here", "--schema", "name str, inhabitants int", "A city"))["name"] == SENTENCE


@case("tools")
def tools():
    answer = llm("-m", "here", "--functions", 'def weather(city: str) -> str:\n    return "rain"', "--td", "Rain?")
    assert SENTENCE in answer


run()
