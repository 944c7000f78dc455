"""`headway-train run` from the user's own files to a checkpoint, for every task, in a few steps."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class
from evaluation_files import read_image_evaluation, read_text_evaluation
from typer.testing import CliRunner

from headway_training.checkpoint import load_model, load_tokenizer
from headway_training.cli import app


def invoke(*words: str) -> str:
    """Runs the command; gives its output without line breaks."""
    result = CliRunner().invoke(app, [*words], catch_exceptions=False)
    output = re.sub(r"\s+", " ", result.output)
    assert result.exit_code == 0, output
    return output


def fail(*words: str) -> str:
    """Runs a command that must fail; gives its message without line breaks."""
    result = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return re.sub(r"\s+", " ", result.output)


def words_of(recipe: str, data: Path, output: Path, settings: tuple[str, ...], steps: int = 6) -> list[str]:
    words = ["run", recipe, "--train", str(data), "--valid", str(data), "--output", str(output)]
    for setting in (*settings, "optimization.evaluations=2"):
        words += ["--set", setting]
    return [*words, "--max-steps", str(steps)]


def test_a_csv_becomes_a_classifier_with_its_labels(tmp_path, reviews, tiny_settings):
    settings = (
        *tiny_settings["ag-news"],
        "optimization.learning_rate=0.02",
        "augmentation.token_dropout=0",
        "optimization.epochs=30",
    )
    output = invoke(*words_of("ag-news", reviews, tmp_path / "sentiment", settings, steps=200))
    model, checkpoint = load_model(tmp_path / "sentiment" / "checkpoint")
    assert (checkpoint.name, checkpoint.labels) == ("sentiment", ("blame", "praise"))
    assert "blame, praise" in checkpoint.description
    assert "reviews.csv" in checkpoint.description
    assert str(tmp_path) not in checkpoint.description
    assert checkpoint.configuration["num_classes"] == 2
    assert checkpoint.training is not None
    assert checkpoint.training.metrics["accuracy"] == 100.0  # a word gives the class away
    assert checkpoint.training.baseline is not None
    assert checkpoint.training.step_count == 200
    assert "Naive Bayes" in output
    assert "memory: weights" in output
    assert "tokens/s a process (measured over" in output
    assert "of the training time was spent waiting for data" in output
    assert len(read_text_evaluation(tmp_path / "sentiment" / "checkpoint")) == 80
    assert load_tokenizer(tmp_path / "sentiment" / "checkpoint").get_vocab_size() == model.configuration.vocabulary_size


def test_parallel_text_becomes_a_translator(tmp_path, pairs, tiny_settings):
    output = invoke(*words_of("multi30k-en-de", pairs, tmp_path / "run", tiny_settings["multi30k-en-de"]))
    _, checkpoint = load_model(tmp_path / "run" / "checkpoint")
    assert checkpoint.languages is not None
    assert checkpoint.special_tokens is not None
    assert None not in checkpoint.special_tokens.model_dump().values()
    assert checkpoint.training is not None
    assert "tok:13a" in str(checkpoint.training.metrics["sacrebleu_signature"])
    assert set(read_text_evaluation(tmp_path / "run" / "checkpoint")[0]) == {"source", "target"}
    assert "copy of the source" in output


def test_plain_text_becomes_a_generator(tmp_path, verses, tiny_settings):
    output = invoke(*words_of("tiny-shakespeare", verses, tmp_path / "run", tiny_settings["tiny-shakespeare"]))
    _, checkpoint = load_model(tmp_path / "run" / "checkpoint")
    assert checkpoint.training is not None
    assert 0 < float(checkpoint.training.metrics["nats_per_character"]) < 6
    assert checkpoint.sampling_defaults is not None
    assert read_text_evaluation(tmp_path / "run" / "checkpoint") == [{"text": verses.read_text(encoding="utf-8")}]
    assert "5-gram" in output


def test_a_folder_of_images_becomes_a_labeller(tmp_path, pictures, tiny_settings):
    output = invoke(*words_of("cifar10", pictures, tmp_path / "run", tiny_settings["cifar10"]))
    _, checkpoint = load_model(tmp_path / "run" / "checkpoint")
    assert checkpoint.labels == ("blue", "green", "red")
    assert checkpoint.image_preprocessing is not None
    images, labels = read_image_evaluation(tmp_path / "run" / "checkpoint")
    assert (images.shape, labels.shape) == ((24, 16, 16, 3), (24,))
    assert "logistic regression on pixels" in output


def test_test_data_of_its_own_is_what_is_measured(tmp_path, reviews, tiny_settings):
    small = tmp_path / "held-out.csv"
    small.write_text("text,label\na wonderful film,praise\na dreadful plot,blame\n")
    words = words_of("ag-news", reviews, tmp_path / "run", tiny_settings["ag-news"])
    invoke(*words, "--test", str(small))
    description = json.loads((tmp_path / "run" / "checkpoint" / "checkpoint.json").read_text())
    assert description["evaluation"]["dataset"] == "held-out.csv"
    assert len(read_text_evaluation(tmp_path / "run" / "checkpoint")) == 2
    assert "--test" in description["training"]["command"]


def test_scalars_for_tensorboard_are_written(tmp_path, reviews, tiny_settings):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    invoke(*words_of("ag-news", reviews, tmp_path / "run", tiny_settings["ag-news"], steps=20))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "run")).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/learning_rate", "train/throughput", "valid/accuracy", "test/accuracy"} <= tags
    assert [scalar.step for scalar in events.Scalars("valid/accuracy")] == [10, 20]


@pytest.fixture
def own_tracker() -> Iterator[list[tuple[str, dict, int | None]]]:
    """Registers a tracker with accelerate, and gives what it was handed."""
    seen: list[tuple[str, dict, int | None]] = []

    class Notebook(GeneralTracker):
        name = "notebook"
        requires_logging_directory = False

        def __init__(self, project: str) -> None:
            super().__init__()
            seen.append(("start", {"project": project}, None))

        @property
        def tracker(self) -> list:
            return seen

        def store_init_configuration(self, values: dict) -> None:
            seen.append(("configuration", values, None))

        def log(self, values: dict, step: int | None = None, **_: object) -> None:
            seen.append(("log", values, step))

        def finish(self) -> None:
            seen.append(("finish", {}, None))

    register_tracker_class(Notebook)
    yield seen
    del LOGGER_TYPE_TO_CLASS["notebook"]


def test_a_tracker_of_ones_own_gets_settings_and_curves(tmp_path, reviews, tiny_settings, own_tracker):
    settings = (*tiny_settings["ag-news"], "tracker=notebook")
    invoke(*words_of("ag-news", reviews, tmp_path / "run", settings, steps=20))
    assert own_tracker[0] == ("start", {"project": "run"}, None)
    (configuration,) = [values for kind, values, _ in own_tracker if kind == "configuration"]
    assert configuration["recipe.optimization.evaluations"] == "2"
    logged = [(step, name) for kind, values, step in own_tracker if kind == "log" for name in values]
    assert [step for step, name in logged if name == "train/loss"] == [10, 20]
    assert [step for step, name in logged if name == "valid/accuracy"] == [10, 20]
    assert [step for step, name in logged if name == "test/accuracy"] == [20]
    assert own_tracker[-1][0] == "finish"
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_tracker_that_is_unknown_or_not_installed_is_named(tmp_path, reviews, tiny_settings, monkeypatch):
    words = words_of("ag-news", reviews, tmp_path / "run", tiny_settings["ag-news"])
    assert "tracker is 'wandbe'; it must be one of aim, " in fail(*words, "--set", "tracker=wandbe")
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    assert "tracker is 'wandb', which is not installed" in fail(*words, "--set", "tracker=wandb")
    invoke(*words, "--set", "tracker=none")


def test_errors_are_one_message_and_leave_no_traceback(tmp_path, reviews):
    assert "no recipe 'ag-nws'; did you mean 'ag-news'?" in fail("run", "ag-nws")
    assert "'optimization.epoch'; did you mean 'optimization.epochs'?" in fail(
        "run", "ag-news", "--set", "optimization.epoch=1"
    )
    assert "--valid is missing" in fail("run", "ag-news", "--train", str(reviews))
    missing = fail("run", "ag-news", "--data-dir", str(tmp_path / "none"), "--output", str(tmp_path / "a"))
    assert "headway-train data ag-news" in missing
    absent = ("run", "ag-news", "--train", "no.csv", "--valid", "no.csv", "--output", str(tmp_path / "b"))
    assert "no.csv does not exist" in fail(*absent)
    wrong = ("--set", "model.num_heads=3", "--output", str(tmp_path / "c"))
    data = ("--train", str(reviews), "--valid", str(reviews))
    assert "d_model must be a multiple of num_heads (3)" in fail("run", "ag-news", *data, *wrong)


def test_a_run_that_failed_before_its_first_step_does_not_take_the_folder(tmp_path, reviews, tiny_settings):
    broken = tmp_path / "broken.csv"
    broken.write_text("text,label\nx,a\ny\n")
    words = words_of("ag-news", broken, tmp_path / "run", tiny_settings["ag-news"])
    assert "broken.csv, line 3" in fail(*words)
    broken.write_text("text,label\nx y z,a\ny z x,b\n" * 8)
    invoke(*words)


def test_the_list_names_every_recipe():
    output = invoke("list")
    for name in ("ag-news", "cifar10", "multi30k-en-de", "tiny-shakespeare"):
        assert name in output
