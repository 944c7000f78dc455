"""A translation model as it is served."""

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
from headway_server.preprocessing import EncodedText, SplitText, split_sentences
from headway_server.preprocessing.pool import text_pool
from headway_server.serving.answers import Answer, CallTimings
from headway_server.serving.limits import check_size_of_call, check_text, check_texts, num_bytes
from headway_server.tasks.decoding import DecodingModel, ModelParts, counted
from headway_server.tasks.inspection.inspector import InspectedTranslation, inspected_tokens
from headway_server.tasks.inspection.maps import AttentionRequest
from headway_server.tasks.translation.answer import TranslatedText, read_result, regroup
from headway_server.tasks.translation.call import Passage, Source, TranslationCall, named_passages, whole_texts
from headway_server.tasks.translation.phrases import PhraseEncoder
from headway_server.tasks.translation.request import MAX_TEXTS, TranslationRequest, plan_translation

_MAX_REPEATED_SEARCHES = 4
"""Most repetitions of a search; after these the last translation is returned, whatever phrases it has."""
_SOURCES_AT_A_TIME = 4
"""Glossaries that a thread encodes before it takes other work: a large one takes some ten milliseconds."""


class TranslationModel(DecodingModel):
    """Translates texts."""

    def __init__(self, bundle: Bundle, parts: ModelParts) -> None:
        """Makes a model of its parts.

        Raises:
            BundleError: The tokenizer or a special token does not fit the model, or the manifest names no token that a
                translation starts from.
        """
        super().__init__(bundle, parts)
        special_tokens = bundle.manifest.special_tokens
        if special_tokens is None or special_tokens.bos is None:
            raise BundleError(f"{bundle.path}: special_tokens.bos is missing; a translation starts from it")
        self._bos_id: int = special_tokens.bos
        self._phrases = PhraseEncoder(parts.tokenizer, unknown_id=special_tokens.unk, owner=bundle.manifest.name)

    def _run_once(self, decoder: Decoder, encoder: Encoder | None) -> None:
        """See `DecodingModel`; the first token of a translation is tried too."""
        assert encoder is not None, "the manifest's validator demands the graph"
        decoder.set_sources(encoder.encode([EncoderInput.of_tokens(np.array([self._tokenizer.largest_id]))]))
        for token_id in (self._bos_id, self._tokenizer.largest_id):
            decoder.decode(np.array([token_id]), np.zeros(1, np.int64))
        decoder.set_sources([])

    async def translate(self, texts: Elements[str], *, request: TranslationRequest) -> Answer[TranslatedText]:
        """Translates texts; all of them, or none.

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
            began = time.monotonic()
            splits: list[SplitText] = []
            passages = whole_texts(texts, fields)
            if request.split_sentences:
                splits = await self._split(texts)
                passages = call.sentences(splits, fields)
                # Each text has the permit of one sentence already.
                more = len(passages) - len(texts)
                permits.enter_context(self._admit(more, num_tokens=call.plan.num_tokens, deadline=request.deadline))
            sources = await self._read(call, passages)
            sequences = [call.sequence(source) for source in sources]
            preprocessing_s = time.monotonic() - began
            with counted(sum(len(source.encoded) for source in sources), sequences):
                results = await self._lanes.run(sequences)
            if any(source.phrases.forbidden_forms for source in sources):
                sources, results = await self._search_again(call, sources, results)
        return await self._answer(call, sources, results, splits, preprocessing_s)

    async def inspect(
        self,
        text: str,
        *,
        translation: str | None,
        request: AttentionRequest,
        truncate: bool,
        deadline: float | None,
    ) -> InspectedTranslation:
        """Shows what the tokens of a source and of its translation attend to.

        Args:
            text: The source.
            translation: Its translation; None: the model's own, by greedy decoding.
            request: Which weights are asked for.
            truncate: True cuts the end off a source that is too long; False refuses it.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: An argument is out of its range, the bundle has no graph for it, the weights are past the
                limit, there is no room, the deadline passed, the server is draining.
        """
        assert self._inspector is not None, "`load` makes it"
        check_text("text", text, self._max_text_bytes)
        if translation is not None:
            check_text("translation", translation, self._max_text_bytes)
        plan = self._inspector.plan(request)
        with self._inspector.admit(deadline):
            if translation is None:
                made = await self.translate([text], request=TranslationRequest(truncate=truncate, deadline=deadline))
                translation = made.results[0].text
            began = time.monotonic()
            [source] = await self._tokenizer.encode_limited(
                [text],
                fields=["text"],
                max_tokens=self.limits.max_input_tokens,
                truncate=truncate,
                with_offsets=True,
            )
            target = EncodedText(input_ids=np.empty(0, np.int64))
            if translation:  # a model may answer with nothing
                [target] = await self._tokenizer.encode_limited(
                    [translation],
                    fields=["translation"],
                    max_tokens=self.limits.max_total_tokens - 1,
                    truncate=False,
                    add_special_tokens=False,
                    with_offsets=True,
                )
            target_tokens = inspected_tokens(self._tokenizer, target, prefix=[self._bos_id])
            maps, timings = await self._inspector.read(
                {
                    "input_ids": source.input_ids,
                    "attention_mask": np.ones_like(source.input_ids),
                    "target_ids": np.insert(target.input_ids, 0, self._bos_id),
                },
                plan,
                field="text",
                num_tokens=len(source) + len(target_tokens),
                deadline=deadline,
                preprocessing_s=time.monotonic() - began,
            )
        return InspectedTranslation(
            tokens=inspected_tokens(self._tokenizer, source),
            target_tokens=target_tokens,
            translation=translation,
            maps=maps,
            truncated=source.truncated,
            timings=timings,
        )

    async def stream(
        self, text: str, *, field: str, request: TranslationRequest
    ) -> AsyncGenerator[Delta | Answer[TranslatedText], None]:
        """Translates a text: yields deltas of the translation as they appear, and last the answer.

        The first delta has the whole prefix. Args and errors are those of `translate`.
        """
        check_text(field, text, self._max_text_bytes)
        self._check_prefixes(request.target_prefixes, "target_prefix")
        call = self._call(request, 1, is_stream=True)
        with self._admit(1, num_tokens=call.plan.num_tokens, deadline=request.deadline) as permit:
            began = time.monotonic()
            sources = await self._read(call, whole_texts([text], [field]))
            sequence = call.sequence(sources[0])
            self._release_with(permit, [sequence])
            preprocessing_s = time.monotonic() - began
            num_given = len(sources[0].prefix_ids)
            held: list[str] = []
            with counted(len(sources[0].encoded), [sequence]):
                async with aclosing(self._lanes.stream(sequence)) as deltas:
                    async for delta in deltas:
                        held.append(delta.output)
                        if delta.num_new_tokens >= num_given:
                            yield Delta(output="".join(held), num_new_tokens=delta.num_new_tokens)
                            held = []
            yield await self._answer(call, sources, [sequence.reply.result.result()], [], preprocessing_s)

    def _check_prefixes(self, prefixes: Elements[str], field: str) -> None:
        """Checks the sizes of prefixes, which the request calls `field` with their number."""
        for index, prefix in enumerate(prefixes):
            if (size := num_bytes(prefix)) > self._max_text_bytes:
                raise InvalidInputError(
                    field.format(index), f"has {size} bytes, the limit is {self._max_text_bytes}; shorten it"
                )
        check_size_of_call("target_prefixes", prefixes, self._max_text_bytes)

    def _call(self, request: TranslationRequest, num_texts: int, *, is_stream: bool = False) -> TranslationCall:
        """Checks what a call asks for, before any work is done for it."""
        manifest = self.bundle.manifest
        if request.wants_alignment and manifest.variants[self.precision].alignment_layer is None:
            raise NoAlignmentError(
                f"{manifest.name}/{manifest.version} cannot tell which words became which: its bundle was exported "
                "without the decoder's attention; export it again, or leave out alignment"
            )
        plan = plan_translation(
            request,
            num_texts=num_texts,
            limits=self.limits,
            num_slots=self._lanes.num_slots,
            owner=manifest.name,
            is_stream=is_stream,
        )
        return TranslationCall(
            plan=plan,
            request=request,
            tokenizer=self._tokenizer,
            phrases=self._phrases,
            first_id=self._bos_id,
            eos_id=self._eos_id,
            is_stream=is_stream,
        )

    async def _split(self, texts: Elements[str]) -> list[SplitText]:
        """Splits texts into sentences, off the event loop; stops at more than could be admitted."""
        languages = self.bundle.manifest.languages
        assert languages is not None, "the manifest's validator demands it"
        loop = asyncio.get_running_loop()
        splits: list[SplitText] = []
        num_sentences = 0
        for text in texts:
            split = await loop.run_in_executor(text_pool(), split_sentences, text, languages.source)
            splits.append(split)
            num_sentences += len(split.sentences)
            if num_sentences > self._capacity:
                least = "" if len(splits) == len(texts) else "at least "
                raise InvalidInputError(
                    self._field,
                    f"has {least}{num_sentences} sentences; {self.bundle.manifest.name} takes at most "
                    f"{self._capacity} at once; send them in several calls",
                )
        return splits

    async def _read(self, call: TranslationCall, passages: Elements[Passage]) -> list[Source]:
        """Tokenizes passages, and the prefixes and phrases of their translations."""
        with named_passages(passages):
            encoded = await self._tokenizer.encode_limited(
                [passage.text for passage in passages],
                fields=[str(number) for number in range(len(passages))],
                max_tokens=self.limits.max_input_tokens,
                truncate=call.request.truncate,
                with_offsets=call.request.wants_alignment,
            )
        sources = call.sources(passages, encoded)
        if not call.has_rules:
            return list(sources)
        loop = asyncio.get_running_loop()
        read: list[Source] = []
        while len(read) < len(passages):
            read += await loop.run_in_executor(text_pool(), list, islice(sources, _SOURCES_AT_A_TIME))
        return read

    async def _search_again(
        self, call: TranslationCall, sources: Elements[Source], results: Elements[SequenceResult]
    ) -> tuple[list[Source], list[SequenceResult]]:
        """Repeats searches whose translations have a forbidden phrase in a spelling that was not forbidden."""
        sources, results = list(sources), list(results)
        loop = asyncio.get_running_loop()
        for _ in range(_MAX_REPEATED_SEARCHES):
            found = await loop.run_in_executor(text_pool(), call.forbid_spellings, sources, results)
            if not found:
                break
            again = await self._lanes.run([call.sequence(source) for source in found.values()])
            for index, result in zip(found, again, strict=True):
                sources[index], results[index] = found[index], result
        return sources, results

    async def _answer(
        self,
        call: TranslationCall,
        sources: Elements[Source],
        results: Elements[SequenceResult],
        splits: Elements[SplitText],
        preprocessing_s: float,
    ) -> Answer[TranslatedText]:
        def read() -> list[TranslatedText]:
            texts = [
                read_result(source, result, plan=call.plan, tokenizer=self._tokenizer)
                for source, result in zip(sources, results, strict=True)
            ]
            return regroup(texts, splits) if splits else texts

        # Finding the characters of every token takes a while.
        in_pool = call.request.wants_alignment
        texts = await asyncio.get_running_loop().run_in_executor(text_pool(), read) if in_pool else read()
        return Answer(results=texts, timings=CallTimings.of(results, preprocessing_s=preprocessing_s))
