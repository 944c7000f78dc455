"""Mixtures of experts: the library's own to rounding, smaller in 8 and 4 bits, and a row alike in any company."""

import numpy as np
import onnx_ir as ir
import pytest
import tiny_huggingface as tiny
import torch
import transformers

from headway_export.errors import SourceError
from headway_export.exporter import ExportOptions, export
from headway_export.huggingface import FolderOptions, from_folder, plain
from headway_export.huggingface.experts import Experts, give_experts
from headway_export.rewriting import quantize_experts
from headway_export.weights import CheckpointFiles, WrittenWeights
from headway_server.bundles import Precision
from headway_server.decoding.runner.decoder import DecoderRunner
from headway_server.decoding.speculation.verifier import can_verify
from headway_server.runtime import Runtime
from headway_training.models.parts.attention import causal_attention

PRECISIONS = (Precision.FP32, Precision.INT8, Precision.INT4)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    folder = tiny.write_model(root / "mixtral", "mixtral")
    tiny.write_tokenizer(folder)
    source, _ = from_folder(folder, FolderOptions())
    return export(source, ExportOptions(store=root / "store", precisions=PRECISIONS))


@pytest.mark.parametrize("family", tiny.MIXTURES)
def test_a_family_of_experts_is_read(tmp_path, family):
    folder = tiny.write_model(tmp_path / "model", family)
    tiny.write_tokenizer(folder)
    source, _ = from_folder(folder, FolderOptions())
    assert any(isinstance(part, Experts) for part in source.module.modules())
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected = own(ids, use_cache=False).logits
        found = source.module.logits(source.module.hidden_states(ids, torch.arange(37)[None], causal_attention()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("family", tiny.MIXTURES)
def test_a_mixture_is_mapped_from_disk(tmp_path, monkeypatch, family):
    """Number for number what is read into memory, also where it came in fp32."""
    folder = tiny.write_model(tmp_path / "model", family)
    tiny.write_tokenizer(folder)
    held, _ = from_folder(folder, FolderOptions())
    monkeypatch.setattr(plain, "_LARGE_BYTES", 1)
    mapped, _ = from_folder(folder, FolderOptions(scratch=tmp_path / "scratch", precisions=(Precision.INT8,)))
    own, mapped_own = held.module.state_dict(), mapped.module.state_dict()
    assert own.keys() == mapped_own.keys()
    for name, weight in own.items():
        torch.testing.assert_close(mapped_own[name], weight, rtol=0, atol=0)
    files = CheckpointFiles(mapped.checkpoint_files)
    for part in mapped.module.modules():
        if isinstance(part, Experts):
            files_of = WrittenWeights()
            files_of.begin_with(files, part)
            assert files.holds(part.up.detach().numpy())
            assert files.holds(part.down.detach().numpy())


def test_experts_of_another_gate_are_refused(tmp_path):
    tiny.write_model(tmp_path / "model", "mixtral", hidden_act="gelu")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.raises(SourceError, match=r"mine: its experts .MixtralExperts. are not gated by SiLU alone"):
        give_experts(model, "mine")


def test_half_precision_is_refused_which_was_never_tried(tmp_path):
    folder = tiny.write_model(tmp_path / "mixtral", "mixtral")
    tiny.write_tokenizer(folder)
    source, _ = from_folder(folder, FolderOptions())
    with pytest.raises(SourceError, match="fp16: a mixture of experts was never tried on CUDA"):
        export(source, ExportOptions(store=tmp_path / "store", precisions=(Precision.FP16,)))
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_weights_in_few_bits_are_as_near_as_their_levels(bits, levels):
    experts = np.random.default_rng(0).normal(size=(3, 5, 64)).astype(np.float32)
    codes, scales = quantize_experts(experts, bits=bits, block_size=32)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(experts.shape)
    restored = (codes.reshape(3, 5, 2, 32).astype(np.float32) - (levels + 1)) * scales[..., np.newaxis]
    blocks = experts.reshape(3, 5, 2, 32)
    assert (np.abs(restored - blocks) <= 0.501 * np.abs(blocks).max(axis=-1, keepdims=True) / levels).all()


@pytest.mark.parametrize(("precision", "operator"), [("fp32", "MoE"), ("int8", "QMoE"), ("int4", "QMoE")])
def test_a_text_has_the_same_logits_in_any_company(bundle, precision, operator):
    """Bit for bit: rows decoded alone and together."""
    variant = bundle.manifest.variants[Precision(precision)]
    graph = ir.load(bundle.path / variant.graphs["decoder"].file).graph
    assert operator in {node.op_type for node in ir.traversal.RecursiveGraphIterator(graph)}
    assert not can_verify(variant)  # drafts would be computed together
    runner = DecoderRunner(Runtime(device="cpu"), bundle, variant, num_slots=12)
    rng = np.random.default_rng(6)
    texts = [rng.integers(3, runner.vocab_size, length) for length in rng.integers(3, 30, 12)]
    steps = rng.integers(3, runner.vocab_size, (4, 12))

    def logits(rows):
        for slot, row in enumerate(rows):
            runner.prefill(slot, texts[row], 0)
        lengths = np.array([len(texts[row]) for row in rows])
        return np.stack([runner.decode(step[rows], lengths + number).copy() for number, step in enumerate(steps)])

    alone = np.concatenate([logits([row]) for row in range(12)], axis=1)
    for count in (2, 3, 7, 12):
        rows = rng.permutation(12)[:count]
        np.testing.assert_array_equal(logits(rows), alone[:, rows])
