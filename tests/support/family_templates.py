"""Chat templates with the features of families of models, written for these tests: none is a family's own."""

from dataclasses import dataclass

CHATML_WITH_TAGS = """\
{%- macro open(role) %}<|im_start|>{{ role }}{{ "\\n" }}{% endmacro %}
{%- set first = messages[0] %}
{%- if tools or first.role == "system" %}
    {{- open("system") }}{{ first.content if first.role == "system" else "Help." }}
    {%- if tools %}
        {{- "\\n\\n# Tools\\nCall them within <tool_call></tool_call>.\\n<tools>" }}
        {%- for tool in tools %}{{ "\\n" ~ tool | tojson }}{% endfor %}
        {{- "\\n</tools>" }}
    {%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in (messages[1:] if first.role == "system" else messages) %}
    {%- if message.role == "tool" %}
        {{- open("user") }}{{ "<tool_response>\\n" ~ message.content ~ "\\n</tool_response>" }}
    {%- else %}
        {{- open(message.role) }}{{ message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "\\n" if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ "}\\n</tool_call>" }}
        {%- endfor %}
    {%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ open("assistant") }}{% endif %}"""
"""As Qwen's: ChatML, tools and calls in tags, results in the user's turn."""

HEADERS = """\
{{- bos_token }}
{%- macro header(role) %}<|start_header_id|>{{ role }}<|end_header_id|>{{ "\\n\\n" }}{% endmacro %}
{{- header("system") }}{{ "Today is " ~ strftime_now("%d %b %Y") ~ ".\\n" }}
{%- if messages[0].role == "system" %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{ raise_exception("only single calls are supported") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- header("assistant") }}{{ '{"name": "' ~ call.name ~ '", "parameters": ' }}{{ call.arguments | tojson }}}
    {%- elif message.role == "tool" %}
        {{- header("ipython") }}{{ message.content | tojson }}
    {%- else %}
        {{- header(message.role) }}
        {%- if loop.first and tools %}
            {{- "Answer, or call a function in JSON.\\n" }}{{ tools | tojson(indent=4) }}{{ "\\n\\n" }}
        {%- endif %}
        {{- message.content | trim }}
    {%- endif %}
    {{- "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ header("assistant") }}{% endif %}"""
"""As Llama 3's: roles in headers, the date, tools in the first of the user's turns, bare JSON for one call."""

BRACKETS = """\
{{- bos_token }}
{%- set ns = namespace(system="") %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- set ns.system = message.content ~ "\\n\\n" %}
    {%- elif message.role == "user" %}
        {%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
        {{- "[INST] " ~ (ns.system if loop.last else "") ~ message.content ~ "[/INST]" }}
    {%- elif message.role == "tool" %}
        {%- if message.tool_call_id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' }}{{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}
        {{- "[/TOOL_RESULTS]" }}
    {%- elif message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
            {{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' ~ ("" if loop.last else ", ") }}
        {%- endfor %}
        {{- "]" ~ eos_token }}
    {%- else %}
        {{- " " ~ message.content | trim ~ eos_token }}
    {%- endif %}
{%- endfor %}"""
"""As Mistral's third: special tokens in brackets, calls as a list with ids, the system in the last of the user's."""

BRACKETS_WITH_ARGUMENTS = """\
{{- bos_token }}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
    {%- if message.role == "system" %}[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]
    {%- elif message.role == "user" %}[INST]{{ message.content }}[/INST]
    {%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
    {%- else %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- "[TOOL_CALLS]" ~ call.function.name ~ "[ARGS]" }}{{ call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}"""
"""As Mistral's later ones: a special token before the name, another before the arguments."""

TURNS = """\
{{- bos_token }}
{%- if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate") }}
    {%- endif %}
    {%- set role = "model" if message.role == "assistant" else message.role %}
    {{- "<start_of_turn>" ~ role ~ "\\n" ~ message.content | trim ~ "<end_of_turn>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<start_of_turn>model\\n" }}{% endif %}"""
"""As Gemma's: the model's turn by another name, and none of a system."""

CHATML_WITH_MARKS = """\
{%- if messages[0].role != "system" %}{{ "<|im_start|>system\\nYou are a small model.<|im_end|>\\n" }}{% endif %}
{%- for message in messages %}
    {{- "<|im_start|>" ~ message.role ~ "\\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{ message.content ~ "<|im_end|>" }}{% endgeneration %}{{ "\\n" }}
    {%- else %}{{ message.content ~ "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
"""As SmolLM's: a system by default, and the model's turns marked for training."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template, the special tokens that it writes, and what it makes of a question, without its date."""

    template: str
    special: tuple[str, ...]
    prompt: str
    """Of a user's `Hello.`, the model's `Good day.`, and a user's `Who?`."""
    has_system: bool = True
    has_tools: bool = False
    writes_several: bool = True
    """Calls in a turn."""


_CHATML = ("<|im_start|>", "<|im_end|>")
_BRACKETS = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
FAMILIES = {
    "qwen": Family(
        template=CHATML_WITH_TAGS,
        special=_CHATML,
        prompt="<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\nGood day.<|im_end|>\n"
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n",
        has_tools=True,
    ),
    "llama": Family(
        template=HEADERS,
        special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        prompt="<bos><|start_header_id|>system<|end_header_id|>\n\nToday is DATE.\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nGood day.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        has_tools=True,
        writes_several=False,
    ),
    "mistral": Family(
        template=BRACKETS,
        special=("[TOOL_CALLS]", *_BRACKETS),
        prompt="<bos>[INST] Hello.[/INST] Good day.<eos>[INST] Who?[/INST]",
        has_tools=True,
    ),
    "mistral with arguments": Family(
        template=BRACKETS_WITH_ARGUMENTS,
        special=("[TOOL_CALLS]", "[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", *_BRACKETS),
        prompt="<bos>[INST]Hello.[/INST]Good day.<eos>[INST]Who?[/INST]",
        has_tools=True,
    ),
    "gemma": Family(
        template=TURNS,
        special=("<start_of_turn>", "<end_of_turn>"),
        prompt="<bos><start_of_turn>user\nHello.<end_of_turn>\n<start_of_turn>model\nGood day.<end_of_turn>\n"
        "<start_of_turn>user\nWho?<end_of_turn>\n<start_of_turn>model\n",
        has_system=False,
    ),
    "smollm": Family(
        template=CHATML_WITH_MARKS,
        special=_CHATML,
        prompt="<|im_start|>system\nYou are a small model.<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n"
        "<|im_start|>assistant\nGood day.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n",
    ),
}
