"""How long a model may think, and what holds for its answer alone: token by token, alone and among others."""

import asyncio
import json
import re

import numpy as np
import pytest
from tiny_engine import EOS_ID, byte_tokenizer, make_chat_template, make_decoder, make_generation_model

from headway_server.decoding.constraints import ConstraintRequest
from headway_server.decoding.sequence import Delta, FinishReason
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import AnswerReader, ChatTurn
from headway_server.tasks.generation.request import GenerationRequest
from headway_server.tasks.parameters import LogProbabilityRequest
from headway_server.transports.http.openai.form import name_of

MARKS = ("<think>", "</think>")
TEMPLATE = (
    "{% for message in messages %}<bos>{{ message.content }}{% endfor %}<bos>"
    "{% if thinks_at_once %}<think>{% elif false %}</think>{% endif %}"
)
CONVERSATION = (ChatTurn(role="user", content="the cat"),)
OPEN = {"thinks_at_once": True}
LENGTH = 24
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
                     "required": ["a"], "additionalProperties": False})  # fmt: skip
HELD = {
    "json": (ConstraintRequest(json_schema=SCHEMA), r'\{\s*"a"\s*:\s*[0-9]\s*\}'),
    "regex": (ConstraintRequest(regex="[0-9]{3}"), "[0-9]{3}"),
    "choices": (ConstraintRequest(choices=("yes", "no")), "yes|no"),
}


@pytest.fixture(params=[MARKS, ()], ids=["delimiters are tokens", "delimiters are text"])
async def model(request, tmp_path):
    """A model that never ends a text or a thought by itself."""
    vocab_size = byte_tokenizer(request.param).get_vocab_size()
    decoder = make_decoder(vocab_size=vocab_size, max_length=256, num_slots=6)
    decoder.output[:, EOS_ID] = 0
    model = make_generation_model(
        decoder,
        chat_template=make_chat_template(tmp_path, TEMPLATE, special=request.param),
        special=request.param,
        max_input_tokens=128,
        max_total_tokens=256,
    )
    model.start()
    yield model
    await asyncio.to_thread(model.close)


def asked(model, *, budget=None, variables=OPEN, **sampling):
    never = tuple((index, -100.0) for _, index in model.reasoning_form.special_tokens)
    given = {"temperature": 1.0, "seed": 3, "max_new_tokens": LENGTH, "logit_biases": never} | sampling
    if budget is not None:
        given["thinking_token_budget"] = budget
    return GenerationRequest(
        parameters=given,
        variables=variables,
        shows_reasoning=True,
        sample_count=2,
        log_probabilities=LogProbabilityRequest(),
    )


async def texts(model, request, prompt=CONVERSATION):
    return (await model.generate([prompt], fields=["conversations[0]"], request=request)).results


def ids(text):
    return [token.token_id for token in text.result.tokens]


async def test_a_thought_has_its_budget_of_tokens_and_ends_alone_and_among_others(model):
    end_ids = list(model._delimiters.end_ids)
    budgets = [None, 0, 1, 7, LENGTH - 1, 10**9]
    alone = [await texts(model, asked(model, budget=budget)) for budget in budgets]
    together = await asyncio.gather(*(texts(model, asked(model, budget=budget)) for budget in budgets))
    free = alone[0]
    for budget, own, among_others in zip(budgets, alone, together, strict=True):
        for sample in range(2):
            tokens = ids(own[sample])
            assert tokens == ids(among_others[sample])
            assert own[sample].result.tokens == among_others[sample].result.tokens
            assert len(tokens) == LENGTH
            if budget is not None and budget < LENGTH:
                assert tokens[:budget] == ids(free[sample])[:budget]
                assert tokens[budget:][: len(end_ids)] == end_ids[: LENGTH - budget]
                answer = AnswerReader(reasoning=model.reasoning_form, calls=None).read(own[sample].text)
                thought, said = answer.reasoning, answer.text
                assert bool(thought) == (budget > 0)
                assert bool(said) == (budget + len(end_ids) < LENGTH)
            else:
                assert tokens == ids(free[sample])


async def test_what_follows_a_thought_is_what_follows_its_tokens(model):
    budget = 5
    [own, _] = await texts(model, asked(model, budget=budget, temperature=0.0))
    prompt = model._reader._chat_template.prompt(CONVERSATION, "c", variables=OPEN).input_ids
    thought = ids(own)[: budget + len(model._delimiters.end_ids)]
    rest = asked(model, temperature=0.0, max_new_tokens=LENGTH - len(thought), variables={})
    [expected, _] = await texts(model, rest, np.array([*prompt, *thought]))
    assert ids(own)[len(thought) :] == ids(expected)


async def test_a_stream_is_the_text_at_once_and_a_prompt_of_tokens_may_end_with_the_mark(model):
    request = asked(model, budget=4)
    whole = await texts(model, request)
    parts = [part async for part in model.stream(CONVERSATION, field="conversation", request=request)]
    for sample in range(2):
        deltas = [part.output for part in parts if isinstance(part, Delta) and part.sample == sample]
        assert "".join(deltas) == whole[sample].text
    prompt = model._reader._chat_template.prompt(CONVERSATION, "c", variables=OPEN).input_ids
    tokens = await texts(model, asked(model, budget=4, variables={}), prompt)
    assert list(map(ids, tokens)) == list(map(ids, whole))


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("kind", HELD)
async def test_a_constraint_holds_for_the_answer_after_the_thought(model, kind, is_open):
    constraint, pattern = HELD[kind]
    special = dict(model.reasoning_form.special_tokens)
    biases = {EOS_ID: 50.0} | dict.fromkeys(special.values(), -100.0)
    if not is_open:
        biases |= {model._delimiters.begin_ids[0]: 100.0}  # which a thought may have too
    for budget in (0, 6):
        request = asked(
            model,
            budget=budget,
            variables=OPEN if is_open else {},
            constraint=constraint,
            logit_biases=tuple(biases.items()),
            max_new_tokens=120,
        )
        for text in await texts(model, request):
            answer = AnswerReader(reasoning=model.reasoning_form, calls=None).read(text.text)
            thought, said = answer.reasoning, answer.text
            assert text.result.finish_reason is not FinishReason.LENGTH
            assert re.fullmatch(pattern, said), text.text
            thinks = is_open or len(model._delimiters.begin_ids) == 1
            assert bool(thought) == bool(budget and thinks)


@pytest.mark.parametrize("pattern", ["<t[a-z]{3}>", "é{3}"])
async def test_a_thought_does_not_begin_within_an_answer(model, pattern):
    special = dict(model.reasoning_form.special_tokens)
    biases = {EOS_ID: 50.0} | dict.fromkeys(special.values(), -100.0)
    written = byte_tokenizer(tuple(special)).encode(pattern[0], add_special_tokens=False).ids[0]
    biases |= {
        model._delimiters.begin_ids[0]: 40.0,
        written: 60.0,
    }  # begins with the answer, and would like to think then
    request = asked(
        model,
        budget=5,
        variables={},
        constraint=ConstraintRequest(regex=pattern),
        logit_biases=tuple(biases.items()),
        max_new_tokens=60,
    )
    for text in await texts(model, request):
        assert re.fullmatch(pattern, text.text), text.text


async def test_stop_strings_and_stop_tokens_end_a_thought_and_a_mark_that_may_not_follow_is_refused(model):
    end_ids = model._delimiters.end_ids
    [text, _] = await texts(model, asked(model, budget=3, stop_strings=("</think>",)))
    assert (text.result.finish_reason, text.result.num_new_tokens) == (FinishReason.STOP, 3 + len(end_ids))
    [text, _] = await texts(model, asked(model, budget=3, stop_token_ids=end_ids[:1]))
    assert text.result.finish_reason is FinishReason.STOP
    assert text.result.num_new_tokens <= 4
    with pytest.raises(InvalidInputError, match="may not follow") as caught:
        await texts(model, asked(model, budget=3, stop_token_ids=end_ids[-1:], min_new_tokens=9))
    assert caught.value.field == "parameters.thinking_token_budget"
    assert str(caught.value.renamed(name_of)).endswith("or leave out min_tokens")


async def test_a_budget_is_refused_where_it_is_out_of_range_or_the_model_does_not_think(model, tmp_path):
    with pytest.raises(InvalidInputError, match="is -1; must be from 0 to 2147483647"):
        await texts(model, asked(model, budget=-1))
    for template in (
        None,
        make_chat_template(tmp_path, "{% for message in messages %}{{ message.content }}{% endfor %}"),
    ):
        plain = make_generation_model(make_decoder(), chat_template=template)
        with pytest.raises(InvalidInputError, match="delimiters") as caught:
            await texts(plain, GenerationRequest(parameters={"thinking_token_budget": 0}), "the cat")
        assert caught.value.field == "parameters.thinking_token_budget"
        plain.close()
