"""A variant that has been written but not proved yet, opened through the runners that serve.

N images, T tokens, S source tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from headway_export.errors import SourceError
from headway_export.source import EvaluationData, ExportSource, Readable
from headway_export.spool import spooled, zeros_on_disk
from headway_server.batching import BatchGraph, Tensors
from headway_server.bundles import IMAGE_EMBEDDINGS, Bundle, Precision, Variant
from headway_server.bundles.chain import DECODING_AXES, chain_width, verifying_axes
from headway_server.decoding.interfaces import EncoderInput, PromptMedia
from headway_server.decoding.runner.decoder import DecoderRunner, slot_sizes
from headway_server.decoding.runner.encoder import CrossTensors, EncoderRunner
from headway_server.decoding.runner.state import SlotState, fixed_size
from headway_server.decoding.speculation.verifier import Verifier
from headway_server.preprocessing.audio import LogMel
from headway_server.preprocessing.image import normalize
from headway_server.preprocessing.sound import SoundReader
from headway_server.preprocessing.tiles import Grid
from headway_server.runtime import Runtime, Session, give_back_memory
from headway_server.tasks.prompt_images import blocks_of, grid_offsets
from headway_server.tasks.text.model import text_graph
from headway_training.data.audio import to_float

NUM_ROWS = 32
"""Of evaluation data that are decoded or run together, at most."""
_MOST_SCORES = 3 << 23
"""Attention scores of a head that an encoder computes together: of two windows of Whisper, 3,000 frames each."""
_LEAST_ROW_BYTES = 1 << 28
"""That rows which are decoded together may take, however few weights the model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A variant in a staged bundle, with the module it was made from."""

    source: ExportSource
    bundle: Bundle
    precision: Precision
    variant: Variant
    runtime: Runtime

    @property
    def vocab_size(self) -> int:
        """Logits after a token."""
        (size,) = (fixed_size(spec, -1) for spec in self.variant.graphs["decoder"].outputs if spec.name == "logits")
        return size

    def open_decoder(
        self,
        num_slots: int,
        *,
        max_length: int | None = None,
        sources: Sequence[CrossTensors] = (),
        session: Session | None = None,
    ) -> DecoderRunner:
        """Opens the decoder. Its cache takes memory at once; what it reads of sources is packed in temporary files.

        Args:
            num_slots: Rows that are decoded together.
            max_length: Positions of a slot; None: those of the bundle.
            sources: Encoded sources, of which there is room for the longest; none: for the bundle's longest.
            session: An open session of the decoder (`open_session`).
        """
        bundle = self._limited(max_length, sources)
        allocate = partial(zeros_on_disk, folder=self.bundle.path)
        return DecoderRunner(
            self.runtime, bundle, self.variant, num_slots=num_slots, sharing=session, allocate=allocate
        )

    def open_session(self) -> Session:
        """Opens the decoder's graph for runners of several sizes."""
        return self.runtime.open(self.bundle, self.variant.graphs["decoder"], fixed_axes=DECODING_AXES)

    def affordable_rows(self, most: int, *, max_length: int | None = None, sources: Sequence[CrossTensors] = ()) -> int:
        """Returns how many of `most` rows can be decoded together, 1 at least.

        Their state and sources take no more memory than the weights in fp32, or 256 MiB. The other arguments are those
        of `open_decoder`.
        """
        sizes = slot_sizes(self._limited(max_length, sources).manifest, self.variant)
        weights = sum(parameter.nbytes for parameter in self.source.module.parameters())
        return max(1, min(most, max(weights, _LEAST_ROW_BYTES) // (sizes.state_bytes + sizes.source_bytes)))

    def _limited(self, max_length: int | None, sources: Sequence[CrossTensors]) -> Bundle:
        """Returns the bundle with lengths that are enough."""
        lengths = {"max_total_tokens": max_length} if max_length is not None else {}
        if sources:
            lengths["max_input_tokens"] = max(source.num_positions for source in sources)
        limits = self.bundle.manifest.limits.model_copy(update=lengths)
        return replace(self.bundle, manifest=self.bundle.manifest.model_copy(update={"limits": limits}))

    def open_encoder(self) -> EncoderRunner:
        """Opens the encoder of a translation model."""
        return EncoderRunner(self.runtime, self.bundle, self.variant)

    def encode(self, batches: Iterable[Sequence[Readable]]) -> list[list[CrossTensors]]:
        """Encodes batches of sources, as `encode_sources` does, before the decoder is opened.

        What a decoder reads of them is kept on disk: 35 MiB of a window of Whisper base.
        """
        encoder = self.open_encoder()
        return [encode_sources(encoder, batch, self.bundle.path) for batch in batches]

    def embed_tiles(self, images: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """Embeds the tiles of prompts' images, (N, 3, height, width) each, one tile after another: (N, M, D) each."""
        graph = BatchGraph(self.runtime.open(self.bundle, self.variant.graphs["image_encoder"]))
        return [
            np.stack([run_batch(graph, [{"pixel_values": tile}])[0][IMAGE_EMBEDDINGS] for tile in tiles])
            for tiles in images
        ]

    def open_attention(self) -> BatchGraph:
        """Opens the graph of the attention weights."""
        return BatchGraph(self.runtime.open(self.bundle, self.variant.graphs["attention"]))

    def open_stateless(self) -> BatchGraph:
        """Opens the graph of a model without state."""
        session = self.runtime.open(self.bundle, self.variant.graphs["model"])
        if self.source.image_preprocessing is not None or self.source.sound is not None:
            return BatchGraph(session)
        return text_graph(session, self.source.special_tokens)


def run_batch(graph: BatchGraph, items: Sequence[Tensors]) -> list[dict[str, NDArray[Any]]]:
    """Runs items of any sizes in one batch and returns all outputs of each, as a server does."""
    return graph.split(graph.session.run(graph.collate(items)), items)


def verifying_width(candidate: Candidate) -> int:
    """Returns the tokens that a decoder's graph verifies at once; 1 if it verifies none."""
    return chain_width(candidate.variant.graphs["decoder"], candidate.variant.state[0].present)


def open_verifier(candidate: Candidate, state: SlotState) -> Verifier | None:
    """Opens a decoder's graph to verify drafts in slots that its decoding has filled; None if it cannot."""
    graph = candidate.variant.graphs["decoder"]
    width = verifying_width(candidate)
    if width == 1:
        return None
    session = candidate.runtime.open(candidate.bundle, graph, fixed_axes=verifying_axes(width), in_lanes=False)
    return Verifier(session, state, width=width, vocab_size=candidate.vocab_size)


def encode_sources(encoder: EncoderRunner, sources: Sequence[Readable], folder: Path) -> list[CrossTensors]:
    """Encodes sentences, int64 (S,) each, images or audio in one batch, or in several if these are long.

    Images are float32 (3, height, width) each, and windows of audio float32, features of two axes or samples (N,).

    Args:
        encoder: The encoder.
        sources: The sources.
        folder: Where temporary files are made of what a decoder reads of them.
    """
    inputs = [EncoderInput(named_source(one), 1) for one in sources]
    longest = max(max(tensor.shape) for one in inputs for tensor in one.tensors.values())
    rows = max(1, _MOST_SCORES // longest**2)
    encoded: list[CrossTensors] = []
    for start in range(0, len(inputs), rows):
        part = encoder.encode(inputs[start : start + rows])
        encoded += [replace(each, tensors=spooled(each.tensors, folder)) for each in part]
        del part
        give_back_memory()
    return encoded


def media_of(
    source: ExportSource,
    token_ids: NDArray[np.int64],
    images: NDArray[np.float32],
    embeddings: NDArray[np.float32],
    num_given: int | None = None,
) -> PromptMedia:
    """Puts the embeddings of tiles, (N, M, D), in their places in a text, (T,).

    The first `num_given` tokens are the prompt; None: all.
    """
    assert source.image_prompt is not None, "a model of images says how they stand in prompts"
    positions = np.flatnonzero(token_ids == source.image_prompt.token)
    offsets = None
    if source.image_prompt.positions == "grid":
        offsets = grid_offsets(len(token_ids), positions, [Grid(tile.shape[1], tile.shape[3]) for tile in images])
    rows = tuple(row for tile in embeddings for row in tile)
    blocks = blocks_of(source.image_prompt, positions, len(token_ids) if num_given is None else num_given)
    return PromptMedia(positions, rows, (b"",) * len(positions), offsets, blocks)


def named_source(source: Readable) -> Tensors:
    """Returns what an encoder reads by the name that its graph gives it."""
    if isinstance(source, Mapping):
        return dict(source)
    one_axis = "input_ids" if source.dtype.kind == "i" else "input_values"
    return {{1: one_axis, 2: "input_features", 3: "pixel_values"}[source.ndim]: source}


def audio_reader(source: ExportSource) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Returns what makes the encoder's input of the samples of a window, (N,), as a server does."""
    if (sound := source.sound) is not None:
        reader = SoundReader(sound, None, max_bytes=0)
        return lambda samples: reader.input_of(samples)[sound.input_name]
    assert source.audio_preprocessing is not None, "a model of audio has its preprocessing"
    return LogMel(source.audio_preprocessing).features


def features_of(source: ExportSource, data: EvaluationData, rows: slice) -> list[NDArray[np.float32]]:
    """Makes a model's input of recordings, as a server does.

    Raises:
        SourceError: They have another rate than the model hears, or one is longer than a window.
    """
    audio = source.audio_preprocessing or source.sound
    assert audio is not None, "a model of audio has its preprocessing"
    if data.rate != audio.sampling_rate:
        raise SourceError(
            f"{data.dataset}: its recordings have {data.rate} samples a second, and {source.name} hears "
            f"{audio.sampling_rate}; resample them"
        )
    if (longest := max(map(len, data.recordings))) > audio.window_samples:
        raise SourceError(
            f"{data.dataset}: a recording has {longest / data.rate:.1f} s, and {source.name} hears "
            f"{audio.window_samples / audio.sampling_rate:g} s at once; cut it"
        )
    read = audio_reader(source)
    return [read(to_float(one)) for one in data.recordings[rows]]


def open_sources(runner: DecoderRunner, sources: Sequence[CrossTensors]) -> None:
    """Lets encoded sentences or images begin in the slots from 0 on."""
    runner.set_sources(sources)
    for slot, source in enumerate(sources):
        runner.begin(slot, source)


def pixel_values_of(source: ExportSource, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Makes a model's input of pixels of the right size, as a server does.

    (N, height, width, 3) -> (N, 3, height, width) float32.
    """
    assert source.image_preprocessing is not None, "an image model has its preprocessing"
    return np.stack([normalize(Image.fromarray(image), source.image_preprocessing) for image in images])
