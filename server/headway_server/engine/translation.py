"""Translation as it is served."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Elements
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

import numpy as np

from headway_server.bundles import TOKENIZER_FILE, Bundle, Precision
from headway_server.engine.encoder_runner import EncoderRunner
from headway_server.engine.interfaces import Decoder, Encoder
from headway_server.engine.model import Decoded, DecodingModel, call_timings, open_decoder
from headway_server.engine.reply import Piece, Reply
from headway_server.engine.request import check_range
from headway_server.engine.sequence import SamplingParameters, Sequence, SequenceResult
from headway_server.engine.settings import EngineSettings
from headway_server.engine.text import TextAssembly
from headway_server.errors import BundleError
from headway_server.preprocessing import EncodedText, TextTokenizer
from headway_server.runtime import Device, Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedText:
    """A translation."""

    result: SequenceResult
    num_source_tokens: int
    truncated: bool


class TranslationModel(DecodingModel):
    """Translates texts."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        precision: Precision,
        device: Device,
        tokenizer: TextTokenizer,
        decoder: Decoder,
        encoder: Encoder,
        settings: EngineSettings,
    ) -> None:
        """Makes a model of its parts; `load` makes the parts.

        Raises:
            BundleError: The manifest names no token that a translation begins with.
        """
        super().__init__(
            bundle,
            precision=precision,
            device=device,
            tokenizer=tokenizer,
            decoder=decoder,
            encoder=encoder,
            settings=settings,
        )
        special_tokens = bundle.manifest.special_tokens
        if special_tokens is None or special_tokens.bos is None:
            raise BundleError(f"{bundle.path}: special_tokens.bos is missing; a translation begins with it")
        self._bos_id: int = special_tokens.bos

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
        decoder = open_decoder(runtime, bundle, variant, settings)
        encoder = EncoderRunner(runtime, bundle, variant)
        model = cls(
            bundle,
            precision=chosen,
            device=runtime.device,
            tokenizer=TextTokenizer.load(bundle.file(TOKENIZER_FILE)),
            decoder=decoder,
            encoder=encoder,
            settings=settings,
        )
        model._check_runs(lambda: model._run_once(decoder, encoder))
        return model

    def _run_once(self, decoder: Decoder, encoder: Encoder) -> None:
        """Runs both graphs with the ids at the ends of what they must take: the first token, and the largest."""
        decoder.set_sources(encoder.encode([np.array([self._tokenizer.largest_id])]))
        for token_id in (self._bos_id, self._tokenizer.largest_id):
            decoder.decode(np.array([token_id]), np.zeros(1, np.int64))
        decoder.set_sources([])

    async def translate(
        self,
        texts: Elements[str],
        *,
        fields: Elements[str],
        max_new_tokens: int | None,
        truncate: bool,
        deadline: float | None,
    ) -> Decoded[TranslatedText]:
        """Translates texts; all of them, or none.

        Args:
            texts: Texts of at least one character.
            fields: What the request calls each of them, for messages.
            max_new_tokens: Most tokens of a translation; None takes as many as the model can hold.
            truncate: Whether a text past the limit is shortened at its end instead of refused.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: A parameter or text is out of its range, there is no room, the deadline passed, the server is
                draining.
        """
        parameters = self._parameters(max_new_tokens)
        with self._admit(len(texts)):
            began = time.monotonic()
            sources = await self._encode(texts, fields, truncate)
            preprocessing_s = time.monotonic() - began
            sequences = [self._sequence(source, parameters, deadline, wants_pieces=False) for source in sources]
            results = await self._engine.run(sequences)
        return _translated(sources, results, preprocessing_s)

    async def stream(
        self, text: str, *, field: str, max_new_tokens: int | None, truncate: bool, deadline: float | None
    ) -> AsyncGenerator[Piece | Decoded[TranslatedText], None]:
        """Translates a text: yields pieces of the translation as they appear, and last the answer.

        Args and errors are those of `translate`.
        """
        parameters = self._parameters(max_new_tokens)
        with self._admit(1):
            began = time.monotonic()
            sources = await self._encode([text], [field], truncate)
            preprocessing_s = time.monotonic() - began
            sequence = self._sequence(sources[0], parameters, deadline, wants_pieces=True)
            async with aclosing(self._engine.stream(sequence)) as pieces:
                async for piece in pieces:
                    yield piece
            yield _translated(sources, [sequence.reply.result.result()], preprocessing_s)

    def _parameters(self, max_new_tokens: int | None) -> SamplingParameters:
        most = self.limits.max_total_tokens
        if max_new_tokens is not None:
            check_range("parameters.max_new_token_count", max_new_tokens, 1, most)
        return SamplingParameters(max_new_tokens=max_new_tokens or most)

    async def _encode(self, texts: Elements[str], fields: Elements[str], truncate: bool) -> list[EncodedText]:
        return await self._tokenizer.encode_limited(
            texts, fields=fields, max_tokens=self.limits.max_input_tokens, truncate=truncate
        )

    def _sequence(
        self,
        source: EncodedText,
        parameters: SamplingParameters,
        deadline: float | None,
        *,
        wants_pieces: bool,
    ) -> Sequence:
        return Sequence(
            input_ids=source.input_ids,
            parameters=parameters,
            text=TextAssembly(self._tokenizer.decode, eager=wants_pieces),
            reply=Reply(),
            eos_id=self._eos_id,
            deadline=deadline,
            wants_pieces=wants_pieces,
            first_id=self._bos_id,
        )


def _translated(
    sources: Elements[EncodedText], results: Elements[SequenceResult], preprocessing_s: float
) -> Decoded[TranslatedText]:
    texts = [
        TranslatedText(result=result, num_source_tokens=len(source), truncated=source.truncated)
        for source, result in zip(sources, results, strict=True)
    ]
    return Decoded(results=texts, timings=call_timings(results, preprocessing_s))
