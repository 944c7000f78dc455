"""Sounds that a model without a decoder reads whole.

N samples, F frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from headway_export import synthetic
from headway_export.candidate import Candidate, run_batch
from headway_export.graphs import StatelessGraph
from headway_export.inputs import NUM_LONG, Draw, apart, evenly
from headway_export.parity import BATCH_SIZES, SEED, Comparison
from headway_export.reference import Reference
from headway_export.run_memory import eager_run_bytes
from headway_export.source import EvaluationData, ExportSource
from headway_export.tasks.stateless import Stateless
from headway_export.tasks.task import NOT_LOOKED_AT
from headway_export.tracing import Traceable, TracedModel, example_of, following_the_protocol, make_spec, trace_graph
from headway_server.batching import Tensors
from headway_server.bundles import Limits, Manifest, SoundPreprocessing, TensorSpec, demanded
from headway_server.preprocessing.sound import SoundReader

_SECONDS: Final = (2.0, 1.0, 0.5)
"""Of the sounds of each compared batch."""
_DRAWN_S: Final = 4.0
"""Of a drawn sound that judges."""


class SoundTask(Stateless):
    """A model of sounds."""

    num_items = (16, 32)
    is_read = False
    names_columns = False
    takes_fixed_scales = False
    shows_no_attention = NOT_LOOKED_AT
    attends_by_operator = False

    def limits(self, module: nn.Module) -> Limits:
        """None: the preprocessing says how long a sound is."""
        return Limits()

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Says how sounds are read."""
        return {"sound": source.sound}

    def trace(self, asked: Traceable) -> TracedModel:
        """Traces the graph, and counts the memory of its run on a window."""
        graph, sound = StatelessGraph(asked.served), asked.sound
        assert sound is not None, "a model of sounds has their preprocessing"
        traced = trace_graph("model", asked.module, graph, [asked.heard], outputs=self.outputs(asked, graph))
        window = np.zeros(sound.window_samples, np.float32)
        shape = SoundReader(sound, None, max_bytes=0).input_of(window)[sound.input_name].shape
        taken = eager_run_bytes(graph, 1, *shape)
        return TracedModel(graphs=(replace(traced, run_bytes=taken),))

    def outputs(self, asked: Traceable, graph: nn.Module) -> list[TensorSpec] | None:
        """Declares what the graph gives; None: it is run to find that out."""
        return None

    def compare(self, candidate: Candidate, reference: Reference, comparison: Comparison) -> None:
        """Compares batches of sounds of several lengths, alike in each."""
        sound, graph = demanded(candidate.source.sound), candidate.open_stateless()
        random = np.random.default_rng(SEED)
        for batch_size, seconds in zip(BATCH_SIZES, _SECONDS, strict=True):
            items = _items_of(sound, _drawn(sound, batch_size, seconds, random))
            for item, found in zip(items, run_batch(graph, items), strict=True):
                answer = partial(reference.outputs, item[sound.input_name])
                comparison.add_outputs(found, f"batch {batch_size} of {seconds:g} s", answer)
            comparison.num_shapes += 1

    def items(self, source: ExportSource, data: EvaluationData) -> Sequence[Tensors]:
        """Not asked for: no metric is measured."""
        raise NotImplementedError(f"{self.task} has no metric")

    def logits(self, candidate: Candidate, data: EvaluationData) -> NDArray[np.float32]:
        """Not asked for: no metric is measured."""
        raise NotImplementedError(f"{self.task} has no metric")

    def draw(self, draw: Draw) -> tuple[list[Any], list[Any]]:
        """Returns sounds that are given or drawn; no scales are taken from them."""
        source, count = draw.source, self.num_inputs(draw.source)
        sound = demanded(source.sound)
        sounds = evenly(source.recordings, count) if source.recordings else None
        items = _items_of(sound, sounds or _drawn(sound, count, _DRAWN_S, draw.generator))
        return apart(items) if source.recordings else (items, items)

    def positions(self, source: ExportSource) -> float:
        """Hundredths of a second of a drawn sound."""
        return _DRAWN_S * 100


class CtcTranscription(SoundTask):
    """Transcripts of sounds, frame by frame."""

    def described(self, source: ExportSource) -> dict[str, Any]:
        """Says how sounds are read, and how frames become tokens."""
        return {**super().described(source), "ctc": source.ctc}

    def outputs(self, asked: Traceable, graph: nn.Module) -> list[TensorSpec]:
        """Logits of each frame, of which there are as many as the model makes."""
        with following_the_protocol(asked.module):
            num_tokens = graph(*example_of([asked.heard]))["logits"].shape[-1]
        return [make_spec("logits", "float32", "batch", "output_frames", num_tokens)]

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how long audio is heard."""
        sound, ctc = demanded(manifest.sound), demanded(manifest.ctc)
        return [
            f"Audio longer than {sound.window_samples / sound.sampling_rate:g} s is read in windows that overlap by "
            f"{2 * ctc.stride_samples / sound.sampling_rate:g} s."
        ]


class AudioClassification(SoundTask):
    """Labels of sounds."""

    num_items = NUM_LONG
    names_columns = True

    def more_limits(self, manifest: Manifest) -> list[str]:
        """Says how long audio is read."""
        sound = demanded(manifest.sound)
        return [f"At most {sound.window_samples / sound.sampling_rate:g} s of an audio are read."]


def _drawn(
    sound: SoundPreprocessing, count: int, seconds: float, generator: np.random.Generator
) -> list[NDArray[np.float32]]:
    """Draws sounds like speech, (N,) each, of one length."""
    length = min(max(int(seconds * sound.sampling_rate), sound.min_samples), sound.window_samples)
    return synthetic.draw_speech(count, sound.sampling_rate, length, generator)


def _items_of(sound: SoundPreprocessing, sounds: Sequence[NDArray[np.float32]]) -> list[Tensors]:
    """Makes the graph's inputs of sounds."""
    reader = SoundReader(sound, None, max_bytes=0)
    return [reader.input_of(one) for one in sounds]
