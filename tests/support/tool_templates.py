"""Chat templates that show tools, and a call of OpenAI's API that offers some."""

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
