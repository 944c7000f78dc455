"""Folders of Bark: what is read of them, and what is refused, without an export."""

import json
import shutil

import numpy as np
import pytest
import tiny_barks

from headway_export import huggingface
from headway_export.errors import SourceError


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tiny_barks.write_bark(tmp_path_factory.mktemp("barks") / "bark")


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "bark")


def read(folder, **options):
    return huggingface.from_folder(folder, huggingface.FolderOptions(**options))


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_folder_says_how_stages_sample_and_what_voices_there_are(folder):
    change(folder / "speaker_embeddings_path.json", gone=dict.fromkeys(tiny_barks.prompts(1), "gone.npy"))
    source, notes = read(folder)
    assert source.labels == ("v2/en_speaker_1", "own")
    assert any("left out: gone" in note for note in notes)
    assert source.sampling_defaults.temperature == 0.7
    assert source.stages.coarse_sampling.temperature == 0.6
    assert source.stages.fine_temperature == 0.5
    assert source.stages.min_end_probability == 0.08


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"semantic_prompt": np.array([99])}, "semantic_prompt of voice own.*from 0 to 19"),
        ({"coarse_prompt": np.zeros((3, 4), int)}, "coarse_prompt of voice own"),
        ({"fine_prompt": np.zeros((4, 4))}, "fine_prompt of voice own is float64"),
        ({"fine_prompt": np.array([None])}, "cannot be read"),
    ],
)
def test_a_voice_of_other_arrays_is_refused(folder, arrays, words):
    np.savez(folder / "speaker_embeddings" / "own.npz", **(tiny_barks.prompts(1) | arrays))
    with pytest.raises(SourceError, match=words):
        read(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"a": {"semantic_prompt": "../../x.npy"}}', "no file of the folder"),
        ('{"a": {}}', "no file of the folder"),
        ("[1]", "cannot be read"),
    ],
)
def test_a_list_of_voices_that_cannot_be_read_is_refused(folder, content, words):
    (folder / "speaker_embeddings_path.json").write_text(content)
    with pytest.raises(SourceError, match=words):
        read(folder)


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("semantic_config", {"semantic_vocab_size": 19}, "eos_token_id is 20; 19 is supported"),
        ("coarse_acoustics_config", {"n_coarse_codebooks": 3}, "n_coarse_codebooks is 3"),
        ("coarse_acoustics_config", {"max_coarse_history": 60}, "fewer than its windows"),
        ("fine_acoustics_config", {"n_fine_codebooks": 3}, "n_fine_codebooks is 3"),
        ("fine_acoustics_config", {"max_fine_input_length": 99}, "max_fine_input_length"),
        ("semantic_config", {"temperature": -1}, "temperature"),
    ],
)
def test_stages_that_follow_otherwise_are_refused(folder, part, values, words):
    content = json.loads((folder / "generation_config.json").read_text())
    change(folder / "generation_config.json", **{part: content[part] | values})
    with pytest.raises(SourceError, match=words):
        read(folder)


def test_another_length_of_texts_is_refused(folder):
    with pytest.raises(SourceError, match="--max-length"):
        read(folder, max_length=8)
