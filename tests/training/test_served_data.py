"""What a served model is measured on."""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from tiny_pictures import write_picture_data

from headway_client import Model, Task
from headway_training.data.sources import read_splits
from headway_training.recipes import read_recipe
from headway_training.served.data import read_dataset

DRAWS_TEXTS = Model(
    name="painter",
    version="1",
    task=Task.IMAGE_GENERATION,
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
    has_chat_template=False,
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
