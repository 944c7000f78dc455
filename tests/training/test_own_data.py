"""The user's own files are read, and a bad row is named by file and line."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headway_training.checkpoint import ImagePreprocessing
from headway_training.data.files import cut_before_spaces
from headway_training.data.images import read_image_folder
from headway_training.data.sources import check_own_data, read_examples
from headway_training.data.texts import read_labeled_texts, read_parallel_texts
from headway_training.errors import DataError, MissingDataError
from headway_training.recipes import ClassificationSettings

PREPROCESSING = ImagePreprocessing(height=8, width=8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def write(folder: Path, content: str, name: str = "data.csv") -> Path:
    file = folder / name
    file.write_text(content, encoding="utf-8")
    return file


def test_csv_with_a_header_reads_text_and_label_in_any_order(tmp_path):
    examples, labels = read_labeled_texts(write(tmp_path, 'id,Label,Text\n1,b,"one, two"\n2,a,three\n\n3,b,four\n'))
    assert labels == ("a", "b")
    assert (examples.texts, examples.labels) == (["one, two", "three", "four"], [1, 0, 1])


def test_csv_without_a_header_has_the_label_first(tmp_path):
    examples, labels = read_labeled_texts(write(tmp_path, '"10","Title","Body"\n"9","Other","Text"\n"10","A","B"\n'))
    assert labels == ("9", "10")  # by value, not by the alphabet
    assert (examples.texts, examples.labels) == (["Title Body", "Other Text", "A B"], [1, 0, 1])


def test_tab_separated_and_packed_files_are_read(tmp_path):
    file = tmp_path / "data.tsv.gz"
    file.write_bytes(gzip.compress(b"\xef\xbb\xbftext\tlabel\r\none, two\ta\r\nthree\tb\r\n"))
    examples, labels = read_labeled_texts(file)
    assert (examples.texts, labels) == (["one, two", "three"], ("a", "b"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no rows; expected a header"),
        ("text,label\none,a\ntwo\n", r"data\.csv, line 3: 1 columns; expected 2 \(text, label\)"),
        ("text,label\none,a\ntwo,too,b\n", r"line 3: 3 columns; expected 2 .* in double quotes"),
        ("text,label\none,a\n,b\n", "line 3: the text is empty"),
        ("text,label\none,a\ntwo,\n", "line 3: the label is empty"),
        ('text,label\none,a\n"two"x,b\n', "line 3: .*expected CSV"),
        ('text,label\n"one\nmore",a\n,b\n', "line 4: the text is empty"),
        ("text,label\none,a\ntwo,a\n", "every row has the label 'a'; a classifier needs at least 2 labels"),
        ("a\nb\n", "line 1: 1 column; expected a header"),
        ("sentence,class\none,a\none,two\nthree,b\none,c\n", r"line 1: \['sentence', 'class'\] looks like a header"),
        ("sentence,sentiment\nso good,1\nso bad,0\n", "has 3 different labels in 3 rows, such as 'sentence'"),
        ("so good,1\nso bad,0\nso good,1\nquite bad,0\nnot bad,1\n", "has 4 different labels in 5 rows"),
        ("sentence,label\nso good,1\nso bad,0\n", r"line 1: \['sentence', 'label'\] has no column text; expected a"),
        ("id,text,sentiment\n1,so good,1\n2,so bad,0\n", "has no column label; expected a header with the columns"),
        ("sentence,mood\n" + "".join(f"text {n},good\n" for n in range(30)), "has 31 different labels in 31 rows"),
        ("".join(f"text {n},good\n" for n in range(30)), "has 30 different labels in 30 rows, such as 'text 0'"),
        ("text,label\n" + "".join(f"good,text {n}\n" for n in range(30)), "has 30 different labels in 30 rows"),
    ],
)
def test_a_bad_csv_is_an_error_that_names_the_line(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read_labeled_texts(write(tmp_path, content))


def test_an_unknown_label_is_named(tmp_path):
    with pytest.raises(DataError, match=r"line 2: the label 'c' is not among those of the model: a, b"):
        read_labeled_texts(write(tmp_path, "text,label\nx,c\n"), ("a", "b"))


def test_text_that_is_not_utf8_is_named_by_its_line(tmp_path):
    file = tmp_path / "latin.csv"
    file.write_bytes("text,label\none,a\nM\xfcller,b\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.csv, line 3: the text is not UTF-8"):
        read_labeled_texts(file)


def test_a_missing_file_or_a_folder_is_an_error(tmp_path):
    with pytest.raises(MissingDataError, match=r"none\.csv does not exist"):
        read_labeled_texts(tmp_path / "none.csv")
    with pytest.raises(MissingDataError, match="is a folder, where a file is expected"):
        read_labeled_texts(tmp_path)


def test_a_damaged_packed_file_is_an_error(tmp_path):
    file = tmp_path / "data.csv.gz"
    file.write_bytes(gzip.compress(b"text,label\n" * 50)[:20])
    with pytest.raises(DataError, match="cannot be read"):
        read_labeled_texts(file)


def test_parallel_text_is_read_from_one_file_or_two(tmp_path):
    one = write(tmp_path, "a b\tc d\n\ne\tf\n\n", "pairs.tsv")
    source, target = write(tmp_path, "a b\ne\n", "t.en"), write(tmp_path, "c d\nf\n\n", "t.de")
    for name in (str(one), f"{source},{target}"):
        texts = read_parallel_texts(name)
        assert (texts.sources, texts.targets) == (["a b", "e"], ["c d", "f"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tb\nc d\n", r"pairs\.tsv, line 2: expected source<TAB>target, both not empty, and found 1 columns"),
        ("a\tb\tc\n", "line 1: .*found 3 columns"),
        ("a\t\n", "line 1: .*both not empty"),
        ("\n", "holds no sentences"),
    ],
)
def test_a_bad_line_of_parallel_text_is_named(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read_parallel_texts(str(write(tmp_path, content, "pairs.tsv")))


def test_two_files_that_do_not_belong_together_are_an_error(tmp_path):
    three, two = write(tmp_path, "a\nb\nc\n", "t.en"), write(tmp_path, "a\nb\n", "t.de")
    gap = write(tmp_path, "a\n\nc\n", "gap.de")
    with pytest.raises(DataError, match=r"has 3 lines and .* has 2"):
        read_parallel_texts(f"{three},{two}")
    with pytest.raises(DataError, match=r"gap\.de, line 2: the line is empty and its partner is not"):
        read_parallel_texts(f"{three},{gap}")
    with pytest.raises(DataError, match=r"expected one file .* or two files, and got 3"):
        read_parallel_texts("a,b,c")


def test_a_short_plain_text_is_an_error(tmp_path):
    with pytest.raises(DataError, match="has 5 characters; expected at least 100"):
        read_examples("generation", str(write(tmp_path, "short")), None, classification=ClassificationSettings())


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_a_text_is_read_part_by_part_as_it_is_read_whole(tmp_path, ends):
    lines = [f"Zeile {i}: ein wenig naïve Prosa — 東京 🦊" for i in range(40_000)]
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbf" + (ends.join(lines) + ends).encode())
    text, _ = read_examples("generation", str(file), None, classification=ClassificationSettings())
    whole = "\n".join(lines) + "\n"
    assert len(text) == len(whole)
    assert text.text == whole
    parts = list(text.parts(5000))
    assert "".join(parts) == whole
    assert max(map(len, parts)) <= 5000


def test_a_byte_that_is_not_utf8_is_named_by_its_line_however_far_in(tmp_path):
    file = tmp_path / "long.txt"
    file.write_bytes(b"a line of text\n" * 200_000 + b"M\xfcller\n")
    with pytest.raises(DataError, match=r"long\.txt, line 200001: the text is not UTF-8"):
        read_examples("generation", str(file), None, classification=ClassificationSettings())


@pytest.mark.parametrize("size", [1, 7, 40, 10_000])
def test_parts_joined_are_the_text_whatever_the_blocks(size):
    text = "The king's  naïve\n\nqueen — doth speak, 12th night O! " * 30
    for block in (3, 50, len(text)):
        parts = list(cut_before_spaces([text[i : i + block] for i in range(0, len(text), block)], size))
        assert "".join(parts) == text
        assert all(0 < len(part) <= size for part in parts)
    assert list(cut_before_spaces(["abcdefgh"], 3)) == ["abc", "def", "gh"]


def test_an_image_folder_is_read_with_a_class_for_each_folder(pictures):
    examples, labels = read_image_folder(pictures, PREPROCESSING)
    assert labels == ("blue", "green", "red")
    assert examples.images.shape == (24, 8, 8, 3)
    assert examples.images.dtype == np.uint8
    strongest = examples.images.mean(axis=(1, 2)).argmax(axis=1)  # 0 red, 1 green, 2 blue
    assert [("red", "green", "blue")[i] for i in strongest] == [labels[i] for i in examples.labels]


def test_an_image_that_cannot_be_read_is_named(pictures):
    (pictures / "red" / "broken.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"broken\.png cannot be read as an image"):
        read_image_folder(pictures, PREPROCESSING)


def test_a_truncated_image_is_named(pictures):
    whole = (pictures / "red" / "0.jpg").read_bytes()
    (pictures / "red" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.jpg cannot be read as an image"):
        read_image_folder(pictures, PREPROCESSING)


def test_image_folders_without_classes_or_images_are_errors(tmp_path, pictures):
    with pytest.raises(MissingDataError, match="is not a folder"):
        read_image_folder(tmp_path / "none", PREPROCESSING)
    (tmp_path / "one" / "cat").mkdir(parents=True)
    with pytest.raises(DataError, match="has 1 folders; a classifier needs a folder for each of at least 2"):
        read_image_folder(tmp_path / "one", PREPROCESSING)
    (pictures / "white").mkdir()
    with pytest.raises(DataError, match="white holds no images"):
        read_image_folder(pictures, PREPROCESSING)
    (pictures / "white" / "a.png").write_bytes((pictures / "red" / "1.png").read_bytes())
    with pytest.raises(DataError, match="the label 'white' is not among those of the model"):
        read_image_folder(pictures, PREPROCESSING, ("red", "green", "blue"))


def test_an_image_lying_on_its_side_is_turned_upright(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pixels = np.zeros((8, 8, 3), np.uint8)
        pixels[:4] = 255  # the upper half is white as stored
        exif = Image.Exif()
        exif[0x0112] = 6 if name == "b" else 1  # 6: to be turned clockwise, which brings the top to the right
        Image.fromarray(pixels).save(tmp_path / name / "x.png", exif=exif)
    examples, _ = read_image_folder(tmp_path, PREPROCESSING)
    assert examples.images[0, 0].mean() > 250
    assert examples.images[1, :, -1].mean() > 250
    assert examples.images[1, :, 0].mean() < 5


def test_training_data_without_validation_data_is_an_error():
    assert check_own_data(None, None, None) is None
    with pytest.raises(DataError, match="--valid is missing"):
        check_own_data("a.csv", None, None)
    with pytest.raises(DataError, match="--train is missing"):
        check_own_data(None, None, "a.csv")
