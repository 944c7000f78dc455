"""Frames of codes: made as tokens come, and the constraint that has them come in order."""

import numpy as np
import pytest

from headway_server.bundles import AudioCodec
from headway_server.decoding.output.frames import FrameAssembly
from headway_server.decoding.rules import num_words, unpack
from headway_server.tasks.synthesis.rules import FrameMasks, FrameRule

CODEC = AudioCodec(sampling_rate=8000, hop_length=160, num_books=3, codebook_size=40, first_code=10, frames_per_run=5)
END = 2
VOCABULARY = 10 + 3 * 40


def tokens_of(frames):
    return (np.array(frames) + 10 + 40 * np.arange(3)).ravel().tolist()


def test_frames_are_handed_out_when_they_are_whole():
    frames = [[1, 2, 3], [39, 0, 39], [7, 7, 7]]
    assembly, taken = FrameAssembly(CODEC), []
    for number, token in enumerate(tokens_of(frames), 1):
        assert assembly.push(token) is False
        if number % 2:  # a slow reader takes what there is
            taken.append(assembly.take())
    taken.append(assembly.take())
    assert [len(part) for part in taken] == [0, 1, 0, 1, 1, 0]
    assert assembly.join(taken).tolist() == frames
    assert assembly.finish().tolist() == frames


@pytest.mark.parametrize("num_tokens", range(7))
def test_a_frame_that_is_not_whole_is_left_out(num_tokens):
    tokens = tokens_of([[1, 2, 3], [4, 5, 6]])[:num_tokens]
    assembly = FrameAssembly(CODEC)
    for token in tokens:
        assembly.push(token)
    whole = [[1, 2, 3], [4, 5, 6]][: num_tokens // 3]
    for found in (assembly.take(), assembly.finish(), assembly.whole(tokens)):
        assert found.dtype == np.int64
        assert found.shape == (len(whole), 3)
        assert found.tolist() == whole


def allowed(rule):
    mask = np.full(num_words(VOCABULARY), -1, np.int32)
    rule.allow(mask, np.zeros(VOCABULARY, np.float32))
    return set(np.flatnonzero(unpack(mask)).tolist())


def test_each_book_follows_the_one_before_and_the_end_a_whole_frame():
    masks = FrameMasks(CODEC, vocab_size=VOCABULARY, end_id=END)
    rule, other = FrameRule(masks), FrameRule(masks)
    books = [set(range(10 + 40 * book, 50 + 40 * book)) for book in range(3)]
    for frame in range(3):
        for book in range(3):
            expected = books[book] | ({END} if frame and not book else set())
            assert allowed(rule) == expected
            assert not rule.is_complete
            rule.follow(min(books[book]))
    assert allowed(other) == books[0]  # what sequences share does not change
