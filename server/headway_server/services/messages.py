"""Messages of `common.proto`, shared by the servicers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeAlias, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from headway.v1 import common_pb2
from headway_server.bundles import Precision
from headway_server.decoding.sequence import Delta, FinishReason
from headway_server.preprocessing.pool import off_loop
from headway_server.services.enums import WireEnum
from headway_server.serving.abilities import Ability, KindT
from headway_server.serving.answers import Answer, CallTimings
from headway_server.serving.families import ServedModel
from headway_server.serving.host import ModelHost
from headway_server.tasks.outputs import ScoredLabel
from headway_server.tasks.text.model import TextInputs

Response = TypeVar("Response")
MessageT = TypeVar("MessageT", bound=Message)
PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")
Parts: TypeAlias = AsyncGenerator[PartT | Answer[ResultT], None]
"""Parts of a streamed result; an answer with one result comes last."""

_MAX_PARTS_ON_LOOP: Final = 1_000

VARIANTS: Final = WireEnum(common_pb2.Variant, Precision)
FINISH_REASONS: Final = WireEnum(common_pb2.FinishReason, FinishReason)


def as_unary(request: Message, kind: type[MessageT]) -> MessageT:
    """Converts a streaming request to the unary method's request with one input; field numbers are equal."""
    return kind.FromString(request.SerializeToString())


async def stream_of(
    kind: type[MessageT],
    parts: Parts[PartT, ResultT] | Callable[[], Awaitable[Parts[PartT, ResultT]]],
    model: ServedModel,
    arrived: float,
    *,
    delta: Callable[[PartT], Mapping[str, Any]],
    last: Callable[[ResultT], Mapping[str, Any]],
) -> AsyncGenerator[MessageT, None]:
    """Makes the messages of a stream from a model's parts.

    Args:
        kind: Type of the messages.
        parts: Parts of the model, or a function that starts them.
        model: The model.
        arrived: Arrival of the call, in seconds of `time.monotonic`.
        delta: Returns the message fields of a part.
        last: Returns the message fields of the result.
    """
    async with aclosing(await parts() if callable(parts) else parts) as yielded:
        async for part in yielded:
            if isinstance(part, Answer):
                [result] = part.results
                yield kind(**last(result), **signed(model, part.timings, arrived))
            else:
                yield kind(**delta(part))


def text_delta(part: Delta) -> dict[str, Any]:
    """Returns the message fields of the next part of a text."""
    return {"text_delta": part.output, "new_token_count": part.num_new_tokens}


def find_model(host: ModelHost, ability: Ability[KindT], request: Any) -> KindT:
    """Finds a request's model for an ability; errors are those of `ModelFinder.find`."""
    return host.find_able(ability, request.model, request.model_version)


def signed(model: ServedModel | None, timings: CallTimings, arrived: float) -> dict[str, Any]:
    """Returns the model and timings fields of a response.

    Args:
        model: The model; None if there is none.
        timings: Timings of the task.
        arrived: Arrival of the call, in seconds of `time.monotonic`.
    """
    return {"model": None if model is None else _reference(model), "timings": _timings(timings, arrived)}


def _reference(model: ServedModel) -> common_pb2.ModelReference:
    """Returns the reference to a model."""
    manifest = model.bundle.manifest
    return common_pb2.ModelReference(
        name=manifest.name, version=manifest.version, variant=VARIANTS.number(model.precision)
    )


def _timings(timings: CallTimings, arrived: float) -> common_pb2.Timings:
    """Returns the timings of a call; `arrived` is its arrival, in seconds of `time.monotonic`."""
    return common_pb2.Timings(
        total=duration(time.monotonic() - arrived),
        queue=duration(timings.queue_s),
        preprocessing=duration(timings.preprocessing_s),
        inference=duration(timings.inference_s),
    )


async def build(num_parts: int, make: Callable[[], Response], *, most_on_loop: int = _MAX_PARTS_ON_LOOP) -> Response:
    """Makes a response of `num_parts` small messages, off the event loop if they are many.

    A thousand take a millisecond; 256 texts with 1,000 labels each would block the event loop for a second.
    """
    return await off_loop(num_parts, make, most_on_loop=most_on_loop)


def label_scores(labels: Iterable[ScoredLabel]) -> list[common_pb2.LabelScore]:
    """Converts labels and their probabilities to messages."""
    return [
        common_pb2.LabelScore(label=scored.label, probability=scored.probability, selected=scored.is_selected)
        for scored in labels
    ]


def text_inputs(request: Any) -> TextInputs:
    """Reads the texts, or pairs of texts, of a request."""
    return TextInputs(texts=list(request.texts), text_pairs=list(request.text_pairs) or None, truncate=request.truncate)


def text_span(span: tuple[int, int]) -> common_pb2.TextSpan:
    """Converts a span, first character and exclusive end, to a message."""
    return common_pb2.TextSpan(start=span[0], end=span[1])


def box(sides: Iterable[float]) -> common_pb2.Box:
    """Converts left, top, right and bottom in pixels to a message."""
    left, top, right, bottom = sides
    return common_pb2.Box(left=left, top=top, right=right, bottom=bottom)


def duration(seconds: float) -> Duration:
    """Converts seconds to a `Duration`, to the nanosecond."""
    whole, nanos = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)


def set_fields(message: Message) -> dict[str, Any]:
    """Returns the set fields of a message by name; repeated ones as tuples."""
    return {
        field.name: value if isinstance(value, bool | int | float | str | bytes | Message) else tuple(value)
        for field, value in message.ListFields()
    }
