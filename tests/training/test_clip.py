"""One space for images and texts: the loss, the data, what training changes in pictures, and a run on tiny data."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_pictures import write_picture_data
from torch.nn import functional

from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.data.pictures import opaque
from headway_training.data.views import random_crops, random_placements
from headway_training.metrics import recall_at
from headway_training.models import CLIP, CLIPConfig
from headway_training.models.clip import contrastive_loss
from headway_training.run import RunOptions, run_training

TINY = {
    "d_space": 16,
    "image_size": 16,
    "patch_size": 8,
    "image_num_layers": 1,
    "image_d_model": 16,
    "image_num_heads": 2,
    "image_d_ff": 32,
    "vocabulary_size": 300,
    "max_length": 16,
    "text_num_layers": 1,
    "text_d_model": 16,
    "text_num_heads": 2,
    "text_d_ff": 32,
}
RECIPE = "clip"


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_embeddings_have_length_one_and_padding_changes_nothing(loss: str) -> None:
    model = CLIP(CLIPConfig(**TINY, loss=loss)).eval()
    ids = torch.randint(4, 300, (3, 5))
    padded = functional.pad(ids, (0, 4))
    texts = model.embed_texts(ids, torch.ones_like(ids))
    same = model.embed_texts(padded, functional.pad(torch.ones_like(ids), (0, 4)))
    images = model.embed_images(torch.randn(2, 3, 16, 16))
    torch.testing.assert_close(texts, same)
    torch.testing.assert_close(torch.cat((texts, images)).norm(dim=-1), torch.ones(5))
    assert model.logits(images, texts).shape == (2, 3)


def test_a_tower_that_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="text tower: d_model must be a multiple of num_heads"):
        CLIPConfig(**{**TINY, "text_num_heads": 3})
    with pytest.raises(ValueError, match="loss must be one of 'softmax', 'sigmoid', and is 'hinge'"):
        CLIPConfig(**TINY, loss="hinge")


def test_the_softmax_loss_of_different_subjects_is_the_cross_entropy_of_both_sides() -> None:
    logits = torch.randn(5, 5)
    own = torch.arange(5)
    expected = (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2
    torch.testing.assert_close(contrastive_loss(logits, own, "softmax") / 5, expected)


def test_pairs_of_one_subject_share_the_target() -> None:
    logits = torch.tensor([[9.0, 9.0, -9.0], [9.0, 9.0, -9.0], [-9.0, -9.0, 9.0]])
    same = contrastive_loss(logits, torch.tensor([4, 4, 7]), "softmax")
    other = contrastive_loss(logits, torch.tensor([4, 5, 7]), "softmax")
    torch.testing.assert_close(same, torch.tensor(2 * np.log(2.0), dtype=torch.float32), atol=1e-4, rtol=0)
    assert contrastive_loss(logits, torch.tensor([4, 4, 7]), "sigmoid") < contrastive_loss(
        logits, torch.tensor([4, 5, 7]), "sigmoid"
    )
    torch.testing.assert_close(other, same, atol=1e-4, rtol=0)  # the mean over equals is that of one of them


def test_the_sigmoid_loss_is_a_decision_for_each_image_and_text() -> None:
    logits = torch.randn(4, 4)
    together = torch.eye(4)
    expected = functional.binary_cross_entropy_with_logits(logits, together, reduction="sum")
    torch.testing.assert_close(contrastive_loss(logits, torch.arange(4), "sigmoid"), expected)


def test_what_is_drawn_is_all_but_the_white_around_it() -> None:
    image = np.full((1, 12, 12, 3), 255, np.uint8)
    image[0, 3:9, 3:9] = 0
    image[0, 5:7, 5:7] = 255  # white that does not reach the edge
    found = opaque(image)[0]
    assert found[3:9, 3:9].all()
    assert found.sum() == 36


def test_a_drawing_lies_on_its_background_and_a_photograph_fills_the_picture() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.zeros(8, 24, 24, dtype=torch.bool)
    drawn[:, 8:16, 8:16] = True
    backgrounds = torch.full((8, 3, 16, 16), 0.25)
    none = torch.zeros(8, dtype=torch.bool)
    images = torch.full((8, 3, 24, 24), 255, dtype=torch.uint8)
    placed = random_placements(images, drawn, backgrounds, mirrored=none, generator=generator)
    assert placed.shape == (8, 3, 16, 16)
    assert placed[:, :, 0, 0].eq(0.25).all()
    assert (placed.amax(dim=(1, 2, 3)) > 0.9).all()
    cut = random_crops(images, 16, least_area=0.3, mirrored=none, generator=generator)
    torch.testing.assert_close(cut, torch.ones(8, 3, 16, 16))


def test_recall_counts_queries_with_a_right_candidate_among_the_nearest() -> None:
    similarity = [[0.9, 0.1, 0.5], [0.2, 0.3, 0.1]]
    right = [[False, False, True], [True, False, False]]
    assert [recall_at(similarity, right, k) for k in (1, 2, 3)] == [0.0, 100.0, 100.0]


@pytest.fixture
def picture_data(tmp_path: Path) -> Path:
    """Emoji that are plain colours in three styles, photographs of one colour, and images with labels."""
    return write_picture_data(tmp_path / "data")


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_run_learns_colours_and_leaves_a_checkpoint(picture_data: Path, tmp_path: Path, loss: str) -> None:
    tiny = {**TINY, "loss": json.dumps(loss), "stem": '"patches"'}
    settings = [
        f"model.{name}={value}" for name, value in tiny.items() if name not in ("image_size", "vocabulary_size")
    ]
    settings += ["preprocessing.height=16", "preprocessing.width=16", "tokenizer.vocabulary_size=300"]
    settings += ["data.held_out_style=noto", "data.valid_fraction=0.25", "augmentation.colour_change=0.1"]
    settings += ["optimization.epochs=60", "optimization.batch_size=20", "optimization.learning_rate=0.01"]
    settings += ["optimization.evaluations=2", "tracker=none", "augmentation.grey=0", "augmentation.holes=0"]
    settings += ["optimization.average_decay=0.9"]
    options = RunOptions(
        recipe=RECIPE, settings=tuple(settings), data_dir=picture_data, output=tmp_path / "run", seed=0
    )
    folder = run_training(options, Console(quiet=True))
    model, checkpoint = load_model(folder)
    assert isinstance(model, CLIP)
    assert load_tokenizer(folder).get_vocab_size() <= 300
    assert checkpoint.training is not None
    metrics = checkpoint.training.metrics
    assert metrics["drawings_top_5"] == 100.0
    assert metrics["image_recall_5"] == 100.0
    assert metrics["image_recall_1"] >= 75.0
    assert {"labels_top_1", "unseen_drawings_top_1", "mean_recall"} <= metrics.keys()
    assert checkpoint.classification is not None
    assert (checkpoint.classification.temperature == 1) == (loss == "sigmoid"), "it is fitted for candidate labels"
    everything = replace(
        options,
        settings=(
            *(one for one in settings if not one.startswith(("data.", "tokenizer."))),
            *("data.held_out_style=", "optimization.epochs=1"),
        ),
        init=folder,
        output=tmp_path / "everything",
    )
    longer, trained_on_all = load_model(run_training(everything, Console(quiet=True)))
    assert trained_on_all.classification is not None
    if loss == "softmax":  # nothing is left to fit a temperature on, so that logits keep their scale
        assert longer.scale.item() / trained_on_all.classification.temperature == pytest.approx(
            model.scale.item() / checkpoint.classification.temperature, rel=1e-6
        )
