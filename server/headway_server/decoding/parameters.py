"""How a caller wants a sequence's tokens to be chosen: by sampling, or by a beam search."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from headway_server.field_rules import maximum

MAX_BEAMS = maximum("DecodingParameters.beam_size")
"""Maximum beams of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How to choose tokens, already checked (`tasks/parameters.py`). `sampling/sampler.py` defines each exactly."""

    max_new_tokens: int
    """Maximum new tokens."""
    temperature: float = 0.0
    """Softmax temperature; 0 is greedy."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 turns it off."""
    top_p: float = 1.0
    """Sample among the smallest set of tokens whose probabilities add up to p (the nucleus)."""
    min_p: float = 0.0
    """Leave out tokens less likely than this fraction of the likeliest one's probability; 0 turns it off."""
    seed: int = 0
    """Seed of the random stream, 0 to 2**64 - 1."""
    sample: int = 0
    """Index of the sample among those of one seed."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text, as the end-of-sequence token does."""
    min_new_tokens: int = 0
    """Tokens to produce before the end-of-sequence token or a stop token may follow."""
    thinking_token_budget: int | None = None
    """Tokens that the model may think, after which it is made to answer; None: no limit. `Thinking` enforces it."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens of the prompt and of the text so far."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens of the text so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for every time it is in the text so far."""
    logit_biases: tuple[tuple[int, float], ...] = ()
    """Distinct tokens with the values added to their logits."""
    num_top_tokens: int | None = None
    """Number of likeliest tokens with log-probabilities at each position, besides the chosen one; None: none."""
    scored_token_ids: tuple[int, ...] = ()
    """Further tokens whose log-probabilities are wanted at each position, wherever they rank; with `num_top_tokens`."""
    wants_prompt_log_probabilities: bool = False
    """True returns the log-probabilities of the prompt's tokens too."""


class EarlyStopping(Enum):
    """When a search that has K hypotheses ends."""

    FIRST = "first"
    """At once."""
    HEURISTIC = "heuristic"
    """When the best beam, if it ended now, would score no better than the worst of the K."""
    NEVER = "never"
    """When no continuation of a beam can score better than the worst of the K. With a positive length penalty the best
    beam is scored at the greatest length it may reach, otherwise as it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchParameters:
    """How to search with beams, already checked (`tasks/text_to_text/request.py`)."""

    beam_size: int = 1
    """K, 1 to `MAX_BEAMS`; 1 is greedy decoding."""
    num_hypotheses: int = 1
    """Hypotheses to return, 1 to K."""
    length_penalty: float = 1.0
    """Exponent of the length that a log-probability is divided by; above 1 favours long outputs."""
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    no_repeat_ngram_size: int = 0
    """n-grams of this size may not repeat; 0: no limit."""
    min_new_tokens: int = 0
    """Tokens to produce before the end may follow."""
    prefix_ids: tuple[int, ...] = ()
    """Tokens that the output begins with. They are part of it and of its log-probability."""
    required_phrases: tuple[tuple[int, ...], ...] = ()
    """Phrases that must appear, as tokens."""
    forbidden_phrases: tuple[tuple[int, ...], ...] = ()
    """Phrases that must not appear, as tokens."""
    wants_alignment: bool = False
    """True returns each token's attention over the source."""
    num_given: int = 0
    """Tokens that the decoder is given after the first one, such as that of a language: the length that a
    log-probability is divided by counts them."""
