"""Labels of texts, or of pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from headway_server.batching.graph import Output, OutputBatches, TextClassifierGraph, probabilities_by
from headway_server.bundles import TOKENIZER_FILE, Bundle, ClassificationScheme
from headway_server.observers import NO_OBSERVER, Observer
from headway_server.preprocessing import EncodedText, TextTokenizer
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.settings import ServerSettings
from headway_server.tasks.stateless import ScoredLabel
from headway_server.tasks.text.model import WARM_UP_LENGTH, TextInputs, TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedText:
    """The labels of one text, the most likely first."""

    labels: tuple[ScoredLabel, ...]
    num_tokens: int
    truncated: bool


class TextClassifier(TextModel[EncodedText]):
    """Labels texts."""

    @classmethod
    def load(
        cls,
        bundle: Bundle,
        runtime: Runtime,
        settings: ServerSettings,
        observer: Observer = NO_OBSERVER,  # noqa: ARG003 (for what runs to report to)
    ) -> Self:
        """Loads the variant that was asked for, or the one that suits the runtime, and runs it once.

        Raises:
            BundleError: The graph or the tokenizer cannot be loaded, or they do not fit the manifest.
            RuntimeUnavailableError: The bundle has no such variant.
        """
        manifest = bundle.manifest
        chosen, variant = runtime.choose_variant(manifest, settings.precision)
        tokenizer = TextTokenizer.load(bundle.file(TOKENIZER_FILE))
        pad_id = manifest.special_tokens.pad if manifest.special_tokens else None
        graph = TextClassifierGraph(runtime.open(bundle, variant.graphs["model"]), pad_id=pad_id or 0)
        length = min(WARM_UP_LENGTH, manifest.limits.max_input_tokens or 1)
        warmed = graph.warm_up([EncodedText(input_ids=np.zeros(length, np.int64))], manifest)
        return cls(
            bundle,
            chosen,
            graph,
            tokenizer,
            settings.batching,
            batches=OutputBatches(graph, probabilities_by(manifest.classification or ClassificationScheme())),
            costs=warmed.costs(length),
        )

    def _item(self, text: str, encoded: EncodedText) -> EncodedText:  # noqa: ARG002 (only its tokens are read)
        return encoded

    async def classify(
        self, inputs: TextInputs, *, top_k: int, deadline: float | None, threshold: float | None = None
    ) -> Answer[ClassifiedText]:
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
        return Answer(results=results, timings=timings)
