"""Parameters of generation as the served model takes them: ranges, samples, echo, conversations, constraints."""

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy_decoder import NumpyDecoder
from tiny_engine import (
    EOS_ID,
    TOKENIZER,
    decode,
    make_chat_template,
    make_decoder,
    make_generation_model,
)

from headway_server.bundles import SamplingDefaults
from headway_server.decoding.constraints import ConstraintRequest
from headway_server.decoding.sequence import Delta, FinishReason
from headway_server.errors import InvalidInputError, NoChatTemplateError
from headway_server.preprocessing import ChatTurn, TextTokenizer
from headway_server.tasks.generation.request import GenerationRequest, PromptReader
from headway_server.tasks.parameters import DecodingLimits, LogProbabilityRequest, plan_sampling

LIMITS = DecodingLimits(max_input_tokens=40, max_total_tokens=64, vocab_size=300)
SEEDED = {"temperature": 1.0, "seed": 5, "max_new_tokens": 12}
LARGEST = 2**31 - 1
LONG_TEXT = "!" * 70_000
"""More than is encoded at a time."""


def make_endless_decoder(**options) -> NumpyDecoder:
    """A decoder whose greedy output never ends: some of 300 logits is always above 0."""
    decoder = make_decoder(**options)
    decoder.output[:, EOS_ID] = 0
    return decoder


@pytest.fixture
async def model():
    model = make_generation_model(make_endless_decoder())
    model.start()
    yield model
    model.close()


async def generate(model, *prompts, sampling=SEEDED, truncate=False, **options):
    fields = [f"prompts[{i}]" for i in range(len(prompts))]
    request = GenerationRequest(parameters=sampling, truncate=truncate, **options)
    answer = await model.generate(prompts, fields=fields, request=request)
    return answer.results


async def stream(model, prompt, *, field="prompt", sampling=SEEDED, truncate=False, **options):
    parts = [
        part
        async for part in model.stream(
            prompt, field=field, request=GenerationRequest(parameters=sampling, truncate=truncate, **options)
        )
    ]
    return parts[:-1], parts[-1].results[0]


@pytest.mark.parametrize(
    ("sampling", "field", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens", "is 0; must be from 1 to 63"),
        ({"max_new_tokens": -LARGEST - 1}, "max_new_tokens", "is -2147483648; must be from 1 to 63"),
        ({"max_new_tokens": 64}, "max_new_tokens", "is 64; must be from 1 to 63"),
        ({"min_new_tokens": -1}, "min_new_tokens", "is -1; must be from 0 to 63"),
        ({"min_new_tokens": 64}, "min_new_tokens", "is 64; must be from 0 to 63"),
        ({"min_new_tokens": 6, "max_new_tokens": 5}, "min_new_tokens", "is 6; must be from 0 to 5"),
        ({"temperature": -0.1}, "temperature", "is -0.1; must be from 0 to 2"),
        ({"temperature": 2.5}, "temperature", "is 2.5; must be from 0 to 2"),
        ({"temperature": math.nan}, "temperature", "is nan; must be from 0 to 2"),
        ({"temperature": math.inf}, "temperature", "is inf; must be from 0 to 2"),
        ({"top_k": -1}, "top_k", "is -1; must be from 0 to 300"),
        ({"top_k": 301}, "top_k", "is 301; must be from 0 to 300"),
        ({"top_p": 0.0}, "top_p", "is 0; must be above 0 and at most 1"),
        ({"top_p": -0.5}, "top_p", "is -0.5; must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p", "is 1.5; must be above 0 and at most 1"),
        ({"top_p": math.nan}, "top_p", "is nan; must be above 0 and at most 1"),
        ({"min_p": -0.5}, "min_p", "is -0.5; must be from 0 to 1"),
        ({"min_p": 1.5}, "min_p", "is 1.5; must be from 0 to 1"),
        ({"min_p": math.nan}, "min_p", "is nan; must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "is 0; must be from 0.01 to 100"),
        ({"repetition_penalty": -1.0}, "repetition_penalty", "is -1; must be from 0.01 to 100"),
        ({"repetition_penalty": 100.5}, "repetition_penalty", "is 100.5; must be from 0.01 to 100"),
        ({"repetition_penalty": math.nan}, "repetition_penalty", "is nan; must be from 0.01 to 100"),
        ({"presence_penalty": -2.5}, "presence_penalty", "is -2.5; must be from -2 to 2"),
        ({"presence_penalty": 2.5}, "presence_penalty", "is 2.5; must be from -2 to 2"),
        ({"presence_penalty": math.nan}, "presence_penalty", "is nan; must be from -2 to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "is -2.5; must be from -2 to 2"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "is 2.5; must be from -2 to 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty", "is nan; must be from -2 to 2"),
        ({"stop_strings": ("a", "")}, "stop_strings[1]", "has 0 characters; must be 1 to 256"),
        ({"stop_strings": ("a" * 257,)}, "stop_strings[0]", "has 257 characters; must be 1 to 256"),
        ({"stop_strings": ("a",) * 17}, "stop_strings", "has 17 elements; at most 16"),
        ({"stop_token_ids": (0, 300)}, "stop_token_ids[1]", "is 300; must be from 0 to 299"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids[0]", "is -1; must be from 0 to 299"),
        ({"stop_token_ids": (7,) * 65}, "stop_token_ids", "has 65 elements; at most 64"),
        ({"logit_biases": ((0, 1.0), (300, 1.0))}, "logit_biases[1].token_id", "is 300; must be from 0 to 299"),
        ({"logit_biases": ((-1, 1.0),)}, "logit_biases[0].token_id", "is -1; must be from 0 to 299"),
        ({"logit_biases": ((0, 100.5),)}, "logit_biases[0].bias", "is 100.5; must be from -100 to 100"),
        ({"logit_biases": ((0, -100.5),)}, "logit_biases[0].bias", "is -100.5; must be from -100 to 100"),
        ({"logit_biases": ((0, math.nan),)}, "logit_biases[0].bias", "is nan; must be from -100 to 100"),
        (
            {"logit_biases": ((5, 1.0), (7, 1.0), (5, 1.0))},
            "logit_biases[2].token_id",
            "is 5, as is that of logit_biases[0]; give a token one bias",
        ),
        ({"logit_biases": ((0, 0.0),) * 1025}, "logit_biases", "has 1025 elements; at most 1024"),
    ],
)
def test_a_sampling_parameter_out_of_its_range_is_named_with_limit_and_value(sampling, field, says):
    with pytest.raises(InvalidInputError) as caught:
        plan_sampling(sampling, defaults=None, limits=LIMITS)
    path = "parameters.sampling" if field in ("temperature", "top_k", "top_p", "min_p") else "parameters"
    assert caught.value.field == f"{path}.{field}"
    assert caught.value.description == says


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_new_tokens": 1, "min_new_tokens": 1},
        {"max_new_tokens": 63, "min_new_tokens": 63},
        {"temperature": 2.0, "top_k": 300, "top_p": 1.0, "min_p": 1.0},
        {"temperature": 0.0, "top_k": 0, "top_p": 1e-30, "min_p": 0.0},
        {"repetition_penalty": 0.009999999776482582, "presence_penalty": -2.0, "frequency_penalty": -2.0},
        {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"stop_strings": ("a" * 256,) * 16, "stop_token_ids": (299,) * 64},
        {"logit_biases": tuple((i, (-1) ** i * 100.0) for i in range(300))},
    ],
)
def test_the_ends_of_the_ranges_belong_to_them(sampling):
    plan = plan_sampling(sampling, defaults=None, limits=LIMITS)
    for name in sampling.keys() & {"min_new_tokens", "temperature", "top_k", "top_p", "min_p", "logit_biases"}:
        assert getattr(plan.parameters, name) == sampling[name]


def test_what_a_call_does_not_set_is_the_models_default():
    values = {
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.75,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.125,
    }
    defaults = SamplingDefaults(max_new_tokens=9, **values)
    plan = plan_sampling({}, defaults=defaults, limits=LIMITS)
    assert plan.default_new_tokens == 9
    assert {name: getattr(plan.parameters, name) for name in values} == values
    for name in values:
        given = plan_sampling(dict(**{name: 1}), defaults=defaults, limits=LIMITS).parameters
        assert {other: getattr(given, other) for other in values} == values | {name: 1}


@pytest.mark.parametrize("count", [-1, 21, LARGEST])
def test_a_number_of_top_tokens_out_of_its_range_is_named(count):
    wanted = LogProbabilityRequest(num_top_tokens=count)
    with pytest.raises(InvalidInputError, match=f"is {count}; must be from 0 to 20") as caught:
        plan_sampling({}, defaults=None, limits=LIMITS, log_probabilities=wanted)
    assert caught.value.field == "log_probabilities.top_token_count"


def test_no_more_top_tokens_are_asked_of_the_engine_than_there_are_tokens():
    wanted = LogProbabilityRequest(num_top_tokens=20, include_prompt=True)
    plan = plan_sampling({}, defaults=None, limits=replace(LIMITS, vocab_size=8), log_probabilities=wanted)
    assert (plan.parameters.num_top_tokens, plan.parameters.wants_prompt_log_probabilities) == (8, True)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("sample_count", 0, "is 0; must be from 1 to 16"),
        ("sample_count", -1, "is -1; must be from 1 to 16"),
        ("sample_count", 17, "is 17; must be from 1 to 16"),
        ("priority", -101, "is -101; must be from -100 to 100"),
        ("priority", 101, "is 101; must be from -100 to 100"),
    ],
)
async def test_an_option_of_a_call_out_of_its_range_is_named(model, option, value, says):
    with pytest.raises(InvalidInputError) as caught:
        await generate(model, "the cat", **{option: value})
    assert (caught.value.field, caught.value.description) == (option, says)


@pytest.mark.parametrize(
    ("default", "most", "field"),
    [(3, 3, r"prompts\[0\]"), (None, 26, r"prompts\[1\]")],
    ids=["the model's default", "the room that is left"],
)
async def test_a_minimum_past_what_follows_a_prompt_is_refused_by_name(default, most, field):
    model = make_generation_model(make_decoder(), defaults=SamplingDefaults(max_new_tokens=default))
    with pytest.raises(InvalidInputError, match=rf"must be from 0 to {most}, .* follow {field}") as caught:
        await generate(model, "the cat", "!" * 38, sampling={"min_new_tokens": most + 1})
    assert caught.value.field == "parameters.min_new_tokens"


async def test_a_prompt_that_is_refused_ends_the_reading(model, monkeypatch):
    read = []
    encode = model._tokenizer._encode
    monkeypatch.setattr(
        model._tokenizer, "_encode", lambda texts, *rest: (read.append(len(texts)), encode(texts, *rest))[1]
    )
    with pytest.raises(InvalidInputError, match=r"prompts\[1\]: has 70000 tokens"):
        await generate(model, "the cat", *[LONG_TEXT] * 5)
    assert read == [1, 1]


async def test_a_prompt_of_white_space_is_continued(model):
    (result,) = await generate(model, " \n ")
    assert result.num_prompt_tokens == len(TOKENIZER.encode(" \n ", add_special_tokens=False).ids)


async def test_samples_follow_their_prompt_and_the_first_is_what_a_single_one_is(model):
    sampling = {"temperature": 1.5, "max_new_tokens": 12}
    together = await generate(model, "the cat", "the dog", sampling=sampling, sample_count=3)
    assert [result.sample for result in together] == [0, 1, 2, 0, 1, 2]
    assert len({result.result.output for result in together}) == 6
    first, second = {result.seed for result in together[:3]}, {result.seed for result in together[3:]}
    assert len(first) == len(second) == 1 != len(first | second)
    again = sampling | {"seed": first.pop()}
    (alone,) = await generate(model, "the cat", sampling=again)
    assert alone.result.output == together[0].result.output
    repeated = await generate(model, "the cat", sampling=again, sample_count=2)
    assert [result.result.output for result in repeated] == [result.result.output for result in together[:2]]


async def test_every_sample_of_every_prompt_takes_a_permit():
    model = make_generation_model(make_decoder(num_slots=2), max_waiting=4)
    model.start()
    await generate(model, "the cat", "the dog", sample_count=3)
    with pytest.raises(
        InvalidInputError, match="is 4, with 2 prompts 8 texts; tiny-generation takes at most 6 at once"
    ):
        await generate(model, "the cat", "the dog", sample_count=4)
    assert model._admission._num_admitted == 0
    model.close()


async def test_an_echo_is_the_prompt_as_it_was_given_and_not_searched_for_stop_strings(model):
    plain, echoed = [
        (await generate(model, "the  cat, ünd", echo=echo, sampling=SEEDED | {"stop_strings": ("cat",)}))[0]
        for echo in (False, True)
    ]
    assert echoed.text == "the  cat, ünd" + plain.text
    assert echoed.result.output == plain.result.output == plain.text


async def test_an_echo_of_a_prompt_that_was_cut_is_what_the_model_read(model):
    (cut,) = await generate(model, "the dog and " * 10 + "!" * 40, truncate=True, echo=True)
    assert cut.truncated
    assert cut.text == "!" * 40 + cut.result.output


@pytest.mark.parametrize("is_text", [True, False])
async def test_the_models_own_prefix_stays_where_a_text_is_cut(is_text):
    reader = PromptReader(TextTokenizer(TOKENIZER), limits=LIMITS, chat_template=None, owner="model", prefix=(7, 9))
    long = "!" * 90
    ids = TOKENIZER.encode(long, add_special_tokens=False).ids
    plan = plan_sampling(SEEDED, defaults=None, limits=LIMITS, log_probabilities=None)
    prompt = long if is_text else np.array(ids)
    (fitted,) = await reader.read([prompt], fields=["prompts[0]"], plan=plan, truncate=True)
    assert fitted.truncated
    assert fitted.input_ids.tolist() == ([7, 9, *ids[-38:]] if is_text else ids[-40:])


async def test_a_streamed_echo_comes_first_and_the_deltas_join_to_the_text(model):
    deltas, result = await stream(model, "the cat", echo=True)
    assert deltas[0] == Delta(output="the cat", num_new_tokens=0)
    assert deltas[0].prompt_ids.tolist() == TOKENIZER.encode("the cat", add_special_tokens=False).ids
    assert "".join(delta.output for delta in deltas) == result.text == "the cat" + result.result.output


async def test_a_stop_token_ends_the_text_and_is_not_part_of_it(model):
    greedy = SEEDED | {"temperature": 0.0}
    (whole,) = await generate(model, "the cat", sampling=greedy)
    ids = TOKENIZER.encode(whole.result.output, add_special_tokens=False).ids
    assert decode(ids) == whole.result.output
    for stop_id in set(ids):
        (ended,) = await generate(model, "the cat", sampling=greedy | {"stop_token_ids": (stop_id,)})
        if ended.result.finish_reason is FinishReason.STOP:
            assert whole.result.output.startswith(ended.result.output)
            assert ended.result.num_new_tokens <= whole.result.num_new_tokens
            return
    raise AssertionError(f"no token of {whole.result.output!r} ends it")


CHAT = """\
{%- for message in messages -%}
<bos>{{ message.role }}: {{ message.content }}
{% endfor -%}
{%- if messages[-1].role == 'system' -%}{{ raise_exception('say something') }}{%- endif -%}
<bos>assistant:"""
TURNS = (ChatTurn(role="system", content="be <bos>"), ChatTurn(role="user", content="hi"))


@pytest.fixture
async def chat_model(tmp_path):
    model = make_generation_model(
        make_endless_decoder(max_length=128), max_input_tokens=100, chat_template=make_chat_template(tmp_path, CHAT)
    )
    model.start()
    yield model
    model.close()


async def test_a_conversation_is_continued_by_its_template(chat_model):
    (answered,) = await generate(chat_model, TURNS, echo=True)
    text = "<bos>system: be <bos>\n<bos>user: hi\n<bos>assistant:"
    assert answered.text == text + answered.result.output
    said = TOKENIZER.encode("system: be <x", add_special_tokens=False).ids
    assert answered.num_prompt_tokens > len(said)  # what a person wrote is no special token
    deltas, streamed = await stream(chat_model, TURNS, field="conversation")
    assert "".join(delta.output for delta in deltas) == streamed.text == answered.result.output


async def test_conversations_are_answered_in_order_and_samples_with_them(chat_model):
    other = (ChatTurn(role="user", content="hello"),)
    together = await generate(chat_model, TURNS, other, sample_count=2)
    alone = [*await generate(chat_model, TURNS, sample_count=2), *await generate(chat_model, other, sample_count=2)]
    assert [result.result.output for result in together] == [result.result.output for result in alone]


async def test_a_conversation_that_the_template_or_the_model_refuses_is_named(chat_model):
    with pytest.raises(InvalidInputError, match=r"prompts\[1\]: .*say something"):
        await generate(chat_model, TURNS, TURNS[:1])
    long = (ChatTurn(role="user", content="!" * 101),)
    with pytest.raises(InvalidInputError, match=r"prompts\[0\]: has \d+ tokens; at most 100"):
        await generate(chat_model, long)
    (cut,) = await generate(chat_model, long, truncate=True)
    assert cut.truncated


async def test_a_model_without_a_template_continues_no_conversation_and_says_so(model):
    with pytest.raises(NoChatTemplateError, match="tiny-generation has no chat template"):
        await generate(model, TURNS)
    with pytest.raises(NoChatTemplateError, match="tiny-generation has no chat template"):
        await stream(model, TURNS)
    assert model._admission._num_admitted == 0


async def test_a_constraint_that_cannot_be_used_is_refused_and_the_permits_given_back(model):
    sampling = SEEDED | {"constraint": ConstraintRequest(regex="(")}
    with pytest.raises(InvalidInputError) as caught:
        await generate(model, "the cat", sampling=sampling)
    assert caught.value.field.startswith("parameters.constraint")
    assert model._admission._num_admitted == 0
