"""OpenAI's API, called by OpenAI's own package: blocking, asyncio, and streams."""

import asyncio
import base64
import json
import re
from contextlib import asynccontextmanager
from io import BytesIO

import numpy as np
import openai
import pytest
import soundfile
from PIL import Image
from tiny_engine import BOS_ID, EOS_ID, MAX_LENGTH, TOKENIZER, slow_down
from waiting import until

CHAT = {"model": "tiny-generation", "messages": [{"role": "user", "content": "the cat"}], "max_completion_tokens": 8}
NO_SPACE = {str(token): -100 for token in range(2, 300) if TOKENIZER.decode([token]).isspace()}
COMPLETION = {"model": "tiny-generation", "prompt": "the cat", "max_tokens": 8}


@pytest.fixture
def calling(serve):
    """A server, and OpenAI's client of it."""

    @asynccontextmanager
    async def start(**options):
        async with (
            serve(**options) as serving,
            openai.AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield serving, client

    return start


def free(serving) -> bool:
    model = next(model for model in serving.host.models if model.bundle.manifest.name == "tiny-generation")
    engine = model._lanes._engines[0]
    return engine._stepper.scheduler.num_free == engine.num_slots


async def test_models_are_listed_and_described(calling):
    async with calling() as (_, client):
        names = [model.id async for model in await client.models.list()]
        assert names == ["colours", "tiny-generation", "topics"]
        assert (await client.models.retrieve("topics/1")).id == "topics"
        with pytest.raises(openai.NotFoundError, match="model 'nope' is not loaded"):
            await client.models.retrieve("nope")


async def test_the_blocking_client_gets_the_same_answers_as_the_asyncio_one(calling):
    async with calling() as (serving, client):
        expected = await client.chat.completions.create(**CHAT, seed=3)

        def call():
            with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none") as blocking:
                whole = blocking.chat.completions.create(**CHAT, seed=3)
                pieces = [
                    chunk.choices[0].delta.content or ""
                    for chunk in blocking.chat.completions.create(**CHAT, seed=3, stream=True)
                ]
                return whole, "".join(pieces)

        whole, streamed = await asyncio.to_thread(call)
        assert whole.choices[0].message.content == streamed == expected.choices[0].message.content
        assert whole.choices[0].message.role == "assistant"


async def test_a_chat_streams_what_it_answers_at_once_and_counts_its_tokens(calling):
    async with calling() as (serving, client):
        whole = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
        stream = await client.chat.completions.create(
            **CHAT, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8
        assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
        tokens = [token for chunk in chunks[:-1] for token in (chunk.choices[0].logprobs or whole_none()).content]
        assert [token.token for token in tokens] == [token.token for token in whole.choices[0].logprobs.content]
        for token in whole.choices[0].logprobs.content:
            assert token.logprob <= 0
            assert [top.logprob for top in token.top_logprobs] == sorted(
                (top.logprob for top in token.top_logprobs), reverse=True
            )
            assert len(token.top_logprobs) == 2
        assert whole.id.startswith("chatcmpl-")
        assert serving.recorder.finished[-1] == ("/v1/chat/completions", "NoneType")


def whole_none():
    return type("_None", (), {"content": ()})


async def test_tokens_are_those_that_generation_reads_and_their_text_is_the_prompt(calling):
    async with calling() as (serving, client):

        async def ask(path, **fields):
            answer = await serving.client.post(path, json={"model": "tiny-generation", **fields})
            assert answer.status_code == 200, answer.text
            return answer.json()

        found = await ask("/tokenize", prompt="the cat", return_token_strs=True)
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["tokens"] == TOKENIZER.encode("the cat", add_special_tokens=False).ids
        assert found["token_strs"] == [TOKENIZER.id_to_token(token) for token in found["tokens"]]
        assert found["max_model_len"] == MAX_LENGTH
        assert await ask("/detokenize", tokens=found["tokens"]) == {"prompt": "the cat"}
        by_text, by_tokens = [
            await client.completions.create(**COMPLETION | {"prompt": prompt}, seed=1)
            for prompt in ("the cat", found["tokens"])
        ]
        assert by_text.usage == by_tokens.usage
        assert by_text.choices[0].text == by_tokens.choices[0].text

        chat = await ask("/tokenize", messages=CHAT["messages"])
        answer = await client.chat.completions.create(**CHAT)
        assert chat["count"] == answer.usage.prompt_tokens
        rendered = (await ask("/detokenize", tokens=chat["tokens"]))["prompt"]
        assert rendered == "<bos>user: the cat\n<bos>assistant:"
        long = await ask("/tokenize", prompt="the cat " * 2_000)  # longer than the model takes
        assert long["count"] > MAX_LENGTH


async def test_the_end_of_a_prompt_is_tokenized_as_it_is_asked_for(serve):
    template = (
        "{% for message in messages %}<bos>{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
    )
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    async with serve(template=template) as serving:
        for more, end in (
            ({}, "\n<bos>assistant:"),
            ({"add_generation_prompt": False}, "\n"),
            ({"continue_final_message": True}, ""),
        ):
            body = {"model": "tiny-generation", "messages": messages, **more}
            found = (await serving.client.post("/tokenize", json=body)).json()
            body = {"model": "tiny-generation", "tokens": found["tokens"]}
            text = (await serving.client.post("/detokenize", json=body)).json()["prompt"]
            assert text == f"<bos>user: the cat\n<bos>assistant: sat{end}"


@pytest.mark.parametrize("options", [{"truncate_texts": True}, {"models": {"topics": {"truncate_texts": True}}}])
async def test_a_server_that_truncates_shortens_what_is_too_long_and_says_so(calling, options):
    long = "star goal " * 100
    async with calling(**options) as (serving, _):
        [writer] = (one for one in serving.host.models if one.bundle.manifest.name == "tiny-generation")
        writer._tokenizer.truncates = True  # which the settings of a model that is loaded from a store say

        async def ask(path, **fields):
            answer = await serving.client.post(f"/v1/{path}", json=fields)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            return {key: body[key] for key in ("data", "results", "choices") if key in body}, answer.headers.get(
                "x-truncated-texts"
            )

        for path, fields, count in (
            ("embeddings", {"model": "topics", "input": [long, "star", long]}, "2"),
            ("rerank", {"model": "topics", "query": "star", "documents": ["goal", long]}, "1"),
            ("completions", COMPLETION | {"prompt": long, "seed": 1}, "1"),
        ):
            implied, asked = await ask(path, **fields), await ask(path, **fields, truncate=True)
            assert implied == asked
            assert implied[1] == count
            assert await ask(path, **fields) == implied  # vectors of candidates are kept
        assert (await ask("embeddings", model="topics", input="star"))[1] is None


async def test_samples_differ_and_a_seed_gives_them_again(calling):
    async with calling() as (_, client):
        ask = {**CHAT, "n": 3, "seed": -7, "temperature": 1.5}
        first, again = [await client.chat.completions.create(**ask) for _ in range(2)]
        texts = [choice.message.content for choice in first.choices]
        assert [choice.index for choice in first.choices] == [0, 1, 2]
        assert len(set(texts)) > 1
        assert texts == [choice.message.content for choice in again.choices]
        assert first.usage.completion_tokens == 24
        assert first.usage.prompt_tokens < 40


async def test_choices_stream_beside_each_other_as_they_are_answered_at_once(calling):
    async with calling() as (serving, client):
        slow_down(serving.decoder, 0.01)
        for create, fields in ((client.chat.completions.create, CHAT), (client.completions.create, COMPLETION)):
            ask = {**fields, "n": 3, "seed": 4, "temperature": 1.5}
            whole = await create(**ask)
            stream = await create(**ask, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            texts, reasons, order = ["", "", ""], {}, []
            for chunk in chunks[:-1]:
                [choice] = chunk.choices
                piece = choice.text if hasattr(choice, "text") else choice.delta.content
                texts[choice.index] += piece or ""
                order += [choice.index] if piece else []
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
            expected = [choice.text if hasattr(choice, "text") else choice.message.content for choice in whole.choices]
            assert texts == expected
            assert len(set(texts)) > 1
            assert order != sorted(order)  # not one after the other
            assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
            assert chunks[-1].usage.completion_tokens == 24
            assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "logprobs": 1}, {"n": 2, "logprobs": 0}], ids=str)
async def test_prompts_stream_beside_each_other_as_they_are_answered_at_once(calling, more):
    prompts = ["the cat", "a dog and a mat", [5, 6, 7]]
    async with calling() as (_, client):
        for prompt in (prompts[:2], prompts[2:] * 3):
            ask = {**COMPLETION, **more, "prompt": prompt, "seed": 4, "temperature": 1.5}
            whole = await client.completions.create(**ask)
            stream = await client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
            *chunks, last = [chunk async for chunk in stream]
            texts, logprobs, reasons = {}, {}, {}
            for [choice] in (chunk.choices for chunk in chunks):
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if choice.logprobs is not None:
                    logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
            assert texts == {choice.index: choice.text for choice in whole.choices}
            assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
            assert len(texts) == len(prompt) * more.get("n", 1)
            for choice in whole.choices if "logprobs" in more else ():
                assert logprobs[choice.index] == choice.logprobs.token_logprobs
            assert last.usage == whole.usage


async def test_a_caller_who_leaves_a_stream_of_several_choices_frees_their_slots(calling):
    async with calling() as (serving, client):
        slow_down(serving.decoder, 0.02)
        stream = await client.chat.completions.create(
            **CHAT | {"max_completion_tokens": MAX_LENGTH - 25}, n=3, stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert not free(serving)
        await stream.close()
        await until(lambda: free(serving))


async def test_completions_of_texts_and_tokens_agree(calling):
    async with calling() as (_, client):
        of_text = await client.completions.create(**COMPLETION)
        ids = TOKENIZER.encode("the cat", add_special_tokens=False).ids
        of_tokens = await client.completions.create(**COMPLETION | {"prompt": [ids, ids]})
        assert [choice.text for choice in of_tokens.choices] == [of_text.choices[0].text] * 2
        stream = await client.completions.create(**COMPLETION, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == of_text.choices[0].text


async def test_completions_tell_the_probabilities_of_prompt_and_text(calling):
    async with calling() as (_, client):
        answer = await client.completions.create(**COMPLETION, logprobs=3, echo=True)
        choice = answer.choices[0]
        assert choice.text.startswith("the cat")
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.tokens) == answer.usage.total_tokens
        assert choice.logprobs.text_offset[0] == 0


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"logprobs": 1, "n": 2}], ids=str)
async def test_a_prompt_may_be_read_alone(calling, more):
    """As harnesses of evaluations do, which score what is given."""
    asked = COMPLETION | {"prompt": ["the cat", "a dog and a mat"], "echo": True, **more}
    async with calling() as (_, client):
        told = await client.completions.create(**asked)
        alone = await client.completions.create(**asked | {"max_tokens": 0})
        stream = await client.completions.create(**asked | {"max_tokens": 0}, stream=True)
        chunks = [choice async for chunk in stream for choice in chunk.choices]
        assert (alone.usage.completion_tokens, alone.usage.prompt_tokens) == (0, told.usage.prompt_tokens)
        for choice, whole in zip(alone.choices, told.choices, strict=True):
            prompt = asked["prompt"][choice.index // more.get("n", 1)]
            own = [chunk for chunk in chunks if chunk.index == choice.index]
            assert (choice.text, "".join(chunk.text for chunk in own)) == (prompt, prompt)
            assert (choice.finish_reason, own[-1].finish_reason) == ("length", "length")
            if "logprobs" not in more:
                assert choice.logprobs is None
                continue
            count = len(choice.logprobs.tokens)
            assert 0 < count < len(whole.logprobs.tokens)
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert getattr(choice.logprobs, name) == getattr(whole.logprobs, name)[:count]
            assert own[0].logprobs.token_logprobs == choice.logprobs.token_logprobs
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(**asked | {"max_tokens": 0, "echo": False})


async def test_answers_have_the_tokens_of_prompts_and_texts_if_clients_of_vllm_ask_for_them(calling):
    ids = TOKENIZER.encode("the cat", add_special_tokens=False).ids
    extra = {"return_token_ids": True}
    async with calling() as (_, client):
        told = await client.completions.create(**COMPLETION, n=2, seed=3, logprobs=0)
        text = await client.completions.create(**COMPLETION, n=2, seed=3, extra_body=extra)
        for choice, plain in zip(text.choices, told.choices, strict=True):
            assert (choice.text, choice.prompt_token_ids, choice.logprobs) == (plain.text, ids, None)
            assert TOKENIZER.decode(choice.token_ids) == choice.text
            assert len(choice.token_ids) == len(plain.logprobs.tokens)
        stream = await client.completions.create(**COMPLETION, n=2, seed=3, extra_body=extra, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        for choice in text.choices:
            own = [chunk for chunk in chunks if chunk.index == choice.index]
            assert [getattr(chunk, "prompt_token_ids", None) for chunk in own] == [ids] + [None] * (len(own) - 1)
            assert [token for chunk in own for token in getattr(chunk, "token_ids", ())] == choice.token_ids

        chat = await client.chat.completions.create(**CHAT, seed=3, extra_body=extra)
        assert len(chat.prompt_token_ids) == chat.usage.prompt_tokens
        assert chat.choices[0].logprobs is None
        stream = await client.chat.completions.create(**CHAT, seed=3, extra_body=extra, stream=True)
        chunks = [chunk async for chunk in stream]
        assert [getattr(chunk, "prompt_token_ids", None) for chunk in chunks[:2]] == [chat.prompt_token_ids, None]
        streamed = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", ())]
        assert streamed == chat.choices[0].token_ids


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"logprobs": 3}, {"echo": True}], ids=str)
async def test_prompts_have_log_probabilities_if_clients_of_vllm_ask_for_them(calling, more):
    async with calling() as (_, client):
        told = (await client.completions.create(**COMPLETION, logprobs=2, echo=True)).choices[0].logprobs
        plain = (await client.completions.create(**COMPLETION | more)).choices[0]
        answer = (await client.completions.create(**COMPLETION | more, extra_body={"prompt_logprobs": 2})).choices[0]
        assert (answer.text, answer.logprobs) == (plain.text, plain.logprobs)
        first, *others = answer.prompt_logprobs
        assert first is None
        ids = TOKENIZER.encode("the cat", add_special_tokens=False).ids
        assert len(others) == len(ids) - 1
        for index, (token_id, likely) in enumerate(zip(ids[1:], others, strict=True), start=1):
            assert likely[str(token_id)]["logprob"] == told.token_logprobs[index]
            ranked = {one["rank"]: one["logprob"] for one in likely.values() if one["rank"] is not None}
            assert ranked == dict(enumerate(told.top_logprobs[index].values(), start=1))

        body = CHAT | {"max_completion_tokens": 2}
        chat = await client.chat.completions.create(**body, extra_body={"prompt_logprobs": 0})
        assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
        assert [len(likely) for likely in chat.prompt_logprobs[1:]] == [1] * (chat.usage.prompt_tokens - 1)


PROMPT = "the cat é → 😀"
"""Whose last characters have several bytes, each of which is a token."""


@pytest.mark.parametrize("echo", [False, True])
async def test_places_and_bytes_of_tokens_fit_the_text_at_once_and_in_a_stream(calling, echo):
    asked = COMPLETION | {"prompt": PROMPT, "logprobs": 20, "max_tokens": 24, "seed": 3}
    async with calling() as (_, client):
        answer = await client.completions.create(**asked, echo=echo)
        choice, told = answer.choices[0], answer.choices[0].logprobs
        stream = await client.completions.create(**asked, echo=echo, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    num_own = answer.usage.completion_tokens
    assert "".join(chunk.text for chunk in chunks) == choice.text
    assert [token for part in parts for token in part.tokens] == told.tokens
    assert [place for part in parts for place in part.text_offset] == told.text_offset
    assert [top for part in parts for top in part.top_logprobs] == told.top_logprobs
    assert [value for part in parts for value in part.token_logprobs] == pytest.approx(told.token_logprobs, abs=1e-5)
    data = [_bytes_of(token) for token in told.tokens]
    for index, place in enumerate(told.text_offset):
        before = b"".join(data[:index]).decode(errors="replace")
        assert place == len(before) - (len(before) - len(before.rstrip("\ufffd")) if index else 0)
        assert choice.text.startswith(before[:place])
    if echo:
        assert told.text_offset[len(data) - num_own] == len(PROMPT)
        assert told.tokens[len(data) - num_own - 4 : len(data) - num_own] == [
            "bytes:\\xf0",
            "bytes:\\x9f",
            "bytes:\\x98",
            "bytes:\\x80",
        ]


async def test_every_choice_of_a_stream_repeats_the_prompt_with_its_log_probabilities(calling):
    asked = COMPLETION | {"prompt": PROMPT, "logprobs": 2, "max_tokens": 3, "seed": 3, "n": 2, "echo": True}
    async with calling() as (_, client):
        answer = await client.completions.create(**asked)
        stream = await client.completions.create(**asked, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    for choice in answer.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        tokens = [token for chunk in own if chunk.logprobs is not None for token in chunk.logprobs.tokens]
        assert (own[0].text, tokens) == (PROMPT, choice.logprobs.tokens)
        assert "".join(chunk.text for chunk in own) == choice.text


def _bytes_of(token: str) -> bytes:
    """Returns the bytes of a token of a completion."""
    written = token.removeprefix("bytes:").replace("\\x", "")
    return bytes.fromhex(written) if token.startswith("bytes:") else token.encode()


async def test_the_likeliest_tokens_are_all_told_the_best_by_its_text(calling):
    asked = {"logprobs": True, "top_logprobs": 20}
    async with calling() as (serving, client):
        completion = await client.completions.create(**COMPLETION, logprobs=20)
        chat = await client.chat.completions.create(**CHAT | asked)
        model = next(model for model in serving.host.models if model.bundle.manifest.name == "tiny-generation")
        for top in completion.choices[0].logprobs.top_logprobs:
            assert len(top) == 20
            assert list(top.values()) == sorted(top.values(), reverse=True)
        for token in chat.choices[0].logprobs.content:
            assert len(token.top_logprobs) == 20
            assert all(bytes(one.bytes) for one in token.top_logprobs if not one.token.startswith("<"))
        model._tokenizer._token_texts = dict.fromkeys(range(TOKENIZER.get_vocab_size()), "same")
        completion = await client.completions.create(**COMPLETION, logprobs=3)
        for top in completion.choices[0].logprobs.top_logprobs:
            assert [name.partition(":")[0] for name in top] == ["same", "token_id", "token_id"]
            assert list(top.values()) == sorted(top.values(), reverse=True)


async def test_parameters_change_what_is_generated(calling):
    async with calling() as (_, client):
        plain = (await client.completions.create(**COMPLETION, logprobs=0)).choices[0]
        first = TOKENIZER.token_to_id(plain.logprobs.tokens[0].replace(" ", "Ġ"))
        if first is not None:
            banned = await client.completions.create(**COMPLETION, logit_bias={str(first): -100}, logprobs=0)
            assert banned.choices[0].logprobs.tokens[0] != plain.logprobs.tokens[0]
        wanted = await client.completions.create(**COMPLETION, logit_bias={"100": 100})
        assert set(wanted.choices[0].text) == {TOKENIZER.decode([100])}
        stop = TOKENIZER.decode([100])
        stopped = await client.completions.create(**COMPLETION, logit_bias={"100": 100}, stop=stop)
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
        penalised = await client.completions.create(
            **COMPLETION, logit_bias={"100": 30}, presence_penalty=2, frequency_penalty=2, extra_body={"top_k": 5}
        )
        assert penalised.usage.completion_tokens == 8


async def test_an_answer_is_held_to_its_schema(calling):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    async with calling() as (_, client):
        answer = await client.chat.completions.create(
            **CHAT | {"max_completion_tokens": 30}, response_format=response_format, logit_bias=NO_SPACE
        )
        assert set(json.loads(answer.choices[0].message.content)) == {"ok"}
        assert answer.choices[0].finish_reason == "stop"
        wrong = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "nothing"}}}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**CHAT, response_format=wrong)
        assert refused.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("most", [4, 24])
async def test_an_object_of_json_ends_within_the_maximum_of_tokens(calling, most):
    never_closes = {str(TOKENIZER.token_to_id(text)): -100 for text in ("}", "]")}
    async with calling() as (_, client):
        for seed in range(4):
            answer = await client.chat.completions.create(
                **CHAT | {"max_completion_tokens": most, "temperature": 1.0},
                seed=seed,
                response_format={"type": "json_object"},
                logit_bias=never_closes,
            )
            assert isinstance(json.loads(answer.choices[0].message.content), dict)
            assert (answer.choices[0].finish_reason, answer.usage.completion_tokens <= most) == ("stop", True)


async def test_embeddings_are_unit_vectors_as_floats_or_bytes(calling):
    async with calling() as (serving, client):
        texts = ["star goal atom", "team"]
        answer = await client.embeddings.create(model="topics", input=texts)  # the package asks for base64
        vectors = np.array([item.embedding for item in answer.data])
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
        floats = await client.embeddings.create(model="topics", input=texts, encoding_format="float")
        assert np.allclose([item.embedding for item in floats.data], vectors, atol=1e-7)
        raw = await serving.client.post(
            "/v1/embeddings", json={"model": "topics", "input": texts[0], "encoding_format": "base64"}
        )
        assert np.allclose(np.frombuffer(base64.b64decode(raw.json()["data"][0]["embedding"]), "<f4"), vectors[0])
        short = await client.embeddings.create(model="topics", input=texts, dimensions=2, encoding_format="float")
        expected = vectors[:, :2] / np.maximum(np.linalg.norm(vectors[:, :2], axis=1, keepdims=True), 1e-30)
        assert np.allclose([item.embedding for item in short.data], expected, atol=1e-6)
        of_tokens = await client.embeddings.create(model="topics", input=[[3, 4]], encoding_format="float")
        assert len(of_tokens.data) == 1
        with pytest.raises(openai.BadRequestError, match="dimensions: is 4; must be from 1 to 3"):
            await client.embeddings.create(model="topics", input="star", dimensions=4)


async def test_many_inputs_are_embedded_as_few_are(calling):
    async with calling() as (_, client):
        texts = [f"star {'goal ' * (index % 5)}atom" for index in range(600)]
        many = await client.embeddings.create(model="topics", input=texts, encoding_format="float")
        few = await client.embeddings.create(model="topics", input=texts[:5], encoding_format="float")
        assert [item.index for item in many.data] == list(range(600))
        vectors = np.array([item.embedding for item in many.data])
        assert np.allclose(vectors[:5], [item.embedding for item in few.data], atol=1e-6)
        assert np.allclose(vectors, np.tile(vectors[:5], (120, 1)), atol=1e-6)


async def test_texts_are_ranked_and_scored_in_the_forms_of_their_clients(serve):
    query, texts = "star atom", ["goal team", "star", "star atom"]

    async def ask(path, **body):
        answer = await serving.client.post(path, json={"query": query} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async with serve() as serving:
        scored = await serving.client.post("/v1/score", json={"text_1": query, "text_2": texts, "model": "topics"})
        scores = [one["score"] for one in scored.json()["data"]]
        assert scores[2] == pytest.approx(1, abs=1e-5)
        order = sorted(range(3), key=lambda index: -scores[index])
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            found = await ask(path, documents=texts, model="topics", user="me")
            assert [one["index"] for one in found["results"]] == order
            assert [one["document"]["text"] for one in found["results"]] == [texts[index] for index in order]
            assert [one["relevance_score"] for one in found["results"]] == pytest.approx(sorted(scores, reverse=True))
        best = await ask("/v1/rerank", documents=[{"text": text} for text in texts], top_n=1, return_documents=False)
        assert [set(one) for one in best["results"]] == [{"index", "relevance_score"}]
        plain = await ask("/rerank", texts=texts, raw_scores=False)  # as Text Embeddings Inference answers
        assert [one["index"] for one in plain] == order
        assert [set(one) for one in plain] == [{"index", "score"}] * 3
        voyages = await ask("/v1/rerank", documents=texts, top_k=2, truncation=True)
        assert [one["index"] for one in voyages["data"]] == order[:2]
        assert [set(one) for one in voyages["data"]] == [{"index", "relevance_score"}] * 2
        for cached in (best, voyages):  # tokens of a cached set of texts are counted too
            assert cached["usage"]["total_tokens"] == found["usage"]["total_tokens"] > 6
        vectors = await serving.client.post(
            "/v1/embeddings", json={"model": "topics", "input": "a", "truncation": True}
        )
        assert vectors.status_code == 200
        pairs = await serving.client.post("/score", json={"text_1": texts, "text_2": texts[::-1]})
        assert [one["score"] for one in pairs.json()["data"]][1] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("path", ["/health", "/ping", "/readyz"])
async def test_the_server_says_that_it_is_ready_where_clients_ask(serve, path):
    async with serve() as serving:
        assert (await serving.client.get(path)).status_code == 200
        assert (await serving.client.get("/version")).json()["version"]


async def test_what_changes_no_answer_is_accepted(calling):
    """What clients send by default, or frameworks add for providers."""
    more = {
        "user": "me",
        "metadata": {"run": "1"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "a",
        "prompt_cache_key": "b",
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_options": {"mode": "implicit"},
        "top_k": -1,
        "skip_special_tokens": True,
        "stream_options": None,
        "structured_outputs": {},
    }
    messages = [
        {"role": "user", "content": "the cat", "name": "Ada"},
        {"role": "assistant", "content": "sat", "refusal": None, "annotations": [], "name": "agent"},
        {"role": "assistant", "content": [{"type": "text", "text": "sa"}, {"type": "refusal", "refusal": "t"}]},
        {"role": "user", "content": "on"},
    ]
    plain = [
        {"role": one["role"], "content": "sat" if one["role"] == "assistant" else one["content"]} for one in messages
    ]
    async with calling(max_length=2 * MAX_LENGTH) as (serving, _):

        async def ask(path, **body):
            answer = await serving.client.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        chat = CHAT | {"messages": messages}
        assert (await ask("chat/completions", **chat, **more))["choices"] == (
            await ask("chat/completions", **CHAT | {"messages": plain})
        )["choices"]
        assert (await ask("completions", **COMPLETION, **more, best_of=1))["choices"] == (
            await ask("completions", **COMPLETION)
        )["choices"]
        assert (await ask("embeddings", model="topics", input="star", user="me"))["data"]


PLAIN = (
    "{% for message in messages %}<bos>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)
READING = """\
{%- for message in messages %}
{{- "<bos>" ~ message.role }}{{ " " ~ message.name if message.name }}: {{ message.content | trim }}
{% endfor %}
{%- if add_generation_prompt %}<bos>{{ reasoning_effort or "usual" }} assistant:{% endif %}"""
"""A template that reads names and effort, and trims."""


async def prompt_tokens_of(client, **fields):
    return (await client.chat.completions.create(**CHAT | fields)).usage.prompt_tokens


async def test_names_and_effort_are_handed_to_a_template_that_reads_them(calling):
    named = {"messages": [CHAT["messages"][0] | {"name": "Ada <bos>"}]}
    async with calling(template=READING, max_length=2 * MAX_LENGTH) as (_, client):
        plain = await prompt_tokens_of(client)
        assert await prompt_tokens_of(client, **named) == plain + len(" Ada <bos>")
        lengths = [await prompt_tokens_of(client, reasoning_effort=effort) for effort in ("low", "minimal")]
        assert lengths == [plain - len("usual") + len(effort) for effort in ("low", "minimal")]
        own = {"extra_body": {"chat_template_kwargs": {"reasoning_effort": "very much"}}}
        assert await prompt_tokens_of(client, reasoning_effort="low", **own) == plain + len("very much") - len("usual")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**CHAT, reasoning_effort="huge")
        assert refused.value.param == "reasoning_effort"
    async with calling() as (_, client):
        plain = await prompt_tokens_of(client)
        assert plain == await prompt_tokens_of(client, **named, reasoning_effort="low")


@pytest.mark.parametrize("template", [READING, PLAIN], ids=["trims", "plain"])
async def test_a_model_continues_the_last_message(calling, template):
    turns = [*CHAT["messages"], {"role": "assistant", "content": "sat "}]
    async with calling(template=template, max_length=2 * MAX_LENGTH) as (_, client):
        ask = CHAT | {"messages": turns, "seed": 3, "temperature": 1.0}
        going_on = {"continue_final_message": True, "add_generation_prompt": False}
        whole = await client.chat.completions.create(**ask, extra_body=going_on)
        written = ("user: the cat\n", "assistant: sat ")
        ids = [token for turn in written for token in (BOS_ID, *TOKENIZER.encode(turn, add_special_tokens=False).ids)]
        text = await client.completions.create(**COMPLETION | {"prompt": ids}, seed=3, temperature=1.0)
        assert whole.choices[0].message.content == text.choices[0].text
        assert whole.usage.prompt_tokens == len(ids)
        for body in ({**going_on, "echo": True}, {"continue_final_message": True, "echo": True}):
            repeated = await client.chat.completions.create(**ask, extra_body=body)
            assert repeated.choices[0].message.content == "sat " + text.choices[0].text
            stream = await client.chat.completions.create(**ask, extra_body=body, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == repeated.choices[0].message.content
        closed = await client.chat.completions.create(**ask, extra_body={"add_generation_prompt": False})
        asked = await client.chat.completions.create(**ask)
        assert closed.usage.prompt_tokens < asked.usage.prompt_tokens
        for wrong, field in (
            ({"extra_body": {"continue_final_message": True, "add_generation_prompt": True}}, "continue_final_message"),
            ({"messages": [{"role": "assistant", "content": ""}], "extra_body": going_on}, "messages[0]"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**ask | wrong)
            assert refused.value.param == field


async def test_every_event_counts_tokens_where_that_is_asked_for(calling):
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2}
    async with calling() as (_, client):
        for create, fields in ((client.chat.completions.create, CHAT), (client.completions.create, COMPLETION)):
            chunks = [chunk async for chunk in await create(**fields, **options)]
            total = chunks[-1].usage
            assert (chunks[-1].choices, total.completion_tokens) == ([], 16)
            for index in range(2):
                own = [chunk.usage for chunk in chunks[:-1] if chunk.choices[0].index == index]
                counted = [usage.completion_tokens for usage in own]
                assert counted == sorted(counted)
                assert counted[-1] == 8
                assert {usage.prompt_tokens for usage in own} == {total.prompt_tokens}
            quiet = {**options, "stream_options": {"include_usage": True}}
            chunks = [chunk async for chunk in await create(**fields, **quiet)]
            assert {chunk.usage for chunk in chunks[:-1]} == {None}


async def test_a_text_goes_on_past_its_end_where_that_is_asked_for(calling):
    async with calling() as (_, client):
        answer = await client.completions.create(**COMPLETION | {"max_tokens": 40}, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 40
        assert answer.choices[0].finish_reason == "length"


async def test_a_text_without_a_maximum_goes_on_to_the_models_length(calling):
    async with calling() as (_, client):
        never_ends = {str(EOS_ID): -100}
        answer = await client.completions.create(model="tiny-generation", prompt="the cat", logit_bias=never_ends)
        assert answer.usage.total_tokens == MAX_LENGTH
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"guided_choice": ["cat", "mat"]}, r"cat|mat"),
        ({"guided_regex": "[ab]{2}"}, r"[ab]{2}"),
        ({"guided_json": {"type": "boolean"}}, r"true|false"),
        ({"structured_outputs": {"choice": ["cat", "mat"]}}, r"cat|mat"),
        ({"structured_outputs": {"regex": "[ab]{2}"}}, r"[ab]{2}"),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, r"true|false"),
    ],
    ids=str,
)
async def test_answers_have_the_structure_that_clients_of_vllm_ask_for(calling, extra, allowed):
    async with calling() as (_, client):
        chat = await client.chat.completions.create(**CHAT, extra_body=extra)
        assert re.fullmatch(allowed, chat.choices[0].message.content)
        text = await client.completions.create(**COMPLETION, extra_body=extra)
        assert re.fullmatch(allowed, text.choices[0].text)


async def test_an_answer_has_the_schema_that_clients_of_text_generation_inference_ask_for(calling):
    async with calling() as (_, client):
        wanted = {"type": "json_object", "value": {"type": "boolean"}}
        answer = await client.chat.completions.create(**CHAT, extra_body={"response_format": wanted})
        assert answer.choices[0].message.content in ("true", "false")


async def test_too_long_an_input_has_the_code_that_clients_look_for(serve):
    long = "the cat " * 50
    asked = {
        "chat/completions": CHAT | {"messages": [{"role": "user", "content": long}]},
        "completions": COMPLETION | {"prompt": long},
        "embeddings": {"model": "topics", "input": "star " * 500},
    }
    async with serve() as serving:
        for path, body in asked.items():
            answer = await serving.client.post(f"/v1/{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded"), answer.text


WRONG = [
    ("chat/completions", {"functions": [{"name": "a"}]}, 400, "functions", "is not supported by this server"),
    ("chat/completions", {"audio": {}}, 400, "audio", "is not supported by this server; leave it out"),
    ("chat/completions", {"ignore_eos": True, "max_completion_tokens": None}, 400, "ignore_eos", "without max_comp"),
    ("chat/completions", {"guided_regex": "a", "guided_choice": ["b"]}, 400, "guided_choice", "with guided_regex"),
    ("chat/completions", {"top_k": -2}, 400, "top_k", "is -2"),
    ("chat/completions", {"temprature": 1}, 400, "temprature", "temperature"),
    ("chat/completions", {"messages": None}, 400, "messages", "is missing"),
    ("chat/completions", {"messages": []}, 400, "messages", "at least 1 item"),
    ("chat/completions", {"messages": [{"role": "aide", "content": "x"}]}, 400, "messages[0].role", "'system'"),
    ("chat/completions", {"messages": [{"role": "user", "content": ""}]}, 400, "messages[0].content", "is empty"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content", "is missing"),
    *(
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [part]}]},
            400,
            f"messages[0].content[0].{name}",
            says,
        )
        for part, name, says in (
            ({"type": "image_url", "image_url": {"url": "x"}}, "image_url.url", "is not a data URL"),
            ({"type": "image_url", "image_url": "x"}, "image_url", "input should be an object"),
            ({"type": "image_url", "image_ulr": {"url": "x"}}, "image_url", "is missing"),
            ({"type": "text", "txt": "x"}, "text", "is missing"),
            ({"type": "file"}, "type", "input should be 'text' or 'refusal' or 'image_url'"),
        )
    ),
    (
        "chat/completions",
        {"min_tokens": 63, "max_completion_tokens": None},
        400,
        "min_tokens",
        "or set max_completion_tokens",
    ),
    (
        "completions",
        {"min_tokens": 63, "max_tokens": None},
        400,
        "min_tokens",
        "follow prompt; ask for fewer, or set max_t",
    ),
    ("completions", {"stop": ["a", ""]}, 400, "stop[1]", "stop[1]: has 0 characters"),
    ("completions", {"logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias", "as is that of logit_bias;"),
    ("chat/completions", {"temperature": 3}, 400, "temperature", "is 3; must be from 0 to 2"),
    ("chat/completions", {"temperature": "1"}, 400, "temperature", "valid number"),
    ("chat/completions", {"n": 17}, 400, "n", "must be from 1 to 16"),
    ("chat/completions", {"top_logprobs": 2}, 400, "top_logprobs", "requires logprobs"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "from 0 to 20"),
    ("chat/completions", {"max_tokens": 5}, 400, "max_tokens", "together with max_completion_tokens"),
    ("chat/completions", {"max_completion_tokens": 5000}, 400, "max_completion_tokens", "is 5000; must be from 1"),
    ("chat/completions", {"logit_bias": {"a": 1}}, 400, "logit_bias.a", "should match"),
    ("chat/completions", {"logit_bias": {"5": 101}}, 400, "logit_bias", "must be from -100 to 100"),
    ("chat/completions", {"stream_options": {"include_usage": True}}, 400, "stream_options", "requires stream"),
    ("chat/completions", {"response_format": {"type": "xml"}}, 400, "response_format", "json_object"),
    (
        "chat/completions",
        {"response_format": {"type": "text", "value": {}}},
        400,
        "response_format.value",
        "requires the type json_object",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_object", "value": 5}},
        400,
        "response_format.value",
        "valid dictionary",
    ),
    (
        "chat/completions",
        {"response_format": {"type": "json_object", "value": {"type": "nothing"}}},
        400,
        "response_format.value",
        "nothing",
    ),
    ("chat/completions", {"guided_json": {"type": "nothing"}}, 400, "guided_json", "nothing"),
    ("completions", {"guided_regex": "("}, 400, "guided_regex", ""),
    ("completions", {"guided_choice": ["a", "a"]}, 400, "guided_choice[1]", "is the same as"),
    (
        "completions",
        {"structured_outputs": {"json": {"type": "nothing"}}},
        400,
        "structured_outputs.json",
        "nothing",
    ),
    ("chat/completions", {"prompt_logprobs": 21}, 400, "prompt_logprobs", "is 21; must be from 0 to 20"),
    ("completions", {"prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs", "together with stream"),
    ("chat/completions", {"model": "topics"}, 400, None, "cannot generate text"),
    ("chat/completions", {"model": "none"}, 404, None, "model 'none' is not loaded"),
    ("chat/completions", {"model": "tiny-generation/9"}, 404, None, "model tiny-generation has no version '9'"),
    ("completions", {"prompt": []}, 400, "prompt", "give 1 to 256"),
    ("completions", {"prompt": ""}, 400, "prompt", "is empty"),
    ("completions", {"prompt": [1, 5000]}, 400, "prompt[1]", "is 5000; must be from 0 to"),
    ("completions", {"prompt": "the cat " * 50}, 400, "prompt", "tokens; at most"),
    ("completions", {"logprobs": 21}, 400, "logprobs", "is 21; must be from 0 to 20"),
    ("completions", {"max_tokens": 5000}, 400, "max_tokens", "is 5000; must be from 1"),
    ("completions", {"suffix": "x"}, 400, "suffix", "is not supported"),
    ("completions", {"best_of": 2}, 400, "best_of", "must be n, 1"),
    ("embeddings", {"input": []}, 400, "input", "is empty"),
    ("embeddings", {"input": ["a", ""]}, 400, "input[1]", "is empty"),
    ("embeddings", {"input": 5}, 400, "input", ""),
    ("embeddings", {"input": "star", "model": "tiny-generation"}, 400, None, "cannot embed texts"),
    ("embeddings", {"input": "star", "task": "query"}, 400, "task", "is not supported"),
    ("embeddings", {"input": ["star"] * 2049}, 400, "input", "the limit is 2048"),
    ("embeddings", {"input": [[3]] * 300 + [[5000]]}, 400, "input[300][0]", "is 5000; must be from 0 to"),
    ("rerank", {"query": "a", "documents": ["b"], "raw_scores": True}, 400, "raw_scores", "input should be False"),
    ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, 400, "top_n", "greater than or equal to 0"),
    ("rerank", {"query": "a", "documents": ["b"], "top_n": 1, "top_k": 1}, 400, "top_n", "together with top_k"),
    ("rerank", {"query": "a"}, 400, "documents", "must be given, or texts"),
    ("/tokenize", {}, 400, "prompt", "is missing; give it, or messages"),
    ("/tokenize", {"prompt": ""}, 400, "prompt", "is empty"),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, 400, "prompt", "is set together with messages"),
    (
        "/tokenize",
        {"prompt": "a", "chat_template_kwargs": {"a": 1}},
        400,
        "chat_template_kwargs",
        "is set with a prompt",
    ),
    ("/detokenize", {"tokens": [1, 2**31 - 1]}, 400, "tokens[1]", "is 2147483647"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]", "greater than or equal to 0"),
    ("rerank", {"query": "a", "documents": ["b", ""]}, 400, "documents[1]", "is empty"),
    ("rerank", {"query": "", "documents": ["b"]}, 400, "query", "is empty"),
    ("score", {"text_1": ["a"] * 257, "text_2": ["a"] * 257}, 400, "text_1", "the limit is 256"),
    ("score", {"text_1": "a", "text_2": []}, 400, "text_2", "is empty"),
    ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_1", "has 2 elements, and text_2 3"),
]


async def test_what_is_wrong_is_named(serve):
    bodies = {"chat/completions": CHAT, "completions": COMPLETION}
    bodies |= {key: {"model": "tiny-generation"} for key in ("/tokenize", "/detokenize")}
    async with serve() as serving:
        for path, changes, status, param, message in WRONG:
            url = path if path.startswith("/") else f"/v1/{path}"
            answer = await serving.client.post(url, json=bodies.get(path, {"model": "topics"}) | changes)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), (changes, error)
            assert message in error["message"], (changes, error)
            assert error["type"] == "invalid_request_error"


NAMES_OF_TASKS = [
    "parameters.stop_strings",
    "stop_strings",
    "min_new_tokens",
    "max_new_tokens",
    "texts",
    "texts[0]",
    "audios",
    "sample_count",
    "messages.messages",
    "constraint.calls",
    "logit_biases[0].bias",
    "log_probabilities.top_token_count",
    "str",
    "TextFormat",
]


async def test_the_callers_own_words_stay_as_they_are(serve):
    """Of a model and a field, though tasks have fields of these names."""
    posts = {"chat/completions": CHAT, "completions": COMPLETION, "embeddings": {"model": "topics", "input": "a"}}
    posts |= {"images/generations": {"prompt": "a"}, "audio/speech": {"input": "a"}}
    async with serve() as serving:

        async def refuse(path, status, **given):
            answer = await serving.client.post(f"/v1/{path}", **given)
            assert answer.status_code == status
            return answer.json()["error"]

        for word in NAMES_OF_TASKS:
            missing, unknown = f"model {word!r} is not loaded", (word, "unknown_parameter")
            for path, body in posts.items():
                error = await refuse(path, 404, json=body | {"model": word})
                assert missing in error["message"]
                error = await refuse(path, 400, json=body | {"model": "topics", word: 1})
                assert (error["param"], error["code"]) == unknown
                assert error["message"].startswith(f"{word}: is not supported")
            for path in ("audio/transcriptions", "audio/translations"):
                twice = [("file", b"x"), ("file", b"y")]
                error = await refuse(path, 400, data={"model": word}, files=twice)
                assert (error["param"], "twice" in error["message"]) == ("file", True)
                error = await refuse(path, 404, data={"model": word}, files={"file": b"x"})
                assert missing in error["message"]
                error = await refuse(path, 400, data={word: "1"}, files={"file": b"x"})
                assert (error["param"], error["code"]) == unknown


async def test_what_is_no_json_is_refused(serve):
    async with serve() as serving:
        for body in (b"", b"{", b"[]", b'{"a":NaN}', b"\xff", b"[" * 100_000, b'{"model":"\\ud800"}', b"1" * 10_000):
            answer = await serving.client.post(
                "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400, (body[:20], answer.text)
        assert {name for _, name in serving.recorder.finished} == {"InvalidInputError"}


async def test_a_caller_who_closes_the_connection_frees_the_slot(calling):
    async with calling() as (serving, client):
        slow_down(serving.decoder, 0.02)
        ask = CHAT | {"max_completion_tokens": MAX_LENGTH - 25}
        stream = await client.chat.completions.create(**ask, stream=True)
        async for _ in stream:
            break
        assert not free(serving)
        await stream.close()
        await until(lambda: free(serving) and serving.server.calls.num_running == 0)
        assert serving.recorder.finished[-1] == ("/v1/chat/completions", "CancelledError")
        waiting = asyncio.create_task(client.chat.completions.create(**ask))
        await until(lambda: not free(serving))
        waiting.cancel()
        await until(lambda: free(serving) and serving.server.calls.num_running == 0)
        assert serving.recorder.finished[-1] == ("/v1/chat/completions", "CancelledError")
        assert len(serving.decoder.decode_sizes) < 20


async def test_what_is_too_much_is_told_to_come_back(calling):
    async with calling(max_calls=1) as (serving, client):
        slow_down(serving.decoder, 0.02)
        stream = await client.chat.completions.create(**CHAT | {"max_completion_tokens": 30}, stream=True)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(**CHAT)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.code == "overloaded"
        assert len([chunk async for chunk in stream]) > 1
        patient = client.with_options(max_retries=3)
        assert (await patient.chat.completions.create(**CHAT)).choices


async def test_a_stream_that_is_accepted_ends_while_the_server_drains(calling):
    async with calling() as (serving, client):
        slow_down(serving.decoder, 0.02)
        stream = await client.chat.completions.create(**CHAT | {"max_completion_tokens": 25}, stream=True)
        stopping = asyncio.create_task(serving.server.stop())
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert await stopping


async def test_a_stream_that_fails_says_so_at_its_end(calling, monkeypatch):
    async with calling(drain_timeout=0.05) as (serving, client):
        slow_down(serving.decoder, 0.05)
        stream = await client.chat.completions.create(**CHAT | {"max_completion_tokens": 30}, stream=True)
        stopping = asyncio.create_task(serving.server.stop())
        with pytest.raises(openai.APIError, match=r"shutting down|unloaded|stopped"):
            async for _ in stream:
                pass
        assert await stopping


async def test_every_caller_gets_its_own_answer(calling):
    async with calling() as (_, client):
        prompts = [f"the cat {number}" for number in range(24)]
        alone = [(await client.completions.create(**COMPLETION | {"prompt": each})).choices[0].text for each in prompts]
        answers = await asyncio.gather(
            *(client.completions.create(**COMPLETION | {"prompt": each}) for each in prompts)
        )
        assert [answer.choices[0].text for answer in answers] == alone


async def test_images_are_drawn(calling, diffusion_store):
    async with calling(store=diffusion_store) as (_, client):
        own = {"step_count": 6, "guidance_scale": 2.0, "sampler": "ddim"}
        answer = await client.images.generate(model="squares", prompt="Red", n=2, extra_body={**own, "seed": 5})
        pictures = [base64.b64decode(image.b64_json) for image in answer.data]
        assert all(picture.startswith(b"\x89PNG") for picture in pictures)
        assert answer.size == "8x8"
        again = await client.images.generate(model="squares", prompt="red", size="8x8", extra_body={**own, "seed": 6})
        assert base64.b64decode(again.data[0].b64_json) == pictures[1]
        linked = await client.images.generate(
            model="squares", prompt="red", response_format="url", extra_body={**own, "seed": 6}
        )
        assert linked.data[0].url == "data:image/png;base64," + again.data[0].b64_json
        for wrong, said in (
            ({"prompt": "pink"}, "this model knows red, green, blue"),
            ({"prompt": "red", "n": 17}, "n: is 17; it goes from 1 to 16"),
            ({"prompt": "red", "size": "256x256"}, "this model generates 8x8"),
            ({"prompt": "red", "response_format": "file"}, "response_format"),
            ({"prompt": "red", "extra_body": {"step_count": 0}}, "step_count: is 0"),
            ({"prompt": "red", "n": 10**400}, "n: is 1000"),
        ):
            with pytest.raises(openai.BadRequestError, match=said):
                await client.images.generate(model="squares", **wrong)


def png(pixels):
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


async def test_images_are_edited(calling, diffusion_store):
    async with calling(store=diffusion_store) as (_, client):
        image = np.random.default_rng(3).integers(0, 256, (8, 8, 3)).astype(np.uint8)
        seen = np.full((8, 8), 255, np.uint8)
        seen[2:6, 2:6] = 0
        cut = np.dstack((image, seen))  # as OpenAI's clients send a mask: transparent where the image is drawn anew
        own = {"step_count": 4, "seed": 5}
        asked = {"model": "squares", "prompt": "Red", "image": ("a.png", png(image)), "extra_body": own}
        drawn = [
            base64.b64decode((await client.images.edit(**asked, mask=("m.png", png(mask)))).data[0].b64_json)
            for mask in (cut, 255 - seen)
        ]
        assert drawn[0] == drawn[1]
        found = np.asarray(Image.open(BytesIO(drawn[0])))
        np.testing.assert_array_equal(found[seen > 0], image[seen > 0])
        assert (found[seen == 0] != image[seen == 0]).any()
        whole = await client.images.edit(**asked | {"extra_body": {**own, "strength": 0.5, "guidance_scale": 0}})
        assert base64.b64decode(whole.data[0].b64_json) != drawn[0]
        for wrong, said in (
            ({"extra_body": {"strength": 2}}, "strength: is 2; it is above 0 and at most 1"),
            ({"extra_body": {"step_count": "few"}}, "step_count"),
            ({"extra_body": {"steps": 3}}, "steps: is not supported"),
            ({"mask": ("m.png", png(seen[:4]))}, "mask: is 8 x 4 pixels, and the image 8 x 8"),
            ({"image": ("a.png", b"x")}, "image: is not an image"),
            ({"image": [("a.png", png(image)), ("b.png", png(image))]}, "is given twice"),
            ({"size": "256x256"}, "this model generates 8x8"),
        ):
            with pytest.raises(openai.BadRequestError, match=said):
                await client.images.edit(**asked | wrong)


async def test_texts_are_spoken(calling, voice_store):
    async with calling(store=voice_store) as (_, client):
        asked = {"model": "tones", "input": "low high", "voice": "ann", "extra_body": {"seed": 5, "temperature": 1.2}}
        whole = (await client.audio.speech.create(response_format="wav", **asked)).content
        assert whole.startswith(b"RIFF")
        async with client.audio.speech.with_streaming_response.create(response_format="pcm", **asked) as answer:
            assert answer.headers["content-type"] == "audio/pcm; rate=8000; channels=1"
            pcm = b"".join([part async for part in answer.iter_bytes()])
        assert whole.endswith(pcm)
        assert len(pcm) > 0
        by_default = await client.audio.speech.create(**asked)
        assert by_default.response.headers["content-type"] == "audio/mpeg"
        heard, rate = soundfile.read(BytesIO(by_default.content))
        assert (len(heard), rate) == (len(pcm) // 2, 8_000)
        for wrong, said in (
            ({"voice": "eve"}, "voice: is 'eve'; the model has ann, bob"),
            ({"input": "low " * 9}, "input: has 38 tokens, the model speaks at most 24"),
            ({"response_format": "aac"}, "response_format"),
            (
                {"extra_body": {"max_duration_seconds": 9}},
                "max_duration_seconds: is 9 seconds; must be from 0.02 to 0.94",
            ),
        ):
            with pytest.raises(openai.BadRequestError, match=said):
                await client.audio.speech.create(**{**asked, **wrong})
