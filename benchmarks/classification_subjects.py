"""The models that classification is measured on, and what each is asked."""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inputs import HEADLINES
from machine import ROOT
from photographs import as_jpeg, load_photographs
from random_encoders import BERT, VIT, prepare, vocabulary_size
from texts import random_texts

from headway.v1 import image_classification_service_pb2, text_classification_service_pb2

SHIPPED = ("ag-news", "cifar10")
MODELS = (BERT, VIT, *SHIPPED)
_NUM_TEXTS = 256
_NUM_TEXTS_OF_A_TRY = 32
"""With tiny models, where nothing is to be measured."""
_SMALL_SIDE = 64
"""Longer side of the pictures for the shipped model, which reads 32 x 32 pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with its inputs."""

    name: str
    store: Path
    is_big: bool
    source: str
    """Where the inputs come from."""
    inputs: tuple[str | bytes, ...]

    @property
    def bundle(self) -> Path:
        """The bundle's folder."""
        return self.store / self.name / "1"

    @property
    def reads_texts(self) -> bool:
        """Whether inputs are texts, of different lengths."""
        return isinstance(self.inputs[0], str)

    @property
    def method(self) -> str:
        """The RPC."""
        if self.reads_texts:
            return "/headway.v1.TextClassificationService/ClassifyText"
        return "/headway.v1.ImageClassificationService/ClassifyImage"

    def requests(self) -> list[bytes]:
        """A serialized request of one input each; a text past the model's limit may be shortened."""
        return [self._request(value).SerializeToString() for value in self.inputs]

    def _request(self, value: str | bytes) -> Any:
        if isinstance(value, str):
            return text_classification_service_pb2.ClassifyTextRequest(
                model=self.name, texts=[value], top_k=1, truncate=True
            )
        return image_classification_service_pb2.ClassifyImageRequest(model=self.name, images=[value], top_k=1)

    def check(self, response: bytes) -> None:
        """Makes sure that one input was answered with one label."""
        module = text_classification_service_pb2 if self.reads_texts else image_classification_service_pb2
        kind = module.ClassifyTextResponse if self.reads_texts else module.ClassifyImageResponse
        [result] = kind.FromString(response).results
        assert len(result.labels) == 1, response


def load_subjects(size: str, scratch: Path) -> list[Subject]:
    """Returns both random models, made where they are missing, and the shipped ones.

    Args:
        size: `base` or `tiny`.
        scratch: Folder for what is made.
    """
    store = prepare(size, scratch)
    source, photographs = load_photographs()
    news_source, news = _news()
    num_texts = _NUM_TEXTS if size == "base" else _NUM_TEXTS_OF_A_TRY
    news = news[:num_texts]
    small = tuple(as_jpeg(photograph, _SMALL_SIDE) for photograph in photographs)
    texts = tuple(random_texts(vocabulary_size(size), num_texts, seed=3))
    return [
        Subject(
            name=BERT,
            store=store,
            is_big=True,
            source=f"{len(texts)} texts of random words, as long as AG News",
            inputs=texts,
        ),
        Subject(name=VIT, store=store, is_big=True, source=source, inputs=photographs),
        Subject(name="ag-news", store=ROOT / "models", is_big=False, source=news_source, inputs=news),
        Subject(
            name="cifar10",
            store=ROOT / "models",
            is_big=False,
            source=f"the same, longer side {_SMALL_SIDE}",
            inputs=small,
        ),
    ]


def _news() -> tuple[str, tuple[str, ...]]:
    named = os.environ.get("HEADWAY_DATA_DIR")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    file = next(iter(sorted(folder.glob("ag_news/test*.csv.gz"))), None)
    if file is None:
        return "headlines written for this benchmark", HEADLINES
    with gzip.open(file, "rt", encoding="utf-8", newline="") as rows:
        texts: Sequence[str] = [f"{title} {text}" for _, title, text in csv.reader(rows)]
    stride = len(texts) // _NUM_TEXTS
    return f"texts of {file.parent.name}/{file.name}", tuple(texts[::stride][:_NUM_TEXTS])
