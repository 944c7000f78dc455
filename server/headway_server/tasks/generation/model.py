"""A generation model as it is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from collections.abc import Sequence as Elements
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from typing import Final

import numpy as np

from headway_server.bundles import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Bundle, demanded
from headway_server.decoding.constraints import (
    CompiledConstraint,
    ConstraintCompiler,
    ConstraintRequest,
    ConstraintState,
)
from headway_server.decoding.output.text import Decode, TextAssembly, TokenPlaces
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.rules import TokenRule
from headway_server.decoding.sequence import Delta, Sequence, SequenceResult, share_prompt
from headway_server.errors import FieldName, InvalidInputError
from headway_server.preprocessing import CallForm, ChatTemplate, ReasoningForm
from headway_server.preprocessing.pool import constraint_pool, text_pool
from headway_server.serving.answers import Answer
from headway_server.serving.calls import cache_scope, current_caller
from headway_server.serving.limits import check_text
from headway_server.tasks.decoding import DecodingJob, DecodingModel, ModelParts
from headway_server.tasks.generation.request import (
    FittedPrompt,
    GenerationRequest,
    Prompt,
    PromptReader,
    check_prompts,
)
from headway_server.tasks.generation.thinking import Thinking, ThinkingMarks
from headway_server.tasks.inspection.inspector import InspectedText, inspected_tokens
from headway_server.tasks.inspection.maps import AttentionRequest
from headway_server.tasks.parameters import SamplingPlan, plan_sampling

_STATES_AT_A_TIME: Final = 8
"""States of a constraint that are made before other work is taken up; a few take milliseconds where they are large."""
_VARIABLES_FIELD: Final = "chat_template_kwargs_json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedText:
    """A continuation."""

    text: str
    """What follows the prompt; with `echo`, the prompt and what follows it."""
    result: SequenceResult
    num_prompt_tokens: int
    truncated: bool
    seed: int
    sample: int
    """Number of the continuation among those of its prompt, from 0."""
    places: Callable[[], tuple[int, ...]]
    """Finds at which character of the text each token begins whose log-probability is told, those of the prompt first
    (P + T in all). Takes 10 microseconds a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What a call asks for, checked."""

    prompts: Elements[Prompt]
    fields: Elements[str]
    """What the request calls each of them."""
    request: GenerationRequest
    plan: SamplingPlan
    is_stream: bool


class GenerationModel(DecodingModel):
    """Continues prompts."""

    _noun = "prompts"
    _field = "prompts"

    def __init__(self, bundle: Bundle, parts: ModelParts, *, chat_template: ChatTemplate | None = None) -> None:
        """Makes a model of its parts; without a chat template, the bundle's is loaded if it has one.

        Raises:
            BundleError: The tokenizer, a special token, a default or the chat template does not fit the model.
        """
        super().__init__(bundle, parts)
        self._constraints = ConstraintCompiler(
            parts.tokenizer.library_tokenizer, vocab_size=self.limits.vocab_size, eos_id=self._eos_id
        )
        self._reader = PromptReader(
            parts.tokenizer,
            limits=self.limits,
            chat_template=chat_template or _load_chat_template(bundle),
            prefix=bundle.manifest.prompt_prefix,
            owner=bundle.manifest.name,
        )
        form = self.reasoning_form
        self._marks = None if form is None else ThinkingMarks.of(form, parts.tokenizer)

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token by itself."""
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes of a token by itself; None if they are parts of characters and not known."""
        return self._tokenizer.token_bytes(token_id)

    async def inspect(
        self, text: str, *, request: AttentionRequest, truncate: bool, deadline: float | None
    ) -> InspectedText:
        """Shows what the tokens of a text attend to, which is read at once; args and errors: `TextModel.inspect`.

        `truncate` cuts the beginning off a text that is too long.
        """
        assert self._inspector is not None, "`load` makes it"
        check_text("text", text, self._max_text_bytes)
        prefix = self.bundle.manifest.prompt_prefix
        with self._inspector.begin(request, deadline) as job:
            with job.preparing():
                [encoded] = await self._tokenizer.encode_limited(
                    [text],
                    fields=["text"],
                    max_tokens=self.limits.max_total_tokens - len(prefix),
                    truncate=truncate,
                    add_special_tokens=False,
                    truncation_side="left",
                    with_offsets=True,
                )
                tokens = await inspected_tokens(self._tokenizer, encoded, prefix=prefix)
            item = {"input_ids": np.concatenate([np.array(prefix, np.int64), encoded.input_ids])}
            maps = await job.read(item, field="text", num_tokens=len(tokens))
        return InspectedText(tokens=tokens, maps=maps, truncated=encoded.truncated, timings=job.timings)

    async def generate(
        self, prompts: Elements[Prompt], *, fields: Elements[str], request: GenerationRequest
    ) -> Answer[GeneratedText]:
        """Continues prompts; all of them, or none.

        Args:
            prompts: Prompts of at least one character or token, or conversations of at least one turn.
            fields: What the request calls each of them, for messages.
            request: What is asked for every prompt.

        Raises:
            RequestError: A parameter or prompt is out of its range, the model continues no conversations, there is no
                room, the deadline passed, the server is draining.
        """
        call = self._call(prompts, fields, request)
        with self._begin_samples(call) as job:
            continued = await self._prepare(job, call)
            await job.run([sequence for _, sequence in continued], are_last=True)
        return job.answer([self._generated(call, *one) for one in continued])

    async def stream(
        self, prompt: Prompt, *, field: str, request: GenerationRequest
    ) -> AsyncGenerator[Delta | Answer[GeneratedText], None]:
        """Continues a prompt: yields deltas of the texts of its samples as they appear, and last the answer.

        With `echo` the first delta of each is the prompt, with its log-probabilities if they are asked for. Args and
        errors are those of `generate`.
        """
        call = self._call([prompt], [field], request, is_stream=True)
        with self._begin_samples(call) as job:
            continued = await self._prepare(job, call)
            fitted, sequences = continued[0][0], [sequence for _, sequence in continued]
            places = [self._places(call, fitted) for _ in sequences]
            unread = set[int]()  # samples whose prompt is repeated with its log-probabilities, known with a first token
            if fitted.shown and request.echo and call.plan.parameters.wants_prompt_log_probabilities:
                unread.update(range(len(sequences)))
            elif fitted.shown:
                for sample in range(len(sequences)):
                    yield Delta(output=fitted.shown, num_new_tokens=0, sample=sample)
            async with aclosing(job.stream(sequences, are_last=True)) as deltas:
                async for delta in deltas:
                    if delta.sample in unread:
                        unread.remove(delta.sample)
                        yield await self._echo(fitted, sequences[delta.sample])
                    if delta.tokens:
                        delta = replace(  # noqa: PLW2901 (the same with the places)
                            delta, places=places[delta.sample].push([token.token_id for token in delta.tokens])
                        )
                    yield delta
            for sample in sorted(unread):
                yield await self._echo(fitted, sequences[sample])
            yield job.answer([self._generated(call, *one) for one in continued])

    @property
    def reasoning_form(self) -> ReasoningForm | None:
        """How the model marks what it thinks, by its chat template; None if it does not."""
        return self._reader.reasoning_form

    def call_form(self) -> CallForm:
        """Returns how the model calls tools, by its chat template.

        Raises:
            InvalidInputError: It does not.
            NoChatTemplateError: It has no chat template.
        """
        self._reader.check_kind([()])
        return self._reader.call_form()

    def _call(
        self, prompts: Elements[Prompt], fields: Elements[str], request: GenerationRequest, *, is_stream: bool = False
    ) -> _Call:
        """Checks what a call asks for, before any work is done for it."""
        plan = self._plan(request)
        check_prompts(prompts, fields, self._max_text_bytes)
        self._reader.check_kind(prompts)
        self._reader.check_variables(request.variables, _VARIABLES_FIELD)
        return _Call(prompts=prompts, fields=fields, request=request, plan=plan, is_stream=is_stream)

    def _plan(self, request: GenerationRequest) -> SamplingPlan:
        parameters = request.parameters
        if request.tools is not None:
            parameters = {**parameters, "constraint": request.tools.constraint(self.call_form())}
        plan = plan_sampling(
            parameters,
            defaults=self.bundle.manifest.sampling_defaults,
            limits=self.limits,
            log_probabilities=request.log_probabilities,
        )
        if plan.parameters.thinking_token_budget is not None:
            self._check_budget(plan.parameters)
        return plan

    def _check_budget(self, parameters: SamplingParameters) -> None:
        """Checks that the model can be made to end its thinking.

        Raises:
            InvalidInputError: It does not think, or the mark that ends a thought may not follow.
        """
        field, name = "parameters.thinking_token_budget", self.bundle.manifest.name
        if self._marks is None:
            reason = "has no marks of thinking" if self.reasoning_form is None else "has one that it cannot write"
            raise InvalidInputError(field, f"is set, and the chat template of {name} {reason}; leave it out")
        ends = self._end_ids(parameters) if parameters.min_new_tokens else ()
        forbidden = {*self.bundle.manifest.suppressed_tokens, *ends}
        if forbidden.intersection(self._marks.end_ids):
            raise InvalidInputError(
                field,
                f"is set, and {self._marks.form.end}, which ends the thinking of {name}, is among the tokens that may "
                "not follow; leave it out of stop_token_ids, or leave out ",
                FieldName("min_new_tokens"),
            )

    def _begin_samples(self, call: _Call) -> DecodingJob:
        """Returns the job of every sample of every prompt; too many may be the fault of the sample count."""
        num_prompts, sample_count = len(call.prompts), call.request.sample_count
        count, name = num_prompts * sample_count, self.bundle.manifest.name
        if sample_count > 1 and count > self._capacity:
            raise InvalidInputError(
                "sample_count",
                f"is {sample_count}, with {num_prompts} {self._noun} {count} texts; {name} takes at most "
                f"{self._capacity} at once; ask for fewer, or send the {self._noun} in several calls",
            )
        return self._begin(count, num_tokens=call.plan.new_tokens, num_bytes=0, deadline=call.request.deadline)

    async def _prepare(self, job: DecodingJob, call: _Call) -> list[tuple[FittedPrompt, Sequence]]:
        """Makes the sequences of all samples of prompts, each with its prompt as it is read."""
        with job.preparing():
            constraint = await self._compile(call.plan.constraint)
            fitted = await self._reader.read(
                call.prompts,
                fields=call.fields,
                plan=call.plan,
                truncate=call.request.truncate,
                tools=() if call.request.tools is None else call.request.tools.tools,
                variables=call.request.variables,
            )
            fitted = await self._opened(call, fitted)
            states = await self._start_constraint(call, constraint, fitted)
            return [(prompt, sequence) for prompt in fitted for sequence in self._sequences(call, prompt, states)]

    async def _compile(self, constraint: ConstraintRequest | None) -> CompiledConstraint | None:
        if constraint is None:
            return None
        return await self._constraints.compile_off_loop(constraint, field="parameters.constraint")

    async def _start_constraint(
        self, call: _Call, constraint: CompiledConstraint | None, prompts: Elements[FittedPrompt]
    ) -> Iterator[ConstraintState | None]:
        """Returns the states of the constraint for every sample of every prompt; more than a few are made in a pool."""
        if constraint is None:
            return repeat(None)
        end_ids = self._end_ids(call.plan.parameters)
        started = (
            constraint.start(end_ids=end_ids, follows_text=bool(self._tokenizer.decode(prompt.context_ids)))
            for prompt in prompts
            for _ in range(call.request.sample_count)
        )
        if (count := len(prompts) * call.request.sample_count) <= _STATES_AT_A_TIME:
            return iter(list(started))
        loop, states = asyncio.get_running_loop(), list[ConstraintState]()
        while len(states) < count:
            states += await loop.run_in_executor(constraint_pool(), list, islice(started, _STATES_AT_A_TIME))
        return iter(states)

    def _sequences(self, call: _Call, prompt: FittedPrompt, states: Iterator[ConstraintState | None]) -> list[Sequence]:
        """Makes the sequences of a prompt, one for each sample, which compute the prompt once.

        Each takes the next of the states of the call's constraint.
        """
        request, is_stream = call.request, call.is_stream
        caller, cache_salt = current_caller(), cache_scope(request.cache_salt)
        decode = self._decode(call)
        sequences = [
            Sequence(
                prompt_ids=prompt.input_ids,
                parameters=parameters,
                output=TextAssembly(
                    decode,
                    context_ids=prompt.context_ids,
                    stop_strings=parameters.stop_strings,
                    eager=is_stream,
                ),
                eos_id=self._eos_id,
                more_eos_ids=self._more_eos_ids,
                deadline=request.deadline,
                wants_deltas=is_stream,
                priority=request.priority,
                caller=caller,
                cache_salt=cache_salt,
                rule=self._rule_of(call.plan, prompt, next(states)),
            )
            for parameters in call.plan.for_samples(prompt.max_new_tokens, request.sample_count)
        ]
        if len(sequences) > 1:
            share_prompt(sequences)
        return sequences

    def _rule_of(self, plan: SamplingPlan, prompt: FittedPrompt, answer: ConstraintState | None) -> TokenRule | None:
        """Returns what a text is held to whose answer, after what the model thinks, is held to `answer`."""
        budget = plan.parameters.thinking_token_budget
        if self._marks is None or not self._thinks(plan) or (budget is None and answer is None):
            return answer
        return Thinking(
            self._marks,
            is_open=self._is_open(prompt),
            context_ids=prompt.context_ids,
            budget=budget,
            answer=answer,
            end_ids=self._end_ids(plan.parameters),
        )

    def _end_ids(self, parameters: SamplingParameters) -> frozenset[int]:
        """Returns the tokens that end a text."""
        return self._more_eos_ids.union(parameters.stop_token_ids, () if self._eos_id is None else (self._eos_id,))

    def _thinks(self, plan: SamplingPlan) -> bool:
        """Returns True if a text may begin with what the model thinks, whatever its answer is held to."""
        constraint = plan.constraint
        return constraint is None or constraint.calls is not None or plan.parameters.thinking_token_budget is not None

    def _is_open(self, prompt: FittedPrompt) -> bool:
        """Returns True if a prompt ends where the model is to think."""
        if self.reasoning_form is None:
            return False
        text = prompt.text
        if text is None:
            text = "" if self._marks is None else self._marks.decode(prompt.context_ids)
        return self.reasoning_form.is_open(text)

    async def _opened(self, call: _Call, prompts: Elements[FittedPrompt]) -> list[FittedPrompt]:
        """Completes prompts by what their texts begin with: the prompt, the mark of thinking, or nothing."""
        if not call.request.echo:
            return [replace(prompt, shown=self._mark(call, prompt)) for prompt in prompts]

        def shown(prompt: FittedPrompt) -> FittedPrompt:
            if prompt.truncated or prompt.text is None:  # without what was cut from it
                return replace(prompt, shown=self._tokenizer.decode(prompt.input_ids.tolist()))
            return replace(prompt, shown=prompt.text)

        num_tokens = sum(len(prompt.input_ids) for prompt in prompts)
        return await asyncio.get_running_loop().run_in_executor(
            text_pool(num_tokens), lambda: [shown(prompt) for prompt in prompts]
        )

    def _mark(self, call: _Call, prompt: FittedPrompt) -> str:
        """Returns the mark of thinking if a prompt ends with it and the text is to show it."""
        form = self.reasoning_form if call.request.shows_reasoning and self._thinks(call.plan) else None
        return form.begin if form is not None and self._is_open(prompt) else ""

    def _decode(self, call: _Call) -> Decode:
        """Returns what makes text of the tokens that follow a prompt."""
        shown = frozenset[int]() if call.plan.constraint is None else call.plan.constraint.special_ids
        if call.request.shows_reasoning and self.reasoning_form is not None:
            shown |= {index for _, index in self.reasoning_form.special_tokens}
        return self._tokenizer.decoder(shown)

    def _places(self, call: _Call, prompt: FittedPrompt) -> TokenPlaces:
        """Returns what finds the places of the tokens that follow a prompt."""
        return TokenPlaces(self._decode(call), prompt.context_ids, start=len(prompt.shown))

    def _all_places(self, call: _Call, prompt: FittedPrompt, result: SequenceResult) -> tuple[int, ...]:
        """See `GeneratedText.places`."""
        own = self._places(call, prompt).push([token.token_id for token in result.tokens])
        return self._prompt_places(prompt) + own if result.prompt_tokens else own

    def _prompt_places(self, prompt: FittedPrompt) -> tuple[int, ...]:
        """Returns at which character of a prompt each of its tokens begins; takes long for a long one."""
        if prompt.truncated or prompt.text is None:
            return TokenPlaces(self._tokenizer.decoder()).push(prompt.input_ids.tolist())
        starts = tuple(start for start, _ in self._tokenizer.encode_now(prompt.text, with_offsets=True).offsets)
        return (0,) * (len(prompt.input_ids) - len(starts)) + starts  # the model's own tokens come first

    async def _echo(self, prompt: FittedPrompt, sequence: Sequence) -> Delta:
        """Returns the delta of a prompt that is repeated with its log-probabilities, once the prompt was read."""
        places = await asyncio.get_running_loop().run_in_executor(
            text_pool(len(prompt.input_ids)), self._prompt_places, prompt
        )
        return Delta(
            output=prompt.shown,
            num_new_tokens=0,
            prompt_tokens=tuple(sequence.prompt_tokens),
            places=places,
            sample=sequence.parameters.sample,
        )

    def _generated(self, call: _Call, prompt: FittedPrompt, sequence: Sequence) -> GeneratedText:
        """Returns what became of a sequence that has ended."""
        parameters, result = sequence.parameters, sequence.reply.result.result()
        return GeneratedText(
            text=prompt.shown + result.output,
            result=result,
            num_prompt_tokens=len(prompt.input_ids),
            truncated=prompt.truncated,
            seed=parameters.seed,
            sample=parameters.sample,
            places=partial(self._all_places, call, prompt, result),
        )


def _load_chat_template(bundle: Bundle) -> ChatTemplate | None:
    """Loads the chat template of a bundle that has one.

    Raises:
        BundleError: It cannot be used.
    """
    manifest = bundle.manifest
    if CHAT_TEMPLATE_FILE not in manifest.files:
        return None
    return ChatTemplate.load(
        bundle.file(CHAT_TEMPLATE_FILE),
        tokenizer_file=bundle.file(TOKENIZER_FILE),
        special_tokens=demanded(manifest.special_tokens),
    )
