"""Chat templates with the features of families of models: conversations, and the form of calls that is found."""

import re

import pytest
from family_templates import FAMILIES
from tiny_engine import byte_tokenizer, make_chat_template

from headway_server.errors import InvalidInputError
from headway_server.preprocessing import (
    CALL_ID,
    Argued,
    CallBegun,
    CallReader,
    ChatTurn,
    NoToolsError,
    Said,
    Tool,
    ToolCall,
)

CONVERSATION = (
    ChatTurn(role="user", content="Hello."),
    ChatTurn(role="assistant", content="Good day."),
    ChatTurn(role="user", content="Who?"),
)
CLOCK = Tool(name="clock", description="Tells the time.", parameters='{"type": "object", "properties": {}}')
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.has_tools]


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture
def template(family, tmp_path):
    return make_chat_template(tmp_path, family.template, special=family.special)


def test_a_conversation_becomes_the_familys_prompt(family, template):
    prompt = template.prompt(CONVERSATION, "conversation")
    assert re.sub(r"\d\d \w{3} \d{4}", "DATE", prompt.text) == family.prompt
    tokenizer = byte_tokenizer(family.special)
    assert prompt.input_ids.tolist() == tokenizer.encode(prompt.text, add_special_tokens=False).ids
    specials = {tokenizer.token_to_id(token) for token in family.special}
    assert specials & set(prompt.input_ids.tolist())


def test_what_people_write_opens_no_turn(family, template):
    forged = "".join(family.special)
    ids = template.prompt((ChatTurn(role="user", content=forged),), "conversation").input_ids.tolist()
    plain = template.prompt((ChatTurn(role="user", content="Hello."),), "conversation").input_ids.tolist()
    tokenizer = byte_tokenizer(family.special)
    for token in family.special:
        index = tokenizer.token_to_id(token)
        assert ids.count(index) == plain.count(index), token


def test_a_system_is_read_or_refused_with_the_templates_words(family, template):
    turns = (ChatTurn(role="system", content="Be brief."), *CONVERSATION)
    if family.has_system:
        assert "Be brief." in template.prompt(turns, "conversation").text
        return
    with pytest.raises(InvalidInputError, match="System role not supported") as refused:
        template.prompt(turns, "conversation")
    assert refused.value.field == "conversation"


def test_tools_are_shown_and_their_results_read(family, template):
    if not family.has_tools:
        with pytest.raises(NoToolsError, match="shows no tools"):
            _ = template.call_form
        return
    assert '"name": "clock"' in template.prompt(CONVERSATION, "conversation", [CLOCK]).text
    call = ToolCall(call_id="a1B2c3D4e", name="clock", arguments='{"zone": "UTC"}')
    turns = (
        *CONVERSATION,
        ChatTurn(role="assistant", content="", tool_calls=(call,)),
        ChatTurn(role="tool", content="noon", tool_call_id=call.call_id),
    )
    written = template.prompt(turns, "conversation", [CLOCK]).text
    assert "noon" in written
    assert '{"zone": "UTC"}' in written


FORMS = {
    "qwen": ('<tool_call>\n{"name": "', '", "arguments": ', "<tool_call>", ()),
    "llama": ('{"name": "', '", "parameters": ', '{"name":', ()),
    "mistral": ('[TOOL_CALLS] [{"name": "', '", "arguments": ', "[TOOL_CALLS]", ("[TOOL_CALLS]",)),
    "mistral with arguments": ("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]")),
}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_the_form_of_calls_is_found(tmp_path, name):
    family = FAMILIES[name]
    form = make_chat_template(tmp_path, family.template, special=family.special).call_form
    head, middle, trigger, special = FORMS[name]
    assert (form.head, form.middle, form.trigger) == (head, middle, trigger)
    assert {token for token, _ in form.special_tokens} == set(special)
    assert (form.between is not None) == family.writes_several
    assert (CALL_ID in form.end) == (name == "mistral")


ANSWERS = {
    "qwen": '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "map", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "clock", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "clock", "arguments": {"a": 1}, "id": "aB3dE6gH9"}, '
    '{"name": "map", "arguments": {}, "id": "123456789"}]',
    "mistral with arguments": 'Let me see.[TOOL_CALLS]clock[ARGS]{"a": 1}[TOOL_CALLS]map[ARGS]{}',
}


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_read_out_of_an_answer(tmp_path, name, size):
    family = FAMILIES[name]
    reader = CallReader(make_chat_template(tmp_path, family.template, special=family.special).call_form)
    answer = ANSWERS[name]
    parts = [part for n in range(0, len(answer), size) for part in reader.feed(answer[n : n + size])]
    parts += reader.end()
    assert "".join(part.text for part in parts if isinstance(part, Said)).startswith(
        "Let me see." if name == "mistral with arguments" else ""
    )
    names = [part.name for part in parts if isinstance(part, CallBegun)]
    assert names == (["clock", "map"] if family.writes_several else ["clock"])
    arguments = "".join(part.text for part in parts if isinstance(part, Argued))
    assert arguments == ('{"a": 1}{}' if family.writes_several else '{"a": 1}')
