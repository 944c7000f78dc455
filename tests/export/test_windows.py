"""Layers with a window have a cache of that size: far past it they write what `transformers` and full caches write."""

import asyncio

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_huggingface as tiny
import torch
import transformers
from bounded_decoder import MAX_LENGTH, NUM_LAYERS, VOCAB_SIZE, traced_decoder
from loading import loading

from headway_export.exporter import ExportOptions, export
from headway_export.huggingface import FolderOptions, from_folder
from headway_export.rewriting import AddVerification, LayerRange, QuantizeCache, ShortenCaches, rewrite
from headway_server.bundles import Precision
from headway_server.decoding.runner.decoder import PREFILL_CHUNK, DecoderRunner, slot_sizes
from headway_server.decoding.settings import EngineSettings
from headway_server.decoding.speculation.verifier import Verifier
from headway_server.runtime import Runtime
from headway_server.tasks.generation.model import GenerationModel
from headway_server.tasks.generation.request import GenerationRequest

LENGTH, WINDOW = 320, 12
ROWS = WINDOW + PREFILL_CHUNK - 1
DROPPING = ROWS + 1
"""Tokens with which the first positions are dropped."""
PRECISIONS = (Precision.FP32, Precision.INT8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows") / "model"
    tiny.write_model(
        folder,
        "gemma3_text",
        max_position_embeddings=LENGTH,
        sliding_window=WINDOW,
        head_dim=16,
        tie_word_embeddings=False,
    )
    tiny.write_tokenizer(folder, frame="$A")
    return folder


@pytest.fixture(scope="module")
def bundle(folder):
    source, _ = from_folder(folder, FolderOptions())
    return export(source, ExportOptions(store=folder.parent / "store", precisions=PRECISIONS))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_proof_holds_and_a_slot_takes_the_memory_of_its_windows(bundle, precision):
    manifest = bundle.manifest
    variant = manifest.variants[precision]
    if precision is Precision.FP32:
        assert variant.parity.max_relative_logit_error < 1e-4
        assert variant.parity.greedy_mismatch_count == 0
    assert [state.window for state in variant.state] == [WINDOW, WINDOW, None, None]
    sizes = slot_sizes(manifest, variant)
    assert sizes.state_bytes * 2 * LENGTH == sizes.prefix_slot_bytes * (LENGTH + ROWS)
    runner = DecoderRunner(Runtime(device="cpu"), bundle, variant, num_slots=3, num_prefix_slots=2)
    assert runner.cache_bytes == 3 * sizes.state_bytes + 2 * sizes.prefix_slot_bytes


@pytest.mark.parametrize("cache", ["fp32", "int8"])
def test_logits_are_those_of_full_caches_however_a_text_is_cut(tmp_path, cache):
    """Of a module of the kit, with sinks, a cap and a bias."""
    rng = np.random.default_rng(3)
    text = rng.integers(0, VOCAB_SIZE, MAX_LENGTH)
    found = {}
    for slack in (4, MAX_LENGTH):
        model = traced_decoder().graphs[0].model
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShortenCaches, "SLACK", slack)
            rewrite(model, shortening := ShortenCaches(MAX_LENGTH))
        assert len(shortening.windows) == (2 * NUM_LAYERS if slack == 4 else 0)
        if cache == "int8":
            rewrite(model, QuantizeCache([LayerRange(key=3.0, value=3.0)] * NUM_LAYERS))
        ir.save(model, tmp_path / "decoder.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "decoder.onnx", providers=["CPUExecutionProvider"])
        for cuts in ((*range(1, MAX_LENGTH),), (3, 4, 10, 11, 12, 30, 31, 47), (20, 25), ()):
            found[slack, cuts] = read(session, np.split(text, cuts))
    first, *others = found.values()
    assert len(np.unique(first.argmax(axis=-1))) > 5, "the model says something"
    for other in others:
        np.testing.assert_allclose(other, first, rtol=0, atol=1e-4 * np.abs(first).max())


def read(session, pieces):
    """Logits (T, V) of a text that is read in pieces."""
    sizes = {"slots": 1, "cache_length": MAX_LENGTH}
    kinds = {"tensor(float)": np.float32, "tensor(int8)": np.int8}
    past = {
        value.name: np.zeros([sizes.get(size, size) for size in value.shape], kinds[value.type])
        for value in session.get_inputs()
        if value.name.startswith("past")
    }
    start, logits = 0, []
    for piece in pieces:
        places = np.arange(start, start + len(piece))[np.newaxis]
        start += len(piece)
        step = {
            "input_ids": piece[np.newaxis],
            "position_ids": places,
            "logits_positions": places - places[0, 0],
            "seqlens_k": np.array([start - 1], np.int32),
            "total_sequence_length": np.array(start, np.int32),
        }
        found, *present = session.run(None, step | past)
        past = dict(zip(past, present, strict=True))
        logits.append(found[0])
    return np.concatenate(logits)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_has_the_same_logits_in_any_company(bundle, precision):
    """Bit for bit: texts that drop positions at different steps, in other chunks and slots, alone and together."""
    runner = DecoderRunner(Runtime(device="cpu"), bundle, bundle.manifest.variants[precision], num_slots=5)
    rng = np.random.default_rng(6)
    texts = [rng.integers(3, runner.vocab_size, length) for length in (DROPPING - 2, 20, DROPPING + 1, 262, 134)]
    steps = rng.integers(3, runner.vocab_size, (6, 5))

    def logits(rows):
        for slot, row in enumerate(rows):
            for start in range(0, len(texts[row]), PREFILL_CHUNK):
                runner.prefill(slot, texts[row][start : start + PREFILL_CHUNK], start)
        lengths = np.array([len(texts[row]) for row in rows])
        return np.stack([runner.decode(step[rows], lengths + number).copy() for number, step in enumerate(steps)])

    alone = np.concatenate([logits([row]) for row in range(5)], axis=1)
    for rows in ([3, 0], [2, 1, 4], [4, 3, 2, 1, 0]):
        np.testing.assert_array_equal(logits(rows), alone[:, rows])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_chunk_of_a_prompt_is_its_tokens_one_by_one(bundle, precision):
    runner = DecoderRunner(Runtime(device="cpu"), bundle, bundle.manifest.variants[precision], num_slots=2)
    text = np.random.default_rng(8).integers(3, runner.vocab_size, LENGTH)
    for start in range(0, len(text), PREFILL_CHUNK):
        chunked = runner.prefill(0, text[start : start + PREFILL_CHUNK], start).copy()
    for position in range(len(text)):
        single = runner.prefill(1, text[position : position + 1], position)
    bound = 1e-5 if precision is Precision.FP32 else 2e-2
    np.testing.assert_allclose(single, chunked, rtol=0, atol=bound * np.abs(chunked).max())


# Served

NEW_TOKENS = 40
GREEDY = {"parameters": {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}}
LONG = "it is an answer that is not in the rain " * 5
PROMPTS = ["the", LONG, LONG + "of an old fire", LONG + LONG + "o", "o"]
"""Two drop positions while they are answered, and one before; three have a chunk in common and go on apart."""


def load(bundle, precision=Precision.FP32, **engine):
    settings = loading(engine=EngineSettings(**({"num_slots": 3, "max_waiting": 100} | engine)), precision=precision)
    model = GenerationModel.load(bundle, Runtime(device="cpu", num_threads=1), settings)
    model.start()
    return model


async def answers(model, prompts, **options):
    fields = [f"prompts[{number}]" for number in range(len(prompts))]
    found = await model.generate(prompts, fields=fields, request=GenerationRequest(**options))
    return [one.result for one in found.results]


async def texts(model, prompts, **options):
    return [one.output for one in await answers(model, prompts, **options)]


@pytest.fixture(scope="module")
def generated(folder):
    """What `generate` answers, greedily."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        written = model.generate(ids, do_sample=False, eos_token_id=2, **given)[0, ids.shape[1] :]
        found.append(tokenizer.decode(written, skip_special_tokens=True))
    return found


async def test_several_callers_get_what_generate_answers_whatever_the_others_do(bundle, generated):
    model = load(bundle)
    assert len(set(generated)) == len(PROMPTS)
    for place, num_cached in ((1, 0), (2, PREFILL_CHUNK), (3, PREFILL_CHUNK), (3, 2 * PREFILL_CHUNK)):
        (found,) = await answers(model, [PROMPTS[place]], **GREEDY)
        assert (found.output, found.num_cached_tokens) == (generated[place], num_cached)
    left = asyncio.ensure_future(answers(model, [LONG[3:]] * 2, parameters={"max_new_tokens": 60}))
    asked = [asyncio.ensure_future(texts(model, [prompt], **GREEDY)) for prompt in PROMPTS * 2]
    await asyncio.sleep(0)
    left.cancel()
    assert [found for (found,) in await asyncio.gather(*asked)] == generated * 2
    model.close()


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_samples_that_join_after_positions_were_dropped_are_those_of_a_server_that_keeps_nothing(
    bundle, precision, monkeypatch
):
    could_return = []
    can_return = DecoderRunner.can_return
    monkeypatch.setattr(
        DecoderRunner, "can_return", lambda *given: could_return.append(can_return(*given)) or could_return[-1]
    )
    keeping, forgetting = load(bundle, precision), load(bundle, precision, num_prefix_slots=0)
    drawn = {"parameters": {"temperature": 1.0, "seed": 3, "max_new_tokens": NEW_TOKENS}, "sample_count": 5}
    for prompt in PROMPTS[1:4]:
        busy = asyncio.ensure_future(texts(keeping, PROMPTS[:1] * 2, **GREEDY))
        await asyncio.sleep(0)
        found, anew = [await answers(model, [prompt], **drawn) for model in (keeping, forgetting)]
        await busy
        assert [one.output for one in found] == [one.output for one in anew]
        assert len({one.output for one in found}) == 5
        assert all(one.num_cached_tokens for one in found[1:])
    assert set(could_return) == {False, True}
    for model in (keeping, forgetting):
        model.close()


async def test_drafts_leave_texts_as_they_are_where_positions_are_dropped(bundle, generated, monkeypatch):
    starts = []
    verify = Verifier.verify
    monkeypatch.setattr(Verifier, "verify", lambda *given: (starts.extend(given[2]), verify(*given))[1])
    model = load(bundle, speculation="prompt-lookup")
    starts.clear()
    found = [(await texts(model, [prompt], **GREEDY))[0] for prompt in PROMPTS]
    assert found == generated
    assert min(starts) < DROPPING < max(starts)
    assert all(not start + 1 < DROPPING <= start + AddVerification.WIDTH for start in starts)
    model.close()
