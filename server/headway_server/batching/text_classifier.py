"""Labels of texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from headway_server.batching.admission import Admission
from headway_server.batching.batcher import Batcher
from headway_server.batching.graph import TextClassifierGraph
from headway_server.batching.model import Classification, ScoredLabel, StatelessModel, call_timings
from headway_server.batching.settings import BatchingSettings
from headway_server.bundles import TOKENIZER_FILE, Bundle, Precision
from headway_server.preprocessing import TextTokenizer
from headway_server.runtime import Runtime

_WARM_UP_LENGTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedText:
    """The labels of one text, the most likely first."""

    labels: tuple[ScoredLabel, ...]
    num_tokens: int
    truncated: bool


class TextClassifier(StatelessModel):
    """Labels texts."""

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        graph: TextClassifierGraph,
        tokenizer: TextTokenizer,
        settings: BatchingSettings,
    ) -> None:
        manifest = bundle.manifest
        assert manifest.limits.max_input_tokens is not None  # the manifest's own check
        self.max_input_tokens: int = manifest.limits.max_input_tokens
        self._tokenizer = tokenizer
        super().__init__(
            bundle,
            precision,
            graph.device,
            Batcher(graph, budget=settings.max_batch_tokens, name=manifest.name),
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
        model = cls(bundle, chosen, graph, tokenizer, settings)
        length = min(_WARM_UP_LENGTH, model.max_input_tokens)
        graph.warm_up([np.zeros(length, np.int64)], num_labels=len(manifest.labels))
        return model

    async def classify(
        self, texts: Sequence[str], *, fields: Sequence[str], top_k: int, truncate: bool, deadline: float | None
    ) -> Classification[ClassifiedText]:
        """Labels texts.

        Args:
            texts: 1 to `MAX_TEXTS` texts of at least one character.
            fields: What the request calls each of them, for messages.
            top_k: Labels to answer a text, 1 to the number of labels.
            truncate: Whether a text past the limit is shortened at its end instead of refused.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: The texts cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        with self._admission.admit(len(texts), sum(len(text.encode()) for text in texts)):
            began = time.monotonic()
            encoded = await self._tokenizer.encode_limited(
                texts, fields=fields, max_tokens=self.max_input_tokens, truncate=truncate
            )
            preprocessing_s = time.monotonic() - began
            batched = await self._batcher.submit(
                [text.input_ids for text in encoded], [len(text) for text in encoded], deadline=deadline
            )
        results = [
            ClassifiedText(labels=labels, num_tokens=len(text), truncated=text.truncated)
            for labels, text in zip(self._top_labels(batched.rows, top_k), encoded, strict=True)
        ]
        return Classification(results=results, timings=call_timings(batched, preprocessing_s))
