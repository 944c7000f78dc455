"""SentencePiece models as a `tokenizer.json`, and the check that a tokenizer is what it was made from.

SentencePiece normalises a text by a table of replacements, of which the longest that fits applies at each place. The
`Precompiled` step of `tokenizers` reads the same table but looks up whole grapheme clusters, and drops what follows a
match in one: a letter of the table before a combining mark loses the mark. `_normalization` therefore puts a separator
between characters that are not replaced together, composes those that are (NFC), looks up, composes again, and takes
the separators out.
"""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast
from unicodedata import normalize

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from headway_export.errors import SourceError

SPACE: Final = "▁"
"""What SentencePiece writes for a space."""
NUM_LINES: Final = 10_000
"""Lines that a converted tokenizer is checked on."""

_APART, _TOGETHER, _OTHER = "\ufff0", "\ufff1", "\ufff8"
"""Separators: unassigned characters that break grapheme clusters and that nothing composes with; texts that hold one
are given the third, which no vocabulary knows either."""
_UNIGRAM, _BPE, _CHARACTERS = 1, 2, 4
"""Types of models."""
_NORMAL, _USER_DEFINED = 1, 4
"""Types of pieces."""

_SCRIPTS: Final = (
    (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x24F), (0x250, 0x2AF), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F),
    (0x530, 0x58F), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0x980, 0x9FF), (0xB80, 0xBFF), (0xE00, 0xE7F),
    (0xF00, 0xFFF), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x137F), (0x1780, 0x17FF), (0x1E00, 0x1FFF),
    (0x2000, 0x206F), (0x2070, 0x20CF), (0x2100, 0x22FF), (0x2460, 0x24FF), (0x3000, 0x30FF), (0x3130, 0x318F),
    (0x3200, 0x33FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0xFB00, 0xFDFF), (0xFE00, 0xFE6F),
    (0xFF00, 0xFFFD), (0x1D400, 0x1D7FF), (0x1F1E6, 0x1F1FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0x0, 0x1F),
    (0x7F, 0x9F),
)  # fmt: skip
_SEPARATORS: Final = (" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u200b", "\u200d", "\u00ad", "")


def sample_lines(count: int = NUM_LINES, *, seed: int = 0, pieces: Sequence[str] = ()) -> Iterator[str]:
    """Yields texts of many scripts, of combining marks on anything, of white space, and of a vocabulary's own pieces.

    Args:
        count: How many.
        seed: Of the random numbers.
        pieces: Strings that are to occur among the others, such as those of special tokens.
    """
    draw = random.Random(seed)  # noqa: S311 (texts, not secrets)
    for number in range(count):
        kind, words = number % 5, []
        script = draw.choice(_SCRIPTS)
        for _ in range(draw.randint(0, 14)):
            first, last = draw.choice(_SCRIPTS) if kind == 0 else script if kind < 4 else _SCRIPTS[0]
            words.append("".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 9))))
            if pieces and draw.random() < (0.8 if kind == 4 else 0.2):
                words.append(draw.choice(pieces))
        text = draw.choice(_SEPARATORS).join(words)
        if kind in (1, 2):
            marks = (0x300, 0x36F) if kind == 1 else (0x1100, 0x11FF)
            text = "".join(c + (chr(draw.randint(*marks)) if draw.random() < 0.3 else "") for c in text)
        yield text


def check_tokenizer(
    path: Path, tokenizer: Tokenizer, original: Callable[[str], Sequence[int]], *, lines: Iterable[str]
) -> None:
    """Holds a tokenizer against the one that it was made from, token for token.

    Args:
        path: The folder, for the message.
        tokenizer: The converted one.
        original: Gives the ids of a text, special tokens included.
        lines: Texts.

    Raises:
        SourceError: They differ; the message has the text.
    """
    for line in lines:
        expected, found = list(original(line)), tokenizer.encode(line).ids
        if expected != found:
            place = next((i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), 0)
            raise SourceError(
                f"{path}: the converted tokenizer reads {line[:200]!a} otherwise than the folder's own: from "
                f"token {place} on, {found[place : place + 4]} for {expected[place : place + 4]}"
            )


def read_pieces(file: Path) -> Any:
    """Reads a SentencePiece model as a protocol message.

    Raises:
        SourceError: It cannot be read, or the library is missing.
    """
    try:
        from sentencepiece import sentencepiece_model_pb2  # noqa: PLC0415 (for folders that have such a model)
    except ImportError as error:
        raise SourceError(f"{file}: needs the library sentencepiece: pip install sentencepiece") from error
    proto = cast("Any", sentencepiece_model_pb2).ModelProto()
    try:
        proto.ParseFromString(file.read_bytes())
    except Exception as error:  # the library raises kinds of its own
        raise SourceError(f"{file}: cannot be read as a SentencePiece model ({type(error).__name__})") from error
    return proto


def convert_pieces(file: Path, ids: Mapping[str, int], *, unknown: str, end: str, special: Sequence[str]) -> Tokenizer:
    """Makes a tokenizer of a SentencePiece model whose pieces have ids of their own.

    Args:
        file: The model of the texts that are read.
        ids: Of every piece that is read or written, each from 0 on without gaps.
        unknown: The piece for what the vocabulary lacks.
        end: The piece that ends a text.
        special: Pieces that are found in a text as they stand, and left out of an answer.

    Raises:
        SourceError: It is neither a unigram model, one of byte-pair encoding nor one of characters, or asks for
            something that is not converted.
    """
    proto = read_pieces(file)
    spec = proto.normalizer_spec
    kind = proto.trainer_spec.model_type
    if kind not in (_UNIGRAM, _BPE, _CHARACTERS) or proto.trainer_spec.byte_fallback:
        raise SourceError(
            f"{file}: is a model of another kind than unigram, BPE and characters, or falls back to bytes; not "
            "supported"
        )
    if not (spec.add_dummy_prefix and spec.remove_extra_whitespaces and spec.escape_whitespaces):
        raise SourceError(f"{file}: treats white space in another way than most; not supported")
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (_NORMAL, _USER_DEFINED)}
    if missing := [piece for piece in scores if piece not in ids]:
        raise SourceError(
            f"{file}: {len(missing)} of its pieces have no id in the vocabulary ({missing[0]!r} is the first); not "
            "supported"
        )
    lowest = min(scores.values())
    by_id = {index: piece for piece, index in ids.items()}
    if sorted(by_id) != list(range(len(ids))):
        raise SourceError(f"{file}: the ids of its vocabulary have gaps, or one stands for two pieces")
    # A piece that is written and not read is spelled with a character that no normalised text has.
    written = {piece for piece in ids if piece not in scores and piece not in special}
    vocabulary = [
        (_APART + piece if piece in written else piece, scores.get(piece, lowest)) for _, piece in sorted(by_id.items())
    ]
    if kind == _UNIGRAM:
        model: models.Model = models.Unigram(vocabulary, unk_id=ids[unknown])
    else:
        places = {piece: index for index, (piece, _) in enumerate(vocabulary)}
        model = models.BPE(places, _merges(scores), unk_token=unknown, fuse_unk=True)
    tokenizer = Tokenizer(model)
    steps = [
        *_normalization(bytes(spec.precompiled_charsmap)),
        normalizers.Replace(Regex(r"\A +| +\z"), ""),
        normalizers.Replace(Regex(" {2,}"), SPACE),
        normalizers.Replace(" ", SPACE),
        normalizers.Prepend(SPACE),
    ]
    known = {piece for piece in scores if len(piece) == 1}
    if strange := [piece for piece in written if known.isdisjoint(piece)]:
        # What the model of the source does not know in one stretch is looked up as it stands.
        longer = [_escaped(piece) for piece in sorted(strange, key=len, reverse=True) if len(piece) > 1]
        short = [_class(piece for piece in strange if len(piece) == 1)] if len(longer) < len(strange) else []
        before, after = f"(?<={_class(known)})", f"(?={_class(known)}|\\z)"
        steps.append(normalizers.Replace(Regex(f"{before}(?=(?:{'|'.join(longer + short)}){after})"), _APART))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_APART, ""), decoders.Metaspace(SPACE)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, ids[end])])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    return tokenizer


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns the pairs of pieces that make a piece, those of the piece with the highest score first."""
    return [
        (piece[:place], piece[place:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for place in range(1, len(piece))
        if piece[:place] in scores and piece[place:] in scores
    ]


def _normalization(table: bytes) -> list[normalizers.Normalizer]:
    """Returns what computes the replacements of a table exactly; none for an empty one."""
    steps: list[normalizers.Normalizer] = [normalizers.Replace(Regex(f"[{_APART}{_TOGETHER}]"), _OTHER)]
    if not table:
        return steps
    replacements = _read_table(table)
    several = sorted(key for key in replacements if len(key) > 1)  # a set's order is another each time
    marks = {character for key in several for character in key[1:]}
    # What may join the cluster of the character before it, beside \p{M}: joiners, Thai and Lao vowels, skin tones.
    joining = rf"\p{{M}}\x{{200c}}\x{{200d}}\x{{e33}}\x{{eb3}}\x{{1f3fb}}-\x{{1f3ff}}{_class(marks)[1:-1]}"
    here = rf"(?!\A)(?=[{joining}])"
    # Letters with a replacement of their own would be looked up with the mark that follows, and lose it.
    pairs = [key for key in several if len(key) == 2 and key[0] in replacements]
    not_composed = [key for key in pairs if len(normalize("NFC", key)) > 1]
    steps += [normalizers.Replace(Regex(f"{here}(?!{'|'.join(_joints(several))})"), _APART)]
    if not_composed:
        steps += [normalizers.Replace(Regex(f"{here}(?={'|'.join(_joints(not_composed))})"), _TOGETHER)]
    return [
        *steps,
        normalizers.NFC(),
        normalizers.Precompiled(table),
        normalizers.Replace(_TOGETHER, ""),
        normalizers.NFC(),
        normalizers.Replace(_APART, ""),
    ]


def _read_table(table: bytes) -> dict[str, str]:
    """Returns the replacements of a table: the size of a trie, the trie as a double array, and strings that end in 0.

    A unit of the trie has, from the lowest bit: 8 of its label, 1 that is set if a key ends here, 1 that scales the
    offset by 256, and 22 of the offset of its children; the value of a key is where its string begins. The layout is
    that of the library darts-clone, which SentencePiece uses.
    """
    (size,) = struct.unpack_from("<I", table)
    units = np.frombuffer(table, "<u4", size // 4, 4).astype(np.int64)
    strings = table[4 + size :]
    offsets = ((units >> 10) << ((units & (1 << 9)) >> 6)).tolist()
    labels = units & ((1 << 31) | 0xFF)  # those of values are larger than any label
    children: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
    places = np.flatnonzero((labels > 0) & (labels < 1 << 8))
    of_places = labels[places]
    for base, place, label in zip((places ^ of_places).tolist(), places.tolist(), of_places.tolist(), strict=True):
        children[base].append((place, bytes((label,))))
    is_end, values = (units & (1 << 8) > 0).tolist(), (units & ((1 << 31) - 1)).tolist()
    found: dict[str, str] = {}
    waiting = [(0, b"")]
    while waiting:
        place, key = waiting.pop()
        base = place ^ offsets[place]
        if is_end[place]:
            start = values[base]
            found[key.decode()] = strings[start : strings.index(b"\0", start)].decode()
        waiting += [(child, key + label) for child, label in children.get(base, ())]
    return found


def _joints(keys: Iterable[str]) -> list[str]:
    """Returns patterns that match, within any of the keys, at the last character if all before it are there.

    The beginnings of a key are keys themselves, so these are all places within keys. Patterns are for the regular
    expressions of Oniguruma; keys that differ in one character share one.
    """
    by_rest: defaultdict[tuple[str, str], set[str]] = defaultdict(set)  # first characters, by the middle and the last
    for key in keys:
        by_rest[key[1:-1], key[-1]].add(key[0])
    by_first: defaultdict[tuple[frozenset[str], str], set[str]] = defaultdict(set)  # last characters
    for (middle, last), first in by_rest.items():
        by_first[frozenset(first), middle].add(last)
    by_ends: defaultdict[tuple[frozenset[str], frozenset[str]], set[str]] = defaultdict(set)  # middles
    for (firsts, middle), lasts in by_first.items():
        by_ends[firsts, frozenset(lasts)].add(middle)
    patterns: list[str] = []
    for (firsts, ends), middles in by_ends.items():
        by_length: defaultdict[int, set[str]] = defaultdict(set)
        for middle in middles:
            by_length[len(middle)].add(middle)
        for length, some in sorted(by_length.items()):
            between = [""] if length == 0 else [_class(some)] if length == 1 else sorted(map(_escaped, some))
            patterns += [f"(?<={_class(firsts)}{middle}){_class(ends)}" for middle in between]
    return patterns


def _class(characters: Iterable[str]) -> str:
    """Returns a class of characters, neighbours as ranges."""
    ranges: list[list[int]] = []
    for code in sorted(map(ord, characters)):
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "[" + "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in ranges) + "]"


def _escaped(text: str) -> str:
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)
