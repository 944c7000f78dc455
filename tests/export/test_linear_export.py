"""A decoder with linear attention from checkpoint to served: its state, prompts in chunks, neighbours, samples."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import loading
from tiny_models import PROVERBS, generation_checkpoint

from headway_export import reference
from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_checkpoint
from headway_export.tracing import trace
from headway_server.bundles import Bundle, Precision, Task
from headway_server.decoding.constraints.grammar import ConstraintRequest
from headway_server.decoding.runner.decoder import PREFILL_CHUNK, DecoderRunner, slot_sizes
from headway_server.decoding.settings import EngineSettings
from headway_server.runtime import Runtime
from headway_server.tasks.generation.model import GenerationModel
from headway_server.tasks.generation.request import GenerationRequest

PROMPTS = ["the early bird", "look before you leap. the pen is mightier than", "z", PROVERBS[:140]]
"""The last one is longer than a chunk."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("linear")
    return generation_checkpoint(folder, "tiny-linear", 60, architecture="linear")


@pytest.fixture(scope="module")
def source(checkpoint):
    return from_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def bundle(source, tmp_path_factory) -> Bundle:
    precisions = (Precision.FP32, Precision.INT8)
    return export(source, ExportOptions(store=tmp_path_factory.mktemp("linear-store"), precisions=precisions))


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(device="cpu", num_threads=1)


def ids_of(source, text: str) -> np.ndarray:
    return np.array(source.tokenizer.encode(text).ids)


def test_the_proof_holds_and_the_state_has_no_positions(bundle):
    fp32 = bundle.manifest.variants[Precision.FP32]
    assert fp32.parity.max_relative_logit_error < 1e-4
    assert fp32.parity.greedy_mismatch_count == 0
    assert {state.update for state in fp32.state} == {"replace"}
    longer = bundle.manifest.limits.model_copy(update={"max_total_tokens": 100_000})
    sizes = [
        slot_sizes(manifest, fp32)
        for manifest in (bundle.manifest, bundle.manifest.model_copy(update={"limits": longer}))
    ]
    assert sizes[0].state_bytes == sizes[1].state_bytes == sizes[1].prefix_slot_bytes  # of two snapshots
    assert sizes[0].state_bytes == 2 * 2 * (4 * 16 * 16 + 3 * 64) * 4  # twice, of 2 layers


def test_a_slot_that_others_have_used_gives_pytorchs_logits(bundle, source, runtime):
    runner = DecoderRunner(runtime, bundle, bundle.manifest.variants[Precision.FP32], num_slots=2)
    assert not runner.keeps_positions
    for prompt in (PROMPTS[3], PROMPTS[0], PROMPTS[2]):
        ids = ids_of(source, prompt)
        for start in range(0, len(ids), PREFILL_CHUNK):
            logits = runner.prefill(1, ids[start : start + PREFILL_CHUNK], start)
        expected = reference.generation_logits(source.module, ids, first=len(ids) - 1)[0]
        assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
    scores = runner.score(1, ids_of(source, PROMPTS[1]), 0)
    expected = reference.generation_logits(source.module, ids_of(source, PROMPTS[1]))
    assert np.abs(scores - expected).max() < 1e-4 * np.abs(expected).max()


async def answer(model, prompts, **options) -> list[str]:
    fields = [f"prompts[{i}]" for i in range(len(prompts))]
    results = await model.generate(prompts, fields=fields, request=GenerationRequest(**options))
    return [result.result.output for result in results.results]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
async def test_texts_are_pytorchs_whatever_their_neighbours_do(bundle, source, runtime, precision):
    settings = EngineSettings(num_slots=3, max_waiting=100)
    model = GenerationModel.load(bundle, runtime, loading(engine=settings, precision=precision))
    model.start()
    greedy = {"parameters": {"temperature": 0.0, "max_new_tokens": 20}}
    alone = [(await answer(model, [prompt], **greedy))[0] for prompt in PROMPTS]
    together = await asyncio.gather(*(answer(model, [prompt], **greedy) for prompt in PROMPTS * 2))
    assert [texts[0] for texts in together] == alone * 2
    assert len(set(alone)) > 1
    drawn = {"parameters": {"temperature": 1.0, "seed": 3, "max_new_tokens": 12}}
    samples = await answer(model, [PROMPTS[0]], sample_count=4, **drawn)
    again = await answer(model, [PROMPTS[0]], sample_count=2, **drawn)
    assert samples[:2] == again
    assert len(set(samples)) > 1
    chosen = {"parameters": {**greedy["parameters"], "constraint": ConstraintRequest(regex="[a-c]{5}")}}
    held = await asyncio.gather(*(answer(model, [prompt], **chosen) for prompt in PROMPTS))
    assert all(set(texts[0]) <= set("abc") for texts in held)
    model.close()
    if precision is Precision.FP32:
        for prompt, text in zip(PROMPTS, alone, strict=True):
            ids = ids_of(source, prompt)
            for _ in range(20):
                logits = reference.generation_logits(source.module, ids, first=len(ids) - 1)[0]
                ids = np.append(ids, logits.argmax())
            assert source.tokenizer.decode(ids[-20:].tolist()) == text


def test_a_head_that_forgets_at_once_is_exported(checkpoint, tmp_path):
    def make():
        module = from_checkpoint(checkpoint).module
        with torch.no_grad():  # the sigmoid of -200 is 0 in float32, and its logarithm must be none
            module.layers[0].attention.decay.bias[0] = -200.0
        return module

    source = dataclasses.replace(from_checkpoint(checkpoint), module=make(), make_reference=make)
    bundle = export(source, ExportOptions(store=tmp_path, precisions=(Precision.FP32,)))
    assert bundle.manifest.variants[Precision.FP32].parity.max_relative_logit_error < 1e-4


def test_there_are_no_attention_weights_to_trace(source):
    with pytest.raises(SourceError, match="has a state in place of attention"):
        trace(source.module, Task.GENERATION, attention=True)
