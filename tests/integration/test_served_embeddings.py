"""Vectors of texts and images, from the client through a server in a process of its own, are PyTorch's."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headway_client import Client, FailedPreconditionError
from headway_export import reference
from headway_export.source import from_checkpoint

TEXTS = ["the bright desert", "snow", "a long winter near the old fire of ice"]


def test_text_vectors(tiny_checkpoints: dict[str, Path], fp32_client: Client):
    source = from_checkpoint(tiny_checkpoints["text_classification"])
    expected = np.stack(
        [reference.outputs(source.module, np.array(source.tokenizer.encode(text).ids))["embedding"] for text in TEXTS]
    )
    plain = fp32_client.embed_text(TEXTS, normalize=False).to_numpy()
    np.testing.assert_allclose(plain, expected, atol=1e-4 * float(np.abs(expected).max()))
    scaled = fp32_client.embed_text(TEXTS).to_numpy()
    np.testing.assert_allclose(scaled, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5)


def test_image_vectors(tiny_checkpoints: dict[str, Path], fp32_client: Client):
    source = from_checkpoint(tiny_checkpoints["image_classification"])
    with np.load(tiny_checkpoints["image_classification"] / "evaluation.npz") as arrays:
        images = arrays["images"][:3]
    files = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        files.append(file.getvalue())
    found = fp32_client.embed_image(files, normalize=False).to_numpy()
    settings = source.image_preprocessing
    for vector, image in zip(found, images, strict=True):
        pixels = ((image / 255 - np.array(settings.mean)) / np.array(settings.std)).astype(np.float32)
        expected = reference.outputs(source.module, np.ascontiguousarray(pixels.transpose(2, 0, 1)))["embedding"]
        np.testing.assert_allclose(vector, expected, atol=1e-4 * float(np.abs(expected).max()))


def test_a_model_without_vectors_names_one_that_has_them(fp32_client: Client):
    with pytest.raises(FailedPreconditionError, match="cannot embed texts; ask tiny-classification"):
        fp32_client.embed_text("snow", model="tiny-generation")


def test_the_likeliest_label_of_a_single_label_model_is_the_one_that_applies(fp32_client: Client):
    for result in fp32_client.classify_text(TEXTS):
        assert [label.selected for label in result.labels] == [True] + [False] * (len(result.labels) - 1)
