"""Captioning: predict the next token of a caption from an image and the caption so far.

B images, C captions of each, T tokens of a caption, I image size, V vocabulary, D width of a space.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn

from headway_training.batches import Batch, even_batches
from headway_training.checkpoint import Baseline, load_model
from headway_training.data.captions import CaptionedImages, language_token, read_own_captions
from headway_training.data.examples import Splits
from headway_training.data.images import for_crops, normalize, resize_and_crop
from headway_training.data.views import random_coarseness, random_colours, random_crops, random_holes
from headway_training.errors import DataError
from headway_training.evaluation import pad, write_greedily
from headway_training.kinds import PHOTOGRAPHS, ROWS, SMOOTHING, FileSettings, Labels, augmentation, register
from headway_training.metrics import caption_bleu, caption_cider, caption_meteor
from headway_training.models import CLIP, Captioner
from headway_training.models.own import MODULE, OwnModule
from headway_training.models.parts.attention import Kernel
from headway_training.models.writer import target_states
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
    language_token_id,
)
from headway_training.tasks.contrastive import embed_images
from headway_training.tokenizers import encode_texts

_NUM_STARTS = 2
"""Tokens that a caption begins with: `bos`, and that of its language."""


@register
class CaptioningTask(CaptionedImagesTask, TextTask):
    """Batches of photographs with captions of every language, and batches of captions alone, in random order."""

    name = "captioning"
    unit = "images"
    metric = "cider"
    higher_is_better = True
    settings = (
        *(ROWS, SMOOTHING, "tokenizer", "preprocessing", "captioning"),
        *augmentation("flip", "coarse", "holes"),
        *PHOTOGRAPHS,
    )
    sections = ("preprocessing",)
    described = ("image_preprocessing", "special_tokens", "language_tokens")
    frame = "$A <eos>"
    has_own_tokens = True
    takes_modules = True
    uses_all_weights = False
    in_order = "target_ids"
    own_data = f"{CaptionedImagesTask.own_data}, and if there are several languages `language`"
    of_data_sets = ("captioning.text_share",)
    sentence = "Says what an image shows"

    @classmethod
    def read(cls, file: str, labels: Labels | None, settings: FileSettings) -> tuple[CaptionedImages, Labels]:
        """Reads a table of images with captions."""
        return read_own_captions(Path(file), for_crops(settings.preprocessing)), ()

    @classmethod
    def check_own(cls, train: Any, valid: Any, test: Any) -> None:
        """All parts have captions in the same languages."""
        super().check_own(train, valid, test)
        for part in (valid, test):
            if (found := sorted(part.captions)) != (expected := sorted(train.captions)):
                raise DataError(
                    f"--valid and --test have captions in {', '.join(found)}, and --train in {', '.join(expected)}; "
                    "give all in the same languages"
                )

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        """A module of one's own reads no captions without a photograph."""
        super().check_recipe(recipe)
        if recipe.architecture == MODULE and recipe.captioning.text_share:
            raise ValueError("captioning.text_share must be 0: a module of your own has nothing to read for an image")

    @classmethod
    def run_module(cls, module: nn.Module, kernel: Kernel, *inputs: Tensor) -> Tensor:
        """Reads captions so far, (B, C, T), of images, (B, 3, I, I)."""
        target_ids, pixel_values = inputs
        writer: Any = module
        keys_values = [
            (key.repeat_interleave(target_ids.shape[1], dim=0), value.repeat_interleave(target_ids.shape[1], dim=0))
            for key, value in writer.cross_keys_values(writer.encode(pixel_values))
        ]
        states = target_states(writer, kernel, target_ids.flatten(0, 1), keys_values)
        return torch.unflatten(writer.logits(states), 0, tuple(target_ids.shape[:2]))

    @classmethod
    def training_texts(cls, train: CaptionedImages) -> list[str]:
        """The captions of every language."""
        return [caption for language in train.captions for caption in train.all_texts(language)]

    @classmethod
    def marks(cls, recipe: Recipe, train: CaptionedImages) -> list[str]:
        """Those of the languages."""
        return [language_token(one) for one in train.captions]

    def __init__(self, recipe: Recipe, splits: Splits[Any], tokenizer: Tokenizer) -> None:
        assert recipe.preprocessing is not None
        super().__init__(recipe, splits)
        self.tokenizer = tokenizer
        self._preprocessing = recipe.preprocessing
        self._special = SpecialIds(tokenizer)
        self._max_length = int(recipe.model["max_target_length"]) - _NUM_STARTS
        train: CaptionedImages = splits.train
        self._languages = tuple(train.captions)
        self._marks = {language: language_token_id(tokenizer, language) for language in self._languages}
        self._photographs = torch.from_numpy(np.ascontiguousarray(train.images.transpose(0, 3, 1, 2)))
        self._captions = {
            language: [self._encode(several) or self._encode(several, cut=True) for several in train.captions[language]]
            for language in self._languages
        }
        self._texts = [(language, row) for language in self._languages for row in self._encode(train.texts[language])]
        self._text_lengths = np.array([len(row) for _, row in self._texts])
        self._pixels: dict[Part, Tensor] = {}

    @property
    def num_train_examples(self) -> int:
        """Photographs, and captions without one."""
        return len(self._photographs) + len(self._texts)

    def model_fields(self) -> dict[str, int]:
        """The vocabulary, and the size that images are brought to."""
        return {"vocabulary_size": self.tokenizer.get_vocab_size(), "image_size": self._preprocessing.height}

    def checkpoint_fields(self) -> dict[str, Any]:
        """Special tokens, languages and preprocessing."""
        return {
            "special_tokens": self._special.tokens,
            "language_tokens": self._marks,
            "image_preprocessing": self._preprocessing,
        }

    def epoch_batches(self, seed: int, epoch: int) -> list[Batch]:
        """Batches of photographs, and of captions alone, whose indices follow those of the photographs.

        An epoch sees every photograph once, and of the captions alone as many as their share of the batches asks for.
        """
        settings, size = self._recipe.captioning, self._recipe.optimization.batch_size
        batches = even_batches(len(self._photographs), size, seed=seed, epoch=epoch)
        random = np.random.default_rng((seed, epoch))
        count = round(len(batches) * settings.text_share / (1 - settings.text_share)) if self._texts else 0
        if count:
            rows = min(size * settings.captions_per_image, len(self._texts))
            passes = -(-count * rows // len(self._texts))
            drawn = np.concatenate([random.permutation(len(self._texts)) for _ in range(passes)])[: count * rows]
            by_length = drawn[np.argsort(self._text_lengths[drawn], kind="stable")]  # so that little is padded
            batches = batches + np.split(by_length + len(self._photographs), count)
        return [batches[i] for i in random.permutation(len(batches))]

    def collate(self, batch: Batch, generator: torch.Generator) -> TrainingBatch:
        """Pixels (B, 3, I, I), captions shifted right and targets, both (B, C, T).

        Of captions alone there are no pixels, and C is 1. The token of a language is not predicted.
        """
        random = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
        num_photographs = len(self._photographs)
        if batch[0] >= num_photographs:
            rows = [self._texts[i - num_photographs] for i in batch]
            return TrainingBatch(tensors=self._targets(rows, 1), num_units=len(batch))
        count = self._recipe.captioning.captions_per_image
        rows = [one for i in batch for one in self._choose(int(i), count, random)]
        tensors = {"pixel_values": self._see(batch, generator), **self._targets(rows, count)}
        return TrainingBatch(tensors=tensors, num_units=len(batch))

    def _choose(self, photograph: int, count: int, random: np.random.Generator) -> list[tuple[str, list[int]]]:
        """Captions of a photograph, of each language in turn, none twice while there are others."""
        captions = {language: several[photograph] for language, several in self._captions.items()}
        shuffled = {language: random.permutation(len(several)) for language, several in captions.items()}
        chosen = []
        for number in range(count):
            turn, place = self._languages[number % len(self._languages)], number // len(self._languages)
            order = shuffled[turn]
            chosen.append((turn, captions[turn][order[place % len(order)]]))
        return chosen

    def _targets(self, rows: Sequence[tuple[str, list[int]]], count: int) -> dict[str, Tensor]:
        """Captions with their languages -> what the decoder reads and predicts, (B, C, T) each."""
        special = self._special
        read = pad([[special.bos, self._marks[language], *ids] for language, ids in rows], special.pad)
        predicted = pad([[IGNORED, *ids, special.eos] for _, ids in rows], IGNORED)
        return {
            "target_ids": torch.unflatten(read, 0, (-1, count)),
            "targets": torch.unflatten(predicted, 0, (-1, count)),
        }

    def _see(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Cuts parts out of photographs, changes colours and detail, covers parts, and normalises."""
        settings, image = self._recipe.augmentation, self._preprocessing
        mirrored = (torch.rand(len(batch), generator=generator) < 0.5) & settings.flip
        images = random_crops(
            self._photographs[torch.from_numpy(batch)],
            image.height,
            least_area=settings.least_crop_area,
            mirrored=mirrored,
            generator=generator,
        )
        images = random_colours(images, settings.colour_change, grey=settings.grey, generator=generator)
        images = random_coarseness(images, settings.coarse, least_size=image.height * 3 // 8, generator=generator)
        images = random_holes(images, settings.holes, largest=0.4, generator=generator)
        mean, std = (torch.tensor(values)[:, None, None] for values in (image.mean, image.std))
        return (images - mean) / std

    def logits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """(B, C, T, V)."""
        logits: Tensor = model(tensors["target_ids"], tensors.get("pixel_values"))
        return logits

    def loss(self, model: nn.Module, tensors: Mapping[str, Tensor], label_smoothing: float = 0.0) -> Tensor:
        """The cross-entropy summed over the tokens of captions.

        Captions are read in as many parts as an image has, by their length, and no logits are computed of padding.
        """
        if isinstance(model, OwnModule):
            return super().loss(model, tensors, label_smoothing)
        assert isinstance(model, Captioner)
        num_images, count = tensors["targets"].shape[:2]
        keys_values = model.cross_keys_values(model.read(tensors.get("pixel_values"), num_images))
        total = keys_values[0][0].new_zeros((), dtype=torch.float32)
        given, wanted = tensors["target_ids"].flatten(0, 1), tensors["targets"].flatten(0, 1)  # (B C, T)
        for rows in torch.chunk((wanted != IGNORED).sum(dim=1).argsort(), count):
            read, predicted, chosen = _without_padding(given[rows], wanted[rows])
            images = rows // count
            states = model.target_states(read, [(key[images], value[images]) for key, value in keys_values])
            logits = model.logits(states[chosen]).float()  # (N, V)
            total = total + self.loss_of_logits(logits, predicted[chosen], label_smoothing)
        return total

    def evaluate(self, model: nn.Module, part: Part) -> Metrics:
        """`cider`, `bleu` and `meteor` of greedy captions in percent, of each language, and their means."""
        pixels, special = self._measured_pixels(part), self._special
        captions = {
            language: self.tokenizer.decode_batch(
                write_greedily(cast("Captioner", model), pixels, (special.bos, mark), special.eos)
            )
            for language, mark in self._marks.items()
        }
        return {**self._score(captions, part)}

    def _score(self, captions: Mapping[str, Sequence[str]], part: Part) -> dict[str, float]:
        """The metrics of captions of a part's photographs, by language."""
        references: CaptionedImages = getattr(self._splits, part)
        return score_captions(captions, references.captions)

    def measure_baselines(self) -> dict[str, dict[str, float]]:
        """The metrics of simple methods, by their names.

        The commonest caption of each language, for every photograph; and a caption of the nearest photograph that is
        trained on, by the vectors of the CLIP model that the recipe starts from, where it does.
        """
        train: CaptionedImages = self._splits.train
        test: CaptionedImages = self._splits.test
        common = {one: Counter(train.all_texts(one)).most_common(1)[0][0] for one in self._languages}
        methods = {"the commonest caption": {one: [text] * len(test) for one, text in common.items()}}
        clip = self._clip()
        if clip is not None:
            nearest = nearest_images(self._vectors(clip, train.images), self._vectors(clip, test.images))
            methods["a caption of the nearest photograph, by CLIP"] = {
                one: [train.captions[one][i][0] for i in nearest] for one in self._languages
            }
        return {name: self._score(captions, "test") for name, captions in methods.items()}

    def measure_baseline(self) -> Baseline:
        """The better of the simple methods."""
        measured = {name: metrics[self.metric] for name, metrics in self.measure_baselines().items()}
        best = max(measured, key=measured.__getitem__)
        return Baseline(name=best, metric=self.metric, value=measured[best])

    def _clip(self) -> tuple[CLIP, Callable[[NDArray[np.uint8]], Tensor]] | None:
        """The CLIP model that the recipe starts from, and how it reads images; None if it starts from none."""
        if self._recipe.init.checkpoint is None:
            return None
        model, checkpoint = load_model(self._recipe.init.checkpoint)
        if not isinstance(model, CLIP):
            return None
        preprocessing = checkpoint.image_preprocessing
        assert preprocessing is not None, "a checkpoint of a model of images has it"

        def read(images: NDArray[np.uint8]) -> Tensor:
            resized = np.stack([resize_and_crop(Image.fromarray(image), preprocessing) for image in images])
            return torch.from_numpy(normalize(resized, preprocessing))

        return model, read

    def _vectors(
        self, clip: tuple[CLIP, Callable[[NDArray[np.uint8]], Tensor]], images: NDArray[np.uint8]
    ) -> NDArray[np.float32]:
        """(N, S, S, 3) -> (N, D), of length one."""
        model, read = clip
        return np.concatenate(
            [embed_images(model, read(images[start : start + 500])) for start in range(0, len(images), 500)]
        )

    def evaluation_data(self) -> EvaluationData:
        """The photographs of the test part as the model sees them, and their captions, (N, languages, captions)."""
        test: CaptionedImages = self._splits.test
        count = min(len(several) for one in self._languages for several in test.captions[one])
        captions = [[test.captions[one][i][:count] for one in self._languages] for i in range(len(test))]
        return EvaluationData(
            arrays={
                "images": self._resized(test.images),
                "languages": np.array(self._languages),
                "captions": np.array(captions),
            }
        )

    def _measured_pixels(self, part: Part) -> Tensor:
        if part not in self._pixels:
            images = self._resized(getattr(self._splits, part).images)
            self._pixels[part] = torch.from_numpy(normalize(images, self._preprocessing))
        return self._pixels[part]

    def _resized(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.stack([resize_and_crop(Image.fromarray(image), self._preprocessing) for image in images])

    def _encode(self, texts: Sequence[str], *, cut: bool = False) -> list[list[int]]:
        """The tokens of captions: those that are too long are cut, or left out, as one of them fills up its batch."""
        limit = self._max_length if cut else None
        rows = encode_texts(self.tokenizer, texts, limit, special=False)
        return [row for row in rows if len(row) <= self._max_length]


def score_captions(
    captions: Mapping[str, Sequence[str]], references: Mapping[str, Sequence[Sequence[str]]]
) -> dict[str, float]:
    """`cider`, `bleu` and `meteor` in percent: means over languages, and of each.

    Args:
        captions: One of each image, by language.
        references: Those that people wrote of each image, by language.
    """
    found = {}
    for language, written in captions.items():
        truths = references[language]
        found[f"cider_{language}"] = caption_cider(written, truths)
        found[f"bleu_{language}"] = caption_bleu(written, truths)
        found[f"meteor_{language}"] = caption_meteor(written, truths, language)
    means = {
        name: float(np.mean([found[f"{name}_{language}"] for language in captions]))
        for name in ("cider", "bleu", "meteor")
    }
    return means | found


def _without_padding(read: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor, Tensor | slice]:
    """Cuts what a decoder reads and predicts, (B, T), after the last target; and which places have a target."""
    if predicted.is_meta:  # a run is sized up: there are no values to tell what is padding
        return read, predicted, slice(None)
    places = (predicted != IGNORED).any(dim=0).nonzero()
    length = int(places.max()) + 1 if len(places) else 1  # there may be no target
    return read[:, :length], predicted[:, :length], predicted[:, :length] != IGNORED


def nearest_images(known: NDArray[np.float32], asked: NDArray[np.float32]) -> NDArray[np.int64]:
    """The row of `known`, (N, D), that is nearest to each of `asked`, (M, D), all of length one: (M,)."""
    nearest: NDArray[np.int64] = (asked @ known.T).argmax(axis=1)
    return nearest
