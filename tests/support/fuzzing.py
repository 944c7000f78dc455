"""Damaged inputs for every parser of the server: what a call or a bundle brings may be refused, and nothing else.

    export PYTHONPATH=.:tests/support
    python tests/support/fuzzing.py images --seconds 300            # seeded mutations
    python tests/support/fuzzing.py images --seconds 300 --guided   # by coverage, if atheris is installed
    python tests/support/fuzzing.py all --seconds 60

Prints one JSON line: the cases, how many were taken and how many refused, and the slowest. A case that raises anything
else, or takes longer than its target may, is written to stderr with the seed and ends the run; one that crashes ends it
anyway. The suite runs some hundred cases of each target (`tests/server/test_fuzzed_inputs.py`).
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import constraint_vocabularies as vocabularies
import hostile_images
import hostile_texts
import tiny_chat
from google.protobuf.message import DecodeError, Message
from mutation import mutate
from PIL import Image
from tiny_engine import TOKENIZER, VOCAB_SIZE

from headway.v1 import common_pb2
from headway.v1 import generation_service_pb2 as pb
from headway.v1 import translation_service_pb2 as translation_pb
from headway_server.bundles import ImagePreprocessing, SpecialTokens, read_manifest
from headway_server.decoding.constraints import ConstraintCompiler, ConstraintRequest
from headway_server.errors import BundleError, RequestError
from headway_server.preprocessing import (
    ChatTemplate,
    ChatTurn,
    ImageLimits,
    ImagePreprocessor,
    TextTokenizer,
    split_sentences,
)
from headway_server.runtime.machine import give_back_memory
from headway_server.services import generation_requests, text_to_text_requests
from headway_server.services.wire import check_fields
from headway_server.serving.limits import check_text
from headway_server.tasks.parameters import DecodingLimits, plan_sampling


@dataclass(frozen=True, kw_only=True)
class Target:
    """A parser, and what is damaged for it."""

    parse: Callable[[bytes], object]
    """Takes a case, or refuses it with an error of `refusals`."""
    samples: Callable[[], list[bytes]]
    """Inputs that are right, to be damaged."""
    words: tuple[bytes, ...] = ()
    """What is put into them."""
    refusals: tuple[type[Exception], ...] = (RequestError,)
    limit_s: float = 2.0
    """Processor time of a case on its thread."""
    draw: Callable[[random.Random], bytes] | None = None
    """Makes a case of its own; None: a sample is damaged anywhere."""
    limit_mib: float | None = None
    """Memory that a case adds at most; None: it is not measured."""
    slowest: dict[str, float] = field(default_factory=dict)
    """Seconds of a processor that parts of it took at most, kept by `parse`."""


@dataclass
class Outcome:
    """What a run has found; it ends with the first case that is neither taken nor refused."""

    cases: int = 0
    taken: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    most_mib: float = 0.0
    """Memory that a case has added at most, where it is measured."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Refusals by error."""


_MEMORY_BYTES = 4 * 2**30


def cases(target: Target, seed: int) -> Iterator[bytes]:
    """Yields the samples, and then damaged ones without end; or what the target draws."""
    rng = random.Random(seed)
    while target.draw is not None:
        yield target.draw(rng)
    yield from (samples := target.samples())
    while True:
        yield mutate(rng, rng.choice(samples), samples, target.words)


def attempt(target: Target, data: bytes, outcome: Outcome) -> None:
    """Has a case parsed; what is neither taken nor refused goes on as it is."""
    had_mib = 0.0 if target.limit_mib is None else forget_peak()
    began = time.thread_time()
    outcome.cases += 1
    try:
        target.parse(data)
        outcome.taken += 1
    except target.refusals as error:
        outcome.refused += 1
        outcome.kinds[type(error).__name__] = outcome.kinds.get(type(error).__name__, 0) + 1
    seconds = time.thread_time() - began
    outcome.slowest_s = max(outcome.slowest_s, seconds)
    assert seconds <= target.limit_s, f"took {seconds:.2f} s of the processor, at most {target.limit_s:g}"
    if target.limit_mib is not None:
        mib = memory_mib("VmHWM") - had_mib
        outcome.most_mib = max(outcome.most_mib, mib)
        assert mib <= target.limit_mib, f"took {mib:.0f} MiB, at most {target.limit_mib:g}"


def memory_mib(name: str, pid: int | str = "self") -> float:
    """Returns what the kernel says of a process's memory under such a name."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


def forget_peak(pid: int | str = "self") -> float:
    """Makes the kernel forget the most memory that a process has had; returns what it has now, in MiB."""
    if pid == "self":
        give_back_memory()  # or a case would take what earlier ones left with the allocator
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory_mib("VmRSS", pid)


def fuzz(
    target: Target,
    seed: int,
    *,
    seconds: float,
    max_cases: int,
    is_enough: Callable[[Outcome], object] = lambda _: True,
) -> Outcome:
    """Has cases parsed until the time is over and it is enough, or there were so many."""
    outcome, end = Outcome(), time.monotonic() + seconds
    for data in cases(target, seed):
        try:
            attempt(target, data, outcome)
        except BaseException:
            sys.stderr.write(f"seed {seed}, case {outcome.cases}: {data[:2000]!r}\n")
            raise
        if outcome.cases >= max_cases or (time.monotonic() > end and is_enough(outcome)):
            return outcome
    raise AssertionError


# Manifests


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="fuzzing-"))


def _manifest(data: bytes) -> None:
    (_folder() / "bundle.json").write_bytes(data)
    read_manifest(_folder())


def _manifests() -> list[bytes]:
    import tiny_bundles

    store = _folder() / "store"
    bundles = [tiny_bundles.write_topic_bundle(store), tiny_bundles.write_colour_bundle(store)]
    return [(bundle.path / "bundle.json").read_bytes() for bundle in bundles]


# Images

_PREPROCESSOR = ImagePreprocessor(
    ImagePreprocessing(
        height=8, width=8, resize="stretch", interpolation="bilinear", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
    ),
    ImageLimits(max_bytes=2**20, max_pixels=2**20),
)


def _images() -> list[bytes]:
    rng = random.Random(0)
    picture = Image.frombytes("RGB", (32, 24), rng.randbytes(32 * 24 * 3))
    exif = Image.Exif()
    exif[0x0112] = 6
    files: list[tuple[Image.Image, dict[str, Any]]] = [
        (picture, {"format": "JPEG", "progressive": True, "exif": exif}),
        (picture, {"format": "JPEG", "quality": 40, "icc_profile": b"x" * 100}),
        (picture, {"format": "PNG"}),
        (picture.convert("P"), {"format": "PNG", "transparency": 3}),
        (picture.convert("L").convert("I;16"), {"format": "PNG"}),
        (picture.convert("RGBA"), {"format": "WEBP"}),
        (picture, {"format": "WEBP", "lossless": True}),
        (picture, {"format": "BMP"}),
        (picture.convert("1"), {"format": "BMP"}),
        (picture.convert("P"), {"format": "GIF", "save_all": True, "append_images": [picture.convert("P")]}),
    ]
    written = []
    for image, options in files:
        image.save(file := io.BytesIO(), **options)
        written.append(file.getvalue())
    return written


_SERVERS_PREPROCESSOR = ImagePreprocessor(
    ImagePreprocessing(
        height=224,
        width=224,
        resize="shorter_side",
        resize_size=256,
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    ),
    ImageLimits(max_bytes=16 * 2**20, max_pixels=hostile_images.MAX_PIXELS),
)


# Templates and conversations


def _template(data: bytes) -> None:
    (_folder() / "chat_template.jinja").write_bytes(data)
    template = ChatTemplate.load(
        _folder() / "chat_template.jinja", tokenizer_file=_chat_tokenizer(), special_tokens=SpecialTokens(bos=0, eos=1)
    )
    template.prompt([ChatTurn(role="user", content="a\ufdfa<|x|>" * 50)], "conversations[0]")


@cache
def _chat_tokenizer() -> Path:
    file = _folder() / "tokenizer.json"
    TOKENIZER.save(str(file))
    return file


def _templates() -> list[bytes]:
    return [
        *(template.encode() for template in tiny_chat.TEMPLATES.values()),
        b"{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}U: {{ m.content | trim }}\n{% else %}"
        b"{{ raise_exception('no ' + m['role']) }}{% endif %}{% endfor %}A:",
        b"{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content[:20] }}"
        b"{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') }}",
    ]


# Constraints


@cache
def _compiler() -> tuple[ConstraintCompiler, int]:
    tokenizer = vocabularies.byte_level(400)
    return ConstraintCompiler(tokenizer, vocab_size=400, eos_id=0), 400


def _constraint(request: ConstraintRequest) -> None:
    """Compiles a constraint and writes a text under it: what has passed must not end the process later either."""
    compiler, vocab_size = _compiler()
    compiled = compiler.compile(request, field="parameters.constraint")
    state = compiled.start()
    choose = vocabularies.random_choice(request.num_characters, vocab_size)
    for _ in range(30):
        allowed = vocabularies.allowed(state, vocab_size) - {0}
        if not allowed:
            return
        try:
            state.follow(choose(allowed))
        except ValueError:
            assert state.failure is not None
            return


_SCHEMA_WORDS = tuple(
    f'"{word}":'.encode()
    for word in (
        *("const", "enum", "minimum", "maximum", "multipleOf", "allOf", "anyOf", "oneOf", "$ref", "pattern", "items"),
        *("minItems", "maxItems", "minLength", "maxLength", "patternProperties", "additionalProperties", "format"),
    )
)


def _schemas() -> list[bytes]:
    recursive = {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "integer"}}},
        {"type": "array", "items": {"enum": [1, -5.5, "x", None, {"y": []}]}, "minItems": 1, "maxItems": 3},
        {"type": "integer", "minimum": -17, "maximum": 90071992547, "multipleOf": 3},
        {"type": "number", "exclusiveMinimum": -1.5, "maximum": 1e10},
        {"allOf": [{"type": "string", "pattern": "^a+b?$"}, {"minLength": 2}], "title": "t"},
        {"anyOf": [{"const": -9223372036854775000}, {"type": "string", "format": "date-time"}]},
        {"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
        recursive,
    ]
    return [json.dumps(schema).encode() for schema in schemas]


def _regexes() -> list[bytes]:
    return [
        rb"[a-z0-9._%+-]{1,64}@[a-z]+\.(com|org)",
        rb"(\w{1,30}\s){1,20}",
        rb"^(a|b)*a(a|b){8}$",
        rb"\p{L}+(?i:x)[^\n]",
    ]


# Requests


def _read_generation(data: bytes) -> None:
    request = pb.GenerateTextRequest.FromString(data)
    generation_requests.read_prompts(request)
    parsed = generation_requests.parse_request(request, deadline=None, sample_count=request.sample_count)
    plan_sampling(
        parsed.parameters,
        defaults=None,
        limits=DecodingLimits(max_input_tokens=32, max_total_tokens=64, vocab_size=VOCAB_SIZE),
        log_probabilities=parsed.log_probabilities,
    )


def _generation_requests() -> list[bytes]:
    parameters = pb.GenerationParameters(
        max_new_tokens=5,
        repetition_penalty=1.5,
        stop_strings=["x"],
        stop_token_ids=[1, 2],
        logit_biases=[pb.LogitBias(token_id=3, bias=-2.5)],
        constraint=pb.Constraint(choices=pb.Choices(texts=["a", "b"])),
    )
    parameters.sampling.temperature, parameters.sampling.top_p, parameters.sampling.seed = 0.7, 0.9, 2**63
    turns = [pb.ChatMessage(role=pb.ROLE_SYSTEM, content="s"), pb.ChatMessage(role=pb.ROLE_USER, content="ü")]
    options = pb.LogProbabilityOptions(top_token_count=3, include_prompt=True)
    requests: list[Message] = [
        pb.GenerateTextRequest(prompts=["a", "b"], parameters=parameters, sample_count=2, priority=-3, cache_salt="s"),
        pb.GenerateTextRequest(conversations=[pb.Conversation(messages=turns)], log_probabilities=options, echo=True),
    ]
    return [request.SerializeToString() for request in requests]


def _read_translation(data: bytes) -> None:
    request = translation_pb.TranslateTextRequest.FromString(data)
    text_to_text_requests.parse_request(request, deadline=None)


def _translation_requests() -> list[bytes]:
    parameters = common_pb2.DecodingParameters(beam_size=4, length_penalty=0.6, early_stopping=2)
    phrases = [common_pb2.PhraseConstraints(required=["a"], forbidden=["b c"])]
    request = translation_pb.TranslateTextRequest(
        texts=["a", "ü"], target_language="en", parameters=parameters, phrase_constraints=phrases, split_sentences=True
    )
    return [request.SerializeToString()]


def _wire(data: bytes) -> None:
    """What the count calls no message is none for the library either."""
    try:
        check_fields(data, pb.GenerateTextRequest.DESCRIPTOR)
    except RequestError as error:
        if "is not a message" not in str(error):
            raise
        with suppress(DecodeError):
            pb.GenerateTextRequest.FromString(data)
            raise AssertionError("the library reads it") from error
        raise


def _long_requests() -> list[bytes]:
    return [sample + b"\x1a\xac\x02" + b"x" * 300 + b"\x1a\xac\x02" + b"y" * 300 for sample in _generation_requests()]


# Texts

_TEXT = "Dr. No said: \u201cIt is.\u201d\u2003He\u00a0did.\n\n\u3042\u3002 \N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN} \ufdfa"


@cache
def _tokenizers() -> tuple[TextTokenizer, ...]:
    return tuple(map(TextTokenizer, (vocabularies.byte_level(400), vocabularies.metaspace(), TOKENIZER)))


def _text(data: bytes) -> None:
    text = data.decode(errors="ignore")
    check_text("text", text or "a", 2**18)
    for tokenizer in _tokenizers():
        encoded = tokenizer.encode_now(text)
        tokenizer.decode(encoded.input_ids.tolist())
    for language in ("en", "ja", "xx"):
        split = split_sentences(text, language)
        assert split.join([sentence.text for sentence in split.sentences])[0] is not None


_SLOWEST: dict[str, float] = {}


def _tokenizer(data: bytes) -> None:
    """Encodes a text with every kind of tokenizer, as large as the server takes it."""
    text = data.decode(errors="ignore")
    check_text("text", text or "a", hostile_texts.MAX_BYTES)
    for name, tokenizer in hostile_texts.tokenizers().items():
        began = time.thread_time()
        encoded = tokenizer.encode_now(text)
        seconds = time.thread_time() - began
        tokenizer.decode(encoded.input_ids.tolist())
        _SLOWEST[name] = round(max(_SLOWEST.get(name, 0.0), seconds), 3)


TARGETS = {
    "manifests": Target(
        parse=_manifest,
        samples=_manifests,
        words=(b'"limits":', b'"files":', b'"shape":', b"null", b"{}", b"[]"),
        refusals=(BundleError,),
    ),
    "images": Target(parse=_PREPROCESSOR.prepare, samples=_images, words=(b"\xff\xda", b"\xff\xd8", b"IDAT", b"fcTL")),
    "headers": Target(
        parse=_SERVERS_PREPROCESSOR.prepare,
        samples=hostile_images.samples,
        draw=hostile_images.damage,
        limit_s=4.0,
        limit_mib=400,
    ),
    "templates": Target(
        parse=_template,
        samples=_templates,
        words=(b"{%", b"%}", b"{{", b"}}", b"|", b"messages", b"loop", b"range(9)", b".__class__", b"for "),
        refusals=(BundleError, RequestError),
        limit_s=4.0,
    ),
    "schemas": Target(
        parse=lambda data: _constraint(ConstraintRequest(json_schema=data.decode(errors="replace"))),
        samples=_schemas,
        words=_SCHEMA_WORDS,
        limit_s=3.0,
    ),
    "expressions": Target(
        parse=lambda data: _constraint(ConstraintRequest(regex=data.decode(errors="replace"))),
        samples=_regexes,
        words=(b"{1,50}", b".*", b"(?", b"|", b"[^", b"\\p{L}", b"\\d", b")", b"&&"),
        limit_s=3.0,
    ),
    "generation": Target(parse=_read_generation, samples=_generation_requests, refusals=(RequestError, DecodeError)),
    "translation": Target(parse=_read_translation, samples=_translation_requests, refusals=(RequestError, DecodeError)),
    "wire": Target(parse=_wire, samples=_long_requests, refusals=(RequestError,)),
    "texts": Target(
        parse=_text,
        samples=lambda: [_TEXT.encode(), "\ufdfa".encode() * 2000],
        words=("\ufdfa".encode() * 400, "\u0301".encode() * 400, b". " * 400, b'"' * 400, b"<eos>", b"</s>"),
    ),
    "tokenizers": Target(
        parse=_tokenizer,
        samples=lambda: [_TEXT.encode()],
        draw=lambda rng: hostile_texts.text(rng).encode(),
        limit_s=30.0,
        limit_mib=400,
        slowest=_SLOWEST,
    ),
}


def _guided(target: Target, seconds: float) -> None:
    """Lets atheris choose the cases, by what they reach in the server's own code. It ends the process."""
    import atheris

    for function in gc.get_objects():
        if isinstance(function, FunctionType) and str(function.__module__).startswith("headway_server"):
            atheris.instrument_func(function)
    corpus = Path(tempfile.mkdtemp(prefix="corpus-"))
    for number, sample in enumerate(target.samples()):
        (corpus / str(number)).write_bytes(sample)
    outcome = Outcome()
    atheris.Setup(
        [sys.argv[0], f"-max_total_time={int(seconds)}", "-max_len=65536", "-rss_limit_mb=4096", str(corpus)],
        lambda data: attempt(target, data, outcome),
    )
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--guided", action="store_true", help="by coverage, with atheris; one target")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # Pillow's, of pictures that are damaged
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))  # what takes more is a finding
    if arguments.guided:
        _guided(TARGETS[arguments.target], arguments.seconds)
    for name in TARGETS if arguments.target == "all" else [arguments.target]:
        outcome = fuzz(TARGETS[name], arguments.seed, seconds=arguments.seconds, max_cases=10**9)
        sys.stdout.write(
            json.dumps({"target": name, "seed": arguments.seed, **vars(outcome), "parts": TARGETS[name].slowest}) + "\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
