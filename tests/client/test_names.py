"""One name for one thing: in the protocol, the Python client and the command line."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import pydoc
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import pytest
import typer
from google.protobuf.descriptor import Descriptor, MethodDescriptor

import headway.v1
from headway.v1 import (
    common_pb2,
    generation_service_pb2,
    image_generation_service_pb2,
    inspection_service_pb2,
    model_service_pb2,
    segmentation_service_pb2,
    speech_service_pb2,
)
from headway_client import (
    AsyncClient,
    AttentionSummary,
    AudioFormat,
    Client,
    DiffusionSampler,
    EarlyStopping,
    MaskFormat,
    Role,
    results,
)
from headway_client.cli import app
from headway_load import LoadTask

FILES = [
    importlib.import_module(f"headway.v1.{module.name}")
    for module in pkgutil.iter_modules(headway.v1.__path__)
    if module.name.endswith("_pb2")
]
MESSAGES = {name: message for file in FILES for name, message in file.DESCRIPTOR.message_types_by_name.items()}
METHODS = {
    method.name: method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
COMMANDS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # a group

NOT_FIELDS = {"self", "timeout_s"}
FLATTENED = {"json_schema", "regex", "choices", "prompt_log_probabilities"}
OF_CHAT = {"tools", "tool_choice", "required_tool_name", "parallel_tool_calls", "chat_template_kwargs_json"}
PROMPTS = {"conversations", "conversation", "prompt_token_ids"}
"""Fields for what else than texts `generate_text` and `chat` take."""
"""Options that stand for a part of a field: of `constraint`, and of `log_probabilities`."""


def is_not_loaded(method: MethodDescriptor) -> bool:
    """True of a method whose speed is not that of a model alone, which the load tester leaves out."""
    return method.name in ("RankImages", "RankTexts", "AnswerQuestion") or method.containing_service.name in (
        "ModelService",
        "InspectionService",
        "ImageService",
        "CaptionService",
        "SegmentationService",
        "ImageGenerationService",
        "SpeechService",
    )


SHORTENED = {
    "caption-image": "caption",
    "transcribe-speech": "transcribe",
    "synthesize-speech": "speak",
}
"""Commands of these RPCs."""
SEGMENTING = {"segment-image", "segment-everything", "segment-interactively"}
"""RPCs that `segment` calls, or that need a hand on the mouse."""


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def field_names(message: Descriptor) -> Iterator[str]:
    """The fields of a request, and of its parameters and sampling in their place."""
    for field in message.fields:
        if field.name in ("parameters", "sampling", "attention"):
            yield from field_names(field.message_type)
        else:
            yield field.name


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("method", METHODS.values(), ids=lambda method: method.name)
def test_an_rpc_has_a_method_of_its_name_whose_options_are_its_fields(kind: type, method: MethodDescriptor) -> None:
    parameters = inspect.signature(getattr(kind, snake_case(method.name))).parameters
    fields = set(field_names(method.input_type))
    assert parameters.keys() - fields == (NOT_FIELDS | FLATTENED if "json_schema" in parameters else NOT_FIELDS)
    missing = {"constraint", *PROMPTS, *OF_CHAT}  # flattened, and what `chat` is for
    if method.name in ("StreamTranslateText", "StreamRewriteText"):
        missing = {"beam_size", "hypothesis_count", "early_stopping"}  # of a search, which a stream cannot have
    if method.containing_service.name in ("CaptionService", "SpeechService"):
        missing = {
            "beam_size",
            "hypothesis_count",
            "early_stopping",
            "max_length_ratio",
        }  # nor an image or audio tokens
    if method.name == "SegmentInteractively":
        missing = {"points", "box", "restart"}  # of each click, which the session takes
    assert fields - parameters.keys() <= missing


@pytest.mark.parametrize("method", METHODS)
def test_a_unary_rpc_has_a_command_of_its_name(method: str) -> None:
    command = snake_case(method).replace("_", "-").removeprefix("stream-")
    assert command in COMMANDS or command in SEGMENTING or command in SHORTENED


def test_no_command_is_without_an_rpc_except_the_tools() -> None:
    rpcs = {snake_case(method).replace("_", "-") for method in METHODS}
    own = {"chat", "caption", "health", "infer", "load", "load-compare", "segment", "speak", "transcribe"}
    assert COMMANDS - rpcs == own


def test_the_load_tester_knows_every_command_that_runs_a_model() -> None:
    of_models = {snake_case(method.name).replace("_", "-") for method in METHODS.values() if is_not_loaded(method)}
    media = {"caption", "classify-audio", "classify-video", "segment", "speak", "transcribe"}
    tools = media | {"health", "infer", "load", "load-compare"}
    assert set(LoadTask) == COMMANDS - tools - of_models


def test_a_result_has_the_fields_of_its_message() -> None:
    kinds = {
        kind.__name__: {field.name for field in dataclasses.fields(kind)}
        for _, kind in inspect.getmembers(results, dataclasses.is_dataclass)
        if kind.__name__ in MESSAGES
    }
    defaults = {"SamplingParameters", "GenerationParameters"}  # some of them only: those that a model has defaults of
    assert len(kinds) > 20
    for name, fields in kinds.items():
        message = {field.name for field in MESSAGES[name].fields}
        if name == "Timings":
            message = {f"{field}_s" for field in message}
        assert fields <= message if name in defaults else fields == message, name


def test_every_result_of_an_rpc_has_a_class() -> None:
    for name in ("GenerateText", "TranslateText", "ClassifyText", "ClassifyTokens", "ClassifyImage", "EmbedText"):
        result = METHODS[name].output_type.fields_by_name["results"].message_type.name
        assert dataclasses.is_dataclass(getattr(results, result))


@pytest.mark.parametrize(
    ("enum", "protocol"),
    [
        (results.FinishReason, common_pb2.FinishReason),
        (results.Variant, common_pb2.Variant),
        (results.BundleState, model_service_pb2.BundleState),
        (AttentionSummary, inspection_service_pb2.AttentionSummary),
        (EarlyStopping, common_pb2.EarlyStopping),
        (AudioFormat, speech_service_pb2.AudioFormat),
        (DiffusionSampler, image_generation_service_pb2.DiffusionSampler),
        (MaskFormat, segmentation_service_pb2.MaskFormat),
        (Role, generation_service_pb2.Role),
    ],
)
def test_an_enum_has_the_members_of_the_protocols(enum: type[StrEnum], protocol: Any) -> None:
    names = {f"{snake_case(enum.__name__).upper()}_{member.name}" for member in enum}
    assert set(protocol.keys()) - names <= {f"{snake_case(enum.__name__).upper()}_UNSPECIFIED"}
    assert names <= set(protocol.keys())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_help_shows_every_option_with_its_description(kind: type) -> None:
    shown = pydoc.render_doc(kind.generate_text, renderer=pydoc.plaintext)
    assert "temperature: float | None = None" in shown
    assert "**options" not in shown
    assert re.search(r"^ +temperature: Softmax temperature, 0 to 2", shown, re.MULTILINE)
    shown = pydoc.render_doc(kind.__init__, renderer=pydoc.plaintext)  # type: ignore[misc]
    assert re.search(r"^ +timeout_s: Default timeout.*\n(.*\n)* +api_key: API key", shown, re.MULTILINE)


def test_both_clients_have_the_same_methods_and_options() -> None:
    def signatures(kind: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        own = {name: list(inspect.signature(method).parameters) for name, method in methods if name[0] != "_"}
        return own | {"__init__": list(inspect.signature(kind).parameters)}

    blocking: dict[str, Any] = signatures(Client)
    blocking["aclose"] = blocking.pop("close")
    assert blocking == signatures(AsyncClient)
