"""An encoder-decoder as it is served: it reads a text and writes another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Elements
from contextlib import ExitStack, aclosing
from itertools import islice

import numpy as np

from headway_server.bundles import Bundle
from headway_server.decoding.interfaces import Decoder, Encoder, EncoderInput
from headway_server.decoding.sequence import Delta, SequenceResult
from headway_server.errors import BundleError, InvalidInputError, NoAlignmentError
from headway_server.preprocessing import EncodedText, SplitText
from headway_server.preprocessing.pool import text_pool
from headway_server.serving.answers import Answer, CallTimings
from headway_server.serving.limits import check_size_of_call, check_text, check_texts, num_bytes
from headway_server.serving.permits import Permit
from headway_server.tasks.decoding import DecodingModel, ModelParts
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
        with ExitStack() as permits:
            permits.enter_context(self._admit(len(texts), num_tokens=call.plan.num_tokens, deadline=request.deadline))
            held = permits.enter_context(self._hold(call.most_rule_bytes))
            began = time.monotonic()
            passages, splits = await self._passages(call, texts, fields)
            if more := len(passages) - len(texts):  # each text has the permit of one already
                permits.enter_context(self._admit(more, num_tokens=call.plan.num_tokens, deadline=request.deadline))
            sources = await self._read(call, passages)
            held.resize(1, rule_bytes(sources))
            sequences = [call.sequence(source) for source in sources]
            preprocessing_s = time.monotonic() - began
            results = await self._run(sequences, held)
            if any(source.phrases.forbidden_forms for source in sources):
                sources, results = await self._search_again(call, sources, results, held)
        return await self._answer(call, sources, results, splits, preprocessing_s)

    async def stream(
        self, text: str, *, field: str, request: TextToTextRequest
    ) -> AsyncGenerator[Delta | Answer[WrittenText], None]:
        """Writes a text for a text: yields deltas of it as they appear, and last the answer.

        The first delta has the whole prefix. Args and errors are those of `write`.
        """
        check_text(field, text, self._max_text_bytes)
        self._check_prefixes(request.target_prefixes, "target_prefix")
        call = self._call(request, 1, is_stream=True)
        with (
            self._admit(1, num_tokens=call.plan.num_tokens, deadline=request.deadline) as permit,
            self._hold(call.most_rule_bytes) as held,
        ):
            began = time.monotonic()
            [source] = await self._read(call, whole_texts([text], [field]))
            held.resize(1, rule_bytes([source]))
            async with aclosing(self._write_source(call, source, permit, held, began)) as parts:
                async for part in parts:
                    yield part

    async def _write_source(
        self, call: TextToTextCall, source: Source, permit: Permit, held: Permit, began: float
    ) -> AsyncGenerator[Delta | Answer[WrittenText], None]:
        """Yields deltas of the output of a source, and last the answer to a call that `began` to be prepared then."""
        sequence = call.sequence(source)
        self._release_with(permit, [sequence])
        preprocessing_s = time.monotonic() - began
        num_given = len(source.prefix_ids)
        unsent: list[str] = []
        async with aclosing(self._stream(sequence, held)) as deltas:
            async for delta in deltas:
                unsent.append(delta.output)
                if delta.num_new_tokens >= num_given:
                    yield Delta(output="".join(unsent), num_new_tokens=delta.num_new_tokens)
                    unsent = []
        yield await self._answer(call, [source], [sequence.reply.result.result()], [], preprocessing_s)

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
        self, call: TextToTextCall, sources: Elements[Source], results: Elements[SequenceResult], held: Permit
    ) -> tuple[list[Source], list[SequenceResult]]:
        """Repeats searches whose outputs have a forbidden phrase in a spelling that was not forbidden."""
        sources, results = list(sources), list(results)
        loop = asyncio.get_running_loop()
        for _ in range(_MAX_REPEATED_SEARCHES):
            found = await loop.run_in_executor(text_pool(), call.forbid_spellings, sources, results)
            if not found:
                break
            again = await self._run([call.sequence(source) for source in found.values()], held)
            for index, result in zip(found, again, strict=True):
                sources[index], results[index] = found[index], result
        return sources, results

    async def _answer(
        self,
        call: TextToTextCall,
        sources: Elements[Source],
        results: Elements[SequenceResult],
        splits: Elements[SplitText],
        preprocessing_s: float,
    ) -> Answer[WrittenText]:
        def read() -> list[WrittenText]:
            texts = [
                read_result(source, result, plan=call.plan, tokenizer=self._tokenizer)
                for source, result in zip(sources, results, strict=True)
            ]
            return regroup(texts, splits) if splits else texts

        # Finding the characters of every token takes a while.
        in_pool = call.request.wants_alignment
        texts = await asyncio.get_running_loop().run_in_executor(text_pool(), read) if in_pool else read()
        return Answer(results=texts, timings=CallTimings.of(results, preprocessing_s=preprocessing_s))
