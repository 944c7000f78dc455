"""How much a translation's tokens attend to its source: out of the graphs, for the kit's models and for others."""

import dataclasses

import numpy as np
import pytest
import torch

from headway_export.candidate import open_sources
from headway_export.exporter import ExportOptions, export
from headway_export.source import from_checkpoint
from headway_export.tracing import alignment_layer
from headway_server.bundles import ALIGNMENT, Architecture, Bundle, Precision, open_bundle
from headway_server.decoding.interfaces import EncoderInput
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.runner.encoder import EncoderRunner
from headway_server.errors import BundleError
from headway_server.runtime import Runtime
from headway_training.models.parts.attention import causal_attention

BOS, EOS = 1, 2
TOKENS = np.array([BOS, 15, 17, 20, 11])


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(device="cpu", num_threads=1)


@pytest.fixture(scope="module")
def bundle(tiny_store) -> Bundle:
    return open_bundle(tiny_store / "tiny-translation" / "1")


def runners(runtime, bundle, precision=Precision.FP32):
    variant = bundle.manifest.variants[precision]
    return DecoderRunner(runtime, bundle, variant, num_slots=4), EncoderRunner(runtime, bundle, variant)


def source_of(length, seed=0):
    return np.append(np.random.default_rng(seed).integers(4, 14, length - 1), EOS)


def weights_in_pytorch(module, source, token_ids, layer):
    """Attention of a layer, averaged over heads: (T, S)."""
    ids, targets = torch.from_numpy(source)[None], torch.from_numpy(token_ids)[None]
    found = {}
    with torch.inference_mode():
        keys_values = module.cross_keys_values(module.encode(ids, torch.ones_like(ids)))

        def attend_cross(query, *, layer, **_):
            key, value = keys_values[layer]
            weights = torch.einsum("bthk,bshk->bhts", query, key).div(query.shape[-1] ** 0.5).softmax(-1)
            found[layer] = weights[0].mean(0).numpy()
            return torch.einsum("bhts,bshk->bthk", weights, value)

        module.decode(targets, torch.arange(len(token_ids))[None], causal_attention(), attend_cross)
    return found[layer]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_it_is_the_attention_of_the_last_layer_but_one(tiny_checkpoints, bundle, runtime, precision):
    decoder, encoder = runners(runtime, bundle, precision)
    assert bundle.manifest.variants[precision].alignment_layer == 0  # of two
    module = from_checkpoint(tiny_checkpoints["translation"]).module
    for length in (1, 2, 9, 24):
        (encoded,) = encoder.encode([EncoderInput.of_tokens(source_of(length))])
        found = decoder.align(2, encoded, TOKENS)
        expected = weights_in_pytorch(module, source_of(length), TOKENS, layer=0)
        assert found.shape == (len(TOKENS), length)
        np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-6)
        np.testing.assert_allclose(found, expected, atol=1e-5 if precision is Precision.FP32 else 0.1)


def test_padding_gets_exactly_nothing(bundle, runtime):
    variant = bundle.manifest.variants[Precision.FP32]
    encoder, decoder = (runtime.open(bundle, variant.graphs[role]) for role in ("encoder", "decoder"))
    ids, mask = np.zeros((2, 9), np.int64), np.zeros((2, 9), np.int64)
    for row, length in enumerate((9, 3)):
        ids[row, :length], mask[row, :length] = source_of(length), 1
    cross = encoder.run({"input_ids": ids, "attention_mask": mask})
    past = {state.past: np.zeros((4, 4, 24, 16), np.float32) for state in variant.state}
    feeds = {
        "input_ids": np.full((4, 1), BOS),
        "position_ids": np.zeros((4, 1), np.int64),
        "logits_positions": np.zeros((4, 1), np.int64),
        "seqlens_k": np.zeros(4, np.int32),
        "total_sequence_length": np.array(1, np.int32),
        "source_mask": mask,
        "num_likeliest": np.array([1]),
    }
    weights = decoder.run(feeds | past | cross)[ALIGNMENT]  # two rows a source
    assert weights.shape == (4, 1, 9)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)
    assert not weights[2:, :, 3:].any()
    assert (weights[:2] > 0).all()


def test_translations_longer_than_a_chunk_are_read_in_chunks(bundle, runtime):
    decoder, encoder = runners(runtime, bundle)
    (encoded,) = encoder.encode([EncoderInput.of_tokens(source_of(12))])
    token_ids = np.append(BOS, np.random.default_rng(1).integers(4, 24, 22))
    together = decoder.align(0, encoded, token_ids)
    decoder.prefill_chunk = 8
    np.testing.assert_allclose(decoder.align(0, encoded, token_ids), together, atol=1e-6)


def test_aligning_leaves_the_running_sentences_alone(bundle, runtime):
    decoder, encoder = runners(runtime, bundle)
    encoded = encoder.encode([EncoderInput.of_tokens(source_of(6)), EncoderInput.of_tokens(source_of(12, seed=1))])
    steps = []
    for aligns in (False, True):
        open_sources(decoder, encoded)
        decoder.decode(np.array([BOS, BOS]), np.zeros(2, np.int64))
        if aligns:
            decoder.align(3, encoded[0], TOKENS)
        steps.append(decoder.decode(np.array([15, 16]), np.ones(2, np.int64)).copy())
    np.testing.assert_array_equal(*steps)


def test_a_bundle_without_says_so_and_what_to_do(bundle, runtime):
    variant = bundle.manifest.variants[Precision.FP32]
    decoder, encoder = runners(runtime, bundle)
    (encoded,) = encoder.encode([EncoderInput.of_tokens(source_of(3))])
    assert decoder.has_alignment
    decoder.has_alignment = False
    with pytest.raises(BundleError, match=r"decoder.onnx: has no output alignment, .* export the model again"):
        decoder.align(0, encoded, TOKENS)
    assert ALIGNMENT in {spec.name for spec in variant.graphs["decoder"].outputs}


def test_a_model_from_outside_is_aligned_too(tiny_checkpoints, tmp_path, runtime):

    from foreign.encoder_decoder import VOCABULARY, build

    def make():
        torch.manual_seed(0)
        return build().eval()

    module = make()
    source = from_checkpoint(tiny_checkpoints["translation"])
    foreign = dataclasses.replace(
        source,
        name="foreign",
        module=module,
        make_reference=make,
        architecture=Architecture(kind="Foreign", parameter_count=1, configuration={}),
        evaluation=None,
    )
    decoder, encoder = runners(runtime, export(foreign, ExportOptions(store=tmp_path, precisions=(Precision.FP32,))))
    ids = np.random.default_rng(0).integers(3, VOCABULARY, 7)
    (encoded,) = encoder.encode([EncoderInput.of_tokens(ids)])
    found = decoder.align(1, encoded, TOKENS)
    np.testing.assert_allclose(found, weights_in_pytorch(module, ids, TOKENS, layer=0), atol=1e-5)


def test_the_layer_is_the_last_but_one_where_there_are_two():
    assert [alignment_layer(count) for count in (1, 2, 3, 6)] == [0, 0, 1, 4]
