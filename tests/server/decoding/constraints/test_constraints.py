"""What a constraint allows: every text decoded under it fulfils it, and everything that fulfils it can be decoded."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import constraint_vocabularies as vocabularies
import numpy as np
import pytest
from tokenizers import Tokenizer

from headway_server.decoding.constraints import (
    CompiledConstraint,
    ConstraintCompiler,
    ConstraintRequest,
    ConstraintState,
    closing,
)

FIELD = "parameters.constraint"

FLAT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "order_id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "status": {"enum": ["new", "shipped", None, 7]},
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"const": 'naïve "tape"\n'},
                    "quantity": {"type": "integer", "multipleOf": 3, "maximum": 99, "minimum": 1},
                },
                "required": ["sku", "quantity"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["order_id", "status", "items"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "string", "maxLength": 3},
                "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
UNION = {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"type": "number", "minimum": 0, "maximum": 1}]}
SCHEMAS = {"flat": FLAT, "nested": NESTED, "tree": TREE, "union": UNION}
REGEXES = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"^(yes|no|perhaps)$",
    r"(?i)[a-c]{2,9}\.",
    r"[^\x00-\x7f]{3}",
    r"(a/b|\"c\"|\\){1,4}",
    r"|x{1,3}",
    r"[a-zé]{1,8}( [a-zé]{1,8}){0,3}\?",
)
CHOICES = ("yes", "yes, sir", "no", 'a "quoted"\n\\ line', "🎉 café", " spaced ", "\u2028\x7f\x00")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return vocabularies.byte_level()


@pytest.fixture(scope="module")
def vocab_size(tokenizer: Tokenizer) -> int:
    return int(tokenizer.get_vocab_size()) + 27  # a model may have more logits than there are tokens


@pytest.fixture(scope="module")
def eos_id(tokenizer: Tokenizer) -> int:
    return int(tokenizer.token_to_id(vocabularies.EOS))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, vocab_size=vocab_size, eos_id=eos_id)


def _request(kind: str, wanted: Any) -> ConstraintRequest:
    return ConstraintRequest(**{kind: json.dumps(wanted) if kind == "json_schema" else wanted})


def _compile(compiler: ConstraintCompiler, kind: str, wanted: Any) -> CompiledConstraint:
    return compiler.compile(_request(kind, wanted), field=FIELD)


def _fulfils(kind: str, wanted: Any, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(wanted, text) is not None
    if kind == "choices":
        return text in wanted
    return _accepts(wanted, json.loads(text), wanted)


def _accepts(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:  # noqa: PLR0911 -- a table of types
    """Whether a JSON value fulfils a schema, for the keywords of this file."""
    if "$ref" in schema:
        return _accepts(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema:
        return any(_accepts(choice, value, root) for choice in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(known)
                and all(_accepts(known[key], member, root) for key, member in value.items())
            )
        case "array":
            bounds = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
            return isinstance(value, list) and bounds and all(_accepts(schema["items"], item, root) for item in value)
        case "string":
            is_text = isinstance(value, str) and len(value) <= schema.get("maxLength", 99)
            return is_text and re.search(schema.get("pattern", ""), value) is not None
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case kind:
            is_number = isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
            in_range = is_number and schema["minimum"] <= value <= schema["maximum"]
            return in_range and value % schema.get("multipleOf", 1) in {0, value % 1}


_CASES = [
    *(pytest.param("json_schema", schema, id=name) for name, schema in SCHEMAS.items()),
    *(pytest.param("regex", regex, id=regex) for regex in REGEXES),
    pytest.param("choices", CHOICES, id="choices"),
]


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize(("kind", "wanted"), _CASES)
def test_every_text_from_random_logits_fulfils_its_constraint(  # noqa: PLR0917 -- fixtures
    kind: str,
    wanted: Any,
    greedy: bool,
    compiler: ConstraintCompiler,
    tokenizer: Tokenizer,
    vocab_size: int,
    eos_id: int,
) -> None:
    constraint = _compile(compiler, kind, wanted)
    num_ended = 0
    for seed in range(12):
        choose = (vocabularies.fixed_choice if greedy else vocabularies.random_choice)(seed, vocab_size)
        token_ids, ended = vocabularies.walk(constraint.start(), choose, vocab_size, {eos_id}, max_tokens=400)
        for eager in (False, True):
            text = vocabularies.as_served(tokenizer, "The answer:", token_ids, eager=eager)
            assert not ended or _fulfils(kind, wanted, text), f"seed {seed}: {text!r}"
        num_ended += ended
    assert num_ended >= 3, "a text may repeat itself, or grow, until the limit, but not always"


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"type": "string", "format": "date-time"}])
def test_texts_of_an_open_schema_are_json(
    schema: dict[str, Any], compiler: ConstraintCompiler, tokenizer: Tokenizer, vocab_size: int, eos_id: int
) -> None:
    constraint = _compile(compiler, "json_schema", schema)
    for seed in range(8):
        choose = vocabularies.random_choice(seed, vocab_size)
        token_ids, ended = vocabularies.walk(constraint.start(), choose, vocab_size, {eos_id}, max_tokens=200)
        if ended:
            json.loads(tokenizer.decode(token_ids))


_ODD = {"const": {"required": 5, "properties": [], "minItems": "a"}}
_ITEMS = {"type": "array", "minItems": 1, "maxItems": 99, "items": FLAT}


_MULTIPLES = {
    "type": "array",
    "items": {
        "anyOf": [{"type": "integer", "multipleOf": 77}, {"type": "integer", "minimum": 4842, "multipleOf": 250}]
    },
}
_TIMES = {"type": "array", "items": {"type": "string", "format": "time"}}


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize(
    ("name", "schema"),
    {
        **SCHEMAS,
        "items": _ITEMS,
        "object": {"type": "object"},
        "value": {},
        "odd": _ODD,
        "multiple": {"type": "integer", "multipleOf": 7},
        "multiples": _MULTIPLES,
        "times": _TIMES,
    }.items(),
)
def test_json_ends_within_its_maximum_of_tokens(  # noqa: PLR0917 -- fixtures
    name: str,
    schema: dict[str, Any],
    greedy: bool,
    compiler: ConstraintCompiler,
    tokenizer: Tokenizer,
    vocab_size: int,
    eos_id: int,
) -> None:
    """With tokens that never end a text by themselves."""
    constraint = _compile(compiler, "json_schema", schema)
    for most in (64, 256):
        for seed in range(6):
            choose = (vocabularies.fixed_choice if greedy else vocabularies.random_choice)(seed, vocab_size)
            state = constraint.start(max_tokens=most)
            token_ids, has_ended = vocabularies.walk(state, choose, vocab_size, {eos_id}, max_tokens=most)
            text = tokenizer.decode(token_ids)
            json.loads(text)
            assert has_ended, (most, seed, text)
            assert (name not in SCHEMAS and name != "items") or _fulfils("json_schema", schema, text), (most, seed)


def test_choices_near_the_maximum_take_bounded_time(
    compiler: ConstraintCompiler, vocab_size: int, eos_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that each token of a look takes on by a millisecond."""
    clock = itertools.count()
    monkeypatch.setattr(closing, "time", SimpleNamespace(thread_time=lambda: next(clock) / 1000))
    monkeypatch.setattr(closing, "_MAX_LOOK_S", 0.1)
    properties = {"k": {"enum": list("abcdefghijklmnop")}, "c": {"const": "qz" * 8}}
    schema = {"type": "object", "properties": properties, "required": ["k", "c"], "additionalProperties": False}
    constraint = _compile(compiler, "json_schema", schema)
    for most in range(20, 60):
        state, began = constraint.start(max_tokens=most), next(clock)
        for _ in range(most):
            token_id = min(vocabularies.allowed(state, vocab_size), default=eos_id)
            if token_id == eos_id or state.follow(token_id).is_complete:
                break
            took, began = next(clock) - began, next(clock)
            assert took < 250, "a look, and one through the choices"


def test_no_token_is_forced_while_there_are_enough_left(
    compiler: ConstraintCompiler, vocab_size: int, eos_id: int
) -> None:
    constraint = _compile(compiler, "json_schema", TREE)
    for seed in range(6):
        walks = []
        for most in (200, None):
            choose = vocabularies.random_choice(seed, vocab_size)
            walks.append(
                vocabularies.walk(constraint.start(max_tokens=most), choose, vocab_size, {eos_id}, max_tokens=100)
            )
        assert walks[0] == walks[1]


@pytest.mark.parametrize("schema", [{"type": "boolean"}, {"enum": ["ja", "nein"]}, {"type": "integer"}], ids=str)
def test_a_short_maximum_leaves_the_choice_of_a_value(
    schema: dict[str, Any], compiler: ConstraintCompiler, tokenizer: Tokenizer, vocab_size: int, eos_id: int
) -> None:
    constraint = _compile(compiler, "json_schema", schema)
    found = set()
    for seed in range(60):
        state = constraint.start(max_tokens=6)
        token_ids, _ = vocabularies.walk(
            state, vocabularies.random_choice(seed, vocab_size), vocab_size, {eos_id}, max_tokens=6
        )
        found.add(tokenizer.decode(token_ids))
    if schema == {"type": "integer"}:
        assert len({text for text in found if len(text) > 1}) > 5
    else:
        assert {json.dumps(value) for value in schema.get("enum", (True, False))} <= found


def test_a_text_may_be_written_in_any_tokens(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    pieces = {tokenizer.decode([token_id]): token_id for token_id in range(2, tokenizer.get_vocab_size())}
    ways = 0
    for choice in ("yes", "perhaps", "shipped"):
        constraint = _compile(compiler, "choices", (choice, choice + "!", "no"))
        for token_ids in vocabularies.spellings(choice, pieces):
            state = constraint.start()
            for token_id in token_ids:
                state.follow(token_id)
            assert not state.is_complete  # "!" may follow
            ways += 1
    assert ways > 10


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_can_be_reached(
    choice: str, compiler: ConstraintCompiler, tokenizer: Tokenizer, vocab_size: int, eos_id: int
) -> None:
    state = _compile(compiler, "choices", CHOICES).start()
    for token_id in tokenizer.encode(choice, add_special_tokens=False).ids:
        assert token_id in vocabularies.allowed(state, vocab_size)
        state.follow(token_id)
    assert eos_id in vocabularies.allowed(state, vocab_size)
    assert state.is_complete == (choice != "yes")


@pytest.mark.parametrize("wanted", ["[ab]{1,3}x?", "(ab|ba)*y{2}", "a.{1,2}|x", "(?:x|xy|xyx)b", "(a|b?)y"])
def test_masks_are_those_of_trying_every_token_against_every_text(wanted: str) -> None:
    alphabet = "abxy "
    tokenizer = vocabularies.characters(alphabet)
    vocab_size = tokenizer.get_vocab_size() + 2
    eos_id = vocab_size - 1
    constraint = ConstraintCompiler(tokenizer, vocab_size=vocab_size, eos_id=eos_id).compile(
        ConstraintRequest(regex=wanted), field=FIELD
    )
    all_texts = ("".join(text) for length in range(7) for text in itertools.product(alphabet, repeat=length))
    texts = [text for text in all_texts if re.fullmatch(wanted, text)]
    token_ids = {char: tokenizer.token_to_id(char) for char in alphabet}
    for begun in sorted({text[:length] for text in texts for length in range(len(text) + 1)}):
        if len(begun) > 3:  # their continuations may be longer than the texts that were enumerated
            continue
        state = constraint.start()
        for char in begun:
            state.follow(token_ids[char])
        expected = {token_ids[char] for char in alphabet if any(text.startswith(begun + char) for text in texts)}
        assert state.is_complete == (not expected), begun
        assert vocabularies.allowed(state, vocab_size) == expected | ({eos_id} if begun in texts else set()), begun


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("json_schema", NESTED), ("json_schema", {}), ("regex", REGEXES[3]), ("choices", CHOICES)],
    ids=["nested", "any", "regex", "choices"],
)
def test_masks_are_those_of_trying_to_accept_every_token(kind: str, wanted: Any) -> None:
    tokenizer = vocabularies.byte_level(320)
    vocab_size, eos_id = tokenizer.get_vocab_size(), tokenizer.token_to_id(vocabularies.EOS)
    compiler = ConstraintCompiler(tokenizer, vocab_size=vocab_size, eos_id=eos_id)
    constraint = _compile(compiler, kind, wanted)
    rng = np.random.default_rng(7)
    taken: list[int] = []
    for _ in range(4):
        tokens = vocabularies.allowed(_replayed(constraint, taken), vocab_size) - {eos_id}
        assert tokens == {token for token in range(vocab_size) if token != eos_id and _can(constraint, taken, token)}
        if not tokens:
            break
        taken.append(int(rng.choice(sorted(tokens))))


def _replayed(constraint: CompiledConstraint, token_ids: list[int]) -> ConstraintState:
    state = constraint.start()
    for token_id in token_ids:
        state.follow(token_id)
    return state


def _can(constraint: CompiledConstraint, taken: list[int], token_id: int) -> bool:
    try:
        _replayed(constraint, [*taken, token_id])
    except ValueError:
        return False
    return True


def test_special_tokens_and_ids_without_a_token_are_never_part_of_a_text(
    compiler: ConstraintCompiler, tokenizer: Tokenizer, vocab_size: int, eos_id: int
) -> None:
    state = _compile(compiler, "regex", r"[\s\S]+").start()
    tokens = vocabularies.allowed(state, vocab_size)
    assert {eos_id, tokenizer.token_to_id(vocabularies.USER)}.isdisjoint(tokens)
    assert max(tokens) < tokenizer.get_vocab_size()
    state.follow(tokenizer.encode("x").ids[0])
    assert vocabularies.allowed(state, vocab_size) - tokens == {eos_id}


def test_a_model_without_an_end_token_ends_where_nothing_may_follow(tokenizer: Tokenizer) -> None:
    vocab_size = tokenizer.get_vocab_size()
    compiler = ConstraintCompiler(tokenizer, vocab_size=vocab_size, eos_id=None)
    state = _compile(compiler, "choices", ("no", "nothing")).start()
    for token_id in tokenizer.encode("no").ids:
        state.follow(token_id)
    assert not state.is_complete
    assert vocabularies.allowed(state, vocab_size)
    for char in "thing":
        state.follow(tokenizer.token_to_id(char))
    assert state.is_complete
    assert not vocabularies.allowed(state, vocab_size)
    assert state.failure is None


def test_stop_tokens_may_follow_only_where_the_text_may_end(
    compiler: ConstraintCompiler, tokenizer: Tokenizer, vocab_size: int, eos_id: int
) -> None:
    user, zero, one = (tokenizer.token_to_id(token) for token in (vocabularies.USER, "0", "1"))
    state = _compile(compiler, "regex", "[01]{2,4}").start(end_ids=frozenset({user, zero}))
    before_end = vocabularies.allowed(state, vocab_size)
    assert one in before_end
    assert {user, zero, eos_id}.isdisjoint(before_end)
    state.follow(one)
    state.follow(one)
    assert {user, zero, eos_id, one} <= vocabularies.allowed(state, vocab_size)


def test_nothing_but_a_stop_token_left_completes_the_text(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    stop = tokenizer.token_to_id("!")
    state = _compile(compiler, "regex", "a!*").start(end_ids=frozenset({stop, *_longer_than_one(tokenizer, "!")}))
    state.follow(tokenizer.token_to_id("a"))
    assert state.is_complete


def _longer_than_one(tokenizer: Tokenizer, char: str) -> set[int]:
    return {token_id for token, token_id in tokenizer.get_vocab().items() if set(token) == {char}}


def test_a_token_that_may_not_follow_is_refused(compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    state = _compile(compiler, "choices", ("yes", "no")).start()
    with pytest.raises(ValueError, match="does not satisfy the constraint"):
        state.follow(tokenizer.token_to_id("x"))
    assert not state.is_complete
    assert vocabularies.allowed(state, 2048) == set()
    assert "does not satisfy" in repr(state)


def test_sequences_of_one_constraint_do_not_meet(
    compiler: ConstraintCompiler, tokenizer: Tokenizer, vocab_size: int
) -> None:
    constraint = _compile(compiler, "choices", ("yes", "no"))
    first, second = constraint.start(), constraint.start()
    before = vocabularies.allowed(second, vocab_size)
    first.follow(tokenizer.token_to_id("y"))
    assert vocabularies.allowed(second, vocab_size) == before
    assert vocabularies.allowed(constraint.start(), vocab_size) == before


def test_a_constraint_that_becomes_too_complex_fails_by_itself(
    compiler: ConstraintCompiler, vocab_size: int, eos_id: int
) -> None:
    state = _compile(compiler, "regex", "((a|b){1,500}){1,500}").start()
    choose = vocabularies.random_choice(1, vocab_size)
    with pytest.raises(ValueError, match="too complex"):  # noqa: PT012 -- it may fail in either
        for _ in range(1000):
            tokens = vocabularies.allowed(state, vocab_size) - {eos_id}
            state.follow(choose(tokens) if tokens else eos_id)
    assert vocabularies.allowed(state, vocab_size) == set()
    assert not state.is_complete
