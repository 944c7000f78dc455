"""What a request over HTTP asks for, and one answer of several: each API's own form, as far as placement needs it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from headway_ray.placement import ValueOf
from headway_server.errors import InvalidInputError
from headway_server.services import service_descriptors
from headway_server.serving.abilities import Rpc, Scope
from headway_server.tasks.table import RPCS
from headway_server.transports.http import OPENAI_ABILITIES, read_form

_HEAD_BYTES: Final = 5
"""Of an envelope of Connect: flags, and the length of its message."""
_SERVER: Final = Rpc(asked=Scope.SERVER)
_NAMED: Final = Rpc(asked=Scope.NAMED)
_ALL: Final = Rpc(asked=Scope.SERVER, is_of_all=True)
_METHODS: Final[Mapping[str, MethodDescriptor]] = {
    f"/{service.full_name}/{method.name}": method for service in service_descriptors() for method in service.methods
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request that was received."""

    path: str
    content_type: str
    body: bytes

    def asked(self) -> tuple[Rpc, ValueOf]:
        """Returns which method it is like, and what reads its fields. A body that is none has no fields."""
        if (method := _METHODS.get(self.path)) is not None:
            return RPCS[method.name], self._message(method)
        if (ability := OPENAI_ABILITIES.get(self.path)) is not None:
            is_form = self.content_type.lower().startswith("multipart/")
            fields = _form(self.content_type, self.body) if is_form else _fields(self.body)
            return Rpc(asked=ability), _of_openai(fields.get("model"))
        if self.path.startswith("/v2"):
            return self._open_inference()
        before, _, model = self.path.partition("/v1/models/")
        if model and not before:
            model = model.removesuffix(":predict").replace("/versions/", "/", 1)  # KServe's names of the same
            return _NAMED, _of_openai(model)
        return _ALL if self.path == "/v1/models" else _SERVER, _no_value

    def _open_inference(self) -> tuple[Rpc, ValueOf]:
        match self.path.strip("/").split("/"):
            case ["v2", "models", "stats"]:
                return RPCS["ModelStatistics"], _no_value
            case ["v2", "repository", "index"]:
                return RPCS["RepositoryIndex"], _no_value
            case ["v2", "models", name, "versions", version, *rest]:
                given = {"model": name, "model_version": version}
            case ["v2", "models", name, *rest]:
                given = {"model": name}
            case _:
                return _SERVER, _no_value
        return RPCS["ModelReady"] if rest == ["ready"] else _NAMED, given.get

    def _message(self, method: MethodDescriptor) -> ValueOf:
        kind, body = self.content_type.lower(), self.body
        if kind.startswith("application/connect+"):
            body = body[_HEAD_BYTES:]
        if "json" in kind:
            fields = _fields(body)
            names = {field.name: field.camelcase_name for field in method.input_type.fields}
            return lambda name: fields.get(name) or fields.get(names.get(name, name))
        try:
            message = GetMessageClass(method.input_type).FromString(body)
        except DecodeError:
            return _no_value
        return lambda name: getattr(message, name, None)


def joined(path: str, content_type: str, bodies: Sequence[bytes]) -> bytes:
    """Returns one answer of several, whose lists follow each other; what is alike in them stands once.

    Args:
        path: Of the request.
        content_type: Of the answers: JSON, or protobuf for the path of a method.
        bodies: At least one.
    """
    if "json" in content_type:
        first, *others = map(json.loads, bodies)
        for other in others:
            first = _joined(first, other)
        return json.dumps(first, ensure_ascii=False).encode()
    return joined_messages(GetMessageClass(_METHODS[path].output_type), bodies)


def joined_messages(kind: type[Message], messages: Iterable[bytes]) -> bytes:
    """Returns one message of several; the same for JSON is `joined`."""
    whole = kind()
    for message in messages:
        whole.MergeFromString(message)
    for field, values in whole.ListFields():
        if field.is_repeated and field.message_type is not None:
            once = {value.SerializeToString(deterministic=True): value for value in values}
            if len(once) < len(values):
                kept = list(once.values())
                del values[:]
                values.extend(kept)
    return whole.SerializeToString()


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, list) and isinstance(other, list):
        return one + [each for each in other if each not in one]
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {name: _joined(one[name], value) if name in one else value for name, value in other.items()}
    return one


def _fields(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _form(content_type: str, body: bytes) -> dict[str, Any]:
    try:
        fields = read_form(content_type, body, None)
    except InvalidInputError:
        return {}
    return {"model": fields.get("model", b"").decode(errors="replace")}


def _of_openai(model: object) -> ValueOf:
    name, _, version = model.partition("/") if isinstance(model, str) else ("", "", "")
    return {"model": name, "model_version": version}.get


def _no_value(_: str) -> None:
    return None
