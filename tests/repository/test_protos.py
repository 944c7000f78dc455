"""The protocol keeps the rules of the design: buf's STANDARD ones that descriptors show, and this project's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    MethodDescriptorProto,
)
from grpc_tools import protoc

_LOWER_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_PASCAL = re.compile(r"([A-Z][a-z0-9]*)+")
_INTEGERS = {
    FieldDescriptorProto.TYPE_INT32,
    FieldDescriptorProto.TYPE_INT64,
    FieldDescriptorProto.TYPE_UINT32,
    FieldDescriptorProto.TYPE_UINT64,
}
_INTEGERS_THAT_DO_NOT_COUNT = {
    "area",
    "beam_size",
    "counts",
    "embedding_dimension",
    "end",
    "head",
    "heads",
    "frame_indices",
    "height",
    "ids",
    "index",
    "indices",
    "label_index",
    "layer",
    "layers",
    "max_new_tokens",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "points_per_side",
    "priority",
    "sample_index",
    "sampling_rate",
    "seed",
    "start",
    "stop_token_ids",
    "thinking_token_budget",
    "token_id",
    "token_ids",
    "top_k",
    "width",
}
"""Every other integer of the API counts things and ends in `_count`; `max_new_tokens` and COCO's `counts` are
the field's own terms."""


class Element(NamedTuple):
    """Something that has a name in a file, with its place there."""

    name: str
    path: tuple[int, ...]


@pytest.fixture(scope="module")
def files(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """Every file of the API, comments included."""
    out = tmp_path_factory.mktemp("protos") / "descriptors.binpb"
    own = root / "proto" / "headway" / "v1"  # the Open Inference Protocol has rules of its own
    sources = sorted(path.relative_to(root / "proto").as_posix() for path in own.glob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    includes = [f"--proto_path={root / 'proto'}", f"--proto_path={well_known}"]
    status = protoc.main(["protoc", *includes, "--include_source_info", f"--descriptor_set_out={out}", *sources])
    assert status == 0
    return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def _messages(file: FileDescriptorProto) -> Iterator[tuple[DescriptorProto, tuple[int, ...]]]:
    """Every message of a file, nested ones included, with its path."""
    waiting = [(message, (4, index)) for index, message in enumerate(file.message_type)]
    while waiting:
        message, path = waiting.pop()
        yield message, path
        waiting += [(nested, (*path, 3, index)) for index, nested in enumerate(message.nested_type)]


def _enums(file: FileDescriptorProto) -> Iterator[tuple[EnumDescriptorProto, tuple[int, ...]]]:
    """Every enum of a file, nested ones included, with its path."""
    yield from ((enum, (5, index)) for index, enum in enumerate(file.enum_type))
    for message, path in _messages(file):
        yield from ((enum, (*path, 4, index)) for index, enum in enumerate(message.enum_type))


def _elements(file: FileDescriptorProto) -> Iterator[Element]:
    """Everything in a file that has a name."""
    for index, service in enumerate(file.service):
        yield Element(service.name, (6, index))
        for at, method in enumerate(service.method):
            yield Element(f"{service.name}.{method.name}", (6, index, 2, at))
    for message, path in _messages(file):
        yield Element(message.name, path)
        for at, field in enumerate(message.field):
            yield Element(f"{message.name}.{field.name}", (*path, 2, at))
    for enum, path in _enums(file):
        yield Element(enum.name, path)
        for at, value in enumerate(enum.value):
            yield Element(f"{enum.name}.{value.name}", (*path, 2, at))


def _methods(files: list[FileDescriptorProto]) -> list[MethodDescriptorProto]:
    return [method for file in files for service in file.service for method in service.method]


def _fields(files: list[FileDescriptorProto]) -> Iterator[tuple[str, FieldDescriptorProto]]:
    for file in files:
        for message, _ in _messages(file):
            yield from ((f"{message.name}.{field.name}", field) for field in message.field)


def test_a_file_is_in_the_folder_of_its_package_and_a_service_has_a_file_of_its_own(
    files: list[FileDescriptorProto],
) -> None:
    for file in files:
        folder, _, name = file.name.rpartition("/")
        assert folder == file.package.replace(".", "/"), file.name
        stem = name.removesuffix(".proto")
        assert _LOWER_SNAKE.fullmatch(stem), file.name
        expected = ["".join(part.title() for part in stem.split("_"))] if stem.endswith("_service") else []
        assert [service.name for service in file.service] == expected, file.name


def test_everything_is_commented(files: list[FileDescriptorProto]) -> None:
    bare = []
    for file in files:
        comments = {tuple(at.path): at.leading_comments.strip() for at in file.source_code_info.location}
        bare += [f"{file.name}: {element.name}" for element in _elements(file) if not comments.get(element.path)]
    assert bare == []


def test_each_call_has_a_request_and_a_response_of_its_own(files: list[FileDescriptorProto]) -> None:
    methods = _methods(files)
    for method in methods:
        assert _PASCAL.fullmatch(method.name), method.name
        assert method.input_type.rpartition(".")[2] == f"{method.name}Request"
        assert method.output_type.rpartition(".")[2] == f"{method.name}Response"
    names = [name for method in methods for name in (method.input_type, method.output_type)]
    assert len(names) == len(set(names))


def test_enum_values_carry_the_name_of_their_enum_and_zero_is_unspecified(files: list[FileDescriptorProto]) -> None:
    for file in files:
        for enum, _ in _enums(file):
            prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper()
            values = {value.number: value.name for value in enum.value}
            assert values[0] == f"{prefix}_UNSPECIFIED", enum.name
            assert [name for name in values.values() if not name.startswith(f"{prefix}_")] == [], enum.name


def test_names_are_written_one_way(files: list[FileDescriptorProto]) -> None:
    wrong = [name for name, field in _fields(files) if not _LOWER_SNAKE.fullmatch(field.name)]
    wrong += [message.name for file in files for message, _ in _messages(file) if not _PASCAL.fullmatch(message.name)]
    assert wrong == []


def test_an_integer_is_a_count_and_says_so_or_is_known_not_to_be(files: list[FileDescriptorProto]) -> None:
    wrong = [
        name
        for name, field in _fields(files)
        if field.type in _INTEGERS
        and not field.name.endswith("_count")
        and field.name not in _INTEGERS_THAT_DO_NOT_COUNT
    ]
    assert wrong == []


def test_a_time_span_is_a_duration_or_names_seconds(files: list[FileDescriptorProto]) -> None:
    units = ("_ms", "_us", "_ns", "_s", "_millis", "_milliseconds", "duration")
    assert [name for name, field in _fields(files) if field.name.endswith(units)] == []
    seconds = [(name, field) for name, field in _fields(files) if field.name.endswith("_seconds")]
    assert {field.type for _, field in seconds} == {FieldDescriptorProto.TYPE_DOUBLE}


def _all_messages(files: list[FileDescriptorProto]) -> dict[str, DescriptorProto]:
    return {message.name: message for file in files for message, _ in _messages(file)}


def test_numbers_have_no_gaps_but_reserved_ones(files: list[FileDescriptorProto]) -> None:
    for name, message in _all_messages(files).items():
        taken = {field.number for field in message.field}
        for gap in message.reserved_range:
            taken |= set(range(gap.start, gap.end))
        assert taken == set(range(1, len(taken) + 1)), name


def test_a_stream_has_the_numbers_of_its_unary_twin(files: list[FileDescriptorProto]) -> None:
    """The request of a stream reads as a unary one with one input, and its last response as one with one result."""
    messages = _all_messages(files)
    twins = {name: name.removeprefix("Stream") for name in messages if name.startswith("Stream")}
    assert len(twins) == 14
    for name, twin in twins.items():
        unary = {field.number: field for field in messages[twin].field}
        for field in messages[name].field:
            if (same := unary.get(field.number)) is not None:
                assert same.name in (field.name, f"{field.name}s", f"{field.name}es"), name
                assert (field.type, field.type_name) == (same.type, same.type_name), name
        of_stream = {field.name for field in messages[name].field}
        shared = [field for field in messages[twin].field if field.name in of_stream]
        assert [field.number for field in shared] == [
            field.number for field in messages[name].field if field.name in {one.name for one in shared}
        ], name
