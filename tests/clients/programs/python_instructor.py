"""Instructor."""
# /// script
# dependencies = ["instructor==1.17.0", "openai==3.3.0"]
# ///

import instructor
import openai
import pydantic
from cases import BASE, CHAT, SENTENCE, case, run

ASK = {"model": CHAT, "messages": [{"role": "user", "content": "A city"}], "max_retries": 0}


class City(pydantic.BaseModel):
    """A city."""

    name: str
    inhabitants: int


def client(mode, package=openai.OpenAI):
    return instructor.from_openai(package(base_url=BASE, api_key="none", max_retries=0), mode=mode)


for name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):

    @case(name)
    def answers(mode=instructor.Mode[name]):
        city = client(mode).chat.completions.create(response_model=City, **ASK)
        assert city.name == SENTENCE


@case("stream of partial answers")
async def partial():
    asynchronous = client(instructor.Mode.TOOLS, openai.AsyncOpenAI)
    pieces = [piece async for piece in asynchronous.chat.completions.create_partial(response_model=City, **ASK)]
    assert pieces[-1].name == SENTENCE


@case("list")
def several():
    cities = client(instructor.Mode.TOOLS).chat.completions.create(response_model=list[City], **ASK)
    assert isinstance(cities, list)


run()
