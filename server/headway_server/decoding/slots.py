"""Per-slot values besides the decoder's state, in columns that move together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Slots:
    """Columns with a value for each slot. Whoever makes a column reads and writes it; `move` is for all of them."""

    def __init__(self, num_slots: int) -> None:
        """Starts without columns.

        Args:
            num_slots: Slots there are.
        """
        self.num_slots = num_slots
        self._columns: list[Any] = []

    def __repr__(self) -> str:
        return f"Slots({self.num_slots} slots, {len(self._columns)} columns)"

    def array(self, dtype: DTypeLike, fill: Any = 0, *, shape: tuple[int, ...] = ()) -> NDArray[Any]:
        """Returns a new column (num_slots, *shape) whose values are `fill`, of the shape of one slot or a scalar."""
        column = np.empty((self.num_slots, *shape), dtype)
        column[:] = fill
        self._columns.append(column)
        return column

    def objects(self) -> list[Any]:
        """Returns a new column of objects, None at first."""
        column: list[Any] = [None] * self.num_slots
        self._columns.append(column)
        return column

    def move(self, source: int, target: int) -> None:
        """Moves the values of a slot to another; the values of `source` are invalid afterwards."""
        for column in self._columns:
            column[target] = column[source]
