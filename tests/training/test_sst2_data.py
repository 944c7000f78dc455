"""SST-2: held-out sentences are not seen in pieces."""

import pytest
from real_data import REAL

from headway_training.data.sst2 import MIN_SENTENCE_WORDS, hold_out_sentences, read_sst2
from headway_training.errors import DataError, MissingDataError

SENTENCES = [f"this is the film number {i} of the ten i saw" for i in range(10)]


def test_a_held_out_sentence_takes_its_own_phrases_with_it_and_leaves_what_others_share():
    phrases = [f"film number {i}" for i in range(10)] + ["the ten", "number 3 of"]
    texts = [*phrases, *SENTENCES]
    kept, held = hold_out_sentences(texts, 0.3)
    held_texts, kept_texts = [texts[i] for i in held], [texts[i] for i in kept]
    assert len(held_texts) == 3
    assert set(held_texts) <= set(SENTENCES)
    assert all(len(text.split()) >= MIN_SENTENCE_WORDS for text in held_texts)
    assert "the ten" in kept_texts
    for sentence in held_texts:
        number = sentence.split()[5]
        assert f"film number {number}" not in kept_texts
        assert sentence not in kept_texts
    assert set(SENTENCES) - set(held_texts) <= set(kept_texts)


def test_what_is_held_out_is_the_same_in_every_run():
    assert [a.tolist() for a in hold_out_sentences(SENTENCES, 0.2)] == [
        a.tolist() for a in hold_out_sentences(SENTENCES, 0.2)
    ]


def test_files_of_glue_are_read(tmp_path):
    folder = tmp_path / "sst2"
    folder.mkdir()
    rows = "".join(f"{text} \t{number % 2}\n" for number, text in enumerate(SENTENCES))
    (folder / "train.tsv").write_text("sentence\tlabel\n" + rows, encoding="utf-8")
    with pytest.raises(MissingDataError, match=r"there is no dev\.tsv"):
        read_sst2(tmp_path, 0.1)
    (folder / "dev.tsv").write_text('sentence\tlabel\na "quoted film \t1\nbad\t0\n', encoding="utf-8")
    splits = read_sst2(tmp_path, 0.1)
    assert (splits.test.texts, splits.test.labels) == (['a "quoted film', "bad"], [1, 0])
    assert (len(splits.train), len(splits.valid)) == (9, 1)
    assert splits.labels == ("negative", "positive")
    (folder / "dev.tsv").write_text("sentence\tlabel\nno label\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 2: expected a sentence, a tab and 0 or 1"):
        read_sst2(tmp_path, 0.1)


def test_the_data_folders_training_part_is_split_by_sentence():
    if not (REAL / "sst2").is_dir():
        pytest.skip(f"no SST-2 in {REAL}; set HEADWAY_DATA_DIR to the folder of the data sets")
    splits = read_sst2(REAL, 0.08)
    assert len(splits.test) in (581, 872)
    assert 400 < len(splits.valid) < 700
    assert len(splits.train) > 60_000
    assert not set(splits.valid.texts) & set(splits.train.texts)
