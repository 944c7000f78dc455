"""The graphs of stateless models, as the batcher runs them.

B is the number of items, T the tokens of the longest text, C the classes, D the width of an embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.batcher import Feeds
from headway_server.batching.tensors import pad, sigmoid, softmax
from headway_server.batching.warm_up import WarmUp, run_to_warm_up
from headway_server.bundles import ClassificationScheme, Manifest
from headway_server.errors import BundleError
from headway_server.preprocessing import EncodedText
from headway_server.preprocessing.pieces import Pieces
from headway_server.runtime import Device, Session

Item = TypeVar("Item")


class Output(StrEnum):
    """What is asked of a graph, by the name of its tensor."""

    LOGITS = "logits"
    EMBEDDING = "embedding"


class ClassifierGraph(ABC, Generic[Item]):
    """A graph that gives `logits`, float32 (B, C) or (B, T, C), and perhaps `embedding`, float32 (B, D)."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def device(self) -> Device:
        """Where the graph runs."""
        return self._session.device

    @property
    def session(self) -> Session:
        """What runs."""
        return self._session

    @abstractmethod
    def collate(self, items: Sequence[Item]) -> Feeds:
        """Makes the graph's inputs of B items."""

    def warm_up(self, items: Sequence[Item], manifest: Manifest) -> WarmUp:
        """Runs the graph, so that the first call does not pay for it and a bundle that cannot run is known now.

        Raises:
            BundleError: The graph does not run, or its outputs are not as wide as the manifest says.
        """
        file = self._session.graph.file
        feeds = self.collate(items)
        try:
            warmed = run_to_warm_up(self._session, feeds)
            shapes = {name: tensor.shape for name, tensor in warmed.outputs.items()}
            found = shapes[Output.LOGITS]
        except Exception as error:  # onnxruntime's own kinds, or a KeyError where it has other tensors
            raise BundleError(f"{file}: does not run ({error}); export the model again") from error
        if found != self._logits_shape(feeds, len(manifest.labels)):
            raise BundleError(
                f"{file}: logits are {found}, the manifest has {len(manifest.labels)} labels; export the model again"
            )
        if manifest.embedding is not None:
            expected = (len(items), manifest.embedding.dimension)
            if shapes.get(Output.EMBEDDING) != expected:
                raise BundleError(
                    f"{file}: embeddings are {shapes.get(Output.EMBEDDING)}, by the manifest they are {expected}; "
                    "export the model again"
                )
        return warmed

    def run(self, feeds: Feeds, outputs: Sequence[Output]) -> dict[str, NDArray[np.float32]]:
        """Returns the outputs that are asked for, by name."""
        return self._session.run(feeds, outputs)

    def _logits_shape(self, feeds: Feeds, num_labels: int) -> tuple[int, ...]:
        """What shape the logits of a batch must have."""
        return (len(next(iter(feeds.values()))), num_labels)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._session!r})"


class TextGraph(ClassifierGraph[Item]):
    """`input_ids` and `attention_mask`, int64 (B, T); `token_type_ids` too where the model has types of tokens."""

    def __init__(self, session: Session, *, pad_id: int) -> None:
        """`pad_id` stands where a text has no token; the mask keeps the model from reading it."""
        super().__init__(session)
        self._pad_id = pad_id
        self._has_types = any(spec.name == "token_type_ids" for spec in session.graph.inputs)

    def _pad(self, texts: Sequence[EncodedText]) -> Feeds:
        """Pads the ids of B texts."""
        input_ids, attention_mask = pad([text.input_ids for text in texts], self._pad_id)
        feeds: Feeds = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self._has_types:
            feeds["token_type_ids"], _ = pad([_types(text) for text in texts], 0)
        return feeds


class TextClassifierGraph(TextGraph[EncodedText]):
    """Logits a text."""

    def collate(self, items: Sequence[EncodedText]) -> Feeds:
        """Pads the ids of B texts."""
        return self._pad(items)


@dataclass(frozen=True, slots=True)
class TaggableText:
    """A text with its tokens."""

    text: str
    encoded: EncodedText
    """With offsets, unless only an embedding is asked for."""
    pieces: Pieces | None = None
    """None before they are found, and where only an embedding is asked for."""


class TokenClassifierGraph(TextGraph[TaggableText]):
    """Logits a token, (B, T, C)."""

    def collate(self, items: Sequence[TaggableText]) -> Feeds:
        """Pads the ids of B texts."""
        return self._pad([item.encoded for item in items])

    def _logits_shape(self, feeds: Feeds, num_labels: int) -> tuple[int, ...]:
        return (*feeds["input_ids"].shape, num_labels)


class ImageClassifierGraph(ClassifierGraph[NDArray[np.float32]]):
    """`pixel_values`, float32 (B, 3, height, width)."""

    def collate(self, items: Sequence[NDArray[np.float32]]) -> Feeds:
        """Stacks B arrays of (3, height, width)."""
        return {"pixel_values": np.stack(items)}


@dataclass(frozen=True, slots=True)
class Wanted(Generic[Item]):
    """An item, and what is asked about it."""

    item: Item
    output: Output


@dataclass(frozen=True, slots=True)
class _Prepared(Generic[Item]):
    """A batch that is ready to run."""

    feeds: Feeds
    items: Sequence[Wanted[Item]]


@dataclass(frozen=True, slots=True)
class _Answered(Generic[Item]):
    """A batch that was run."""

    tensors: dict[str, NDArray[np.float32]]
    items: Sequence[Wanted[Item]]


class OutputBatches(Generic[Item]):
    """Batches in which some items want what logits tell and others embeddings: one run answers them all.

    ONNX Runtime computes what leads to either in any case (a graph runs as it was planned at load), and the states
    before them are nearly all of the work; what is not asked for is not handed out.
    """

    def __init__(
        self,
        graph: ClassifierGraph[Item],
        read_logits: Callable[[NDArray[np.float32], Sequence[Item]], Sequence[NDArray[np.float32]]],
    ) -> None:
        """Prepares for batches.

        Args:
            graph: What runs.
            read_logits: Makes the results of B items of their logits.
        """
        self._graph = graph
        self._read_logits = read_logits

    def collate(self, items: Sequence[Wanted[Item]]) -> _Prepared[Item]:
        """Makes the graph's inputs of B items."""
        return _Prepared(self._graph.collate([wanted.item for wanted in items]), items)

    def run(self, prepared: _Prepared[Item]) -> _Answered[Item]:
        """Runs the graph for what some item of the batch wants."""
        wanted = {item.output for item in prepared.items}
        outputs = [output for output in Output if output in wanted]
        return _Answered(self._graph.run(prepared.feeds, outputs), prepared.items)

    def finish(self, answered: _Answered[Item]) -> list[NDArray[np.float32]]:
        """Makes the result of each item: what its logits tell, or an embedding, (D,)."""
        items, logits = answered.items, answered.tensors.get(Output.LOGITS)
        told: dict[int, NDArray[np.float32]] = {}
        if logits is not None:
            rows = [row for row, wanted in enumerate(items) if wanted.output is Output.LOGITS]
            own = logits if len(rows) == len(items) else logits[rows]
            told = dict(zip(rows, self._read_logits(own, [items[row].item for row in rows]), strict=True))
        return [told[row] if row in told else answered.tensors[Output.EMBEDDING][row] for row in range(len(items))]


def probabilities_by(
    classification: ClassificationScheme,
) -> Callable[[NDArray[np.float32], Sequence[object]], list[NDArray[np.float32]]]:
    """Returns what makes the probabilities of B items, each (C,), of their logits, (B, C)."""
    return lambda logits, _: list(to_probabilities(logits, classification))


def to_probabilities(logits: NDArray[np.float32], classification: ClassificationScheme) -> NDArray[np.float32]:
    """Divides logits, (B, C), by the temperature and makes probabilities of them, (B, C)."""
    scaled = logits.astype(np.float32, copy=False) / np.float32(classification.temperature)
    return sigmoid(scaled) if classification.kind == "multi_label" else softmax(scaled)


def _types(text: EncodedText) -> NDArray[np.int64]:
    return np.zeros_like(text.input_ids) if text.type_ids is None else text.type_ids
