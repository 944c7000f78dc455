"""A recurrent encoder-decoder from checkpoint to served: the graphs, the state, the engine, the alignments."""

import asyncio
import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from loading import loading
from naive_beam_search import beam_search
from random_searches import differences, is_close_call, random_search, reference_config
from tiny_engine import make_sequence, running_engine
from tiny_recurrent import recurrent_checkpoint

from headway_export import reference
from headway_export.candidate import open_sources
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_checkpoint
from headway_server.bundles import Bundle, Precision
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import EncoderRunner
from headway_server.decoding.settings import EngineSettings
from headway_server.runtime import Runtime
from headway_server.tasks.text_to_text.request import TextToTextRequest
from headway_server.tasks.text_to_text.translation import TranslationModel
from headway_training.evaluation import pad, token_mask, translate_greedily

BOS, EOS = 1, 2
PRECISIONS = [Precision.FP32, Precision.INT8]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoints, tmp_path_factory) -> Path:
    return recurrent_checkpoint(tmp_path_factory.mktemp("recurrent"), tiny_checkpoints["translation"])


@pytest.fixture(scope="module")
def bundle(checkpoint, tmp_path_factory) -> Bundle:
    options = ExportOptions(store=tmp_path_factory.mktemp("recurrent-store"), precisions=tuple(PRECISIONS))
    return export(from_checkpoint(checkpoint), options)


@pytest.fixture(scope="module")
def module(checkpoint) -> torch.nn.Module:
    return from_checkpoint(checkpoint).module


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(device="cpu", num_threads=1)


@pytest.fixture(scope="module")
def texts(checkpoint) -> list[str]:
    lines = (checkpoint / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["source"] for line in lines][:40]


def runners(runtime, bundle, precision=Precision.FP32, num_slots=8):
    variant = bundle.manifest.variants[precision]
    return DecoderRunner(runtime, bundle, variant, num_slots=num_slots), EncoderRunner(runtime, bundle, variant)


def random_sources(seed, *lengths):
    generator = np.random.default_rng(seed)
    return [np.append(generator.integers(4, 24, length - 1), EOS) for length in lengths]


def relative_error(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


def test_the_model_has_learned_and_every_variant_keeps_it(bundle):
    values = {name: variant.quality.value for name, variant in bundle.manifest.variants.items()}
    assert values[Precision.FP32] > 90
    assert values[Precision.INT8] > values[Precision.FP32] - 0.5
    assert bundle.manifest.variants[Precision.FP32].parity.max_relative_logit_error < 1e-4
    assert bundle.manifest.variants[Precision.INT8].agreement.figures["top_agreement"] > 0.95


def test_without_evaluation_data_int8_is_held_to_what_fp32_writes(checkpoint, tmp_path):
    source = dataclasses.replace(from_checkpoint(checkpoint), evaluation=None)
    bundle = export(source, ExportOptions(store=tmp_path, precisions=tuple(PRECISIONS)))
    agreed = bundle.manifest.variants[Precision.INT8].agreement
    assert (agreed.dataset, agreed.example_count, agreed.calibrated_on) == ("generated", 64, None)
    assert 0 < agreed.figures["mean_kl_divergence"] < agreed.limits["mean_kl_divergence"]


def test_the_manifest_says_what_kind_of_state_it_is_and_what_it_begins_with(bundle):
    (state,) = bundle.manifest.variants[Precision.FP32].state
    assert (state.update, state.initial) == ("replace", "initial_state_0")
    assert bundle.manifest.variants[Precision.FP32].alignment_layer == 0
    decoder = bundle.manifest.variants[Precision.FP32].graphs["decoder"]
    assert {spec.name: spec.shape for spec in decoder.inputs}["input_ids"] == ("slots", 1)
    assert bundle.manifest.opset == 21


@torch.inference_mode()
def test_steps_of_ragged_sources_give_the_logits_of_the_training_forward(bundle, module, runtime):
    decoder, encoder = runners(runtime, bundle)
    sources = random_sources(0, 2, 9, 24)
    open_sources(decoder, encoder.encode([EncoderInput.of_tokens(source) for source in sources]))
    targets = [np.array([BOS])] * 3
    for position in range(8):
        logits = decoder.decode(np.array([row[-1] for row in targets]), np.full(3, position))
        for source, target, found in zip(sources, targets, logits, strict=True):
            ids = torch.from_numpy(source)[None]
            expected = module(ids, torch.ones_like(ids), torch.from_numpy(target)[None])[0, -1]
            assert relative_error(found, expected.numpy()) < 1e-4
        targets = [np.append(row, token) for row, token in zip(targets, logits.argmax(axis=-1), strict=True)]


def test_a_sentence_that_was_moved_or_copied_goes_on_where_it_was(bundle, runtime):
    decoder, encoder = runners(runtime, bundle)
    encoded = encoder.encode([EncoderInput.of_tokens(source) for source in random_sources(1, 7, 7)])
    open_sources(decoder, encoded)
    decoder.decode(np.array([BOS, BOS]), np.zeros(2, np.int64))
    expected = decoder.decode(np.array([5, 6]), np.ones(2, np.int64)).copy()
    open_sources(decoder, encoded)
    decoder.decode(np.array([BOS, BOS]), np.zeros(2, np.int64))
    decoder.copy(1, 5, 1)
    decoder.move(0, 1, 1)
    decoder.move(5, 0, 1)
    decoder.set_sources(encoded[::-1])
    found = decoder.decode(np.array([6, 5]), np.ones(2, np.int64))
    np.testing.assert_array_equal(found, expected[::-1])


def test_several_rows_may_read_one_source(bundle, module, runtime):
    decoder, encoder = runners(runtime, bundle)
    sources = random_sources(2, 11, 4)
    encoded = encoder.encode([EncoderInput.of_tokens(source) for source in sources])
    decoder.set_sources(encoded)
    for slot in range(6):
        decoder.begin(slot, encoded[slot // 3])
    tokens = np.random.default_rng(2).integers(4, decoder.vocab_size, 6)
    logits = decoder.decode(tokens, np.zeros(6, np.int64))
    for row, token in enumerate(tokens):
        expected = reference.translation_logits(module, sources[row // 3], np.array([token]))[-1]
        assert relative_error(logits[row], expected) < 1e-4


@pytest.mark.parametrize("precision", PRECISIONS)
def test_alignments_are_pytorchs_attention_and_sum_to_one(bundle, module, runtime, precision):
    decoder, encoder = runners(runtime, bundle, precision)
    (source,) = random_sources(3, 9)
    (encoded,) = encoder.encode([EncoderInput.of_tokens(source)])
    token_ids = np.array([BOS, 15, 17, 20, 11])
    found = decoder.align(2, encoded, token_ids)
    np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-6)
    with torch.inference_mode():
        ids = torch.from_numpy(source)[None]
        cross, (first,) = module.encode_source(ids, torch.ones_like(ids))
        states, expected = (first[:, None],), []
        for token in token_ids:
            _, states, weights = module.step(torch.tensor([[token]]), states, cross, torch.ones_like(ids))
            expected.append(weights[0, 0].numpy())
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-5 if precision is Precision.FP32 else 0.1)


def test_aligning_leaves_the_running_sentences_alone(bundle, runtime):
    decoder, encoder = runners(runtime, bundle)
    encoded = encoder.encode([EncoderInput.of_tokens(source) for source in random_sources(4, 6, 12)])
    open_sources(decoder, encoded)
    decoder.decode(np.array([BOS, BOS]), np.zeros(2, np.int64))
    expected = decoder.decode(np.array([5, 6]), np.ones(2, np.int64)).copy()
    open_sources(decoder, encoded)
    decoder.decode(np.array([BOS, BOS]), np.zeros(2, np.int64))
    decoder.align(4, encoded[0], np.array([BOS, 9, 8]))
    np.testing.assert_array_equal(decoder.decode(np.array([5, 6]), np.ones(2, np.int64)), expected)


async def served(model, texts):
    return (await model.write(texts, request=TextToTextRequest())).results


async def test_served_translations_equal_pytorchs_alone_and_in_a_batch(bundle, checkpoint, module, runtime, texts):
    settings = EngineSettings(num_slots=5, max_waiting=300)
    model = TranslationModel.load(bundle, runtime, loading(engine=settings, precision=Precision.FP32))
    model.start()
    together = [result.text for result in await served(model, texts)]
    alone = [(await served(model, [text]))[0].text for text in texts[:10]]
    model.close()
    tokenizer = from_checkpoint(checkpoint).tokenizer
    rows = [tokenizer.encode(text).ids for text in texts]
    expected = [
        tokenizer.decode(translate_greedily(module, pad([row], 0), token_mask([row]), bos=BOS, eos=EOS)[0])
        for row in rows
    ]
    assert together == expected
    assert alone == expected[:10]
    assert len(set(together)) > 30


async def test_sentences_that_join_and_leave_at_any_step_do_not_disturb_each_other(bundle, runtime, texts):
    settings = EngineSettings(num_slots=3, max_waiting=300)
    model = TranslationModel.load(bundle, runtime, loading(engine=settings, precision=Precision.INT8))
    model.start()
    alone = [(await served(model, [text]))[0].text for text in texts]
    answers = await asyncio.gather(*(served(model, [text]) for text in texts))
    model.close()
    assert [answer[0].text for answer in answers] == alone


def next_log_probabilities(module, source):
    """What a search asks PyTorch for: how likely tokens are after beams of a sentence, by the training forward."""
    ids = torch.from_numpy(source)[None]

    def log_probabilities(beams):
        tokens = torch.tensor([(BOS, *beam) for beam in beams])
        rows = ids.expand(len(beams), -1)
        return module(rows, torch.ones_like(rows), tokens)[:, -1].double().log_softmax(dim=-1)

    return log_probabilities


async def search_together(decoder, encoder, cases):
    async with running_engine(decoder, encoder=encoder) as engine:
        sequences = [
            make_sequence(source, start_ids=[BOS], eos_id=EOS, search=search, max_new_tokens=length)
            for source, search, length in cases
        ]
        return [result for (result,) in await asyncio.gather(*(engine.run([sequence]) for sequence in sequences))]


async def test_beams_find_what_pytorch_finds_alone_and_in_company(bundle, module, runtime):
    rng = random.Random(5)
    sources = random_sources(5, *(rng.randint(2, 9) for _ in range(60)))
    cases = [(source, random_search(rng, range(14, 24)), rng.choice([4, 9, 24])) for source in sources]
    results = await search_together(*runners(runtime, bundle, num_slots=40), cases)
    num_close = 0
    with torch.inference_mode():
        for (source, search, length), result in zip(cases, results, strict=True):
            asked = next_log_probabilities(module, source)
            options = {"eos": EOS, "search": reference_config(search), "max_length": length}
            if found := differences(result.hypotheses, beam_search(asked, **options)):
                num_close += 1
                assert is_close_call(asked, **options), (source, search, length, found)
    assert num_close <= 2
    assert len({result.hypotheses[0].token_ids for result in results}) > 40
    for case, result in list(zip(cases, results, strict=True))[:10]:
        (alone,) = await search_together(*runners(runtime, bundle, num_slots=case[1].beam_size), [case])
        assert [h.token_ids for h in alone.hypotheses] == [h.token_ids for h in result.hypotheses]
