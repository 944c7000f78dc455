"""What models can do for calls, and what RPCs ask for: the kinds of rows of `tasks/table.py`."""

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
    """Something that calls ask of a model. `KindT_co` is the class of the models that have it.

    Which tasks have it, their families say (`families.py`).
    """

    name: str
    """As in `Model.capabilities` of the protocol."""
    words: str
    """For messages, such as "embed texts"."""
    needs: Callable[[Manifest], object] = _anything
    """What the manifest must have beside its task."""
    prefers: Callable[[Manifest, Precision], object] = _anything
    """What a bundle must have in a precision to be taken by a call that names no model."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairAbility(Ability[KindT_co], Generic[KindT_co, PartnerT_co]):
    """An ability that a model has together with a second one in the same space."""

    partner: Ability[PartnerT_co]
    """What the second model is made for."""


def space_of(manifest: Manifest) -> str:
    """Returns the name of the space in which a model's vectors can be compared with another's; empty: none."""
    return manifest.embedding.space.name if manifest.embedding and manifest.embedding.space else ""


class Scope(Enum):
    """What an RPC is about that asks for no ability."""

    NAMED = auto()
    """The model that it names, whatever that can do."""
    PROBED = auto()
    """The same, and an answer where there is no such model."""
    SERVER = auto()
    """The server, or all its models."""


class Effect(Enum):
    """What a call does."""

    RUNS = auto()
    """Runs a model."""
    LOOKS = auto()
    """Tells of the server and its models."""
    CHANGES = auto()
    """Changes the server, which administrators may."""


Asked: TypeAlias = Ability[Any] | Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpc:
    """What the calls of an RPC ask for."""

    asked: Asked
    with_field: Mapping[str, Asked] = field(default_factory=dict)
    """What requests ask for that set one of these fields."""
    effect: Effect = Effect.RUNS
    is_of_all: bool = False
    """True if `asked` is about the models of all processes, where they are in several: their answers are joined."""

    def asked_by(self, value_of: Callable[[str], object]) -> Asked:
        """Returns what a request asks for.

        Args:
            value_of: Returns the value of a field of the request; something false where it is not set.
        """
        return next((asked for name, asked in self.with_field.items() if value_of(name)), self.asked)

    @property
    def abilities(self) -> Iterator[Ability[Any]]:
        """All abilities that a request may ask for."""
        return (asked for asked in (self.asked, *self.with_field.values()) if isinstance(asked, Ability))
