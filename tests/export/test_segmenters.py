"""How segmenters of `transformers` are read, and how prompts become masks of an image's pixels."""

import numpy as np
import pytest
import tiny_segmenters
import torch
import transformers
from PIL import Image
from tiny_segmenters import BOX, POINT, SEVERAL, SIDE, Library

from headway_export.errors import SourceError
from headway_export.huggingface import FolderOptions, from_folder
from headway_export.huggingface.segmenters import SEGMENTERS
from headway_server.bundles import Task
from headway_server.preprocessing import ImagePreprocessor
from headway_server.preprocessing.image import ImageLimits, ImageTransform
from headway_server.tasks.images.model import SeenImage
from headway_server.tasks.segmentation.decoder import (
    BOTTOM_RIGHT,
    PADDING,
    TOP_LEFT,
    answer_order,
)
from headway_server.tasks.segmentation.masks import PixelMask
from headway_server.tasks.segmentation.model import Frame

SIZES = ((90, 60), (60, 90), (64, 64), (33, 150), (200, 41))
"""Width and height of images."""
PROMPTS = (POINT, BOX, *SEVERAL)
MOST_PIXELS = 1e-3
"""Share of an image's pixels that may differ."""


@pytest.fixture(scope="module", params=tiny_segmenters.FAMILIES)
def folder(request, tmp_path_factory):
    return tiny_segmenters.write_segmenter(tmp_path_factory.mktemp("segmenter") / "model", request.param)


def picture(size):
    coarse = np.random.default_rng(sum(size)).integers(0, 256, (7, 7, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize(size)


class Ours:
    """A source's module, asked as a server asks the graphs."""

    def __init__(self, source):
        self.module, self.scheme = source.module, source.segmentation
        self.preprocessor = ImagePreprocessor(
            source.image_preprocessing, ImageLimits(max_bytes=2**20, max_pixels=2**20)
        )

    def embed(self, image):
        prepared = self.preprocessor.prepare_decoded(image, "image")
        with torch.inference_mode():
            embedding = self.module.encoder(torch.from_numpy(prepared.pixel_values)[None])
        seen = SeenImage(*image.size, prepared.transform)
        return embedding, Frame(seen, (SIDE, SIDE), self.module.mask_size, self.scheme)

    def answer(self, embedding, frame, prompts, earlier=None):
        """Logits (N, M, S, S) and IoU (N, M) of prompts together."""
        longest = max(len(prompt.points) + 2 * (prompt.box is not None) for prompt in prompts)
        points, labels = np.zeros((len(prompts), longest, 2), np.float32), np.full((len(prompts), longest), PADDING)
        for row, prompt in enumerate(prompts):
            scaled = prompt.scaled(frame.image.width, frame.image.height)
            corners = () if scaled.box is None else (scaled.box[:2], scaled.box[2:])
            positions, kinds = (*scaled.points, *corners), (*scaled.labels, *(TOP_LEFT, BOTTOM_RIGHT)[: len(corners)])
            points[row, : len(positions)] = frame.image.transform.to_model(positions) / SIDE
            labels[row, : len(kinds)] = kinds
        size = self.module.mask_size
        masks = torch.zeros(len(prompts), size, size) if earlier is None else torch.from_numpy(np.stack(earlier))
        has_masks = torch.full((len(prompts),), int(earlier is not None))
        with torch.inference_mode():
            found = self.module.decoder(
                **{name: one.expand(len(prompts), *one.shape[1:]) for name, one in embedding.items()},
                points=torch.from_numpy(points),
                point_labels=torch.from_numpy(labels),
                earlier_mask=masks,
                has_earlier_mask=has_masks,
            )
        return found["masks"].numpy(), found["predicted_iou"].numpy()


def kind_of(prompt):
    return "box" if prompt == BOX else "point" if prompt == POINT else "several"


def test_every_family_that_is_read_is_tried():
    assert set(tiny_segmenters.FAMILIES) == set(SEGMENTERS)


def test_masks_are_those_of_the_library(folder):
    source, _ = from_folder(folder, FolderOptions())
    assert source.task is Task.SEGMENTATION
    ours, library = Ours(source), Library(folder)
    shares, firsts = [], []
    for size in SIZES:
        image = picture(size)
        embedding, frame = ours.embed(image)
        rows = zip(PROMPTS, *ours.answer(embedding, frame, PROMPTS), strict=True)  # of several lengths together
        for prompt, masks, predicted in rows:
            kind = kind_of(prompt)
            pixels, ious, _ = library.answer(image, prompt, several=kind == "point")
            ranks = np.argsort(-ious, kind="stable")
            order = answer_order(masks, predicted, kind, frame.scheme.stable_mask)
            np.testing.assert_allclose(predicted[order][: len(ious)], ious[ranks], atol=1e-4)
            for number, rank in zip(order, ranks, strict=False):
                found = frame.pixels(masks[number]).pixels()
                assert (found != pixels[rank]).mean() <= MOST_PIXELS, (size, prompt)
                shares.append(found.mean())
            firsts += [order[0]] * (kind == "several")
    assert np.mean([0.01 < share < 0.99 for share in shares]) > 0.2
    if source.segmentation.stable_mask is not None:
        assert 0 < np.mean(np.array(firsts) == 0) < 1, firsts


def test_an_earlier_mask_is_read_as_by_the_library(folder):
    source, _ = from_folder(folder, FolderOptions())
    ours, library, image = Ours(source), Library(folder), picture(SIZES[0])
    embedding, frame = ours.embed(image)
    _, _, [first] = library.answer(image, BOX, several=False)
    masks, predicted = ours.answer(embedding, frame, SEVERAL, [first] * len(SEVERAL))
    for prompt, logits, ious in zip(SEVERAL, masks, predicted, strict=True):
        pixels, [expected], _ = library.answer(image, prompt, several=False, earlier=first)
        without, _, _ = library.answer(image, prompt, several=False)
        [number] = answer_order(logits, ious, "several", frame.scheme.stable_mask)
        assert ious[number] == pytest.approx(expected, abs=1e-4)
        assert (frame.pixels(logits[number]).pixels() != pixels[0]).mean() <= MOST_PIXELS
        assert (pixels != without).any()


@pytest.mark.parametrize("size", [(640, 480), (333, 1000), (1500, 90), (200, 150)])
def test_logits_become_pixels_by_way_of_the_models_as_the_image_processor_does(size):
    """The sizes are those of SAM; noise is all edge."""
    processor = transformers.SamImageProcessorPil()
    logits = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    height, width = processor._get_preprocess_shape(size[::-1], 1024)
    [expected] = processor.post_process_masks([torch.from_numpy(logits)[None, None]], [size[::-1]], [(height, width)])
    transform = ImageTransform(scale=(width / size[0], height / size[1]), offset=(0, 0))
    found, direct = (
        PixelMask.of_logits(logits, transform, size, (1024, 1024), by_model_pixels=by_model_pixels).pixels()
        for by_model_pixels in (True, False)
    )
    assert (found != expected[0, 0].numpy()).mean() < 1e-5
    assert (direct != expected[0, 0].numpy()).mean() > 1e-3


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("sam", {"size": {"longest_edge": 32}, "pad_size": {"height": 32, "width": 32}}, "and sam reads 64 x 64"),
        ("sam", {"pad_size": {"height": 64, "width": 96}}, "not padded to a square"),
        ("sam", {"do_pad": False}, "not padded to a square"),
        (
            "sam",
            {"image_processor_type": "ViTImageProcessor", "size": {"height": 64, "width": 64}, "do_pad": False},
            "stretches images to a square, which is not what sam was trained on",
        ),
        ("sam2", {"size": {"height": 96, "width": 64}}, "and sam2 reads 64 x 64"),
    ],
)
def test_preprocessing_that_is_not_the_models_is_refused(tmp_path, family, changes, says):
    folder = tiny_segmenters.write_segmenter(tmp_path / "model", family, **changes)
    with pytest.raises(SourceError, match=says):
        from_folder(folder, FolderOptions())


def test_a_folder_of_videos_is_told_apart(tmp_path):
    folder = tiny_segmenters.write_segmenter(tmp_path / "model", "sam2_video")
    _, [note, *_] = from_folder(folder, FolderOptions())
    assert note.startswith("its part for images is exported; the memory that follows objects")


def test_a_stability_that_no_mask_has_is_refused(tmp_path):
    folder = tiny_segmenters.write_segmenter(tmp_path / "model", "sam2")
    file = folder / "config.json"
    name = "dynamic_multimask_stability_thresh"
    file.write_text(file.read_text().replace(f'"{name}": 0.87', f'"{name}": 1.5'))
    with pytest.raises(SourceError, match=r"dynamic_multimask_stability_thresh is 1.5, which goes from 0 to 1"):
        from_folder(folder, FolderOptions())
