"""Abilities of models and requirements of RPCs: the row types of `tasks/table.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, TypeAlias, TypeVar

from headway_server.bundles import Manifest, Precision

KindT = TypeVar("KindT")
PartnerT = TypeVar("PartnerT")
KindT_co = TypeVar("KindT_co", covariant=True)
PartnerT_co = TypeVar("PartnerT_co", covariant=True)


def _anything(*_: object) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ability(Generic[KindT_co]):
    """A capability of models that a call requires. `KindT_co` is the class of the models that have it.

    Families list the abilities of their tasks (`families.py`).
    """

    name: str
    """As in `Model.capabilities` of the protocol."""
    words: str
    """A verb phrase for error messages, such as "embed texts"."""
    needs: Callable[[Manifest], object] = _anything
    """A condition on the manifest, beside its task."""
    prefers: Callable[[Manifest, Precision], object] = _anything
    """A condition on a bundle and its precision, to be chosen for calls without a model's name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairAbility(Ability[KindT_co], Generic[KindT_co, PartnerT_co]):
    """An ability of two models in the same embedding space."""

    partner: Ability[PartnerT_co]
    """The ability of the second model."""


def space_of(manifest: Manifest) -> str:
    """Returns the name of a model's shared embedding space; empty: none."""
    return manifest.embedding.space.name if manifest.embedding and manifest.embedding.space else ""


class Scope(Enum):
    """The subject of an RPC that requires no ability."""

    NAMED = auto()
    """The named model, whatever its abilities."""
    PROBED = auto()
    """The same, but an unknown model is no error."""
    SERVER = auto()
    """The server, or all its models."""


class Effect(Enum):
    """The effect of a call."""

    RUNS = auto()
    """Runs a model."""
    LOOKS = auto()
    """Describes the server and its models."""
    CHANGES = auto()
    """Changes the server; for administrators."""


Asked: TypeAlias = Ability[Any] | Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpc:
    """The requirements of an RPC."""

    asked: Asked
    with_field: Mapping[str, Asked] = field(default_factory=dict)
    """Requirement of requests that set a field, by its name."""
    effect: Effect = Effect.RUNS
    is_of_all: bool = False
    """True if `asked` concerns the models of all processes; their answers are merged."""

    def asked_by(self, value_of: Callable[[str], object]) -> Asked:
        """Returns the requirement of a request.

        Args:
            value_of: Returns the value of a field of the request; something false where it is not set.
        """
        return next((asked for name, asked in self.with_field.items() if value_of(name)), self.asked)

    @property
    def abilities(self) -> Iterator[Ability[Any]]:
        """All abilities that a request may require."""
        return (asked for asked in (self.asked, *self.with_field.values()) if isinstance(asked, Ability))
