"""GenerationService through a real channel: what is refused and how, and what is answered beside the text."""

import math

import grpc
import pytest
from decoding_server import serving, violation
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tiny_engine import EOS_ID, TOKENIZER, VOCAB_SIZE, make_chat_template, make_decoder

from headway.v1 import common_pb2
from headway.v1 import generation_service_pb2 as pb
from headway_server.decoding.sequence import FinishReason
from headway_server.services.messages import FINISH_REASONS

SAMPLING_FIELDS = {"temperature", "top_k", "top_p", "min_p", "seed"}
TEMPLATE = "{% for message in messages %}<bos>{{ message.role }}: {{ message.content }}\n{% endfor %}<bos>assistant:"
LARGEST = 2**31 - 1
NAN = math.nan


def parameters(**options):
    """Parameters of a request, those of sampling in their place."""
    sampling = {name: options.pop(name) for name in SAMPLING_FIELDS & options.keys()}
    return pb.GenerationParameters(**options, sampling=common_pb2.SamplingParameters(**sampling))


PARAMETERS = parameters(max_new_tokens=12, temperature=1.0, seed=5)


def make_endless_decoder(**options):
    """A decoder whose greedy output never ends: some of 300 logits is always above 0."""
    decoder = make_decoder(**options)
    decoder.output[:, EOS_ID] = 0
    return decoder


def turn(role=pb.ROLE_USER, content="hi"):
    return pb.ChatMessage(role=role, content=content)


def conversation(*turns):
    return pb.Conversation(messages=turns)


async def refusal(stub, request) -> error_details_pb2.BadRequest.FieldViolation:
    if isinstance(request, pb.GenerateTextRequest):
        answer = stub.GenerateText(request)
    else:
        answer = anext(aiter(stub.StreamGenerateText(request)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    found = violation(caught.value)
    assert caught.value.details() == f"{found.field}: {found.description}"
    return found


BIAS = pb.LogitBias
OUT_OF_RANGE = [
    ({"max_new_tokens": 0}, "max_new_tokens", "is 0; must be from 1 to 63"),
    ({"max_new_tokens": 64}, "max_new_tokens", "is 64; must be from 1 to 63"),
    ({"min_new_tokens": -1}, "min_new_tokens", "is -1; must be from 0 to 63"),
    ({"min_new_tokens": 64}, "min_new_tokens", "is 64; must be from 0 to 63"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens", "is 9; must be from 0 to 8"),
    ({"temperature": -0.5}, "temperature", "is -0.5; must be from 0 to 2"),
    ({"temperature": 2.5}, "temperature", "is 2.5; must be from 0 to 2"),
    ({"temperature": NAN}, "temperature", "is nan; must be from 0 to 2"),
    ({"top_k": -1}, "top_k", f"is -1; must be from 0 to {VOCAB_SIZE}"),
    ({"top_k": LARGEST}, "top_k", f"is {LARGEST}; must be from 0 to {VOCAB_SIZE}"),
    ({"top_p": 0}, "top_p", "is 0; must be above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p", "is 1.5; must be above 0 and at most 1"),
    ({"top_p": NAN}, "top_p", "is nan; must be above 0 and at most 1"),
    ({"min_p": -0.5}, "min_p", "is -0.5; must be from 0 to 1"),
    ({"min_p": 1.5}, "min_p", "is 1.5; must be from 0 to 1"),
    ({"min_p": NAN}, "min_p", "is nan; must be from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "is 0; must be from 0.01 to 100"),
    ({"repetition_penalty": 101}, "repetition_penalty", "is 101; must be from 0.01 to 100"),
    ({"repetition_penalty": NAN}, "repetition_penalty", "is nan; must be from 0.01 to 100"),
    ({"presence_penalty": -2.5}, "presence_penalty", "is -2.5; must be from -2 to 2"),
    ({"presence_penalty": 2.5}, "presence_penalty", "is 2.5; must be from -2 to 2"),
    ({"presence_penalty": NAN}, "presence_penalty", "is nan; must be from -2 to 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "is -2.5; must be from -2 to 2"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "is 2.5; must be from -2 to 2"),
    ({"frequency_penalty": NAN}, "frequency_penalty", "is nan; must be from -2 to 2"),
    ({"stop_strings": ["a", ""]}, "stop_strings[1]", "has 0 characters; must be 1 to 256"),
    ({"stop_strings": ["a" * 257]}, "stop_strings[0]", "has 257 characters; must be 1 to 256"),
    ({"stop_strings": ["a"] * 17}, "stop_strings", "has 17 elements; at most 16"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", f"is -1; must be from 0 to {VOCAB_SIZE - 1}"),
    ({"stop_token_ids": [3, VOCAB_SIZE]}, "stop_token_ids[1]", f"is {VOCAB_SIZE}; must be from 0 to {VOCAB_SIZE - 1}"),
    ({"stop_token_ids": [3] * 65}, "stop_token_ids", "has 65 elements; at most 64"),
    (
        {"logit_biases": [BIAS(token_id=VOCAB_SIZE)]},
        "logit_biases[0].token_id",
        f"is {VOCAB_SIZE}; must be from 0 to {VOCAB_SIZE - 1}",
    ),
    (
        {"logit_biases": [BIAS(token_id=-1)]},
        "logit_biases[0].token_id",
        f"is -1; must be from 0 to {VOCAB_SIZE - 1}",
    ),
    (
        {"logit_biases": [BIAS(), BIAS(token_id=1, bias=101)]},
        "logit_biases[1].bias",
        "is 101; must be from -100 to 100",
    ),
    ({"logit_biases": [BIAS(bias=-101)]}, "logit_biases[0].bias", "is -101; must be from -100 to 100"),
    ({"logit_biases": [BIAS(bias=NAN)]}, "logit_biases[0].bias", "is nan; must be from -100 to 100"),
    (
        {"logit_biases": [BIAS(token_id=5), BIAS(token_id=5)]},
        "logit_biases[1].token_id",
        "is 5, as is that of logit_biases[0]; give a token one bias",
    ),
    ({"logit_biases": [BIAS()] * 1025}, "logit_biases", "has 1025 elements; at most 1024"),
    ({"constraint": pb.Constraint()}, "constraint", "is of no kind; set one of json_schema, regex and choices"),
    (
        {"constraint": pb.Constraint(json_schema=" " * 65537)},
        "constraint.json_schema",
        "has 65537 bytes of UTF-8; at most 65536, so make it shorter",
    ),
    (
        {"constraint": pb.Constraint(regex="a" * 8193)},
        "constraint.regex",
        "has 8193 bytes of UTF-8; at most 8192, so make it shorter",
    ),
    (
        {"constraint": pb.Constraint(choices=pb.Choices())},
        "constraint.choices.texts",
        "has 0 elements; must be 1 to 256",
    ),
    (
        {"constraint": pb.Constraint(choices=pb.Choices(texts=map(str, range(257))))},
        "constraint.choices.texts",
        "has 257 elements; must be 1 to 256",
    ),
    (
        {"constraint": pb.Constraint(choices=pb.Choices(texts=["a" * 1025]))},
        "constraint.choices.texts[0]",
        "has 1025 characters; must be 1 to 1024",
    ),
]


def path_of(field):
    """The path of a parameter in the request."""
    return f"parameters.sampling.{field}" if field in SAMPLING_FIELDS else f"parameters.{field}"


async def test_every_parameter_out_of_its_range_is_named_with_limit_and_value():
    async with serving() as (stub, _):
        for options, field, says in OUT_OF_RANGE:
            given = parameters(**options)
            for request in (
                pb.GenerateTextRequest(prompts=["the cat"], parameters=given),
                pb.StreamGenerateTextRequest(prompt="the cat", parameters=given),
            ):
                found = await refusal(stub, request)
                assert (found.field, found.description) == (path_of(field), says)


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"sample_count": 0}, "sample_count", "is 0; must be from 1 to 16"),
        ({"sample_count": 17}, "sample_count", "is 17; must be from 1 to 16"),
        ({"priority": -101}, "priority", "is -101; must be from -100 to 100"),
        ({"priority": 101}, "priority", "is 101; must be from -100 to 100"),
        (
            {"log_probabilities": pb.LogProbabilityOptions(top_token_count=21)},
            "log_probabilities.top_token_count",
            "is 21; must be from 0 to 20",
        ),
        (
            {"log_probabilities": pb.LogProbabilityOptions(top_token_count=-1)},
            "log_probabilities.top_token_count",
            "is -1; must be from 0 to 20",
        ),
        ({"prompts": []}, "prompts", "is empty; give 1 to 256, or conversations instead"),
        (
            {"conversations": [conversation(turn())]},
            "conversations",
            "is given together with prompts; give one of the two",
        ),
    ],
)
async def test_an_option_of_a_call_out_of_its_range_is_named(options, field, says):
    async with serving() as (stub, _):
        found = await refusal(stub, pb.GenerateTextRequest(**({"prompts": ["the cat"]} | options)))
        assert (found.field, found.description) == (field, says)


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"priority": 101}, "priority", "is 101; must be from -100 to 100"),
        (
            {"log_probabilities": pb.LogProbabilityOptions(top_token_count=21)},
            "log_probabilities.top_token_count",
            "is 21; must be from 0 to 20",
        ),
        ({"prompt": ""}, "prompt", "is empty; give at least one character, or a conversation instead"),
        ({"conversation": conversation(turn())}, "conversation", "is given together with prompt; give one of the two"),
        ({"prompt": "", "conversation": conversation()}, "conversation.messages", "is empty; give 1 to 1024"),
    ],
)
async def test_an_option_of_a_stream_out_of_its_range_is_named(options, field, says):
    async with serving() as (stub, _):
        found = await refusal(stub, pb.StreamGenerateTextRequest(**({"prompt": "the cat"} | options)))
        assert (found.field, found.description) == (field, says)


ROLES = "must be one of ROLE_SYSTEM (1), ROLE_USER (2), ROLE_ASSISTANT (3), ROLE_TOOL (4)"
GOOD = conversation(turn())


@pytest.mark.parametrize(
    ("conversations", "field", "says"),
    [
        ([GOOD] * 257, "conversations", "has 257 elements, the limit is 256; send them in several calls"),
        ([GOOD, conversation()], "conversations[1].messages", "is empty; give 1 to 1024"),
        (
            [conversation(*[turn()] * 1025)],
            "conversations[0].messages",
            "has 1025 elements, the limit is 1024; leave out the first ones",
        ),
        ([GOOD, GOOD, conversation(turn(role=0))], "conversations[2].messages[0].role", f"is 0; {ROLES}"),
        ([conversation(turn(), turn(role=9))], "conversations[0].messages[1].role", f"is 9; {ROLES}"),
        (
            [conversation(turn(content=""))],
            "conversations[0].messages[0].content",
            "is empty; give at least one character",
        ),
        (
            [conversation(turn(content="ü" * 501))],
            "conversations[0].messages[0].content",
            "has 1002 bytes, the limit is 1000; split or shorten it",
        ),
        (
            [GOOD, conversation(*[turn(content="a" * 400)] * 3)],
            "conversations[1]",
            "has 1200 bytes in all, the limit is 1000; leave out the first messages",
        ),
        (
            [conversation(turn(content="a" * 1000))] * 17,
            "conversations",
            "has 17000 bytes in all, the limit of a call is 16000; send them in several calls",
        ),
    ],
)
async def test_what_is_wrong_with_a_conversation_is_named(conversations, field, says, tmp_path):
    template = make_chat_template(tmp_path, TEMPLATE)
    async with serving(chat_template=template, max_text_bytes=1000) as (stub, _):
        found = await refusal(stub, pb.GenerateTextRequest(conversations=conversations))
        assert (found.field, found.description) == (field, says)
        if len(conversations) == 1:
            found = await refusal(stub, pb.StreamGenerateTextRequest(conversation=conversations[0]))
            assert found.field == field.replace("conversations[0]", "conversation")


async def test_conversations_are_answered_and_streamed_alike(tmp_path):
    template = make_chat_template(tmp_path, TEMPLATE)
    turns = conversation(turn(pb.ROLE_SYSTEM, "be"), turn(), turn(pb.ROLE_ASSISTANT, ""), turn(content="oh"))
    async with serving(make_endless_decoder(max_length=256), chat_template=template, max_input_tokens=200) as (stub, _):
        response = await stub.GenerateText(pb.GenerateTextRequest(conversations=[turns, GOOD], parameters=PARAMETERS))
        messages = [
            message
            async for message in stub.StreamGenerateText(
                pb.StreamGenerateTextRequest(conversation=turns, parameters=PARAMETERS, echo=True)
            )
        ]
    text = "<bos>system: be\n<bos>user: hi\n<bos>assistant: \n<bos>user: oh\n<bos>assistant:"
    assert messages[0].text_delta == text
    assert messages[-1].result.text == text + response.results[0].text
    assert len(response.results) == 2


async def test_what_a_model_thinks_is_told_apart_whole_and_as_it_comes(tmp_path):
    marks = ("<think>", "</think>")
    template = make_chat_template(
        tmp_path,
        "{% for message in messages %}<bos>{{ message.reasoning_content }}</think>{{ message.content }}{% endfor %}"
        "<bos><think>",
        special=marks,
    )
    decoder = make_endless_decoder(max_length=256, vocab_size=VOCAB_SIZE + 2)
    options = {"chat_template": template, "special": marks, "max_input_tokens": 200}
    turns = conversation(turn(), pb.ChatMessage(role=pb.ROLE_ASSISTANT, content="a", reasoning="bcd"), turn())
    async with serving(decoder, **options) as (stub, _):
        asked = parameters(max_new_tokens=24, temperature=1.0, seed=5, thinking_token_budget=6)
        response = await stub.GenerateText(
            pb.GenerateTextRequest(conversations=[turns, GOOD], parameters=asked, sample_count=2)
        )
        for index, talk in enumerate((turns, GOOD)):
            request = pb.StreamGenerateTextRequest(conversation=talk, parameters=asked)
            messages = [message async for message in stub.StreamGenerateText(request)]
            result, whole = messages[-1].result, response.results[2 * index]
            assert (result.text, result.reasoning) == (whole.text, whole.reasoning)
            assert whole.text
            assert whole.reasoning
            assert "".join(message.text_delta for message in messages) == result.text
            assert "".join(message.reasoning_delta for message in messages) == result.reasoning
        without = [turn(), pb.ChatMessage(role=pb.ROLE_ASSISTANT, content="a"), turn()]
        request = pb.GenerateTextRequest(conversations=[conversation(*without)], parameters=asked)
        shorter = (await stub.GenerateText(request)).results[0].prompt_token_count
        assert response.results[0].prompt_token_count > shorter
        forged = conversation(pb.ChatMessage(role=pb.ROLE_USER, content="a", reasoning="b"))
        found = await refusal(stub, pb.GenerateTextRequest(conversations=[forged]))
        assert (found.field, found.description) == (
            "conversations[0].messages[0].reasoning",
            "is set, and the role is user; the assistant thinks",
        )
        echoed = pb.StreamGenerateTextRequest(conversation=GOOD, parameters=asked, echo=True)
        assert not any([message.reasoning_delta async for message in stub.StreamGenerateText(echoed)])


async def test_a_model_without_a_chat_template_is_a_failed_precondition_with_its_reason():
    async with serving() as (stub, _):
        calls = [
            stub.GenerateText(pb.GenerateTextRequest(conversations=[GOOD])),
            anext(aiter(stub.StreamGenerateText(pb.StreamGenerateTextRequest(conversation=GOOD)))),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError, match="tiny-generation has no chat template") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            info = error_details_pb2.ErrorInfo()
            assert any(detail.Unpack(info) for detail in rpc_status.from_call(caught.value).details)
            assert info.reason == "NO_CHAT_TEMPLATE"


async def test_samples_are_numbered_in_the_order_of_the_prompts():
    async with serving() as (stub, _):
        prompts = ["the cat", "the dog sat"]
        request = pb.GenerateTextRequest(prompts=prompts, parameters=PARAMETERS, sample_count=3, echo=True, priority=-3)
        results = (await stub.GenerateText(request)).results
    assert [result.sample_index for result in results] == [0, 1, 2, 0, 1, 2]
    assert [result.text.startswith(prompts[i // 3]) for i, result in enumerate(results)] == [True] * 6
    assert len({result.text for result in results}) == 6
    assert {result.seed for result in results} == {5}
    assert results[1].cached_prompt_token_count == results[1].prompt_token_count


async def test_log_probabilities_are_answered_with_the_texts_of_their_tokens():
    options = pb.LogProbabilityOptions(top_token_count=3, include_prompt=True)
    prompt = "the cat, ü"
    async with serving(make_endless_decoder()) as (stub, _):
        request = pb.GenerateTextRequest(prompts=[prompt], parameters=PARAMETERS, log_probabilities=options)
        (result,) = (await stub.GenerateText(request)).results
        stream = stub.StreamGenerateText(
            pb.StreamGenerateTextRequest(prompt=prompt, parameters=PARAMETERS, log_probabilities=options)
        )
        messages = [message async for message in stream]
    assert len(result.tokens) == result.new_token_count == 12
    ids = TOKENIZER.encode(prompt, add_special_tokens=False).ids
    assert [token.token_id for token in result.prompt_tokens] == ids
    assert [token.text for token in result.prompt_tokens] == ["the", " cat", ",", " ", "\ufffd", "\ufffd"]
    assert not result.prompt_tokens[0].HasField("log_probability")
    assert not result.prompt_tokens[0].top_tokens
    for token in [*result.prompt_tokens[1:], *result.tokens]:
        assert token.HasField("log_probability")
        assert len(token.top_tokens) == 3
        likeliest = [candidate.log_probability for candidate in token.top_tokens]
        assert sorted(likeliest, reverse=True) == likeliest
        assert token.log_probability <= likeliest[0] < 0
        for candidate in token.top_tokens:
            assert candidate.token_id != token.token_id or candidate.text == token.text
            assert candidate.text == token_text(candidate.token_id)
    assert [token for message in messages for token in message.tokens] == list(result.tokens)
    assert messages[-1].result.prompt_tokens == result.prompt_tokens


def token_text(token_id: int) -> str:
    return TOKENIZER.decode([token_id], skip_special_tokens=False)


async def test_no_log_probabilities_are_answered_that_were_not_asked_for():
    async with serving() as (stub, _):
        (plain,) = (await stub.GenerateText(pb.GenerateTextRequest(prompts=["a"], parameters=PARAMETERS))).results
        request = pb.GenerateTextRequest(
            prompts=["a"], parameters=PARAMETERS, log_probabilities=pb.LogProbabilityOptions()
        )
        (chosen_only,) = (await stub.GenerateText(request)).results
    assert (list(plain.tokens), list(plain.prompt_tokens), list(chosen_only.prompt_tokens)) == ([], [], [])
    assert chosen_only.tokens
    assert all(token.log_probability < 0 and not token.top_tokens for token in chosen_only.tokens)


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        (pb.Constraint(choices=pb.Choices(texts=["yes", "no"])), {"yes", "no"}),
        (pb.Constraint(regex="(ab){2}c"), {"ababc"}),
        (pb.Constraint(json_schema='{"enum": [17]}'), {"17"}),
    ],
)
async def test_a_text_follows_its_constraint_and_says_that_it_is_complete(constraint, texts):
    given = parameters(max_new_tokens=30, temperature=2, seed=3, constraint=constraint)
    async with serving() as (stub, _):
        request = pb.GenerateTextRequest(prompts=["the cat", "the dog"], parameters=given, sample_count=16)
        results = (await stub.GenerateText(request)).results
        stream = stub.StreamGenerateText(pb.StreamGenerateTextRequest(prompt="the cat", parameters=given))
        streamed = [message async for message in stream][-1].result
    assert {result.text for result in results} == texts
    ends = {common_pb2.FINISH_REASON_CONSTRAINT, common_pb2.FINISH_REASON_END_OF_SEQUENCE}
    assert {result.finish_reason for result in results} <= ends
    assert streamed.text == results[0].text


async def test_a_stop_token_is_a_stop():
    async with serving(make_endless_decoder()) as (stub, _):
        everything = parameters(stop_token_ids=range(64), max_new_tokens=40, temperature=2, seed=1)
        (result,) = (await stub.GenerateText(pb.GenerateTextRequest(prompts=["a"], parameters=everything))).results
    assert result.finish_reason == common_pb2.FINISH_REASON_STOP


def test_every_reason_to_finish_has_its_number():
    assert {FINISH_REASONS.number(reason) for reason in FinishReason} == set(common_pb2.FinishReason.values()) - {
        common_pb2.FINISH_REASON_UNSPECIFIED
    }
