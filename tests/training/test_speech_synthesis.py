"""Speaking: sequences of voice, text and codes, and both runs on tones."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_voice
import torch
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.data.examples import Splits
from headway_training.data.sources import OwnData, read_splits
from headway_training.errors import RecipeError
from headway_training.models import SpeechSynthesizer, SpeechSynthesizerConfig
from headway_training.recipes import read_recipe
from headway_training.tasks import make_task
from headway_training.tasks.base import IGNORED, Task
from headway_training.tokenizers import encode_texts

SHAPE = {**tiny_voice.CODEC, **tiny_voice.SPEAKER, "vocabulary_size": 261, "num_voices": 2}


def make_voice_task(voice_checkpoint: Path, tmp_path: Path, *settings: str) -> tuple[Task, Splits[Any]]:
    """The task of the recordings and the codec that a checkpoint was made from, and its data."""
    root = voice_checkpoint.parents[1]
    table = str(root / "recordings" / "recordings.tsv")
    shape = [f"model.{name}={value}" for name, value in tiny_voice.SPEAKER.items()]
    codec = f"init.checkpoint={root / 'codec' / 'checkpoint'}"
    recipe = read_recipe("telephone-speech", [*shape, codec, *settings])
    splits = read_splits(recipe, tmp_path, OwnData(train=table, valid=table))
    return make_task(recipe, splits, tmp_path), splits


def test_a_run_leaves_codec_language_model_and_voices(voice_checkpoint: Path) -> None:
    model, described = load_model(voice_checkpoint)
    codec, _ = load_model(voice_checkpoint.parents[1] / "codec" / "checkpoint")
    assert isinstance(model, SpeechSynthesizer)
    assert described.labels == ("ann", "bob")
    assert described.training.metrics["nats_per_code"] < np.log(16)
    for name, weight in codec.state_dict().items():  # which the second run leaves as it is
        torch.testing.assert_close(model.state_dict()[name], weight, msg=name)
    assert model.voices.shape == (2, 5, 2)
    assert not torch.equal(model.voices[0], model.voices[1])
    ids = encode_texts(load_tokenizer(voice_checkpoint), ["low"], None)[0]
    assert ids[0] == described.special_tokens.bos
    assert len(ids) == 5


def test_a_sequence_is_voice_text_codes_and_end_and_codes_alone_are_targets(
    voice_checkpoint: Path, tmp_path: Path
) -> None:
    settings = ("augmentation.join_texts=2", "augmentation.other_speeds=0", "speech.first_book_weight=1.5")
    task, splits = make_voice_task(voice_checkpoint, tmp_path, *settings)
    model = load_model(voice_checkpoint)[0]
    generator = torch.Generator().manual_seed(1)
    tensors = task.collate(np.arange(12), generator).tensors
    special = task.checkpoint_fields()["special_tokens"]
    logits, targets = task.logits(model, tensors).flatten(0, 1), tensors["targets"].flatten()
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    weights = torch.where((targets - 261) // 16 == 1, 0.5, 1.5)  # of the second book, and of the first and the end
    torch.testing.assert_close(task.loss(model, tensors), (losses * weights).sum())
    has_voice = set()
    for ids, targets in zip(tensors["input_ids"].tolist(), tensors["targets"].tolist(), strict=True):
        first = next(i for i, target in enumerate(targets) if target != IGNORED)
        start = ids.index(special.bos)
        has_voice.add(start > 0)
        assert start in (0, 10)  # frames of the voice times books
        assert all(token >= 261 for token in ids[:start])
        spoken = [target for target in targets if target != IGNORED]
        assert spoken[-1] == special.eos
        assert targets[first : first + len(spoken)] == spoken
        assert ids[first + 1 : first + len(spoken)] == spoken[:-1]
        books = [(token - 261) // 16 for token in spoken[:-1]]
        assert books == [0, 1] * (len(books) // 2)
    assert has_voice == {True, False}
    codes = model.encode(torch.from_numpy(np.pad(splits.train.samples[0] / 32_768, (0, 0))).float()[None])[0]
    alone = task.evaluation_data().arrays
    assert alone["input_ids"][alone["prompt_lengths"][0] : alone["lengths"][0] - 1].tolist() == (
        (codes + 261 + torch.tensor([0, 16])).flatten().tolist()
    )


def test_half_of_the_examples_are_at_other_speeds(voice_checkpoint: Path, tmp_path: Path) -> None:
    settings = ("augmentation.join_texts=1", "augmentation.other_speeds=2", "speech.first_book_weight=1.0")
    task, splits = make_voice_task(voice_checkpoint, tmp_path, *settings)
    generator = torch.Generator().manual_seed(1)
    hop = SpeechSynthesizerConfig(**SHAPE).hop_length
    at_speed: Counter[float] = Counter()
    for number in np.arange(12).repeat(20):
        targets = task.collate(np.array([number]), generator).tensors["targets"]
        num_frames = (int((targets != IGNORED).sum()) - 1) // 2
        length = len(splits.train.samples[number]) / hop
        at_speed[min((1, 1.15, 0.85), key=lambda speed: abs(num_frames - np.ceil(length / speed)))] += 1
    assert 90 < at_speed[1] < 150
    assert min(at_speed[1.15], at_speed[0.85]) > 30


def test_a_weight_that_leaves_nothing_to_the_other_books_is_refused(voice_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"must be below the number of books \(2\), and is 2\.0"):
        make_voice_task(voice_checkpoint, tmp_path, "speech.first_book_weight=2.0")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_length": 36}, "max_length must be at least 37"),
        ({"num_voices": 0}, "num_voices must be an integer of at least 1"),
        ({"num_heads": 8}, "head_dim must be a multiple of 8"),
    ],
)
def test_a_shape_that_cannot_be_is_named(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SpeechSynthesizerConfig(**{**SHAPE, **changes})


def test_a_run_without_a_codec_is_refused_with_what_to_do() -> None:
    with pytest.raises(RecipeError, match="and give its checkpoint with --init"):
        read_recipe("telephone-speech", ["init={}"])
