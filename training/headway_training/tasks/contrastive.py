"""Images and texts in one space: pairs of the two are brought together, and strangers apart.

B rows, N images, M texts, T tokens, I image size in pixels, D width of the space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn

from headway_training.batches import Batch, even_batches
from headway_training.calibration import fit_temperature
from headway_training.checkpoint import Baseline, Classification, load_model
from headway_training.data.captions import read_own_photographs
from headway_training.data.examples import LabeledImages, Splits
from headway_training.data.images import for_crops, normalize, resize_and_crop
from headway_training.data.pictures import CaptionedPhotographs, Drawings, Pictures, opaque, without_drawings
from headway_training.data.public import Dataset
from headway_training.data.sources import OwnData
from headway_training.data.views import (
    plain_backgrounds,
    random_coarseness,
    random_colours,
    random_crops,
    random_holes,
    random_placements,
)
from headway_training.evaluation import pad, token_mask
from headway_training.kinds import PHOTOGRAPHS, ROWS, SMOOTHING, FileSettings, Labels, augmentation, register
from headway_training.metrics import recall_at
from headway_training.models.clip import CLIP, contrastive_loss
from headway_training.processes import gather_rows, num_exchanging
from headway_training.recipes import Recipe
from headway_training.tasks.base import (
    IGNORED,
    CaptionedImagesTask,
    EvaluationData,
    Metrics,
    Part,
    SpecialIds,
    TextTask,
    TrainingBatch,
    hide_tokens,
)
from headway_training.tokenizers import encode_texts

NAME_TEMPLATES = ("{}", "{}", "{}", "a picture of {}", "a drawing of {}", "an emoji: {}")
"""What a drawing's name is put into, each as likely as the others."""
LABEL_TEMPLATES = ("{}", "a {}", "a photo of a {}", "a picture of a {}")
"""What a label of images is put into; the mean of the vectors stands for it."""
_DRAWING_PASSES = 3
"""Times that each drawing is seen while each photograph is seen once; once among drawings of its own group."""
_CUTOFFS = (1, 5, 10)
_EVALUATION_ROWS = 250


@register
class ContrastiveTask(CaptionedImagesTask, TextTask):
    """Batches of drawings with names, and batches of photographs with captions, in random order.

    A drawing lies on white, on colours or on a photograph, and its text is its name, or search words, or both.
    """

    name = "image_text_embedding"
    unit = "images"
    metric = "mean_recall"
    higher_is_better = True
    settings = (
        *(ROWS, SMOOTHING, "tokenizer", "preprocessing", "attention"),
        *augmentation("token_dropout", "white_background", "photograph_background", "coarse", "holes"),
        *PHOTOGRAPHS,
    )
    sections = ("preprocessing",)
    described = ("image_preprocessing", "special_tokens")
    compares_rows = True
    of_data_sets = augmentation("white_background", "photograph_background")
    sentence = "Puts images and texts into one space"
    _temperature = 1.0

    @classmethod
    def read(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[Pictures, Labels]:
        """Reads a table of images with captions; those of all languages are captions alike."""
        return without_drawings(read_own_photographs(Path(file), for_crops(settings.preprocessing))), ()

    @classmethod
    def unread(cls, recipe: Recipe, own: OwnData | None, dataset: Dataset | None) -> Iterator[tuple[str, str]]:
        """A loss of pairs smooths no labels."""
        if recipe.configuration.get("loss") == "sigmoid":
            yield SMOOTHING, "is not read with model.loss 'sigmoid'"

    @classmethod
    def training_texts(cls, train: Pictures) -> list[str]:
        """Names, search words and captions."""
        return train.all_texts()

    def __init__(self, recipe: Recipe, splits: Splits[Any], tokenizer: Tokenizer) -> None:
        assert recipe.preprocessing is not None
        super().__init__(recipe, splits)
        self._preprocessing = recipe.preprocessing
        self.tokenizer = tokenizer
        self._special = SpecialIds(tokenizer)
        self._max_length = int(recipe.model["max_length"])
        train: Pictures = splits.train
        self._drawn = torch.from_numpy(opaque(train.drawings.images))  # (N, S, S)
        self._drawings = _channels_first(train.drawings.images)
        self._photographs = _channels_first(train.photographs.images)
        self._captions = [self._encode(captions) for captions in train.photographs.captions]
        self._measured = {part: self._prepare(getattr(splits, part)) for part in ("valid", "test")}

    @property
    def num_train_examples(self) -> int:
        """Drawings and photographs."""
        return len(self._splits.train)

    def model_fields(self) -> dict[str, int]:
        """The vocabulary, and the size that images are brought to."""
        return {"vocabulary_size": self.tokenizer.get_vocab_size(), "image_size": self._preprocessing.height}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens, preprocessing and the fitted temperature."""
        return {
            "special_tokens": self._special.tokens,
            "image_preprocessing": self._preprocessing,
            "classification": Classification(temperature=self._temperature),
        }

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of drawings, and of photographs, whose indices follow those of all drawings."""
        size, num_drawings = self._recipe.optimization.batch_size, len(self._drawings)
        batches = self._grouped_batches(seed, epoch)
        batches += [
            batch
            for passing in range(1, _DRAWING_PASSES)
            for batch in even_batches(num_drawings, size, seed=seed, epoch=epoch * _DRAWING_PASSES + passing)
        ]
        photographs = even_batches(len(self._photographs), size, seed=seed, epoch=epoch)
        batches += [batch + num_drawings for batch in photographs]
        least = min(size // 2, num_drawings or len(self._photographs))  # a batch of few pairs has few strangers
        batches = [batch for batch in batches if len(batch) >= least]
        order = np.random.default_rng((seed, epoch)).permutation(len(batches))
        return [batches[i] for i in order]

    def _grouped_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of drawings of one group or a few, which are harder to tell from each other."""
        random = np.random.default_rng((seed, epoch * _DRAWING_PASSES))
        train: Pictures = self._splits.train
        if not len(train.drawings):
            return []
        order = random.permutation(len(train.drawings))
        places = random.permutation(int(train.texts.groups.max()) + 1)  # of the groups
        by_group = order[np.argsort(places[train.texts.groups[train.drawings.emoji[order]]], kind="stable")]
        size = self._recipe.optimization.batch_size
        return [by_group[start : start + size] for start in range(0, len(by_group), size)]

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Pixels (B, 3, I, I), ids and mask (B, T), and targets (B): equal where two pairs have one subject."""
        random = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
        num_drawings = len(self._drawings)
        if batch[0] < num_drawings:
            emoji = self._splits.train.drawings.emoji[batch]
            images = self._place(batch, generator)
            rows = self._encode([self._describe(row, random) for row in emoji])
            targets = torch.from_numpy(self._splits.train.texts.concepts[emoji])
        else:
            batch = batch - num_drawings
            images = self._cut(batch, generator)
            rows = [self._captions[i][random.integers(len(self._captions[i]))] for i in batch]
            targets = torch.from_numpy(batch)
        mask, rate = token_mask(rows), self._recipe.augmentation.token_dropout
        tensors = {
            "pixel_values": self._finish(images, generator),
            "input_ids": hide_tokens(pad(rows, self._special.pad), mask, rate, self._special.unk, generator),
            "attention_mask": mask,
            "targets": targets,
        }
        return TrainingBatch(tensors=tensors, num_units=len(batch))

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, B), an image in each row and a text in each column."""
        logits: Tensor = model(tensors["pixel_values"], tensors["input_ids"], tensors["attention_mask"])
        return logits

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
        """A process's share of the contrastive loss of all pairs, those of the other processes among them."""
        assert isinstance(model, CLIP)
        images = model.embed_images(tensors["pixel_values"])
        pairs = torch.cat((images, model.embed_texts(tensors["input_ids"], tensors["attention_mask"])), dim=1)
        subjects, share = tensors["targets"], num_exchanging()
        if share > 1:
            pairs, subjects = gather_rows(pairs), gather_rows(subjects)
            pairs, subjects = pairs[subjects != IGNORED], subjects[subjects != IGNORED]
        logits = model.logits(*pairs.chunk(2, dim=1)).float()
        kind = model.configuration.loss
        return contrastive_loss(logits, subjects, kind, label_smoothing=label_smoothing) / share

    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """Recall in percent, by `measure_recalls`."""
        assert isinstance(model, CLIP)
        measured = self._measured[part]
        recalls = measure_recalls(
            getattr(self._splits, part),
            images=lambda kind: embed_images(model, measured[kind]),
            texts=lambda texts: self._embed_texts(model, self._encode(texts)),
        )
        return {**recalls}

    def calibrate(self, model: nn.Module) -> None:
        """Fits the temperature of the softmax over labels that a caller brings; that of `sigmoid` stays as learned.

        It is fitted on concepts that were never trained on, as such labels often are: of others the model may be surer.
        Where all are trained on, logits keep the scale of the checkpoint that the run started from, if that was fitted;
        else photographs and captions take their place.
        """
        assert isinstance(model, CLIP)
        if model.configuration.loss != "softmax":
            return
        pictures, pixels = self._splits.valid, self._measured["valid"]
        start = self._recipe.init.checkpoint
        if "unseen_drawings" not in pixels and start is not None:
            earlier, described = load_model(start)
            if isinstance(earlier, CLIP) and described.classification is not None:
                scale = earlier.scale.item() / described.classification.temperature
                self._temperature = model.scale.item() / scale
                return
        if "unseen_drawings" in pixels:
            concepts, first = np.unique(pictures.texts.concepts, return_index=True)
            texts = [pictures.texts.names[index] for index in first]
            images, targets = (
                "unseen_drawings",
                np.searchsorted(concepts, pictures.texts.concepts[pictures.unseen_drawings.emoji]),
            )
        else:
            texts = [captions[0] for captions in pictures.photographs.captions]
            images, targets = "photographs", np.arange(len(texts))
        cosines = embed_images(model, pixels[images]) @ self._embed_texts(model, self._encode(texts)).T
        self._temperature = fit_temperature(cosines * model.scale.item(), targets)

    def measure_baseline(self) -> Baseline:
        """A guess: one photograph in so many is among the first ten."""
        value = 100 * min(1.0, 10 / len(self._splits.test.photographs))
        return Baseline(name="chance", metric="image_recall_10", value=value)

    def evaluation_data(self) -> EvaluationData:
        """The photographs of the test part and their captions, by index."""
        photographs: CaptionedPhotographs = self._splits.test.photographs
        texts = [
            {"text": caption, "label": number}
            for number, captions in enumerate(photographs.captions)
            for caption in captions
        ]
        images = np.stack([self._resize(image) for image in photographs.images])
        return EvaluationData(texts=texts, images=(images, np.arange(len(images))))

    def _place(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Lays drawings on white, on colours, and on photographs."""
        settings, size = self._recipe.augmentation, self._preprocessing.height
        backgrounds = plain_backgrounds(len(batch), size, white=settings.white_background, generator=generator)
        behind = torch.rand(len(batch), generator=generator) < settings.photograph_background
        if num_behind := int(behind.sum()):
            chosen = torch.randint(len(self._photographs), (num_behind,), generator=generator)
            backgrounds[behind] = random_crops(
                self._photographs[chosen],
                size,
                least_area=0.2,
                mirrored=_flips(num_behind, generator),
                generator=generator,
            )
        mirrorable = torch.from_numpy(self._splits.train.texts.mirrorable[self._splits.train.drawings.emoji[batch]])
        mirrored = _flips(len(batch), generator) & mirrorable
        rows = torch.from_numpy(batch)
        return random_placements(
            self._drawings[rows], self._drawn[rows], backgrounds, mirrored=mirrored, generator=generator
        )

    def _cut(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Cuts parts out of photographs."""
        return random_crops(
            self._photographs[torch.from_numpy(batch)],
            self._preprocessing.height,
            least_area=self._recipe.augmentation.least_crop_area,
            mirrored=_flips(len(batch), generator),
            generator=generator,
        )

    def _finish(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Changes colours and detail, covers parts, and normalises."""
        settings, image = self._recipe.augmentation, self._preprocessing
        images = random_colours(images, settings.colour_change, grey=settings.grey, generator=generator)
        images = random_coarseness(images, settings.coarse, least_size=images.shape[-1] * 3 // 8, generator=generator)
        images = random_holes(images, settings.holes, largest=0.4, generator=generator)
        mean, std = (torch.tensor(values)[:, None, None] for values in (image.mean, image.std))
        return (images - mean) / std

    def _describe(self, emoji: int, random: np.random.Generator) -> str:
        """A text for an emoji: its name in some template, its name with search words, or search words alone."""
        texts = self._splits.train.texts
        name, tags = texts.names[emoji], texts.tags[emoji]
        kind = random.random()
        if kind < 0.6 or not tags:
            return NAME_TEMPLATES[random.integers(len(NAME_TEMPLATES))].format(name)
        count = int(random.integers(1, min(len(tags), 5) + 1))
        words = [tags[i] for i in random.permutation(len(tags))[:count]]
        return ", ".join([name, *words] if kind < 0.85 else words)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        rows = encode_texts(self.tokenizer, texts, None)
        return [row if len(row) <= self._max_length else [*row[: self._max_length - 1], row[-1]] for row in rows]

    def _prepare(self, pictures: Pictures) -> dict[str, Tensor]:
        """What a part is measured on, as pixels, by kind."""
        kinds: dict[str, Drawings | CaptionedPhotographs | LabeledImages | None] = {
            "drawings": pictures.drawings,
            "unseen_drawings": pictures.unseen_drawings,
            "photographs": pictures.photographs,
            "labeled": pictures.labeled,
        }
        return {
            kind: torch.from_numpy(
                normalize(np.stack([self._resize(image) for image in part.images]), self._preprocessing)
            )
            for kind, part in kinds.items()
            if part is not None and len(part)
        }

    def _resize(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return resize_and_crop(Image.fromarray(image), self._preprocessing)

    def _embed_texts(self, model: CLIP, ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        return embed_texts(model, ids, self._special.pad)


def measure_recalls(
    pictures: Pictures,
    *,
    images: Callable[[str], NDArray[np.float32]],
    texts: Callable[[Sequence[str]], NDArray[np.float32]],
) -> dict[str, float]:
    """Recall in percent: of drawings' names, of captions and photographs, and of images' labels.

    `mean_recall` is the mean of those of drawings at 1, of photographs at 10 and of labels at 1, whichever there are.

    Args:
        pictures: What is measured.
        images: Name of a field of `pictures` -> vectors of its images, (N, D) of length one.
        texts: Texts -> their vectors, (M, D) of length one.
    """
    metrics: dict[str, float] = {}
    drawn = {kind: getattr(pictures, kind) for kind in ("drawings", "unseen_drawings")}
    drawn = {kind: drawings for kind, drawings in drawn.items() if drawings is not None and len(drawings)}
    names = texts(pictures.texts.names) if drawn else np.empty((0, 0), np.float32)
    for kind, drawings in drawn.items():
        concepts = pictures.texts.concepts
        right = concepts[drawings.emoji][:, None] == concepts[None, :]  # (N, names)
        similarity = images(kind) @ names.T
        metrics |= {f"{kind}_top_{k}": recall_at(similarity, right, k) for k in _CUTOFFS[:2]}
    metrics |= caption_recalls(pictures.photographs.captions, images("photographs"), texts)
    if pictures.labeled is not None:
        similarity = images("labeled") @ _label_vectors(pictures.labels, texts).T
        right = pictures.labeled.labels[:, None] == np.arange(len(pictures.labels))
        metrics["labels_top_1"] = recall_at(similarity, right, 1)
    means = [metrics[name] for name in ("drawings_top_1", "image_recall_10", "labels_top_1") if name in metrics]
    return {"mean_recall": float(np.mean(means)), **metrics}


def caption_recalls(
    captions: Sequence[Sequence[str]],
    vectors: NDArray[np.float32],
    texts: Callable[[Sequence[str]], NDArray[np.float32]],
) -> dict[str, float]:
    """Recall in percent of the image of each caption, and of any caption of each image.

    Args:
        captions: Of each image.
        vectors: Of the images, (N, D) of length one.
        texts: As in `measure_recalls`.
    """
    owner = np.repeat(np.arange(len(captions)), [len(several) for several in captions])  # (M)
    similarity = vectors @ texts([caption for several in captions for caption in several]).T  # (N, M)
    right = np.arange(len(captions))[:, None] == owner[None, :]
    recalls = {f"image_recall_{k}": recall_at(similarity.T, right.T, k) for k in _CUTOFFS}
    return recalls | {f"text_recall_{k}": recall_at(similarity, right, k) for k in _CUTOFFS}


def _label_vectors(labels: Sequence[str], texts: Callable[[Sequence[str]], NDArray[np.float32]]) -> NDArray[np.float32]:
    """The mean direction of each label's templates: (labels, D)."""
    written = [template.format(label) for label in labels for template in LABEL_TEMPLATES]
    vectors = texts(written).reshape(len(labels), len(LABEL_TEMPLATES), -1).mean(1)
    unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return unit


@torch.inference_mode()
def embed_images(model: CLIP, pixel_values: Tensor) -> NDArray[np.float32]:
    """Float (N, 3, I, I) -> (N, D)."""
    device = next(model.parameters()).device
    parts = [model.embed_images(part.to(device)).float().cpu() for part in torch.split(pixel_values, _EVALUATION_ROWS)]
    vectors: NDArray[np.float32] = torch.cat(parts).numpy()
    return vectors


@torch.inference_mode()
def embed_texts(model: CLIP, ids: Sequence[Sequence[int]], padding: int) -> NDArray[np.float32]:
    """The tokens of each text -> (M, D)."""
    device = next(model.parameters()).device
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    vectors: NDArray[np.float32] | None = None
    for start in range(0, len(order), _EVALUATION_ROWS):
        chosen = order[start : start + _EVALUATION_ROWS]
        rows = [ids[i] for i in chosen]
        part = model.embed_texts(pad(rows, padding).to(device), token_mask(rows).to(device)).float().cpu().numpy()
        if vectors is None:
            vectors = np.empty((len(ids), part.shape[1]), np.float32)
        vectors[chosen] = part
    assert vectors is not None, "there are no texts"
    return vectors


def _channels_first(images: NDArray[np.uint8]) -> Tensor:
    """(N, S, S, 3) -> uint8 (N, 3, S, S)."""
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def _flips(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator) < 0.5
