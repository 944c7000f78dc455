"""Rows for tests of the sampler: random parameters, text so far, masks, and the naive sampler's opinion of them."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from naive_decoding import naive_choice, naive_number
from numpy.typing import NDArray

from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.rules import MinimumLength
from headway_server.decoding.sampling.masks import TokenMasks
from headway_server.decoding.sampling.sampler import TokenSampler
from headway_server.decoding.slots import Slots

ROUNDING = 1e-6
"""Share of the weights that float32 may put on the wrong side of a border."""


def pack(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Packs which tokens (V,) are allowed, bit by bit."""
    words = np.zeros(-(-len(allowed) // 32), np.uint32)
    for token in np.flatnonzero(allowed).tolist():
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


def make_parameters(rng: np.random.Generator, vocab_size: int, *, with_edits: bool = True) -> SamplingParameters:
    """Draws parameters, each of them off as often as not."""

    def maybe(off: float, *values: float) -> float:
        return float(rng.choice([*[off] * len(values), *values]))

    num_biases = int(maybe(0, 1, 5)) if with_edits else 0
    biased = rng.choice(vocab_size, min(num_biases, vocab_size), replace=False).tolist()
    edits = {
        "repetition_penalty": maybe(1, 0.5, 1.3, 100),
        "presence_penalty": maybe(0, -1, 1.5),
        "frequency_penalty": maybe(0, -0.5, 2),
        "logit_biases": tuple((token, float(rng.normal() * 5)) for token in biased),
        "min_new_tokens": int(maybe(0, 2, 4)),
    }
    return SamplingParameters(
        max_new_tokens=10,
        temperature=float(rng.choice([0.0, 1e-6, 0.3, 0.8, 1.0, 2.0])),
        top_k=int(maybe(0, 1, 2, min(40, vocab_size), vocab_size, max(vocab_size // 2, 1))),
        top_p=maybe(1.0, 0.05, 0.5, 0.9, 0.999),
        min_p=maybe(0.0, 0.001, 0.1, 1.0),
        seed=int(rng.integers(2**63)),
        sample=int(rng.integers(3)),
        num_top_tokens=[None, 0, 3][rng.integers(3)],
        **(edits if with_edits else {}),
    )


def new_sampler(num_slots: int, vocab_size: int, suppressed_ids: tuple[int, ...] = (), **options: Any) -> TokenSampler:
    """Makes a sampler with masks of its own."""
    masks = TokenMasks(Slots(num_slots), vocab_size=vocab_size, suppressed_ids=suppressed_ids)
    return TokenSampler(masks, **options)


def restrict(sampler: TokenSampler, slot: int, mask: NDArray[np.int32]) -> None:
    """Restricts a slot's next draw, and no other, to what a mask allows."""
    own = sampler.masks.begin(slot)
    own &= mask


def make_sampler(parameters: list[SamplingParameters], vocab_size: int, **options: Any) -> TokenSampler:
    """Makes a sampler whose slots have these parameters."""
    sampler = new_sampler(len(parameters), vocab_size, **options)
    for slot, one in enumerate(parameters):
        sampler.assign(slot, one)
    return sampler


@dataclass(kw_only=True)
class Row:
    """A sequence as the naive sampler sees it."""

    parameters: SamplingParameters
    prompt_ids: NDArray[np.int64]
    end_ids: tuple[int, ...]
    text_ids: list[int] = field(default_factory=list)
    allowed: NDArray[np.bool_] | None = None
    suppressed_ids: tuple[int, ...] = ()

    def assign(self, sampler: TokenSampler, slot: int) -> None:
        """Begins in a slot."""
        sampler.assign(slot, self.parameters, prompt_ids=self.prompt_ids)

    def restrict(self, sampler: TokenSampler, slot: int) -> None:
        """Restricts a slot's next draw to what its mask and its shortest text allow."""
        too_short = MinimumLength(self.end_ids, self.parameters.min_new_tokens - len(self.text_ids))
        if self.allowed is None and too_short.num_left <= 0:
            return
        mask = sampler.masks.begin(slot)
        if self.allowed is not None:
            mask &= pack(self.allowed)
        too_short.allow(mask, np.zeros(0, np.float32))

    def choices(self, logits: NDArray[np.float32]) -> set[int | None]:
        """Returns what the naive sampler chooses, and what it would if weights were a rounding larger or smaller."""
        top_p = self.parameters.top_p
        return {
            self.choice(logits, top_p=min(top_p * (1 + share), 1.0), nudge=nudge)
            for share in (-ROUNDING, 0.0, ROUNDING)
            for nudge in (-ROUNDING, 0.0, ROUNDING)
        }

    def choice(self, logits: NDArray[np.float32], *, top_p: float | None = None, nudge: float = 0.0) -> int | None:
        """Returns what the naive sampler chooses; `nudge` is that of `naive_choice`."""
        return naive_choice(
            logits,
            self.parameters if top_p is None else replace(self.parameters, top_p=top_p),
            naive_number(self.parameters, len(self.text_ids)),
            nudge=nudge,
            prompt_ids=self.prompt_ids.tolist(),
            text_ids=self.text_ids,
            end_ids=self.end_ids,
            forbidden={*self.suppressed_ids, *(() if self.allowed is None else np.flatnonzero(~self.allowed).tolist())},
        )
