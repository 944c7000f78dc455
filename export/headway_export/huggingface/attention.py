"""Attention of `transformers`' models, given from outside.

`transformers` sends the attention of its families through one interface. The function that is registered there calls
what `attending` has put in place, so one adapter serves all models of a kind; rotary positions, norms and grouped heads
stay with the library's own code.

B rows, T tokens, S keys, H heads, G key and value heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol, Unpack, cast

import numpy as np
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from headway_export.errors import SourceError
from headway_export.rounding import is_explained
from headway_training.folders import first_line, quiet
from headway_training.models.parts.attention import Attend, TextScoring

ATTENTION: Final = "headway"
"""Name that models are made with whose attention is given from outside."""


_NAMES: Final = {"bias": "position_bias", "window": "sliding_window"}
"""What `transformers` calls a parameter of attention where it is another name."""
_WIDTH: Final = 8
"""Widths of heads are multiples of it, as the operator on the key/value cache asks for."""
_LOGIT_BOUND: Final = 1e-4
"""Largest relative difference of logits between injected attention and the library's own."""


class LayerAttention(Protocol):
    """Attention of one layer, which is told by its module."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **scoring: Unpack[TextScoring]
    ) -> Tensor:
        """(B, T, H, K), twice (B, S, G, K) -> (B, T, H, K)."""
        ...


_given: ContextVar[LayerAttention] = ContextVar("attention")


@contextmanager
def attending(attention: LayerAttention) -> Iterator[None]:
    """Computes attention by a function in all models that are made with `ATTENTION`."""
    token = _given.set(attention)
    try:
        yield
    finally:
        _given.reset(token)


def layer_of(module: nn.Module) -> int:
    """Returns the number of a layer of attention.

    Raises:
        SourceError: It has none.
    """
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int):
        raise SourceError(f"{type(module).__name__} does not know its number (layer_idx)")
    return number


def injected_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (the attention that is injected has its own)
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer of `transformers`: (B, H, T, K), twice (B, G, S, K) -> (B, T, H, K).

    Raises:
        SourceError: The layer asks for something that injected attention does not take.
    """
    if further.get("alibi") is not None:
        raise SourceError("its attention has alibi beside the scores, which is not known here")
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    given: TextScoring = {
        "bias": position_bias,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "window": sliding_window,
    }
    return _given.get()(module, query, key, value, **given), None


def attend_in_one_width(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, *, layer: int, **scoring: Unpack[TextScoring]
) -> Tensor:
    """Calls `attend` with heads of one width, a multiple of 8, filled up with zeros: they change no score.

    Args:
        attend: Takes keys and values of one width.
        query: (B, T, H, K).
        key: (B, T, G, K).
        value: (B, T, G, V), of another width for latent attention (MiniCPM3, arXiv 2405.04434).
        layer: The caller's number.
        scoring: What differs from softmax(Q K^T / sqrt(K)) V.

    Returns:
        (B, T, H, V).
    """
    own, width = query.shape[-1], value.shape[-1]
    whole = width_of_cache(max(own, width))
    if own == width == whole:
        return attend(query, key, value, layer=layer, **scoring)
    if scoring.get("scale") is None:
        scoring["scale"] = own**-0.5
    query, key, value = (functional.pad(one, (0, whole - one.shape[-1])) for one in (query, key, value))
    return attend(query, key, value, layer=layer, **scoring)[..., :width]


def width_of_cache(width: int) -> int:
    """Returns the width of heads in a cache, whose own width it is filled up from."""
    return -(-width // _WIDTH) * _WIDTH


@contextmanager
def running(owner: str) -> Iterator[None]:
    """Turns what a model with injected attention raises into a sentence about `owner`.

    Raises:
        SourceError: It has raised.
    """
    try:
        with quiet():
            yield
    except SourceError as error:
        raise SourceError(f"{owner}: {error}") from error
    except Exception as error:  # whatever its code raises
        raise SourceError(
            f"{owner} does not run with injected attention ({first_line(error)}); this family is not supported"
        ) from error


def without(scoring: TextScoring, *names: str) -> None:
    """Checks that a layer of attention does without some of its parameters.

    Raises:
        SourceError: It has one, which the exported graph would leave out.
    """
    for name, value in scoring.items():
        if name in names and value is not None:
            raise SourceError(
                f"its attention has {_NAMES.get(name, name)}, which the key/value cache's operator is not given"
            )


transformers.AttentionInterface.register(ATTENTION, injected_attention)


@contextmanager
def asked_logits(model: nn.Module, positions: Tensor) -> Iterator[None]:
    """Lets a model of `transformers` compute its logits (B, P, V) at the asked positions, (P,), alone.

    The output projection is the dearest product, and its result the largest tensor.
    """
    projection = cast("Any", model).get_output_embeddings()
    hook = projection.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, positions], *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


def check_logits(
    found: NDArray[np.float32], expected: NDArray[np.float32], owner: str, again: Callable[[], NDArray[np.float32]]
) -> None:
    """Holds the logits (T, V) of a model with injected attention against those with the library's own.

    Args:
        found: With injected attention.
        expected: Without.
        owner: What the model is called in messages.
        again: Computes `found` once more, to see what rounding does to it.

    Raises:
        SourceError: They differ.
    """
    size = max(np.abs(expected).max(), 1e-6)

    def distance(logits: NDArray[np.float32]) -> float:
        return float(np.abs(logits - found).max() / size)

    error_size = distance(expected)
    if not (error_size <= _LOGIT_BOUND or is_explained(error_size, again, distance)):
        raise SourceError(
            f"{owner} computes something that injected attention leaves out: its logits differ by {error_size:.1e} "
            f"from those of transformers (bound {_LOGIT_BOUND:.0e}), and rounding does not explain it; this family is "
            "not supported"
        )
