"""Chat templates of the shapes that are in use, written for these tests, and tokenizers to go with them."""

import json
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headway_server.bundles import SpecialTokens
from headway_server.preprocessing import ChatTemplate, ChatTurn

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>")
BOS_ID, EOS_ID = 0, 1
_WORDS = "you are a helpful assistant the cat sat on the mat user system what is it hello there good day " * 4

MARKERS = """\
{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
"""A line before and after each turn."""

DEFAULT_SYSTEM = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""A system's turn if there is none; thoughts are left out of the turns so far."""

INSTRUCTIONS = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}\
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}\
{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
"""Turns in turn, the system's within the first of the user's."""

NAMESPACE = """\
{%- set ns = namespace(system='', turns=0) -%}
{%- macro turn(role, text) -%}
{{ '<|' + role + '|>' }}
{{ text | trim }}{{ eos_token }}
{% endmacro -%}
{{ bos_token }}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- set ns.system = ns.system ~ message.content | trim -%}{%- endif -%}
{%- endfor -%}
{%- if ns.system -%}{{ turn('system', ns.system) }}{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
    {%- set ns.turns = ns.turns + 1 -%}
    {%- generation -%}{{ turn(message.role, message.content) }}{%- endgeneration -%}
{%- endfor -%}
{%- if ns.turns > 99 -%}{{ raise_exception('at most 99 turns') }}{%- endif -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""
"""Special tokens made of roles, a macro, a namespace."""

TEMPLATES = {
    "markers": MARKERS,
    "default_system": DEFAULT_SYSTEM,
    "instructions": INSTRUCTIONS,
    "namespace": NAMESPACE,
}


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE; besides special tokens, `<think>` and `</think>` and runs of spaces are added ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_WORDS], trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "    ")])
    return tokenizer


def sentence_piece_tokenizer() -> Tokenizer:
    """Unigram as SentencePiece makes it: spaces are ▁, one is put in front, special tokens are in the vocabulary."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=[*SPECIAL_TOKENS, "<unk>"],
        unk_token="<unk>",
        initial_alphabet=list("<|>/_[]abcdefghijklmnopqrstuvwxyz .?"),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_WORDS], trainer)
    return tokenizer


TOKENIZERS = {"byte_level": byte_level_tokenizer, "sentence_piece": sentence_piece_tokenizer}


def load_template(folder: Path, source: str, tokenizer: Tokenizer | None = None) -> ChatTemplate:
    """Loads a template from files as a bundle has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    (tokenizer or byte_level_tokenizer()).save(str(folder / "tokenizer.json"))
    return ChatTemplate.load(
        folder / "chat_template.jinja",
        tokenizer_file=folder / "tokenizer.json",
        special_tokens=SpecialTokens(bos=BOS_ID, eos=EOS_ID),
    )


def turns(*contents: str, system: str | None = None) -> list[ChatTurn]:
    """Makes a conversation: the system's turn if given, then user and assistant by turns."""
    said = [
        ChatTurn(role=("user", "assistant")[index % 2], content=content)  # type: ignore[arg-type]  # one of the two
        for index, content in enumerate(contents)
    ]
    return [*([ChatTurn(role="system", content=system)] if system is not None else []), *said]


def rendered(source: str, conversation) -> str:
    """What transformers writes: its environment, filters and names (`utils/chat_template_utils.py`, version 5.23.0)."""

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_write")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _write(self, caller):
            return caller()

    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    messages = [turn.shown(lambda value: value) for turn in conversation]
    return environment.from_string(source).render(
        messages=messages, tools=None, documents=None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
