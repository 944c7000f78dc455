"""The rules in the .proto files hold wherever a range or a default is written once more."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

from headway_client import options
from headway_server.decoding.parameters import SamplingParameters
from headway_server.field_rules import FieldRules, all_rules
from headway_server.tasks.segmentation.model import EverythingRequest
from headway_server.tasks.text_to_text.request import TextToTextParameters

NUMBER = r"(-?[\d,]+(?:\.\d+)?)"
RANGE = re.compile(rf"(?P<above>[Aa]bove )?(?<![\w.]){NUMBER},? to {NUMBER}(?!\w)")
DEFAULT = re.compile(rf"Default:? {NUMBER}(?=[.,;])")


def value(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.fixture(scope="module")
def comments(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The comment of every field, by `Message.field`."""
    out = tmp_path_factory.mktemp("rules") / "descriptors.binpb"
    own = root / "proto" / "headway" / "v1"
    sources = sorted(path.relative_to(root / "proto").as_posix() for path in own.glob("*.proto"))
    includes = [f"--proto_path={root / 'proto'}", f"--proto_path={Path(protoc.__file__).parent / '_proto'}"]
    assert protoc.main(["protoc", *includes, "--include_source_info", f"--descriptor_set_out={out}", *sources]) == 0
    found = {}
    for file in FileDescriptorSet.FromString(out.read_bytes()).file:
        told = {tuple(at.path): " ".join(at.leading_comments.split()) for at in file.source_code_info.location}
        for index, message in enumerate(file.message_type):
            for at, field in enumerate(message.field):
                found[f"{message.name}.{field.name}"] = told[4, index, 2, at]
    return found


def told_ranges(text: str) -> Iterator[tuple[str, float, float]]:
    for above, low, high in RANGE.findall(text):
        yield "above" if above else "minimum", value(low), value(high)


def test_the_comment_of_a_field_tells_its_rules(comments: dict[str, str]) -> None:
    for name, rules in all_rules().items():
        comment = comments[name]
        if rules.maximum is not None and "as in" not in comment.lower():
            assert any(agrees(told, [rules]) for told in told_ranges(comment)), (name, comment, rules)
        if rules.default_number is not None and (default := DEFAULT.search(comment)):
            assert value(default[1]) == pytest.approx(rules.default_number), name
        for limit in (rules.max_element_count, rules.max_character_count, rules.max_byte_count):
            if limit is not None and "as in" not in comment.lower() and "one for each" not in comment:
                numbers = {value(number) for number in re.findall(r"\d[\d,]*", comment)}
                numbers |= {1024 * value(number) for number in re.findall(r"(\d+) KiB", comment)}
                assert limit in numbers, (name, comment, limit)


def test_a_range_in_a_comment_has_its_rule(comments: dict[str, str]) -> None:
    known = all_rules()
    for name, comment in comments.items():
        message, _, _ = name.partition(".")
        is_asked = message.endswith(("Request", "Parameters", "Options", "Bias"))
        if is_asked and any(True for _ in told_ranges(comment)) and "Range" in comment:
            assert name in known, (name, comment)


@pytest.mark.parametrize(
    ("kind", "messages", "renamed"),
    [
        (SamplingParameters, ("GenerationParameters", "SamplingParameters"), {}),
        (TextToTextParameters, ("DecodingParameters",), {"num_hypotheses": "hypothesis_count"}),
        (EverythingRequest, ("SegmentEverythingRequest",), {}),
    ],
)
def test_the_servers_defaults_are_those_of_the_rules(
    kind: type, messages: tuple[str, ...], renamed: dict[str, str]
) -> None:
    compared = 0
    for field in dataclasses.fields(kind):
        for message in messages:
            rules = all_rules().get(f"{message}.{renamed.get(field.name, field.name)}")
            if rules is not None and rules.default_number is not None and isinstance(field.default, int | float):
                assert field.default == pytest.approx(rules.default_number), field.name
                compared += 1
    assert compared > 2


def by_field() -> dict[str, list[FieldRules]]:
    found: dict[str, list[FieldRules]] = {}
    for name, rules in all_rules().items():
        found.setdefault(name.partition(".")[2], []).append(rules)
    found["logit_biases"] += found["bias"]  # told together
    return found


def agrees(told: tuple[str, float, float], rules: list[FieldRules]) -> bool:
    kind, low, high = told
    for one in rules:
        least = one.above if kind == "above" else one.minimum
        if least is not None and one.maximum is not None and (low, high) == pytest.approx((least, one.maximum)):
            return True
        if one.max_element_count is not None and high == one.max_element_count:
            return True
        if one.max_character_count is not None and high == one.max_character_count:
            return True
    return False


def test_documents_tell_the_ranges_of_the_rules(root: Path) -> None:
    known, compared = by_field(), 0
    for document in sorted((root / "docs").glob("*.md")):
        for line in document.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            if len(cells) < 3 or not (found := re.fullmatch(r"`([\w.]+)`", cells[0])):
                continue
            rules = known.get(found[1].rpartition(".")[2])
            for told in told_ranges(cells[1]) if rules else ():
                assert agrees(told, rules or []), (document.name, line)
                compared += 1
    assert compared > 15


def test_options_of_the_client_tell_the_ranges_of_the_rules() -> None:
    known, compared = by_field(), 0
    for kind in vars(options).values():
        if isinstance(kind, type) and hasattr(kind, "__optional_keys__"):
            for name, option in options.options_of(kind).items():
                for told in told_ranges(option.description) if name in known else ():
                    assert agrees(told, known[name]), (kind.__name__, name, option.description)
                    compared += 1
    assert compared > 20


CONTROLS = {
    "temperature": "temperature",
    "topP": "top_p",
    "minP": "min_p",
    "penalty": "repetition_penalty",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
    "count": "image_count",
    "steps": "step_count",
    "guidance": "guidance_scale",
    "strength": "strength",
}
"""Controls of the page, and the field that each sets."""


def test_controls_of_the_page_have_the_ranges_of_the_rules(root: Path) -> None:
    control = re.compile(r'const (\w+) = (?:number|slider)\((?:"[^"]*", )?\{ min: ([-\d.]+), max: ([-\d.]+)')
    known, found = by_field(), {}
    for source in (root / "server" / "headway_server" / "transports" / "http" / "page").rglob("*.js"):
        for name, low, high in control.findall(source.read_text(encoding="utf-8")):
            if name in CONTROLS:
                [rules] = known[CONTROLS[name]]
                found[name] = (float(low), float(high))
                assert float(high) == rules.maximum, (source.name, name)
                least = rules.minimum if rules.above is None else rules.above
                assert least is not None
                assert 0 <= float(low) - round(least, 6) < 0.1, (source.name, name)
    assert found.keys() == CONTROLS.keys()
