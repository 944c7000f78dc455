"""Classification of texts, or of pairs of texts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Postprocess, Tensors
from headway_server.batching.settings import MAX_TEXTS
from headway_server.bundles import ClassificationScheme, Manifest
from headway_server.errors import InvalidInputError
from headway_server.preprocessing import EncodedText
from headway_server.serving.answers import Answer
from headway_server.serving.limits import check_probability, check_texts, check_top_k
from headway_server.tasks.outputs import (
    EMBEDDING,
    LOGITS,
    LabelReader,
    ScoredLabel,
    read_embedding,
    to_probabilities,
)
from headway_server.tasks.text.entailment import Entailment, GivenLabels
from headway_server.tasks.text.model import TextInputs, TextModel, TokenInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifiedText:
    """Labels of one text, the most likely first."""

    labels: tuple[ScoredLabel, ...]
    num_tokens: int
    truncated: bool
    embedding: NDArray[np.float32] | None = None
    """(D,), if requested."""


class TextClassifier(TextModel):
    """Labels texts."""

    @classmethod
    def _postprocess(cls, manifest: Manifest) -> Postprocess | None:
        # Zero-shot classification by entailment reads raw logits.
        return None if Entailment.of(manifest) is not None else super()._postprocess(manifest)

    @cached_property
    def _entailment(self) -> Entailment | None:
        return Entailment.of(self.bundle.manifest)

    async def classify(
        self,
        inputs: TextInputs | TokenInputs,
        *,
        top_k: int,
        deadline: float | None,
        threshold: float | None = None,
        embedding: Literal["none", "raw", "normalized"] = "none",
    ) -> Answer[ClassifiedText]:
        """Classifies texts.

        Args:
            inputs: Texts.
            top_k: Labels to return for each text, 1 to the number of labels; 0: all of them.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
            threshold: Minimum probability of a label that applies, 0 to 1, instead of the model's.
            embedding: Embedding to return with each text, from the same run; for bundles whose graphs give
                embeddings.

        Raises:
            RequestError: An argument is out of its range, the texts cannot be read, the queue is full, the deadline
                passed, the server is draining.
        """
        num_labels = check_top_k(top_k, len(self.labels))
        if threshold is not None:
            check_probability("threshold", threshold)
        has_logits = self._entailment is not None

        def read(row: Tensors, _: int, encoded: EncodedText) -> ClassifiedText:
            probabilities = to_probabilities(row[LOGITS], self.classification) if has_logits else row[LOGITS]
            return ClassifiedText(
                labels=self._label_reader.read(probabilities, num_labels, threshold),
                num_tokens=len(encoded),
                truncated=encoded.truncated,
                embedding=read_embedding(row, embedding),
            )

        outputs = (LOGITS,) if embedding == "none" else (LOGITS, EMBEDDING)
        return await self._answer(inputs, outputs, read, deadline=deadline)

    async def classify_by_entailment(
        self,
        inputs: TextInputs,
        given: GivenLabels,
        *,
        top_k: int,
        deadline: float | None,
        threshold: float | None = None,
    ) -> Answer[ClassifiedText]:
        """Classifies texts by the caller's labels (zero-shot); for models of natural language inference.

        Args:
            inputs: Texts without pairs.
            given: The caller's labels.
            top_k: Labels to return for each text, 1 to the number of the caller's labels; 0: all of them.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.
            threshold: Minimum probability of a label that applies, 0 to 1. None: the likeliest label applies, or all
                independent labels of at least 0.5.

        Raises:
            RequestError: The model has no label `entailment`, or as `classify`.
        """
        entailment = self._entailment
        if entailment is None:
            raise InvalidInputError(
                "candidate_labels",
                f"is set, and model {self.bundle.manifest.name} has no label entailment; leave it out, or ask a model "
                "of natural language inference",
            )
        if inputs.text_pairs:
            raise InvalidInputError("text_pairs", "is set together with candidate_labels; leave one of them out")
        hypotheses = given.hypotheses()
        fields = check_texts("texts", inputs.texts, MAX_TEXTS, self._max_text_bytes)
        if (num_pairs := len(fields) * len(hypotheses)) > MAX_TEXTS:
            raise InvalidInputError(
                "candidate_labels",
                f"has {len(hypotheses)} elements, which with {len(fields)} texts make {num_pairs} pairs; the limit is "
                f"{MAX_TEXTS}; send the texts in several calls",
            )
        num_labels = check_top_k(top_k, len(hypotheses))
        if threshold is not None:
            check_probability("threshold", threshold)
        pairs = replace(
            inputs,
            texts=[text for text in inputs.texts for _ in hypotheses],
            text_pairs=hypotheses * len(inputs.texts),
            fields=[field for field in fields for _ in hypotheses],
        )

        def read(row: Tensors, _: int, encoded: EncodedText) -> tuple[NDArray[np.float32], int, bool]:
            logits: NDArray[np.float32] = row[LOGITS].astype(np.float32, copy=False)
            logits = np.divide(logits, np.float32(self.classification.temperature), dtype=np.float32)
            return logits, len(encoded), encoded.truncated

        answer = await self._answer(pairs, (LOGITS,), read, deadline=deadline)
        scheme = (
            ClassificationScheme(kind="multi_label", thresholds=(0.5,) * len(hypotheses))
            if given.are_independent
            else ClassificationScheme()
        )
        reader = LabelReader(given.labels, scheme)
        results = []
        for start in range(0, len(answer.results), len(hypotheses)):
            rows = answer.results[start : start + len(hypotheses)]
            logits = np.stack([logits for logits, _, _ in rows])  # (L, C)
            probabilities = entailment.probabilities(logits, are_independent=given.are_independent)
            results.append(
                ClassifiedText(
                    labels=reader.read(probabilities, num_labels, threshold),
                    num_tokens=sum(num_tokens for _, num_tokens, _ in rows),
                    truncated=any(truncated for _, _, truncated in rows),
                )
            )
        return Answer(results=results, timings=answer.timings)
