"""Cutting out what is pointed at: prompts are simulated clicks and boxes (Kirillov et al. 2023, appendix A).

B images of a batch, P prompts of each, N = B P prompts together, I image size, S cells along a side of a mask, M masks
of a prompt, H, W height and width of a picture as it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own convention)

from headway_training.baselines import component_under_point, fill_box
from headway_training.batches import Batch
from headway_training.checkpoint import Baseline
from headway_training.data.examples import Splits
from headway_training.data.images import normalize, resize_and_crop
from headway_training.data.pictures import opaque
from headway_training.data.segments import (
    LEAST_AREA,
    Composer,
    Kind,
    Labels,
    Scene,
    SegmentedImage,
    SegmentedPictures,
    centre_of,
    choose_prompts,
    crop_scene,
    find_segmented_files,
    read_own_segments,
)
from headway_training.data.views import random_coarseness, random_colours
from headway_training.errors import DataError
from headway_training.kinds import PHOTOGRAPHS, ROWS, FileSettings, augmentation, register
from headway_training.kinds import Labels as KnownLabels
from headway_training.models.segmentation import (
    BOTTOM_RIGHT,
    INSIDE,
    OUTSIDE,
    PADDING,
    TOP_LEFT,
    mask_iou,
    mask_losses,
)
from headway_training.recipes import Recipe
from headway_training.tasks.base import IGNORED, EvaluationData, Metrics, Part, Task, TrainingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pictures:
    """How pictures of a kind are trained and measured on."""

    passes: int = 1
    """Times that each is seen in an epoch, in which each drawing is the first of a composed picture once."""
    turned: bool = False
    """Whether they may stand on their heads or their sides."""
    turned_over: float = 0.0
    """Share of them whose light and dark are exchanged."""
    least_share: float = 0.0
    """Of a picture: segments that are smaller are not measured."""
    most_measured: int | None = None
    """Pictures of a part that are measured; None: all."""
    measured_side: int | None = None
    """Pixels of the longer side of what is measured; None: those that there are."""


_PICTURES: Mapping[Kind, _Pictures] = {
    "nuclei": _Pictures(passes=8, turned=True, turned_over=0.15),
    "photographs": _Pictures(passes=12, least_share=0.001),
    "own": _Pictures(most_measured=500, measured_side=512),  # 2 MB each, with their masks
}
_ATTEMPTS = 4
"""Parts of a picture that are tried until one has a segment to ask for."""
_BOX_NOISE = 0.1
"""Deviation of a box's sides in training, as a share of its own (appendix A)."""
_BOXES = 0.5
"""Share of the prompts of a batch that begin with a box; the others begin with a point."""
_SCENE_SEED = 7
_NUM_COMPOSITES: Mapping[Part, int] = {"valid": 80, "test": 300}
_MOST_PROMPTS: Mapping[Part, int] = {"valid": 6, "test": 30}
"""Segments of each picture that are measured."""
_EVALUATION_IMAGES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPicture:
    """A picture with segments to find."""

    kind: Kind
    image: NDArray[np.uint8]
    """(H, W, 3), as it is stored."""
    masks: NDArray[np.uint8]
    """(P, H W / 8): the segments, by `numpy.packbits`."""
    points: NDArray[np.float32]
    """(P, 2): a place in each, as shares of width and height."""
    boxes: NDArray[np.float32]
    """(P, 4): left, top, right, bottom, as shares."""

    def mask(self, row: int) -> NDArray[np.bool_]:
        """(H, W)."""
        height, width = self.image.shape[:2]
        bits: NDArray[np.bool_] = np.unpackbits(self.masks[row], count=height * width).reshape(height, width).view(bool)
        return bits


@register
class SegmentationTask(Task):
    """Batches of microscope pictures, photographs and composed pictures, in random order."""

    name = "segmentation"
    unit = "images"
    metric = "mean_iou"
    evaluation_metric = "first_mask_iou"  # of the mask that an answer has first: an exporter knows no kinds of pictures
    higher_is_better = True
    settings = (ROWS, "preprocessing", "segmentation", *augmentation("coarse"), *PHOTOGRAPHS)
    sections = ("preprocessing",)
    described = ("image_preprocessing",)
    takes_modules = True
    own_data = "a folder with the folders `images` and `masks`"
    sentence = "Cuts out of a picture what a point or a box means"

    @classmethod
    def read(
        cls, file: str, labels: KnownLabels | None, settings: FileSettings
    ) -> tuple[SegmentedPictures, KnownLabels]:
        """Finds pictures and their masks; their pixels are read again when a batch needs them."""
        return read_own_segments(Path(file)), ()

    @classmethod
    def files_behind(cls, path: Path) -> list[Path]:
        """The pictures and their masks."""
        return find_segmented_files(path)

    def __init__(self, recipe: Recipe, splits: Splits[Any]) -> None:
        assert recipe.preprocessing is not None
        super().__init__(recipe, splits)
        self._preprocessing = recipe.preprocessing
        self._size = recipe.preprocessing.height
        self._mask_size = int(recipe.model.get("mask_size") or self._size // int(recipe.model.get("mask_stride", 4)))
        train: SegmentedPictures = splits.train
        self._composer = _make_composer(train)
        self._measured: dict[Part, list[MeasuredPicture]] = {}

    @property
    def num_train_examples(self) -> int:
        """Pictures and drawings."""
        return len(self._splits.train)

    def model_fields(self) -> dict[str, int]:
        """The size that images are brought to."""
        return {"image_size": self._size}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Preprocessing."""
        return {"image_preprocessing": self._preprocessing}

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of all kinds, which are numbered one after the other, and drawings after them."""
        train: SegmentedPictures = self._splits.train
        counts = [*map(len, train.pictures.values()), len(train.drawings)]
        passes = [*(_PICTURES[kind].passes for kind in train.pictures), 1]
        starts = np.cumsum([0, *counts])
        pictures = np.concatenate(
            [np.tile(np.arange(count) + starts[kind], passes[kind]) for kind, count in enumerate(counts)]
        )
        order = np.random.default_rng((seed, epoch)).permutation(pictures)
        size = self._recipe.optimization.batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Pixels (B, 3, I, I); first points (B, P, 2), boxes (B, P, 4) and the coverage of segments (B, P, S, S).

        Coverage is uint8, of 255. Chances (B, P, rounds, 3) are random numbers of 0 to 1: by the first round's a prompt
        begins with a point or a box, by those of the others points are added. Targets (B, P) are 0, or ignored where a
        picture has no segment.
        """
        random = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
        count, side = self._recipe.segmentation.prompts_per_image, self._mask_size
        coverage = np.zeros((len(batch), count, side, side), np.uint8)
        points, boxes = np.zeros((len(batch), count, 2), np.float32), np.zeros((len(batch), count, 4), np.float32)
        targets = np.full((len(batch), count), IGNORED, np.int64)
        images = np.empty((len(batch), self._size, self._size, 3), np.uint8)
        for row, picture in enumerate(batch):
            for _ in range(_ATTEMPTS):
                scene = self._scene(int(picture), random)
                prompts = choose_prompts(scene, count, side, random)
                if prompts is not None:
                    coverage[row], points[row], boxes[row] = prompts.coverage, prompts.points, prompts.boxes
                    targets[row] = 0
                    break
            images[row] = scene.image
        if (targets == IGNORED).all():
            targets[0, 0] = 0  # nothing to find, which is not found by an empty mask either: a step needs a target
        rounds = self._recipe.segmentation.click_rounds
        tensors = {
            "pixel_values": self._finish(images, generator),
            "chances": torch.rand(len(batch), count, rounds, 3, generator=generator),
            "coverage": torch.from_numpy(coverage),
            "points": torch.from_numpy(points),
            "boxes": torch.from_numpy(_shake(boxes, random)),
            "targets": torch.from_numpy(targets),
        }
        return TrainingBatch(tensors=tensors, num_units=len(batch))

    def _scene(self, picture: int, random: np.random.Generator) -> Scene:
        """The part of a picture that is seen, or the picture that is composed, by the number of a picture."""
        train: SegmentedPictures = self._splits.train
        for kind, pictures in train.pictures.items():
            if picture < len(pictures):
                shape, least_area = _PICTURES[kind], self._recipe.augmentation.least_crop_area
                whole = pictures[picture].load()
                scene = crop_scene(whole, self._size, random, least_area=least_area, turned=shape.turned)
                if shape.turned_over and random.random() < shape.turned_over:
                    scene = Scene(image=255 - scene.image, maps=scene.maps)
                return scene
            picture -= len(pictures)
        return self._composer.compose(picture, self._size, random)

    def _finish(self, images: NDArray[np.uint8], generator: torch.Generator) -> Tensor:
        """(B, I, I, 3) -> changes colours and detail, and normalises: (B, 3, I, I)."""
        settings, image = self._recipe.augmentation, self._preprocessing
        values = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
        values = random_colours(values, settings.colour_change, grey=settings.grey, generator=generator)
        values = random_coarseness(values, settings.coarse, least_size=self._size * 3 // 8, generator=generator)
        mean, std = (torch.tensor(one)[:, None, None] for one in (image.mean, image.std))
        return (values - mean) / std

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """The masks of the prompts' first points, (B, P, M, S, S)."""
        points = tensors["points"].flatten(0, 1)[:, None]  # (N, 1, 2)
        labels = torch.full(points.shape[:2], INSIDE, device=points.device)
        masks, _ = _decode(model, _embed_prompts(model, tensors), points, labels)
        return torch.unflatten(masks, 0, tuple(tensors["targets"].shape))

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
        """The loss summed over prompts: of each answer, the best of three masks, the single mask, and the IoU.

        A prompt begins with a point or a box. After each answer a point is added where the mask that was given is
        wrong, and that mask goes in with it; of such answers the single mask counts alone.
        """
        coverage = tensors["coverage"].flatten(0, 1)[:, None].float() / 255  # (N, 1, S, S)
        counts = (tensors["targets"] != IGNORED).flatten().float()  # (N)
        embedding = _embed_prompts(model, tensors)
        chances = tensors["chances"].flatten(0, 1)  # (N, rounds, 3)
        points, labels = _first_prompts(
            tensors["points"].flatten(0, 1), tensors["boxes"].flatten(0, 1), is_boxed=chances[:, 0, 0] < _BOXES
        )
        earlier, total = None, counts.new_zeros(())
        rounds = self._recipe.segmentation.click_rounds
        for number in range(rounds):
            masks, predicted = _decode(model, embedding, points, labels, earlier)
            losses = mask_losses(masks, coverage)  # (N, M)
            iou = mask_iou(masks > 0, coverage > 0.5)  # (N, M)
            answer = losses[:, 0]
            if number == 0:
                answer = answer + losses[:, 1:].min(dim=1).values
            total = (
                total + ((answer + F.mse_loss(predicted, iou, reduction="none").mean(dim=1)) * counts).sum() / rounds
            )
            if number + 1 < rounds:
                given = predicted[:, 1:].argmax(dim=1) + 1 if number == 0 else torch.zeros_like(labels[:, 0])
                given = given.masked_fill(labels[:, 0] == TOP_LEFT, 0)  # as `answer_order` has it
                earlier = masks.detach().gather(1, given[:, None, None, None].expand(-1, 1, *masks.shape[-2:]))[:, 0]
                point, label = _next_point(earlier > 0, coverage[:, 0] > 0.5, chances[:, number + 1])
                points, labels = torch.cat((points, point), dim=1), torch.cat((labels, label), dim=1)
        return total

    def measured(self, part: Part) -> list[MeasuredPicture]:
        """The pictures and segments of a part that are measured; the same in every run.

        Raises:
            DataError: There is no segment as large as a pixel.
        """
        if part not in self._measured:
            pictures: SegmentedPictures = getattr(self._splits, part)
            random = np.random.default_rng(_SCENE_SEED)
            composer = _make_composer(pictures)
            found = measured_of(pictures, part, random)
            count = _NUM_COMPOSITES[part] if len(composer) else 0
            for number in random.permutation(np.arange(count) % max(1, len(composer))):
                scene = composer.compose(int(number), self._size, random)
                picture = SegmentedImage(image=scene.image, segmentations=scene.maps)
                found.append(_measure(picture, "composites", _MOST_PROMPTS[part], LEAST_AREA, random))
            self._measured[part] = _with_segments(found)
        return self._measured[part]

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Mean IoU in percent, at one point and at one box, by the kind of picture, in the pictures' own pixels.

        `best` is of the best of an answer's three masks, the others of its first (`answer_order`). `mean_iou` is the
        mean of nuclei and of the user's own, and of the best of three for composed pictures and photographs.
        `iou_error` is the mean distance of the predicted IoU from the true one.
        """
        device = next(model.parameters()).device
        pictures = self.measured(part)
        found: dict[str, list[float]] = {}
        for start in range(0, len(pictures), _EVALUATION_IMAGES):
            chosen = pictures[start : start + _EVALUATION_IMAGES]
            pixels = np.stack([resize_and_crop(Image.fromarray(one.image), self._preprocessing) for one in chosen])
            embedding = _embed(model, torch.from_numpy(normalize(pixels, self._preprocessing)).to(device))
            counts = torch.tensor([len(one.points) for one in chosen])
            embedding = embedding.repeat_interleave(counts.to(device), dim=0)
            for name, points, labels in _prompts_of(chosen):
                masks, predicted = _decode(model, embedding, points.to(device), labels.to(device))
                order = answer_order(predicted, is_box=name == "box")  # (N, 3)
                masks = masks.gather(1, order[..., None, None].expand(-1, -1, *masks.shape[2:]))
                of_pictures = (torch.split(one, counts.tolist()) for one in (masks, predicted.gather(1, order)))
                parts = zip(chosen, *of_pictures, strict=True)
                for picture, logits, promised in parts:
                    ious = _picture_iou(picture, logits.float().cpu())  # (P, 3)
                    found.setdefault(f"{picture.kind}_{name}", []).extend(ious[:, 0].tolist())
                    found.setdefault(f"{picture.kind}_{name}_best", []).extend(ious.amax(dim=1).tolist())
                    found.setdefault("iou_error", []).extend((promised.float().cpu() - ious).abs().flatten().tolist())
        return {**mean_ious(found)}

    def measure_baselines(self) -> dict[str, float]:
        """Mean IoU in percent of simple methods: the box, and the component under the point by Otsu's threshold."""
        found: dict[str, list[float]] = {}
        for picture in self.measured("test"):
            for row in range(len(picture.masks)):
                mask = picture.mask(row)
                for name, answer in (
                    ("point", component_under_point(picture.image, *picture.points[row])),
                    ("box", fill_box(picture.image, *picture.boxes[row])),
                ):
                    iou = (mask & answer).sum() / (mask | answer).sum()
                    found.setdefault(f"{picture.kind}_{name}", []).append(float(iou))
        return {name: 100 * float(np.mean(values)) for name, values in found.items()}

    def measure_baseline(self) -> Baseline:
        """The mean over kinds of pictures and prompts, as `mean_iou` is."""
        name = "Otsu's threshold and the component under the point; the filled box"
        return Baseline(name=name, metric=self.metric, value=float(np.mean(list(self.measure_baselines().values()))))

    def evaluation_data(self) -> EvaluationData:
        """What is measured in a validation: images, prompts, and the masks (N, I, I) in the images' pixels, packed."""
        pictures, size = self.measured("valid"), self._size
        masks = [one.mask(row) for one in pictures for row in range(len(one.masks))]
        resized = [Image.fromarray(mask).resize((size, size), Image.Resampling.NEAREST) for mask in masks]
        return EvaluationData(
            arrays={
                "images": np.stack(
                    [resize_and_crop(Image.fromarray(one.image), self._preprocessing) for one in pictures]
                ),
                "image_index": np.repeat(np.arange(len(pictures)), [len(one.masks) for one in pictures]),
                "points": np.concatenate([one.points for one in pictures]),
                "boxes": np.concatenate([one.boxes for one in pictures]),
                "masks": np.packbits(np.stack([np.asarray(mask) for mask in resized]).reshape(len(masks), -1), axis=1),
            }
        )


def _embed(model: Any, pixel_values: Tensor) -> Tensor:
    """Of a `PromptSegmenter`: float (B, 3, I, I), normalised -> embeddings, (B, L, E)."""
    embedding: Tensor = model.encoder(pixel_values)["embedding"]
    return embedding


def _embed_prompts(model: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """The embedding of each prompt's image, (N, L, E)."""
    return _embed(model, tensors["pixel_values"]).repeat_interleave(tensors["targets"].shape[1], dim=0)


def _decode(
    model: Any, embedding: Tensor, points: Tensor, labels: Tensor, earlier: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of a `PromptSegmenter`: the masks of prompts, (N, M, S, S), and their predicted IoU, (N, M)."""
    found = model.decoder(embedding, points, labels, earlier_mask=earlier, has_earlier_mask=None)
    return found["masks"], found["predicted_iou"]


def answer_order(predicted_iou: Tensor, *, is_box: bool) -> Tensor:
    """Which masks answer a point or a box, the best first, as a server has it: (N, M) -> (N, M - 1).

    At a point those that may each mean another thing, by falling predicted IoU; at a box first the mask for prompts
    that mean one thing.
    """
    order = predicted_iou[:, 1:].argsort(dim=1, descending=True, stable=True) + 1
    return torch.cat((torch.zeros_like(order[:, :1]), order[:, :-1]), dim=1) if is_box else order


def _make_composer(pictures: SegmentedPictures) -> Composer:
    drawings = pictures.drawings
    backgrounds = [one.load().image for one in pictures.pictures.get("photographs", ())]
    return Composer(drawings, opaque(drawings.images), backgrounds)


def _shake(boxes: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.float32]:
    """Moves the sides of boxes, (..., 4), by a share of their lengths."""
    sides = np.tile(boxes[..., 2:] - boxes[..., :2], 2)  # (..., 4)
    noise = np.clip(random.normal(0, _BOX_NOISE, boxes.shape), -2 * _BOX_NOISE, 2 * _BOX_NOISE)
    shaken: NDArray[np.float32] = np.clip(boxes + noise * sides, 0, 1).astype(np.float32)
    return shaken


def _first_prompts(points: Tensor, boxes: Tensor, *, is_boxed: Tensor) -> tuple[Tensor, Tensor]:
    """A point or a box of each prompt, as `is_boxed`, (N,), has it: points (N, 2, 2) and their labels (N, 2)."""
    corners, labels = _as_corners(boxes)
    alone, alone_labels = _as_point(points)
    return torch.where(is_boxed[:, None, None], corners, alone), torch.where(is_boxed[:, None], labels, alone_labels)


def _as_corners(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes (N, 4) -> points (N, 2, 2) and labels (N, 2)."""
    return torch.unflatten(boxes, -1, (2, 2)), torch.tensor([TOP_LEFT, BOTTOM_RIGHT], device=boxes.device).expand(
        len(boxes), 2
    )


def _as_point(points: Tensor) -> tuple[Tensor, Tensor]:
    """Points (N, 2) -> points (N, 2, 2), of which the second is padding, and labels (N, 2)."""
    labels = torch.tensor([INSIDE, PADDING], device=points.device).expand(len(points), 2)
    return torch.stack((points, torch.zeros_like(points)), dim=1), labels


def _next_point(masks: Tensor, truth: Tensor, chances: Tensor) -> tuple[Tensor, Tensor]:
    """A random cell where masks, bool (N, S, S), are wrong, or anywhere where they are right: (N, 1, 2) and (N, 1).

    The first of the chances, (N, 3), chooses among these cells, the others a place within the cell.
    """
    size = masks.shape[-1]
    wrong = (masks != truth).flatten(1)  # (N, cells)
    ranks = (wrong | ~wrong.any(dim=1, keepdim=True)).cumsum(dim=1)  # of the cells that may be chosen, from 1
    count = ranks[:, -1:]
    wanted = torch.minimum((chances[:, :1] * count).long(), count - 1)  # (N, 1), from 0
    place = (ranks <= wanted).sum(dim=1, keepdim=True)
    inside = truth.flatten(1).gather(1, place)  # (N, 1)
    cells = torch.stack((place % size, place // size), dim=-1)  # (N, 1, 2): x and y
    return (cells + chances[:, None, 1:]) / size, torch.where(inside, INSIDE, OUTSIDE)


def measured_of(pictures: SegmentedPictures, part: Part, random: np.random.Generator) -> list[MeasuredPicture]:
    """The pictures of each kind that are measured, composed ones left out, with some segments of each."""
    found = []
    for kind, several in pictures.pictures.items():
        shape, chosen = _PICTURES[kind], list(range(len(several)))
        if shape.most_measured is not None and len(several) > shape.most_measured:
            chosen = sorted(random.permutation(len(several))[: shape.most_measured].tolist())
        for number in chosen:
            one = several[number].load()
            one = one if shape.measured_side is None else one.reduced(shape.measured_side)
            least = round(shape.least_share * one.image.shape[0] * one.image.shape[1])
            found.append(_measure(one, kind, _MOST_PROMPTS[part], least, random))
    return found


def read_measured(folder: Path) -> list[MeasuredPicture]:
    """Reads a user's folder as a test part is measured.

    Raises:
        DataError: As `read_own_segments`, or there is no segment as large as a pixel.
    """
    return _with_segments(measured_of(read_own_segments(folder), "test", np.random.default_rng(_SCENE_SEED)))


def _with_segments(found: Sequence[MeasuredPicture]) -> list[MeasuredPicture]:
    """Those that have any.

    Raises:
        DataError: None has.
    """
    kept = [one for one in found if len(one.masks)]
    if not kept:
        raise DataError("no object of the pictures to measure on is as large as a pixel; give others")
    return kept


def _measure(
    picture: SegmentedImage, kind: Kind, most: int, least_area: int, random: np.random.Generator
) -> MeasuredPicture:
    """Chooses segments of a picture, of all its segmentations alike."""
    places: list[tuple[Labels, int]] = []
    for labels in picture.segmentations:
        areas = np.bincount(labels.ravel())
        places += [(labels, number) for number in range(1, len(areas)) if areas[number] >= max(1, least_area)]
    chosen = [places[i] for i in np.sort(random.permutation(len(places))[:most])]
    height, width = picture.image.shape[:2]
    masks, points, boxes = [], [], []
    for labels, number in chosen:
        mask = labels == number
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        top, left, bottom, right = rows[0], columns[0], rows[-1] + 1, columns[-1] + 1
        x, y = centre_of(mask[top:bottom, left:right])
        points.append(((left + x) / width, (top + y) / height))
        boxes.append((left / width, top / height, right / width, bottom / height))
        masks.append(np.packbits(mask))
    return MeasuredPicture(
        kind=kind,
        image=picture.image,
        masks=np.array(masks),
        points=np.array(points, np.float32),
        boxes=np.array(boxes, np.float32),
    )


def _prompts_of(pictures: Sequence[MeasuredPicture]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The points of pictures, then their boxes, as a model takes them."""
    yield "point", *_as_point(torch.from_numpy(np.concatenate([one.points for one in pictures])))
    yield "box", *_as_corners(torch.from_numpy(np.concatenate([one.boxes for one in pictures])))


def _picture_iou(picture: MeasuredPicture, logits: Tensor) -> Tensor:
    """IoU of masks (P, M, S, S) with the segments, in the picture's own pixels: (P, M)."""
    rows = []
    for row, masks in enumerate(logits):
        large = F.interpolate(masks[None], size=picture.image.shape[:2], mode="bilinear")[0]  # (M, H, W)
        rows.append(mask_iou(large > 0, torch.from_numpy(picture.mask(row))[None]))
    return torch.stack(rows)


def mean_ious(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The figures of `SegmentationTask.evaluate`, of the values of each prompt by their names."""
    metrics = {name: 100 * float(np.mean(values)) for name, values in found.items()}
    names = [f"{kind}_{prompt}" for kind in ("nuclei", "own") for prompt in ("point", "box")]
    names += [f"{kind}_{prompt}_best" for kind in ("composites", "photographs") for prompt in ("point", "box")]
    chosen = [metrics[name] for name in names if name in metrics]
    return {"mean_iou": float(np.mean(chosen)), **metrics}
