"""Graphs at sizes that the trace never saw, held against PyTorch's whole computation."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from torch import nn

from headway_export import reference
from headway_export.parity import check_ranking
from headway_export.source import from_checkpoint
from headway_server.bundles import Bundle, Precision, Task, open_bundle
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import EncoderRunner
from headway_server.runtime import Runtime

BOS = 1


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(device="cpu")


def _decoder(runtime: Runtime, bundle: Bundle, precision: Precision = Precision.FP32, num_slots: int = 8):
    return DecoderRunner(runtime, bundle, bundle.manifest.variants[precision], num_slots=num_slots)


def _relative_error(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.fixture(scope="module", params=["usual", "llama"])
def generator_model(request: pytest.FixtureRequest) -> tuple[Bundle, nn.Module]:
    """A text model with the parts of a GPT-2, and one with those of a Llama: its bundle, and the module."""
    if request.param == "llama":
        folder, checkpoint = request.getfixturevalue("llama_store") / "tiny-llama" / "1", "llama_checkpoint"
        return open_bundle(folder), from_checkpoint(request.getfixturevalue(checkpoint)).module
    checkpoints = request.getfixturevalue("tiny_checkpoints")
    bundle = open_bundle(request.getfixturevalue("tiny_store") / "tiny-generation" / "1")
    return bundle, from_checkpoint(checkpoints["generation"]).module


@pytest.mark.parametrize("length", [1, 2, 3, 6, 17, 64, 127, 128, 129, 160])
def test_a_prompt_of_any_length_gives_pytorchs_logits(generator_model, runtime, length):
    bundle, module = generator_model
    runner = _decoder(runtime, bundle)
    ids = np.random.default_rng(length).integers(0, runner.vocab_size, length)
    scores = np.concatenate([runner.score(3, ids[at : at + 128], at) for at in range(0, length, 128)])
    assert _relative_error(scores, reference.generation_logits(module, ids)) < 1e-4


def test_prompts_in_chunks_and_ragged_decoding_give_pytorchs_logits(generator_model, runtime):
    bundle, module = generator_model
    runner = _decoder(runtime, bundle)
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, runner.vocab_size, length) for length in (1, 131, 40)]
    for slot, row in enumerate(rows):
        for start in range(0, len(row), runner.prefill_chunk):
            runner.prefill(slot, row[start : start + runner.prefill_chunk], start)
    for _ in range(5):
        tokens = generator.integers(0, runner.vocab_size, len(rows))
        logits = runner.decode(tokens, np.array([len(row) for row in rows]))
        rows = [np.append(row, token) for row, token in zip(rows, tokens, strict=True)]
        for row, found in zip(rows, logits, strict=True):
            assert _relative_error(found, reference.generation_logits(module, row)[-1]) < 1e-4


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_a_row_answers_bit_for_bit_the_same_alone_and_among_others(generator_model, runtime, precision):
    runner = _decoder(runtime, generator_model[0], precision)
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, runner.vocab_size, length) for length in (30, 7, 55, 12)]
    for slot, prompt in enumerate(prompts):
        runner.prefill(slot, prompt, 0)
    together = runner.decode(np.arange(4), np.array([len(prompt) for prompt in prompts])).copy()
    for row, prompt in enumerate(prompts):
        runner.prefill(0, prompt, 0)
        alone = runner.decode(np.array([row]), np.array([len(prompt)]))
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_a_moved_slot_goes_on_where_it_was(generator_model, runtime, precision):
    runner = _decoder(runtime, generator_model[0], precision)
    prompt = np.arange(20)
    runner.prefill(5, prompt, 0)
    runner.prefill(0, prompt, 0)
    expected = runner.decode(np.array([3]), np.array([20])).copy()
    runner.prefill(0, prompt[::-1].copy(), 0)
    runner.move(5, 0, 20)
    np.testing.assert_array_equal(runner.decode(np.array([3]), np.array([20])), expected)


def test_the_cache_of_a_llama_has_its_key_and_value_heads_and_its_rotations_are_not_rounded(llama_store):
    bundle = open_bundle(llama_store / "tiny-llama" / "1")
    for precision, variant in bundle.manifest.variants.items():
        graph = variant.graphs["decoder"]
        past = next(spec for spec in graph.inputs if spec.name == "past_key_0")
        assert (past.dtype, past.shape[1]) == ("int8" if precision is Precision.INT8 else "float32", 1)
        initializers = ir.load(bundle.path / graph.file).graph.initializers.values()
        tables = [value.const_value for value in initializers if len(value.const_value.shape) == 3]
        assert [(table.dtype, list(table.shape)) for table in tables] == [(ir.DataType.FLOAT, [160, 2, 8])]


def test_translations_of_ragged_sources_give_pytorchs_logits(tiny_store, tiny_checkpoints, runtime):
    module = from_checkpoint(tiny_checkpoints["translation"]).module
    bundle = open_bundle(tiny_store / "tiny-translation" / "1")
    runner = _decoder(runtime, bundle)
    encoder = EncoderRunner(runtime, bundle, bundle.manifest.variants[Precision.FP32])
    generator = np.random.default_rng(2)
    sources = [generator.integers(4, runner.vocab_size, length) for length in (1, 9, 24)]
    runner.set_sources(encoder.encode([EncoderInput.of_tokens(source) for source in sources]))
    targets = [np.array([BOS])] * 3
    for position in range(6):
        logits = runner.decode(np.array([row[-1] for row in targets]), np.full(3, position))
        for source, target, found in zip(sources, targets, logits, strict=True):
            assert _relative_error(found, reference.translation_logits(module, source, target)[-1]) < 1e-4
        targets = [np.append(row, token) for row, token in zip(targets, logits.argmax(axis=-1), strict=True)]


def test_several_rows_may_read_one_source(tiny_store, tiny_checkpoints, runtime):
    """Beams of a sentence are neighbouring rows that share its cross-attention tensors."""
    module = from_checkpoint(tiny_checkpoints["translation"]).module
    bundle = open_bundle(tiny_store / "tiny-translation" / "1")
    runner = _decoder(runtime, bundle)
    encoder = EncoderRunner(runtime, bundle, bundle.manifest.variants[Precision.FP32])
    generator = np.random.default_rng(3)
    sources = [generator.integers(4, runner.vocab_size, length) for length in (11, 4)]
    runner.set_sources(encoder.encode([EncoderInput.of_tokens(source) for source in sources]))
    tokens = generator.integers(4, runner.vocab_size, 6)
    logits = runner.decode(tokens, np.zeros(6, np.int64))
    for row, token in enumerate(tokens):
        expected = reference.translation_logits(module, sources[row // 3], np.array([token]))[-1]
        assert _relative_error(logits[row], expected) < 1e-4


def test_a_manifest_names_the_highest_opset_of_its_graphs(tiny_store):
    found = {}
    for folder in Path(tiny_store).glob("*/1"):
        bundle = open_bundle(folder)
        opsets = {ir.load(file).graph.opset_imports[""] for file in folder.rglob("*.onnx")}
        assert bundle.manifest.opset == max(opsets)
        found[bundle.manifest.task] = opsets
    assert found[Task.GENERATION] == {21, 24}
    assert found[Task.IMAGE_CLASSIFICATION] == {21}


def test_graphs_carry_no_traces_of_the_machine_that_made_them(tiny_store):
    for file in Path(tiny_store).rglob("*.onnx"):
        content = file.read_bytes()
        assert b"site-packages" not in content
        assert b"headway_export" not in content


def test_a_decoder_of_translations_ranks_its_own_logits(tiny_store, runtime):
    bundle = open_bundle(tiny_store / "tiny-translation" / "1")
    generator = np.random.default_rng(4)
    for precision in (Precision.FP32, Precision.INT8):
        runner = _decoder(runtime, bundle, precision)
        encoder = EncoderRunner(runtime, bundle, bundle.manifest.variants[precision])
        sources = [generator.integers(4, runner.vocab_size, length) for length in (1, 9, 24)]
        runner.set_sources(encoder.encode([EncoderInput.of_tokens(source) for source in sources]))
        for position, count in enumerate((1, 8, 8, 1, runner.vocab_size)):
            tokens = generator.integers(4, runner.vocab_size, 3)
            logits = runner.decode(tokens, np.full(3, position), num_likeliest=count)
            assert runner.ranking is not None
            assert runner.ranking.token_ids.shape == (3, count)
            check_ranking(runner.ranking, logits, f"step {position}")
