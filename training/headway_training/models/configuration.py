"""Configurations of models: their checks, their way to and from plain dictionaries, and the fields of a layer."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

Scalar = int | float | str | bool
NormOrder = Literal["pre", "post"]
NormKind = Literal["layer_norm", "rms_norm"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
PositionKind = Literal["learned", "sinusoidal", "rotary", "none"]

HEAD_DIM_MULTIPLE = 8
"""A head's width must be a multiple of this: the cached attention of exported graphs requires it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Base of all configurations: the fields, plain numbers and words, decide a model's shape completely."""

    def to_dict(self) -> dict[str, Scalar]:
        """Returns all fields by name, those with default values included."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Makes a configuration from fields by name, as `to_dict` returns them.

        Raises:
            ValueError: a field is unknown (the message names the most similar one), missing or out of range.
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

    def _check_flags(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, and is {value!r}")

    def _check_share(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, and is {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig(Configuration):
    """What a layer of a transformer is made of.

    The defaults are GPT-2's, except for exact GELU and no dropout. A Llama (Touvron et al. 2023) has `norm_kind`
    rms_norm, `activation` silu, `gated` true, `biases` false and `positions` rotary.

    Raises:
        ValueError: a field is out of range; the message gives the limit and the value.
    """

    d_model: int
    """Width of the hidden states; a multiple of `num_heads`."""
    num_heads: int
    """Attention heads; each is d_model / num_heads wide, a multiple of 8."""
    num_kv_heads: int = 0
    """Key and value heads of self-attention, a divisor of `num_heads`: each serves num_heads / num_kv_heads query heads
    (Ainslie et al. 2023), so that a key/value cache shrinks by that factor. 0: as many as `num_heads`."""
    d_ff: int
    """Inner width of the feed-forward network."""
    dropout: float = 0.0
    """Probability, in training, of dropping an element of the embeddings and of what a sublayer adds; 0 to below 1."""
    norm: NormOrder = "pre"
    """Normalisation before each sublayer (`pre`) or after its residual sum (`post`)."""
    norm_kind: NormKind = "layer_norm"
    """`layer_norm` (Ba et al. 2016), or `rms_norm`, which neither centres nor has a bias (Zhang and Sennrich 2019)."""
    norm_eps: float = 1e-5
    """Added to the variance (or mean square) before a normalisation divides by its root; above 0, below 1."""
    activation: Activation = "gelu"
    """Of the feed-forward network: `relu`, `gelu` (exact), `gelu_tanh` (approximated, as in GPT-2) or `silu`."""
    gated: bool = False
    """The feed-forward network multiplies the activation of one projection by a second projection (Shazeer 2020):
    GEGLU with `gelu`, SwiGLU with `silu`."""
    biases: bool = True
    """The linear maps of layers, and their layer norms, have biases."""
    positions: PositionKind = "learned"
    """`learned` or `sinusoidal` embeddings are added to the tokens'; `rotary` positions turn queries and keys in each
    layer's self-attention (Su et al. 2021); `none`."""

    def __post_init__(self) -> None:
        self._check_integers("d_model", "num_heads", "d_ff")
        self._check_integers("num_kv_heads", minimum=0)
        self._check_choice("norm", NormOrder)
        self._check_choice("norm_kind", NormKind)
        self._check_choice("activation", Activation)
        self._check_choice("positions", PositionKind)
        self._check_flags("gated", "biases")
        self._check_share("dropout")
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads ({self.num_heads}), and is {self.d_model}")
        if self.head_dim % HEAD_DIM_MULTIPLE:
            raise ValueError(
                f"head_dim must be a multiple of {HEAD_DIM_MULTIPLE}, and is {self.head_dim} "
                f"(d_model {self.d_model} / num_heads {self.num_heads}); change one of the two"
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must be a divisor of num_heads ({self.num_heads}), and is {self.num_kv_heads}"
            )
        if not isinstance(self.norm_eps, float) or not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps must be above 0 and below 1, and is {self.norm_eps!r}")

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.d_model // self.num_heads


def nearest(word: str, known: Mapping[str, object]) -> str:
    """Returns the key of `known`, which is not empty, that is most similar to `word`."""
    return difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]
