"""Labels and embeddings of texts, or of pairs of texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from headway_server.batching.admission import Admission
from headway_server.batching.batcher import BatchedResults, Batcher
from headway_server.batching.embedder import EmbeddedText, to_vectors
from headway_server.batching.graph import Output, OutputBatches, TextClassifierGraph, Wanted
from headway_server.batching.model import CallTimings, Classification, ScoredLabel, StatelessModel, call_timings
from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import TOKENIZER_FILE, Bundle, ClassificationScheme, Precision
from headway_server.preprocessing import EncodedText, TextTokenizer
from headway_server.runtime import Runtime

_WARM_UP_LENGTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedText:
    """The labels of one text, the most likely first."""

    labels: tuple[ScoredLabel, ...]
    num_tokens: int
    truncated: bool


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


class TextClassifier(StatelessModel):
    """Labels texts, and turns them into vectors."""

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        graph: TextClassifierGraph,
        tokenizer: TextTokenizer,
        settings: BatchingSettings,
        *,
        most_padding: int | None,
    ) -> None:
        manifest = bundle.manifest
        assert manifest.limits.max_input_tokens is not None  # the manifest's own check
        self.max_input_tokens: int = manifest.limits.max_input_tokens
        self._tokenizer = tokenizer
        batches = OutputBatches(graph, manifest.classification or ClassificationScheme())
        super().__init__(
            bundle,
            precision,
            graph.device,
            Batcher(
                batches,
                budget=settings.batch_tokens(graph.device),
                name=manifest.name,
                session=graph.session,
                most_padding=most_padding,
            ),
            Admission(
                limit=settings.max_waiting_texts,
                noun="texts",
                owner=manifest.name,
                max_bytes=settings.max_waiting_mib * 2**20,
            ),
        )

    @classmethod
    def load(
        cls, bundle: Bundle, runtime: Runtime, settings: BatchingSettings, *, precision: Precision | None = None
    ) -> Self:
        """Loads the variant that was asked for, or the one that suits the runtime, and runs it once.

        Raises:
            BundleError: The graph or the tokenizer cannot be loaded, or they do not fit the manifest.
            RuntimeUnavailableError: The bundle has no such variant.
        """
        manifest = bundle.manifest
        chosen, variant = runtime.choose_variant(manifest, precision)
        tokenizer = TextTokenizer.load(bundle.file(TOKENIZER_FILE))
        pad_id = manifest.special_tokens.pad if manifest.special_tokens else None
        graph = TextClassifierGraph(runtime.open(bundle, variant.graphs["model"]), pad_id=pad_id or 0)
        length = min(_WARM_UP_LENGTH, manifest.limits.max_input_tokens or 1)
        warmed = graph.warm_up([EncodedText(input_ids=np.zeros(length, np.int64))], manifest)
        return cls(bundle, chosen, graph, tokenizer, settings, most_padding=warmed.most_padding(length))

    async def classify(
        self, inputs: TextInputs, *, top_k: int, deadline: float | None, threshold: float | None = None
    ) -> Classification[ClassifiedText]:
        """Labels texts.

        Args:
            inputs: The texts.
            top_k: Labels to answer a text, 1 to the number of labels.
            deadline: When the caller stops waiting, by `time.monotonic`.
            threshold: Probability from which a label applies, in place of the model's.

        Raises:
            RequestError: The texts cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        encoded, batched, timings = await self._answer(inputs, Output.LOGITS, deadline)
        labels = self._top_labels(batched.rows, top_k, threshold)
        results = [
            ClassifiedText(labels=own, num_tokens=len(text), truncated=text.truncated)
            for own, text in zip(labels, encoded, strict=True)
        ]
        return Classification(results=results, timings=timings)

    async def embed(
        self, inputs: TextInputs, *, normalize: bool, deadline: float | None
    ) -> Classification[EmbeddedText]:
        """Turns texts into vectors; for bundles whose graphs give embeddings.

        Args:
            inputs: The texts.
            normalize: Whether vectors are scaled to length 1.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: As `classify`.
        """
        encoded, batched, timings = await self._answer(inputs, Output.EMBEDDING, deadline)
        vectors = to_vectors(batched.rows, normalize=normalize)
        results = [
            EmbeddedText(values=vector, num_tokens=len(text), truncated=text.truncated)
            for vector, text in zip(vectors, encoded, strict=True)
        ]
        return Classification(results=results, timings=timings)

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
            )
            preprocessing_s = time.monotonic() - began
            batched = await self._batcher.submit(
                [Wanted(text, output) for text in encoded], [len(text) for text in encoded], deadline=deadline
            )
        return encoded, batched, call_timings(batched, preprocessing_s)
