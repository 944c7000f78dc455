"""Returns the tokens of a sequence unchanged, for callers that decode them."""

from __future__ import annotations

from collections.abc import Sequence


class TokenAssembly:
    """Tokens, in tuples; an `OutputAssembler`."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._num_taken = 0

    def push(self, token_id: int) -> bool:
        """Takes the next token."""
        self._token_ids.append(token_id)
        return False

    def take(self) -> tuple[int, ...]:
        """Returns the tokens since the last call."""
        taken = self._token_ids[self._num_taken :]
        self._num_taken = len(self._token_ids)
        return tuple(taken)

    def finish(self) -> tuple[int, ...]:
        """Returns all tokens."""
        return tuple(self._token_ids)

    def whole(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns other tokens."""
        return tuple(token_ids)

    def join(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Joins parts."""
        return tuple(token_id for part in parts for token_id in part)

    def __repr__(self) -> str:
        return f"TokenAssembly({len(self._token_ids)} tokens)"
