"""Detector of the caller's labels that reads these as one text together with an image.

What is encoded of an image alone is cached; the rest is computed for each image and set of labels.

N places of an image's maps of features, T tokens of a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from headway_server.batching import Batcher, Tensors
from headway_server.bundles import TOKENIZER_FILE, Bundle, Manifest, demanded
from headway_server.errors import InvalidInputError
from headway_server.observers import NO_OBSERVER, ModelId, Observer
from headway_server.preprocessing.text import TextTokenizer
from headway_server.runtime import Runtime
from headway_server.serving.answers import Answer
from headway_server.serving.calls import counted_tokens, current_caller
from headway_server.serving.images import SentImage
from headway_server.serving.limits import check_texts
from headway_server.settings import ServerSettings
from headway_server.tasks.detection.model import MAX_LABELS, DetectedObjects, DetectionParameters, ObjectDetector
from headway_server.tasks.detection.objects import (
    BOXES,
    FEATURES,
    TOKEN_LOGITS,
    join_labels,
    label_logits,
)
from headway_server.tasks.images.labels import check_given
from headway_server.tasks.images.model import Images, SeenImage
from headway_server.tasks.text.model import text_graph, text_tensors

_MAX_RUN_BYTES: Final = 2**26
"""Maximum bytes of features of a batch of the decoder."""
_COPIED_VALUES: Final = 2**20
"""Stands for reading features off the event loop."""


class JoinedDetector(ObjectDetector):
    """Finds objects of the caller's labels in images."""

    _memory_noun = "features"
    _tokenizer: TextTokenizer
    _decoder: Batcher
    _max_text_bytes: int

    @classmethod
    def load(cls, bundle: Bundle, runtime: Runtime, settings: ServerSettings, observer: Observer = NO_OBSERVER) -> Self:
        """Loads both graphs, and runs the second once on the largest image; errors are those of `ImageModel.load`."""
        detector = super().load(bundle, runtime, settings, observer)
        manifest = bundle.manifest
        _, variant = runtime.choose_variant(manifest, settings.precision)
        graph = text_graph(
            runtime.with_lanes(1).open(bundle, variant.graphs["decoder"]), manifest.special_tokens
        )  # a run needs most of the memory, and all cores
        blank = detector.blank_outputs()
        prompt, scheme = demanded(demanded(manifest.detection).prompt), demanded(manifest.detection)
        ids = join_labels([np.zeros(1, np.int64)], prompt)
        item = {**blank, **text_tensors(ids)}
        count = scheme.num_queries
        max_padding = graph.warm_up(item, 1, {TOKEN_LOGITS: (count, len(ids)), BOXES: (count, 4)})
        detector.decode_by(
            TextTokenizer.load(bundle.file(TOKENIZER_FILE)),
            Batcher(
                graph,
                budget=max(1, _MAX_RUN_BYTES // blank[FEATURES].nbytes),
                model=ModelId(name=manifest.name, version=manifest.version),
                session=graph.session,
                max_padding=max_padding,
                observer=observer,
            ),
            max_text_bytes=settings.max_text_bytes,
        )
        return detector

    def decode_by(self, tokenizer: TextTokenizer, decoder: Batcher, *, max_text_bytes: int) -> None:
        """Takes what reads labels and what finds objects, whose life is the model's."""
        self._tokenizer, self._decoder, self._max_text_bytes = tokenizer, decoder, max_text_bytes
        self.workers += [decoder]

    @classmethod
    def _cache_mib(cls, settings: ServerSettings) -> int:
        return settings.max_image_embeddings_mib

    @classmethod
    def _expected(cls, manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
        outputs = next(iter(manifest.variants.values())).graphs["model"].outputs
        return {spec.name: tuple(axis if isinstance(axis, int) else -1 for axis in spec.shape[1:]) for spec in outputs}

    def _reduce(self, row: Tensors, image: SeenImage) -> Tensors:  # noqa: ARG002
        """Copies the features, which outlast the batch."""
        return {name: values.copy() for name, values in row.items()}

    async def detect(
        self, images: Images, parameters: DetectionParameters, *, deadline: float | None
    ) -> Answer[DetectedObjects]:
        """Finds objects; arguments are those of `ObjectDetector.detect`.

        Raises:
            RequestError: There are no labels, one is empty, repeated or has a token that separates labels, together
                they are too long, the images cannot be read or are too thin, the queue is full, the deadline passed,
                the server is draining.
        """
        labels = tuple(parameters.labels)
        check_given(labels, MAX_LABELS, owner=self.bundle.manifest.name)
        tokens = await self._read_labels(labels)
        lengths = [len(ids) for ids in tokens]
        text = text_tensors(join_labels(tokens, demanded(demanded(self.bundle.manifest.detection).prompt)))

        def keep(row: Tensors, image: SeenImage) -> tuple[Tensors, SeenImage]:
            return row, image

        encoded = await self._answer(images, self._outputs, keep, deadline, num_labels=_COPIED_VALUES)
        features = [row[FEATURES] for row, _ in encoded.results]
        for index, one in enumerate(features):
            self._check_places(images, index, len(one), encoded.results[index][1])

        def read(row: Tensors, index: int) -> DetectedObjects:
            logits = label_logits(row[TOKEN_LOGITS], lengths)
            return self._read(logits, row[BOXES], encoded.results[index][1], parameters, names=labels)

        caller = current_caller()
        with (
            self._memory.admit(len(features), sum(one.nbytes for one in features), caller=caller),
            counted_tokens(len(text["input_ids"])),
        ):
            found = await self._decoder.submit(
                [{**row, **text} for row, _ in encoded.results],
                [1] * len(features),
                outputs=(TOKEN_LOGITS, BOXES),
                read=read,
                deadline=deadline,
                caller=caller,
                groups=[one.shape for one in features],  # padding would be places of the image
            )
        return Answer(results=found.results, timings=encoded.timings)

    async def _read_labels(self, labels: Sequence[str]) -> list[NDArray[np.int64]]:
        """Tokenizes labels in lower case, as transformers does.

        Raises:
            InvalidInputError: One is empty or has a separator, or together they are too long.
        """
        fields = check_texts("labels", labels, MAX_LABELS, self._max_text_bytes)
        splitting = demanded(demanded(self.bundle.manifest.detection).prompt).splitting
        limit = demanded(self.bundle.manifest.limits.max_input_tokens)
        tokens, total = list[NDArray[np.int64]](), 2
        each = self._tokenizer.encode_each([label.strip().lower() for label in labels], add_special_tokens=False)
        async with aclosing(each):
            async for text in each:
                field, ids = fields[len(tokens)], text.input_ids
                if not len(ids):
                    raise InvalidInputError(field, "has no text; give it at least one word")
                if (found := next((index for index in ids.tolist() if index in splitting), None)) is not None:
                    raise InvalidInputError(
                        field,
                        f"has {self._tokenizer.piece(found)!r}, which separates labels; leave it out, or give a label "
                        "for each part",
                    )
                total += len(ids) + 1
                if total > limit:
                    raise InvalidInputError(
                        "labels",
                        f"have {total} tokens up to {field}, with one behind each and two around all, the limit is "
                        f"{limit}; leave some out, or shorten them",
                    )
                tokens.append(ids)
        return tokens

    def _check_places(self, images: Images, index: int, num_places: int, image: SeenImage) -> None:
        """Checks that an image has a place for each box.

        Raises:
            InvalidInputError: It does not.
        """
        count = demanded(self.bundle.manifest.detection).num_queries
        if num_places < count:
            one = images[index]
            field = one.field if isinstance(one, SentImage) else f"images[{index}]"
            raise InvalidInputError(
                field,
                f"is {image.width} x {image.height}, too thin: resized it has {num_places} places, and the model "
                f"chooses {count} of them; crop it, or fill it up",
            )
