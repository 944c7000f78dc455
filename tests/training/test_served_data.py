"""What a served model is measured on."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from tiny_pictures import write_picture_data

from headway_client import Model
from headway_training.data.sources import read_splits
from headway_training.errors import EvaluationError
from headway_training.recipes import read_recipe
from headway_training.served.data import read_dataset, read_file
from headway_training.served.evaluation import EvaluationOptions, _check_settings, evaluate_served

DRAWS_TEXTS = Model(
    name="painter",
    version="1",
    task="image_generation",
    description="",
    architecture="",
    parameter_count=0,
    variant="",
    device="",
    max_input_token_count=8,
    max_token_count=0,
    labels=(),
    source_language="",
    target_language="",
    default_parameters=None,
    quality=(),
    license="",
)


def test_drawings_are_measured_beside_images_that_were_learned_from(tmp_path: Path) -> None:
    folder = write_picture_data(tmp_path)
    examples = read_dataset(DRAWS_TEXTS, "emoji", folder).examples
    splits = read_splits(read_recipe("emoji-diffusion"), folder, None)
    assert examples.prompts == splits.test.names
    assert len(examples.trained_on) == len(examples.images) == len(splits.test)
    for file in examples.trained_on:
        image = np.asarray(Image.open(io.BytesIO(file)))
        assert any(np.array_equal(image, one) for one in splits.train.images)
    assert examples.trained_on == read_dataset(DRAWS_TEXTS, "emoji", folder).examples.trained_on, "always the same"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"file": "a.csv", "data_dir": Path("data")}, "--data-dir holds public data sets, and --file is none"),
        ({"label_separator": ";"}, "--label-separator is read of --file alone"),
        ({"file": "a.csv", "dataset": "ag-news"}, "--data and --file are both given"),
    ],
)
def test_an_option_of_other_data_is_refused_before_the_server_is_asked(options: dict, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        evaluate_served(EvaluationOptions(model="m", server="127.0.0.1:1", **options), Console(quiet=True))


def test_an_option_that_the_measured_data_does_not_read_is_refused(tmp_path: Path) -> None:
    captioner = replace(DRAWS_TEXTS, task="captioning")
    _check_settings({"language": "de"}, captioner, of_file=True)
    with pytest.raises(EvaluationError, match="language is no option of measuring captioning"):
        _check_settings({"language": "de"}, captioner, of_file=False)
    with pytest.raises(EvaluationError, match="--label-separator is for texts that may have several labels"):
        read_file(replace(DRAWS_TEXTS, task="text_classification"), str(tmp_path / "a.csv"), {}, ";")
