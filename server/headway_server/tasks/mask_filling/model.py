"""Masked language models: the likeliest tokens for the masks of a text.

M masks of a text, V vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Postprocess, Tensors
from headway_server.batching.settings import MAX_TEXTS
from headway_server.bundles import Manifest, demanded
from headway_server.errors import InvalidInputError
from headway_server.field_rules import most_bytes, most_elements
from headway_server.preprocessing import EncodedText
from headway_server.preprocessing.pool import off_loop
from headway_server.serving.answers import Answer
from headway_server.serving.calls import current_caller
from headway_server.serving.limits import check_count, check_text, check_texts, num_bytes
from headway_server.settings import TEXTS_OF_A_CALL
from headway_server.tasks.outputs import LOGITS, softmax
from headway_server.tasks.parameters import check_rules
from headway_server.tasks.text.model import TextInputs, TextModel

POSITIONS: Final = "mask_positions"
"""Input of the graph: positions of the masks among a text's tokens, (M,) int64."""
NEUTRAL_MASKS: Final = ("[MASK]", "<mask>")
"""Masks that every model reads."""
MAX_MASKS: Final = 64
"""Maximum masks of a text."""
DEFAULT_TOP_K: Final = 5
MAX_TARGETS: Final = most_elements("FillMaskRequest.targets")
_MAX_TARGET_BYTES: Final = most_bytes("FillMaskRequest.targets")
_FEW_CHARACTERS: Final = 2**17
"""Characters that are searched for masks on the event loop, in some milliseconds."""
_BATCH_BYTES: Final = 64 * 2**20
"""Bytes of a batch's logits, about; the cost of a mask follows from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskToken:
    """A token for a mask."""

    token: str
    """With a space before it if it begins a word."""
    token_id: int
    probability: float
    filled_text: str
    """The text with the token in place of the mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledMask:
    """A mask: characters `start` to `end`, `end` excluded, in Unicode code points."""

    start: int
    end: int
    tokens: tuple[MaskToken, ...]
    """The likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledText:
    """The masks of one text, in order."""

    masks: tuple[FilledMask, ...]
    num_tokens: int
    truncated: bool


class MaskFiller(TextModel):
    """Fills masks of texts."""

    _memory_noun = "filled texts"

    @classmethod
    def _postprocess(cls, manifest: Manifest) -> Postprocess | None:  # noqa: ARG003 (the same for all)
        return None

    @classmethod
    def _tensors(cls, manifest: Manifest, text: EncodedText, *, has_types: bool) -> Tensors:
        positions = np.flatnonzero(text.input_ids == _mask_id(manifest))
        if not len(positions):  # of a graph's test run
            positions = np.zeros(1, np.int64)
        return {**super()._tensors(manifest, text, has_types=has_types), POSITIONS: positions}

    @classmethod
    def _expected(cls, manifest: Manifest, length: int) -> Mapping[str, tuple[int, ...]]:
        num_masks = length if _mask_id(manifest) == 0 else 1  # of a text of zeros
        return {LOGITS: (num_masks, _num_logits(manifest))}

    def _cost(self, item: Tensors) -> int:
        """Returns the tokens of a text, or more if its logits take more than their share of a batch's memory."""
        budget = self._budget
        masks = len(item[POSITIONS]) * _num_logits(self.bundle.manifest) * np.dtype(np.float32).itemsize
        return max(super()._cost(item), -(-masks * budget // _BATCH_BYTES))

    @cached_property
    def _mask(self) -> str:
        """The model's own mask."""
        return self._tokenizer.piece(_mask_id(self.bundle.manifest))

    @cached_property
    def _masks(self) -> re.Pattern[str]:
        """All masks that it reads."""
        return re.compile("|".join(map(re.escape, dict.fromkeys((self._mask, *NEUTRAL_MASKS)))))

    async def fill(
        self, inputs: TextInputs, *, top_k: int, targets: Sequence[str] = (), deadline: float | None
    ) -> Answer[FilledText]:
        """Finds tokens for the masks of texts; each mask is filled by itself.

        Args:
            inputs: Texts without pairs, each with 1 to `MAX_MASKS` masks: the model's own or `NEUTRAL_MASKS`.
            top_k: Most tokens of a mask; 0: `DEFAULT_TOP_K`, or all of `targets`.
            targets: Tokens to choose from, at most `MAX_TARGETS`; none: the vocabulary.
            deadline: End of the caller's wait, in seconds of `time.monotonic`.

        Raises:
            RequestError: An argument is out of its range, a target is no token, the texts cannot be read, one has no
                mask or too many, the filled texts are too large, the queue is full, the deadline passed, the server is
                draining.
        """
        check_rules("top_k", top_k, "FillMaskRequest.top_k")
        candidates = self._candidates(targets)
        count = min(top_k or (len(candidates) if targets else DEFAULT_TOP_K), len(candidates))
        fields = check_texts("texts", inputs.texts, MAX_TEXTS, self._max_text_bytes)
        num_masks = await self._count_masks(inputs.texts, fields)
        size = count * sum(number * num_bytes(text) for number, text in zip(num_masks, inputs.texts, strict=True))
        if size > (limit := TEXTS_OF_A_CALL * self._max_text_bytes):
            raise InvalidInputError(
                "texts",
                f"have {size} bytes in all when each mask is filled with {count} tokens, the limit of a call is "
                f"{limit}; send {'fewer masks, or ' if count == 1 else 'a lower top_k, or '}several calls",
            )

        def read(row: Tensors, index: int, encoded: EncodedText) -> FilledText:
            text = inputs.texts[index]
            if not np.isfinite(row[LOGITS]).all():
                raise FloatingPointError("the model's logits are not finite")
            chances = softmax(row[LOGITS])[:, candidates]  # (M, C)
            masks = [
                FilledMask(
                    start=mask.start(),
                    end=mask.end(),
                    tokens=tuple(
                        self._token(text, mask, int(candidates[place]), float(own[place]))
                        for place in _largest(own, count)
                    ),
                )
                for mask, own in zip(self._masks.finditer(text), chances, strict=True)
            ]
            return FilledText(masks=tuple(masks), num_tokens=len(encoded), truncated=encoded.truncated)

        with self._memory.admit(1, size, caller=current_caller()):
            return await self._answer(inputs, (LOGITS,), read, deadline=deadline)

    def _candidates(self, targets: Sequence[str]) -> NDArray[np.int64]:
        """Returns the ids of targets, (C,), each once; all that the tokenizer knows without targets.

        Raises:
            InvalidInputError: One is not a token, or there are too many.
        """
        num_logits = _num_logits(self.bundle.manifest)
        if not targets:
            return np.arange(min(self._tokenizer.largest_id + 1, num_logits))
        check_count("targets", len(targets), MAX_TARGETS)
        special, ids = self.bundle.manifest.special_tokens, dict[int, None]()
        for index, target in enumerate(targets):
            field = check_text(f"targets[{index}]", target, _MAX_TARGET_BYTES)
            known = self._tokenizer.library_tokenizer.token_to_id(target)
            found = [known] if known is not None else self._tokenizer.encode_now(target).input_ids.tolist()
            if len(found) != 1 or (special is not None and found[0] == special.unk):
                parts = ", ".join(repr(self._tokenizer.piece(one)) for one in found) or "nothing"
                raise InvalidInputError(
                    field,
                    f"is no token of model {self.bundle.manifest.name}, which reads it as {parts}; give a token of its "
                    "vocabulary",
                )
            if found[0] >= num_logits:
                raise InvalidInputError(
                    field,
                    f"is token {found[0]}, and model {self.bundle.manifest.name} fills masks with tokens below "
                    f"{num_logits}; leave it out",
                )
            ids[found[0]] = None
        return np.array(list(ids), np.int64)

    async def _count_masks(self, texts: Sequence[str], fields: Sequence[str]) -> list[int]:
        """Returns the number of masks of each text.

        Raises:
            InvalidInputError: One has none, or more than `MAX_MASKS`.
        """
        counts = await off_loop(
            sum(map(len, texts)),
            lambda: [sum(1 for _ in islice(self._masks.finditer(text), MAX_MASKS + 1)) for text in texts],
            most_on_loop=_FEW_CHARACTERS,
        )
        for field, count in zip(fields, counts, strict=True):
            if not count:
                raise InvalidInputError(field, f"has no mask; put {NEUTRAL_MASKS[0]} where a token is missing")
            if count > MAX_MASKS:
                raise InvalidInputError(field, f"has more than {MAX_MASKS} masks, the limit of a text; split it")
        return counts

    async def _encode(self, inputs: TextInputs, fields: Sequence[str], *, with_offsets: bool) -> list[EncodedText]:
        """Tokenizes texts with the model's own masks; one whose mask would be cut off is refused."""
        written = await off_loop(
            sum(map(len, inputs.texts)),
            lambda: [self._masks.subn(lambda _: self._mask, text) for text in inputs.texts],
            most_on_loop=_FEW_CHARACTERS,
        )
        texts = [text for text, _ in written]
        encoded = await super()._encode(replace(inputs, texts=texts), fields, with_offsets=with_offsets)
        mask_id = _mask_id(self.bundle.manifest)
        for field, (_, expected), one in zip(fields, written, encoded, strict=True):
            count = int((one.input_ids == mask_id).sum())
            if count != expected:
                raise InvalidInputError(
                    field,
                    f"has {expected} masks, and the model reads {count} of them in its {self.max_input_tokens} tokens; "
                    + (
                        "shorten it"
                        if one.truncated
                        else f"its tokenizer does not read {self._mask} as a mask beside what is before and behind it; "
                        "put a space there"
                    ),
                )
        return encoded

    def _token(self, text: str, mask: re.Match[str], token_id: int, probability: float) -> MaskToken:
        token = self._tokenizer.token_text(token_id)
        filled = fill_in(text, mask.start(), mask.end(), token)
        return MaskToken(token=token, token_id=token_id, probability=probability, filled_text=filled)


def fill_in(text: str, start: int, end: int, token: str) -> str:
    """Returns a text with a token in place of the characters `start` to `end`.

    A token that begins a word is set apart from a word before it; any other continues the line before, without the
    white space between them.
    """
    before, word = text[:start], token.lstrip()
    if not token.startswith(" "):
        line = before.rstrip()
        begins_line = not line or "\n" in before[len(line) :]
        return (before if begins_line else line) + token + text[end:]
    is_apart = not before or not word or not (_is_spaced(before[-1]) and _is_spaced(word[0]))
    return f"{before}{'' if is_apart else ' '}{word}{text[end:]}"


def _is_spaced(character: str) -> bool:
    """Returns True for letters and digits, except in scripts without case, which may be written without spaces."""
    return character.isalnum() and unicodedata.category(character) != "Lo"


def _largest(values: NDArray[np.float32], count: int) -> list[int]:
    """Returns the places of the largest values, (C,), the largest first, the first among equals."""
    places = np.argpartition(-values, count - 1)[:count]
    found: list[int] = places[np.lexsort((places, -values[places]))].tolist()
    return found


def _mask_id(manifest: Manifest) -> int:
    return demanded(demanded(manifest.special_tokens).mask)


def _num_logits(manifest: Manifest) -> int:
    """Returns the width of the logits, which all variants share."""
    graphs = [variant.graphs["model"] for variant in manifest.variants.values()]
    return int(next(spec.shape[-1] for spec in graphs[0].outputs if spec.name == LOGITS))
