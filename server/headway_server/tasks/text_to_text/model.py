"""An encoder-decoder as it is served: it reads a text and writes another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Elements
from contextlib import aclosing
from itertools import islice

import numpy as np

from headway_server.bundles import Bundle
from headway_server.decoding.interfaces import Decoder, Encoder, EncoderInput
from headway_server.decoding.sequence import Delta, SequenceResult
from headway_server.errors import BundleError, InvalidInputError, NoAlignmentError
from headway_server.preprocessing import EncodedText, SplitText
from headway_server.preprocessing.pool import text_pool
from headway_server.serving.answers import Answer
from headway_server.serving.limits import check_size_of_call, check_text, check_texts, num_bytes
from headway_server.tasks.decoding import DecodingJob, DecodingModel, ModelParts
from headway_server.tasks.text_to_text.answer import WrittenText, read_result, regroup
from headway_server.tasks.text_to_text.call import (
    Passage,
    Source,
    TextToTextCall,
    named_passages,
    rule_bytes,
    whole_texts,
)
from headway_server.tasks.text_to_text.phrases import PhraseEncoder, Tokens
from headway_server.tasks.text_to_text.request import MAX_TEXTS, TextToTextRequest, plan_text_to_text

_MAX_REPEATED_SEARCHES = 4
"""Most repetitions of a search; after these the last output is returned, whatever phrases it has."""
_SOURCES_AT_A_TIME = 4
"""Glossaries that a thread encodes before it takes other work: a large one takes some ten milliseconds."""


class TextToTextModel(DecodingModel):
    """Writes a text for each text; translation adds languages, sentences and alignments."""

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Makes a model of its parts.

        Raises:
            BundleError: The tokenizer or a special token does not fit the model, or the manifest names no token that
                its decoder starts from.
        """
        super().__init__(bundle, parts)
        special_tokens = bundle.manifest.special_tokens
        if special_tokens is None or special_tokens.bos is None:
            raise BundleError(f"{bundle.path}: special_tokens.bos is missing; its decoder starts from it")
        self._bos_id: int = special_tokens.bos
        self._phrases = PhraseEncoder(parts.tokenizer, unknown_id=special_tokens.unk, owner=bundle.manifest.name)

    def _run_once(self, decoder: Decoder, encoder: Encoder | None) -> None:
        """See `DecodingModel`; the token that the decoder starts from is tried too."""
        assert encoder is not None, "the manifest's validator demands the graph"
        decoder.set_sources(encoder.encode([EncoderInput.of_tokens(np.array([self._tokenizer.largest_id]))]))
        for token_id in (self._bos_id, self._tokenizer.largest_id):
            decoder.decode(np.array([token_id]), np.zeros(1, np.int64))
        decoder.set_sources([])

    async def write(self, texts: Elements[str], *, request: TextToTextRequest) -> Answer[WrittenText]:
        """Writes a text for each text; all of them, or none.

        Args:
            texts: 1 to `MAX_TEXTS` texts of at least one character.
            request: What is asked for beside them.

        Raises:
            RequestError: A parameter or text is out of its range, the bundle cannot align, there is no room, the
                deadline passed, the server is draining.
        """
        check_texts("texts", texts, MAX_TEXTS, self._max_text_bytes)
        request.check_one_each(len(texts))
        self._check_prefixes(request.target_prefixes, "target_prefixes[{}]")
        call = self._call(request, len(texts))
        fields = [f"texts[{index}]" for index in range(len(texts))]
        num_tokens, num_bytes = call.plan.num_tokens, call.most_rule_bytes
        with self._begin(len(texts), num_tokens=num_tokens, num_bytes=num_bytes, deadline=request.deadline) as job:
            with job.preparing():
                passages, splits = await self._passages(call, texts, fields)
                if more := len(passages) - len(texts):  # each text has a place already
                    job.admit(more)
                sources = await self._read(call, passages)
            job.hold(rule_bytes(sources))
            results = await job.run([call.sequence(source) for source in sources])
            if any(source.phrases.forbidden_forms for source in sources):
                sources, results = await self._search_again(job, call, sources, results)
        return job.answer(await self._written(call, sources, results, splits))

    async def stream(
        self, text: str, *, field: str, request: TextToTextRequest
    ) -> AsyncGenerator[Delta | Answer[WrittenText], None]:
        """Writes a text for a text: yields deltas of it as they appear, and last the answer.

        The first delta has the whole prefix. Args and errors are those of `write`.
        """
        check_text(field, text, self._max_text_bytes)
        self._check_prefixes(request.target_prefixes, "target_prefix")
        call = self._call(request, 1, is_stream=True)
        num_tokens, num_bytes = call.plan.num_tokens, call.most_rule_bytes
        with self._begin(1, num_tokens=num_tokens, num_bytes=num_bytes, deadline=request.deadline) as job:
            with job.preparing():
                [source] = await self._read(call, whole_texts([text], [field]))
            job.hold(rule_bytes([source]))
            async with aclosing(self._write_source(job, call, source)) as parts:
                async for part in parts:
                    yield part if isinstance(part, Delta) else job.answer([part])

    async def _write_source(
        self, job: DecodingJob, call: TextToTextCall, source: Source
    ) -> AsyncGenerator[Delta | WrittenText, None]:
        """Yields deltas of the output of a source, and last the whole."""
        sequence = call.sequence(source)
        num_given = len(source.prefix_ids)
        unsent: list[str] = []
        async with aclosing(job.stream(sequence, is_last=True)) as deltas:
            async for delta in deltas:
                unsent.append(delta.output)
                if delta.num_new_tokens >= num_given:
                    yield Delta(output="".join(unsent), num_new_tokens=delta.num_new_tokens)
                    unsent = []
        [written] = await self._written(call, [source], [sequence.reply.result.result()], [])
        yield written

    def _check_prefixes(self, prefixes: Elements[str], field: str) -> None:
        """Checks the sizes of prefixes, which the request calls `field` with their number."""
        for index, prefix in enumerate(prefixes):
            if (size := num_bytes(prefix)) > self._max_text_bytes:
                raise InvalidInputError(
                    field.format(index), f"has {size} bytes, the limit is {self._max_text_bytes}; shorten it"
                )
        check_size_of_call("target_prefixes", prefixes, self._max_text_bytes)

    def _call(self, request: TextToTextRequest, num_texts: int, *, is_stream: bool = False) -> TextToTextCall:
        """Checks what a call asks for, before any work is done for it."""
        manifest = self.bundle.manifest
        if request.wants_alignment and manifest.variants[self.precision].alignment_layer is None:
            raise NoAlignmentError(
                f"{manifest.name}/{manifest.version} cannot tell which words became which: its bundle was exported "
                "without the decoder's attention; export it again, or leave out alignment"
            )
        source_prefix, start_ids = self._start(request)
        plan = plan_text_to_text(
            request,
            num_texts=num_texts,
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
            source_prefix=source_prefix,
            is_stream=is_stream,
        )

    def _start(self, request: TextToTextRequest) -> tuple[Tokens, Tokens]:  # noqa: ARG002 (for translations)
        """Returns the tokens that come before each source, and those that the decoder reads before it writes."""
        return (), (self._bos_id, *self.bundle.manifest.prompt_prefix)

    async def _passages(
        self,
        call: TextToTextCall,  # noqa: ARG002 (for translations)
        texts: Elements[str],
        fields: Elements[str],
    ) -> tuple[list[Passage], list[SplitText]]:
        """Returns what is read by itself, in order, and how texts were split into it; nothing of texts left whole."""
        return whole_texts(texts, fields), []

    async def _read(self, call: TextToTextCall, passages: Elements[Passage]) -> list[Source]:
        """Tokenizes passages, and the prefixes and phrases of their outputs."""
        with named_passages(passages):
            encoded = await self._tokenizer.encode_limited(
                [passage.text for passage in passages],
                fields=[str(number) for number in range(len(passages))],
                max_tokens=self.limits.max_input_tokens - len(call.source_prefix),
                truncate=call.request.truncate,
                with_offsets=call.request.wants_alignment,
            )
        if call.source_prefix:
            encoded = [text.after(call.source_prefix) for text in encoded]
        return await self._sources(call, passages, encoded)

    async def _sources(
        self, call: TextToTextCall, passages: Elements[Passage], encoded: Elements[EncodedText]
    ) -> list[Source]:
        """Reads the prefixes and phrases of the outputs of passages, off the event loop."""
        sources = call.sources(passages, encoded)
        if not call.has_rules:
            return list(sources)
        pool, loop = text_pool(call.longest_rule), asyncio.get_running_loop()
        read: list[Source] = []
        while len(read) < len(passages):
            read += await loop.run_in_executor(pool, list, islice(sources, _SOURCES_AT_A_TIME))
        return read

    async def _search_again(
        self, job: DecodingJob, call: TextToTextCall, sources: Elements[Source], results: Elements[SequenceResult]
    ) -> tuple[list[Source], list[SequenceResult]]:
        """Repeats searches whose outputs have a forbidden phrase in a spelling that was not forbidden."""
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

    async def _written(
        self,
        call: TextToTextCall,
        sources: Elements[Source],
        results: Elements[SequenceResult],
        splits: Elements[SplitText],
    ) -> list[WrittenText]:
        """Reads the results of sources, and joins those of the sentences of a text."""

        def read() -> list[WrittenText]:
            texts = [
                read_result(source, result, plan=call.plan, tokenizer=self._tokenizer)
                for source, result in zip(sources, results, strict=True)
            ]
            return regroup(texts, splits) if splits else texts

        # Finding the characters of every token takes a while.
        in_pool = call.request.wants_alignment
        return await asyncio.get_running_loop().run_in_executor(text_pool(), read) if in_pool else read()
