"""Masks that are held by their edges, and those that are chosen of many, against masks with all logits."""

import numpy as np
import pytest

from headway_server.bundles import Segmentation, StableMask
from headway_server.preprocessing.image import ImageTransform
from headway_server.tasks.images.model import SeenImage
from headway_server.tasks.segmentation.decoder import MASKS, PREDICTED_IOU, answer_order
from headway_server.tasks.segmentation.masks import EdgedMask, PixelMask, drop_duplicates, stability
from headway_server.tasks.segmentation.model import EverythingRequest, Frame, _choose, _Found, _read_good, _render

SIDE = 32
TRANSFORMS = [
    (ImageTransform(scale=(1.0, 1.0), offset=(0.0, 0.0)), (64, 64)),
    (ImageTransform(scale=(0.37, 0.81), offset=(0.0, 0.0)), (173, 79)),
    (ImageTransform(scale=(64 / 2999.9999, 2.0), offset=(0.0, -3.0)), (3000, 40)),
    (ImageTransform(scale=(3.7, 5.1), offset=(2.5, 4.0)), (15, 11)),
]


def blobs(generator, count=1):
    """Logits of random ellipses, (count, S, S)."""
    down, across = np.mgrid[:SIDE, :SIDE] / SIDE
    left, top, wide, high, steep = generator.random((5, count, 1, 1))
    distance = ((across - left) / (0.1 + wide)) ** 2 + ((down - top) / (0.1 + high)) ** 2
    return ((1 - distance) * 20 * steep).astype(np.float32)


def strange(generator, name):
    logits = blobs(generator)[0]
    places = generator.random(logits.shape) < 0.2
    if name == "noise":
        return generator.normal(size=logits.shape).astype(np.float32)
    if name == "steep":
        return np.sign(logits) * np.float32(10.0) ** generator.integers(-12, 12, logits.shape).astype(np.float32)
    if name in ("zero", "nan", "inf", "-inf"):
        logits[places] = float(name.replace("zero", "0"))
    return np.full_like(logits, {"all inside": 3, "all outside": -3}.get(name, 0)) if "all" in name else logits


KINDS = ["ellipse", "noise", "steep", "zero", "nan", "inf", "-inf", "all inside", "all outside"]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of logits that are not finite
@pytest.mark.parametrize("by_model_pixels", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_held_by_its_edge_has_the_pixels_of_all_its_logits(kind, by_model_pixels):
    for seed in range(20):
        logits = strange(np.random.default_rng(seed), kind)
        edged = EdgedMask.of_logits(logits, by_model_pixels=by_model_pixels)
        assert edged.nbytes <= EdgedMask.most_bytes(SIDE)
        for transform, size in TRANSFORMS:
            naive, mask = (
                PixelMask.of_logits(one, transform, size, (64, 64), by_model_pixels=by_model_pixels)
                for one in (logits, edged.with_all_logits())
            )
            np.testing.assert_array_equal(mask.pixels(), naive.pixels())


def test_a_mask_with_a_plain_edge_takes_a_fraction_of_its_logits():
    logits = np.linspace(-5, 5, 256, dtype=np.float32) - np.zeros((256, 1), np.float32)
    assert EdgedMask.of_logits(logits).nbytes < logits.nbytes / 10


@pytest.mark.parametrize(("max_overlap", "most"), [(0.2, 120), (0.2, 7), (0.7, 120), (0.7, 12), (1.0, 120)])
@pytest.mark.parametrize("seed", range(2))
def test_segments_are_those_of_a_choice_that_holds_all_logits(seed, max_overlap, most):
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(40):
        masks = blobs(generator, 4) if generator.random() < 0.8 else -np.abs(blobs(generator, 4))
        masks[1] += generator.normal(size=masks[1].shape).astype(np.float32)
        rows.append({MASKS: masks, PREDICTED_IOU: generator.choice(np.linspace(0, 1, 9, dtype=np.float32), 4)})
    wanted = EverythingRequest(min_predicted_iou=0.3, min_stability=0.4, max_overlap=max_overlap)
    frame = Frame(SeenImage(173, 79, TRANSFORMS[1][0]), (64, 64), SIDE, Segmentation())

    naive = []
    for row in rows:
        for number in answer_order(row[MASKS], row[PREDICTED_IOU], "point"):
            logits, promised = row[MASKS][number], row[PREDICTED_IOU][number]
            if promised >= 0.3 and stability(logits) >= 0.4 and (logits > 0).any():
                naive.append(_Found(logits, float(promised), float(stability(logits))))
    naive.sort(key=lambda mask: -np.float32(mask.predicted_iou * mask.stability))
    kept = []
    for mask in naive:
        inside = mask.logits > 0
        if len(kept) < most and all(
            (inside & (other.logits > 0)).sum() <= max_overlap * (inside | (other.logits > 0)).sum() for other in kept
        ):
            kept.append(mask)
    assert len(kept) >= 5
    assert len(kept) < len(naive) or max_overlap == 1

    candidates = [mask for row in rows for mask in _read_good(wanted, frame, "point", row)]
    chosen = _choose(candidates, wanted.max_overlap, most)
    answers = [_render(masks, frame, "png") for masks in (kept, chosen)]
    assert answers[0] == answers[1]


def test_no_more_masks_are_compared_than_are_answered():
    generator = np.random.default_rng(3)
    masks, scores = generator.random((60, 16, 16)) > 0.5, generator.random(60, np.float32)
    masks[30:] = masks[:30]
    bits = [np.packbits(mask) for mask in masks]
    everything = drop_duplicates(bits, scores, 0.9, 60)
    assert len(everything) == 30
    assert drop_duplicates(bits, scores, 0.9, 7) == everything[:7]


@pytest.mark.parametrize(
    ("kind", "stable_mask", "expected"),
    [
        ("point", None, [2, 3, 1]),
        ("box", None, [0, 2, 3]),
        ("several", None, [0]),
        ("point", StableMask(offset=1.0, least=0.9), [2, 3, 1]),
        ("box", StableMask(offset=1.0, least=0.9), [2, 3, 1]),
        ("several", StableMask(offset=1.0, least=0.9), [2]),
        ("box", StableMask(offset=0.1, least=0.9), [0, 2, 3]),
        ("several", StableMask(offset=9.0, least=0.9), [2]),
    ],
)
def test_an_unstable_mask_gives_way_to_the_likeliest_of_the_others_and_none_comes_twice(kind, stable_mask, expected):
    masks = np.full((4, 4, 4), 0.5, np.float32)
    predicted_iou = np.array([0.9, 0.1, 0.8, 0.3], np.float32)
    assert answer_order(masks, predicted_iou, kind, stable_mask).tolist() == expected


def test_a_mask_of_nothing_is_stable():
    masks, predicted_iou = np.full((4, 4, 4), -5, np.float32), np.array([0.1, 0.2, 0.8, 0.3], np.float32)
    assert answer_order(masks, predicted_iou, "several", StableMask(offset=1.0, least=0.9)).tolist() == [0]


def test_padding_counts_neither_in_stability_nor_among_segments():
    masks = np.full((4, SIDE, SIDE), -5, np.float32)
    masks[1:, :4] = 5
    masks[2, SIDE // 2 + 1 :] = masks[3, SIDE // 2 + 1 :] = 0.5  # unstable, below an image of half the height
    masks[3, : SIDE // 2] = -5
    row = {MASKS: masks, PREDICTED_IOU: np.array([0.1, 0.9, 0.8, 0.7], np.float32)}
    frame = Frame(SeenImage(64, 32, TRANSFORMS[0][0]), (64, 64), SIDE, Segmentation(pixels="of_model_pixels"))
    wanted = EverythingRequest(min_predicted_iou=0.5, min_stability=0.9)
    first, second = _read_good(wanted, frame, "point", row)
    assert (first.predicted_iou, second.predicted_iou) == pytest.approx((0.9, 0.8))
    np.testing.assert_array_equal(first.edged.inside, second.edged.inside)
