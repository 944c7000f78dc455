"""Hostile and broken templates: nothing is reached, nothing takes long, and what is wrong is said at load."""

from __future__ import annotations

import pytest
from tiny_chat import MARKERS, byte_level_tokenizer, load_template, turns

from headway_server.bundles import SpecialTokens
from headway_server.errors import BundleError, InvalidInputError
from headway_server.preprocessing import ChatTemplate
from headway_server.preprocessing.chat import MAX_TEMPLATE_BYTES
from headway_server.preprocessing.template import MAX_TEXT_LENGTH

ESCAPES = {
    "class": "{{ ''.__class__ }}",
    "class by item": "{{ ''['__class__'] }}",
    "class by made up name": "{{ ''['__cla' ~ 'ss__'] }}",
    "class of content": "{{ messages[0].content.__class__.__mro__ }}",
    "marks of content": "{{ messages[0].content.marks }}",
    "runs of content": "{{ messages[0].content.runs() }}",
    "class by map": "{{ messages | map(attribute='__class__') | list | length }}",
    "class by attr": "{{ '' | attr('__class__') }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "init of namespace": "{{ namespace.__init__ }}",
    "mro": "{{ dict.mro() }}",
    "frame": "{{ (messages | map('length')).gi_frame }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "format filter": "{{ '%s' | format(messages) }}",
    "percent": "{{ '%s' % 1 }}",
    "environment of a macro": "{% macro m() %}{% endmacro %}{{ m._environment }}",
    "call of a macro": "{% macro m() %}{% endmacro %}{{ m.__call__ }}",
    "self": "{{ self._TemplateReference__context }}",
    "context": "{{ self.__init__.__globals__ }}",
    "joiner": "{{ joiner.__init__ }}",
    "lipsum": "{{ lipsum() }}",
    "include": "{% include 'tokenizer.json' %}",
    "import": "{% import 'tokenizer.json' as t %}",
    "extends": "{% extends 'tokenizer.json' %}",
    "autoescape": "{% autoescape true %}{{ messages[0].content }}{% endautoescape %}",
    "encode": "{{ messages[0].content.encode() }}",
    "translate": "{{ 'a'.translate({97: 'b'}) }}",
}

MUTATIONS = {
    "append": "{% set _ = messages.append({}) %}",
    "pop": "{% set _ = messages.pop() %}",
    "clear": "{{ messages.clear() }}",
    "update": "{{ messages[0].update({'role': 'system'}) }}",
    "setdefault": "{{ messages[0].setdefault('name', '') }}",
    "item": "{% set messages[0].role = 'system' %}",
    "do": "{% do messages.append({}) %}",
}

BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "silent loop": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}",
    "range": "{{ range(10 ** 12) | list | length }}",
    "large range": "{{ range(1000000000000) | list | length }}",
    "repetition": "{{ 'a' * 99999999999 }}",
    "repetition of content": "{{ messages[0].content * 99999999 }}",
    "repetition of a list": "{{ ([1] * 99999999) | length }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling a list": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "nesting": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
    "nesting tuples": "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "nesting dictionaries": (
        "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}"
    ),
    "nested to JSON": (
        "{% set ns = namespace(x=['a' * 9999]) %}"
        "{% for i in range(99) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}"
    ),
    "nesting views": (
        "{% set ns = namespace(x={'a': 1}) %}{% for i in range(99) %}"
        "{% set ns.x = {'a': ns.x.items(), 'b': ns.x.values()} %}{% endfor %}{{ ns.x | trim }}"
    ),
    "nesting namespaces": (
        "{% set ns = namespace(x=1) %}{% for i in range(99) %}"
        "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ {}[ns.x].a }}"
    ),
    "rounding": "{{ 1 | round(9999999999, 'ceil') }}",
    "numbers of many digits": "{{ ('f' * 499999) | int(base=16) }}",
    "squaring": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "replacing": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replacing by filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "replacing nothing": "{{ messages[0].content.replace('', 'b' * 999999) }}",
    "joining": "{{ ('a' * 99999).join('b' * 99999) }}",
    "joining by filter": "{{ range(99999) | join('b' * 99999) }}",
    "filling": "{{ 'a'.center(99999999999) }}{{ 'a' | center(99999999999) }}",
    "padding": "{{ '{:99999999999}'.format(1) }}",
    "padding by percent": "{{ '%99999999999d' % 1 }}",
    "indenting": "{{ {'a': 1} | tojson(indent=99999999999) }}",
    "date": "{{ strftime_now('%' ~ 99999999999 ~ 'd' * 999) }}",
    "macros": ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}"),
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive loop": ("{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}"),
    "macro's text": "{% macro m() %}{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endmacro %}{{ m() }}",
    "block's text": "{% set x %}{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}",
    "slices in a block": (
        "{% set x = 'a' * 499999 %}{% set y %}{% for a in range(99999) %}{{ x[1:] }}{% endfor %}{% endset %}"
    ),
    "slices kept": (
        "{% set x = 'a' * 499999 %}{% set ns = namespace(y=0) %}"
        "{% for a in range(99999) %}{% set ns.y = namespace(x=x[1:], y=ns.y) %}{% endfor %}"
    ),
    "looking up": "{% set x = range(99999) | list %}{% for a in range(99999) if 'a' in x %}{% endfor %}",
    "looking up often": "{% set x = range(99999) | list %}{% if " + "'a' in x or " * 4_000 + "false %}{% endif %}",
    "looking up by tests": "{% set x = range(99999) | list %}{{ range(99999) | select('in', x) | list }}",
    "long operations": (
        "{% set x = 'a' * 499999 %}{% for a in range(99999) %}{% if (x ~ 'b').count('aab') %}{% endif %}{% endfor %}"
    ),
    "comparison": (
        "{% set a = namespace(x=['a' * 9]) %}{% set b = namespace(x=['a' * 9]) %}{% for i in range(40) %}"
        "{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}{{ a.x == b.x }}"
    ),
}

NOT_TEMPLATES = {
    "unclosed": "{% for message in messages %}",
    "unknown tag": "{% call_the_model %}",
    "unknown filter": "{{ messages | unheard_of }}",
    "deep": "{{ " + "(" * 5_000 + ")" * 5_000 + " }}",
    "deep blocks": "{% if true %}" * 500 + "{% endif %}" * 500,
}


@pytest.mark.parametrize("name", ESCAPES)
def test_escapes_are_refused(tmp_path, name):
    with pytest.raises(BundleError):
        load_template(tmp_path, ESCAPES[name] + MARKERS)


@pytest.mark.parametrize("name", MUTATIONS)
def test_changes_are_refused(tmp_path, name):
    with pytest.raises(BundleError):
        load_template(tmp_path, MUTATIONS[name] + MARKERS)


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(tmp_path, name):
    """Each would take far longer than a test may, or more memory than there is."""
    with pytest.raises(BundleError):
        load_template(tmp_path, BOMBS[name] + MARKERS)


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


def test_a_template_that_writes_a_container_is_told_to_use_tojson(tmp_path):
    with pytest.raises(BundleError, match="tojson"):
        load_template(tmp_path, "{{ messages }}")


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


def test_the_date_and_json_are_written_as_templates_expect(tmp_path):
    source = (
        "{{ strftime_now('%Y') | length }}{{ {'b': 'é<', 'a': [1, none, true]} | tojson }}{{ messages[0].content }}"
    )
    assert load_template(tmp_path, source).prompt(turns("!"), "c").text == '4{"b": "é<", "a": [1, null, true]}!'


def test_a_namespace_is_not_written_out(tmp_path):
    source = (
        "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}"
        "{{ ns.x | trim }} {{ ns.x is lower }} {{ messages[0].content }}"
    )
    assert load_template(tmp_path, source).prompt(turns("!"), "c").text == "<namespace> True !"


def test_what_is_not_given_is_none_and_unknown_names_are_undefined(tmp_path):
    source = "{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }} {{ thinking is defined }}"
    assert load_template(tmp_path, source).prompt(turns("!"), "c").text == "True True True False"
