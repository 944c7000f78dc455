"""What a model thinks, apart from what it says, by OpenAI's API."""

import json

import pytest
from tool_templates import BEGIN_ID, END_ID, MARKS, THINKING_TEMPLATE

ASK = {
    "model": "tiny-generation",
    "messages": [{"role": "user", "content": "the cat"}],
    "max_completion_tokens": 24,
    "temperature": 1.0,
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture
def thinking(serve):
    return lambda: serve(template=THINKING_TEMPLATE, special=MARKS, max_length=1024)


async def ask(serving, **fields):
    answer = await serving.client.post("/v1/chat/completions", json=ASK | fields)
    return answer.status_code, answer.json()


async def message_of(serving, **fields):
    status, body = await ask(serving, **fields)
    assert status == 200, body
    return body["choices"][0]["message"]


async def stream_of(serving, **fields):
    """What the deltas of a stream have said, thought and called."""
    answer = await serving.client.post("/v1/chat/completions", json=ASK | fields | {"stream": True})
    said = {"content": "", "reasoning_content": ""}
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for name in said:
                    said[name] += choice["delta"].get(name, "")
    return said


async def test_thinking_that_the_prompt_begins_is_told_apart_whole_and_as_it_comes(thinking):
    begun = {"chat_template_kwargs": {"thinks_at_once": True}}
    never_ends = begun | {"logit_bias": {str(END_ID): -100, str(BEGIN_ID): -100}, "seed": 1}
    ends = begun | {"logit_bias": {str(END_ID): 100}, "seed": 1, "max_completion_tokens": 1}
    async with thinking() as serving:
        message = await message_of(serving, **never_ends)
        assert message["content"] == ""
        assert message["reasoning_content"]
        streamed = await stream_of(serving, **never_ends)
        assert (streamed["content"], streamed["reasoning_content"]) == ("", message["reasoning_content"])
        message = await message_of(serving, **ends)
        assert message == {"role": "assistant", "content": "", "refusal": None}
        for seed in range(8):
            fields = begun | {"logit_bias": {str(END_ID): 5, str(BEGIN_ID): -100}, "seed": seed}
            message, streamed = await message_of(serving, **fields), await stream_of(serving, **fields)
            assert streamed == {
                "content": message["content"],
                "reasoning_content": message.get("reasoning_content", ""),
            }
            assert "</think>" not in streamed["reasoning_content"]


async def test_a_template_is_asked_not_to_think_by_its_own_name(thinking):
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "seed": 1}
    async with thinking() as serving:
        message = await message_of(serving, logit_bias={str(END_ID): -100, str(BEGIN_ID): -100}, **fields)
        assert "reasoning_content" not in message
        assert message["content"]
        _, asked = await ask(serving, **fields)
        _, plain = await ask(serving, seed=1)
        assert asked["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 2
        status, body = await ask(serving, chat_template_kwargs={"enable_thinkng": False})
        assert (status, body["error"]["param"]) == (400, "chat_template_kwargs.enable_thinkng")
        assert "which reads" in body["error"]["message"]
        assert "enable_thinking" in body["error"]["message"]
        status, body = await ask(serving, chat_template_kwargs={"messages": []})
        assert (status, body["error"]["param"]) == (400, "chat_template_kwargs.messages")


async def test_thoughts_may_come_back_and_belong_to_the_assistant(thinking):
    turns = [*ASK["messages"], {"role": "assistant", "content": "a", "reasoning_content": "bcd"}, *ASK["messages"]]
    without = [*ASK["messages"], {"role": "assistant", "content": "a"}, *ASK["messages"]]
    async with thinking() as serving:
        _, more = await ask(serving, messages=turns)
        _, less = await ask(serving, messages=without)
        assert more["usage"]["prompt_tokens"] > less["usage"]["prompt_tokens"]
        status, body = await ask(serving, messages=[{"role": "user", "content": "a", "reasoning_content": "b"}])
        assert (status, body["error"]["param"]) == (400, "messages[0].reasoning_content")


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_a_model_thinks_before_it_calls(thinking, choice):
    begun = {"chat_template_kwargs": {"thinks_at_once": True}, "tools": [CLOCK], "tool_choice": choice}
    async with thinking() as serving:
        most = 600 if choice == "required" else 40
        fields = begun | {"logit_bias": {str(END_ID): 5}, "max_completion_tokens": most, "parallel_tool_calls": False}
        thoughts = []
        for seed in range(3):
            message = await message_of(serving, seed=seed, **fields)
            streamed = await stream_of(serving, seed=seed, **fields)
            assert streamed["reasoning_content"] == message.get("reasoning_content", "")
            thoughts.append(streamed["reasoning_content"])
            if choice == "required":
                [call] = message["tool_calls"]
                assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("clock", {})
        assert any(thoughts)


async def test_an_answer_that_is_json_is_no_thought(thinking):
    fields = {"chat_template_kwargs": {"thinks_at_once": True}, "response_format": {"type": "json_object"}, "seed": 3}
    async with thinking() as serving:
        message = await message_of(serving, **fields)
        assert "reasoning_content" not in message
        assert message["content"].startswith("{")


async def test_json_follows_a_thought_of_its_budget(thinking):
    fields = {"thinking_token_budget": 4, "response_format": {"type": "json_object"}, "logit_bias": {str(END_ID): -100}}
    async with thinking() as serving:
        for budget in (0, 4):
            begun = fields | {"chat_template_kwargs": {"thinks_at_once": True}, "thinking_token_budget": budget}
            message = await message_of(serving, **begun, seed=3)
            assert bool(message.get("reasoning_content")) == bool(budget)
            assert message["content"].startswith("{")
            streamed = await stream_of(serving, **begun, seed=3)
            assert (streamed["content"], streamed["reasoning_content"]) == (
                message["content"],
                message.get("reasoning_content", ""),
            )
        status, body = await ask(serving, thinking_token_budget=-1)
        assert (status, body["error"]["param"]) == (400, "thinking_token_budget")
