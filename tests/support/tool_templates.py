"""Chat templates that show tools, and a call of OpenAI's API that offers some."""

from tiny_engine import byte_tokenizer

TOOL_TEMPLATE = """\
{%- if tools %}<bos>system: call {% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ "\\n" }}{% endif %}
{%- for message in messages %}<bos>{{ message.role }}: {{ message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- "\\n<call>\\n" }}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
        {{- "\\n</call>" }}
    {%- endfor %}{{ "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}<bos>assistant: {% endif %}"""
"""Calls as most templates write them: a line of JSON in marks."""

BARE_TEMPLATE = """\
{%- if tools %}<bos>system: {{ tools | tojson }}{{ "\\n" }}{% endif %}
{%- for message in messages %}<bos>{{ message.role }}: {% if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}<eos>
    {%- else %}{{ message.content }}<eos>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<bos>assistant: {% endif %}"""
"""Calls without marks, one in a turn, and an end of the turn that is a special token."""

MARKS = ("<think>", "</think>")
BEGIN_ID, END_ID = map(byte_tokenizer(MARKS).token_to_id, MARKS)
THINKING_TEMPLATE = """\
{%- if tools %}<bos>system: {{ tools | tojson }}{{ "\\n" }}{% endif %}
{%- for message in messages %}<bos>{{ message.role }}: {{ message.reasoning_content }}{{ message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- "\\n<call>\\n" }}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
        {{- "\\n</call>" }}
    {%- endfor %}{{ "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}<bos>assistant: {% if enable_thinking is defined and not enable_thinking %}
        {{- "<think></think>" }}{% elif thinks_at_once %}<think>{% endif %}
{%- endif %}"""
"""Reasoning between marks, which the prompt may begin or have ended."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says what it is like outside <bos>.",
        "parameters": {
            "properties": {"city": {"enum": ["Bonn", "Kiel"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK = {
    "model": "tiny-generation",
    "messages": [{"role": "user", "content": "the cat"}],
    "tools": [WEATHER, CLOCK],
    "max_completion_tokens": 300,
    "temperature": 1.0,
}
