"""Images and texts in one space, and a caller's own labels, from the client through a server, are PyTorch's."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from headway_client import Client, FailedPreconditionError, InvalidArgumentError
from headway_training.checkpoint import load_model
from headway_training.models import CLIP

LABELS = ["a red wall", "two dogs", "the sea", "green grass"]


@pytest.fixture(scope="module")
def images(towers: Path) -> np.ndarray:
    with np.load(towers / "evaluation.npz") as arrays:
        return arrays["images"]


def files(images: np.ndarray) -> list[bytes]:
    written = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        written.append(file.getvalue())
    return written


def expected_logits(checkpoint: Path, images: np.ndarray, texts: list[list[str]]) -> np.ndarray:
    """Of PyTorch, for labels with several texts each: (images, labels)."""
    model, described = load_model(checkpoint)
    assert isinstance(model, CLIP)
    settings = described.image_preprocessing
    assert settings is not None
    pixels = ((images / 255 - np.array(settings.mean)) / np.array(settings.std)).astype(np.float32)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    with torch.inference_mode():
        vectors = []
        for several in texts:
            ids = [torch.tensor([tokenizer.encode(text).ids]) for text in several]
            mean = torch.cat([model.embed_texts(one, torch.ones_like(one)) for one in ids]).mean(dim=0)
            vectors.append(mean / mean.norm())
        found = model.embed_images(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))
        logits: np.ndarray = model.logits(found, torch.stack(vectors)).numpy()
    return logits


def test_models_of_one_space_say_so(towers_client: Client) -> None:
    models = {model.task: model for model in towers_client.list_models()}
    assert models["image_embedding"].embedding_space == models["text_embedding"].embedding_space != ""


@pytest.mark.parametrize("templates", [None, ["{}", "a picture of {}"]])
def test_labels_have_the_probabilities_of_pytorch_and_a_set_comes_again(
    towers_client: Client, towers: Path, images: np.ndarray, templates: list[str] | None
) -> None:
    texts = [[template.replace("{}", label) for template in templates or ["{}"]] for label in LABELS]
    expected = 1 / (1 + np.exp(-expected_logits(towers, images, texts)))
    for _ in range(2):
        results = towers_client.classify_image(files(images), candidate_labels=LABELS, templates=templates)
        for result, row in zip(results, expected, strict=True):
            found = {label.label: label.probability for label in result.labels}
            np.testing.assert_allclose([found[label] for label in LABELS], row, rtol=2e-3)
            assert all(label.selected == (label.probability >= 0.5) for label in result.labels)
    (best,) = towers_client.classify_image(files(images[:1]), candidate_labels=LABELS, templates=templates, top_k=1)
    assert [label.label for label in best.labels] == [LABELS[int(expected[0].argmax())]]


@pytest.mark.parametrize(
    ("labels", "templates", "message"),
    [
        (["dog", "cat", "dog"], None, r"candidate_labels\[2\]:? repeats candidate_labels\[0\]; give each label once"),
        (["dog", ""], None, r"candidate_labels\[1\]:? is empty"),
        (["dog"], ["a picture"], r"templates\[0\]:? has 0 times \{\}; put it once where the label goes"),
        (["dog"], ["{} {}"], r"templates\[0\]:? has 2 times \{\}"),
        ([str(i) for i in range(4097)], None, r"candidate_labels:? has 4097 elements, the limit is 4096"),
        ([str(i) for i in range(4096)], ["{}!", "{}?", "{}.", "{}", "{} "], "templates:? makes 20480 texts"),
        (["dog " * 40], None, r"candidate_labels\[0\]:? has \d+ tokens"),
        (None, ["a {}"], "templates:? requires candidate_labels"),
    ],
)
def test_labels_that_cannot_be_are_refused(
    towers_client: Client, images: np.ndarray, labels: list[str] | None, templates: list[str] | None, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        towers_client.classify_image(files(images[:1]), candidate_labels=labels, templates=templates)


def test_a_model_without_labels_asks_for_them(towers_client: Client, images: np.ndarray) -> None:
    with pytest.raises(FailedPreconditionError, match=r"cannot classify images|no loaded model can"):
        towers_client.classify_image(files(images[:1]), model="tiny-clip-image")
