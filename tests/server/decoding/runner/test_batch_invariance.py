"""Encoded sources and logits of the shipped translators: alone against in batches, bit for bit."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from headway_server.bundles import open_bundle
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import EncoderRunner
from headway_server.runtime import Runtime

MODELS = Path(__file__).parents[4] / "models"
LENGTHS = range(1, 41)  # every remainder, also of vectors of 16 and of the four that a product takes at a time
NUM_STEPS = 9


class Translator:
    """The runners of a shipped model."""

    def __init__(self, name: str, runtime: Runtime, num_slots: int) -> None:
        bundle = open_bundle(MODELS / name / "1")
        _, variant = runtime.choose_variant(bundle.manifest, None)
        self.encoder = EncoderRunner(runtime, bundle, variant)
        self.decoder = DecoderRunner(runtime, bundle, variant, num_slots=num_slots)
        self.tokens = bundle.manifest.special_tokens

    def logits(self, sources, chosen=None, first_slot=0):
        """Decodes greedily in neighbouring slots: logits (steps, R, V) and the tokens that were read (steps, R)."""
        for row, source in enumerate(sources):
            self.decoder.begin(first_slot + row, source)
        self.decoder.set_sources(sources, first_slot)
        read = [np.full(len(sources), self.tokens.bos)]
        found = []
        for step in range(NUM_STEPS):
            token_ids = read[-1] if chosen is None else chosen[step]
            found.append(self.decoder.decode(token_ids, np.full(len(sources), step), first_slot).copy())
            read.append(found[-1].argmax(axis=1))
        return np.stack(found), np.stack(read[:-1])


@pytest.mark.parametrize("name", ["multi30k-de-en", "multi30k-en-de"])
def test_a_sentence_does_not_depend_on_its_neighbours(name):
    rng = np.random.default_rng(5)
    alone = Translator(name, Runtime(device="cpu", num_threads=1), num_slots=1)
    runtime = Runtime(device="cpu", num_threads=2, num_lanes=2)
    together = Translator(name, runtime, num_slots=40)
    inputs = [EncoderInput.of_tokens(np.append(rng.integers(4, 4000, size=length - 1), 3)) for length in LENGTHS]
    expected = []
    for each in inputs:
        [source] = alone.encoder.encode([each])
        # A runner keeps the padding of a longer source before, so each comes after one of another length.
        expected.append((source, *alone.logits([source])))
    for size in (1, 2, 3, 7, 16, 40):
        for shares in (False, True):  # all cores for the run, or one
            rows = rng.permutation(len(inputs))[:size].tolist()
            with runtime.cores.all_busy() if shares else nullcontext():
                sources = together.encoder.encode([inputs[row] for row in rows])
                chosen = np.concatenate([expected[row][2] for row in rows], axis=1)
                logits, _ = together.logits(sources, chosen, first_slot=int(rng.integers(0, 41 - size)))
            for place, row in enumerate(rows):
                for tensor, values in expected[row][0].tensors.items():
                    assert np.array_equal(sources[place].tensors[tensor], values), (LENGTHS[row], size)
                assert np.array_equal(logits[:, place], expected[row][1][:, 0]), (LENGTHS[row], size)
