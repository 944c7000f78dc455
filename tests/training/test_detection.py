"""Pictures with boxes, what a detector learns of them, and how it is measured."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from tiny_segments import write_segment_data

from headway_server.tasks.detection.objects import suppress
from headway_training.data.objects import LEAST_SEEN, boxes_of
from headway_training.data.segments import Scene
from headway_training.data.sources import read_splits
from headway_training.metrics import FoundObjects, box_iou, mean_average_precision
from headway_training.models.detection import Detector, DetectorConfig, detection_loss, generalised_iou
from headway_training.recipes import read_recipe
from headway_training.tasks import make_task
from headway_training.tasks.detection import objects_of

TINY = ("model.width=8", "preprocessing.height=64", "preprocessing.width=64", "optimization.batch_size=8")


def random_boxes(count, generator):
    corners = generator.random((count, 2, 2)).astype(np.float32)
    return np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=-1)


def test_boxes_are_around_what_is_seen_of_drawings_that_are_not_covered_further():
    whole = np.zeros((20, 20), np.int32)
    whole[2:12, 4:10], whole[15:20, 0:6] = 1, 3
    scene = Scene(image=np.zeros((20, 20, 3), np.uint8), maps=(whole,), drawn=((1, 60), (0, 90), (2, 30)))
    found = boxes_of(scene, np.array([7, 8, 9]))
    np.testing.assert_allclose(found.boxes * 20, [[4, 2, 10, 12], [0, 15, 6, 20]])
    assert found.labels.tolist() == [8, 9]
    covered = Scene(image=scene.image, maps=scene.maps, drawn=((1, 60), (0, 90), (2, int(30 / LEAST_SEEN) + 1)))
    assert boxes_of(covered, np.array([7, 8, 9])).labels.tolist() == [8]


def test_precision_is_that_of_sklearn_where_every_object_is_found():
    generator = np.random.default_rng(0)
    boxes = np.array([[10 * i, 0, 10 * i + 8, 8] for i in range(12)], np.float32)
    is_right = generator.random(12) < 0.5
    found = FoundObjects(scores=generator.random(12).astype(np.float32), labels=np.zeros(12, np.int64), boxes=boxes)
    truth = [(boxes[is_right], np.zeros(is_right.sum(), np.int64))]
    ours = mean_average_precision([found], truth)
    assert ours >= 100 * average_precision_score(is_right, found.scores) - 1e-4  # which does not interpolate
    halves = FoundObjects(scores=found.scores[is_right], labels=found.labels[is_right], boxes=boxes[is_right])
    assert mean_average_precision([halves], truth) == pytest.approx(100)


def test_an_object_that_is_found_twice_is_right_once_and_one_of_another_label_never():
    box = np.array([[0, 0, 1, 1]], np.float32)
    truth = [(np.concatenate([box, box + 5]), np.array([1, 1]))]

    def measured(labels):
        found = FoundObjects(
            scores=np.array([0.9, 0.8], np.float32), labels=np.array(labels), boxes=np.tile(box, (2, 1))
        )
        return mean_average_precision([found], truth)

    assert measured([1, 1]) == pytest.approx(50)
    assert measured([0, 1]) == pytest.approx(50)
    assert measured([0, 0]) == 0


def test_overlapping_objects_are_left_out_as_by_the_server():
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(40, 3)).astype(np.float32)
    corners = (generator.random((40, 4)) * 0.4 + [0, 0, 0.6, 0.6]).astype(np.float32)
    boxes = np.concatenate([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], axis=-1)
    found = objects_of(logits, boxes)
    order = np.argsort(-logits.ravel(), kind="stable")
    places, labels = np.divmod(order, 3)
    kept = suppress(corners[places], labels, 0.5)[:100]
    np.testing.assert_array_equal(found.labels, labels[kept])
    np.testing.assert_allclose(found.boxes, corners[places[kept]], atol=1e-6)
    assert len(kept) < 100


def test_overlap_is_one_of_a_box_with_itself_and_below_zero_of_boxes_apart():
    boxes = torch.from_numpy(random_boxes(20, np.random.default_rng(2)))
    torch.testing.assert_close(generalised_iou(boxes, boxes), torch.ones(20))
    assert (generalised_iou(boxes, boxes + 3) < 0).all()
    plain = box_iou(boxes.numpy(), boxes.numpy())
    assert (generalised_iou(boxes[:, None], boxes[None]).numpy() <= plain + 1e-6).all()


def test_the_loss_is_least_for_the_truth_and_knows_no_rows_without_objects():
    cells, truth = 4, torch.tensor([[[0.3, 0.3, 0.7, 0.9], [0.0, 0.0, 0.2, 0.2]]])
    labels, is_there = torch.tensor([[1, 0]]), torch.ones(1, 2, dtype=torch.bool)
    boxes = torch.tensor([[0.5, 0.6, 0.4, 0.6]]).repeat(cells * cells, 1)[None]
    boxes[0, 0] = torch.tensor([0.1, 0.1, 0.2, 0.2])
    logits = torch.full((1, cells * cells, 2), -9.0)
    logits[0, 2 * cells + 2, 1] = logits[0, 0, 0] = 9.0
    best = detection_loss(logits, boxes, truth, labels, is_there)
    assert best < detection_loss(logits.flip(-1), boxes, truth, labels, is_there)
    assert best < detection_loss(logits, boxes * 0.8, truth, labels, is_there)
    rows = [torch.cat([one, one]) for one in (logits, boxes, truth, labels)]
    twice = detection_loss(*rows, torch.cat([is_there, torch.zeros_like(is_there)]))
    torch.testing.assert_close(twice, best)


def test_a_tiny_detector_learns_to_find_squares(tmp_path):
    recipe = read_recipe("detect", TINY)
    task = make_task(recipe, read_splits(recipe, write_segment_data(tmp_path), None), tmp_path)
    assert task.labels == ("cat", "dog", "fox")
    torch.manual_seed(0)
    model = Detector(DetectorConfig(**{**recipe.configuration, **task.model_fields()}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    before = task.evaluate(model.eval(), "valid")["mean_average_precision"]
    for batch in task.epoch_batches(0, 0)[:40]:
        made = task.collate(batch, generator)
        optimizer.zero_grad()
        (task.loss(model.train(), made.tensors) / made.num_targets).backward()
        optimizer.step()
    assert task.evaluate(model.eval(), "valid")["mean_average_precision"] > before + 20
