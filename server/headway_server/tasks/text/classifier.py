"""Labels of texts, or of pairs of texts."""

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
    """The labels of one text, the most likely first."""

    labels: tuple[ScoredLabel, ...]
    num_tokens: int
    truncated: bool
    embedding: NDArray[np.float32] | None = None
    """(D,), if it was asked for."""


class TextClassifier(TextModel):
    """Labels texts."""

    @classmethod
    def _postprocess(cls, manifest: Manifest) -> Postprocess | None:
        # What a text entails is read from the logits themselves.
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
        """Labels texts.

        Args:
            inputs: The texts.
            top_k: Labels to answer a text, 1 to the number of labels; 0: all of them.
            deadline: When the caller stops waiting, by `time.monotonic`.
            threshold: Probability from which a label applies, 0 to 1, in place of the model's.
            embedding: Which vector of each text to answer too, from the same run; for bundles whose graphs give
                embeddings.

        Raises:
            RequestError: An argument is out of its range, the texts cannot be read, the queue is full, the deadline
                passed, the server is draining.
        """
        num_labels = check_top_k(top_k, len(self.labels))
        if threshold is not None:
            check_probability("threshold", threshold)
        has_logits = self._entailment is not None

        def read(row: Tensors, _: str, encoded: EncodedText) -> ClassifiedText:
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
        """Labels texts with labels that the caller gives; for models of natural language inference.

        Args:
            inputs: The texts, without pairs.
            given: The labels.
            top_k: Labels to answer a text, 1 to the number of those given; 0: all of them.
            deadline: When the caller stops waiting, by `time.monotonic`.
            threshold: Probability from which a label applies, 0 to 1. None: the likeliest applies, and of independent
                labels those of at least 0.5.

        Raises:
            RequestError: The model cannot do this, and as `classify`.
        """
        entailment = self._entailment
        if entailment is None:
            raise InvalidInputError(
                "candidate_labels",
                f"is set, and model {self.bundle.manifest.name} tells no entailment; leave it out, or ask a model of "
                "natural language inference",
            )
        if inputs.text_pairs:
            raise InvalidInputError("text_pairs", "is set beside candidate_labels; leave one of them out")
        hypotheses = given.hypotheses()
        fields = check_texts("texts", inputs.texts, MAX_TEXTS, self._max_text_bytes)
        if (num_pairs := len(fields) * len(hypotheses)) > MAX_TEXTS:
            raise InvalidInputError(
                "candidate_labels",
                f"has {len(hypotheses)} elements for {len(fields)} texts, {num_pairs} pairs; the limit is {MAX_TEXTS}; "
                "send the texts in several calls",
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

        def read(row: Tensors, _: str, encoded: EncodedText) -> tuple[NDArray[np.float32], int, bool]:
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
