"""Detokenizing in deltas and stop strings, against the whole text decoded at once."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headway_server.decoding.output.text import Detokenizer, StopMatcher, TextAssembly, TextOffsets
from headway_server.preprocessing import TextTokenizer
from headway_server.preprocessing.text import TokenDecoder

TEXT = "Grüße, naïve café! 日本語のテキスト 👩‍👩‍👧‍👦 и ещё 😀 don't stop , now ."


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "<eos>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<eos>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {"<unk>": 0, "<eos>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for token in ["▁", "▁now", "▁don", "t", "'", "s", "top", "▁Gr", "a", "f"]:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def bpe_with_suffix() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", "<eos>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


TOKENIZERS = {f.__name__: f() for f in (byte_level, word_piece, metaspace, byte_fallback, bpe_with_suffix)}


def decode_with(tokenizer: Tokenizer):
    return TextTokenizer(tokenizer).decoder()


def without_unfinished(text: str) -> str:
    """Leaves out what may be the beginning of a character: at most three U+FFFD at the end."""
    num_broken = len(text) - len(text.rstrip("\ufffd"))
    return text[: len(text) - min(num_broken, 3)]


def deltas_of(tokenizer: Tokenizer, ids, context=()):
    detokenizer = Detokenizer(decode_with(tokenizer), context)
    return [detokenizer.push((token,)) for token in ids]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_deltas_of_real_text_join_to_it_and_hold_whole_characters(name):
    tokenizer = TOKENIZERS[name]
    rng = random.Random(1)
    for _ in range(300):
        begin = rng.randrange(len(TEXT) - 1)
        ids = tokenizer.encode((TEXT[begin:] + TEXT)[: rng.randrange(1, 90)]).ids
        deltas = deltas_of(tokenizer, ids)
        assert "".join(deltas) == tokenizer.decode(ids)
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "byte_fallback"])
def test_deltas_of_any_tokens_join_to_the_text_decoded_at_once(name):
    tokenizer = TOKENIZERS[name]
    rng = random.Random(2)
    for _ in range(500):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 60))]
        whole = tokenizer.decode(ids)
        assert "".join(deltas_of(tokenizer, ids)) == without_unfinished(whole)


def test_bytes_that_form_no_character_raise_nothing():
    tokenizer = TOKENIZERS["byte_fallback"]
    rng = random.Random(3)
    for _ in range(500):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 60))]
        "".join(deltas_of(tokenizer, ids)).encode("utf-8")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_continuation_reads_on_from_its_prompt(name):
    tokenizer = TOKENIZERS[name]
    rng = random.Random(4)
    for _ in range(200):
        ids = tokenizer.encode(TEXT * 2).ids
        cut = rng.randrange(1, len(ids) - 1)
        prompt = tokenizer.decode(ids[:cut])
        if "\ufffd" in prompt:
            continue  # a prompt is whole characters
        assert prompt + "".join(deltas_of(tokenizer, ids[cut:], ids[:cut])) == tokenizer.decode(ids)


def byte_ids(name: str, text: bytes) -> list[int]:
    """The tokens of single bytes."""
    tokenizer = TOKENIZERS[name]
    if name == "byte_fallback":
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text]
    # Of the alphabet, printable characters stand for themselves, those from 256 on for the other bytes in their order.
    printable = {ord(character) for character in pre_tokenizers.ByteLevel.alphabet()}
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [tokenizer.token_to_id(characters[byte]) for byte in text]


def test_an_emoji_split_over_tokens_comes_in_one_delta():
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer.encode("a😀f").ids
    deltas = deltas_of(tokenizer, ids)
    assert "😀" in deltas
    assert deltas.count("") >= 3


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("broken", [b"\x80", b"\xe6\x97", b"\xf0\x9f\x98\x41\xff"])
def test_bytes_that_never_form_a_character_cost_no_more_with_their_number(name, broken):
    tokenizer = TOKENIZERS[name]
    window_sizes = []

    class Decoder(TokenDecoder):
        def __call__(self, token_ids):
            window_sizes.append(len(token_ids))
            return super().__call__(token_ids)

    ids = byte_ids(name, broken * 200)
    detokenizer = Detokenizer(Decoder(TextTokenizer(tokenizer), frozenset()))
    text = "".join(detokenizer.push((token,)) for token in ids)
    assert max(window_sizes) <= 20
    assert len(window_sizes) <= 3 * len(ids)
    assert text.count("\ufffd") > 190
    after = "".join(detokenizer.push((token,)) for token in tokenizer.encode(" now 😀").ids)
    assert after.endswith("now 😀") or name == "byte_fallback"  # whose run of bytes is spoilt as a whole


@pytest.mark.parametrize("seed", range(5))
def test_broken_and_whole_characters_come_in_the_order_of_their_bytes(seed):
    tokenizer = TOKENIZERS["byte_level"]
    rng = random.Random(seed)
    parts = ["日".encode(), "😀".encode(), "é".encode(), b"a", b"\x80", b"\xf0\x9f\x98", b"\xe6\x97", b"\xff"]
    for _ in range(300):
        whole = b"".join(rng.choices(parts, weights=[1, 1, 1, 1, 9, 2, 2, 9], k=rng.randrange(1, 70)))
        deltas = deltas_of(tokenizer, byte_ids("byte_level", whole))
        assert "".join(deltas) == without_unfinished(whole.decode("utf-8", "replace"))


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_broken_text_made_at_the_end_equals_text_made_in_deltas(name):
    tokenizer = TOKENIZERS[name]
    for end in (b"", b"\xf0", b"\xf0\x9f\x98", b"\x80" * 5, b"\x80" * 50):
        ids = byte_ids(name, (TEXT * 2).encode() + end)
        eager, lazy = (TextAssembly(decode_with(tokenizer), eager=eager) for eager in (True, False))
        for token in ids:
            eager.push(token)
            lazy.push(token)
        assert eager.finish() == lazy.finish()
        assert lazy.finish().startswith(TEXT * 2)


def with_replacement(name: str) -> tuple[Tokenizer, list[int]]:
    """A tokenizer that can spell U+FFFD, and the tokens that do."""
    if name in ("byte_level", "byte_fallback"):
        return TOKENIZERS[name], byte_ids(name, "\ufffd".encode())
    tokenizer = Tokenizer.from_str(TOKENIZERS[name].to_str())
    tokenizer.add_tokens([AddedToken("\ufffd", normalized=False)])
    return tokenizer, [tokenizer.token_to_id("\ufffd")]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("after", ["", "unfinished", "special", "more", "a word"])
@pytest.mark.parametrize("count", [1, 4, 30])
def test_a_replacement_that_the_tokens_spell_is_text(name, after, count):
    tokenizer, spelled = with_replacement(name)
    before = tokenizer.encode("don't").ids
    ids = before + spelled * count
    expected = tokenizer.decode(ids)
    assert expected.count("\ufffd") == count
    has_bytes = name in ("byte_level", "byte_fallback")
    if after == "unfinished" and has_bytes:
        ids += byte_ids(name, b"\xf0\x9f")
    elif after == "special":
        tokenizer.add_special_tokens(["<eos>"])
        ids.append(tokenizer.token_to_id("<eos>"))
    elif after == "more" and has_bytes:
        ids += byte_ids(name, "😀".encode())
        expected = tokenizer.decode(ids)
    elif after == "a word":
        ids += tokenizer.encode("now").ids
        expected = tokenizer.decode(ids)
    for eager in (True, False):
        assembly = TextAssembly(decode_with(tokenizer), eager=eager)
        for token in ids:
            assembly.push(token)
        assert assembly.finish() == expected
    assert assembly.whole(ids) == expected
    own = TextOffsets(decode_with(tokenizer)).push([*ids, *tokenizer.encode("now").ids])
    assert list(own) == sorted(own)
    after_context = deltas_of(tokenizer, ids[len(before) + len(spelled) :], ids[: len(before) + len(spelled)])
    assert tokenizer.decode(before + spelled) + "".join(after_context) == expected


def test_an_unfinished_character_at_the_end_is_no_text():
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer.encode("a😀").ids
    for eager in (True, False):
        assembly = TextAssembly(decode_with(tokenizer), eager=eager)
        for token in ids[:-1]:
            assembly.push(token)
        assert assembly.finish() == "a"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_made_at_the_end_equals_text_made_in_deltas(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(TEXT * 3).ids
    eager, lazy = (TextAssembly(decode_with(tokenizer), eager=eager) for eager in (True, False))
    taken = []
    for token in ids:
        eager.push(token)
        lazy.push(token)
        taken.append(eager.take())
    assert lazy.take() == ""
    whole = eager.finish()
    taken.append(eager.take())
    assert "".join(taken) == whole == lazy.finish() == tokenizer.decode(ids)


def test_stop_strings_end_the_text_wherever_it_is_cut():
    rng = random.Random(5)
    for _ in range(3000):
        text = "".join(rng.choices("abc", k=rng.randrange(1, 25)))
        stops = tuple("".join(rng.choices("abc", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4)))
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        expected = text[: min(ends)[1]] if ends else text
        matcher, out, stopped, at = StopMatcher(stops), "", False, 0
        while at < len(text) and not stopped:
            size = rng.randrange(1, 5)
            delta, stopped = matcher.push(text[at : at + size])
            out += delta
            assert expected.startswith(out)
            at += size
        assert stopped == bool(ends)
        assert (out if stopped else out + matcher.finish()) == expected


def test_what_could_begin_a_stop_string_is_held_back_and_no_more():
    matcher = StopMatcher(("###", "end"))
    assert matcher.push("a#") == ("a", False)
    assert matcher.push("#e") == ("##", False)
    assert matcher.push("n") == ("", False)
    assert matcher.push("x") == ("enx", False)
    assert matcher.push("##") == ("", False)
    assert matcher.finish() == "##"


def test_an_assembly_says_at_which_token_a_stop_string_is_complete():
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer.encode("a😀ff").ids
    assembly = TextAssembly(decode_with(tokenizer), stop_strings=("😀f",))
    stopped = [assembly.push(token) for token in ids]
    assert stopped.index(True) == len(ids) - 2
    assert assembly.finish().startswith("a")
    assert "😀" not in assembly.finish()
