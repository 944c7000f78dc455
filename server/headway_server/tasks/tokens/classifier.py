"""Labelled spans of texts.

B is the number of texts of a batch, T the tokens of its longest text, C the tags, S the spans of a text, P its pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.graph import Output, OutputBatches, TaggableText, TokenClassifierGraph, Wanted
from headway_server.batching.tensors import log_softmax
from headway_server.bundles import TOKENIZER_FILE, Bundle
from headway_server.bundles.tags import TagSet
from headway_server.observers import NO_OBSERVER, Observer
from headway_server.preprocessing import EncodedText, TextTokenizer
from headway_server.preprocessing.pieces import Pieces
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.settings import ServerSettings
from headway_server.tasks.text.model import WARM_UP_LENGTH, TextInputs, TextModel
from headway_server.tasks.tokens.spans import END, LABEL, PROBABILITY, START, SpanDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledSpan:
    """A labelled part of a text: characters `start` to `end`, `end` excluded, in Unicode code points."""

    label: str
    probability: float
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedText:
    """The spans of one text, in its order; they do not overlap."""

    spans: tuple[LabeledSpan, ...]
    num_tokens: int
    truncated: bool


class TokenClassifier(TextModel[TaggableText]):
    """Labels spans of texts."""

    _reads_offsets = True

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
        graph = TokenClassifierGraph(runtime.open(bundle, variant.graphs["model"]), pad_id=pad_id or 0)
        length = min(WARM_UP_LENGTH, manifest.limits.max_input_tokens or 1)
        warmed = graph.warm_up([TaggableText("", EncodedText(input_ids=np.zeros(length, np.int64)))], manifest)
        return cls(
            bundle,
            chosen,
            graph,
            tokenizer,
            settings.batching,
            batches=OutputBatches(graph, SpanReader(TagSet.parse(manifest.labels))),
            costs=warmed.costs(length),
            prepare=_with_pieces,
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that a span may have."""
        return TagSet.parse(self.bundle.manifest.labels).labels

    def _item(self, text: str, encoded: EncodedText) -> TaggableText:
        return TaggableText(text, encoded)

    async def classify(self, inputs: TextInputs, *, deadline: float | None) -> Answer[TaggedText]:
        """Labels spans of texts.

        Args:
            inputs: The texts.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: The texts cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        encoded, batched, timings = await self._answer(inputs, Output.LOGITS, deadline)
        labels = self.labels
        results = [
            TaggedText(spans=_name(found, labels), num_tokens=len(tokens), truncated=tokens.truncated)
            for found, tokens in zip(batched.rows, encoded, strict=True)
        ]
        return Answer(results=results, timings=timings)


class SpanReader:
    """Finds the spans of texts in the logits of their tokens."""

    def __init__(self, tags: TagSet) -> None:
        self._decoder = SpanDecoder(tags)

    def __call__(self, logits: NDArray[np.float32], items: Sequence[TaggableText]) -> list[NDArray[np.float32]]:
        """Finds the spans of each text: (B, T, C) to B arrays of (S, 4), whose columns `batching.spans` names.

        Raises:
            FloatingPointError: A logit is not a number.
        """
        found = []
        for row, item in zip(logits, items, strict=True):
            assert item.pieces is not None  # found before the batch was run
            scores = row[item.pieces.tokens]  # (P, C)
            if not np.isfinite(scores).all():
                raise FloatingPointError("a model answered logits that are not numbers")
            pieces = item.pieces
            found.append(self._decoder.decode(log_softmax(scores), pieces.starts, pieces.ends, pieces.joined))
        return found


def _name(found: NDArray[np.float32], labels: Sequence[str]) -> tuple[LabeledSpan, ...]:
    """Names the labels of spans, (S, 4)."""
    return tuple(
        LabeledSpan(
            label=labels[int(row[LABEL])],
            probability=row[PROBABILITY],
            start=int(row[START]),
            end=int(row[END]),
        )
        for row in found.tolist()
    )


def _with_pieces(wanted: Wanted[TaggableText]) -> Wanted[TaggableText]:
    """What is wanted of a text, whose pieces are found if spans are."""
    if wanted.output is Output.EMBEDDING:
        return wanted
    item = wanted.item
    return Wanted(dataclasses.replace(item, pieces=Pieces.find(item.text, item.encoded.offsets)), wanted.output)
