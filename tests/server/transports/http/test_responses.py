"""OpenAI's Responses API, called by OpenAI's own package: the answers of chat completions in another form."""

import asyncio
from contextlib import asynccontextmanager

import openai
import pytest
from pydantic import BaseModel
from tiny_engine import slow_down
from tool_templates import ASK, BEGIN_ID, CLOCK, END_ID, MARKS, THINKING_TEMPLATE, TOOL_TEMPLATE, WEATHER

TOOLS = [{"type": "function", "strict": False, "parameters": {}, **tool["function"]} for tool in (WEATHER, CLOCK)]
RESPOND = {"model": "tiny-generation", "input": "the cat", "max_output_tokens": 24, "temperature": 1.0, "store": False}
BEGUN = {"chat_template_kwargs": {"thinks_at_once": True}, "logit_bias": {str(END_ID): 5, str(BEGIN_ID): -100}}
OK = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture
def calling(serve):
    """A server whose model knows tools, and OpenAI's client of it."""

    @asynccontextmanager
    async def start(template=TOOL_TEMPLATE, **options):
        async with (
            serve(template=template, **{"max_length": 1024, **options}) as serving,
            openai.AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield serving, client

    return start


def content_of_response(response):
    """Reasoning, text and calls."""
    thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.summary]
    calls = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
    return "".join(thoughts), response.output_text, calls


def content_of_chat(choice):
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return getattr(choice.message, "reasoning_content", ""), choice.message.content or "", calls


def counts(usage):
    if hasattr(usage, "input_tokens"):
        return usage.input_tokens, usage.output_tokens, usage.total_tokens, usage.input_tokens_details.cached_tokens
    cached = usage.prompt_tokens_details.cached_tokens
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, cached


CALL_ITEM = {"type": "function_call", "call_id": "abcdefgh1", "name": "clock", "arguments": "{}", "id": "fc_1"}
CALL_PART = {"id": "abcdefgh1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
SAME = {
    "text": ({}, {}),
    "long": ({"max_output_tokens": 300}, {"max_completion_tokens": 300}),
    "instructions": (
        {"instructions": "Be brief.", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]},
    ),
    "turns": (
        {
            "input": [
                {"role": "developer", "content": "a"},
                {"role": "user", "content": "b"},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]},
                {
                    "type": "message",
                    "id": "msg_1",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "c", "annotations": []}],
                },
                CALL_ITEM,
                CALL_ITEM | {"call_id": "abcdefgh2"},
                {"type": "function_call_output", "call_id": "abcdefgh1", "output": "noon"},
                {
                    "type": "function_call_output",
                    "call_id": "abcdefgh2",
                    "output": [{"type": "input_text", "text": "1"}],
                },
                {"role": "assistant", "content": "d"},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "e"}]},
            ]
        },
        {
            "messages": [
                {"role": "developer", "content": "a"},
                {"role": "user", "content": "b"},
                {
                    "role": "assistant",
                    "content": "c",
                    "reasoning_content": "so",
                    "tool_calls": [CALL_PART, CALL_PART | {"id": "abcdefgh2"}],
                },
                {"role": "tool", "tool_call_id": "abcdefgh1", "content": "noon"},
                {"role": "tool", "tool_call_id": "abcdefgh2", "content": "1"},
                {"role": "assistant", "content": "d"},
                {"role": "assistant", "content": "e"},
            ]
        },
    ),
    "calls": (
        {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 300},
        {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_completion_tokens": 300},
    ),
    "a call": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 300},
        {
            "tools": [WEATHER, CLOCK],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "max_completion_tokens": 300,
        },
    ),
    "may call": (
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": [WEATHER, CLOCK], "parallel_tool_calls": False},
    ),
    "no calls": ({"tools": TOOLS, "tool_choice": "none"}, {"tools": [WEATHER, CLOCK], "tool_choice": "none"}),
    "schema": (
        {"text": {"format": {"type": "json_schema", "name": "answer", "schema": OK, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": OK}}},
    ),
    "json": ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    "thought": ({"extra_body": BEGUN}, {"extra_body": BEGUN}),
}


@pytest.mark.parametrize("name", SAME)
async def test_both_apis_answer_the_same_whole_and_streamed(calling, name):
    of_responses, of_chat = SAME[name]
    respond = {**RESPOND, **of_responses}
    chat = {key: value for key, value in ASK.items() if key != "tools"} | {"max_completion_tokens": 24} | of_chat
    async with calling(template=THINKING_TEMPLATE, special=MARKS) as (_, client):
        for seed in (1, 2, 3):
            extra = {**respond.get("extra_body", {}), "seed": seed}
            theirs = await client.chat.completions.create(**{**chat, "extra_body": extra})
            [choice] = theirs.choices
            whole = await client.responses.create(**{**respond, "extra_body": extra})
            assert content_of_response(whole) == content_of_chat(choice)
            assert counts(whole.usage)[:3] == counts(theirs.usage)[:3]
            assert whole.status == ("incomplete" if choice.finish_reason == "length" else "completed")
            async with client.responses.stream(**{**respond, "extra_body": extra}) as stream:
                events = [event async for event in stream]
            last = events[-1].response
            assert events[-1].type == f"response.{whole.status}"
            assert content_of_response(last) == content_of_response(whole)
            assert counts(last.usage)[:3] == counts(whole.usage)[:3]
            assert [item.type for item in last.output] == [item.type for item in whole.output]
            assert [item.status for item in last.output] == [item.status for item in whole.output]
            check_events(events, last)


def check_events(events, last):
    """Checks that events come in OpenAI's order, and that their parts add up to the answer."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert {events[0].response.status, events[1].response.status} == {"in_progress"}
    position = 2
    for index, item in enumerate(last.output):
        names = {
            "reasoning": ("reasoning_summary_part", "reasoning_summary_text"),
            "message": ("content_part", "output_text"),
            "function_call": (None, "function_call_arguments"),
        }
        part, text = names[item.type]
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert events[position : position + len(own)] == own
        position += len(own)
        kinds = [event.type.removeprefix("response.") for event in own]
        begin = ["output_item.added", *([f"{part}.added"] if part else [])]
        end = [f"{text}.done", *([f"{part}.done"] if part else []), "output_item.done"]
        assert kinds[: len(begin)] == begin
        assert kinds[-len(end) :] == end
        deltas = own[len(begin) : -len(end)]
        assert {event.type for event in deltas} <= {f"response.{text}.delta"}
        done = own[-len(end)]
        whole = done.arguments if item.type == "function_call" else done.text
        assert "".join(event.delta for event in deltas) == whole
        assert own[0].item.status == "in_progress"
        assert (own[-1].item.id, own[-1].item.status) == (item.id, item.status)
        assert {event.item_id for event in own if hasattr(event, "item_id")} == {item.id}
    assert position == len(events) - 1


async def test_an_answer_repeats_the_settings_of_its_request(calling):
    asked = {
        **RESPOND,
        "instructions": "Be brief.",
        "metadata": {"run": "1"},
        "user": "me",
        "safety_identifier": "a",
        "prompt_cache_key": "b",
        "service_tier": "flex",
        "top_p": 0.9,
        "tools": TOOLS,
        "tool_choice": "auto",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "truncation": "disabled",
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 3,
    }
    async with calling() as (serving, client):
        answer = await client.responses.create(**asked)
        assert answer.id.startswith("resp_")
        assert (answer.object, answer.model, answer.error) == ("response", "tiny-generation", None)
        for name in (
            "instructions",
            "metadata",
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "top_p",
            "truncation",
        ):
            assert getattr(answer, name) == asked[name], name
        assert (answer.temperature, answer.max_output_tokens, answer.store) == (1.0, 24, False)
        assert (answer.reasoning.effort, answer.text.verbosity, answer.text.format.type) == ("low", "low", "text")
        assert [tool.name for tool in answer.tools] == ["weather", "clock"]
        assert (answer.tool_choice, answer.parallel_tool_calls, answer.background) == ("auto", True, False)
        assert answer.incomplete_details.reason == "max_output_tokens"
        plain = await client.responses.create(model="tiny-generation", input="the cat", max_output_tokens=3)
        assert (plain.metadata, plain.tools, plain.temperature) == ({}, [], 0.0)
        assert plain.usage.output_tokens_details.reasoning_tokens == 0
        assert serving.recorder.finished[-1] == ("/v1/responses", "NoneType")


class Answer(BaseModel):
    """What an answer is read as."""

    ok: bool


async def test_an_answer_is_parsed_as_the_class_that_was_asked_for(calling):
    async with calling() as (_, client):
        answer = await client.responses.parse(**RESPOND, text_format=Answer)
        assert isinstance(answer.output_parsed, Answer)
        assert (answer.status, answer.incomplete_details) == ("completed", None)
        assert answer.completed_at >= answer.created_at
        async with client.responses.stream(**RESPOND, text_format=Answer) as stream:
            async for _ in stream:
                pass
            assert isinstance((await stream.get_final_response()).output_parsed, Answer)


async def test_a_conversation_goes_on_with_the_items_of_an_answer_and_results(calling):
    async with calling(template=THINKING_TEMPLATE, special=MARKS) as (_, client):
        asked = {**RESPOND, "tools": TOOLS, "max_output_tokens": 400, "extra_body": BEGUN | {"seed": 1}}
        first = await client.responses.create(**asked, tool_choice="required", parallel_tool_calls=False)
        call = first.output[-1]
        assert [item.type for item in first.output][-1] == "function_call"
        assert first.usage.output_tokens_details.reasoning_tokens > 0
        items = [{"role": "user", "content": "the cat"}, *first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
        second = await client.responses.create(**{**asked, "input": items, "max_output_tokens": 5})
        assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("fields", [{}, BEGUN, {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 300}])
async def test_log_probabilities_are_those_of_the_text(calling, fields):
    asked = {**RESPOND, "include": ["message.output_text.logprobs"], "top_logprobs": 2, **fields, "seed": 3}
    async with calling(template=THINKING_TEMPLATE, special=MARKS) as (serving, client):
        raw = (await serving.client.post("/v1/responses", json=asked)).json()
        asked = {key: value for key, value in asked.items() if key not in ("seed", *BEGUN)}
        extra = {"seed": 3} | {key: value for key, value in fields.items() if key in BEGUN}
        events = [e async for e in await client.responses.create(**asked, stream=True, extra_body=extra)]
        parts = [part for item in raw["output"] if item["type"] == "message" for part in item["content"]]
        for part in parts:
            text = (
                b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
                .decode(errors="replace")
                .replace("<bos>", "")
            )
            assert part["text"].rstrip("\ufffd") in text
            assert len(text) <= len(part["text"]) + 3
            assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
            streamed = [entry for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
            assert [entry.token for entry in streamed] == [entry["token"] for entry in part["logprobs"]]
        assert bool(parts) == ("tools" not in fields)


WRONG = {
    "previous_response_id": ({"previous_response_id": "resp_1"}, "send the whole conversation in input"),
    "conversation": ({"conversation": "conv_1"}, "send all of its items in input"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "send its text in instructions"),
    "background": ({"background": True}, "set stream instead"),
    "truncation": ({"truncation": "auto"}, "set truncate to have the prompt cut"),
    "input": ({"input": []}, "is empty; give 1 to"),
    "input[1]": (
        {"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_1"}]},
        "not stored",
    ),
    "input[0].content[0].type": (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
        "input_image",
    ),
    "input[0].content[0].image_url": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
        "is missing",
    ),
    "input[0].role": ({"input": [{"role": "aide", "content": "x"}]}, "'user'"),
    "input[0].content": ({"input": [{"role": "user", "content": ""}]}, "is empty"),
    "input[2].arguments": (
        {"input": [{"role": "user", "content": "a"}, CALL_ITEM, CALL_ITEM | {"arguments": "5"}]},
        "is not a JSON object",
    ),
    "input[128]": (
        {"input": [CALL_ITEM | {"call_id": f"abcdefg{index:02}"} for index in range(130)]},
        "is one of 130 calls in a turn; at most 128",
    ),
    "input[0].call_id": ({"input": [{"type": "function_call_output", "call_id": "", "output": "a"}]}, "id of the call"),
    "tools[0].type": (
        {"tools": [{"type": "web_search", "search_context_size": "low"}]},
        "is 'web_search'; this server",
    ),
    "tools[0].parameters": (
        {"tools": [{"type": "function", "name": "a", "parameters": {"type": "string"}}]},
        "schema of an object",
    ),
    "tools[1].parameters": (
        {"tools": [TOOLS[1], {"type": "function", "name": "a", "parameters": {"multipleOf": 99991}}]},
        "multipleOf",
    ),
    "tool_choice": ({"tool_choice": "required"}, "without tools"),
    "tool_choice.name": ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "sun"}}, "none of the tools"),
    "text.format.schema": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}},
        "has a type that JSON does not have",
    ),
    "text.format.type": ({"text": {"format": {"type": "grammar"}}}, ""),
    "max_output_tokens": ({"max_output_tokens": 5000}, "is 5000; must be from 1"),
    "temperature": ({"temperature": 3}, "must be from 0 to 2"),
    "top_logprobs": ({"top_logprobs": 2}, "requires message.output_text.logprobs in include"),
    "include[0]": ({"include": ["all"]}, "message.output_text.logprobs"),
    "reasoning.effort": ({"reasoning": {"effort": "huge"}}, "'minimal'"),
    "stream_options": ({"stream_options": {"include_obfuscation": False}}, "requires stream"),
    "moderation": ({"moderation": {"model": "a"}}, "is not supported"),
    "n": ({"n": 2}, "is not supported"),
    "instructions": ({"instructions": "the cat " * 400}, "tokens; at most"),
}


async def test_what_is_wrong_is_named_as_in_the_request(calling):
    async with calling() as (serving, _):
        for field, (changes, message) in WRONG.items():
            for stream in (False, True):
                body = {**RESPOND, "stream": stream, **changes}
                answer = await serving.client.post("/v1/responses", json=body)
                error = answer.json()["error"]
                if field in ("text.format.type", "instructions"):
                    field = {"text.format.type": "text.format", "instructions": "input"}[field]  # noqa: PLW2901
                assert (answer.status_code, error["param"]) == (400, field), error
                assert message in error["message"], error
                if "stream_options" in changes:
                    break


async def test_nothing_is_stored(calling):
    async with calling() as (_, client):
        answer = await client.responses.create(**RESPOND | {"store": True})
        assert answer.store is False
        for ask in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="answers are not stored") as refused:
                await ask(answer.id)
            assert refused.value.code == "response_not_found"


async def test_a_stream_that_fails_ends_with_what_went_wrong(calling):
    async with calling(drain_timeout=0.05) as (serving, client):
        slow_down(serving.decoder, 0.05)
        stream = await client.responses.create(**RESPOND | {"max_output_tokens": 60}, stream=True)
        first = await anext(stream)
        stopping = asyncio.create_task(serving.server.stop())
        events = [event async for event in stream]
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert events[-2].message == events[-1].response.error.message
        assert (events[-1].response.id, events[-1].response.status) == (first.response.id, "failed")
        assert await stopping
