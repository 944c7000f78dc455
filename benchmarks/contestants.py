"""What is measured side by side: headway served, headway bare, and other libraries, behind one interface.

All get prompts of the same random words and lengths. A server's are never asked twice, since it would remember them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from limits import BareModel, BareProcess
from peers.environment import PeerProcess
from prompts import PROMPT_SETS, PromptSource
from random_model import RandomModel
from streams import Target, measure_streams
from tokenizers import Tokenizer

_NUM_PROMPTS = 64
"""Prompts of the sides that remember nothing; they go round."""
_SEED = 11

Kind = Literal["served", "bare", "peer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked at a time."""

    case: str
    """A prompt set."""
    num_streams: int
    new_tokens: int
    seconds: float
    """Shortest measurement."""

    @property
    def key(self) -> str:
        """A name for it."""
        return f"{self.case} x {self.num_streams}"


def prompt_source(model: RandomModel, prompt_set: str, *, seed: int = _SEED) -> PromptSource:
    """Returns prompts of a set."""
    shortest, longest = PROMPT_SETS[prompt_set]
    return prompts_between(model, shortest, longest, seed=seed)


def prompts_between(model: RandomModel, shortest: int, longest: int, *, seed: int) -> PromptSource:
    """Returns prompts of a range of lengths."""
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    return PromptSource(tokenizer, shortest=shortest, longest=longest, seed=seed)


class Served:
    """headway's server, streams over gRPC from this process."""

    kind: Kind = "served"

    def __init__(self, model: RandomModel, address: str, precision: str) -> None:
        self.name = f"headway {precision}, served"
        self.precision = precision
        self.target = Target(address=address, model=model.name)
        self._prompts = {prompt_set: prompt_source(model, prompt_set) for prompt_set in PROMPT_SETS}

    def measure(self, load: Load) -> dict[str, Any]:
        """Keeps so many streams busy."""
        return measure_streams(
            self.target,
            self._prompts[load.case],
            num_streams=load.num_streams,
            new_tokens=load.new_tokens,
            seconds=load.seconds,
        )


class Bare:
    """A loop over the same graph: prefill of each prompt, decode in one batch, the likeliest token; no server."""

    kind: Kind = "bare"

    def __init__(
        self, model: RandomModel, process: BareProcess, precision: str, *, num_slots: int, threads: int
    ) -> None:
        self.name = f"headway {precision}, bare loop"
        self.precision = precision
        self._process = process
        self._folder: Path = model.bundle
        self._num_slots = num_slots
        self._threads = threads
        self._texts = {
            prompt_set: tuple(prompt.text for prompt in prompt_source(model, prompt_set).take(_NUM_PROMPTS))
            for prompt_set in PROMPT_SETS
        }

    def measure(self, load: Load) -> dict[str, Any]:
        """Keeps so many rows busy."""
        bare_model = BareModel(
            folder=self._folder,
            precision=self.precision,
            device="cpu",
            num_threads=self._threads,
            inputs=self._texts[load.case],
            new_tokens=load.new_tokens,
            num_slots=self._num_slots,
        )
        return self._process.measure_decoding(bare_model, load.num_streams, load.seconds)


class PeerContestant:
    """Another library, batch after batch in its own process; it is given tokens and gives tokens."""

    kind: Kind = "peer"

    def __init__(self, model: RandomModel, process: PeerProcess) -> None:
        self.name = process.peer.name
        self.precision = process.peer.precision
        self._process = process
        self._prompts = {
            prompt_set: [prompt.token_ids for prompt in prompt_source(model, prompt_set).take(_NUM_PROMPTS)]
            for prompt_set in PROMPT_SETS
        }

    def measure(self, load: Load) -> dict[str, Any]:
        """Runs batches of so many prompts.

        Raises:
            PeerError: It cannot.
        """
        prompts = self._prompts[load.case]
        size = load.num_streams
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        figures: dict[str, Any] = self._process.measure(load.key, batches, load.new_tokens, load.seconds)
        return figures
