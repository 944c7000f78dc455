"""Generation as it is served."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Elements
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

import numpy as np

from headway_server.bundles import TOKENIZER_FILE, Bundle, Precision
from headway_server.engine.interfaces import Decoder
from headway_server.engine.model import Decoded, DecodingModel, call_timings
from headway_server.engine.reply import Piece, Reply
from headway_server.engine.request import FittedPrompt, SamplingPlan, SamplingRequest, plan_sampling
from headway_server.engine.runner import DecoderRunner
from headway_server.engine.sequence import Sequence, SequenceResult
from headway_server.engine.settings import EngineSettings
from headway_server.engine.text import TextAssembly
from headway_server.preprocessing import TextTokenizer
from headway_server.runtime import Runtime

_CONTEXT_TOKENS = 16
"""Tokens of a prompt that may matter for how its continuation reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedText:
    """A continuation."""

    result: SequenceResult
    num_prompt_tokens: int
    truncated: bool
    seed: int


class GenerationModel(DecodingModel):
    """Continues prompts."""

    _noun = "prompts"
    _field = "prompts"

    @classmethod
    def load(
        cls, bundle: Bundle, runtime: Runtime, settings: EngineSettings, *, precision: Precision | None = None
    ) -> Self:
        """Loads the variant that was asked for, or the one that suits the runtime.

        Raises:
            BundleError: A graph or the tokenizer cannot be loaded, or does not fit the manifest.
            RuntimeUnavailableError: The bundle has no such variant.
        """
        chosen, variant = runtime.choose_variant(bundle.manifest, precision)
        decoder = DecoderRunner(runtime, bundle, variant, num_slots=settings.num_slots)
        model = cls(
            bundle,
            precision=chosen,
            device=runtime.device,
            tokenizer=TextTokenizer.load(bundle.file(TOKENIZER_FILE)),
            decoder=decoder,
            settings=settings,
        )
        model._check_runs(lambda: model._run_once(decoder))
        return model

    def _run_once(self, decoder: Decoder) -> None:
        """Runs each kind of step with the largest id, which a graph with a smaller embedding does not take."""
        largest = np.array([self._tokenizer.largest_id])
        decoder.prefill(0, largest, 0)
        decoder.decode(largest, np.ones(1, np.int64))

    async def generate(
        self,
        prompts: Elements[str],
        *,
        fields: Elements[str],
        sampling: SamplingRequest,
        truncate: bool,
        deadline: float | None,
    ) -> Decoded[GeneratedText]:
        """Continues prompts; all of them, or none.

        Args:
            prompts: Prompts of at least one character.
            fields: What the request calls each of them, for messages.
            sampling: How to choose tokens, for every prompt.
            truncate: Whether a prompt past the limit is shortened at its beginning instead of refused.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: A parameter or prompt is out of its range, there is no room, the deadline passed, the server
                is draining.
        """
        plan = self._plan(sampling)
        with self._admit(len(prompts)):
            began = time.monotonic()
            fitted = await self._fit(prompts, fields, plan, truncate)
            preprocessing_s = time.monotonic() - began
            sequences = [self._sequence(prompt, plan, deadline, wants_pieces=False) for prompt in fitted]
            results = await self._engine.run(sequences)
        return _generated(sequences, fitted, results, preprocessing_s)

    async def stream(
        self, prompt: str, *, field: str, sampling: SamplingRequest, truncate: bool, deadline: float | None
    ) -> AsyncGenerator[Piece | Decoded[GeneratedText], None]:
        """Continues a prompt: yields pieces of text as they appear, and last the answer.

        Args and errors are those of `generate`.
        """
        plan = self._plan(sampling)
        with self._admit(1):
            began = time.monotonic()
            fitted = await self._fit([prompt], [field], plan, truncate)
            preprocessing_s = time.monotonic() - began
            sequence = self._sequence(fitted[0], plan, deadline, wants_pieces=True)
            async with aclosing(self._engine.stream(sequence)) as pieces:
                async for piece in pieces:
                    yield piece
            yield _generated([sequence], fitted, [sequence.reply.result.result()], preprocessing_s)

    def _plan(self, sampling: SamplingRequest) -> SamplingPlan:
        return plan_sampling(sampling, defaults=self.bundle.manifest.sampling_defaults, limits=self.limits)

    async def _fit(
        self, prompts: Elements[str], fields: Elements[str], plan: SamplingPlan, truncate: bool
    ) -> list[FittedPrompt]:
        """Tokenizes prompts, without the post-processor: what it adds at an end would end the prompt."""
        encoded = await self._tokenizer.encode_batch(prompts, add_special_tokens=False)
        return [
            plan.fit(prompt.input_ids, field=field, limits=self.limits, truncate=truncate)
            for prompt, field in zip(encoded, fields, strict=True)
        ]

    def _sequence(
        self, prompt: FittedPrompt, plan: SamplingPlan, deadline: float | None, *, wants_pieces: bool
    ) -> Sequence:
        parameters = plan.for_prompt(prompt)
        text = TextAssembly(
            self._tokenizer.decode,
            context_ids=prompt.input_ids[-_CONTEXT_TOKENS:].tolist(),
            stop_strings=parameters.stop_strings,
            eager=wants_pieces,
        )
        return Sequence(
            input_ids=prompt.input_ids,
            parameters=parameters,
            text=text,
            reply=Reply(),
            eos_id=self._eos_id,
            deadline=deadline,
            wants_pieces=wants_pieces,
        )


def _generated(
    sequences: Elements[Sequence],
    prompts: Elements[FittedPrompt],
    results: Elements[SequenceResult],
    preprocessing_s: float,
) -> Decoded[GeneratedText]:
    texts = [
        GeneratedText(
            result=result,
            num_prompt_tokens=len(prompt.input_ids),
            truncated=prompt.truncated,
            seed=sequence.parameters.seed,
        )
        for sequence, prompt, result in zip(sequences, prompts, results, strict=True)
    ]
    return Decoded(results=texts, timings=call_timings(results, preprocessing_s))
