"""What a beam search is asked for, and what it finds.

The search is that of Sutskever et al. 2014 (arXiv 1409.3215, section 3.2), with the bookkeeping that the field has
agreed on since. A sentence has K beams, each a text so far with its log-probability. At a step:

1. All K x V continuations are ranked by log-probability; of these the best 2 K are looked at.
2. A continuation that ends the sentence becomes a hypothesis if it is among the best K, and is passed over if it is
   not. Its score is its log-probability divided by (tokens ** length_penalty); the end counts as a token.
3. The best K of the others are the beams from now on.
4. The K best hypotheses are kept. Whether the search ends with K of them, `EarlyStopping` says; when a translation may
   have no more tokens, the beams are hypotheses as they stand, by the same score.

Ties go to the lower beam, then to the lower token id.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from headway_server.decoding.sequence import FinishReason

MAX_BEAMS = 16
"""Most beams of a sentence."""


class EarlyStopping(Enum):
    """When a search with K hypotheses ends."""

    FIRST = "first"
    """At once."""
    HEURISTIC = "heuristic"
    """When the best beam, if it ended now, would score no better than the worst of the K."""
    NEVER = "never"
    """When no continuation of a beam can score better than the worst of the K: with a positive length penalty the best
    beam at the greatest length it may reach is compared, otherwise as it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchParameters:
    """How to search for a translation. Checked where it is made, `tasks/translation/request.py`."""

    beam_size: int = 1
    """K, 1 to `MAX_BEAMS`; 1 follows the likeliest token alone."""
    num_hypotheses: int = 1
    """Hypotheses to hand out, 1 to K."""
    length_penalty: float = 1.0
    """Exponent of the length that a log-probability is divided by; above 1 favours long translations."""
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    no_repeat_ngram_size: int = 0
    """No n tokens may follow each other twice in a translation; 0 allows it."""
    prefix_ids: tuple[int, ...] = ()
    """Tokens that the translation begins with; they are part of it, and of its log-probability."""
    required_phrases: tuple[tuple[int, ...], ...] = ()
    """Phrases that must appear, as tokens."""
    forbidden_phrases: tuple[tuple[int, ...], ...] = ()
    """Phrases that must not appear, as tokens."""
    wants_alignment: bool = False
    """Whether each token's attention over the source is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A translation that a search has found."""

    token_ids: tuple[int, ...]
    """Its tokens, those of the prefix included, the end of the sequence left out."""
    text: str
    log_probability: float
    """Sum of the natural logarithms of its tokens' probabilities, prefix and end of the sequence included."""
    score: float
    """What hypotheses are ranked by."""
    num_new_tokens: int
    """Tokens produced, the end of the sequence included."""
    finish_reason: FinishReason
    alignment: NDArray[np.float32] | None = None
    """(len(token_ids), S) each token's attention over the S source tokens; rows sum to one."""
