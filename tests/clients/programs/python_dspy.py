"""DSPy."""
# /// script
# dependencies = ["dspy==3.4.1", "numpy==2.4.6"]
# ///

import dspy
from cases import BASE, CHAT, SENTENCE, VECTORS, case, run
from dspy import lm15

access = lm15.AccessPolicy(
    provider="headway", supports=lm15.EndpointSupport(complete=True, stream=True), auth_modes=("bearer",), base_url=BASE
)
lm15.register_provider(  # so that DSPy knows what the models can do
    lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat.preset("vllm")),
    supports=lm15.ModelSupport(function_calling=True, response_schema=True),
)
model = dspy.LM(f"headway/{CHAT}", api_key="none", cache=False, num_retries=0, max_tokens=400)


class Question(dspy.Signature):
    """Answer a question."""

    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


def weather(city: str) -> str:
    """Say what it is like outside."""
    return f"rain in {city}"


@case("chat")
def chat():
    assert model("Who sat?") == [SENTENCE]
    assert dspy.LM(f"openai/{CHAT}", api_base=BASE, api_key="none", cache=False)("Who sat?") == [SENTENCE]


@case("JSON adapter")
def json_adapter():
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Question)(question="Who sat?").answer == SENTENCE
        assert dspy.ChainOfThought(Question)(question="Who sat?").answer == SENTENCE


@case("JSON adapter with tools")
def tools():
    class Asking(dspy.Signature):
        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        outputs: dspy.ToolCalls = dspy.OutputField()

    with dspy.context(lm=model, adapter=dspy.JSONAdapter(use_native_function_calling=True)):
        answer = dspy.Predict(Asking)(question="Rain?", tools=[dspy.Tool(weather)])
    assert answer.outputs.tool_calls[0].args == {"city": SENTENCE}


@case("embeddings")
def embeddings():
    vectors = dspy.Embedder(f"openai/{VECTORS}", api_base=BASE, api_key="none", caching=False)
    assert vectors(["a cat", "a dog"]).shape[0] == 2


run()
