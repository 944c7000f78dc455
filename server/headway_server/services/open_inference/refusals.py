"""Extensions of Triton that the server does not have: each method is refused by name, with what to do instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NoReturn

from google.protobuf.empty_pb2 import Empty

from headway_server.errors import NotOfferedError
from headway_server.services.procedure import PARSED_ON_LOOP_BYTES, Procedure

NO_SHARED_MEMORY: Final = (
    "shared memory is not offered; send the elements in the request, in raw_input_contents or as binary data over HTTP"
)
REFUSED: Final[Mapping[str, str]] = {
    **{
        f"{kind}SharedMemory{verb}": NO_SHARED_MEMORY
        for kind in ("System", "Cuda")
        for verb in ("Status", "Register", "Unregister")
    },
    "TraceSetting": (
        "settings of traces are not offered; start the server with --trace-endpoint and --trace-sample-ratio"
    ),
    "LogSettings": "settings of the log are not offered; start the server with --log-level and --log-format",
}
"""Sentences by the name of the method."""


def refusals_of(service: str) -> dict[str, Procedure]:
    """Returns the refused methods of the service by full name, to raise NotOfferedError. They read no request."""

    def refuse(sentence: str) -> Callable[[Empty, float | None], Awaitable[NoReturn]]:
        async def answer(_request: Empty, _deadline: float | None) -> NoReturn:
            raise NotOfferedError(sentence)

        return answer

    return {
        (full_name := f"/{service}/{name}"): Procedure(
            name=full_name,
            request_type=Empty,  # every message is one, with unknown fields
            request=Empty.DESCRIPTOR,
            answer=refuse(sentence),
            is_stream=False,
            takes_stream=False,
            max_bytes=PARSED_ON_LOOP_BYTES,
            is_admin=False,
            is_probe=False,
        )
        for name, sentence in REFUSED.items()
    }
