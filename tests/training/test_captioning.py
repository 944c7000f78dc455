"""Captions of images: the model, the metrics, the data, and a run on tiny data."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_pictures import write_caption_data

from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.data.public import DATASETS
from headway_training.evaluation import write_greedily
from headway_training.metrics import caption_bleu, caption_cider, caption_meteor
from headway_training.models import Captioner, CaptionerConfig, CLIPConfig, build_model
from headway_training.models.parts.attention import causal_attention, cross_attention
from headway_training.recipes import read_recipe
from headway_training.run import RunOptions, run_training
from headway_training.tasks.base import IGNORED
from headway_training.tasks.captioning import CaptioningTask

TINY = {
    "image_size": 16,
    "patch_size": 8,
    "image_num_layers": 1,
    "image_d_model": 16,
    "image_num_heads": 2,
    "image_d_ff": 32,
    "vocabulary_size": 340,
    "max_target_length": 24,
    "num_layers": 1,
    "d_model": 32,
    "num_heads": 2,
    "d_ff": 64,
}
RECIPE = "caption"


@pytest.fixture
def model() -> Captioner:
    torch.manual_seed(0)
    return Captioner(CaptionerConfig(**TINY)).eval()


@torch.inference_mode()
def test_captions_of_one_image_do_not_see_each_other_nor_other_images(model: Captioner) -> None:
    images, targets = torch.randn(2, 3, 16, 16), torch.randint(4, 340, (2, 3, 7))
    logits = model(targets, images)
    assert logits.shape == (2, 3, 7, 340)
    torch.testing.assert_close(model(targets[1:, 2:], images[1:])[0, 0], logits[1, 2], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(targets, images.flip(0)), logits)
    without = model(targets)
    torch.testing.assert_close(model(targets[:1]), without[:1], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_greedy_captions_are_the_likeliest_tokens_of_the_whole_model(model: Captioner) -> None:
    images = torch.randn(3, 3, 16, 16)
    rows = write_greedily(model, images, (2, 5), -1, batch_size=2)
    assert [len(row) for row in rows] == [23] * 3  # of 24 positions the last predicts one more, and two are given
    memory = model.encode(images)
    attend_cross = cross_attention(model.cross_keys_values(memory), torch.ones(3, 4))
    given = torch.tensor([[2, 5, *row] for row in rows])[:, :24]
    hidden = model.decode(given, torch.arange(24), causal_attention(), attend_cross)
    assert model.logits(hidden)[:, 1:].argmax(dim=-1).tolist() == rows


def test_a_captioner_starts_from_the_image_tower_of_a_clip(model: Captioner) -> None:
    fields = {name: value for name, value in TINY.items() if name.startswith(("image_", "patch"))}
    text = {"text_num_layers": 1, "text_d_model": 16, "text_num_heads": 2, "text_d_ff": 32}
    shape = CLIPConfig(**fields, **text, d_space=8, vocabulary_size=300, max_length=8)
    clip = build_model("clip", shape).state_dict()
    own = {name: weight.shape for name, weight in model.state_dict().items() if name.startswith("image_tower.")}
    assert own == {name: clip[name].shape for name in own}


def test_an_image_encoder_that_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="image encoder: d_model must be a multiple of num_heads"):
        CaptionerConfig(**{**TINY, "image_num_heads": 3})


def test_caption_metrics_are_those_of_the_authors_programs() -> None:
    references = [
        ["A dog runs.", "a brown dog is running"],
        ["two men talk", "men speak"],
        ["a bird", "the bird flies over the sea"],
    ]
    captions = ["a dog is running", "two men", "a dog"]
    assert caption_cider(captions, references) == pytest.approx(199.5318289815733)  # pycocoevalcap 1.2
    long = ["a dog runs fast", "two men talk here"]
    assert caption_cider(long, [[one] for one in long]) == pytest.approx(1000)
    assert caption_bleu(long, [[one, "a cat"] for one in long]) == pytest.approx(100)
    assert caption_meteor(["zwei Hunde"], [["zwei Hund"]], "de") > 90  # by their stems
    assert caption_meteor(["two dogs"], [["a cat"]], "en") == 0


@pytest.fixture
def caption_data(tmp_path: Path) -> Path:
    """Photographs of one colour with a caption in two languages, and captions without photographs."""
    return write_caption_data(tmp_path / "data")


def test_lines_of_photographs_join_their_captions_and_lines_without_one_stay_alone(caption_data: Path) -> None:
    dataset = DATASETS["captions"]
    splits = dataset.read(dataset, caption_data, read_recipe(RECIPE).data)
    assert splits.train.captions["en"][3] == ["a wall that is yellow"]  # which it has already
    assert splits.train.captions["de"][3] == ["eine Wand, ganz gelb", "eine gelbe Wand"]
    assert splits.train.texts == {"en": ["a red wall"], "de": ["eine rote Wand"]}
    assert len(splits.valid) == 4
    assert splits.valid.num_texts == 0


def test_a_run_learns_to_name_colours_in_two_languages(caption_data: Path, tmp_path: Path) -> None:
    tiny = {**TINY, "stem": '"patches"'}
    settings = [
        f"model.{name}={value}" for name, value in tiny.items() if name not in ("image_size", "vocabulary_size")
    ]
    settings += ["preprocessing.height=16", "preprocessing.width=16", "tokenizer.vocabulary_size=340"]
    settings += ["optimization.epochs=60", "optimization.batch_size=10", "optimization.learning_rate=0.01"]
    settings += ["optimization.evaluations=1", "tracker=none", "augmentation.grey=0", "augmentation.holes=0"]
    settings += ["augmentation.colour_change=0.1", "optimization.average_decay=0.9", "model.dropout=0"]
    settings += ["captioning.captions_per_image=2", "optimization.label_smoothing=0"]
    options = RunOptions(recipe=RECIPE, settings=tuple(settings), data_dir=caption_data, output=tmp_path / "run")
    folder = run_training(options, Console(quiet=True))
    model, checkpoint = load_model(folder)
    assert isinstance(model, Captioner)
    tokenizer = load_tokenizer(folder)
    assert checkpoint.language_tokens == {one: tokenizer.token_to_id(f"<{one}>") for one in ("en", "de")}
    assert checkpoint.training is not None
    assert checkpoint.training.baseline is not None
    assert checkpoint.training.metrics["cider"] > checkpoint.training.baseline.value + 100
    assert checkpoint.training.metrics["meteor_de"] > 90
    with np.load(folder / "evaluation.npz") as stored:
        assert stored["images"].shape == (4, 16, 16, 3)
        assert stored["captions"][1].tolist() == [["a wall that is green"], ["eine Wand, ganz grün"]]
        assert stored["languages"].tolist() == ["en", "de"]


def test_the_loss_is_that_of_all_logits_whatever_is_padding(model: Captioner) -> None:
    random = torch.Generator().manual_seed(3)
    lengths = torch.tensor([[3, 5, 9], [2, 7, 7]])
    targets = torch.randint(4, 340, (2, 3, 12), generator=random)
    places = torch.arange(12)
    targets[(places == 0) | (places > lengths[..., None])] = IGNORED
    ids = torch.randint(4, 340, (2, 3, 12), generator=random)
    images = torch.randn(2, 3, 16, 16, generator=random)
    task = CaptioningTask.__new__(CaptioningTask)  # its loss reads nothing of a recipe and data
    for tensors in (
        {"pixel_values": images, "target_ids": ids, "targets": targets},
        {"target_ids": ids[:, :1], "targets": targets[:, :1]},
    ):
        expected = task.loss_of_logits(task.logits(model, tensors), tensors["targets"], 0.1)
        torch.testing.assert_close(task.loss(model, tensors, 0.1), expected)
