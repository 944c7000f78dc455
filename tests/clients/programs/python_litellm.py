"""LiteLLM as a library."""
# /// script
# dependencies = ["litellm==1.110.2"]
# ///

import io
import json
import math
import struct
import wave

import litellm
import pydantic
from cases import BASE, CHAT, HTTP, SCORER, SENTENCE, THOUGHT, VECTORS, case, refused, run

COMMON = {"api_base": BASE, "api_key": "none", "num_retries": 0}
ASK = {"model": f"hosted_vllm/{CHAT}", "messages": [{"role": "user", "content": "Who sat?"}], **COMMON}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class City(pydantic.BaseModel):
    name: str
    inhabitants: int


@case("chat")
async def chat():
    for provider in ("hosted_vllm", "openai", "litellm_proxy"):
        answer = await litellm.acompletion(**ASK | {"model": f"{provider}/{CHAT}"})
        assert answer.choices[0].message.content == SENTENCE


@case("stream")
def stream():
    pieces = litellm.completion(**ASK, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == SENTENCE


@case("reasoning")
def reasoning():
    message = litellm.completion(**ASK, chat_template_kwargs={"enable_thinking": True}).choices[0].message
    assert (message.content, message.reasoning_content) == (SENTENCE, THOUGHT)


@case("tools")
def tools():
    for choice in ("auto", "required"):
        [call] = litellm.completion(**ASK, tools=[WEATHER], tool_choice=choice).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {})


@case("structured output")
def structured():
    answer = litellm.completion(**ASK, response_format=City).choices[0].message.content
    assert City.model_validate_json(answer).name == SENTENCE


@case("completions")
def completions():
    answer = litellm.text_completion(
        model="text-completion-openai/shakespeare", prompt="ROMEO:", max_tokens=8, **COMMON
    )
    assert answer.choices[0].text


@case("embeddings")
def embeddings():
    for provider in ("hosted_vllm", "openai"):
        answer = litellm.embedding(model=f"{provider}/{VECTORS}", input=["a cat", "a dog"], **COMMON)
        assert len(answer.data) == 2


@case("rerank")
def rerank():
    documents = ["bank price", "goal match"]
    for provider, base in (("hosted_vllm", BASE), ("cohere", HTTP), ("jina_ai", BASE)):
        answer = litellm.rerank(
            model=f"{provider}/{SCORER}", query="goal", documents=documents, api_base=base, api_key="none"
        )
        assert len(answer.results) == 2, provider


@case("transcriptions")
def transcriptions():
    tone = io.BytesIO()
    with wave.open(tone, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(8000)
        written.writeframes(struct.pack("<8000h", *(int(8000 * math.sin(i / 9)) for i in range(8000))))
    tone.seek(0)
    tone.name = "tone.wav"
    answer = litellm.transcription(model="hosted_vllm/telephone-transcriber", file=tone, **COMMON)
    assert isinstance(answer.text, str)


@case("images")
def images():
    answer = litellm.image_generation(model="openai/fashion-mnist-diffusion", prompt="bag", **COMMON)
    assert answer.data[0].b64_json


@case("speech")
def speech():
    answer = litellm.speech(
        model="openai/telephone-speech", input="one two", voice="allison", response_format="wav", **COMMON
    )
    assert answer.content.startswith(b"RIFF")


@case("errors")
def errors():
    for wrong, error in (({"model": "hosted_vllm/none"}, litellm.NotFoundError), ({"n": 99}, litellm.BadRequestError)):
        refused(error, lambda wrong=wrong: litellm.completion(**ASK | wrong))


run()
