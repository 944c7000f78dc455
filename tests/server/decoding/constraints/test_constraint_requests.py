"""What is refused, how it is said, and what a compiler keeps."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import constraint_vocabularies as vocabularies
import pytest
from tiny_engine import make_decoder, make_generation_model
from tokenizers import Tokenizer, decoders, models

from headway_server.decoding.constraints import (
    MAX_CHOICES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    ConstraintCompiler,
    ConstraintRequest,
    trial,
)
from headway_server.decoding.constraints import compiler as compiler_module
from headway_server.decoding.constraints.compiler import MAX_CACHED, Reservation
from headway_server.decoding.constraints.trial import BusyError, try_grammar
from headway_server.errors import InvalidInputError, OverloadedError, WrongTaskError
from headway_server.tasks.generation.request import GenerationRequest

FIELD = "parameters.constraint"

# What an automaton of such an expression would have in states has many digits; each is to be refused or done quickly.
HOSTILE_REGEXES = (
    "(a|a)*{1000}",
    "(((a{0,100}){0,100}){0,100}){0,100}",
    "((a|b){1,500}){1,500}",
    "(a|b)*a(a|b){200}",
    "(.*a){300}.*",
    r"\p{L}{1,2000}\p{N}{1,2000}",
    "a{99999}",
    "(" * 4000 + ")" * 4000,
    "[" * 8000,
    "a|" * 4000,
)
_NEST: dict[str, Any] = {"type": "string"}
for _level in range(40):
    _NEST = {"type": "array", "items": _NEST}
HOSTILE_SCHEMAS = (
    _NEST,
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"allOf": [{"anyOf": [{"pattern": f"^{chr(97 + j)}{i}"} for j in range(8)]} for i in range(8)]},
    {"allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(10)]} for i in range(20)]},
    {"type": "string", "minLength": 10**6, "maxLength": 10**9, "pattern": "(a|b)*a(a|b){20}$"},
    {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}},
    {"type": "integer", "multipleOf": 999_983},
    {"allOf": [{"multipleOf": prime} for prime in (97, 101, 103)]},
    {"prefixItems": [{"type": "integer", "multipleOf": 9973, "minimum": -(10**15) - i} for i in range(500)]},
    {"$defs": {f"a{i}": {"prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 3} for i in range(40)}, "$ref": "#/$defs/a0"},
    {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}},
)


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    tokenizer = vocabularies.byte_level()
    return ConstraintCompiler(tokenizer, vocab_size=tokenizer.get_vocab_size(), eos_id=0)


def _refusal(compiler: ConstraintCompiler, **wanted: Any) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as refused:
        compiler.compile(ConstraintRequest(**wanted), field=FIELD)
    for internal in ("llguidance", "lark", "start:", "x-guidance", "compile JSON", "Parser", "\n"):
        assert internal not in refused.value.description
    return refused.value


@pytest.mark.parametrize("wanted", [{}, {"regex": "a", "choices": ("a",)}, {"regex": "a", "json_schema": "{}"}])
def test_a_request_is_of_one_kind(wanted: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one of json_schema, regex, choices"):
        ConstraintRequest(**wanted)


@pytest.mark.parametrize(
    ("wanted", "field", "description"),
    [
        ({"json_schema": " " * (MAX_SCHEMA_BYTES + 1)}, "json_schema", f"has 65537 bytes of UTF-8; at most {2**16}"),
        ({"regex": "é" * 4097}, "regex", f"has 8194 bytes of UTF-8; at most {MAX_REGEX_BYTES}"),
        ({"choices": ()}, "choices.texts", "has 0 elements; must be 1 to 256"),
        ({"choices": tuple(map(str, range(257)))}, "choices.texts", f"has 257 elements; must be 1 to {MAX_CHOICES}"),
        ({"choices": ("a", "")}, "choices.texts[1]", "has 0 characters; must be 1 to 1024"),
        ({"choices": ("é" * 1025,)}, "choices.texts[0]", "has 1025 characters; must be 1 to 1024"),
        ({"choices": ("a", "b", "a")}, "choices.texts[2]", "is the same as parameters.constraint.choices.texts[0]"),
    ],
)
def test_what_is_too_large_is_refused_with_limit_and_value(
    compiler: ConstraintCompiler, wanted: dict[str, Any], field: str, description: str
) -> None:
    refusal = _refusal(compiler, **wanted)
    assert refusal.field == f"{FIELD}.{field}"
    assert description in refusal.description


def test_the_limits_themselves_are_within() -> None:
    ConstraintRequest(choices=tuple(f"{index:1024}" for index in range(MAX_CHOICES))).check_size(FIELD)
    ConstraintRequest(regex="a" * MAX_REGEX_BYTES).check_size(FIELD)
    ConstraintRequest(json_schema=" " * MAX_SCHEMA_BYTES).check_size(FIELD)


def test_the_largest_choices_are_compiled(compiler: ConstraintCompiler) -> None:
    compiler.compile(ConstraintRequest(choices=tuple(f"{index:1024}" for index in range(MAX_CHOICES))), field=FIELD)


@pytest.mark.parametrize(
    ("regex", "description"),
    [
        ("(", "is no regular expression: unclosed group"),
        ("a{5,2}", "is no regular expression: invalid repetition count range"),
        (r"\p{Klingon}", "is no regular expression: Unicode property not found"),
        (r"a\bc", "has an anchor or a word border within"),
        ("(?=a)b", "has look-around"),
        (r"(a)\1", "backreferences are not supported"),
        ("[a&&b]", "allows no text that the model can write"),
        ("", "allows no text but the empty one"),
    ],
)
def test_a_regular_expression_that_cannot_be_used_is_explained(
    compiler: ConstraintCompiler, regex: str, description: str
) -> None:
    refusal = _refusal(compiler, regex=regex)
    assert refusal.field == f"{FIELD}.regex"
    assert description in refusal.description


@pytest.mark.parametrize(
    ("schema", "description"),
    [
        ('{"type": "string",}', "is not JSON: "),
        ("[]", "must be a JSON object"),
        ("{" * 30000, "is not JSON: "),
        ('{"a":' * 10000, "is nested too deeply"),
        ('{"items":' * 200 + "{}" + "}" * 200, "is nested too deeply"),
        ('{"minimum": NaN}', "has a number that JSON does not have"),
        ('{"const": "\\ud800"}', "has half of a surrogate pair"),
        ('{"type": "strin"}', "has a type that JSON does not have: strin"),
        ('{"items": {"not": {}}}', 'has keywords that are not supported: "not"'),
        ('{"format": "shoe"}', "has a format that is not supported: shoe"),
        ('{"pattern": "("}', "has a pattern that is no regular expression: unclosed group"),
        ('{"pattern": "(?!a)"}', "has a pattern that has look-around"),
        ('{"$ref": "#/$defs/node"}', "refers to /$defs/node, which is not in it"),
        ('{"$ref": "https://example.org/a.json"}', "only references within the schema are followed"),
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "allows no text: minimum (5) is greater than maximum (3)"),
        ('{"enum": []}', "allows no text"),
        ('{"properties": {"a": 5}}', "is not a schema"),
        ('{"minLength": -1}', "is not a schema: Expected positive integer for 'minLength', got -1"),
        ('{"oneOf": [{"const": 1}, {"const": 2}]}', "has a oneOf whose alternatives may overlap; use anyOf"),
        ('{"multipleOf": -3}', "has a multipleOf -3; must be above 0"),
        ('{"multipleOf": 999983}', "least common multiple 999983"),
    ],
)
def test_a_schema_that_cannot_be_used_is_explained(compiler: ConstraintCompiler, schema: str, description: str) -> None:
    refusal = _refusal(compiler, json_schema=schema)
    assert refusal.field == f"{FIELD}.json_schema"
    assert description in refusal.description


def test_a_schema_brings_no_options_of_the_library(compiler: ConstraintCompiler) -> None:
    options = {"item_separator": ";", "key_separator": "=", "whitespace_pattern": "x", "lenient": True}
    _refusal(compiler, json_schema=json.dumps({"not": {}, "x-guidance": options}))
    schema = {"type": "array", "minItems": 2, "items": {"const": 1}, "x-guidance": options}
    state = compiler.compile(ConstraintRequest(json_schema=json.dumps(schema)), field=FIELD).start()
    vocab_size = vocabularies.byte_level().get_vocab_size()
    token_ids, _ = vocabularies.walk(state, vocabularies.random_choice(1, vocab_size), vocab_size, {0}, 200)
    assert set(json.loads(vocabularies.byte_level().decode(token_ids))) == {1}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "wanted",
    [
        *({"regex": regex} for regex in HOSTILE_REGEXES),
        *({"json_schema": json.dumps(schema)} for schema in HOSTILE_SCHEMAS),
    ],
    ids=lambda wanted: str(wanted)[:50],
)
def test_hostile_constraints_are_refused_or_followed_within_bounds(
    compiler: ConstraintCompiler, wanted: dict[str, str]
) -> None:
    try:
        state = compiler.compile(ConstraintRequest(**wanted), field=FIELD).start()
    except InvalidInputError as error:
        assert error.description  # noqa: PT017 -- either may happen
        return
    choose = vocabularies.random_choice(5, 1000)
    for _ in range(40):
        tokens = vocabularies.allowed(state, 1000) - {0}
        if not tokens:
            assert state.failure is not None or state.is_complete
            return
        try:
            state.follow(choose(tokens))
        except ValueError:
            assert state.failure is not None
            return


@pytest.mark.parametrize(
    "schema",
    [
        '{"const": -9223372036854775808}',
        '{"enum": [1, -9223372036854775296]}',
        '{"properties": {"a": {"const": -9223372036854775807}}}',
    ],
)
def test_integers_that_overflow_the_librarys_stack_are_refused_by_name(
    compiler: ConstraintCompiler, schema: str
) -> None:
    assert "so near to -2^63 none is supported" in _refusal(compiler, json_schema=schema).description


def test_integers_beside_those_are_followed(compiler: ConstraintCompiler) -> None:
    request = ConstraintRequest(json_schema='{"enum": [-9223372036854774784, 18446744073709551615]}')
    assert compiler.compile(request, field=FIELD).complaint is None


def test_multiples_of_thousands_of_digits_are_refused(compiler: ConstraintCompiler) -> None:
    first, second = "9" * 2999 + "7", "9" * 2998 + "13"
    schema = f'{{"properties": {{"a": {{"multipleOf": {first}}}, "b": {{"multipleOf": {second}}}}}}}'
    assert "least common multiple of many digits" in _refusal(compiler, json_schema=schema).description


def test_a_grammar_that_crashes_the_library_costs_a_trial_and_nothing_else() -> None:
    head = '%llguidance {"no_forcing": true}\nstart: '
    for _ in range(2):
        assert try_grammar(f'{head}%json {{"const": -9223372036854775808}}') is None
        assert try_grammar(f"{head}/a+/") is not None


def test_a_trial_is_ended_at_its_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    assert try_grammar(f"start: /{'.*' * 8000}/") is None
    assert time.monotonic() - began < 10


def test_a_program_for_trials_that_was_killed_is_replaced() -> None:
    assert try_grammar("start: /a/") is not None
    for program in trial._TRIALS._idle:
        program._process.kill()
        program._process.wait()
    assert try_grammar("start: /a/") is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string", "pattern": f"a{i}.*b{i}"} for i in range(1000)]},
        {"patternProperties": {f"^{chr(97 + i % 26)}{chr(97 + i // 26)}.*$": {} for i in range(600)}},
    ],
    ids=["allOf", "patternProperties"],
)
def test_a_schema_that_would_take_minutes_is_given_up(compiler: ConstraintCompiler, schema: dict[str, Any]) -> None:
    refusal = _refusal(compiler, json_schema=json.dumps(schema))
    assert "takes more than 1 s or 32 MiB to be compiled" in refusal.description


def test_the_constraints_of_all_calls_hold_no_more_memory_than_there_is_for_them(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    had = Reservation.total_bytes()
    request = ConstraintRequest(json_schema=json.dumps({"enum": [f"word {index}" for index in range(5000)]}))
    first = compiler.compile(request, field=FIELD)
    each = Reservation.total_bytes() - had
    assert each >= 256 * 2**10
    monkeypatch.setattr(compiler_module, "MAX_CONSTRAINT_BYTES", had + 2 * each)
    second = compiler.compile(request, field=FIELD)
    with pytest.raises(OverloadedError, match="the constraints of other calls take"):
        compiler.compile(request, field=FIELD)
    state = second.start()
    del second  # what a sequence still follows is held
    with pytest.raises(OverloadedError):
        compiler.compile(request, field=FIELD)
    del state
    compiler.compile(request, field=FIELD)
    del first
    assert Reservation.total_bytes() == had


def test_a_constraint_of_many_sequences_counts_each_automaton(compiler: ConstraintCompiler) -> None:
    gc.collect()
    had = Reservation.total_bytes()
    constraint = compiler.compile(ConstraintRequest(regex="[ab]+"), field=FIELD)
    one = Reservation.total_bytes() - had
    states = [constraint.start() for _ in range(20)]
    assert Reservation.total_bytes() - had == one * -(-len(states) // 8)


def test_what_was_checked_is_kept_up_to_a_number() -> None:
    compiler = ConstraintCompiler(vocabularies.byte_level(300), vocab_size=300, eos_id=None)
    for index in range(MAX_CACHED + 5):
        for _ in range(2):
            compiler.compile(ConstraintRequest(choices=(f"choice {index}",)), field=FIELD)
        assert f"{min(index + 1, MAX_CACHED)} of {MAX_CACHED} constraints known" in repr(compiler)
    _refusal(compiler, regex="(")
    assert f"{MAX_CACHED} of {MAX_CACHED} constraints known" in repr(compiler)


def test_a_refusal_is_remembered_and_told_again_by_the_callers_field(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ConstraintCompiler(vocabularies.byte_level(300), vocab_size=300, eos_id=None)
    trials: list[str] = []
    monkeypatch.setattr(compiler_module, "try_grammar", trials.append)
    request = ConstraintRequest(json_schema='{"allOf": [{"minLength": 1}]}')
    for field in ("parameters.constraint", "options"):
        with pytest.raises(InvalidInputError, match="takes more than") as caught:
            compiler.compile(request, field=field)
        assert caught.value.field == f"{field}.json_schema"
    assert len(trials) == 1


def test_a_schema_that_a_busy_machine_could_not_check_is_not_refused_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ConstraintCompiler(vocabularies.byte_level(300), vocab_size=300, eos_id=None)
    request = ConstraintRequest(json_schema='{"allOf": [{"type": "string", "minLength": 1}]}')

    def is_busy(_: str) -> bool:
        raise BusyError

    with monkeypatch.context() as busy:
        busy.setattr(compiler_module, "try_grammar", is_busy)
        with pytest.raises(OverloadedError, match="try again later"):
            compiler.compile(request, field=FIELD)
    assert compiler.compile(request, field=FIELD).complaint is None


async def test_hostile_constraints_hold_up_no_other_texts_and_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_generation_model(make_decoder())
    model.start()
    released = threading.Event()
    monkeypatch.setattr(model._constraints, "compile", lambda *_, **__: released.wait(60))
    monkeypatch.setattr(compiler_module, "MAX_COMPILING_S", 5.0)
    hostile = {"constraint": ConstraintRequest(regex="a"), "max_new_tokens": 1}
    held_up = [
        asyncio.ensure_future(
            model.generate(["a"], fields=["prompts[0]"], request=GenerationRequest(parameters=hostile))
        )
        for _ in range(4)
    ]
    await asyncio.sleep(0.05)
    plain = GenerationRequest(parameters={"max_new_tokens": 1}, truncate=True)
    answer = await model.generate(["the cat " * 20_000], fields=["prompts[0]"], request=plain)
    assert answer.results[0].truncated
    assert not any(call.done() for call in held_up)
    with pytest.raises(OverloadedError, match="more than 5 s"):
        await held_up[0]
    await asyncio.gather(*held_up, return_exceptions=True)
    released.set()
    model.close()


def test_a_sequence_that_comes_to_its_limit_leaves_other_calls_alone(compiler: ConstraintCompiler) -> None:
    request = ConstraintRequest(regex=r"((a|b){1,500}){1,500}")
    outcomes = []
    for _ in range(3):
        state = compiler.compile(request, field=FIELD).start()
        choose, num_tokens = vocabularies.random_choice(1, 1000), 0
        while state.failure is None and num_tokens < 1000 and (tokens := vocabularies.allowed(state, 1000) - {0}):
            try:
                state.follow(choose(tokens))
            except ValueError:
                break
            num_tokens += 1
        outcomes.append((num_tokens, state.failure))
    assert outcomes[0][0] > 10
    assert "too complex" in str(outcomes[0][1])
    assert outcomes == outcomes[:1] * 3


def test_many_sequences_of_a_call_are_alike(compiler: ConstraintCompiler) -> None:
    constraint = compiler.compile(ConstraintRequest(regex="[a-c]{1,9}!"), field=FIELD)
    first = [vocabularies.allowed(constraint.start(), 1000) for _ in range(30)]
    assert first == first[:1] * 30


async def test_constraints_are_compiled_by_several_threads_off_the_event_loop() -> None:
    tokenizer = vocabularies.byte_level(400)
    compiler = ConstraintCompiler(tokenizer, vocab_size=400, eos_id=0)
    requests = [ConstraintRequest(regex=f"[a-z]{{1,{index % 5 + 1}}}") for index in range(20)]
    compiled = await asyncio.gather(*(compiler.compile_off_loop(request, field=FIELD) for request in requests))

    def begin(index: int) -> set[int]:
        return vocabularies.allowed(compiled[index % len(compiled)].start(), 400)

    with ThreadPoolExecutor(4) as threads:
        first, *rest = list(threads.map(begin, range(200)))
    assert first
    assert all(tokens == begin(index + 1) for index, tokens in enumerate(rest))
    with pytest.raises(InvalidInputError, match="unclosed group"):
        await compiler.compile_off_loop(ConstraintRequest(regex="("), field=FIELD)


def test_a_tokenizer_may_be_given_by_its_file(tmp_path: Path) -> None:
    vocabularies.byte_level(300).save(str(tmp_path / "tokenizer.json"))
    compiler = ConstraintCompiler(tmp_path / "tokenizer.json", vocab_size=300, eos_id=None)
    assert compiler.compile(ConstraintRequest(regex="a"), field=FIELD).start().failure is None


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(suffix="</w>"), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0)]), "Strip"),
        (None, "has no decoder"),
    ],
)
def test_a_tokenizer_whose_tokens_read_by_their_neighbours_is_refused(decoder: Any, reason: str) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "##c": 2, "d</w>": 3}, []))
    if decoder is not None:
        tokenizer.decoder = decoder
    compiler = ConstraintCompiler(tokenizer, vocab_size=4, eos_id=None)
    with pytest.raises(WrongTaskError, match=f"cannot be constrained: .*{reason}"):
        compiler.compile(ConstraintRequest(regex="a"), field=FIELD)


def test_a_word_brings_its_space_and_bytes_spell_the_rest() -> None:
    tokenizer = vocabularies.metaspace()
    size = tokenizer.get_vocab_size()
    token = tokenizer.token_to_id
    compiler = ConstraintCompiler(tokenizer, vocab_size=size, eos_id=token("</s>"))
    spaced = compiler.compile(ConstraintRequest(choices=(" yes", "no", "é")), field=FIELD)
    tokens = vocabularies.allowed(spaced.start(), size)
    names = {"\u2581yes", "\u2581", "<0x20>", "no", "n", "<0x6E>", "<0xC3>"}
    assert tokens == {token(name) for name in names}
    state = spaced.start()
    state.follow(token("\u2581yes"))
    assert state.is_complete
    before = [token("no")]
    assert tokenizer.decode([*before, token("\u2581yes")]).removeprefix(tokenizer.decode(before)) == " yes"


def test_at_the_very_beginning_no_token_may_lose_its_space() -> None:
    tokenizer = vocabularies.metaspace()
    size = tokenizer.get_vocab_size()
    compiler = ConstraintCompiler(tokenizer, vocab_size=size, eos_id=None)
    constraint = compiler.compile(ConstraintRequest(choices=("no yes", " yes")), field=FIELD)
    state = constraint.start(follows_text=False)
    token = tokenizer.token_to_id
    assert vocabularies.allowed(state, size) == {token(name) for name in ("no", "n", "<0x6E>")}
    state.follow(token("no"))
    state.follow(token("\u2581yes"))
    assert tokenizer.decode([token("no"), token("\u2581yes")]) == "no yes"
    assert state.is_complete


def test_a_vocabulary_of_few_characters_is_held_to_what_it_can_spell() -> None:
    tokenizer = vocabularies.characters("abc1")
    compiler = ConstraintCompiler(tokenizer, vocab_size=5, eos_id=None)
    state = compiler.compile(ConstraintRequest(regex="[a-z]x?|[0-9]+|.z"), field=FIELD).start()
    assert vocabularies.allowed(state, 5) == {1, 2, 3, 4}
    state.follow(1)
    assert state.is_complete, "x is no token, so nothing follows a"
    assert "lacks characters for it: 'z'" in _refusal(compiler, choices=("ab", "az")).description
    assert "lacks characters for JSON" in _refusal(compiler, json_schema="{}").description
    assert "allows no text" in _refusal(compiler, regex="z+").description
