"""Speaking: sequences of voice, text and codes, and both runs on tones."""

from pathlib import Path

import numpy as np
import pytest
import tiny_voice
import torch

from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.data.sources import OwnData, read_splits
from headway_training.errors import RecipeError
from headway_training.models import SpeechSynthesizer, SpeechSynthesizerConfig
from headway_training.recipes import read_recipe
from headway_training.tasks import make_task
from headway_training.tasks.base import IGNORED
from headway_training.tokenizers import encode_texts

SHAPE = {**tiny_voice.CODEC, **tiny_voice.SPEAKER, "vocabulary_size": 261, "num_voices": 2}


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
    root = voice_checkpoint.parents[1]
    settings = [f"model.{name}={value}" for name, value in tiny_voice.SPEAKER.items()]
    settings += [f"init.checkpoint={root / 'codec' / 'checkpoint'}", "augmentation.join_texts=2"]
    recipe = read_recipe("telephone-speech", settings)
    table = str(root / "recordings" / "recordings.tsv")
    splits = read_splits(recipe, tmp_path, OwnData(train=table, valid=table))
    task = make_task(recipe, splits, tmp_path)
    model = load_model(voice_checkpoint)[0]
    generator = torch.Generator().manual_seed(1)
    tensors = task.collate(np.arange(12), generator).tensors
    special = task.checkpoint_fields()["special_tokens"]
    whole = task.loss_of_logits(task.logits(model, tensors), tensors["targets"])
    torch.testing.assert_close(task.loss(model, tensors), whole)  # of which it computes the targets' part alone
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
