"""Text to ids and back."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
import tiny_engine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from headway_server.errors import BundleError, InvalidInputError, no_panics
from headway_server.preprocessing import EncodedText, TextTokenizer
from headway_server.preprocessing.pool import LONG_TEXT, text_pool

VOCABULARY = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "a": 4, "b": 5, "c": 6, "ü": 7}


@pytest.fixture
def library_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]"])
    return tokenizer


@pytest.fixture
def tokenizer(library_tokenizer: Tokenizer) -> TextTokenizer:
    return TextTokenizer(library_tokenizer)


async def encode_all(tokenizer: TextTokenizer, texts: list[str], **options) -> list[EncodedText]:
    return [text async for text in tokenizer.encode_each(texts, **options)]


async def test_special_tokens_are_added_where_they_are_asked_for(tokenizer):
    [text] = await encode_all(tokenizer, ["a b"], add_special_tokens=True)
    assert text.input_ids.tolist() == [1, 4, 5, 2]
    [prompt] = await encode_all(tokenizer, ["a b"], add_special_tokens=False)
    assert prompt.input_ids.tolist() == [4, 5]
    assert (text.input_ids.dtype, len(text), text.offsets) == ("int64", 4, ())


async def test_offsets_count_code_points(tokenizer):
    [text] = await encode_all(tokenizer, ["🙂 ü b"], add_special_tokens=False, with_offsets=True)
    assert text.offsets == ((0, 1), (2, 3), (4, 5))


async def test_what_the_file_says_of_truncation_and_padding_is_not_followed(library_tokenizer, tmp_path):
    library_tokenizer.enable_truncation(2)
    library_tokenizer.enable_padding(length=9)
    library_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer.load(tmp_path / "tokenizer.json")
    [text] = await encode_all(tokenizer, ["a b c"], add_special_tokens=True)
    assert text.input_ids.tolist() == [1, 4, 5, 6, 2]


@pytest.mark.parametrize(("side", "kept"), [("right", [4, 5]), ("left", [5, 6])])
async def test_a_shortened_text_keeps_its_special_tokens(library_tokenizer, side, kept):
    own, other = TextTokenizer(library_tokenizer, truncation_side=side), TextTokenizer(library_tokenizer)
    limited = {"fields": ["text"], "max_tokens": 4, "truncate": True, "with_offsets": True}
    [text] = await own.encode_limited(["a b c a b c"], **limited)
    assert text.input_ids.tolist() == [1, *kept, 2]
    assert text.offsets[1:-1] == (((0, 1), (2, 3)) if side == "right" else ((8, 9), (10, 11)))
    assert text.truncated
    [same] = await other.encode_limited(["a b c a b c"], truncation_side=side, **limited)
    assert (same.input_ids.tolist(), same.offsets) == (text.input_ids.tolist(), text.offsets)


async def test_a_shortened_prompt_keeps_its_end(tokenizer):
    [text] = await tokenizer.encode_limited(
        ["a b c a b"], fields=["prompt"], max_tokens=2, truncate=True, add_special_tokens=False, truncation_side="left"
    )
    assert text.input_ids.tolist() == [4, 5]


async def test_a_text_at_the_limit_is_whole_and_one_past_it_is_refused(tokenizer):
    [text] = await tokenizer.encode_limited(["a b"], fields=["text"], max_tokens=4, truncate=False)
    assert (len(text), text.truncated) == (4, False)
    with pytest.raises(InvalidInputError, match=r"texts\[1\]: has 5 tokens, the model reads at most 4") as caught:
        await tokenizer.encode_limited(["a", "a b c"], fields=["texts[0]", "texts[1]"], max_tokens=4, truncate=False)
    assert caught.value.field == "texts[1]"


@pytest.mark.parametrize("add_special_tokens", [True, False])
async def test_a_text_without_a_token_of_its_own_is_refused(tokenizer, add_special_tokens):
    with pytest.raises(InvalidInputError, match=r"texts\[1\]: has no text; give it at least one word"):
        await tokenizer.encode_limited(
            ["a", " \n "],
            fields=["texts[0]", "texts[1]"],
            max_tokens=4,
            truncate=False,
            add_special_tokens=add_special_tokens,
        )


class CountingTokenizer(TextTokenizer):
    """Notes how many texts it encodes at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.counts: list[int] = []

    def _encode(self, texts, *rest):
        self.counts.append(len(texts))
        return super()._encode(texts, *rest)


LONG = "a b c " * 6_000  # 36,000 characters


async def test_many_texts_are_encoded_a_slice_at_a_time_and_as_if_at_once(library_tokenizer):
    tokenizer = CountingTokenizer(library_tokenizer)
    texts = ["a", LONG, "b", LONG, LONG * 3, "c", "a b"]
    for encoded in (
        await encode_all(tokenizer, texts, add_special_tokens=True),
        await tokenizer.encode_limited(texts, fields=texts, max_tokens=10**6, truncate=False),
    ):
        assert [text.input_ids.tolist() for text in encoded] == [library_tokenizer.encode(text).ids for text in texts]
    assert tokenizer.counts == [3, 1, 1, 2] * 2


@pytest.mark.parametrize(
    ("texts", "pairs", "on_loop"),
    [
        (["a b c"], None, True),
        (["a " * 500], None, True),
        (["a " * 500, "b"], None, False),
        (["a " * 300], ["b " * 200], True),
        (["a " * 300], ["b " * 201], False),
    ],
)
async def test_only_a_few_characters_are_encoded_on_the_event_loop(library_tokenizer, texts, pairs, on_loop):
    threads = []

    class Tokenizer(TextTokenizer):
        def _encode(self, *inputs):
            threads.append(threading.current_thread())
            return super()._encode(*inputs)

    each = Tokenizer(library_tokenizer).encode_each(texts, add_special_tokens=False, text_pairs=pairs)
    assert len([text async for text in each]) == len(texts)
    assert [thread is threading.current_thread() for thread in threads] == [on_loop]


async def test_nothing_is_encoded_after_the_first_refusal(library_tokenizer):
    tokenizer = CountingTokenizer(library_tokenizer)
    with pytest.raises(InvalidInputError, match="1: has 18002 tokens"):
        await tokenizer.encode_limited(["a", *[LONG] * 9], fields=list("0123456789"), max_tokens=4, truncate=False)
    assert tokenizer.counts == [2]


async def test_what_a_caller_that_went_has_not_had_encoded_is_left(library_tokenizer):
    tokenizer = CountingTokenizer(library_tokenizer)
    gate, pool = threading.Event(), text_pool()
    held = [pool.submit(gate.wait, 30) for _ in range(pool.num_threads)]
    call = asyncio.create_task(encode_all(tokenizer, [LONG] * 9, add_special_tokens=True))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    assert all(job.result() for job in held)
    pool.submit(int).result()  # whatever the call had left in the pool would have run before this
    assert tokenizer.counts == []


async def test_long_texts_of_some_callers_do_not_hold_up_shorter_ones(library_tokenizer):
    gate = threading.Event()

    class Held(TextTokenizer):
        def _encode(self, texts, *rest):
            if len(texts[0]) > LONG_TEXT:
                assert gate.wait(30)
            return super()._encode(texts, *rest)

    tokenizer = Held(library_tokenizer)
    long = [asyncio.create_task(encode_all(tokenizer, [LONG * 3], add_special_tokens=True)) for _ in range(9)]
    try:
        await asyncio.sleep(0)
        for _ in range(3):
            [text] = await asyncio.wait_for(encode_all(tokenizer, [LONG], add_special_tokens=True), 30)
            assert len(text) == 18_002
        assert not any(call.done() for call in long)
    finally:
        gate.set()
    assert len(await asyncio.gather(*long)) == 9


class PanicException(BaseException):
    """Named as what libraries written in Rust raise; it is no Exception."""


async def test_a_tokenizer_that_panics_fails_its_call_with_an_exception(tokenizer, monkeypatch):
    class Panicking:
        def __getattr__(self, name):
            def panic(*_, **__):
                raise PanicException("index out of bounds")

            return panic

    monkeypatch.setattr(tokenizer, "_tokenizer", Panicking())
    with pytest.raises(RuntimeError, match="a library panicked: index out of bounds"):
        await tokenizer.encode_limited(["a"], fields=["texts[0]"], max_tokens=9, truncate=False)
    with pytest.raises(RuntimeError, match="a library panicked"):
        await encode_all(tokenizer, [LONG], add_special_tokens=True)
    for call in (lambda: tokenizer.encode_now("a"), lambda: tokenizer.decode([4]), lambda: tokenizer.token_text(4)):
        with pytest.raises(RuntimeError, match="a library panicked"):
            call()


def test_a_long_text_keeps_no_other_thread_waiting(tokenizer):
    seen, is_over = [], threading.Event()

    def look() -> None:
        while not is_over.is_set():
            seen.append(time.monotonic())
            time.sleep(1e-4)

    other = threading.Thread(target=look)
    other.start()
    began = time.monotonic()
    tokenizer.encode_now(LONG * 20)
    ended = time.monotonic()
    is_over.set()
    other.join()
    quarter = (ended - began) / 4
    assert any(began + quarter < moment < ended - quarter for moment in seen)


def test_other_exceptions_pass():
    for kind in (KeyboardInterrupt, ValueError):
        with pytest.raises(kind), no_panics():
            raise kind


def test_decoding_leaves_special_tokens_out(tokenizer):
    assert tokenizer.decode([1, 4, 7, 2]) == "a ü"


def test_a_file_that_is_no_tokenizer_is_a_bad_bundle(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text('{"model": "none"}')
    with pytest.raises(BundleError, match="cannot be read as a tokenizer"):
        TextTokenizer.load(tmp_path / "tokenizer.json")


async def test_who_stops_at_a_text_has_none_encoded_of_a_later_slice(tokenizer, monkeypatch):
    encoded = []
    encode = tokenizer._encode
    monkeypatch.setattr(
        tokenizer, "_encode", lambda texts, *rest: (encoded.append(len(texts)), encode(texts, *rest))[1]
    )
    each = tokenizer.encode_each([LONG] * 9, add_special_tokens=False)
    await anext(each)
    await each.aclose()
    assert encoded == [1]


def test_the_largest_id_is_not_the_number_of_tokens():
    gapped = TextTokenizer(Tokenizer(models.WordLevel({"a": 0, "b": 9}, "a")))
    assert (gapped.largest_id, gapped.vocabulary_size) == (9, 2)


@pytest.mark.parametrize(
    ("model", "decoder", "texts"),
    [
        (models.Unigram([("▁the", -1.0), ("a", -1.0)]), decoders.Metaspace(), [" the", "a"]),
        (
            models.Unigram([("▁the", -1.0), ("<0xC3>", -1.0)]),
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip()]),
            [" the", "\ufffd"],
        ),
        (models.WordPiece({"the": 0, "##ing": 1}), decoders.WordPiece(), [" the", "ing"]),
        (
            models.WordLevel({"Ġthe": 0, "Ã": 1, "©": 2, "Ã©": 3, "©Ã": 4}, "Ã"),
            decoders.ByteLevel(),
            [" the", "\ufffd", "\ufffd", "é", "\ufffd\ufffd"],
        ),
    ],
    ids=["metaspace", "byte-fallback", "wordpiece", "byte-level"],
)
def test_a_token_by_itself_reads_as_it_does_within_a_text(model, decoder, texts):
    library_tokenizer = Tokenizer(model)
    library_tokenizer.decoder = decoder
    tokenizer = TextTokenizer(library_tokenizer)
    for _ in range(2):  # made, and remembered
        assert [tokenizer.token_text(token_id) for token_id in range(len(texts))] == texts


def test_a_special_token_by_itself_reads_as_its_name_and_an_unknown_one_as_nothing(tokenizer):
    assert tokenizer.token_text(1).strip() == "[CLS]"
    assert tokenizer.token_text(999) == ""


async def test_a_long_text_that_is_cut_leaves_the_event_loop_alone():
    """The library keeps the interpreter's lock where it is asked for one text, and lets go of it for several."""
    long, gaps = TextTokenizer(tiny_engine.TOKENIZER), []

    async def tick():
        while True:
            began = time.monotonic()
            await asyncio.sleep(0)
            gaps.append(time.monotonic() - began)

    ticking = asyncio.ensure_future(tick())
    held = []
    for _ in range(3):  # the least counts: a busy machine stops the loop too
        await asyncio.sleep(0)
        gaps.clear()
        began = time.monotonic()
        [text] = await long.encode_limited(["the cat sat " * 20_000], fields=["a"], max_tokens=9, truncate=True)
        held.append(max(gaps) / (time.monotonic() - began))
    ticking.cancel()
    assert text.truncated
    assert min(held) < 0.2, "the share of the time for which the loop stood"
