"""Served generation model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from collections.abc import Sequence as Elements
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.settings import MAX_IMAGES
from headway_server.bundles import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Bundle, demanded
from headway_server.decoding.constraints import (
    CompiledConstraint,
    ConstraintCompiler,
    ConstraintRequest,
    ConstraintState,
)
from headway_server.decoding.interfaces import PromptMedia
from headway_server.decoding.output.text import Decode, TextAssembly, TextOffsets
from headway_server.decoding.parameters import SamplingParameters
from headway_server.decoding.rules import TokenRule
from headway_server.decoding.sequence import Delta, Sequence, SequenceResult, share_prompt
from headway_server.errors import FieldName, InvalidInputError
from headway_server.observers import ModelUsage
from headway_server.preprocessing import AnswerReader, CallForm, ChatTemplate, PromptEnd, ReasoningForm, Tool
from headway_server.preprocessing.pool import constraint_pool, text_pool
from headway_server.serving.answers import Answer
from headway_server.serving.calls import cache_scope, current_caller
from headway_server.serving.images import SentImage
from headway_server.serving.limits import check_count, check_text, check_token_ids
from headway_server.tasks.decoding import DecodingJob, DecodingModel, ModelParts
from headway_server.tasks.generation.request import (
    CONSTRAINT_FIELD,
    FittedPrompt,
    GenerationRequest,
    Prompt,
    PromptReader,
    ToolUse,
    check_prompts,
)
from headway_server.tasks.generation.thinking import ReasoningDelimiters, Thinking
from headway_server.tasks.inspection.inspector import InspectedText, inspected_tokens
from headway_server.tasks.inspection.maps import AttentionRequest
from headway_server.tasks.parameters import SamplingPlan, plan_sampling
from headway_server.tasks.prompt_images import PlacedImage, place_media, shown_images

_STATES_AT_A_TIME: Final = 8
"""Constraint states made per turn of the pool; large ones take milliseconds each."""
_VARIABLES_FIELD: Final = "chat_template_kwargs_json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedText:
    """A continuation."""

    text: str
    """Continuation of the prompt; with `echo`, the prompt and its continuation."""
    result: SequenceResult
    prompt_ids: NDArray[np.int64]
    """(P,) tokens of the prompt."""
    truncated: bool
    seed: int
    sample: int
    """Index of the continuation among those of its prompt, from 0."""
    text_offsets: Callable[[], tuple[int, ...]]
    """Computes the character offset of each token with a log-probability, prompt tokens first (P + T in all). Takes 10
    microseconds a token."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Validated parameters of a call."""

    prompts: Elements[Prompt]
    fields: Elements[str]
    """Name of each in the request."""
    request: GenerationRequest
    plan: SamplingPlan
    is_stream: bool
    images: Elements[Elements[SentImage]]
    """Images of each prompt; empty if no prompt has any."""


class GenerationModel(DecodingModel):
    """Continues prompts."""

    _noun = "prompts"
    _field = "prompts"

    def __init__(self, bundle: Bundle, parts: ModelParts, *, chat_template: ChatTemplate | None = None) -> None:
        """Assembles a model from its parts; without a chat template, the bundle's is loaded if it has one.

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
            media_tokens=bundle.manifest.media_tokens,
            image_token=None if parts.images is None else parts.images.prompt.token,
            owner=bundle.manifest.name,
        )
        self._images = parts.images
        if parts.images is not None:
            self.workers.append(parts.images.batcher)
        form = self.reasoning_form
        self._delimiters = None if form is None else ReasoningDelimiters.of(form, parts.tokenizer)

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token by itself."""
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes of a token by itself; None if it is part of a character and its bytes are unknown."""
        return self._tokenizer.token_bytes(token_id)

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        field: str,
        add_special_tokens: bool,
        tools: Elements[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        end: PromptEnd = PromptEnd.NEW_TURN,
        images: Elements[SentImage] = (),
    ) -> list[int]:
        """Returns the tokens of a prompt as `generate` reads it, and of any length.

        Args:
            prompt: A text or a conversation.
            field: Its name in the request.
            add_special_tokens: True puts the model's first tokens before a text.
            tools: Tools of a conversation.
            variables: Variables of the chat template.
            end: End of a conversation's prompt.
            images: Images of a conversation.

        Raises:
            RequestError: As `generate`.
        """
        check_prompts([prompt], [field], self._max_text_bytes)
        self._reader.check_kind([prompt])
        self._reader.check_images([prompt])
        self._reader.check_variables(variables or {}, _VARIABLES_FIELD)
        if tools:
            self._reader.call_form()
        with self._begin(1, num_tokens=0, num_bytes=0, deadline=None) as job, job.preparing():
            placed = [] if self._images is None else await self._images.place(images)
            input_ids = await self._reader.tokenize(
                prompt,
                field=field,
                add_special_tokens=add_special_tokens,
                tools=tools,
                variables=variables,
                end=end,
                images=None if self._images is None else self._images.written(placed),
            )
        token_ids: list[int] = input_ids.tolist()
        return token_ids

    async def detokenize(self, token_ids: NDArray[np.int64], *, field: str) -> str:
        """Returns the text of tokens, with the names of special tokens.

        Raises:
            RequestError: A token is not in the vocabulary, or there are too many, or as `generate`.
        """
        check_prompts([token_ids], [field], self._max_text_bytes)
        check_token_ids(field, token_ids, self.limits.vocab_size - 1)
        with self._begin(1, num_tokens=0, num_bytes=0, deadline=None) as job, job.preparing():
            decode = partial(self._tokenizer.decode_whole, token_ids.tolist())
            return await asyncio.get_running_loop().run_in_executor(text_pool(len(token_ids)), decode)

    def token_piece(self, token_id: int) -> str:
        """Returns a token as the vocabulary spells it."""
        return self._tokenizer.piece(token_id)

    def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a text by itself, on the caller's thread."""
        return len(self._tokenizer.encode_now(text).input_ids)

    async def inspect(
        self, text: str, *, request: AttentionRequest, truncate: bool, deadline: float | None
    ) -> InspectedText:
        """Computes the attention maps of a text in one run; args and errors: `TextModel.inspect`.

        `truncate` cuts the beginning off a text that is too long.
        """
        assert self._inspector is not None, "`load` sets it"
        check_text("text", text, self._max_text_bytes)
        prefix = self.bundle.manifest.prompt_prefix
        with self._inspector.begin(request, deadline) as job:
            with job.preparing():
                [encoded] = await self._tokenizer.encode_limited(
                    [text],
                    fields=["text"],
                    max_tokens=self.limits.max_total_tokens - len(prefix),
                    truncate=truncate or self._tokenizer.truncates,
                    add_special_tokens=False,
                    truncation_side="left",
                    with_offsets=True,
                )
                tokens = await inspected_tokens(self._tokenizer, encoded, prefix=prefix)
            item = {"input_ids": np.concatenate([np.array(prefix, np.int64), encoded.input_ids])}
            maps = await job.read(item, field="text", num_tokens=len(tokens))
        return InspectedText(tokens=tokens, maps=maps, truncated=encoded.truncated, timings=job.timings)

    def usage(self) -> ModelUsage:
        """Returns the usage of the engine, and the size of the cache of images' embeddings."""
        usage = super().usage()
        return usage if self._images is None else replace(usage, caches=(*usage.caches, *self._images.usage().caches))

    async def prepare(self, images: Elements[SentImage], *, deadline: float | None) -> Answer[None]:
        """Computes and caches the embeddings of images.

        Args:
            images: 1 to `MAX_IMAGES` images.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: An image cannot be read, there is no room, the deadline passed, the server is draining.
        """
        assert self._images is not None, "the table of tasks asks for models with images"
        check_count("images", len(images), MAX_IMAGES)
        with self._begin(1, num_tokens=0, num_bytes=0, deadline=deadline) as job:
            await self._images.embed(await self._images.place(images), job)
            return job.answer([None for _ in images])

    async def generate(
        self,
        prompts: Elements[Prompt],
        *,
        fields: Elements[str],
        request: GenerationRequest,
        images: Elements[Elements[SentImage]] = (),
    ) -> Answer[GeneratedText]:
        """Continues prompts; all of them, or none.

        Args:
            prompts: Prompts of at least one character or token, or conversations of at least one turn.
            fields: Name of each in the request, for error messages.
            request: Parameters for every prompt.
            images: Images of each prompt, in the order of its turns; empty if no prompt has any.

        Raises:
            RequestError: A parameter or prompt is out of its range, the model has no chat template, the queue is full,
                the
            deadline passed, the server is draining.
        """
        call = self._call(prompts, fields, request, images)
        with self._begin_samples(call) as job:
            continued = await self._prepare(job, call)
            await job.run([sequence for _, sequence in continued], are_last=True)
        return job.answer([self._generated(call, *one) for one in continued])

    def stream(
        self, prompt: Prompt, *, field: str, request: GenerationRequest
    ) -> AsyncGenerator[Delta | Answer[GeneratedText], None]:
        """Continues a prompt as `stream_many` does."""
        return self.stream_many([prompt], fields=[field], request=request)

    async def stream_many(
        self,
        prompts: Elements[Prompt],
        *,
        fields: Elements[str],
        request: GenerationRequest,
        images: Elements[Elements[SentImage]] = (),
    ) -> AsyncGenerator[Delta | Answer[GeneratedText], None]:
        """Continues prompts: yields deltas of their texts as they appear, and last the answer.

        The `sample` of a delta counts the texts of the call, those of a prompt adjacent. With `echo` the first delta of
        each is the prompt, with its log-probabilities if requested. Args and errors are those of `generate`.
        """
        call = self._call(prompts, fields, request, images, is_stream=True)
        with self._begin_samples(call) as job:
            continued = await self._prepare(job, call)
            text_offsets = [self._text_offsets(call, fitted) for fitted, _ in continued]
            unread = set[int]()  # texts whose prompt is repeated with its log-probabilities, known with a first token
            for index, (fitted, _) in enumerate(continued):
                if fitted.shown and request.echo and call.plan.parameters.wants_prompt_log_probabilities:
                    unread.add(index)
                elif fitted.shown:
                    yield Delta(output=fitted.shown, num_new_tokens=0, prompt_ids=fitted.input_ids, sample=index)
            async with aclosing(job.stream([sequence for _, sequence in continued], are_last=True)) as deltas:
                async for delta in deltas:
                    if delta.sample in unread:
                        unread.remove(delta.sample)
                        yield await self._echo(*continued[delta.sample], index=delta.sample)
                    offsets: tuple[int, ...] = ()
                    if delta.tokens:
                        offsets = text_offsets[delta.sample].push([token.token_id for token in delta.tokens])
                    yield replace(delta, text_offsets=offsets, prompt_ids=continued[delta.sample][0].input_ids)
            for index in sorted(unread):
                yield await self._echo(*continued[index], index=index)
            yield job.answer([self._generated(call, *one) for one in continued])

    @property
    def reasoning_form(self) -> ReasoningForm | None:
        """Delimiters of the model's reasoning, from its chat template; None if it has none."""
        return self._reader.reasoning_form

    def answer_reader(self, request: GenerationRequest) -> AnswerReader:
        """Returns a reader for one answer to a request: reasoning and tool calls apart from the text.

        Raises:
            InvalidInputError: The request has tools, and the chat template supports none.
            NoChatTemplateError: The request has tools, and the model has no chat template.
        """
        return AnswerReader(
            reasoning=self.reasoning_form if request.shows_reasoning else None,
            calls=None if request.tools is None else self._call_form(),
        )

    def _call_form(self) -> CallForm:
        self._reader.check_kind([()])
        return self._reader.call_form()

    def _call(
        self,
        prompts: Elements[Prompt],
        fields: Elements[str],
        request: GenerationRequest,
        images: Elements[Elements[SentImage]],
        *,
        is_stream: bool = False,
    ) -> _Call:
        """Validates a call before any work is done for it."""
        plan = self._plan(request)
        check_prompts(prompts, fields, self._max_text_bytes)
        self._reader.check_kind(prompts)
        self._reader.check_images(prompts)
        self._reader.check_variables(request.variables, _VARIABLES_FIELD)
        return _Call(prompts=prompts, fields=fields, request=request, plan=plan, is_stream=is_stream, images=images)

    def _plan(self, request: GenerationRequest) -> SamplingPlan:
        parameters = request.parameters
        if request.tools is not None:
            answer = parameters.get("constraint")
            parameters = {**parameters, "constraint": request.tools.constraint(self._call_form(), answer)}
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
        """Checks that the model's reasoning can be ended by force.

        Raises:
            InvalidInputError: The model does not reason, or the end delimiter of reasoning is forbidden.
        """
        field, name = "parameters.thinking_token_budget", self.bundle.manifest.name
        if self._delimiters is None:
            reason = (
                "has no delimiters of reasoning"
                if self.reasoning_form is None
                else "has a delimiter that its vocabulary cannot write"
            )
            raise InvalidInputError(field, f"is set, and the chat template of {name} {reason}; leave it out")
        ends = self._end_ids(parameters) if parameters.min_new_tokens else ()
        forbidden = {*self.bundle.manifest.suppressed_tokens, *ends}
        if forbidden.intersection(self._delimiters.end_ids):
            raise InvalidInputError(
                field,
                f"is set, and {self._delimiters.form.end}, the end delimiter of {name}'s reasoning, may not follow; "
                "remove it from stop_token_ids, or leave out ",
                FieldName("min_new_tokens"),
            )

    def _begin_samples(self, call: _Call) -> DecodingJob:
        """Returns the job of all samples of all prompts; the error for too many names the sample count."""
        num_prompts, sample_count = len(call.prompts), call.request.sample_count
        count, name = num_prompts * sample_count, self.bundle.manifest.name
        if sample_count > 1 and count > self._capacity:
            raise InvalidInputError(
                "sample_count",
                f"is {sample_count}, with {num_prompts} {self._noun} {count} texts; {name} takes at most "
                f"{self._capacity} at once; ask for fewer, or send the {self._noun} in several calls",
            )
        return self._begin(count, num_tokens=call.plan.expected_new_tokens, num_bytes=0, deadline=call.request.deadline)

    async def _prepare(self, job: DecodingJob, call: _Call) -> list[tuple[FittedPrompt, Sequence]]:
        """Makes the sequences of all samples of prompts, each with its fitted prompt."""
        with job.preparing():
            constraint = await self._compile(call)
            placed = [] if self._images is None else [await self._images.place(images) for images in call.images]
            fitted = await self._reader.read(
                call.prompts,
                fields=call.fields,
                plan=call.plan,
                truncate=call.request.truncate or self._tokenizer.truncates,
                tools=() if call.request.tools is None else call.request.tools.tools,
                variables=call.request.variables,
                hints=call.request.hints,
                end=call.request.end,
                images=[] if self._images is None else [self._images.written(images) for images in placed],
            )
            fitted = await self._opened(call, fitted)
            states = await self._start_constraint(call, constraint, fitted)
        media = [
            await self._embed(
                job, prompt, images, field, wants_prompt=call.plan.parameters.wants_prompt_log_probabilities
            )
            for prompt, images, field in zip(fitted, placed, call.fields, strict=bool(placed))
        ]
        return [
            (prompt, sequence)
            for prompt, embedded in zip(fitted, media or repeat(None), strict=False)
            for sequence in self._sequences(call, prompt, states, embedded)
        ]

    async def _embed(
        self,
        job: DecodingJob,
        prompt: FittedPrompt,
        images: Elements[PlacedImage],
        field: str,
        *,
        wants_prompt: bool,
    ) -> PromptMedia | None:
        """Computes the embeddings of a prompt's images, once it is known to fit and which of them are left of it.

        Raises:
            InvalidInputError: An image is damaged, or was cut where that is not possible, or log-probabilities of a
                prompt are asked for whose tokens see those behind them.
        """
        if self._images is None or not images:
            return None
        of_images = self._images.prompt
        if wants_prompt and of_images.attention == "prompt":
            raise InvalidInputError(
                field,
                f"has no log-probabilities: each token of a prompt of {self.bundle.manifest.name} sees all others; ask "
                "for those of the answer alone",
            )
        shown = shown_images(of_images, images, int(np.count_nonzero(prompt.input_ids == of_images.token)))
        embeddings = await self._images.embed(shown, job)
        return place_media(prompt.input_ids, of_images, shown, embeddings, field=field)

    async def _compile(self, call: _Call) -> CompiledConstraint | None:
        if call.plan.constraint is None:
            return None
        try:
            return await self._constraints.compile_off_loop(call.plan.constraint, field=CONSTRAINT_FIELD)
        except InvalidInputError as error:
            raise error.renamed(partial(_name_of, call.plan.constraint, call.request.tools)) from error

    async def _start_constraint(
        self, call: _Call, constraint: CompiledConstraint | None, prompts: Elements[FittedPrompt]
    ) -> Iterator[ConstraintState | None]:
        """Returns a constraint state for every sample of every prompt; more than a few are made in a pool."""
        if constraint is None:
            return repeat(None)
        end_ids = self._end_ids(call.plan.parameters)
        started = (
            constraint.start(
                end_ids=end_ids,
                follows_text=bool(self._tokenizer.decode(prompt.context_ids)),
                max_tokens=prompt.max_new_tokens,
            )
            for prompt in prompts
            for _ in range(call.request.sample_count)
        )
        if (count := len(prompts) * call.request.sample_count) <= _STATES_AT_A_TIME:
            return iter(list(started))
        loop, states = asyncio.get_running_loop(), list[ConstraintState]()
        while len(states) < count:
            states += await loop.run_in_executor(constraint_pool(), list, islice(started, _STATES_AT_A_TIME))
        return iter(states)

    def _sequences(
        self,
        call: _Call,
        prompt: FittedPrompt,
        states: Iterator[ConstraintState | None],
        media: PromptMedia | None = None,
    ) -> list[Sequence]:
        """Makes the sequences of a prompt, one for each sample; the prompt is computed once.

        Each takes the next constraint state.
        """
        request, is_stream = call.request, call.is_stream
        caller, cache_salt = current_caller(), cache_scope(request.cache_salt)
        decode = self._decode(call)
        sequences = [
            Sequence(
                prompt_ids=prompt.input_ids,
                media=media,
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
        """Returns the rule of a text whose answer, after any reasoning, is constrained by `answer`."""
        budget = plan.parameters.thinking_token_budget
        if self._delimiters is None or not self._thinks(plan) or (budget is None and answer is None):
            return answer
        return Thinking(
            self._delimiters,
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
        """Returns True if a text may begin with reasoning, which no constraint applies to."""
        constraint = plan.constraint
        return constraint is None or constraint.calls is not None or plan.parameters.thinking_token_budget is not None

    def _is_open(self, prompt: FittedPrompt) -> bool:
        """Returns True if a prompt ends with the start delimiter of reasoning."""
        if self.reasoning_form is None:
            return False
        text = prompt.text
        if text is None:
            text = "" if self._delimiters is None else self._delimiters.decode(prompt.context_ids)
        return self.reasoning_form.is_open(text)

    async def _opened(self, call: _Call, prompts: Elements[FittedPrompt]) -> list[FittedPrompt]:
        """Sets the opening of each prompt's text: the prompt, the start delimiter of reasoning, or nothing."""
        if not call.request.echo:
            return [replace(prompt, shown=self._start_delimiter(call, prompt)) for prompt in prompts]

        def shown(prompt: FittedPrompt) -> FittedPrompt:
            if prompt.truncated or prompt.text is None:  # without what was cut from it
                return replace(prompt, shown=self._tokenizer.decode(prompt.input_ids.tolist()))
            return replace(prompt, shown=prompt.text)

        num_tokens = sum(len(prompt.input_ids) for prompt in prompts)
        return await asyncio.get_running_loop().run_in_executor(
            text_pool(num_tokens), lambda: [shown(prompt) for prompt in prompts]
        )

    def _start_delimiter(self, call: _Call, prompt: FittedPrompt) -> str:
        """Returns the start delimiter of reasoning if a prompt ends with it and the text shows delimiters."""
        form = self.reasoning_form if call.request.shows_reasoning and self._thinks(call.plan) else None
        return form.begin if form is not None and self._is_open(prompt) else ""

    def _decode(self, call: _Call) -> Decode:
        """Returns the decoding function of the tokens that follow a prompt."""
        shown = frozenset[int]() if call.plan.constraint is None else call.plan.constraint.special_ids
        if call.request.shows_reasoning and self.reasoning_form is not None:
            shown |= {index for _, index in self.reasoning_form.special_tokens}
        return self._tokenizer.decoder(shown)

    def _text_offsets(self, call: _Call, prompt: FittedPrompt) -> TextOffsets:
        """Returns the function that finds the offsets of the tokens that follow a prompt."""
        return TextOffsets(self._decode(call), prompt.context_ids, start=len(prompt.shown))

    def _all_text_offsets(self, call: _Call, prompt: FittedPrompt, result: SequenceResult) -> tuple[int, ...]:
        """See `GeneratedText.text_offsets`."""
        own = self._text_offsets(call, prompt).push([token.token_id for token in result.tokens])
        return self._prompt_text_offsets(prompt) + own if result.prompt_tokens else own

    def _prompt_text_offsets(self, prompt: FittedPrompt) -> tuple[int, ...]:
        """Returns the character offset of each token of a prompt; slow for a long prompt."""
        if prompt.truncated or prompt.text is None:
            return TextOffsets(self._tokenizer.decoder()).push(prompt.input_ids.tolist())
        starts = tuple(start for start, _ in self._tokenizer.encode_now(prompt.text, with_offsets=True).offsets)
        return (0,) * (len(prompt.input_ids) - len(starts)) + starts  # the model's prefix tokens come first

    async def _echo(self, prompt: FittedPrompt, sequence: Sequence, *, index: int) -> Delta:
        """Returns the delta of an echoed prompt with its log-probabilities, once the prompt is computed."""
        text_offsets = await asyncio.get_running_loop().run_in_executor(
            text_pool(len(prompt.input_ids)), self._prompt_text_offsets, prompt
        )
        return Delta(
            output=prompt.shown,
            num_new_tokens=0,
            prompt_tokens=tuple(sequence.prompt_tokens),
            text_offsets=text_offsets,
            prompt_ids=prompt.input_ids,
            sample=index,
        )

    def _generated(self, call: _Call, prompt: FittedPrompt, sequence: Sequence) -> GeneratedText:
        """Returns the result of a finished sequence."""
        parameters, result = sequence.parameters, sequence.reply.result.result()
        return GeneratedText(
            text=prompt.shown + result.output,
            result=result,
            prompt_ids=prompt.input_ids,
            truncated=prompt.truncated,
            seed=parameters.seed,
            sample=parameters.sample,
            text_offsets=partial(self._all_text_offsets, call, prompt, result),
        )


def _name_of(constraint: ConstraintRequest, tools: ToolUse | None, field: str) -> str:
    """Returns the name in a request of a field of a constraint."""
    field = field if tools is None else tools.name_of(field)
    if not constraint.name:
        return field
    own = rf"^{re.escape(CONSTRAINT_FIELD)}(?:\.(?:json_schema|regex|choices(?:\.texts)?)\b)?"
    return re.sub(own, constraint.name, field)


def _load_chat_template(bundle: Bundle) -> ChatTemplate | None:
    """Loads the chat template of a bundle that has one.

    Raises:
        BundleError: The chat template cannot be used.
    """
    manifest = bundle.manifest
    if CHAT_TEMPLATE_FILE not in manifest.files:
        return None
    return ChatTemplate.load(
        bundle.file(CHAT_TEMPLATE_FILE),
        tokenizer_file=bundle.file(TOKENIZER_FILE),
        special_tokens=demanded(manifest.special_tokens),
    )
