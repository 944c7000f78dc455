"""The graphs of stateless models, as the batcher runs them.

B is the number of items, T the tokens of the longest text, C the classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway_server.batching.batcher import Feeds
from headway_server.batching.tensors import pad, softmax
from headway_server.errors import BundleError
from headway_server.runtime import Device, Session

Item = TypeVar("Item")


class _ClassifierGraph(ABC, Generic[Item]):
    """A graph that ends in `logits`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def device(self) -> Device:
        """Where the graph runs."""
        return self._session.device

    @abstractmethod
    def collate(self, items: Sequence[Item]) -> Feeds:
        """Makes the graph's inputs of B items."""

    def warm_up(self, items: Sequence[Item], *, num_labels: int) -> None:
        """Runs the graph once, so that the first call does not pay for it and a bundle that cannot run is known now.

        Raises:
            BundleError: The graph does not run, or its logits are not (B, `num_labels`).
        """
        try:
            shape = self.run(self.collate(items)).shape
        except Exception as error:  # onnxruntime's own kinds, or a KeyError where it has other tensors
            raise BundleError(f"{self._session.graph.file}: does not run ({error}); export the model again") from error
        if shape != (len(items), num_labels):
            raise BundleError(
                f"{self._session.graph.file}: logits are {shape}, the manifest has {num_labels} labels; "
                "export the model again"
            )

    def run(self, feeds: Feeds) -> NDArray[np.float32]:
        """Returns the logits, (B, C)."""
        logits: NDArray[np.float32] = self._session.run(feeds)["logits"]
        return logits

    def finish(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Makes probabilities of logits: (B, C) to (B, C)."""
        return softmax(outputs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._session!r})"


class TextClassifierGraph(_ClassifierGraph[NDArray[np.int64]]):
    """`input_ids` and `attention_mask`, int64 (B, T), to `logits`."""

    def __init__(self, session: Session, *, pad_id: int) -> None:
        """`pad_id` stands where a text has no token; the mask keeps the model from reading it."""
        super().__init__(session)
        self._pad_id = pad_id

    def collate(self, items: Sequence[NDArray[np.int64]]) -> Feeds:
        """Pads B arrays of ids."""
        input_ids, attention_mask = pad(items, self._pad_id)
        return {"input_ids": input_ids, "attention_mask": attention_mask}


class ImageClassifierGraph(_ClassifierGraph[NDArray[np.float32]]):
    """`pixel_values`, float32 (B, 3, height, width), to `logits`."""

    def collate(self, items: Sequence[NDArray[np.float32]]) -> Feeds:
        """Stacks B arrays of (3, height, width)."""
        return {"pixel_values": np.stack(items)}
