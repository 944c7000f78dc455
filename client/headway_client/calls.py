"""A call before it is sent: both clients send it, each in its own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from headway_client.results import Answer, TokenLogProbability

ResponseT = TypeVar("ResponseT", bound=Message)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnaryCall(Generic[ResponseT, ResultT]):
    """A call with one response."""

    path: str
    """Service and method, as gRPC names them: `/package.Service/Method`."""
    request: Message
    response_type: type[ResponseT]
    read: Callable[[ResponseT], ResultT]
    """Makes the result from the response."""


class Piece(Protocol):
    """What every message of a text stream carries."""

    @property
    def text_delta(self) -> str:
        """The next piece of text."""

    @property
    def new_token_count(self) -> int:
        """Tokens produced so far."""


PieceT = TypeVar("PieceT", bound=Piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCall(Generic[PieceT, ResultT]):
    """A call whose response is a stream of pieces of text, the last of which carries the whole result."""

    path: str
    """Service and method, as gRPC names them: `/package.Service/Method`."""
    request: Message
    parse: Callable[[bytes], PieceT]
    """Decodes a message of the stream."""
    read: Callable[[PieceT], Answer[ResultT] | None]
    """Makes the answer from the last message; None for those before it."""
    read_tokens: Callable[[PieceT], tuple[TokenLogProbability, ...]] = lambda _: ()
    """Reads the log-probabilities that came with a message."""


def serialize(message: Message) -> bytes:
    """Encodes a request of any type."""
    return message.SerializeToString()
