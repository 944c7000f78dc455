"""Generation as it is served."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from collections.abc import Sequence as Elements
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np

from headway_server.bundles import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Bundle, Precision
from headway_server.decoding.constraints import CompiledConstraint, ConstraintCompiler
from headway_server.decoding.interfaces import Decoder, DraftVerifier
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.sequence import Delta, SequenceResult
from headway_server.decoding.settings import EngineSettings
from headway_server.decoding.speculation.verifier import can_verify, open_verifier
from headway_server.errors import InvalidInputError
from headway_server.observers import NO_OBSERVER, Observer
from headway_server.preprocessing import ChatTemplate, TextTokenizer
from headway_server.runtime import Cores, Device, Runtime
from headway_server.serving.answers import Answer, CallTimings
from headway_server.settings import ServerSettings
from headway_server.tasks.decoding import DecodingModel, open_decoders
from headway_server.tasks.generation.call import GenerationCall
from headway_server.tasks.generation.prompt import FittedPrompt, Prompt, PromptReader
from headway_server.tasks.parameters import LogProbabilityRequest, SamplingPlan, SamplingRequest, plan_sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedText:
    """A continuation."""

    text: str
    """What follows the prompt, after the prompt itself where it was to be repeated."""
    result: SequenceResult
    num_prompt_tokens: int
    truncated: bool
    seed: int
    sample: int
    """Number of the continuation among those of its prompt, from 0."""


class GenerationModel(DecodingModel):
    """Continues prompts."""

    _noun = "prompts"
    _field = "prompts"

    def __init__(
        self,
        bundle: Bundle,
        *,
        precision: Precision,
        device: Device,
        tokenizer: TextTokenizer,
        decoders: Elements[Decoder],
        settings: EngineSettings,
        chat_template: ChatTemplate | None = None,
        verifier: DraftVerifier | None = None,
        cores: Cores | None = None,
    ) -> None:
        """Makes a model of its parts; `load` makes the parts.

        Raises:
            BundleError: The tokenizer, a special token or a default does not fit the model.
        """
        super().__init__(
            bundle,
            precision=precision,
            device=device,
            tokenizer=tokenizer,
            decoders=decoders,
            verifier=verifier,
            cores=cores,
            settings=settings,
        )
        self._constraints = ConstraintCompiler(
            tokenizer.library_tokenizer, vocab_size=self.limits.vocab_size, eos_id=self._eos_id
        )
        self._reader = PromptReader(
            tokenizer, limits=self.limits, chat_template=chat_template, owner=bundle.manifest.name
        )

    @classmethod
    def load(
        cls,
        bundle: Bundle,
        runtime: Runtime,
        settings: ServerSettings,
        observer: Observer = NO_OBSERVER,  # noqa: ARG003 (for what runs to report to)
    ) -> Self:
        """Loads the variant that was asked for, or the one that suits the runtime.

        Raises:
            BundleError: A graph or the tokenizer cannot be loaded, or does not fit the manifest.
            MemoryUnavailableError: The slots that were asked for do not fit.
            RuntimeUnavailableError: The bundle has no such variant.
        """
        chosen, variant = runtime.choose_variant(bundle.manifest, settings.precision)
        speculates = settings.engine.speculation != "off" and can_verify(variant)
        decoders = open_decoders(runtime, bundle, variant, settings.engine, sessions=2 if speculates else 1)
        verifier = (
            None if settings.engine.speculation == "off" else open_verifier(runtime, bundle, variant, decoders[0])
        )
        model = cls(
            bundle,
            precision=chosen,
            device=runtime.device,
            tokenizer=TextTokenizer.load(bundle.file(TOKENIZER_FILE)),
            chat_template=_load_chat_template(bundle),
            decoders=decoders,
            verifier=verifier,
            cores=runtime.cores,
            settings=settings.engine,
        )
        model._check_runs(lambda: model._run_once(decoders[0]))
        return model

    def _run_once(self, decoder: Decoder) -> None:
        """Runs each kind of step with the largest id, which a graph with a smaller embedding does not take."""
        largest = np.array([self._tokenizer.largest_id])
        decoder.prefill(0, largest, 0)
        decoder.decode(largest, np.ones(1, np.int64))

    def token_text(self, token_id: int) -> str:
        """Returns a token by itself, as it reads within a text."""
        return self._tokenizer.token_text(token_id)

    async def generate(
        self,
        prompts: Elements[Prompt],
        *,
        fields: Elements[str],
        sampling: SamplingRequest,
        truncate: bool,
        deadline: float | None,
        sample_count: int = 1,
        echo: bool = False,
        log_probabilities: LogProbabilityRequest | None = None,
        priority: int = 0,
    ) -> Answer[GeneratedText]:
        """Continues prompts; all of them, or none.

        Args:
            prompts: Prompts of at least one character, or conversations of at least one turn.
            fields: What the request calls each of them, for messages.
            sampling: How to choose tokens, for every prompt.
            truncate: Whether a prompt past the limit is shortened at its beginning instead of refused.
            deadline: When the caller stops waiting, by `time.monotonic`.
            sample_count: Continuations of each prompt; those of one follow each other in the answer.
            echo: Whether texts begin with their prompts.
            log_probabilities: Which are wanted; None is none.
            priority: Place in the queue: higher ones go first.

        Raises:
            RequestError: A parameter or prompt is out of its range, the model continues no conversations, there is no
                room, the deadline passed, the server is draining.
        """
        call = GenerationCall(
            plan=self._plan(sampling, log_probabilities),
            constraint=sampling.constraint,
            truncate=truncate,
            deadline=deadline,
            sample_count=sample_count,
            echo=echo,
            priority=priority,
        )
        self._reader.check_kind(prompts)
        with self._admit_samples(fields, sample_count):
            began = time.monotonic()
            constraint = await self._compile(call)
            fitted = await self._reader.read(prompts, fields=fields, plan=call.plan, truncate=truncate)
            preprocessing_s = time.monotonic() - began
            pairs = [
                (prompt, sequence)
                for prompt in fitted
                for sequence in call.sequences(prompt, self._tokenizer, self._eos_id, constraint)
            ]
            results = await self._lanes.run([sequence for _, sequence in pairs])
        texts = [
            self._generated(prompt, sequence.parameters, result, call)
            for (prompt, sequence), result in zip(pairs, results, strict=True)
        ]
        return Answer(results=texts, timings=CallTimings.of(results, preprocessing_s=preprocessing_s))

    async def stream(
        self,
        prompt: Prompt,
        *,
        field: str,
        sampling: SamplingRequest,
        truncate: bool,
        deadline: float | None,
        echo: bool = False,
        log_probabilities: LogProbabilityRequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Delta | Answer[GeneratedText], None]:
        """Continues a prompt: yields deltas of the text as they appear, and last the answer.

        With `echo` the first delta is the prompt. Args and errors are those of `generate`.
        """
        call = GenerationCall(
            plan=self._plan(sampling, log_probabilities),
            constraint=sampling.constraint,
            truncate=truncate,
            deadline=deadline,
            echo=echo,
            priority=priority,
            wants_deltas=True,
        )
        self._reader.check_kind([prompt])
        with self._admit(1):
            began = time.monotonic()
            constraint = await self._compile(call)
            (fitted,) = await self._reader.read([prompt], fields=[field], plan=call.plan, truncate=truncate)
            preprocessing_s = time.monotonic() - began
            (sequence,) = call.sequences(fitted, self._tokenizer, self._eos_id, constraint)
            if echo:
                yield Delta(output=self._echo(fitted), num_new_tokens=0)
            async with aclosing(self._lanes.stream(sequence)) as deltas:
                async for delta in deltas:
                    yield delta
            result = sequence.reply.result.result()
            text = self._generated(fitted, sequence.parameters, result, call)
            yield Answer(results=[text], timings=CallTimings.of([result], preprocessing_s=preprocessing_s))

    def _plan(self, sampling: SamplingRequest, log_probabilities: LogProbabilityRequest | None) -> SamplingPlan:
        return plan_sampling(
            sampling,
            defaults=self.bundle.manifest.sampling_defaults,
            limits=self.limits,
            log_probabilities=log_probabilities,
        )

    @contextmanager
    def _admit_samples(self, fields: Elements[str], sample_count: int) -> Iterator[None]:
        """Holds a permit for every sample of every prompt; what is wrong with too many may be the samples."""
        count = len(fields) * sample_count
        if sample_count > 1 and count > self._capacity:
            raise InvalidInputError(
                "sample_count",
                f"is {sample_count}, with {len(fields)} {self._noun} {count} texts; {self.bundle.manifest.name} "
                f"takes at most {self._capacity} at once; ask for fewer, or send the {self._noun} in several calls",
            )
        with self._admit(count):
            yield

    async def _compile(self, call: GenerationCall) -> CompiledConstraint | None:
        if call.constraint is None:
            return None
        return await self._constraints.compile_off_loop(call.constraint, field="parameters.constraint")

    def _generated(
        self, prompt: FittedPrompt, parameters: SamplingParameters, result: SequenceResult, call: GenerationCall
    ) -> GeneratedText:
        return GeneratedText(
            text=self._echo(prompt) + result.output if call.echo else result.output,
            result=result,
            num_prompt_tokens=len(prompt.input_ids),
            truncated=prompt.truncated,
            seed=parameters.seed,
            sample=parameters.sample,
        )

    def _echo(self, prompt: FittedPrompt) -> str:
        """Returns the prompt as its text continues it: what was cut from it is not there."""
        return self._tokenizer.decode(prompt.input_ids.tolist()) if prompt.truncated else prompt.text


def _load_chat_template(bundle: Bundle) -> ChatTemplate | None:
    """Loads the chat template of a bundle that has one.

    Raises:
        BundleError: It cannot be used.
    """
    manifest = bundle.manifest
    if CHAT_TEMPLATE_FILE not in manifest.files:
        return None
    assert manifest.special_tokens is not None, "the manifest's validator demands it"
    return ChatTemplate.load(
        bundle.file(CHAT_TEMPLATE_FILE),
        tokenizer_file=bundle.file(TOKENIZER_FILE),
        special_tokens=manifest.special_tokens,
    )
