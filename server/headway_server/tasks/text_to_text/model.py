"""Served encoder-decoders with text output, and the text-to-text model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Elements
from contextlib import aclosing
from itertools import islice

from headway_server.bundles import Bundle
from headway_server.decoding.sequence import Delta, SequenceResult
from headway_server.errors import BundleError, InvalidInputError, NoAlignmentError
from headway_server.preprocessing import SplitText
from headway_server.preprocessing.pool import text_pool
from headway_server.serving.answers import Answer
from headway_server.serving.limits import check_one_each, check_size_of_call, check_text, check_texts, num_bytes
from headway_server.tasks.decoding import DecodingJob, DecodingModel, ModelParts
from headway_server.tasks.text_to_text.answer import WrittenText, read_result, regroup
from headway_server.tasks.text_to_text.call import Reading, Source, TextToTextCall, rule_bytes
from headway_server.tasks.text_to_text.phrases import PhraseEncoder, Tokens
from headway_server.tasks.text_to_text.reader import Passage, TextReader, whole_texts
from headway_server.tasks.text_to_text.request import MAX_TEXTS, TextToTextRequest, plan_text_to_text

_MAX_REPEATED_SEARCHES = 4
"""Maximum repetitions of a search; then the last output is returned, with any forbidden phrases."""
_SOURCES_AT_A_TIME = 4
"""Glossaries that a thread tokenizes per turn; a large one takes some ten milliseconds."""


class WritingModel(DecodingModel):
    """Base of encoder-decoders with a text for each input: texts and images."""

    _prefix_field = "target_prefix"
    """Name of the output's prefix in a streamed request; unary requests have the plural."""

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Assembles a model from its parts.

        Raises:
            BundleError: The tokenizer or a special token does not match the model, or the manifest has no start token
                of
            the decoder.
        """
        super().__init__(bundle, parts)
        special_tokens = bundle.manifest.special_tokens
        if special_tokens is None or special_tokens.bos is None:
            raise BundleError(f"{bundle.path}: special_tokens.bos is missing; it is the decoder's start token")
        self._bos_id: int = special_tokens.bos
        self._phrases = PhraseEncoder(parts.tokenizer, unknown_id=special_tokens.unk, owner=bundle.manifest.name)

    def _call(self, request: TextToTextRequest, count: int, *, is_stream: bool = False) -> TextToTextCall:
        """Validates a call of `count` inputs, before any work is done for it."""
        manifest, prefixes = self.bundle.manifest, f"{self._prefix_field}es"
        check_one_each(prefixes, len(request.target_prefixes), count)
        check_one_each("phrase_constraints", len(request.phrases), count)
        names = [self._prefix_field] if is_stream else [f"{prefixes}[{index}]" for index in range(count)]
        for name, prefix in zip(names, request.target_prefixes, strict=False):  # may be empty
            if (size := num_bytes(prefix)) > self._max_text_bytes:
                raise InvalidInputError(name, f"has {size} bytes, the limit is {self._max_text_bytes}; shorten it")
        check_size_of_call(prefixes, request.target_prefixes, self._max_text_bytes)
        if request.wants_alignment and manifest.variants[self.precision].alignment_layer is None:
            raise NoAlignmentError(
                f"{manifest.name}/{manifest.version} cannot align: its bundle was exported without the decoder's "
                "attention; export it again, or leave out alignment"
            )
        source_prefix, start_ids = self._start(request)
        plan = plan_text_to_text(
            request,
            num_texts=count,
            limits=self.limits,
            num_slots=self._lanes.num_slots,
            owner=manifest.name,
            num_given=len(start_ids) - 1,
            is_stream=is_stream,
        )
        return TextToTextCall(
            plan=plan,
            request=request,
            tokenizer=self._tokenizer,
            phrases=self._phrases,
            start_ids=start_ids,
            eos_id=self._eos_id,
            prefix_names=names,
            source_prefix=source_prefix,
            is_stream=is_stream,
        )

    def _start(self, request: TextToTextRequest) -> tuple[Tokens, Tokens]:  # noqa: ARG002 (for translations)
        """Returns the tokens before each text, and the start tokens of the decoder."""
        return (), (self._bos_id, *self.bundle.manifest.prompt_prefix)

    async def _sources(self, call: TextToTextCall, readings: Elements[Reading]) -> list[Source]:
        """Tokenizes the prefixes and phrases of outputs, off the event loop."""
        sources = call.sources(readings)
        if not call.has_rules:
            return list(sources)
        pool, loop = text_pool(call.longest_rule), asyncio.get_running_loop()
        read: list[Source] = []
        while len(read) < len(readings):
            read += await loop.run_in_executor(pool, list, islice(sources, _SOURCES_AT_A_TIME))
        return read

    async def _write_source(
        self, job: DecodingJob, call: TextToTextCall, source: Source
    ) -> AsyncGenerator[Delta | WrittenText, None]:
        """Yields deltas of the output of a source, and last the whole output."""
        sequence = call.sequence(source)
        num_given = len(source.prefix_ids)
        unsent: list[str] = []
        async with aclosing(job.stream([sequence], are_last=True)) as deltas:
            async for delta in deltas:
                unsent.append(delta.output)
                if delta.num_new_tokens >= num_given:
                    yield Delta(output="".join(unsent), num_new_tokens=delta.num_new_tokens)
                    unsent = []
        [written] = await self._written(call, [source], [sequence.reply.result.result()], [])
        yield written

    async def _written(
        self,
        call: TextToTextCall,
        sources: Elements[Source],
        results: Elements[SequenceResult],
        splits: Elements[SplitText],
    ) -> list[WrittenText]:
        """Makes the results of sources, and joins those of the sentences of a text."""

        def read() -> list[WrittenText]:
            texts = [
                read_result(source, result, plan=call.plan, tokenizer=self._tokenizer)
                for source, result in zip(sources, results, strict=True)
            ]
            return regroup(texts, splits) if splits else texts

        # Finding the characters of every token takes a while.
        in_pool = call.request.wants_alignment
        return await asyncio.get_running_loop().run_in_executor(text_pool(), read) if in_pool else read()


class TextToTextModel(WritingModel):
    """Text-to-text model; translation adds languages, sentences and alignments."""

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Assembles a model from its parts; errors are those of `WritingModel`."""
        super().__init__(bundle, parts)
        self._reader = TextReader(parts.tokenizer, max_tokens=self.limits.max_input_tokens)
        self._blank = self._reader.blank

    async def write(self, texts: Elements[str], *, request: TextToTextRequest) -> Answer[WrittenText]:
        """Generates an output for each text; all of them, or none.

        Args:
            texts: 1 to `MAX_TEXTS` texts of at least one character.
            request: Parameters of the call.

        Raises:
            RequestError: A parameter or text is out of its range, the bundle cannot align, the queue is full, the
            deadline passed, the server is draining.
        """
        check_texts("texts", texts, MAX_TEXTS, self._max_text_bytes)
        call = self._call(request, len(texts))
        fields = [f"texts[{index}]" for index in range(len(texts))]
        num_tokens, num_bytes = call.plan.num_tokens, call.most_rule_bytes
        with self._begin(len(texts), num_tokens=num_tokens, num_bytes=num_bytes, deadline=request.deadline) as job:
            with job.preparing():
                passages, splits = await self._passages(call, texts, fields)
                if more := len(passages) - len(texts):  # each text is admitted already
                    job.admit(more)
                sources = await self._sources(call, await self._reader.read(call, passages))
            job.reserve(rule_bytes(sources))
            results = await job.run([call.sequence(source) for source in sources])
            if any(source.phrases.forbidden_forms for source in sources):
                sources, results = await self._search_again(job, call, sources, results)
        return job.answer(await self._written(call, sources, results, splits))

    async def stream(
        self, text: str, *, field: str, request: TextToTextRequest
    ) -> AsyncGenerator[Delta | Answer[WrittenText], None]:
        """Generates the output of one text: yields deltas as they appear, and last the answer.

        The first delta has the whole prefix. Args and errors are those of `write`.
        """
        check_text(field, text, self._max_text_bytes)
        call = self._call(request, 1, is_stream=True)
        num_tokens, num_bytes = call.plan.num_tokens, call.most_rule_bytes
        with self._begin(1, num_tokens=num_tokens, num_bytes=num_bytes, deadline=request.deadline) as job:
            with job.preparing():
                readings = await self._reader.read(call, whole_texts([text], [field]))
                [source] = await self._sources(call, readings)
            job.reserve(rule_bytes([source]))
            async with aclosing(self._write_source(job, call, source)) as parts:
                async for part in parts:
                    yield part if isinstance(part, Delta) else job.answer([part])

    async def _passages(
        self,
        call: TextToTextCall,  # noqa: ARG002 (for translations)
        texts: Elements[str],
        fields: Elements[str],
    ) -> tuple[list[Passage], list[SplitText]]:
        """Returns the passages in order, and the splits of texts; no splits if texts stay whole."""
        return whole_texts(texts, fields), []

    async def _search_again(
        self, job: DecodingJob, call: TextToTextCall, sources: Elements[Source], results: Elements[SequenceResult]
    ) -> tuple[list[Source], list[SequenceResult]]:
        """Repeats searches whose outputs contain a forbidden phrase as tokens that were not forbidden."""
        sources, results = list(sources), list(results)
        loop = asyncio.get_running_loop()
        for _ in range(_MAX_REPEATED_SEARCHES):
            found = await loop.run_in_executor(text_pool(), call.forbid_spellings, sources, results)
            if not found:
                break
            again = await job.run([call.sequence(source) for source in found.values()])
            for index, result in zip(found, again, strict=True):
                sources[index], results[index] = found[index], result
        return sources, results
