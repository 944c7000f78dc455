"""Every call, through both clients: what is sent and what is answered."""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import headway_client
from headway.v1 import common_pb2
from headway.v1 import generation_service_pb2 as pb
from headway_client import (
    AsyncClient,
    ChatMessage,
    HeadwayError,
    Page,
    Picture,
    RetryPolicy,
    Role,
    SegmentPrompt,
    Tool,
    ToolCall,
    TranslatedText,
    results,
)

Connect = Callable[..., Any]


def test_generate_sends_every_option_and_reads_every_field(server: Any, connect: Connect) -> None:
    answer = connect(server.address).call(
        "generate_text",
        ["one two", "three"],
        model="rule",
        model_version="1",
        truncate=True,
        max_new_tokens=5,
        min_new_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.125,
        logit_biases={17: -5, 3: 100},
        seed=2**63,
        stop_strings=["."],
        stop_token_ids=[8, 9],
        regex="[a-z]+",
        echo=True,
        log_probabilities=2,
        prompt_log_probabilities=True,
        priority=-7,
        sample_count=2,
    )
    (request,) = server.rules.requests
    expected = pb.GenerateTextRequest(
        model="rule",
        model_version="1",
        prompts=["one two", "three"],
        truncate=True,
        parameters=pb.GenerationParameters(
            max_new_tokens=5,
            min_new_tokens=2,
            sampling=common_pb2.SamplingParameters(temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, seed=2**63),
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.125,
            logit_biases=[pb.LogitBias(token_id=17, bias=-5), pb.LogitBias(token_id=3, bias=100)],
            stop_strings=["."],
            stop_token_ids=[8, 9],
            constraint=pb.Constraint(regex="[a-z]+"),
        ),
        echo=True,
        log_probabilities=pb.LogProbabilityOptions(top_token_count=2, include_prompt=True),
        priority=-7,
        sample_count=2,
    )
    assert request == expected
    candidates = (results.TokenCandidate(0, " on", -0.5), results.TokenCandidate(1, " on", -1.5))
    assert answer[0].tokens[-1] == results.TokenLogProbability(3, " on", -0.5, candidates)
    (first,) = answer[0].prompt_tokens
    assert (first.text, first.log_probability) == ("one two", None)
    assert [result.sample_index for result in answer] == [0, 1, 0, 1]
    assert [result.text for result in answer] == ["one two and so on"] * 2 + ["three and so on"] * 2
    assert answer[0].cached_prompt_token_count == 1
    assert str(answer.model) == "rule 1 (fp32)"
    assert answer.timings == results.Timings(1.5, 0.25, 0.0, 0.0)


def test_an_answer_without_what_was_not_asked_for(server: Any, connect: Connect) -> None:
    answer = connect(server.address).call("generate_text", "one two")
    assert answer[0] == results.GeneratedText("one two and so on", results.FinishReason.LENGTH, 2, 5, False, 7, 0, 1)


def test_options_that_are_not_given_stay_unset(server: Any, connect: Connect) -> None:
    connect(server.address).call("generate_text", "one", temperature=0.0)
    parameters = pb.GenerationParameters(sampling=common_pb2.SamplingParameters(temperature=0))
    assert server.rules.requests == [pb.GenerateTextRequest(prompts=["one"], parameters=parameters)]


@pytest.mark.parametrize(
    ("options", "constraint"),
    [
        ({"json_schema": '{"type": "object"}'}, pb.Constraint(json_schema='{"type": "object"}')),
        ({"json_schema": {"type": "object"}}, pb.Constraint(json_schema='{"type": "object"}')),
        ({"choices": ["yes", "no"]}, pb.Constraint(choices=pb.Choices(texts=["yes", "no"]))),
        ({"choices": []}, pb.Constraint(choices=pb.Choices())),
        ({"regex": ""}, pb.Constraint(regex="")),
    ],
)
def test_a_constraint_is_sent(server: Any, connect: Connect, options: dict[str, Any], constraint: Any) -> None:
    connect(server.address).call("generate_text", "one", **options)
    assert server.rules.requests[0].parameters.constraint == constraint


def test_two_constraints_are_a_value_error(server: Any, connect: Connect) -> None:
    with pytest.raises(ValueError, match="regex and choices are given"):
        connect(server.address).call("generate_text", "one", regex="a", choices=["a"])


SYSTEM, USER, ASSISTANT = (pb.ChatMessage(role=role, content=text) for role, text in enumerate(("be", "hi", "oh"), 1))
THOUGHTFUL = pb.ChatMessage(role=pb.ROLE_ASSISTANT, content="oh", reasoning="hm")


@pytest.mark.parametrize(
    ("conversations", "sent"),
    [
        ("hi", [[USER]]),
        (["hi", "hi"], [[USER], [USER]]),
        ([("system", "be"), ("user", "hi")], [[SYSTEM, USER]]),
        ([ChatMessage(Role.USER, "hi"), ChatMessage(Role.ASSISTANT, "oh")], [[USER, ASSISTANT]]),
        ([{"role": "assistant", "content": "oh"}, {"role": "user", "content": "hi"}], [[ASSISTANT, USER]]),
        ([[("user", "hi")], "hi", ({"role": "user", "content": "hi"},)], [[USER], [USER], [USER]]),
        ([ChatMessage(Role.ASSISTANT, "oh", "hm"), ("assistant", "oh", "hm")], [[THOUGHTFUL, THOUGHTFUL]]),
        ([{"role": "assistant", "content": "oh", "reasoning": "hm"}], [[THOUGHTFUL]]),
        ([], []),
    ],
)
def test_chat_sends_one_conversation_or_several(
    server: Any, connect: Connect, conversations: Any, sent: list[list[Any]]
) -> None:
    answer = connect(server.address).call("chat", conversations, priority=3, sample_count=2)
    (request,) = server.rules.requests
    assert [list(conversation.messages) for conversation in request.conversations] == sent
    assert (request.priority, list(request.prompts), len(answer)) == (3, [], 2 * len(sent))


def test_stream_chat_sends_a_conversation(server: Any, connect: Connect) -> None:
    turns = [ChatMessage(Role.SYSTEM, "be"), ChatMessage(Role.USER, "hi")]
    deltas, answer = connect(server.address).stream("stream_chat", turns, top_k=4)
    assert "".join(delta.text for delta in deltas) == answer[0].text == "hi and so on"
    (request,) = server.rules.requests
    assert list(request.conversation.messages) == [SYSTEM, USER]
    assert (request.prompt, request.parameters.sampling.top_k) == ("", 4)
    assert not any(delta.reasoning for delta in deltas)


def test_chat_sends_tools_and_turns_about_them(server: Any, connect: Connect) -> None:
    call = ToolCall("a1", "clock", "{}")
    turns = [ChatMessage(Role.ASSISTANT, "", tool_calls=[call]), ChatMessage(Role.TOOL, "noon", tool_call_id="a1")]
    options = {
        "tools": [Tool("clock", "Tells the time.", {"properties": {}}), {"name": "sun"}],
        "tool_choice": "required",
        "required_tool_name": "clock",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    caller = connect(server.address)
    caller.call("chat", turns, **options)
    caller.stream("stream_chat", turns, **options)
    unary, stream = server.rules.requests
    assert stream.conversation == unary.conversations[0]
    assert list(unary.conversations[0].messages) == [
        pb.ChatMessage(role="ROLE_ASSISTANT", tool_calls=[{"id": "a1", "name": "clock", "arguments_json": "{}"}]),
        pb.ChatMessage(role="ROLE_TOOL", content="noon", tool_call_id="a1"),
    ]
    for request in (unary, stream):
        assert [(tool.name, tool.description, tool.parameters_json_schema) for tool in request.tools] == [
            ("clock", "Tells the time.", '{"properties": {}}'),
            ("sun", "", ""),
        ]
        assert request.tool_choice == pb.TOOL_CHOICE_REQUIRED
        assert (request.required_tool_name, request.parallel_tool_calls) == ("clock", False)
        assert request.HasField("parallel_tool_calls")
        assert request.chat_template_kwargs_json == '{"enable_thinking": false}'


def test_prompts_may_be_tokens(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    with suppress(HeadwayError):  # the rule server reads texts alone
        caller.call("generate_text", [[1, 2], (3,)])
    with suppress(HeadwayError):
        caller.stream("stream_generate_text", [1, 2])
    unary, stream = server.rules.requests
    assert [list(one.ids) for one in unary.prompt_token_ids] == [[1, 2], [3]]
    assert list(stream.prompt_token_ids.ids) == [1, 2]
    with pytest.raises(TypeError, match="prompts: a str or a sequence of token ids is needed, got list"):
        caller.call("generate_text", [[1.5]])


def test_what_a_model_thinks_comes_apart_from_what_it_says(server: Any, connect: Connect) -> None:
    deltas, answer = connect(server.address).stream("stream_chat", [ChatMessage(Role.USER, "ponder")])
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert "".join(delta.text for delta in deltas) == answer[0].text


@pytest.mark.parametrize(
    ("conversation", "error", "message"),
    [
        (3, TypeError, "a str, a sequence of messages, or a sequence of these"),
        ([3], TypeError, r"conversations\[0\]: a str or a sequence of messages is needed, got int"),
        ([("user", "hi"), "hi"], TypeError, r"conversations\[1\]: a pair of role and content is needed, got str"),
        ([("user", 3)], TypeError, r"conversations\[0\]: the content is a str"),
        ([ChatMessage(Role.USER, [Picture(b"a", "id")])], ValueError, "an image or an image_id, not both"),
        (
            [("human", "hi")],
            ValueError,
            r"conversations\[0\]: the role is 'human'; must be one of system, user, assist",
        ),
        ([{"role": "user", "text": "hi"}], ValueError, r"has the keys 'role', 'text'; must be 'role' and 'content'"),
    ],
)
def test_what_is_no_conversation_is_told_before_anything_is_sent(
    server: Any, connect: Connect, conversation: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        connect(server.address).call("chat", conversation)
    assert server.rules.requests == []


def test_stream_generate_hands_out_deltas_whose_join_is_the_text(server: Any, connect: Connect) -> None:
    deltas, answer = connect(server.address).stream("stream_generate_text", "one two", max_new_tokens=9)
    assert len(deltas) == 6  # five words and the last message
    assert "".join(delta.text for delta in deltas) == answer[0].text == "one two and so on"
    assert [delta.new_token_count for delta in deltas] == [1, 2, 3, 4, 5, 5]
    assert server.rules.requests[0].parameters.max_new_tokens == 9
    assert not any(delta.tokens for delta in deltas)


def test_streamed_deltas_carry_their_log_probabilities(server: Any, connect: Connect) -> None:
    deltas, answer = connect(server.address).stream("stream_generate_text", "one", log_probabilities=0, echo=True)
    assert [token.text for delta in deltas for token in delta.tokens] == ["one", " and", " so", " on"]
    assert len(answer[0].tokens) == 3
    (request,) = server.rules.requests
    assert (request.echo, request.log_probabilities) == (True, pb.LogProbabilityOptions())


def test_translate(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    answer = caller.call("translate_text", ["a dog"], source_language="en", target_language="de", max_new_tokens=4)
    assert answer[0] == TranslatedText("A DOG", -1.5, -0.75, results.FinishReason.END_OF_SEQUENCE, 2, 2, False)
    (request,) = server.rules.requests
    assert (request.source_language, request.target_language) == ("en", "de")
    assert request.parameters.max_new_tokens == 4
    deltas, streamed = caller.stream("stream_translate_text", "a dog")
    assert "".join(delta.text for delta in deltas) == "A DOG"
    assert streamed[0] == answer[0]


def test_classify_and_its_kin(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    labels = caller.call("classify_text", ["good news", "bad"], top_k=2)
    assert labels[0].labels == (results.LabelScore("World", 0.5), results.LabelScore("Sports", 0.25))
    assert len(labels) == 2
    assert caller.call("classify_tokens", "good news")[0].spans == (
        results.LabeledSpan("noun", 0.5, results.TextSpan(0, 4)),
    )
    pages = [Page(["a", "bc"], [(1, 2, 3, 4), (5, 6, 7, 8)], 9, 10), Page(["a", "bc"], [*range(8)])]
    expected = results.LabeledSpan("sum", 0.5, results.TextSpan(2, 4), results.WordSpan(1, 2))
    assert [one.spans for one in caller.call("classify_tokens", pages=pages)] == [(expected,), (expected,)]
    assert expected.span.of(pages[0].text) == "bc"
    first, second = server.rules.requests[-1].pages
    assert (list(first.boxes), first.width, first.height) == ([*range(1, 9)], 9, 10)
    assert (list(second.boxes), second.width, second.height) == ([*range(8)], 0, 0)
    with pytest.raises(TypeError, match=r"pages\[0\]: a Page is needed, got dict"):
        caller.call("classify_tokens", pages=[{"words": ["a"]}])
    assert caller.call("embed_text", "good news")[0].values == (0.5, -0.5)


def test_answers_and_filled_masks(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    answers = caller.call("answer_question", "who", ["Ada saw", "Oslo"], top_k=2, overlap_token_count=0)
    assert [one.answers for one in answers] == [
        (results.ExtractedAnswer(text, results.TextSpan(0, 4), 0.5),) for text in ("Ada ", "Oslo")
    ]
    request = server.rules.requests[0]
    assert (list(request.questions), request.top_k, request.HasField("overlap_token_count")) == (["who"], 2, True)
    [filled] = caller.call("fill_mask", "the [MASK]", targets="sea")
    token = results.MaskToken(" sea", 7, 0.5, "the sea")
    assert filled.masks == (results.FilledMask(results.TextSpan(4, 10), (token,)),)
    assert list(server.rules.requests[1].targets) == ["sea"]


def test_label_takes_bytes_and_paths(server: Any, connect: Connect, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(b"four")
    answer = connect(server.address).call("classify_image", [b"one", file, str(file)], top_k=1)
    assert [result.width for result in answer] == [3, 4, 4]
    assert list(server.rules.requests[0].images) == [b"one", b"four", b"four"]
    with pytest.raises(FileNotFoundError):
        connect(server.address).call("classify_image", tmp_path / "absent.png")


def test_labels_of_audios(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    answer = caller.call("classify_audio", [b"one", b"four"], top_k=2, truncate=True)
    label = results.LabelScore("bell", 0.75, True)
    assert list(answer) == [results.AudioClassification((label,), seconds, True) for seconds in (3, 4)]
    assert (server.rules.requests[0].top_k, server.rules.requests[0].truncate) == (2, True)


def test_maps_of_images(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    answer = caller.call("classify_pixels", [b"one", b"four"])
    label = results.PixelLabel("sky", 2, 1.0, 0.5)
    assert [(one.labels, one.width, one.height) for one in answer] == [((label,), width, 2) for width in (3, 4)]
    assert answer[0].to_numpy().tolist() == [[0, 65535]]
    [found] = caller.call("estimate_depth", image_ids="a")
    assert (found.kind, found.minimum, found.maximum, found.width) == (results.DepthKind.METRIC, 1, 3, 1)
    assert found.to_numpy().tolist() == [[1, 3]]
    assert list(server.rules.requests[1].image_ids) == ["a"]


def test_labels_of_a_video(server: Any, connect: Connect) -> None:
    answer = connect(server.address).call("classify_video", [b"one", b"two"], top_k=1)
    assert list(answer) == [results.VideoClassification((results.LabelScore("dancing", 0.75, True),), (0, 0, 1))]
    assert list(server.rules.requests[0].frames) == [b"one", b"two"]


def test_objects_of_images(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    answer = caller.call("detect_objects", [b"one", b"four"], threshold=0.0, labels="dog", max_object_count=3)
    found = results.DetectedObject("dog", 7, 0.5, results.Box(1, 2, 3.5, 4))
    assert list(answer) == [results.ObjectDetection((found,), width, 2) for width in (3, 4)]
    request = server.rules.requests[0]
    assert request.HasField("threshold")
    assert (list(request.labels), request.max_object_count) == (["dog"], 3)
    assert len(caller.call("detect_objects", image_ids=["a", "b"])) == 2


def test_models_and_model(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    listing = caller.call("list_models")
    (model,) = listing
    assert (model.name, model.task, model.parameter_count) == ("rule", "generation", 1_234_567)
    expected = results.GenerationParameters(
        max_new_tokens=None,
        sampling=results.SamplingParameters(0.5, None, None, 0.0),
        repetition_penalty=1.25,
        presence_penalty=None,
        frequency_penalty=None,
    )
    assert model.default_parameters == expected
    assert model.quality[0].value == 90.5
    assert listing.rejected_bundles[0].path == "broken/1"
    assert len(caller.call("list_models", "translation")) == 0
    assert caller.call("get_model", "rule").manifest_json == '{"schema_version": 1}'
    assert len(caller.call("list_models", capability="chat")) == 0


def test_bundles_are_listed_with_their_states_and_the_routes(server: Any, connect: Connect) -> None:
    listing = connect(server.address).call("list_bundles")
    assert [(bundle.name, bundle.version, bundle.state, bundle.reason) for bundle in listing] == [
        ("rule", "1", results.BundleState.READY, ""),
        ("rule", "2", results.BundleState.INCOMPLETE, "x is missing"),
    ]
    assert listing.routes == (results.Route("rule", "", "2", 0.125),)
    assert listing.aliases == (results.Alias("old", "rule", "1"),)
    assert listing.store_problem == "the store has not answered for 10 s"


def test_models_are_loaded_unloaded_and_routed(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    assert caller.call("load_model", "rule", model_version="1").name == "rule"
    assert caller.call("unload_model", "rule") is None
    assert [bundle.version for bundle in caller.call("scan_store")] == ["1", "2"]
    routes = caller.call("set_route", "rule", default_version="1", canary_version="2", canary_share=0.5)
    assert (list(routes), len(routes)) == ([results.Route("rule", "1", "2", 0.5)], 1)
    assert routes.not_kept_reason == "routes.json cannot be written"
    aliases = caller.call("set_alias", "old", model="rule")
    assert (list(aliases), len(aliases)) == ([results.Alias("old", "rule", "")], 1)
    assert aliases.not_kept_reason == ""
    assert list(caller.call("set_alias", "old")) == []
    load, unload, *_, route, alias, no_alias = server.rules.requests
    assert (load.model, load.model_version, unload.model, unload.model_version) == ("rule", "1", "rule", "")
    assert (route.default_version, route.canary_version, route.canary_share) == ("1", "2", 0.5)
    assert (alias.alias, alias.model, no_alias.model) == ("old", "rule", "")


def test_health_and_readiness(server: Any, connect: Connect) -> None:
    caller = connect(server.address)
    assert caller.call("health") is results.HealthStatus.SERVING
    caller.call("wait_ready", 5.0)
    server.rules.serving = False
    assert caller.call("health") is results.HealthStatus.NOT_SERVING
    with pytest.raises(headway_client.DeadlineExceededError, match=r"not ready within 0\.2 s"):
        caller.call("wait_ready", 0.2)


def test_health_of_a_server_that_is_not_there_is_told_at_once(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(headway_client.UnavailableError):
        connect(f"127.0.0.1:{port}").call("health")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("generate_text", 3, "prompts: a str or a sequence of str"),
        ("generate_text", ["one", b"two"], r"prompts\[1\]: a str is needed, got bytes"),
        ("classify_text", b"one", "texts: a str or"),
        ("classify_image", [b"one", 2], r"images\[1\]: bytes or a path"),
    ],
)
def test_a_wrong_type_is_told_before_anything_is_sent(
    server: Any, connect: Connect, name: str, value: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        connect(server.address).call(name, value)
    assert server.rules.requests == []


def test_a_misspelt_option_is_a_type_error(server: Any, connect: Connect) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        connect(server.address).call("generate_text", "one", max_tokens=3)


def test_no_module_of_the_client_brings_in_numpy_or_a_framework() -> None:
    program = (
        "import importlib, pkgutil, sys, headway_client\n"
        "for module in pkgutil.walk_packages(headway_client.__path__, 'headway_client.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(sorted({'torch', 'onnx', 'onnxruntime', 'numpy'} & set(sys.modules)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def _takes_files(name: str) -> list[str]:
    """Parameters of a method of the asyncio client that may be paths of files."""
    parameters = inspect.signature(getattr(AsyncClient, name)).parameters.values()
    return [one.name for one in parameters if re.search(r"\b(Images?|Audios?|bytes)\b", str(one.annotation))]


async def _used(made: Any) -> None:
    """Waits for a call's answer, or reads its stream."""
    if not hasattr(made, "__aenter__"):
        await made
        return
    async with made as entered:
        async for _ in entered:
            pass


METHODS = [name for name, method in vars(AsyncClient).items() if callable(method) and not name.startswith("_")]
READS_FILES = [(name, parameter) for name in METHODS for parameter in _takes_files(name)]


@pytest.mark.parametrize(("name", "parameter"), READS_FILES)
async def test_the_asyncio_client_reads_files_off_the_event_loop(
    name: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    readers: list[threading.Thread] = []
    for way in ("read_bytes", "stat", "open"):
        own = getattr(Path, way)

        def read(path: Path, *args: Any, own: Any = own, **options: Any) -> Any:
            if path == file:
                readers.append(threading.current_thread())
            return own(path, *args, **options)

        monkeypatch.setattr(Path, way, read)
    needed = {"prompt": "x", "texts": ["x"], "text": "x", "prompts": SegmentPrompt(points=[(1, 1)])}
    signature = inspect.signature(getattr(AsyncClient, name)).parameters
    given = {
        key: value
        for key, value in needed.items()
        if key in signature and signature[key].default is inspect.Parameter.empty
    }
    if name == "rank_images" and parameter == "images":
        given["query_text"] = "x"
    given[parameter] = file
    async with AsyncClient("127.0.0.1:1", retry=RetryPolicy(max_attempts=1), timeout_s=5) as client:
        with pytest.raises(HeadwayError):
            await _used(getattr(client, name)(**given))
    assert readers
    assert threading.main_thread() not in readers


def test_the_asyncio_client_takes_files_in_more_than_a_dozen_methods() -> None:
    assert {"caption_image", "segment_interactively", "generate_image", "rank_texts"} <= {
        name for name, _ in READS_FILES
    }
    assert len({name for name, _ in READS_FILES}) >= 14


def test_importing_the_client_leaves_the_process_as_it_is() -> None:
    program = (
        "import json, os; before = dict(os.environ)\n"
        "import {0}, headway_client; headway_client.Client, headway_client.AsyncClient\n"
        "print(json.dumps(sorted({{*before.items()}} ^ {{*os.environ.items()}})))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    for module, changes in (("headway_client", []), ("headway_client.cli", [["GRPC_VERBOSITY", "NONE"]])):
        command = [sys.executable, "-c", program.format(module)]
        printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        assert json.loads(printed) == changes
