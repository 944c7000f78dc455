"""CrewAI."""
# /// script
# dependencies = ["crewai==1.15.30"]
# ///

import pydantic
from cases import BASE, CHAT, SENTENCE, case, run
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

model = LLM(model=f"openai/{CHAT}", base_url=BASE, api_key="none")


class City(pydantic.BaseModel):
    name: str
    inhabitants: int


@tool("weather")
def weather(city: str) -> str:
    """Say what it is like outside."""
    return f"rain in {city}"


@case("chat")
def chat():
    assert model.call("Who sat?") == SENTENCE


@case("crew with a tool")
def crew():
    agent = Agent(role="Forecaster", goal="Tell.", backstory="None.", llm=model, tools=[weather], max_iter=3)
    task = Task(description="Rain?", expected_output="A sentence", agent=agent)
    assert SENTENCE in str(Crew(agents=[agent], tasks=[task]).kickoff())


@case("structured output")
def structured():
    answer = LLM(model=f"openai/{CHAT}", base_url=BASE, api_key="none", response_format=City).call("A city")
    assert SENTENCE in str(answer)


run()
