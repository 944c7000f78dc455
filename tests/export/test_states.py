"""Decoders of `transformers` with states: in pieces, exported and served to several they are the library's own."""

import asyncio

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_huggingface as tiny
import torch
import transformers
from loading import loading
from structlog.testing import capture_logs

from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.huggingface import FolderOptions, from_folder, states
from headway_export.rewriting import ReplaceSoftplus, rewrite
from headway_export.tracing import OPSET
from headway_server.bundles import Precision
from headway_server.decoding.runner.decoder import PREFILL_CHUNK, DecoderRunner
from headway_server.decoding.settings import EngineSettings
from headway_server.decoding.speculation.verifier import can_verify
from headway_server.runtime import Runtime
from headway_server.tasks.generation.model import GenerationModel
from headway_server.tasks.generation.request import GenerationRequest
from headway_training.models.parts.attention import scaled_dot_product_attention
from headway_training.models.protocols import HybridDecoder, StatefulDecoder, decoder_kind

LENGTH = 2 * PREFILL_CHUNK + 44
PIECES = (9, 1, 1, 20, 6)
PRECISIONS = {
    "lfm2": (Precision.FP32, Precision.INT8),
    "olmo_hybrid": (Precision.FP32,),
    "falcon_h1": (Precision.FP32,),
    "mamba": (Precision.FP32,),
    "mamba2": (Precision.FP32, Precision.INT8),
}
"""Of a convolution alone, of each recurrence, and of layers that have both."""
VARIANTS = [(family, precision) for family, precisions in PRECISIONS.items() for precision in precisions]


def source_of(folder, family, **changes):
    tiny.write_model(folder, family, **changes)
    tiny.write_tokenizer(folder, frame="$A")
    source, _ = from_folder(folder, FolderOptions())
    return source


class Remembering:
    """Causal attention to the keys of earlier calls, too."""

    def __init__(self):
        self.cache = {}

    def __call__(self, query, key, value, *, layer, scale, window=None, **without):
        assert window is None
        assert all(one is None for one in without.values())
        known = self.cache.get(layer)
        if known is not None:
            key, value = (torch.cat(pair, dim=1) for pair in zip(known, (key, value), strict=True))
        self.cache[layer] = key, value
        queries, keys = query.shape[1], key.shape[1]
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        return scaled_dot_product_attention(query, key, value, mask[None, None], scale=scale)


def read_in_pieces(module, ids):
    """Logits (1, T, V) of a text (1, T) that is read in `PIECES`."""
    past, attend, logits, start = module.first_states(1), Remembering(), [], 0
    for length in PIECES:
        piece, places = ids[:, start : start + length], torch.arange(start, start + length)[None]
        if decoder_kind(module) is HybridDecoder:
            hidden, past = module.read_attending(piece, places, attend, past)
        else:
            hidden, past = module.read(piece, past)
        logits.append(module.logits(hidden))
        start += length
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("family", tiny.STATEFUL)
def test_a_family_that_is_read_in_pieces_has_the_librarys_logits(tmp_path, family):
    source = source_of(tmp_path / "model", family)
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    ids = torch.from_numpy(np.random.default_rng(3).integers(3, tiny.WORDS, (1, sum(PIECES))))
    with torch.inference_mode():
        expected = own(ids, use_cache=False).logits
        found = read_in_pieces(source.module, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def bundles(root):
    found = {}
    for family, precisions in PRECISIONS.items():
        source = source_of(root / family, family, max_position_embeddings=LENGTH)
        found[family] = export(source, ExportOptions(store=root / "store", precisions=precisions))
    return found


@pytest.mark.parametrize(("family", "precision"), VARIANTS)
def test_the_proof_holds_over_chunks_and_tokens(bundles, family, precision):
    bundle = bundles[family]
    variant = bundle.manifest.variants[precision]
    if precision is Precision.FP32:
        assert variant.parity.max_relative_logit_error < 1e-4
        assert variant.parity.greedy_mismatch_count == 0
        assert variant.parity.greedy_token_count > 100
    assert bundle.manifest.limits.max_total_tokens == LENGTH
    updates = {state.update for state in variant.state}
    assert updates == ({"replace"} if "mamba" in family else {"in_place", "replace"})
    assert not can_verify(variant)  # a wrong draft would stay in the states


@pytest.mark.parametrize(("family", "precision"), VARIANTS)
def test_a_row_has_the_same_logits_in_any_company(bundles, family, precision):
    """Bit for bit: texts of several lengths that are read and decoded alone and together."""
    bundle = bundles[family]
    runner = DecoderRunner(Runtime(device="cpu"), bundle, bundle.manifest.variants[precision], num_slots=9)
    rng = np.random.default_rng(6)
    texts = [rng.integers(3, runner.vocab_size, length) for length in rng.integers(3, 30, 9)]
    steps = rng.integers(3, runner.vocab_size, (4, 9))

    def logits(rows):
        for slot, row in enumerate(rows):
            runner.prefill(slot, texts[row], 0)
        lengths = np.array([len(texts[row]) for row in rows])
        return np.stack([runner.decode(step[rows], lengths + number).copy() for number, step in enumerate(steps)])

    alone = np.concatenate([logits([row]) for row in range(9)], axis=1)
    for count in (2, 3, 7, 9):
        rows = rng.permutation(9)[:count]
        np.testing.assert_array_equal(logits(rows), alone[:, rows])


@pytest.mark.parametrize("family", PRECISIONS)
def test_a_chunk_of_a_prompt_is_its_tokens_one_by_one(bundles, family):
    bundle = bundles[family]
    runner = DecoderRunner(Runtime(device="cpu"), bundle, bundle.manifest.variants[Precision.FP32], num_slots=2)
    text = np.random.default_rng(8).integers(3, runner.vocab_size, PREFILL_CHUNK + 5)
    for start in range(0, len(text), PREFILL_CHUNK):
        chunked = runner.prefill(0, text[start : start + PREFILL_CHUNK], start).copy()
    for position in range(len(text)):
        single = runner.prefill(1, text[position : position + 1], position)
    np.testing.assert_allclose(single, chunked, rtol=0, atol=1e-5 * np.abs(chunked).max())


def test_a_recurrence_of_another_kind_is_refused_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.delitem(states._RECURRENCES, "mamba2_chunk_scan")
    with pytest.raises(SourceError, match="Mamba2ForCausalLM: it keeps a recurrent state that is computed by no"):
        source_of(tmp_path / "model", "mamba2")


def test_half_precision_is_refused_which_was_never_tried(tmp_path):
    source = source_of(tmp_path / "mamba2", "mamba2")
    assert decoder_kind(source.module) is StatefulDecoder
    with pytest.raises(SourceError, match="fp16: a decoder with such states was never tried on CUDA"):
        export(source, ExportOptions(store=tmp_path / "store", precisions=(Precision.FP16,)))


def test_softplus_of_a_number_has_the_same_bits_in_any_place():
    shape = [None, None]
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in "xy"]
    node = onnx.helper.make_node("Softplus", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "graph", values[:1], values[1:])
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10))
    rewrite(model, ReplaceSoftplus())
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    numbers = np.random.default_rng(2).normal(scale=8, size=(9, 1000)).astype(np.float32)
    numbers[0, :3] = -200, 0, 200
    (found,) = session.run(None, {"x": numbers})
    np.testing.assert_allclose(found, np.logaddexp(0, numbers.astype(np.float64)), rtol=4e-7, atol=1e-37)
    for width in (1, 3, 24):
        parts = [session.run(None, {"x": numbers[:, at : at + width]})[0] for at in range(0, 999 - width, width)]
        whole = np.concatenate(parts, axis=1)
        np.testing.assert_array_equal(whole, found[:, : whole.shape[1]])


# Served

SERVED = ("lfm2", "mamba2")
NEW_TOKENS = 12
GREEDY = {"parameters": {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}}
LONG = "it is an answer that is not in the rain " * 5
PROMPTS = ["the", LONG, "an old fire", LONG + "of an old fire", "o"]
"""Two have a chunk in common and go on apart."""


def load(bundle, precision=Precision.FP32, **engine):
    settings = loading(engine=EngineSettings(**({"num_slots": 3, "max_waiting": 100} | engine)), precision=precision)
    return GenerationModel.load(bundle, Runtime(device="cpu", num_threads=1), settings)


async def answers(model, prompts, **options):
    fields = [f"prompts[{number}]" for number in range(len(prompts))]
    found = await model.generate(prompts, fields=fields, request=GenerationRequest(**options))
    return [one.result for one in found.results]


async def texts(model, prompts, **options):
    return [one.output for one in await answers(model, prompts, **options)]


def generated(folder, prompts):
    """What `generate` answers, greedily."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
        written = model.generate(ids, do_sample=False, eos_token_id=2, **given)[0, ids.shape[1] :]
        found.append(tokenizer.decode(written, skip_special_tokens=True))
    return found


@pytest.mark.parametrize("family", SERVED)
async def test_several_callers_get_what_generate_answers_whatever_the_others_do(root, bundles, family):
    model = load(bundles[family])
    model.start()
    expected = generated(root / family, PROMPTS)
    assert len(set(expected)) == len(PROMPTS)
    first = await answers(model, [PROMPTS[1]], **GREEDY)
    second = await answers(model, [PROMPTS[3]], **GREEDY)
    assert [one.num_cached_tokens for one in (*first, *second)] == [0, PREFILL_CHUNK]
    assert [one.output for one in (*first, *second)] == [expected[1], expected[3]]
    left = asyncio.ensure_future(answers(model, [LONG[3:]] * 2, parameters={"max_new_tokens": 60}))
    asked = [asyncio.ensure_future(texts(model, [prompt], **GREEDY)) for prompt in PROMPTS * 2]
    await asyncio.sleep(0)
    left.cancel()
    assert [found for (found,) in await asyncio.gather(*asked)] == expected * 2
    model.close()


@pytest.mark.parametrize(("family", "precision"), [(*one,) for one in VARIANTS if one[0] in SERVED])
async def test_samples_share_a_prompt_and_are_those_of_a_server_that_keeps_nothing(bundles, family, precision):
    keeping, forgetting = load(bundles[family], precision), load(bundles[family], precision, num_prefix_slots=0)
    drawn = {"parameters": {"temperature": 1.0, "seed": 3, "max_new_tokens": NEW_TOKENS}, "sample_count": 5}
    for model in (keeping, forgetting):
        model.start()
    for prompt in (PROMPTS[2], PROMPTS[3]):
        found, anew = [await answers(model, [prompt], **drawn) for model in (keeping, forgetting)]
        assert [one.output for one in found] == [one.output for one in anew]
        assert len({one.output for one in found}) == 5
        assert all(one.num_cached_tokens for one in found[1:])
        assert not any(one.num_cached_tokens for one in anew)
    again = await answers(keeping, [PROMPTS[3]], **drawn)
    assert [one.output for one in again] == [one.output for one in found]
    assert again[0].num_cached_tokens == PREFILL_CHUNK
    for model in (keeping, forgetting):
        model.close()


def test_drafts_are_refused_with_the_reason(bundles):
    with capture_logs() as lines:
        load(bundles["lfm2"], speculation="prompt-lookup").close()
    reasons = [line["reason"] for line in lines if line["event"] == "no speculation"]
    assert reasons == ["a wrong draft could not be taken back from its states, which have no positions"]
