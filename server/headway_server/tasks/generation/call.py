"""What a generation call asks for, and the sequences that answer it."""

from __future__ import annotations

from dataclasses import dataclass

from headway_server.decoding.constraints import CompiledConstraint, ConstraintRequest
from headway_server.decoding.output.text import TextAssembly
from headway_server.decoding.sequence import Sequence, share_prompt
from headway_server.preprocessing import TextTokenizer
from headway_server.tasks.generation.prompt import FittedPrompt
from headway_server.tasks.parameters import MAX_PRIORITY, MAX_SAMPLES, SamplingPlan, check_range

_CONTEXT_TOKENS = 16
"""Tokens of a prompt that may matter for how its continuation reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """What a call asks for every prompt, checked."""

    plan: SamplingPlan
    constraint: ConstraintRequest | None
    truncate: bool
    deadline: float | None
    sample_count: int = 1
    echo: bool
    priority: int
    wants_deltas: bool = False

    def __post_init__(self) -> None:
        """Checks what does not depend on the model."""
        check_range("sample_count", self.sample_count, 1, MAX_SAMPLES)
        check_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)

    def sequences(
        self,
        prompt: FittedPrompt,
        tokenizer: TextTokenizer,
        eos_id: int | None,
        constraint: CompiledConstraint | None,
    ) -> list[Sequence]:
        """Makes the sequences of a prompt, a sample each, which read it once.

        Args:
            prompt: The prompt.
            tokenizer: The model's.
            eos_id: Token of the model that ends a sequence.
            constraint: What the call's constraint was compiled to.
        """
        context_ids = prompt.input_ids[-_CONTEXT_TOKENS:].tolist()
        follows_text = constraint is not None and bool(tokenizer.decode(context_ids))
        sequences = [
            Sequence(
                prompt_ids=prompt.input_ids,
                parameters=parameters,
                output=TextAssembly(
                    tokenizer.decode,
                    context_ids=context_ids,
                    stop_strings=parameters.stop_strings,
                    eager=self.wants_deltas,
                ),
                eos_id=eos_id,
                deadline=self.deadline,
                wants_deltas=self.wants_deltas,
                priority=self.priority,
                constraint=None
                if constraint is None
                else constraint.start(end_ids=frozenset(parameters.stop_token_ids), follows_text=follows_text),
            )
            for parameters in self.plan.for_samples(prompt.max_new_tokens, self.sample_count)
        ]
        if len(sequences) > 1:
            share_prompt(sequences)
        return sequences
