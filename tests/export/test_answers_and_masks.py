"""Models for question answering and fill-mask from folders of `transformers`: what is read, and the kind it is of."""

import numpy as np
import pytest
import tiny_embedders
import tiny_huggingface as tiny
import torch
import transformers

from headway_export.errors import SourceError
from headway_export.huggingface.folder import FolderOptions
from headway_export.huggingface.kinds import from_folder
from headway_export.inputs import Draw
from headway_export.source import read_evaluation
from headway_export.tasks.table import task_of
from headway_server.bundles import Task

FAMILIES = [
    *(name for name in tiny.ENCODERS if name != "big_bird"),
    *tiny.FURTHER_ENCODERS,
]
TYPED = ("bert", "electra", "albert")


def write(folder, family, head, **changes):
    tiny.write_model(folder, family, head, **{"num_labels": 2, **changes})
    tiny.write_tokenizer(folder, has_types=family in TYPED, mask="<mask>" if head == "ForMaskedLM" else "")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_ends_of_answers_are_those_of_transformers(tmp_path, family):
    folder = write(tmp_path / "model", family, "ForQuestionAnswering")
    source, notes = from_folder(folder, FolderOptions())
    assert (source.task, source.text_pairs, notes) == (Task.QUESTION_ANSWERING, "required", ())
    assert source.has_token_types == (family in TYPED)
    own = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    read = transformers.AutoTokenizer.from_pretrained(folder)("the old fire", "an answer", return_tensors="pt")
    with torch.no_grad():
        expected = own(**read)
        found = source.module(
            *(read[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in read)
        )
    torch.testing.assert_close(found[:, 0], expected.start_logits)
    torch.testing.assert_close(found[:, 1], expected.end_logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_masks_are_those_of_transformers(tmp_path, family):
    folder = write(tmp_path / "model", family, "ForMaskedLM")
    source, notes = from_folder(folder, FolderOptions())
    assert (source.task, source.special_tokens.mask) == (Task.FILL_MASK, tiny.WORDS - 1)
    assert "--pooling splade" in notes[-1]
    own = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    read = transformers.AutoTokenizer.from_pretrained(folder)("the <mask> fire<mask>", return_tensors="pt")
    positions = (read.input_ids == tiny.WORDS - 1).nonzero()[:, 1][None]
    assert positions.shape == (1, 2)
    with torch.no_grad():
        expected = own(input_ids=read.input_ids, attention_mask=read.attention_mask).logits[:, positions[0]]
        found = source.module(read.input_ids, read.attention_mask, positions)
        reference = source.make_reference()(read.input_ids, read.attention_mask, positions)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(reference, expected)


def test_a_flag_chooses_what_a_masked_language_model_is_for(tmp_path):
    folder = write(tmp_path / "model", "bert", "ForMaskedLM")
    for options, task in (
        (FolderOptions(), Task.FILL_MASK),
        (FolderOptions(task="fill_mask"), Task.FILL_MASK),
        (FolderOptions(pooling="splade"), Task.TEXT_EMBEDDING),
        (FolderOptions(pooling="mean"), Task.TEXT_EMBEDDING),
    ):
        assert from_folder(folder, options)[0].task is task
    sparse = tiny_embedders.write_sparse_encoder(tmp_path / "splade")
    assert from_folder(sparse, FolderOptions())[0].task is Task.TEXT_EMBEDDING
    with pytest.raises(SourceError, match="its tokenizer has no mask token; fill_mask needs one"):
        from_folder(sparse, FolderOptions(task="fill_mask"))


def test_a_tokenizer_that_puts_nothing_between_two_texts_is_refused(tmp_path):
    folder = write(tmp_path / "model", "bert", "ForQuestionAnswering")
    read = transformers.AutoTokenizer.from_pretrained(folder)
    read.backend_tokenizer.post_processor = transformers.AutoTokenizer.from_pretrained(
        folder
    ).backend_tokenizer.post_processor.__class__(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    read.save_pretrained(folder)
    with pytest.raises(SourceError, match="puts no token between a question and a context"):
        from_folder(folder, FolderOptions())


@pytest.mark.parametrize("head", ["ForQuestionAnswering", "ForMaskedLM"])
def test_drawn_inputs_are_windows_of_one_length_and_texts_with_masks(tmp_path, head):
    source, _ = from_folder(write(tmp_path / "model", "bert", head), FolderOptions())

    class Candidate:
        """What `Draw` reads of one."""

    Candidate.source = source
    judged, calibration = task_of(source.task).draw(Draw(Candidate))
    assert judged
    assert calibration
    if head == "ForQuestionAnswering":
        assert {len(item["input_ids"]) for item in judged} == {tiny.LENGTH}
        assert {int(item["token_type_ids"].sum()) for item in judged} == {int(judged[0]["token_type_ids"].sum())} != {0}
    for item in judged if head == "ForMaskedLM" else ():
        masked = np.flatnonzero(item["input_ids"] == source.special_tokens.mask)
        assert item["mask_positions"].tolist() == masked.tolist()
        assert 1 <= len(masked) <= 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "a", "context": "b"}', "line 1: expected an object with the texts question and context"),
        ('{"question": "", "context": "b", "answers": []}', "line 1: expected an object"),
        ("[1]", "line 1: expected an object"),
        ("no", "line 1: is no JSON"),
        ("", "has no questions"),
    ],
)
def test_malformed_questions_are_refused_with_the_line(tmp_path, line, words):
    file = tmp_path / "questions.jsonl"
    file.write_text(line)
    with pytest.raises(SourceError, match=f"cannot be read as evaluation data of question_answering .*{words}"):
        read_evaluation(file, Task.QUESTION_ANSWERING, "own", 0)
