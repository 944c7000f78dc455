"""Checkpoints are read back as they were written, and a folder that is none is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from documents import first_names, values_of
from evaluation_files import read_image_evaluation, read_text_evaluation
from safetensors.torch import load_file
from tokenizers import Tokenizer

from headway_training.checkpoint import (
    HUGGINGFACE,
    Checkpoint,
    Evaluation,
    ImagePreprocessing,
    SpecialTokens,
    load_model,
    load_tokenizer,
    read_checkpoint,
    write_checkpoint,
)
from headway_training.errors import CheckpointError
from headway_training.kinds import metric_names, task_names
from headway_training.models import ARCHITECTURES, build_model
from headway_training.models.own import MODULE
from headway_training.recipes import TokenizerSettings
from headway_training.recipes.settings import LoraSettings
from headway_training.tokenizers import train_tokenizer

GPT = {"vocabulary_size": 260, "max_length": 8, "num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 32}
VIT = {"image_size": 8, "patch_size": 4, "num_layers": 1, "num_classes": 2, "d_model": 16, "num_heads": 2, "d_ff": 32}


def write_gpt(
    folder: Path, texts: tuple[dict[str, str], ...] = ({"text": "Füchse"},)
) -> tuple[torch.nn.Module, Tokenizer]:
    torch.manual_seed(0)
    model = build_model("gpt", GPT)
    tokenizer = train_tokenizer(["a b c"], TokenizerSettings(vocabulary_size=260), "generation")
    evaluation = Evaluation(file="evaluation.jsonl", dataset="x", metric="nats_per_character", higher_is_better=False)
    checkpoint = Checkpoint(
        name="tiny",
        task="generation",
        description="Nothing.",
        license="Apache-2.0",
        architecture="gpt",
        configuration=GPT,
        special_tokens=SpecialTokens(),
        evaluation=evaluation,
    )
    write_checkpoint(folder, checkpoint, model, tokenizer=tokenizer, texts=texts)
    return model, tokenizer


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path):
    model, tokenizer = write_gpt(tmp_path / "run" / "checkpoint")
    loaded, checkpoint = load_model(tmp_path / "run" / "checkpoint")
    ids = torch.randint(260, (2, 8), generator=torch.Generator().manual_seed(1))
    assert torch.equal(loaded(ids), model.eval()(ids))
    assert not loaded.training
    assert checkpoint.configuration == GPT
    assert load_tokenizer(tmp_path / "run" / "checkpoint").to_str() == tokenizer.to_str()
    assert read_text_evaluation(tmp_path / "run" / "checkpoint") == [{"text": "Füchse"}]


def test_a_tied_weight_is_stored_once(tmp_path):
    model, _ = write_gpt(tmp_path / "c")
    stored = load_file(tmp_path / "c" / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == sum(p.numel() for p in model.parameters())


def test_writing_again_replaces_the_folder_whole(tmp_path):
    write_gpt(tmp_path / "c")
    (tmp_path / "c" / "left-over").write_text("x")
    write_gpt(tmp_path / "c", ({"text": "other"},))
    assert read_text_evaluation(tmp_path / "c") == [{"text": "other"}]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert not (tmp_path / "c" / "left-over").exists()


def test_images_come_back(tmp_path):
    images, labels = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3), np.array([1, 0])
    checkpoint = Checkpoint(
        name="tiny",
        task="image_classification",
        description="Nothing.",
        license="Apache-2.0",
        architecture="vit",
        configuration=VIT,
        labels=("a", "b"),
        image_preprocessing=ImagePreprocessing(height=8, width=8, mean=(0, 0, 0), std=(1, 1, 1)),
    )
    write_checkpoint(tmp_path / "c", checkpoint, build_model("vit", VIT), images=(images, labels))
    read_images, read_labels = read_image_evaluation(tmp_path / "c")
    np.testing.assert_array_equal(read_images, images)
    np.testing.assert_array_equal(read_labels, labels)
    assert read_checkpoint(tmp_path / "c") == checkpoint


def test_a_folder_that_is_no_checkpoint_is_said_to_be_none(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it holds no checkpoint\.json"):
        read_checkpoint(tmp_path)
    write_gpt(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match=r"Did you mean .*checkpoint\?"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema version 2; this version of headway reads 1"),
        ({"task": "poetry"}, "task: "),
        ({"colour": "red"}, "colour: Extra inputs"),
        ({"name": "No Name"}, "name: String should match"),
        ({"special_tokens": None}, "special_tokens: generation needs them"),
        ({"task": "text_classification"}, "labels: text_classification needs them"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, change, message):
    write_gpt(tmp_path)
    file = tmp_path / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path)


def test_broken_json_and_missing_files_are_named(tmp_path):
    write_gpt(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"is incomplete: model\.safetensors is missing"):
        read_checkpoint(tmp_path)
    (tmp_path / "checkpoint.json").write_text('{"schema_version": 1,')
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 32}, "does not fit the configuration"),
        ({"num_heads": 3}, "configuration: "),
        ({"x": 1}, "no field 'x'"),
    ],
)
def test_weights_that_do_not_fit_are_an_error(tmp_path, change, message):
    write_gpt(tmp_path)
    file = tmp_path / "checkpoint.json"
    content = json.loads(file.read_text())
    content["configuration"] |= change
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_damaged_weights_and_tokenizers_are_errors(tmp_path):
    write_gpt(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    (tmp_path / "tokenizer.json").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not fit"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)


def test_the_documents_name_every_field_and_choice():
    docs = Path(__file__).parents[2] / "docs"
    page = docs / "checkpoint.md"
    fields = Checkpoint.model_fields
    assert set(re.findall(r"^(\w+) {2,}\S", page.read_text(), flags=re.MULTILINE)) == set(fields)
    assert values_of(page, "task") == set(task_names())
    assert values_of(page, "architecture") == {*ARCHITECTURES, HUGGINGFACE, MODULE}
    assert values_of(page, "metric") == metric_names()
    assert first_names(docs / "fine-tuning.md", "`[lora]`") == set(LoraSettings.model_fields)
