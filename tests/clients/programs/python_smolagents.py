"""smolagents."""
# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# ///

from cases import BASE, CHAT, SENTENCE, case, run
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=CHAT, api_base=BASE, api_key="none")
ASK = [{"role": "user", "content": [{"type": "text", "text": "Who sat?"}]}]


@tool
def weather(city: str) -> str:
    """Say what it is like outside.

    Args:
        city: its name
    """
    return f"rain in {city}"


@case("chat")
def chat():
    assert model.generate(ASK).content == SENTENCE


@case("stream")
def stream():
    assert "".join(piece.content or "" for piece in model.generate_stream(ASK)) == SENTENCE


@case("agent with tools")
def agent():
    steps = list(ToolCallingAgent(tools=[weather], model=model, max_steps=1).run("Rain?", stream=True))
    assert any(getattr(step, "name", "") == "weather" or "weather" in str(step) for step in steps)


run()
