"""OpenAI Agents SDK for Python."""
# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///

import openai
import pydantic
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, handoff
from cases import BASE, CHAT, SENTENCE, case, run

client = openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)
model = OpenAIChatCompletionsModel(CHAT, openai_client=client)


class City(pydantic.BaseModel):
    name: str
    inhabitants: int


@function_tool
def weather(city: str) -> str:
    """Say what it is like outside."""
    return f"rain in {city}"


@case("chat")
async def chat():
    answer = await Runner.run(Agent("Teller", model=model, instructions="Tell."), "Who sat?")
    assert answer.final_output == SENTENCE


@case("stream")
async def stream():
    answer = Runner.run_streamed(Agent("Teller", model=model), "Who sat?")
    kinds = [event.type async for event in answer.stream_events()]
    assert "raw_response_event" in kinds
    assert answer.final_output == SENTENCE


@case("agent with a tool")
async def agent():
    answer = await Runner.run(Agent("Forecaster", model=model, tools=[weather]), "Rain?")
    assert answer.final_output == SENTENCE
    assert f"rain in {SENTENCE}" in [getattr(item, "output", "") for item in answer.new_items]


@case("handoff")
async def hand_over():
    teller = Agent("Teller", model=model)
    answer = await Runner.run(Agent("Desk", model=model, handoffs=[handoff(teller)]), "Who sat?")
    assert answer.last_agent is teller


@case("structured output")
async def structured():
    answer = await Runner.run(Agent("Teller", model=model, output_type=City), "A city")
    assert answer.final_output.name == SENTENCE


@case("responses")
async def responses():
    agent = Agent("Teller", model=OpenAIResponsesModel(CHAT, openai_client=client))
    assert (await Runner.run(agent, "Who sat?")).final_output == SENTENCE


run()
