"""Before an encoder's training: hidden tokens of the training text are told, and the weights are handed on."""

import pytest
import torch
from accelerate import Accelerator
from rich.console import Console
from safetensors.torch import load_file
from torch.nn import functional

from headway_training.data.sources import OwnData, read_splits
from headway_training.errors import RecipeError
from headway_training.models import build_model
from headway_training.pretraining import PRETRAINING_FOLDER, pretrain
from headway_training.recipes import read_recipe
from headway_training.run import RunOptions, run_training
from headway_training.tasks import make_task
from headway_training.tasks.base import IGNORED
from headway_training.tasks.masked_language import MaskedLanguageTask

QUIET = Console(quiet=True)


def make(folder, reviews, settings):
    """Recipe, splits, task and a fresh model of the reviews' classifier."""
    recipe = read_recipe("ag-news", settings)
    own = OwnData(train=str(reviews), valid=str(reviews))
    splits = read_splits(recipe, folder, own)
    task = make_task(recipe, splits, folder / "tokenizer.json")
    fields = {name: value for name, value in recipe.model.items() if name != "architecture"}
    torch.manual_seed(0)
    return recipe, splits, task, build_model("encoder", {**fields, **task.model_fields()})


def test_tokens_are_hidden_as_often_as_asked_and_special_ones_never(tmp_path, reviews, tiny_settings):
    recipe, splits, task, _ = make(
        tmp_path, reviews, (*tiny_settings["ag-news"], "pretraining.mask_rate=0.3", "optimization.batch_tokens=100000")
    )
    masked = MaskedLanguageTask(recipe, task.tokenizer, splits.train.texts, splits.valid.texts, 32)
    (batch,) = masked.epoch_batches(0, 0)
    tensors = masked.collate(batch, torch.Generator().manual_seed(0)).tensors
    plain, told = [masked._train[i] for i in batch], tensors["targets"] != IGNORED
    share = told.sum() / tensors["attention_mask"].sum()
    assert 0.2 < float(share) < 0.3  # of all tokens, the special ones among them
    hidden = tensors["input_ids"][told] == task.tokenizer.token_to_id("<unk>")
    assert 0.7 < float(hidden.float().mean()) < 0.9
    for row, ids in enumerate(plain):
        for place, token in enumerate(ids):
            if told[row, place]:
                assert int(tensors["targets"][row, place]) == token
                assert token >= 4  # the special tokens come first
            else:
                assert int(tensors["input_ids"][row, place]) == token


def test_the_loss_of_the_tokens_to_tell_alone_is_that_of_all_logits(tmp_path, reviews, tiny_settings):
    recipe, splits, task, _ = make(tmp_path, reviews, tiny_settings["ag-news"])
    masked = MaskedLanguageTask(recipe, task.tokenizer, splits.train.texts, splits.valid.texts, 32)
    fields = {name: value for name, value in recipe.model.items() if name != "architecture"}
    model = build_model("encoder", {**fields, **masked.model_fields()}).eval()
    tensors = masked.collate(masked.epoch_batches(0, 0)[0], torch.Generator().manual_seed(0)).tensors
    everywhere = model(tensors["input_ids"], tensors["attention_mask"])  # (B, T, V)
    expected = functional.cross_entropy(everywhere.transpose(1, 2), tensors["targets"], reduction="sum")
    assert torch.allclose(masked.loss(model, tensors), expected, rtol=1e-5)


def test_only_a_masked_language_head_has_logits_of_some_tokens(tmp_path, reviews, tiny_settings):
    classifier = make(tmp_path, reviews, tiny_settings["ag-news"])[3]
    ids = torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(TypeError, match="the model has a sequence head"):
        classifier.logits_at(ids.bool(), ids, ids)


def test_the_weights_are_handed_on_but_for_the_head(tmp_path, reviews, tiny_settings):
    settings = (*tiny_settings["ag-news"], "pretraining.epochs=2", "optimization.learning_rate=0.01")
    recipe, splits, task, model = make(tmp_path, reviews, settings)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    where = {"folder": tmp_path, "seed": 0, "console": QUIET, "accelerator": Accelerator(mixed_precision="no")}
    pretrain(recipe, task, splits, model, **where)
    learned = load_file(tmp_path / PRETRAINING_FOLDER / "best.safetensors")
    for name, tensor in model.named_parameters():
        same = before if name.startswith("head.") else learned
        assert torch.equal(tensor, same[name]), name
    assert not torch.equal(model.tokens.weight, before["tokens.weight"])
    again = make(tmp_path, reviews, settings)[3]
    pretrain(recipe, task, splits, again, **where)  # it is finished: its weights are taken
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_a_run_begins_with_its_pretraining(tmp_path, reviews, tiny_settings):
    own = OwnData(train=str(reviews), valid=str(reviews))
    settings = (*tiny_settings["ag-news"], "pretraining.epochs=1", "optimization.evaluations=1")
    options = RunOptions(recipe="ag-news", settings=settings, own_data=own, output=tmp_path / "run", max_steps=2)
    run_training(options, QUIET)
    assert (tmp_path / "run" / PRETRAINING_FOLDER / "best.safetensors").is_file()
    assert (tmp_path / "run" / "checkpoint").is_dir()


def test_only_encoders_are_pretrained(tmp_path, verses, tiny_settings):
    own = OwnData(train=str(verses), valid=str(verses))
    settings = (*tiny_settings["tiny-shakespeare"], "pretraining.epochs=1")
    with pytest.raises(RecipeError, match="only 'encoder' can be pretrained"):
        run_training(
            RunOptions(recipe="tiny-shakespeare", settings=settings, own_data=own, output=tmp_path / "run"), QUIET
        )
