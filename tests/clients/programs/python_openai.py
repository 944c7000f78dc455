"""OpenAI for Python."""
# /// script
# dependencies = ["openai==3.57.0", "pydantic==2.13.4"]
# ///

import base64
import io
import json
import math
import struct
import wave

import openai
import pydantic
from cases import BASE, CHAT, CITY, SENTENCE, THOUGHT, VECTORS, case, refused, run

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
ASK = {"model": CHAT, "messages": [{"role": "user", "content": "Who sat?"}]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says what it is like outside.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class City(pydantic.BaseModel):
    name: str
    inhabitants: int


@case("models")
def models():
    assert CHAT in [model.id for model in client.models.list()]
    assert client.models.retrieve(CHAT).id == CHAT


@case("completions")
def completions():
    answer = client.completions.create(
        model="shakespeare", prompt=["ROMEO:", "JULIET:"], max_tokens=8, logprobs=2, seed=1
    )
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens // 2 == 8
    pieces = client.completions.create(model="shakespeare", prompt="ROMEO:", max_tokens=8, seed=1, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices)


@case("chat")
def chat():
    answer = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3, n=2)
    assert [choice.message.content for choice in answer.choices] == [SENTENCE] * 2
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@case("stream")
async def stream():
    async with openai.AsyncOpenAI(base_url=BASE, api_key="none") as asynchronous:
        said, usage = "", None
        options = {"include_usage": True}
        async for piece in await asynchronous.chat.completions.create(**ASK, stream=True, stream_options=options):
            said += piece.choices[0].delta.content or "" if piece.choices else ""
            usage = piece.usage or usage
        assert said == SENTENCE
        assert usage.completion_tokens == 4
    with client.chat.completions.stream(**ASK) as events:
        assert [event.content for event in events if event.type == "content.done"] == [SENTENCE]


@case("tools")
def tools():
    [call] = client.chat.completions.create(**ASK, tools=[WEATHER]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": SENTENCE}
    forced = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", forced):
        answer = client.chat.completions.create(**ASK, tools=[WEATHER], tool_choice=choice)
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    called = {"role": "assistant", "tool_calls": [call.model_dump()]}
    messages = [*ASK["messages"], called, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    answer = client.chat.completions.create(model=CHAT, messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == SENTENCE
    with client.chat.completions.stream(**ASK, tools=[WEATHER]) as events:
        final = events.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "weather"


@case("parsed answers")
def parsed():
    city = client.chat.completions.parse(**ASK, response_format=City).choices[0].message.parsed
    assert city.name == SENTENCE
    tool = openai.pydantic_function_tool(City)
    [call] = client.chat.completions.parse(**ASK, tools=[tool]).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, City)


@case("JSON schema and object")
def formats():
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = client.chat.completions.create(**ASK, response_format=schema).choices[0].message.content
    assert json.loads(answer).keys() == CITY["properties"].keys()
    answer = client.chat.completions.create(**ASK, response_format={"type": "json_object"}).choices[0].message.content
    assert isinstance(json.loads(answer), dict)


@case("reasoning")
def reasoning():
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    message = client.chat.completions.create(**ASK, extra_body=extra).choices[0].message
    assert (message.content, message.reasoning_content) == (SENTENCE, THOUGHT)


@case("responses")
def responses():
    answer = client.responses.create(model=CHAT, input="Who sat?")
    assert answer.output_text == SENTENCE
    with client.responses.stream(model=CHAT, input="Who sat?") as events:
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == SENTENCE
    assert client.responses.parse(model=CHAT, input="Which city?", text_format=City).output_parsed.name == SENTENCE


@case("embeddings")
def embeddings():
    answer = client.embeddings.create(model=VECTORS, input=["a cat", "a dog"])
    lengths = [math.hypot(*item.embedding) for item in answer.data]
    assert all(abs(length - 1) < 1e-4 for length in lengths)
    [short] = client.embeddings.create(model=VECTORS, input="a cat", dimensions=8, encoding_format="float").data
    assert len(short.embedding) == 8


@case("images")
def images():
    answer = client.images.generate(model="fashion-mnist-diffusion", prompt="bag", response_format="b64_json")
    assert base64.b64decode(answer.data[0].b64_json).startswith(b"\x89PNG")


@case("speech")
def speech():
    sound = client.audio.speech.create(
        model="telephone-speech", input="one two", voice="allison", response_format="wav"
    )
    with wave.open(io.BytesIO(sound.content)) as read:
        assert read.getnframes() > 1000


@case("transcriptions")
def transcriptions():
    silence = io.BytesIO()
    with wave.open(silence, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(16000)
        written.writeframes(struct.pack("<16000h", *(int(8000 * math.sin(i / 9)) for i in range(16000))))
    silence.seek(0)
    answer = client.audio.transcriptions.create(model="telephone-transcriber", file=("tone.wav", silence))
    assert isinstance(answer.text, str)


@case("errors")
def errors():
    for wrong, error in (({"model": "none"}, openai.NotFoundError), ({"temperature": 9}, openai.BadRequestError)):
        assert refused(error, lambda wrong=wrong: client.chat.completions.create(**ASK | wrong)).code


run()
