"""Served translation model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Elements

import numpy as np

from headway_server.bundles import Languages, demanded
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import EncodedText, SplitText, split_sentences
from headway_server.preprocessing.pool import text_pool
from headway_server.serving.limits import check_text
from headway_server.tasks.inspection.inspector import InspectedTranslation, inspected_tokens
from headway_server.tasks.inspection.maps import AttentionRequest
from headway_server.tasks.text_to_text.call import TextToTextCall
from headway_server.tasks.text_to_text.model import TextToTextModel
from headway_server.tasks.text_to_text.phrases import Tokens
from headway_server.tasks.text_to_text.reader import Passage, sentences
from headway_server.tasks.text_to_text.request import TextToTextRequest


class TranslationModel(TextToTextModel):
    """Translates texts, between two or more languages."""

    async def inspect(
        self,
        text: str,
        *,
        translation: str | None,
        request: AttentionRequest,
        truncate: bool,
        deadline: float | None,
    ) -> InspectedTranslation:
        """Computes attention maps of a source and its translation.

        Args:
            text: The source.
            translation: Its translation; None: the model's own, by greedy decoding.
            request: Layers, heads and summary of the requested weights.
            truncate: True truncates the end of a source that is too long; False refuses it.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: An argument is out of its range, the bundle has no attention graph, the weights exceed the
                limit, the queue is full, the deadline passed, the server is draining.
        """
        assert self._inspector is not None, "`load` sets it"
        check_text("text", text, self._max_text_bytes)
        if translation is not None:
            check_text("translation", translation, self._max_text_bytes)
        with self._inspector.begin(request, deadline) as job:
            if translation is None:
                made = await self.write([text], request=TextToTextRequest(truncate=truncate, deadline=deadline))
                translation = made.results[0].text
            with job.preparing():
                [source] = await self._tokenizer.encode_limited(
                    [text],
                    fields=["text"],
                    max_tokens=self.limits.max_input_tokens,
                    truncate=truncate or self._tokenizer.truncates,
                    with_offsets=True,
                )
                target = EncodedText(input_ids=np.empty(0, np.int64))
                if translation:  # a translation may be empty
                    [target] = await self._tokenizer.encode_limited(
                        [translation],
                        fields=["translation"],
                        max_tokens=self.limits.max_total_tokens - 1,
                        truncate=False,
                        add_special_tokens=False,
                        with_offsets=True,
                    )
                target_tokens = await inspected_tokens(self._tokenizer, target, prefix=[self._bos_id])
            item = {
                "input_ids": source.input_ids,
                "attention_mask": np.ones_like(source.input_ids),
                "target_ids": np.insert(target.input_ids, 0, self._bos_id),
            }
            num_tokens = len(source) + len(target_tokens)
            maps = await job.read(item, field="text", num_tokens=num_tokens)
        return InspectedTranslation(
            tokens=await inspected_tokens(self._tokenizer, source),
            target_tokens=target_tokens,
            translation=translation,
            maps=maps,
            truncated=source.truncated,
            timings=job.timings,
        )

    def _start(self, request: TextToTextRequest) -> tuple[Tokens, Tokens]:
        """See `TextToTextModel`; languages are selected by special tokens.

        Raises:
            InvalidInputError: The model does not have a language, or none of several is named.
        """
        languages = demanded(self.bundle.manifest.languages)
        source = self._language("source_language", request.source_language, languages.sources)
        target = self._language("target_language", request.target_language, languages.targets)
        prefix = (languages.target_marks.get(target), languages.source_tokens.get(source))
        start = (self._bos_id, *self.bundle.manifest.prompt_prefix, languages.target_tokens.get(target))
        return _given(prefix), _given(start)

    def _language(self, field: str, code: str, known: Elements[str]) -> str:
        language = Languages.match(code, known)
        if language is None:
            says = f"is {code[:64]!r}" if code else "is empty"
            raise InvalidInputError(
                field, f"{says}; {self.bundle.manifest.name} has {len(known)} languages, name one: {', '.join(known)}"
            )
        return language

    async def _passages(
        self, call: TextToTextCall, texts: Elements[str], fields: Elements[str]
    ) -> tuple[list[Passage], list[SplitText]]:
        """See `TextToTextModel`; splits texts into sentences on request."""
        if not call.request.split_sentences:
            return await super()._passages(call, texts, fields)
        splits = await self._split(texts, call.request.source_language)
        return sentences(splits, fields), splits

    async def _split(self, texts: Elements[str], source_language: str) -> list[SplitText]:
        """Splits texts into sentences, off the event loop; stops above the admissible number."""
        language = self._language("source_language", source_language, demanded(self.bundle.manifest.languages).sources)
        loop = asyncio.get_running_loop()
        splits: list[SplitText] = []
        num_sentences = 0
        for text in texts:
            split = await loop.run_in_executor(text_pool(), split_sentences, text, language)
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


def _given(token_ids: Elements[int | None]) -> Tokens:
    return tuple(token_id for token_id in token_ids if token_id is not None)
