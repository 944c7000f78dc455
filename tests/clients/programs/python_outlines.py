"""Outlines with OpenAI's package."""
# /// script
# dependencies = ["outlines==1.3.3", "openai==3.57.0"]
# ///

import json
from typing import Literal

import openai
import outlines
import pydantic
from cases import BASE, CHAT, SENTENCE, case, run

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)


class City(pydantic.BaseModel):
    name: str
    inhabitants: int


@case("text")
def text():
    assert outlines.from_openai(client, CHAT)("Who sat?") == SENTENCE


@case("stream")
def stream():
    assert "".join(outlines.from_openai(client, CHAT).stream("Who sat?")) == SENTENCE


@case("JSON schema")
def schema():
    assert json.loads(outlines.from_openai(client, CHAT)("A city", City))["name"] == SENTENCE


@case("vLLM's: schema, choice, regular expression")
def vllm():
    model = outlines.from_vllm(client, CHAT)
    assert json.loads(model("A city", City))["name"] == SENTENCE
    assert model("Which?", Literal["Bonn", "Kiel"]) in ("Bonn", "Kiel")
    assert model("How many?", outlines.regex("[0-9]{3}")).isdigit()


run()
