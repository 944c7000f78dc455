"""Training runs that start from a checkpoint: weights by name, its tokenizer, and the names of the rest."""

import re

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.cli import app
from headway_training.data import OwnData
from headway_training.run import RunOptions, run_training

QUIET = Console(quiet=True)


def without_tokenizer(settings):
    """The settings of a run that takes the tokenizer of a checkpoint."""
    return tuple(setting for setting in settings if not setting.startswith("tokenizer."))


def run(folder, recipe, data, settings, *, init=None, steps=2, resume=False, console=QUIET):
    settings = settings if init is None else without_tokenizer(settings)
    options = RunOptions(
        recipe=recipe,
        settings=(*settings, "optimization.evaluations=1"),
        own_data=OwnData(train=str(data), valid=str(data)),
        output=folder,
        init=init,
        max_steps=steps,
        resume=resume,
    )
    return run_training(options, console)


@pytest.fixture
def pretrained(tmp_path, reviews, tiny_settings):
    """The checkpoint of a classifier of reviews."""
    return run(tmp_path / "pretrained", "ag-news", reviews, tiny_settings["ag-news"])


def test_a_run_starts_from_the_weights_and_with_the_tokenizer_of_a_checkpoint(
    tmp_path, reviews, tiny_settings, pretrained, capsys
):
    other = tmp_path / "other.csv"
    lines = reviews.read_text(encoding="utf-8").replace("praise", "3").replace("blame", "1").splitlines()
    other.write_text("\n".join([*lines, "80,2,so so said one"]), encoding="utf-8")
    still = (*tiny_settings["ag-news"], "optimization.learning_rate=1e-9", "optimization.weight_decay=0")
    checkpoint = run(tmp_path / "tuned", "ag-news", other, still, init=pretrained, console=Console(soft_wrap=True))
    before, after = (load_model(folder)[0].state_dict() for folder in (pretrained, checkpoint))
    for name, tensor in before.items():
        if not name.startswith("head.output"):
            torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-5)
    assert load_tokenizer(checkpoint).to_str() == load_tokenizer(pretrained).to_str()
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"weights of {pretrained}: " in shown
    assert re.search(
        r"of another shape in the checkpoint, so they start fresh: head\.\S+ \(2, 16\) in place of \(3, 16\)", shown
    )
    assert load_model(checkpoint)[1].training.command.startswith(f"headway-train run ag-news --init {pretrained}")


def test_what_one_of_both_lacks_is_named(tmp_path, reviews, tiny_settings, pretrained, capsys):
    settings = (*tiny_settings["ag-news"], "model.num_layers=2", "model.window=2")
    run(tmp_path / "deeper", "ag-news", reviews, settings, init=pretrained, console=Console(soft_wrap=True))
    shown = capsys.readouterr().out
    (missing,) = re.findall(r"not in the checkpoint, so they start fresh: (.*)", shown)
    assert "stack.layers.1." in missing
    assert "window." in missing
    assert "stack.layers.0." not in missing
    deeper = tmp_path / "deeper" / "checkpoint"
    run(tmp_path / "again", "ag-news", reviews, tiny_settings["ag-news"], init=deeper, console=Console(soft_wrap=True))
    (unexpected,) = re.findall(r"in the checkpoint alone, so they are left out: (.*)", capsys.readouterr().out)
    assert "stack.layers.1." in unexpected


def test_another_task_takes_the_encoder_and_frames_texts_its_own_way(
    tmp_path, reviews, pairs, tiny_settings, pretrained
):
    translator = run(tmp_path / "translator", "multi30k-en-de", pairs, tiny_settings["multi30k-en-de"])
    tokenizer = load_tokenizer(translator)
    assert tokenizer.encode("one").ids[0] != tokenizer.token_to_id("<bos>")
    again = run(tmp_path / "again", "multi30k-en-de", pairs, tiny_settings["multi30k-en-de"], init=translator)
    assert load_tokenizer(again).to_str() == tokenizer.to_str()
    from headway_training.tokenizers import take_tokenizer

    framed = take_tokenizer(translator, "text_classification").encode("one").ids
    assert framed[0] == tokenizer.token_to_id("<bos>")
    assert framed[-1] == tokenizer.token_to_id("<eos>")


def test_a_resumed_run_goes_on_from_its_state_and_not_from_the_checkpoint(tmp_path, reviews, tiny_settings, pretrained):
    settings = tiny_settings["ag-news"]
    checkpoint = run(tmp_path / "tuned", "ag-news", reviews, settings, init=pretrained)
    before = (checkpoint / "model.safetensors").read_bytes()
    run(tmp_path / "tuned", "ag-news", reviews, settings, init=pretrained, resume=True)
    assert (checkpoint / "model.safetensors").read_bytes() == before


def fail(*words: str) -> str:
    result = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    assert len(result.output.strip().splitlines()) == 1
    return result.output


def test_a_wrong_folder_is_an_error_of_one_line(tmp_path, reviews, verses, tiny_settings, pretrained):
    words = ["run", "ag-news", "--train", str(reviews), "--valid", str(reviews), "--output", str(tmp_path / "run")]
    assert "is not a checkpoint: it holds no checkpoint.json" in fail(*words, "--init", str(tmp_path))
    assert f"Did you mean {pretrained}?" in fail(*words, "--init", str(pretrained.parent))
    assert "is not a checkpoint" in fail(*words, "--set", "init.checkpoint=nowhere")
    generator = run(tmp_path / "generator", "tiny-shakespeare", verses, tiny_settings["tiny-shakespeare"])
    assert "has no <pad>, <unk>, <bos>, <eos>; text_classification needs it" in fail(*words, "--init", str(generator))
    narrow = [word for setting in without_tokenizer(tiny_settings["ag-news"]) for word in ("--set", setting)]
    assert "none of its matrices (encoder) has a name and shape of the model's" in fail(
        *words, *narrow, "--set", "model.d_model=32", "--set", "model.d_ff=48", "--init", str(pretrained)
    )
