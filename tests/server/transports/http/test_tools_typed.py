"""Tools, their results, template variables and prompts of tokens in headway's own protocol: as by OpenAI's API."""

import json

import grpc
import httpx2
import pytest
from rpc_failures import failure_of
from tool_templates import ASK, CLOCK, TOOL_TEMPLATE, WEATHER

from headway.v1 import common_pb2
from headway.v1 import generation_service_pb2 as pb
from headway.v1 import generation_service_pb2_grpc as pb_grpc
from headway_client import AsyncClient, ChatMessage, Role, Tool

TOOLS = [
    pb.Tool(
        name=tool["function"]["name"],
        description=tool["function"].get("description", ""),
        parameters_json_schema=json.dumps(tool["function"]["parameters"]) if "parameters" in tool["function"] else "",
    )
    for tool in (WEATHER, CLOCK)
]
TALK = pb.Conversation(messages=[pb.ChatMessage(role=pb.ROLE_USER, content="the cat")])


def request(kind=pb.GenerateTextRequest, seed=1, **fields):
    sampling = common_pb2.SamplingParameters(temperature=1.0, seed=seed)
    talk = {"conversations": [TALK]} if kind is pb.GenerateTextRequest else {"conversation": TALK}
    return kind(
        **{
            "model": "tiny-generation",
            "tools": TOOLS,
            "parameters": pb.GenerationParameters(max_new_tokens=300, sampling=sampling),
            **talk,
            **fields,
        }
    )


@pytest.fixture
async def calling(serve):
    async with (
        serve(template=TOOL_TEMPLATE, max_length=1024) as serving,
        grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel,
    ):
        yield pb_grpc.GenerationServiceStub(channel), serving.client


async def by_openai(client: httpx2.AsyncClient, **fields):
    response = await client.post("/v1/chat/completions", json={**ASK, **fields})
    assert response.status_code == 200, response.text
    return response.json()


OPTIONS = [
    ({"tool_choice": pb.TOOL_CHOICE_REQUIRED}, {"tool_choice": "required"}),
    (
        {"tool_choice": pb.TOOL_CHOICE_REQUIRED, "parallel_tool_calls": False},
        {"tool_choice": "required", "parallel_tool_calls": False},
    ),
    ({"required_tool_name": "clock"}, {"tool_choice": {"type": "function", "function": {"name": "clock"}}}),
    ({}, {}),
    ({"tool_choice": pb.TOOL_CHOICE_NONE}, {"tool_choice": "none"}),
]


@pytest.mark.parametrize(("typed", "openai"), OPTIONS)
async def test_both_doors_answer_the_same_calls(calling, typed, openai):
    stub, client = calling
    for seed in (1, 2):
        [whole] = (await stub.GenerateText(request(seed=seed, **typed))).results
        theirs = (await by_openai(client, seed=seed, **openai))["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in theirs.get("tool_calls", ())]
        assert [(call.name, call.arguments_json) for call in whole.tool_calls] == calls
        assert whole.text == (theirs["content"] or "")
        messages = [m async for m in stub.StreamGenerateText(request(pb.StreamGenerateTextRequest, seed=seed, **typed))]
        assert "".join(message.text_delta for message in messages) == messages[-1].result.text == whole.text
        streamed: list[list[str]] = []
        for delta in (delta for message in messages for delta in message.tool_call_deltas):
            if delta.name:
                assert delta.index == len(streamed)
                streamed.append([delta.id, delta.name, ""])
            streamed[delta.index][2] += delta.arguments_delta
        result = messages[-1].result
        assert streamed == [[call.id, call.name, call.arguments_json] for call in result.tool_calls]
        assert [tuple(call[1:]) for call in streamed] == calls


async def test_results_of_tools_are_read_as_by_openai(calling):
    stub, client = calling
    call = {"id": "abcdefgh1", "name": "clock", "arguments": "{}"}
    talk = pb.Conversation(
        messages=[
            *TALK.messages,
            pb.ChatMessage(
                role=pb.ROLE_ASSISTANT,
                tool_calls=[pb.ToolCall(id=call["id"], name=call["name"], arguments_json=call["arguments"])],
            ),
            pb.ChatMessage(role=pb.ROLE_TOOL, content="noon", tool_call_id=call["id"]),
        ]
    )
    [text] = (await stub.GenerateText(request(conversations=[talk]))).results
    function = {"name": call["name"], "arguments": call["arguments"]}
    answer = await by_openai(
        client,
        seed=1,
        messages=[
            *ASK["messages"],
            {"role": "assistant", "tool_calls": [{"id": call["id"], "type": "function", "function": function}]},
            {"role": "tool", "content": "noon", "tool_call_id": call["id"]},
        ],
    )
    assert text.prompt_token_count == answer["usage"]["prompt_tokens"]
    assert text.text == (answer["choices"][0]["message"]["content"] or "")


async def test_a_prompt_of_tokens_is_that_of_its_text(calling):
    stub, _ = calling
    parameters = pb.GenerationParameters(max_new_tokens=9)
    ids = list(b"the cat")
    by_text = await stub.GenerateText(
        pb.GenerateTextRequest(
            model="tiny-generation",
            prompts=["the cat"],
            parameters=parameters,
            log_probabilities={"include_prompt": True},
        )
    )
    ids = [token.token_id for token in by_text.results[0].prompt_tokens]
    by_ids = pb.GenerateTextRequest(
        model="tiny-generation", prompt_token_ids=[pb.TokenIds(ids=ids)] * 2, parameters=parameters
    )
    answer = await stub.GenerateText(by_ids)
    assert [text.text for text in answer.results] == [by_text.results[0].text] * 2
    assert answer.results[0].prompt_token_count == len(ids)
    stream = pb.StreamGenerateTextRequest(model="tiny-generation", prompt_token_ids={"ids": ids}, parameters=parameters)
    assert [m async for m in stub.StreamGenerateText(stream)][-1].result.text == answer.results[0].text


NOT_ENFORCED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
OF_ANSWER = ("parameters.constraint.json_schema", "response_format.json_schema.schema")
OF_TOOL = ("tools[1].parameters_json_schema", "tools[1].function.parameters")
WRONG_SCHEMAS = [
    ({}, {"answer": {"type": "nothing"}}, OF_ANSWER),
    ({}, {"tool": {"type": "object", "required": 5}}, OF_TOOL),
    ({"required_tool_name": "other"}, {"tool": {"multipleOf": 99991}}, OF_TOOL),
    ({}, {"tool": NOT_ENFORCED, "strict": True, "answer": {"type": "object"}}, OF_TOOL),
    ({}, {"tool": NOT_ENFORCED, "answer": {"type": "object", "not": {}}}, OF_ANSWER),
    ({}, {"answer": {"type": "object", "title": "a" * 70_000}}, OF_ANSWER),
]


@pytest.mark.parametrize(("typed", "wrong", "fields"), WRONG_SCHEMAS)
async def test_of_several_schemas_the_wrong_one_is_named(calling, typed, wrong, fields):
    """By the typed API, chat completions and responses."""
    stub, client = calling
    schema, strict = wrong.get("tool", {}), wrong.get("strict", False)
    tools = [*TOOLS[:1], pb.Tool(name="other", parameters_json_schema=json.dumps(schema), strict=strict)]
    more = dict(typed)
    if "answer" in wrong:
        sampling = pb.GenerationParameters(constraint={"json_schema": json.dumps(wrong["answer"])})
        more["parameters"] = sampling
    failure = await failure_of(stub.GenerateText(request(tools=tools, **more)))
    assert failure.field == fields[0], failure.message
    other = {"name": "other", "parameters": schema, "strict": strict}
    asked = {"tools": [WEATHER, {"type": "function", "function": other}]}
    flat = {"tools": [{"type": "function"} | tool["function"] for tool in asked["tools"]]}
    if typed:
        asked["tool_choice"] = {"type": "function", "function": {"name": "other"}}
        flat["tool_choice"] = {"type": "function", "name": "other"}
    if "answer" in wrong:
        format_of_answer = {"name": "a", "schema": wrong["answer"]}
        asked["response_format"] = {"type": "json_schema", "json_schema": format_of_answer}
        flat["text"] = {"format": {"type": "json_schema"} | format_of_answer}
    answer = await client.post("/v1/chat/completions", json=ASK | asked)
    assert answer.json()["error"]["param"] == fields[1], answer.text
    answer = await client.post("/v1/responses", json={"model": ASK["model"], "input": "the cat"} | flat)
    expected = {"response_format.json_schema.schema": "text.format.schema"}.get(fields[1], "tools[1].parameters")
    assert answer.json()["error"]["param"] == expected, answer.text


async def test_keywords_that_are_not_enforced_are_left_to_the_model_by_every_api(calling):
    stub, client = calling
    required = {"tool_choice": pb.TOOL_CHOICE_REQUIRED, "parallel_tool_calls": False}
    tool = pb.Tool(name="other", parameters_json_schema=json.dumps(NOT_ENFORCED))
    [text] = (await stub.GenerateText(request(tools=[tool], **required))).results
    function = {"type": "function", "function": {"name": "other", "parameters": NOT_ENFORCED}}
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    answer = await by_openai(client, seed=1, tools=[function], **options)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert text.tool_calls[0].arguments_json == call["function"]["arguments"]


def asked(**message):
    return {"conversations": [pb.Conversation(messages=[*TALK.messages, pb.ChatMessage(**message)])]}


CALL = pb.ToolCall(id="a", name="clock", arguments_json="{}")


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"tools": [], "tool_choice": pb.TOOL_CHOICE_AUTO}, "tool_choice", "is set without tools"),
        ({"tools": [], "parallel_tool_calls": False}, "parallel_tool_calls", "is set without tools"),
        ({"tools": [], "required_tool_name": "clock"}, "required_tool_name", "is set without tools"),
        ({"tool_choice": 9}, "tool_choice", "is 9; must be one of TOOL_CHOICE_AUTO (1), TOOL_CHOICE_NONE (2)"),
        ({"required_tool_name": "sun"}, "required_tool_name", "is none of the tools weather, clock"),
        ({"tools": [TOOLS[0]] * 2}, "tools", "have the name weather twice"),
        ({"tools": TOOLS * 65}, "tools", "has 130 elements, the limit is 128"),
        ({"tools": [pb.Tool(name="a b")]}, "tools[0].name", "must have 1 to 64 letters"),
        ({"tools": [pb.Tool(name="a", parameters_json_schema="[")]}, "tools[0].parameters_json_schema", "is not JSON"),
        (
            {"tools": [pb.Tool(name="a", parameters_json_schema="[1]")]},
            "tools[0].parameters_json_schema",
            "is not a JSON",
        ),
        (
            {"tools": [pb.Tool(name="a", parameters_json_schema='{"type": "string"}')]},
            "tools[0].parameters_json_schema",
            "must be the schema of an object",
        ),
        ({"echo": True}, "echo", "is set together with tools"),
        ({"parameters": {"constraint": {"regex": "a"}}}, "parameters.constraint", "is set together with tools"),
        ({"conversations": [], "prompts": ["a"]}, "tools", "requires a conversation"),
        (
            {"tools": [], "conversations": [], "prompts": ["a"], "chat_template_kwargs_json": "{}"},
            "chat_template_kwargs_json",
            "requires a conversation",
        ),
        ({"chat_template_kwargs_json": "3"}, "chat_template_kwargs_json", "is not a JSON object"),
        ({"chat_template_kwargs_json": '{"a": NaN}'}, "chat_template_kwargs_json", "is not JSON"),
        ({"chat_template_kwargs_json": '{"a": 1e999}'}, "chat_template_kwargs_json", "is not JSON"),
        ({"chat_template_kwargs_json": '{"a": ' + "[" * 9999}, "chat_template_kwargs_json", "is not JSON"),
        (
            {"chat_template_kwargs_json": '{"sun": 1}'},
            "chat_template_kwargs_json.sun",
            "is not read by the model's chat",
        ),
        ({"prompts": ["a"]}, "conversations", "is given together with prompts"),
        (
            {"conversations": [], "prompts": ["a"], "prompt_token_ids": [{"ids": [1]}]},
            "prompt_token_ids",
            "is given together with prompts",
        ),
        (
            {"tools": [], "conversations": [], "prompt_token_ids": [{"ids": [1]}, {}]},
            "prompt_token_ids[1].ids",
            "is empty",
        ),
        ({"tools": [], "conversations": [], "prompt_token_ids": [{"ids": [-1]}]}, "prompt_token_ids[0].ids[0]", "-1"),
        (
            {"tools": [], "conversations": [], "prompt_token_ids": [{"ids": [10**6]}]},
            "prompt_token_ids[0].ids[0]",
            "1000000",
        ),
        (asked(role=pb.ROLE_TOOL, content="a"), "conversations[0].messages[1].tool_call_id", "belongs to role tool"),
        (
            asked(role=pb.ROLE_USER, content="a", tool_call_id="a"),
            "conversations[0].messages[1].tool_call_id",
            "belongs to role",
        ),
        (
            asked(role=pb.ROLE_USER, content="a", tool_calls=[CALL]),
            "conversations[0].messages[1].tool_calls",
            "the role is user",
        ),
        (
            asked(role=pb.ROLE_ASSISTANT, tool_calls=[pb.ToolCall(name="clock", arguments_json="x")]),
            "conversations[0].messages[1].tool_calls[0].arguments_json",
            "is not JSON",
        ),
        (
            asked(role=pb.ROLE_ASSISTANT, tool_calls=[CALL] * 129),
            "conversations[0].messages[1].tool_calls",
            "has 129 elements",
        ),
    ],
)
async def test_what_is_wrong_with_tools_is_named(calling, fields, field, says):
    stub, _ = calling
    failure = await failure_of(stub.GenerateText(request(**fields)))
    assert (failure.code, failure.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert says in failure.message


async def test_a_conversation_about_a_tool_goes_on_by_the_client(serve):
    async with (
        serve(template=TOOL_TEMPLATE, max_length=1024) as serving,
        AsyncClient(f"127.0.0.1:{serving.grpc_port}") as client,
    ):
        asked = {
            "model": "tiny-generation",
            "tools": [Tool("clock")],
            "max_new_tokens": 90,
            "temperature": 1.0,
            "seed": 1,
        }
        turns = [ChatMessage(Role.USER, "the cat")]
        [answer] = await client.chat(turns, tool_choice="required", parallel_tool_calls=False, **asked)
        [call] = answer.tool_calls
        assert (call.name, call.arguments) == ("clock", {})
        async with client.stream_chat(turns, tool_choice="required", parallel_tool_calls=False, **asked) as stream:
            deltas = [delta async for part in stream for delta in part.tool_calls]
        assert deltas[0].name == "clock"
        assert "".join(delta.arguments_delta for delta in deltas) == call.arguments_json
        turns.append(ChatMessage(Role.ASSISTANT, answer.text, tool_calls=answer.tool_calls))
        turns.append(ChatMessage(Role.TOOL, "noon", tool_call_id=call.id))
        [last] = await client.chat(turns, **asked)
        assert last.prompt_token_count > answer.prompt_token_count
