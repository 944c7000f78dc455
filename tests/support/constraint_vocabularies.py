"""Tokenizers of several kinds, small enough to try every token, and a walk through what a constraint allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from headway_server.decoding.constraints import ConstraintState
from headway_server.decoding.output.text import TextAssembly
from headway_server.decoding.rules import num_words, unpack
from headway_server.preprocessing import TextTokenizer

EOS, USER = "<eos>", "<|user|>"

_TEXT = [
    'The order {"order_id": "AB-123456", "status": "shipped", "items": [{"sku": "tape-22", "quantity": 3}]} was late. ',
    '{"name": "Grünwald", "age": 36, "active": true, "email": "ada@example.org", "tags": ["red", "green", "blue"]} ',
    "To be, or not to be: that is the question, and the answer is yes, no, or perhaps; naïve 🎉 café 2026-11-21. ",
]


def byte_level(vocabulary_size: int = 1000) -> Tokenizer:
    """A byte-level BPE with an end-of-sequence token and a chat marker, both special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = [f"{text} {number} {number * 37} {chr(97 + number % 26) * 3}" for number in range(300) for text in _TEXT]
    tokenizer.train_from_iterator(
        words,
        trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            special_tokens=[EOS, USER],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


def characters(alphabet: str = "abcxyz 0189") -> Tokenizer:
    """One token a character, and one for all others."""
    tokenizer = Tokenizer(
        models.WordLevel({"<unk>": 0} | {char: 1 + id_ for id_, char in enumerate(alphabet)}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def metaspace() -> Tokenizer:
    """Pieces as sentencepiece makes them: a word brings its space, and bytes stand in for rare characters."""
    pieces = [
        "<s>",
        "</s>",
        "\u2581",
        "\u2581yes",
        "yes",
        "\u2581no",
        "no",
        "n",
        "o",
        "y",
        "e",
        "s",
        "{",
        "}",
        "\u2581\u2581",
    ]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in ("<s>", "</s>")])
    return tokenizer


def allowed(state: ConstraintState, vocab_size: int) -> set[int]:
    """The tokens that may follow."""
    mask = np.full(num_words(vocab_size), -1, np.int32)
    state.allow(mask)
    bits = unpack(mask)
    assert not bits[vocab_size:].any(), "no bit past the vocabulary"
    return set(np.flatnonzero(bits).tolist())


def random_choice(seed: int, vocab_size: int) -> Callable[[set[int]], int]:
    """Chooses as sampling from random logits does."""
    rng = np.random.default_rng(seed)

    def choose(tokens: set[int]) -> int:
        ids = sorted(tokens)
        scores: NDArray[np.float64] = rng.gumbel(size=vocab_size)[ids]
        return ids[int(scores.argmax())]

    return choose


def fixed_choice(seed: int, vocab_size: int) -> Callable[[set[int]], int]:
    """Chooses as greedy decoding of a model does whose logits never change."""
    logits = np.random.default_rng(seed).normal(size=vocab_size)

    def choose(tokens: set[int]) -> int:
        return max(tokens, key=lambda token: logits[token])

    return choose


def walk(
    state: ConstraintState, choose: Callable[[set[int]], int], vocab_size: int, end_ids: set[int], max_tokens: int
) -> tuple[list[int], bool]:
    """Decodes until the text ends; returns its tokens, and whether it did end."""
    token_ids: list[int] = []
    while not state.is_complete:
        token_id = choose(allowed(state, vocab_size))
        if token_id in end_ids:
            break
        token_ids.append(token_id)
        state.follow(token_id)
        if len(token_ids) == max_tokens:
            return token_ids, state.is_complete
    return token_ids, True


def as_served(tokenizer: Tokenizer, prompt: str, token_ids: list[int], *, eager: bool) -> str:
    """The text of `token_ids` after a prompt, as the server hands it out."""
    text = TextAssembly(
        TextTokenizer(tokenizer).decoder(),
        context_ids=tokenizer.encode(prompt, add_special_tokens=False).ids[-16:],
        eager=eager,
    )
    for token_id in token_ids:
        text.push(token_id)
    return text.finish()


def spellings(text: str, pieces: dict[str, int]) -> Iterator[list[int]]:
    """Yields every way to write a text in tokens that are whole characters."""
    if not text:
        yield []
    for length in range(1, len(text) + 1):
        if (token_id := pieces.get(text[:length])) is not None:
            for rest in spellings(text[length:], pieces):
                yield [token_id, *rest]
