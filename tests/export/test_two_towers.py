"""A model of two towers becomes two bundles whose vectors share a space."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from headway_export.exporter import ExportOptions, export
from headway_export.source import sources_from_checkpoint
from headway_server.bundles import Precision, Task
from headway_training.checkpoint import (
    Checkpoint,
    Evaluation,
    ImagePreprocessing,
    SpecialTokens,
    load_model,
    write_checkpoint,
)
from headway_training.models import build_model
from headway_training.recipes import TokenizerSettings
from headway_training.tokenizers import special_tokens, train_tokenizer

TEXTS = ["a red wall", "a blue house by the sea", "two dogs", "a dog and a cat run over the green grass"]
CONFIGURATION = {
    "d_space": 16,
    "loss": "sigmoid",
    "image_size": 16,
    "patch_size": 8,
    "stem": "convolutions",
    "image_num_layers": 1,
    "image_d_model": 32,
    "image_num_heads": 2,
    "image_d_ff": 64,
    "max_length": 24,
    "text_num_layers": 1,
    "text_d_model": 32,
    "text_num_heads": 2,
    "text_d_ff": 64,
}


@pytest.fixture(scope="module")
def two_towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two towers with random weights."""
    folder = tmp_path_factory.mktemp("towers") / "checkpoint"
    tokenizer: Tokenizer = train_tokenizer(TEXTS, TokenizerSettings(vocabulary_size=300), "image_text_embedding")
    configuration = {**CONFIGURATION, "vocabulary_size": tokenizer.get_vocab_size()}
    torch.manual_seed(0)
    model = build_model("clip", configuration)
    checkpoint = Checkpoint(
        name="tiny-clip",
        task="image_text_embedding",
        description="Puts images and texts into one space.",
        license="none",
        architecture="clip",
        configuration=configuration,
        special_tokens=SpecialTokens.model_validate(special_tokens(tokenizer).model_dump()),
        image_preprocessing=ImagePreprocessing(height=16, width=16, mean=(0.5, 0.5, 0.5), std=(0.3, 0.3, 0.3)),
        evaluation=Evaluation(
            file="evaluation.jsonl", dataset="tiny pairs", metric="mean_recall", higher_is_better=True
        ),
    )
    images = np.random.default_rng(0).integers(0, 255, (4, 16, 16, 3), np.uint8)
    texts = [{"text": text, "label": number} for number, text in enumerate(TEXTS)]
    write_checkpoint(folder, checkpoint, model, tokenizer=tokenizer, texts=texts, images=(images, np.arange(4)))
    return folder


def test_each_tower_is_proved_and_both_name_one_space(two_towers: Path, tmp_path: Path) -> None:
    options = ExportOptions(store=tmp_path, precisions=(Precision.FP32, Precision.INT8), attention=True)
    bundles = [export(source, options) for source in sources_from_checkpoint(two_towers)]
    manifests = [bundle.manifest for bundle in bundles]
    assert [(one.name, one.task) for one in manifests] == [
        ("tiny-clip-image", Task.IMAGE_EMBEDDING),
        ("tiny-clip-text", Task.TEXT_EMBEDDING),
    ]
    embeddings = [one.embedding for one in manifests]
    assert all(one is not None for one in embeddings)
    spaces = [one.space for one in embeddings if one is not None]
    assert spaces[0] == spaces[1]
    space = spaces[0]
    assert space is not None
    assert space.name.startswith("tiny-clip-")
    assert (space.probabilities, space.scale, space.bias) == ("sigmoid", pytest.approx(10.0), -10.0)
    for one in manifests:
        assert one.variants[Precision.FP32].parity.max_relative_logit_error < 1e-4
        agreement = one.variants[Precision.INT8].agreement
        assert agreement is not None
        assert (agreement.dataset, agreement.example_count) == ("tiny pairs", 4)
        assert one.variants[Precision.FP32].attention is not None


def test_other_weights_make_another_space(two_towers: Path, tmp_path: Path) -> None:
    first = sources_from_checkpoint(two_towers)[0].space
    model, checkpoint = load_model(two_towers)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    write_checkpoint(
        tmp_path / "other",
        checkpoint.model_copy(update={"evaluation": None}),
        model,
        tokenizer=Tokenizer.from_file(str(two_towers / "tokenizer.json")),
    )
    second = sources_from_checkpoint(tmp_path / "other", name="mine")
    assert [source.name for source in second] == ["mine-image", "mine-text"]
    assert first is not None
    assert second[0].space is not None
    assert second[0].space.name != first.name
