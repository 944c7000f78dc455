"""Labelled spans of texts.

B is the number of texts of a batch, T the tokens of its longest text, C the tags, S the spans of a text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.admission import Admission
from headway_server.batching.batcher import Batcher, Feeds
from headway_server.batching.model import Classification, StatelessModel, call_timings
from headway_server.batching.settings import BatchingSettings
from headway_server.batching.spans import END, LABEL, PROBABILITY, START, SpanDecoder
from headway_server.batching.tensors import log_softmax, pad
from headway_server.batching.warm_up import WarmUp, run_to_warm_up
from headway_server.bundles import TOKENIZER_FILE, Bundle, Precision
from headway_server.bundles.tags import TagSet
from headway_server.errors import BundleError
from headway_server.preprocessing import EncodedText, TextTokenizer
from headway_server.preprocessing.pieces import Pieces
from headway_server.runtime import Device, Runtime, Session

_WARM_UP_LENGTH = 32


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


@dataclass(frozen=True, slots=True)
class TextToTag:
    """A text with its tokens."""

    text: str
    encoded: EncodedText
    """With offsets."""


class TokenClassifierGraph:
    """`input_ids` and `attention_mask`, int64 (B, T), to `logits`, float32 (B, T, C), and on to spans."""

    def __init__(self, session: Session, *, pad_id: int, tags: TagSet) -> None:
        """`pad_id` stands where a text has no token; the mask keeps the model from reading it."""
        self._session = session
        self._pad_id = pad_id
        self._decoder = SpanDecoder(tags)

    @property
    def device(self) -> Device:
        """Where the graph runs."""
        return self._session.device

    @property
    def session(self) -> Session:
        """What runs."""
        return self._session

    def collate(self, items: Sequence[TextToTag]) -> tuple[Feeds, list[Pieces]]:
        """Pads the ids of B texts and finds their pieces."""
        input_ids, attention_mask = pad([item.encoded.input_ids for item in items], self._pad_id)
        pieces = [Pieces.find(item.text, item.encoded.offsets) for item in items]
        return {"input_ids": input_ids, "attention_mask": attention_mask}, pieces

    def run(self, prepared: tuple[Feeds, list[Pieces]]) -> tuple[NDArray[np.float32], list[Pieces]]:
        """Returns the logits, (B, T, C), beside the pieces."""
        feeds, pieces = prepared
        return self._session.run(feeds)["logits"], pieces

    def finish(self, outputs: tuple[NDArray[np.float32], list[Pieces]]) -> list[NDArray[np.float32]]:
        """Finds the spans of each text: B arrays of (S, 4), whose columns `headway_server.batching.spans` names.

        Raises:
            FloatingPointError: The graph gave a logit that is not a number.
        """
        logits, pieces = outputs
        found = []
        for row, own in zip(logits, pieces, strict=True):
            scores = row[own.tokens]  # (P, C)
            if not np.isfinite(scores).all():
                raise FloatingPointError(f"{self!r} answered logits that are not numbers")
            found.append(self._decoder.decode(log_softmax(scores), own.starts, own.ends, own.joined))
        return found

    def warm_up(self, length: int, *, num_tags: int) -> WarmUp:
        """Runs the graph, so that the first call does not pay for it and a bundle that cannot run is known now.

        Raises:
            BundleError: The graph does not run, or its logits are not (B, T, `num_tags`).
        """
        ids = np.zeros((1, length), np.int64)
        try:
            warmed = run_to_warm_up(self._session, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
            shape = warmed.outputs["logits"].shape
        except Exception as error:  # onnxruntime's own kinds, or a KeyError where it has other tensors
            raise BundleError(f"{self._session.graph.file}: does not run ({error}); export the model again") from error
        if shape != (1, length, num_tags):
            raise BundleError(
                f"{self._session.graph.file}: logits of {length} tokens are {shape}, the manifest has {num_tags} tags; "
                "export the model again"
            )
        return warmed

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._session!r})"


class TokenClassifier(StatelessModel):
    """Labels spans of texts."""

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        graph: TokenClassifierGraph,
        tokenizer: TextTokenizer,
        settings: BatchingSettings,
        *,
        most_padding: int | None,
    ) -> None:
        manifest = bundle.manifest
        assert manifest.limits.max_input_tokens is not None  # the manifest's own check
        self.max_input_tokens: int = manifest.limits.max_input_tokens
        self._tokenizer = tokenizer
        self._labels = TagSet.parse(manifest.labels).labels
        super().__init__(
            bundle,
            precision,
            graph.device,
            Batcher(
                graph,
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
        tags = TagSet.parse(manifest.labels)
        graph = TokenClassifierGraph(runtime.open(bundle, variant.graphs["model"]), pad_id=pad_id or 0, tags=tags)
        length = min(_WARM_UP_LENGTH, manifest.limits.max_input_tokens or 1)
        warmed = graph.warm_up(length, num_tags=len(manifest.labels))
        return cls(bundle, chosen, graph, tokenizer, settings, most_padding=warmed.most_padding(length))

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that a span may have."""
        return self._labels

    async def classify(
        self, texts: Sequence[str], *, fields: Sequence[str], truncate: bool, deadline: float | None
    ) -> Classification[TaggedText]:
        """Labels spans of texts.

        Args:
            texts: 1 to `MAX_TEXTS` texts of at least one character.
            fields: What the request calls each of them, for messages.
            truncate: Whether a text past the limit is shortened at its end instead of refused.
            deadline: When the caller stops waiting, by `time.monotonic`.

        Raises:
            RequestError: The texts cannot be read, the queue is full, the deadline passed, the server is draining.
        """
        with self._admission.admit(len(texts), sum(len(text.encode()) for text in texts)):
            began = time.monotonic()
            encoded = await self._tokenizer.encode_limited(
                texts, fields=fields, max_tokens=self.max_input_tokens, truncate=truncate, with_offsets=True
            )
            preprocessing_s = time.monotonic() - began
            batched = await self._batcher.submit(
                [TextToTag(text, tokens) for text, tokens in zip(texts, encoded, strict=True)],
                [len(tokens) for tokens in encoded],
                deadline=deadline,
            )
        results = [
            TaggedText(spans=self._name(found), num_tokens=len(tokens), truncated=tokens.truncated)
            for found, tokens in zip(batched.rows, encoded, strict=True)
        ]
        return Classification(results=results, timings=call_timings(batched, preprocessing_s))

    def _name(self, found: NDArray[np.float32]) -> tuple[LabeledSpan, ...]:
        """Names the labels of spans, (S, 4)."""
        return tuple(
            LabeledSpan(
                label=self.labels[int(row[LABEL])],
                probability=row[PROBABILITY],
                start=int(row[START]),
                end=int(row[END]),
            )
            for row in found.tolist()
        )
