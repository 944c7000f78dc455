"""Families of vision models: the exported module answers a PNG as the processor and model of `transformers` do."""

import io
import json

import numpy as np
import pytest
import tiny_vision
import torch
import transformers
from PIL import Image
from thorough import IS_THOROUGH

from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.huggingface import FolderOptions, from_folder
from headway_server.bundles import Precision
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.image import ImageLimits

VECTORS_ALONE = ("dinov3_vit", "dinov3_convnext")
"""Families without a classifier."""
PROVED = ("efficientnet", "dinov3_vit", *(("mobilevit", "levit") if IS_THOROUGH else ()))
"""Families of which a bundle is written too: the ones whose pixels or positions are of their own. Half a minute of
tracing is for a thorough run alone."""
ASKED = {"poolformer": "mean"}
"""Pooling, where a family's model has no vector of its own."""
ROWS = [(family, family not in VECTORS_ALONE) for family in tiny_vision.FURTHER if family != "vit_mae"]
ROWS += [("vit_msn", False), ("poolformer", False)]


def picture() -> Image.Image:
    coarse = np.random.default_rng(3).integers(0, 256, (9, 9, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize((90, 61))


def prepared_by_transformers(folder, settings):
    """Pixels, and what a level of 255 is in each channel."""
    if "DINOv3" not in (folder / "preprocessor_config.json").read_text():
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        return processor(picture(), return_tensors="pt")["pixel_values"]
    # which needs torchvision: its steps, by the functions that it calls
    pixels = torch.from_numpy(np.array(picture())).permute(2, 0, 1)[None] / 255
    size = (settings.height, settings.width)
    pixels = torch.nn.functional.interpolate(pixels, size, mode="bilinear", antialias=True)
    return (pixels - torch.tensor(settings.mean)[:, None, None]) / torch.tensor(settings.std)[:, None, None]


@pytest.mark.parametrize(("family", "is_classifier"), ROWS)
def test_a_png_is_answered_as_by_transformers(tmp_path, family, is_classifier):
    folder = tiny_vision.write_vision_model(tmp_path / "model", family, is_classifier=is_classifier)
    asked = None if is_classifier else ASKED.get(family)
    source, _ = from_folder(folder, FolderOptions(pooling=asked))
    settings = source.image_preprocessing
    file = io.BytesIO()
    picture().save(file, "PNG")
    served = ImagePreprocessor(settings, ImageLimits(max_bytes=2**20, max_pixels=2**20)).prepare(file.getvalue())
    expected_pixels = prepared_by_transformers(folder, settings)
    auto = transformers.AutoModelForImageClassification if is_classifier else transformers.AutoModel
    with torch.inference_mode():
        output = auto.from_pretrained(folder).eval()(expected_pixels, return_dict=True)
        ours = expected_pixels.flip(1) if family == "mobilevit" else expected_pixels
        found = source.module(ours)
    level = 1.01 / 255 / np.array(settings.std)[:, None, None]
    assert (np.abs(served.pixel_values - ours[0].numpy()) <= level).all()
    if is_classifier:
        torch.testing.assert_close(found.softmax(-1), output.logits.softmax(-1), rtol=0, atol=1e-4)
    else:
        states = output.last_hidden_state
        pooled = {"vit_msn": lambda: states[:, 0], "poolformer": lambda: states.mean((2, 3))}
        expected = pooled.get(family, lambda: output.pooler_output)().flatten(1)
        torch.testing.assert_close(found["embedding"], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    if family in PROVED:  # `export` compares the graph with the module
        export(source, ExportOptions(store=tmp_path / "store", precisions=(Precision.FP32,)))


def test_a_model_that_hides_parts_at_random_is_refused_and_its_encoder_is_not(tmp_path):
    folder = tiny_vision.write_vision_model(tmp_path / "model", "vit_mae", is_classifier=False)
    with pytest.raises(SourceError, match="hides parts of an image at random"):
        from_folder(folder, FolderOptions())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "vit", "architectures": ["ViTModel"]}))
    assert from_folder(folder, FolderOptions())[0].module.pooling == "class_token"


def test_a_model_without_a_vector_says_which_pooling_it_takes(tmp_path):
    folder = tiny_vision.write_vision_model(tmp_path / "model", "poolformer", is_classifier=False)
    for asked in (None, "cls"):
        with pytest.raises(SourceError, match="give --pooling mean"):
            from_folder(folder, FolderOptions(pooling=asked))
