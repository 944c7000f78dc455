"""What models of texts have in common as they are served: a tokenizer, a batcher, and embeddings."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headway_server.batching.batcher import Batcher
from headway_server.batching.graph import Output, OutputBatches, TextGraph, Wanted
from headway_server.batching.pending_call import BatchedResults
from headway_server.batching.run_costs import RunCosts
from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import Bundle, Precision
from headway_server.preprocessing import EncodedText, TextTokenizer
from headway_server.serving.answers import Answer, CallTimings
from headway_server.serving.permits import Admission
from headway_server.tasks.stateless import StatelessModel
from headway_server.tasks.text.embeddings import EmbeddedText, to_vectors

WARM_UP_LENGTH = 32
"""Tokens of the text that a graph is run with when it is loaded, where it reads as many."""
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInputs:
    """The checked texts of a call."""

    texts: Sequence[str]
    """1 to `MAX_TEXTS` texts of at least one character."""
    fields: Sequence[str]
    """What the request calls each of them, for messages."""
    text_pairs: Sequence[str] | None = None
    """What each is paired with; None: nothing."""
    truncate: bool = False
    """Whether a text past the limit is shortened at its end instead of refused; of a pair, the longer one first."""

    @property
    def num_bytes(self) -> int:
        """Size of all texts in UTF-8."""
        return sum(len(text.encode()) for text in (*self.texts, *(self.text_pairs or ())))


class TextModel(StatelessModel, Generic[Item]):
    """Reads texts; turns them into vectors where its graph gives embeddings."""

    _reads_offsets = False
    """Whether what logits tell is told of the characters of tokens."""

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        graph: TextGraph[Item],
        tokenizer: TextTokenizer,
        settings: BatchingSettings,
        *,
        batches: OutputBatches[Item],
        costs: RunCosts,
        prepare: Callable[[Wanted[Item]], Wanted[Item]] | None = None,
    ) -> None:
        """Prepares a model; `costs` and `prepare` are the batcher's."""
        manifest = bundle.manifest
        assert manifest.limits.max_input_tokens is not None  # the manifest's own check
        self.max_input_tokens: int = manifest.limits.max_input_tokens
        self._tokenizer = tokenizer
        batcher: Batcher[Any] = Batcher(
            batches,
            budget=settings.batch_tokens(graph.device),
            name=manifest.name,
            session=graph.session,
            costs=costs,
            prepare=prepare,
        )
        admission = Admission(
            limit=settings.max_waiting_texts,
            noun="texts",
            owner=manifest.name,
            max_bytes=settings.max_waiting_mib * 2**20,
        )
        super().__init__(bundle, precision, graph.device, batcher, admission)

    @abstractmethod
    def _item(self, text: str, encoded: EncodedText) -> Item:
        """What the graph reads of a text."""

    async def embed(self, inputs: TextInputs, *, normalize: bool, deadline: float | None) -> Answer[EmbeddedText]:
        """Turns texts into vectors; for bundles whose graphs give embeddings.

        Args:
            inputs: The texts.
            normalize: Whether vectors are scaled to length 1.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: The texts cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        encoded, batched, timings = await self._answer(inputs, Output.EMBEDDING, deadline)
        vectors = to_vectors(batched.rows, normalize=normalize)
        results = [
            EmbeddedText(values=vector, num_tokens=len(text), truncated=text.truncated)
            for vector, text in zip(vectors, encoded, strict=True)
        ]
        return Answer(results=results, timings=timings)

    async def _answer(
        self, inputs: TextInputs, output: Output, deadline: float | None
    ) -> tuple[list[EncodedText], BatchedResults, CallTimings]:
        """Tokenizes texts and waits for what is asked about each."""
        with self._admission.admit(len(inputs.texts), inputs.num_bytes):
            began = time.monotonic()
            encoded = await self._tokenizer.encode_limited(
                inputs.texts,
                fields=inputs.fields,
                max_tokens=self.max_input_tokens,
                truncate=inputs.truncate,
                text_pairs=inputs.text_pairs,
                with_offsets=self._reads_offsets and output is Output.LOGITS,
            )
            preprocessing_s = time.monotonic() - began
            items = [
                Wanted(self._item(text, tokens), output) for text, tokens in zip(inputs.texts, encoded, strict=True)
            ]
            batched = await self._batcher.submit(items, [len(tokens) for tokens in encoded], deadline=deadline)
        return encoded, batched, CallTimings.of(batched.runs, preprocessing_s=preprocessing_s)
