"""Cutting out what is pointed at: the model, its losses, the pictures that are composed, and a run on tiny data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_segments import make_drawings, write_segment_data

from headway_training.baselines import component_under_point, fill_box
from headway_training.checkpoint import load_model
from headway_training.data.segments import Composer, Scene, SegmentedImage, choose_prompts, crop_scene, find_parts
from headway_training.data.sources import read_splits
from headway_training.models import SegmentationConfig, Segmenter, build_model
from headway_training.models.segmentation import (
    BOTTOM_RIGHT,
    INSIDE,
    OUTSIDE,
    PADDING,
    TOP_LEFT,
    mask_iou,
    mask_losses,
)
from headway_training.recipes import read_recipe
from headway_training.run import RunOptions, run_training
from headway_training.tasks import make_task, segmentation
from headway_training.trainer import Trainer

RECIPE = "segment"
TINY = {
    "image_size": 32,
    "patch_size": 8,
    "mask_stride": 2,
    "d_detail": 8,
    "image_num_layers": 1,
    "image_d_model": 16,
    "image_num_heads": 2,
    "image_d_ff": 32,
    "num_layers": 1,
    "d_model": 32,
    "num_heads": 2,
    "d_ff": 32,
}
COLOURS = ((200, 30, 30), (30, 200, 30), (30, 30, 200))
QUIET = Console(quiet=True)


@pytest.fixture
def model() -> Segmenter:
    torch.manual_seed(0)
    return Segmenter(SegmentationConfig(**TINY)).eval()


@torch.inference_mode()
def test_padded_points_and_rows_beside_it_change_no_prompt(model: Segmenter) -> None:
    bank = model.embed(torch.randn(3, 3, 32, 32))
    points, labels = torch.rand(2, 3, 2), torch.tensor([[1, 0, -1], [2, 3, 1]])
    masks, iou = model.decode(bank[[2, 0]], points, labels)
    alone = model.decode(bank[2:], points[:1, :2], labels[:1, :2])
    torch.testing.assert_close(alone[0][0], masks[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(alone[1][0], iou[0], atol=1e-6, rtol=1e-6)
    moved = torch.cat((points[:, :2], points[:, 2:] + torch.tensor([[[9.0]], [[0.0]]])), dim=1)
    assert torch.equal(model.decode(bank[[2, 0]], moved, labels)[0], masks)
    assert masks.shape == (2, 4, 16, 16)
    assert ((iou > 0) & (iou < 1)).all()


@torch.inference_mode()
def test_an_earlier_mask_is_read_where_there_is_one(model: Segmenter) -> None:
    bank, points, labels = (
        model.embed(torch.randn(1, 3, 32, 32)),
        torch.rand(2, 1, 2),
        torch.ones(2, 1, dtype=torch.int64),
    )
    bank, earlier = bank.expand(2, -1, -1), torch.randn(2, 16, 16)
    without, _ = model.decode(bank, points, labels)
    with_both, _ = model.decode(bank, points, labels, earlier_mask=earlier)
    mixed = model.decoder(bank, points, labels, earlier_mask=earlier, has_earlier_mask=torch.tensor([0, 1]))["masks"]
    torch.testing.assert_close(mixed[0], without[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mixed[1], with_both[1], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(without[1], with_both[1])


@torch.inference_mode()
def test_a_box_and_clicks_are_drawn_where_they_are(model: Segmenter) -> None:
    side = model.mask_size  # 16
    points = torch.tensor(
        [[[0.25, 0.5], [0.5, 0.78125], [0.0, 0.0]], [[0.21875, 0.71875], [0.46875, 0.09375], [0.5, 0.5]]]
    )
    labels = torch.tensor([[TOP_LEFT, BOTTOM_RIGHT, PADDING], [INSIDE, OUTSIDE, PADDING]])
    drawn = model.decoder._draw(points, labels, None, None)
    earlier, box, inside, outside = drawn.unbind(dim=1)
    expected = torch.zeros(side, side)
    expected[8:12, 4:8], expected[12, 4:8] = 1, 0.5
    torch.testing.assert_close(box, torch.stack((expected, torch.zeros_like(expected))))
    for empty in (earlier, inside[0], outside[0]):
        assert not empty.any()
    assert divmod(int(inside[1].argmax()), side) == (11, 3)
    assert divmod(int(outside[1].argmax()), side) == (1, 7)
    torch.testing.assert_close(torch.stack((inside[1].max(), outside[1].max())), torch.ones(2))


def test_a_prompt_tells_what_the_detail_is_like_and_which_cells_are_like_it(model: Segmenter) -> None:
    told: list[torch.Tensor] = []
    model.decoder.looked.register_forward_hook(lambda _, inputs, __: told.append(inputs[0]))
    detail = torch.zeros(1, 8, 16, 16)
    detail[0, 0, :, 8:], detail[0, 1, 12:, :] = 1, 2
    cells = model.encoder._by_patch(detail).reshape(1, -1, 8).expand(2, -1, -1)
    points = torch.tensor([[[0.5, 0.5], [1.0, 1.0]], [[0.9, 0.1], [0.1, 0.95]]])
    labels = torch.tensor([[TOP_LEFT, BOTTOM_RIGHT], [INSIDE, OUTSIDE]])
    _, hints = model.decoder._look(model.decoder._draw(points, labels, None, None), cells)
    earlier, box, inside, outside = told[0].unflatten(1, (4, 8))[:, :, :2].unbind(dim=1)
    torch.testing.assert_close(box, torch.tensor([[1.0, 1.0], [0, 0]]), atol=1e-3, rtol=0)
    torch.testing.assert_close(inside, torch.tensor([[0.0, 0], [1, 0]]), atol=2e-3, rtol=0)
    torch.testing.assert_close(outside, torch.tensor([[0.0, 0], [0, 2]]), atol=2e-2, rtol=0)
    assert not earlier.any()
    alike = hints[1, :, 4:]  # (cells, maps)
    assert not alike[:, :2].any()  # to no box, and to no earlier mask
    same = (cells[1, :, 0] == 1) & (cells[1, :, 1] == 0)
    assert alike[same, 2].min() > 0.99  # distance 0
    torch.testing.assert_close(alike[~same, 2].max(), torch.tensor(0.5), atol=1e-2, rtol=0)  # distance 1


def test_cells_of_a_patch_come_back_to_their_places(model: Segmenter) -> None:
    grid = torch.arange(16 * 16.0).reshape(1, 1, 16, 16).expand(1, 4, 16, 16)
    cells = model.encoder._by_patch(grid).reshape(1, -1, 4)
    assert torch.equal(model.decoder._arrange(cells), grid)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_stride": 8}, "mask_stride is 8; it must be patch_size"),
        ({"d_model": 48}, "decoder: |d_model must be a multiple of 16 num_heads"),
        ({"image_num_heads": 3}, "image encoder: d_model must be a multiple of num_heads"),
    ],
)
def test_a_shape_that_cannot_be_is_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentationConfig(**{**TINY, **change})


def test_the_loss_is_least_where_probabilities_are_the_share_that_is_covered() -> None:
    coverage = torch.rand(16, 16)
    right = mask_losses(torch.logit(coverage, eps=1e-6), coverage)
    assert right < mask_losses(torch.logit(coverage, eps=1e-6) + 0.3, coverage)
    assert right < mask_losses(torch.logit(coverage, eps=1e-6) - 0.3, coverage)
    assert mask_losses(torch.where(coverage > 0.5, 20.0, -20.0), (coverage > 0.5).float()) < 0.01
    assert mask_iou(coverage > 0.5, coverage > 0.5) == 1


def test_parts_of_a_drawing_are_its_regions_of_one_colour() -> None:
    drawings, drawn = make_drawings()
    parts = find_parts(drawings.images[0], drawn[0])
    assert set(np.unique(parts)) == {0, 1, 2}
    assert parts[48, 48] != parts[20, 20]
    assert (parts > 0).sum() == drawn[0].sum()
    assert not find_parts(np.zeros((96, 96, 3), np.uint8), drawn[0]).any()


def test_a_composed_picture_shows_every_segment_where_its_map_says() -> None:
    composer = Composer(*make_drawings(), backgrounds=[])
    random = np.random.default_rng(0)
    for drawing in (0, 1, 2):
        scene = composer.compose(drawing, 128, random)
        again = composer.compose(drawing, 128, np.random.default_rng(5))
        same = composer.compose(drawing, 128, np.random.default_rng(5))
        assert np.array_equal(again.image, same.image)
        wholes, parts = scene.maps
        assert wholes.any()
        assert not parts[wholes == 0].any()
        for number in np.unique(parts)[1:]:
            pixels = scene.image[parts == number].astype(int)
            nearest = min(np.abs(np.median(pixels, axis=0) - colour).max() for colour in COLOURS)
            assert len(pixels) < 40 or nearest < 30, "a part is of one colour"


def test_prompts_lie_in_their_segments_and_cover_what_they_say() -> None:
    random = np.random.default_rng(1)
    labels = np.zeros((100, 140), np.int32)
    labels[20:60, 30:90], labels[70:90, 10:40] = 1, 2
    image = np.repeat((labels * 100).astype(np.uint8)[..., None], 3, axis=-1)
    picture = SegmentedImage(image=image, segmentations=(labels,))
    for _ in range(20):
        scene = crop_scene(picture, 64, random, least_area=0.4, turned=True)
        prompts = choose_prompts(scene, 3, 16, random)
        if prompts is None:
            continue
        for point, box, coverage in zip(prompts.points, prompts.boxes, prompts.coverage, strict=True):
            x, y = (point * 64).astype(int)
            number = scene.maps[0][y, x]
            assert number > 0
            assert abs(int(scene.image[y, x, 0]) - number * 100) < 60
            rows, columns = np.nonzero(scene.maps[0] == number)
            assert np.allclose(box * 64, (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1))
            assert coverage.sum() / 255 * 16 == pytest.approx(len(rows), rel=0.02)
    assert choose_prompts(Scene(image=scene.image, maps=(np.zeros((64, 64), np.int32),)), 3, 16, random) is None


def test_the_next_point_is_any_cell_where_the_mask_is_wrong_or_any_where_it_is_right() -> None:
    truth = torch.zeros(2, 4, 4, dtype=torch.bool)
    truth[:, 0, 0] = truth[:, 2, 1] = True
    masks = truth.clone()
    masks[0, 2, 1], masks[0, 3, 3] = False, True  # two wrong cells, one of which is inside; none in the second row
    steps = (torch.arange(64) + 0.5) / 64
    found: list[set[tuple[int, int, int]]] = [set(), set()]
    for chance in steps:
        points, labels = segmentation._next_point(masks, truth, torch.tensor([[chance, 0.25, 0.75]] * 2))
        assert torch.allclose(points[:, 0] * 4 % 1, torch.tensor([0.25, 0.75]))
        for row, ((x, y),) in enumerate((points * 4).long().tolist()):
            found[row].add((y, x, int(labels[row, 0])))
    assert found[0] == {(2, 1, INSIDE), (3, 3, OUTSIDE)}
    assert len(found[1]) == 16


def test_baselines_fill_the_box_and_take_the_component_under_the_point() -> None:
    image = np.zeros((40, 60, 3), np.uint8)
    image[10:20, 10:20], image[10:20, 30:50] = 200, 220
    found = component_under_point(image, 40 / 60, 15 / 40)
    assert found.sum() == 200
    assert found[15, 40]
    assert not found[15, 15]
    assert fill_box(image, 0.5, 0.25, 5 / 6, 0.5).sum() == 200


@pytest.fixture
def segment_data(tmp_path: Path) -> Path:
    return write_segment_data(tmp_path / "data")


def settings_of(*more: str) -> tuple[str, ...]:
    tiny = [f"model.{name}={value}" for name, value in TINY.items() if name != "image_size"]
    tiny += ["preprocessing.height=32", "preprocessing.width=32", "data.valid_fraction=0.25", "tracker=none"]
    return (*tiny, "optimization.batch_size=8", "segmentation.prompts_per_image=3", *more)


def make_trainer(folder: Path, data: Path, *more: str) -> Trainer:
    recipe = read_recipe(RECIPE, settings_of(*more))
    task = make_task(recipe, read_splits(recipe, data, None), folder)
    torch.manual_seed(7)
    model = build_model(recipe.architecture, {**recipe.configuration, **task.model_fields()})
    return Trainer(task=task, model=model, recipe=recipe, folder=folder, seed=7, console=QUIET)


def test_a_run_leaves_a_checkpoint_with_what_was_measured(
    tmp_path: Path, segment_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segmentation, "_NUM_COMPOSITES", {"valid": 6, "test": 12})
    settings = settings_of(
        *("optimization.epochs=1000", "optimization.max_steps=3", "optimization.learning_rate=0.01"),
        *("optimization.average_decay=0.9", "optimization.evaluations=1", "optimization.precision=fp32"),
    )
    options = RunOptions(recipe=RECIPE, settings=settings, data_dir=segment_data, output=tmp_path / "run", seed=0)
    folder = run_training(options, QUIET)
    model, checkpoint = load_model(folder)
    assert isinstance(model, Segmenter)
    assert checkpoint.training is not None
    assert checkpoint.training.baseline is not None
    assert checkpoint.evaluation is not None
    assert checkpoint.evaluation.metric == "first_mask_iou"
    metrics = checkpoint.training.metrics
    assert {
        "mean_iou",
        "nuclei_point",
        "nuclei_box",
        "composites_point_best",
        "photographs_box_best",
        "iou_error",
    } <= metrics.keys()
    arrays = np.load(folder / "evaluation.npz")
    assert len(arrays["masks"]) == len(arrays["points"]) == len(arrays["image_index"])


def test_a_tiny_model_learns_a_handful_of_pictures(tmp_path: Path, segment_data: Path) -> None:
    trainer = make_trainer(tmp_path / "run", segment_data, "optimization.max_steps=1")
    task, model = trainer.task, trainer.model.train()
    batch = task.collate(np.array([0, 2, 6, 8]), torch.Generator().manual_seed(0))  # nuclei, a photograph, a drawing
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(250):
        optimizer.zero_grad()
        chances = torch.rand_like(batch.tensors["chances"])  # of a point or a box, as another batch has others
        loss = task.loss(model, {**batch.tensors, "chances": chances}) / batch.num_targets
        loss.backward()
        optimizer.step()
    truth = batch.tensors["coverage"].flatten(0, 1)[:, None] > 127
    found = mask_iou(task.logits(model.eval(), batch.tensors).flatten(0, 1)[:, 1:] > 0, truth).amax(dim=1)
    assert found.mean() > 0.8
