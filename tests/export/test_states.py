"""Decoders of `transformers` with states: read in pieces they are the library's own, and a row is alike in any company."""

import numpy as np
import pytest
import tiny_huggingface as tiny
import torch
import transformers

from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.huggingface import FolderOptions, from_folder, states
from headway_server.bundles import Precision
from headway_server.decoding.runner.decoder import PREFILL_CHUNK, DecoderRunner
from headway_server.decoding.speculation.verifier import can_verify
from headway_server.runtime import Runtime
from headway_training.models.parts.attention import scaled_dot_product_attention
from headway_training.models.protocols import HybridDecoder, StatefulDecoder, decoder_kind

LENGTH = 3 * PREFILL_CHUNK
PIECES = (9, 1, 1, 20, 6)
PRECISIONS = {
    "lfm2": (Precision.FP32, Precision.INT8),
    "qwen3_5_text": (Precision.FP32,),
    "falcon_h1": (Precision.FP32, Precision.INT8),
    "mamba": (Precision.FP32,),
    "mamba2": (Precision.FP32, Precision.INT8),
}
"""Of a convolution alone, of each recurrence, and of layers that have both."""
VARIANTS = [(family, precision) for family, precisions in PRECISIONS.items() for precision in precisions]


def source_of(folder, family, **changes):
    tiny.write_model(folder, family, **changes)
    tiny.write_tokenizer(folder)
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
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("states")
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
    text = np.random.default_rng(8).integers(3, runner.vocab_size, 2 * PREFILL_CHUNK + 5)
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
