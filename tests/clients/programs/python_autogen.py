"""AutoGen."""
# /// script
# dependencies = ["autogen-ext[openai]==0.7.5", "autogen-agentchat==0.7.5"]
# ///

import pydantic
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from cases import BASE, CHAT, SENTENCE, case, run

model = OpenAIChatCompletionClient(
    model=CHAT,
    base_url=BASE,
    api_key="none",
    max_retries=0,
    model_info={
        "family": ModelFamily.UNKNOWN,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "vision": False,
        "multiple_system_messages": True,
    },
)
ASK = [UserMessage(content="Who sat?", source="user")]


class City(pydantic.BaseModel):
    name: str
    inhabitants: int


async def weather(city: str) -> str:
    """Say what it is like outside."""
    return f"rain in {city}"


@case("chat")
async def chat():
    answer = await model.create(ASK)
    assert (answer.content, answer.usage.completion_tokens) == (SENTENCE, 4)


@case("stream")
async def stream():
    pieces = [piece async for piece in model.create_stream(ASK)]
    assert pieces[-1].content == SENTENCE


@case("tools")
async def tools():
    tool = FunctionTool(weather, description="Says what it is like outside.")
    [call] = (await model.create(ASK, tools=[tool], tool_choice="required")).content
    assert call.name == "weather"


@case("structured output")
async def structured():
    answer = await model.create(ASK, json_output=City)
    assert City.model_validate_json(answer.content).name == SENTENCE


@case("agent")
async def agent():
    assistant = AssistantAgent("assistant", model_client=model, tools=[weather], reflect_on_tool_use=True)
    answer = await assistant.run(task="Rain?")
    assert answer.messages[-1].content == SENTENCE


run()
