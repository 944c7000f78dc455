"""What all configurations of models share: checks, and the way to and from plain dictionaries."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

from headway_training.models.parts.feed_forward import Activation
from headway_training.models.parts.positions import PositionKind

Scalar = int | float | str | bool
NormOrder = Literal["pre", "post"]

HEAD_DIM_MULTIPLE = 8
"""The cached attention of the exported graphs wants heads of such a width."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Base of the configurations: they say everything that decides a model's shape, in plain numbers and words."""

    def to_dict(self) -> dict[str, Scalar]:
        """Gives the fields by name, defaults included."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Makes a configuration from fields by name, such as `to_dict` gave.

        Raises:
            ValueError: a field is unknown (the nearest known one is named), missing, or out of its range.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                raise ValueError(f"{cls.__name__} has no field {name!r}; did you mean {nearest(name, fields)!r}?")
        missing = [
            name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values
        ]
        if missing:
            raise ValueError(f"{cls.__name__} needs {', '.join(missing)}")
        return cls(**values)  # __post_init__ checks the values

    def _check_integers(self, *names: str, minimum: int = 1) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ValueError(f"{name} must be an integer of at least {minimum}, and is {value!r}")

    def _check_choice(self, name: str, choices: object) -> None:
        value = getattr(self, name)
        if value not in get_args(choices):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, and is {value!r}")

    def _check_flag(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, and is {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig(Configuration):
    """What one layer is made of.

    Raises:
        ValueError: a field is out of its range; the message gives the limit and the value.
    """

    d_model: int
    """Width of the hidden states; a multiple of `num_heads`."""
    num_heads: int
    """Attention heads; each is d_model / num_heads wide, a multiple of 8."""
    d_ff: int
    """Inner width of the feed-forward network."""
    dropout: float = 0.0
    """Probability, in training, of dropping an element of the embeddings and of what a sublayer adds; 0 to below 1."""
    norm: NormOrder = "pre"
    """Layer normalisation before each sublayer (`pre`) or after its residual sum (`post`)."""
    activation: Activation = "gelu"
    """Of the feed-forward network: `relu` or `gelu`."""
    positions: PositionKind = "learned"
    """Position embeddings: `learned`, `sinusoidal` or `none`."""

    def __post_init__(self) -> None:
        self._check_integers("d_model", "num_heads", "d_ff")
        self._check_choice("norm", NormOrder)
        self._check_choice("activation", Activation)
        self._check_choice("positions", PositionKind)
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads ({self.num_heads}), and is {self.d_model}")
        if self.head_dim % HEAD_DIM_MULTIPLE:
            raise ValueError(
                f"head_dim must be a multiple of {HEAD_DIM_MULTIPLE}, and is {self.head_dim} "
                f"(d_model {self.d_model} / num_heads {self.num_heads}); change one of the two"
            )
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, and is {self.dropout!r}")

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.d_model // self.num_heads


def nearest(word: str, known: Mapping[str, object]) -> str:
    """Finds the known word that is most like `word`; `known` is not empty."""
    return difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]
