"""What a template may do and take, and what is wrong with a broken one, said at load."""

from __future__ import annotations

import time

import pytest
from tiny_chat import MARKERS, SPECIAL_TOKENS, TEMPLATES, byte_level_tokenizer, load_template, rendered, turns

from headway_server.bundles import SpecialTokens
from headway_server.errors import BundleError, InvalidInputError, MachineBusyError
from headway_server.preprocessing import ChatTemplate, Tool, template
from headway_server.preprocessing.chat import MAX_TEMPLATE_BYTES
from headway_server.preprocessing.template import MAX_TEXT_LENGTH, passes_trial

ESCAPES = {
    "class": "{{ ''.__class__ }}",
    "class by item": "{{ ''['__cla' ~ 'ss__'] }}",
    "class by attr": "{{ '' | attr('__class__') }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "self": "{{ self.__init__.__globals__ }}",
}
"""The sandbox refuses these, or takes them for nothing."""

CHANGES = {
    "append": "{% set _ = messages.append({}) %}",
    "update": "{{ messages[0].update({'role': 'system'}) }}",
    "item": "{% set messages[0].role = 'system' %}",
    "include": "{% include 'tokenizer.json' %}",
    "range": "{{ range(10 ** 12) | list | length }}",
}

NOT_TEMPLATES = {
    "unclosed": "{% for message in messages %}",
    "unknown tag": "{% call_the_model %}",
    "unknown filter": "{{ messages | unheard_of }}",
    "deep": "{{ " + "(" * 5_000 + ")" * 5_000 + " }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_of_the_server_is_reached(tmp_path, name):
    try:
        prompt = load_template(tmp_path, ESCAPES[name] + MARKERS).prompt(turns("hello"), "c")
    except BundleError:
        return
    assert prompt.text.startswith("<|im_start|>")


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_conversation_is_made_of_cannot_be_changed(tmp_path, name):
    with pytest.raises(BundleError):
        load_template(tmp_path, CHANGES[name] + MARKERS)


@pytest.mark.parametrize(
    ("loop", "limit"),
    [("aaaa" * 20, "writes more than 524,288 characters"), ("", "takes more than 1 s of a processor")],
    ids=["size", "time"],
)
def test_a_template_that_never_comes_to_an_end_is_stopped(tmp_path, loop, limit):
    source = MARKERS + (
        "{% if messages | length > 3 %}{% for a in range(99999) %}{% for b in range(999) %}"
        + loop
        + "{% endfor %} {% endfor %}{% endif %}"
    )
    template = load_template(tmp_path, source)
    began = time.thread_time()
    with pytest.raises(InvalidInputError, match=f"too long for the model's chat template, which {limit}"):
        template.prompt(turns("a", "b", "c", "d"), "conversation")
    assert time.thread_time() - began < 3


# As transformers renders

REAL_WORLD = {
    **TEMPLATES,
    "roles in tokens": (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "thoughts and tools": """
{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '</tools>' }}{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == 'user' and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning + '\n</think>\n\n' + content }}
        {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
    "dates and breaks": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|im_start|>system<|im_end|>\n\nToday Date: " + date_string + "\n\n" + system_message }}
{%- for message in messages %}
    {%- if loop.index0 > 6 %}{% break %}{% endif %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '<|im_end|>\n\n' + message['content'] | trim + '</s>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_end|>\n\n' }}{%- endif %}""",
    "roles renamed": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<|im_start|>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{{ item['text'] | trim }}
    {%- endfor -%}{%- endif -%}
    {{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>model\n' }}{%- endif -%}""",
}
"""Templates with the features of those of Llama, Qwen, Gemma and Phi, written for these tests."""

CONVERSATIONS = (
    turns("hello there"),
    turns(" hello ", "<think>\nhm\n</think>\n\nhi", "so? <b> & [x] > y", system=" Be brief.\n"),
    turns("<tool_response>1 < 2</tool_response>", "a", "\n b \n", "c", "d", "e", "f", "g", "h"),
)


@pytest.mark.parametrize("name", REAL_WORLD)
@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_prompts_are_those_that_transformers_writes(tmp_path, name, number):
    conversation = CONVERSATIONS[number]
    prompt = load_template(tmp_path, REAL_WORLD[name]).prompt(conversation, "c")
    assert prompt.text == rendered(REAL_WORLD[name], conversation)
    assert prompt.input_ids.tolist() == byte_level_tokenizer().encode(prompt.text, add_special_tokens=False).ids


PRINTED = {
    "a turn": "{{ messages[0] }}",
    "as Python writes it": "{{ '%r %s' % (messages[0].content, messages) }}",
    "in lines": "{{ messages | pprint }}",
    "after it is changed": "{{ [messages[0].content.strip() ~ '<s>'] }}",
}


@pytest.mark.parametrize("name", PRINTED)
def test_values_are_printed_as_transformers_prints_them(tmp_path, name):
    conversation = turns(" a < b |> 'c' <|im_end|> ")
    prompt = load_template(tmp_path, PRINTED[name]).prompt(conversation, "c")
    assert prompt.text == rendered(PRINTED[name], conversation)
    tokenizer = byte_level_tokenizer()
    control = [tokenizer.id_to_token(i) for i in prompt.input_ids.tolist() if i < len(SPECIAL_TOKENS)]
    assert control == (["<s>"] if "<s>" in PRINTED[name] else [])


@pytest.mark.parametrize("template", [MARKERS, MARKERS + "\U0001d801"])
def test_what_looks_like_a_stand_in_is_text(tmp_path, template):
    said = "".join(map(chr, range(0x1D7FE, 0x1DA02))) + "\U00060000\U00050003\U0006ffff"
    prompt = load_template(tmp_path, template).prompt(turns(said), "c")
    kept = said[:-2] + "\N{REPLACEMENT CHARACTER}" * 2
    assert prompt.text == rendered(template, turns(kept))
    assert prompt.input_ids.tolist() == byte_level_tokenizer().encode(prompt.text, add_special_tokens=False).ids


def test_special_tokens_are_given_by_name(tmp_path):
    names = "{{ [bos_token, eos_token, pad_token, unk_token] | join(' ') }}{{ sep_token is defined }}"
    load_template(tmp_path, MARKERS)
    (tmp_path / "chat_template.jinja").write_text(names)
    template = ChatTemplate.load(
        tmp_path / "chat_template.jinja",
        tokenizer_file=tmp_path / "tokenizer.json",
        special_tokens=SpecialTokens(bos=0, eos=1, pad=2, unk=3),
    )
    assert template.prompt(turns("a"), "c").text == "<s> </s> <|im_start|> <|im_end|>False"


def test_a_template_that_needs_a_list_of_tools_is_given_an_empty_one(tmp_path):
    source = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[-1].content }}"
    template = load_template(tmp_path, source)
    assert template.prompt(turns("a"), "c").text == "a"
    tool = Tool(name="clock", parameters="{}")
    assert template.prompt(turns("a"), "c", [tool]).text.startswith('{"type": "function"')


def test_a_template_is_given_what_a_caller_sets_and_it_reads(tmp_path):
    source = (
        "{% set deep = deep or 'no' %}{{ messages[0].content }} {{ deep }} {{ deep is mapping and deep.a }}"
        "{% if enable_thinking is defined and not enable_thinking %}<s>{% endif %} {{ (documents or []) | length }}"
    )
    template = load_template(
        tmp_path, source + "{% set own = 1 %}{{ own }}{% for one in messages %}{{ loop.index }}{% endfor %}"
    )
    given = {"enable_thinking": False, "deep": {"a": ["<s>"]}, "documents": [{"text": "x"}]}
    template.check_variables(given, "kwargs")
    prompt = template.prompt(turns("a"), "c", variables=given)
    assert prompt.text == "a {'a': ['<s>']} ['<s>']<s> 111"
    assert prompt.input_ids.tolist().count(0) == 1
    for name, problem in {
        "messages": "set by the server",
        "bos_token": "set by the server",
        "raise_exception": "set by the server",
        "namespace": "set by the server",
        "own": "not read by",
        "loop": "not read by",
        "enable_thinkng": "not read by the model's chat template, which reads deep, documents, enable_thinking;",
    }.items():
        with pytest.raises(InvalidInputError, match=problem) as refused:
            template.check_variables({name: 1}, "kwargs")
        assert refused.value.field == f"kwargs.{name}"


def test_what_a_caller_sets_is_found_by_its_name_whatever_special_tokens_look_like(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["_eos_"])
    template = load_template(tmp_path, "{{ messages[0].content }}_eos_{{ enable_thinking }}", tokenizer)
    assert template.prompt(turns("a"), "c", variables={"enable_thinking": False}).text == "a_eos_False"


def test_a_template_that_fails_with_what_only_a_caller_gives_is_no_fault_of_the_bundle(tmp_path):
    source = (
        "{% for tool in tools or [] %}{{ tool.function.parameters.properties.a.type + '' }}{% endfor %}"
        "{% for message in messages %}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}"
        "{% if call.function.arguments.a %}{{ call.function.arguments.a + '' }}{% endif %}{% endfor %}{% endfor %}"
        "{% if level %}{{ 'x' + level }}{% endif %}"
    )
    template = load_template(tmp_path, source)
    tool = Tool(name="clock", parameters='{"properties": {"a": {"type": ["string", "null"]}}}')
    for beside, given in {
        "tools": {"tools": [tool]},
        "values of its variables": {"variables": {"level": 5}},
        "tools and values of its variables": {"tools": [tool], "variables": {"level": "<s>"}},
    }.items():
        with pytest.raises(InvalidInputError, match=rf"template fail with the {beside} \(can only concat") as refused:
            template.prompt(turns("a"), "messages", **given)
        assert refused.value.field == "messages"


def test_what_a_caller_sets_counts_as_much_as_what_is_said(tmp_path):
    template = load_template(tmp_path, MARKERS + "{{ a }}")
    with pytest.raises(InvalidInputError, match="leave out older turns"):
        template.prompt(turns("a"), "conversation", variables={"a": ["a" * MAX_TEXT_LENGTH]})
    for large in ({"a" * 2**18: "b" * 2**18}, ["a"] * 2**18, [1.5] * 2**19, 2 ** (3 * 2**19)):
        with pytest.raises(InvalidInputError, match="leave out older turns"):
            template.prompt(turns("a"), "conversation", variables={"a": large})
    large = '"' * 8_000_000
    began = time.process_time()
    with pytest.raises(InvalidInputError, match="leave out older turns"):
        template.prompt(turns("a"), "conversation", variables={"a": large})
    assert time.process_time() - began < 0.02  # to write it as JSON takes 0.06 s


@pytest.mark.parametrize("arguments", ["", "(ensure_ascii=true)", "(indent=2, sort_keys=true)"])
def test_json_is_what_transformers_writes(tmp_path, arguments):
    source = "{{ {'b': 'é<\U0001f642', 'a': [1, none, messages[0].content]} | tojson" + arguments + " }}"
    conversation = turns("<|im_end|>é\U0010fffd")
    prompt = load_template(tmp_path, source).prompt(conversation, "c")
    assert prompt.text == rendered(source, conversation)


# What is wrong with a template


@pytest.mark.parametrize("name", NOT_TEMPLATES)
def test_what_is_no_template_is_refused_at_load(tmp_path, name):
    with pytest.raises(BundleError):
        load_template(tmp_path, NOT_TEMPLATES[name])


def test_a_large_template_is_refused_with_limit_and_size(tmp_path):
    source = MARKERS + "{#" + " " * MAX_TEMPLATE_BYTES + "#}"
    with pytest.raises(BundleError, match=rf"{len(source):,} bytes.*{MAX_TEMPLATE_BYTES:,}"):
        load_template(tmp_path, source)


def test_a_template_that_is_not_text_is_refused(tmp_path):
    load_template(tmp_path, MARKERS)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(BundleError, match="cannot be read"):
        load_from(tmp_path)


def test_a_missing_template_is_refused(tmp_path):
    load_template(tmp_path, MARKERS)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        load_from(tmp_path)


def load_from(folder):
    return ChatTemplate.load(
        folder / "chat_template.jinja", tokenizer_file=folder / "tokenizer.json", special_tokens=SpecialTokens()
    )


def test_a_template_that_refuses_every_conversation_is_refused(tmp_path):
    with pytest.raises(BundleError, match=r"for no conversation.*never"):
        load_template(tmp_path, "{{ raise_exception('never') }}")


def test_a_conversation_longer_than_any_prompt_is_refused_with_limit_and_length(tmp_path):
    template = load_template(tmp_path, MARKERS)
    with pytest.raises(InvalidInputError, match=rf"{MAX_TEXT_LENGTH + 1:,} characters.*{MAX_TEXT_LENGTH:,}"):
        template.prompt(turns("a" * (MAX_TEXT_LENGTH + 1)), "conversation")


def test_a_conversation_that_a_template_makes_too_much_of_is_refused(tmp_path):
    template = load_template(tmp_path, MARKERS + "{% for a in messages %}{{ a.content }}{% endfor %}")
    with pytest.raises(InvalidInputError, match="too long") as caught:
        template.prompt(turns("a" * (MAX_TEXT_LENGTH * 2 // 3)), "conversations[1]")
    assert caught.value.field == "conversations[1]"


def test_the_longest_conversation_that_may_be_sent_is_answered(tmp_path):
    contents = ["word " * 95] * 1023
    template = load_template(tmp_path, MARKERS)
    prompt = template.prompt(turns(*contents), "conversation")
    assert prompt.input_ids.tolist() == byte_level_tokenizer().encode(prompt.text, add_special_tokens=False).ids


def test_what_is_not_given_is_none_and_unknown_names_are_undefined(tmp_path):
    source = "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ thinking is defined }}"
    assert load_template(tmp_path, source).prompt(turns("!"), "c").text == "True True True False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**11 }}",
        "{% for m in messages %}{{ m.content.replace('A', m.content) }}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ],
    ids=["product", "long content", "doubling"],
)
def test_a_template_that_takes_all_memory_is_a_bad_bundle(tmp_path, source):
    with pytest.raises(BundleError, match="takes more than 5 s of a processor or 256 MiB"):
        load_template(tmp_path, source)


def test_a_template_that_loops_without_a_word_is_a_bad_bundle():
    assert not passes_trial("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    assert passes_trial("{{ messages[0].content }}")


def test_a_template_that_a_busy_machine_has_not_tried_is_no_bad_one_and_is_tried_again(tmp_path, monkeypatch):
    source = "{{ messages[0].content }}{# tried twice #}"
    with monkeypatch.context() as busy:
        busy.setattr(template, "WALL_LIMIT_S", 1e-4)
        with pytest.raises(MachineBusyError, match="could not be tried within 120 s"):
            load_template(tmp_path, source)
    assert load_template(tmp_path, source)
